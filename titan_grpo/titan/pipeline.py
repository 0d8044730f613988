"""Pipeline parallelism: torch's schedules over torchtitan's stages, rebuilt for each batch shape.

torch fixes the shape of micro-batches when a schedule's stages are built. Here all micro-batches
of one optimizer step are padded to one shape. If it differs from the last step's, stages and
schedule are rebuilt around the same modules. Shapes are given explicitly, so torch needs no pass
over the model to infer them.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import PipelineScheduleMulti
from torch.nn import functional

from titan_grpo.algorithm.rows import IGNORE_INDEX

OfLogits = Callable[[torch.Tensor, int], torch.Tensor]
"""(logits [R, L, V] of a micro-batch, its number) -> its loss, or [R, L, values] of each token."""


@dataclass(frozen=True, slots=True)
class Activations:
    """Tensors between stages: [R, L / ``split``, ``width``]."""

    width: int
    dtype: torch.dtype
    device: torch.device
    split: int
    """Number of tensor-parallel ranks: between layers each has its part of the tokens."""


class _Reader(torch.nn.Module):
    """Last stage of a pass without gradients. It returns what ``of_logits`` reads, so the logits
    are freed."""

    def __init__(self, part: torch.nn.Module, of_logits: OfLogits) -> None:
        super().__init__()
        self._part, self._of_logits, self._number = part, of_logits, 0

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """[R, L, width] -> [R, L, values]. Called for the micro-batches in order."""
        self._number += 1
        return self._of_logits(self._part(hidden), self._number - 1)


class Pipeline(torch.nn.ModuleList):
    """This rank's stages of a model, as torchtitan built them."""

    def __init__(
        self,
        schedule: Any,
        parts: Sequence[torch.nn.Module],
        group: dist.ProcessGroup,
        activations: Activations,
    ) -> None:
        """``schedule`` is torchtitan's; only its class and its stages' places are kept. Collective
        over ``group``: the ranks with one model's stages."""
        super().__init__(parts)
        self._kind, self._group, self._between = type(schedule), group, activations
        stages = getattr(schedule, "_stages", None) or [schedule._stage]
        self._places = [(stage.stage_index, stage.num_stages) for stage in stages]
        self.is_last = any(stage.is_last for stage in stages)
        self._is_first = any(stage.is_first for stage in stages)
        last: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(last, self.is_last, group=group)
        self._source = dist.get_global_rank(group, last.index(True))
        self._shape: torch.Size | None = None
        self._trained: Any = None
        """The schedule of the last optimizer step; its stages hold buffers of that shape."""
        self._loss: list[OfLogits] = []

    def forward_backward(self, ids: torch.Tensor, loss: OfLogits) -> None:
        """Run forward and backward of ids [micro-batches, R, L] as one pass of the schedule, which
        calls ``loss`` on the rank with the last stage. Collective: every rank with one model's
        stages gives the same ids."""
        self._loss[:] = [loss]
        if self._shape != ids.shape:
            self._shape = ids.shape
            self._trained = self._schedule(ids, True, lambda out, k: self._loss[0](out, int(k)))
        self._trained.step(
            *self._arguments(ids),
            target=torch.arange(len(ids)) if self.is_last else None,
            return_outputs=False,
        )
        self._loss.clear()

    @torch.no_grad()
    def read(self, ids: torch.Tensor, read: OfLogits, values: int) -> torch.Tensor:
        """Apply ``read`` to each micro-batch's logits, without gradients; return float32
        [micro-batches, R, L, values] on every rank. Collective."""
        out: torch.Tensor | None = self._schedule(ids, False, read).step(*self._arguments(ids))
        for module in self.modules():
            if isinstance(module, FSDPModule):
                # a forward without backward leaves parameters gathered
                module.reshard()
        shape = *ids.shape, values
        if out is None:
            out = torch.empty(shape, dtype=torch.float32, device=ids.device)
        out = out.float().view(shape).contiguous()
        dist.broadcast(out, self._source, group=self._group)
        return out

    def share(self, value: Any) -> Any:
        """Return the value of the rank with the last stage, on every rank. Collective."""
        box = [value]
        dist.broadcast_object_list(box, self._source, group=self._group)
        return box[0]

    def _arguments(self, ids: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (ids.flatten(0, 1),) if self._is_first else ()

    def _schedule(self, ids: torch.Tensor, training: bool, of_logits: Any) -> Any:
        """Build a schedule for the shape of ``ids``. ``of_logits``: in training the loss, with the
        arguments of torch's schedules."""
        count, rows, length = ids.shape
        b = self._between
        inside = torch.empty(
            (rows, length // b.split, b.width),
            dtype=b.dtype,
            device="meta",
            requires_grad=training,
        )
        stages = []
        for part, (index, number) in zip(self, self._places, strict=True):
            last = index == number - 1
            module = _Reader(part, of_logits) if last and not training else part
            stages.append(
                PipelineStage(
                    module,
                    index,
                    number,
                    b.device,
                    input_args=ids[0] if index == 0 else inside,
                    # unused for the last stage, which sends nothing
                    output_args=inside,
                    group=self._group,
                )
            )
        several = issubclass(self._kind, PipelineScheduleMulti)
        return self._kind(
            stages if several else stages[0],
            count,
            loss_fn=of_logits if training else None,
            scale_grads=False,
        )


def parts_of(model: torch.nn.Module) -> list[Any]:
    """Return this rank's modules of a model: the stages of a Pipeline, or the model itself."""
    return list(model) if isinstance(model, Pipeline) else [model]


Loaded = tuple[dict[str, Any], torch.Tensor]
"""A micro-batch: tensors [R, L] by name, and labels."""

FILL = {"labels": IGNORE_INDEX, "sequence": -1}
"""Padding value of each tensor; 0 for the others."""


def alike(minibatch: Sequence[Loaded]) -> list[Loaded]:
    """Pad the micro-batches of one optimizer step to one shape: the most rows, the longest row.
    Padding follows a row's tokens, so causal attention hides it from them."""
    rows, length = (max(labels.shape[dim] for _, labels in minibatch) for dim in (0, 1))

    def fit(name: str, tensor: torch.Tensor) -> torch.Tensor:
        after = (0, length - tensor.shape[1], 0, rows - tensor.shape[0])
        return functional.pad(tensor, after, value=FILL.get(name, 0))

    return [
        ({name: fit(name, tensor) for name, tensor in inputs.items()}, fit("labels", labels))
        for inputs, labels in minibatch
    ]
