"""How ranks that refuse their configuration say it."""

import gc
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from titan_grpo import train
from titan_grpo.errors import ConfigError
from titan_grpo.observe.recorder import Recorder
from titan_grpo.observe.report import write_report
from titan_grpo.subprocesses import ENDING
from titan_grpo.train import refuse, restart_notes, stopped_before


def test_a_hosts_first_rank_says_it(capsys: pytest.CaptureFixture[str]) -> None:
    refuse("no such model", {"RANK": "8", "LOCAL_RANK": "0"})
    refuse("no torchrun", {})
    assert capsys.readouterr().err == "titan-grpo: no such model\ntitan-grpo: no torchrun\n"


def test_another_rank_says_what_it_alone_knows(capsys: pytest.CaptureFixture[str]) -> None:
    refuse("no such file", {"RANK": "9", "LOCAL_RANK": "1"}, wait_s=0.01)
    assert capsys.readouterr().err == "titan-grpo: rank 9: no such file\n"


ENDED_BY = """
import os, sys
from titan_grpo import errors, train
def run(argv):
    print("here", flush=True)
    raise getattr(errors, argv[0])("why")
train._run = run
os.environ |= {"RANK": "1", "LOCAL_RANK": "1"}
sys.exit(train.main(sys.argv[1:]))
"""


@pytest.mark.parametrize("error", ["ConfigError", "RunStopped", "AlertStop", "UnhealthyError"])
def test_a_rank_that_ends_as_all_do_leaves_the_first_one_the_time_to_close_and_to_say_why(
    error: str,
) -> None:
    """Before, torchrun ended rank 0 in the middle of its closing, as soon as another rank had
    ended by an alert."""
    process = subprocess.Popen(
        [sys.executable, "-c", ENDED_BY, error],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "here\n"
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.5)
    process.terminate()
    assert process.communicate(timeout=20) == ("", "")


@pytest.mark.parametrize("error", ["ServerUnreachable", "ServerUnfit", "SyncError"])
def test_an_end_that_is_no_bug_of_ours_is_one_line_without_a_traceback(error: str) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", ENDED_BY, error], capture_output=True, text=True, timeout=60
    )
    assert (ended.returncode, ended.stderr) == (1, "titan-grpo: rank 1: why\n")


REPORTED = """
import os, sys
from torch.distributed.elastic.multiprocessing.errors import record
from titan_grpo import errors, train
@record
def run(argv):
    raise getattr(errors, argv[0])("why")
train._run = run
sys.exit(train.main(sys.argv[1:]))
"""


def test_torchruns_report_has_no_stack_of_an_end_that_is_no_bug_of_ours(tmp_path: Path) -> None:
    for error in ("TaskError", "AlertStop", "DataError", "ProtocolError"):
        report = tmp_path / error
        subprocess.run(
            [sys.executable, "-c", REPORTED, error],
            env=dict(os.environ, TORCHELASTIC_ERROR_FILE=str(report)),
            capture_output=True,
            timeout=60,
        )
    assert [path.name for path in tmp_path.iterdir()] == ["ProtocolError"]


def test_a_rank_collects_garbage_once_it_has_imported_what_it_trains_with(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    enabled = []

    def start(argv: list[str]) -> Callable[[], None]:
        enabled.append(gc.isenabled())
        if argv:
            raise ConfigError(*argv)
        return lambda: enabled.append(gc.isenabled())

    monkeypatch.setattr(train, "_start", start)
    train._run([])
    assert enabled == [False, True]
    with pytest.raises(ConfigError):
        train._run(["refused"])
    assert gc.isenabled()


STOPPED = """
import threading
from titan_grpo.subprocesses import stop_on_signals
stop_on_signals()
try:
    print("here", flush=True)
    for _ in range(600):  # a signal that comes just before a wait does not end that one
        threading.Event().wait(0.1)
finally:
    print("closed")
"""


@pytest.mark.parametrize("number", ENDING)
def test_each_signal_that_ends_a_job_lets_a_rank_close_what_it_has_started(number: int) -> None:
    """A terminal's end (SIGHUP) left no summary.json."""
    process = subprocess.Popen(
        [sys.executable, "-c", STOPPED], stdout=subprocess.PIPE, text=True, process_group=0
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "here\n"
    process.send_signal(number)
    assert process.communicate(timeout=20)[0] == "closed\n"
    assert process.returncode == 128 + number


VERIFYING = """
import threading
from titan_grpo.titan import verify_train
def parse(argv):
    try:
        print("here", flush=True)
        for _ in range(600):
            threading.Event().wait(0.1)
    finally:
        print("closed")
verify_train.parse = parse
verify_train.main(["--evidence", "none", "--"])
"""

PARENT = "import subprocess, sys; subprocess.run([sys.executable, '-c', sys.argv[1]])"


def test_a_rank_of_a_verification_ends_in_the_ordinary_way_when_torchrun_is_killed() -> None:
    """Before, it trained on."""
    torchrun = subprocess.Popen(
        [sys.executable, "-c", PARENT, VERIFYING], stdout=subprocess.PIPE, text=True
    )
    assert torchrun.stdout is not None
    assert torchrun.stdout.readline() == "here\n"
    torchrun.kill()
    assert torchrun.communicate(timeout=20)[0] == "closed\n"


@pytest.mark.parametrize("number", ENDING)
def test_a_signal_while_torch_is_imported_ends_a_rank_without_a_traceback(number: int) -> None:
    process = subprocess.Popen(
        [sys.executable, "-X", "importtime", "-m", "titan_grpo.train"],
        stderr=subprocess.PIPE,
        text=True,
        process_group=0,
    )
    assert process.stderr is not None
    assert any("| " in line and line.split()[-1] == "torch._C" for line in process.stderr)
    process.send_signal(number)
    said = process.communicate(timeout=60)[1]
    assert [line for line in said.splitlines() if not line.startswith("import time:")] == []
    assert process.returncode == 128 + number


def test_the_start_says_when_ranks_that_torchrun_restarts_could_not_connect() -> None:
    shared = {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_MAX_RESTARTS": "2"}
    (note,) = restart_notes(shared)
    assert "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1" in note
    assert "--rdzv_backend c10d" in note, "with a static rendezvous the variable alone is no remedy"
    assert restart_notes(shared | {"TORCHELASTIC_USE_AGENT_STORE": "False"}) == []
    assert restart_notes(shared | {"TORCHELASTIC_MAX_RESTARTS": "0"}) == []
    assert restart_notes({}) == []


@pytest.mark.parametrize(
    ("ended_by", "again"),
    [
        ("AlertStop: step 3: alerts.stop reward/mean < 0.1 for 3 (0)", False),
        ("UnhealthyError: step 3: the loss is nan", False),
        ("RuntimeError: another rank ended", True),
        ("SIGTERM", True),
    ],
)
def test_a_run_that_its_own_rule_ended_is_not_trained_on_by_a_restart_of_torchruns(
    tmp_path: Path, ended_by: str, again: bool
) -> None:
    """Before, a run with --max-restarts trained on after alerts.stop, as often as that allows."""
    restarted = {"TORCHELASTIC_RESTART_COUNT": "1"}
    assert stopped_before(str(tmp_path), restarted) == "", "nothing has ended yet"
    write_report(Recorder(tmp_path), "run", "async", ended_by)
    assert stopped_before(str(tmp_path), restarted) == ("" if again else ended_by)
    assert stopped_before(str(tmp_path), {"TORCHELASTIC_RESTART_COUNT": "0"}) == "", "by a user"
