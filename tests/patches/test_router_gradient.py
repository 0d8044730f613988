"""The gradients of an MoE, and of what is before it, where tensor-parallel ranks share it."""

from itertools import product
from pathlib import Path

from tests.rigs.ranks import run_ranks

SCRIPT = Path(__file__).with_name("router_rank.py")


def test_ranks_that_share_a_layer_of_experts_have_the_gradients_of_one_that_has_it_whole(
    tmp_path: Path,
) -> None:
    ways = product(("tensor", "borrowed", "both"), (False, True), (0, 1))
    wanted = [f"{way}, scores before {b}, {n} shared: wrong []" for way, b, n in ways]
    for said in run_ranks(SCRIPT, 4, str(tmp_path)):
        assert said.splitlines() == wanted
