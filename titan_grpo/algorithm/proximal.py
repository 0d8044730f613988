"""The proximal policy: what the clipped ratio is measured against (decoupled PPO, Hilton et al., arXiv 2110.00641).

The data's policy is corrected for by a weight (correction.py), the step's size is bounded against the proximal policy. That
one is best the policy right before the batch: recomputed by a forward pass, or the current policy itself for the first
optimizer step of a batch.
"""

import torch


def interpolated(logprobs: torch.Tensor, rollout_logprobs: torch.Tensor, staleness: torch.Tensor) -> torch.Tensor:
    """Proximal log-probabilities without a forward pass, from version numbers; no gradient.

    With s the trainer's version minus the token's, the policy one version back is taken to lie at the fraction (s - 1) / s of
    the way from the engine's log-probability to the current one (log-linear, as in AReaL's proximal approximation and A-3PO,
    arXiv 2512.06547):

        log p_prox = log p_engine / s + (1 - 1 / s) * log p_current    for s >= 1,    log p_current for s <= 0.

    ``staleness`` [R, L] in versions. Example: s = 1 gives the engine's, s = 2 the mean of the two.
    """
    share = torch.where(staleness > 0, 1 / staleness.clamp(min=1), 0.0).to(logprobs.dtype)
    current = logprobs.detach()
    return current + share * (rollout_logprobs - current)
