"""Make torchtitan importable without triton, and able to route tokens to experts without a GPU."""

import importlib.util
import sys
import types
from pathlib import Path

from titan_grpo.errors import UpstreamError
from titan_grpo.patches.torchtitan_cpu_device import no_accelerator
from titan_grpo.patches.versions import Range, require

WHY = (
    "`import torchtitan` reaches models/moe/kernels.py, which imports triton unconditionally; the"
    " CPU build of torch brings none, so nothing of torchtitan can be imported. A CUDA build brings"
    " it, and on a machine without a GPU expert parallel ranks end in its kernel: 0 active drivers"
)
APPLIES_TO: Range = ("torchtitan", "0.2.2", "0.3")
DELETE_WHEN = "torchtitan guards that import, or < 0.3 is no longer supported"

_MODULE = "torchtitan.models.moe.kernels"


def _placeholder() -> dict[str, types.ModuleType]:
    """Return the modules that importing kernels.py needs: ``triton.jit`` as a decorator,
    ``tl.constexpr`` as an annotation."""
    language = types.ModuleType("triton.language")
    language.constexpr = object  # type: ignore[attr-defined]
    triton = types.ModuleType("triton")
    triton.jit = lambda function: function  # type: ignore[attr-defined]
    triton.language = language  # type: ignore[attr-defined]
    return {"triton": triton, "triton.language": language}


def _fill_indices(*args: object, block_size: int = 128, max_blocks: int = 1024) -> object:
    """Replace upstream's wrapper by upstream's CPU reference, which has no launch sizes."""
    del block_size, max_blocks
    return sys.modules[_MODULE].fill_indices_cpu(*args)


def _unloaded_module() -> types.ModuleType:
    # find_spec of the top-level package runs none of its code, unlike find_spec of a submodule.
    package = importlib.util.find_spec("torchtitan")
    if package is None or package.origin is None:
        raise UpstreamError(
            "torchtitan is installed without its package directory; reinstall it (pip install"
            " --force-reinstall)"
        )
    path = Path(package.origin).parent / "models" / "moe" / "kernels.py"
    spec = importlib.util.spec_from_file_location(_MODULE, path)
    if spec is None:
        raise UpstreamError(f"{path} cannot be loaded as a Python file; reinstall torchtitan")
    return importlib.util.module_from_spec(spec)


def apply() -> bool:
    """Load kernels.py, with a temporary placeholder if triton is missing, and use upstream's CPU
    reference. With triton and an accelerator, do nothing. Return whether it is in place.

    Must run before torchtitan is imported.

    Raises:
        UpstreamError: torchtitan's version is not in ``APPLIES_TO``.
    """
    if _MODULE in sys.modules:
        return getattr(sys.modules[_MODULE], "fill_indices_wrapper", None) is _fill_indices
    installed = importlib.util.find_spec("triton") is not None
    if installed and not no_accelerator():
        return False
    require(APPLIES_TO, __name__)
    module = _unloaded_module()
    placeholder = {} if installed else _placeholder()
    sys.modules.update(placeholder)
    try:
        module.__loader__.exec_module(module)  # type: ignore[union-attr]
    finally:
        # Other packages probe for triton and must still find none.
        for name in placeholder:
            del sys.modules[name]
    module.fill_indices_wrapper = _fill_indices  # type: ignore[attr-defined]
    sys.modules[_MODULE] = module
    return True
