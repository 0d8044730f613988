"""What passes between the trainer's rank 0 and its rollout process: the spec at its start, the
messages after that, their JSON form, and the interface of what carries them; and the cursor that
makes a resumed run continue with exactly the right prompts.

A child process gets them pickled, since a prompt's payload may hold any Python object. Between
hosts each is one JSON text, and what is read can only become one of these messages."""

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, Protocol, TypeVar

import msgspec

from titan_grpo.config import Rollout
from titan_grpo.config.rollout import WorkerKeys
from titan_grpo.config.task import ROLLOUT
from titan_grpo.errors import DataError, PeerError, TitanGrpoError
from titan_grpo.observe import names
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
        """Inverse of ``state``; an empty mapping is the start. Raises DataError on anything
        else."""
        low, above = state.get("low", 0), state.get("above", [])
        ints = isinstance(above, list) and all(isinstance(i, int) for i in [low, *above])
        if not ints or low < 0 or any(i < low for i in above):
            raise DataError(
                "rollout state must be low and above with every index of above >= low, got"
                f" {dict(state)!r:.200}"
            )
        return cls(low, tuple(above))

    def state(self) -> dict[str, Any]:
        """JSON-able: ``{"low": int, "above": sorted list}``."""
        return {"low": self.low, "above": sorted(self._above)}

    @property
    def used(self) -> int:
        """How many indices are used."""
        return self.low + len(self._above)

    def use(self, index: int) -> None:
        """Mark an index as used. Raises DataError if it was: a prompt must not be trained on
        twice."""
        if index < self.low or index in self._above:
            raise DataError(f"prompt {index} was used before: a group came twice")
        self._above.add(index)
        while self.low in self._above:
            self._above.remove(self.low)
            self.low += 1

    def unused(self) -> Iterator[int]:
        """The unused indices as of now, in order, without end. Later ``use`` calls do not change
        it."""
        index, above = self.low, frozenset(self._above)
        while True:
            if index not in above:
                yield index
            index += 1


@dataclass(kw_only=True)
class RolloutSpec(WorkerKeys):
    """What the rollout process starts with. Small, and without secrets (keys are named, not held).
    Not changed once it is made.

    ``base_version`` is the trainer's version at the start or at the resume; ``state`` what
    ``RolloutClient.state`` returned when the checkpoint was written (empty: from the first prompt).
    """

    model_dir: str
    section: str = ROLLOUT
    """Before the task's keys in messages: of [rollout], or of an [[evaluation]] table."""
    base_version: int = 0
    state: dict[str, Any] = field(default_factory=dict)
    kv_recomputed: bool = False
    """Servers throw the KV of running requests away at each commit
    (``weight_sync.kv_after_update``)."""
    router_replay: bool = False
    """Completions come with the experts of each token (``grpo.router_replay``)."""
    commit_deadline_s: float = 60.0
    """Of each engine call (EngineCall), in seconds."""
    load_deadline_s: float = 60.0
    """Of the load, which may wait for a transfer, in seconds."""
    places: int = 0
    """Groups used since ``base_version``, less those that made no version; those that are
    ``waiting`` have places behind them."""
    waiting: dict[int, int] = field(default_factory=dict)
    """Prompt index -> completions of the finished groups that the trainer has not used yet."""
    registration: dict[str, Any] = field(default_factory=dict)
    """What an Atropos API gets about the trainer, but for batch_size."""

    def unused_prompts(self) -> Iterator[int]:
        """Indices of the prompts without a group, in order, without end. Raises DataError for a bad
        ``state``."""
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
        """The spec of a validated ``[rollout]`` section; ``model_dir`` holds tokenizer.json."""
        values = {f.name: getattr(rollout, f.name) for f in fields(WorkerKeys)}
        return cls(
            model_dir=model_dir, base_version=base_version, state=dict(state or {}), **values
        )


@dataclass(frozen=True, slots=True)
class Ticket:
    """A prompt that is being worked on: its index, and its history.

    ``attempt`` counts starts and goes into the request seeds. ``drops`` counts unusable groups: a
    bad prompt must not be tried forever. ``outages`` counts consecutive server failures without a
    further token: a prompt that crashes servers must not be tried forever, and a slow one over a
    bad network must not be given up. Staleness costs neither: long completions would be filtered
    out of the training data. ``parts``: what its completions have so far, one each, or nothing.
    """

    index: int
    attempt: int = 0
    drops: int = 0
    outages: int = 0
    parts: tuple[Completion, ...] = ()

    def dropped(self) -> "Ticket":
        """After its group was dropped as unusable, with all its parts."""
        return replace(self, attempt=self.attempt + 1, drops=self.drops + 1, parts=())

    def failed(self, parts: tuple[Completion, ...]) -> "Ticket":
        """After its server failed, or aborted it.

        >>> ticket, part = Ticket(0, outages=19), Completion((5,), (-1.0,), "", 3, 3, "s")
        >>> ticket.failed(()).outages, ticket.failed((part,)).outages
        (20, 1)
        """
        had, has = (sum(len(part.token_ids) for part in some) for some in (self.parts, parts))
        outages = 1 if has > had else self.outages + 1
        return replace(self, attempt=self.attempt + 1, outages=outages, parts=parts)

    def moved(self, parts: tuple[Completion, ...]) -> "Ticket":
        """After its server left the run or had to be drained, or its group grew too stale; costs no
        budget."""
        return replace(self, attempt=self.attempt + 1, parts=parts)

    def done(self) -> "Ticket":
        """With its group made."""
        return replace(self, parts=())


class Frame(msgspec.Struct, frozen=True, tag=True, tag_field="frame", forbid_unknown_fields=True):
    """A message. ``frame`` names its type in the JSON form."""


IN_FLIGHT = "in_flight."
"""Prefix, before a server's URL, of the counters that say how many requests run now: not a total,
so neither added up nor kept."""


class Counters:
    """Counts by name, of which each message has those that changed since the one before: with a
    thousand servers all of them would be longer than a group."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._changed: set[str] = set()

    def add(self, name: str, count: int = 1) -> None:
        """So many more."""
        self.set(name, self._counts[name] + count)

    def set(self, name: str, count: int) -> None:
        """So many now."""
        self._counts[name] = count
        self._changed.add(name)

    def made(self, completions: Iterable[Completion]) -> None:
        """Completions by their lengths (``length_range``)."""
        for completion in completions:
            self.add(f"made.{length_range(completion.num_sampled)}")

    def changed(self) -> dict[str, int]:
        """What changed since the last call, as it is now."""
        changed, self._changed = self._changed, set()
        return {name: self._counts[name] for name in changed}


def length_range(tokens: int) -> int:
    """Greatest length of the range that a length is counted in.

    >>> [length_range(n) for n in (0, 1, 2, 3, 4, 5, 64, 65)]
    [1, 1, 2, 4, 4, 8, 64, 128]
    """
    return 1 << max(0, tokens - 1).bit_length()


def totals(counters: dict[str, int]) -> dict[str, int]:
    """The counters that count up."""
    return {name: n for name, n in counters.items() if not name.startswith(IN_FLIGHT)}


COUNTED = {
    names.REQUESTS: "requests",
    names.OUTAGES: "outages",
    names.INTERRUPTED: "interrupted",
    names.MOVED: "moved",
    names.SKIPPED_PROMPTS: "skipped",
}
"""Total of the run -> the counter's name."""


def counted(counters: Mapping[str, int]) -> dict[str, float]:
    """Counters by the names of metrics.jsonl, as far as they need no step to be computed.

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
    """A server was removed from the run: make its groups elsewhere."""

    url: str


class Drain(Frame, frozen=True):
    """Answer once nothing runs on the server. Its ``ServerState`` keeps new groups away. What still
    runs after ``within_s`` seconds is cancelled and made elsewhere, or later."""

    url: str
    number: int
    within_s: float


class TrainerVersion(Frame, frozen=True):
    """The version the trainer is at."""

    version: int


class AskLoad(Frame, frozen=True):
    """Answer with the requests in flight by server URL."""

    number: int


class GiveBack(Frame, frozen=True):
    """A finished group was too stale at use: make the prompt's group again."""

    ticket: Ticket


class Used(Frame, frozen=True):
    """The trainer took the groups with these prompt indices."""

    indices: tuple[int, ...]


class Unversioned(Frame, frozen=True):
    """``count`` groups were used without making a version: their places are free again."""

    count: int


class EngineCall(Frame, frozen=True):
    """Call a method of a server's ServerControl (engine_calls.METHODS), or of its own update
    routes; ``arguments`` are JSON values. Calls of one server are made in order; one that could not
    begin within ``within_s`` seconds is not made."""

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
    """A checked, rewarded group, with the counters that changed since the message before."""

    ticket: Ticket
    group: Group
    counters: dict[str, int]


class LeftOut(Frame, frozen=True):
    """The user's filter dropped a finished group: its prompt is used, with these rewards."""

    index: int
    rewards: tuple[float, ...]
    counters: dict[str, int]


class Answer(Frame, frozen=True):
    """The outcome of the message with that number, as a JSON value. ``kind``: empty, or the name of
    the error that ``error`` is the text of. ``engine``: of an EngineCall what answers at its URL,
    empty before the first call."""

    number: int
    value: Any = None
    engine: str = ""
    error: str = ""
    kind: str = ""


class Event(Frame, frozen=True):
    """Something was dropped, or a server failed. ``skipped``: a prompt given up for good."""

    text: str
    counters: dict[str, int]
    skipped: int | None = None


class Failed(Frame, frozen=True):
    """The rollout process ends; nothing follows. ``kind`` says what is at fault."""

    kind: Literal["config", "data", "task", "bug"]
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
    """The remote lost our session (restart or lease expiry). Unanswered messages are lost; send the
    state again.

    ``resync`` opens a new session there with a spec and its first messages. Messages that are sent
    after ``resync`` belong to the new session, so call it under the lock under which you send.
    Never blocks.
    """

    resync: Callable[[RolloutSpec, Sequence[ToWorker]], None]


Message = FromWorker | SessionLost | TitanGrpoError
"""What a transport delivers. After an error nothing follows."""

OnMessage = Callable[[Message], None]
"""Called by a thread of the transport, in the order of sending; must not block."""


class WorkerTransport(Protocol):
    """Carries messages both ways, in order and each of them once. Used by one client."""

    def start(self, spec: RolloutSpec, on_message: OnMessage, timeout_s: float) -> None:
        """Begin. ``on_message`` gets ``Ready``, or an error. ``timeout_s``: deadline of this
        call."""

    def send(self, message: ToWorker, within_s: float | None = None) -> None:
        """Any thread; never blocks. A message that could not be delivered within ``within_s``
        seconds may be left out."""

    def close(self, deadline_s: float) -> None:
        """Abort and end the remote, within the deadline. Idempotent; raises nothing. Errors may be
        delivered meanwhile."""


T = TypeVar("T")

FORMAT = hashlib.sha256(
    json.dumps(
        msgspec.json.schema_components([ToWorker, FromWorker, RolloutSpec]), sort_keys=True
    ).encode()
).hexdigest()[:16]
"""Names the messages of this version. Trainer and service must have the same."""


def encode(message: ToWorker | FromWorker) -> str:
    """The text of a message. Raises DataError for one without a JSON form."""
    try:
        if isinstance(message, GroupDone):
            # msgspec would write NaN as null, and other types as what they resemble. Only the
            # task's payload is not checked before.
            json.dumps(message.group.prompt.payload, allow_nan=False)
        return msgspec.json.encode(message).decode()
    except (TypeError, ValueError, OverflowError) as error:
        raise DataError(
            "with a remote rollout.controller prompts need a JSON payload of finite numbers:"
            f" {type(message).__name__}: {error}"
        ) from error


def decode(text: str | bytes | msgspec.Raw, kind: Any) -> Any:
    """A value of the type ``kind`` (``ToWorker``, ``FromWorker`` or a record). Raises PeerError."""
    try:
        return msgspec.json.decode(text, type=kind)
    except msgspec.MsgspecError as error:
        raise PeerError(f"a frame cannot be read: {error}: {str(text)[:200]!r}") from error


def convert(answer: Any, kind: type[T], what: str, strict: bool = True) -> T:
    """A decoded JSON value as ``kind``; not ``strict``: numbers may be texts. Raises PeerError,
    which begins with ``what``."""
    try:
        return msgspec.convert(answer, kind, strict=strict)
    except msgspec.ValidationError as error:
        raise PeerError(f"{what} cannot be read: {error}: {str(answer)[:200]!r}") from error
