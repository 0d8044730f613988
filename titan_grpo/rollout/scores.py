"""What an evaluation's rewards say, with their uncertainty. Pure."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from titan_grpo.observe import names
from titan_grpo.samples import Group

Z_95 = 1.959964
"""Two-sided 95 % quantile of the normal distribution."""


class Estimate(msgspec.Struct, frozen=True):
    """A mean over prompts with its 95 % confidence interval; without bounds where there is one
    prompt only."""

    value: float
    low: float | None = None
    high: float | None = None


class Scores(msgspec.Struct, frozen=True):
    """The outcome of one evaluation of one version."""

    name: str
    version: int
    server: str
    prompts: int
    samples: int
    """Completions of each prompt."""
    reward: Estimate
    passed: dict[int, Estimate]
    """k -> pass@k."""
    tokens: Estimate
    """Sampled tokens of a completion."""
    refused: int
    """Prompts that the server refused (too long, say): in no other figure."""
    seconds: float


@dataclass(frozen=True, slots=True)
class Failure:
    """Why an evaluation has no result, for people. ``again``: the server's fault, so that another
    try may have one."""

    text: str
    again: bool


@dataclass(frozen=True, slots=True)
class Prompted:
    """Rewards and lengths (sampled tokens) of one prompt's completions."""

    rewards: tuple[float, ...]
    tokens: tuple[int, ...]

    @classmethod
    def of(cls, group: Group) -> "Prompted":
        """Those of a finished, rewarded group."""
        done = group.completions
        return cls(tuple(c.reward for c in done), tuple(c.num_sampled for c in done))


def estimate(values: Sequence[float]) -> Estimate:
    """The mean of one value per prompt: mean +- 1.96 standard errors (Student's correction of the
    variance, normal quantile).

    The completions of a prompt are not independent, so the prompt is the unit: clustered standard
    errors with equal clusters (Miller, "Adding Error Bars to Evals", arXiv 2411.00640, section
    2.2). Raises StatisticsError without a value.

    Worked example: (0, 1, 1, 0): mean 0.5, deviation 0.577, standard error 0.289, interval
    (-0.066, 1.066). It is not cut to the values that a reward can have.
    """
    mean = statistics.fmean(values)
    if len(values) < 2:
        return Estimate(mean)
    error = statistics.stdev(values) / math.sqrt(len(values))
    return Estimate(mean, mean - Z_95 * error, mean + Z_95 * error)


def pass_at_k(samples: int, passed: int, k: int) -> float:
    """Unbiased estimate, from ``samples`` completions of which ``passed`` pass, of the probability
    that at least one of ``k`` passes: 1 - C(n - c, k) / C(n, k) (Chen et al., "Evaluating Large
    Language Models Trained on Code", arXiv 2107.03374, equation 1). Needs k <= samples.

    >>> pass_at_k(4, 1, 1), pass_at_k(4, 1, 2), pass_at_k(4, 3, 2)
    (0.25, 0.5, 1.0)
    """
    if samples - passed < k:
        return 1.0
    return 1.0 - math.comb(samples - passed, k) / math.comb(samples, k)


def passes(prompts: Sequence[Prompted], k: int, least: float) -> Estimate:
    """pass@k over prompts; a completion passes with a reward of at least ``least``."""
    return estimate(
        [pass_at_k(len(p.rewards), sum(r >= least for r in p.rewards), k) for p in prompts]
    )


def of_version(group: Group, version: int) -> bool:
    """Whether every token of a group was sampled by ``version``, on KV of its own. Engines that
    name the version of each token have it checked by token; others by what the ledger knew when a
    request began and ended."""
    return all(
        c.version_first == c.version_last == version
        and all(made_by == version for made_by, _ in c.token_spans)
        for c in group.completions
    )


def next_due(every: int, evaluated: int) -> int | None:
    """The version from which an evaluation is due after that of ``evaluated``: the next multiple of
    ``every``; None: none but the last version is.

    >>> next_due(10, 0), next_due(10, 10), next_due(10, 13), next_due(0, 5)
    (10, 20, 20, None)
    """
    return (evaluated // every + 1) * every if every else None


def metrics(scores: Scores) -> dict[str, float]:
    """The values of metrics.jsonl: ``evaluation/NAME/reward``, ``.../reward_low``, ``..._high`` and
    so on."""
    values: dict[str, float | None] = {
        "version": float(scores.version),
        "refused": float(scores.refused),
        "seconds": scores.seconds,
    }
    estimates = {"reward": scores.reward, "tokens": scores.tokens}
    estimates |= {f"pass_at_{k}": found for k, found in scores.passed.items()}
    for what, found in estimates.items():
        values |= {what: found.value, f"{what}_low": found.low, f"{what}_high": found.high}
    return {f"{names.EVALUATION}/{scores.name}/{k}": v for k, v in values.items() if v is not None}


def line(scores: Scores) -> str:
    """For people.

    Example: ``evaluation test, version 20: reward 0.412 (0.371 to 0.453), pass@1 0.410 (0.369 to
    0.451), 153 tokens; 400 prompts x 1``.
    """
    parts = [("reward", scores.reward), *((f"pass@{k}", e) for k, e in scores.passed.items())]
    shown = ", ".join(f"{what} {_shown(found)}" for what, found in parts)
    refused = f", {scores.refused} refused" if scores.refused else ""
    return (
        f"evaluation {scores.name}, version {scores.version}: {shown},"
        f" {scores.tokens.value:.0f} tokens; {scores.prompts} prompts x {scores.samples}{refused},"
        f" {scores.seconds:.1f} s"
    )


def _shown(found: Estimate) -> str:
    if found.low is None or found.high is None:
        return f"{found.value:.3f}"
    return f"{found.value:.3f} ({found.low:.3f} to {found.high:.3f})"
