"""What is left when a run ends by an error."""

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
