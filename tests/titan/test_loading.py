"""Two gloo ranks and their loaders, with tensors made on rank 0 and with tensors that each rank
builds."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("loading_rank.py")
DEADLINE_S = 120

# Each rank imports torchtitan for seven seconds of a core; tests/e2e has training runs in both
# modes that agree.
pytestmark = [pytest.mark.e2e, pytest.mark.long]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    store = tmp_path_factory.mktemp("loading") / "store"
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    processes = [
        subprocess.Popen(
            [sys.executable, str(SCRIPT), str(rank), str(store)],
            stdout=subprocess.PIPE,
            env=environment,
            text=True,
        )
        for rank in (0, 1)
    ]
    try:
        return [
            json.loads(process.communicate(timeout=DEADLINE_S)[0].splitlines()[-1])
            for process in processes
        ]
    finally:
        for process in processes:
            process.kill()
            process.wait(DEADLINE_S)


@pytest.mark.parametrize("rows", ["padded", "packed"])
def test_each_rank_gives_its_trainer_the_same_tensors_in_both_modes(ranks, rows) -> None:
    for rank in ranks:
        assert len(rank[f"{rows}, single"]) >= 3
        assert rank[f"{rows}, by rank"] == rank[f"{rows}, single"]
    assert ranks[0][f"{rows}, single"] != ranks[1][f"{rows}, single"], "a share of its own"


def test_an_error_on_rank_0_stops_both_with_the_same_words(ranks) -> None:
    assert [rank["stopped"] for rank in ranks] == ["DataError: no batch"] * 2
