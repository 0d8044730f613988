"""Compact rows, which a rank may be sent in place of tensors; rows of attention."""

import pickle
from array import array
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from titan_grpo.algorithm.rows import IGNORE_INDEX, Layout, Row, attention_rows, build, compact
from titan_grpo.samples import Completion, Prompt

LAYOUT = Layout(token_budget=64, max_len=32)


def test_a_token_travels_in_eight_bytes_and_a_prompts_in_four() -> None:
    long = Completion((7,) * 1000, (-0.5,) * 1000, "stop", 3, 3, "s")
    rows = compact([[Row(0, Prompt(0, (5,) * 100), long, 0.0, 1.0) for _ in range(16)]], LAYOUT)
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
    assert compact([[whole], []], LAYOUT).sampled == array("b")
    assert compact([[turns], [whole]], LAYOUT).sampled == array("b", (1, 0, 1, 1))


@pytest.mark.parametrize("pack", [False, True])
def test_what_float32_can_not_hold_becomes_infinite_and_not_an_error(pack: bool) -> None:
    large = Row(0, Prompt(0, (5, 6)), Completion((7,), (-0.5,), "stop", 3, 3, "s"), 4.5e38, 1.0)
    [mb] = build(compact([[large]], replace(LAYOUT, pack=pack)))
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
