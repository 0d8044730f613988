"""The receiver process with real senders: what arrives is committed, what goes wrong leaves the
engine as it was."""

import ctypes
import ipaddress
import math
import os
import signal
import sys
import threading
import time
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from tests.receive.site import BUCKET, DictEngine, Site, Version, Weights
from tests.rigs.present import present
from tests.rigs.signals import send
from tests.rigs.trainer_handle import wait_until
from titan_grpo.engines.server import RolloutNeeds
from titan_grpo.errors import PeerError, ServerRefused, ServerUnfit, TransferFailed
from titan_grpo.protocol.messages import Order
from titan_grpo.receive.process import LAST_LINE
from titan_grpo.subprocesses import SET_MEMPOLICY
from titan_grpo.sync.link import LaneLink

pytestmark = pytest.mark.e2e

over_tcp = pytest.mark.parametrize("site", ["tcp"], indirect=True)
"""For what the engine's side decides, whichever way the bytes come: over gloo each receiver imports
torch. And for what follows ``broadcast``, which itself sends over gloo."""


def test_a_good_transfer_reaches_the_engine_and_is_read_back(site: Site) -> None:
    w = Weights(1.0)
    report = site.deliver(site.connect(w), 1, 7, w)
    assert report.ok
    assert report.intact
    assert (report.version, report.fingerprint, report.loaded) == (7, w.fingerprint, 2)
    assert site.engine.value() == 1.0


def test_a_version_of_a_hundred_thousand_tensors_reaches_the_engine() -> None:
    names = [
        f"model.language_model.layers.{i // 1000}.mlp.experts.{i % 1000}.gate_up_proj.weight"
        for i in range(100_000)
    ]
    version = Version(dict(zip(names, torch.full((len(names), 4), 3.0), strict=True)))
    assert len(version.manifest.to_json()) > 8 << 20
    engine = DictEngine()
    engine.tensors = {name: torch.zeros(4) for name in names}
    site = Site(engine=engine, transport="tcp")
    try:
        began = time.monotonic()
        link = site.connect(version)
        connected = time.monotonic()
        report = site.deliver(link, 1, 1, version)
        print(
            f"connected {connected - began:.2f} s, delivered {time.monotonic() - connected:.2f} s"
        )
        assert report.loaded == len(names)
        assert engine.value() == 3.0
    finally:
        site.close()


@over_tcp
def test_the_receiver_takes_memory_of_all_nodes_though_its_engine_is_bound_to_one(
    site: Site,
) -> None:
    bind, first = 2, ctypes.byref(ctypes.c_ulong(1))
    set_policy = partial(ctypes.CDLL(None).syscall, SET_MEMPOLICY[os.uname().machine])
    if set_policy(bind, first, 64):
        pytest.skip("no memory policy can be set here")
    try:
        assert " bind:0 " in Path("/proc/self/numa_maps").read_text()
        site.connect(Weights(1.0))
    finally:
        set_policy(0, None, 0)
    policies = Path(f"/proc/{site.receiver_pid}/numa_maps").read_text()
    assert "titan_grpo" in policies
    assert " bind:" not in policies


def broadcast(site: Site, nbytes: int, **config: Any) -> LaneLink:
    """A lane of the next epoch that has sent so many bytes of a version over gloo."""
    weights = Weights(9.0)
    link = site.greet(weights, transport="gloo", **config)
    link.wait_joined(180.0)
    assert link.send_manifest().ok
    link._post(Order(1, "receive", 99, weights.fingerprint), weights.digests)
    link._connected().broadcast(weights.image[:nbytes], 60.0)
    return link


@over_tcp
def test_a_receiver_that_cannot_be_started_is_said_at_once_and_the_next_one_serves(
    site: Site,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(sys, "executable", "/removed/bin/python")
    link = site.greet(Weights(1.0))
    monkeypatch.undo()
    with pytest.raises(ServerRefused, match=r"cannot run a receiver process: .*/removed/bin"):
        link.wait_joined(20.0)
    assert "Traceback" not in caplog.text
    # As when a package in the server's environment is replaced while it runs.
    (tmp_path / "msgspec.py").write_text("raise ImportError")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    link = site.greet(Weights(1.0))
    monkeypatch.undo()
    with pytest.raises(ServerRefused, match="it ended by an exception, which is in the server's"):
        link.wait_joined(60.0)
    assert site.deliver(site.connect(Weights(2.0)), 1, 2, Weights(2.0)).ok


@over_tcp
def test_a_receiver_that_is_killed_before_it_joins_is_said_at_once(site: Site) -> None:
    """As for want of memory. The lane waited for its deadline, and named the network."""
    link = site.greet(Weights(1.0))
    os.kill(site.receiver_pid, signal.SIGKILL)
    with pytest.raises(ServerRefused, match=r"it ended with signal 9 \(out of memory, maybe\)"):
        link.wait_joined(20.0)
    assert site.deliver(site.connect(Weights(2.0)), 1, 2, Weights(2.0)).ok


@over_tcp
def test_a_sender_that_is_gone_leaves_the_old_version_and_the_next_one_works(site: Site) -> None:
    site.deliver(site.connect(Weights(1.0)), 1, 1, Weights(1.0))
    link = broadcast(site, BUCKET)
    receiver = site.receiver_pid
    link.close()
    assert site.receiver_status() == 3
    assert site.engine.value() == 1.0
    assert site.receiver.state.version == 1
    assert site.deliver(site.connect(Weights(2.0)), 1, 2, Weights(2.0)).ok
    assert site.engine.value() == 2.0
    assert site.receiver_pid != receiver


@over_tcp
def test_a_stalled_sender_costs_the_receiver_its_deadline_and_the_engine_nothing(
    site: Site,
) -> None:
    broadcast(site, BUCKET, lane_deadline_s=8.0)
    assert site.receiver_status() == 3  # ended the epoch by its own deadline of 8 s
    assert site.engine.value() == 0.0
    assert site.deliver(site.connect(Weights(2.0)), 1, 2, Weights(2.0)).ok


@over_tcp
def test_a_stalled_sender_does_not_delay_its_successor(site: Site) -> None:
    broadcast(site, BUCKET)
    assert site.deliver(site.connect(Weights(2.0)), 1, 2, Weights(2.0)).ok


def test_bytes_that_differ_from_their_digests_are_named_never_lent_and_do_not_end_the_epoch(
    site: Site,
) -> None:
    good = Weights(1.0)
    bad = good.image.clone()
    bad[5000] ^= 1
    link = site.connect(good)
    staged = link.send(1, 1, bad, good.digests, good.fingerprint)
    assert not staged.ok
    assert staged.bad_block == 1  # byte 5000 lies in the second block of 4096
    assert "block 1" in staged.error
    report = present(site.side.commit(link.commit(staged).to_dict()))
    assert not report.ok
    assert report.intact
    assert site.engine.value() == 0.0
    assert site.deliver(link, 2, 1, good).ok


@over_tcp
def test_a_sender_with_other_byte_counts_aborts_the_receiver_and_not_the_engine(site: Site) -> None:
    with suppress(TransferFailed):
        broadcast(site, 2 * BUCKET)
    assert site.receiver_status() == -signal.SIGABRT
    assert site.engine.value() == 0.0
    assert site.deliver(site.connect(Weights(2.0)), 1, 2, Weights(2.0)).ok


@over_tcp
def test_a_commit_for_an_epoch_that_was_replaced_is_refused(site: Site) -> None:
    w = Weights(1.0)
    old = site.connect(w)
    staged = old.send(1, 1, w.image, w.digests, w.fingerprint)
    new = site.connect(w)
    report = present(site.side.commit(old.commit(staged).to_dict()))
    assert not report.ok
    assert report.intact
    assert site.engine.value() == 0.0
    with pytest.raises(TransferFailed, match="waiting for the engine to apply transfer 1"):
        new.wait_applied(
            1, 0.5
        )  # the report on the old lane's first transfer is none on the new lane's
    assert site.deliver(new, 1, 1, w).ok


@over_tcp
def test_a_receiver_that_stands_still_gives_no_sign_of_life_in_time(site: Site) -> None:
    w = Weights(1.0)
    link = site.connect(w)
    assert site.deliver(link, 1, 1, w).ok
    send(site.receiver_pid, signal.SIGSTOP)
    with pytest.raises(TransferFailed):
        link.ping(2, 0.5)


@over_tcp
def test_each_time_a_receiver_stands_still_its_trainers_lease_counts_from_then(site: Site) -> None:
    site.connect(Weights(1.0))
    receiver = present(site.receiver._serving)
    for _ in range(2):
        send(receiver.pid, signal.SIGSTOP)
        began = time.monotonic()
        assert receiver.last_sign_s() >= began
        os.kill(receiver.pid, signal.SIGCONT)
        # An answer to any request shows that it goes on, and so that this time is over.
        assert receiver.ask({"op": "place"})["ok"]
    # First: once it has ended it may be reaped at any moment.
    killed = psutil.Process(receiver.pid)
    killed.kill()
    psutil.wait_procs([killed], timeout=60.0)
    began = time.monotonic()
    assert receiver.last_sign_s() >= began


@over_tcp
def test_a_bye_holds_although_the_receiver_answers_once_more_before_it_ends(site: Site) -> None:
    site.connect(Weights(1.0))
    receiver, said = present(site.receiver._serving), [{"id": LAST_LINE, "last_sign_s": -math.inf}]
    receiver.kill()

    class Ending:
        """A channel whose other end answers between its last line and its end."""

        def send(self, message: dict[str, Any], timeout_s: float) -> None:
            if len(said) == 1:
                said.append({"id": message["id"], "last_sign_s": -math.inf})

        def receive(self, timeout_s: float) -> dict[str, Any] | None:
            return said.pop(0) if said else None

        def close(self) -> None:
            pass

    receiver._channel = Ending()  # type: ignore[assignment]
    assert [receiver.last_sign_s(), receiver.last_sign_s()] == [-math.inf, -math.inf]


@over_tcp
def test_a_server_that_sends_no_routes_is_refused_where_they_are_needed(site: Site) -> None:
    site.engine.routes = False
    with pytest.raises(ServerUnfit, match="router_replay needs those of every completion"):
        site.greet(
            Weights(1.0), needs=RolloutNeeds(routes=True, exempt=("http://other",))
        ).wait_joined(60.0)
    evaluating = site.greet(
        Weights(1.0), needs=RolloutNeeds(routes=True, exempt=("http://own",)), url="http://own"
    )
    assert evaluating.wait_joined(60.0).ok, "what evaluates is not trained on"
    site.engine.routes = True
    assert site.greet(Weights(1.0), needs=RolloutNeeds(routes=True)).wait_joined(60.0).ok


@over_tcp
def test_a_later_run_that_the_server_cannot_serve_leaves_the_run_in_force(site: Site) -> None:
    link = site.connect(Weights(1.0))
    site.engine.routes = False
    needs = RolloutNeeds(routes=True)
    later = site.greet(Weights(1.0), run_id="ffffffffffff-00000000", epoch=1, needs=needs)
    with pytest.raises(ServerUnfit, match="router_replay"):
        later.wait_joined(60.0)
    assert site.deliver(link, 1, 1, Weights(1.0)).ok


def test_bye_ends_the_receiver_process(site: Site) -> None:
    link = site.connect(Weights(1.0))
    link.bye(60.0)
    assert site.receiver_status() == 0


@over_tcp
def test_receivers_whose_memory_was_never_mapped_leave_no_zombies(site: Site) -> None:
    before = {p.pid for p in psutil.Process().children()}
    link = site.connect(Weights(1.0))
    site.probe()
    link.bye(60.0)
    assert wait_until(lambda: {p.pid for p in psutil.Process().children()} <= before, 60.0)


@over_tcp
def test_a_probe_is_answered_and_changes_nothing(site: Site) -> None:
    w = Weights(1.0)
    link = site.connect(w)
    site.deliver(link, 1, 1, w)
    serving = site.receiver_pid
    joined = site.probe()
    assert joined.ok
    assert joined.held_version == 1
    assert joined.package.startswith("titan_grpo")
    assert site.receiver_pid == serving
    assert site.deliver(link, 2, 2, w).ok


@over_tcp
def test_hellos_that_are_refused_at_the_same_time_all_get_their_answers(site: Site) -> None:
    w = Weights(1.0)
    link = site.connect(w)
    for zombie in [site.greet(w, epoch=1) for _ in range(3)]:
        with pytest.raises(PeerError, match="not newer than epoch 1"):
            zombie.wait_joined(60.0)
    assert site.deliver(link, 1, 1, w).ok


def interfaces() -> list[str]:
    """Loopback, and one address of this host on a network if it has any."""
    found = [
        a.address
        for rows in psutil.net_if_addrs().values()
        for a in rows
        if a.family.name == "AF_INET"
    ]
    return [
        "127.0.0.1",
        *[address for address in found if not ipaddress.ip_address(address).is_loopback][:1],
    ]


def listening(pid: int | None = None) -> set[tuple[str, int]]:
    """(address, port) of every TCP socket that a process listens on."""
    connections = psutil.Process(pid).net_connections("tcp")
    return {(c.laddr.ip, c.laddr.port) for c in connections if c.status == psutil.CONN_LISTEN}


@pytest.mark.parametrize("host", interfaces(), ids=["loopback", "network"][: len(interfaces())])
def test_both_ends_listen_on_the_configured_interface_only(host: str, site: Site) -> None:
    before, w = listening(), Weights(1.0)
    link = site.greet(w, bind_host=host)
    link.wait_joined(180.0)
    assert link.send_manifest().ok
    trainer: list[set[tuple[str, int]]] = []
    receiver: list[set[tuple[str, int]]] = []

    def look(moved: int) -> None:
        trainer.append(listening() - before)
        receiver.append(listening(site.receiver_pid))

    staged = link.send(1, 1, w.image, w.digests, w.fingerprint, look)
    assert staged.ok
    assert len(trainer) == -(-w.image.numel() // BUCKET)
    # one port; and over gloo that of the store, and of gloo's device at each end
    ours = [host] * (3 if site.transport == "gloo" else 1)
    assert [sorted(address for address, _ in found) for found in trainer] == [ours] * len(trainer)
    own = [host] if site.transport == "gloo" else []
    assert [sorted(address for address, _ in found) for found in receiver] == [own] * len(receiver)


def test_a_large_version_has_its_bytes_at_the_least_rate_beside_the_lanes_deadline() -> None:
    """Over gloo too: 9 buckets of 0.7 s each, where lane_deadline_s is 5 s and the rate adds 8."""
    site = Site(transport="gloo", lane_deadline_s=5.0, min_rate=BUCKET)
    weights, pace = Weights(1.0), threading.Event()
    try:
        link = site.connect(weights)
        content = weights.image, weights.digests, weights.fingerprint
        assert link.send(1, 1, *content, lambda _: pace.wait(0.7)).ok
    finally:
        site.close()
