"""Low-rank adapters (LoRA, arXiv 2106.09685) on a model's linear layers: insert, shard, initialise
and merge them.

An adapter is two parameters of the layer itself, beside its ``weight``: names, sharding and
checkpoints of every other parameter stay unchanged. FSDP2 and tensor parallelism cut ``lora_b`` as
they cut the weight's rows.
"""

import copy
import math
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from titan_grpo.config import Lora
from titan_grpo.errors import ConfigError
from titan_grpo.layout.infer import HFTensor, Layout, Shape, ToHF, strip_prefixes
from titan_grpo.layout.peft import MergedRows, tensor_name
from titan_grpo.layout.plan import chunk_of
from titan_grpo.titan import compat
from titan_grpo.titan.flavors import disable_unexported_buffers, model_of

A, B = ".lora_a", ".lora_b"
"""Suffixes of the adapters' parameter names."""


class LoraLinear(nn.Linear):
    """Linear layer with an adapter, made by ``put_on``: y = x W^T + scale * (x A^T) B^T."""

    lora_a: nn.Parameter
    lora_b: nn.Parameter
    scale: float

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[.., in] -> [.., out]."""
        low = F.linear(_gathered(F.linear(x, self.lora_a)), self.lora_b)
        return F.linear(x, self.weight, self.bias) + self.scale * low


def _gathered(low: torch.Tensor) -> torch.Tensor:
    """Return the product with A whole where tensor-parallel ranks have some of A's rows each.

    Left to itself, DTensor compares the costs of the ways that there are for each shape, and a
    compiled layer is compiled anew for each outcome, past torch's limit.
    """
    if not isinstance(low, DTensor):
        return low
    cut = low.ndim - 1
    places = [Replicate() if place.is_shard(cut) else place for place in low.placements]
    return low.redistribute(placements=places)


def is_adapter(fqn: str) -> bool:
    """Whether a parameter belongs to an adapter."""
    return fqn.endswith((A, B))


def adapted(model: nn.Module) -> Iterator[tuple[str, LoraLinear]]:
    """Yield the layers with adapters by name, wrapper prefixes stripped, in the model's order."""
    for name, module in model.named_modules():
        if isinstance(module, LoraLinear):
            yield strip_prefixes(name), module


def put_on(model: nn.Module, to_hf: ToHF, lora: Lora) -> list[str]:
    """Add uninitialised adapters to the layers that ``lora.targets`` names; return the HF names of
    these layers. Raises ConfigError for a target that the model does not have."""
    layers: dict[str, nn.Linear] = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            weight = torch.empty(module.weight.shape, device="meta")
            theirs = list(to_hf({f"{strip_prefixes(name)}.weight": weight}))
            if len(theirs) == 1:  # one layer in a Hugging Face checkpoint too
                layers[theirs[0].removesuffix(".weight")] = module
    have = sorted({name.rpartition(".")[2] for name in layers})
    for target in lora.targets:
        if target not in have:
            raise ConfigError(
                f"lora.targets must name linear layers of the model ({', '.join(have)}; experts are"
                f" none), got {target!r:.200}"
            )
    chosen = [name for name in layers if name.rpartition(".")[2] in lora.targets]
    for name in chosen:
        layer: Any = layers[name]
        weight = layer.weight
        layer.lora_a = nn.Parameter(weight.new_empty(lora.rank, weight.shape[1]))
        layer.lora_b = nn.Parameter(weight.new_empty(weight.shape[0], lora.rank))
        layer.scale = lora.alpha / lora.rank
        own = type(layer)
        layer.__class__ = (
            LoraLinear if own is nn.Linear else type("LoraLinear", (LoraLinear, own), {})
        )
    return chosen


def sharded(
    model: nn.Module,
    to_hf: ToHF,
    lora: Lora,
    parallelize: Callable[..., nn.Module],
    *arguments: Any,
) -> nn.Module:
    """Put adapters on a model, parallelize it with these arguments, and freeze everything but the
    adapters."""
    put_on(model, to_hf, lora)
    model = parallelize(model, *arguments)
    # after parallelize, which makes new parameters
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(is_adapter(name))
    return model


def of_base(adapter: Any) -> Any:
    """Make a StateDictAdapter skip LoRA adapters in ``to_hf``: they have no name in the base
    model's checkpoint."""
    to_hf = adapter.to_hf
    adapter.to_hf = lambda state: to_hf({n: v for n, v in state.items() if not is_adapter(n)})
    return adapter


@torch.no_grad()
def start_values(model: nn.Module, seed: int) -> None:
    """Initialise A as PEFT does (uniform, variance 1 / (3 * in)) and B with zero: the first policy
    is the base model. Drawn on the host from ``seed``: independent of the sharding."""
    generator = torch.Generator().manual_seed(seed)
    for _, layer in adapted(model):
        rank, width = layer.lora_a.shape
        drawn = torch.empty(rank, width).uniform_(-1.0, 1.0, generator=generator)
        offsets, sizes = chunk_of(layer.lora_a)
        part = drawn[tuple(slice(o, o + n) for o, n in zip(offsets, sizes, strict=True))]
        _local(layer.lora_a).copy_(part / math.sqrt(width))
        _local(layer.lora_b).zero_()


def merged_shards(model: nn.Module, wanted: Collection[str]) -> dict[str, MergedRows]:
    """Return this rank's rows of the adapted weights in ``wanted``, with their adapters, by the
    weight's name.

    Collective if A, or B under tensor parallelism, is sharded: every rank must call it. Call it
    between two steps, while FSDP2 has the parameters sharded.
    """
    found = {}
    with torch.no_grad():
        for name, layer in adapted(model):
            (row, column), (rows, columns) = chunk_of(layer.weight)
            down = _whole(layer.lora_a)[:, column : column + columns]
            aligned = _same_rows(layer)
            up = _local(layer.lora_b) if aligned else _whole(layer.lora_b)[row : row + rows]
            if f"{name}.weight" in wanted:
                base = _local(layer.weight)
                found[f"{name}.weight"] = MergedRows(base, up.detach(), down, layer.scale)
    return found


def adapter_shards(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return this rank's part of each adapter's parameters by name. B includes the adapter's scale,
    so engines need no alpha."""
    found = {}
    with torch.no_grad():
        for name, layer in adapted(model):
            found[name + A] = _local(layer.lora_a).detach()
            found[name + B] = layer.scale * _local(layer.lora_b).detach()
    return found


def adapter_shapes(model: nn.Module) -> dict[str, Shape]:
    """Return the full shape of each adapter's parameters by name, in the model's order."""
    named = ((strip_prefixes(name), p) for name, p in model.named_parameters())
    return {name: tuple(p.shape) for name, p in named if is_adapter(name)}


def _same_rows(layer: LoraLinear) -> bool:
    """Whether each rank's part of B has the rows of its part of the weight; the same on every
    rank."""
    if not isinstance(layer.weight, DTensor):
        return True
    cut = layer.weight.placements
    return layer.lora_b.placements == cut and all(  # type: ignore[attr-defined]
        not isinstance(place, Shard) or place.dim == 0 for place in cut
    )


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach()


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.detach()


def adapter_layout(base: Layout, shapes: Mapping[str, Shape]) -> Layout:
    """Return the layout of the adapters' tensors under PEFT's names. ``shapes``: full shapes of the
    adapters' parameters. B's rows are permuted like the weight's (rope's permutation in
    ``to_hf``)."""
    tensors = []
    for fqn, shape in shapes.items():
        end = A if fqn.endswith(A) else B
        (weight,) = base.by_fqn[f"{fqn.removesuffix(end)}.weight"]
        name = tensor_name(weight.name.removesuffix(".weight"), end[-1].upper())
        rows = range(shape[0]) if end == A else weight.rows
        tensors.append(HFTensor(name, tuple(shape), fqn, rows))
    return Layout(shapes, tuple(tensors))


def skeleton(config: Any) -> tuple[nn.Module, ToHF]:
    """Build the model of a parsed configuration on the meta device, with its LoRA adapters; return
    it and its state dict adapter's to_hf."""
    spec, args = model_of(config.model.name, config.model.flavor)
    # A copy: the table of flavors is shared, and update_from_config changes its entries in place.
    args = copy.deepcopy(args)
    args.update_from_config(config)
    # without the folder, whose index would say into which files torchtitan itself saves
    adapter = spec.state_dict_adapter(args, None)
    disable_unexported_buffers(args, adapter)
    if config.lora.rank:
        compat.upstream().separate_qkv(args)
    with torch.device("meta"):
        model: nn.Module = spec.model_cls(args)
    if config.lora.rank:
        put_on(model, adapter.to_hf, config.lora)
    return model, adapter.to_hf


def adapter_elements(config: Any) -> int:
    """Return the elements of all LoRA adapters of a parsed configuration; 0 without [lora]."""
    shapes = adapter_shapes(skeleton(config)[0]) if config.lora.rank else {}
    return sum(map(math.prod, shapes.values()))
