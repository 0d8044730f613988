"""From groups of completions to one list of micro-batches per data-parallel rank."""

import math
from array import array
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import compress, groupby
from typing import Literal, TypeVar

import torch

from titan_grpo.algorithm.advantages import AdvantageOptions, Scored, step_advantages
from titan_grpo.algorithm.balance import TokenCost, cut_packed, cut_padded, deal, padded_length, partition
from titan_grpo.errors import ConfigError, DataError
from titan_grpo.samples import Completion, Group, Prompt

IGNORE_INDEX = -100
"""Label of positions that are not a completion token; torchtitan's and torch's own value."""

LOGPROB_RANGE = (-1e30, 1e-3)
"""A log-probability outside this is not one: NaN, infinite, past float32, or positive by more than rounding."""

MicroBatch = dict[str, torch.Tensor]
"""R rows of L tokens; see ``assemble`` for the tensors."""


@dataclass(frozen=True, slots=True)
class BatchOptions:
    """How rows are limited, padded and weighted. Checked on construction: raises ConfigError."""

    token_budget: int
    """Rows times padded length of one micro-batch on one rank."""

    max_len: int
    """Most tokens of prompt plus completion, and the greatest padded length (the model's sequence length)."""

    pad_id: int = 0
    """Input token at padded positions; any valid one, attention is causal and padding is on the right."""

    normalization: Literal["token", "sequence", "constant"] = "token"
    """Which weights the loss gets; see ``_row_weight``."""

    advantage: AdvantageOptions = field(default_factory=AdvantageOptions)
    """How rewards become advantages."""

    num_minibatches: int = 1
    """Optimizer steps that the groups are dealt to; each is normalised over its own rows."""

    constant: int = 0
    """Tokens that every sequence is divided by when normalization = "constant" (rollout.max_completion_tokens)."""

    pad_multiple: int = 8
    """Padded lengths are multiples of this (fewer shapes, and divisible by the tensor-parallel degree)."""

    cost: TokenCost = field(default_factory=TokenCost)
    """Work of a sequence, which ranks get equal shares of."""

    balance: bool = True
    """Partition the work by ``partition``; false deals groups in the order in which they came."""

    equal_counts: bool = False
    """Balanced shares have the same number of groups, give or take one."""

    split_groups: bool = False
    """Balance single sequences; false keeps all of a group on one rank."""

    pack: bool = False
    """Several sequences in one row (see packing.py); false gives each a row of its own, padded."""

    def __post_init__(self) -> None:
        for name in ("token_budget", "max_len", "pad_multiple", "num_minibatches"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be greater than 0, got {getattr(self, name)}")
        if self.max_len > self.token_budget:
            raise ConfigError(
                f"grpo.token_budget must hold one row of the greatest length, {self.max_len} tokens, got {self.token_budget}: "
                "such a row would fit no micro-batch; raise the budget or lower training.seq_len"
            )
        if self.normalization not in ("token", "sequence", "constant"):
            raise ConfigError(f"grpo.loss_normalization must be token, sequence or constant, got {self.normalization!r}")
        if self.normalization == "constant" and self.constant < 1:
            raise ConfigError(f'the divisor of loss_normalization = "constant" must be greater than 0, got {self.constant}')


@dataclass(frozen=True, slots=True)
class Batch:
    """One step's work: ``ranks[rank][k]`` is that rank's k-th micro-batch; every rank has the same number."""

    ranks: list[list[MicroBatch]]
    steps: tuple[int, ...]
    """Micro-batches of each optimizer step, in order: the first ``steps[0]`` of every rank belong to the first, and so on."""
    sequences: int
    """Rows that are trained on."""
    tokens: int
    """Sampled completion tokens in them."""
    loads: tuple[int, ...]
    """Input tokens of each rank, without padding."""
    work: tuple[float, ...]
    """Cost of each rank's sequences, in the unit of ``BatchOptions.cost``."""
    dealt_work: tuple[float, ...]
    """The same if groups were dealt in the order in which they came."""
    padded_tokens: int
    """Rows times padded length, over all micro-batches and ranks."""
    dropped: dict[str, int]
    """Completions left out, by reason: too_long, empty_completion, empty_prompt, nothing_sampled, length_mismatch, bad_logprob,
    bad_reward."""

    @property
    def fill(self) -> float:
        """Share of the padded tokens that are real."""
        return sum(self.loads) / self.padded_tokens


@dataclass(frozen=True, slots=True)
class _Row:
    group: int
    """Place of its group in the step."""
    prompt: Prompt
    completion: Completion
    advantage: float

    @property
    def length(self) -> int:
        """Input length: the last token of a sequence is only ever a label."""
        return len(self.prompt.token_ids) + len(self.completion.token_ids) - 1


def defect(prompt: Prompt, completion: Completion) -> str:
    """Why this completion must not be trained on, or "" if it may."""
    if not prompt.token_ids:
        return "empty_prompt"
    if not completion.token_ids:
        return "empty_completion"
    if len(completion.logprobs) != len(completion.token_ids):
        return "length_mismatch"
    logprobs: Sequence[float] = completion.logprobs
    if completion.sampled:
        if len(completion.sampled) != len(completion.token_ids):
            return "length_mismatch"
        logprobs = list(compress(logprobs, completion.sampled))
        if not logprobs:
            return "nothing_sampled"
    # The sum finds NaN, which min and max may step over; three passes in C, where a generator would take 5 times as long.
    least, most = min(logprobs), max(logprobs)
    if not (math.isfinite(sum(logprobs)) and LOGPROB_RANGE[0] < least and most < LOGPROB_RANGE[1]):
        return "bad_logprob"
    return "" if math.isfinite(completion.reward) else "bad_reward"


def assemble(groups: Sequence[Group], num_ranks: int, options: BatchOptions) -> Batch:
    """Rows, advantages and weights of one step, balanced over ``num_ranks`` data-parallel ranks. Deterministic.

    Tensors of a micro-batch with R rows of L tokens, on the CPU, all [R, L]:

    * ``inputs`` int64: prompt and completion without the last token, then ``pad_id``;
    * ``labels`` int64: the next token where that is a sampled one of the completion, else ``IGNORE_INDEX``;
    * ``sequence`` int64: number of the sequence, from 0 in each micro-batch; its tokens lie together. -1 is padding;
    * ``rollout_logprobs`` float32: the engine's log-probability of the label, 0 where ignored;
    * ``weights`` float32: the normalisation over the whole step, 0 where ignored;
    * ``advantages`` float32 and ``versions`` int64 (the oldest policy version in the sequence): 0 at padding;
    * ``positions`` int64, with ``options.pack`` only: place of the token in its sequence.

    Example: prompt (5, 6), completion (7, 8) -> inputs 5 6 7, labels -100 7 8.

    A defective completion is left out, also of its group's mean; one with more than ``max_len`` tokens is
    left out but its reward counts in that mean. Both are counted in ``Batch.dropped``. Ranks that run out
    of rows get an all-masked micro-batch, because every rank must run every collective.

    Raises DataError if no row is left.
    """
    rows, dropped = _rows(groups, options)
    if not rows:
        raise DataError(f"no completion of this step can be trained on: {len(groups)} groups, dropped {dropped}")
    parts = [[row for row in rows if row.group % options.num_minibatches == m] for m in range(options.num_minibatches)]
    dealt = [_deal(part, num_ranks, options) for part in parts if part]
    ranks = [[mb for minibatch in dealt for mb in minibatch.ranks[rank]] for rank in range(num_ranks)]
    return Batch(
        ranks=ranks,
        steps=tuple(len(minibatch.ranks[0]) for minibatch in dealt),
        sequences=len(rows),
        tokens=sum(row.completion.num_sampled for row in rows),
        loads=_summed([minibatch.loads for minibatch in dealt]),
        work=_summed([minibatch.work for minibatch in dealt]),
        dealt_work=_summed([minibatch.dealt_work for minibatch in dealt]),
        padded_tokens=sum(mb["inputs"].numel() for rank in ranks for mb in rank),
        dropped=dropped,
    )


_Number = TypeVar("_Number", int, float)


def _summed(of_minibatches: Sequence[Sequence[_Number]]) -> tuple[_Number, ...]:
    """Per rank, the sum over minibatches."""
    return tuple(sum(values) for values in zip(*of_minibatches, strict=True))


@dataclass(frozen=True, slots=True)
class _Dealt:
    ranks: list[list[MicroBatch]]
    loads: list[int]
    work: list[float]
    dealt_work: list[float]


def _deal(rows: Sequence[_Row], num_ranks: int, options: BatchOptions) -> _Dealt:
    """The micro-batches of one optimizer step."""
    items = [[row] for row in rows] if options.split_groups else [list(g) for _, g in groupby(rows, lambda row: row.group)]
    costs = [sum(options.cost.of(row.length) for row in item) for item in items]
    dealt = deal(len(items), num_ranks)
    parts = partition(costs, num_ranks, options.equal_counts) if options.balance else dealt
    shares = [[row for item in part for row in items[item]] for part in parts]
    tokens = sum(row.completion.num_sampled for row in rows)
    return _Dealt(
        ranks=[[_micro_batch(cut, len(rows), tokens, options) for cut in cuts] for cuts in _cuts(shares, options)],
        loads=[sum(row.length for row in share) for share in shares],
        work=[sum(costs[item] for item in part) for part in parts],
        dealt_work=[sum(costs[item] for item in part) for part in dealt],
    )


def _cuts(shares: Sequence[Sequence[_Row]], options: BatchOptions) -> list[list[list[_Row]]]:
    """Rows of each micro-batch of each rank; all ranks have as many as the one that needs most, some of them empty."""

    def cut(share: Sequence[_Row], at_least: int) -> list[list[int]]:
        lengths = [row.length for row in share]
        if options.pack:
            return cut_packed(lengths, options.token_budget, at_least)
        padded = [padded_length(length, options.pad_multiple, options.max_len) for length in lengths]
        return cut_padded(padded, options.token_budget, at_least)

    most = max(len(cut(share, 1)) for share in shares)
    out = []
    for share in shares:
        cuts = [[share[i] for i in indices] for indices in cut(share, most)]
        out.append(cuts + [[] for _ in range(most - len(cuts))])
    return out


def _rows(groups: Sequence[Group], options: BatchOptions) -> tuple[list[_Row], dict[str, int]]:
    """Rows in the order of groups and completions, and what was left out, by reason."""
    rows: list[_Row] = []
    dropped: Counter[str] = Counter()
    sound: list[list[Completion]] = []
    for group in groups:
        reasons = [defect(group.prompt, completion) for completion in group.completions]
        dropped.update(reason for reason in reasons if reason)
        sound.append([c for c, reason in zip(group.completions, reasons, strict=True) if not reason])
    scored = [[Scored(c.reward, c.num_sampled) for c in completions] for completions in sound]
    for number, advantages in enumerate(step_advantages(scored, options.advantage)):
        prompt = groups[number].prompt
        for completion, advantage in zip(sound[number], advantages, strict=True):
            if len(prompt.token_ids) + len(completion.token_ids) > options.max_len:
                dropped["too_long"] += 1
            else:
                rows.append(_Row(number, prompt, completion, 0.0 if completion.zero_advantage else advantage))
    return rows, dict(dropped)


def _row_weight(length: int, sequences: int, tokens: int, options: BatchOptions) -> float:
    """Weight of each of a row's ``length`` completion tokens, in a step of ``sequences`` rows and ``tokens`` tokens.

    token: 1 / tokens (DAPO). sequence: 1 / (sequences * length) (GRPO). constant: 1 / (sequences * constant) (Dr.GRPO).
    Example, rows of 1 and 3 tokens: token 1/4 each; sequence 1/2 and 1/6; constant 10: 1/20 each.
    """
    if options.normalization == "token":
        return 1 / tokens
    return 1 / (sequences * (length if options.normalization == "sequence" else options.constant))


def _shape(rows: Sequence[_Row], options: BatchOptions) -> tuple[int, int]:
    """Rows and padded length of one micro-batch."""
    if options.pack:
        # A packed row may be longer than max_len: positions begin anew with each sequence.
        return 1, padded_length(max(sum(row.length for row in rows), 1), options.pad_multiple, options.token_budget)
    longest = max((row.length for row in rows), default=1)
    return max(len(rows), 1), padded_length(longest, options.pad_multiple, options.max_len)


def _micro_batch(rows: Sequence[_Row], sequences: int, tokens: int, options: BatchOptions) -> MicroBatch:
    """Tensors of one micro-batch; no rows give one all-masked row of the least length."""
    shape = _shape(rows, options)
    out = {
        "inputs": torch.full(shape, options.pad_id, dtype=torch.int64),
        "labels": torch.full(shape, IGNORE_INDEX, dtype=torch.int64),
        "sequence": torch.full(shape, -1, dtype=torch.int64),
        "rollout_logprobs": torch.zeros(shape),
        "weights": torch.zeros(shape),
        "advantages": torch.zeros(shape),
        "versions": torch.zeros(shape, dtype=torch.int64),
    }
    if options.pack:
        out["positions"] = torch.zeros(shape, dtype=torch.int64)
    flat = {name: tensor.view(-1) for name, tensor in out.items()}
    start = 0
    for number, row in enumerate(rows):
        completion = row.completion
        stop, first = start + row.length, start + len(row.prompt.token_ids) - 1
        # Through array: torch.tensor takes six times as long on a tuple.
        ids = torch.frombuffer(array("q", row.prompt.token_ids + completion.token_ids), dtype=torch.int64)
        flat["inputs"][start:stop] = ids[:-1]
        flat["labels"][first:stop] = ids[first - start + 1 :]
        flat["sequence"][start:stop] = number
        flat["rollout_logprobs"][first:stop] = torch.frombuffer(array("f", completion.logprobs), dtype=torch.float32)
        flat["weights"][first:stop] = _row_weight(completion.num_sampled, sequences, tokens, options)
        if completion.sampled:
            context = ~torch.tensor(completion.sampled)
            for name, nothing in (("labels", IGNORE_INDEX), ("rollout_logprobs", 0), ("weights", 0)):
                flat[name][first:stop][context] = nothing
        flat["advantages"][start:stop] = row.advantage
        flat["versions"][start:stop] = completion.version_first
        if options.pack:
            flat["positions"][start:stop] = torch.arange(row.length)
        start = stop if options.pack else start + shape[1]
    return out
