"""Which prompt's group starts next: the places of protocol/admission.py, the groups that wait to be
started, and how long each is expected to take."""

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from titan_grpo.protocol import admission
from titan_grpo.protocol.admission import Admission, Admit, GiveUp, Start, Unversioned, Used
from titan_grpo.rollout.messages import Ticket
from titan_grpo.rollout.spec import RolloutSpec
from titan_grpo.rollout.task_runner import TaskFailed, TaskRunner
from titan_grpo.samples import Group

REMEMBERED = 100_000
"""Prompts whose groups' durations are remembered; the oldest are forgotten first."""

SMOOTHING = 0.3
"""Weight of the newest value in a running mean."""


class Durations:
    """How long a prompt's group takes, in seconds: as it did the last time that the same prompt
    came, or by the task's ``expected_tokens``. Only the order of starts depends on it."""

    def __init__(self, runner: TaskRunner) -> None:
        self._runner = runner
        self._known: OrderedDict[tuple[int, ...], float] = OrderedDict()
        self._token_s = 0.0

    def expected_s(self, index: int) -> float:
        """0.0: unknown."""
        if not self._known and not self._runner.has_expected_tokens:
            return 0.0
        try:
            prompt = self._runner.prompt(index)
            known = self._known.get(prompt.token_ids)
            if known is not None:
                return known
            # Before the first group has shown how long a token takes, only the proportions matter.
            return self._runner.expected_tokens(prompt) * (self._token_s or 1e-3)
        except TaskFailed:
            return 0.0  # The start of its group raises the same, where it is counted.

    def took(self, group: Group, seconds: float) -> None:
        """A group was made in one go."""
        key = group.prompt.token_ids
        self._known.pop(key, None)
        self._known[key] = seconds
        if len(self._known) > REMEMBERED:
            self._known.popitem(last=False)
        each = seconds / max(1, max(len(c.token_ids) for c in group.completions))
        self._token_s += (each - self._token_s) * (SMOOTHING if self._token_s else 1.0)


@dataclass(frozen=True, slots=True)
class Waiting:
    """A group that may start: its ticket, the server to avoid, and its expected duration."""

    ticket: Ticket
    avoid: str = ""
    expected_s: float = 0.0


class Starts:
    """All methods run in the dispatcher's loop. Times are seconds of its clock."""

    def __init__(self, spec: RolloutSpec, expected_s: Callable[[int], float]) -> None:
        self._admission = Admission(
            spec.base_version,
            spec.prompts_per_step,
            spec.max_staleness,
            spec.places,
            tuple(sorted(spec.waiting)),
        )
        self._expected_s = expected_s
        self._fresh = spec.unused_prompts()
        self._next = next(self._fresh)
        self._waiting: dict[int, Waiting] = {}
        self._trainer: tuple[int, float] | None = None
        self._step_s = 0.0

    def trainer_at(self, version: int, now: float) -> None:
        """The trainer has reached a version."""
        if self._trainer is not None and version > self._trainer[0]:
            each = (now - self._trainer[1]) / (version - self._trainer[0])
            self._step_s += (each - self._step_s) * (SMOOTHING if self._step_s else 1.0)
        if self._trainer is None or version != self._trainer[0]:
            self._trainer = version, now

    def used(self, prompts: tuple[int, ...]) -> None:
        """The trainer took these groups."""
        self._admission, _ = admission.step(self._admission, Used(prompts))

    def unversioned(self, count: int) -> None:
        """As many used groups made no version."""
        self._admission, _ = admission.step(self._admission, Unversioned(count))

    def again(self, ticket: Ticket, avoid: str = "") -> None:
        """A group that was started has to be made again, in its place."""
        expected_s = self._expected_s(ticket.index)
        self._waiting[ticket.index] = Waiting(ticket, avoid, expected_s)

    def give_up(self, prompt: int) -> None:
        """Its group will never be made."""
        self._admission, _ = admission.step(self._admission, GiveUp(prompt))

    def candidates(self, newest: int) -> list[Waiting]:
        """What may start, most urgent first, where ``newest`` is the newest version of a server."""
        while self._admission.may_start(self._next, newest):
            self._admission, _ = admission.step(self._admission, Admit(self._next, newest))
            self.again(Ticket(self._next))
            self._next = next(self._fresh)

        def order(waiting: Waiting) -> tuple[float, int]:
            used_at, index = self._admission.used_at(waiting.ticket.index), waiting.ticket.index
            return admission.urgency(used_at, waiting.expected_s, self._step_s), index

        return sorted(self._waiting.values(), key=order)

    def may_start(self, prompt: int, version: int) -> bool:
        """Whether a server that holds ``version`` may make its group."""
        return self._admission.may_start(prompt, version)

    def start(self, prompt: int, version: int) -> int:
        """Its group starts, for the trainer at the version that is returned."""
        self._admission, (made,) = admission.step(self._admission, Start(prompt, version))
        del self._waiting[prompt]
        return made.used_at
