"""Records that cross rooms. Standard library only: the rollout process and the servers load no
torch for them."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import compress, groupby
from typing import Any

LARGEST_REWARD = 3e38
"""Advantages are computed in float32, whose range ends just above."""

LARGEST_LOGPROB = 1e-3
"""Rounding can make the log-probability of a certain token slightly positive. Larger values are no
log-probabilities: a probability, or the 1.0 with which Atropos marks a masked token."""


Span = tuple[int, int]
"""(version, tokens): so many tokens in a row were sampled by the weights of that version. Where an
engine does not name the version of each token: by that version or a later one."""


LEAST_LOGPROB = -1e30
"""One below this is past float32."""


def sound_logprobs(logprobs: Sequence[float]) -> bool:
    """Whether all are finite numbers between ``LEAST_LOGPROB`` and ``LARGEST_LOGPROB``; at least
    one."""
    # The sum finds NaN, which min and max may step over; three passes in C, where a generator would
    # take 5 times as long.
    finite = math.isfinite(sum(logprobs))
    return finite and min(logprobs) > LEAST_LOGPROB and max(logprobs) <= LARGEST_LOGPROB


def sound_reward(reward: float) -> bool:
    """Whether a reward is no NaN and no larger than ``LARGEST_REWARD`` either way, so that sums of
    rewards are finite."""
    return abs(reward) <= LARGEST_REWARD


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt of a task.

    ``index`` is its place in the task's endless, seeded sequence: the same index gives the same
    prompt in every run with that seed, which makes a resumed run exact.
    """

    index: int
    token_ids: tuple[int, ...]
    payload: dict[str, Any] = field(default_factory=dict)
    """What the reward needs besides the tokens (a reference answer, say)."""


TURN_OVER = "turn"
"""``finish_reason`` of a completion whose task has not yet answered the policy's turn."""


@dataclass(frozen=True, slots=True)
class Completion:
    """One sampled continuation, token in and token out, from its first token (``NO_TOKENS``) on,
    over one request or several.

    ``finish_reason`` is empty while more is to come. ``logprobs[i]`` is the engine's
    log-probability (natural logarithm) of ``token_ids[i]`` under the distribution it was sampled
    from. ``version_first`` and ``version_last`` bound the policy versions of all that its tokens
    depend on, the KV of the prompt included: equal unless weights were committed while it ran or
    waited. Staleness is bounded by ``version_first``.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: str
    version_first: int
    version_last: int
    server: str
    reward: float = 0.0

    sampled: tuple[bool, ...] = ()
    """Which of ``token_ids`` the policy sampled; the others (a tool's answer) are context, and
    their ``logprobs`` mean nothing. Empty: all of them."""
    zero_advantage: bool = False
    """The reward counts for the others of its group, but this completion is not trained on."""
    spans: tuple[Span, ...] = ()
    """Which version sampled which of ``token_ids``, in order; the numbers of tokens add up to
    theirs. Context has the version before it. Empty: all are of ``version_first``, or later ones
    up to ``version_last``."""
    routes: bytes = field(default=b"", repr=False)
    """Which experts the engine sent each token of prompt and completion to, but for the last token:
    uint16, little-endian, [tokens, layers, experts of a token]. Empty: it did not say."""
    episode: int = -1
    """Where an agent's history changed, its episode is several completions, which have this number
    in common: their reward counts once in the group. -1: it is one of its own."""

    @property
    def token_spans(self) -> tuple[Span, ...]:
        """``spans``, written out where they are empty.

        >>> Completion((7, 8), (-0.5, -1.0), "stop", 3, 4, "s").token_spans
        ((3, 2),)
        """
        return self.spans or ((self.version_first, len(self.token_ids)),)

    @property
    def num_sampled(self) -> int:
        """Tokens that are trained on."""
        return sum(self.sampled) if self.sampled else len(self.token_ids)

    @property
    def finished(self) -> bool:
        """Whether nothing more is to come."""
        return self.finish_reason not in ("", TURN_OVER)

    @property
    def waits(self) -> bool:
        """Whether the policy's turn is over, and the task's answer to it is missing."""
        return self.finish_reason == TURN_OVER

    @property
    def answers(self) -> int:
        """How many of its turns are the task's."""
        return sum(not sampled for sampled, _ in groupby(self.sampled))

    def then(self, more: "Completion") -> "Completion":
        """The two as one. All that is not of tokens (how it ended, its reward) is that of ``more``.

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
            # An engine's answer has the routes of what came before its own tokens too, as they were
            # when that was computed again; the tokens were sampled on those that are here already.
            routes=self.routes + more.routes[len(self.routes) :],
        )


NO_TOKENS = Completion((), (), "", -1, -1, "")
"""A completion before its first token."""


def spans_from(first: int, spans: Sequence[Span]) -> tuple[Span, ...]:
    """``Completion.spans`` of a completion with ``version_first = first``: neighbours of one
    version as one.

    >>> spans_from(3, ((3, 2), (3, 1), (4, 0), (5, 2))), spans_from(3, ((3, 2), (3, 1)))
    (((3, 3), (5, 2)), ())
    """
    runs = groupby((span for span in spans if span[1]), key=lambda span: span[0])
    found = tuple((version, sum(tokens for _, tokens in run)) for version, run in runs)
    return found if any(version != first for version, _ in found) else ()


def context(token_ids: Sequence[int], version: int) -> Completion:
    """Tokens that the policy did not sample; they count as of ``version``, that of those beside
    them."""
    ids, none = tuple(token_ids), (0.0,) * len(token_ids)
    return Completion(ids, none, "", version, version, "", sampled=(False,) * len(ids))


def whole_routes(routes: bytes, tokens: int, width: int = 0) -> bool:
    """Whether ``routes`` (as in Completion) are of all of ``tokens`` tokens but the last, ``width``
    experts each; 0: as many of each as of any other.

    >>> whole_routes(bytes(24), 4), whole_routes(bytes(24), 4, 2), whole_routes(b"", 4)
    (True, False, False)
    """
    each, rest = divmod(len(routes), 2 * max(tokens - 1, 1))
    return each > 0 and rest == 0 and width in (0, each)


def fresh_enough(first: int, spans: Sequence[Span], oldest: int, stale_share: float) -> bool:
    """Whether a completion may be used where versions before ``oldest`` are too stale: it depends
    on none (``first`` is the oldest that it depends on, KV included), or less than ``stale_share``
    of its tokens were sampled by such. The share is of the weights alone: KV that was kept over a
    commit is older than the tokens made on it, and then is borne with them.

    >>> half = ((3, 2), (5, 2))
    >>> [fresh_enough(3, half, 4, share) for share in (0.0, 0.5, 0.6)]
    [False, False, True]
    >>> [fresh_enough(3, ((5, 4),), 4, share) for share in (0.1, 0.0)]  # admitted at 3
    [True, False]
    """
    stale = sum(tokens for version, tokens in spans if version < oldest)
    return first >= oldest or stale < stale_share * sum(tokens for _, tokens in spans)


def defect(prompt: Prompt, completion: Completion) -> str:
    """Why a completion must not be trained on (the name it is counted under), or "" if it may.

    One rule for rollouts and batch: the group of such a one is left out whole, since advantages
    compare its members, and one without its failures of one kind would be biased.
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
    """All completions of one prompt; the unit of advantages, of admission and of the data
    cursor."""

    prompt: Prompt
    completions: tuple[Completion, ...]

    @property
    def version(self) -> int:
        """Oldest policy version in the group, from which its staleness is counted."""
        return min(c.version_first for c in self.completions)
