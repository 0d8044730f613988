"""Generation requests and their answers, for any engine; and answers that come in pieces, as
server-sent events: bytes in, tokens out. Pure."""

import hashlib
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Annotated, Any

import msgspec

from titan_grpo.engines.http import Call, HttpRefused, want
from titan_grpo.errors import ServerRefused

LOGPROB_FLOOR = -9999.0
"""At or below this a log-probability stands for minus infinity, which JSON has no number for (vLLM
sends just this one)."""

VersionSpan = tuple[str, int, int]
"""(label, start, end): the engine showed ``label`` for its weights while it made the tokens start,
..., end - 1."""


@dataclass(frozen=True, slots=True)
class Sampled:
    """One sampled continuation: token ids, their natural-log probabilities (NaN where the server
    sent null), and why it ended.

    ``versions``: which weights made which tokens, in order and without gaps; empty where the engine
    does not send it. ``retractions``: how often the engine dropped the request's KV and computed it
    anew; None where it does not send it. ``routes``: as in samples.Completion.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: str
    versions: tuple[VersionSpan, ...] = ()
    retractions: int | None = None
    routes: bytes = field(default=b"", repr=False)


@dataclass(frozen=True, slots=True)
class Sampling:
    """Sampling of one request. Truncation (top-k, top-p, penalties) is always off: the trainer
    recomputes plain softmax."""

    max_tokens: int
    temperature: float = 1.0
    seed: int | None = None
    cache_salt: str = ""
    """Version label the request is admitted under: a pause that keeps requests does not clear the
    prefix cache, so KV blocks of older weights would be reused; a salt per version keeps them
    apart."""

    stop: tuple[str, ...] = ()
    """Texts at which the completion ends; the tokens that hold one belong to it."""

    stop_token_ids: tuple[int, ...] = ()
    """Tokens at which it ends, besides the model's own end tokens; each belongs to it."""

    ignore_eos: bool = False
    """Go on to ``max_tokens`` whatever is sampled: requests of a known length, for checks and
    measurements."""

    routes: bool = False
    """Ask for the experts of each token, which come with an answer that is not streamed."""


RETURN_ROUTES = "--enable-return-routed-experts"
"""Option with which both engines remember the experts of each token."""

NO_ROUTES = f"start it with {RETURN_ROUTES} (vLLM has that on a GPU only, SGLang on a CPU too)"


ToolCalls = list[tuple[str, dict[str, Any]]]
"""(name of the tool, its arguments), in their order."""

TOOL_PARSER = "--tool-call-parser"
"""Option of both engines: by which format they read calls of tools in a model's text."""


def tool_calls(content: Any, found: Iterable[tuple[Any, Any]]) -> tuple[str, ToolCalls]:
    """An engine's reading of an answer: what is left for the user, and the calls. ``found``: names,
    and arguments in JSON. Without calls where one of those is no object.

    >>> tool_calls(None, [("add", '{"a": 1}')]), tool_calls("?", [("add", "{")])
    (('', [('add', {'a': 1})]), ('?', []))
    """
    calls = []
    for name, text in found:
        try:
            arguments = msgspec.json.decode(text or "{}")
        except (TypeError, msgspec.DecodeError):
            arguments = None
        if not isinstance(arguments, dict):
            return str(content or ""), []
        calls.append((str(name), arguments))
    return str(content or ""), calls


def salt(label: str) -> str:
    """A cache salt for any label: hashed, since vLLM refuses salts over 128 characters or with "/",
    "@" or a backslash."""
    return hashlib.blake2b(label.encode(), digest_size=16).hexdigest()


_TokenIds = tuple[Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)], ...]


def read_ids(answer: Any, key: str, path: str) -> tuple[int, ...]:
    """``answer[key]``, a list of token ids. ServerRefused for others.

    >>> read_ids({"ids": [5, 6]}, "ids", "/generate")
    (5, 6)
    """
    try:
        return msgspec.convert(want(answer, key, list, path), _TokenIds)
    except msgspec.ValidationError as error:
        raise ServerRefused(f"{path} must answer with token ids in {key!r}: {error}") from None


def logprob(value: Any) -> float:
    """A log-probability of an answer; NaN for null, minus infinity at the floor and below."""
    if not isinstance(value, (int, float)):
        return math.nan
    return -math.inf if value <= LOGPROB_FLOOR else float(value)


def version_spans(value: Any, path: str) -> tuple[VersionSpan, ...]:
    """``weight_versions`` of an answer, in the form that both engines give it; empty for null.
    ServerRefused for others."""
    return tuple(
        (
            str(want(s, "version", str, path)),
            int(want(s, "start", int, path)),
            int(want(s, "end", int, path)),
        )
        for s in (value if isinstance(value, list) else ())
    )


INTERVAL = 32
"""Tokens in one piece, but for the first and the last: what a broken connection costs of each
request at most. Both engines take it with the request. At this the engines' own cost does not show;
one token a piece costs them up to two thirds more CPU time, and this side several times as much
(docs/measurements.md)."""

DONE = b"[DONE]"


@dataclass(frozen=True, slots=True)
class Piece:
    """One event of a streamed answer.

    ``start``: how many tokens come before these; -1: as many as came so far. ``finish_reason``:
    empty while more is to come. ``versions`` (empty where not in the event) and ``retractions`` are
    those of the whole answer up to here.
    """

    token_ids: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    finish_reason: str = ""
    versions: tuple[VersionSpan, ...] = ()
    retractions: int | None = None
    start: int = -1


@dataclass(frozen=True, slots=True)
class StreamedCall:
    """A call whose answer comes in pieces. ``call.parse`` reads one that comes whole all the same;
    ``call.timeout_s`` bounds each silence. ``piece`` turns an event's JSON into a Piece."""

    call: Call[Sampled]
    piece: Callable[[Any], Piece]


class Events:
    """Cuts a body into the payloads of its events, wherever the chunks were cut. Bytes: a character
    may be cut too."""

    def __init__(self) -> None:
        self._rest = b""

    def take(self, chunk: bytes) -> list[bytes]:
        """Payloads that are complete with this chunk. One line is one payload, as both engines
        write it.

        >>> events = Events()
        >>> end = bytes([13, 10, 13, 10])
        >>> events.take(b'data: {"a"'), events.take(b': 1}' + end + b'data: [DO')
        ([], [b'{"a": 1}'])
        """
        *lines, self._rest = (self._rest + chunk).split(b"\n")
        return [line[5:].strip() for line in lines if line.startswith(b"data:")]


class Answer:
    """One streamed answer, as far as it has come.

    Some server or proxy may not stream: a body that is a JSON object and no events is read as the
    whole answer.
    """

    def __init__(self, call: StreamedCall) -> None:
        self._call, self._events = call, Events()
        self._whole = b""
        self._began = False
        self._token_ids: list[int] = []
        self._logprobs: list[float] = []
        self._versions: tuple[VersionSpan, ...] = ()
        self._retractions: int | None = None
        self.finish_reason = ""
        """Empty until it is known how the answer ended."""

    @property
    def count(self) -> int:
        """Tokens so far."""
        return len(self._token_ids)

    @property
    def whole(self) -> bool:
        """Whether the engine has sent how it ended."""
        return bool(self.finish_reason)

    def take(self, chunk: bytes) -> None:
        """The next bytes of the body. Raises HttpRefused for an error among the events,
        ServerRefused for what is none."""
        if self._whole or (not self._began and chunk.lstrip().startswith(b"{")):
            self._whole += chunk
            return
        self._began = self._began or bool(chunk.strip())
        for payload in self._events.take(chunk):
            if payload != DONE:
                self._add(self._call.piece(_event(payload, self._call.call.path)))

    def end(self) -> None:
        """The body ended. Raises ServerRefused for a whole answer that cannot be read."""
        if self._whole:
            s = self._call.call.parse(_event(self._whole, self._call.call.path))
            self._add(Piece(s.token_ids, s.logprobs, s.finish_reason, s.versions, s.retractions, 0))

    def sampled(self, count: int, finish_reason: str) -> Sampled:
        """The first ``count`` tokens with their versions, and ``finish_reason``."""
        spans = tuple(
            (label, start, min(end, count)) for label, start, end in self._versions if start < count
        )
        return Sampled(
            tuple(self._token_ids[:count]),
            tuple(self._logprobs[:count]),
            finish_reason,
            spans,
            self._retractions,
        )

    def _add(self, piece: Piece) -> None:
        have = self.count
        start = have if piece.start < 0 else piece.start
        if start > have:
            raise ServerRefused(
                f"{self._call.call.path} left out the tokens {have} to {start - 1} of its answer"
            )
        self._token_ids[start:] = piece.token_ids
        self._logprobs[start:] = piece.logprobs
        self._versions = piece.versions or self._versions
        self._retractions = self._retractions if piece.retractions is None else piece.retractions
        self.finish_reason = piece.finish_reason or self.finish_reason


def _event(payload: bytes, path: str) -> Any:
    """The JSON of one event. An error in it is raised as the HTTP status that it comes too late
    for."""
    try:
        event = msgspec.json.decode(payload)
    except (msgspec.DecodeError, UnicodeDecodeError):
        raise ServerRefused(
            f"{path} must stream JSON, got {payload[:200]!r}: another server or another version"
            " of it?"
        ) from None
    error = event.get("error") if isinstance(event, dict) else None
    if error is not None:
        code = error.get("code") if isinstance(error, dict) else None
        raise HttpRefused(
            f"{path} broke its answer off: {str(error)[:300]}",
            code if isinstance(code, int) else 500,
        )
    return event
