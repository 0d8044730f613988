"""Give an MoE's router, and what is before a layer of experts, their whole gradients under tensor
parallelism. Needed on every device."""

from collections.abc import Iterable
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate

from titan_grpo.patches.versions import Range, require

WHY = (
    "under tensor parallelism a rank has a part of the gradient of the router's scores (its part of"
    " the experts' output, or of the tokens), and torchtitan takes it for the whole: the router is"
    " trained with a wrong gradient, another one on each rank, and its weights differ between the"
    " ranks from the first step on. Where expert parallelism takes the same ranks, what is before"
    " the layer lacks the gradients of other ranks' tokens too"
)
APPLIES_TO: Range = ("torchtitan", "0.2.2", "0.3")
DELETE_WHEN = "torchtitan < 0.3 is no longer supported (its issue 2387)"


class _Once(torch.autograd.Function):
    """A tensor whose gradient, which all ranks of a sum have whole, counts on one of them."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, counts: bool) -> torch.Tensor:
        ctx.counts = counts
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        # Not None: a rank that left out the collectives before would leave the others in them.
        return grads[0] if ctx.counts else torch.zeros_like(grads[0]), None


def apply(model_parts: Iterable[torch.nn.Module], mesh: DeviceMesh, borrowed: bool) -> None:
    """Sum gradients over ``mesh``, that of the tensor-parallel ranks, where torchtitan does not.

    ``borrowed``: expert parallelism takes these ranks too (expert_tensor_parallel_degree 1), and
    each has some of the tokens. Must run after parallelize and before the first forward.

    Raises:
        UpstreamError: torchtitan's version is not in ``APPLIES_TO``.
    """
    from torchtitan.models.moe import MoE

    def summed(tensor: torch.Tensor) -> torch.Tensor:
        whole = DTensor.from_local(tensor, mesh, (Replicate(),), run_check=False)
        return whole.to_local(grad_placements=(Partial(),))

    def once(_module: Any, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        counts = mesh.get_local_rank() == 0
        found: torch.Tensor = _Once.apply(inputs[0], counts)  # type: ignore[no-untyped-call]
        return found, *inputs[1:]

    for part in model_parts:
        for module in part.modules():
            if type(module) is not MoE:  # that with DeepEP has another forward
                continue
            require(APPLIES_TO, __name__)
            layer: Any = module
            gate = layer.router.gate
            if borrowed or not layer.score_before_experts:  # else each rank has the whole
                gate.register_forward_hook(lambda _module, _inputs, scores: summed(scores))
            if borrowed:
                # Before that of torchtitan, which makes DTensors.
                gate.register_forward_pre_hook(once, prepend=True)
                if layer.shared_experts is not None:
                    layer.shared_experts.register_forward_pre_hook(once)
                # After torchtitan's.
                layer.register_forward_pre_hook(
                    lambda _module, inputs: (summed(inputs[0]), *inputs[1:])
                )
