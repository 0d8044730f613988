"""Sums over sequences that may lie several in one row: by an index tensor, never by row."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Spans:
    """Which tokens count, and which sequence each belongs to. Every result is [R, L] again: a sequence's value at each of
    its tokens, so that token and sequence level share all further code. No size depends on a tensor's values (no host sync).
    """

    mask: torch.Tensor
    """bool [R, L]: completion tokens that count."""

    sequence: torch.Tensor
    """int64 [R, L]: number of the token's sequence, -1 for padding. Numbers are below R * L and unique in the micro-batch."""

    def total(self, values: torch.Tensor) -> torch.Tensor:
        """Sum over the counting tokens of each sequence, [R, L]; differentiable."""
        place = (self.sequence + 1).reshape(-1)
        counted = values.masked_fill(~self.mask, 0).reshape(-1)
        sums = counted.new_zeros(place.numel() + 1).index_add(0, place, counted)
        return sums[place].view(self.sequence.shape)

    def mean(self, values: torch.Tensor) -> torch.Tensor:
        """Mean over the counting tokens of each sequence, [R, L]; 0 for a sequence without any."""
        return self.total(values) / self.total(torch.ones_like(values)).clamp(min=1)

    def any(self, flags: torch.Tensor) -> torch.Tensor:
        """Whether ``flags`` (bool [R, L]) holds at any counting token of the sequence: bool [R, L]."""
        return self.total(flags.to(torch.float32)) > 0

    def count(self) -> torch.Tensor:
        """Sequences with a counting token, a float64 scalar."""
        present = torch.zeros(self.sequence.numel() + 1, dtype=torch.float64, device=self.mask.device)
        return present.index_fill(0, torch.where(self.mask, self.sequence + 1, 0).reshape(-1), 1.0)[1:].sum()


def spans_of(labels_mask: torch.Tensor, sequence: torch.Tensor | None) -> Spans:
    """Spans of a micro-batch; without ``sequence`` every row is one sequence."""
    if sequence is None:
        rows = torch.arange(labels_mask.shape[0], device=labels_mask.device)
        sequence = rows.unsqueeze(-1).expand(labels_mask.shape)
    return Spans(labels_mask, sequence)
