"""Copies from parameter shards into a version image: arithmetic on boxes, once at the start."""

import mmap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

import torch

from titan_grpo.errors import ConfigError
from titan_grpo.layout.infer import Layout, Shape, matrix_shape, progression
from titan_grpo.layout.manifest import ITEM_BYTES, Extent, Manifest, joined, whole_pages

MOST_EXTENTS = 1 << 20
"""Most extents of one host: each has a system call when sent. See manifest.MOST_IN_ALL too."""

Chunk = tuple[Shape, Shape]
"""Offsets and sizes of a box within a parameter's full shape."""


@dataclass(frozen=True)
class CopyOp:
    """One strided copy: ``num_rows x num_cols`` elements of a local shard into the image.

    ``rows`` selects rows of the shard, seen as a matrix (``matrix_shape`` of its local shape). Row
    ``i`` of the destination starts ``dest_offset + i * dest_row_stride`` bytes into the image, with
    adjacent elements of ``dtype``.
    """

    fqn: str
    rows: slice | torch.Tensor
    dest_offset: int
    dest_row_stride: int
    num_rows: int
    num_cols: int
    dtype: str


def written_pages(ops: Iterable[CopyOp]) -> tuple[Extent, ...]:
    """Return the pages of an image from the first to the last byte of each op, joined where they
    meet: a page can be pinned only once.

    An op of 2 rows of 8 bytes, 64 bytes apart, at byte 4090 ends at 4162: with pages of 4096 bytes
    the result is (0, 8192).
    """
    ends = []
    for op in ops:
        stop = op.dest_offset + (op.num_rows - 1) * op.dest_row_stride + _width(op)
        if op.num_rows and op.num_cols:
            ends.append((op.dest_offset, stop))
    return whole_pages(ends, mmap.PAGESIZE)


def written_extents(ops: Iterable[CopyOp]) -> tuple[Extent, ...]:
    """Return the extents of an image that ``ops`` write, joined where they meet.

    An op of 2 rows of 8 bytes, 64 bytes apart, at byte 4090 gives (4090, 4098) and (4154, 4162).
    Raises ConfigError for more than MOST_EXTENTS.
    """
    ends: list[Extent] = []
    for op in ops:
        width = _width(op)
        if width == op.dest_row_stride:
            ends.append((op.dest_offset, op.dest_offset + op.num_rows * width))
        else:
            starts = (op.dest_offset + row * op.dest_row_stride for row in range(op.num_rows))
            ends += [(start, start + width) for start in starts]
        if len(ends) > MOST_EXTENTS:
            raise ConfigError(
                f"the shards of one host must be at most {MOST_EXTENTS} pieces of memory, they are"
                f" more (at {op.fqn}): parameters are cut by columns over several hosts; keep the"
                " ranks of one tensor parallel group on one host"
            )
    return joined(ends)


def _width(op: CopyOp) -> int:
    """Return the bytes of one row of ``op``."""
    item: int = getattr(torch, op.dtype).itemsize
    return op.num_cols * item


def merged(boxes: Iterable[Chunk]) -> list[Chunk]:
    """Merge disjoint boxes, such as those of a host's ranks, as long as two of them form a box.

    Two halves of the columns of rows 4 to 8: ``merged([((4, 0), (4, 2)), ((4, 2), (4, 2))]) ==
    [((4, 0), (4, 4))]``.
    """
    out, before = list(boxes), -1
    while len(out) != before:
        before = len(out)
        for dim in range(len(out[0][0]) if out else 0):
            out = _merged_along(dim, out)
    return out


def _merged_along(dim: int, boxes: list[Chunk]) -> list[Chunk]:
    def others(box: Chunk) -> tuple[Shape, ...]:
        return tuple(tuple(n for d, n in enumerate(side) if d != dim) for side in box)

    out: list[Chunk] = []
    for box in sorted(boxes, key=lambda box: (others(box), box[0][dim])):
        if out and others(out[-1]) == others(box):
            (offsets, sizes), (start, size) = out[-1], (box[0][dim], box[1][dim])
            if offsets[dim] + sizes[dim] == start:
                out[-1] = offsets, (*sizes[:dim], sizes[dim] + size, *sizes[dim + 1 :])
                continue
        out.append(box)
    return out


def chunk_of(tensor: torch.Tensor) -> Chunk:
    """Return the box of this rank's shard of a parameter: a DTensor's local shard, a plain tensor
    whole.

    Asks the tensor as distributed checkpointing does. Raises ConfigError if the shard is not one
    box.
    """
    create = getattr(tensor, "__create_chunk_list__", None)
    if create is None:
        return (0,) * tensor.dim(), tuple(tensor.shape)
    chunks = create()
    if len(chunks) != 1:
        raise ConfigError(
            f"a parameter's local shard must be one box, got {len(chunks)}: its placement cannot"
            " be synced"
        )
    return tuple(chunks[0].offsets), tuple(chunks[0].sizes)


def copy_ops(
    layout: Layout, manifest: Manifest, fqn: str, offsets: Sequence[int], sizes: Sequence[int]
) -> list[CopyOp]:
    """Return the copies that write the box ``offsets, sizes`` of parameter ``fqn`` into an image:
    one per run of HF rows. Adjacent HF tensors, such as a rank's experts, may share one: each copy
    costs the main thread about 15 us per version, and two launches on a device.

    Worked example: rows ``[0, 2, 1, 3]`` of a ``(4, 8)`` parameter become an HF tensor in bfloat16
    at offset 256, and this rank holds rows 0 and 1: HF row 0 (source 0) and HF row 2 (source 1), so
    two ops of one row each, to 256 and to ``256 + 2 * 16``, both with a row stride of 16 bytes.
    """
    shape = layout.shapes[fqn]
    if prod(sizes) == 0:
        return []
    local_rows = _local_row_of(shape, offsets, sizes)
    first_col, num_cols = (offsets[-1], sizes[-1]) if len(shape) > 1 else (0, 1)
    cols = matrix_shape(shape)[1]
    ops: list[CopyOp] = []
    for tensor in layout.by_fqn[fqn]:
        spec = manifest.spec(tensor.name)
        item = ITEM_BYTES[spec.dtype]
        for start, ids in _runs(local_rows[tensor.row_ids()]):
            run = progression(ids)
            rows = ids if run is None else slice(run.start, run.stop, run.step)
            offset = spec.offset + (start * cols + first_col) * item
            op = CopyOp(fqn, rows, offset, cols * item, ids.numel(), num_cols, spec.dtype)
            if ops and (both := _joined(ops[-1], op)) is not None:
                ops[-1] = both
            else:
                ops.append(op)
    return ops


def _joined(one: CopyOp, other: CopyOp) -> CopyOp | None:
    """Return two copies of a parameter as one, if the second begins where the first ends, in the
    shard and in the image."""
    first, second = one.rows, other.rows
    if not (isinstance(first, slice) and isinstance(second, slice)):
        return None
    adjacent = first.step == second.step == 1 and first.stop == second.start
    if not adjacent or one.dest_offset + one.num_rows * one.dest_row_stride != other.dest_offset:
        return None
    rows = slice(first.start, second.stop, 1)
    return replace(one, rows=rows, num_rows=one.num_rows + other.num_rows)


def _local_row_of(shape: Shape, offsets: Sequence[int], sizes: Sequence[int]) -> torch.Tensor:
    """Return int64[full rows]: the local shard's row of each row of the parameter; -1 for rows of
    other shards."""
    leading = max(len(shape) - 1, min(len(shape), 1))
    table = torch.full(shape[:leading], -1, dtype=torch.int64, device="cpu")
    box = tuple(slice(o, o + n) for o, n in zip(offsets[:leading], sizes[:leading], strict=True))
    held = table[box]
    held.copy_(torch.arange(held.numel(), device="cpu").view(held.shape))
    return table.view(-1)


def _runs(local_rows: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
    """Yield the maximal runs of adjacent entries that are not -1, as (start, the run): ``[-1, 5, 6,
    -1, 0] -> (1, [5, 6]), (4, [0])``."""
    held = (local_rows >= 0).nonzero().view(-1)
    if held.numel() == 0:
        return
    breaks = (held.diff() != 1).nonzero().view(-1) + 1
    for positions in torch.tensor_split(held, breaks):
        start = int(positions[0])
        yield start, local_rows[start : start + positions.numel()]


def assign_writers(
    all_chunks: Sequence[Mapping[str, Chunk]], shapes: Mapping[str, Sequence[int]]
) -> list[set[str]]:
    """Return, for each rank, the names of the parameters of which it writes its box.

    ``all_chunks[rank][fqn]`` is that rank's box. If several ranks hold a box (HSDP replicas, norms
    under tensor parallelism, plain tensors), the lowest writes it. Raises ConfigError unless the
    boxes cover every element of every parameter exactly once.
    """
    writers: list[set[str]] = [set() for _ in all_chunks]
    for fqn, shape in shapes.items():
        boxes: dict[Chunk, int] = {}
        for rank, chunks in enumerate(all_chunks):
            if fqn in chunks and prod(chunks[fqn][1]) > 0:
                boxes.setdefault(chunks[fqn], rank)
        _check_coverage(fqn, shape, list(boxes))
        for rank in boxes.values():
            writers[rank].add(fqn)
    return writers


def _check_coverage(fqn: str, shape: Sequence[int], boxes: list[Chunk]) -> None:
    held, wanted = sum(prod(sizes) for _, sizes in boxes), prod(shape)
    if held < wanted:
        raise ConfigError(
            f"the ranks must hold every element of {fqn} {tuple(shape)}, they hold {held} of"
            f" {wanted}: its placement cannot be synced"
        )
    overlap = _first_overlap(boxes)
    if overlap is not None or held > wanted:
        raise ConfigError(
            f"the shards of {fqn} {tuple(shape)} must not overlap, got (offsets, sizes)"
            f" {overlap or boxes}"
        )


def _first_overlap(boxes: list[Chunk]) -> tuple[Chunk, Chunk] | None:
    """Return two boxes that share an element, or None. Boxes are sorted by the dimension with the
    most offsets: shards along any dimension cost one comparison each."""
    columns = list(zip(*(offsets for offsets, _ in boxes), strict=True))
    axis = max(range(len(columns)), key=lambda dim: len({*columns[dim]}), default=0)
    ordered = sorted(boxes, key=lambda box: box[0][axis : axis + 1])
    for i, (offsets, sizes) in enumerate(ordered):
        for other in ordered[i + 1 :]:
            if offsets and other[0][axis] >= offsets[axis] + sizes[axis]:
                break
            dims = zip(offsets, sizes, *other, strict=True)
            if all(o < p + m and p < o + n for o, n, p, m in dims):
                return (offsets, sizes), other
    return None
