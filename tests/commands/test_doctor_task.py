"""What the doctor says about reward functions, dataset and chat template: one line each."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from titan_grpo import cli
from titan_grpo.titan.tiny import write_tiny_model

REWARDS = "def right(completions, answer):\n    return [1.0] * len(completions)\n"


@pytest.fixture
def diagnosis(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., list[str]]:
    """A factory: changes of a sound job's files and keys -> the doctor's lines about its task."""
    model = write_tiny_model("qwen3", tmp_path / "model")
    (tmp_path / "doctored_rewards.py").write_text(REWARDS)
    rows = [{"prompt": f"{i}+1=", "answer": i + 1} for i in range(5)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "bare.jsonl").write_text('{"prompt": "x"}\n')
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    subjects = ("reward", "dataset", "first prompt", "chat template", "task", "agent")

    def run(**changes: Any) -> list[str]:
        job, wanted = changes.pop("job", ""), changes.pop("subjects", subjects)
        keys = {"reward": "doctored_rewards:right", "dataset": "rows.jsonl"} | changes
        arguments = [f"--job.config_file={job}"] if job else []
        arguments += [f"--rollout.{name}={value}" for name, value in keys.items() if value]
        # A server elsewhere that is not there is one problem, and not of the task's.
        arguments += ["--rollout.servers=http://127.0.0.1:9", f"--model.hf_assets_path={model}"]
        arguments += ["--model.name=qwen3", "--model.flavor=grpo_tiny", "--training.seq_len=512"]
        code = cli.main(["doctor", "--timeout", "1", *arguments])
        lines = capsys.readouterr().out.splitlines()
        about = [line for line in lines if line[9:22].strip() in wanted]
        assert about, lines
        assert code == 1
        return about

    return run


def test_a_sound_task_shows_its_rows_and_its_first_prompt(
    diagnosis: Callable[..., list[str]],
) -> None:
    reward, dataset, prompt = diagnosis()
    assert reward == "ok       reward        doctored_rewards:right"
    assert dataset == "ok       dataset       rows.jsonl: 5 rows with prompt, answer"
    assert prompt.startswith("ok       first prompt  22 tokens: '<bos>user: ")


def test_a_first_prompt_that_leaves_no_room_for_a_completion_is_a_warning(
    diagnosis: Callable[..., list[str]], tmp_path: Path
) -> None:
    (tmp_path / "long.jsonl").write_text(json.dumps({"prompt": "7" * 512, "answer": 7}))
    *_, prompt = diagnosis(dataset="long.jsonl", chat_template="none")
    assert prompt.startswith("warning  first prompt  training.seq_len = 512 leaves no room")
    assert " after 512 tokens: '777" in prompt


def test_a_first_prompt_without_a_token_is_a_warning(
    diagnosis: Callable[..., list[str]], tmp_path: Path
) -> None:
    (tmp_path / "empty.jsonl").write_text(json.dumps({"prompt": "", "answer": 7}))
    *_, prompt = diagnosis(dataset="empty.jsonl", chat_template="none")
    assert prompt.startswith("warning  first prompt  the first row and the chat template make")


def test_null_in_a_column_that_a_function_needs_is_a_warning_with_its_first_row(
    diagnosis: Callable[..., list[str]], tmp_path: Path
) -> None:
    rows = [{"prompt": f"{i}+1=", "answer": i + 1, "level": None} for i in range(600)]
    del rows[516]["answer"], rows[517]["answer"]
    (tmp_path / "nulls.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    _, sound, nulls, _ = diagnosis(dataset="nulls.jsonl")
    assert sound.startswith("ok       dataset")
    assert nulls == (
        "warning  dataset       2 of 600 rows have no value (null) in 'answer', the first is row"
        " 516 (from 0): rollout.reward 'doctored_rewards:right' gets None"
    )


def test_a_prompt_without_a_column_in_braces_is_a_warning(
    diagnosis: Callable[..., list[str]],
) -> None:
    _, _, warned, _ = diagnosis(prompt="question")
    assert warned == (
        "warning  dataset       rollout.prompt 'question' names no column: each row has the same"
        " prompt"
    )


def test_a_text_that_is_not_utf_8_is_found_before_a_run_meets_its_row(
    diagnosis: Callable[..., list[str]], tmp_path: Path
) -> None:
    row = '{"prompt": "1+1=", "answer": "%s"}\n'
    (tmp_path / "latin.jsonl").write_bytes((row % "2" * 5 + row % "caf\xe9").encode("latin-1"))
    _, dataset = diagnosis(dataset="latin.jsonl")
    assert dataset.startswith("problem  dataset       row 5 of rollout.dataset 'latin.jsonl' must")
    assert "must be UTF-8: " in dataset


def test_a_tokenizer_file_that_cannot_be_read_is_one_finding_with_its_path(
    diagnosis: Callable[..., list[str]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "model/tokenizer.json").write_text('{"version": ')
    (found,) = diagnosis(subjects=["configuration"])
    assert found.startswith("problem  configuration the model's directory (model.hf_assets_path)")
    assert f"{str(tmp_path / 'model')!r} has one that is damaged: " in found


@pytest.mark.parametrize(
    ("changes", "lines"),
    [
        (
            {"reward": "doctored_rewards:wrong"},
            [
                "problem  reward        rollout.reward 'doctored_rewards:wrong' must be a",
                "ok       dataset",
                "ok       first prompt",
            ],
        ),
        (
            {"reward": "no_such_module:f", "dataset": "none.jsonl"},
            [
                "problem  reward        rollout.reward 'no_such_module:f' cannot be imported",
                "problem  dataset       rollout.dataset must be an existing file or pattern",
            ],
        ),
        (
            {"prompt": "{question}"},
            [
                "ok       reward",
                "problem  dataset       rollout.prompt asks for 'question', a column that",
            ],
        ),
        (
            {"dataset": "bare.jsonl"},
            [
                "ok       reward",
                "problem  dataset       rollout.reward 'doctored_rewards:right' asks for 'answer'",
            ],
        ),
    ],
)
def test_each_thing_that_is_wrong_is_one_line(
    diagnosis: Callable[..., list[str]], changes: dict[str, str], lines: list[str]
) -> None:
    found = diagnosis(**changes)
    assert len(found) == len(lines)
    for line, start in zip(found, lines, strict=True):
        assert line.startswith(start)


def test_a_model_without_a_chat_template_is_one_line(
    diagnosis: Callable[..., list[str]], tmp_path: Path
) -> None:
    settings = tmp_path / "model" / "tokenizer_config.json"
    settings.write_text("{}")
    *_, template = diagnosis()
    assert template.startswith("problem  chat template the model must have a chat template")
    *_, prompt = diagnosis(chat_template="none")
    assert prompt.startswith("ok       first prompt  4 tokens: '")


def test_a_class_with_a_wrong_attribute_is_one_line(
    diagnosis: Callable[..., list[str]], tmp_path: Path
) -> None:
    (tmp_path / "doctored_task.py").write_text(
        "from titan_grpo.rollout.tasks.built_in import Digits\n"
        "class Stopped(Digits):\n    stop_token_ids = 2\n"
    )
    (problem,) = diagnosis(task="doctored_task:Stopped", reward="", dataset="")
    said = "a task's stop_token_ids must be a sequence of token ids, got 2"
    assert problem.startswith(f"problem  task          {said}")


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("none.jsonl", "rollout.task_path must be an existing file or pattern, got 'none.jsonl'"),
        ("bare.jsonl", "a column that rollout.task_path 'bare.jsonl' must have; it has prompt"),
    ],
)
def test_the_data_of_gsm8k_are_named_by_the_key_that_is_set_with_the_script_that_makes_them(
    diagnosis: Callable[..., list[str]], path: str, words: str
) -> None:
    (problem,) = diagnosis(task="gsm8k", task_path=path, reward="", dataset="")
    assert problem.endswith(f"{words} (scripts/get_gsm8k.py makes that file)")


def test_an_agent_is_imported_and_shown_its_first_row(
    diagnosis: Callable[..., list[str]], tmp_path: Path
) -> None:
    (tmp_path / "doctored_agent.py").write_text(
        "def solve(base_url, api_key, row):\n    return 1\n\ndef play(url):\n    return 1\n"
    )
    agent, template = diagnosis(agent="doctored_agent:solve", reward="")
    assert agent.startswith("ok       agent         doctored_agent:solve, with {'prompt': '")
    assert template.startswith("ok       chat template '<bos>user: hello")
    (problem,) = diagnosis(agent="doctored_agent:other", reward="")
    assert problem.startswith("problem  agent         rollout.agent 'doctored_agent:other' must be")
    (problem,) = diagnosis(agent="doctored_agent:play", reward="")
    taken = "must take (base_url, api_key, row): too many positional arguments"
    assert f"rollout.agent 'doctored_agent:play' {taken}" in problem
    (problem,) = diagnosis(agent="builtins:max", reward="")
    assert "must take (base_url, api_key, row): no signature found" in problem


EVALUATION = """
[grpo]
async_weight_update = true

[[evaluation]]
name = "held_out"
reward = ["{reward}"]
dataset = "rows.jsonl"
"""


def test_an_evaluation_is_looked_at_like_the_run(
    diagnosis: Callable[..., list[str]], tmp_path: Path
) -> None:
    job = tmp_path / "job.toml"
    given = {"reward": "doctored_rewards:right", "job": str(job)}
    job.write_text(EVALUATION.format(reward="doctored_rewards:right"))
    *_, prompt = diagnosis(**given)
    assert prompt.startswith(
        "ok       first prompt  evaluation 'held_out': 22 tokens: '<bos>user: "
    )
    job.write_text(EVALUATION.format(reward="doctored_rewards:wrong"))
    lines = diagnosis(**given)
    problems = [line for line in lines if line.startswith("problem")]
    start = "problem  reward        evaluation 'held_out'.reward 'doctored_rewards:wrong'"
    assert [line.startswith(start) for line in problems] == [True]
