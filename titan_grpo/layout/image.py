"""The bytes of one version in memory that several processes of one host share; and how much memory
this process may still take, by the machine's and the container's limit.

A memfd and not a file in /dev/shm: it is not limited by that mount's size (64 MB in many
containers), it has no name that could collide, and it vanishes with the last process that holds it,
so that a killed run leaks nothing."""

import ctypes
import fcntl
import mmap
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

from titan_grpo.errors import ConfigError, ProtocolError, SyncError
from titan_grpo.layout.parts import Extent, whole_pages

if TYPE_CHECKING:
    import torch

CGROUP_FILES = (
    ("memory.max", "memory.current", "inactive_file"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)
"""Per cgroup version (v2, v1): limit file, usage file, and the line of memory.stat that can be
reclaimed at once."""


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""  # that file does not exist under this kernel or cgroup version


def _table(text: str) -> dict[str, int]:
    """Lines "key[:] number ..." to a dict."""
    rows = (line.replace(":", " ").split() for line in text.splitlines())
    return {row[0]: int(row[1]) for row in rows if len(row) > 1 and row[1].isdigit()}


def _cgroup_folders(proc: Path, cgroup: Path) -> list[Path]:
    """Every folder whose limit binds this process, from its own cgroup up to the mount's root."""
    folders = [cgroup, cgroup / "memory"]  # a container often mounts its own cgroup as the root
    for line in _read(proc / "self" / "cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers not in ("", "memory"):
            continue
        root = cgroup / controllers
        parts = [part for part in path.split("/") if part and part != ".."]
        folders += [root.joinpath(*parts[:depth]) for depth in range(1, len(parts) + 1)]
    return folders


def _cgroup_room(folder: Path) -> list[int]:
    room = []
    for limit_file, usage_file, reclaimable in CGROUP_FILES:
        limit, usage = _read(folder / limit_file).strip(), _read(folder / usage_file).strip()
        if limit.isdigit() and usage.isdigit():
            cache = _table(_read(folder / "memory.stat")).get(reclaimable, 0)
            room.append(int(limit) - int(usage) + cache)
    return room


def available_memory(proc: Path = Path("/proc"), cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Bytes that can be allocated without swapping or being killed: the least of MemAvailable and
    all cgroup limits."""
    available = _table(_read(proc / "meminfo")).get("MemAvailable")
    rooms = [] if available is None else [available * 1024]
    for folder in _cgroup_folders(proc, cgroup):
        rooms += _cgroup_room(folder)
    if not rooms:
        raise ConfigError(
            f"the available memory could not be read under {proc} or {cgroup}: titan_grpo needs"
            " Linux"
        )
    return max(0, min(rooms))


def require_memory(nbytes: int, what: str, available: int | None = None) -> None:
    """Raise ConfigError if ``nbytes`` for ``what`` are not available now (``available``: measured
    unless given).

    Before the run, because a page that cannot be backed later is a SIGBUS or the kernel's OOM
    killer in mid-step.
    """
    have = available_memory() if available is None else available
    if nbytes > have:
        raise ConfigError(
            f"{what} needs {nbytes} bytes of host memory ({nbytes / 2**30:.2f} GiB), available are"
            f" {have} ({have / 2**30:.2f} GiB): the run would be killed when it fills them; use"
            " fewer weight_sync.slots, or a machine or container with more memory"
        )


__all__ = [
    "ImageAddress",
    "SharedImage",
    "available_memory",
    "open_memfd",
    "require_memory",
]

MADV_POPULATE_READ = 22
"""Advice number of Linux 5.14 and later that the mmap module does not name."""

PIECE_BYTES = 64 << 20
"""Memory is made in pieces of so many bytes."""

MOST_THREADS = 8
"""Threads that make memory, where there are as many cores: more do not zero pages faster."""

Made = Callable[[int], object]
"""Called with the number of bytes that have their memory, again and again until all have."""

_libc = ctypes.CDLL(None)
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


def _nothing(_: int) -> None:
    return


def _make_pages(
    mapped: mmap.mmap, extents: Sequence[Extent], made: Made, reserve: int | None = None
) -> None:
    """Give these whole pages their memory, and map it, on several threads. ``reserve``: the memfd,
    which has none yet; OSError if there is none. Page by page, the faults would make the first copy
    several times as long as the later ones."""
    base = ctypes.addressof(ctypes.c_char.from_buffer(mapped))

    def make(piece: Extent) -> int:
        start, nbytes = piece[0], piece[1] - piece[0]
        if reserve is not None:
            os.posix_fallocate(reserve, start, nbytes)
        # Not mmap.madvise, which holds the interpreter lock for half a second per GiB. For reading,
        # which is enough: the pages exist, so no write fault follows. A kernel before 5.14 refuses,
        # and faults page by page.
        _libc.madvise(base + start, nbytes, MADV_POPULATE_READ)
        return nbytes

    pieces = [
        (at, min(at + PIECE_BYTES, stop))
        for start, stop in extents
        for at in range(start, stop, PIECE_BYTES)
    ]
    threads = min(MOST_THREADS, len(os.sched_getaffinity(0)), max(1, len(pieces)))
    pool = ThreadPoolExecutor(threads, "memory")
    try:
        for done in accumulate(pool.map(make, pieces)):
            made(done)
    finally:
        pool.shutdown(cancel_futures=True)


@dataclass(frozen=True, slots=True)
class ImageAddress:
    """Where another process of this host finds an image: file descriptor ``fd`` of process ``pid``.

    ``inode`` tells a reused pid or descriptor from the image that was meant.
    """

    pid: int
    fd: int
    nbytes: int
    inode: int

    def to_json(self) -> dict[str, int]:
        """As a dict of numbers, for a JSON message."""
        return asdict(self)

    @classmethod
    def from_json(cls, record: dict[str, Any]) -> "ImageAddress":
        """Read to_json() back; TypeError for missing or unknown keys."""
        return cls(**{key: int(value) for key, value in record.items()})


def open_memfd(address: ImageAddress, mode: int) -> int:
    """A descriptor of another process's image, ``mode`` O_RDONLY or O_RDWR. SyncError if that
    process or that image is gone, or may not be read: the kernel admits the same user only."""
    path = f"/proc/{address.pid}/fd/{address.fd}"
    try:
        fd = os.open(path, mode | os.O_CLOEXEC)
    except OSError as error:
        raise SyncError(
            f"the weight image of process {address.pid} could not be opened ({error}): its process"
            " ended, or runs as another user or in another pid namespace; run both as one user in"
            " one container"
        ) from error
    found = os.fstat(fd)
    if (found.st_ino, found.st_size) != (address.inode, address.nbytes):
        os.close(fd)
        raise SyncError(
            f"the weight image of process {address.pid} must be inode {address.inode} with"
            f" {address.nbytes} bytes, got inode {found.st_ino} with {found.st_size}: it was"
            " replaced; ask its owner for the new address"
        )
    return fd


def _pages(extents: Sequence[Extent], nbytes: int) -> list[Extent]:
    """The whole pages that these extents are on, up to the end of the image."""
    return [(start, min(stop, nbytes)) for start, stop in whole_pages(extents, mmap.PAGESIZE)]


class SharedImage:
    """One image: mapped, shared, of fixed size. Made by ``create`` in one process, opened by
    ``attach`` in others."""

    def __init__(self, address: ImageAddress, mapped: mmap.mmap, fd: int | None) -> None:
        """Use ``create`` or ``attach`` instead. ``fd``: the owner's descriptor, which others open;
        taken over."""
        self.address = address
        self._map: mmap.mmap | None = mapped
        self._fd = fd

    @classmethod
    def create(
        cls,
        nbytes: int,
        label: str,
        extents: Sequence[Extent] | None = None,
        made: Made = _nothing,
    ) -> "SharedImage":
        """Allocate a zeroed image, or of its ``nbytes`` only these ``extents``: the rest has no
        memory. ``label`` is what /proc shows; ``made`` gets the bytes so far, on this thread.
        Raises ConfigError if the memory is not there.

        The pages are reserved at once: without that a full machine shows as a SIGBUS in the middle
        of a step.
        """
        if nbytes < 1:
            raise ValueError(f"an image must have 1 byte or more, got {nbytes}")
        extents = ((0, nbytes),) if extents is None else extents
        pages = _pages(extents, nbytes)
        require_memory(sum(stop - start for start, stop in pages), f"the weight image {label}")
        fd = os.memfd_create(label, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(fd, nbytes)
            mapped = mmap.mmap(fd, nbytes, flags=mmap.MAP_SHARED)
            _make_pages(mapped, pages, made, fd)
            # no process that attaches can shrink the file under the others' mappings
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
            address = ImageAddress(os.getpid(), fd, nbytes, os.fstat(fd).st_ino)
            return cls(address, mapped, fd)
        except BaseException:  # ``made`` may raise anything
            os.close(fd)
            raise

    @classmethod
    def attach(
        cls,
        address: ImageAddress,
        extents: Sequence[Extent] | None = None,
        serve: bool = False,
    ) -> "SharedImage":
        """Map another process's image, which was created with these ``extents``; with ``serve``
        others find it at this process too. Raises SyncError if that process or that image is gone,
        or may not be read."""
        fd = open_memfd(address, os.O_RDWR)
        extents = ((0, address.nbytes),) if extents is None else extents
        mapped = None
        try:
            mapped = mmap.mmap(fd, address.nbytes, flags=mmap.MAP_SHARED)
        finally:
            if not serve or mapped is None:
                os.close(fd)  # the mapping keeps the memory
        # of the extents only: elsewhere it would make pages for bytes of other hosts
        _make_pages(mapped, _pages(extents, address.nbytes), _nothing)
        if serve:
            return cls(replace(address, pid=os.getpid(), fd=fd), mapped, fd)
        return cls(address, mapped, None)

    @property
    def _open_map(self) -> mmap.mmap:
        if self._map is None:
            raise ProtocolError("a closed weight image was used")
        return self._map

    @property
    def buffer(self) -> memoryview:
        """The image as writable bytes, uint8[nbytes]. Each call gives a new view of the same
        memory."""
        return memoryview(self._open_map)

    def tensor(self) -> "torch.Tensor":
        """The image as torch.uint8[nbytes] on the CPU, sharing the memory."""
        import torch  # here: the doctor asks for the memory where there may be no torch

        return torch.frombuffer(self.buffer, dtype=torch.uint8)

    def close(self) -> None:
        """Let go of the image; idempotent. Views and tensors that are still held stay valid: the
        last one unmaps it."""
        # not mmap.close(): torch does not hold a buffer export, so that would pull the pages from a
        # tensor
        self._map = None
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def __enter__(self) -> "SharedImage":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
