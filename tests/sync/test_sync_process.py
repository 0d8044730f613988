"""The sync process of a trainer: killed, stopped, and orphaned. Real processes; the servers are
HTTP servers with real receivers and without an engine."""

import io
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.rigs.server_handle import ServerProcess, served
from tests.rigs.signals import send, signal_at
from tests.rigs.sockets import descriptors_left
from tests.rigs.trainer import MATRICES, Trainer, content, manifest_of, matrices
from tests.rigs.trainer_handle import wait_until
from titan_grpo.config import WeightSync
from titan_grpo.errors import SyncError
from titan_grpo.runkey import KEY_VARIABLE, Key
from titan_grpo.sync import child
from titan_grpo.sync.lanes import SyncOptions
from titan_grpo.sync.process import SyncProcess

WAIT_S = 120.0
ROOT = Path(__file__).resolve().parents[2]

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]


@contextmanager
def training(folder: Path, servers: int = 1, **options: Any) -> Iterator[tuple[Trainer, list[Any]]]:
    """A trainer with its servers, which share a run key with it and hold version 0."""
    key = Key.generate()
    with ExitStack() as stack:
        env = {KEY_VARIABLE: key.hex()}
        up = [stack.enter_context(ServerProcess(env=env)) for _ in range(servers)]
        manifest = manifest_of(MATRICES, 1 << 16)
        config = WeightSync(bind_host="127.0.0.1", block_bytes=1 << 16, backoff_s=0.1)
        sync = SyncOptions(urls=[s.url for s in up], engine="vllm", run_key=key, **options)
        trainer = Trainer(manifest, config, folder, sync)
        stack.callback(trainer.close)
        trainer.start()
        assert trainer.publish(0, matrices(0), WAIT_S)
        assert trainer.servers.wait_held(0, WAIT_S, everyone=True), trainer.servers.text()
        yield trainer, up


def steps(trainer: Trainer, first: int, count: int) -> None:
    """So many steps of a main thread, which waits for no slot: of a stopped process none would
    come."""
    for version in range(first, first + count):
        trainer.publish(version, matrices(version))
        trainer.servers.reached(version)
        assert trainer.servers.take_error() is None
        threading.Event().wait(0.05)


def ends_on_the_newest(trainer: Trainer, servers: list[ServerProcess], version: int) -> None:
    """A version after these reaches all servers, and they generate with its weights."""
    assert trainer.publish(version, matrices(version), WAIT_S)
    urls = sorted(server.url for server in servers)
    assert wait_until(lambda: sorted(trainer.worker.flush(version, WAIT_S)) == urls, WAIT_S)
    for server in servers:
        now = server.run(served())
        assert now["visible"][-1][1] == content(version)
        assert not now["paused"]


def test_killed_in_the_middle_of_a_run_it_is_started_again_and_every_server_ends_on_the_newest(
    tmp_path: Path,
) -> None:
    with training(tmp_path, servers=2) as (trainer, servers):
        killed = trainer.worker.pid
        steps(trainer, 1, 20)
        os.kill(killed, signal.SIGKILL)
        steps(trainer, 21, 20)
        assert wait_until(lambda: trainer.worker.pid != killed, WAIT_S)
        ends_on_the_newest(trainer, servers, 41)
        (error,) = trainer.recorder.history().errors
        assert "the sync process ended with signal 9 (out of memory, maybe)" in error


def test_standing_still_it_is_killed_and_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(child, "SILENT_S", 3.0)
    with training(tmp_path) as (trainer, servers):
        still = trainer.worker.pid
        send(still, signal.SIGSTOP)
        steps(trainer, 1, 3)
        assert wait_until(lambda: trainer.worker.pid != still, WAIT_S)
        ends_on_the_newest(trainer, servers, 4)
        error = trainer.recorder.history().errors[0]
        assert "the sync process has given no sign for 6 s and was killed" in error


def test_killed_where_nothing_takes_what_rank_0_says_it_is_started_again_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = io.TextIOWrapper(io.FileIO("/dev/full", "w"), write_through=True)
    with full, training(tmp_path) as (trainer, servers):
        monkeypatch.setattr(sys, "stderr", full)
        killed = trainer.worker.pid
        os.kill(killed, signal.SIGKILL)
        assert wait_until(lambda: trainer.worker.pid != killed, WAIT_S)
        ends_on_the_newest(trainer, servers, 1)


def test_killed_right_after_a_publish_it_brings_that_version(tmp_path: Path) -> None:
    with training(tmp_path) as (trainer, servers):
        killed = trainer.worker.pid
        send(killed, signal.SIGSTOP)
        assert trainer.publish(1, matrices(1), WAIT_S)
        os.kill(killed, signal.SIGKILL)
        assert trainer.worker.flush(1, WAIT_S) == [servers[0].url]
        assert servers[0].run(served())["visible"][-1][1] == content(1)


def test_stopped_it_costs_versions_and_no_step(tmp_path: Path) -> None:
    with training(tmp_path) as (trainer, servers):
        send(trainer.worker.pid, signal.SIGSTOP)
        steps(trainer, 1, 40)
        os.kill(trainer.worker.pid, signal.SIGCONT)
        ends_on_the_newest(trainer, servers, 41)


def test_a_server_leaves_and_comes_again_and_late_orders_to_its_last_lane_cost_nothing(
    tmp_path: Path,
) -> None:
    with training(tmp_path, servers=2) as (trainer, servers):
        assert trainer.servers.remove(servers[0].url, WAIT_S)
        for order in ("stop_lane", "abort_lane"):
            trainer.worker.post(order, servers[0].url)
        assert trainer.publish(1, matrices(1), WAIT_S)
        assert trainer.servers.wait_held(1, WAIT_S, everyone=True) == [servers[1].url]
        assert trainer.servers.add(servers[0].url)
        ends_on_the_newest(trainer, servers, 2)
        assert trainer.recorder.history().errors == []


def idle_in(folder: Path) -> Trainer:
    """A trainer whose sync process has nothing to do yet."""
    manifest = manifest_of(MATRICES, 1 << 16)
    options = SyncOptions(urls=["http://nowhere"], engine="vllm")
    return Trainer(manifest, WeightSync(bind_host="127.0.0.1"), folder, options)


@pytest.fixture
def idle(tmp_path: Path) -> Iterator[Trainer]:
    with idle_in(tmp_path) as made:
        yield made


def test_at_the_start_one_that_does_not_begin_is_named(
    idle: Trainer, capsys: pytest.CaptureFixture[str]
) -> None:
    send(idle.worker.pid, signal.SIGSTOP)
    idle.start()
    with pytest.raises(SyncError, match=r"must begin before weight_sync\.startup_deadline_s"):
        idle.worker.wait_begun(0.2)
    assert "waiting for the sync process" in "".join(capsys.readouterr())
    os.kill(idle.worker.pid, signal.SIGCONT)
    idle.worker.wait_begun(WAIT_S)
    assert idle.worker.slots.take_reserved() is not None


@pytest.mark.usefixtures("ends_by_signals")
def test_a_signal_before_it_was_told_to_begin_leaves_a_close_without_a_traceback(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with idle_in(tmp_path) as idle:
        with signal_at(SyncProcess._begin, 8), pytest.raises(SystemExit):
            idle.start()
        idle.worker.close()
    assert capfd.readouterr().err == ""


@contextmanager
def no_thread_for_a_pipe() -> Iterator[None]:
    """As where the system has no thread left."""
    start = threading.Thread.start

    def refused(thread: threading.Thread) -> None:
        if thread.name == "pipe":
            raise RuntimeError("can't start new thread")
        start(thread)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(threading.Thread, "start", refused)
        yield


@pytest.mark.parametrize(
    "shortage",
    [partial(descriptors_left, 0), no_thread_for_a_pipe],
    ids=["descriptors", "threads"],
)
def test_while_it_cannot_be_started_again_it_is_tried_at_a_pace_and_leaves_nothing(
    idle: Trainer,
    shortage: Callable[[], AbstractContextManager[None]],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def tries() -> list[float]:
        return [r.created for r in caplog.records if r.name == child.logger.name]

    monkeypatch.setattr(child, "RESTART_S", 1.0)
    killed = idle.worker.pid
    with shortage():
        os.kill(killed, signal.SIGKILL)
        assert wait_until(lambda: len(tries()) >= 3, WAIT_S)
    times = tries()
    assert times[2] - times[0] > 0.9
    assert wait_until(lambda: idle.worker.pid != killed, WAIT_S)
    started = [p for p in psutil.Process().children() if SyncProcess.MODULE in p.cmdline()]
    assert [p.pid for p in started] == [idle.worker.pid]


def test_one_that_is_being_started_while_the_run_ends_ends_too(
    idle: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    launching, goes_on, launched = threading.Event(), threading.Event(), list[int]()
    launch = SyncProcess.launch

    def held(config: WeightSync) -> child.Launched:
        launching.set()
        assert goes_on.wait(WAIT_S)
        made = launch(config)
        launched.append(made[0].pid)
        return made

    monkeypatch.setattr(SyncProcess, "launch", staticmethod(held))
    os.kill(idle.worker.pid, signal.SIGKILL)
    assert launching.wait(WAIT_S)
    idle.worker.close()
    goes_on.set()
    assert wait_until(lambda: bool(launched) and not psutil.pid_exists(launched[0]), WAIT_S)


ORPHAN = """
import os, sys
from pathlib import Path
from tests.sync.test_sync_process import training, steps
with training(Path(sys.argv[1])) as (trainer, servers):
    if os.fork() == 0:
        os.read(0, 1)
        os._exit(0)
    print(trainer.worker.pid, flush=True)
    steps(trainer, 1, 100_000)
"""


def test_it_ends_with_rank_0_also_where_a_child_of_that_has_its_sockets(tmp_path: Path) -> None:
    rank0 = subprocess.Popen(
        [sys.executable, "-c", ORPHAN, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=ROOT,
        text=True,
    )
    try:
        assert rank0.stdout is not None
        child = psutil.Process(int(rank0.stdout.readline()))
        rank0.kill()
        child.wait(WAIT_S)
    finally:
        rank0.kill()
        rank0.communicate()
