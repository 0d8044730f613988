"""Weights cut over two trainer hosts, the second of which is a process at another address: each
serves its part, and a server gets the whole of one version, or none of it."""

import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.rigs.host_process import HostProcess
from tests.rigs.present import present
from tests.sync.conftest import MakeRig, Rig
from titan_grpo.protocol.messages import Hashed, RangeSource, Standing
from titan_grpo.runkey import Key
from titan_grpo.sync.host import HostSync
from titan_grpo.sync.images import hashed_key
from titan_grpo.sync.transports.broadcast import put_text
from titan_grpo.titan.hf_files import whole_image

pytestmark = pytest.mark.e2e

COPY_S = 8.0
"""The longest that publishing a version takes, the copy of some MiB: less than any deadline for
which it could wait here."""


def published(run: Rig, version: int) -> None:
    """Publish as the trainer does, which must wait for nobody."""
    slot = run.slots.reserved.wait(120.0)
    assert slot is not None
    began = time.monotonic()
    run.publish_into(version, slot)
    assert time.monotonic() - began < COPY_S


def a_thawed_host_serves(run: Rig, version: int) -> None:
    """The first host goes on, and the server gets this version."""
    run.hosts[0].thaw()
    published(run, version)
    run.everyone(version)
    assert run.loaded["a"].value() == float(version)


def test_servers_hold_versions_of_which_each_host_has_hashed_and_served_its_rows(
    rig: MakeRig,
) -> None:
    key = Key.generate()
    run = rig("a", "b", hosts=2, run_keys={"trainer": key, "a": key, "b": key})
    for version in (1, 2, 3):
        run.deliver(version)
        assert [run.loaded[url].value() for url in "ab"] == [version, version]
    assert run.hosts[0].bytes_held == run.pool.manifest.total_bytes // 2
    with whole_image(run.pool, run.lanes.hashing, run.complete(3), run.config) as image:
        assert set(image.view(torch.bfloat16).tolist()) == {3.0}


def test_a_host_that_stands_still_costs_the_version_that_it_does_not_hash_and_no_other(
    rig: MakeRig,
) -> None:
    run = rig("a", hosts=2, lane_deadline_s=12.0, min_rate=64 << 20)
    run.deliver(1)
    run.hosts[0].freeze()
    published(run, 2)
    run.until_error("waiting for part 1 of version 2 from rank 1")
    assert run.server_set.entries()["a"].standing is Standing.HOLDS
    assert run.loaded["a"].value() == 1.0
    a_thawed_host_serves(run, 3)


def test_a_host_that_announces_what_are_no_digests_costs_that_version_and_no_other(
    rig: MakeRig,
) -> None:
    run = rig("a", hosts=2)
    run.hosts[0].freeze()
    report = Hashed(1, RangeSource("127.0.0.2", 1, "", part=1), "no digits")
    put_text(present(run.pool.hashed), hashed_key(1, 1), report.to_json())
    published(run, 1)
    run.until_error("part 1 of rank 1's host has no digests: non-hexadecimal number")
    a_thawed_host_serves(run, 2)


def test_what_a_killed_sync_process_of_a_host_had_hashed_is_served_by_the_next_one(
    rig: MakeRig,
) -> None:
    """No later version may come: a trainer whose bound on staleness is 0 waits for this one."""
    run = rig("a", "b", hosts=2, progress_deadline_s=4.0)
    run.deliver(1)
    run.slots.keep("a")
    run.publish(2)
    run.until(lambda: run.server_set.entries()["b"].held == 2)
    run.hosts[0].kill_sync()
    run.slots.go_on("a")
    run.everyone(2)
    assert [run.loaded[url].value() for url in "ab"] == [2.0, 2.0]


def test_a_hosts_later_errors_are_counted_with_the_first_one() -> None:
    host: Any = HostSync.__new__(HostSync)  # its constructor starts a process
    host.lock, host._announcer = threading.RLock(), SimpleNamespace(take_error=lambda: None)
    host._error, host._further = None, 0
    for version in (1, 2, 3):
        host.failed(f"part 1 of version {version}: no")
    assert str(host.take_error()) == "part 1 of version 1: no (and 2 more since the last step)"
    assert host.take_error() is None


def test_a_host_that_lost_its_connection_to_rank_0_announces_the_next_version_over_another_one(
    rig: MakeRig,
) -> None:
    run = rig("a", hosts=2)
    run.deliver(1)
    run.hosts[0].cut()
    for version in (2, 3):
        run.deliver(version)
        assert run.loaded["a"].value() == float(version)


@pytest.mark.parametrize(
    ("end", "words"),
    [(HostProcess.freeze, "version 2: send failed"), (HostProcess.kill, "source at 127.0.0.2")],
    ids=["stops", "dies"],
)
def test_a_host_that_ends_in_the_middle_of_serving_leaves_servers_on_the_version_that_they_hold(
    rig: MakeRig, end: Callable[[HostProcess], None], words: str
) -> None:
    run = rig("a", hosts=2, progress_deadline_s=4.0)
    run.deliver(1)
    run.slots.keep("a")
    run.publish(2)
    run.complete(2)
    end(run.hosts[0])
    run.slots.go_on("a")
    run.until_error(words)
    assert run.loaded["a"].value() == 1.0
    assert not run.servers["a"].paused
    if end is HostProcess.freeze:
        a_thawed_host_serves(run, 3)
