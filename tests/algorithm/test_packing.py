import torch
from hypothesis import given
from hypothesis import strategies as st

from titan_grpo.algorithm.rows import attention_rows


def test_the_docstring_example():
    rows, home = attention_rows(torch.tensor([[0, 0, 1, -1]]), multiple=1)
    assert [row.tolist() for row in rows] == [[[0, 1]], [[2]]]
    assert home.tolist() == [0, 1, 2, 0]


def test_a_micro_batch_of_padding_counts_as_whole_rows():
    rows, home = attention_rows(torch.full((2, 3), -1), multiple=1)
    assert [row.tolist() for row in rows] == [[[0, 1, 2], [3, 4, 5]]]
    assert home.tolist() == [0, 1, 2, 3, 4, 5]


a_row = st.lists(st.integers(1, 20), max_size=6)


@given(st.lists(a_row, min_size=1, max_size=4), st.sampled_from((1, 8)))
def test_every_token_is_at_its_place_in_a_row_of_its_own_sequence_alone(packed, multiple):
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
