"""The bytes of one version: in memory that several processes of one host share; hashes of their
blocks, and the fingerprint of them all.

A memfd and not a file in /dev/shm: it is not limited by that mount's size (64 MB in many
containers), it has no name that could collide, and it vanishes with the last process that holds it,
so that a killed run leaks nothing."""

import ctypes
import fcntl
import hashlib
import mmap
import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import xxhash
from blake3 import blake3

from titan_grpo.errors import ConfigError, PeerError, ProtocolError, SyncError
from titan_grpo.layout.manifest import Extent, Manifest, whole_pages
from titan_grpo.layout.memory import require_memory
from titan_grpo.runkey import Key

if TYPE_CHECKING:
    import torch

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


def _make_pages(
    mapped: mmap.mmap,
    extents: Sequence[Extent],
    made: Made = lambda _: None,
    reserve: int | None = None,
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

    ``inode`` distinguishes a reused pid or descriptor from the image that was meant.
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


def _require_found(ours: ImageAddress) -> None:
    """ConfigError if this process's own image is not where others look for it."""
    try:
        os.close(open_memfd(ours, os.O_RDONLY))
    except SyncError as error:
        raise ConfigError(
            f"/proc must show the files of this process as those of {ours.pid}, it does not"
            f" ({error.__cause__ or error}): no other process would find the weights here; start it"
            " with the /proc of its own pid namespace (unshare --mount-proc)"
        ) from error


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
        made: Made = lambda _: None,
    ) -> "SharedImage":
        """Allocate a zeroed image, or of its ``nbytes`` only these ``extents``: the rest has no
        memory. ``label`` is what /proc shows; ``made`` gets the bytes so far, on this thread.
        Raises ConfigError if the memory is not there, or other processes could not find it.

        The pages are reserved at once: without that a full machine shows as a SIGBUS in the middle
        of a step.
        """
        if nbytes < 1:
            raise ValueError(f"an image must have 1 byte or more, got {nbytes}")
        extents = ((0, nbytes),) if extents is None else extents
        pages = _pages(extents, nbytes)
        require_memory(sum(stop - start for start, stop in pages), f"the weight image {label}")
        fd = -1
        try:
            fd = os.memfd_create(label, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            os.ftruncate(fd, nbytes)
            mapped = mmap.mmap(fd, nbytes, flags=mmap.MAP_SHARED)
            _make_pages(mapped, pages, made, fd)
            # no process that attaches can shrink the file under the others' mappings
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
            address = ImageAddress(os.getpid(), fd, nbytes, os.fstat(fd).st_ino)
            _require_found(address)
            return cls(address, mapped, fd)
        except BaseException as error:  # ``made`` may raise anything
            if fd >= 0:
                os.close(fd)
            if isinstance(error, OSError):
                raise ConfigError(
                    f"the weight image {label} must have {nbytes} bytes of shared memory, which the"
                    f" kernel refuses ({error}): there is no room for a version; raise the limits"
                    " of this process (ulimit -a: -v, -f and -n) or of its container"
                ) from error
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
        _make_pages(mapped, _pages(extents, address.nbytes))
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


# Hashes.

BLOCK_HASHES: dict[str, Callable[[memoryview], bytes]] = {
    "xxh3": lambda block: xxhash.xxh3_128_digest(block),
    "blake3": lambda block: blake3(block).digest(),
}
"""Algorithm name to hash of one block: xxh3 is 16 bytes and the fastest, blake3 is 32 bytes and
cryptographic."""

KEYED = "blake3"
"""The algorithm that takes a key. Without the key no sender can make a block and a digest that fit
each other."""

CORES = os.cpu_count() or 1

HASH_THREADS = max(min(4, CORES), min(16, CORES // 4))
"""On a host of 8 GPUs, whose share of 235B takes 4 threads 2 s of keyed blake3, 16."""


def digest_block(pieces: Sequence[memoryview], algorithm: str, key: bytes | None = None) -> bytes:
    """Hash of one block, the bytes of its pieces in order, keyed with 32 bytes if ``key`` is given.

    Raises ConfigError for an unknown algorithm, or a key with one that takes none.
    """
    block = pieces[0] if len(pieces) == 1 else memoryview(b"".join(pieces))
    if key is not None:
        if algorithm != KEYED:
            raise ConfigError(
                f"with a run key the blocks' digests must be {KEYED}, got {algorithm!r}: others"
                " take no key"
            )
        return blake3(block, key=key).digest()
    try:
        hash_block = BLOCK_HASHES[algorithm]
    except KeyError:
        known = " or ".join(BLOCK_HASHES)
        raise ConfigError(f"weight_sync.digest must be {known}, got {algorithm!r}") from None
    return hash_block(block)


def block_digests(
    buffer: memoryview,
    manifest: Manifest,
    algorithm: str,
    key: bytes | None = None,
    part: int | None = None,
) -> tuple[bytes, ...]:
    """Hash of every block of an image, or of one part, in order. ``buffer`` is the image, uint8,
    ``manifest.total_bytes`` long; ``key`` as in digest_block. No other byte of it is read.

    On ``HASH_THREADS`` threads, which release the GIL: a hash is limited by the memory's bandwidth,
    which few cores use up.
    """
    if buffer.nbytes != manifest.total_bytes:
        raise ValueError(
            f"the buffer must have the manifest's {manifest.total_bytes} bytes, got {buffer.nbytes}"
        )

    def digest(index: int) -> bytes:
        return digest_block([buffer[a:b] for a, b in manifest.block(index)], algorithm, key)

    numbers = range(manifest.num_blocks) if part is None else manifest.blocks(part)
    with ThreadPoolExecutor(HASH_THREADS, thread_name_prefix="hash") as pool:
        return tuple(pool.map(digest, numbers))


@dataclass(frozen=True, slots=True)
class Hashing:
    """How a run's blocks are hashed. ``key``: EpochKeys.blocks, None without a run key."""

    algorithm: str
    key: Key | None = None

    @property
    def range_key(self) -> Key | None:
        """EpochKeys.ranges."""
        return self.key.derive("ranges") if self.key is not None else None

    def block(self, pieces: Sequence[memoryview]) -> bytes:
        """See digest_block."""
        return digest_block(pieces, self.algorithm, self.key.raw if self.key is not None else None)

    def blocks(
        self, image: memoryview, manifest: Manifest, part: int | None = None
    ) -> tuple[bytes, ...]:
        """See block_digests."""
        key = self.key.raw if self.key is not None else None
        return block_digests(image, manifest, self.algorithm, key, part)

    def split(self, raw: bytes | bytearray, count: int) -> list[bytes]:
        """``count`` digests that travelled as one. PeerError if they are not as many."""
        size = len(self.block(()))
        if len(raw) != size * count:
            raise PeerError(
                f"{count} {self.algorithm} digests must be {size * count} bytes, got {len(raw)}"
            )
        return [bytes(raw[i : i + size]) for i in range(0, len(raw), size)]


def fingerprint(manifest_digest: str, digests: Iterable[bytes]) -> str:
    """32 hex characters that name the content of a version: the layout and every block's hash, in
    order.

    Over keyed hashes it is keyed by them: no one else can make blocks that fit a fingerprint, or a
    fingerprint that fits.
    """
    state = hashlib.blake2b(manifest_digest.encode(), digest_size=16)
    for digest in digests:
        # the length first, so that two lists with the same concatenation differ
        state.update(len(digest).to_bytes(2, "little") + digest)
    return state.hexdigest()


def first_difference(expected: Sequence[bytes], found: Sequence[bytes]) -> int | None:
    """Index of the first block whose hash differs or is missing; None if the lists are equal."""
    for index, (a, b) in enumerate(zip(expected, found, strict=False)):
        if a != b:
            return index
    return None if len(expected) == len(found) else min(len(expected), len(found))
