from hypothesis import given
from hypothesis import strategies as st

from titan_grpo.algorithm.balance import deal, padded_length, plan_waves

lengths = st.lists(st.integers(1, 64), min_size=1, max_size=60)
num_ranks = st.integers(1, 9)
budget = st.integers(64, 512)


def test_the_docstring_examples():
    assert plan_waves((8, 16, 8, 16, 8), 2, 16) == [[1, 3], [0, 2, 4]]
    assert deal([[0, 1, 2, 3]], (5, 4, 3, 1), 2) == [[[0, 3]], [[1, 2]]]


def test_a_padded_length_never_exceeds_the_greatest_length():
    assert [padded_length(n, 8, 30) for n in (1, 8, 9, 24, 25, 30)] == [8, 8, 16, 24, 30, 30]


@given(lengths, num_ranks, budget)
def test_every_row_is_in_one_micro_batch_within_the_budget(padded, ranks, token_budget):
    shares = deal(plan_waves(padded, ranks, token_budget), padded, ranks)
    assert sorted(row for share in shares for wave in share for row in wave) == list(range(len(padded)))
    assert len({len(share) for share in shares}) == 1
    for share in shares:
        for wave in share:
            assert len(wave) * max((padded[row] for row in wave), default=0) <= token_budget


@given(lengths, num_ranks, budget)
def test_two_ranks_differ_by_one_row_per_wave_and_by_the_longest_row_in_all(costs, ranks, token_budget):
    waves = plan_waves(costs, ranks, token_budget)
    shares = deal(waves, costs, ranks)
    for number in range(len(waves)):
        counts = [len(share[number]) for share in shares]
        assert max(counts) - min(counts) <= 1
    loads = [sum(costs[row] for wave in share for row in wave) for share in shares]
    assert max(loads) - min(loads) <= max(costs)


@given(lengths, num_ranks, budget)
def test_only_the_last_wave_can_leave_a_rank_without_rows(padded, ranks, token_budget):
    waves = plan_waves(padded, ranks, token_budget)
    assert all(len(wave) >= ranks for wave in waves[:-1])
