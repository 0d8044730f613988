"""Plan of a step, made on rank 0: from groups of completions to the rows of every data-parallel
rank, cut into micro-batches."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import groupby

import torch

from titan_grpo.algorithm.advantages import Scored, by_episode, step_advantages
from titan_grpo.algorithm.balance import (
    TokenCost,
    cut_alike,
    cut_packed,
    cut_padded,
    deal,
    padded_length,
    partition,
)
from titan_grpo.algorithm.rows import Layout, MicroBatch, Row, Rows, build, compact
from titan_grpo.config import GRPO
from titan_grpo.errors import DataError
from titan_grpo.samples import EXTERNAL, Completion, Group, Prompt, defect, whole_routes


@dataclass(frozen=True, slots=True)
class BatchOptions(Layout):
    """How a step's completions become rows; one of ``max_len`` tokens fits into the token budget
    (titan/rules.py)."""

    grpo: GRPO = field(default_factory=GRPO)

    longest: int = 0
    """Most tokens of a completion (rollout.max_completion_tokens)."""

    cost: TokenCost = field(default_factory=TokenCost)
    """Work of a sequence; ranks get equal shares of it."""

    vocabulary: int = 1 << 31
    """Number of the model's token ids; another id is a defect. Default: what an int32 can hold."""

    experts: int = 1 << 15
    """Number of experts of a layer; a route to another one is a defect. Default: what an int16 can
    hold."""

    stages: int = 1
    """Pipeline-parallel ranks. With several, the micro-batches of an optimizer step have one shape,
    and their number is a multiple of this, so that every stage has work."""

    @property
    def layout(self) -> Layout:
        """The options that a rank needs to build its tensors."""
        return Layout(*(getattr(self, each.name) for each in fields(Layout)))


@dataclass(frozen=True, slots=True)
class Batch:
    """Plan of one step: ``rows[rank]`` is that rank's share. Every rank has the same number of
    micro-batches."""

    rows: list[Rows]
    steps: tuple[int, ...]
    """Number of micro-batches of each optimizer step: the first ``steps[0]`` of every rank belong
    to the first step, and so on."""
    loads: tuple[int, ...]
    """Input tokens of each rank, without padding."""
    work: tuple[float, ...]
    """Cost of each rank's sequences, in the unit of ``BatchOptions.cost``."""
    dealt_work: tuple[float, ...]
    """The same if groups were dealt in their order, without balancing."""
    padded_tokens: int
    """Rows times padded length, over all micro-batches and ranks."""
    trained: tuple[int, ...]
    """Sampled tokens of each completion that is trained on."""
    dropped: dict[str, int]
    """Completions left out, by reason: too_long, truncated, empty_completion, empty_prompt,
    nothing_sampled, length_mismatch, bad_logprob, bad_reward, bad_token, no_routes;
    group_of_defective for the others of a group with one of the last eight."""

    @property
    def fill(self) -> float:
        """Share of the padded tokens that are real."""
        return sum(self.loads) / self.padded_tokens

    def micro_batches(self) -> list[list[MicroBatch]]:
        """Build the tensors of all ranks; ``[rank][k]`` is that rank's k-th micro-batch."""
        return [build(rows) for rows in self.rows]


def plan(groups: Sequence[Group], num_ranks: int, options: BatchOptions) -> Batch:
    """Plan the rows, advantages and weights of one step, balanced over ``num_ranks`` data-parallel
    ranks. Deterministic.

    A group with a defective completion is left out whole, as in the rollouts: advantages compare
    its members, and a group without its failures of one kind would be biased. A row of more than
    ``max_len`` tokens is left out alone, and with ``grpo.mask_truncated`` a completion that hit the
    length limit; their rewards still count for their groups. ``Batch.dropped`` counts all of these.
    If every completion hit the limit, all are kept with weight 0: a step without a gradient. Ranks
    without enough rows get empty micro-batches: every rank must run every collective.

    Raises DataError if no row is left.
    """
    rows, dropped = _rows(groups, options)
    if not rows:
        raise DataError(
            f"no completion of this step can be trained on: {len(groups)} groups, dropped {dropped}"
            " (docs/metrics.md has what each reason means)"
        )
    steps: list[int] = []
    trained: list[int] = []
    ranks: list[list[list[Row]]] = [[] for _ in range(num_ranks)]
    work, dealt_work = [0.0] * num_ranks, [0.0] * num_ranks
    for minibatch in range(options.grpo.num_microbatches):
        part = [row for row in rows if row.group % options.grpo.num_microbatches == minibatch]
        if not part:
            continue
        weighted = _weighted(part, options)
        trained += [row.completion.num_sampled for row in weighted if row.weight]
        items = [[row] for row in weighted]
        if not options.grpo.balance_split_groups:
            of_groups = groupby((row for [row] in items), lambda row: row.group)
            items = [list(group) for _, group in of_groups]
        costs = [sum(options.cost.of(row.length) for row in item) for item in items]
        dealt = deal(len(items), num_ranks)
        shares = (
            partition(costs, num_ranks, options.grpo.balance_equal_counts)
            if options.grpo.balance_batch
            else dealt
        )
        cuts = _cuts([[row for item in share for row in items[item]] for share in shares], options)
        steps.append(len(cuts[0]))
        for rank in range(num_ranks):
            ranks[rank] += cuts[rank]
            work[rank] += sum(costs[item] for item in shares[rank])
            dealt_work[rank] += sum(costs[item] for item in dealt[rank])
    layout = options.layout
    return Batch(
        rows=[compact(cuts, layout) for cuts in ranks],
        steps=tuple(steps),
        loads=tuple(sum(row.length for cut in cuts for row in cut) for cuts in ranks),
        work=tuple(work),
        dealt_work=tuple(dealt_work),
        padded_tokens=sum(_padded_tokens(cuts, steps, options) for cuts in ranks),
        trained=tuple(trained),
        dropped=dropped,
    )


def _padded_tokens(
    cuts: Sequence[Sequence[Row]], steps: Sequence[int], options: BatchOptions
) -> int:
    shapes = [options.layout.shape([row.length for row in cut]) for cut in cuts]
    if options.stages == 1:
        return sum(map(math.prod, shapes))
    total = 0
    for count in steps:
        rows, lengths = zip(*shapes[:count], strict=True)
        total, shapes = total + count * max(rows) * max(lengths), shapes[count:]
    return total


def _rows(groups: Sequence[Group], options: BatchOptions) -> tuple[list[Row], dict[str, int]]:
    """Return rows in the order of groups and completions, and counts of what is left out."""
    rows: list[Row] = []
    dropped: Counter[str] = Counter()
    sound: list[tuple[Completion, ...]] = []
    for group in groups:
        reasons = [unfit(group.prompt, completion, options) for completion in group.completions]
        spoilt = any(reasons)
        dropped.update((why or "group_of_defective" for why in reasons) if spoilt else ())
        sound.append(() if spoilt else group.completions)
    scored, places = zip(*map(by_episode, sound), strict=True) if sound else ((), ())
    for number, of_episodes in enumerate(step_advantages(scored, options.grpo, options.longest)):
        prompt = groups[number].prompt
        advantages = [of_episodes[place] for place in places[number]]
        for completion, advantage in zip(sound[number], advantages, strict=True):
            if len(prompt.token_ids) + len(completion.token_ids) > options.max_len:
                dropped["too_long"] += 1
                continue
            advantage = 0.0 if completion.zero_advantage else advantage
            rows.append(Row(number, prompt, completion, advantage))
    if options.grpo.mask_truncated:
        whole = [row for row in rows if not _truncated(row.completion, options)]
        dropped["truncated"] += len(rows) - len(whole)
        rows = whole or rows
    return rows, {reason: count for reason, count in dropped.items() if count}


def _truncated(completion: Completion, options: BatchOptions) -> bool:
    """Return whether the length limit ended a completion. One from outside that does not say what
    ended it counts if it has the greatest length."""
    if completion.finish_reason == EXTERNAL:
        return Scored.of(completion).length >= options.longest
    return completion.finish_reason == "length"


def unfit(prompt: Prompt, completion: Completion, options: BatchOptions) -> str:
    """Return why a completion must not be trained on (samples.defect, or what this model cannot
    take), or ""."""
    if fault := defect(prompt, completion):
        return fault
    # Groups from outside and from files may have any id. On a GPU, one past the vocabulary ends the
    # process; a negative one may be IGNORE_INDEX, with which the token would not be trained on.
    for ids in (prompt.token_ids, completion.token_ids):
        if min(ids) < 0 or max(ids) >= options.vocabulary:
            return "bad_token"
    if not options.routes:
        return ""
    tokens = len(prompt.token_ids) + len(completion.token_ids)
    if not whole_routes(completion.routes, tokens, options.routes):
        return "no_routes"
    # -1 leaves the choice to the trainer; an expert that it lacks would end its forward.
    experts = torch.frombuffer(bytearray(completion.routes), dtype=torch.int16)
    known = int(experts.min()) >= -1 and int(experts.max()) < options.experts
    return "" if known else "no_routes"


def _weighted(rows: Sequence[Row], options: BatchOptions) -> list[Row]:
    """Return the rows of one optimizer step, each with the weight of its completion tokens.

    token: 1 / tokens of the step (DAPO). sequence: 1 / (sequences * the row's tokens) (GRPO).
    constant: 1 / (sequences * longest) (Dr.GRPO). Example, rows of 1 and 3 tokens: token 1/4 each;
    sequence 1/2 and 1/6; constant with longest = 10: 1/20 each. A ``zero_advantage`` row counts in
    the divisors and has weight 0: the KL and entropy terms would train on it too.
    """
    if options.grpo.mask_truncated and _truncated(rows[0].completion, options):
        # ``_rows`` keeps a truncated row only if every row of the step is truncated.
        return list(rows)
    match options.grpo.loss_normalization:
        case "token":
            divisors = [sum(row.completion.num_sampled for row in rows)] * len(rows)
        case "sequence":
            divisors = [len(rows) * row.completion.num_sampled for row in rows]
        case "constant":
            divisors = [len(rows) * options.longest] * len(rows)
    return [
        replace(row, weight=0.0 if row.completion.zero_advantage else 1 / div)
        for row, div in zip(rows, divisors, strict=True)
    ]


def _cuts(shares: Sequence[Sequence[Row]], options: BatchOptions) -> list[list[list[Row]]]:
    """Return the rows of each micro-batch of each rank. All ranks get the number that the fullest
    one needs; some micro-batches are empty."""

    def cut(share: Sequence[Row], at_least: int) -> list[list[int]]:
        lengths = [row.length for row in share]
        if options.pack:
            return cut_packed(lengths, options.token_budget, at_least)
        padded = [padded_length(n, options.pad_multiple, options.max_len) for n in lengths]
        if options.stages > 1:
            return cut_alike(padded, options.token_budget, at_least)
        return cut_padded(padded, options.token_budget, at_least)

    most = max(len(cut(share, options.stages)) for share in shares)
    most = -(-most // options.stages) * options.stages
    out = []
    for share in shares:
        cuts = [[share[i] for i in indices] for indices in cut(share, most)]
        out.append(cuts + [[] for _ in range(most - len(cuts))])
    return out
