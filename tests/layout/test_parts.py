"""Parts of an image over several hosts: what belongs to whom, and which blocks they make."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from titan_grpo.errors import ConfigError
from titan_grpo.layout.digest import block_digests
from titan_grpo.layout.manifest import Manifest
from titan_grpo.layout.parts import Part, parts_of
from titan_grpo.layout.plan import merged


def test_padding_belongs_to_the_bytes_before_it() -> None:
    written = [[(0, 500), (1024, 1524)], [(500, 1000), (1524, 2024)]]
    assert [part.extents for part in parts_of(written, 2048, 256)] == [
        ((0, 500), (1024, 1524)),
        ((500, 1024), (1524, 2048)),
    ]


@pytest.mark.parametrize(
    "written",
    [
        [[(0, 500)], [(400, 1024)]],
        [[(0, 500)], [(500, 1024), (500, 1024)]],
        [[(0, 500)], [(756, 1024)]],
        [[(0, 500)], [(500, 768)]],
        [[(1, 1024)], []],
        [[], []],
    ],
)
def test_bytes_that_no_host_or_two_write_are_refused(written) -> None:
    with pytest.raises(ConfigError):
        parts_of(written, 1024, 256)


@given(st.lists(st.integers(0, 2), min_size=1, max_size=40), st.integers(1, 700))
def test_the_blocks_of_all_parts_are_every_byte_once(owners, block_bytes) -> None:
    total = 64 * len(owners)
    manifest = Manifest.build([("a", "uint8", (total,))], block_bytes)
    written = [
        [(64 * i, 64 * i + 64) for i, owner in enumerate(owners) if owner == host]
        for host in range(3)
    ]
    cut = manifest.with_parts(parts_of(written, manifest.total_bytes, 256))
    pieces = [piece for index in range(cut.num_blocks) for piece in cut.block(index)]
    assert sum(stop - start for start, stop in pieces) == manifest.total_bytes
    assert {b for start, stop in pieces for b in range(start, stop)} == set(range(cut.total_bytes))
    assert Manifest.from_json(cut.to_json()) == cut
    image = memoryview(bytes(i % 251 for i in range(cut.total_bytes)))
    each = [block_digests(image, cut, "xxh3", part=part) for part in range(3)]
    assert sum(each, ()) == block_digests(image, cut, "xxh3")


def test_a_range_of_a_part_is_in_several_places() -> None:
    part = Part(((0, 500), (1024, 1524)))
    assert list(part.pieces(400, 600)) == [(400, 500), (1024, 1124)]
    with pytest.raises(IndexError):
        list(part.pieces(900, 1001))


def test_boxes_that_make_up_one_are_one() -> None:
    quarters = [((r, c), (2, 2)) for r in (0, 2) for c in (0, 2)]
    assert merged(quarters) == [((0, 0), (4, 4))]
    assert merged([((0, 0), (2, 2)), ((2, 2), (2, 2))]) == [((0, 0), (2, 2)), ((2, 2), (2, 2))]
