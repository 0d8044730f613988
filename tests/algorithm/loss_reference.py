"""The loss of one sequence in float64, written from the papers' formulas with plain autograd.

It knows nothing of rows, masks, chunks, sequence numbers or micro-batches, and shares no code with
what it checks.
"""

import math
from dataclasses import dataclass

import torch

from titan_grpo.config_grpo import GRPO


@dataclass
class Sequence:
    """One completion of n tokens; every tensor is [n]."""

    tokens: torch.Tensor
    old: torch.Tensor
    """Log-probabilities of the policy before the batch."""
    engine: torch.Tensor
    reference: torch.Tensor
    weights: torch.Tensor
    advantage: float
    staleness: int


def sequence_loss(
    sequence: Sequence, z: torch.Tensor, temperature: float, g: GRPO, old_given: bool
) -> torch.Tensor:
    """Loss of one sequence whose logits are ``z`` [n, words]; ``old_given``: a later optimizer step
    of a batch."""
    words = z.shape[-1]
    logp_all = torch.log_softmax(z / temperature, -1)
    logp = torch.stack([logp_all[t, token] for t, token in enumerate(sequence.tokens)])
    now = logp.detach()
    if old_given:
        prox = sequence.old
    elif g.proximal_logprobs == "rollout":
        prox = sequence.engine
    elif g.proximal_logprobs == "interpolate" and sequence.staleness > 0:
        alpha = (sequence.staleness - 1) / sequence.staleness
        prox = sequence.engine + alpha * (now - sequence.engine)
    else:
        prox = now
    kept = [
        t
        for t in range(len(now))
        if not 0 < g.onpolicy_logp_threshold < 1 or now[t].exp() >= g.onpolicy_logp_threshold
    ]
    if not kept:
        return 0 * z.sum()
    advantage = sequence.advantage * (g.pos_scaler if sequence.advantage > 0 else g.neg_scaler)
    importance = _importance([(prox[t] - sequence.engine[t]).item() for t in kept], g)
    total = 0 * z.sum()
    gspo = torch.exp(sum(logp[t] - prox[t] for t in kept) / len(kept))
    for t, weight in zip(kept, importance, strict=True):
        ratio = gspo if g.policy_ratio_type == "sequence" else torch.exp(logp[t] - prox[t])
        low, high = 1 - g.clip_ratio_lower_bound, 1 + g.clip_ratio_upper_bound
        if g.policy_loss == "cispo":
            objective = min(max(ratio.item(), low), high) * advantage * logp[t]
        elif advantage >= 0:
            objective = advantage * (ratio if ratio <= high else high + 0 * ratio)
        else:
            objective = advantage * (ratio if ratio >= low else low + 0 * ratio)
        term = -weight * objective
        x = sequence.reference[t] - logp[t]
        kl = {"k1": -x, "k2": x * x / 2, "k3": torch.exp(x) - 1 - x, "mse": x * x / 2}
        term = term + g.kl_beta * kl.get(g.kl_estimator_type, x.abs())
        term = term + ((g.logit_loss_weight * z[t]) ** 2).sum() / words
        minus_entropy = sum(logp_all[t, j].exp() * logp_all[t, j] for j in range(words))
        total = total + sequence.weights[t] * (term + g.entropy_loss_weight * minus_entropy)
    return total


def _importance(differences: list[float], g: GRPO) -> list[float]:
    """Weight of each kept token, from log p_prox - log p_engine of all of them."""
    if g.rollout_is_threshold == 0:
        return [1.0] * len(differences)
    veto = g.rollout_is_veto_threshold
    if veto > 0 and any(math.exp(x) < veto for x in differences):
        return [0.0] * len(differences)
    out = []
    for difference in differences:
        level = {"token": difference, "sequence": sum(differences)}.get(
            g.rollout_is_level, sum(differences) / len(differences)
        )
        w = math.exp(min(max(level, -20), 20))
        lower = g.rollout_is_threshold_lower or 1 / g.rollout_is_threshold
        if g.rollout_is_mode == "truncate":
            w = min(w, g.rollout_is_threshold)
        elif not lower <= w <= g.rollout_is_threshold:
            w = 0.0
        out.append(w)
    return out
