"""Which host has which bytes of an image. Standard library only.

A part is what one trainer host has of every version: extents of the image, in order, read as one
stream. With one host there is one part, the whole image.

Worked example: two hosts each hold half of the rows of two tensors at 0 and 1024, of 1000 bytes
each. Part 0 is (0, 500) and (1024, 1524), part 1 is (500, 1024) and (1524, 2048): padding belongs
to the bytes before it. Byte 600 of part 0's stream is byte 1124 of the image.
"""

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

from titan_grpo.errors import ConfigError

Extent = tuple[int, int]
"""First byte, and the one after the last."""


@dataclass(frozen=True)
class Part:
    """Extents of an image, in ascending order, that do not touch each other."""

    extents: tuple[Extent, ...]

    @cached_property
    def _ends(self) -> list[int]:
        """Where each extent ends in the stream."""
        return list(accumulate(stop - start for start, stop in self.extents))

    @cached_property
    def nbytes(self) -> int:
        """Bytes of the stream."""
        return self._ends[-1] if self._ends else 0

    def pieces(self, start: int, stop: int) -> Iterator[Extent]:
        """Where bytes ``start`` to ``stop`` of the stream are in the image. IndexError outside of
        it.

        >>> list(Part(((0, 500), (1024, 1524))).pieces(400, 600))
        [(400, 500), (1024, 1124)]
        """
        if not 0 <= start <= stop <= self.nbytes:
            raise IndexError(
                f"a range of the part must be in [0, {self.nbytes}], got {start, stop}"
            )
        index = bisect_right(self._ends, start)
        while start < stop:
            shift = self.extents[index][1] - self._ends[index]
            end = min(stop, self._ends[index])
            yield start + shift, end + shift
            start, index = end, index + 1


def joined(extents: Iterable[Extent]) -> tuple[Extent, ...]:
    """In ascending order, those that meet or overlap as one: ``joined([(4, 8), (0, 4)]) == ((0,
    8),)``."""
    out: list[Extent] = []
    for start, stop in sorted(extents):
        if out and start <= out[-1][1]:
            out[-1] = out[-1][0], max(out[-1][1], stop)
        elif start < stop:
            out.append((start, stop))
    return tuple(out)


def whole_pages(extents: Iterable[Extent], page: int) -> tuple[Extent, ...]:
    """``extents`` rounded out to pages: ``whole_pages([(5, 6), (4095, 4097)], 4096) == ((0,
    8192),)``."""
    return joined((start // page * page, -(-stop // page) * page) for start, stop in extents)


def parts_of(written: Sequence[Sequence[Extent]], total_bytes: int, padding: int) -> list[Part]:
    """The part of each host, from the bytes that its ranks write.

    Up to ``padding`` bytes that no rank writes belong to the extent before them. ConfigError if
    more are missing, or a byte has two writers: a version would have bytes of two others.
    """
    owned = sorted((*extent, host) for host, extents in enumerate(written) for extent in extents)
    grown: list[list[Extent]] = [[] for _ in written]
    if not owned or owned[0][0] != 0:
        raise ConfigError("the first byte of an image must be written by a host, none writes it")
    ends = [start for start, _, _ in owned[1:]] + [total_bytes]
    for (start, stop, host), end in zip(owned, ends, strict=True):
        if not 0 <= end - stop < padding:
            raise ConfigError(
                f"every byte of an image must be written by one host, host {host} writes bytes"
                f" {start} to {stop} and the next extent begins at {end}: the placements of this"
                " model's shards cannot be synced"
            )
        grown[host].append((start, end))
    return [Part(joined(extents)) for extents in grown]
