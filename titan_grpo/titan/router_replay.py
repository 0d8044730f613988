"""Routers of an MoE on the experts that the engine chose, for torchtitan's models.

Trainer and engine compute a router's logits in other kernels and types; where two experts are
nearly equal they choose others, and the log-probabilities of the token and of all after it differ
by tenths of a nat. With the engine's choice in the trainer's forward and backward they differ by
arithmetic alone (R3, arXiv 2510.11370). The gates stay the trainer's: its own scores of the chosen
experts, so routers learn.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from titan_grpo.algorithm.metrics import Metrics
from titan_grpo.errors import ConfigError

CHOSEN = 8.0
"""Added to the score of a replayed expert, scores being at most 1 and a load balancing bias less
than the rest."""


def routers(model: torch.nn.Module) -> dict[int, Any]:
    """Number of each MoE layer -> its router. Raises ConfigError for a model without one."""
    layers: Any = getattr(model, "layers", {})
    found = {
        int(number): layer.moe.router
        for number, layer in layers.items()
        if getattr(getattr(layer, "moe", None), "router", None) is not None
    }
    if not found:
        raise ConfigError(
            "grpo.router_replay needs an MoE with torchtitan's routers, this model"
            f" ({type(model).__name__}) has none: set it to false"
        )
    return found


def route_width(model: torch.nn.Module) -> int:
    """Experts of a token over all layers, as engines send them: dense layers count too. Raises
    ConfigError as ``routers``."""
    found = routers(model)
    layers: Any = model.layers
    return len(layers) * int(next(iter(found.values())).top_k)


class RouterReplay:
    """Shared by all routers of a model: the routes of the current micro-batch."""

    def __init__(self) -> None:
        self._routes: torch.Tensor | None = None
        self._differs: torch.Tensor | None = None

    def install(self, model: torch.nn.Module) -> None:
        """Make every router follow ``using``, before the first forward; parameters and their names
        stay as they are. Raises ConfigError as ``routers``."""
        for number, router in routers(model).items():
            router.register_forward_pre_hook(partial(self._replay, number))

    @contextmanager
    def using(self, routes: torch.Tensor | None, device: torch.device) -> Iterator[None]:
        """Forward and backward of one micro-batch happen inside (backward too: checkpointed layers
        route again there). ``routes``: int16 [R, L, layers * experts of a token], -1 where the
        trainer's choice stands; None: it stands everywhere."""
        self._routes = None if routes is None else routes.flatten(0, 1).to(device).long()
        self._differs = None
        try:
            yield
        finally:
            self._routes = self._differs = None

    def take_metrics(self) -> Metrics:
        """Since ``using``: how many tokens had routes, and for how many any router's own choice was
        another. Empty without routes."""
        if self._routes is None or self._differs is None:
            return {}
        replayed = self._routes[:, 0] >= 0
        return {
            "replayed_sum": replayed.sum().double(),
            "routes_differ_sum": (self._differs & replayed).sum().double(),
        }

    def _replay(self, layer: int, router: Any, given: tuple[Any, ...]) -> tuple[Any, ...] | None:
        """In place of an expert's bias, the router gets one for each token that only the replayed
        experts can win with."""
        if self._routes is None:
            return None
        x, bias = given[0], given[1] if len(given) > 1 else None
        top_k = router.top_k
        wanted = self._routes[:, layer * top_k : (layer + 1) * top_k]
        with torch.no_grad():
            own = type(router).forward(router, x, bias)[1].flatten(0, -2)
            differs = (own.sort(-1).values != wanted.sort(-1).values).any(-1)
            self._differs = differs if self._differs is None else self._differs | differs
            replayed = wanted >= 0
            chosen = x.new_zeros((len(wanted), router.num_experts), dtype=torch.float32)
            chosen.scatter_add_(1, wanted.clamp(min=0), replayed.float() * CHOSEN)
            # As the scores: [R * L, experts] with torchtitan 0.2.2, [R, L, experts] with 0.3.
            chosen = chosen.view(*x.shape[:-1], router.num_experts)
        return x, chosen if bias is None else chosen + bias
