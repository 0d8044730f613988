"""Export of a checkpoint as Hugging Face safetensors: in one process, without a GPU, one parameter
at a time.

Names and layout come from the model's own state dict adapter, as in a weight sync: in
``weight_sync.wire_dtype`` the export equals what the servers held at that version.
"""

import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from titan_grpo.config import sends_adapters
from titan_grpo.errors import ConfigError, DataError
from titan_grpo.layout.infer import Layout, ToHF, strip_prefixes
from titan_grpo.layout.peft import MergedRows, adapter_config
from titan_grpo.titan import lora
from titan_grpo.titan.checkpoints import Stored, check_alpha, check_saver
from titan_grpo.titan.hf_files import Written, copy_assets, write_adapter, write_weights
from titan_grpo.titan.jobfile import base_of
from titan_grpo.titan.weight_sync import layout_of, stored_tensors


def check_same_model(shapes: dict[str, tuple[int, ...]], checkpoint: Stored) -> None:
    """Raise ConfigError unless the checkpoint holds every tensor of the model, in its shape."""
    stored = checkpoint.shapes()
    for fqn, shape in shapes.items():
        have = tuple(stored[fqn].size) if fqn in stored else None
        if have != shape:
            raise ConfigError(
                f"{checkpoint} must be a checkpoint of model.name and model.flavor: {fqn} must have"
                f" the shape {shape}, it {'is missing' if have is None else f'has {have}'}; name"
                " the job's own --job.config_file"
            )


def _check_finite(checkpoint: Stored, name: str, tensor: torch.Tensor) -> None:
    if not torch.isfinite(tensor).all():
        kind = str(tensor.dtype).removeprefix("torch.")
        raise DataError(
            f"{checkpoint}: {name} holds NaN or infinity in {kind}, so a server would emit noise;"
            " export an earlier version, or another --dtype"
        )


def hf_tensors(
    checkpoint: Stored,
    layout: Layout,
    to_hf: ToHF,
    dtype: torch.dtype,
    keep: set[str],
    scales: Mapping[str, float],
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield tensors by HF name: parameters in ``dtype``, those in ``keep`` in their stored type.
    Holds one parameter in memory at a time. ``scales``: by layer name, those of the adapters to
    merge. Raises DataError for NaN, infinity (also of a value that ``dtype`` cannot hold), or
    elements that the adapter does not export."""
    for fqn, parts in layout.by_fqn.items():
        if not parts:
            continue  # tied to another parameter
        state = checkpoint.load(fqn)
        layer = fqn.removesuffix(".weight")
        if layer in scales:
            low = checkpoint.load(layer + lora.A, layer + lora.B)
            rows = MergedRows(state[fqn], low[layer + lora.B], low[layer + lora.A], scales[layer])
            state[fqn] = rows[:]
        yielded = 0
        for name, tensor in to_hf(state).items():
            yielded += tensor.numel()
            written = tensor if fqn in keep else tensor.to(dtype)
            _check_finite(checkpoint, name, written)
            yield name, written
        if yielded != state[fqn].numel():
            raise DataError(
                f"{checkpoint}: {fqn} has {state[fqn].numel()} elements, its adapter exported"
                f" {yielded}"
            )


def _read_model(config: Any, checkpoint: Stored) -> tuple[torch.nn.Module, ToHF, Layout]:
    """Return (model on the meta device, its to_hf, layout of the base model).

    Raises ConfigError if the checkpoint is of another model or torchtitan, or has adapters that the
    job does not have, or another lora.alpha.
    """
    model, to_hf = lora.skeleton(config)
    layout = layout_of(model, stored_tensors([model], to_hf), to_hf)
    stored = checkpoint.shapes()
    check_saver(checkpoint)
    needed = {fqn: shape for fqn, shape in layout.shapes.items() if layout.by_fqn[fqn]}
    adapters = lora.adapter_shapes(model)
    check_same_model(needed | adapters, checkpoint)
    extra = sorted(set(filter(lora.is_adapter, stored)) - adapters.keys())
    if extra:
        raise ConfigError(
            f"{checkpoint} must have the adapters that the job's [lora] asks for, it also has"
            f" {extra[0]}: what is exported would lack it; name the job's own --job.config_file"
        )
    check_alpha(config, checkpoint)
    return model, to_hf, layout


@contextmanager
def whole_or_not_at_all(out: Path) -> Iterator[Path]:
    """Yield a directory that is renamed to ``out`` at the end, and removed after an error. Raises
    ConfigError if ``out`` is in use, or cannot be replaced."""
    given, out = out, Path(os.path.realpath(out))  # a link to a directory stays
    if out.is_dir() and (os.path.ismount(out) or out == Path.cwd()):
        raise ConfigError(
            f"--out must be a directory that can be replaced, got {str(given)!r}, a mount point or"
            " the working directory: name a new one in it"
        )
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(
            f"--out must be a new or an empty directory, got {str(given)!r}: its files would be"
            " mixed with others"
        )
    draft = out.with_name(out.name + ".partial")
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir(parents=True)
    try:
        yield draft
        if out.exists():
            out.rmdir()
        draft.rename(out)
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def export_version(config: Any, checkpoint: Path, out: Path, dtype: str) -> Written:
    """Write a version into ``out`` as a Hugging Face directory, its adapters merged. ``checkpoint``
    is its DCP folder. ``config`` comes from ``titan.jobconfig.parse``; only [model], [lora] and the
    settings that shape the model are used.

    Raises: ConfigError: the checkpoint is of another model, or the base model's files are missing.
        DataError: weights that are not finite. StorageError: the disk refuses a shard.
    """
    stored = Stored(checkpoint)
    model, to_hf, layout = _read_model(config, stored)
    keep = layout.shapes.keys() & {strip_prefixes(fqn) for fqn, _ in model.named_buffers()}
    scales = {name: layer.scale for name, layer in lora.adapted(model)}
    out.mkdir(parents=True, exist_ok=True)
    copy_assets(Path(config.model.hf_assets_path), out, dtype)
    return write_weights(
        hf_tensors(stored, layout, to_hf, getattr(torch, dtype), keep, scales), out
    )


def export_adapter(config: Any, checkpoint: Path, out: Path, dtype: str) -> Written:
    """Write the adapters of a version into ``out`` as PEFT does: adapter_model.safetensors and
    adapter_config.json. Raises as ``export_version``, and ConfigError for a job without [lora]."""
    if not config.lora.rank:
        raise ConfigError("--adapter needs a job with [lora], this one trains every weight")
    stored = Stored(checkpoint)
    model, _, base = _read_model(config, stored)
    layout = lora.adapter_layout(base, lora.adapter_shapes(model))
    tensors = {}
    for each in layout.tensors:
        value = stored.load(each.fqn)[each.fqn][each.row_ids()].to(getattr(torch, dtype))
        _check_finite(stored, each.name, value)
        tensors[each.name] = value
    settings = adapter_config(
        config.lora.rank, config.lora.alpha, config.lora.targets, base_of(config)
    )
    return write_adapter(tensors.items(), out, settings)


def export_last(config: Any, checkpoint: Path, out: Path) -> None:
    """Write the version of a checkpoint as ``hf_files.save_version`` leaves a run's last one in
    ``out``, as servers held it. Raises as ``export_version``."""
    write = export_adapter if sends_adapters(config.lora) else export_version
    write(config, checkpoint, out, config.weight_sync.wire_dtype)
