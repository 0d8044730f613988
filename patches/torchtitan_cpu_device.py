"""Make torchtitan's trainer run without an accelerator: device type, memory monitor, barrier."""

import sys
from typing import Any

import torch
import torch._utils
import torch.cpu

from titan_grpo.errors import ProtocolError
from titan_grpo.patches.versions import Range, require

WHY = (
    'torchtitan reads its device type once at import and falls back to "cuda"; its memory monitor'
    " and its barrier call functions that torch.cpu lacks (get_device_name, an integer"
    " current_device)"
)
APPLIES_TO: Range = ("torchtitan", "0.2.2", "0.4")
DELETE_WHEN = "torchtitan trains on CPU as released, or < 0.4 is no longer supported"

_UTILS = "torchtitan.tools.utils"


def _cpu_device_type() -> str:
    return "cpu"


def no_accelerator() -> bool:
    """Whether training runs on the CPU. MPS does not count as an accelerator: no process group
    backend reduces on it."""
    return torch._utils._get_available_device_type() in (None, "cpu", "mps")


class CpuDeviceModule:
    """torch.cpu, with the current device as an index, as ``barrier(device_ids=...)`` needs it."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cpu, name)

    def current_device(self) -> int:
        """Index of the only device."""
        return 0


class CpuMemoryMonitor:
    """Replacement of torchtitan's DeviceMemoryMonitor: a CPU has no device memory to report."""

    device_name = "cpu"
    device_capacity_gib = 0.0

    def get_peak_stats(self) -> Any:
        """Return zeros."""
        from torchtitan.components.metrics import DeviceMemStats

        return DeviceMemStats(0.0, 0.0, 0.0, 0.0, 0, 0)

    def reset_peak_stats(self) -> None:
        """Do nothing."""


def apply() -> bool:
    """Make torchtitan use the CPU, unless there is an accelerator; return whether it does.

    Must run after ``torchtitan_triton`` and before torchtitan is imported: its modules copy the
    device type by name.

    Raises:
        UpstreamError: torchtitan's version is not in ``APPLIES_TO``.
        ProtocolError: torchtitan was imported earlier and has the wrong device type.
    """
    if not no_accelerator():
        return False
    require(APPLIES_TO, __name__)
    loaded = sys.modules.get(_UTILS)
    if loaded is not None and loaded.device_type != "cpu":
        raise ProtocolError(
            f"patch {__name__} came after `import torchtitan`, which holds device type"
            f" {loaded.device_type!r} by now; call titan_grpo.titan.compat.prepare() before"
            " anything imports torchtitan"
        )
    torch._utils._get_available_device_type = _cpu_device_type
    import torchtitan.components.metrics as metrics
    import torchtitan.distributed.utils as distributed_utils

    metrics.build_device_memory_monitor = CpuMemoryMonitor
    distributed_utils.device_module = CpuDeviceModule()
    return True
