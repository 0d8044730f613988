"""What the papers of the named algorithms compute, in float64 numpy: losses written out completion
by completion, gradients by central differences. Nothing here is shared with what it checks.

The model is a table: the logits after a token are that token's row.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Ints = NDArray[np.int64]
LIMIT = 10
"""rollout.max_completion_tokens of the data."""


@dataclass
class Sample:
    """One completion: the tokens that its own follow, and log-probabilities [n]."""

    before: Ints
    tokens: Ints
    engine: Array
    old: Array
    reference: Array
    reward: float

    @property
    def n(self) -> int:
        return len(self.tokens)


Group = list[Sample]


def logprobs(table: Array, sample: Sample) -> Array:
    """Of the sample's tokens under a table of logits."""
    logits: Array = table[sample.before]
    top = logits.max(-1, keepdims=True)
    normal: Array = np.log(np.exp(logits - top).sum(-1)) + top[:, 0]
    chosen: Array = logits[np.arange(sample.n), sample.tokens]
    return chosen - normal


def rewards(group: Group) -> Array:
    return np.array([sample.reward for sample in group])


def grpo_advantages(groups: list[Group]) -> list[Array]:
    return [(rewards(g) - rewards(g).mean()) / (rewards(g).std() + 1e-6) for g in groups]


def centred(groups: list[Group]) -> list[Array]:
    return [rewards(g) - rewards(g).mean() for g in groups]


def leave_one_out(groups: list[Group]) -> list[Array]:
    return [
        np.array([r - (rewards(g).sum() - r) / (len(g) - 1) for r in rewards(g)]) for g in groups
    ]


def of_the_step(groups: list[Group]) -> list[Array]:
    scale = np.sqrt(np.mean(np.concatenate(centred(groups)) ** 2)) + 1e-6
    return [c / scale for c in centred(groups)]


def dapo_advantages(groups: list[Group]) -> list[Array]:
    cache, out = 2, []  # a share of 0.2 of LIMIT
    for group in groups:
        over = np.array([(LIMIT - cache - s.n) / cache for s in group]).clip(-1, 0)
        r = rewards(group) + over
        out.append((r - r.mean()) / (r.std() + 1e-6))
    return out


# Each: (now, at, old, sample, A) -> sum over the completion's tokens, to be maximised, as an array
# [n]. ``now`` is what is varied, ``at`` the same where it stands for a constant. ``old`` is the
# policy before the batch.


def truncated(x: Array | np.floating[Any]) -> Array:
    return np.minimum(np.exp(x), 2.0)


def clip(low: float, high: float) -> Callable[..., Array]:
    def objective(now: Array, at: Array, old: Array, s: Sample, a: float) -> Array:
        ratio = np.exp(now - old)
        surrogate = np.minimum(ratio * a, ratio.clip(1 - low, 1 + high) * a)
        return truncated(old - s.engine) * surrogate

    return objective


def gspo(now: Array, at: Array, old: Array, s: Sample, a: float) -> Array:
    ratio = np.exp(np.mean(now - old))
    surrogate = min(ratio * a, np.clip(ratio, 1 - 3e-4, 1 + 4e-4) * a)
    return np.full(s.n, truncated(np.mean(old - s.engine)) * surrogate)


def cispo(now: Array, at: Array, old: Array, s: Sample, a: float) -> Array:
    return np.minimum(np.exp(at - s.engine), 5.0) * a * now


def reinforce(now: Array, at: Array, old: Array, s: Sample, a: float) -> Array:
    """RLOO with 0.03 times the KL in the reward: what a token decides is the KL from it on."""
    returns = np.array([np.sum((at - s.reference)[t:]) for t in range(s.n)])
    return truncated(np.sum(old - s.engine)) * (a - 0.03 * returns) * np.exp(now - at)


def sapo(now: Array, at: Array, old: Array, s: Sample, a: float) -> Array:
    tau = 1.0 if a > 0 else 1.05
    gate = 4 / tau / (1 + np.exp(-tau * (np.exp(now - old) - 1)))
    return truncated(old - s.engine) * gate * a


def gmpo(now: Array, at: Array, old: Array, s: Sample, a: float) -> Array:
    sign = 1 if a > 0 else -1
    bounded = sign * np.minimum(sign * (now - old), 0.4)
    return truncated(old - s.engine) * float(np.exp(bounded.mean())) * a


def topr(now: Array, at: Array, old: Array, s: Sample, a: float) -> Array:
    return (1.0 if a >= 0 else min(np.exp(np.sum(at - s.engine)), 1.0)) * a * now


def unbounded(now: Array, at: Array, old: Array, s: Sample, a: float) -> Array:
    return np.exp(now - s.engine) * a


def m2po_masking(samples: list[Sample], advantages: list[float], at: Array) -> list[Array]:
    """Algorithm 1 of M2PO, as it stands there: for each sample, which tokens stay."""
    masks = [np.ones(s.n, bool) for s in samples]
    moved = [logprobs(at, s) - s.engine for s in samples]
    region = {
        (k, t): moved[k][t] ** 2
        for k, a in enumerate(advantages)
        for t in range(samples[k].n)
        if (a > 0 and moved[k][t] > 0) or (a < 0 and moved[k][t] < 0)
    }
    while region and np.mean(list(region.values())) > 0.04:
        k, t = max(region, key=region.__getitem__)
        masks[k][t] = False
        del region[k, t]
    return masks


def no_masking(samples: list[Sample], advantages: list[float], at: Array) -> list[Array]:
    return [np.ones(s.n, bool) for s in samples]


def no_kl(now: Array, at: Array, s: Sample) -> Array:
    return np.zeros(s.n)


def k3(now: Array, at: Array, s: Sample) -> Array:
    x = s.reference - now
    return 0.04 * np.minimum(np.exp(now - s.engine), 10) * (np.exp(x) - 1 - x)


def k2(now: Array, at: Array, s: Sample) -> Array:
    return 1e-5 * np.minimum(np.exp(at - s.engine), 10) * (s.reference - now) ** 2 / 2


def by_token(group_of_samples: list[Sample], s: Sample) -> float:
    return 1 / sum(each.n for each in group_of_samples)


def by_sequence(group_of_samples: list[Sample], s: Sample) -> float:
    return 1 / (len(group_of_samples) * s.n)


def by_constant(group_of_samples: list[Sample], s: Sample) -> float:
    return 1 / (len(group_of_samples) * LIMIT)


@dataclass
class Paper:
    """One algorithm: how its loss is put together."""

    advantages: Callable[[list[Group]], list[Array]]
    objective: Callable[..., Array]
    weight: Callable[[list[Sample], Sample], float]
    kl: Callable[..., Array] = no_kl
    steps: int = 4
    """Optimizer steps of a batch."""
    masking: Callable[..., list[Array]] = no_masking


PAPERS = {
    "grpo": Paper(grpo_advantages, clip(0.2, 0.28), by_sequence, k3, 1),
    "dapo": Paper(dapo_advantages, clip(0.2, 0.28), by_token),
    "dr_grpo": Paper(centred, clip(0.2, 0.28), by_constant, steps=1),
    "gspo": Paper(grpo_advantages, gspo, by_sequence),
    "cispo": Paper(grpo_advantages, cispo, by_token),
    "rloo": Paper(leave_one_out, reinforce, by_constant, steps=1),
    "reinforce_pp": Paper(of_the_step, clip(0.2, 0.2), by_token, k2),
    "sapo": Paper(grpo_advantages, sapo, by_sequence),
    "gmpo": Paper(grpo_advantages, gmpo, by_sequence),
    "topr": Paper(centred, topr, by_constant),
    "m2po": Paper(grpo_advantages, unbounded, by_token, masking=m2po_masking),
}


def losses(paper: Paper, groups: list[Group], table: Array, at: Array) -> float:
    """Sum of the losses of a batch's optimizer steps, each over the groups dealt to it, all at one
    table: the first has it as its own policy before the batch, the later ones the samples' own."""
    total, advantages = 0.0, paper.advantages(groups)
    for step in range(paper.steps):
        mine = list(zip(groups, advantages, strict=True))[step :: paper.steps]
        samples = [s for group, _ in mine for s in group]
        kept = iter(paper.masking(samples, [a for _, each in mine for a in each], at))
        for group, of_group in mine:
            for s, a in zip(group, of_group, strict=True):
                now, here = logprobs(table, s), logprobs(at, s)
                old = here if step == 0 else s.old
                policy = next(kept) * paper.objective(now, here, old, s, a)
                terms = paper.kl(now, here, s) - policy
                total += paper.weight(samples, s) * terms.sum()
    return total


def gradient(paper: Paper, groups: list[Group], at: Array) -> Array:
    """Central differences: every entry of the table."""
    out, h = np.zeros_like(at), 1e-5
    for place in np.ndindex(at.shape):
        moved = np.zeros_like(at)
        moved[place] = h
        out[place] = (
            losses(paper, groups, at + moved, at) - losses(paper, groups, at - moved, at)
        ) / (2 * h)
    return out
