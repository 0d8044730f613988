"""One evaluation: reward functions on rows, refusals, failures; against an HTTP server that stands
for an engine's faults."""

import asyncio
import json
from collections import Counter

import pytest

from titan_grpo.config.evaluation import Evaluation, inherited
from titan_grpo.config.rollout import Rollout
from titan_grpo.errors import PeerError
from titan_grpo.rollout import evaluation
from titan_grpo.rollout.evaluation import EvaluationFailed, Job, evaluate
from titan_grpo.rollout.scores import Scores
from titan_grpo.rollout.spec import RolloutSpec
from titan_grpo.rollout.task_runner import TaskFailed

ROWS, SAMPLES = 5, 3


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Rows, and a module with reward functions."""
    lines = [json.dumps({"prompt": "ab" * (n + 1), "worth": n}) for n in range(ROWS)]
    (tmp_path / "rows.jsonl").write_text("\n".join(lines) + "\n")
    (tmp_path / "own_rewards.py").write_text(
        "def worth(completions, worth, **_):\n    return worth\n"
        "def broken(completions, **_):\n    raise KeyError('my own mistake')\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


@pytest.fixture
def job(folder, model_dir):
    """A factory of jobs on a server."""

    def make(url: str, reward: str = "worth", **keys) -> Job:
        rollout = Rollout(chat_template="none", max_completion_tokens=4)
        table = {"name": "own", "dataset": str(folder / "rows.jsonl"), "samples": SAMPLES}
        table |= {"reward": [f"own_rewards:{reward}"], "pass_at": [1, 2], "pass_reward": 3.0}
        settings = Evaluation(**inherited(table | keys, rollout))
        spec = RolloutSpec.from_config(rollout, model_dir)
        return Job.of(settings, spec).on(url, "vllm", 7, "run:7:f")

    return make


def run(job: Job) -> Scores:
    return asyncio.run(evaluate(job, ""))


def test_each_row_is_asked_as_often_as_there_are_samples_and_its_reward_counts_once(
    job, completion_server
) -> None:
    server = completion_server()
    found = run(job(server.url))
    assert (found.prompts, found.samples, found.refused, found.version) == (ROWS, SAMPLES, 0, 7)
    assert found.reward.value == sum(range(ROWS)) / ROWS
    assert found.passed[1].value == found.passed[2].value == 2 / ROWS, "rows 3 and 4"
    assert found.tokens.value == 4
    asked = Counter(tuple(body["prompt"]) for body in server.bodies)
    assert sorted(asked.values()) == [SAMPLES] * ROWS
    assert len({body["seed"] for body in server.bodies}) == ROWS * SAMPLES


def test_the_same_prompts_and_seeds_are_asked_each_time(job, completion_server) -> None:
    server = completion_server()
    one = job(server.url, rows=2)
    for _ in range(2):
        run(one)
    asked = [(tuple(body["prompt"]), body["seed"]) for body in server.bodies]
    assert sorted(asked[: 2 * SAMPLES]) == sorted(asked[2 * SAMPLES :])


def test_a_prompt_that_the_server_refuses_is_counted_and_in_no_figure(
    job, completion_server
) -> None:
    server = completion_server()
    longest = 2 * ROWS
    server.behaviour = lambda body: (
        (400, {"error": "too long"}) if len(body["prompt"]) >= longest else server.good(body)
    )
    found = run(job(server.url))
    assert (found.prompts, found.refused) == (ROWS - 1, 1)
    assert found.reward.value == sum(range(ROWS - 1)) / (ROWS - 1)


def test_a_server_that_fails_for_a_moment_costs_an_attempt_and_one_that_stays_so_the_result(
    job, completion_server
) -> None:
    server, failed = completion_server(), []

    def fail_once(body):
        if not failed:
            failed.append(body)
            return 503, {"error": "busy"}
        return server.good(body)

    server.behaviour = fail_once
    assert run(job(server.url)).prompts == ROWS
    server.behaviour = lambda body: (503, {"error": "busy"})
    with pytest.raises(PeerError, match=r"prompt \d could not be finished"):
        run(job(server.url))


def test_a_mistake_in_a_reward_function_is_shown_with_its_row(job, completion_server) -> None:
    with pytest.raises(TaskFailed) as failed:
        run(job(completion_server().url, "broken"))
    text = evaluation.failure_text(failed.value)
    assert "my own mistake" in text
    assert "own_rewards.py" in text
    assert "row" in text


def test_an_evaluation_that_takes_too_long_has_no_result(job, completion_server) -> None:
    server = completion_server()
    server.behaviour = server.hang
    with pytest.raises(EvaluationFailed, match=r"it was not over after 0\.5 s"):
        run(job(server.url, timeout_s=0.5))
