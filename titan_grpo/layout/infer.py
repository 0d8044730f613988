"""Names of a model's parameters and order of their rows in the engine's (HF) layout, inferred from
the model's own ``to_hf``.

Row ids and column ids go through ``to_hf`` once: permutations (rope q/k) and splits (experts) come
out as data, so no second table of names is needed.

A parameter of shape ``(d0, .., dk)`` is a matrix of ``d0 * .. * d(k-1)`` rows and ``dk`` columns; a
vector has one column. An HF tensor is rows of one parameter, whole, in some order."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod

import torch

from titan_grpo.errors import ConfigError
from titan_grpo.layout.manifest import Manifest

Shape = tuple[int, ...]
ToHF = Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]

WRAPPER_PREFIXES = ("_checkpoint_wrapped_module.", "_orig_mod.")
"""Prefixes that activation checkpointing and torch.compile put into parameter names."""


def strip_prefixes(fqn: str) -> str:
    """Return a parameter's name in the adapter: without WRAPPER_PREFIXES."""
    for prefix in WRAPPER_PREFIXES:
        fqn = fqn.replace(prefix, "")
    return fqn


def matrix_shape(shape: Sequence[int]) -> tuple[int, int]:
    """Return rows and columns: ``(8, 3, 5) -> (24, 5)``, ``(7,) -> (7, 1)``, ``() -> (1, 1)``."""
    return (prod(shape), 1) if len(shape) < 2 else (prod(shape[:-1]), shape[-1])


@dataclass(frozen=True)
class HFTensor:
    """One tensor of the engine's model: row ``r`` is row ``rows[r]`` of parameter ``fqn``."""

    name: str
    shape: Shape
    fqn: str
    rows: range | torch.Tensor
    """A range if the rows are an arithmetic progression, else int64[rows]."""

    def row_ids(self) -> torch.Tensor:
        """Return int64[rows of this tensor]: the parameter's row of each."""
        if isinstance(self.rows, range):
            return torch.arange(self.rows.start, self.rows.stop, self.rows.step, device="cpu")
        return self.rows


@dataclass(frozen=True)
class Layout:
    """All parameters (full shapes) and the HF tensors that they become, in the adapter's order."""

    shapes: Mapping[str, Shape]
    tensors: tuple[HFTensor, ...]

    @cached_property
    def by_fqn(self) -> dict[str, list[HFTensor]]:
        """The HF tensors of each parameter; an empty list for a tied one."""
        table: dict[str, list[HFTensor]] = {fqn: [] for fqn in self.shapes}
        for tensor in self.tensors:
            table[tensor.fqn].append(tensor)
        return table

    def manifest(
        self, wire_dtype: str, block_bytes: int, keep_dtype: Mapping[str, str] | None = None
    ) -> Manifest:
        """Lay the HF tensors out in ``wire_dtype``.

        ``keep_dtype`` maps parameter names to other dtypes, for parameters that must not be rounded
        (an MoE's float32 expert bias).
        """
        keep = keep_dtype or {}
        return Manifest.build(
            ((t.name, keep.get(t.fqn, wire_dtype), t.shape) for t in self.tensors), block_bytes
        )


def infer_layout(
    to_hf: ToHF, shapes: Mapping[str, Sequence[int]], tied: Collection[str] = ()
) -> Layout:
    """Infer the HF tensors that ``to_hf`` makes of every parameter, one at a time.

    ``shapes``: full (unsharded) shape per parameter name, prefixes stripped. ``tied``: names that
    may yield nothing because another parameter has their values (``output.weight`` with tied
    embeddings).

    Raises ConfigError, with the parameter's name, if it yields nothing (adapters silently drop
    unknown names), if rows are lost, repeated or changed, if its columns move, or if two parameters
    give the same HF name.
    """
    tensors: list[HFTensor] = []
    owner: dict[str, str] = {}
    for fqn, shape in shapes.items():
        if 0 in shape:
            raise ConfigError(
                f"every dimension of {fqn} must be 1 or greater, got {tuple(shape)}: a parameter"
                " without elements has no rows to sync; remove it from the model"
            )
        found = _learn_one(to_hf, fqn, tuple(shape))
        if not found and fqn not in tied:
            raise ConfigError(
                f"every parameter must become at least one HF tensor, {fqn} becomes none: the"
                " servers would keep its first values for ever; strip wrapper prefixes from its"
                " name, or use a model whose StateDictAdapter exports it"
            )
        for tensor in found:
            if tensor.name in owner:
                raise ConfigError(
                    f"HF tensor {tensor.name} must come from one parameter, got"
                    f" {owner[tensor.name]} and {fqn}"
                )
            owner[tensor.name] = fqn
        tensors += found
    return Layout({fqn: tuple(shape) for fqn, shape in shapes.items()}, tuple(tensors))


def _learn_one(to_hf: ToHF, fqn: str, shape: Shape) -> list[HFTensor]:
    rows, cols = matrix_shape(shape)
    # Expanded views: a probe of an embedding takes rows * 4 bytes, not rows * cols * 4, unless
    # to_hf clones it.
    row_ids = (
        torch.arange(rows, dtype=torch.int32, device="cpu")
        .view(-1, 1)
        .expand(rows, cols)
        .view(shape)
    )
    col_ids = torch.arange(cols, dtype=torch.int32, device="cpu").expand(rows, cols).view(shape)
    by_row, by_col = _probe(to_hf, fqn, row_ids), _probe(to_hf, fqn, col_ids)
    found = []
    for name, tensor in by_row.items():
        ids = _source_rows(fqn, name, tensor, by_col[name], cols)
        run = progression(ids)
        found.append(HFTensor(name, tuple(tensor.shape), fqn, ids if run is None else run))
    if found:
        _check_rows_used_once(fqn, rows, found)
    return found


def _probe(to_hf: ToHF, fqn: str, probe: torch.Tensor) -> dict[str, torch.Tensor]:
    try:
        return to_hf({fqn: probe})
    except (KeyError, ValueError, RuntimeError) as error:
        raise ConfigError(
            f"the StateDictAdapter must convert {fqn} {tuple(probe.shape)} on its own, it raised"
            f" {error!r}: the parameter cannot be synced; strip wrapper prefixes from its name, or"
            " check the model flavor's head counts"
        ) from error


def _source_rows(
    fqn: str, name: str, by_row: torch.Tensor, by_col: torch.Tensor, cols: int
) -> torch.Tensor:
    """Return int64[rows of the HF tensor]: the source row of each. Raises ConfigError unless rows
    are whole and in column order."""
    if by_row.dtype != torch.int32 or by_row.numel() % cols:
        raise ConfigError(
            f"{name} must hold whole rows of {fqn} ({cols} columns), got {by_row.dtype}"
            f" {tuple(by_row.shape)}: the adapter changes values or splits columns, which cannot"
            " be synced"
        )
    ids, columns = by_row.reshape(-1, cols), by_col.reshape(-1, cols)
    # Stride 0 is the probe's own expanded dimension, equal by construction: skip the full compare,
    # which would read every element.
    rows_whole = ids.stride(1) == 0 or bool((ids == ids[:, :1]).all())
    columns = columns[:1] if columns.stride(0) == 0 else columns
    if not rows_whole or not bool(
        (columns == torch.arange(cols, dtype=torch.int32, device="cpu")).all()
    ):
        raise ConfigError(
            f"{name} must keep the columns of {fqn} in place: the adapter transposes or reorders"
            " them, which cannot be synced"
        )
    return ids[:, 0].to(torch.int64)


def _check_rows_used_once(fqn: str, rows: int, found: Iterable[HFTensor]) -> None:
    ids = torch.cat([tensor.row_ids() for tensor in found])
    in_range = bool(((ids >= 0) & (ids < rows)).all())
    if not in_range or not torch.equal(torch.bincount(ids), torch.ones(rows, dtype=torch.int64)):
        raise ConfigError(
            f"each of the {rows} rows of {fqn} must reach the HF tensors exactly once, got"
            f" {ids.numel()} rows: the adapter drops, repeats or changes values, which cannot be"
            " synced"
        )


def progression(ids: torch.Tensor) -> range | None:
    """Return ids as a range, ``[4, 6, 8] -> range(4, 9, 2)``; None unless they rise in equal
    steps."""
    if ids.numel() < 2:
        return range(int(ids[0]), int(ids[0]) + 1) if ids.numel() else range(0)
    steps = ids.diff()
    step = int(steps[0])
    if step < 1 or bool((steps != step).any()):
        return None
    return range(int(ids[0]), int(ids[-1]) + 1, step)
