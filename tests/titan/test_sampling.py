"""What a step is made of: dynamic sampling, and how long other ranks wait for it."""

import math
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
import torch.distributed as dist

from tests.rigs.jobs import job
from titan_grpo.algorithm.balance import TokenCost
from titan_grpo.algorithm.batch import BatchOptions, plan
from titan_grpo.algorithm.rows import MicroBatch
from titan_grpo.config import GRPO, Evaluation, JobConfig, Rollout, WeightSync
from titan_grpo.config.task import EVALUATION_MARGIN_S
from titan_grpo.errors import DataError
from titan_grpo.observe import names
from titan_grpo.samples import Completion, Group, Prompt
from titan_grpo.titan import compat, rules

compat.prepare()

from titan_grpo.titan.data import (  # noqa: E402 - patches first
    BatchLoader,
    Share,
    batch_options,
    left_out_for,
    pickled_shares,
    text_weight,
    varied_groups,
)
from titan_grpo.titan.step_records import group_values, reward_values  # noqa: E402

KIND = BatchOptions(64, 32)


def group(index: int, *rewards: float, lengths: tuple[int, ...] = (2, 2)) -> Group:
    completions = [
        Completion((5,) * n, (-1.0,) * n, "stop", 0, 0, "s", float(r))
        for r, n in zip(rewards, lengths, strict=True)
    ]
    return Group(Prompt(index, (1,)), tuple(completions))


class Source:
    """Groups in order: True has spread."""

    def __init__(self, *spread: bool) -> None:
        self.groups = [group(i, 0, 1 if varied else 0) for i, varied in enumerate(spread)]
        self.asked: list[int] = []
        self.given_back: list[int] = []

    def take(self, count: int) -> list[Group]:
        self.asked.append(count)
        out, self.groups = self.groups[:count], self.groups[count:]
        return out

    def run(self, want: int, rounds: int, kind: BatchOptions = KIND) -> tuple[list[int], int]:
        found = varied_groups(self.take, self.given_back.append, want, rounds, kind)
        return [g.prompt.index for g in found.groups], len(found.left_out)


def test_rows_are_cut_as_the_job_says() -> None:
    sections: dict[str, Any] = {
        "training": {"local_batch_size": 4, "seq_len": 20},
        "parallelism": {"tensor_parallel_degree": 3, "pipeline_parallel_degree": 2},
    }
    for budget, cut in ((0, 80), (96, 96)):
        found = batch_options(job(grpo=GRPO(token_budget=budget), **sections), TokenCost(), 9)
        whole = found.token_budget, found.max_len, found.pad_multiple, found.stages
        assert whole == (cut, 20, 24, 2)


def test_groups_without_spread_are_replaced_and_their_places_given_back_before() -> None:
    source = Source(True, False, True, False, True, True)
    assert source.run(4, 3) == ([0, 2, 4, 5], 2)
    assert (source.asked, source.given_back) == ([4, 2], [2])


def test_what_was_left_out_is_known_so_that_rewards_can_be_shown_unfiltered() -> None:
    groups = [group(0, 1, 1), group(1, 0, 1)]
    found = varied_groups(lambda count: groups[:count], lambda count: None, 2, 0, KIND)
    assert (found.groups, found.left_out) == ([groups[1]], [groups[0]])
    assert [left_out_for(each, KIND) for each in groups] == ["no_spread", ""]


def test_replacing_ends_after_the_rounds_with_what_there_is() -> None:
    source = Source(*[True, False, False, False, False, False])
    assert source.run(3, 2) == ([0], 5)
    assert (source.asked, source.given_back) == ([3, 2, 2], [2, 2])


def test_if_none_has_spread_the_last_ones_are_used_all_the_same() -> None:
    source = Source(*[False] * 4)
    assert source.run(2, 1) == ([2, 3], 2)


def test_spread_is_that_of_the_shaped_rewards() -> None:
    groups = [group(0, 1, 1, lengths=(2, 8)), group(1, 0, 1)]
    found = varied_groups(lambda count: groups, lambda count: None, 2, 0, KIND)
    assert [g.prompt.index for g in found.groups] == [1]
    overlong = replace(KIND, grpo=GRPO(overlong_cache_tokens=4), longest=8)
    found = varied_groups(lambda count: groups, lambda count: None, 2, 0, overlong)
    assert [g.prompt.index for g in found.groups] == [0, 1]


def test_parts_of_one_episode_make_no_spread_by_their_lengths() -> None:
    whole = group(0, 1, 1, lengths=(2, 8))
    parts = replace(whole, completions=tuple(replace(c, episode=3) for c in whole.completions))
    shaped = replace(KIND, grpo=GRPO(overlong_cache_tokens=4), longest=8)
    found = varied_groups(lambda count: [parts, whole], lambda count: None, 2, 0, shaped)
    assert found.groups == [whole]


def test_a_completion_that_is_not_trained_on_makes_no_spread_and_its_reward_stops_nothing() -> None:
    groups = [group(0, 1, math.nan), group(1, 0, math.inf), group(2, 0, 1)]
    found = varied_groups(lambda count: groups, lambda count: None, 3, 0, KIND)
    assert [g.prompt.index for g in found.groups] == [2]


@pytest.mark.parametrize("ids", [(5, 9), (5, -100)])
def test_a_group_with_a_token_that_the_model_lacks_is_replaced(ids: tuple[int, ...]) -> None:
    """As the batch leaves it out: before, the step had a group less."""
    source = Source(True, True, True)
    first, *others = source.groups[0].completions
    strange = (*others, replace(first, token_ids=ids))
    source.groups[0] = replace(source.groups[0], completions=strange)
    kind = replace(KIND, vocabulary=9)
    assert [left_out_for(each, kind) for each in source.groups] == ["bad_token", "", ""]
    assert source.run(2, 1, kind) == ([1, 2], 1)


def test_more_groups_than_asked_for_are_all_kept_and_none_is_asked_for_again() -> None:
    asked = []

    def take(count: int) -> list[Group]:
        asked.append(count)
        return [group(index, 0, 1) for index in range(3)]

    assert len(varied_groups(take, lambda count: None, 2, 3, KIND).groups) == 3
    assert asked == [2]


@pytest.mark.parametrize(
    ("size", "flat", "asked", "trained"),
    [
        (8, (), [4], [0, 1]),
        (2, (0, 1, 2), [4, 2], [3, 4, 5, 6, 7, 8, 9, 10, 11]),
        (32, (), [4], [0]),
    ],
)
def test_groups_from_outside_fill_a_step_by_their_completions(
    size: int, flat: tuple[int, ...], asked: list[int], trained: list[int]
) -> None:
    rewards = [[float(n % 2 and i not in flat) for n in range(size)] for i in range(16)]
    waiting = [group(i, *each, lengths=(2,) * size) for i, each in enumerate(rewards)]
    counts: list[int] = []

    def take(count: int) -> list[Group]:
        counts.append(count)
        enough = -(-count * 4 // size)
        out, waiting[:] = waiting[:enough], waiting[enough:]
        return out

    found = varied_groups(take, lambda count: None, 4, 3, KIND, group_size=4)
    assert counts == asked
    assert [g.prompt.index for g in found.groups] == trained


def test_the_weight_of_text_is_a_mean_or_one_per_completion_token() -> None:
    assert text_weight(200, 50, 0.5, False) == 0.0025
    assert text_weight(200, 50, 0.5, True) == 0.01
    assert text_weight(0, 0, 1.0, True) == 1.0


def test_staleness_is_of_the_oldest_version_behind_a_group() -> None:
    waited = Completion((5, 6, 7, 8), (-1.0,) * 4, "stop", 3, 5, "s", 1.0, spans=((4, 1), (5, 3)))
    groups = [Group(Prompt(0, (1,)), (replace(waited, version_first=4, spans=()), waited))]
    batch = plan(groups, 1, BatchOptions(token_budget=64, max_len=32))
    values = group_values(groups, batch, version=5, kv_kept=True)
    assert (values[names.STALENESS], values[names.STALENESS_MAX]) == (2.0, 2.0)


def test_a_completion_that_gets_no_gradient_is_not_counted_as_trained() -> None:
    made = group(0, 1.0, 0.0, 0.5, lengths=(2, 3, 4))
    *others, last = made.completions
    groups = [replace(made, completions=(*others, replace(last, zero_advantage=True)))]
    batch = plan(groups, 1, BatchOptions(token_budget=64, max_len=32))
    values = group_values(groups, batch, version=0, kv_kept=False)
    assert (values[names.TRAINED_TOKENS], values[names.TRAINED_SEQUENCES]) == (5, 2)


def test_a_completion_that_ran_over_a_commit_is_on_kept_kv_only_where_a_commit_leaves_it() -> None:
    over = Completion((5, 6), (-1.0,) * 2, "stop", 4, 5, "s", 1.0, spans=((4, 1), (5, 1)))
    within = Completion((5, 6), (-1.0,) * 2, "stop", 5, 5, "s", 1.0)
    groups = [Group(Prompt(0, (1,)), (over, within))]
    batch = plan(groups, 1, BatchOptions(token_budget=64, max_len=32))
    found = [group_values(groups, batch, 5, kv_kept)[names.KEPT_KV] for kv_kept in (True, False)]
    assert found == [0.5, 0.0]


def test_the_mean_length_is_that_of_all_episodes_however_few_are_trained_on() -> None:
    def sampled(tokens: int, finish: str, episode: int = -1) -> Completion:
        ids, logprobs = (5,) * tokens, (-1.0,) * tokens
        return Completion(ids, logprobs, finish, 5, 5, "s", float(tokens), episode=episode)

    lengths = (2, "stop"), (10, "length"), (10, "length"), (2, "stop")
    alone = Group(Prompt(0, (1,)), tuple(sampled(*each) for each in lengths))
    parts = Group(Prompt(1, (1,)), (sampled(2, "stop", 1), sampled(3, "stop", 1)))
    turns = replace(sampled(5, "stop"), sampled=(True, False, False, True, True))
    tools = Group(Prompt(2, (1,)), (turns, sampled(4, "stop")))
    options = BatchOptions(token_budget=64, max_len=32, grpo=GRPO(mask_truncated=True))
    for made, mean in (alone, 6.0), (parts, 5.0), (tools, 3.5):
        values = group_values([made], plan([made], 1, options), version=5, kv_kept=False)
        assert values[names.COMPLETION_TOKENS] == mean


def test_the_mean_reward_is_that_of_all_that_was_made_for_a_step_filtered_groups_too() -> None:
    taken = [group(0, 1.0, 1.0), group(1, 0.5, 1.5)]
    # Each step has the mean of what it keeps, also one that leaves out nothing.
    for left_out, mean in ([], 1.0), ([0.0] * 4, 0.5):
        values = reward_values(taken, left_out)
        assert (values[names.REWARD], values[names.REWARD_KEPT]) == (mean, 1.0)


def test_an_episode_of_several_completions_counts_once_in_the_mean_reward() -> None:
    whole = group(0, 1.0, 0.0, 0.0, lengths=(2, 2, 2))
    solved, *parts = whole.completions
    failed = [replace(part, episode=1) for part in parts]
    values = reward_values([replace(whole, completions=(solved, *failed))])
    assert (values[names.REWARD], values[names.REWARD_STD]) == (0.5, 0.5)


SHORT = JobConfig(GRPO(), Rollout(batch_timeout_s=60.0), WeightSync())


def no_batch() -> NoReturn:
    raise DataError("no batch")


def bug() -> NoReturn:
    raise RuntimeError("the sizes differ")


def test_the_loaders_group_outlasts_a_start_and_a_sync_and_carries_an_error_of_rank_0(
    tmp_path: Path,
) -> None:
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        loader = BatchLoader(0)
        loader.connect(SHORT, 0)
        options = loader.group._get_backend(torch.device("cpu")).options
        # 600 s for servers and the first commit, 60 s for rollouts, 240 s for a sync.
        assert options._timeout.total_seconds() > 600 + 60 + 240
        for fails in no_batch, bug:  # the other ranks get RunStopped
            with pytest.raises((DataError, RuntimeError), match=r"^(no batch|the sizes differ)$"):
                loader.fetch(fails)
    finally:
        dist.destroy_process_group()


class Counted(list[MicroBatch]):
    """Micro-batches that note when they are pickled."""

    def __init__(self, name: str, pickles: list[str]) -> None:
        self.name, self.pickles = name, pickles

    def __reduce__(self) -> tuple[type[str], tuple[str]]:
        self.pickles.append(self.name)
        return str, (self.name,)


def test_what_several_ranks_get_is_pickled_once() -> None:
    """Before, rank 0 pickled a share for each rank: with 512 ranks it held up every step."""
    pickles: list[str] = []
    ranks = [Counted(name, pickles) for name in ("first", "second")]
    shares = pickled_shares(Share(slot=3), ranks, [0, 0, 1, 1])
    assert pickles == ["first", "second"]
    read = [pickle.loads(each) for each in shares]
    assert [(each.slot, each.microbatches) for each in read] == [
        *[(3, "first")] * 2,
        *[(3, "second")] * 2,
    ]


def test_the_waits_for_a_large_version_have_the_time_of_its_bytes() -> None:
    sync = replace(SHORT.weight_sync, min_rate=1 << 20)
    job = replace(SHORT, weight_sync=sync, grpo=replace(SHORT.grpo, async_weight_update=False))
    mib, seconds = 1 << 20, 7200
    assert rules.sync_waits_s(job, seconds * mib) == rules.sync_waits_s(job, 0) + seconds
    small, large = (rules.rank0_waits_s(job, nbytes) for nbytes in (0, seconds * mib))
    # The first commit, before the first batch.
    assert large[0] - large[1] == small[0] - small[1] + seconds
    # A slot, the flush and the files at the end, each with the bytes at min_rate.
    assert large[1] >= 3 * seconds > small[1]


def test_an_evaluation_that_runs_at_the_end_counts_too() -> None:
    slow = replace(SHORT)
    table = Evaluation(timeout_s=7200.0, every=10, at_end=False)
    slow.evaluation = [table]  # type: ignore[list-item]  # as titan/jobconfig.py makes them
    assert min(rules.rank0_waits_s(slow)) >= 7200 + EVALUATION_MARGIN_S


def test_a_long_flush_at_the_end_counts_too() -> None:
    slow = replace(SHORT, weight_sync=WeightSync(shutdown_deadline_s=5000.0))
    assert min(rules.rank0_waits_s(slow)) >= 5000
