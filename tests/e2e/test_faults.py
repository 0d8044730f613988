"""Servers that freeze and trainers that are killed, in real runs."""

import signal
import statistics
import subprocess
import time
from pathlib import Path

import psutil
import pytest

from titan_grpo.engines.launch import Server, ServerSpec
from titan_grpo.observe import names
from titan_grpo.observe.recorder import read_metrics
from titan_grpo.titan.export import versions_in

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

FREEZE_S = 10.0


def busy_seconds(out: Path, first: int, last: int) -> list[float]:
    """Per step: training, and what the weight sync cost the main thread; without the wait for rollouts."""
    rows = [r for r in read_metrics(out / "metrics.jsonl") if first <= r["step"] <= last]
    return [r[names.TRAIN_S] + r[names.BLOCKED_S] for r in rows]


def test_a_server_frozen_for_ten_seconds_costs_the_trainer_nothing(runs, site, make_replay, tmp_path, record_property):
    replay = make_replay(tmp_path / "replay.jsonl", prompts=2, group=4, tokens=8).write(3000)
    deadlines = ["--weight_sync.lane_deadline_s=4", "--weight_sync.commit_deadline_s=4", "--weight_sync.connect_deadline_s=4"]
    arguments = [*replay.arguments, *deadlines, "--training.steps=3000"]
    with runs.start(tmp_path, [site.url], *arguments, nproc=2) as training:
        training.wait_step(30)
        site.server.signal(signal.SIGSTOP)
        frozen_at = training.step
        training.run_on(FREEZE_S)
        thawed_at = training.step
        site.server.signal(signal.SIGCONT)
        # A new lane, and on it the newest version whole.
        assert training.wait_until(lambda: newest_held(training.shown) >= thawed_at, 60), training.log
        training.stop()
    before, during = busy_seconds(tmp_path, 10, frozen_at), busy_seconds(tmp_path, frozen_at + 1, thawed_at)
    rows = [r for r in read_metrics(tmp_path / "metrics.jsonl") if frozen_at < r["step"] <= thawed_at]
    blocked = [r[names.BLOCKED_S] for r in rows]
    figures = f"{len(during)} steps while frozen, median {statistics.median(during):.4f} s (before: "
    figures += f"{statistics.median(before):.4f} s), longest {max(during):.4f} s, blocked median "
    figures += f"{statistics.median(blocked):.5f} s, longest {max(blocked):.5f} s"
    print(figures)
    record_property("freeze", figures)
    assert len(during) >= 20, "the trainer stood still with the server"
    assert statistics.median(during) <= 1.3 * statistics.median(before) + 0.01, figures
    assert max(r[names.STEP_S] for r in rows) < FREEZE_S / 10, figures
    assert statistics.median(blocked) < 0.01, figures
    assert max(blocked) < 0.2, figures
    assert site.label().version >= thawed_at
    site.assert_serves()


def newest_held(lines: list[str]) -> int:
    """The version that the only server holds, as the last progress line says; -1: unknown."""
    held = [line.rpartition("=")[2] for line in lines if line.startswith("step") and "versions" in line]
    return int(held[-1]) if held and held[-1].isdigit() else -1


def wait_idle(site, training) -> None:
    """Until the server holds what the last finished step made, so that nothing is on its way for a whole step."""
    end = time.monotonic() + 60
    while site.label().version < training.step or site.paused():
        assert time.monotonic() < end, training.log


def receiver_of(server: Server) -> psutil.Process:
    children = psutil.Process(server.group).children(recursive=True)
    (receiver,) = [p for p in children if "titan_grpo.receive.process" in p.cmdline()]
    return receiver


def test_a_trainer_killed_in_mid_transfer_leaves_the_old_version_and_the_next_one_resumes(runs, site, make_replay, tmp_path):
    # Steps so long that a commit is over well before the next one.
    replay = make_replay(tmp_path / "replay.jsonl", prompts=8, group=8, tokens=440).write(40)
    settings = ["--training.seq_len=512", "--checkpoint.interval=1"]
    with runs.start(tmp_path, [site.url], *replay.arguments, *settings, "--training.steps=40") as training:
        training.wait_step(2)
        run = site.label().run_id
        receiver = receiver_of(site.server)
        wait_idle(site, training)
        # With the receiver frozen, the next transfer can not end, while the engine goes on.
        receiver.suspend()
        held = site.label()
        training.wait_step(training.step + 2)
        training.kill()
        receiver.resume()
    site.assert_serves()
    assert site.label() == held
    assert held.run_id == run
    base = versions_in(tmp_path / "checkpoint")[-1]
    summary = runs.complete(tmp_path, [site.url], *replay.arguments, *settings, f"--training.steps={base + 2}")
    assert summary["steps"] == 2
    assert summary["versions_committed"][site.url]["committed"][0] == base, "the resumed version comes before any rollout"
    assert summary["versions_committed"][site.url]["last"] == base + 2
    assert summary["digest_mismatches"] == 0
    assert site.label().run_id > run
    assert site.label().version == base + 2
    site.assert_serves()


IN_SMALL_SHM = 'mount -t tmpfs -o size={size} tmpfs /dev/shm && exec "$@"'


def small_shm(size: str) -> tuple[str, ...]:
    """A command line that runs its arguments with a /dev/shm of that size; skips where namespaces are not permitted."""
    command = ("unshare", "--mount", "--propagation", "private", "bash", "-c", IN_SMALL_SHM.format(size=size), "bash")
    tried = subprocess.run([*command, "true"], capture_output=True, text=True, check=False)
    if tried.returncode:
        pytest.skip(f"mount namespaces are not permitted here: {tried.stderr.strip()}")
    return command


def test_a_run_does_not_need_dev_shm(runs, site, small_replay, tmp_path):
    # One image of this model is 1 MB: what 64 MB are to a real one.
    arguments = [*small_replay.arguments, "--training.steps=2"]
    summary = runs.complete(tmp_path, [site.url], *arguments, nproc=2, inside=small_shm("128k"))
    assert summary["versions_committed"][site.url]["last"] == 2
    assert summary["digest_mismatches"] == 0


def test_one_of_two_servers_is_killed_and_training_goes_on_with_the_other(runs, site, vllm_python, tmp_path):
    python = vllm_python
    wrapper = tmp_path / "python"
    # This one lives with the 64 MB of /dev/shm that containers have by default, if we may.
    inside = "unshare --mount --propagation private bash -c 'mount -t tmpfs -o size=64m tmpfs /dev/shm && exec \"$@\"' bash"
    wrapper.write_text(f'#!/bin/bash\nunshare --mount true && exec {inside} {python} "$@"\nexec {python} "$@"\n')
    wrapper.chmod(0o755)
    spec = ServerSpec(python=str(wrapper), model=str(runs.model), log_path=str(tmp_path / "second.log"))
    with Server(spec) as second:
        second.wait_healthy(200)
        with runs.start(tmp_path, [site.url, second.url], "--training.steps=12") as training:
            assert training.wait_until(lambda: training.step >= 4 and holds_both(training.shown)), training.log
            second.signal(signal.SIGKILL)
            killed_at = training.step
            assert training.finish() == 0, training.log
    rows = read_metrics(tmp_path / "metrics.jsonl")
    assert [r["step"] for r in rows] == list(range(1, 13))
    assert killed_at < 12
    summary = runs.summary(tmp_path)
    committed = summary["versions_committed"][site.url]["committed"]
    assert committed == sorted(set(committed))
    assert committed[-1] == 12
    assert summary["versions_committed"][second.url]["last"] < 12
    assert summary["digest_mismatches"] == 0
    assert any(second.url in error for error in summary["errors"])
    site.assert_serves()


def holds_both(lines: list[str]) -> bool:
    """Whether the last progress line knows the versions of all servers, and each committed one of training."""
    held = [word.rpartition("=")[2] for word in lines[-1].partition("versions ")[2].split()] if lines else []
    return len(held) == 2 and all(v.isdigit() and int(v) > 0 for v in held)
