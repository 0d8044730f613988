"""Runs at the start of every Python process whose PYTHONPATH has this directory; what it does and
why: ``__init__.py``.

It imports nothing but the standard library until SGLang's imports come to it, and then runs the
``sitecustomize`` that this one hides, if there is another on the path.
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
"""Operators that torchvision describes to torch at import -> their schemas."""

_kept: list[object] = []
"""References: torch forgets the schemas of a library that is freed."""


class MissingKernels:
    """Finds ``sgl_kernel`` where no other finder does. It is the last one, so an installed package
    is preferred."""

    @staticmethod
    def find_spec(
        name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> object:
        """The stand-in's spec. UpstreamError for a version of SGLang that it was not written
        for."""
        if name not in KERNELS:
            return None
        from titan_grpo.patches import sglang_cpu

        sglang_cpu.apply()
        file = os.path.join(HERE, "sgl_kernel_stand_in.py")
        inside: list[str] | None = [] if name == "sgl_kernel" else None
        return importlib.util.spec_from_file_location(name, file, submodule_search_locations=inside)


class MissingSchemas:
    """Acts on the way to the module that registers torchvision's shape functions, and leaves
    finding it to the others."""

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> None:
        """Define the operators that torchvision's own library, which has been tried by then, did
        not bring."""
        if name == "torchvision._meta_registrations":
            import torch

            library = torch.library.Library("torchvision", "FRAGMENT")
            for operator, schema in SCHEMAS.items():
                if not hasattr(torch.ops.torchvision, operator):
                    library.define(schema)
            _kept.append(library)


class UnlockedMemory:
    """Acts on the way to the module that remembers the experts of each token, and leaves finding it
    to the others."""

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> None:
        """Let that module's memory be as it is allocated: SGLang registers it with CUDA, on a CPU
        too, where torch has none to call."""
        if name == "sglang.srt.state_capturer.base":
            from sglang.srt.mem_cache.pool_host import common

            def allocate(
                dims: Any, dtype: Any, device: str, pin_memory: bool, allocator: Any
            ) -> Any:
                return allocator.allocate(dims, dtype=dtype, device=device)

            common.ALLOC_MEMORY_FUNCS["cpu"] = allocate


def run_hidden() -> None:
    """Run the sitecustomize that Python would have found without this one. What it raises is for
    site.py, as ever."""
    others = [entry for entry in sys.path if os.path.realpath(entry) != HERE]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", others)
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


sys.meta_path.append(MissingKernels)  # type: ignore[arg-type]
sys.meta_path[:0] = [MissingSchemas, UnlockedMemory]
run_hidden()
