"""The GRPO loss of one micro-batch, already normalised over the whole optimizer step: a sum of
terms per token.

    L = sum over tokens t of weights[t] * kept[t] * ( -is[t] * objective[t] + kl_beta * KL[t] +
    logit[t] - w_H * entropy[t] )

``weights`` carry the normalisation (see batch.py), so the loss of a step is the plain SUM over
ranks and micro-batches, and ranks' gradients are summed, never averaged (torchtitan's FSDP divide
factor is 1.0 already). docs/algorithm.md lists the terms.

The proximal policy. In the first optimizer step of a batch the policy before the step and the
policy that is differentiated are the same: unless ``old_logprobs`` is given, the proximal
log-probabilities are the current ones, detached. The ratio then has the VALUE 1 everywhere: only
its gradient matters, clipping never binds, and all the off-policy correction is in ``is``.

A micro-batch's tensors are [R, L]: ``labels``, ``weights``, ``rollout_logprobs``, ``advantages``
([R] too), ``sequence`` (int64, number of each token's sequence from 0 in the micro-batch, -1 is
padding; without it each row is one sequence), and, where they are needed, ``staleness`` (versions)
and ``on_policy`` (bool), both [R] too.
"""

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch

from titan_grpo.algorithm.advantages import scaled_advantages
from titan_grpo.algorithm.metrics import Metrics
from titan_grpo.algorithm.objective import (
    Correction,
    KLEstimator,
    Spans,
    Weights,
    cispo_objective,
    clipped_objective,
    interpolated,
    kl_estimate,
    policy_ratio,
    rollout_weights,
    spans_of,
)
from titan_grpo.algorithm.rows import IGNORE_INDEX, MicroBatch
from titan_grpo.config_grpo import GRPO
from titan_grpo.errors import ConfigError


class LogitTerms(NamedTuple):
    """What the loss needs of the whole distribution, each [R, L] with gradient; None where its
    weight is 0."""

    entropy: torch.Tensor | None = None
    """Nats, of the distribution at the sampling temperature (entropy.py)."""
    mean_square: torch.Tensor | None = None
    """Mean over the vocabulary of logit^2 (logits.py)."""


@dataclass(frozen=True, slots=True)
class LossSettings:
    """What the loss is made of, from ``[grpo]``."""

    objective: Literal["clip", "cispo"]
    ratio_level: Literal["token", "sequence"]
    low: float
    high: float
    proximal: Literal["recompute", "interpolate", "rollout"]
    pos_scaler: float
    neg_scaler: float
    correction: Correction
    kl_beta: float
    kl_estimator: KLEstimator
    entropy_weight: float
    logit_weight: float
    least_probability: float

    @classmethod
    def of(cls, g: GRPO) -> "LossSettings":
        """The settings of a validated section."""
        return cls(
            objective=g.policy_loss,
            ratio_level=g.policy_ratio_type,
            low=g.clip_ratio_lower_bound,
            high=g.clip_ratio_upper_bound,
            proximal=g.proximal_logprobs,
            pos_scaler=g.pos_scaler,
            neg_scaler=g.neg_scaler,
            correction=Correction(
                level=g.rollout_is_level,
                mode=g.rollout_is_mode,
                threshold=g.rollout_is_threshold,
                lower=g.rollout_is_threshold_lower,
                veto=g.rollout_is_veto_threshold,
            ),
            kl_beta=g.kl_beta,
            kl_estimator=g.kl_estimator_type,
            entropy_weight=g.entropy_loss_weight,
            logit_weight=g.logit_loss_weight,
            least_probability=g.onpolicy_logp_threshold,
        )


def grpo_loss(
    logprobs: torch.Tensor,
    batch: MicroBatch,
    options: GRPO,
    ref_logprobs: torch.Tensor | None = None,
    old_logprobs: torch.Tensor | None = None,
    logit_terms: LogitTerms = LogitTerms(),  # noqa: B008 - immutable
) -> tuple[torch.Tensor, Metrics]:
    """Loss (scalar with gradient) and metrics of one micro-batch; sum the losses, see metrics.py
    for the metrics.

    ``logprobs`` [R, L] are ``token_logprobs`` of the model, at the sampling temperature. ``batch``
    is one of ``build``'s, moved to the same device. ``ref_logprobs`` [R, L] belong to the reference
    model and are needed when ``options.kl_beta`` > 0; ``old_logprobs`` [R, L] to the policy before
    the batch's first optimizer step. Only the policy term is importance-weighted. An all-masked
    micro-batch gives a zero that still has a graph, so that every rank runs the same backward
    collectives.

    Raises ConfigError when a weight is not 0 and what it weights is not given.
    """
    s = LossSettings.of(options)
    _require(s, ref_logprobs, logit_terms)
    labelled = batch["labels"] != IGNORE_INDEX
    kept = labelled & _likely(logprobs, s.least_probability)
    spans = spans_of(kept, batch.get("sequence"))
    weights = batch["weights"].masked_fill(~kept, 0)
    advantages = scaled_advantages(_per_token(batch["advantages"]), s.pos_scaler, s.neg_scaler)

    old = _proximal(logprobs, batch, s, old_logprobs)
    ratio = policy_ratio(logprobs, old, spans, s.ratio_level)
    importance = rollout_weights(old, batch["rollout_logprobs"], spans, s.correction)
    terms = {"policy": -importance.weight * _objective(ratio, advantages, logprobs, s)}
    kl = kl_estimate(logprobs, ref_logprobs, s.kl_estimator) if ref_logprobs is not None else None
    if kl is not None:
        terms["kl"] = s.kl_beta * kl
    if logit_terms.mean_square is not None:
        terms["logit"] = s.logit_weight**2 * logit_terms.mean_square
    if logit_terms.entropy is not None:
        terms["entropy"] = -s.entropy_weight * logit_terms.entropy
    sums = {name: (weights * term).sum() for name, term in terms.items()}
    loss = torch.stack(list(sums.values())).sum()

    with torch.no_grad():
        metrics = _token_metrics(logprobs, batch["rollout_logprobs"], labelled, spans)
        metrics |= _ratio_metrics(ratio, importance, advantages, spans, s)
        metrics |= {"loss_sum": loss.detach().double()}
        metrics |= {f"{name}_loss_sum": value.detach().double() for name, value in sums.items()}
        metrics |= _on_policy_metrics(logprobs, batch, labelled)
        looked_at = {
            "kl": kl,
            "entropy": logit_terms.entropy,
            "logit_square": logit_terms.mean_square,
        }
        metrics |= {
            f"{n}_tokens_sum": v.masked_fill(~labelled, 0).sum().double()
            for n, v in looked_at.items()
            if v is not None
        }
    return loss, metrics


def _require(s: LossSettings, ref_logprobs: torch.Tensor | None, given: LogitTerms) -> None:
    if s.kl_beta > 0 and ref_logprobs is None:
        raise ConfigError(
            f"grpo.kl_beta = {s.kl_beta} needs a reference model's log-probabilities, got none"
        )
    if s.entropy_weight and given.entropy is None:
        raise ConfigError(
            f"grpo.entropy_loss_weight = {s.entropy_weight} needs the entropy of every token, got"
            " none"
        )
    if s.logit_weight and given.mean_square is None:
        raise ConfigError(
            f"grpo.logit_loss_weight = {s.logit_weight} needs the mean square of every token's"
            " logits, got none"
        )


def _per_token(values: torch.Tensor) -> torch.Tensor:
    """[R] becomes [R, 1]; [R, 1] and [R, L] stay."""
    return values.unsqueeze(-1) if values.ndim == 1 else values


def _likely(logprobs: torch.Tensor, least_probability: float) -> torch.Tensor:
    """Tokens that ``onpolicy_logp_threshold`` keeps: p >= threshold; 0 and 1 keep all, as in the
    existing trainer."""
    if not 0 < least_probability < 1:
        return torch.ones_like(logprobs, dtype=torch.bool)
    return logprobs.detach().exp() >= least_probability


def _proximal(
    logprobs: torch.Tensor, batch: MicroBatch, s: LossSettings, old_logprobs: torch.Tensor | None
) -> torch.Tensor:
    if old_logprobs is not None:
        return old_logprobs
    if s.proximal == "rollout":
        return batch["rollout_logprobs"]
    if s.proximal == "interpolate":
        return interpolated(logprobs, batch["rollout_logprobs"], _per_token(batch["staleness"]))
    return logprobs


def _objective(
    ratio: torch.Tensor, advantages: torch.Tensor, logprobs: torch.Tensor, s: LossSettings
) -> torch.Tensor:
    if s.objective == "cispo":
        return cispo_objective(ratio, advantages, logprobs, s.low, s.high)
    return clipped_objective(ratio, advantages, s.low, s.high)


def _token_metrics(
    logprobs: torch.Tensor, rollout: torch.Tensor, labelled: torch.Tensor, spans: Spans
) -> Metrics:
    """Counts, and trainer against engine: gap is the absolute difference of the two
    log-probabilities, per token."""
    difference = (logprobs - rollout).masked_fill(~labelled, 0)
    gap = difference.abs()
    return {
        "tokens_sum": labelled.sum().double(),
        "kept_tokens_sum": spans.mask.sum().double(),
        "sequences_sum": Spans(labelled, spans.sequence).count(),
        "logprob_tokens_sum": logprobs.masked_fill(~labelled, 0).sum().double(),
        "logprob_difference_tokens_sum": difference.sum().double(),
        "logprob_gap_tokens_sum": gap.sum().double(),
        "logprob_gap_max": gap.max().double(),
    }


def _on_policy_metrics(
    logprobs: torch.Tensor, batch: MicroBatch, labelled: torch.Tensor
) -> Metrics:
    """Trainer against engine on what the trainer's own version made (``batch["on_policy"]``,
    optional).

    There the gap is arithmetic alone (types, kernels, a wrong sync); elsewhere it is also what the
    policy learnt since.
    """
    own = batch.get("on_policy")
    if own is None:
        return {}
    chosen = labelled & _per_token(own)
    gap = (logprobs - batch["rollout_logprobs"]).abs().masked_fill(~chosen, 0)
    return {
        "on_policy_count_sum": chosen.sum().double(),
        "on_policy_gap_sum": gap.sum().double(),
        "on_policy_gap_max": gap.max().double(),
    }


def _ratio_metrics(
    ratio: torch.Tensor,
    importance: Weights,
    advantages: torch.Tensor,
    spans: Spans,
    s: LossSettings,
) -> Metrics:
    """Ratio and importance weight per token (a sequence's one counts for each of its tokens), and
    how often they were cut."""
    # CISPO bounds the ratio of every token, PPO only where the step would go further.
    either = torch.full_like(advantages, s.objective == "cispo", dtype=torch.bool)
    below, above = (
        (ratio < 1 - s.low) & (either | (advantages < 0)),
        (ratio > 1 + s.high) & (either | (advantages > 0)),
    )
    ratio, weight = ratio.masked_fill(~spans.mask, 0), importance.weight.masked_fill(~spans.mask, 0)
    return {
        "ratio_tokens_sum": ratio.sum().double(),
        "ratio_max": ratio.max().double(),
        "clipped_low_tokens_sum": (below & spans.mask).sum().double(),
        "clipped_high_tokens_sum": (above & spans.mask).sum().double(),
        "importance_tokens_sum": weight.sum().double(),
        "importance_max": weight.max().double(),
        "importance_capped_tokens_sum": importance.cut.sum().double(),
        "vetoed_tokens_sum": importance.vetoed.sum().double(),
    }
