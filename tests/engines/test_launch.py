"""Launching: the command, the environment, and that nothing outlives its owner. No vLLM here; e2e has the real one."""

import os
import signal
import subprocess
import sys
import textwrap

import psutil
import pytest

from titan_grpo.engines.launch import Server, ServerSpec, command, environment
from titan_grpo.errors import ServerUnreachable
from titan_grpo.runkey import KEY_FILE_VARIABLE, KEY_VARIABLE, Key


def stand_in(tmp_path, body: str) -> str:
    """An executable that takes vLLM's command line and runs ``body`` in place of a server."""
    path = tmp_path / "python"
    path.write_text(f"#!{sys.executable}\n{textwrap.dedent(body)}")
    path.chmod(0o755)
    return str(path)


def spec(tmp_path, body: str) -> ServerSpec:
    return ServerSpec(python=stand_in(tmp_path, body), model="m", log_path=str(tmp_path / "log" / "server.log"))


def test_torchrun_variables_do_not_reach_the_server():
    base = {"RANK": "1", "MASTER_ADDR": "x", "TORCHELASTIC_USE_AGENT_STORE": "True", "OMP_NUM_THREADS": "9", "HOME": "/h"}
    out = environment(base, ServerSpec("py", "m", "log", port=1, cpu=False))
    assert not {"RANK", "MASTER_ADDR", "TORCHELASTIC_USE_AGENT_STORE", "OMP_NUM_THREADS"} & set(out)
    assert (out["HOME"], out["VLLM_SERVER_DEV_MODE"]) == ("/h", "1")


def test_a_run_key_goes_by_environment_in_place_of_any_other_and_is_not_shown():
    key = Key.generate()
    spec = ServerSpec("py", "m", "log", port=1, run_key=key)
    out = environment({KEY_VARIABLE: "the trainer's", KEY_FILE_VARIABLE: "file"}, spec)
    assert out[KEY_VARIABLE] == key.hex()
    assert KEY_FILE_VARIABLE not in out
    assert not any(key.hex() in text for text in (*command(spec), repr(spec)))
    assert environment({KEY_VARIABLE: "k"}, ServerSpec("py", "m", "log", port=1))[KEY_VARIABLE] == "k"


def test_the_backend_of_our_plugin_is_asked_for_unless_switched_off():
    assert '{"backend": "titan_grpo"}' in command(ServerSpec("py", "m", "log", port=1))
    assert "--weight-transfer-config" not in command(ServerSpec("py", "m", "log", port=1, weight_transfer=False))


def test_a_server_that_shares_cores_has_no_spinning_worker_process():
    shared, own = ServerSpec("py", "m", "log", port=1), ServerSpec("py", "m", "log", port=1, cpu_threads=0)
    assert "uni" in command(shared)
    assert environment({}, shared)["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"
    assert "uni" not in command(own)
    assert "VLLM_ENABLE_V1_MULTIPROCESSING" not in environment({}, own)


def test_a_server_that_ends_at_once_is_reported_with_the_end_of_its_log(tmp_path):
    dying = "import sys; print('no such model', flush=True); sys.exit(3)"
    with Server(spec(tmp_path, dying)) as server, pytest.raises(ServerUnreachable, match=r"exit code 3(.|\n)*no such model"):
        server.wait_healthy(30)


def test_stop_kills_a_server_that_ignores_sigterm_and_its_children(tmp_path):
    stubborn = """\
        import os, signal, sys
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        pid = os.fork()
        signal.pause()
    """
    server = Server(spec(tmp_path, stubborn), stop_grace_s=0.5)
    leader = psutil.Process(server.group)
    server.stop()
    assert not leader.is_running()
    assert not [p for p in psutil.process_iter() if _group(p.pid) == server.group]
    server.stop()


def test_a_killed_owner_takes_its_server_with_it(tmp_path):
    path = stand_in(tmp_path, "import signal; signal.pause()")
    owner_code = f"""
import sys
from titan_grpo.engines.launch import Server, ServerSpec
server = Server(ServerSpec({path!r}, "m", {str(tmp_path / "log")!r}), stop_grace_s=1.0)
print(server.group, flush=True)
sys.stdin.read()
"""
    owner = subprocess.Popen([sys.executable, "-c", owner_code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    group = int(owner.stdout.readline())
    server = psutil.Process(group)
    owner.send_signal(signal.SIGKILL)
    owner.wait(10)
    _, alive = psutil.wait_procs([server], timeout=15)
    assert not alive


def _group(pid: int) -> int:
    try:
        return os.getpgid(pid)
    except ProcessLookupError:
        return -1
