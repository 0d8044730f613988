"""Low-rank adapters on a model's linear layers: put on, frozen around, started, merged.

An adapter is two parameters of the layer itself, beside its ``weight``: names, sharding and
checkpoints of every other parameter stay as they are. FSDP2 and tensor parallelism cut ``lora_b``
as they cut the weight's rows.
"""

import math
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor, Shard

from titan_grpo.config.lora import Lora
from titan_grpo.errors import ConfigError
from titan_grpo.layout.infer import HFTensor, Layout, Shape, ToHF, strip_prefixes
from titan_grpo.layout.peft import MergedRows, tensor_name
from titan_grpo.layout.plan import chunk_of

A, B = ".lora_a", ".lora_b"
"""Ends of the adapters' parameter names."""

CONVERTER = "titan_grpo_lora"
"""Name under which torchtitan finds ``Converter``."""


class LoraLinear(nn.Linear):
    """y = x W^T + scale * (x A^T) B^T. Made of a Linear by ``put_on``."""

    lora_a: nn.Parameter
    lora_b: nn.Parameter
    scale: float

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[.., in] -> [.., out]."""
        low = F.linear(F.linear(x, self.lora_a), self.lora_b)
        return F.linear(x, self.weight, self.bias) + self.scale * low


def is_adapter(fqn: str) -> bool:
    """Whether a parameter belongs to an adapter."""
    return fqn.endswith((A, B))


def adapted(model: nn.Module) -> Iterator[tuple[str, LoraLinear]]:
    """The layers with adapters and their names, wrapper prefixes stripped, in the model's order."""
    for name, module in model.named_modules():
        if isinstance(module, LoraLinear):
            yield strip_prefixes(name), module


def hf_layers(model: nn.Module, to_hf: ToHF) -> dict[str, tuple[str, nn.Linear]]:
    """Name in a Hugging Face checkpoint -> (name here, layer), of the linear layers that are one
    there too."""
    found = {}
    for name, module in model.named_modules():
        if not isinstance(module, nn.Linear):
            continue
        fqn = strip_prefixes(name)
        names = list(to_hf({f"{fqn}.weight": torch.empty(module.weight.shape, device="meta")}))
        if len(names) == 1:
            found[names[0].removesuffix(".weight")] = fqn, module
    return found


def put_on(model: nn.Module, to_hf: ToHF, lora: Lora) -> list[str]:
    """Make adapters of the layers that ``lora.targets`` names, without values; the HF names of
    these layers.

    Raises ConfigError for a target that the model does not have.
    """
    layers = hf_layers(model, to_hf)
    have = sorted({name.rpartition(".")[2] for name in layers})
    for target in lora.targets:
        if target not in have:
            raise ConfigError(
                f"lora.targets must name linear layers of the model ({', '.join(have)}; experts are"
                f" none), got {target!r}"
            )
    chosen = [name for name in layers if name.rpartition(".")[2] in lora.targets]
    for name in chosen:
        layer: Any = layers[name][1]
        weight = layer.weight
        layer.lora_a = nn.Parameter(weight.new_empty(lora.rank, weight.shape[1]))
        layer.lora_b = nn.Parameter(weight.new_empty(weight.shape[0], lora.rank))
        layer.scale = lora.alpha / lora.rank
        own = type(layer)
        layer.__class__ = (
            LoraLinear if own is nn.Linear else type("LoraLinear", (LoraLinear, own), {})
        )
    return chosen


class Converter:
    """torchtitan's ModelConverter: it runs between the making of a model and its sharding."""

    def __init__(self, job_config: Any, parallel_dims: Any) -> None:
        self._config = job_config

    def convert(self, model: nn.Module) -> None:
        """Put the adapters on."""
        from torchtitan.protocols.train_spec import get_train_spec

        spec = get_train_spec(self._config.model.name)
        args = spec.model_args[self._config.model.flavor]
        put_on(model, spec.state_dict_adapter(args, None).to_hf, self._config.lora)

    def post_optimizer_hook(self, model: Any) -> None:
        """Nothing is due after a step."""


def train_adapters_only(spec: Any, job_config: Any) -> dict[str, Any]:
    """What of a train spec is another with adapters: the optimizer gets them alone, and the state
    dict adapter, which knows the base model's names, leaves them out. ``job_config`` asks for
    the converter."""
    from torchtitan.protocols import model_converter

    if CONVERTER not in model_converter._registry_model_converter_cls:
        model_converter.register_model_converter(Converter, CONVERTER)
    job_config.model.converters = [CONVERTER]

    def build_optimizers(model_parts: list[nn.Module], *arguments: Any, **options: Any) -> Any:
        # after the sharding, which makes new parameters
        for model in model_parts:
            for name, parameter in model.named_parameters():
                parameter.requires_grad_(is_adapter(name))
        return spec.build_optimizers_fn(model_parts, *arguments, **options)

    return {
        "build_optimizers_fn": build_optimizers,
        "state_dict_adapter": without_adapters(spec.state_dict_adapter),
    }


def without_adapters(kind: type) -> type:
    """A StateDictAdapter class that leaves adapters out of what it exports: they have no name in
    the base model's checkpoint."""

    def to_hf(self: Any, state_dict: Mapping[str, Any]) -> dict[str, Any]:
        return of_base(partial(kind.to_hf, self))(state_dict)  # type: ignore[attr-defined]

    return type(kind.__name__, (kind,), {"to_hf": to_hf})


def of_base(to_hf: ToHF) -> Callable[[Mapping[str, Any]], dict[str, Any]]:
    """``to_hf`` of what is no adapter."""

    def exported(state_dict: Mapping[str, Any]) -> dict[str, Any]:
        return to_hf({name: value for name, value in state_dict.items() if not is_adapter(name)})

    return exported


@torch.no_grad()
def start_values(model: nn.Module, seed: int) -> None:
    """A as PEFT starts it (uniform, variance 1 / (3 * in)) and B zero, so that the first policy is
    the base model. Drawn on the host from ``seed``: the same however the model is sharded."""
    generator = torch.Generator().manual_seed(seed)
    for _, layer in adapted(model):
        rank, width = layer.lora_a.shape
        drawn = torch.empty(rank, width).uniform_(-1.0, 1.0, generator=generator)
        offsets, sizes = chunk_of(layer.lora_a)
        part = drawn[tuple(slice(o, o + n) for o, n in zip(offsets, sizes, strict=True))]
        _local(layer.lora_a).copy_(part / math.sqrt(width))
        _local(layer.lora_b).zero_()


def merged_shards(model: nn.Module, wanted: Collection[str]) -> dict[str, MergedRows]:
    """This rank's rows of the adapted weights, with their adapters, by the weight's name.

    Collective where A, or B under tensor parallelism, is cut: every rank calls it, also one that
    wants none.

    For the moment between two steps, in which FSDP2 has the parameters sharded.
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
    """This rank's part of each adapter's parameter by its name, B times the adapter's scale: with
    that in it, an engine needs to know no alpha."""
    found = {}
    with torch.no_grad():
        for name, layer in adapted(model):
            found[name + A] = _local(layer.lora_a).detach()
            found[name + B] = layer.scale * _local(layer.lora_b).detach()
    return found


def adapter_shapes(model: nn.Module) -> dict[str, Shape]:
    """Full shape of each parameter of an adapter, in the model's order."""
    named = ((strip_prefixes(name), p) for name, p in model.named_parameters())
    return {name: tuple(p.shape) for name, p in named if is_adapter(name)}


def _same_rows(layer: LoraLinear) -> bool:
    """Whether this rank's part of B is that of the weight's rows; the same on every rank."""
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
    """The adapters' tensors as PEFT names them. ``shapes``: full ones of the adapters' parameters.

    The rows of B are the weight's, so they move as ``to_hf`` moves those (rope's permutation).
    """
    tensors = []
    for fqn, shape in shapes.items():
        end = A if fqn.endswith(A) else B
        (weight,) = base.by_fqn[f"{fqn.removesuffix(end)}.weight"]
        name = tensor_name(weight.name.removesuffix(".weight"), end[-1].upper())
        rows = range(shape[0]) if end == A else weight.rows
        tensors.append(HFTensor(name, tuple(shape), fqn, rows))
    return Layout(shapes, tuple(tensors))
