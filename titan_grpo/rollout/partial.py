"""What a completion has so far. When its request ends before it does, it goes on from there, on any
server. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import NamedTuple

from titan_grpo.engines.generation import Sampled
from titan_grpo.samples import Completion, Span, fresh_enough

ABORTED = "abort"
"""``finish_reason`` of an answer that an engine cut short; its tokens are as good as any."""


class Made(NamedTuple):
    """The versions behind one answer: the oldest and the newest of all that its tokens depend on,
    and which sampled which tokens."""

    first: int
    last: int
    spans: tuple[Span, ...]


def joined(spans: Sequence[Span]) -> tuple[Span, ...]:
    """Without empty ones, and neighbours of one version as one.

    >>> joined(((3, 2), (3, 1), (4, 0), (5, 2)))
    ((3, 3), (5, 2))
    """
    runs = groupby((span for span in spans if span[1]), key=lambda span: span[0])
    return tuple((version, sum(tokens for _, tokens in run)) for version, run in runs)


@dataclass(frozen=True, slots=True)
class Partial:
    """Tokens sampled so far, with their log-probabilities and the versions that made them, over one
    request or several.

    ``finish_reason`` is empty while more is to come; ``first`` and ``last`` (as in ``Made``) mean
    something only where there are tokens. ``sampled``, ``spans`` and ``routes`` are as in
    samples.Completion. ``waits``: the policy's turn is over, and the task's answer to it is
    missing.
    """

    token_ids: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    first: int = -1
    last: int = -1
    finish_reason: str = ""
    sampled: tuple[bool, ...] = ()
    waits: bool = False
    spans: tuple[Span, ...] = ()
    routes: bytes = b""

    def __repr__(self) -> str:
        return (
            f"<{len(self.token_ids)} tokens of v{self.first} to v{self.last},"
            f" {self.finish_reason or 'unfinished'}>"
        )

    def after(self, sampled: Sampled, made: Made, budget: int) -> "Partial":
        """With an engine's answer appended. ``budget``: tokens of the whole completion; a full one
        is finished by its length.

        >>> answer = Sampled((5, 6), (-1.0, -2.0), "abort")
        >>> part = Partial().after(answer, Made(3, 3, ((3, 2),)), 4)
        >>> part, part.left(4)
        (<2 tokens of v3 to v3, unfinished>, 2)
        >>> whole = part.after(answer, Made(3, 5, ((3, 1), (5, 1))), 4)
        >>> whole, whole.spans
        (<4 tokens of v3 to v5, length>, ((3, 3), (5, 1)))
        """
        token_ids, logprobs = self.token_ids + sampled.token_ids, self.logprobs + sampled.logprobs
        reason = sampled.finish_reason
        if reason == ABORTED:
            reason = "length" if len(token_ids) >= budget else ""
        flags = self.sampled + (True,) * len(sampled.token_ids) if self.sampled else ()
        if not sampled.token_ids:
            return replace(self, finish_reason=reason, waits=False)
        first, last, spans = made
        if self.token_ids:
            first, last = min(first, self.first), max(last, self.last)
        spans = joined((*self.token_spans, *spans))
        # An answer has the routes of what came before its own tokens too, as they were when that
        # was computed again; the tokens were sampled on those that are here already.
        routes = self.routes + sampled.routes[len(self.routes) :]
        return Partial(token_ids, logprobs, first, last, reason, flags, spans=spans, routes=routes)

    def waiting(self) -> "Partial":
        """With its turn over, but not the completion: the task's answer comes next."""
        return replace(self, finish_reason="", waits=True)

    def answered(self, context: Sequence[int] | None, budget: int) -> "Partial":
        """With the task's answer appended, which no version made; None ends it. An answer that
        leaves no room to go on is left out.

        >>> part = Partial((5,), (-1.0,), 3, 3, waits=True).answered((8, 9), 4)
        >>> part.token_ids, part.sampled, part.spans
        ((5, 8, 9), (True, False, False), ((3, 3),))
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
            # Context is of no version; it counts as of the one before it.
            spans=joined((*self.token_spans, (self.token_spans[-1][0], len(context)))),
        )

    def first_tokens(self, count: int) -> "Partial":
        """Without what came after the first ``count`` tokens, of which there is at least one.

        >>> part = Partial((5, 6), (-1.0, -2.0), 3, 4, spans=((3, 1), (4, 1)))
        >>> part.first_tokens(1).token_ids, part.first_tokens(1).spans
        ((5,), ((3, 1),))
        """
        spans, left = [], count
        for version, tokens in self.token_spans:
            spans.append((version, min(tokens, left)))
            left -= spans[-1][1]
        return replace(
            self,
            token_ids=self.token_ids[:count],
            logprobs=self.logprobs[:count],
            sampled=self.sampled[:count],
            spans=joined(spans),
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
    def token_spans(self) -> tuple[Span, ...]:
        """``spans``, written out where they are empty."""
        return self.spans or ((self.first, len(self.token_ids)),)

    @property
    def answers(self) -> int:
        """How many of its turns are the task's."""
        return sum(not sampled for sampled, _ in groupby(self.sampled))

    def left(self, budget: int) -> int:
        """How many tokens it may still get."""
        return budget - len(self.token_ids)

    def completion(self, server: str) -> Completion:
        """The completion, without its reward; ``server`` is the one that finished it."""
        plain = all(version == self.first for version, _ in self.spans)
        return Completion(
            self.token_ids,
            self.logprobs,
            self.finish_reason,
            self.first,
            self.last,
            server,
            sampled=self.sampled,
            spans=() if plain else self.spans,
            routes=self.routes,
        )


def oldest(parts: Sequence[Partial]) -> int | None:
    """Oldest version that made any of the tokens; None where there are none."""
    return min((part.first for part in parts if part.token_ids), default=None)


def length_range(tokens: int) -> int:
    """Greatest length of the range that a length is counted in.

    >>> [length_range(n) for n in (0, 1, 2, 3, 4, 5, 64, 65)]
    [1, 1, 2, 4, 4, 8, 64, 128]
    """
    return 1 << max(0, tokens - 1).bit_length()


def sampled_tokens(parts: Sequence[Partial]) -> int:
    """How many tokens of the parts the policy made."""
    return sum(sum(part.sampled) if part.sampled else len(part.token_ids) for part in parts)


def worth_keeping(
    parts: Sequence[Partial], version: int, needed: int, mix: bool, stale_share: float = 0.0
) -> tuple[Partial, ...]:
    """The parts with which a group goes on at a server that holds ``version``; unusable ones begin
    again.

    ``needed``: oldest version that the trainer can use at the group's step (``stale_share``: as in
    samples.fresh_enough). ``mix``: whether one
    completion may be of several versions (a finished one keeps those it has).
    """

    def usable(part: Partial) -> bool:
        unmixed = mix or bool(part.finish_reason) or part.last == version
        fresh = fresh_enough(part.first, part.token_spans, needed, stale_share)
        return not part.token_ids or (fresh and unmixed)

    return tuple(part if usable(part) else Partial() for part in parts)
