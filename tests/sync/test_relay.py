"""Servers that read versions from each other, with real receivers at an address that is not the
trainer's: the trainer sends each version about once, and what fails costs no server its version."""

import os
import signal

import pytest

from titan_grpo.observe import names
from titan_grpo.receive.receiver_main import RELAY_HOST
from titan_grpo.runkey import Key

pytestmark = pytest.mark.e2e


@pytest.fixture
def elsewhere(monkeypatch) -> None:
    """Receivers serve each other at an address of their own."""
    monkeypatch.setenv(RELAY_HOST, "127.0.0.9")


def relayed(run) -> tuple[int, int]:
    """Bytes that servers read, and of these from each other."""
    totals = run.recorder.totals()
    return totals[names.SYNC_BYTES], totals[names.RELAYED_BYTES]


def test_three_servers_of_another_host_take_each_version_from_the_trainer_once(
    rig, elsewhere
) -> None:
    key = Key.generate()
    keys = dict.fromkeys(("trainer", "a", "b", "c"), key)
    # on a busy machine too no server waits for another one in vain
    patient = {"min_rate": 1 << 20, "progress_deadline_s": 60.0}
    run = rig("a", "b", "c", relay=True, far=True, run_keys=keys, **patient)
    run.publish(1)
    run.everyone(1)
    before = relayed(run)
    for version in (2, 3):
        run.publish(version)
        run.everyone(version)
        assert [run.loaded[url].value() for url in "abc"] == [version] * 3
    read, from_others = (b - a for a, b in zip(before, relayed(run), strict=True))
    image = run.pool.manifest.total_bytes
    assert read == 2 * 3 * image
    assert from_others == 2 * 2 * image


def test_a_server_that_dies_costs_the_others_no_version(rig, elsewhere) -> None:
    run = rig("a", "b", "c", relay=True, far=True)
    run.publish(1)
    run.everyone(1)
    os.kill(run.servers["a"].receiver.pid, signal.SIGSTOP)
    run.publish(2)
    run.until(lambda: all(run.server_set.entry(url).held == 2 for url in "bc"))
    os.kill(run.servers["a"].receiver.pid, signal.SIGKILL)
    run.publish(3)
    run.everyone(3)
    assert [run.loaded[url].value() for url in "abc"] == [3, 3, 3]
