"""What a completion has so far. When its request ends before it does, it goes on from there, on any
server. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from titan_grpo.engines.generation import Sampled
from titan_grpo.samples import Completion

ABORTED = "abort"
"""``finish_reason`` of an answer that an engine cut short; its tokens are as good as any."""


@dataclass(frozen=True, slots=True)
class Partial:
    """Tokens sampled so far, with their log-probabilities and the versions that made them, over one
    request or several.

    ``finish_reason`` is empty while more is to come; ``first`` and ``last`` mean something only
    where there are tokens. ``sampled`` is as in samples.Completion. ``waits``: the policy's turn is
    over, and the task's answer to it is missing.
    """

    token_ids: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    first: int = -1
    last: int = -1
    finish_reason: str = ""
    sampled: tuple[bool, ...] = ()
    waits: bool = False

    def __repr__(self) -> str:
        return (
            f"<{len(self.token_ids)} tokens of v{self.first} to v{self.last},"
            f" {self.finish_reason or 'unfinished'}>"
        )

    def after(self, sampled: Sampled, versions: Sequence[int], budget: int) -> "Partial":
        """With an engine's answer appended. ``budget``: tokens of the whole completion; a full one
        is finished by its length.

        >>> part = Partial().after(Sampled((5, 6), (-1.0, -2.0), "abort"), (3,), 4)
        >>> part, part.left(4)
        (<2 tokens of v3 to v3, unfinished>, 2)
        >>> part.after(Sampled((7, 8), (-1.0, -2.0), "abort"), (4, 5), 4)
        <4 tokens of v3 to v5, length>
        """
        token_ids, logprobs = self.token_ids + sampled.token_ids, self.logprobs + sampled.logprobs
        reason = sampled.finish_reason
        if reason == ABORTED:
            reason = "length" if len(token_ids) >= budget else ""
        flags = self.sampled + (True,) * len(sampled.token_ids) if self.sampled else ()
        if not sampled.token_ids:
            return Partial(token_ids, logprobs, self.first, self.last, reason, flags)
        made = (*versions, self.first, self.last) if self.token_ids else tuple(versions)
        return Partial(token_ids, logprobs, min(made), max(made), reason, flags)

    def waiting(self) -> "Partial":
        """With its turn over, but not the completion: the task's answer comes next."""
        return replace(self, finish_reason="", waits=True)

    def answered(self, context: Sequence[int] | None, budget: int) -> "Partial":
        """With the task's answer appended, which no version made; None ends it. An answer that
        leaves no room to go on is left out.

        >>> part = Partial((5,), (-1.0,), 3, 3, waits=True).answered((8, 9), 4)
        >>> part.token_ids, part.sampled
        ((5, 8, 9), (True, False, False))
        >>> part.answered((8,), 4).finish_reason, part.answered(None, 4).finish_reason
        ('length', 'stop')
        """
        if context is None or len(context) >= self.left(budget):
            return replace(self, finish_reason="stop" if context is None else "length", waits=False)
        return replace(
            self,
            token_ids=(*self.token_ids, *context),
            logprobs=self.logprobs + (0.0,) * len(context),
            sampled=(self.sampled or (True,) * len(self.token_ids)) + (False,) * len(context),
            waits=False,
        )

    def stretches(self) -> tuple[tuple[bool, tuple[int, ...]], ...]:
        """(sampled, token ids) of each turn in its order.

        >>> Partial((5, 8, 9), (-1.0, 0.0, 0.0), sampled=(True, False, False)).stretches()
        ((True, (5,)), (False, (8, 9)))
        """
        flags = self.sampled or (True,) * len(self.token_ids)
        pairs = groupby(zip(flags, self.token_ids, strict=True), key=lambda pair: pair[0])
        return tuple((flag, tuple(token for _, token in run)) for flag, run in pairs)

    @property
    def answers(self) -> int:
        """How many of its turns are the task's."""
        return sum(not sampled for sampled, _ in groupby(self.sampled))

    def left(self, budget: int) -> int:
        """How many tokens it may still get."""
        return budget - len(self.token_ids)

    def completion(self, server: str) -> Completion:
        """The completion, without its reward; ``server`` is the one that finished it."""
        return Completion(
            self.token_ids,
            self.logprobs,
            self.finish_reason,
            self.first,
            self.last,
            server,
            sampled=self.sampled,
        )


def oldest(parts: Sequence[Partial]) -> int | None:
    """Oldest version that made any of the tokens; None where there are none."""
    return min((part.first for part in parts if part.token_ids), default=None)


def worth_keeping(
    parts: Sequence[Partial], version: int, needed: int, mix: bool
) -> tuple[Partial, ...]:
    """The parts with which a group goes on at a server that holds ``version``; unusable ones begin
    again.

    ``needed``: oldest version that the trainer could use now. A group that goes on is of a low
    prompt, so one of the next to be used; the bound itself is checked there. ``mix``: whether one
    completion may be of several versions (a finished one keeps those it has).
    """

    def usable(part: Partial) -> bool:
        unmixed = mix or bool(part.finish_reason) or part.last == version
        return not part.token_ids or (part.first >= needed and unmixed)

    return tuple(part if usable(part) else Partial() for part in parts)
