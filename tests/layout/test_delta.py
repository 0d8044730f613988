"""Patches between images: lossless, small, and harmless where they are not patches."""

from contextlib import suppress
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from titan_grpo.errors import PeerError
from titan_grpo.layout import delta
from titan_grpo.layout.manifest import Part, joined


def image(seed: int, words: int) -> np.ndarray:
    """Random bytes."""
    return np.random.default_rng(seed).integers(0, 1 << 16, words, np.uint16).view(np.uint8)


def changed(base: np.ndarray, seed: int, share: float, most: int) -> np.ndarray:
    """A copy in which a share of the words has changed by up to ``most``, with wrap-around."""
    rng = np.random.default_rng(seed)
    new = base.copy()
    words = new.view(np.uint16)
    places = np.flatnonzero(rng.random(words.size) < share)
    words[places] += rng.integers(-most, most + 1, places.size).astype(np.uint16)
    return new


def whole(image: np.ndarray) -> Part:
    """The part that one trainer host has."""
    return Part(((0, image.size),))


def encode(base: np.ndarray, new: np.ndarray, limit: int = 1 << 30) -> bytearray | None:
    """A patch of the whole image."""
    return delta.encode(base, new, whole(new), limit)


def patched(base: np.ndarray, patch: bytes | bytearray) -> np.ndarray:
    """What a patch makes of an image."""
    out = base.copy()
    delta.apply(patch, out, whole(out))
    return out


@given(
    seed=st.integers(0, 1 << 30),
    words=st.integers(0, 3 * delta.CHUNK // 2 + 5),
    share=st.sampled_from([0.0, 1e-5, 3e-4, 0.01, 0.2, 1.0]),
    most=st.sampled_from([1, 2, 40_000]),
)
def test_a_patch_makes_exactly_the_new_image(
    seed: int, words: int, share: float, most: int
) -> None:
    base = image(seed, words)
    new = changed(base, seed + 1, share, most)
    patch = encode(base, new)
    assert patch is not None
    assert np.array_equal(patched(base, patch), new)
    # Whole chunks where that is smaller.
    assert len(patch) <= new.size + 8 * (new.size // delta.CHUNK + 1)


@given(
    seed=st.integers(0, 1 << 30),
    cuts=st.lists(st.integers(0, 5 * delta.CHUNK // 2), min_size=2, max_size=40, unique=True),
)
def test_patches_of_two_parts_make_the_image_and_each_changes_its_own_bytes(
    seed: int, cuts: list[int]
) -> None:
    """Rows of two hosts in turns, also of one byte an element."""
    size = max(cuts)
    base = image(seed, size // 2 + 1)[:size]
    new = image(seed + 1, size // 2 + 1)[:size]
    keep = np.random.default_rng(seed).random(size) < 0.97
    new[keep] = base[keep]
    edges = [0, *sorted(cuts)]
    rows = list(pairwise(edges))
    parts = [Part(joined(rows[first::2])) for first in (0, 1)]
    out = base.copy()
    for part in parts:
        patch = delta.encode(base, new, part, 1 << 30)
        assert patch is not None
        delta.apply(patch, out, part)
        for low, high in part.extents:
            assert np.array_equal(out[low:high], new[low:high])
    assert np.array_equal(out, new)
    delta.apply(delta.encode(new, base, parts[1], 1 << 30) or b"", out, parts[1])
    for (low, high), after in [(e, new) for e in parts[0].extents] + [
        (e, base) for e in parts[1].extents
    ]:
        assert np.array_equal(out[low:high], after[low:high])


@pytest.mark.parametrize(
    "gap", [0, 1, 62, 63, 64, 125, 126, 63 * 64, 63 * 64 + 1, 63 * 65, 200_000]
)
def test_a_gap_at_the_codes_borders_is_exact(gap: int) -> None:
    base = np.zeros(delta.CHUNK, dtype=np.uint8)
    new = base.copy()
    new.view(np.uint16)[[0, gap + 1]] = 1, 7
    patch = encode(base, new)
    assert patch is not None
    assert np.array_equal(patched(base, patch), new)


def test_changes_by_one_unit_are_a_byte_each() -> None:
    base = image(0, 1 << 20)
    patch = encode(base, changed(base, 1, 0.02, 1))
    assert patch is not None
    assert len(patch) < 0.02 * base.size  # 1.3 % of the words, two bytes each, have changed


def test_a_patch_over_its_limit_is_none() -> None:
    base = image(0, 1 << 20)
    new = changed(base, 1, 0.1, 1)
    patch = encode(base, new, base.size)
    assert patch is not None
    assert encode(base, new, len(patch)) == patch
    assert encode(base, new, len(patch) - 1) is None


def well_formed(codes: bytes) -> bytes:
    """A chunk of these codes, with as many values as they ask for."""
    values = sum(code & 3 == 2 for code in codes)
    head = np.array([len(codes), values], dtype="<u4").tobytes()
    return head + codes + bytes(len(codes) % 2 + 2 * values)


@given(
    data=st.one_of(st.binary(max_size=200), st.builds(well_formed, st.binary(max_size=40))),
    words=st.integers(1, 300),
)
def test_bytes_that_are_no_patch_are_the_peers_mistake_or_change_the_image_only(
    data: bytes, words: int
) -> None:
    """Never an index outside, nor any other error: patches may come from other servers."""
    memory = np.zeros(2 * words + 32, dtype=np.uint8)
    with suppress(PeerError):
        delta.apply(data, memory[16:-16], Part(((0, 2 * words),)))
    assert not memory[:16].any()
    assert not memory[-16:].any()


def test_bytes_that_are_no_words_are_sent_whole() -> None:
    nothing = bytes(8)  # no codes, no values
    delta.apply(nothing, np.zeros(4, np.uint8), Part(((0, 4),)))
    with pytest.raises(PeerError, match="a chunk of 3 bytes whole"):
        delta.apply(nothing, np.zeros(3, np.uint8), Part(((0, 3),)))


@given(cut=st.integers(0, 10_000), seed=st.integers(0, 100))
def test_a_patch_that_is_cut_short_or_too_long_is_refused(cut: int, seed: int) -> None:
    base = image(seed, 40_000)
    patch = encode(base, changed(base, seed + 1, 0.05, 3))
    assert patch is not None
    for wrong in (patch[: min(cut, len(patch) - 1)], patch + bytes(cut + 1)):
        with pytest.raises(PeerError):
            delta.apply(wrong, base.copy(), whole(base))
