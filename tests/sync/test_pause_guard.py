"""A trainer that dies or freezes in a commit leaves no server paused, and none that shows what it
does not hold.

Real HTTP, real receiver processes, a real trainer process; the engine is a copy of the tensors
(testing.server_process).
"""

import json
import os
import resource
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
from msgspec.structs import replace as change
from safetensors.torch import save_file

from tests.rigs.census import children
from tests.rigs.present import present
from tests.rigs.proxy import Proxy, address_of
from tests.rigs.receiver_server import DirectControl, ReceiverServer
from tests.rigs.server_handle import ServerProcess, served
from tests.rigs.threads import no_free_thread
from tests.rigs.trainer import MATRICES, content
from tests.rigs.trainer_handle import TrainerProcess, wait_until
from tests.rigs.trainer_process import Settings
from tests.sync.conftest import MakeRig
from titan_grpo.config import WeightSync
from titan_grpo.engines import vllm
from titan_grpo.engines.http import Call, ignore
from titan_grpo.errors import PeerError
from titan_grpo.protocol.lane import LaneEvent, Point
from titan_grpo.protocol.messages import UNUSABLE, Joined, Label, new_run_id
from titan_grpo.protocol.pause_guard import Deadlines, Recover
from titan_grpo.protocol.recovery import Relabel
from titan_grpo.runkey import Key
from titan_grpo.sync import pause_guard
from titan_grpo.sync.lanes import SyncOptions
from titan_grpo.sync.link import ANSWER_S, LinkOptions
from titan_grpo.sync.pause_guard import RENEW_S, PauseGuard, deadlines_of
from titan_grpo.sync.pause_guard_main import (
    Access,
    GuardProcess,
    SupersededError,
    fence,
    recover,
    steps,
    superseded,
)
from titan_grpo.sync.transports.channel import resolve_bind_host

API_KEY = "secret-of-the-control-plane"
URL = "http://127.0.0.1:9"
WAIT_S = 120.0

pytestmark = pytest.mark.e2e


def ended(pid: int) -> bool:
    """Whether a process is over, also if it was waited for."""
    try:
        return bool(psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True


@contextmanager
def training(
    server: ServerProcess | Proxy, folder: Path, **options: Any
) -> Iterator[tuple[TrainerProcess, psutil.Process]]:
    """A trainer whose first version the server holds, and that goes on when it is told to; and its
    pause guard."""
    save_file(MATRICES, folder / "model.safetensors")
    settings = Settings(
        *(str(folder), [server.url], str(folder), 0),
        step_s=0.001,
        rest_s=0.02,
        steps_per_version=1,
        calm=[1, 2, 3],
        deadline_s=15.0,
        lease_s=8.0,
        bucket_bytes=1 << 16,
        api_key=API_KEY,
    )
    with ExitStack() as stack:
        process = TrainerProcess(replace(settings, **options), folder / "trainer.log", os.environ)
        trainer = stack.enter_context(process)
        holding(trainer, published(trainer, 0))
        guard = psutil.Process(children(present(trainer.sync_pid))[0])
        stack.callback(lambda: guard.is_running() and guard.kill())
        yield trainer, guard


def holding(trainer: TrainerProcess, version: int) -> None:
    """Wait until the server holds it."""
    held = {"event": "server", "held": version}
    trainer.wait(lambda e: held.items() <= e.items(), WAIT_S, f"version {version}")


def published(trainer: TrainerProcess, since: int) -> int:
    """Wait for the next version after so many events; its number."""
    said = trainer.wait(lambda e: e["event"] == "published", WAIT_S, "a version", since)
    return int(said["version"])


def next_version(trainer: TrainerProcess) -> int:
    """Have it publish one more; its number."""
    since = trainer.mark()
    trainer.tell("publish", True)
    return published(trainer, since)


def held_at(trainer: TrainerProcess, point: Point, occurrence: int = 1) -> int:
    """Wait until the lane stands at a point of the next version; the version."""
    (url,) = trainer.settings.urls
    trainer.tell("hold", url, point, occurrence)
    version = next_version(trainer)
    trainer.wait(lambda e: e["event"] == "held_at", WAIT_S, point.value)
    return version


def log(folder: Path) -> str:
    """What the pause guard has said."""
    return (folder / "pause_guard.log").read_text()


@pytest.fixture
def server() -> Iterator[ServerProcess]:
    with ServerProcess() as running:
        yield running


def honest(server: ServerProcess) -> dict[str, Any]:
    """What the server says now; whatever a request could ever have met had the weights of its
    label."""
    now: dict[str, Any] = server.run(served())
    for label, seen in now["visible"]:
        if (shown := Label.parse(label)) is not None:
            assert seen == content(shown.version), f"{label} was shown over other weights"
    return now


# Before the load it holds the version before, after it the new one: of each side one point.
KILLED = [
    pytest.param(Point.PAUSE, False, marks=pytest.mark.long),
    (Point.LOAD, False),
    (Point.LABEL, True),
    pytest.param(Point.RESUME, True, marks=pytest.mark.long),
]


@pytest.mark.parametrize(("point", "new"), KILLED, ids=lambda x: getattr(x, "value", str(x)))
def test_a_trainer_killed_in_a_commit_leaves_its_server_generating_under_the_right_label(
    point: Point, new: bool, server: ServerProcess, tmp_path: Path
) -> None:
    with training(server, tmp_path) as (trainer, guard):
        first, version = min(trainer.published()), held_at(trainer, point)
        trainer.kill()
        assert wait_until(lambda: "holds" in log(tmp_path), WAIT_S)
        guard.wait(WAIT_S)
        now = honest(server)
        assert not now["paused"]
        holds = version if new else first
        assert present(Label.parse(now["label"])).version == holds
        assert now["digest"] == content(holds)
        # the receiver that answered the pause guard lost its lane and ended
        assert wait_until(lambda: all(map(ended, server.receiver_pids)), WAIT_S)


def test_a_half_loaded_server_stays_paused_and_says_so(
    server: ServerProcess, tmp_path: Path
) -> None:
    with training(server, tmp_path, apply="streamed") as (trainer, guard):
        held_at(trainer, Point.EXTENT, 6)
        trainer.kill()
        guard.wait(WAIT_S)
        now = honest(server)
        said = log(tmp_path)
        assert (now["intact"], now["paused"], now["label"]) == (False, True, UNUSABLE), said
        assert "half loaded" in said


def test_a_frozen_trainers_server_goes_on_and_its_thawed_lane_can_not_load(
    server: ServerProcess, tmp_path: Path
) -> None:
    with training(server, tmp_path) as (trainer, guard):
        first, second = min(trainer.published()), held_at(trainer, Point.LOAD)
        trainer.signal(signal.SIGSTOP)
        assert wait_until(lambda: "holds" in log(tmp_path), WAIT_S)
        assert wait_until(lambda: not server.run(vllm.is_paused()), WAIT_S)
        assert honest(server)["digest"] == content(first)
        trainer.signal(signal.SIGCONT)
        trainer.tell("go")
        holding(trainer, second)
        third = next_version(trainer)
        holding(trainer, third)
        trainer.stop()
        guard.wait(WAIT_S)
        now = honest(server)
        held = present(Label.parse(now["label"])).version
        assert (now["paused"], now["digest"], held) == (False, content(third), third)
        # the refused load of the old epoch touched nothing: one load per version
        assert now["loads"] == 3


LINK = LinkOptions(WeightSync(commit_deadline_s=5.0), "gloo", "127.0.0.1")


def passing(url: str, point: Point) -> LaneEvent:
    return LaneEvent(point, url, "0001-ab", 2, 1)


def test_a_killed_pause_guard_is_replaced_with_all_that_is_open(
    server: ServerProcess, tmp_path: Path
) -> None:
    guard = PauseGuard(LINK, tmp_path / "log", Deadlines(60.0, 60.0, again_s=0.1, tries=2))
    guard.know(server.url, API_KEY)
    server.run(vllm.pause(5.0))
    guard.observe(passing(server.url, Point.PAUSE))
    first = psutil.Process(guard.pid)
    first.kill()
    assert wait_until(lambda: first.status() == psutil.STATUS_ZOMBIE, WAIT_S)
    guard.observe(passing("http://127.0.0.1:9", Point.PAUSE))
    guard.observe(passing("http://127.0.0.1:9", Point.RESUMED))
    assert guard.pid != first.pid
    second = psutil.Process(guard.pid)
    guard.close()  # with a server still paused: as after a lane that was aborted
    second.wait(WAIT_S)
    assert not server.run(vllm.is_paused())
    assert "127.0.0.1:9 " not in (tmp_path / "log").read_text()


def test_what_ends_a_trainer_does_not_end_its_pause_guard_and_its_secrets_stay_hidden(
    tmp_path: Path,
) -> None:
    key = Key.generate()
    guard = PauseGuard(replace(LINK, run_key=key), tmp_path / "log", Deadlines(60.0, 60.0))
    guard.know("http://127.0.0.1:9", API_KEY)
    process = psutil.Process(guard.pid)
    status = Path(f"/proc/{process.pid}/status")
    ignored = sum(1 << (number - 1) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP))

    def masks() -> dict[str, str]:
        return dict(line.split(":", 1) for line in status.read_text().splitlines())

    assert wait_until(lambda: int(masks()["SigIgn"], 16) & ignored == ignored, WAIT_S)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        process.send_signal(number)
    shown = " ".join([*process.cmdline(), *process.environ().values()])
    assert key.hex() not in shown
    assert API_KEY not in shown
    assert os.getsid(process.pid) == process.pid
    assert process.is_running()
    guard.close()
    process.wait(WAIT_S)
    assert (tmp_path / "log").read_text() == ""


def test_a_log_that_cannot_be_opened_costs_no_pause_guard(tmp_path: Path) -> None:
    guard = PauseGuard(LINK, tmp_path / "gone" / "log", Deadlines(60.0, 60.0))
    assert guard.pid is not None
    process = psutil.Process(guard.pid)
    guard.close()
    process.wait(WAIT_S)


def test_a_pause_guard_that_still_loads_is_not_replaced_and_one_that_hangs_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    guard = PauseGuard(LINK, tmp_path / "log", Deadlines(60.0, 60.0, tries=1))
    first = psutil.Process(guard.pid)
    first.suspend()
    urls = [f"http://127.0.0.1:9/{number}" for number in range(1000)]
    for url in urls:
        guard.know(url, API_KEY)
        guard.observe(passing(url, Point.GREET))
    assert guard.pid == first.pid
    monkeypatch.setattr(pause_guard, "STUCK_S", 0.5)
    threading.Event().wait(0.6)
    guard.observe(passing(urls[0], Point.PAUSE))
    assert guard.pid != first.pid
    assert first.status() == psutil.STATUS_ZOMBIE
    psutil.Process(guard.pid).kill()
    guard.close()


def test_a_quick_commit_is_two_lines_and_a_slow_one_repeats_its_newest_point(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, theirs = socket.socketpair()
    process = subprocess.Popen(["cat"], stdin=subprocess.PIPE)  # ends when this process does
    monkeypatch.setattr(pause_guard, "start_module", lambda *_, **__: (process, ours))

    def points() -> list[Point]:
        lines = map(json.loads, theirs.recv(1 << 20).splitlines())
        return [Point(line["event"]["point"]) for line in lines if line["op"] == "event"]

    commit = Point.PAUSE, Point.LOAD, Point.LABEL, Point.RESUME, Point.RESUMED
    with theirs:
        guard = PauseGuard(LINK, tmp_path / "log", Deadlines(60.0, 60.0))
        for point in (Point.GREET, Point.CONNECTED, *commit):
            guard.renew(URL)
            guard.observe(passing(URL, point))
        assert points() == [Point.GREET, Point.CONNECTED, Point.PAUSE, Point.RESUMED]
        # A point of another connection is no repetition.
        guard.observe(passing(URL, Point.PAUSE))
        guard.observe(replace(passing(URL, Point.LOAD), epoch=4))
        assert points() == [Point.PAUSE, Point.LOAD]
        guard.observe(replace(passing(URL, Point.LABEL), epoch=4))
        monkeypatch.setattr(pause_guard, "RENEW_S", 0.0)
        guard.renew(URL)
        guard.observe(replace(passing(URL, Point.RESUME), epoch=4))
        assert points() == [Point.LABEL, Point.RESUME]
        process.kill()
        guard.close()


def test_a_trainer_with_many_open_files_has_a_pause_guard_too_which_gives_up_a_server_that_is_gone(
    tmp_path: Path,
) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(4096, hard), hard))
    with ExitStack() as stack:
        stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        # more than select() can name
        for _ in range(1100):
            stack.callback(os.close, os.dup(0))
        deadlines = Deadlines(60.0, 60.0, tries=2, first_s=0.05)
        guard = PauseGuard(LINK, tmp_path / "log", deadlines)
        guard.observe(passing("http://127.0.0.1:9", Point.PAUSE))
        process = psutil.Process(guard.pid)
        guard.close()
        process.wait(WAIT_S)
    assert "http://127.0.0.1:9 did not answer in 2 tries" in (tmp_path / "log").read_text()


@pytest.mark.timeout(60)
def test_a_pause_guard_of_many_servers_on_a_host_without_a_free_thread_goes_on_and_tries_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    ours, theirs = socket.socketpair()
    deadlines = {"pause_s": 60.0, "greet_s": 60.0, "tries": 3, "first_s": 0.01}
    access = {"bind_host": "", "call_s": 1.0, "join_s": 1.0, "run_key": ""}
    lines: list[dict[str, object]] = [{"op": "start", "deadlines": deadlines, "access": access}]
    # More than its wake-ups of itself that a socket holds.
    urls = [f"http://127.0.0.1:{port}" for port in range(1, 400)]
    lines += [{"op": "event", "event": passing(url, Point.PAUSE)} for url in urls]
    ours.sendall(b"".join(msgspec.json.encode(line) + b"\n" for line in lines))
    ours.close()  # as a trainer that ends
    with no_free_thread():
        GuardProcess(theirs, os.getppid()).run()
    said = set(caplog.messages)
    assert said >= {f"{url} cannot be recovered now: can't start new thread" for url in urls}
    assert said >= {f"{url} did not answer in 3 tries: it may be paused" for url in urls}


@pytest.mark.long
def test_a_slow_commit_whose_calls_all_end_in_time_is_not_fenced(tmp_path: Path) -> None:
    """A load whose four calls take 20 s together, where the lease is 18 s: each is far from it also
    where many processes share the cores."""
    with (
        ServerProcess(args=["--update-seconds", "5"]) as server,
        Proxy(address_of(server.url)) as proxy,
    ):
        # of a dead lane: the load starts, is refused, ends this one, starts again, and loads
        server.run(Call("POST", "/start_weight_update", WAIT_S, ignore))
        with training(proxy, tmp_path, lease_s=18.0) as (trainer, guard):
            (version,) = trainer.published()
            trainer.stop()
            guard.wait(WAIT_S)
            assert log(tmp_path) == ""
        assert proxy.granted.count("/start_weight_update") == 1
        # of the lane, once: a hello, and the call to map memory
        assert proxy.granted.count("/init_weight_transfer_engine") == 2
        assert honest(server)["digest"] == content(version)


def test_a_lease_covers_one_call_or_a_whole_step_where_another_process_makes_the_calls() -> None:
    """A step is vLLM's load: start, the end of an update that a dead lane left open, start, load;
    then the receiver's report."""
    staged = WeightSync(commit_deadline_s=4.0, backoff_max_s=3.0)
    streamed = replace(staged, lane_deadline_s=8.0, min_rate=64, apply="streamed")
    rest_s = RENEW_S + 2 * ANSWER_S + 3.0
    assert deadlines_of(staged, 0, 0, forwarded=False).pause_s == 4.0 + rest_s
    assert deadlines_of(streamed, 64, 0, forwarded=False).pause_s == 4.0 + 9.0 + rest_s
    assert deadlines_of(staged, 0, 0, forwarded=True).pause_s == RENEW_S + 5 * 4.0
    assert deadlines_of(streamed, 64, 0, forwarded=True).pause_s == RENEW_S + 5 * 4.0 + 9.0


def test_a_connections_lease_covers_its_longest_silence() -> None:
    """One call, the receiver's answer and the communicator; or the manifest and the first bucket of
    memory."""
    quick = WeightSync(
        commit_deadline_s=4.0, connect_deadline_s=10.0, progress_deadline_s=2.0, backoff_max_s=3.0
    )
    rest_s = RENEW_S + 4.0 + 2 * 3.0
    assert deadlines_of(quick, 0, 0, forwarded=False).greet_s == rest_s + 2 * 10.0
    slow = replace(quick, bucket_bytes=1 << 30, min_rate=1 << 20, progress_deadline_s=5.0)
    first_s = 10.0 + 3.0 + 5.0 + 1024.0
    assert deadlines_of(slow, 1, 3 << 20, forwarded=False).greet_s == rest_s + first_s
    assert deadlines_of(quick, 0, 0, forwarded=True).greet_s == 3 * 10.0 + 10 * 4.0 + 2 * 3.0


def test_a_refused_epoch_is_its_own_only_if_it_is_in_force() -> None:
    def refused(run: str, epoch: int, final: bool = False) -> Joined:
        force: dict[str, Any] = {"run_in_force": run, "epoch_in_force": epoch, "term_in_force": 1}
        return Joined(False, "no", "", 1, "", -1, "", True, final=final, **force)

    assert superseded(refused("0001-ab", 3), "0001-ab", 3) == ""
    assert superseded(refused("0001-ab", 3), "0001-ab", 1) == "no"
    assert superseded(refused("0001-ab", 3), "0001-aa", 3) == "no"
    with pytest.raises(PeerError, match="no"):
        superseded(refused("", 0, final=True), "0001-ab", 3)


def test_the_pause_guard_of_a_run_that_was_refused_leaves_the_live_runs_commit_alone(
    rig: MakeRig,
) -> None:
    paused, goes_on = threading.Event(), threading.Event()

    def watch(event: LaneEvent) -> None:
        if event.point is Point.LABEL and event.version == 2:
            paused.set()
            assert goes_on.wait(WAIT_S)

    run = rig("a", watch=watch)
    run.deliver(1)
    run.publish(2)
    assert paused.wait(WAIT_S)
    due = Recover("a", new_run_id(time.time() + 60), 1, doubtful=True, number=1)
    access = Access("127.0.0.1", call_s=WAIT_S, join_s=WAIT_S, run_key="")
    taken = f"the live run {run.pool.run_id} has this server"
    try:
        with pytest.raises(SupersededError, match=taken):
            recover(DirectControl(run.servers["a"]), access, due, threading.Event())
    finally:
        goes_on.set()
    run.everyone(2)
    assert run.server_set.take_error() is None


def test_a_label_of_the_run_on_a_server_without_a_version_is_another_servers() -> None:
    run, control = "r", DirectControl(ReceiverServer("http://a"))
    control.relabel(str(Label(run, 8, "f")))
    fresh = Joined(True, "", "package", 1, "", -1, "", True)
    with pytest.raises(PeerError, match="two servers answer at this URL"):
        steps(control, fresh, run)
    assert steps(control, change(fresh, pid=0), run) == (), "a server without our receiver"
    assert steps(control, fresh, "another run") == ()
    held = change(fresh, held_run=run, held_version=9, held_fingerprint="g")
    assert steps(control, held, run) == (Relabel(str(held.held)),)


class HostSeen(DirectControl):
    """Notes the addresses that receivers are told to connect to."""

    def __init__(self, server: ReceiverServer) -> None:
        super().__init__(server)
        self.hosts: list[str] = []

    def greet(self, hello: Mapping[str, Any]) -> None:
        self.hosts.append(hello["host"])
        super().greet(hello)


@pytest.mark.parametrize("url", ["http://127.0.0.1:8000", "http://192.0.2.7:8000"])
def test_a_server_is_fenced_over_its_own_network_whichever_server_the_run_began_with(
    url: str,
) -> None:
    first = "http://127.0.0.1:8000"
    host = resolve_bind_host("", url)
    if url != first and host == resolve_bind_host("", first):
        pytest.skip("this machine has no route to a network: each server is reached over loopback")
    link = SyncOptions(urls=[first]).link(WeightSync())
    access = Access(link.bind_host, call_s=5.0, join_s=WAIT_S, run_key="")
    with ReceiverServer(url) as server:
        control = HostSeen(server)
        assert fence(control, access, "0001-ab", 2).ok
    assert control.hosts == [host]
