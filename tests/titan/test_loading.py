"""Two gloo ranks and their loaders, with tensors made on rank 0 and with tensors that each rank
builds."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.rigs.ranks import run_ranks

SCRIPT = Path(__file__).with_name("loading_rank.py")

# Each rank imports torchtitan for seven seconds of a core; tests/e2e has training runs in both
# modes that agree.
pytestmark = [pytest.mark.e2e, pytest.mark.long]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    store = tmp_path_factory.mktemp("loading") / "store"
    return [json.loads(out.splitlines()[-1]) for out in run_ranks(SCRIPT, 2, str(store))]


@pytest.mark.parametrize("rows", ["padded", "packed"])
def test_each_rank_gives_its_trainer_the_same_tensors_in_both_modes(
    ranks: list[dict[str, Any]], rows: str
) -> None:
    for rank in ranks:
        assert len(rank[f"{rows}, single"]) >= 3
        assert rank[f"{rows}, by rank"] == rank[f"{rows}, single"]
    assert ranks[0][f"{rows}, single"] != ranks[1][f"{rows}, single"], "a share of its own"


def test_an_error_on_rank_0_stops_both_with_the_same_words(ranks: list[dict[str, Any]]) -> None:
    assert [rank["stopped"] for rank in ranks] == ["DataError: no batch"] * 2
