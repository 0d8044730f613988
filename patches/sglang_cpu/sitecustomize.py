"""Python runs this at the start of every process with this directory in PYTHONPATH; see
``__init__.py``.

It imports only the standard library until SGLang imports one of its modules, and runs the
``sitecustomize`` that it hides, if there is another on the path.
"""

import importlib.machinery
import importlib.util
import os
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

HERE = os.path.dirname(os.path.realpath(__file__))
KERNELS = ("sgl_kernel", "sgl_kernel.mamba")
SCHEMAS = {
    "nms": "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms": "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
}
"""Operators that torchvision registers shape functions for at import -> their schemas."""

_kept: list[object] = []
"""Libraries to keep alive: torch drops the schemas of a freed library."""


class MissingKernels:
    """Finder of the stand-in for ``sgl_kernel``. It is the last finder, so an installed package is
    preferred."""

    @staticmethod
    def find_spec(
        name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> object:
        """Return the stand-in's spec. Raises UpstreamError for a version of SGLang that it was not
        written for."""
        if name not in KERNELS:
            return None
        from titan_grpo.patches import sglang_cpu

        sglang_cpu.apply()
        file = os.path.join(HERE, "sgl_kernel_stand_in.py")
        inside: list[str] | None = [] if name == "sgl_kernel" else None
        return importlib.util.spec_from_file_location(name, file, submodule_search_locations=inside)


class MissingSchemas:
    """Finder that acts before the module that registers torchvision's shape functions is found, and
    leaves finding it to the others."""

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> None:
        """Define the operators that torchvision's own library, loaded before, does not have."""
        if name == "torchvision._meta_registrations":
            import torch

            library = torch.library.Library("torchvision", "FRAGMENT")
            for operator, schema in SCHEMAS.items():
                if not hasattr(torch.ops.torchvision, operator):
                    library.define(schema)
            _kept.append(library)


class UnlockedMemory:
    """Finder that acts before the module that records the experts of each token is found, and
    leaves finding it to the others."""

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> None:
        """Skip the registration of that module's memory with CUDA: SGLang does it on a CPU too,
        where it fails."""
        if name == "sglang.srt.state_capturer.base":
            from sglang.srt.mem_cache.pool_host import common

            def allocate(
                dims: Any, dtype: Any, device: str, pin_memory: bool, allocator: Any
            ) -> Any:
                return allocator.allocate(dims, dtype=dtype, device=device)

            common.ALLOC_MEMORY_FUNCS["cpu"] = allocate


def run_hidden() -> None:
    """Run the sitecustomize that Python would find without this one. Its exceptions go to site.py,
    as usual."""
    others = [entry for entry in sys.path if os.path.realpath(entry) != HERE]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", others)
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


sys.meta_path.append(MissingKernels)  # type: ignore[arg-type]
sys.meta_path[:0] = [MissingSchemas, UnlockedMemory]
run_hidden()
