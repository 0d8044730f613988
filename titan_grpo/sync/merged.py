"""Rows of a weight with its low-rank adapter added, made when they are copied."""

import torch


class MergedRows:
    """``base + scale * up @ down`` of one shard, seen as a matrix of which rows can be picked.

    The sum is made in float64, a few rows at a time: its rounding to the image's type is then the
    same however the rows are cut over ranks and pieces, and a shard needs no second copy of itself.
    """

    dtype = torch.float64

    def __init__(
        self, base: torch.Tensor, up: torch.Tensor, down: torch.Tensor, scale: float
    ) -> None:
        """``base`` [m, n]; ``up`` [m, rank]; ``down`` [rank, n]; of any floating-point type, on one
        device."""
        self._base, self._up, self._down, self._scale = base, up, down, scale

    def element_size(self) -> int:
        """Bytes of an element of what is made."""
        return self.dtype.itemsize

    def __getitem__(self, rows: slice | torch.Tensor) -> torch.Tensor:
        """float64 [rows, n]."""
        up = self._up[rows].to(self.dtype)
        return torch.addmm(
            self._base[rows].to(self.dtype), up, self._down.to(self.dtype), alpha=self._scale
        )
