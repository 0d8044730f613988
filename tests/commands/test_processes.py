"""Running a child whose whole tree ends with it, and reporting its failure in one line."""

import os
import signal
import subprocess
import sys

import psutil
import pytest

from titan_grpo.commands.processes import TrainingFailed, descendants, end_group, run_logged
from titan_grpo.errors import ConfigError


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


def test_the_log_keeps_everything_and_people_see_marked_lines(tmp_path):
    seen: list[str] = []
    run_logged(
        python("print('noise'); print('titan-grpo| step 1/2')"),
        tmp_path / "log",
        os.environ,
        seen.append,
    )
    assert seen == ["step 1/2"]
    assert (tmp_path / "log").read_text() == "noise\ntitan-grpo| step 1/2\n"


@pytest.mark.parametrize(
    ("code", "error", "message"),
    [
        ("print('titan-grpo: bad key'); raise SystemExit(2)", ConfigError, "bad key"),
        (
            "print('failed (exitcode: 2)'); print('titan-grpo: bad key'); raise SystemExit(1)",
            ConfigError,
            "bad key",
        ),
        (
            "raise ValueError('3 rows')",
            TrainingFailed,
            r"ValueError: 3 rows \(exit code 1; .*log\)",
        ),
    ],
    ids=["a refused configuration", "a rank's refused configuration", "an exception"],
)
def test_a_failure_is_one_line(code, error, message, tmp_path):
    with pytest.raises(error, match=message) as caught:
        run_logged(python(code), tmp_path / "log", os.environ, None)
    assert "\n" not in str(caught.value)


# A child in a session of its own that ignores SIGTERM, as a hanging rank of torchrun's does; says
# its pid.
HANGING = (
    "import signal, os; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(os.getpid(),"
    " flush=True); signal.pause()"
)
PARENT = (
    f"import subprocess, sys; subprocess.run([sys.executable, '-c', {HANGING!r}],"
    " start_new_session=True)"
)


def test_a_grandchild_in_a_session_of_its_own_ends_too():
    process = subprocess.Popen(
        python(PARENT), stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    child = psutil.Process(int(process.stdout.readline()))
    pidfds = descendants(process.pid)
    assert len(pidfds) == 1
    os.close(pidfds[0])
    end_group(process)
    assert process.returncode == -signal.SIGTERM
    assert psutil.wait_procs([child], timeout=30)[1] == []
    process.stdout.close()
