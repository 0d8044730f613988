"""Make torchtitan 0.3's trainer importable without triton."""

import importlib.util
import sys
import types
from typing import Any

from titan_grpo.errors import UpstreamError
from titan_grpo.patches.versions import Range, require

WHY = (
    "`import torchtitan.trainer` reaches distributed/minimal_async_ep/kernels.py, which imports"
    " triton unconditionally; the CPU build of torch brings none"
)
APPLIES_TO: Range = ("torchtitan", "0.3", "0.4")
DELETE_WHEN = "torchtitan guards that import"

_MODULE = "torchtitan.distributed.minimal_async_ep.kernels"


def _kernel(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*args: object, **options: object) -> None:
        raise UpstreamError(f"{_MODULE}.{name} needs triton, which is not installed")

    return missing


def apply() -> bool:
    """Without triton, replace the module of kernels by one whose functions raise when called.
    Return whether it is replaced. Must run before torchtitan's trainer is imported.

    Raises:
        UpstreamError: torchtitan's version is not in ``APPLIES_TO``.
    """
    if _MODULE in sys.modules or importlib.util.find_spec("triton") is not None:
        return getattr(sys.modules.get(_MODULE), "__getattr__", None) is _kernel
    require(APPLIES_TO, __name__)
    module = types.ModuleType(_MODULE)
    module.__getattr__ = _kernel  # type: ignore[method-assign]
    sys.modules[_MODULE] = module
    return True
