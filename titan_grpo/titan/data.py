"""A step's data: groups, in the data loader that torchtitan iterates, and plain text.

Rank 0 takes groups, plans all ranks' work and scatters it. The scatter carries everything that the
ranks must agree on: the micro-batches, the slot of the next version, the resume state, or an error
that stops the run. With ``grpo.single_rank_load`` micro-batches travel as tensors; without, as rows
from which each rank builds the same tensors. The scatter has its own gloo group: the wait for
rollouts may be longer than torchtitan's training timeout.
"""

import math
import pickle
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torchtitan.components.dataloader import BaseDataLoader

from titan_grpo.algorithm.advantages import by_episode, has_spread
from titan_grpo.algorithm.balance import TokenCost
from titan_grpo.algorithm.batch import BatchOptions, unfit
from titan_grpo.algorithm.rows import MicroBatch, Rows, attention_rows, build
from titan_grpo.errors import ConfigError, ProtocolError, RunStopped
from titan_grpo.samples import Group
from titan_grpo.titan.rules import rank0_waits_s

GROUP_MARGIN_S = 120.0
"""Seconds that the loader's group waits beyond rank 0's own deadlines: rank 0 also builds tensors
and writes files, and its error says more than a gloo timeout."""


def batch_options(
    job_config: Any, cost: TokenCost, vocabulary: int, routes: int = 0, experts: int = 1 << 15
) -> BatchOptions:
    """Return how rows are cut, padded and weighted."""
    training, grpo = job_config.training, job_config.grpo
    return BatchOptions(
        token_budget=grpo.token_budget or training.local_batch_size * training.seq_len,
        max_len=training.seq_len,
        pad_multiple=math.lcm(8, job_config.parallelism.tensor_parallel_degree),
        pack=grpo.pack_sequences,
        routes=routes,
        experts=experts,
        grpo=grpo,
        longest=job_config.rollout.max_completion_tokens,
        cost=cost,
        vocabulary=vocabulary,
        stages=job_config.parallelism.pipeline_parallel_degree,
    )


@dataclass(frozen=True, slots=True)
class StepGroups:
    """Groups taken for one step."""

    groups: list[Group]
    left_out: list[Group]
    """Groups that the step does not use."""


def left_out_for(group: Group, options: BatchOptions) -> str:
    """Return why dynamic sampling replaces a group (its reason of a drop): a defect, with which it
    is not trained on, or "no_spread"; empty if it keeps the group."""
    for completion in group.completions:
        if fault := unfit(group.prompt, completion, options):
            return fault
    spread = has_spread(by_episode(group.completions)[0], options.grpo, options.longest)
    return "" if spread else "no_spread"


def varied_groups(
    take: Callable[[int], list[Group]],
    give_places_back: Callable[[int], None],
    want: int,
    rounds: int,
    options: BatchOptions,
    group_size: int = 0,
) -> StepGroups:
    """Take ``want`` groups with reward spread, replacing the others up to ``rounds`` times. Return
    fewer if that does not suffice (dynamic sampling, DAPO, arXiv 2503.14476, section 3.2).

    A prompt that is always or never solved gives equal rewards, so zero advantages: its group only
    shrinks the effective batch. If no group has spread, return those of the last round: a step
    needs rows, and their advantages are zero.

    Args:
        take: waits for that many more groups.
        give_places_back: gets the number of groups to replace, before ``take``; without it
            admission would not start others.
        group_size: of groups from outside, which have any size: as many completions count as one
            group, and ``take`` counts alike. 0: groups are counted.
    """

    kept: list[Group] = []
    flat: list[Group] = []
    missing = want
    for round_ in range(rounds + 1):
        taken = take(missing)
        for group in taken:
            (flat if left_out_for(group, options) else kept).append(group)
        completions = sum(len(group.completions) for group in kept)
        missing = want - (completions // group_size if group_size else len(kept))
        # It is negative where groups from outside are larger.
        if missing <= 0 or round_ == rounds:
            break
        give_places_back(missing)
    return StepGroups(kept, flat) if kept else StepGroups(taken, flat[: -len(taken)])


@dataclass(slots=True)
class Share:
    """One rank's share of one step."""

    steps: tuple[int, ...] = ()
    """Micro-batches of each optimizer step, in order."""
    slot: int | None = None
    """Slot for the version that this step makes; None: it is not published."""
    state: str = ""
    """Rollout state after this step, for the checkpoint."""
    microbatches: list[MicroBatch] | Rows = field(default_factory=list)
    """The tensors, or the rows to build them from."""


StepWork = tuple[Share, Sequence[list[MicroBatch] | Rows]]
"""Rank 0's work for a step: the share without micro-batches, and these by data-parallel rank."""


def pickled_shares(
    share: Share, ranks: Sequence[list[MicroBatch] | Rows], dp_ranks: Sequence[int]
) -> list[bytes]:
    """Return the share of each rank, ``dp_ranks`` by rank. Each data-parallel index is pickled
    once: with TP, EP or pipeline stages it has many ranks."""
    pickled = [pickle.dumps(replace(share, microbatches=each)) for each in ranks]
    return [pickled[index] for index in dp_ranks]


Result = TypeVar("Result")


def from_rank0(values: Callable[[], Sequence[Any]] | None, group: dist.ProcessGroup) -> Any:
    """Return on each rank its own of the ``values``, by rank, that rank 0 makes; the other ranks
    pass None, and wait for it. If it raises, rank 0 raises that error and every other rank
    RunStopped. Collective."""
    shares: list[Any] | None = None
    failure: Exception | None = None
    if values is not None:
        try:
            shares = [(value, "") for value in values()]
        except Exception as error:  # noqa: BLE001 - raised below, on every rank
            # Sent, a bug too: otherwise the other ranks would wait until rank 0 has closed
            # everything, and end by a lost connection.
            failure = error
            said = f"{type(error).__name__}: {error}"
            shares = [(None, said)] * dist.get_world_size(group)
    received: list[Any] = [None]
    dist.scatter_object_list(received, shares, src=0, group=group)
    value, why = received[0]
    if why:
        raise failure or RunStopped(why)
    return value


def on_rank0(work: Callable[[], Result] | None, group: dist.ProcessGroup) -> Result:
    """Return on every rank what ``work`` returns on rank 0. Otherwise as ``from_rank0``."""
    one = None if work is None else (lambda: [work()] * dist.get_world_size(group))
    found: Result = from_rank0(one, group)
    return found


class BatchLoader(BaseDataLoader):
    """One rank's data loader. ``fetch`` is collective; iteration yields the fetched micro-batches
    in torchtitan's form."""

    group: dist.ProcessGroup
    """Gloo group of all ranks for control messages on the main thread; set by ``connect``."""

    def __init__(self, dp_rank: int) -> None:
        self.dp_rank = dp_rank
        self.state = ""
        self._queue: list[MicroBatch] = []
        self._dp_ranks: list[int] = []

    def connect(self, job_config: Any, nbytes: int) -> None:
        """Open the scatter's own group. Collective over all ranks, once."""
        # The ranks also wait in this group while rank 0 starts servers and waits for a commit.
        timeout = timedelta(seconds=max(rank0_waits_s(job_config, nbytes)) + GROUP_MARGIN_S)
        self.group = dist.new_group(backend="gloo", timeout=timeout)
        dp_ranks: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(dp_ranks, self.dp_rank, group=self.group)
        self._dp_ranks = dp_ranks

    @property
    def num_shares(self) -> int:
        """Number of shares: one per data-parallel index; ranks of the same index get the same."""
        return max(self._dp_ranks) + 1

    def fetch(self, prepare: Callable[[], StepWork] | None) -> Share:
        """Return this rank's share of one step. Rank 0 passes ``prepare``; if that raises, it is as
        in ``from_rank0``.

        Collective over all ranks; the ranks other than 0 wait here for the rollouts.
        """
        shares = None if prepare is None else (lambda: pickled_shares(*prepare(), self._dp_ranks))
        mine: Share = pickle.loads(from_rank0(shares, self.group))
        self.state = mine.state
        work = mine.microbatches
        self._queue = build(work) if isinstance(work, Rows) else list(work)
        return mine

    def __iter__(self) -> Iterator[tuple[dict[str, Any], torch.Tensor]]:
        while True:
            if not self._queue:
                raise ProtocolError("the trainer asked for more micro-batches than the step has")
            batch: dict[str, Any] = dict(self._queue.pop(0))
            labels = batch.pop("labels")
            if "positions" in batch:
                batch["rows"] = attention_rows(batch["sequence"])
            yield {"input": batch.pop("inputs"), **batch}, labels

    # Called by torchtitan's checkpointer.

    def state_dict(self) -> dict[str, Any]:
        """Return the rollout state as text: cursor and counters, equal on every rank."""
        return {"rollout": self.state}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the state of a checkpoint; it is used when the rollouts start."""
        self.state = state_dict["rollout"]


class TextMixin:
    """PTX mix-in: one rank's batches of plain text from torchtitan's own loader. Their
    cross-entropy joins the optimizer step against forgetting, as in InstructGPT (arXiv 2203.02155,
    eq. 2):  L = L_policy + ptx_scale * CE.

    ``loader`` is checkpointed; iteration begins after the checkpoint is loaded.
    """

    def __init__(self, spec: Any, job_config: Any, dp_degree: int, dp_rank: int) -> None:
        """``spec`` is torchtitan's train spec of the model, with its own tokenizer and loader."""
        if spec.build_tokenizer_fn is None or spec.build_dataloader_fn is None:
            raise ConfigError(
                "grpo.ptx_mixin_batchsize must be 0 for a model.name that torchtitan has no text"
                f" loader for, got {job_config.grpo.ptx_mixin_batchsize}"
            )
        # Exact: rules.py refuses other values.
        self.batches_per_step = job_config.grpo.ptx_mixin_batchsize // (
            job_config.training.local_batch_size * dp_degree
        )
        tokenizer = spec.build_tokenizer_fn(job_config)
        ranks = {"dp_world_size": dp_degree, "dp_rank": dp_rank}
        try:
            self.loader = spec.build_dataloader_fn(
                **ranks, tokenizer=tokenizer, job_config=job_config
            )
        except (ValueError, OSError) as error:
            raise ConfigError(
                "training.dataset and training.dataset_path must name a text that torchtitan loads"
                f" (grpo.ptx_mixin_batchsize > 0 reads it), got {job_config.training.dataset!r} and"
                f" {job_config.training.dataset_path!r}: {error}"
            ) from error
        self._batches: Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]] | None = None

    def take(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return an optimizer step's batches as (inputs, labels), int64 [B, L] on the CPU. The
        loader repeats its data."""
        if self._batches is None:
            self._batches = iter(self.loader)
        pairs = [next(self._batches) for _ in range(self.batches_per_step)]
        return [(inputs["input"], labels) for inputs, labels in pairs]


def text_weight(
    text_tokens: float, completion_tokens: float, scale: float, by_tokens: bool
) -> float:
    """Return the factor on the SUM of the text's cross-entropies; token counts are over all ranks.

    It is ``scale`` / text_tokens: ``scale`` times the mean. With ``by_tokens`` it is ``scale`` /
    completion_tokens: with token-normalised GRPO a token of text weighs ``scale`` times as much as
    one of a completion.

    Example: 200 tokens of text, 50 of completions, scale 0.5: 0.0025, and by tokens 0.01.
    """
    return scale / max(completion_tokens if by_tokens else text_tokens, 1.0)
