"""Messages between the trainer's rank 0 and its rollout process, and their JSON form.

A child process gets them pickled, since a prompt's payload may hold any Python object. Between
hosts each is one JSON text, and what is read can only become one of these messages."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar

import msgspec

from titan_grpo.errors import DataError, PeerError
from titan_grpo.observe import names
from titan_grpo.protocol.messages import ServerState
from titan_grpo.rollout.partial import Partial
from titan_grpo.rollout.spec import RolloutSpec
from titan_grpo.samples import Group


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
    parts: tuple[Partial, ...] = ()

    def dropped(self) -> "Ticket":
        """After its group was dropped as unusable, with all its parts."""
        return replace(self, attempt=self.attempt + 1, drops=self.drops + 1, parts=())

    def failed(self, parts: tuple[Partial, ...]) -> "Ticket":
        """After its server failed, or aborted it.

        >>> ticket = Ticket(0, outages=19)
        >>> ticket.failed(()).outages, ticket.failed((Partial((5,), (-1.0,), 3, 3),)).outages
        (20, 1)
        """
        had, has = (sum(len(part.token_ids) for part in some) for some in (self.parts, parts))
        outages = 1 if has > had else self.outages + 1
        return replace(self, attempt=self.attempt + 1, outages=outages, parts=parts)

    def moved(self, parts: tuple[Partial, ...]) -> "Ticket":
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
    """Answer ``Drained`` once nothing runs on the server. Its ``ServerState`` keeps new groups
    away. What still runs after ``within_s`` seconds is cancelled and made elsewhere, or later."""

    url: str
    number: int
    within_s: float


class TrainerVersion(Frame, frozen=True):
    """The version the trainer is at."""

    version: int


class AskLoad(Frame, frozen=True):
    """Answer with ``Load``."""


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
    """A checked, rewarded group, with the counters at that moment."""

    ticket: Ticket
    group: Group
    counters: dict[str, int]


class LeftOut(Frame, frozen=True):
    """The user's filter dropped a finished group: its prompt is used, with these rewards."""

    index: int
    rewards: tuple[float, ...]
    counters: dict[str, int]


class Load(Frame, frozen=True):
    """Requests in flight by server URL."""

    in_flight: dict[str, int]


class Drained(Frame, frozen=True):
    """Nothing runs on the server of that Drain."""

    number: int


class EngineAnswer(Frame, frozen=True):
    """The outcome of an EngineCall, as a JSON value. ``kind``: empty, or the name of the error that
    ``error`` is the text of. ``engine``: what answers at that URL, empty before the first call."""

    number: int
    value: Any
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
FromWorker = Ready | GroupDone | LeftOut | Load | Drained | EngineAnswer | Event | Failed

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
