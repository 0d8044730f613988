"""Several sequences in one row, and how attention is kept from crossing from one to the next.

Everything in a transformer but attention works token by token, so it does not matter to it whose neighbour a token is. For
attention the row is taken apart: its tokens are gathered into rows of one sequence each, plain causal attention runs on those,
and the results go back to where the tokens lie. So no mask is needed (the fast kernels take none), and nothing but attention
pays for padding: rows of similar length go together, and less than half of such a batch is padding.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from titan_grpo.algorithm.balance import padded_length


class AttentionRows(NamedTuple):
    """Where attention finds the tokens of a packed micro-batch of R rows with L tokens, counted row by row."""

    rows: tuple[torch.Tensor, ...]
    """int64 [S, P] each: the tokens of S sequences of similar length, each followed by any tokens up to P."""

    home: torch.Tensor
    """int64 [R * L]: for each token of the micro-batch, where it is in those rows, flattened and one after the other."""

    def to(self, device: torch.device | str) -> "AttentionRows":
        """The same on ``device``."""
        return AttentionRows(tuple(rows.to(device, non_blocking=True) for rows in self.rows), self.home.to(device))


def attention_rows(sequence: torch.Tensor, multiple: int = 8) -> AttentionRows:
    """From ``sequence`` int64 [R, L] on the CPU: which sequence a token belongs to (its tokens lie together), -1 for padding.

    Results of padding tokens are those of some other token: finite, and used by nobody. A micro-batch of nothing but
    padding counts as R sequences, so that attention has a gradient graph there too.

    Example: sequence ((0, 0, 1, -1),), multiple 1 -> rows ((0, 1),) and ((2,),), home (0, 1, 2, 0).
    """
    num_rows, row_tokens = sequence.shape
    spans = _spans(sequence) or [(row * row_tokens, row_tokens) for row in range(num_rows)]
    spans.sort(key=lambda span: -span[1])
    home = torch.zeros(num_rows * row_tokens, dtype=torch.int64)
    rows, filled = [], 0
    for alike in _alike([length for _, length in spans]):
        longest = padded_length(spans[alike.start][1], multiple, row_tokens)
        starts = torch.tensor([start for start, _ in spans[alike]])
        # Past a sequence's end follow its neighbours, which its own tokens can not see; past the last row any token will do.
        index = (starts.unsqueeze(-1) + torch.arange(longest)).clamp_(max=home.numel() - 1)
        for number, (start, length) in enumerate(spans[alike]):
            place = filled + number * longest
            home[start : start + length] = torch.arange(place, place + length)
        rows.append(index)
        filled += index.numel()
    return AttentionRows(tuple(rows), home)


def _spans(sequence: torch.Tensor) -> list[tuple[int, int]]:
    """(first token, number of tokens) of every sequence, in order; padding left out."""
    flat = sequence.reshape(-1)
    values, lengths = torch.unique_consecutive(flat, return_counts=True)
    ends = lengths.cumsum(0)
    table = zip(values.tolist(), (ends - lengths).tolist(), lengths.tolist(), strict=True)
    return [(start, length) for value, start, length in table if value >= 0]


def _alike(lengths: Sequence[int]) -> list[slice]:
    """Runs of falling ``lengths`` whose shortest is more than half of the longest. Example: (8, 5, 4, 1) -> 0:2, 2:3, 3:4."""
    cuts = [0]
    for at, length in enumerate(lengths):
        if 2 * length <= lengths[cuts[-1]]:
            cuts.append(at)
    return [slice(start, stop) for start, stop in zip(cuts, [*cuts[1:], len(lengths)], strict=True)]
