"""Sites of an engine and its receiver, and senders that misbehave."""

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.receive.site import Site


@pytest.fixture(params=["gloo", "tcp"])
def site(request: pytest.FixtureRequest) -> Iterator[Site]:
    made = Site(transport=request.param)
    yield made
    made.close()


@pytest.fixture
def rogue() -> Iterator[Callable[[Site, str], subprocess.Popen[str]]]:
    """Start a sender process of the next epoch, let it join, and return when it has done what its
    mode says."""
    started: list[subprocess.Popen[str]] = []

    def start(site: Site, mode: str) -> subprocess.Popen[str]:
        site.epoch += 1
        script = Path(__file__).with_name("sender_process.py")
        process = subprocess.Popen(
            [sys.executable, str(script), site.run_id, str(site.epoch), mode],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        assert process.stdout is not None
        site.side.hello(json.loads(process.stdout.readline()))
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()
