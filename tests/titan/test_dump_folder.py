"""A dump folder belongs to one live run, and a disk that refuses is one line."""

import errno
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from titan_grpo.errors import ConfigError
from titan_grpo.titan.dump_folder import LOCK, held, write_failure

HOLD = """
import sys, time
from pathlib import Path
from titan_grpo.titan.dump_folder import held
with held(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_a_second_run_is_refused_with_the_first_ones_process_until_that_is_killed(tmp_path) -> None:
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


def test_a_folder_that_is_a_file_is_refused(tmp_path) -> None:
    (tmp_path / "out").write_text("")
    with (
        pytest.raises(ConfigError, match=r"job\.dump_folder must be a directory"),
        held(tmp_path / "out"),
    ):
        pass


def test_a_full_disk_is_refused_before_anything_starts(tmp_path) -> None:
    (tmp_path / LOCK).symlink_to("/dev/full")
    with pytest.raises(ConfigError, match="No space left on device; make room"), held(tmp_path):
        pass


def test_an_error_of_the_disk_is_found_where_a_library_wrapped_it() -> None:
    folder = Path("out")
    full = OSError(errno.ENOSPC, "No space left on device")
    wrapped = RuntimeError("unexpected pos")
    wrapped.__context__ = full
    of_ranks = Exception("checkpoint")
    of_ranks.failures = {1: (wrapped, None)}  # type: ignore[attr-defined]
    for error in (full, wrapped, of_ranks):
        assert "No space left on device" in write_failure(error, folder)
    of_torch = RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 704 vs 598")
    assert "unexpected pos" in write_failure(of_torch, folder)
    assert "Permission denied" in write_failure(
        PermissionError(errno.EACCES, "Permission denied", "out/summary.json"), folder
    )
    assert write_failure(ConnectionRefusedError(111, "refused"), folder) == ""
