"""Tensors that a rank builds from compact rows are the ones that rank 0 would send; rows of
attention."""

import pickle
import random
from array import array
from random import Random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from titan_grpo.algorithm.batch import BatchOptions, plan
from titan_grpo.algorithm.rows import IGNORE_INDEX, Layout, Row, attention_rows, build, compact
from titan_grpo.config import GRPO
from titan_grpo.errors import DataError
from titan_grpo.samples import Completion, Group, Prompt

OPTIONS = BatchOptions(token_budget=64, max_len=32, pad_id=1)


def completion(source: Random) -> Completion:
    ids = tuple(source.randrange(200_000) for _ in range(source.randint(1, 30)))
    sampled = tuple(source.random() < 0.6 for _ in ids) if source.random() < 0.3 else ()
    version = source.randrange(2**40)
    logprobs = tuple(-9 * source.random() for _ in ids)
    cut = source.randrange(len(ids))
    return Completion(
        ids,
        logprobs,
        "stop",
        version,
        version,
        "s",
        source.random(),
        sampled,
        source.random() < 0.1,
        ((version, cut), (version + 1, len(ids) - cut)) if source.random() < 0.3 else (),
    )


def step(seed: int) -> list[Group]:
    source = random.Random(seed)
    prompts = [
        tuple(source.randrange(200_000) for _ in range(source.randint(1, 6)))
        for _ in range(source.randint(1, 6))
    ]
    return [
        Group(Prompt(index, ids), tuple(completion(source) for _ in range(source.randint(1, 5))))
        for index, ids in enumerate(prompts)
    ]


steps = st.integers(0, 10**9).map(step)


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(
        one[name].dtype == other[name].dtype and torch.equal(one[name], other[name]) for name in one
    )


@settings(max_examples=60)
@given(steps, st.integers(1, 5), st.booleans(), st.integers(1, 2))
def test_a_rank_builds_from_what_it_is_sent_the_very_tensors_that_rank_0_builds_for_it(
    groups: list[Group], num_ranks: int, pack: bool, minibatches: int
) -> None:
    grpo = GRPO(num_microbatches=minibatches, loss_normalization="sequence")
    options = BatchOptions(64, 32, 1, pack=pack, grpo=grpo)
    try:
        batch = plan(groups, num_ranks, options)
    except DataError:
        return
    sent = [pickle.dumps(rows) for rows in batch.rows]
    whole = batch.micro_batches()
    assert sum(mb["inputs"].numel() for rank in whole for mb in rank) == batch.padded_tokens
    for data, expected in zip(sent, whole, strict=True):
        built = build(pickle.loads(data))
        assert len(built) == len(expected) == sum(batch.steps)
        assert all(map(same, built, expected))


@settings(max_examples=30)
@given(steps, st.booleans())
def test_tensors_are_copies_that_leave_the_rows_as_they_were(
    groups: list[Group], pack: bool
) -> None:
    rows = compact(
        [[Row(0, g.prompt, c, 0.5, 0.25) for g in groups for c in g.completions]],
        Layout(10**4, 64, 0, 8, pack),
    )
    [first] = build(rows)
    kept = {name: tensor.clone() for name, tensor in first.items()}
    for tensor in first.values():
        tensor.fill_(7)
    [again] = build(rows)
    assert same(kept, again)


def test_a_token_travels_in_eight_bytes_and_a_prompts_in_four() -> None:
    long = Completion((7,) * 1000, (-0.5,) * 1000, "stop", 3, 3, "s")
    rows = compact(
        [[Row(0, Prompt(0, (5,) * 100), long, 0.0, 1.0) for _ in range(16)]], OPTIONS.layout
    )
    assert len(pickle.dumps(rows)) < 16 * (8 * 1000 + 4 * 100) + 1000


def test_rows_say_which_tokens_were_sampled_only_where_some_were_not() -> None:
    whole = Row(0, Prompt(0, (5,)), Completion((7, 8), (-0.5, -1.0), "stop", 3, 3, "s"), 0.0, 1.0)
    turns = Row(
        0,
        Prompt(0, (6,)),
        Completion((7, 8), (-0.5, 9.0), "stop", 3, 3, "s", sampled=(True, False)),
        0.0,
        1.0,
    )
    assert compact([[whole], []], OPTIONS.layout).sampled == array("b")
    assert compact([[turns], [whole]], OPTIONS.layout).sampled == array("b", (1, 0, 1, 1))


@pytest.mark.parametrize("pack", [False, True])
def test_what_float32_can_not_hold_becomes_infinite_and_not_an_error(pack: bool) -> None:
    large = Row(0, Prompt(0, (5, 6)), Completion((7,), (-0.5,), "stop", 3, 3, "s"), 4.5e38, 1.0)
    [mb] = build(compact([[large]], Layout(64, 32, 0, 8, pack)))
    assert mb["advantages"][0, :2].tolist() == [float("inf")] * 2
    assert mb["labels"][0, :3].tolist() == [IGNORE_INDEX, 7, IGNORE_INDEX]


def test_the_docstring_example_of_attention_rows() -> None:
    rows, home = attention_rows(torch.tensor([[0, 0, 1, -1]]), multiple=1)
    assert [row.tolist() for row in rows] == [[[0, 1]], [[2]]]
    assert home.tolist() == [0, 1, 2, 0]


def test_a_micro_batch_of_padding_counts_as_whole_rows() -> None:
    rows, home = attention_rows(torch.full((2, 3), -1), multiple=1)
    assert [row.tolist() for row in rows] == [[[0, 1, 2], [3, 4, 5]]]
    assert home.tolist() == [0, 1, 2, 3, 4, 5]


a_row = st.lists(st.integers(1, 20), max_size=6)


@given(st.lists(a_row, min_size=1, max_size=4), st.sampled_from((1, 8)))
def test_every_token_is_at_its_place_in_a_row_of_its_own_sequence_alone(
    packed: list[list[int]], multiple: int
) -> None:
    longest = max(1, *[sum(lengths) for lengths in packed])
    sequence, number = torch.full((len(packed), longest), -1), 0
    for row, lengths in enumerate(packed):
        start = 0
        for length in lengths:
            sequence[row, start : start + length] = number
            start, number = start + length, number + 1
    rows, home = attention_rows(sequence, multiple)
    flat, places = sequence.reshape(-1), torch.cat([row.reshape(-1) for row in rows])
    assert 0 <= int(places.min()) <= int(places.max()) < flat.numel()
    real = flat >= 0
    assert torch.equal(places[home][real], torch.arange(flat.numel())[real])
    for table in rows:
        for row in table.tolist():
            length = int((flat == flat[row[0]]).sum()) if number else longest
            # Causal attention: what stands before a token in its row is its own sequence, from the
            # first token on.
            assert row[:length] == list(range(row[0], row[0] + length))
            assert row[0] == 0 or not number or flat[row[0] - 1] != flat[row[0]]
            assert number == 0 or 2 * (length + multiple) > len(row)
