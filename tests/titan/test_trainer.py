"""What a trainer waits for at the end of a run, and of a step in sync mode."""

import json
from pathlib import Path

import pytest

from tests.rigs.ranks import run_ranks
from tests.rigs.sockets import free_port

SCRIPT = Path(__file__).with_name("ended_rank.py")


@pytest.mark.e2e
def test_a_checkpoint_that_is_being_written_is_whole_when_the_run_has_ended_by_an_error(
    tmp_path: Path,
) -> None:
    (said,) = run_ranks(SCRIPT, 1, str(free_port()), str(tmp_path))
    assert json.loads(said.splitlines()[-1]) == ["no server is left", True]


@pytest.mark.e2e
@pytest.mark.long
def test_the_other_ranks_wait_for_commits_in_a_group_that_outlasts_rank_0(tmp_path: Path) -> None:
    script = Path(__file__).with_name("committed_rank.py")
    waited = [
        json.loads(s.splitlines()[-1])
        for s in run_ranks(script, 2, str(free_port()), str(tmp_path))
    ]
    assert min(waited) > 5
