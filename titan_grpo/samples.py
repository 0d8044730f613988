"""Records that several rooms share. Standard library only, since the rollout process and the
servers load this without torch."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import compress, groupby, islice
from typing import Any

LARGEST_REWARD = 3e38
"""Advantages are computed in float32, whose range ends just above."""

LARGEST_LOGPROB = 1e-3
"""Rounding can make the log-probability of a certain token slightly positive. A larger value is
something else: a probability, or the 1.0 with which Atropos marks a masked token."""


Span = tuple[int, int]
"""(version, tokens): a number of consecutive tokens that this version sampled (or a later one, if
the engine does not report each token's version)."""


LEAST_LOGPROB = -1e30
"""Log-probabilities at or below this are refused (float32 ends at -3.4e38)."""


def sound_logprobs(logprobs: Sequence[float]) -> bool:
    """Whether all are finite and between ``LEAST_LOGPROB`` and ``LARGEST_LOGPROB``. There must be
    at least one."""
    # The sum finds NaN, which min and max may miss. Three passes in C take a fifth of a generator's
    # time.
    finite = math.isfinite(sum(logprobs))
    return finite and min(logprobs) > LEAST_LOGPROB and max(logprobs) <= LARGEST_LOGPROB


def sound_reward(reward: float) -> bool:
    """Whether a reward is not NaN and at most ``LARGEST_REWARD`` in magnitude, so that sums of
    rewards are finite."""
    return abs(reward) <= LARGEST_REWARD


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt of a task.

    ``index``: its position in the task's endless, seeded sequence. An index gives the same prompt
    in every run with that seed, so a resumed run continues exactly.
    """

    index: int
    token_ids: tuple[int, ...]
    payload: dict[str, Any] = field(default_factory=dict)
    """Data for the reward besides the tokens, such as a reference answer."""


TURN_OVER = "turn"
"""``finish_reason`` of a completion that waits for the task's answer to the policy's turn."""

EXTERNAL = "external"
"""``finish_reason`` of a completion from outside that does not say what ended it."""


@dataclass(frozen=True, slots=True)
class Completion:
    """One sampled continuation as token ids, complete or in progress (from ``NO_TOKENS`` on), made
    by one request or several.

    ``finish_reason``: empty while in progress. ``logprobs[i]``: the engine's log-probability
    (natural logarithm) of ``token_ids[i]`` under its sampling distribution. ``version_first`` and
    ``version_last`` bound the policy versions that the tokens depend on, the KV of the prompt
    included; they are equal unless weights were committed while it ran or waited. Staleness counts
    from ``version_first``.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: str
    version_first: int
    version_last: int
    server: str
    reward: float = 0.0

    sampled: tuple[bool, ...] = ()
    """Which of ``token_ids`` the policy sampled; the others (a tool's answer) are context, whose
    ``logprobs`` are meaningless. Empty: all."""
    zero_advantage: bool = False
    """Do not train on this completion; its reward still counts in its group."""
    spans: tuple[Span, ...] = ()
    """Versions of consecutive runs of ``token_ids``, covering all. Context counts as the version
    before it. Empty: one run, of ``version_first`` (or up to ``version_last``; see Span)."""
    routes: bytes = field(default=b"", repr=False)
    """Experts of each token of prompt and completion except the last, as the engine routed them:
    uint16, little-endian, [tokens, layers, experts of a token]. Empty: not reported."""
    episode: int = -1
    """Number shared by the completions of one episode, into which an agent's changes of its history
    split it; their reward counts once in the group. -1: an episode of one completion."""

    @property
    def token_spans(self) -> tuple[Span, ...]:
        """``spans``, or the one span that empty ``spans`` stand for.

        >>> Completion((7, 8), (-0.5, -1.0), "stop", 3, 4, "s").token_spans
        ((3, 2),)
        """
        return self.spans or ((self.version_first, len(self.token_ids)),)

    @property
    def num_sampled(self) -> int:
        """Number of tokens that the policy sampled."""
        return sum(self.sampled) if self.sampled else len(self.token_ids)

    @property
    def finished(self) -> bool:
        return self.finish_reason not in ("", TURN_OVER)

    @property
    def waits(self) -> bool:
        """Whether it waits for the task's answer to the policy's turn."""
        return self.finish_reason == TURN_OVER

    @property
    def answers(self) -> int:
        """Number of the task's turns in it."""
        return sum(not sampled for sampled, _ in groupby(self.sampled))

    def fresh_enough(self, oldest: int, stale_share: float) -> bool:
        """Whether it may be used if versions before ``oldest`` are too stale: it depends on none of
        them (KV included), or less than ``stale_share`` of its sampled tokens are of them. The
        share counts sampling versions only: KV that was kept over a commit is older than the tokens
        made from it, and is then accepted.

        >>> half = Completion((1,) * 4, (-1.0,) * 4, "stop", 3, 5, "s", spans=((3, 2), (5, 2)))
        >>> [half.fresh_enough(4, share) for share in (0.0, 0.5, 0.6)]
        [False, False, True]
        >>> admitted_at_3 = replace(half, spans=((5, 4),))
        >>> [admitted_at_3.fresh_enough(4, share) for share in (0.1, 0.0)]
        [True, False]
        """
        if self.version_first >= oldest:
            return True
        flags, stale = iter(self.sampled or (True,) * len(self.token_ids)), 0
        for version, tokens in self.token_spans:
            sampled = sum(islice(flags, tokens))
            stale += sampled if version < oldest else 0
        return stale < stale_share * self.num_sampled

    def then(self, more: "Completion") -> "Completion":
        """Return this completion continued by ``more``, whose finish reason, reward and other
        fields that are not per token it takes.

        >>> part = Completion((5,), (-0.5,), "", 3, 3, "s")
        >>> whole = part.then(Completion((8, 9), (-1.0, 0.0), "stop", 3, 5, "s", spans=((5, 2),)))
        >>> whole.token_ids, whole.version_last, whole.token_spans, whole.finish_reason
        ((5, 8, 9), 5, ((3, 1), (5, 2)), 'stop')
        """
        if not self.token_ids:
            return more
        if not more.token_ids:
            return replace(self, finish_reason=more.finish_reason)
        first = min(self.version_first, more.version_first)
        flags: tuple[bool, ...] = ()
        if self.sampled or more.sampled:
            flags = tuple(f for c in (self, more) for f in c.sampled or (True,) * len(c.token_ids))
        return replace(
            more,
            token_ids=self.token_ids + more.token_ids,
            logprobs=self.logprobs + more.logprobs,
            version_first=first,
            version_last=max(self.version_last, more.version_last),
            sampled=flags,
            spans=spans_from(first, (*self.token_spans, *more.token_spans)),
            # ``more`` also has routes of the earlier tokens, from their recomputation. Keep the
            # routes with which the tokens were sampled.
            routes=self.routes + more.routes[len(self.routes) :],
        )


NO_TOKENS = Completion((), (), "", -1, -1, "")
"""A completion before its first token."""


def spans_from(first: int, spans: Sequence[Span]) -> tuple[Span, ...]:
    """Return ``Completion.spans`` for ``version_first = first``: merge neighbours of one version,
    and drop the spans if all are of ``first``.

    >>> spans_from(3, ((3, 2), (3, 1), (4, 0), (5, 2))), spans_from(3, ((3, 2), (3, 1)))
    (((3, 3), (5, 2)), ())
    """
    runs = groupby((span for span in spans if span[1]), key=lambda span: span[0])
    found = tuple((version, sum(tokens for _, tokens in run)) for version, run in runs)
    return found if any(version != first for version, _ in found) else ()


def context(token_ids: Sequence[int], version: int) -> Completion:
    """Return a completion of tokens that the policy did not sample; they count as ``version``, the
    neighbouring tokens' version."""
    ids, none = tuple(token_ids), (0.0,) * len(token_ids)
    return Completion(ids, none, "", version, version, "", sampled=(False,) * len(ids))


def shared_prefix(rows: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    """Return the common prefix of all rows (at least one).

    >>> shared_prefix([(1, 2, 3), (1, 2), (1, 2, 4)])
    (1, 2)
    """
    # In lexicographic order all others are between these two, so they share the prefix.
    first, last = min(rows), max(rows)
    same = (at for at, (a, b) in enumerate(zip(first, last, strict=False)) if a != b)
    return first[: next(same, len(first))]


def whole_routes(routes: bytes, tokens: int, width: int = 0) -> bool:
    """Whether ``routes`` (as in Completion) cover all of ``tokens`` tokens except the last, with
    ``width`` numbers (layers x experts) each, or with any equal width if 0.

    >>> whole_routes(bytes(24), 4), whole_routes(bytes(24), 4, 2), whole_routes(b"", 4)
    (True, False, False)
    """
    each, rest = divmod(len(routes), 2 * max(tokens - 1, 1))
    return each > 0 and rest == 0 and width in (0, each)


def defect(prompt: Prompt, completion: Completion) -> str:
    """Return why a completion must not be trained on (the name of its counter), or "".

    Rollouts and batch share this rule. The whole group of a defective completion is left out:
    advantages compare its members, and a group without one kind of failure would be biased.
    """
    if not prompt.token_ids:
        return "empty_prompt"
    if not completion.token_ids:
        return "empty_completion"
    logprobs: Sequence[float] = completion.logprobs
    lengths = {len(completion.token_ids), len(logprobs)}
    if completion.sampled:
        lengths.add(len(completion.sampled))
    lengths.add(sum(tokens for _, tokens in completion.token_spans))
    if len(lengths) > 1:
        return "length_mismatch"
    if completion.sampled:
        logprobs = list(compress(logprobs, completion.sampled))
        if not logprobs:
            return "nothing_sampled"
    if not sound_logprobs(logprobs):
        return "bad_logprob"
    return "" if sound_reward(completion.reward) else "bad_reward"


@dataclass(frozen=True, slots=True)
class Group:
    """All completions of one prompt: the unit of advantages, admission and the data cursor."""

    prompt: Prompt
    completions: tuple[Completion, ...]

    @property
    def version(self) -> int:
        """Oldest policy version in the group; its staleness counts from it."""
        return min(c.version_first for c in self.completions)
