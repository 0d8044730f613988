"""The loss of one sequence in float64, written from the papers' formulas with plain autograd.

It knows nothing of rows, masks, chunks, sequence numbers or micro-batches, and shares no code with
what it checks.
"""

import math
from dataclasses import dataclass

import torch

from titan_grpo.config.grpo import GRPO


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
    staleness: torch.Tensor
    """Versions between each token and the policy."""


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
    elif g.proximal_logprobs == "interpolate":
        prox = now.clone()
        for t, age in enumerate(sequence.staleness.tolist()):
            if age > 0:
                alpha = (age - 1) / age
                prox[t] = sequence.engine[t] + alpha * (now[t] - sequence.engine[t])
    else:
        prox = now
    kept = [
        t
        for t in range(len(now))
        if not 0 < g.onpolicy_logp_threshold < 1 or now[t].exp() >= g.onpolicy_logp_threshold
        if g.token_staleness_limit < 0 or sequence.staleness[t] <= g.token_staleness_limit
    ]
    if not kept:
        return 0 * z.sum()
    own = [logp[t] for t in kept]
    before = [prox[t].item() for t in kept]
    engine = [sequence.engine[t].item() for t in kept]
    reference = [sequence.reference[t].item() for t in kept]
    advantage = sequence.advantage * (g.pos_scaler if sequence.advantage > 0 else g.neg_scaler)
    total = 0 * z.sum()
    for at, t in enumerate(kept):
        taken = advantage
        if g.kl_beta and g.kl_in_reward:
            taken += g.kl_beta * sum(reference[u] - own[u].item() for u in range(at, len(kept)))
        term = _policy(own, before, engine, at, taken, g)
        if g.kl_beta and not g.kl_in_reward:
            term = term + g.kl_beta * _kl(own[at], reference[at], engine[at], g.kl_estimator_type)
        term = term + ((g.logit_loss_weight * z[t]) ** 2).sum() / words
        minus_entropy = sum(logp_all[t, j].exp() * logp_all[t, j] for j in range(words))
        total = total + sequence.weights[t] * (term + g.entropy_loss_weight * minus_entropy)
    return total


def _policy(
    logp: list[torch.Tensor],
    prox: list[float],
    engine: list[float],
    at: int,
    advantage: float,
    g: GRPO,
) -> torch.Tensor:
    """What is minimised of the policy loss at one of a sequence's kept tokens."""
    behaviour = [(p - q).item() for p, q in zip(logp, engine, strict=True)]
    if g.policy_loss == "cispo":
        return -min(math.exp(behaviour[at]), g.cispo_weight_max) * advantage * logp[at]
    if g.policy_loss == "topr":
        tapered = 1.0 if advantage >= 0 else min(math.exp(min(max(sum(behaviour), -20), 20)), 1.0)
        return -tapered * advantage * logp[at]
    ratios = [torch.exp(p - q) for p, q in zip(logp, prox, strict=True)]
    low, high = 1 - g.clip_ratio_lower_bound, 1 + g.clip_ratio_upper_bound
    if g.policy_loss == "sapo":
        tau = g.sapo_tau_pos if advantage > 0 else g.sapo_tau_neg
        objective = advantage * 4 / tau / (1 + torch.exp(-tau * (ratios[at] - 1)))
    elif g.policy_loss == "gmpo":
        bounded = [min(r, high + 0 * r) if advantage > 0 else max(r, low + 0 * r) for r in ratios]
        objective = advantage * torch.stack(bounded).prod() ** (1 / len(bounded))
    else:
        ratio = ratios[at]
        if g.policy_ratio_type == "sequence":
            ratio = torch.stack(ratios).prod() ** (1 / len(ratios))
        if advantage >= 0:
            objective = advantage * (ratio if ratio <= high else high + 0 * ratio)
        elif g.clip_ratio_dual and ratio > g.clip_ratio_dual:
            objective = advantage * (g.clip_ratio_dual + 0 * ratio)
        else:
            objective = advantage * (ratio if ratio >= low else low + 0 * ratio)
    weight = _importance([p - q for p, q in zip(prox, engine, strict=True)], g)[at]
    return -weight * objective


def _kl(logp: torch.Tensor, reference: float, engine: float, estimator: str) -> torch.Tensor:
    """KL term of one token."""
    x = reference - logp
    ratio = torch.exp(logp - engine)
    ratio = ratio if ratio <= 10 else 10 + 0 * ratio
    weighted = {"k2": ratio.item() * x * x / 2, "k3": ratio * (torch.exp(x) - 1 - x)}
    weighted["mse"] = weighted["k2"]
    return weighted.get(estimator, -x if estimator == "k1" else x.abs())


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
