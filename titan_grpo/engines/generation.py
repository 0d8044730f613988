"""Generation requests and answers of any engine, and streamed answers (server-sent events): bytes
in, tokens out. Pure."""

import base64
import hashlib
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Annotated, Any

import msgspec

from titan_grpo.engines.http import Call, HttpRefused, want
from titan_grpo.errors import NOT_JSON, ServerRefused

LOGPROB_FLOOR = -9999.0
"""Log-probabilities at or below this mean minus infinity, which JSON lacks (vLLM sends this
number)."""

VersionSpan = tuple[str, int, int]
"""(label, start, end): the label of the engine's weights while it made tokens start to end - 1."""


@dataclass(frozen=True, slots=True)
class Sampled:
    """One sampled continuation: token ids, their natural-log probabilities (NaN for null), and the
    reason of its end.

    ``versions``: which weights made which tokens, in order and without gaps; empty if the engine
    does not say. ``retractions``: how often the engine dropped and recomputed the request's KV;
    None if it does not say. ``routes``: as in samples.Completion.
    """

    token_ids: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    finish_reason: str = ""
    versions: tuple[VersionSpan, ...] = ()
    retractions: int | None = None
    routes: bytes = field(default=b"", repr=False)

    def first(self, count: int, finish_reason: str) -> "Sampled":
        """Return the first ``count`` tokens with their versions, and ``finish_reason``."""
        return replace(
            self,
            token_ids=self.token_ids[:count],
            logprobs=self.logprobs[:count],
            finish_reason=finish_reason,
            versions=tuple(
                (label, start, min(end, count))
                for label, start, end in self.versions
                if start < count
            ),
        )


PLAIN = {
    "top_p": 1.0,
    "top_k": -1,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
}
"""What a request must name to sample from plain softmax: engines take the rest from the model's
generation_config.json, or from options of the server."""

QUERY_S = 10.0
"""Longest deadline of a query that an engine answers without work, in seconds."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """Sampling options of one request. Truncation and penalties (top-k, top-p, ...) are always off:
    the trainer computes plain softmax."""

    max_tokens: int
    temperature: float = 1.0
    seed: int | None = None
    cache_salt: str = ""
    """Version label at the request's admission. A pause that keeps requests also keeps the prefix
    cache: a salt per version prevents reuse of KV blocks of older weights."""

    stop: tuple[str, ...] = ()
    """Texts that end the completion; their tokens belong to it."""

    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end it, besides the model's own end tokens; they belong to it."""

    ignore_eos: bool = False
    """Always sample ``max_tokens``: requests of a known length, for checks and measurements."""

    routes: bool = False
    """Ask for the experts of each token; only unstreamed answers have them."""

    @property
    def options(self) -> dict[str, Any]:
        """What both engines call alike: the distribution, and what ends a completion."""
        ends = {"stop": list(self.stop), "stop_token_ids": list(self.stop_token_ids)}
        given = {name: values for name, values in ends.items() if values}
        return {"temperature": self.temperature, **PLAIN, "ignore_eos": self.ignore_eos, **given}


RETURN_ROUTES = "--enable-return-routed-experts"
"""Option of both engines: record the experts of each token."""

NO_ROUTES = f"start it with {RETURN_ROUTES} (vLLM has that on a GPU only, SGLang on a CPU too)"


def routes(text: Any, path: str, form: str, read: Callable[[bytes], Any]) -> bytes:
    """Return an answer's experts, [tokens, layers, experts of a token] in base64; empty for null.
    ``read``: returns the array of an engine's ``form``."""
    if not isinstance(text, str):
        return b""
    try:
        found = read(base64.b64decode(text))
    except (ValueError, EOFError) as error:
        raise ServerRefused(
            f"{path} must send routed_experts as {form} in base64: {error}"
        ) from error
    return bytes(found.astype("<u2").tobytes())


ToolCalls = list[tuple[str, dict[str, Any]]]
"""(name of the tool, its arguments), in the order of the calls."""

TOOL_PARSER = "--tool-call-parser"
"""Option of both engines: the format of tool calls in a model's text."""


def tool_calls(content: Any, found: Iterable[tuple[Any, Any]]) -> tuple[str, ToolCalls]:
    """Return an answer's text for the user, and its tool calls. ``found``: names, and arguments in
    JSON. Without any calls if one's arguments are no JSON object.

    >>> tool_calls(None, [("add", '{"a": 1}')]), tool_calls("?", [("add", "{")])
    (('', [('add', {'a': 1})]), ('?', []))
    """
    calls = []
    for name, text in found:
        try:
            arguments = msgspec.json.decode(text or "{}")
        except (TypeError, *NOT_JSON):
            arguments = None
        if not isinstance(arguments, dict):
            return str(content or ""), []
        calls.append((str(name), arguments))
    return str(content or ""), calls


def salt(label: str) -> str:
    """Return the cache salt of a label. It is a hash, since vLLM refuses salts over 128 characters
    or with "/", "@" or a backslash."""
    return hashlib.blake2b(label.encode(), digest_size=16).hexdigest()


TokenId = Annotated[int, msgspec.Meta(ge=0, le=(1 << 31) - 1)]
"""A token's id as a batch holds it: int32, 0 or more."""


def read_ids(answer: Any, key: str, path: str) -> tuple[int, ...]:
    """Return ``answer[key]``. Raises ServerRefused if it is no list of token ids.

    >>> read_ids({"ids": [5, 6]}, "ids", "/generate")
    (5, 6)
    """
    try:
        return msgspec.convert(want(answer, key, list, path), tuple[TokenId, ...])
    except msgspec.ValidationError as error:
        raise ServerRefused(f"{path} must answer with token ids in {key!r}: {error}") from None


def logprob(value: Any) -> float:
    """Read a log-probability; NaN for null, minus infinity at LOGPROB_FLOOR and below."""
    if not isinstance(value, (int, float)):
        return math.nan
    return -math.inf if value <= LOGPROB_FLOOR else float(value)


def version_spans(value: Any, path: str) -> tuple[VersionSpan, ...]:
    """Read ``weight_versions`` of either engine's answer; empty if it is no list. Raises
    ServerRefused for a malformed entry."""
    return tuple(
        (
            str(want(s, "version", str, path)),
            int(want(s, "start", int, path)),
            int(want(s, "end", int, path)),
        )
        for s in (value if isinstance(value, list) else ())
    )


INTERVAL = 32
"""Tokens in one piece (the first and the last may be shorter): the most that a broken connection
costs a request. Both engines take it in the request. At 32 the engines' cost is not measurable; at
1 it is up to two thirds more CPU time, and several times as much here (docs/measurements.md)."""

DONE = b"[DONE]"


Piece = tuple[int, Sampled]
"""One event of a streamed answer: the position of its first token in the answer (-1: after those
received so far), and what it has. Its ``finish_reason`` is empty until the answer ends;
``versions`` (empty if not in the event) and ``retractions`` are of the whole answer so far."""


class Events:
    """Splitter of a body into the payloads of its events. It works on bytes: a chunk may end within
    a character."""

    def __init__(self) -> None:
        self._rest = b""

    def take(self, chunk: bytes) -> list[bytes]:
        """Return the payloads that this chunk completes. One line is one payload in both engines.

        >>> events = Events()
        >>> end = bytes([13, 10, 13, 10])
        >>> events.take(b'data: {"a"'), events.take(b': 1}' + end + b'data: [DO')
        ([], [b'{"a": 1}'])
        """
        *lines, self._rest = (self._rest + chunk).split(b"\n")
        return [line[5:].strip() for line in lines if line.startswith(b"data:")]

    @property
    def begun(self) -> bool:
        """Whether a part of an event's line has come. Comments are none: vLLM's
        ``--sse-keep-alive-interval`` sends them, whatever its engine does."""
        return self._rest.startswith(b"data:")


class StreamedAnswer:
    """One streamed answer, as received so far."""

    def __init__(self, call: Call[Piece]) -> None:
        self._call, self._events = call, Events()
        self._token_ids: list[int] = []
        self._logprobs: list[float] = []
        self._versions: tuple[VersionSpan, ...] = ()
        self._retractions: int | None = None
        self.finish_reason = ""
        """Empty until the answer's end."""

    @property
    def count(self) -> int:
        """Tokens so far."""
        return len(self._token_ids)

    @property
    def whole(self) -> bool:
        """Whether the answer has its finish reason."""
        return bool(self.finish_reason)

    def take(self, chunk: bytes) -> bool:
        """Take the next bytes of the body; return whether any are an event's. Raises HttpRefused
        for an error event, ServerRefused for an invalid one."""
        payloads = self._events.take(chunk)
        for payload in payloads:
            if payload != DONE:
                self._add(*self._call.read(_event(payload, self._call.path)))
        return bool(payloads) or self._events.begun

    def sampled(self, count: int, finish_reason: str) -> Sampled:
        """Return the first ``count`` tokens with their versions, and ``finish_reason``."""
        ids, logprobs = tuple(self._token_ids), tuple(self._logprobs)
        whole = Sampled(ids, logprobs, "", self._versions, self._retractions)
        return whole.first(count, finish_reason)

    def _add(self, at: int, part: Sampled) -> None:
        have = self.count
        start = have if at < 0 else at
        if start > have:
            raise ServerRefused(
                f"{self._call.path} left out the tokens {have} to {start - 1} of its answer"
            )
        self._token_ids[start:] = part.token_ids
        self._logprobs[start:] = part.logprobs
        self._versions = part.versions or self._versions
        self._retractions = self._retractions if part.retractions is None else part.retractions
        self.finish_reason = part.finish_reason or self.finish_reason


def _event(payload: bytes, path: str) -> Any:
    """Decode the JSON of one event. Raises HttpRefused for an error: the HTTP status, already sent,
    could not say so."""
    try:
        event = msgspec.json.decode(payload)
    except NOT_JSON:
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
