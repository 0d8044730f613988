"""Versions are committed to real servers by calls that a rollout service makes: checks of the
engines' suite, through it."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conformance import commits, streaming
from tests.conformance.engine import EngineUnderTest
from tests.e2e.conftest import Site

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]


@pytest.mark.parametrize(
    "check",
    [
        commits.the_server_computes_what_was_committed_also_the_second_time,
        commits.an_update_that_a_dead_trainer_left_open_is_taken_over,
        streaming.streamed_weights_are_computed_also_the_second_time,
    ],
    ids=lambda check: check.__name__,
)
def test_vllm(
    check: Callable[[EngineUnderTest], None],
    site: Site,
    through_service: Callable[[EngineUnderTest], EngineUnderTest],
    tmp_path: Path,
) -> None:
    server = EngineUnderTest(site.server, tmp_path)
    commits.bring_back(server)
    check(through_service(server))


def test_sglang_which_takes_pauses_and_weights_with_the_admin_key_only(
    sglang_site: Site, through_service: Callable[[EngineUnderTest], EngineUnderTest], tmp_path: Path
) -> None:
    server = through_service(EngineUnderTest(sglang_site.server, tmp_path))
    commits.bring_back(server)
    commits.the_server_computes_what_was_committed_also_the_second_time(server)
    commits.an_update_that_a_dead_trainer_left_open_is_taken_over(server)
