"""scripts/quickstart.sh: the main job on two cores, and that nothing of it stays behind; and an
example of it, run by the command in its first comment."""

import importlib
import json
import os
import re
import signal
import subprocess
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

# That command starts an engine and a run of its own. What it adds to the quickstart is the task,
# which tests/rollout/test_function_runs.py runs in a rollout process.
from scripts.common import RECIPE
from tests.e2e.conftest import Runs, run_cli
from tests.example_files import command_of
from tests.rigs.present import present
from tests.rigs.trainer_handle import wait_until
from titan_grpo.rollout.codec import TextCodec
from titan_grpo.runkey import Key, with_run_key

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(400)]

STEPS = 12
EVALUATION = """
[[evaluation]]
name = "own"
reward = ["examples.own_reward.rewards:number"]
dataset = "examples/own_reward/data.jsonl"
rows = 4
max_completion_tokens = 4
"""
STOP_S = 120.0
"""Deadline of an end, in seconds. What bounds it is torchrun, which kills its ranks after 30 s:
they leave no report then."""

MARK = "TITAN_GRPO_TEST_MARK"


def processes(mark: str) -> dict[psutil.Process, str]:
    """All processes that inherited our mark, wherever they hang in the tree of processes, with
    their command lines."""
    found = {}
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARK) == mark and process.status() != psutil.STATUS_ZOMBIE:
                found[process] = " ".join(process.cmdline())[:150]
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return found


def marked(mark: str) -> list[str]:
    return list(processes(mark).values())


@pytest.fixture
def mark() -> Iterator[str]:
    mark = uuid.uuid4().hex
    yield mark
    assert marked(mark) == [], "the quickstart left processes behind"


def start(
    root: Path, mark: str, *arguments: str, run_key: Key | None = None
) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        ["scripts/quickstart.sh", *arguments],
        cwd=root,
        env={**with_run_key(os.environ, run_key), MARK: mark},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        stdin=subprocess.DEVNULL,
        text=True,
        # a shell that started the tests in the background made them ignore Ctrl-C, and that is
        # inherited
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )


@pytest.mark.parametrize(
    "engines", [("vllm",), pytest.param(("vllm", "sglang"), marks=pytest.mark.long)], ids="+".join
)
def test_the_reward_rises_and_every_promised_file_is_there(
    engines: tuple[str, ...], runs: Runs, mark: str, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    run_key = Key.generate()
    words = ["--steps", str(STEPS), "--out", str(out)]
    words += ["--engine", "both"] if len(engines) > 1 else []
    # Rewards and rows of their own on each engine, in a run that is there anyway.
    recipe = tmp_path / "quickstart.toml"
    recipe.write_text((runs.root / RECIPE).read_text() + EVALUATION)
    words += ["--config", str(recipe)]
    with start(runs.root, mark, *words, run_key=run_key) as process:
        said, _ = process.communicate(timeout=350)
    assert process.returncode == 0, said
    assert marked(mark) == []
    summary = runs.summary(out)
    assert (summary["steps"], summary["mode"], summary["digest_mismatches"]) == (STEPS, "async", 0)
    assert summary["reward_last"] > summary["reward_first"]
    evaluated = [
        (each["name"], each["version"], each["prompts"]) for each in summary["evaluations"]
    ]
    assert evaluated == [("own", 0, 4), ("own", STEPS, 4)], summary["errors"]
    assert summary["staleness"]["max"] <= 1
    assert len(summary["versions_committed"]) == len(engines), "one server of each engine"
    for server in summary["versions_committed"].values():
        assert (server["committed"][0], server["last"]) == (0, STEPS)
    assert len((out / "metrics.jsonl").read_text().splitlines()) == STEPS
    trace = json.loads((out / "trace.json").read_text())
    assert {"X", "M"} <= {event["ph"] for event in trace}
    assert (out / "reward.png").read_bytes().startswith(b"\x89PNG")
    assert list((out / "tb").rglob("events.out.tfevents.*"))
    model = AutoModelForCausalLM.from_pretrained(out / "hf")
    tokens = AutoTokenizer.from_pretrained(out / "hf")("say 123", return_tensors="pt")["input_ids"]
    assert bool(torch.isfinite(model(tokens).logits).all())
    for engine in engines:
        log = (out / f"{engine}0.log").read_text()
        assert "takes weights from trainers with the run key" in log
    kept = [path.read_bytes() for path in out.rglob("*") if path.is_file()]
    assert not any(
        shown in text
        for text in (said.encode(), *kept)
        for shown in (run_key.hex().encode(), run_key.raw)
    )
    # The terminal shows our own lines: progress, table, where the files are.
    assert "waiting for the launched server vllm0" in said
    assert "waiting for the first commit" in said
    assert f"titan-grpo report {out}" in said
    assert len(re.findall(rf"^step +\d+/{STEPS}  reward", said, re.MULTILINE)) == STEPS
    assert not [
        line
        for line in said.splitlines()
        if "[titan]" in line or "Warning" in line or line.startswith("  ")
    ]


@pytest.mark.parametrize(
    "moment",
    [
        pytest.param("waiting for the launched server", id="servers start"),
        pytest.param("step", id="training", marks=pytest.mark.long),
    ],
)
def test_ctrl_c_ends_everything_soon(moment: str, runs: Runs, mark: str, tmp_path: Path) -> None:
    with start(runs.root, mark, "--steps", "1000", "--out", str(tmp_path / "run")) as process:
        for line in present(process.stdout):
            if line.startswith(moment):
                break
        # the line comes before what it speaks of
        assert wait_until(lambda: len(marked(mark)) >= 7, STOP_S), (
            "quickstart, two guards, server; torchrun, two ranks"
        )
        began = time.monotonic()
        process.send_signal(signal.SIGINT)
        said, _ = process.communicate(timeout=STOP_S)
        print(f"ended {time.monotonic() - began:.1f} s after Ctrl-C")
    assert process.returncode == 130, said
    assert marked(mark) == []
    assert "every process that was started has ended" in said
    if moment == "step":
        summary = runs.summary(tmp_path / "run")
        assert summary["steps"] >= 1, "a stopped run leaves its report"
        assert summary["ended_by"] in ("SIGINT", "SIGTERM")


def test_a_mistake_is_said_in_one_line_before_the_servers_are_up(
    runs: Runs, mark: str, tmp_path: Path
) -> None:
    # Of a task: it is looked at after the rules of all keys.
    wrong = "examples.own_reward.rewards:numbers"
    arguments = [f"--rollout.reward={wrong}", "--rollout.dataset=examples/own_reward/data.jsonl"]
    with start(runs.root, mark, "--out", str(tmp_path / "run"), *arguments) as process:
        said, _ = process.communicate(timeout=100)
    assert process.returncode == 2, said
    words = f"titan-grpo quickstart: rollout.reward '{wrong}' must be a function"
    assert said.splitlines()[-1].startswith(words), said
    assert "healthy" not in said
    assert marked(mark) == []


@pytest.mark.long
def test_a_server_whose_engine_dies_is_started_again_and_gets_the_newest_version(
    runs: Runs, mark: str, tmp_path: Path
) -> None:
    out, steps = tmp_path / "run", 20
    with start(runs.root, mark, "--steps", str(steps), "--out", str(out)) as process:
        for line in present(process.stdout):
            if line.startswith("step  3/"):
                break
        # It has written its title over its environment, so the mark is not there.
        tree = psutil.Process(process.pid).children(recursive=True)
        (engine,) = [each for each in tree if "EngineCore" in " ".join(each.cmdline())]
        engine.kill()
        said, _ = process.communicate(timeout=350)
    assert process.returncode == 0, said
    assert "the launched server vllm0 ended with exit code 0: it is started again" in said
    summary = runs.summary(out)
    (server,) = summary["versions_committed"].values()
    assert (summary["steps"], server["last"]) == (steps, steps)
    assert summary["digest_mismatches"] == 0
    assert {path.name for path in out.glob("vllm*.log")} == {"vllm0.log", "vllm0-2.log"}


@pytest.mark.long
def test_a_killed_quickstart_leaves_nothing(runs: Runs, mark: str, tmp_path: Path) -> None:
    with start(runs.root, mark, "--steps", "1000", "--out", str(tmp_path / "run")) as process:
        for line in present(process.stdout):
            if line.startswith("step"):
                break
        left = processes(mark)
        assert len(left) >= 7, "quickstart, two guards, server; torchrun, two ranks"
        process.kill()
        began = time.monotonic()
        alive = psutil.wait_procs(left, timeout=STOP_S)[1]
        print(f"ended {time.monotonic() - began:.1f} s after SIGKILL")
        assert [left[one] for one in alive] == []


@pytest.mark.long
def test_an_own_reward_on_own_rows_trains_the_quickstarts_model_in_its_chat_template(
    root: Path, tmp_path: Path
) -> None:
    steps = 16  # in which the reward rises for certain
    source = root / "examples" / "own_reward" / "rewards.py"
    arguments = command_of(source)
    out, record = tmp_path / "run", tmp_path / "record.jsonl"
    arguments[arguments.index("--out") + 1] = str(out)
    arguments += ["--steps", str(steps), "--rollout.record_path", str(record)]
    # What scripts/quickstart.sh does once the environments are there.
    done = run_cli(root, "quickstart", *arguments, timeout_s=350)
    assert done.returncode == 0, done.stderr[-3000:]
    summary = json.loads((out / "summary.json").read_text())
    assert summary["steps"] == steps
    assert summary["reward_last"] > summary["reward_first"] + 0.05
    # Every prompt is a row in the template, and every reward the function's.
    number = importlib.import_module("examples.own_reward.rewards").number
    rows = [json.loads(line) for line in (source.parent / "data.jsonl").read_text().splitlines()]
    codec, groups = TextCodec(str(out / "model")), groups_of(record)
    assert len(groups) == steps * 8
    for group in groups:
        row = rows[group["prompt"]["payload"]["row"]]
        text = f"user: {row['prompt']}\nassistant:"
        assert tuple(group["prompt"]["token_ids"]) == (1, *codec.encode(text))
        said = [codec.decode(each["token_ids"]) for each in group["completions"]]
        expected = number(said, [row["answer"]] * len(said))
        assert [each["reward"] for each in group["completions"]] == pytest.approx(expected)
    # An epoch has every row once.
    first = [group["prompt"]["payload"]["row"] for group in groups[: len(rows)]]
    assert len(set(first)) == len(first)


def groups_of(record: Path) -> list[dict[str, Any]]:
    """The groups of a record, in the order of their prompts."""
    groups = [
        group for line in record.read_text().splitlines() for group in json.loads(line)["groups"]
    ]
    return sorted(groups, key=lambda group: group["prompt"]["index"])
