"""Repeat an engine's load as plain copies, learnt by watching its own loader once.

A loader decides for each tensor where its rows go: which are this worker's, which parameter they
are fused into. It decides the same every time, in Python, and that takes longer than the copies:
vLLM reloads 310 tensors (1.1 GiB) on an H200 in 0.12 s, of which the bytes take 0.02 s. A mixture
of experts has tens of thousands of tensors.

``learn`` records the copies of one load. They are repeated only if they prove to be all that the
load did: nothing computes with a weight, nothing keeps one but the parameters (and buffers), none
is dropped before it is copied on, copies fill these without a gap, and each has the bytes that its
copies give it. Otherwise every version goes through the engine's own loader.

Some loaders write to the tensors that they load (SGLang's of Gemma adds 1 to its norms). Those lie
in memory that an engine's workers share, and that is kept for the next version: such a loader gets
copies of them.
"""

import gc
import logging
import os
from bisect import bisect_left, insort
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from enum import Enum
from functools import cache
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from titan_grpo.receive.window import Tensors

log = logging.getLogger(__name__)

OWN_LOADER = "TITAN_GRPO_OWN_LOADER"
"""Environment variable of a server: with 1, every version goes through the engine's own loader."""

UNSEEN = RuntimeError, AttributeError
"""Raised for tensors without memory of their own, for operators without a schema, and where a
device has no memory left to compare in."""

WRITES = "the loader writes to the tensors that it loads, and gets copies of them"


class Written(RuntimeError):
    """A loader was about to write to a tensor that it loads."""


COMPARED = 64 << 20
"""On a full GPU there is no room for a large tensor twice."""


@dataclass(frozen=True, slots=True)
class Copies:
    """What a load does. ``pairs``: (part of a parameter, view of the loaded tensors).
    ``addresses``: name of a parameter, or buffer that is loaded -> where it was."""

    pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]
    addresses: Mapping[str, int]

    def fit(self, model: torch.nn.Module) -> bool:
        """Whether all of it is still where it was."""
        tensors = [*model.named_parameters(), *model.named_buffers()]
        return self.addresses.items() <= {name: t.data_ptr() for name, t in tensors}.items()

    def repeat(self) -> None:
        """Copy. Copies from pinned memory may still run when this returns."""
        with torch.no_grad():
            for target, source in self.pairs:
                # What is gathered or cast goes through memory that torch gives back at once.
                direct = source.is_contiguous() and source.dtype == target.dtype
                target.copy_(source, non_blocking=direct)


class Loading:
    """How one engine loads versions: by its own loader, or by the copies of an earlier load."""

    def __init__(self) -> None:
        self._own = os.environ.get(OWN_LOADER) == "1"
        self._writes = False
        """Whether its loader writes to the tensors that it loads."""

    def run(
        self,
        load: Callable[[Tensors], None],
        tensors: Callable[[], Tensors],
        sources: Sequence[torch.Tensor],
        model: torch.nn.Module | None,
        known: Copies | str | None,
    ) -> Copies | str:
        """Load a version. Return what its next one in the same memory is loaded by: copies, or a
        text, why by the engine's own loader.

        ``load``: the engine's own loader. ``tensors``: returns all of them in order; called again
        if the loader has to begin again. ``sources``: their values, views of memory that stays
        where it is. ``model``: what they fill; None: unknown. ``known``: what this returned for
        that memory before.
        """
        if self._own:
            model = None
        if isinstance(known, Copies) and model is not None and known.fit(model):
            known.repeat()
            all(True for _ in tensors())
            return known
        if self._writes:
            load((name, tensor.clone()) for name, tensor in tensors())
            return WRITES
        if isinstance(known, str):
            load(tensors())
            return known
        try:
            found = learn(lambda: load(tensors()), model, sources)
        except Written as written:
            log.info("%s: %s", written, WRITES)
            self._writes = True
            return self.run(load, tensors, sources, model, known)
        by = f"the engine's own loader: {found}"
        if isinstance(found, Copies):
            by = f"the {len(found.pairs)} copies of this load"
        log.info("the next versions are loaded by %s", by)
        return found


def learn(
    load: Callable[[], None], model: torch.nn.Module | None, sources: Sequence[torch.Tensor]
) -> Copies | str:
    """Call ``load``, which fills ``model`` from ``sources`` (views of memory that stays where it
    is). Return the copies that it consists of, or why there are none. Raises Written before it
    writes to ``sources``, which breaks it off."""
    watch = _Watch(sources)
    try:
        with torch.no_grad(), watch:
            load()
    finally:
        # Whatever a loader makes of an error.
        if watch.written:
            raise Written(watch.written)
    if model is None:
        return f"{OWN_LOADER} is 1, or what it fills is not known"
    try:
        with torch.no_grad():
            found: Copies | str = watch.copies(model)
            if isinstance(found, Copies) and differ([*found.pairs, *watch.constants]):
                return "parameters differ from what was copied into them"
    except UNSEEN as error:  # the load went well
        return f"the copies cannot be checked: {error}"
    return found


def differ(pairs: Iterable[tuple[torch.Tensor, torch.Tensor]], most: int = COMPARED) -> bool:
    """Whether a byte of a first tensor is not what a copy of the second would write there.
    ``most``: bytes that are compared at once."""
    found: dict[torch.device, torch.Tensor] = {}
    for target, source in pairs:
        for ours, theirs in _pieces(target, source, most):
            unequal = _differ(ours, theirs.to(ours.device, ours.dtype))
            found[ours.device] = found.get(ours.device, unequal) | unequal
    return any(bool(unequal) for unequal in found.values())


def _differ(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """Return whether the bits of two tensors of one shape and dtype differ: NaN is like itself."""
    both = [tensor.contiguous().flatten() for tensor in (first, second)]
    # Eight bytes at once where they lie so.
    starts = [int(flat.storage_offset()) * flat.itemsize for flat in both]
    wide = not any(n % 8 for n in (*starts, both[0].nbytes))
    ours, theirs = (flat.view(torch.int64 if wide else torch.uint8) for flat in both)
    return ours.ne(theirs).any()


def _pieces(
    target: torch.Tensor, source: torch.Tensor, most: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield both in pieces of ``most`` bytes, or of a row."""
    if target.nbytes <= most or target.dim() == 0:
        yield target, source
        return
    rows = max(1, most * len(target) // target.nbytes)
    yield from zip(target.split(rows), source.split(rows), strict=True)


def _storage(tensor: torch.Tensor) -> int:
    """Return what names the tensor's memory as long as a weak reference to it lives: an address
    would soon name other memory."""
    return int(tensor.untyped_storage()._cdata)


def _in_memory(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and not value.is_meta and value.numel() > 0


NEW = "aten::empty_like", "aten::zeros_like", "aten::new_empty", "aten::new_empty_strided"
"""They read no more of a tensor than its shape."""


class _Kind(Enum):
    """Of an operation. FILL writes a constant: what it pads keeps its value. HARMLESS ones make
    views or new memory."""

    HARMLESS, COPY, FILL, OTHER = range(4)


@cache
def _kind(func: Any) -> _Kind:
    aten, returned = torch.ops.aten, func._schema.returns
    if func is aten.copy_.default:
        return _Kind.COPY
    if func in (aten.fill_.Scalar, aten.zero_.default):
        return _Kind.FILL
    views = returned and not func._schema.is_mutable and all(r.alias_info for r in returned)
    # Made of others (torch.Tensor.to), which are seen one by one; in inference mode it comes whole,
    # and may copy.
    whole = func.has_kernel_for_dispatch_key(torch._C.DispatchKey.CompositeImplicitAutograd)
    new = func.name().partition(".")[0] in NEW
    return _Kind.HARMLESS if (views and not whole) or new else _Kind.OTHER


@cache
def _targets(func: Any) -> tuple[tuple[int, str], ...]:
    """Place and name of the arguments that an operation writes to."""
    named = enumerate(func._schema.arguments)
    return tuple((n, a.name) for n, a in named if a.alias_info and a.alias_info.is_write)


@dataclass(frozen=True, slots=True)
class _Write:
    """Of a block of a storage, from byte ``start`` on. ``constant``: of one value, which
    ``source`` has in the block's shape."""

    start: int
    shape: torch.Size
    dtype: torch.dtype
    source: torch.Tensor
    constant: bool = False

    @property
    def end(self) -> int:
        return self.start + self.shape.numel() * self.dtype.itemsize


class _Blocks:
    """Writes to one storage. None overlaps another: the later one has replaced it."""

    def __init__(self, tensor: torch.Tensor) -> None:
        """``tensor``: any view of it."""
        self._memory = StorageWeakRef(tensor.untyped_storage())
        self.copied_on = False
        self._starts = list[int]()
        self._writes = dict[int, _Write]()

    def between(self, begin: int, end: int) -> list[_Write]:
        """Return those that reach into the bytes from ``begin`` to ``end``, in their order."""
        first = bisect_left(self._starts, begin)
        if first > 0 and self._writes[self._starts[first - 1]].end > begin:
            first -= 1
        return [self._writes[at] for at in self._starts[first : bisect_left(self._starts, end)]]

    def forget(self, begin: int, end: int) -> None:
        for write in self.between(begin, end):
            del self._writes[write.start]
            del self._starts[bisect_left(self._starts, write.start)]

    def put(self, write: _Write) -> None:
        self.forget(write.start, write.end)
        self._writes[write.start] = write
        insort(self._starts, write.start)

    def kept(self, repeated: Container[int] = ()) -> bool:
        """Whether there is still something in it that was loaded, beside the writes whose ids are
        ``repeated``."""
        loaded = (w for w in self._writes.values() if not w.constant)
        return any(id(w) not in repeated for w in loaded) and not self._memory.expired()

    def taken(self) -> bool:
        """Whether it is gone, and no copy that was seen has read what was loaded into it."""
        loaded = any(not w.constant for w in self._writes.values())
        return loaded and not self.copied_on and self._memory.expired()


def _view(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.dtype, tensor.storage_offset(), tensor.shape, tensor.stride()


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the first byte of a tensor in its storage, and the one after the last."""
    begin = int(tensor.storage_offset()) * tensor.itemsize
    if tensor.numel() == 0:
        return begin, begin
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    return begin, begin + (1 + sum((n - 1) * step for n, step in steps)) * tensor.itemsize


class _Watch(TorchDispatchMode):
    """Sees every operation of the thread that enters it, and records what it writes.

    Loaders also fill memory of their own and copy that on (vLLM: into the tensors that its CUDA
    graphs know), so the writes to every storage are recorded.
    """

    def __init__(self, sources: Sequence[torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._sources = {_storage(s) for s in sources if _in_memory(s)}
        self._blocks: dict[int, _Blocks] = {}
        self.problem = self.written = ""
        self.constants = list[tuple[torch.Tensor, torch.Tensor]]()
        """Parts of parameters that have one value, and that value in their shape (``copies``)."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> object:
        if self._writes_to_sources(func, args, kwargs or {}):
            self.written = f"{func} writes to a tensor that is loaded"
            raise Written(self.written)
        out = func(*args, **(kwargs or {}))
        if not self.problem:
            try:
                self.problem = self._seen(func, args, kwargs)
            except UNSEEN as error:  # raising would break a load that goes well
                self.problem = f"{func} cannot be followed: {error}"
        return out

    def _writes_to_sources(self, func: Any, args: Any, kwargs: Any) -> bool:
        with suppress(*UNSEEN):
            for place, name in _targets(func):
                target = args[place] if place < len(args) else kwargs.get(name)
                if any(_storage(t) in self._sources for t in tree_leaves(target) if _in_memory(t)):
                    return True
        return False

    def _seen(self, func: Any, args: Any, kwargs: Any) -> str:
        """Record an operation. Return why the load is not one of copies, or ""."""
        if (kind := _kind(func)) is _Kind.HARMLESS:
            return ""
        if kind is _Kind.COPY:
            return self._copied(args[0], args[1])
        if kind is _Kind.FILL:
            value = args[1] if len(args) > 1 else 0
            one = torch.full((), value, dtype=args[0].dtype, device="cpu")
            return self._wrote(args[0], one, constant=True)
        given = {_storage(t) for t in tree_leaves((args, kwargs)) if _in_memory(t)}
        if not given.isdisjoint(self._sources | self._blocks.keys()):
            return f"{func} computes with weights"
        return ""

    def _copied(self, target: torch.Tensor, source: torch.Tensor) -> str:
        if not _in_memory(target):
            return ""  # a loader that only counts
        origin, storage = _storage(source), _storage(target)
        if origin in self._sources:
            return self._wrote(target, source)
        if origin in self._blocks and origin != storage:
            return self._moved(target, source, self._blocks[origin])
        if origin == storage and _view(source) == _view(target):
            return ""  # onto itself
        if storage in self._blocks:
            return "something else is copied into weights"
        return ""

    def _wrote(self, target: torch.Tensor, source: torch.Tensor, constant: bool = False) -> str:
        if not _in_memory(target):
            return ""
        if not target.is_contiguous():
            return "a block is written with gaps"
        start, source = _span(target)[0], source.expand(target.shape)
        self._of(target).put(_Write(start, target.shape, target.dtype, source, constant))
        return ""

    def _of(self, tensor: torch.Tensor) -> _Blocks:
        """Return the writes to a tensor's memory."""
        if (storage := _storage(tensor)) not in self._blocks:
            self._blocks[storage] = _Blocks(tensor)
        return self._blocks[storage]

    def _moved(self, target: torch.Tensor, source: torch.Tensor, blocks: _Blocks) -> str:
        """Record for ``target`` the writes that filled ``source``."""
        same = target.dtype == source.dtype and target.shape == source.shape
        if not (same and target.is_contiguous() and source.is_contiguous()):
            return "a block is rearranged"
        (begin, end), (first, last) = _span(source), _span(target)
        writes, blocks.copied_on = blocks.between(begin, end), True
        if any(w.start < begin or w.end > end for w in writes):
            return "a part of a block is copied on"
        moved = self._of(target)
        # What ``source`` had from nowhere is unknown in ``target`` too.
        moved.forget(first, last)
        for w in writes:
            moved.put(replace(w, start=w.start - begin + first))
        return ""

    def copies(self, model: torch.nn.Module) -> Copies | str:
        """Return the load's copies, or why it is more than those. Call it after the load."""
        if self.problem:
            return self.problem
        tensors = dict[str, torch.Tensor](model.named_parameters())
        tensors |= {name: b for name, b in model.named_buffers() if self._of(b).kept()}
        pairs, repeated = list[tuple[torch.Tensor, torch.Tensor]](), set[int]()
        for name, tensor in tensors.items():
            (at, end), whole = _span(tensor), tensor.is_contiguous()
            begin = at
            for w in self._of(tensor).between(at, end):
                # A view of another parameter must lie in what fills that one.
                if w.dtype != tensor.dtype or w.start > at or (whole and w.start < at):
                    break
                at = w.end
                if whole:
                    first = (w.start - begin) // tensor.itemsize
                    block = tensor.detach().view(-1)[first : first + w.shape.numel()]
                    filled = self.constants if w.constant else pairs
                    filled.append((block.view(w.shape), w.source))
                    repeated.add(id(w))
            if at < end or (whole and at > end):
                return f"{name} is not filled by copies alone"
        if any(blocks.kept(repeated) for blocks in self._blocks.values()):
            gc.collect()  # a cycle may hold what is no longer used
        if left := sum(blocks.kept(repeated) for blocks in self._blocks.values()):
            return f"{left} tensors are loaded that are neither parameters nor buffers"
        # By an operator that no mode of torch sees, as vLLM packs a linear layer for oneDNN.
        if gone := sum(blocks.taken() for blocks in self._blocks.values()):
            return f"{gone} tensors are loaded into memory that is gone, and nothing copied them on"
        return Copies(pairs, {name: tensor.data_ptr() for name, tensor in tensors.items()})
