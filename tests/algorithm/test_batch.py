import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.algorithm.loss_inputs import filled
from titan_grpo.algorithm.balance import TokenCost
from titan_grpo.algorithm.batch import BatchOptions, plan
from titan_grpo.algorithm.loss import LogitTerms, grpo_loss
from titan_grpo.algorithm.rows import IGNORE_INDEX
from titan_grpo.config import GRPO
from titan_grpo.errors import DataError
from titan_grpo.samples import EXTERNAL, Completion, Group, Prompt

OPTIONS = BatchOptions(token_budget=64, max_len=32, pad_id=1)


def completion(
    tokens: Sequence[int] = (7, 8),
    logprobs: Sequence[float] | None = None,
    reward: float = 0.0,
    version: int = 3,
) -> Completion:
    if logprobs is None:
        logprobs = [-0.5 * (i + 1) for i in range(len(tokens))]
    return Completion(
        tuple(tokens), tuple(logprobs), "stop", version, version + 1, "http://s", reward
    )


def group(*completions: Completion, prompt: Sequence[int] = (5, 6), index: int = 0) -> Group:
    return Group(Prompt(index, tuple(prompt)), completions)


def only_micro_batch(
    groups: list[Group], options: BatchOptions = OPTIONS
) -> dict[str, torch.Tensor]:
    [[micro_batch]] = plan(groups, 1, options).micro_batches()
    return micro_batch


def test_tokens_labels_and_logprobs_are_aligned_by_the_next_token() -> None:
    mb = only_micro_batch([group(completion((7, 8), reward=1.0), completion((9,), reward=0.0))])
    x = IGNORE_INDEX
    assert mb["inputs"].tolist() == [[5, 6, 7, 1, 1, 1, 1, 1], [5, 6, 1, 1, 1, 1, 1, 1]]
    assert mb["labels"].tolist() == [[x, 7, 8, x, x, x, x, x], [x, 9, x, x, x, x, x, x]]
    assert mb["rollout_logprobs"].tolist() == [
        [0, -0.5, -1.0, 0, 0, 0, 0, 0],
        [0, -0.5, 0, 0, 0, 0, 0, 0],
    ]
    assert mb["sequence"].tolist() == [
        [0, 0, 0, -1, -1, -1, -1, -1],
        [1, 1, -1, -1, -1, -1, -1, -1],
    ]
    assert torch.equal(
        mb["advantages"].round(),
        torch.tensor([[1.0, 1, 1, 0, 0, 0, 0, 0], [-1, -1, 0, 0, 0, 0, 0, 0]]),
    )
    assert mb["versions"].tolist() == [[3, 3, 3, 0, 0, 0, 0, 0], [3, 3, 0, 0, 0, 0, 0, 0]]
    assert {name: t.dtype for name, t in mb.items()} == {
        "inputs": torch.int64,
        "labels": torch.int64,
        "sequence": torch.int64,
        "rollout_logprobs": torch.float32,
        "weights": torch.float32,
        "advantages": torch.float32,
        "oldest": torch.int64,
        "versions": torch.int64,
    }


def test_each_label_has_the_version_that_sampled_it_and_the_sequence_its_oldest() -> None:
    over_commits = replace(completion((7, 8, 9, 4)), version_last=5, spans=((3, 1), (5, 1), (4, 2)))
    waited = replace(completion((7,), version=2), spans=((4, 1),))
    mb = only_micro_batch([group(over_commits, waited)])
    assert mb["versions"][:, :5].tolist() == [[3, 3, 5, 4, 4], [4, 4, 0, 0, 0]]
    assert mb["oldest"][:, :5].tolist() == [[3, 3, 3, 3, 3], [2, 2, 0, 0, 0]]


@pytest.mark.parametrize(
    ("normalization", "one_token", "three_tokens"),
    [("token", 1 / 4, 1 / 4), ("sequence", 1 / 2, 1 / 6), ("constant", 1 / 20, 1 / 20)],
)
def test_the_weights_of_the_docstring_example(
    normalization: Literal["token", "sequence", "constant"], one_token: float, three_tokens: float
) -> None:
    options = replace(OPTIONS, grpo=GRPO(loss_normalization=normalization), longest=10)
    weights = only_micro_batch([group(completion((7,)), completion((7, 8, 9)))], options)["weights"]
    by_count = {int((row != 0).sum()): row[row != 0] for row in weights}
    assert by_count[1].tolist() == pytest.approx([one_token])
    assert by_count[3].tolist() == pytest.approx([three_tokens] * 3)


@pytest.mark.parametrize(
    ("reason", "bad"),
    [
        ("empty_completion", completion(())),
        ("length_mismatch", completion((7, 8), logprobs=(-1.0,))),
        ("length_mismatch", replace(completion((7, 8)), sampled=(True,))),
        ("length_mismatch", replace(completion((7, 8)), spans=((3, 1),))),
        ("nothing_sampled", replace(completion((7, 8)), sampled=(False, False))),
        ("bad_logprob", completion((7, 8), logprobs=(-1.0, math.nan))),
        ("bad_logprob", completion((7, 8), logprobs=(-math.inf, -1.0))),
        ("bad_logprob", completion((7, 8), logprobs=(-1.0, 1.0))),
        ("bad_logprob", completion((7, 8), logprobs=(-1e39, -1.0))),
        ("bad_token", completion((7, 100))),
        ("bad_token", completion((2**31, 7))),
        ("bad_token", completion((7, IGNORE_INDEX))),
        ("bad_reward", completion((7, 8), reward=math.nan)),
        ("bad_reward", completion((7, 8), reward=-1.7e308)),
    ],
)
def test_a_defective_completion_takes_its_group_out_and_no_other(
    reason: str, bad: Completion
) -> None:
    good = (completion(reward=1.0), completion(reward=0.25))
    options = replace(OPTIONS, vocabulary=100)
    batch = plan([group(*good), group(*good, bad, index=1)], 1, options)
    assert batch.dropped == {reason: 1, "group_of_defective": 2}
    assert batch.rows[0].cuts == (2,)
    without = only_micro_batch([group(*good)])
    for name, tensor in batch.micro_batches()[0][0].items():
        assert torch.equal(tensor, without[name]), name


@pytest.mark.parametrize("lacking", [100, -3])
def test_a_prompt_with_a_token_that_the_model_lacks_takes_its_group_out(lacking: int) -> None:
    groups = [group(completion()), group(completion(), prompt=(5, lacking), index=1)]
    batch = plan(groups, 1, replace(OPTIONS, vocabulary=100))
    assert (batch.rows[0].cuts, batch.dropped) == ((1,), {"bad_token": 1})
    with pytest.raises(DataError, match="'bad_token': 1"):
        plan(groups[1:], 1, replace(OPTIONS, vocabulary=100))


def test_a_truncated_completion_can_be_left_out_but_its_reward_counts() -> None:
    cut = replace(completion((7, 8), reward=0.0), finish_reason="length")
    options = replace(OPTIONS, grpo=GRPO(mask_truncated=True))
    batch = plan([group(completion((9,), reward=1.0), cut)], 1, options)
    assert batch.dropped == {"truncated": 1}
    assert batch.trained == (1,)
    [mb] = batch.micro_batches()[0]
    assert mb["labels"].tolist() == [[IGNORE_INDEX, 9] + [IGNORE_INDEX] * 6]
    assert mb["weights"][0, 1] == 1
    assert mb["advantages"][0, :2].tolist() == pytest.approx([1.0] * 2, abs=1e-5)


def test_a_completion_from_outside_that_does_not_say_what_ended_it_is_truncated_at_the_limit() -> (
    None
):
    """Before, nothing of Atropos was: its completions never say it."""
    ends = {EXTERNAL: (7, 8, 9), "stop": (10, 11, 12), "length": (13,)}
    outside = [replace(completion(ids), finish_reason=end) for end, ids in ends.items()]
    short = replace(completion((14, 15)), finish_reason=EXTERNAL)
    options = replace(OPTIONS, grpo=GRPO(mask_truncated=True), longest=3)
    batch = plan([group(*outside, short, completion((16,)))], 1, options)
    assert (batch.dropped, batch.trained) == ({"truncated": 2}, (3, 2, 1))


def test_a_step_of_truncated_completions_alone_is_one_without_a_gradient() -> None:
    cut = [replace(completion((7, 8), reward=float(n)), finish_reason="length") for n in range(2)]
    for normalization in ("token", "sequence", "constant"):
        grpo = GRPO(mask_truncated=True, loss_normalization=normalization)
        options = replace(OPTIONS, grpo=grpo, longest=4)
        batch = plan([group(*cut)], 1, options)
        assert batch.rows[0].cuts == (2,)
        assert batch.trained == ()
        assert not batch.micro_batches()[0][0]["weights"].any()


def test_an_overlong_completion_is_left_out_but_its_reward_counts_in_the_mean() -> None:
    batch = plan([group(completion(reward=1.0), completion((7,) * 31, reward=0.0))], 1, OPTIONS)
    assert batch.dropped == {"too_long": 1}
    assert batch.micro_batches()[0][0]["advantages"][0, :3].tolist() == pytest.approx(
        [1.0] * 3, abs=1e-5
    )


def test_what_the_policy_did_not_sample_is_context_only() -> None:
    turns = replace(
        completion((7, 8, 9), logprobs=(-1.0, 1.0, -2.0), reward=1.0), sampled=(True, False, True)
    )
    options = replace(OPTIONS, grpo=GRPO(loss_normalization="sequence"))
    batch = plan([group(turns, completion((3,), reward=0.0))], 1, options)
    assert batch.trained == (2, 1)
    [mb] = batch.micro_batches()[0]
    x = IGNORE_INDEX
    assert mb["inputs"][0].tolist() == [5, 6, 7, 8, 1, 1, 1, 1]
    assert mb["labels"][0].tolist() == [x, 7, x, 9, x, x, x, x]
    assert mb["rollout_logprobs"][0].tolist() == [0, -1, 0, -2, 0, 0, 0, 0]
    assert mb["weights"][0].tolist() == [0, 0.25, 0, 0.25, 0, 0, 0, 0]


def test_a_completion_without_its_advantage_counts_for_its_group_and_for_no_term_of_the_loss() -> (
    None
):
    left_out = replace(completion((7, 8), reward=0.0), zero_advantage=True)
    mb = only_micro_batch([group(completion((7, 8), reward=1.0), left_out)])
    assert mb["advantages"].round().tolist() == [[1, 1, 1, 0, 0, 0, 0, 0], [0] * 8]
    logprobs = torch.full((2, 8), -1.0, requires_grad=True)
    terms = LogitTerms(2.0 * logprobs, logprobs.square())
    grpo = GRPO(kl_beta=0.1, entropy_loss_weight=0.1, logit_loss_weight=0.1)
    loss, _ = grpo_loss(logprobs, filled(mb), grpo, torch.full((2, 8), -2.0), None, terms)
    loss.backward()
    assert logprobs.grad is not None
    assert logprobs.grad[0].count_nonzero() == 2
    assert logprobs.grad[1].tolist() == [0] * 8
    # The other's weight does not change: half of the step's two sequences, over two tokens.
    assert mb["weights"][0].unique().tolist() == [0, 0.25]


def test_the_reward_of_an_episode_counts_once_however_many_sequences_it_has() -> None:
    won, lost = completion((7, 8), reward=1.0), completion((7, 8), reward=0.0)
    parts = [replace(lost, episode=0)] * 3
    mb = only_micro_batch([group(won, *parts)])
    # Counted three times, the failure would make the success worth 1.73, and cost 0.58 itself.
    firsts = mb["advantages"][:, 1].tolist()
    assert firsts == pytest.approx([1.0, -1.0, -1.0, -1.0], abs=1e-5)


def test_packed_sequences_lie_in_one_row_and_positions_begin_anew() -> None:
    groups = [group(completion((7, 8), reward=1.0), completion((9,), reward=0.0))]
    mb = only_micro_batch(groups, replace(OPTIONS, pack=True))
    x = IGNORE_INDEX
    assert mb["inputs"].tolist() == [[5, 6, 7, 5, 6, 1, 1, 1]]
    assert mb["labels"].tolist() == [[x, 7, 8, x, 9, x, x, x]]
    assert mb["positions"].tolist() == [[0, 1, 2, 0, 1, 0, 0, 0]]
    assert mb["sequence"].tolist() == [[0, 0, 0, 1, 1, -1, -1, -1]]
    assert mb["advantages"].round().tolist() == [[1, 1, 1, -1, -1, 0, 0, 0]]


def test_a_packed_row_may_be_longer_than_any_sequence_but_not_than_the_budget() -> None:
    groups = [group(*[completion(tuple(range(10, 38)), reward=r) for r in range(5)])]
    batch = plan(groups, 1, replace(OPTIONS, pack=True))
    assert [tuple(mb["inputs"].shape) for mb in batch.micro_batches()[0]] == [
        (1, 64),
        (1, 64),
        (1, 32),
    ]
    assert max(int(mb["positions"].max()) for mb in batch.micro_batches()[0]) == 28


def sequences_of(micro_batches: list[dict[str, torch.Tensor]]) -> list[tuple[tuple[Any, ...], ...]]:
    """(inputs, labels, rollout log-probabilities, weights, advantages) of every sequence, by its
    own tokens."""
    names = ("inputs", "labels", "rollout_logprobs", "weights", "advantages", "versions")
    out = []
    for mb in micro_batches:
        for number in range(int(mb["sequence"].max()) + 1):
            mine = mb["sequence"] == number
            out.append(tuple(tuple(mb[name][mine].tolist()) for name in names))
    return sorted(out)


def prompts_of(micro_batches: list[dict[str, torch.Tensor]]) -> set[tuple[int, ...]]:
    return {tuple(inputs[:1]) for inputs, *_ in sequences_of(micro_batches)}


@pytest.mark.parametrize("pack", [False, True])
def test_a_group_stays_on_one_rank_unless_it_may_be_split(pack: bool) -> None:
    groups = [
        group(*[completion((7,) * (n + 1)) for n in range(4)], prompt=(50 + g, 60), index=g)
        for g in range(5)
    ]
    whole = plan(groups, 3, replace(OPTIONS, pack=pack))
    prompts = [prompts_of(rank) for rank in whole.micro_batches()]
    assert sum(len(p) for p in prompts) == 5
    assert sorted(map(len, prompts)) == [1, 2, 2]
    split = plan(groups, 3, replace(OPTIONS, pack=pack, grpo=GRPO(balance_split_groups=True)))
    assert max(split.loads) - min(split.loads) < max(whole.loads) - min(whole.loads)


def test_work_is_balanced_against_what_dealing_would_give() -> None:
    long, short = completion((7,) * 29), completion((7,))
    groups = [
        group(*[long if g % 2 == 0 else short] * 2, prompt=(50 + g, 60), index=g) for g in range(4)
    ]
    cost = TokenCost(1.0, 0.1)
    batch = plan(groups, 2, replace(OPTIONS, cost=cost))
    assert batch.work == (2 * cost.of(30) + 2 * cost.of(2),) * 2
    assert batch.dealt_work == (4 * cost.of(30), 4 * cost.of(2))
    dealt = replace(OPTIONS, cost=cost, grpo=GRPO(balance_batch=False))
    assert plan(groups, 2, dealt).work == batch.dealt_work


def test_a_prompt_without_tokens_is_dropped_because_nothing_predicts_its_first_token() -> None:
    batch = plan([group(completion(), completion(), prompt=()), group(completion())], 1, OPTIONS)
    assert batch.dropped == {"empty_prompt": 2}


def test_a_row_of_exactly_the_greatest_length_fits() -> None:
    assert only_micro_batch([group(completion((7,) * 30))])["inputs"].shape == (1, 32)
    odd = replace(OPTIONS, max_len=30)
    assert only_micro_batch([group(completion((7,) * 28))], odd)["inputs"].shape == (1, 30)


def test_ranks_without_rows_get_an_all_masked_micro_batch() -> None:
    batch = plan([group(completion())], 3, OPTIONS)
    assert [len(rank) for rank in batch.micro_batches()] == [1, 1, 1]
    for rank in batch.micro_batches()[1:]:
        assert rank[0]["inputs"].tolist() == [[1] * 8]
        assert (rank[0]["labels"] == IGNORE_INDEX).all()
        assert not rank[0]["weights"].any()
    assert batch.loads == (3, 0, 0)
    assert batch.fill == 3 / 24


def test_a_minibatch_of_which_no_row_is_left_is_no_optimizer_step() -> None:
    options = replace(OPTIONS, grpo=GRPO(num_microbatches=2))
    too_long = group(completion(tuple(range(10, 50))))
    batch = plan([group(completion()), too_long], 2, options)
    assert (batch.steps, batch.dropped) == ((1,), {"too_long": 1})
    assert [len(rank) for rank in batch.micro_batches()] == [1, 1]


a_completion = st.builds(
    lambda n, reward: completion(tuple(range(10, 10 + n)), reward=reward),
    st.integers(1, 34),
    st.floats(0, 1),
)
a_group = st.builds(
    lambda n, cs: group(*cs, prompt=range(50, 50 + n)),
    st.integers(1, 6),
    st.lists(a_completion, min_size=2, max_size=6),
)


@settings(max_examples=60, deadline=None)
@given(st.lists(a_group, min_size=1, max_size=6), st.integers(1, 5), st.booleans(), st.booleans())
def test_packed_and_padded_batches_hold_the_same_sequences_with_the_same_weights(
    groups: list[Group], num_ranks: int, split: bool, balance: bool
) -> None:
    options = replace(OPTIONS, grpo=GRPO(balance_split_groups=split, balance_batch=balance))
    try:
        padded = plan(groups, num_ranks, options)
    except DataError:
        return
    packed = plan(groups, num_ranks, replace(options, pack=True))
    assert packed.work == padded.work
    assert packed.padded_tokens <= padded.padded_tokens or num_ranks > 1
    for batch in (packed, padded):
        built = [mb for rank in batch.micro_batches() for mb in rank]
        assert sum(mb["inputs"].numel() for mb in built) == batch.padded_tokens
    for one, other in zip(packed.micro_batches(), padded.micro_batches(), strict=True):
        assert sequences_of(one) == sequences_of(other)
        assert len(one) == sum(packed.steps)
        for mb in one:
            assert mb["inputs"].numel() <= options.token_budget
            for number in range(int(mb["sequence"].max()) + 1):
                place = mb["positions"][mb["sequence"] == number]
                assert torch.equal(place, torch.arange(len(place)))


@settings(max_examples=60, deadline=None)
@given(
    st.lists(a_group, min_size=1, max_size=6),
    st.integers(1, 5),
    st.sampled_from(["token", "sequence", "constant"]),
)
def test_a_batch_holds_every_short_enough_completion_once_within_the_budget(
    groups: list[Group], num_ranks: int, normalization: Literal["token", "sequence", "constant"]
) -> None:
    fits = [
        (g, c)
        for g in groups
        for c in g.completions
        if len(g.prompt.token_ids) + len(c.token_ids) <= 32
    ]
    options = replace(OPTIONS, grpo=GRPO(loss_normalization=normalization), longest=34)
    if not fits:
        with pytest.raises(DataError):
            plan(groups, num_ranks, options)
        return
    batch = plan(groups, num_ranks, options)
    micro_batches = [mb for rank in batch.micro_batches() for mb in rank]
    seen, weight = [], 0.0
    for mb in micro_batches:
        assert mb["inputs"].numel() <= options.token_budget
        assert mb["inputs"].shape[1] <= options.max_len
        assert mb["inputs"].shape[1] % 8 == 0
        mask = mb["labels"] != IGNORE_INDEX
        assert torch.equal(mb["weights"] > 0, mask)
        assert not mb["rollout_logprobs"][~mask].any()
        weight += mb["weights"].double().sum().item()
        for row in range(len(mask)):
            if mask[row].any():
                at = int(mask[row].nonzero()[0]) + 1
                seen.append(
                    (
                        tuple(mb["inputs"][row, :at].tolist()),
                        tuple(mb["labels"][row][mask[row]].tolist()),
                    )
                )
    assert sorted(seen) == sorted((g.prompt.token_ids, c.token_ids) for g, c in fits)
    assert len({len(rank) for rank in batch.micro_batches()}) == 1
    expected = (
        sum(len(c.token_ids) for _, c in fits) / (34 * len(fits))
        if normalization == "constant"
        else 1
    )
    assert weight == pytest.approx(expected, rel=1e-5)
    again = plan(groups, num_ranks, options)
    for one, two in zip(
        micro_batches, (mb for rank in again.micro_batches() for mb in rank), strict=True
    ):
        assert all(torch.equal(one[name], two[name]) for name in one)


def test_with_pipeline_stages_each_rank_has_a_multiple_of_them_and_padding_counts_in_full() -> None:
    groups = [
        group(*(completion(range(4, 4 + n)) for n in (3, 17)), index=index) for index in range(3)
    ]
    options = replace(OPTIONS, stages=2, grpo=GRPO(balance_split_groups=True))
    found = plan(groups, 2, options)
    assert found.steps == (2,)
    [one, other] = found.micro_batches()
    assert len(one) == len(other) == 2
    shapes = [
        (max(len(mb["inputs"]) for mb in rank), max(mb["inputs"].shape[1] for mb in rank))
        for rank in (one, other)
    ]
    assert found.padded_tokens == sum(2 * rows * length for rows, length in shapes)
    assert all(rows * length <= options.token_budget for rows, length in shapes)


def test_with_pipeline_stages_the_padding_is_that_of_each_optimizer_step() -> None:
    # Five rows of 24 tokens in the first, two to a micro-batch: three, and one more for the stages.
    long = group(*[completion(range(4, 21))] * 5)
    short = group(completion((7,)), completion((8,)), index=1)
    options = replace(OPTIONS, stages=2, grpo=GRPO(num_microbatches=2))
    found = plan([long, short], 1, options)
    assert found.steps == (4, 2)
    assert found.padded_tokens == 4 * 2 * 24 + 2 * 1 * 8
