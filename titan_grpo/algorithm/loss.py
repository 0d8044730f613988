"""GRPO loss of one micro-batch, normalised over the whole optimizer step: a sum of terms per token.

    L = sum over tokens t of weights[t] * kept[t] * ( -is[t] * objective[t] + kl_beta * KL[t] +
    logit[t] - w_H * entropy[t] )

``weights`` carry the normalisation (see batch.py): the loss of a step is the plain SUM over ranks
and micro-batches. Gradients of ranks are summed, never averaged (torchtitan's FSDP divide factor is
1.0 already). docs/algorithm.md lists the terms.

In the first optimizer step of a batch, the current policy is also the policy before the step:
unless ``old_logprobs`` is given, the proximal log-probabilities are the current ones, detached (see
``_proximal`` for the exceptions). The ratio then has the VALUE 1 everywhere: only its gradient
matters, clipping never binds, and ``is`` is the whole off-policy correction. With one optimizer
step per batch the bounds of the ratio therefore do nothing (config/inert.py warns at the start).

Below the loss: reduction of its metrics over micro-batches and ranks, and the checks before a step.
A metric's suffix is its reduction: ``*_sum`` addition, ``*_max`` maximum. Values are float64
scalars on the loss's device: no host sync until the end.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from titan_grpo.algorithm.objective import (
    Policy,
    Spans,
    interpolated,
    kl_estimate,
    kl_returns,
    kl_term,
    policy_objective,
)
from titan_grpo.algorithm.rows import IGNORE_INDEX, MicroBatch
from titan_grpo.config.grpo import GRPO
from titan_grpo.errors import ConfigError, ProtocolError
from titan_grpo.observe.names import GAP_PARTS

Metrics = dict[str, torch.Tensor]


class LogitTerms(NamedTuple):
    """Terms over the whole vocabulary, each [R, L] with gradient; None if its weight is 0."""

    entropy: torch.Tensor | None = None
    """Nats, of the distribution at the sampling temperature."""
    mean_square: torch.Tensor | None = None
    """Mean over the vocabulary of logit^2."""


def grpo_loss(
    logprobs: torch.Tensor,
    batch: MicroBatch,
    grpo: GRPO,
    ref_logprobs: torch.Tensor | None = None,
    old_logprobs: torch.Tensor | None = None,
    logit_terms: LogitTerms = LogitTerms(),  # noqa: B008 - immutable
) -> tuple[torch.Tensor, Metrics]:
    """Return loss (scalar with gradient) and metrics of one micro-batch; sum the losses,
    ``accumulate`` the metrics.

    Args:
        logprobs: [R, L], ``token_logprobs`` of the model at the sampling temperature.
        batch: one of ``build``'s on the same device, with ``staleness`` (versions between a token
            and the trainer) and ``on_policy`` (bool: the sequence is of the trainer's own version),
            [R, L]; optional ``high_entropy``, ``outside_m2`` (bool [R, L]), which restrict the
            policy term.
        ref_logprobs: [R, L] of the reference model; needed if ``grpo.kl_beta`` > 0.
        old_logprobs: [R, L] of the policy before the batch's first optimizer step.

    An all-masked micro-batch gives a zero with a graph, so that every rank runs the same backward
    collectives. Raises ConfigError if a weight is not 0 and its term is missing.
    """
    for key, given in (
        ("kl_beta", ref_logprobs),
        ("entropy_loss_weight", logit_terms.entropy),
        ("logit_loss_weight", logit_terms.mean_square),
    ):
        if getattr(grpo, key) and given is None:
            raise ConfigError(
                f"grpo.{key} = {getattr(grpo, key)} needs its term per token, got none"
            )
    rollout = batch["rollout_logprobs"]
    labelled = batch["labels"] != IGNORE_INDEX
    spans = kept_tokens(logprobs, batch, grpo)
    weights = batch["weights"].masked_fill(~spans.mask, 0)
    advantages = token_advantages(logprobs, batch, spans, grpo, ref_logprobs)

    observed = {}
    if ref_logprobs is not None and grpo.kl_in_reward:
        observed["kl"] = kl_estimate(logprobs, ref_logprobs, "k1")
    elif ref_logprobs is not None:
        observed["kl"] = kl_term(logprobs, ref_logprobs, rollout, grpo.kl_estimator_type)
    old = _proximal(logprobs, batch, grpo) if old_logprobs is None else old_logprobs
    policy = policy_objective(logprobs, old, rollout, advantages, spans, grpo)
    if (outside := batch.get("outside_m2")) is not None:
        policy = policy.without(outside & spans.mask)

    terms = {"policy": -policy.importance.weight * policy.objective}
    if (high_entropy := batch.get("high_entropy")) is not None:
        terms["policy"] = terms["policy"].masked_fill(~high_entropy, 0)
    if ref_logprobs is not None and not grpo.kl_in_reward:
        terms["kl"] = grpo.kl_beta * observed["kl"]
    if logit_terms.mean_square is not None:
        observed["logit_square"] = logit_terms.mean_square
        terms["logit"] = grpo.logit_loss_weight**2 * logit_terms.mean_square
    if logit_terms.entropy is not None:
        observed["entropy"] = logit_terms.entropy
        terms["entropy"] = -grpo.entropy_loss_weight * logit_terms.entropy
    sums = {name: (weights * term).sum() for name, term in terms.items()}
    loss = torch.stack(list(sums.values())).sum()

    with torch.no_grad():
        metrics = {"loss_sum": loss.detach().double()}
        metrics |= {f"{name}_loss_sum": value.detach().double() for name, value in sums.items()}
        metrics |= {
            f"{name}_tokens_sum": value.masked_fill(~labelled, 0).sum().double()
            for name, value in observed.items()
        }
        metrics |= _token_metrics(logprobs, batch, labelled, spans)
        metrics |= _ratio_metrics(policy, advantages, spans, grpo)
    return loss, metrics


def kept_tokens(logprobs: torch.Tensor, batch: MicroBatch, grpo: GRPO) -> Spans:
    """Return the completion tokens that ``onpolicy_logp_threshold`` and ``token_staleness_limit``
    leave in every term, ratio and weight."""
    kept = batch["labels"] != IGNORE_INDEX
    if 0 < grpo.onpolicy_logp_threshold < 1:
        kept = kept & (logprobs.detach().exp() >= grpo.onpolicy_logp_threshold)
    if grpo.token_staleness_limit >= 0:
        kept = kept & (batch["staleness"] <= grpo.token_staleness_limit)
    return Spans(kept, batch["sequence"])


def token_advantages(
    logprobs: torch.Tensor,
    batch: MicroBatch,
    spans: Spans,
    grpo: GRPO,
    ref_logprobs: torch.Tensor | None,
) -> torch.Tensor:
    """Return the advantage of each token in the loss: scaled by its sign, and with
    ``kl_in_reward`` less the KL from the token on. No gradient."""
    advantages = batch["advantages"]
    scaled = advantages * grpo.pos_scaler, advantages * grpo.neg_scaler
    advantages = torch.where(advantages > 0, *scaled)
    if ref_logprobs is None or not grpo.kl_in_reward:
        return advantages
    return advantages - grpo.kl_beta * kl_returns(logprobs, ref_logprobs, spans)


def _proximal(logprobs: torch.Tensor, batch: MicroBatch, grpo: GRPO) -> torch.Tensor:
    """Return the proximal log-probabilities of the first optimizer step of a batch."""
    if grpo.proximal_logprobs == "rollout":
        return batch["rollout_logprobs"]
    if grpo.proximal_logprobs == "interpolate":
        return interpolated(logprobs, batch["rollout_logprobs"], batch["staleness"])
    return logprobs


def _token_metrics(
    logprobs: torch.Tensor, batch: MicroBatch, labelled: torch.Tensor, spans: Spans
) -> Metrics:
    """Return counts, and the gap: the absolute difference of trainer's and engine's log-probability
    per token.

    On tokens of the trainer's own version (``batch["on_policy"]``) the gap comes from arithmetic
    only (types, kernels) or a wrong sync; on others also from what the policy learnt since.
    """
    difference = (logprobs - batch["rollout_logprobs"]).masked_fill(~labelled, 0)
    gap = difference.abs()
    own = labelled & batch["on_policy"]
    own_gap = gap.masked_fill(~own, 0)
    metrics = {
        "tokens_sum": labelled.sum().double(),
        "kept_tokens_sum": spans.mask.sum().double(),
        "staleness_tokens_sum": batch["staleness"].masked_fill(~labelled, 0).sum().double(),
        "logprob_tokens_sum": logprobs.masked_fill(~labelled, 0).sum().double(),
        # Extremes are reduced by maximum only, so the least log-probability is stored negated.
        # Without a token both are minus infinity.
        "logprob_max": logprobs.masked_fill(~labelled, -math.inf).max().double(),
        "minus_logprob_max": (-logprobs).masked_fill(~labelled, -math.inf).max().double(),
        "logprob_difference_tokens_sum": difference.sum().double(),
        "logprob_gap_tokens_sum": gap.sum().double(),
        "logprob_gap_max": gap.max().double(),
        "on_policy_count_sum": own.sum().double(),
        "on_policy_gap_sum": own_gap.sum().double(),
        "on_policy_gap_max": own_gap.max().double(),
    }
    metrics |= _separation(logprobs, batch["advantages"], labelled)
    return metrics | _gap_parts(gap, batch, labelled, spans)


def _separation(
    logprobs: torch.Tensor, advantages: torch.Tensor, labelled: torch.Tensor
) -> Metrics:
    """Return sums and counts of the log-probabilities at positive and at negative advantages."""
    out: Metrics = {}
    for name, part in (("better", advantages > 0), ("worse", advantages < 0)):
        chosen = labelled & part
        out[f"{name}_logprob_sum"] = logprobs.masked_fill(~chosen, 0).sum().double()
        out[f"{name}_count_sum"] = chosen.sum().double()
    return out


def _gap_parts(
    gap: torch.Tensor, batch: MicroBatch, labelled: torch.Tensor, spans: Spans
) -> Metrics:
    """Return gap and token count for each of ``GAP_PARTS``: by place in the completion (context
    does not count), by the engine's probability, and by the token's staleness in versions."""
    seen = labelled.flatten().cumsum(0)
    number = spans.sequence.flatten() + 1  # 0: padding
    first = seen.new_full((seen.numel() + 1,), seen.numel())
    first = first.scatter_reduce(0, number, seen - labelled.flatten().long(), "amin")
    values = {
        "position": (seen - first[number]).view_as(gap),
        "probability": batch["rollout_logprobs"].exp(),
        "lag": batch["staleness"],
    }
    out: Metrics = {}
    for by, value in values.items():
        low = -math.inf
        for high in GAP_PARTS[by]:
            part = labelled & (value > low) & (value <= high)
            out[f"gap_{by}_{high:g}_sum"] = gap.masked_fill(~part, 0).sum().double()
            out[f"gap_{by}_{high:g}_count_sum"] = part.sum().double()
            low = high
    return out


def _ratio_metrics(policy: Policy, advantages: torch.Tensor, spans: Spans, grpo: GRPO) -> Metrics:
    """Return metrics of ratio and importance weight per token (a sequence's value counts for each
    of its tokens), and how often they were cut: the ratio only in losses that clip it, and where it
    is past its bound in the advantage's direction."""
    clipped = spans.mask & (grpo.policy_loss in ("clip", "gmpo"))
    below = clipped & (policy.ratio < 1 - grpo.clip_ratio_lower_bound) & (advantages < 0)
    above = clipped & (policy.ratio > 1 + grpo.clip_ratio_upper_bound) & (advantages > 0)
    ratio = policy.ratio.masked_fill(~spans.mask, 0)
    weight = policy.importance.weight.masked_fill(~spans.mask, 0)
    return {
        "ratio_tokens_sum": ratio.sum().double(),
        "ratio_max": ratio.max().double(),
        "clipped_low_tokens_sum": below.sum().double(),
        "clipped_high_tokens_sum": above.sum().double(),
        "importance_tokens_sum": weight.sum().double(),
        "importance_max": weight.max().double(),
        "importance_capped_tokens_sum": policy.importance.cut.sum().double(),
        "vetoed_tokens_sum": policy.importance.vetoed.sum().double(),
    }


def accumulate(parts: Sequence[Mapping[str, torch.Tensor]]) -> Metrics:
    """Reduce the metrics of several micro-batches (or ranks) to one dict. Raises ProtocolError
    unless all have the same names."""
    for part in parts:
        if part.keys() != parts[0].keys():
            raise ProtocolError(
                "metrics of one step must have the same names, got"
                f" {sorted(part.keys() ^ parts[0].keys())}"
            )
    stacked = {name: torch.stack([part[name] for part in parts]) for name in parts[0]}
    return {
        name: values.amax() if name.endswith("_max") else values.sum()
        for name, values in stacked.items()
    }


def pack(metrics: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (sums, maxima): two float64 vectors in sorted order of names, so that two all-reduces
    are enough for all metrics. A NaN maximum becomes infinite: gloo passes over NaN of all ranks
    but the first."""
    sums = [metrics[name] for name in sorted(metrics) if not name.endswith("_max")]
    maxima = [metrics[name] for name in sorted(metrics) if name.endswith("_max")]
    most = torch.stack(maxima)
    return torch.stack(sums), most.masked_fill(most.isnan(), math.inf)


def unpack(names: Sequence[str], sums: torch.Tensor, maxima: torch.Tensor) -> Metrics:
    """Invert ``pack`` for the same set of names."""
    ordered = sorted(names)
    out = dict(zip((n for n in ordered if not n.endswith("_max")), sums.unbind(), strict=True))
    return out | dict(zip((n for n in ordered if n.endswith("_max")), maxima.unbind(), strict=True))


def summarize(metrics: Mapping[str, torch.Tensor]) -> dict[str, float]:
    """Return one step's numbers from fully reduced metrics.

    ``X_tokens_sum`` becomes ``X``, a mean over completion tokens (0 without tokens); ``X_sum``
    becomes ``X``; ``X_max`` stays.

    Example: tokens_sum 4, logprob_gap_tokens_sum 0.2, logprob_gap_max 0.1 -> tokens 4.0,
    logprob_gap 0.05, logprob_gap_max 0.1.
    """
    values = {name: float(value) for name, value in metrics.items()}
    tokens = max(values.get("tokens_sum", 0.0), 1.0)
    out: dict[str, float] = {}
    for name, value in values.items():
        if name.endswith("_tokens_sum"):
            out[name.removesuffix("_tokens_sum")] = value / tokens
        else:
            out[name.removesuffix("_sum")] = value
    return out


REASONS = (
    "the loss is not finite",
    "the gradient is not finite",
    "the gradient norm is past grpo.grad_norm_limit",
    "all rewards were equal for grpo.reward_collapse_steps steps in a row",
)
"""Meaning of each of ``flags``."""


def flags(
    loss: torch.Tensor, grad_norm: torch.Tensor, grad_norm_limit: float, collapsed: bool
) -> torch.Tensor:
    """Return float32 [4] on the loss's device, 1 where REASONS holds on this rank. No host sync.

    All-reduce it with MAX: if one rank skips a step, all ranks must. ``grad_norm``: before
    clipping. A ``grad_norm_limit`` of 0 allows any.
    """
    norm = grad_norm.to(loss.device)
    finite = torch.isfinite(norm)
    large = finite & (norm > grad_norm_limit) if grad_norm_limit > 0 else torch.zeros_like(finite)
    found = [~torch.isfinite(loss), ~finite, large, torch.full_like(finite, collapsed)]
    return torch.stack([flag.reshape(()) for flag in found]).to(torch.float32)


def reasons(reduced: Sequence[float]) -> tuple[str, ...]:
    """Return why the step must be skipped, from all-reduced flags; empty if it may be taken."""
    return tuple(reason for flag, reason in zip(reduced, REASONS, strict=True) if flag > 0)


@dataclass(frozen=True, slots=True)
class Collapse:
    """Count of steps in a row in which all rewards were equal."""

    limit: int
    """Steps in a row that count as collapse; 0: never."""

    flat_steps: int = 0

    @property
    def collapsed(self) -> bool:
        """Whether the limit is reached."""
        return 0 < self.limit <= self.flat_steps

    def after(self, rewards: Sequence[float]) -> "Collapse":
        """Return the count after one more step; one with different rewards resets it."""
        flat = not rewards or min(rewards) == max(rewards)
        return replace(self, flat_steps=self.flat_steps + 1 if flat else 0)
