"""Layout of a version image: HF names, dtypes, shapes, byte offsets. No torch.

A manifest is made once at the start of a run, is identical on every rank and is sent to every
receiver, so that an extent of bytes means the same tensor rows everywhere.

A part is what one trainer host has of every version: extents of the image, in order, read as one
stream. With one host there is one part, the whole image. Worked example: two hosts each hold half
of the rows of two tensors at 0 and 1024, of 1000 bytes each. Part 0 is (0, 500) and (1024, 1524),
part 1 is (500, 1024) and (1524, 2048): padding belongs to the bytes before it. Byte 600 of part 0's
stream is byte 1124 of the image.

A part travels as runs. Where each host has some columns of every expert of an MoE model, 64 hosts
have millions of extents, and a few thousand runs.

Also here: the requirements of a stock server's own update route, which are buckets that it can
unpack and names that it has. Pure."""

import hashlib
import json
import re
from bisect import bisect_right
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from math import prod
from typing import Annotated

import msgspec
from msgspec import Meta

from titan_grpo.errors import NOT_JSON, ConfigError, DataError

Extent = tuple[int, int]
"""First byte, and the one after the last."""

Run = tuple[int, int, int, Annotated[int, Meta(ge=1)]]
"""Extents of one length at equal distances: the first one's first byte, bytes of each, bytes from
one's start to the next one's (0 if there is one only), number."""

MOST_IN_ALL = 1 << 23
"""Most extents of all parts together: every process that reads the manifest makes them, in about
1.5 s and 0.3 GB per million."""


@dataclass(frozen=True)
class Part:
    """Extents of an image, ascending, that do not touch each other."""

    extents: tuple[Extent, ...]

    @cached_property
    def runs(self) -> tuple[Run, ...]:
        """The extents as runs.

        >>> Part(((0, 8), (64, 72), (128, 136), (200, 203))).runs
        ((0, 8, 64, 3), (200, 3, 0, 1))
        """
        out: list[Run] = []
        for start, stop in self.extents:
            if out:
                first, nbytes, step, count = out[-1]
                if stop - start == nbytes and (count == 1 or start == first + count * step):
                    out[-1] = first, nbytes, (start - first) // count, count + 1
                    continue
            out.append((start, stop - start, 0, 1))
        return tuple(out)

    @cached_property
    def _ends(self) -> list[int]:
        """End of each extent in the stream."""
        return list(accumulate(stop - start for start, stop in self.extents))

    @cached_property
    def nbytes(self) -> int:
        """Bytes of the stream."""
        return self._ends[-1] if self._ends else 0

    def pieces(self, start: int, stop: int) -> Iterator[Extent]:
        """Yield the extents of the image that are bytes ``start`` to ``stop`` of the stream. Raises
        IndexError outside of the stream.

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
    """Sort extents, and merge those that meet or overlap: ``joined([(4, 8), (0, 4)]) == ((0,
    8),)``."""
    out: list[Extent] = []
    for start, stop in sorted(extents):
        if out and start <= out[-1][1]:
            out[-1] = out[-1][0], max(out[-1][1], stop)
        elif start < stop:
            out.append((start, stop))
    return tuple(out)


def whole_pages(extents: Iterable[Extent], page: int) -> tuple[Extent, ...]:
    """Round ``extents`` out to pages: ``whole_pages([(5, 6), (4095, 4097)], 4096) == ((0,
    8192),)``."""
    return joined((start // page * page, -(-stop // page) * page) for start, stop in extents)


def extents_of(parts: Sequence[Sequence[Run]]) -> list[list[Extent]]:
    """Return the extents of each part from its runs. Raises ConfigError for more than MOST_IN_ALL
    of all parts."""
    number = sum(count for runs in parts for *_, count in runs)
    if number > MOST_IN_ALL:
        raise ConfigError(
            f"the shards of all hosts must be at most {MOST_IN_ALL} pieces of memory together, they"
            f" are {number}: every server would need too long to read where they are; cut the"
            " weights into fewer shards (parallelism.data_parallel_replicate_degree)"
        )
    return [
        [
            (first + step * i, first + step * i + nbytes)
            for first, nbytes, step, count in runs
            for i in range(count)
        ]
        for runs in parts
    ]


def parts_of(written: Sequence[Sequence[Extent]], total_bytes: int, padding: int) -> list[Part]:
    """Return the part of each host, from the bytes that its ranks write.

    Fewer than ``padding`` bytes that no rank writes belong to the extent before them. Raises
    ConfigError for a longer gap, or a byte with two writers: an image could mix two versions.
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


ALIGNMENT = 256
"""Alignment, in bytes, of every tensor's offset and of the total: enough for any device's vector
loads and copies."""

ITEM_BYTES = {
    "bfloat16": 2,
    "float16": 2,
    "float32": 4,
    "float64": 8,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "int8": 1,
    "uint8": 1,
    "int16": 2,
    "int32": 4,
    "int64": 8,
    "bool": 1,
}
"""Bytes per element of the dtypes that an image can hold; names are torch's without "torch."."""

FORMAT = 4
"""Version of this JSON layout; a receiver with another one refuses the manifest."""


def align(nbytes: int) -> int:
    """Round up to a multiple of ALIGNMENT: ``align(1) == 256``, ``align(256) == 256``."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One HF tensor: row-major, contiguous, ``offset`` bytes from the start of the image."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor, without the padding after it."""
        return prod(self.shape) * ITEM_BYTES[self.dtype]


class _Record(msgspec.Struct, forbid_unknown_fields=True):
    """A manifest as JSON."""

    format: int
    block_bytes: Annotated[int, Meta(ge=1)]
    tensors: list[tuple[str, str, tuple[int, ...]]]
    parts: list[tuple[Run, ...]]


@dataclass(frozen=True)
class Manifest:
    """Ordered tensors of an image, its parts, and the size of the blocks that are hashed and sent.

    Blocks are cut within the parts, part after part: each host hashes and serves its own blocks.
    ``build`` makes one part, the whole image.

    Worked example: ``build([("a", "bfloat16", (3, 5)), ("b", "float32", (2,))], 4096)`` puts ``a``
    (30 bytes) at 0 and ``b`` (8 bytes) at 256; ``total_bytes`` is 512 and there is one block,
    ``block(0) == [(0, 512)]``.
    """

    tensors: tuple[TensorSpec, ...]
    block_bytes: int
    parts: tuple[Part, ...]

    @classmethod
    def build(
        cls, entries: Iterable[tuple[str, str, Sequence[int]]], block_bytes: int
    ) -> "Manifest":
        """Lay out ``(name, dtype, shape)`` one after the other, each aligned to ALIGNMENT.

        Raises ConfigError for no tensors, a duplicate name, an unknown dtype or a dimension
        below 1.
        """
        specs: list[TensorSpec] = []
        seen: set[str] = set()
        offset = 0
        for name, dtype, shape in entries:
            _check_entry(name, dtype, tuple(shape), seen)
            specs.append(TensorSpec(name, dtype, tuple(shape), offset))
            seen.add(name)
            offset += align(specs[-1].nbytes)
        if not specs:
            raise ConfigError(
                "a manifest needs at least one tensor, got none: nothing would be synced; check the"
                " model's adapter"
            )
        return cls(tuple(specs), block_bytes, (Part(((0, offset),)),))

    def with_parts(self, parts: Sequence[Part]) -> "Manifest":
        """Return a manifest of the same tensors with these parts."""
        return replace(self, parts=tuple(parts))

    @cached_property
    def total_bytes(self) -> int:
        """Bytes of the whole image, a multiple of ALIGNMENT."""
        last = self.tensors[-1]
        return last.offset + align(last.nbytes)

    @cached_property
    def _first_blocks(self) -> list[int]:
        """Number of the first block of each part, then the number of all blocks."""
        counts = (-(-part.nbytes // self.block_bytes) for part in self.parts)
        return list(accumulate(counts, initial=0))

    @property
    def num_blocks(self) -> int:
        """Number of blocks of the image; the last one of a part may be shorter."""
        return self._first_blocks[-1]

    def blocks(self, part: int) -> range:
        return range(self._first_blocks[part], self._first_blocks[part + 1])

    def block(self, index: int) -> list[Extent]:
        """Return the extents of block ``index`` in the image. Raises IndexError unless ``0 <= index
        < num_blocks``."""
        if not 0 <= index < self.num_blocks:
            raise IndexError(f"block must be in [0, {self.num_blocks}), got {index}")
        number = bisect_right(self._first_blocks, index) - 1
        part = self.parts[number]
        start = (index - self._first_blocks[number]) * self.block_bytes
        return list(part.pieces(start, min(start + self.block_bytes, part.nbytes)))

    @cached_property
    def digest(self) -> str:
        """Hash of the canonical JSON, 32 hex characters: equal digests mean the same names, dtypes,
        shapes (and so offsets), block size and parts."""
        return hashlib.blake2b(self.encoded, digest_size=16).hexdigest()

    @cached_property
    def encoded(self) -> bytes:
        """The canonical JSON as bytes: one object for all connections that send it."""
        return self.to_json().encode()

    @cached_property
    def _by_name(self) -> dict[str, TensorSpec]:
        return {spec.name: spec for spec in self.tensors}

    def spec(self, name: str) -> TensorSpec:
        """Return the tensor of a HF name. Raises KeyError if the manifest has none."""
        return self._by_name[name]

    def to_json(self) -> str:
        """Return canonical JSON: the same manifest gives the same text on every machine."""
        record = {
            "format": FORMAT,
            "block_bytes": self.block_bytes,
            "tensors": [[s.name, s.dtype, list(s.shape)] for s in self.tensors],
            "parts": [part.runs for part in self.parts],
        }
        return json.dumps(record, sort_keys=True, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str | bytes | bytearray) -> "Manifest":
        """Read to_json() back. Raises DataError for anything else."""
        try:
            record = msgspec.json.decode(text, type=_Record)
            if record.format != FORMAT:
                raise DataError(
                    f"manifest format must be {FORMAT}, got {record.format}: install the same"
                    " titan_grpo on both ends"
                )
            manifest = cls.build(record.tensors, record.block_bytes)
            written = extents_of(record.parts)
            cut = manifest.with_parts(parts_of(written, manifest.total_bytes, padding=1))
        except (*NOT_JSON, ConfigError) as error:
            raise DataError(
                f"a manifest must list [name, dtype, shape] rows, and parts: {error}; refused"
            ) from error
        if [part.runs for part in cut.parts] != record.parts:
            raise DataError("the parts of a manifest must be runs of extents in order; refused")
        return cut


def _check_entry(name: str, dtype: str, shape: tuple[int, ...], seen: set[str]) -> None:
    if name in seen:
        raise ConfigError(
            f"tensor names must be unique in a manifest, got {name!r} twice: one would overwrite"
            " the other"
        )
    if dtype not in ITEM_BYTES:
        raise ConfigError(f"dtype of {name} must be one of {', '.join(ITEM_BYTES)}, got {dtype!r}")
    if any(size < 1 for size in shape):
        raise ConfigError(f"every dimension of {name} must be 1 or greater, got {shape}")


FUSED = (
    (re.compile(r"\.(q|k|v)_proj\.(\w+)$"), r".qkv_proj.\2"),
    (re.compile(r"\.experts\.\d+\.(gate|up)_proj\.weight$"), ".experts.w13_weight"),
    (re.compile(r"\.experts\.\d+\.down_proj\.weight$"), ".experts.w2_weight"),
    (re.compile(r"\.(gate|up)_proj\.(\w+)$"), r".gate_up_proj.\2"),
)
"""HF names -> the engine's parameter that fuses several of them."""

PARTS = {".qkv_proj.": 3, ".gate_up_proj.": 2}
"""Piece of a fused parameter's name -> number of its HF tensors. An engine that gets only some of
them still reports success."""

SHOWN = 4
"""Most names under one heading of a message."""


def listed(found: Mapping[str, Sequence[str]]) -> str:
    """Return the first names under each heading; empty if there are none.

    >>> listed({"missing": ["a", "b"], "unknown": []})
    'missing: a, b'
    """
    return "; ".join(
        f"{what}: {', '.join(names[:SHOWN])}"
        + (f" and {len(names) - SHOWN} more" if len(names) > SHOWN else "")
        for what, names in found.items()
        if names
    )


def buckets(manifest: Manifest, bucket_bytes: int) -> list[tuple[TensorSpec, ...]]:
    """Return runs of tensors without gaps between them in the image, in order, each of at most
    ``bucket_bytes`` (or one tensor).

    A bucket is one slice of the image. Every tensor starts at a multiple of ALIGNMENT in it, so
    that the receiving end can view it in place.

    Worked example: bf16 tensors of 256, 256, 30 and 512 bytes lie at 0, 256, 512 and 768; with
    1024-byte buckets they go as (0, 1, 2) and (3): there are 226 bytes of padding before the last
    one.
    """
    out: list[list[TensorSpec]] = []
    for spec in manifest.tensors:
        if out:
            start, last = out[-1][0].offset, out[-1][-1]
            joins = last.offset + last.nbytes == spec.offset
            if joins and spec.offset + spec.nbytes - start <= bucket_bytes:
                out[-1].append(spec)
                continue
        out.append([spec])
    return [tuple(bucket) for bucket in out]


def fused(name: str) -> str:
    """Return the engine's parameter of a HF tensor: ``0.mlp.up_proj.weight`` ->
    ``0.mlp.gate_up_proj.weight``."""
    for pattern, replacement in FUSED:
        name, found = pattern.subn(replacement, name)
        if found:
            break
    return name


def names_problem(sent: Iterable[str], served: Collection[str]) -> str:
    """Return why the tensors ``sent`` (HF names) are not the whole model ``served`` (the engine's
    parameters); empty if they are.

    A tied head may be missing on either side. Parameters that engines compute themselves (rotary
    tables) are not required.
    """
    wanted = {name for name in served if not name.endswith(("inv_freq", "cos_sin_cache"))}
    count = Counter(fused(name) for name in sent)
    given = set(count)
    optional = {"lm_head.weight"} if "lm_head.weight" not in wanted & given else set()
    unknown, missing = sorted(given - wanted - optional), sorted(wanted - given - optional)
    partly = sorted(
        name
        for name in given
        for piece, number in PARTS.items()
        if piece in name and count[name] != number
    )
    found = {"unknown to the server": unknown, "missing": missing, "sent in part": partly}
    if not (differ := listed(found)):
        return ""
    return (
        f"the trainer's tensors are not those of the server's model ({differ}): serve the model"
        " that is trained, or, if the engine only has other names for them, install"
        " titan_grpo in the server's environment"
    )
