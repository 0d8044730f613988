"""A server that is killed in a real run."""

import signal
import subprocess
from pathlib import Path

import pytest

from tests.e2e.conftest import Runs, Site
from tests.rigs.interpreter import wrapper
from titan_grpo.engines.launch import Server, ServerSpec
from titan_grpo.observe.recorder import read_metrics

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]


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
