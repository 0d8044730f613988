"""Import torchtitan on a CPU without torch's compiler and the data sets, which are not needed."""

import contextlib
import functools
import importlib
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch

from titan_grpo.patches.torchtitan_cpu_device import no_accelerator
from titan_grpo.patches.versions import Range, require

WHY = (
    "`import torchtitan` calls torch.compile for attention kernels that only flex and varlen"
    " attention use, which loads torch's compiler, and imports the datasets library for text that"
    " GRPO does not read: half of a rank's start on a CPU"
)
APPLIES_TO: Range = ("torchtitan", "0.2.2", "0.3")
DELETE_WHEN = "torchtitan compiles and imports these at their first use, or < 0.3 is dropped"

_TEXT = "torchtitan.hf_datasets.text_datasets"
_BUILDERS = ("build_text_dataloader", "build_text_validation_dataloader")


def _compile_at_first_call(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """Return a function that calls torch.compile(function, **options) at its first call."""
    compiled: list[Callable[..., Any]] = []

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():  # part of a larger region, which compiles it
            return function(*args, **kwargs)
        if not compiled:
            compiled.append(torch.compile(function, **options))
        return compiled[0](*args, **kwargs)

    return call


class _TextDatasets(types.ModuleType):
    """Placeholder of torchtitan's module of text data sets; its first use loads the real one."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)

        def real() -> Any:
            if sys.modules.get(_TEXT) is self:
                del sys.modules[_TEXT]
            return getattr(importlib.import_module(_TEXT), name)

        # Modules import the builders by name, and call them later or never.
        return (lambda *args, **kwargs: real()(*args, **kwargs)) if name in _BUILDERS else real()


@contextlib.contextmanager
def deferred() -> Iterator[None]:
    """Within the context, imports of torchtitan skip its slow parts. With an accelerator nothing
    changes.

    Raises:
        UpstreamError: torchtitan's version is not in ``APPLIES_TO``.
    """
    if not no_accelerator():
        yield
        return
    require(APPLIES_TO, __name__)
    sys.modules.setdefault(_TEXT, _TextDatasets(_TEXT))
    real, torch.compile = torch.compile, _compile_at_first_call  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.compile = real
