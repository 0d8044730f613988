"""Image of one version in memory shared by processes of one host; hashes of its blocks, and the
fingerprint over all.

It is a memfd, not a file in /dev/shm: that mount's size (64 MB in many containers) does not limit
it, it has no name that could collide, and the kernel frees it with the last process that holds it,
so a killed run leaks nothing."""

import ctypes
import fcntl
import hashlib
import mmap
import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
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
"""madvise number of Linux 5.14 and later; the mmap module has no name for it."""

PIECE_BYTES = 64 << 20
"""Bytes that one thread allocates at a time."""

PIECES_PER_CHECK = 32
"""Pieces that are allocated between two looks at the memory that is left: 2 GiB."""

MOST_THREADS = 8
"""Most threads that allocate memory: more do not zero pages faster."""

Made = Callable[[int], object]
"""Progress callback: the number of bytes allocated so far, after each piece."""

_libc = ctypes.CDLL(None)
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


def _make_pages(
    mapped: mmap.mmap,
    extents: Sequence[Extent],
    made: Made = lambda _: None,
    reserve: int | None = None,
    what: str = "",
) -> None:
    """Allocate and map these whole pages, on several threads. Otherwise a fault for each page would
    make the first copy several times as long as later ones. ``reserve``: a memfd whose pages are
    not allocated yet; ``what`` they are for. Raises OSError or ConfigError if there is no memory
    for it."""
    base = ctypes.addressof(ctypes.c_char.from_buffer(mapped))

    def make(piece: Extent) -> int:
        start, nbytes = piece[0], piece[1] - piece[0]
        if reserve is not None:
            os.posix_fallocate(reserve, start, nbytes)
        # Not mmap.madvise: it holds the interpreter lock for half a second per GiB. Populating for
        # reading is enough: the pages exist, so no write fault follows. A kernel before 5.14
        # refuses the advice; then each page faults on first use.
        _libc.madvise(base + start, nbytes, MADV_POPULATE_READ)
        return nbytes

    pieces = [
        (at, min(at + PIECE_BYTES, stop))
        for start, stop in extents
        for at in range(start, stop, PIECE_BYTES)
    ]
    threads = min(MOST_THREADS, len(os.sched_getaffinity(0)), max(1, len(pieces)))
    left, done = sum(stop - start for start, stop in pieces), 0
    pool = ThreadPoolExecutor(threads, "memory")
    try:
        for first in range(0, len(pieces), PIECES_PER_CHECK):
            if reserve is not None:
                # Not once before all: servers that start together on a host each find the same
                # memory free, and the OOM killer would end an engine.
                require_memory(left - done, what)
            for nbytes in pool.map(make, pieces[first : first + PIECES_PER_CHECK]):
                done += nbytes
                made(done)
    finally:
        pool.shutdown(cancel_futures=True)


@dataclass(frozen=True, slots=True)
class ImageAddress:
    """Address of an image for other processes of the host: descriptor ``fd`` of process ``pid``.

    ``inode`` detects a pid or descriptor that was reused for another file.
    """

    pid: int
    fd: int
    nbytes: int
    inode: int

    def to_json(self) -> dict[str, int]:
        """Return a dict of numbers, for a JSON message."""
        return asdict(self)

    @classmethod
    def from_json(cls, record: dict[str, Any]) -> "ImageAddress":
        """Read to_json() back. Raises TypeError for missing or unknown keys."""
        return cls(**{key: int(value) for key, value in record.items()})


def open_memfd(address: ImageAddress, mode: int) -> int:
    """Open another process's image, ``mode`` O_RDONLY or O_RDWR; return the descriptor. Raises
    SyncError if process or image is gone, or the kernel refuses: it must be the same user's."""
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
    """Raise ConfigError if other processes cannot find this process's image under /proc."""
    try:
        os.close(open_memfd(ours, os.O_RDONLY))
    except SyncError as error:
        raise ConfigError(
            f"/proc must show the files of this process as those of {ours.pid}, it does not"
            f" ({error.__cause__ or error}): no other process would find the weights here; start it"
            " with the /proc of its own pid namespace (unshare --mount-proc)"
        ) from error


def _pages(extents: Sequence[Extent], nbytes: int) -> list[Extent]:
    """Round extents out to whole pages, up to the end of the image."""
    return [(start, min(stop, nbytes)) for start, stop in whole_pages(extents, mmap.PAGESIZE)]


class SharedImage:
    """One mapped, shared image of fixed size: ``create`` it in one process, ``attach`` to it in
    others."""

    def __init__(self, address: ImageAddress, mapped: mmap.mmap, fd: int | None) -> None:
        """Use ``create`` or ``attach`` instead. ``fd``: the descriptor that other processes open;
        the object owns and closes it."""
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
        """Allocate a zeroed image; with ``extents`` allocate only those of its ``nbytes``.
        ``label``: its name in /proc; ``made``: called on this thread.

        The pages are reserved now: otherwise a machine without memory shows as a SIGBUS in the
        middle of a step. Raises ConfigError if there is no memory, or if other processes could not
        find the image.
        """
        if nbytes < 1:
            raise ValueError(f"an image must have 1 byte or more, got {nbytes}")
        extents = ((0, nbytes),) if extents is None else extents
        pages, what = _pages(extents, nbytes), f"the weight image {label}"
        require_memory(sum(stop - start for start, stop in pages), what)
        fd = -1
        try:
            fd = os.memfd_create(label, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            os.ftruncate(fd, nbytes)
            mapped = mmap.mmap(fd, nbytes, flags=mmap.MAP_SHARED)
            _make_pages(mapped, pages, made, fd, f"the rest of {what}")
            # Seal it: shrinking the file would make other mappings fault with SIGBUS.
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
            address = ImageAddress(os.getpid(), fd, nbytes, os.fstat(fd).st_ino)
            _require_found(address)
            return cls(address, mapped, fd)
        except BaseException as error:  # from ``made`` too
            if fd >= 0:
                os.close(fd)
            if isinstance(error, OSError):
                raise ConfigError(
                    f"{what} must have {nbytes} bytes of shared memory, which the"
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
        """Map another process's image, which was created with these ``extents``. ``serve``: keep
        the descriptor, so that others can open the image at this process. Raises as open_memfd."""
        fd = open_memfd(address, os.O_RDWR)
        extents = ((0, address.nbytes),) if extents is None else extents
        image = None
        try:
            mapped = mmap.mmap(fd, address.nbytes, flags=mmap.MAP_SHARED)
            # Only the extents: other pages belong to other hosts and must stay unallocated.
            _make_pages(mapped, _pages(extents, address.nbytes))
            if serve:
                image = cls(replace(address, pid=os.getpid(), fd=fd), mapped, fd)
        finally:
            if image is None:
                os.close(fd)  # the mapping keeps the memory
        return image or cls(address, mapped, None)

    @property
    def buffer(self) -> memoryview:
        """The image as writable bytes, uint8[nbytes]; each access makes a new view of the
        memory."""
        if self._map is None:
            raise ProtocolError("a closed weight image was used")
        return memoryview(self._map)

    def tensor(self) -> "torch.Tensor":
        """Return torch.uint8[nbytes] on the CPU that shares the memory."""
        import torch  # here: the doctor command uses this module on hosts without torch

        return torch.frombuffer(self.buffer, dtype=torch.uint8)

    def close(self) -> None:
        """Release the image; idempotent. Views and tensors stay valid: the end of the last one
        unmaps it."""
        # Not mmap.close(): torch holds no buffer export, so that would unmap a live tensor's pages.
        self._map = None
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def __enter__(self) -> "SharedImage":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


# Hashes.

BLOCK_HASHES: dict[str, Callable[[], "xxhash.xxh3_128 | blake3"]] = {
    "xxh3": xxhash.xxh3_128,
    "blake3": blake3,
}
"""Algorithm name -> state of the hash of one block: xxh3 has 16 bytes and is the fastest, blake3
has 32 bytes and is cryptographic."""

KEYED = "blake3"
"""The algorithm that takes a key: without it no sender can make a block with a valid digest."""


def hash_threads(cores: int) -> int:
    """Return the threads of a hash on a host with so many cores: a quarter of them, 4 to 16, never
    more than cores. On one of eight hosts, 4 threads would take 2 s of keyed blake3 for their part
    of a 235B model.

    >>> [hash_threads(cores) for cores in (1, 4, 16, 32, 64, 128)]
    [1, 4, 4, 8, 16, 16]
    """
    return max(min(4, cores), min(16, cores // 4))


@dataclass(frozen=True, slots=True)
class Hashing:
    """How a run's blocks are hashed. ``key``: EpochKeys.blocks, None without a run key."""

    algorithm: str
    key: Key | None = None

    @property
    def range_key(self) -> Key | None:
        """Key of the connections that read versions. It is the same in all epochs of the run, since
        the trainer's other hosts have no epochs."""
        return self.key.derive("ranges") if self.key is not None else None

    def block(self, pieces: Sequence[memoryview]) -> bytes:
        """Hash one block: the bytes of its pieces in order. Raises ConfigError for an unknown
        algorithm, or a key with any algorithm but KEYED."""
        if self.algorithm not in BLOCK_HASHES:
            known = " or ".join(BLOCK_HASHES)
            raise ConfigError(f"weight_sync.digest must be {known}, got {self.algorithm!r}")
        if self.key is not None and self.algorithm != KEYED:
            raise ConfigError(
                f"with a run key the blocks' digests must be {KEYED}, got"
                f" {self.algorithm!r}: others take no key"
            )
        state = blake3(key=self.key.raw) if self.key else BLOCK_HASHES[self.algorithm]()
        for piece in pieces:
            state.update(piece)
        return state.digest()

    def blocks(
        self, image: memoryview, manifest: Manifest, part: int | None = None
    ) -> tuple[bytes, ...]:
        """Hash every block of an image, or of one part, in order. ``image``: the whole one, uint8,
        ``manifest.total_bytes`` long; only the hashed blocks are read.

        Runs on ``hash_threads`` threads, which release the GIL: memory bandwidth is the limit, and
        a few cores reach it.
        """
        if image.nbytes != manifest.total_bytes:
            raise ValueError(
                f"the image must have the manifest's {manifest.total_bytes} bytes, got"
                f" {image.nbytes}"
            )

        def digest(index: int) -> bytes:
            return self.block([image[a:b] for a, b in manifest.block(index)])

        numbers = range(manifest.num_blocks) if part is None else manifest.blocks(part)
        with ThreadPoolExecutor(hash_threads(os.cpu_count() or 1), "hash") as pool:
            return tuple(pool.map(digest, numbers))

    def split(self, raw: bytes | bytearray, count: int) -> list[bytes]:
        """Split the concatenation of ``count`` digests. Raises PeerError for any other length."""
        size = len(self.block(()))
        if len(raw) != size * count:
            raise PeerError(
                f"{count} {self.algorithm} digests must be {size * count} bytes, got {len(raw)}"
            )
        return [bytes(raw[i : i + size]) for i in range(0, len(raw), size)]


def fingerprint(manifest_digest: str, digests: Iterable[bytes]) -> str:
    """Return 32 hex characters that identify a version's content: the hash of the layout and of
    every block's digest, in order.

    Over keyed digests it is keyed too: without the key no sender can make blocks with a valid
    fingerprint.
    """
    state = hashlib.blake2b(manifest_digest.encode(), digest_size=16)
    for digest in digests:
        # The length first: lists with the same concatenation must not have the same hash.
        state.update(len(digest).to_bytes(2, "little") + digest)
    return state.hexdigest()
