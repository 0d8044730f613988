"""Servers that read versions from each other, with real receivers at an address that is not the
trainer's: the trainer sends each version about once, and what fails costs no server its version."""

import math
from typing import Any

import pytest

from tests.sync.conftest import MakeRig, Rig
from titan_grpo.config.rollout import server_url
from titan_grpo.observe import names
from titan_grpo.protocol import relay as table
from titan_grpo.protocol.messages import Joined
from titan_grpo.receive.fetch import RELAY_HOST
from titan_grpo.runkey import Key
from titan_grpo.sync.relay import Relay


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Receivers serve each other at an address of their own."""
    monkeypatch.setenv(RELAY_HOST, "127.0.0.9")


def relayed(run: Rig) -> tuple[float, float]:
    """Bytes that servers read, and of these from each other."""
    totals = run.recorder.history().totals
    return totals[names.SYNC_BYTES], totals[names.RELAYED_BYTES]


def joined(host: str, zone: str = "") -> Joined:
    """A server at ``host`` that serves others."""
    at: dict[str, Any] = {"relay_host": host, "relay_port": 7, "zone": zone}
    return Joined(True, "", "titan_grpo", 1, "", -1, "", True, **at)


def read_from(relay: Relay, url: str) -> list[str]:
    """Hosts that it is sent to for version 1, before the trainer."""
    return [source.host for source in relay.asked(url, 1, 1).sources]


def test_servers_whose_addresses_fit_one_pattern_read_from_each_other_first() -> None:
    relay = Relay(True, zones=["10.0.1.*", "10.0.2.*"])
    for host in ("10.0.1.7", "10.0.2.7", "10.0.2.8"):
        relay.came(f"http://{host}:8000", joined(host), "10.0.0.1")
    assert read_from(relay, "http://10.0.1.7:8000") == []
    assert read_from(relay, "http://10.0.2.7:8000")[0] == "10.0.1.7"
    assert read_from(relay, "http://10.0.2.8:8000")[0] == "10.0.2.7"


def test_patterns_may_be_in_capitals_and_a_servers_own_zone_takes_precedence() -> None:
    relay, read = Relay(True, zones=["GPU-A*", "GPU-B*"]), []
    servers = (("gpu-b1", ""), ("gpu-a1", ""), ("GPU-B2", ""), ("gpu-a2", "GPU-B*"))
    for at, (name, zone) in enumerate(servers, 1):
        url = server_url(f"http://{name}:8000")
        relay.came(url, joined(f"10.0.0.{at}", zone), "10.0.0.9")
        read.append(read_from(relay, url)[:1])
    assert read == [[], ["10.0.0.1"], ["10.0.0.1"], ["10.0.0.3"]]


def test_a_server_on_the_trainers_host_reads_its_memory_and_serves_nobody() -> None:
    relay = Relay(True)
    relay.came("http://10.0.0.1:8000", joined("10.0.0.1"), "10.0.0.1")
    relay.came("http://10.0.0.2:8000", joined("10.0.0.2"), "10.0.0.1")
    first = relay.asked("http://10.0.0.2:8000", 1, 1)
    assert (first.sources, len(first.serve)) == ((), 1)
    assert relay.asked("http://10.0.0.1:8000", 1, 1).serve == ()


@pytest.mark.e2e
def test_three_servers_of_another_host_take_each_version_from_the_trainer_once(
    rig: MakeRig, elsewhere: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    # which servers other work slows down is the machine's affair
    monkeypatch.setattr(table, "SLOW", math.inf)
    key = Key.generate()
    keys = dict.fromkeys(("trainer", "a", "b", "c"), key)
    # on a busy machine too no server waits for another one in vain
    patient = {"min_rate": 1 << 20, "progress_deadline_s": 60.0}
    run = rig("a", "b", "c", relay=True, far=True, run_keys=keys, **patient)
    run.deliver(1)
    before = relayed(run)
    for version in (2, 3):
        run.deliver(version)
        assert [run.loaded[url].value() for url in "abc"] == [version] * 3
    read, from_others = (b - a for a, b in zip(before, relayed(run), strict=True))
    image = run.pool.manifest.total_bytes
    assert read == 2 * 3 * image
    assert from_others == 2 * 2 * image, "two of three"


@pytest.mark.e2e
def test_a_server_that_dies_costs_the_others_no_version(rig: MakeRig, elsewhere: None) -> None:
    run = rig("a", "b", "c", relay=True, far=True)
    run.deliver(1)
    run.servers["a"].freeze_receiver()
    run.publish(2)
    run.until(lambda: all(run.server_set.entries()[url].held == 2 for url in "bc"))
    run.servers["a"].kill_receiver()
    run.deliver(3)
    assert [run.loaded[url].value() for url in "abc"] == [3, 3, 3]
