"""torchtitan's tiny models with weights of the tests."""

from collections.abc import Mapping
from typing import cast

import torch

from titan_grpo.titan import compat, flavors, tiny

compat.prepare()


def loaded(
    kind: tiny.Kind, weights: Mapping[str, torch.Tensor] | None = None, flavor: str = ""
) -> torch.nn.Module:
    """The tiny ``kind``, or that ``flavor`` of it, with ``weights`` by Hugging Face name (default:
    those of seed 3)."""
    name, smallest = flavors.FLAVORS[kind]
    spec, args = flavors.model_of(name, flavor or smallest)
    model = spec.model_cls(args)
    with torch.no_grad():
        model.init_weights()
    given = tiny.tiny_weights(kind, 3, std=0.1) if weights is None else weights
    model.load_state_dict(spec.state_dict_adapter(args, None).from_hf(given))
    return cast(torch.nn.Module, model)
