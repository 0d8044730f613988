"""A dump folder belongs to one live run, and its readers know whether that lives."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from titan_grpo.errors import ConfigError
from titan_grpo.observe.run_lock import LOCK, held, lives, restarts

HOLD = """
import sys, time
from pathlib import Path
from titan_grpo.observe.run_lock import held
with held(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_a_second_run_is_refused_with_the_first_ones_process_until_that_is_killed(
    tmp_path: Path,
) -> None:
    command = [sys.executable, "-c", HOLD, str(tmp_path)]
    first = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert first.stdout is not None
        assert first.stdout.readline() == "held\n"
        with pytest.raises(ConfigError, match=rf"live run.* process {first.pid}: "), held(tmp_path):
            pass
    finally:
        first.send_signal(signal.SIGKILL)
        first.communicate(timeout=60)
    with held(tmp_path):
        pass


def test_a_process_that_is_no_torchrun_starts_no_run_again(tmp_path: Path) -> None:
    """It may have the number of one that has ended. (tests/views/test_live.py has a real one.)"""
    command = [sys.executable, "-c", HOLD, str(tmp_path)]
    environment = os.environ | {"TORCHELASTIC_MAX_RESTARTS": "1"}
    subprocess.run(command, env=environment, input=b"", check=True, timeout=60)
    assert f" of torchrun {os.getpid()} " in (tmp_path / LOCK).read_text()
    assert lives(tmp_path) is False
    assert not restarts(tmp_path)


FORK = """
import os, sys
from pathlib import Path
from titan_grpo.observe.run_lock import held
with held(Path(sys.argv[1])):
    if os.fork():
        os._exit(0)
    os.write(1, b"forked\\n")
    sys.stdin.read()
"""


def test_a_fork_that_outlives_the_run_does_not_keep_its_lock(tmp_path: Path) -> None:
    command = [sys.executable, "-c", FORK, str(tmp_path)]
    run = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert run.stdin is not None
    assert run.stdout is not None
    with run.stdin, run.stdout:
        assert run.stdout.readline() == "forked\n"
        assert run.wait(60) == 0
        assert lives(tmp_path) is False


def test_a_folder_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "out").write_text("")
    with (
        pytest.raises(ConfigError, match=r"job\.dump_folder must be a directory"),
        held(tmp_path / "out"),
    ):
        pass


def test_a_folder_may_be_a_link_to_one_that_is_not_there_yet(tmp_path: Path) -> None:
    (tmp_path / "out").symlink_to(tmp_path / "scratch" / "run")
    with held(tmp_path / "out"):
        assert lives(tmp_path / "scratch" / "run") is True


def test_a_full_disk_is_refused_before_anything_starts(tmp_path: Path) -> None:
    (tmp_path / LOCK).symlink_to("/dev/full")
    with pytest.raises(ConfigError, match="No space left on device; make room"), held(tmp_path):
        pass


def test_a_run_lives_as_long_as_it_holds_its_lock(tmp_path: Path) -> None:
    assert lives(tmp_path) is None
    with held(tmp_path):
        assert lives(tmp_path) is True
    # The number in the file is that of a live process: it may be another's by now.
    assert lives(tmp_path) is False


def test_whether_another_hosts_run_lives_is_known_only_while_its_lock_is_seen(
    tmp_path: Path,
) -> None:
    with held(tmp_path):
        (tmp_path / LOCK).write_text("elsewhere process 1\n")
        assert lives(tmp_path) is True
    assert lives(tmp_path) is None


def test_a_run_in_whose_folder_no_lock_can_be_asked_for_is_unknown(tmp_path: Path) -> None:
    (tmp_path / LOCK).mkdir()
    assert lives(tmp_path) is None
