"""From when a difference of trainer and engine is more than arithmetic, and what most likely makes
it. Pure."""

import math
from collections.abc import Mapping

from titan_grpo.observe import names

ON_POLICY_GAP = 0.05
"""Nats between trainer and engine on tokens of the same weights, a mean."""
GREW = 2.0
"""A gap in the last fifth of the steps over that in the first from which it has grown."""
LEAST_GAP = 0.01
"""Nats below which a gap is arithmetic of bfloat16, whatever it was before."""


def likely_cause(last: Mapping[str, float]) -> str:
    """What most likely makes a gap, from the parts of the tokens in which it is large. Order: what
    explains the others too comes first."""
    fresh, old = last.get(names.gap("lag", 0)), last.get(names.gap("lag", math.inf))
    old = last.get(names.gap("lag", 2), old)
    old = last.get(names.gap("lag", 1), old)
    if old is not None and (fresh or 0.0) < min(LEAST_GAP, old / GREW):
        return (
            "only tokens of older versions differ, so it is what the policy learnt since: a lower"
            " rollout.max_staleness or a lower learning rate makes it smaller"
        )
    places = [last.get(names.gap("position", high)) for high in (16, 128, 1024, 8192, math.inf)]
    found = [gap for gap in places if gap is not None]
    if len(found) > 1 and found[-1] >= GREW * max(found[0], LEAST_GAP / GREW):
        return (
            "it grows along the completion: another RoPE scaling or attention on the server"
            " (titan-grpo doctor compares config.json), KV of older versions"
            ' (weight_sync.kv_after_update = "recompute"), or of an MoE other routes'
            " (grpo.router_replay)"
        )
    rare = last.get(names.gap("probability", 0.01))
    likely = last.get(names.gap("probability", math.inf))
    if rare is not None and likely is not None and rare >= 10 * max(likely, 1e-3):
        return (
            "mostly at tokens that the engine finds unlikely: logits in float32 on both sides"
            " (grpo.fp32_lm_head and the server's switch for it), or a quantised server"
        )
    return (
        "everywhere alike: other types, kernels, quantisation or sampling parameters on the server"
        " (titan-grpo verify compares them)"
    )
