"""The job of a command that trains a tiny model on servers that it starts."""

import argparse
from pathlib import Path
from typing import Any

import pytest

from titan_grpo.commands import quickstart
from titan_grpo.commands.processes import add_tiny_run, tiny_run
from titan_grpo.config import LAUNCH
from titan_grpo.titan import jobconfig
from titan_grpo.titan.startup import launched


def run_of(folder: Path, pythons: dict[str, str], *rest: str) -> tuple[Any, list[str]]:
    """The job of the quickstart with two servers of each engine, and its command."""
    parser = argparse.ArgumentParser()
    add_tiny_run(parser, "quickstart_cpu.toml", 3, ["qwen3"])
    options = parser.parse_args([])
    options.pythons, options.servers, options.out, options.rest = pythons, 2, folder, rest
    options.lora = options.lora_sync = None
    options.router_replay = options.sync = False
    return tiny_run(options, folder, [LAUNCH], quickstart.job_arguments(options))


@pytest.mark.parametrize("engines", [["vllm"], ["sglang"], ["vllm", "sglang"]])
def test_the_quickstart_sets_no_key_in_vain(engines: list[str], tmp_path: Path) -> None:
    """Before, each start with one engine said that the other one's arguments have no effect."""
    _, command = run_of(tmp_path, dict.fromkeys(engines, "python"))
    assert jobconfig.read(command[command.index("--job.config_file") :], 2)[1:] == ([], [])


def test_the_quickstarts_servers_are_what_its_job_asks_for(tmp_path: Path) -> None:
    """Before, they took 256 tokens and 64 requests, and had a head of their own type."""
    rest = ("--training.seq_len=512", "--grpo.fp32-lm-head")
    job, _ = run_of(tmp_path, {"vllm": "p", "sglang": "q"}, *rest)
    servers = launched(job, str(tmp_path), True, None, ("", ""))
    assert [(each.engine, each.python) for each in servers] == [
        *[("vllm", "p")] * 2,
        *[("sglang", "q")] * 2,
    ]
    asked = {(each.max_model_len, each.max_num_seqs, each.fp32_head) for each in servers}
    assert asked == {(512, 128, True)}
    assert {each.args for each in servers} == {("--load-format", "dummy")}
    assert job.weight_sync.startup_deadline_s == 4 * quickstart.STARTUP_S
