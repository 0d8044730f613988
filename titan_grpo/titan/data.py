"""What a step is made of, and the data loader that torchtitan iterates.

Rank 0 takes groups, plans all ranks' work and scatters it. The scatter carries everything that all
ranks must agree on: the micro-batches, the slot of the next version image, the resume state, and an
error that stops the run. Micro-batches travel as tensors, or as the rows that each rank builds the
very same tensors of (``grpo.single_rank_load``). It runs on a gloo group of its own, because the
wait for rollouts may be longer than torchtitan's training timeout.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torchtitan.components.dataloader import BaseDataLoader

from titan_grpo.algorithm.advantages import AdvantageOptions, Scored, has_spread
from titan_grpo.algorithm.rows import MicroBatch, Rows, attention_rows, build
from titan_grpo.errors import ProtocolError, TitanGrpoError
from titan_grpo.samples import Group, defect
from titan_grpo.titan.rules import rank0_waits_s

GROUP_MARGIN_S = 120.0
"""Seconds that the loader's group waits longer than rank 0 may: rank 0 builds tensors and writes
files besides, and its own error says more than a timeout of gloo."""


@dataclass(frozen=True, slots=True)
class Sampled:
    """What a step is made of."""

    groups: list[Group]
    left_out: list[Group]
    """Groups that were taken for it too, but not used."""


def varied_groups(
    take: Callable[[int], list[Group]],
    give_places_back: Callable[[int], None],
    want: int,
    rounds: int,
    options: AdvantageOptions,
) -> Sampled:
    """``want`` groups with reward spread, replacing the others up to ``rounds`` times; then as many
    as there are (dynamic sampling, DAPO, arXiv 2503.14476, section 3.2).

    All completions of a prompt that is always or never solved have the same reward, so their
    advantages are zero: such groups shrink the batch that the gradient is made of. Before groups
    are replaced their number goes to ``give_places_back``, so that the bound on staleness lets
    others start. If no group at all has spread, those of the last round are returned: a step needs
    rows, and their advantages are zero.

    Args:
        take: waits for that many more groups.
    """

    def varied(group: Group) -> bool:
        # A group with a defect is not trained on; a reward that is none would stop the run here.
        if any(defect(group.prompt, c) for c in group.completions):
            return False
        return has_spread([Scored.of(c) for c in group.completions], options)

    kept: list[Group] = []
    flat: list[Group] = []
    for round_ in range(rounds + 1):
        taken = take(want - len(kept))
        kept += [group for group in taken if varied(group)]
        flat += [group for group in taken if not varied(group)]
        missing = want - len(kept)
        # Groups from outside may be smaller than ours, and then more of them make a step.
        if missing <= 0 or round_ == rounds:
            break
        give_places_back(missing)
    return Sampled(kept, flat) if kept else Sampled(taken, flat[: -len(taken)])


@dataclass(slots=True)
class Share:
    """What one rank gets for one step."""

    microbatches: list[MicroBatch] | Rows = field(default_factory=list)
    """The tensors, or what this rank is to build them of."""
    steps: tuple[int, ...] = ()
    """Micro-batches of each optimizer step, in order."""
    slot: int | None = None
    """Slot for the version that this step makes; None: it is skipped."""
    state: str = ""
    """Rollout state after this step, for the checkpoint."""
    error: str = ""
    """Why the run must stop now, on every rank alike."""


@dataclass(slots=True)
class StepWork:
    """What rank 0 prepared for all ranks: ``ranks[dp_rank]`` micro-batches, ``steps`` of them for
    each optimizer step."""

    ranks: Sequence[list[MicroBatch] | Rows]
    steps: tuple[int, ...]
    slot: int | None
    state: str


class RunStopped(TitanGrpoError):
    """Rank 0 met an error that ends the run; raised on every rank with the same words."""


class BatchLoader(BaseDataLoader):
    """One rank's loader. ``fetch`` is collective; iterating yields the fetched micro-batches in
    torchtitan's form."""

    def __init__(self, dp_rank: int) -> None:
        self.dp_rank = dp_rank
        self.state = ""
        self._queue: list[MicroBatch] = []
        self._group: dist.ProcessGroup | None = None
        self._dp_ranks: list[int] = []

    def connect(self, job_config: Any) -> None:
        """Open the scatter's own group. Collective over all ranks, once."""
        # The ranks wait in this group also while rank 0 starts servers and waits for a commit.
        timeout = timedelta(seconds=max(rank0_waits_s(job_config)) + GROUP_MARGIN_S)
        self._group = dist.new_group(backend="gloo", timeout=timeout)
        dp_ranks: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(dp_ranks, self.dp_rank, group=self._group)
        self._dp_ranks = dp_ranks

    @property
    def group(self) -> dist.ProcessGroup:
        """The gloo group of all ranks, for control messages on the main thread."""
        if self._group is None:
            raise ProtocolError("the batch loader must be connected before it is used")
        return self._group

    @property
    def num_shares(self) -> int:
        """Data-parallel ranks, each of which gets a share of its own."""
        return max(self._dp_ranks) + 1

    def fetch(self, prepare: Callable[[], StepWork] | None) -> Share:
        """One step's share of this rank. Rank 0 passes ``prepare``; if it raises, every rank raises
        RunStopped.

        Collective over all ranks; the ranks other than 0 wait here for the rollouts.
        """
        shares: list[Share] | None = None
        if prepare is not None:
            try:
                work = prepare()
                shares = [
                    Share(work.ranks[n], work.steps, work.slot, work.state) for n in self._dp_ranks
                ]
            except (TitanGrpoError, OSError) as error:
                # The other ranks would wait in the scatter until its deadline without an answer.
                shares = [Share(error=f"{type(error).__name__}: {error}") for _ in self._dp_ranks]
        received: list[Any] = [None]
        dist.scatter_object_list(received, shares, src=0, group=self.group)
        share: Share = received[0]
        if share.error:
            raise RunStopped(share.error)
        self.state = share.state
        work_here = share.microbatches
        self._queue = build(work_here) if isinstance(work_here, Rows) else list(work_here)
        return share

    def __iter__(self) -> Iterator[tuple[dict[str, Any], torch.Tensor]]:
        while True:
            if not self._queue:
                raise ProtocolError("the trainer asked for more micro-batches than the step has")
            batch: dict[str, Any] = dict(self._queue.pop(0))
            labels = batch.pop("labels")
            if "positions" in batch:
                batch["rows"] = attention_rows(batch["sequence"])
            yield {"input": batch.pop("inputs"), **batch}, labels

    # What torchtitan's checkpointer calls.

    def state_dict(self) -> dict[str, Any]:
        """The rollout state as text: cursor and counters, equal on every rank."""
        return {"rollout": self.state}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take up what a checkpoint holds; used when the rollouts start."""
        self.state = state_dict["rollout"]
