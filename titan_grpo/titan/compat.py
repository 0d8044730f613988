"""Gate to torchtitan: supported versions, and the patches before its first import."""

import importlib
import logging
from collections.abc import Collection
from importlib import metadata
from typing import Any

from titan_grpo.errors import UpstreamError
from titan_grpo.patches.versions import Range, inside

TORCHTITAN: Range = ("torchtitan", "0.2.2", "0.4")

THREE: Range = ("torchtitan", "0.3", "0.4")


def refusal(version: str | None) -> str:
    """Return why this torchtitan version cannot be used, with the remedy; empty if it can. None:
    not installed. Pure."""
    if version is not None and inside(version, TORCHTITAN):
        return ""
    _, first, beyond = TORCHTITAN
    return (
        f"training plugs into torchtitan >={first},<{beyond}, and"
        f" {f'{version} is' if version else 'none is'} installed: pip install 'titan_grpo[train]'"
        " (0.2.2) or 'titan_grpo[train03]' (0.3)"
    )


def require_torchtitan() -> str:
    """Return the installed version of torchtitan without importing it. Raises UpstreamError if it
    is missing or unsupported."""
    try:
        version: str | None = metadata.version("torchtitan")
    except metadata.PackageNotFoundError:
        version = None
    reason = refusal(version)
    if version is None or reason:
        raise UpstreamError(reason)
    return version


def upstream() -> Any:
    """Return the module for the installed torchtitan: ``upstream02`` or ``upstream03``. Call
    ``prepare`` first."""
    number = "03" if inside(require_torchtitan(), THREE) else "02"
    return importlib.import_module(f"titan_grpo.titan.upstream{number}")


def other_saver(names: Collection[str], version: str) -> str:
    """Return why torchtitan ``version`` cannot load a checkpoint with these tensors, or "". 0.2.2
    and 0.3 name layers and optimizer state differently. Pure."""
    three = inside(version, THREE)
    if any((".attention.wq." if three else ".attention.qkv_linear.") in name for name in names):
        theirs = "0.2.2" if three else "0.3"
        return (
            f"was saved with torchtitan {theirs}, and {version} is installed, which names layers"
            f" and optimizer state otherwise: go on with torchtitan {theirs}, or export the version"
            " there (titan-grpo export) and start from those files"
            " (checkpoint.initial_load_in_hf)"
        )
    return ""


def _has_a_reader(record: logging.LogRecord) -> bool:
    """Whether a line is not that of each adapter of a model in one file, on how torchtitan would
    save it: here it never does."""
    return "Defaulting to saving a single safetensors file" not in str(record.msg)


def prepare() -> bool:
    """Check the version and apply all patches that act at import, in the one order that works. Call
    before anything imports torchtitan. Idempotent.

    Returns whether training runs on the CPU; then apply ``torchtitan_gloo_premul`` to each sharded
    model.

    Raises:
        UpstreamError: an unsupported version of torchtitan or torch.
        ProtocolError: torchtitan was imported before.
    """
    three = inside(require_torchtitan(), THREE)
    logging.getLogger().addFilter(_has_a_reader)
    from titan_grpo.patches import (
        torch_selective_markers,
        torch_set_timeout,
        torchtitan_async_ep,
        torchtitan_cpu_device,
        torchtitan_llama3_shards,
        torchtitan_moe_histc,
        torchtitan_slow_imports,
        torchtitan_tied_embeddings,
        torchtitan_triton,
    )

    torch_selective_markers.apply()
    if three:
        torch_set_timeout.apply()
        torchtitan_async_ep.apply()
        on_cpu = torchtitan_cpu_device.apply()
        torchtitan_llama3_shards.apply()
        return on_cpu
    torchtitan_triton.apply()
    with torchtitan_slow_imports.deferred():
        on_cpu = torchtitan_cpu_device.apply()
    torchtitan_moe_histc.apply()
    torchtitan_tied_embeddings.apply()
    torchtitan_llama3_shards.apply()
    return on_cpu
