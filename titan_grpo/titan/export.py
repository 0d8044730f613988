"""A checkpointed version as Hugging Face safetensors: in one process, without a GPU, one parameter
at a time.

Names and layout come from the model's own state dict adapter, as in a weight sync, and so does the
type: what is exported is what the servers held at that version.
"""

import copy
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from titan_grpo.errors import ConfigError, DataError
from titan_grpo.layout.infer import Layout, infer_layout
from titan_grpo.titan.hf_files import Written, copy_assets, write_weights
from titan_grpo.titan.weight_sync import ToHF, exported_tensors

PREFIX = "step-"
"""torchtitan's name of a checkpoint's folder, before the step; a version is a number of optimizer
steps."""


def versions_in(folder: Path) -> list[int]:
    """Versions that a checkpoint folder holds, ascending: its step-N folders with the metadata that
    completes them."""
    names = [p.parent.name.removeprefix(PREFIX) for p in folder.glob(f"{PREFIX}*/.metadata")]
    return sorted(int(name) for name in names if name.isdigit())


def checkpoint_of(folder: Path, version: int) -> Path:
    """Folder of one version. ``folder`` is the checkpoint folder, or the dump folder above it.

    Raises ConfigError if the version is not there, naming those that are.
    """
    for place in (folder, folder / "checkpoint"):
        if version in versions_in(place):
            return place / f"{PREFIX}{version}"
    have = versions_in(folder) or versions_in(folder / "checkpoint")
    found = (
        f"it has {', '.join(map(str, have))}"
        if have
        else "it has no complete checkpoint (DCP folders step-N) at all"
    )
    raise ConfigError(
        f"{folder} must hold version {version}: {found}; name another --version or --checkpoint"
    )


def skeleton(config: Any) -> tuple[torch.nn.Module, ToHF]:
    """The model of a parsed configuration without memory, and its adapter's to_hf."""
    from torchtitan.protocols.train_spec import get_train_spec

    from titan_grpo.titan.flavors import disable_unexported_buffers, register_tiny_flavors

    register_tiny_flavors()
    spec = get_train_spec(config.model.name)
    # A copy: the table of flavors is shared, and update_from_config changes what it gets.
    args = copy.deepcopy(spec.model_args[config.model.flavor])
    args.update_from_config(config)
    adapter = spec.state_dict_adapter(args, config.model.hf_assets_path)
    disable_unexported_buffers(args, adapter)
    with torch.device("meta"):
        model: torch.nn.Module = spec.model_cls(args)
    return model, adapter.to_hf


def stored_shapes(checkpoint: Path) -> dict[str, TensorStorageMetadata]:
    """Name -> shape and type of every tensor of a DCP checkpoint."""
    metadata = dcp.FileSystemReader(checkpoint).read_metadata()
    return {
        k: v
        for k, v in metadata.state_dict_metadata.items()
        if isinstance(v, TensorStorageMetadata)
    }


def check_same_model(
    shapes: dict[str, tuple[int, ...]], stored: dict[str, TensorStorageMetadata], checkpoint: Path
) -> None:
    """Raise ConfigError unless the checkpoint holds every tensor of the model, in its shape."""
    for fqn, shape in shapes.items():
        have = tuple(stored[fqn].size) if fqn in stored else None
        if have != shape:
            raise ConfigError(
                f"{checkpoint} must be a checkpoint of model.name and model.flavor: {fqn} must have"
                f" the shape {shape}, it {'is missing' if have is None else f'has {have}'}; name"
                " the job's own --job.config_file"
            )


def hf_tensors(
    checkpoint: Path, layout: Layout, to_hf: ToHF, dtype: torch.dtype, keep: set[str]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors by HF name, parameters in ``dtype``, those in ``keep`` as they were stored; one
    parameter in memory at a time."""
    stored = stored_shapes(checkpoint)
    for fqn, parts in layout.by_fqn.items():
        if not parts:
            continue  # tied to another one
        state = {fqn: torch.empty(tuple(stored[fqn].size), dtype=stored[fqn].properties.dtype)}
        dcp.load(state, storage_reader=dcp.FileSystemReader(checkpoint), no_dist=True)
        yielded = 0
        for name, tensor in to_hf(state).items():
            yielded += tensor.numel()
            if not torch.isfinite(tensor).all():
                raise DataError(
                    f"{checkpoint}: {name} holds NaN or infinity, so a server would emit noise;"
                    " export an earlier version"
                )
            yield name, tensor if fqn in keep else tensor.to(dtype)
        if yielded != state[fqn].numel():
            raise DataError(
                f"{checkpoint}: {fqn} has {state[fqn].numel()} elements, its adapter exported"
                f" {yielded}"
            )


def export_version(config: Any, checkpoint: Path, out: Path, dtype: str) -> Written:
    """Write a version as a Hugging Face directory; ``checkpoint`` is its DCP folder. ``out``
    appears whole or not at all.

    ``config`` comes from ``titan.jobconfig.parse``; of it only [model] and what shapes the model
    are used.

    Raises: ConfigError: ``out`` is in use, the checkpoint is of another model, or the base model's
        files are missing. DataError: weights that are not finite.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(
            f"--out must be a new or an empty directory, got {str(out)!r}: its files would be mixed"
            " with others"
        )
    model, to_hf = skeleton(config)
    weights = exported_tensors(model, to_hf)
    shapes = {fqn: tuple(tensor.shape) for fqn, tensor in weights}
    tied = {"output.weight"} if getattr(model, "enable_weight_tying", False) else set()
    layout = infer_layout(to_hf, shapes, tied)
    check_same_model(
        {fqn: s for fqn, s in shapes.items() if layout.by_fqn[fqn]},
        stored_shapes(checkpoint),
        checkpoint,
    )
    keep = set(shapes) - {fqn for fqn, _ in model.named_parameters()}
    draft = out.with_name(out.name + ".partial")
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir(parents=True)
    try:
        copy_assets(Path(config.model.hf_assets_path), draft, dtype)
        written = write_weights(
            hf_tensors(checkpoint, layout, to_hf, getattr(torch, dtype), keep), draft
        )
        if out.exists():
            out.rmdir()
        draft.rename(out)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return written
