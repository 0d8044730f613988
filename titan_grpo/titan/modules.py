"""What GRPO needs of torchtitan's models besides: attention inside the sequences of a packed row,
routers on the engine's experts, logits in float32, and the moving reference of the KL term."""

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn import functional

from titan_grpo.algorithm.loss import Metrics
from titan_grpo.algorithm.rows import AttentionRows
from titan_grpo.errors import ConfigError, ProtocolError
from titan_grpo.titan import compat


class DocumentAttention(torch.nn.Module):
    """Calls ``inner`` with q, k, v as they are, or sequence by sequence while ``seam.rows`` is set:
    it gathers a packed row into rows of one sequence each, and puts the results back (see
    algorithm/rows.py).

    torchtitan 0.2.2 cuts a row at every end-of-text token (flex and varlen attention), which is not
    where our sequences end, and its sdpa attention, as that of 0.3, takes no mask at all. q, k, v
    are [R, heads, L, dim], ``tokens`` being 2, or [R, L, heads, dim], it being 1."""

    def __init__(self, inner: torch.nn.Module, seam: "PackedAttention", tokens: int) -> None:
        super().__init__()
        self.inner = inner
        self._seam, self._tokens = seam, tokens

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any
    ) -> torch.Tensor:
        """As q, with the dim of v; ``options`` are the wrapped module's."""
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
    """Shared by all attention layers of a model: where the sequences of the current micro-batch
    lie."""

    def __init__(self) -> None:
        self.rows: AttentionRows | None = None

    def install(self, model: torch.nn.Module) -> None:
        """Wrap the attention of every layer, before the first forward; parameters and their names
        stay as they are.

        Raises ConfigError for a model without positions in its forward, or with another attention
        than sdpa.
        """
        upstream = compat.upstream("models")
        plain = upstream.attention()
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
        """Forward and backward of one micro-batch happen inside (backward too: checkpointed layers
        compute again there)."""
        self.rows = None if rows is None else rows.to(device)
        try:
            yield
        finally:
            self.rows = None


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
    """Shared by all routers of a model: the experts that the engine chose for the current
    micro-batch.

    Trainer and engine compute a router's logits in other kernels and types; where two experts are
    nearly equal they choose others, and the log-probabilities of the token and of all after it
    differ by tenths of a nat. With the engine's choice in the trainer's forward and backward they
    differ by arithmetic alone (R3, arXiv 2510.11370). The gates stay the trainer's: its own scores
    of the chosen experts, so routers learn.
    """

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


def _float32_logits(head: Any, hidden: torch.Tensor) -> torch.Tensor:
    """[..., dim] -> [..., vocabulary] in float32, of the weights as mixed precision gathered
    them."""
    bias = None if head.bias is None else head.bias.float()
    # autocast would take the product back to its own type
    with torch.autocast(hidden.device.type, enabled=False):
        return functional.linear(hidden.float(), head.weight.float(), bias)


def compute_head_in_fp32(model: torch.nn.Module) -> None:
    """Let a model's last projection compute in float32; parameters and their names stay as they
    are: what is lost in bfloat16 is the gap at rare tokens (MiniMax-M1, arXiv 2506.13585, section
    3.2). Raises ConfigError for a model without one that is plain."""
    head = getattr(model, "output", None) or getattr(model, "lm_head", None)
    # Not the class: FSDP makes one of its own of it.
    if getattr(type(head), "forward", None) is not torch.nn.Linear.forward:
        raise ConfigError(
            "grpo.fp32_lm_head needs a model whose last layer is a plain projection, this one has"
            f" {type(head).__name__}: set it to false"
        )
    # The instance's forward: hooks of FSDP and TP around it stay.
    assert isinstance(head, torch.nn.Linear)
    head.forward = MethodType(_float32_logits, head)  # type: ignore[method-assign]


@torch.no_grad()
def move_reference(reference: torch.nn.Module, policy: torch.nn.Module, ema: float) -> None:
    """reference = ema * reference + (1 - ema) * policy, on this rank's own shards: in place,
    without communication. For a step boundary, where FSDP2 has the policy sharded."""
    for module in reference.modules():
        if isinstance(module, FSDPModule):
            # A forward without backward leaves the last group gathered, and that copy would be used
            # again.
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
