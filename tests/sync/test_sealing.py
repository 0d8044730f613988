"""The sealer and the image slots between a trainer and its lanes: skipping, other ranks'
parts, and memory."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.rigs.host_process import host_shards
from tests.rigs.present import present
from tests.sync.conftest import SHAPES, MakeRig
from titan_grpo.layout import image
from titan_grpo.sync.publisher import Announcer, Copy, copied_key

pytestmark = pytest.mark.e2e

WAIT_S = 60.0


def test_a_version_is_skipped_when_every_slot_is_being_read_and_the_next_one_is_not(
    rig: MakeRig,
) -> None:
    r = rig("a", "b")
    r.deliver(1)
    r.servers["a"].freeze_receiver()
    r.publish(2)
    r.until(
        lambda: r.server_set.entries()["a"].incoming == 2 and r.server_set.entries()["b"].held == 2
    )
    r.servers["b"].freeze_receiver()
    r.publish(3)
    r.until(lambda: r.server_set.entries()["b"].incoming == 3)
    assert r.slots.reserved.take() is None
    for server in r.servers.values():
        server.thaw_receiver()
    r.deliver(5)
    assert [r.loaded[url].value() for url in "ab"] == [5.0, 5.0]


def test_a_part_that_comes_too_late_costs_its_version_alone_and_leaves_no_notice_in_the_store(
    rig: MakeRig,
) -> None:
    r = rig("a", remote_writers=(1, 2), lane_deadline_s=8.0)
    late, punctual = (Announcer(n, r.pool.store.port, WAIT_S, WAIT_S) for n in (1, 2))

    def deliver(version: int, slot: int) -> None:
        for announcer in (late, punctual):
            announcer(version, slot, Copy(0.0))
        r.publish_into(version, slot)
        r.everyone(version)

    slot = r.publish(1)
    punctual(1, slot, Copy(0.0))
    reserved = [r.slots.reserved.wait(within_s) for within_s in (WAIT_S, 0.0)]
    assert reserved == [1 - slot, None], "one reservation at a time"
    r.publish_into(2, 1 - slot)
    punctual(2, 1 - slot, Copy(0.0))
    r.until_error("version 1: could not be published")
    # A rank announces in the order of the versions, the late one too.
    for version, its_slot in ((1, slot), (2, 1 - slot)):
        late(version, its_slot, Copy(0.0))
    r.everyone(2)
    for version in (3, 4):
        deliver(version, present(r.slots.reserved.wait(WAIT_S)))
    assert r.server_set.take_error() is None
    assert r.servers["a"].versions == [2, 3, 4]
    kept = [(v, n) for v in (1, 2) for n in (1, 2) if r.pool.store.check([copied_key(v, n)])]
    assert kept == []
    for announcer in (late, punctual):
        announcer.close(WAIT_S)


def test_a_version_that_gets_no_threads_to_be_hashed_is_given_up_and_the_next_one_is_not(
    rig: MakeRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    r = rig("a")
    r.deliver(1)

    class Exhausted(ThreadPoolExecutor):
        def map(self, *_: Any, **__: Any) -> Any:
            # what Python says where the system has no further thread
            raise RuntimeError("can't start new thread")

    with monkeypatch.context() as system:
        system.setattr(image, "ThreadPoolExecutor", Exhausted)
        r.publish(2)
        r.until_error("version 2: could not be published: can't start")
    r.deliver(3)


def memory(pid: int | str, key: str) -> int:
    """Bytes of one line of /proc/<pid>/status."""
    lines = dict(
        line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines()
    )
    return int(lines[key].split()[0]) * 1024


def test_host_memory_is_the_slots_here_and_one_image_at_the_receiver(rig: MakeRig) -> None:
    """slots x model bytes on the trainer's host, model bytes at the server; nothing of a model's
    size besides."""
    before = memory("self", "RssShmem")
    r = rig("a", "b", slots=2)
    model = r.pool.manifest.total_bytes
    r.deliver(1)
    # Tensors of its own for each version would stay in the allocator's pools, or not.
    shards = host_shards(SHAPES, 1, 0)
    Path("/proc/self/clear_refs").write_text("5")  # restarts VmHWM, the peak
    resident = memory("self", "VmRSS")
    for version in range(2, 8):
        slot = present(r.slots.reserved.wait(WAIT_S))
        for shard in shards.values():
            shard.fill_(version)
        r.publish_into(version, slot, shards)
        r.everyone(version)
    slack = r.config.bucket_bytes + (1 << 20)
    # the servers live in this process: each one keeps its receiver's image mapped
    assert memory("self", "RssShmem") - before <= 2 * model + 2 * model + slack
    assert memory("self", "VmHWM") - resident <= slack
    for server in r.servers.values():
        assert memory(present(server.receiver_pid), "RssShmem") <= model + slack
