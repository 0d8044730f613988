"""What ``titan-grpo evaluate`` refuses before it asks for a completion."""

from pathlib import Path
from typing import Any

import pytest

from tests.rigs.board import Board
from tests.rigs.sockets import free_port
from titan_grpo import cli
from titan_grpo.titan.tiny import write_tiny_model

JOB = """
[job]
custom_config_module = "titan_grpo.config"
[model]
name = "qwen3"
flavor = "grpo_tiny"
[grpo]
async_weight_update = true
[rollout]
servers = ["http://127.0.0.1:9"]
[[evaluation]]
name = "held_out"
task = "digits"
rows = 1
"""


LACKING = ": there is no folder "
REPLACED = ": the file would replace this device, pipe or folder"


@pytest.mark.parametrize(("place", "why"), [("", REPLACED), ("nowhere/figures.json", LACKING)])
def test_figures_that_could_not_be_written_are_refused_before_an_evaluation(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], place: str, why: str
) -> None:
    job, out = tmp_path / "job.toml", tmp_path / place
    job.write_text(JOB)
    words = ["--server", "http://127.0.0.1:9", "--out", str(out), "--job.config_file", str(job)]
    assert cli.main(["evaluate", *words]) == 2
    rule = f"--out must be a file that can be written, got {str(out)!r}{why}"
    assert capsys.readouterr().err.startswith(f"titan-grpo evaluate: {rule}")


@pytest.mark.parametrize(
    ("job", "rule"),
    [
        (JOB.partition("[[evaluation]]")[0], "the job must have an [[evaluation]] table for"),
        (JOB, "tables that are asked for, got other; there are held_out"),
    ],
)
def test_a_job_without_the_table_is_told_what_there_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], job: str, rule: str
) -> None:
    path = tmp_path / "job.toml"
    path.write_text(job)
    assert cli.main(["evaluate", "--name", "other", "--job.config_file", str(path)]) == 2
    assert rule in capsys.readouterr().err


def test_an_adapter_alone_is_refused_with_the_command_that_writes_the_whole_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "job.toml").write_text(JOB)
    (tmp_path / "adapter_config.json").write_text("{}")
    words = ["--model", str(tmp_path), "--job.config_file", str(tmp_path / "job.toml")]
    assert cli.main(["evaluate", *words]) == 2
    rule = f"--model must be a whole model, got the adapter in {str(tmp_path)!r}: titan-grpo export"
    assert rule in capsys.readouterr().err


def test_a_job_that_names_no_servers_is_evaluated_on_the_one_that_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its own may be arguments of the run."""
    job, gone = tmp_path / "job.toml", f"http://127.0.0.1:{free_port()}"
    job.write_text(JOB.replace('"http://127.0.0.1:9"', ""))
    words = ["--model.hf_assets_path", str(write_tiny_model("qwen3", tmp_path / "model", seed=1))]
    assert cli.main(["evaluate", "--server", gone, "--job.config_file", str(job), *words]) == 1
    assert f"titan-grpo evaluate: ServerUnreachable: {gone}" in capsys.readouterr().err


def test_a_server_that_runs_is_asked_for_whole_completions_in_a_job_that_starts_its_own_too(
    tmp_path: Path,
) -> None:
    """Before, they ended where the rows of the job's own servers would."""
    board, asked = Board(), set[int]()
    board.routes["GET /weight_info"] = lambda _: (200, {"weight_version": "default"})

    def refuse(body: dict[str, Any]) -> tuple[int, Any]:
        asked.add(body["max_tokens"])
        return 400, {}

    board.routes["POST /v1/completions"] = refuse
    job, own = tmp_path / "job.toml", 'servers = ["launch"]\nlaunch_python = "python"'
    longer = JOB.replace('servers = ["http://127.0.0.1:9"]', own) + "max_completion_tokens = 5000\n"
    job.write_text(longer)
    words = ["--model.hf_assets_path", str(write_tiny_model("qwen3", tmp_path / "model", seed=1))]
    words += ["--training.seq_len=512"]
    assert cli.main(["evaluate", "--server", board.url, "--job.config_file", str(job), *words]) == 1
    board.close()
    assert asked == {5000}


def test_a_server_with_another_tokenizer_is_refused_before_it_is_asked_for_a_completion(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    board, job = Board(), tmp_path / "job.toml"
    board.routes["GET /weight_info"] = lambda _: (200, {"weight_version": "default"})
    board.routes["POST /tokenize"] = lambda _: (200, {"tokens": [1, 2, 3]})
    job.write_text(JOB)
    model = str(write_tiny_model("qwen3", tmp_path / "model", seed=1))
    words = ["--job.config_file", str(job), "--model.hf_assets_path", model]
    assert cli.main(["evaluate", "--server", board.url, *words]) == 2
    board.close()
    assert "POST /v1/completions" not in board.paths
    rule = f"--server must have the tokenizer of model.hf_assets_path ({model!r}), {board.url} has"
    assert rule in capsys.readouterr().err


def test_an_sglang_that_no_run_has_updated_is_told_the_label_to_start_with(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    board, job = Board(), tmp_path / "job.toml"
    board.routes["GET /model_info"] = lambda _: (200, {"weight_version": "default"})
    job.write_text(JOB)
    words = ["--model.hf_assets_path", str(write_tiny_model("qwen3", tmp_path / "model", seed=1))]
    assert cli.main(["evaluate", "--server", board.url, "--job.config_file", str(job), *words]) == 1
    board.close()
    assert "POST /generate" not in board.paths
    assert "start it with --weight-version run:0:0" in capsys.readouterr().err


def test_an_interpreter_that_is_not_there_is_one_line_before_a_server_is_started(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job, gone = tmp_path / "job.toml", tmp_path / "gone"
    job.write_text(JOB)
    words = ["--model.hf_assets_path", str(write_tiny_model("qwen3", tmp_path / "model", seed=1))]
    words += [f"--rollout.launch_python={gone}"]
    assert cli.main(["evaluate", "--job.config_file", str(job), *words]) == 2
    rule = "rollout.launch_python must be the interpreter of the engine's environment"
    assert capsys.readouterr().err == f"titan-grpo evaluate: {rule}, {str(gone)!r} is no file\n"


def test_the_server_that_is_started_has_the_gpus_of_the_jobs_first(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    python, said = tmp_path / "python", tmp_path / "said"
    python.write_text(f'#!/bin/sh\necho "$CUDA_VISIBLE_DEVICES $*" >{said}\nexit 1\n')
    python.chmod(0o755)
    job = tmp_path / "job.toml"
    launched = ['servers = ["launch"]', f'launch_python = "{python}"']
    launched += ["launch_count = 2", "launch_gpus = [4, 5, 6, 7]"]
    job.write_text(JOB.replace('servers = ["http://127.0.0.1:9"]', "\n".join(launched)))
    model = str(write_tiny_model("qwen3", tmp_path / "model", seed=1))
    words = ["--job.config_file", str(job), "--model.hf_assets_path", model]
    assert cli.main(["evaluate", *words]) == 1
    assert "ended with exit code 1" in capsys.readouterr().err
    assert said.read_text().startswith("4,5 ")
    assert "--tensor-parallel-size 2" in said.read_text()
