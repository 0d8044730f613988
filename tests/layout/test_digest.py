"""Hashes of blocks, fingerprints, and digests of content: equal for equal values however they lie
in memory, different for anything that differs."""

import os
import tracemalloc
from itertools import pairwise

import pytest
import torch

from titan_grpo.errors import ConfigError, PeerError
from titan_grpo.layout.image import BLOCK_HASHES, Hashing, fingerprint
from titan_grpo.layout.manifest import Manifest
from titan_grpo.runkey import Key
from titan_grpo.verify.recording import content_digest, tensor_digest

MANIFEST = Manifest.build([("a", "uint8", (1000,))], 256)

KNOWN = {
    "xxh3": "99aa06d3014798d86001c324468d497f",
    "blake3": "af1349b9f5f9a1a6a0404dea36dcc9499bcb25c9adc112b7cc9a93cae41f3262",
}
"""Published hashes of the empty input: both ends may have other versions of the hash libraries."""


@pytest.mark.parametrize("algorithm", sorted(BLOCK_HASHES))
def test_hashes_are_the_published_ones(algorithm: str) -> None:
    assert Hashing(algorithm).block(()).hex() == KNOWN[algorithm]


@pytest.mark.parametrize("algorithm", sorted(BLOCK_HASHES))
def test_a_flipped_bit_changes_its_own_block_only(algorithm: str) -> None:
    image = bytearray(range(256)) * 4
    before = Hashing(algorithm).blocks(memoryview(image), MANIFEST)
    image[700] ^= 1
    after = Hashing(algorithm).blocks(memoryview(image), MANIFEST)
    assert [a == b for a, b in zip(before, after, strict=True)] == [True, True, False, True]
    assert fingerprint(MANIFEST.digest, before) != fingerprint(MANIFEST.digest, after)


def test_a_fingerprint_names_layout_and_content() -> None:
    digests = [b"aa", b"b"]
    assert len(fingerprint("m", digests)) == 32
    assert fingerprint("m", digests) == fingerprint("m", tuple(digests))
    assert fingerprint("m", digests) != fingerprint("n", digests)
    assert fingerprint("m", digests) != fingerprint("m", [b"a", b"ab"])


def test_a_key_changes_every_hash_and_the_published_vector_says_how() -> None:
    key = Key(b"whats the Elvish word for friend")  # the key of BLAKE3's published test vectors
    assert (
        Hashing("blake3", key).block(()).hex()
        == "92b2b75604ed3c761f9d6f62392c8a9227ad0ea3f09573e783f1498a4ed60d26"
    )
    image = memoryview(bytes(1024))
    plain, keyed = (
        Hashing("blake3").blocks(image, MANIFEST),
        Hashing("blake3", key).blocks(image, MANIFEST),
    )
    assert all(a != b for a, b in zip(plain, keyed, strict=True))
    assert fingerprint("m", plain) != fingerprint("m", keyed)


@pytest.mark.parametrize("hashing", [Hashing("xxh3"), Hashing("blake3", Key(bytes(32)))])
def test_a_block_in_pieces_has_the_hash_of_its_bytes_and_is_not_copied(hashing: Hashing) -> None:
    """A tensor that lies on several hosts has its blocks in pieces."""
    block = memoryview(os.urandom(4 << 20))
    cuts = [len(block) * piece // 9 for piece in range(10)]
    pieces = [block[low:high] for low, high in pairwise(cuts)]
    whole = hashing.block([block])
    tracemalloc.start()
    try:
        assert hashing.block(pieces) == whole
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_a_hash_that_takes_no_key_is_refused_with_one() -> None:
    with pytest.raises(ConfigError, match=r"with a run key .* must be blake3, got 'xxh3'"):
        Hashing("xxh3", Key(bytes(32))).block(())


def test_an_unknown_algorithm_and_a_wrong_size_are_refused() -> None:
    with pytest.raises(ConfigError, match="xxh3 or blake3, got 'md5'"):
        Hashing("md5").block(())
    with pytest.raises(ValueError, match="1024 bytes, got 3"):
        Hashing("xxh3").blocks(memoryview(b"abc"), MANIFEST)


def test_digests_are_split_where_there_are_as_many_as_blocks_and_refused_elsewhere() -> None:
    assert Hashing("xxh3").split(bytes(16) + bytes([1] * 16), 2) == [bytes(16), bytes([1] * 16)]
    for nbytes in (31, 33, 48):
        with pytest.raises(PeerError, match=f"2 xxh3 digests must be 32 bytes, got {nbytes}"):
            Hashing("xxh3").split(bytes(nbytes), 2)


BASE = torch.arange(12, dtype=torch.float32).view(3, 4).bfloat16()


def test_a_strided_view_has_the_digest_of_its_copy() -> None:
    assert tensor_digest(BASE.t()) == tensor_digest(BASE.t().contiguous())


@pytest.mark.parametrize(
    "other",
    [BASE.view(4, 3), BASE.view(torch.float16), BASE.t(), torch.cat([-BASE[:1], BASE[1:]])],
    ids=["shape", "dtype", "order", "one sign"],
)
def test_any_difference_changes_the_digest(other: torch.Tensor) -> None:
    assert tensor_digest(BASE) != tensor_digest(other)


def test_the_digest_of_all_depends_on_names_and_not_on_their_order() -> None:
    assert content_digest({"a": "1", "b": "2"}) == content_digest({"b": "2", "a": "1"})
    assert content_digest({"a": "1", "b": "2"}) != content_digest({"a": "2", "b": "1"})
