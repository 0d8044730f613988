"""What lies where in a version image: HF names, dtypes, shapes, byte offsets. Standard library
only.

A manifest is made once at the start of a run, is identical on every rank and is sent to every
receiver, so that an extent of bytes means the same tensor rows everywhere.

What a stock server's own update route demands of a manifest: buckets that it can unpack, and names
that it knows. Pure."""

import hashlib
import json
import re
from bisect import bisect_right
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from math import prod
from typing import Any

from titan_grpo.errors import ConfigError, DataError
from titan_grpo.layout.parts import Extent, Part, parts_of

ALIGNMENT = 256
"""Bytes to which every tensor's offset and the total are rounded: enough for any device's vector
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
"""Bytes per element of the dtypes an image can hold; names are torch's without the "torch." in
front."""

FORMAT = 2
"""Number of this JSON layout; a receiver with another one refuses the manifest."""


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
        """Bytes of the tensor itself, without the padding behind it."""
        return prod(self.shape) * ITEM_BYTES[self.dtype]


@dataclass(frozen=True)
class Manifest:
    """Ordered tensors of an image, and the size of the blocks that are hashed and sent.

    Blocks are cut within the parts (layout.parts), part after part: a host hashes and serves its
    own. ``build`` makes one part, the whole image.

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

        Raises ConfigError for no tensors, a name twice, an unknown dtype, an empty shape or a block
        size below 1.
        """
        if block_bytes < 1:
            raise ConfigError(f"weight_sync.block_bytes must be 1 or greater, got {block_bytes}")
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
        """The same tensors, cut among these hosts."""
        return replace(self, parts=tuple(parts))

    @cached_property
    def total_bytes(self) -> int:
        """Bytes of the whole image, a multiple of ALIGNMENT."""
        last = self.tensors[-1]
        return last.offset + align(last.nbytes)

    @cached_property
    def _first_blocks(self) -> list[int]:
        """Number of the first block of each part, and the number of all blocks."""
        counts = (-(-part.nbytes // self.block_bytes) for part in self.parts)
        return list(accumulate(counts, initial=0))

    @property
    def num_blocks(self) -> int:
        """How many blocks cover the image; the last one of a part may be shorter."""
        return self._first_blocks[-1]

    def blocks(self, part: int) -> range:
        """Numbers of the blocks of that part."""
        return range(self._first_blocks[part], self._first_blocks[part + 1])

    def block(self, index: int) -> list[Extent]:
        """Where block ``index`` is in the image; IndexError outside ``0 <= index <
        num_blocks``."""
        if not 0 <= index < self.num_blocks:
            raise IndexError(f"block must be in [0, {self.num_blocks}), got {index}")
        number = bisect_right(self._first_blocks, index) - 1
        part = self.parts[number]
        start = (index - self._first_blocks[number]) * self.block_bytes
        return list(part.pieces(start, min(start + self.block_bytes, part.nbytes)))

    @cached_property
    def digest(self) -> str:
        """32 hex characters over the canonical JSON: equal digests mean the same names, dtypes,
        shapes, offsets and parts."""
        return hashlib.blake2b(self.to_json().encode(), digest_size=16).hexdigest()

    @cached_property
    def _by_name(self) -> dict[str, TensorSpec]:
        return {spec.name: spec for spec in self.tensors}

    def spec(self, name: str) -> TensorSpec:
        """The tensor of that HF name; KeyError if the manifest has none."""
        return self._by_name[name]

    def to_json(self) -> str:
        """Canonical JSON: the same manifest gives the same characters on every machine."""
        tensors = [[s.name, s.dtype, list(s.shape), s.offset] for s in self.tensors]
        record = {
            "format": FORMAT,
            "block_bytes": self.block_bytes,
            "tensors": tensors,
            "parts": [part.extents for part in self.parts],
        }
        return json.dumps(record, sort_keys=True, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> "Manifest":
        """Read to_json() back. Raises DataError if it is not one, or if its offsets are not the
        ones build() gives."""
        record = _parse(text)
        try:
            offsets = [int(offset) for _, _, _, offset in record["tensors"]]
            entries = [
                (str(name), str(dtype), tuple(map(int, shape)))
                for name, dtype, shape, _ in record["tensors"]
            ]
            manifest = cls.build(entries, int(record["block_bytes"]))
            parts = [tuple((int(a), int(b)) for a, b in part) for part in record["parts"]]
            cut = manifest.with_parts(parts_of(parts, manifest.total_bytes, padding=1))
        except (TypeError, ValueError, ConfigError) as error:
            raise DataError(
                f"a manifest must list [name, dtype, shape, offset] rows, and parts: {error};"
                " refused"
            ) from error
        for spec, offset in zip(manifest.tensors, offsets, strict=True):
            if spec.offset != offset:
                raise DataError(
                    f"manifest offset of {spec.name} must be {spec.offset}, got {offset}: bytes"
                    " would land in other rows"
                )
        if [part.extents for part in cut.parts] != parts:
            raise DataError("the parts of a manifest must be extents in order; refused")
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


def _parse(text: str) -> dict[str, Any]:
    try:
        record = json.loads(text)
    except ValueError as error:
        raise DataError(f"a manifest must be JSON: {error}; refused") from error
    if not isinstance(record, dict) or set(record) != {"format", "block_bytes", "tensors", "parts"}:
        raise DataError(
            "a manifest must have exactly the keys format, block_bytes, tensors and parts; refused"
        )
    if record["format"] != FORMAT:
        raise DataError(
            f"manifest format must be {FORMAT}, got {record['format']!r}: install the same"
            " titan_grpo on both ends"
        )
    return record


FUSED = (
    (re.compile(r"\.(q|k|v)_proj\.(\w+)$"), r".qkv_proj.\2"),
    (re.compile(r"\.experts\.\d+\.(gate|up)_proj\.weight$"), ".experts.w13_weight"),
    (re.compile(r"\.experts\.\d+\.down_proj\.weight$"), ".experts.w2_weight"),
    (re.compile(r"\.(gate|up)_proj\.(\w+)$"), r".gate_up_proj.\2"),
)
"""HF names -> the parameter in which engines keep several of them as one."""

PARTS = {".qkv_proj.": 3, ".gate_up_proj.": 2}
"""Piece of a fused parameter's name -> HF tensors that make it up. An engine takes one of them
alone, and says success."""

SHOWN = 4


def buckets(manifest: Manifest, bucket_bytes: int) -> list[tuple[TensorSpec, ...]]:
    """Runs of tensors that lie in the image without gaps, each of at most ``bucket_bytes`` (or one
    tensor), in order.

    A bucket's bytes are one slice of the image, and every tensor in it starts at a multiple of its
    item size, so that the other end can view it in place.

    Worked example: bf16 tensors of 256, 256, 30 and 512 bytes lie at 0, 256, 512 and 768; with
    1024-byte buckets they go as (0, 1, 2) and (3): there are 226 bytes of padding before the last
    one.
    """
    out: list[list[TensorSpec]] = []
    for spec in manifest.tensors:
        if out:
            start, last = out[-1][0].offset, out[-1][-1]
            joins = (
                last.offset + last.nbytes == spec.offset
                and (spec.offset - start) % ITEM_BYTES[spec.dtype] == 0
            )
            if joins and spec.offset + spec.nbytes - start <= bucket_bytes:
                out[-1].append(spec)
                continue
        out.append([spec])
    return [tuple(bucket) for bucket in out]


def fused(name: str) -> str:
    """The engine's parameter that takes a HF tensor: ``0.mlp.up_proj.weight`` ->
    ``0.mlp.gate_up_proj.weight``."""
    for pattern, replacement in FUSED:
        name, found = pattern.subn(replacement, name)
        if found:
            break
    return name


def names_problem(sent: Iterable[str], served: Collection[str]) -> str:
    """Why tensors with these HF names do not make up a model with these parameters; empty if they
    do.

    A head that is tied to the embedding may be on either side. Parameters that engines compute
    themselves (rotary tables) are not asked for.
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
    parts = [
        f"{what}: {', '.join(names[:SHOWN])}"
        + (f" and {len(names) - SHOWN} more" if len(names) > SHOWN else "")
        for what, names in (
            ("unknown to the server", unknown),
            ("missing", missing),
            ("sent in part", partly),
        )
        if names
    ]
    if not parts:
        return ""
    return (
        f"the trainer's tensors are not those of the server's model ({'; '.join(parts)}): serve the"
        " model that is trained, or, if the engine only has other names for them, install"
        " titan_grpo in the server's environment"
    )
