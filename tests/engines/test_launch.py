"""Launching: the command, the environment, and that nothing outlives its owner. No engine here; e2e
has the real ones."""

import contextlib
import json
import os
import queue
import shlex
import signal
import socket
import sys
import textwrap
from dataclasses import replace
from pathlib import Path
from resource import RLIMIT_NOFILE, getrlimit, setrlimit
from typing import Any

import pytest

from tests.rigs.trainer_handle import wait_until
from titan_grpo.engines import launch, sglang, vllm
from titan_grpo.engines.generation import RETURN_ROUTES
from titan_grpo.engines.launch import (
    Restarts,
    Server,
    ServerGroup,
    ServerSpec,
    command,
    environment,
)
from titan_grpo.errors import ServerUnreachable, TitanGrpoError
from titan_grpo.patches import sglang_cpu
from titan_grpo.runkey import KEY_FILE_VARIABLE, KEY_VARIABLE, Key


def stand_in(tmp_path: Path, body: str) -> str:
    """An executable that takes an engine's command line and runs ``body`` in place of a server."""
    path = tmp_path / "python"
    path.write_text(f"#!{sys.executable}\n{textwrap.dedent(body)}")
    path.chmod(0o755)
    return str(path)


def spec(tmp_path: Path, body: str) -> ServerSpec:
    return ServerSpec(
        python=stand_in(tmp_path, body), model="m", log_path=str(tmp_path / "log" / "server.log")
    )


def of(engine: str = "vllm", **settings: Any) -> ServerSpec:
    return ServerSpec("py", "m", "log", engine=engine, port=1, **settings)


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_torchruns_variables_and_the_trainers_allocator_do_not_reach_the_server(
    engine: str,
) -> None:
    names = ["RANK", "MASTER_ADDR", "TORCHELASTIC_USE_AGENT_STORE", "OMP_NUM_THREADS"]
    names += ["PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"]
    out = environment(dict.fromkeys(names, "9") | {"HOME": "/h"}, of(engine, cpu=False))
    assert not {*names, "PYTHONPATH"} & set(out)
    assert out["HOME"] == "/h"


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_a_run_key_goes_by_environment_in_place_of_any_other_and_is_not_shown(engine: str) -> None:
    key = Key.generate()
    spec = of(engine, run_key=key)
    out = environment({KEY_VARIABLE: "the trainer's", KEY_FILE_VARIABLE: "file"}, spec)
    assert out[KEY_VARIABLE] == key.hex()
    assert KEY_FILE_VARIABLE not in out
    assert not any(key.hex() in text for text in (*command(spec), repr(spec)))
    assert environment({KEY_VARIABLE: "k"}, of())[KEY_VARIABLE] == "k"


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_a_proxy_is_not_asked_for_the_servers_own_address(engine: str) -> None:
    spec = of(engine)
    proxy = {"http_proxy": "http://proxy:3128"}
    assert environment(proxy, spec)["NO_PROXY"] == "127.0.0.1"
    assert environment(proxy | {"NO_PROXY": "a.b"}, spec)["no_proxy"] == "a.b,127.0.0.1"
    for known in ("*", "a.b, 127.0.0.1"):
        assert "NO_PROXY" not in environment(proxy | {"no_proxy": known}, spec)
    assert not {"NO_PROXY", "no_proxy"} & set(environment({}, spec))


def test_a_vllm_wants_no_key_but_the_runs() -> None:
    assert "VLLM_API_KEY" not in environment({"VLLM_API_KEY": "another server's"}, of())


def test_our_plugin_and_middleware_are_asked_for_unless_switched_off() -> None:
    asked = {*command(of()), *command(of("sglang"))}
    assert {'{"backend": "titan_grpo"}', vllm.MIDDLEWARE, sglang.LOADER} < asked
    without = command(of(weight_transfer=False))
    assert not {"--weight-transfer-config", "--middleware"} & set(without)
    assert "--custom-weight-loader" not in command(of("sglang", weight_transfer=False))


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_the_experts_of_tokens_are_asked_for_where_a_run_replays_them(engine: str) -> None:
    assert RETURN_ROUTES in command(of(engine, routes=True))
    assert RETURN_ROUTES not in command(of(engine))


def test_a_server_that_shares_cores_has_no_spinning_worker_process() -> None:
    shared, own = of(), of(cpu_threads=0)
    assert "uni" in command(shared)
    assert environment({}, shared)["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"
    assert "uni" not in command(own)
    assert "VLLM_ENABLE_V1_MULTIPROCESSING" not in environment({}, own)


def test_sglang_gets_the_stand_ins_on_a_cpu_only_and_before_any_other_path() -> None:
    on_cpu = environment({"PYTHONPATH": "theirs"}, of("sglang", env={"PYTHONPATH": "ours"}))
    assert on_cpu["PYTHONPATH"] == os.pathsep.join((sglang_cpu.directory(), "ours"))
    assert environment({"PYTHONPATH": "theirs"}, of("sglang"))["PYTHONPATH"].endswith(
        f"{os.pathsep}theirs"
    )
    assert (on_cpu["SGLANG_USE_CPU_ENGINE"], on_cpu["CUDA_VISIBLE_DEVICES"]) == ("1", "")
    on_gpu = environment({}, of("sglang", cpu=False))
    assert not {"PYTHONPATH", "SGLANG_USE_CPU_ENGINE", "CUDA_VISIBLE_DEVICES"} & set(on_gpu)
    assert "--device" in command(of("sglang"))
    assert "--device" not in command(of("sglang", cpu=False))


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_the_start_commands_of_the_docs_are_those_that_we_use(engine: str, root: Path) -> None:
    page = (root / "docs" / "first_job.md").read_text().replace("\\\n", " ")
    module = {"vllm": "vllm.entrypoints.openai.api_server", "sglang": "sglang.launch_server"}[
        engine
    ]
    (line,) = [
        line for line in page.splitlines() if f".venv-{engine}/bin/python -m {module}" in line
    ]
    spec = ServerSpec("py", "MODEL", "log", engine=engine, port=1)
    ours, written = command(spec)[1:], shlex.split(line)
    # What a launched server is told of its own place and size, and the noise that it need not make.
    left_out = {"--host", "--port", "--dtype", "--max-num-seqs", "--max-model-len"}
    left_out |= {"--context-length", "--max-running-requests"}
    left_out |= {"--log-level-http", "--disable-uvicorn-access-log", "--disable-log-stats"}
    assert {flag for flag in ours if flag.startswith("--")} - left_out == {
        flag for flag in written if flag.startswith("--")
    }
    set_there = dict(
        word.split("=", 1) for word in written if "=" in word and not word.startswith(("-", "{"))
    )
    set_there.pop("PYTHONPATH", None)
    env = environment({}, spec)
    assert {name: env[name] for name in set_there} == set_there


def test_ranks_of_sglang_on_a_cpu_are_told_their_cores() -> None:
    two = environment({}, of("sglang", tensor_parallel=2))
    assert two["SGLANG_CPU_OMP_THREADS_BIND"].count("|") == 1
    few = sglang.environment({}, of("sglang", tensor_parallel=3), [4, 5])
    assert few["SGLANG_CPU_OMP_THREADS_BIND"] == "4|5|4"
    assert "SGLANG_CPU_OMP_THREADS_BIND" not in environment({}, of("sglang"))


def test_the_keys_of_an_engine_are_not_on_its_command_line_and_not_shown() -> None:
    for engine in ("vllm", "sglang"):
        spec = of(engine, api_key="ours", admin_key="boss")
        assert not any(
            key in text for text in (*command(spec, "keys"), repr(spec)) for key in ("ours", "boss")
        )
    assert environment({}, of(api_key="ours"))["VLLM_API_KEY"] == "ours"
    assert json.loads(sglang.keys(of("sglang", api_key="ours", admin_key="boss"))) == {
        "api-key": "ours",
        "admin-api-key": "boss",
    }
    assert sglang.keys(of("sglang")) == ""


READS_ITS_KEYS = """\
    import http.server, os, stat, sys
    class Healthy(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()
    path = sys.argv[sys.argv.index("--config") + 1]
    print(oct(stat.S_IMODE(os.stat(path).st_mode)), open(path).read(), flush=True)
    port = int(sys.argv[sys.argv.index("--port") + 1])
    http.server.HTTPServer(("127.0.0.1", port), Healthy).serve_forever()
"""


def test_sglangs_keys_are_in_a_file_of_ours_alone_and_only_until_it_runs(tmp_path: Path) -> None:
    log = tmp_path / "log" / "server.log"
    with Server(replace(spec(tmp_path, READS_ITS_KEYS), engine="sglang", api_key="ours")) as server:
        server.wait_healthy(90)
        assert [path.name for path in log.parent.iterdir()] == ["server.log"]
    assert log.read_text().startswith('0o600 {"api-key": "ours"}')
    assert log.stat().st_mode & 0o077 == 0, "SGLang writes its arguments, so its keys, into its log"


def test_a_server_that_cannot_be_started_leaves_no_file_with_its_keys(tmp_path: Path) -> None:
    unusable = replace(spec(tmp_path, ""), engine="sglang", api_key="ours", model="a\0b")
    with pytest.raises(ValueError, match="null byte"):
        Server(unusable)
    assert [path.name for path in (tmp_path / "log").iterdir()] == ["server.log"]


def test_the_port_of_a_server_that_starts_is_nobody_elses(tmp_path: Path) -> None:
    def take(port: int) -> None:
        with socket.socket() as other:
            other.bind(("127.0.0.1", port))

    with (
        Server(spec(tmp_path, "import signal; signal.pause()")) as server,
        pytest.raises(OSError, match="in use"),
    ):
        take(server.spec.port)
    take(server.spec.port)


def test_a_server_whose_engine_fails_is_reported_with_the_engines_error_and_not_only_the_last(
    tmp_path: Path,
) -> None:
    dying = r"""
        import sys
        print("WARNING [core.py:1] Failed to import from a.b: ModuleNotFoundError('a')")
        print("(EngineCore pid=7) ERROR 11-26 11:49:21 [core.py:1510] Traceback (most recent)")
        print("(EngineCore pid=7) ERROR 11-26 11:49:21 [core.py:1510]     raise OSError(text)")
        print("(EngineCore pid=7) ERROR 11-26 11:49:21 [core.py:1510] a.b.StartError: no kernels")
        print("  File \"core_client.py\", line 682, in __init__\n" * 100)
        print("RuntimeError: the engine failed, see above", flush=True)
        sys.exit(1)
    """
    with Server(spec(tmp_path, dying)) as server, pytest.raises(ServerUnreachable) as failed:
        server.wait_healthy(90)
    first, *rest = str(failed.value).splitlines()
    assert (
        "exit code 1 before it was healthy, its first error: a.b.StartError: no kernels;" in first
    )
    assert rest[-1] == "RuntimeError: the engine failed, see above"


def test_a_vllm_that_reads_calls_of_tools_gets_the_options_beside_its_parsers_name() -> None:
    name = ("--tool-call-parser", "hermes")
    asked = command(of(tool_calls=True, args=name))
    assert {"--enable-scale-out", "--enable-auto-tool-choice"} < set(asked)
    assert asked[-2:] == [*name]
    assert command(of("sglang", tool_calls=True, args=name))[-2:] == [*name]


def test_the_log_of_a_server_has_nothing_of_one_that_still_ends_and_that_ones_stays(
    tmp_path: Path,
) -> None:
    """A run that torchrun starts again starts its servers while those of the killed one end. These
    wrote behind a gap of zeros in the new log; later, theirs was removed, which may say why."""
    ending = """
        import signal, sys
        signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended"))
        print("up " * 100, flush=True)
        signal.pause()
    """
    with Server(spec(tmp_path, ending)) as first:
        log = Path(first.spec.log_path)
        assert wait_until(lambda: b"up" in log.read_bytes(), 60.0)
        with Server(spec(tmp_path, 'print("new", flush=True)')) as second:
            assert wait_until(lambda: not second.alive(), 60.0)
        first.stop()
    assert log.read_bytes() == b"new\n"
    assert log.with_name("server-2.log").read_bytes() == b"up " * 100 + b"\nended\n"


SERVING = """
    import os, sys
    from http.server import BaseHTTPRequestHandler, HTTPServer
    from pathlib import Path

    folder = Path(sys.argv[0]).parent
    if (folder / "broken").exists():
        raise OSError("no GPU")

    class Healthy(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.end_headers()

    (folder / "pid").write_text(str(os.getpid()))
    HTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Healthy).serve_forever()
"""


def test_a_runs_server_that_ends_is_started_again_at_its_port_unless_it_never_answered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before, a run on servers of its own waited half an hour for one that had crashed."""
    monkeypatch.setattr(launch, "LOOK_S", 0.05)
    said, failed = queue.SimpleQueue[str](), queue.SimpleQueue[TitanGrpoError]()
    group = ServerGroup([spec(tmp_path, SERVING)])

    def kill() -> None:
        os.kill(int((tmp_path / "pid").read_text()), signal.SIGKILL)

    with contextlib.ExitStack() as ends:
        ends.callback(group.stop)
        group.start()
        group.wait_healthy(60)
        (url,) = group.urls
        group.watch(Restarts(lambda: [url], said.put, failed.put))
        kill()
        again = "the launched server {} ended with signal 9 (out of memory, maybe): it is started"
        assert said.get(timeout=60) == again.format("server") + " again"
        shown = ""

        def healthy() -> bool:
            nonlocal shown
            shown += capsys.readouterr().err
            return shown.count(f"vllm at {url} is healthy after ") == 2

        assert wait_until(healthy, 60.0)
        assert group.urls == (url,)
        (tmp_path / "broken").touch()
        kill()
        assert said.get(timeout=60) == again.format("server-2") + " again"
        last = "the launched server server-3 ended with exit code 1"
        why = " (its first error: OSError: no GPU)"
        assert said.get(timeout=60) == f"{last} before it was healthy: it is not started again{why}"
        assert str(failed.get(timeout=60)) == f"no server is left: {last}{why}"
    assert {path.name for path in (tmp_path / "log").iterdir()} == {
        f"server{number}.log" for number in ("", "-2", "-3")
    }


def test_a_server_for_which_the_system_has_no_descriptor_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "LOOK_S", 0.05)
    said, failed = queue.SimpleQueue[str](), queue.SimpleQueue[TitanGrpoError]()
    group = ServerGroup([spec(tmp_path, SERVING)])
    with contextlib.ExitStack() as ends:
        ends.callback(group.stop)
        group.start()
        group.wait_healthy(60)
        (url,) = group.urls
        group.watch(Restarts(lambda: [url], said.put, failed.put))
        pid, (soft, hard) = int((tmp_path / "pid").read_text()), getrlimit(RLIMIT_NOFILE)
        ends.callback(setrlimit, RLIMIT_NOFILE, (soft, hard))
        setrlimit(RLIMIT_NOFILE, (3, hard))  # also for its log, which it cannot read then
        os.kill(pid, signal.SIGKILL)
        ended = "the launched server server ended with signal 9 (out of memory, maybe)"
        assert said.get(timeout=60) == f"{ended}: it is started again"
        assert said.get(timeout=60).startswith(f"{url} cannot be started again: ")
        assert said.get(timeout=60) == f"{ended} before it was healthy: it is not started again"
        assert str(failed.get(timeout=60)) == f"no server is left: {ended}"


def test_a_server_that_has_left_the_run_is_not_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Server(spec(tmp_path, "")) as server:
        assert wait_until(lambda: not server.alive(), 60.0)
        lines: list[object] = []
        assert not Restarts(lambda: ["http://another"], lines.append, lines.append).look(server)
        assert lines == []
        assert Restarts(lambda: [server.url], lines.append, lines.append).look(server)
        monkeypatch.setattr(launch, "received", [signal.SIGTERM])
        assert not Restarts(lambda: [server.url], lines.append, lines.append).look(server)
