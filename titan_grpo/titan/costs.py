"""How much work a sequence is for a model, from torchtitan's own count of operations."""

from typing import Any

import torch

from titan_grpo.algorithm.balance import TokenCost


def token_cost(model_args: Any, model: torch.nn.Module) -> TokenCost:
    """Floating-point operations of forward and backward for a sequence, as its length decides.

    torchtitan counts a + b * n operations per token of a row of n tokens: a for the parameters that a token meets (of an MoE
    the active ones), b for attention without regard to causality, which halves it. Sharded parameters count whole.
    """
    one, two = (model_args.get_nparams_and_flops(model, length)[1] for length in (1, 2))
    return TokenCost(float(2 * one - two), (two - one) / 2)
