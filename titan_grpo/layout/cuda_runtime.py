"""Calls of the CUDA runtime that torch does not offer: pin and unpin foreign memory, copy a strided
block.

torch's own ``copy_`` to a strided host tensor goes through a pageable temporary and blocks the
host; ``cudaMemcpy2DAsync`` does not. A failed call leaves an error behind that torch would report
for its next kernel launch, so it is cleared here.
"""

import ctypes
from dataclasses import dataclass
from pathlib import Path

from titan_grpo.errors import SyncError, UpstreamError

REGISTER_PORTABLE = 1
DEVICE_TO_HOST = 2


@dataclass(frozen=True, slots=True)
class Block:
    """Strided memory: rows that start ``pitch`` bytes apart, the first at address ``pointer``."""

    pointer: int
    pitch: int


class CudaRuntime:
    """The process's CUDA runtime, through ctypes. Calls act on the current device of the calling
    thread."""

    def __init__(self) -> None:
        """Find the library that torch loaded. Raises UpstreamError if there is none."""
        path = loaded_library("libcudart")
        if path is None:
            raise UpstreamError(
                "torch must have loaded libcudart as a shared library, this build did not: weights"
                " cannot be copied without blocking the trainer; use a torch wheel built for CUDA"
            )
        lib = ctypes.CDLL(path)
        size, pointer = ctypes.c_size_t, ctypes.c_void_p
        lib.cudaHostRegister.argtypes = [pointer, size, ctypes.c_uint]
        lib.cudaHostUnregister.argtypes = [pointer]
        way = ctypes.c_int
        lib.cudaMemcpy2DAsync.argtypes = [pointer, size, pointer, size, size, size, way, pointer]
        lib.cudaMemcpyAsync.argtypes = [pointer, pointer, size, ctypes.c_int, pointer]
        lib.cudaGetErrorString.argtypes = [ctypes.c_int]
        lib.cudaGetErrorString.restype = ctypes.c_char_p
        self._lib = lib

    def _message(self, code: int) -> str:
        # Clear the error: torch checks the last one after each of its own launches.
        self._lib.cudaGetLastError()
        text: bytes = self._lib.cudaGetErrorString(code)
        return text.decode()

    def register(self, pointer: int, nbytes: int) -> str | None:
        """Pin host memory that torch did not allocate; return why it was refused, or None."""
        code = self._lib.cudaHostRegister(pointer, nbytes, REGISTER_PORTABLE)
        return None if code == 0 else self._message(code)

    def unregister(self, pointer: int) -> None:
        """Undo ``register``. Ignore a refusal: it only comes when the context is gone, and the pin
        with it."""
        code = self._lib.cudaHostUnregister(pointer)
        if code != 0:
            self._message(code)

    def copy_to_host(self, host: Block, device: Block, width: int, rows: int, stream: int) -> None:
        """Enqueue a copy of ``rows`` rows of ``width`` bytes on ``stream`` (a cudaStream_t). Raises
        SyncError if refused."""
        if rows == 1:
            # A row may have any length: cudaMemcpy2DAsync takes pitches below 2 GiB only.
            way = width, DEVICE_TO_HOST, stream
            code = self._lib.cudaMemcpyAsync(host.pointer, device.pointer, *way)
        else:
            ends = host.pointer, host.pitch, device.pointer, device.pitch
            code = self._lib.cudaMemcpy2DAsync(*ends, width, rows, DEVICE_TO_HOST, stream)
        if code != 0:
            raise SyncError(
                f"a copy of {rows} x {width} bytes from the device was refused:"
                f" {self._message(code)}; nothing was published"
            )


def loaded_library(name: str, maps: Path = Path("/proc/self/maps")) -> str | None:
    """Return the path of the mapped shared library ``name``; None if it is not mapped. A wheel may
    put a hash into the file name: libcudart-1b2c3d4e.so.12."""
    # The path of another file that is mapped may be no text.
    for line in maps.read_text(errors="surrogateescape").splitlines():
        path = line.partition("/")[2]
        if Path(path).name.startswith((name + ".so", name + "-")):
            return "/" + path
    return None
