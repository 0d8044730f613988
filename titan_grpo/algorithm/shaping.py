"""What is done to a reward before it is compared, and to an advantage before it is used. Pure arithmetic."""

from dataclasses import dataclass

import torch

from titan_grpo.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Overlong:
    """Soft overlong punishment (DAPO, arXiv 2503.14476, eq. 13). Checked on construction: raises ConfigError."""

    max_tokens: int
    """L_max: the longest completion that is sampled."""

    cache_tokens: int
    """L_cache: how many tokens before that the penalty begins."""

    factor: float = 1.0
    """The penalty at L_max."""

    def __post_init__(self) -> None:
        if not 0 < self.cache_tokens <= self.max_tokens:
            raise ConfigError(
                f"grpo.overlong_cache_tokens must be in 1 .. rollout.max_completion_tokens ({self.max_tokens}), "
                f"got {self.cache_tokens}: the penalty would have no room to grow"
            )


def overlong_penalty(tokens: int, options: Overlong) -> float:
    """What is added to the reward of a completion of ``tokens`` tokens: 0 down to minus ``options.factor``.

    0 up to L_max - L_cache tokens, then (L_max - L_cache - tokens) / L_cache, and -1 at L_max and beyond; times the factor.

    Example: L_max 100, L_cache 20: 80 tokens 0, 90 tokens -0.5, 100 tokens -1.
    """
    over = tokens - (options.max_tokens - options.cache_tokens)
    return -options.factor * min(max(over / options.cache_tokens, 0.0), 1.0)


def scaled_advantages(advantages: torch.Tensor, pos_scaler: float, neg_scaler: float) -> torch.Tensor:
    """A * pos_scaler where A > 0, else A * neg_scaler; any shape. (The existing trainer's keys of these names.)"""
    return torch.where(advantages > 0, advantages * pos_scaler, advantages * neg_scaler)
