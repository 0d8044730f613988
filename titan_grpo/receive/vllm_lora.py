"""Adapters of versions in a vLLM server: written by the worker's plugin, loaded, named and unloaded
through vLLM's own routes by the middleware of its HTTP process. Imports nothing of vLLM.

A commit writes the adapter as PEFT does into a folder of this host's memory. Before the label is
set the middleware has vLLM load it under the label as its name. From then on it is the model of
every request that arrives; a request that runs on keeps the adapter that it began with. An adapter
that no request has any more is unloaded, and its files are removed.

The files stay as long as a request may need them: vLLM reads an adapter again that it put out of
its cache for another one.
"""

import json
import os
import secrets
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from titan_grpo.engines.vllm import LORA_ROUTES, allowed_rank
from titan_grpo.layout.manifest import Manifest
from titan_grpo.layout.peft import adapter_config, layer_of

VARIABLE = "TITAN_GRPO_LORA_FOLDER"
STAGED = "staged"
WEIGHTS = "adapter_model.safetensors"
MEMORY = Path("/dev/shm")

Shape = tuple[int, ...]


def choose_folder() -> None:
    """Name the folder of this server, before its processes are started: they inherit it."""
    place = MEMORY if MEMORY.is_dir() else Path(tempfile.gettempdir())
    os.environ.setdefault(VARIABLE, str(place / f"titan_grpo-lora-{secrets.token_hex(8)}"))


def folder() -> Path:
    """The server's folder; there once a version was written."""
    choose_folder()
    return Path(os.environ[VARIABLE])


def write_staged(tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Write an adapter's tensors as PEFT does; B is scaled already."""
    folder().mkdir(mode=0o700, exist_ok=True)
    draft = folder() / f"{STAGED}.partial"
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir()
    # clone: views of one image would be refused, since they share its storage
    whole = {name: tensor.clone() for name, tensor in tensors}
    save_file(whole, draft / WEIGHTS, metadata={"format": "pt"})
    rank = next(tensor.shape[0] for name, tensor in whole.items() if ".lora_A." in name)
    targets = {layer_of(name).rpartition(".")[2] for name in whole}
    (draft / "adapter_config.json").write_text(json.dumps(adapter_config(rank, rank, targets)))
    shutil.rmtree(folder() / STAGED, ignore_errors=True)
    draft.rename(folder() / STAGED)


def problem(manifest: Manifest, lora_config: Any, base: Mapping[str, Shape]) -> str:
    """Why a server with this LoRAConfig (None: none) cannot take these adapters; empty if it can.
    ``base``: names and shapes of its checkpoint, empty where there is none to compare with."""
    ranks = {s.shape[0] for s in manifest.tensors if ".lora_A." in s.name}
    rank = max(ranks)
    if lora_config is None:
        return (
            f'the trainer sends adapters of rank {rank} (lora.sync = "adapter"), and the server was'
            " started without --enable-lora: start it with --enable-lora --max-lora-rank"
            f" {allowed_rank(rank)}"
        )
    if rank > lora_config.max_lora_rank:
        return (
            f"the trainer's adapters have rank {rank}, and the server takes at most"
            f" {lora_config.max_lora_rank}: start it with --max-lora-rank {allowed_rank(rank)}"
        )
    if os.environ.get(LORA_ROUTES, "").lower() not in ("1", "true"):
        return f"adapters are loaded through vLLM's routes: start the server with {LORA_ROUTES}=1"
    for spec in manifest.tensors if base else ():
        shape = base.get(f"{layer_of(spec.name)}.weight")
        side = 1 if ".lora_A." in spec.name else 0
        if shape is None or len(shape) != 2 or shape[side] != spec.shape[side]:
            return (
                f"{spec.name} {spec.shape} is no adapter of the server's model ({shape}): serve the"
                " base model that is trained"
            )
    return ""


class Adapters:
    """Which adapters the server has, and how many requests each. No I/O."""

    def __init__(self) -> None:
        self.current = ""
        self._requests: Counter[str] = Counter()
        self._loaded: set[str] = set()

    def loaded(self, name: str) -> None:
        """vLLM has an adapter: every request that arrives from now on is its."""
        self._loaded.add(name)
        self.current = name

    def began(self) -> str:
        """A request arrives; the adapter that it gets."""
        self._requests[self.current] += 1
        return self.current

    def ended(self, name: str) -> None:
        """A request is answered, or its client left."""
        self._requests[name] -= 1

    def take_unused(self) -> list[str]:
        """The adapters that no request has or will get; they are forgotten here."""
        unused = sorted(n for n in self._loaded if n != self.current and not self._requests[n])
        self._loaded.difference_update(unused)
        for name in unused:
            del self._requests[name]
        return unused
