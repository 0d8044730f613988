"""Messages between the trainer's rank 0 and its rollout process: the spec at the start, the
messages after it, their JSON form, and the transport's interface. Also the cursor, by which a
resumed run continues with exactly the right prompts.

A child process gets messages pickled: a prompt's payload may be any Python object. Between hosts
each message is one JSON text, which can only decode to one of these types."""

import hashlib
import json
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, Protocol, TypeVar

import msgspec

from titan_grpo.config import Rollout
from titan_grpo.config.rollout import WorkerKeys
from titan_grpo.config.task import ROLLOUT
from titan_grpo.errors import NOT_JSON, DataError, PeerError, TitanGrpoError, utf8_text
from titan_grpo.observe import names
from titan_grpo.protocol.frames import Post
from titan_grpo.protocol.messages import ServerState
from titan_grpo.samples import Completion, Group


class Cursor:
    """Set of used prompt indices, as a low-water mark (all below are used) and the used ones above
    it.

    Worked example: after 0, 1, 3 were used, low is 2 and above is {3}; a resumed run begins with 2,
    4, 5, ...
    """

    def __init__(self, low: int = 0, above: tuple[int, ...] = ()) -> None:
        self.low = low
        self._above = set(above)

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> "Cursor":
        """Inverse of ``state``; an empty mapping is the start. Raises DataError on other values."""
        low, above = state.get("low", 0), state.get("above", [])
        ints = isinstance(above, list) and all(isinstance(i, int) for i in [low, *above])
        if not ints or low < 0 or any(i < low for i in above):
            raise DataError(
                "rollout state must be low and above with every index of above >= low, got"
                f" {dict(state)!r:.200}"
            )
        return cls(low, tuple(above))

    def state(self) -> dict[str, Any]:
        """Return ``{"low": int, "above": sorted list}``, JSON-able."""
        return {"low": self.low, "above": sorted(self._above)}

    @property
    def end(self) -> int:
        """Index after the last used one."""
        return max(self._above, default=self.low - 1) + 1

    def before(self, end: int) -> "Cursor":
        """Return the cursor of the used indices below ``end``."""
        return Cursor(min(self.low, end), tuple(index for index in self._above if index < end))

    def __contains__(self, index: object) -> bool:
        """Return whether an index is used."""
        return isinstance(index, int) and (index < self.low or index in self._above)

    @property
    def used(self) -> int:
        return self.low + len(self._above)

    def use(self, index: int) -> None:
        """Mark an index as used. Raises DataError if it is already: a prompt must not be trained on
        twice."""
        if index in self:
            raise DataError(f"prompt {index} was used before: a group came twice")
        self._above.add(index)
        while self.low in self._above:
            self._above.remove(self.low)
            self.low += 1

    def unused(self) -> Iterator[int]:
        """Return an endless iterator of the indices unused at its first step, in order. Later
        ``use`` calls do not change it."""
        index, above = self.low, frozenset(self._above)
        while True:
            if index not in above:
                yield index
            index += 1


ROWS = (
    *("seed", "task", "task_path", "dataset", "dataset_config", "dataset_split"),
    *("dataset_filter", "dataset_shuffle"),
)
"""Keys that decide which row a prompt's index is."""


def _absolute(name: str, value: Any) -> Any:
    return os.path.abspath(value) if value and name in ("task_path", "dataset") else value


@dataclass(kw_only=True)
class RolloutSpec(WorkerKeys):
    """Start parameters of the rollout process. Small, without secrets (keys are named, not held),
    immutable by convention.

    ``base_version``: the trainer's version at the start or resume. ``state``: result of
    ``RolloutClient.state`` when the checkpoint was written (empty: from the first prompt).
    """

    model_dir: str
    section: str = ROLLOUT
    """Config section of the task's keys, for error messages: [rollout] or [[evaluation]]."""
    base_version: int = 0
    state: dict[str, Any] = field(default_factory=dict)
    kv_recomputed: bool = False
    """Whether servers discard the KV of running requests at each commit
    (``weight_sync.kv_after_update``)."""
    router_replay: bool = False
    """Whether completions come with the experts of each token (``grpo.router_replay``)."""
    row_tokens: int = sys.maxsize
    """Most tokens of a prompt and its completion (``training.seq_len``); an evaluation has no such
    limit on servers that the run did not start."""
    commit_deadline_s: float = 60.0
    """Deadline of each engine call (EngineCall), in seconds."""
    load_deadline_s: float = 60.0
    """Deadline of the load, which may wait for a transfer, in seconds."""
    places: int = 0
    """Groups used since ``base_version``, minus those that made no version. The ``waiting`` groups
    have the next places."""
    waiting: dict[int, int] = field(default_factory=dict)
    """Prompt index -> number of completions, of the finished groups not used yet."""
    sessions_lost: int = 0
    """Sessions before this one: number of the first attempt at a prompt. With the seeds of before,
    a completion that ended a process, or held it, would do so again."""
    registration: dict[str, Any] = field(default_factory=dict)
    """The trainer's registration with an Atropos API, without batch_size."""

    def room(self, prompt: Sequence[int]) -> int:
        """Return the most tokens of a completion of ``prompt``: less than 1 if no row has both."""
        return min(self.max_completion_tokens, self.row_tokens - len(prompt))

    def rows(self) -> dict[str, Any]:
        """Return the keys of ROWS, for a later start's ``state``."""
        return {name: getattr(self, name) for name in ROWS}

    def changed_rows(self) -> str:
        """Return which keys of ROWS differ from those of ``state``; empty if none does, or groups
        come from outside. A state of an older titan_grpo has none. A path may be absolute in one
        of both: it is for a process on another host."""
        if self.source != "task":
            return ""
        before, key = self.state.get("rows", {}), f"{self.section}."
        return ", ".join(
            f"{key}{name} = {value!r} (before: {before[name]!r})"
            for name, value in self.rows().items()
            if _absolute(name, before.get(name, value)) != _absolute(name, value)
        )

    def unused_prompts(self) -> Iterator[int]:
        """Return an endless iterator of the prompts without a group, in order. Raises DataError for
        a bad ``state``."""
        cursor = Cursor.from_state(self.state.get("cursor", {}))
        for index in self.waiting:
            cursor.use(index)
        return cursor.unused()

    @classmethod
    def from_config(
        cls,
        rollout: Rollout,
        model_dir: str,
        base_version: int = 0,
        state: dict[str, Any] | None = None,
    ) -> "RolloutSpec":
        """Return the spec of a validated ``[rollout]``; ``model_dir`` holds tokenizer.json."""
        values = {f.name: getattr(rollout, f.name) for f in fields(WorkerKeys)}
        return cls(
            model_dir=model_dir, base_version=base_version, state=dict(state or {}), **values
        )


@dataclass(frozen=True, slots=True)
class Ticket:
    """Prompt in work: its index, and its history.

    ``attempt`` counts restarts and goes into the request seeds. ``drops`` counts unusable groups: a
    bad prompt must not be retried forever. ``outages`` counts server failures in a row without a
    new token: a prompt that crashes servers must not be retried forever, but a slow one on a bad
    network must not be skipped. Staleness adds to neither: that would filter long completions out
    of the training data. ``parts``: its completions so far, or empty.
    """

    index: int
    attempt: int = 0
    drops: int = 0
    outages: int = 0
    parts: tuple[Completion, ...] = ()

    def dropped(self) -> "Ticket":
        """Return the ticket after its group was dropped as unusable, with all parts."""
        return replace(self, attempt=self.attempt + 1, drops=self.drops + 1, parts=())

    def failed(self, parts: tuple[Completion, ...]) -> "Ticket":
        """Return the ticket after its server failed or aborted requests.

        >>> ticket, part = Ticket(0, outages=19), Completion((5,), (-1.0,), "", 3, 3, "s")
        >>> ticket.failed(()).outages, ticket.failed((part,)).outages
        (20, 1)
        """
        had, has = (sum(len(part.token_ids) for part in some) for some in (self.parts, parts))
        outages = 1 if has > had else self.outages + 1
        return replace(self, attempt=self.attempt + 1, outages=outages, parts=parts)

    def moved(self, parts: tuple[Completion, ...]) -> "Ticket":
        """Return the ticket after its server left, stood still or was drained, or its group became
        too stale; this costs no budget."""
        return replace(self, attempt=self.attempt + 1, parts=parts)

    def done(self) -> "Ticket":
        return replace(self, parts=())


class Frame(msgspec.Struct, frozen=True, tag=True, tag_field="frame", forbid_unknown_fields=True):
    """Base of the messages. ``frame`` names the type in the JSON form."""


IN_FLIGHT = "in_flight."
"""Prefix of the counters of requests in flight, before a server's URL. These are current values,
not totals, so they are neither summed nor saved."""

TOKENS = "tokens."
"""Prefix of the counters of tokens, before the URL of the server that sampled them."""


def server_of(counter: str) -> str:
    """Return the URL of the one server that a counter is of, or "".

    >>> server_of("tokens.http://a:1"), server_of("tokens"), server_of("made.64")
    ('http://a:1', '', '')
    """
    kind, _, rest = counter.partition(".")
    return rest if kind + "." in (IN_FLIGHT, TOKENS) else ""


def forget(counters: dict[str, int], url: str) -> None:
    """Remove the counters of a server that left: every server of a run's life would have a metric,
    and a place in each checkpoint."""
    for prefix in (IN_FLIGHT, TOKENS):
        counters.pop(prefix + url, None)


class Counters:
    """Counts by name. A message carries only those changed since the last one: with a thousand
    servers, all counts together would be longer than a group."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._changed: set[str] = set()

    def add(self, name: str, count: int = 1) -> None:
        self.set(name, self._counts[name] + count)

    def set(self, name: str, count: int) -> None:
        self._counts[name] = count
        self._changed.add(name)

    def forget(self, url: str) -> None:
        """Remove the counts of a server that left; if it comes back they begin at 0."""
        forget(self._counts, url)

    def made(self, completions: Iterable[Completion]) -> None:
        for completion in completions:
            self.add(f"made.{length_range(completion.num_sampled)}")

    def changed(self) -> dict[str, int]:
        """Return the current values of the counts changed since the last call."""
        changed, self._changed = self._changed, set()
        return {name: self._counts[name] for name in changed}


def length_range(tokens: int) -> int:
    """Return the upper end of the histogram bin of a length, a power of two.

    >>> [length_range(n) for n in (0, 1, 2, 3, 4, 5, 64, 65)]
    [1, 1, 2, 4, 4, 8, 64, 128]
    """
    return 1 << max(0, tokens - 1).bit_length()


COUNTED = {
    names.REQUESTS: "requests",
    names.OUTAGES: "outages",
    names.INTERRUPTED: "interrupted",
    names.MOVED: "moved",
    names.SKIPPED_PROMPTS: "skipped",
}
"""Metric name of a total -> counter name."""


def counted(counters: Mapping[str, int]) -> dict[str, float]:
    """Return counters under the names of metrics.jsonl, those that do not depend on a step.

    Example: {"requests": 8, "dropped.stale": 1, "in_flight.http://a:1": 2} gives rollout/requests,
    dropped/stale, server/a:1/in_flight and rollout/in_flight_requests.
    """
    found = {name: float(counters.get(what, 0)) for name, what in COUNTED.items()}
    in_flight = {k.removeprefix(IN_FLIGHT): n for k, n in counters.items() if IN_FLIGHT in k}
    found[names.IN_FLIGHT] = float(sum(in_flight.values()))
    for url, count in in_flight.items():
        found[names.of_server(url, "in_flight")] = float(count)
    for name, count in counters.items():
        kind, _, reason = name.partition(".")
        if kind == "dropped":
            found[names.dropped(reason)] = float(count)
    return found


# To the rollout process.


class ServerLeft(Frame, frozen=True):
    """A server left the run: make its groups elsewhere."""

    url: str


class Drain(Frame, frozen=True):
    """Answer once no request runs on the server; its ``ServerState`` keeps new groups away. Groups
    still running after ``within_s`` seconds are cancelled and made elsewhere, or later."""

    url: str
    number: int
    within_s: float


class TrainerVersion(Frame, frozen=True):
    """The trainer's version."""

    version: int


class AskLoad(Frame, frozen=True):
    """Answer with the requests in flight by server URL."""

    number: int


class GiveBack(Frame, frozen=True):
    """A finished group is too stale to use: make the prompt's group again."""

    ticket: Ticket


class Used(Frame, frozen=True):
    """The trainer took the groups with these prompt indices."""

    indices: tuple[int, ...]


class Unversioned(Frame, frozen=True):
    """``count`` used groups made no version: their places are free again."""

    count: int


class EngineCall(Frame, frozen=True):
    """Call a method of a server's ServerControl or StockRoutes (engine_calls.METHODS);
    ``arguments`` are JSON values. The calls of each of the two are made in order. A call that
    cannot begin within ``within_s`` seconds is not made."""

    number: int
    url: str
    method: str
    arguments: tuple[Any, ...]
    within_s: float


class Stop(Frame, frozen=True):
    """Abort everything and exit."""


# From the rollout process.


class Ready(Frame, frozen=True):
    """Task and tokenizer are loaded."""


class GroupDone(Frame, frozen=True):
    """A checked, rewarded group, with the counters changed since the last message."""

    ticket: Ticket
    group: Group
    counters: dict[str, int]


class LeftOut(Frame, frozen=True):
    """A finished group with these rewards was left out by choice; its prompt counts as used."""

    index: int
    rewards: tuple[float, ...]
    counters: dict[str, int]


class Answer(Frame, frozen=True):
    """Outcome of the message with that number, as a JSON value. ``kind``: the error's kind, empty
    on success; ``error``: its text. ``engine``: engine at the URL of an EngineCall, empty before
    the first call."""

    number: int
    value: Any = None
    engine: str = ""
    error: str = ""
    kind: str = ""


class Event(Frame, frozen=True):
    """The counters changed since the last message, with a text for the log if they are of a drop or
    a server failure, say, and not of groups that were started. ``skipped``: a prompt given up."""

    text: str
    counters: dict[str, int]
    skipped: int | None = None


class Failed(Frame, frozen=True):
    """The rollout process ends; nothing follows. ``kind``: the cause; "killed" is the service's
    word, and another process may then take its place."""

    kind: Literal["config", "data", "task", "bug", "killed"]
    text: str


ToWorker = (
    ServerState
    | ServerLeft
    | Drain
    | TrainerVersion
    | AskLoad
    | GiveBack
    | Used
    | Unversioned
    | EngineCall
    | Stop
)
FromWorker = Ready | GroupDone | LeftOut | Answer | Event | Failed


class RolloutStopped(TitanGrpoError):
    """The rollout process ended, or stopped delivering: no further batch can come."""


@dataclass(frozen=True, slots=True)
class SessionLost:
    """The worker lost our session: it was killed (``killed``), or the lease of a service expired.
    Unanswered messages are lost; send the state again.

    ``resync`` opens a new session with a spec and its first messages. Messages sent after it belong
    to the new session, so call it under the lock that guards ``send``. Waits for nothing; raises
    OSError if a process cannot be started. ``why``: in words.
    """

    resync: Callable[[RolloutSpec, Sequence[ToWorker]], None]
    why: str
    killed: bool = False


Message = FromWorker | SessionLost | TitanGrpoError
"""Item that a transport delivers. Of errors the first one counts."""

OnMessage = Callable[[Message], None]
"""Callback of a transport's thread, in the order of sending; must not block."""


class WorkerTransport(Protocol):
    """Channel of messages both ways, in order, each exactly once. Used by one client."""

    def start(self, spec: RolloutSpec, on_message: OnMessage) -> None:
        """Start; ``on_message`` gets ``Ready`` or an error."""

    def send(self, message: ToWorker, within_s: float | None = None) -> None:
        """Send a message. Any thread; never blocks. A message that is not delivered within
        ``within_s`` seconds may be dropped."""

    def close(self, deadline_s: float) -> None:
        """Abort and end the remote within the deadline. Idempotent; raises nothing. Errors may be
        delivered meanwhile."""


T = TypeVar("T")

FORMAT = hashlib.sha256(
    json.dumps(
        msgspec.json.schema_components([ToWorker, FromWorker, RolloutSpec, Post]), sort_keys=True
    ).encode()
).hexdigest()[:16]
"""Hash of the schema of messages and frames. Trainer and service must have the same."""


def encode(message: ToWorker | FromWorker) -> str:
    """Return the JSON text of a message. Raises DataError if it has none."""
    try:
        if isinstance(message, GroupDone):
            # msgspec would write NaN as null and convert other types silently. Only the task's
            # payload is not checked elsewhere.
            json.dumps(message.group.prompt.payload, allow_nan=False)
        if isinstance(message, Event | Failed):
            message = msgspec.structs.replace(message, text=utf8_text(message.text))
        return msgspec.json.encode(message).decode()
    except (TypeError, ValueError, OverflowError) as error:
        raise DataError(
            "with a remote rollout.controller prompts need a JSON payload of finite numbers:"
            f" {type(message).__name__}: {error}"
        ) from error


def decode(text: str | bytes | msgspec.Raw, kind: Any) -> Any:
    """Return a value of type ``kind`` (``ToWorker``, ``FromWorker`` or a record). Raises PeerError
    if the text is none."""
    try:
        return msgspec.json.decode(text, type=kind)
    except NOT_JSON as error:
        raise PeerError(f"a frame cannot be read: {error}: {str(text)[:200]!r}") from error


def convert(answer: Any, kind: type[T], what: str) -> T:
    """Return a decoded JSON value as ``kind``. Raises PeerError, its text beginning with
    ``what``."""
    try:
        return msgspec.convert(answer, kind)
    except msgspec.ValidationError as error:
        raise PeerError(f"{what} cannot be read: {error}: {str(answer)[:200]!r}") from error
