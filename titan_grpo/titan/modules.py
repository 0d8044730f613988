"""Additions to torchtitan's models: attention within the sequences of a packed row, router replay,
logits in float32, and the moving reference of the KL term."""

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate
from torch.nn import functional

from titan_grpo.algorithm.loss import Metrics
from titan_grpo.algorithm.rows import AttentionRows
from titan_grpo.errors import ConfigError, ProtocolError
from titan_grpo.titan import compat


class DocumentAttention(torch.nn.Module):
    """Wrapper of an attention module. While ``seam.rows`` is set, it gathers packed rows into rows
    of one sequence each, calls ``inner`` on these, and puts the results back (see
    algorithm/rows.py). Otherwise it calls ``inner`` unchanged.

    torchtitan 0.2.2's flex and varlen attention cut a row at every end-of-text token, which is not
    where our sequences end; its sdpa attention and 0.3's take no mask. q, k, v are [R, heads, L,
    dim] if ``tokens`` is 2, [R, L, heads, dim] if it is 1."""

    def __init__(self, inner: torch.nn.Module, seam: "PackedAttention", tokens: int) -> None:
        super().__init__()
        self.inner = inner
        self._seam, self._tokens = seam, tokens

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any
    ) -> torch.Tensor:
        """Return the shape of q with the dim of v. ``options`` go to the wrapped module."""
        rows = self._seam.rows
        if rows is None:
            out: torch.Tensor = self.inner(q, k, v, **options)
            return out
        tokens = self._tokens
        shape = (q.shape[0], q.shape[tokens])
        flat = [x.transpose(1, tokens).flatten(0, 1) for x in (q, k, v)]
        parts = []
        for index in rows.rows:
            alone = self.inner(*(x[index].transpose(1, tokens) for x in flat), **options)
            parts.append(alone.transpose(1, tokens).flatten(0, 1))
        joined: torch.Tensor = torch.cat(parts)[rows.home].unflatten(0, shape)
        return joined.transpose(1, tokens)


class PackedAttention:
    """Places of the sequences in the current micro-batch, shared by all attention layers."""

    def __init__(self) -> None:
        self.rows: AttentionRows | None = None

    def install(self, model: torch.nn.Module) -> None:
        """Wrap the attention of every layer, before the first forward. Parameters and their names
        do not change. Raises ConfigError for a model whose forward takes no positions, or without
        sdpa attention."""
        upstream = compat.upstream()
        plain = upstream.ATTENTION
        found = [
            (parent, name, child)
            for parent in model.modules()
            for name, child in parent.named_children()
            if isinstance(child, plain)
        ]
        if not found or "positions" not in inspect.signature(model.forward).parameters:
            raise ConfigError(
                "grpo.pack_sequences needs a model with sdpa attention and positions in its"
                f" forward, {type(model).__name__} has not: sequences of one row would see each"
                " other; set it to false"
            )
        for parent, name, child in found:
            setattr(parent, name, DocumentAttention(child, self, upstream.TOKENS))

    @contextmanager
    def using(self, rows: AttentionRows | None, device: torch.device) -> Iterator[None]:
        """Set ``rows`` for one micro-batch. Run its forward and backward inside (checkpointed
        layers recompute in the backward)."""
        self.rows = None if rows is None else rows.to(device)
        try:
            yield
        finally:
            self.rows = None


CHOSEN = 8.0
"""Added to the score of a replayed expert. Larger than a score (at most 1) plus a load balancing
bias (below 7)."""


def routers(model: torch.nn.Module) -> dict[int, Any]:
    """Return the router of each MoE layer by layer number. Raises ConfigError if there is none."""
    layers: Any = model.layers
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
    """Return the number of experts of a token over all layers, as engines send them: dense layers
    count too. Raises ConfigError as ``routers``."""
    found = routers(model)
    layers: Any = model.layers
    return len(layers) * int(next(iter(found.values())).top_k)


class RouterReplay:
    """Experts that the engine chose for the current micro-batch, shared by all routers of a model.

    Trainer and engine compute a router's logits with different kernels and types. Where two experts
    score nearly equally they choose differently, and the log-probabilities of that token and of all
    later ones differ by tenths of a nat. With the engine's choice in the trainer's forward and
    backward they differ by arithmetic alone (R3, arXiv 2510.11370). The gates are still the
    trainer's own scores of the chosen experts, so routers learn.
    """

    def __init__(self) -> None:
        self._routes: torch.Tensor | None = None
        self._differs: torch.Tensor | None = None

    def install(self, model: torch.nn.Module) -> None:
        """Hook every router, before the first forward. Parameters and their names do not change.
        Raises ConfigError as ``routers``."""
        for number, router in routers(model).items():
            router.register_forward_pre_hook(partial(self._replay, number))

    @contextmanager
    def using(self, routes: torch.Tensor | None, device: torch.device) -> Iterator[None]:
        """Set the routes of one micro-batch. Run its forward and backward inside (checkpointed
        layers route again in the backward). ``routes``: int16 [R, L, layers * experts of a token],
        -1 for the trainer's own choice; None: its own choice everywhere."""
        if routes is not None:
            self._routes = routes.flatten(0, 1).to(device).long()
            # Not None until the first layer: with selective checkpointing a layer must recompute
            # the operations of its forward, and no other.
            self._differs = torch.zeros_like(self._routes[:, 0], dtype=torch.bool)
        try:
            yield
        finally:
            self._routes = self._differs = None

    def take_metrics(self) -> Metrics:
        """Return how many tokens had routes since ``using``, and for how many of them any router
        would have chosen others. Empty without routes."""
        if self._routes is None or self._differs is None:
            return {}
        replayed = self._routes[:, 0] >= 0
        return {
            "replayed_sum": replayed.sum().double(),
            "routes_differ_sum": (self._differs & replayed).sum().double(),
        }

    def _replay(self, layer: int, router: Any, given: tuple[Any, ...]) -> tuple[Any, ...] | None:
        """Replace a router's expert bias by one per token with which only the replayed experts can
        win. A forward pre-hook."""
        if self._routes is None or self._differs is None:
            return None
        x, bias = given[0], given[1] if len(given) > 1 else None
        top_k = router.top_k
        wanted = self._routes[:, layer * top_k : (layer + 1) * top_k]
        with torch.no_grad():
            own = type(router).forward(router, x, bias)[1]
            # torchtitan 0.3 has DTensors here under tensor parallelism.
            own = (own.full_tensor() if isinstance(own, DTensor) else own).flatten(0, -2)
            differs = (own.sort(-1).values != wanted.sort(-1).values).any(-1)
            self._differs = differs | self._differs
            replayed = wanted >= 0
            chosen = torch.zeros(len(wanted), router.num_experts, device=wanted.device)
            chosen.scatter_add_(1, wanted.clamp(min=0), replayed.float() * CHOSEN)
            # The scores' shape: [R * L, experts] in torchtitan 0.2.2, [R, L, experts] in 0.3.
            chosen = chosen.view(*x.shape[:-1], router.num_experts)
            if isinstance(x, DTensor):
                mesh = x.device_mesh
                each = [Replicate()] * mesh.ndim
                chosen = DTensor.from_local(chosen, mesh, each, run_check=False)
        return x, chosen if bias is None else chosen + bias


def _float32_logits(head: Any, hidden: torch.Tensor) -> torch.Tensor:
    """[..., dim] -> [..., vocabulary] in float32, from weights and hidden states in the type of
    mixed precision."""
    device = hidden.device.type
    given = [hidden, head.weight, *([] if head.bias is None else [head.bias])]
    if torch.is_autocast_enabled(device):
        # One rank: nothing gathers weights in that type. These are the optimizer's, in float32,
        # which no server has.
        given = [each.to(torch.get_autocast_dtype(device)) for each in given]
    # autocast would compute the product in its own type
    with torch.autocast(device, enabled=False):
        return functional.linear(*(each.float() for each in given))


def compute_head_in_fp32(model: torch.nn.Module) -> None:
    """Make a model's last projection compute in float32: in bfloat16 trainer and engine differ at
    rare tokens (MiniMax-M1, arXiv 2506.13585, section 3.2). Parameters and their names do not
    change. Raises ConfigError if the last layer is no plain projection."""
    head = getattr(model, "output", None) or getattr(model, "lm_head", None)
    # Compare ``forward``, not the class: FSDP derives a class of its own.
    if getattr(type(head), "forward", None) is not torch.nn.Linear.forward:
        raise ConfigError(
            "grpo.fp32_lm_head needs a model whose last layer is a plain projection, this one has"
            f" {type(head).__name__}: set it to false"
        )
    # Set on the instance: the hooks of FSDP and TP stay around it.
    assert isinstance(head, torch.nn.Linear)
    head.forward = MethodType(_float32_logits, head)  # type: ignore[method-assign]


@torch.no_grad()
def move_reference(reference: torch.nn.Module, policy: torch.nn.Module, ema: float) -> None:
    """Set reference = ema * reference + (1 - ema) * policy on this rank's shards, in place, without
    communication. Call it at a step boundary, while FSDP2 has the policy sharded."""
    for module in reference.modules():
        if isinstance(module, FSDPModule):
            # A forward without backward leaves the last group gathered; the next forward would use
            # that stale copy.
            module.reshard()
    ours, theirs = (
        [p.to_local() if isinstance(p, DTensor) else p.data for p in model.parameters()]
        for model in (reference, policy)
    )
    if [p.shape for p in ours] != [p.shape for p in theirs]:
        raise ProtocolError(
            "reference and policy must be sharded alike, and their local parameters differ in"
            " number or shape"
        )
    torch._foreach_lerp_(ours, theirs, 1 - ema)
