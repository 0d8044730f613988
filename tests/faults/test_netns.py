"""Networks of a test on a host that does not give them: what was made is removed."""

import os
import signal
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from tests.faults.netns import Hosts, Namespace

IP = """#!/usr/bin/env bash
# In place of iproute2's: notes its calls, and interrupts the caller at the first address.
echo "$*" >>"$(dirname "$0")/calls"
case "$*" in *"addr add"*) kill -INT $PPID; exec sleep 60;; esac
"""


@pytest.fixture
def interrupts() -> Iterator[None]:
    """SIGINT raises KeyboardInterrupt, also where tests were started in a shell's background."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interrupts")
@pytest.mark.parametrize(
    ("network", "made"),
    [(Namespace(), "netns"), (Hosts(2), "link")],
    ids=["one namespace", "hosts on a switch"],
)
def test_an_interrupt_while_a_network_is_made_leaves_none_of_it(
    network: AbstractContextManager[object],
    made: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    program = tmp_path / "ip"
    program.write_text(IP)
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt), network:
        pass
    assert time.monotonic() - began < 30.0
    calls = [line.split() for line in (tmp_path / "calls").read_text().splitlines()]
    names = [call[2] for call in calls if call[:2] == [made, "add"]]
    assert names
    assert all([made, "del", name] in calls for name in names)
