"""Real subprocesses: their end is noticed asleep and within a deadline, and none outlives its
owner."""

import mmap
import os
import resource
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest

from tests.rigs.census import in_group
from titan_grpo.runkey import KEY_VARIABLE
from titan_grpo.subprocesses import (
    Guarded,
    _shared_memory,
    end,
    helper_environment,
    start_module,
    wait_process,
)

LONG = [sys.executable, "-c", "input()"]
SAYS_ITS_ID = "import os, signal; print(os.getpid(), flush=True); signal.pause()"
END_S = 60.0
SHARED = Path("/dev/shm")


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


@pytest.fixture
def guarded() -> Iterator["list[Guarded]"]:
    started: list[Guarded] = []
    yield started
    for one in started:
        one.stop()


def ready(code: str, started: list[Guarded], grace_s: float = 0.5) -> Guarded:
    """Start code that prints a line when it is at work."""
    one = Guarded(python(code), os.environ, grace_s, stdout=subprocess.PIPE, stderr=None)
    started.append(one)
    assert one.guard.stdout is not None
    assert one.guard.stdout.readline()
    one.guard.stdout.close()
    return one


def test_a_helper_gets_no_rank_and_no_run_key() -> None:
    base = {"RANK": "1", "TORCHELASTIC_RUN_ID": "x", KEY_VARIABLE: "secret", "HOME": "/h"}
    out = helper_environment(base | {"LD_PRELOAD": "theirs"}, "LD_PRELOAD")
    assert not {"RANK", "TORCHELASTIC_RUN_ID", KEY_VARIABLE, "LD_PRELOAD"} & set(out)
    assert (out["HOME"], out["OMP_NUM_THREADS"]) == ("/h", "1")


def test_a_process_that_goes_on_is_a_timeout_and_one_that_ended_its_status() -> None:
    with subprocess.Popen(LONG, stdin=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        with pytest.raises(subprocess.TimeoutExpired):
            wait_process(process, 0.01)
        process.kill()
        assert wait_process(process, END_S) == -9
        assert wait_process(process, 0.0) == -9


def test_a_users_command_ends_with_the_ctrl_c_that_ends_the_wait_for_it() -> None:
    # Its session is its own: a terminal's Ctrl-C reaches this process only.
    code = (
        "import os, signal, sys, titan_grpo.subprocesses as s;"
        # In the background of a shell it would be ignored.
        " signal.signal(signal.SIGINT, signal.default_int_handler);"
        f" s.run_command([sys.executable, '-c', {SAYS_ITS_ID!r}], os.environ, {END_S})"
    )
    with subprocess.Popen(python(code), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as ours:
        assert ours.stdout is not None
        command = psutil.Process(int(ours.stdout.readline()))
        ours.send_signal(signal.SIGINT)
        assert psutil.wait_procs([command], timeout=END_S / 2)[1] == []


def test_two_threads_may_wait_for_it_and_none_uses_the_processor_meanwhile() -> None:
    found: list[tuple[int, float]] = []

    def wait(process: "subprocess.Popen[bytes]") -> None:
        before = time.thread_time()
        found.append((wait_process(process, END_S), time.thread_time() - before))

    with subprocess.Popen(LONG, stdin=subprocess.PIPE) as process:
        threads = [threading.Thread(target=wait, args=(process,)) for _ in range(2)]
        for thread in threads:
            thread.start()
        # in which a wait that polls would use far more than is allowed
        threading.Event().wait(1.0)
        process.communicate(b"\n", END_S)
        for thread in threads:
            thread.join(END_S)
    assert [status for status, _ in found] == [0, 0]
    assert max(seconds for _, seconds in found) < 0.1


# A grandchild in a session of its own that ignores SIGTERM, as a hanging rank of torchrun's does.
HANGING = (
    "import signal, os; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(os.getpid(),"
    " flush=True); signal.pause()"
)
# Its name is no text, nor is that of a file that it maps. Any process on the host may be so.
NO_TEXT = (
    "import ctypes, mmap, os; ctypes.CDLL(None).prctl(15, b'\\xff', 0, 0, 0);"
    " file = os.memfd_create('\\udcff'); os.truncate(file, 1); mapped = mmap.mmap(file, 1);"
)
PARENT = (
    f"import subprocess, sys; subprocess.run([sys.executable, '-c', {NO_TEXT + HANGING!r}],"
    " start_new_session=True)"
)


def test_a_grandchild_in_a_session_of_its_own_ends_too_whatever_its_name() -> None:
    process = subprocess.Popen(
        python(PARENT), stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    assert process.stdout is not None
    with process.stdout:
        grandchild = psutil.Process(int(process.stdout.readline()))
    assert _shared_memory(lambda group: group == grandchild.pid) == set()
    end(process, 10.0)
    assert process.returncode == -signal.SIGTERM
    assert psutil.wait_procs([grandchild], timeout=END_S)[1] == []


@pytest.mark.parametrize("guard_killed", [False, True])
def test_stop_kills_a_command_that_ignores_sigterm_and_its_children(
    guarded: list[Guarded], guard_killed: bool
) -> None:
    one = ready(HANGING.replace("signal.pause", "os.fork(); signal.pause"), guarded)
    assert one.poll() is None
    if guard_killed:
        one.guard.kill()
    one.stop()
    if guard_killed:
        assert psutil.wait_procs(in_group(one.group), timeout=END_S)[1] == []
    else:
        assert one.poll() == 128 + signal.SIGKILL
        assert in_group(one.group) == []
    one.stop()


OWNER = """
import os, sys
from titan_grpo.subprocesses import Guarded
one = Guarded([sys.executable, "-c", sys.argv[1]], os.environ, 1.0, stderr=None)
sys.stdin.read()
"""


@pytest.mark.parametrize("killed", ["owner", "guard"])
def test_a_killed_owner_or_guard_takes_the_command_with_it(killed: str) -> None:
    with subprocess.Popen(
        [*python(OWNER), f"import os; {HANGING}"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as owner:
        assert owner.stdout is not None
        command = psutil.Process(int(owner.stdout.readline()))
        (owner if killed == "owner" else command.parent()).kill()
        assert psutil.wait_procs([command], timeout=END_S)[1] == []


def test_a_guard_works_where_its_owner_has_more_than_1024_descriptors_open(
    guarded: list[Guarded],
) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with ExitStack() as stack:
        stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 4096), hard))
        for _ in range(1100):
            stack.callback(os.close, os.open(os.devnull, os.O_RDONLY))
        # A grace that a command which ends by SIGTERM does not need.
        one = ready("import signal; print(1, flush=True); signal.pause()", guarded, END_S)
        with pytest.raises(subprocess.TimeoutExpired):
            wait_process(one.guard, 0.3)
        one.stop()
    assert one.poll() == 128 + signal.SIGTERM


MAPS = """
import mmap, signal
held = []
for path in {paths!r}:
    with open(path, "r+b") as file:
        held.append(mmap.mmap(file.fileno(), 4096))
print(1, flush=True)
signal.pause()
"""


def test_the_shared_memory_of_a_command_goes_with_it_and_that_of_others_stays(
    guarded: list[Guarded],
) -> None:
    with ExitStack() as stack:
        files = [
            stack.enter_context(tempfile.NamedTemporaryFile(dir=SHARED, delete=False))
            for _ in range(2)
        ]
        paths = [Path(file.name) for file in files]
        for path in paths:
            stack.callback(path.unlink, missing_ok=True)
        for file in files:
            file.truncate(4096)
        stack.enter_context(mmap.mmap(files[1].fileno(), 4096))
        ready(MAPS.format(paths=[str(path) for path in paths]), guarded).stop()
        assert [path.exists() for path in paths] == [False, True]


SEMAPHORE = """
import _multiprocessing, signal
held = _multiprocessing.SemLock(1, 1, 1, {name!r}, False)
print(1, flush=True)
signal.pause()
"""


def test_a_named_semaphore_of_a_command_goes_with_it(guarded: list[Guarded]) -> None:
    name = f"titan-grpo-test-{os.getpid()}"
    one = ready(SEMAPHORE.format(name=f"/{name}"), guarded)
    assert (SHARED / f"sem.{name}").exists()
    one.stop()
    assert not (SHARED / f"sem.{name}").exists()


def said_by(folder: Path, source: str, *arguments: str, signalled: int = 0) -> str:
    """What a module of this source says before it ends well. ``signalled``: a signal that it gets
    at once."""
    (folder / "started.py").write_text(source)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(folder), *sys.path])}
    process, sock = start_module("started", *arguments, env=environment)
    process.send_signal(signalled)
    with sock:
        sock.settimeout(END_S)
        said = sock.recv(1 << 10).decode()
    assert wait_process(process, END_S) == 0
    return said


def test_ctrl_c_does_not_end_a_process_that_still_loads_its_module(tmp_path: Path) -> None:
    source = (
        "import os, signal\n"
        "os.kill(os.getpid(), signal.SIGINT)\n"
        "def main(sock, parent):\n"
        "    sock.sendall(b'loaded')\n"
    )
    assert said_by(tmp_path, source) == "loaded"


def test_ctrl_c_does_not_end_a_process_whose_interpreter_still_starts(tmp_path: Path) -> None:
    """Before, it left a traceback and, of a sync process, "it is started again" in a run's log."""
    source = (
        "import signal\n"
        "def main(sock, parent):\n"
        "    sock.sendall(str(signal.pthread_sigmask(signal.SIG_BLOCK, [])).encode())\n"
    )
    assert said_by(tmp_path, source, signalled=signal.SIGINT) == "set()"
    assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == set()


def test_a_guarded_command_takes_ctrl_c_as_any_other_does(guarded: list[Guarded]) -> None:
    one = ready("import signal\nprint(1, flush=True)\nsignal.pause()", guarded)
    one.signal(signal.SIGINT)
    assert wait_process(one.guard, END_S) == 128 + signal.SIGINT


def test_a_module_that_is_started_is_there_once(tmp_path: Path) -> None:
    """Loaded again, under its name, its records would be of other classes than its own."""
    source = (
        "import pickle\n"
        "class Record: pass\n"
        "def main(sock, parent, *arguments):\n"
        "    same = pickle.loads(b'cstarted\\nRecord\\n.') is Record\n"
        "    sock.sendall(f'{same} {parent} {arguments}'.encode())\n"
    )
    assert said_by(tmp_path, source, "-1") == f"True {os.getpid()} ('-1',)"


def test_a_started_module_collects_garbage_and_leaves_out_what_its_imports_made(
    tmp_path: Path,
) -> None:
    source = (
        "import gc\n"
        "meanwhile = gc.isenabled()\n"
        "def main(sock, parent):\n"
        "    left_out = gc.get_freeze_count() > 1000\n"
        "    sock.sendall(f'{meanwhile} {gc.isenabled()} {left_out}'.encode())\n"
    )
    assert said_by(tmp_path, source) == "False True True"
