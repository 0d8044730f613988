"""Frames between the trainer's rank 0 and its rollout process: pickled over a socket pair, or as
JSON from another host."""

from dataclasses import dataclass, replace
from typing import Any, Literal

from titan_grpo.rollout.partial import Partial
from titan_grpo.samples import Group


@dataclass(frozen=True, slots=True)
class Ticket:
    """One prompt on its way: its index, and what has happened to it so far.

    ``attempt`` counts starts and goes into the request seeds. ``drops`` counts unusable groups: a
    bad prompt must not be tried forever. ``outages`` counts servers that failed one after the other
    without one more token: a prompt that ends servers must not be tried forever, and a slow one
    over a bad network must not be given up. Staleness costs a prompt neither: long completions
    would be filtered out of the training data. ``parts``: what its completions have already, one
    each, or nothing.
    """

    index: int
    attempt: int = 0
    drops: int = 0
    outages: int = 0
    parts: tuple[Partial, ...] = ()

    def dropped(self) -> "Ticket":
        """The same prompt after its group was dropped as unusable, with all that it had."""
        return replace(self, attempt=self.attempt + 1, drops=self.drops + 1, parts=())

    def stale(self) -> "Ticket":
        """The same prompt after its group grew too stale: made again as often as that happens."""
        return replace(self, attempt=self.attempt + 1, parts=())

    def failed(self, parts: tuple[Partial, ...]) -> "Ticket":
        """The same prompt after a server failed under it, or cut it short.

        >>> ticket = Ticket(0, outages=19)
        >>> ticket.failed(()).outages, ticket.failed((Partial((5,), (-1.0,), 3, 3),)).outages
        (20, 1)
        """
        more = sum(len(part.token_ids) for part in parts) > sum(
            len(part.token_ids) for part in self.parts
        )
        return replace(
            self, attempt=self.attempt + 1, outages=1 if more else self.outages + 1, parts=parts
        )

    def moved(self, parts: tuple[Partial, ...]) -> "Ticket":
        """The same prompt after its server left the run: nobody's fault, so it costs no budget."""
        return replace(self, attempt=self.attempt + 1, parts=parts)

    def done(self) -> "Ticket":
        """The same prompt with its group made."""
        return replace(self, parts=())


@dataclass(frozen=True, slots=True)
class ServerState:
    """To the rollout process: what the ledger says of one server. ``version`` None: unknown.
    ``engine``: its dialect's name."""

    url: str
    version: int | None
    accepting: bool
    label: str
    engine: str


@dataclass(frozen=True, slots=True)
class ServerLeft:
    """To the rollout process: a server was removed from the run; what runs on it is made
    elsewhere."""

    url: str


@dataclass(frozen=True, slots=True)
class Drain:
    """To the rollout process: answer ``Drained`` once nothing runs on a server any more, which is
    given nothing meanwhile (its ledger line says so). What still runs after ``within_s`` seconds is
    given up and made elsewhere, or later."""

    url: str
    number: int
    within_s: float


@dataclass(frozen=True, slots=True)
class Drained:
    """From the rollout process: nothing runs on the server of that Drain."""

    number: int


@dataclass(frozen=True, slots=True)
class TrainerVersion:
    """To the rollout process: the version the trainer is at."""

    version: int


@dataclass(frozen=True, slots=True)
class AskLoad:
    """To the rollout process: say what is in flight."""


@dataclass(frozen=True, slots=True)
class GiveBack:
    """To the rollout process: this finished group was too stale at use; make the prompt's group
    again."""

    ticket: Ticket


@dataclass(frozen=True, slots=True)
class Used:
    """To the rollout process: the groups with these prompt indices were taken by the trainer."""

    indices: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Unversioned:
    """To the rollout process: ``count`` groups were used without making a version, so their places
    are free again."""

    count: int


@dataclass(frozen=True, slots=True)
class EngineCall:
    """To the rollout process: call a method of a server's ServerControl (engine_calls.METHODS), or
    of its own update routes; ``arguments`` are JSON values. Calls of one server are made in order;
    one that could not begin within ``within_s`` seconds is not made."""

    number: int
    url: str
    method: str
    arguments: tuple[Any, ...]
    within_s: float


@dataclass(frozen=True, slots=True)
class EngineAnswer:
    """From the rollout process: what came of an EngineCall, as a JSON value. ``kind``: empty, or
    the name of the error that ``error`` is the text of. ``engine``: what answers at that URL, empty
    as long as nobody has asked."""

    number: int
    value: Any
    engine: str = ""
    error: str = ""
    kind: str = ""


@dataclass(frozen=True, slots=True)
class Stop:
    """To the rollout process: abort everything and exit."""


@dataclass(frozen=True, slots=True)
class Ready:
    """From the rollout process: task and tokenizer are loaded."""


@dataclass(frozen=True, slots=True)
class GroupDone:
    """From the rollout process: a checked, rewarded group, with the counters at that moment."""

    ticket: Ticket
    group: Group
    counters: dict[str, int]


@dataclass(frozen=True, slots=True)
class Load:
    """From the rollout process, when it is asked: requests in flight by server URL."""

    in_flight: dict[str, int]


@dataclass(frozen=True, slots=True)
class Event:
    """From the rollout process: something was dropped, or a server failed. ``skipped`` names a
    prompt given up for good."""

    text: str
    counters: dict[str, int]
    skipped: int | None = None


@dataclass(frozen=True, slots=True)
class Failed:
    """From the rollout process: its last words. ``kind`` says whose fault it is (config, data,
    bug)."""

    kind: Literal["config", "data", "bug"]
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
FromWorker = Ready | GroupDone | Load | Drained | EngineAnswer | Event | Failed
