import re
import resource
import socket
import sys
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tests.rigs.board import Board, Reply
from tests.rigs.present import present
from tests.rigs.sockets import free_port
from titan_grpo import cli
from titan_grpo.commands import doctor_host
from titan_grpo.commands.doctor import Wanted, machine
from titan_grpo.commands.doctor_servers import (
    Access,
    Needs,
    Options,
    clock_ahead_s,
    server,
    server_facts,
    tokens_here,
)
from titan_grpo.config import Rollout
from titan_grpo.engines.http import SyncDriver
from titan_grpo.sync.transports.channel import resolve_bind_host
from titan_grpo.titan.flavors import FLAVORS
from titan_grpo.titan.tiny import write_tiny_model


def says(answer: object) -> Reply:
    return lambda _: (200, answer)


CLOSED: dict[str, object] = {"/health": None, "/version": {"version": "0.32.0"}}
ALONE = {"tp_size": 1, "pp_size": 1, "dp_size": 1, "nnodes": 1}
ALONE |= {"tokenizer_worker_num": 1, "offload_group_size": -1}
SGLANG: dict[str, dict[str, Any]] = {
    "/model_info": {"weight_version": "7"},
    "/server_info": {"version": "0.5.23", "api_key": "its-own-secret", **ALONE},
}


@contextmanager
def http_server(
    answers: Mapping[str, object], ahead_s: float = 0.0
) -> Iterator[tuple[str, list[str]]]:
    """A server that knows these paths (a number is a status without an answer) and answers 404 to
    the rest; yields its URL and the requests it got."""
    board = Board(ahead_s=ahead_s)
    for path, answer in answers.items():
        for method in ("GET", "POST"):
            board.routes[f"{method} {path}"] = answer if isinstance(answer, int) else says(answer)
    yield board.url, board.paths
    board.close()


def test_the_doctor_passes_this_environment(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor"]) == 0
    said = capsys.readouterr().out
    assert "problem " not in said
    assert "version images need" not in said, "it has no job, of whose model they would be"


def test_servers_that_cannot_be_used_are_each_told_why_and_the_exit_code_is_1(
    capsys: pytest.CaptureFixture[str],
) -> None:
    gone = f"http://127.0.0.1:{free_port()}"
    too_old, silent = {"version": "0.5.20"}, {"api_key": "its-own-secret"}
    with (
        http_server(CLOSED) as (closed, _),
        http_server({**SGLANG, "/server_info": too_old}) as (old, _),
        http_server({**SGLANG, "/server_info": silent}) as (unknown, _),
        http_server({**SGLANG, "/health": None}) as (plain, seen),
    ):
        urls = (gone, closed, old, unknown, plain)
        assert cli.main(["doctor", *(f"--server={url}" for url in urls)]) == 1
    said = capsys.readouterr()
    for words in (
        f"{gone}: GET /health",
        f"{closed} answers, vLLM 0.32.0",
        "VLLM_SERVER_DEV_MODE=1",
        f"{plain} answers, SGLang 0.5.23",
        "--custom-weight-loader titan_grpo.receive.sglang_plugin.commit",
        "5 problems, 0 warnings",
    ):
        assert words in said.out
    about = [line for line in said.out.splitlines() if f"{old}:" in line]
    assert about == [f"problem  server        {old}: SGLang 0.5.20 is older than 0.5.21"]
    assert "its-own-secret" not in said.out + said.err, "SGLang tells its keys to everybody"
    assert [request for request in seen if request.startswith(("POST", "GET /health"))] == []


def test_a_server_that_is_not_healthy_is_not_asked_for_its_state() -> None:
    """Each question to one that hangs takes the whole deadline."""
    with http_server({"/weight_info": {"weight_version": "1"}, "/health": 503}) as (url, seen):
        (found,) = server(server_facts(url, Access(60)))
    assert found.text.startswith(f"{url}: GET /health was refused with 503")
    assert not {"GET /is_paused", "GET /server_info", "GET /generate"} & set(seen)


def test_a_server_with_another_backend_is_never_greeted() -> None:
    # The greeting would raise in its worker, and that ends a vLLM engine.
    answers = {
        "/health": None,
        "/version": {"version": "0.32.0"},
        "/weight_info": {"weight_version": "default"},
        "/is_paused": {"is_paused": False},
        "/server_info": {"vllm_config": {"weight_transfer_config": {"backend": "nccl"}}},
    }
    with http_server(answers) as (url, seen):
        found = server_facts(url, Access(60))
    assert (found.backend, found.joined) == ("nccl", None)
    assert [request for request in seen if request.startswith("POST")] == []


@pytest.mark.parametrize(("ahead_s", "words"), [(60, "ahead of"), (-60, "behind"), (3, "")])
def test_a_server_whose_clock_is_off_by_five_seconds_is_a_warning(
    ahead_s: int, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")  # a server is asked past it
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("NO_PROXY", raising=False)
    with http_server(CLOSED, ahead_s) as (url, _):
        found = server(server_facts(url, Access(60)))
    clocks = [f for f in found if f.subject == "clocks"]
    assert [f.status for f in clocks] == (["warning"] if words else [])
    assert all(words in f.text and "NTP" in f.remedy for f in clocks)


@pytest.mark.parametrize(
    "date",
    ["Mon, 01 Jan 99999999999 00:00:00 GMT", "Mon, 01 Jan 2024 99999999999999999999:00:00 GMT"],
)
def test_a_date_that_no_clock_shows_says_nothing_of_a_servers_clock(date: str) -> None:
    def serve() -> None:
        connection, _ = listener.accept()
        with connection:
            connection.recv(1 << 16)
            connection.sendall(f"HTTP/1.1 200 OK\r\nDate: {date}\r\n\r\n".encode())

    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor() as threads:
        served = threads.submit(serve)
        with SyncDriver(f"http://127.0.0.1:{listener.getsockname()[1]}") as driver:
            assert clock_ahead_s(driver, 60.0) == 0.0
        served.result(60)


@pytest.mark.parametrize(("status", "lacking"), [(404, 1), (405, 0), (500, 0)])
def test_a_vllm_without_our_middleware_is_told_what_it_lacks(status: int, lacking: int) -> None:
    answers = {
        "/health": 200,
        "/generate": status,
        "/weight_info": {"weight_version": "1"},
        "/server_info": {"vllm_config": {"weight_transfer_config": {"backend": "nccl"}}},
    }
    with http_server(answers) as (url, _):
        found = server(server_facts(url, Access(60)))
    said = [each for each in found if each.subject == "middleware"]
    assert [each.status for each in said] == ["warning"] * lacking
    assert all("/generate" in each.text and "--middleware titan" in each.remedy for each in said)


def test_a_web_server_that_is_no_engine_is_not_told_how_to_start_one() -> None:
    with http_server({"/health": None, "/version": "<html>"}) as (url, _):
        (found,) = server(server_facts(url, Access(60)))
    assert found.text.startswith(f"{url} answers, and neither as vLLM nor as SGLang: /version must")
    assert found.remedy == "correct rollout.servers: an engine must run there"


def test_a_receiver_that_never_calls_back_is_reported_by_the_deadline() -> None:
    answers = {
        "/health": None,
        "/weight_info": {"weight_version": "1"},
        "/server_info": {"vllm_config": {"weight_transfer_config": {"backend": "titan_grpo"}}},
        "/init_weight_transfer_engine": {},
    }
    with http_server(answers) as (url, seen):
        found = server_facts(url, Access(3))
    assert "POST /init_weight_transfer_engine" in seen
    assert found.joined is None
    assert "the deadline of 3.0 s passed" in found.errors["joined"]


@pytest.mark.parametrize(
    ("apply", "transport", "replicas", "status"),
    [
        ("staged", "auto", 1, "problem"),
        ("streamed", "auto", 1, "warning"),
        ("streamed", "auto", 2, "problem"),
        ("streamed", "nccl", 1, "problem"),
    ],
)
def test_an_sglang_without_our_plugin_is_a_problem_only_for_a_job_that_cannot_use_it(
    apply: str,
    transport: str,
    replicas: int,
    status: str,
    job: list[str],
    capsys: pytest.CaptureFixture[str],
) -> None:
    job += [f"--weight_sync.apply={apply}", f"--weight_sync.transport={transport}"]
    described = SGLANG["/server_info"] | {"dp_size": replicas}
    with http_server(SGLANG | {"/server_info": described}) as (url, _):
        cli.main([*job, f"--rollout.servers={url}"])
    out = capsys.readouterr().out
    [said] = [line for line in out.splitlines() if "server plugin" in line]
    assert said.split()[0] == status
    assert "and --tokenizer-worker-num 1" in out, "a lane says so, and it may be the reason"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("--model.flavor=debugmodel", "model.flavor must be the model of"),
        ("--rollout.replay_path=nope.jsonl", "rollout.replay_path must be an existing file"),
        ("--alerts.command=nopecmd --alerts.run=reward/mean<1", "alerts.command must be a program"),
        (
            "--weight_sync.tls_certificate=nope --weight_sync.tls_key=nope",
            "weight_sync.tls_certificate",
        ),
        (
            "--checkpoint.enable --checkpoint.initial_load_in_hf",
            "checkpoint.initial_load_in_hf needs *.safetensors files",
        ),
        ("", ""),
    ],
)
def test_what_the_run_would_refuse_at_its_start_is_a_problem_and_the_rest_is_looked_at(
    arguments: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = write_tiny_model("qwen3", tmp_path / "model", seed=0)
    if "in_hf" in arguments:
        (model / "model.safetensors").unlink()
    job = [f"--model.hf_assets_path={model}", "--model.name=qwen3", "--model.flavor=grpo_tiny"]
    job += ["--training.seq_len=512", "--rollout.task=digits"]
    gone = f"http://127.0.0.1:{free_port()}"
    assert cli.main(["doctor", *job, f"--rollout.servers={gone}", *arguments.split()]) == 1
    out = capsys.readouterr().out
    (said,) = [line for line in out.splitlines() if line[9:22] == "configuration"]
    assert said.startswith("problem" if words else "ok")
    assert words in said
    assert f"{gone}: GET /health" in out


@pytest.fixture
def job(root: Path) -> list[str]:
    """A doctor of the quickstart's job."""
    return ["doctor", "--job.config_file", str(root / "train_configs" / "quickstart_cpu.toml")]


def test_what_the_start_of_the_run_says_of_the_job_is_said_before_it(
    tmp_path: Path, job: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """Before, a key without effect and random first weights were "valid", and no more."""
    model = write_tiny_model("qwen3", tmp_path / "model", seed=0)
    job += [f"--rollout.servers=http://127.0.0.1:{free_port()}", f"--model.hf_assets_path={model}"]
    job += ["--grpo.algorithm=dr_grpo", "--grpo.kl_in_reward", "--checkpoint.no-enable"]
    job += ["--checkpoint.no-initial_load_in_hf"]
    cli.main(job)
    lines = capsys.readouterr().out.splitlines()
    said = [(line[:9].strip(), line[23:]) for line in lines if line[9:22].strip() == "start"]
    (expanded, unused, weights) = said
    assert expanded[0] == "ok"
    assert expanded[1].startswith("grpo.algorithm = ")
    assert unused[0] == weights[0] == "warning"
    assert unused[1].startswith("grpo.kl_in_reward = True has no effect: ")
    assert weights[1].startswith("training starts from random weights")


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here")
def test_a_job_with_nccl_is_said_to_need_a_gpu(
    tmp_path: Path, job: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    model = write_tiny_model("qwen3", tmp_path / "model", seed=0)
    job += [f"--rollout.servers=http://127.0.0.1:{free_port()}", f"--model.hf_assets_path={model}"]
    cli.main([*job, "--weight_sync.transport=nccl"])
    assert "warning  nccl          torch sees no GPU here" in capsys.readouterr().out


def test_servers_of_a_file_are_looked_at_too(
    tmp_path: Path, job: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    urls = [f"http://127.0.0.1:{free_port()}" for _ in range(2)]
    listed = tmp_path / "servers"
    listed.write_text(f"{urls[1]}\n")
    job += [f"--rollout.servers={urls[0]}", f"--rollout.servers_file={listed}"]
    assert cli.main(job) == 1
    assert f"{urls[1]}: GET /health" in capsys.readouterr().out
    listed.write_text("no url\n")
    assert cli.main(job) == 1
    assert "line 1: a server must be a URL" in capsys.readouterr().out


def test_an_evaluations_own_servers_are_looked_at_for_what_an_evaluation_needs(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    gone, text = f"http://127.0.0.1:{free_port()}", tmp_path / "job.toml"
    name, flavor = FLAVORS["qwen3_moe"]
    with http_server(SGLANG) as (rollouts, _), http_server(SGLANG) as (own, _):
        text.write_text(
            (root / "train_configs" / "quickstart_cpu.toml").read_text()
            + f'[[evaluation]]\nname = "a"\nrows = 1\nservers = ["{gone}/", "{own}"]\n'
        )
        words = [f"--rollout.servers={rollouts}", "--grpo.router_replay"]
        words += [f"--model.name={name}", f"--model.flavor={flavor}"]
        assert cli.main(["doctor", "--job.config_file", str(text), *words]) == 1
    out = capsys.readouterr().out
    assert f"problem  server        {gone}: GET /health" in out
    assert f"{own} answers, SGLang 0.5.23" in out
    assert re.findall(r"options +(\S+) sends no routes", out) == [rollouts]


def test_both_engines_of_a_launched_fleet_are_looked_for(
    job: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    job += ["--rollout.servers=launch", "--rollout.launch_engines=vllm,sglang"]
    job += ["--rollout.launch_python=/no/v", "--rollout.launch_sglang_python=/no/s"]
    assert cli.main(job) == 1
    out = capsys.readouterr().out
    assert "/no/v does not run" in out
    assert "/no/s does not run" in out


def test_a_missing_api_key_variable_exits_with_2_and_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("NO_SUCH_KEY", raising=False)
    assert cli.main(["doctor", "--api-key-env", "NO_SUCH_KEY"]) == 2
    err = capsys.readouterr().err
    assert "NO_SUCH_KEY" in err
    assert err.count("\n") == 1


@pytest.mark.parametrize("url", ["http://[::1", "host:8000", "ftp://host:8000", "http://h/?q"])
def test_a_server_that_is_no_url_is_refused(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor", "--server", url]) == 2
    assert capsys.readouterr() == (
        "",
        "titan-grpo doctor: a server must be a URL such as http://host:8000, without user, query"
        f" and fragment, got {url!r}\n",
    )


def test_the_engine_interpreter_is_asked_for_its_plugin() -> None:
    answer = doctor_host.engine_answer(sys.executable)
    assert isinstance(answer, dict)
    assert (answer["vllm_plugin"], answer["sglang_plugin"]) == ("yes", "yes")
    assert isinstance(doctor_host.engine_answer("/no/such/python"), str)


def test_an_interpreter_that_is_none_says_so_and_reads_nothing_of_ours() -> None:
    # cat would wait for a terminal's input
    for path, words in (("/bin/true", "it is no Python"), ("/bin/cat", "it ended with exit code")):
        answer = doctor_host.engine_answer(path)
        assert isinstance(answer, str)
        assert answer.startswith(words)
    assert str(doctor_host.engine_answer("nowhere")).startswith("it cannot be started")


@pytest.mark.parametrize("after", ["echo wrapper: done >&2", "echo 5", "echo '[]'"])
def test_what_a_script_around_the_interpreter_says_hides_no_answer(
    tmp_path: Path, after: str
) -> None:
    script = tmp_path / "python"
    script.write_text(f'#!/bin/sh\n{sys.executable} "$@"\n{after}\n')
    script.chmod(0o755)
    assert isinstance(doctor_host.engine_answer(str(script)), dict)


@pytest.mark.parametrize("seconds", ["-1", "nan", "inf"])
def test_a_deadline_that_is_none_is_refused(
    seconds: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["doctor", f"--timeout={seconds}", "--server", "http://127.0.0.1:1"]) == 2
    assert "--timeout must be in (0, 3600]" in capsys.readouterr().err


def test_model_elements_are_read_from_the_headers_of_all_files(tmp_path: Path) -> None:
    for number, shape in enumerate([(4, 8), (3,)]):
        tensor = torch.zeros(shape, dtype=torch.bfloat16)
        save_file({f"w{number}": tensor}, tmp_path / f"model-{number}.safetensors", {"a": "b"})
    assert doctor_host.model_elements(tmp_path) == 35
    assert doctor_host.model_elements(tmp_path / "nothing") is None


def test_a_damaged_file_of_the_model_is_one_finding_among_the_others(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"damaged")
    want = Wanted([], {}, Rollout(), model=str(tmp_path))
    found = {each.subject: each for each in machine(want, {})}
    assert found["model"].status == "problem"
    assert str(tmp_path / "model.safetensors") in found["model"].text
    assert found["ports"].status == "ok"


def test_the_way_to_a_local_server_is_the_loopback_address() -> None:
    assert resolve_bind_host("", "http://127.0.0.1:8000") == "127.0.0.1"
    assert doctor_host.bind("127.0.0.1").status == "ok"
    for address in ("203.0.113.1", "0.0.0.0", "10.0..5"):
        assert doctor_host.bind(address).status == "problem"


@pytest.mark.parametrize("argv", [[], ["no-such-command"]])
def test_the_command_line_without_a_command_says_what_there_is(
    argv: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(argv) == 2
    captured = capsys.readouterr()
    assert "doctor" in captured.out + captured.err


def test_both_engines_descriptions_are_read() -> None:
    config = {
        "lora_config": {"max_lora_rank": 16},
        "aux_output_config": {"enable_return_routed_experts": True},
        "model_config": {"max_model_len": 4096},
    }
    assert Options.of_server("vllm", {"vllm_config": config}) == Options(16, True, 4096)
    assert Options.of_server("vllm", {"vllm_config": {"lora_config": None}}) == Options()
    assert Options.of_server("sglang", {"enable_return_routed_experts": True}) == Options(0, True)
    assert Options.of_server("sglang", None) == Options()


def test_a_server_is_asked_for_its_tokens_and_options_where_a_job_needs_them(
    tmp_path: Path,
) -> None:
    here = tokens_here(str(write_tiny_model("qwen3", tmp_path / "model", seed=1)))
    assert here
    assert tokens_here(str(tmp_path)) is None
    with http_server({**SGLANG, "/tokenize": {"tokens": here}}) as (url, seen):
        assert server_facts(url, Access(60)).tokens is None
        assert "POST /tokenize" not in seen
        found = server_facts(url, Access(60), Needs(tokens=here))
    assert (found.tokens, found.options) == (here, Options())
    with http_server(SGLANG) as (url, _):
        assert server_facts(url, Access(60), Needs(tokens=here)).tokens is None


def test_a_server_is_asked_whether_it_reads_calls_of_tools_where_agents_need_it() -> None:
    with http_server(SGLANG) as (url, _):
        assert "tool_calls" not in server_facts(url, Access(60), Needs()).errors
        asked = server_facts(url, Access(60), Needs(tool_calls=True))
    assert "--tool-call-parser NAME" in asked.errors["tool_calls"]
    named = SGLANG | {"/server_info": SGLANG["/server_info"] | {"tool_call_parser": "hermes"}}
    with http_server(named) as (url, _):
        found = server_facts(url, Access(60), Needs(tool_calls=True))
    assert "tool_calls" not in found.errors


def test_a_job_that_sends_adapters_is_judged_by_their_size(
    tmp_path: Path, job: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    model = write_tiny_model("qwen3", tmp_path / "model", seed=0)
    job += [f"--rollout.servers=http://127.0.0.1:{free_port()}", "--lora.rank=2"]
    job += [f"--model.hf_assets_path={model}", "--weight_sync.slots=256"]
    needs = []
    for sync in ("merged", "adapter"):
        cli.main([*job, f"--lora.sync={sync}"])
        (found,) = re.findall(r"256 version images need (\d+) MiB", capsys.readouterr().out)
        needs.append(int(found))
    elements = present(doctor_host.model_elements(model))
    assert needs[0] == round(256 * elements * 2 / 2**20), "bfloat16"
    assert 0 < needs[1] < needs[0] / 4


@pytest.mark.parametrize("sync", ["merged", "adapter"])
def test_a_server_without_adapters_is_a_problem_only_for_a_job_that_sends_them(
    sync: str, job: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with http_server(SGLANG) as (url, _):
        cli.main([*job, f"--rollout.servers={url}", "--lora.rank=2", f"--lora.sync={sync}"])
    assert ("takes no adapters as versions" in capsys.readouterr().out) == (sync == "adapter")


def test_a_checkpoint_of_adapters_has_no_optimizer_state_of_the_base(
    tmp_path: Path, job: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """Before, it was judged as one that has, so that a disk with room for it had none."""
    model = write_tiny_model("qwen3", tmp_path / "model", seed=0)
    job += [f"--rollout.servers=http://127.0.0.1:{free_port()}", f"--model.hf_assets_path={model}"]
    job += ["--checkpoint.enable", "--checkpoint.initial_load_in_hf"]
    sizes = []
    for more in ([], ["--lora.rank=2"]):
        cli.main([*job, *more])
        (found,) = re.findall(r"checkpoints? of (\d+) MiB", capsys.readouterr().out)
        sizes.append(int(found))
    assert 0 < sizes[1] < sizes[0] / 2


@pytest.mark.parametrize(("servers", "status"), [(["launch"], "warning"), (["http://a:1"], "ok")])
def test_servers_that_the_run_starts_need_open_files_too(
    servers: list[str], status: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1024, 1024))
    rollout = Rollout(servers=servers, launch_count=8, max_concurrent_requests=128)
    found = {each.subject: each for each in machine(Wanted([], {}, rollout), {})}
    assert found["ulimit -n"].status == status
