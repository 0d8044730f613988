"""Make SGLang start without its compiled kernels: this directory goes into the server's PYTHONPATH.

Its ``sitecustomize.py`` runs in every process of the server (SGLang spawns several), and changes
three things:

* ``import sgl_kernel`` loads ``sgl_kernel_stand_in.py`` if no real package can be found. All its
  functions raise NotImplementedError with their names: they can be imported, but not called.
* Before torchvision registers shape functions for its operators, missing operators get their
  schemas: PyPI's torchvision is built for CUDA and does not load its operators with torch for CPU.
* Before SGLang allocates memory for the experts of each token (``--enable-return-routed-experts``),
  registering a CPU's memory with CUDA, which would fail, is turned off.
"""

from pathlib import Path

from titan_grpo.patches.versions import Range, require

WHY = (
    "PyPI has SGLang's kernel packages (sgl-kernel, sglang-kernel) for CUDA only, without their"
    " sources, and a few modules of SGLang import names from `sgl_kernel` also on a CPU whose every"
    " layer then runs in pure torch. SGLang imports torchvision for models without pictures too,"
    " and PyPI's build fails beside torch for CPU: 'operator torchvision::nms does not exist'."
)
APPLIES_TO: Range = ("sglang", "0.5.20", "0.5.24")
DELETE_WHEN = (
    "SGLang's CPU kernels, or a build for CPU that needs none, come from PyPI, and"
    " tests/e2e/test_sglang.py passes"
)

CALLS_VARIABLE = "TITAN_GRPO_SGL_KERNEL_CALLS"
"""Environment variable with the path of a file: a function of the stand-in appends its name to it
before raising."""


def directory() -> str:
    """Return the directory for the front of the server's PYTHONPATH."""
    return str(Path(__file__).resolve().parent)


def apply() -> bool:
    """Check, at its import, that the stand-in may replace a missing ``sgl_kernel``; return True.

    Raises:
        UpstreamError: SGLang's version is not in ``APPLIES_TO``: it may call other kernels.
    """
    require(APPLIES_TO, __name__)
    return True
