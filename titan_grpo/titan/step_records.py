"""Records of a training step: its line of metrics.jsonl, completions for inspection, and both in
torchtitan's loggers (TensorBoard, W&B)."""

import html
import re
import statistics
from collections.abc import Callable, Mapping, Sequence
from math import isfinite
from typing import Any, NamedTuple

import torch

from titan_grpo.algorithm.advantages import by_episode
from titan_grpo.algorithm.balance import variation
from titan_grpo.algorithm.batch import Batch
from titan_grpo.algorithm.rows import IGNORE_INDEX
from titan_grpo.observe import names
from titan_grpo.observe.schema import Shown
from titan_grpo.rollout.messages import IN_FLIGHT
from titan_grpo.samples import Group, sound_reward

LOSS_VALUES = {
    names.LOSS: "loss",
    names.LOGPROB: "logprob",
    names.LOGPROB_MAX: "logprob_max",
    names.STALENESS_TOKENS: "staleness",
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
"""Name of a metric -> its name in the loss. A run omits those that it does not compute."""


def loss_values(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return a step's metrics of its loss, from the result of ``algorithm.loss.summarize``."""
    values = {name: metrics[key] for name, key in LOSS_VALUES.items() if key in metrics}
    values[names.CLIP_FRACTION] = metrics["clipped_low"] + metrics["clipped_high"]
    # The loss sums both over the tokens in it, ``summarize`` divides by all.
    kept = metrics.get("kept", 0)
    for name in {names.RATIO_MEAN, names.IMPORTANCE_MEAN} & values.keys():
        total = values.pop(name)
        if kept:  # else there is no token of which it would be the mean
            values[name] = total / kept
    if "minus_logprob_max" in metrics:
        values[names.LOGPROB_MIN] = -metrics["minus_logprob_max"]
    better, worse = (metrics.get(f"{name}_count", 0) for name in ("better", "worse"))
    if better and worse:
        values[names.LOGPROB_SEPARATION] = (
            metrics["better_logprob"] / better - metrics["worse_logprob"] / worse
        )
    if metrics["on_policy_count"] > 0:
        values[names.ON_POLICY_GAP] = metrics["on_policy_gap"] / metrics["on_policy_count"]
        values[names.ON_POLICY_GAP_MAX] = metrics["on_policy_gap_max"]
    for by, bounds in names.GAP_PARTS.items():
        for high in bounds:
            if count := metrics.get(f"gap_{by}_{high:g}_count", 0):
                values[names.gap(by, high)] = metrics[f"gap_{by}_{high:g}"] / count
    if metrics.get("replayed", 0) > 0:
        values[names.ROUTES_DIFFER] = metrics["routes_differ"] / metrics["replayed"]
    return values


def rollout_values(
    before: Mapping[str, int], now: Mapping[str, int], seconds: float, gpus: int = 0
) -> dict[str, float]:
    """Return the metrics of the rollouts between two readings of their counters, ``seconds`` apart.
    ``gpus``: number of all servers' GPUs; 0: unknown.

    Example: 600 tokens more in 3 s give ``rollout/generated_tokens_per_s`` 200.
    """
    new = {name: count - before.get(name, 0) for name, count in now.items()}
    values = {names.THROWN_TOKENS: float(new.get("thrown_tokens", 0))}
    if "ready" in now:
        values[names.READY_GROUPS] = float(now["ready"])
    if seconds > 0 and "tokens" in now:
        values[names.GENERATED] = new["tokens"] / seconds
        if gpus:
            values[names.GENERATED_PER_GPU] = values[names.GENERATED] / gpus
    if commits := new.get("commits", 0):
        values[names.IN_FLIGHT_AT_COMMIT] = new["in_flight_at_commits"] / commits
    running = {name.removeprefix(IN_FLIGHT): n for name, n in now.items() if IN_FLIGHT in name}
    if running:
        values[names.IN_FLIGHT] = float(sum(running.values()))
    for url, count in running.items():
        values[names.of_server(url, "in_flight")] = float(count)
        if seconds > 0:
            was, total = (counts.get(f"tokens.{url}", 0) for counts in (before, now))
            # One that left and came back counts from 0.
            made = total - was if total >= was else total
            values[names.of_server(url, "tokens_per_s")] = made / seconds
    return values


def server_values(version: int, held: Mapping[str, int | None]) -> dict[str, float]:
    """Return versions and lags of the servers at a step that began from ``version``, without
    servers that hold no version."""
    known = {url: own for url, own in held.items() if own is not None}
    lags = {url: float(max(0, version - own)) for url, own in known.items()}
    values = {names.VERSION: float(version)}
    if lags:
        values |= {names.LAG: statistics.fmean(lags.values()), names.LAG_MAX: max(lags.values())}
    for url, own in known.items():
        values[names.of_server(url, "version")] = float(own)
        values[names.of_server(url, "lag")] = lags[url]
    return values


def rewards_of(groups: Sequence[Group]) -> list[float]:
    """Return the rewards of all completions, of an agent's episode once."""
    scored = [each for group in groups for each in by_episode(group.completions)[0]]
    return [each.reward for each in scored if sound_reward(each.reward)]


def reward_values(groups: Sequence[Group], left_out: Sequence[float] = ()) -> dict[str, float]:
    """Return mean and deviation of the rewards of a step's groups and of those that it leaves out,
    and the mean of the step's alone."""
    kept = rewards_of(groups)
    rewards = [*kept, *left_out]
    return {
        names.REWARD: statistics.fmean(rewards),
        names.REWARD_STD: statistics.pstdev(rewards),
        names.REWARD_KEPT: statistics.fmean(kept),
    }


def group_values(
    groups: Sequence[Group], batch: Batch, version: int, kv_kept: bool
) -> dict[str, float]:
    """Return the metrics of a step's groups and batch; staleness is in versions, lengths are of
    whole episodes. ``kv_kept``: running requests keep their KV across a commit."""
    completions = [c for g in groups for c in g.completions]
    staleness = [version - g.version for g in groups]
    episodes = [each for g in groups for each in by_episode(g.completions)[0]]
    kept = [kv_kept and c.version_first < c.version_last for c in completions]
    return {
        names.STALENESS: statistics.fmean(staleness),
        names.KEPT_KV: statistics.fmean(kept),
        names.STALENESS_MAX: float(max(staleness)),
        names.COMPLETION_TOKENS: statistics.fmean(each.tokens for each in episodes),
        names.TRAINED_TOKENS: float(sum(batch.trained)),
        names.TRAINED_SEQUENCES: float(len(batch.trained)),
        names.WORK_CV: variation(batch.work),
        names.WORK_CV_DEALT: variation(batch.dealt_work),
        names.BATCH_FILL: batch.fill,
    }


COLUMNS = ("reward", "versions", "server", "gap", "prompt", "completion")
"""Columns of a table of completions."""

Row = tuple[float, str, str, float, str, str]

SequenceKey = tuple[int, ...]
"""Prompt and completion tokens of a sequence."""


class FirstBatch(NamedTuple):
    """A rank's first micro-batch of a step, each [R, L], int64 or float32, detached. ``logprobs``
    are the policy's before the batch's first optimizer step."""

    inputs: torch.Tensor
    labels: torch.Tensor
    sequence: torch.Tensor
    logprobs: torch.Tensor


def sequences(batch: FirstBatch) -> dict[SequenceKey, list[float | None]]:
    """Return the policy's log-probability of each token of each sequence; None for tokens that are
    no label (the prompt, a tool's answer). Waits for the device.

    Omits a sequence whose last token is no label: the batch does not have that token. Example:
    inputs 5 6 7, labels -100 7 8, log-probabilities (any), -1, -2 ->
    {(5, 6, 7, 8): [None, None, -1, -2]}.
    """
    inputs, labels, numbers = (x.reshape(-1).tolist() for x in batch[:3])
    logprobs = batch.logprobs.reshape(-1).float().tolist()
    out: dict[SequenceKey, list[float | None]] = {}
    start = 0
    for at in range(1, len(numbers) + 1):
        if at < len(numbers) and numbers[at] == numbers[start]:
            continue
        if numbers[start] >= 0 and labels[at - 1] != IGNORE_INDEX:
            own = [
                None
                if labels[k] == IGNORE_INDEX or not isfinite(logprobs[k])
                else round(logprobs[k], 4)
                for k in range(start, at)
            ]
            out[(*inputs[start:at], labels[at - 1])] = [None, *own]
        start = at
    return out


def shown(
    groups: Sequence[Group], trained: Mapping[SequenceKey, list[float | None]]
) -> list[Shown]:
    """Return the completions of ``groups`` that are among the ``trained`` sequences, in order."""
    out = []
    for group in groups:
        prompt = list(group.prompt.token_ids)
        for c in group.completions:
            own = trained.get((*prompt, *c.token_ids))
            if own is not None:
                engine = [round(logprob, 4) for logprob in c.logprobs]
                tokens, after = list(c.token_ids), own[len(prompt) :]
                versions = c.version_first, c.version_last
                out.append(Shown(c.server, c.reward, *versions, prompt, tokens, engine, after))
    return out


def rows(chosen: Sequence[Shown], decode: Callable[[Sequence[int]], str]) -> list[Row]:
    """Return completions as rows of ``COLUMNS``."""
    return [
        (
            each.reward,
            f"{each.version_first} to {each.version_last}",
            each.server,
            each.gap,
            decode(each.prompt),
            decode(each.tokens),
        )
        for each in chosen
    ]


MAX_LOSS = "loss_metrics/global_max_loss"
"""torchtitan's name for the largest mean loss of a rank. A loss here is normalised over all ranks'
tokens or sequences: a rank's part of it is no mean."""


class Dispensable:
    """Wrapper of a torchtitan logger (TensorBoard, W&B). Its first error is reported and stops this
    logger only, not the run (a full disk, a lost network); metrics.jsonl has all values."""

    def __init__(self, inner: Any, warn: Callable[[str], None]) -> None:
        self._inner, self._warn = inner, warn
        self._failed = False

    def log(self, metrics: dict[str, Any], step: int) -> None:
        """Log as torchtitan's BaseLogger.log, without MAX_LOSS; do nothing after an error."""
        if not self._failed:
            values = {name: value for name, value in metrics.items() if name != MAX_LOSS}
            self._run(lambda: self._inner.log(values, step), f"at step {step}")

    def table(self, rows: Sequence[Row], step: int) -> None:
        """Log completions as a table if the logger has tables; do nothing after an error."""
        if not self._failed:
            self._run(lambda: _table(self._inner, rows, step), f"at step {step}")

    def close(self) -> None:
        """Close the logger, also after an error: it may still write what it has."""
        self._run(self._inner.close, "at its end")

    def _run(self, call: Callable[[], None], when: str) -> None:
        try:
            call()
        except Exception as error:  # noqa: BLE001 - the boundary to a plugin, W&B raises its own
            if self._failed:
                return
            self._failed = True
            name = type(self._inner).__name__
            self._warn(
                f"{name} failed {when} and gets nothing more: {type(error).__name__}: {error};"
                " training goes on, metrics.jsonl has all values"
            )


def make_dispensable(processor: Any, warn: Callable[[str], None]) -> None:
    """Wrap each logger of torchtitan's metrics processor, so that their failures are
    independent."""
    inner = processor.logger
    if hasattr(inner, "_loggers"):
        inner._loggers = [Dispensable(each, warn) for each in inner._loggers]
    else:
        processor.logger = Dispensable(inner, warn)


NO_WANDB = (
    "metrics.enable_wandb: torchtitan made no logger of W&B (a line of the start says why), so W&B"
    " gets nothing; training goes on, metrics.jsonl has all values"
)


def lacks_wandb(processor: Any) -> bool:
    """Return whether a processor that ``make_dispensable`` has wrapped logs on this rank, but not
    in W&B. Where torchtitan cannot make that logger, a line of the start is all that says so."""
    loggers = getattr(processor.logger, "_loggers", None)
    return loggers is not None and not any(hasattr(each._inner, "wandb") for each in loggers)


def log_table(processor: Any, rows: Sequence[Row], step: int) -> None:
    """Log completions in each logger of a processor that ``make_dispensable`` has wrapped."""
    for each in getattr(processor.logger, "_loggers", [processor.logger]):
        each.table(rows, step)


def _table(inner: Any, rows: Sequence[Row], step: int) -> None:
    name = f"{inner.tag}/completions" if getattr(inner, "tag", None) else "completions"
    if hasattr(inner, "writer"):  # TensorBoard's
        inner.writer.add_text(name, markdown(rows), step)
    elif hasattr(inner, "wandb"):
        table = inner.wandb.Table(columns=list(COLUMNS), data=[list(row) for row in rows])
        inner.wandb.log({name: table}, step=step)


def markdown(rows: Sequence[Row]) -> str:
    """Return a Markdown table for TensorBoard's text page, with all markup in completions escaped.

    Example: the cell ``a|b``, a line break, ``<i>`` -> ``a&#124;b⏎&lt;i&gt;``.
    """

    def cell(value: object) -> str:
        text = html.escape(f"{value:.4g}" if isinstance(value, float) else str(value), quote=False)
        marks = re.sub(r"[|*_`\[\]\\]", lambda found: f"&#{ord(found[0])};", text)
        return marks.replace("\n", "⏎")

    lines = [COLUMNS, ["---"] * len(COLUMNS), *([cell(value) for value in row] for row in rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
