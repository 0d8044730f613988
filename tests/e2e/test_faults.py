"""Servers that freeze and trainers that are killed, in real runs."""

import signal
import subprocess
from pathlib import Path

import psutil
import pytest

from tests.e2e.conftest import Replay, Runs, Site, Training
from tests.rigs.interpreter import wrapper
from tests.rigs.trainer_handle import wait_until
from titan_grpo.engines.launch import Server, ServerSpec
from titan_grpo.observe.recorder import read_metrics
from titan_grpo.titan.export import checkpoints_in

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

WAIT_S = 60.0


def wait_idle(site: Site, training: Training) -> None:
    """Until the server holds what the last finished step made, so that nothing is on its way for a
    whole step."""
    assert wait_until(
        lambda: site.label().version >= training.step and not site.paused(), WAIT_S
    ), training.log


def receiver_of(server: Server) -> psutil.Process:
    children = psutil.Process(server.group).children(recursive=True)
    (receiver,) = [p for p in children if "titan_grpo.receive.process" in p.cmdline()]
    return receiver


@pytest.mark.long
def test_a_trainer_killed_in_mid_transfer_leaves_the_old_version_and_the_next_one_resumes(
    runs: Runs, site: Site, tmp_path: Path
) -> None:
    # Steps so long that a commit is over well before the next one.
    replay = Replay(tmp_path / "replay.jsonl", prompts=8, group=8, tokens=440).write(40)
    settings = ["--training.seq_len=512", "--checkpoint.interval=1"]
    # However long the two steps take in which nothing moves.
    patient = "--weight_sync.progress_deadline_s=600"
    with runs.start(
        tmp_path, [site.url], *replay.arguments, *settings, patient, "--training.steps=40"
    ) as training:
        training.wait_step(2)
        run = site.label().run_id
        receiver = receiver_of(site.server)
        wait_idle(site, training)
        # With the receiver frozen, the next transfer cannot end, while the engine goes on.
        receiver.suspend()
        held = site.label()
        training.wait_step(training.step + 2)
        training.kill()
        receiver.resume()
    # A commit may have begun between the look at the server and the freeze: it is whole, then, and
    # the pause guard lets the server go.
    assert wait_until(lambda: not site.paused(), WAIT_S)
    site.assert_serves()
    assert site.label().version - held.version in (0, 1)
    assert site.label().run_id == held.run_id == run
    base = max(checkpoints_in(tmp_path / "checkpoint"))
    summary = runs.complete(
        tmp_path, [site.url], *replay.arguments, *settings, f"--training.steps={base + 2}"
    )
    assert (summary["steps"], summary["resumes"]) == (base + 2, [base + 1])
    assert summary["versions_committed"][site.url]["committed"][-3] == base, (
        "the resumed version comes before any rollout"
    )
    assert summary["versions_committed"][site.url]["last"] == base + 2
    assert summary["digest_mismatches"] == 0
    assert site.label().run_id > run
    assert site.label().version == base + 2
    site.assert_serves()


def small_shm(size: str) -> tuple[str, ...]:
    """A command line that runs its arguments with a /dev/shm of that size; empty where namespaces
    are not permitted."""
    inside = f'mount -t tmpfs -o size={size} tmpfs /dev/shm && exec "$@"'
    command = ("unshare", "--mount", "--propagation", "private", "bash", "-c", inside, "bash")
    tried = subprocess.run([*command, "true"], capture_output=True, check=False)
    return () if tried.returncode else command


@pytest.mark.long
def test_one_of_two_servers_is_killed_and_training_goes_on_with_the_other_and_without_dev_shm(
    runs: Runs, site: Site, vllm_python: str, tmp_path: Path
) -> None:
    # The second server lives with the 64 MB of /dev/shm that containers have by default. One image
    # of this model is 1 MB: what 64 MB are to a real one, and more than its trainer gets.
    python = wrapper(tmp_path / "python", *small_shm("64m"), vllm_python)
    spec = ServerSpec(python=python, model=str(runs.model), log_path=str(tmp_path / "second.log"))
    with Server(spec) as second:
        second.wait_healthy(200)
        # More steps than there are before both servers hold a version, on any machine.
        urls, most = [site.url, second.url], "--training.steps=2000"
        with runs.start(tmp_path, urls, most, nproc=2, inside=small_shm("128k")) as training:
            assert training.wait_until(lambda: holds_both(training.shown)), training.log
            second.signal(signal.SIGKILL)
            training.wait_step(training.step + 6)
            failed = f"weight sync: {second.url}"
            assert training.wait_until(lambda: any(failed in line for line in training.shown))
            training.stop()
    steps = [row["step"] for row in read_metrics(tmp_path / "metrics.jsonl")]
    assert steps == list(range(1, len(steps) + 1))
    summary = runs.summary(tmp_path)
    committed = summary["versions_committed"][site.url]["committed"]
    assert committed == sorted(set(committed))
    # A step is made of rollouts of the version before the last one at the earliest; and a stop
    # flushes nothing.
    assert -1 <= steps[-1] - committed[-1] <= 2
    assert summary["versions_committed"][second.url]["last"] < steps[-1]
    assert summary["digest_mismatches"] == 0
    assert any(second.url in error for error in summary["errors"])
    site.assert_serves()


def holds_both(lines: list[str]) -> bool:
    """Whether the last progress line knows the versions of all servers, and each committed one of
    training."""
    held = (
        [word.rpartition("=")[2] for word in lines[-1].partition("versions ")[2].split()]
        if lines
        else []
    )
    return len(held) == 2 and all(v.isdigit() and int(v) > 0 for v in held)
