"""Stand-in for the package ``sgl_kernel`` and its module ``sgl_kernel.mamba``: any function can be
imported, and raises when called."""

import os
from collections.abc import Callable
from typing import Any, NoReturn

from titan_grpo.patches.sglang_cpu import CALLS_VARIABLE


def __getattr__(name: str) -> Callable[..., NoReturn]:
    # Python itself looks up such names (__path__, __wrapped__, ...): they must be missing.
    if name.startswith("__"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

    def missing(*_: Any, **__: Any) -> NoReturn:
        if path := os.environ.get(CALLS_VARIABLE):
            with open(path, "a") as calls:
                calls.write(f"{__name__}.{name}\n")
        raise NotImplementedError(
            f"{__name__}.{name} was called, and only a stand-in for import is here: SGLang needs"
            " its compiled kernels for this model, option or processor; install them"
            " (sglang-kernel), or start SGLang as docs/configuration.md says"
        )

    missing.__name__ = missing.__qualname__ = name
    return missing
