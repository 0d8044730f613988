"""Hashes of an image's blocks, and the fingerprint of a whole version.

The content of tensors as digests by name: knows no image, no offsets and no blocks, on purpose.

A verification compares two ends through it, so that a mistake in the layout cannot make both ends
agree."""

import hashlib
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import xxhash
from blake3 import blake3

from titan_grpo.errors import ConfigError
from titan_grpo.layout.manifest import Manifest

if TYPE_CHECKING:
    import torch

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


def tensor_digest(tensor: "torch.Tensor") -> str:
    """32 hex characters over dtype, shape and the row-major bytes; the tensor may be on any device,
    and not contiguous."""
    import torch  # here: a receiver hashes blocks, and has no use for the seconds of this import

    dtype = str(tensor.dtype).removeprefix("torch.")
    state = hashlib.blake2b(f"{dtype} {tuple(tensor.shape)} ".encode(), digest_size=16)
    flat = tensor.detach().cpu().contiguous().flatten()
    state.update(memoryview(flat.view(torch.uint8).numpy()))  # type: ignore[arg-type]
    return state.hexdigest()


def content_digest(tensors: Mapping[str, str]) -> str:
    """32 hex characters over the digests of all tensors (name -> tensor_digest), whatever their
    order."""
    text = "\n".join(f"{name} {tensors[name]}" for name in sorted(tensors))
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
