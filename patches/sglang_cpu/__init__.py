"""Let SGLang start where its compiled kernels cannot be installed: a directory for PYTHONPATH of
the server.

``sitecustomize.py`` in it acts in every process of the server (SGLang spawns several), and in three
places only:

* ``import sgl_kernel`` gets ``sgl_kernel_stand_in.py`` if, and only if, no real one can be found.
  Every function of it raises NotImplementedError with its name: it is there to be imported, never
  to compute.
* before torchvision registers shape functions for its operators, those of its operators that are
  missing get their schemas, because PyPI's torchvision is built for CUDA and does not load its own
  beside the CPU build of torch.
* before SGLang makes room for the experts of each token (``--enable-return-routed-experts``), a
  CPU's memory for them is no longer registered with CUDA, which fails there.
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
"""Environment variable with a file: a function of the stand-in that is called appends its name
before it raises."""


def directory() -> str:
    """What to put in front of the server's PYTHONPATH."""
    return str(Path(__file__).resolve().parent)


def apply() -> bool:
    """True: the stand-in may take the place of a missing ``sgl_kernel``. Called at its
    import.

    Raises: UpstreamError: SGLang's version is not in ``APPLIES_TO``; it may call kernels where the
        tested ones do not.
    """
    require(APPLIES_TO, __name__)
    return True
