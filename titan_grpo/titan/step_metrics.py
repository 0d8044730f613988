"""What a step's line of metrics.jsonl is computed from. Pure."""

import statistics
from collections.abc import Iterable, Mapping, Sequence

from titan_grpo.algorithm.balance import variation
from titan_grpo.algorithm.batch import Batch
from titan_grpo.algorithm.metrics import GAP_PARTS
from titan_grpo.observe import names
from titan_grpo.rollout.messages import IN_FLIGHT
from titan_grpo.samples import Group, sound_reward

LOSS_VALUES = {
    names.LOSS: "loss",
    names.LOGPROB: "logprob",
    names.LOGPROB_MAX: "logprob_max",
    names.TRAINED_TOKENS: "tokens",
    names.TRAINED_SEQUENCES: "sequences",
    names.LOGPROB_GAP: "logprob_gap",
    names.LOGPROB_GAP_MAX: "logprob_gap_max",
    names.LOGPROB_DIFFERENCE: "logprob_difference",
    names.RATIO_MEAN: "ratio",
    names.KL: "kl",
    names.ENTROPY: "entropy",
    names.LOGIT_SQUARE: "logit_square",
    names.PTX_LOSS: "ptx",
    names.IMPORTANCE_MEAN: "importance",
    names.IMPORTANCE_CUT: "importance_capped",
    names.VETOED: "vetoed",
    names.KEPT: "kept",
    names.POLICY_LOSS: "policy_loss",
    names.KL_LOSS: "kl_loss",
    names.ENTROPY_LOSS: "entropy_loss",
    names.LOGIT_LOSS: "logit_loss",
    names.CLIPPED_LOW: "clipped_low",
    names.CLIPPED_HIGH: "clipped_high",
    names.RATIO_MAX: "ratio_max",
    names.IMPORTANCE_MAX: "importance_max",
}
"""Name of a metric -> what the loss calls it; those that a run does not compute are left out."""


def loss_values(metrics: Mapping[str, float]) -> dict[str, float]:
    """A step's figures of its loss, from ``algorithm.metrics.summarize``."""
    values = {name: metrics[key] for name, key in LOSS_VALUES.items() if key in metrics}
    values[names.CLIP_FRACTION] = metrics["clipped_low"] + metrics["clipped_high"]
    if "minus_logprob_max" in metrics:
        values[names.LOGPROB_MIN] = -metrics["minus_logprob_max"]
    if metrics["on_policy_count"] > 0:
        values[names.ON_POLICY_GAP] = metrics["on_policy_gap"] / metrics["on_policy_count"]
        values[names.ON_POLICY_GAP_MAX] = metrics["on_policy_gap_max"]
    for by, bounds in GAP_PARTS.items():
        for high in bounds:
            if count := metrics.get(f"gap_{by}_{high:g}_count", 0):
                values[names.gap(by, high)] = metrics[f"gap_{by}_{high:g}"] / count
    if metrics.get("replayed", 0) > 0:
        values[names.ROUTES_DIFFER] = metrics["routes_differ"] / metrics["replayed"]
    return values


def rollout_values(
    before: Mapping[str, int], now: Mapping[str, int], seconds: float
) -> dict[str, float]:
    """Figures of the rollouts between two readings of their counters, ``seconds`` apart.

    Example: 600 tokens more in 3 s give ``rollout/generated_tokens_per_s`` 200.
    """
    new = {name: count - before.get(name, 0) for name, count in now.items()}
    values = {names.THROWN_TOKENS: float(new.get("thrown_tokens", 0))}
    if "ready" in now:
        values[names.READY_GROUPS] = float(now["ready"])
    if seconds > 0 and "tokens" in now:
        values[names.GENERATED] = new["tokens"] / seconds
    if commits := new.get("commits", 0):
        values[names.IN_FLIGHT_AT_COMMIT] = new["in_flight_at_commits"] / commits
    running = {name.removeprefix(IN_FLIGHT): n for name, n in now.items() if IN_FLIGHT in name}
    if running:
        values[names.IN_FLIGHT] = float(sum(running.values()))
    for url, count in running.items():
        values[names.of_server(url, "in_flight")] = float(count)
        if seconds > 0:
            made = new.get(f"tokens.{url}", 0)
            values[names.of_server(url, "tokens_per_s")] = made / seconds
    return values


def server_values(version: int, held: Mapping[str, int | None]) -> dict[str, float]:
    """Versions and lags of the servers at a step that began from ``version``. Servers that hold
    none are left out."""
    values = {names.VERSION: float(version), **lags(version, held.values())}
    for url, own in held.items():
        if own is not None:
            values[names.of_server(url, "version")] = float(own)
            values[names.of_server(url, "lag")] = float(max(0, version - own))
    return values


def lags(version: int, held: Iterable[int | None]) -> dict[str, float]:
    """How far the servers are behind the ``version`` that a step began from, in versions. Those
    that hold none are left out."""
    lags = [max(0, version - own) for own in held if own is not None]
    return {names.LAG: statistics.fmean(lags), names.LAG_MAX: float(max(lags))} if lags else {}


def reward_values(groups: Sequence[Group], left_out: Sequence[float] = ()) -> dict[str, float]:
    """Figures of the rewards over completions; ``left_out``: of further ones."""
    rewards = [c.reward for g in groups for c in g.completions if sound_reward(c.reward)]
    rewards += left_out
    return {names.REWARD: statistics.fmean(rewards), names.REWARD_STD: statistics.pstdev(rewards)}


def group_values(groups: Sequence[Group], batch: Batch, version: int) -> dict[str, float]:
    """A step's figures of what it trains on: staleness over groups and over tokens, in versions."""
    staleness = [version - g.version for g in groups]
    spans = [span for g in groups for c in g.completions for span in c.token_spans]
    token_ages = sum((version - made_by) * tokens for made_by, tokens in spans)
    return {
        names.STALENESS: statistics.fmean(staleness),
        names.STALENESS_MAX: float(max(staleness)),
        names.STALENESS_TOKENS: token_ages / max(sum(tokens for _, tokens in spans), 1),
        names.COMPLETION_TOKENS: batch.tokens / batch.sequences,
        names.WORK_CV: variation(batch.work),
        names.WORK_CV_DEALT: variation(batch.dealt_work),
        names.BATCH_FILL: batch.fill,
    }
