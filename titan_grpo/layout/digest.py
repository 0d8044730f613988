"""Hashes of an image's blocks, and the fingerprint of a whole version. No torch."""

import hashlib
from collections.abc import Callable, Iterable, Sequence

import xxhash
from blake3 import blake3

from titan_grpo.errors import ConfigError
from titan_grpo.layout.manifest import Manifest

BLOCK_HASHES: dict[str, Callable[[memoryview], bytes]] = {
    "xxh3": lambda block: xxhash.xxh3_128_digest(block),
    "blake3": lambda block: blake3(block).digest(),
}
"""Algorithm name to hash of one block: xxh3 is 16 bytes and the fastest, blake3 is 32 bytes and cryptographic."""


def digest_block(block: memoryview, algorithm: str) -> bytes:
    """Hash of one block of bytes. Raises ConfigError for an unknown algorithm."""
    try:
        hash_block = BLOCK_HASHES[algorithm]
    except KeyError:
        known = " or ".join(BLOCK_HASHES)
        raise ConfigError(f"weight_sync.digest must be {known}, got {algorithm!r}") from None
    return hash_block(block)


def block_digests(buffer: memoryview, manifest: Manifest, algorithm: str) -> tuple[bytes, ...]:
    """Hash of every block of an image, in order. ``buffer`` is the image, uint8, ``manifest.total_bytes`` long."""
    if buffer.nbytes != manifest.total_bytes:
        raise ValueError(f"the buffer must have the manifest's {manifest.total_bytes} bytes, got {buffer.nbytes}")
    spans = (manifest.block(i) for i in range(manifest.num_blocks))
    return tuple(digest_block(buffer[start:stop], algorithm) for start, stop in spans)


def fingerprint(manifest_digest: str, digests: Iterable[bytes]) -> str:
    """32 hex characters that name the content of a version: the layout and every block's hash, in order."""
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
