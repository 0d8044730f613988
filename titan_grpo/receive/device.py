"""The device that an engine's worker computes on, as a commit needs it: named, waited for, and
loaded from pinned memory."""

import logging
from collections.abc import Callable

import torch

from titan_grpo.errors import UpstreamError
from titan_grpo.layout.cuda_runtime import CudaRuntime

log = logging.getLogger("titan_grpo.receive")


class WorkerDevice:
    """The calling thread's CUDA device, if this process uses CUDA; else the CPU.

    Made by the worker's main thread: another thread's current device is GPU 0, whatever the model
    is on.
    """

    def __init__(self) -> None:
        used = torch.cuda.is_available() and torch.cuda.is_initialized()
        self.name = f"cuda:{torch.cuda.current_device()}" if used else "cpu"
        """ "cuda:N" by this process's own numbers, which its children share, or "cpu"."""

    def settle(self) -> None:
        """Wait until the device has done everything that was enqueued, on all streams."""
        if self.name != "cpu":
            torch.cuda.synchronize(self.name)

    def pin(self, image: torch.Tensor) -> Callable[[], None] | None:
        """Pin host memory (uint8[nbytes]), from which copies to the device are then several times
        as fast, and asynchronous; the call that undoes it. None without a device, or if it was
        refused."""
        if self.name == "cpu":
            return None
        pointer, nbytes = image.data_ptr(), image.numel()
        try:
            runtime = CudaRuntime()
            with torch.cuda.device(self.name):
                refusal = runtime.register(pointer, nbytes)
        except UpstreamError as error:
            refusal = str(error)
        if refusal is not None:
            log.warning(
                "%d bytes of staged weights could not be pinned (%s): each load reads pageable"
                " memory, and the pause is several times as long; raise the limit on locked memory"
                " (ulimit -l)",
                nbytes,
                refusal,
            )
            return None

        def unpin() -> None:
            # in whichever thread: without this the call would make a context on GPU 0
            with torch.cuda.device(self.name):
                runtime.unregister(pointer)

        return unpin
