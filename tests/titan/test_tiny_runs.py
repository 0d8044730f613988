"""The job of a command that trains a tiny model on servers that it starts."""

import argparse
from pathlib import Path

import pytest

from titan_grpo import cli
from titan_grpo.commands import quickstart
from titan_grpo.commands.processes import add_tiny_run, tiny_run
from titan_grpo.config import LAUNCH
from titan_grpo.titan.startup import launched


@pytest.mark.parametrize("command", ["quickstart", "verify"])
def test_a_mistake_in_the_job_is_named_before_its_servers_answer(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # This interpreter ends at once, which would be the next thing to be said.
    words = [command, "--vllm-python", "/bin/true", "--out", str(tmp_path / "new")]
    assert cli.main([*words, "--grpo.nope", "1"]) == 2
    assert "Unrecognized options: --grpo.nope" in capsys.readouterr().err


def test_the_quickstarts_servers_are_what_its_job_asks_for(tmp_path: Path) -> None:
    """Before, they took 256 tokens and 64 requests, and had a head of their own type."""
    parser = argparse.ArgumentParser()
    add_tiny_run(parser, "quickstart_cpu.toml", 3, ["qwen3"])
    options = parser.parse_args([])
    options.pythons, options.servers, options.out = {"vllm": "p", "sglang": "q"}, 2, tmp_path
    options.lora = options.lora_sync = None
    options.router_replay = options.sync = False
    options.rest = ["--training.seq_len=512", "--grpo.fp32-lm-head"]
    job, _ = tiny_run(options, tmp_path, [LAUNCH], quickstart.job_arguments(options))
    servers = launched(job, str(tmp_path), True, None, ("", ""))
    assert [(each.engine, each.python) for each in servers] == [
        *[("vllm", "p")] * 2,
        *[("sglang", "q")] * 2,
    ]
    asked = {(each.max_model_len, each.max_num_seqs, each.fp32_head) for each in servers}
    assert asked == {(512, 128, True)}
    assert {each.args for each in servers} == {("--load-format", "dummy")}
    assert job.weight_sync.startup_deadline_s == 4 * quickstart.STARTUP_S
