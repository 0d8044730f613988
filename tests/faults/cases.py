"""The fault matrix as a table: every (who, point, kind) is a case, or has a written reason why it
makes no sense. Pure.

::

    who     trainer | sync (its sync process) | engine | server (all its processes) | receiver
            | link (the network)
    point   protocol.lane.Point, in a lane's order
    kind    what happens there

Names: ``receiver-kill@staged``, with a variant where one place has several:
``link-lose@load:start``. The engines differ in their control calls, and in what the death of one
process does to the others of a server."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from fnmatch import fnmatchcase

from titan_grpo.engines import sglang, vllm
from titan_grpo.errors import ConfigError
from titan_grpo.protocol.lane import Point


class Who(Enum):
    """Where the fault strikes."""

    TRAINER = "trainer"
    """Rank 0; its sync process ends with it, and is frozen with it."""

    SYNC = "sync"
    """The trainer's sync process alone."""

    ENGINE = "engine"
    """The process that holds the weights: vLLM's core, SGLang's scheduler. What answers HTTP is
    another one."""

    SERVER = "server"
    RECEIVER = "receiver"
    LINK = "link"


class Kind(Enum):
    """What happens."""

    KILL = "kill"
    FREEZE = "freeze"
    RESET = "reset"
    REFUSE = "refuse"
    ERROR = "error"
    LOSE = "lose"
    SILENCE = "silence"
    TWICE = "twice"
    CORRUPT = "corrupt"
    LENGTH = "length"
    OLD = "old"
    LATE = "late"
    OTHER = "other"
    ZOMBIE = "zombie"
    RATE = "rate"
    DELAY = "delay"
    END = "end"


MEANING: dict[Kind, str] = {
    Kind.KILL: "SIGKILL",
    Kind.FREEZE: "SIGSTOP for longer than the deadline, then SIGCONT",
    Kind.RESET: "the connection is reset",
    Kind.REFUSE: "connections are refused until the lane has met it",
    Kind.ERROR: "the call is answered with 500 and not executed",
    Kind.LOSE: "the call is executed and its answer lost: a lost ack",
    Kind.SILENCE: "the call is never answered",
    Kind.TWICE: "the call is delivered twice",
    Kind.CORRUPT: "a byte on its way is another one",
    Kind.LENGTH: "the two ends do not agree on the manifest, or bytes are missing",
    Kind.OLD: (
        "the server is restarted with the weights that it was started with, before the lane notices"
    ),
    Kind.LATE: "the server comes up when the run has long begun",
    Kind.OTHER: "another model answers at the server's address",
    Kind.ZOMBIE: "the trainer is frozen, a later run takes its servers, and then it wakes up",
    Kind.RATE: "the server's network is limited to a tenth of its rate (own namespace, tc tbf)",
    Kind.DELAY: "the server's network is slowed by 20 ms each way (own namespace, tc netem)",
    Kind.END: (
        "the run ends while the server stands still: a bounded end, and the newest version on the"
        " other server"
    ),
}

PROCESSES = (Who.TRAINER, Who.SYNC, Who.ENGINE, Who.SERVER, Who.RECEIVER)

AFFLICTS: dict[Kind, tuple[tuple[Who, ...], str]] = {
    Kind.KILL: (PROCESSES, "a link has no process; it ends by reset, refuse or silence"),
    Kind.FREEZE: (PROCESSES, "a link has no process; it stalls by silence"),
    Kind.RESET: ((Who.LINK,), "a process whose connections all end has been killed: see kill"),
    Kind.REFUSE: ((Who.LINK,), "a process that refuses connections is gone: see kill"),
    Kind.ERROR: ((Who.LINK,), "whoever answers 500, the lane sees the link's answer"),
    Kind.LOSE: ((Who.LINK,), "an answer is lost between processes, not in one"),
    Kind.SILENCE: ((Who.LINK,), "a process that does not answer stands still: see freeze"),
    Kind.TWICE: ((Who.LINK,), "what is sent once is doubled between processes, not in one"),
    Kind.CORRUPT: (
        (Who.LINK,),
        (
            "what changes in a process's own memory is outside the fault model: both hosts' memory"
            " is trusted"
        ),
    ),
    Kind.LENGTH: ((Who.LINK,), "each end alone is consistent; the two differ"),
    Kind.OLD: (
        (Who.ENGINE,),
        (
            "only an engine has weights to come back with; a new receiver is told by its engine"
            " what it holds"
        ),
    ),
    Kind.LATE: (
        (Who.ENGINE,),
        (
            "a receiver is started by its engine; a late trainer is the next run, which every"
            " trainer case starts"
        ),
    ),
    Kind.OTHER: (
        (Who.ENGINE,),
        "only the engine has a model; another model in the trainer is another run: see zombie",
    ),
    Kind.ZOMBIE: ((Who.TRAINER,), "only a trainer belongs to a run"),
    Kind.RATE: ((Who.LINK,), "a slow process is one that is frozen again and again: see freeze"),
    Kind.DELAY: ((Who.LINK,), "a slow process is one that is frozen again and again: see freeze"),
    Kind.END: (
        (Who.ENGINE,),
        (
            "the trainer's end is hard only where a server does not answer: a frozen engine stands"
            " for all"
        ),
    ),
}
"""Kind -> what it can strike, and why nothing else."""

CALLS: dict[str, dict[Point, dict[str, str]]] = {
    vllm.NAME: {
        Point.GREET: {
            "": "/init_weight_transfer_engine",
            "label": "/weight_info",
            "paused": "/is_paused",
        },
        Point.STAGED: {"": "/weight_info"},
        Point.PAUSE: {"": "/pause"},
        Point.LOAD: {"start": "/start_weight_update", "update": "/update_weights"},
        Point.LABEL: {"": "/finish_weight_update"},
        Point.RESUME: {"": "/resume"},
        Point.RESUMED: {"": "/weight_info"},
        Point.HELD: {"": "/weight_info"},
    },
    sglang.NAME: {
        Point.GREET: {
            "": "/titan_grpo/hello",
            "label": "/model_info",
            "paused": "/titan_grpo/state",
        },
        Point.STAGED: {"": "/model_info"},
        Point.PAUSE: {"": "/pause_generation"},
        Point.LOAD: {"": "/titan_grpo/load"},
        Point.LABEL: {"": "/titan_grpo/finish"},
        Point.RESUME: {"": "/continue_generation"},
        Point.RESUMED: {"": "/model_info"},
        Point.HELD: {"": "/model_info"},
    },
}
"""Engine -> point -> variant -> a control call between it and the next point."""

VLLM_ENDS = (
    "vLLM's HTTP process ends with its engine, and its looks and commit calls wait for a frozen"
    " one: see engine"
)

NO_CALL = "no control call is made between this point and the next"
NO_BYTES = "no byte of a version moves between this point and the next"
WHOLE = "it lasts for whole transfers: the case at begin passes every point"

MIDDLE = 2
"""Which bucket stands for the middle of a transfer."""


@dataclass(frozen=True, slots=True)
class Case:
    """One fault. ``occurrence``: which passing of the point, counted from the moment the lane is
    watched for it.

    ``call``: the path of the control call that a fault of the link strikes; empty where none
    follows.
    """

    who: Who
    point: Point
    kind: Kind
    variant: str = ""
    occurrence: int = 1
    call: str = ""

    @property
    def name(self) -> str:
        """How it is asked for and reported."""
        return f"{self.who.value}-{self.kind.value}@{self.point.value}" + (
            f":{self.variant}" if self.variant else ""
        )


Place = tuple[Who, Point, Kind]


def product() -> Iterator[Place]:
    yield from ((who, point, kind) for kind in Kind for who in Who for point in Point)


def entry(place: Place, engine: str = vllm.NAME) -> tuple[Case, ...] | str:
    """The cases of one combination, or why there is none."""
    who, point, kind = place
    whos, elsewhere = AFFLICTS[kind]
    if who not in whos:
        return elsewhere
    reason = _senseless(who, point, kind, engine)
    if reason:
        return reason
    occurrence = MIDDLE if point is Point.EXTENT else 1
    calls = CALLS[engine].get(point, {})
    return tuple(
        Case(who, point, kind, v, occurrence, calls.get(v, ""))
        for v in _variants(point, kind, calls)
    )


def _senseless(who: Who, point: Point, kind: Kind, engine: str) -> str:
    """Why a kind that strikes ``who`` has no meaning at ``point``; empty if it has one."""
    in_transfer = point in (Point.BEGIN, Point.EXTENT)
    if who is Who.RECEIVER and point is Point.GREET:
        return "there is no receiver of an epoch before its hello"
    if who is Who.SERVER and engine == vllm.NAME:
        return VLLM_ENDS
    if (
        kind in (Kind.REFUSE, Kind.ERROR, Kind.LOSE, Kind.SILENCE, Kind.TWICE)
        and point not in CALLS[engine]
    ):
        return NO_CALL
    if kind is Kind.CORRUPT and not in_transfer:
        return NO_BYTES
    if kind is Kind.LENGTH and not in_transfer:
        return NO_BYTES
    if kind is Kind.LATE and point is not Point.GREET:
        return "a server that is not there yet passes no point but the first"
    if kind in (Kind.RATE, Kind.DELAY) and point is not Point.BEGIN:
        return WHOLE
    return ""


def _variants(point: Point, kind: Kind, calls: Mapping[str, str]) -> tuple[str, ...]:
    if kind is Kind.LENGTH:
        return ("manifest",) if point is Point.BEGIN else ("missing",)
    if kind in (Kind.RESET, Kind.REFUSE, Kind.ERROR, Kind.LOSE, Kind.SILENCE, Kind.TWICE):
        return tuple(calls or ("",))
    return ("",)


def all_cases(engine: str = vllm.NAME) -> tuple[Case, ...]:
    """The whole matrix, ordered by kind, who and point."""
    return tuple(
        case
        for place in product()
        if not isinstance(cases := entry(place, engine), str)
        for case in cases
    )


def reasons(engine: str = vllm.NAME) -> dict[Place, str]:
    """Every combination that is no case, and why."""
    return {place: found for place in product() if isinstance(found := entry(place, engine), str)}


def select(text: str, engine: str = vllm.NAME) -> tuple[Case, ...]:
    """Cases by name, comma-separated: ``all``, a case, a pattern (``*@load*``), or a name without
    its point.

    Raises ConfigError for a name that selects nothing.
    """
    found: dict[str, Case] = {}
    for name in filter(None, (part.strip() for part in text.split(","))):
        chosen = [case for case in all_cases(engine) if _fits(case, name)]
        if not chosen:
            raise ConfigError(_unknown(name, engine))
        found |= {case.name: case for case in chosen}
    if not found:
        raise ConfigError("--faults must name a case, a pattern or all, got nothing")
    order = {case: number for number, case in enumerate(all_cases(engine))}
    return tuple(sorted(found.values(), key=order.__getitem__))


def _fits(case: Case, name: str) -> bool:
    short = case.name.partition("@")[0]
    return (
        name == "all"
        or name == short
        or fnmatchcase(case.name, name)
        or case.name.partition(":")[0] == name
    )


def _unknown(name: str, engine: str) -> str:
    """One line; names the reason if the combination exists."""
    who, _, rest = name.partition("-")
    kind, _, point = rest.partition("@")
    for (w, p, k), reason in reasons(engine).items():
        if (w.value, k.value, p.value) == (who, kind, point.partition(":")[0]):
            return f"--faults {name} is no case: {reason}"
    names: Sequence[str] = sorted({case.name.partition("@")[0] for case in all_cases(engine)})
    return (
        f"--faults must be all, a pattern or WHO-KIND@POINT, got {name!r}; there are"
        f" {', '.join(names)}"
    )


def listing(cases: Sequence[Case], engine: str = vllm.NAME) -> str:
    """The cases with their meaning, then why every other combination is none."""
    lines = [f"{case.name:<28}{MEANING[case.kind]}" for case in cases]
    lines += ["", f"no case ({len(reasons(engine))} combinations):"]
    places: dict[tuple[str, str], list[str]] = {}
    for (who, point, kind), reason in reasons(engine).items():
        places.setdefault((f"{who.value}-{kind.value}", reason), []).append(point.value)
    lines += [
        f"{name:<18} at {'every point' if len(p) == len(Point) else ', '.join(p)}: {why}"
        for (name, why), p in places.items()
    ]
    return "\n".join(lines)
