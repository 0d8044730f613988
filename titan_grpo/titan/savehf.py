"""A version image as a directory of HF safetensors: the image already has the names, the layout and the dtype."""

import shutil
from pathlib import Path

import torch
from huggingface_hub import save_torch_state_dict

from titan_grpo.layout.manifest import Manifest

COMPANIONS = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")
"""Files of the start model that a loader needs beside the weights."""


def views(image: torch.Tensor, manifest: Manifest) -> dict[str, torch.Tensor]:
    """The image's tensors by HF name, sharing its memory (uint8[total_bytes] on the CPU)."""
    out: dict[str, torch.Tensor] = {}
    for spec in manifest.tensors:
        flat = image[spec.offset : spec.offset + spec.nbytes].view(getattr(torch, spec.dtype))
        out[spec.name] = flat.view(spec.shape)
    return out


def save_image(image: torch.Tensor, manifest: Manifest, folder: Path, companions_from: Path) -> None:
    """Write ``folder`` with safetensors (sharded when large) and the files that make it loadable."""
    folder.mkdir(parents=True, exist_ok=True)
    # Cloned one by one by the writer's own sharing check otherwise: it takes views of one buffer for tied weights.
    save_torch_state_dict({name: tensor.clone() for name, tensor in views(image, manifest).items()}, folder)
    for name in COMPANIONS:
        source = companions_from / name
        if source.is_file():
            shutil.copyfile(source, folder / name)
