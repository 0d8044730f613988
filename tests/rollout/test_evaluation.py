"""One evaluation: reward functions on rows, refusals, failures; against an HTTP server that stands
for an engine's faults. Its figures against their definitions, by counting."""

import asyncio
import json
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.rollout.conftest import CompletionServer, MakeServer, answer, piece
from titan_grpo.config.rollout import Rollout
from titan_grpo.config.task import Evaluation, inherited
from titan_grpo.errors import ConfigError, DataError, PeerError
from titan_grpo.observe.schema import Estimate, Evaluated
from titan_grpo.protocol.messages import ServerState
from titan_grpo.rollout import evaluation
from titan_grpo.rollout.codec import TextCodec
from titan_grpo.rollout.evaluation import (
    EvaluationFailed,
    Job,
    Prompted,
    estimate,
    evaluate,
    line,
    metrics,
    of_version,
    pass_at_k,
    passes,
    prepare,
)
from titan_grpo.rollout.messages import RolloutSpec
from titan_grpo.rollout.task_runner import TaskFailed, TaskRunner
from titan_grpo.samples import Completion, Group, Prompt

ROWS, SAMPLES = 5, 3


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
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
def job(folder: Path, model_dir: str) -> Callable[..., Job]:

    def make(reward: str = "worth", **keys: Any) -> Job:
        rollout = Rollout(chat_template="none", max_completion_tokens=4)
        table = {"name": "own", "dataset": str(folder / "rows.jsonl"), "samples": SAMPLES}
        table |= {"reward": [f"own_rewards:{reward}"], "pass_at": [1, 2], "pass_reward": 3.0}
        settings = Evaluation(**inherited(table | keys, rollout))
        spec = RolloutSpec.from_config(rollout, model_dir)
        return Job.of(settings, spec)

    return make


def run(job: Job, server: CompletionServer) -> Evaluated:
    state = ServerState(server.url, 7, True, "run:7:f", "vllm")
    return asyncio.run(evaluate(job, state, prepare(job), ""))


def test_each_row_is_asked_as_often_as_there_are_samples_and_its_reward_counts_once(
    job: Callable[..., Job], completion_server: MakeServer
) -> None:
    server = completion_server()
    found = run(job(), server)
    assert (found.prompts, found.samples, found.refused, found.version) == (ROWS, SAMPLES, 0, 7)
    assert found.reward.value == sum(range(ROWS)) / ROWS
    assert found.passed["1"].value == found.passed["2"].value == 2 / ROWS, "rows 3 and 4"
    assert found.tokens.value == 4
    asked = [(tuple(body["prompt"]), body["seed"]) for body in server.bodies]
    assert sorted(Counter(prompt for prompt, _ in asked).values()) == [SAMPLES] * ROWS
    assert len({seed for _, seed in asked}) == ROWS * SAMPLES
    # The same each time.
    run(job(), server)
    again = [(tuple(body["prompt"]), body["seed"]) for body in server.bodies[len(asked) :]]
    assert sorted(again) == sorted(asked)


def test_a_prompt_that_the_server_refuses_is_counted_and_in_no_figure(
    job: Callable[..., Job], completion_server: MakeServer
) -> None:
    server = completion_server()
    longest = 2 * ROWS
    server.behaviour = lambda body: (
        (400, {"error": "too long"}) if len(body["prompt"]) >= longest else server.good(body)
    )
    found = run(job(), server)
    assert (found.prompts, found.refused) == (ROWS - 1, 1)
    assert found.reward.value == sum(range(ROWS - 1)) / (ROWS - 1)


def test_the_interval_is_that_of_the_prompts_means_however_many_completions_they_have(
    job: Callable[..., Job], completion_server: MakeServer
) -> None:
    assert run(job(), completion_server()).reward == estimate([0.0, 1.0, 2.0, 3.0, 4.0])


def test_an_evaluation_leaves_out_no_group_and_begins_with_the_first_row() -> None:
    spec = RolloutSpec(
        model_dir="", accept="m:f", state={"cursor": {"low": 4, "above": []}}, waiting={4: 1}
    )
    table = Evaluation(name="own", samples=SAMPLES, accept="m:g", min_completion_tokens=3)
    own = Job.of(table, spec).spec
    assert (own.accept, own.min_completion_tokens, own.state, own.waiting) == ("", 0, {}, {})


def test_completions_that_are_unfit_are_made_again(
    job: Callable[..., Job], completion_server: MakeServer
) -> None:
    server = completion_server()
    server.behaviour = lambda body: answer(
        [80] * body["max_tokens"], [1.0 if len(server.bodies) == 1 else -1.0] * body["max_tokens"]
    )
    assert run(job(samples=1, pass_at=[1], rows=1), server).prompts == 1
    assert len(server.bodies) == 2


def test_an_evaluation_has_each_row_of_its_dataset_once_at_most(job: Callable[..., Job]) -> None:
    assert [prepare(job(rows=rows))[1] for rows in (0, 3, 2 * ROWS)] == [ROWS, 3, ROWS]


def test_a_prompt_that_leaves_no_room_for_a_completion_is_counted_and_not_asked(
    job: Callable[..., Job], completion_server: MakeServer
) -> None:
    server, plain = completion_server(), job()
    rows = replace(plain, spec=replace(plain.spec, row_tokens=2 * ROWS))  # the longest prompt
    server.behaviour = lambda body: answer([80] * body["max_tokens"], [-1.0] * body["max_tokens"])
    found = run(rows, server)
    assert (found.prompts, found.refused) == (ROWS - 1, 1)
    assert max(len(body["prompt"]) + body["max_tokens"] for body in server.bodies) == 2 * ROWS


def test_a_server_that_fails_for_a_moment_costs_an_attempt_and_one_that_stays_so_the_result(
    job: Callable[..., Job], completion_server: MakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(evaluation, "RETRY_S", 0.01)
    server = completion_server()
    failed: list[dict[str, Any]] = []

    def fail_once(body: dict[str, Any]) -> tuple[int, Any]:
        if not failed:
            failed.append(body)
            return 503, {"error": "busy"}
        return server.good(body)

    server.behaviour = fail_once
    assert run(job(), server).prompts == ROWS
    server.behaviour = lambda body: (503, {"error": "busy"})
    with pytest.raises(PeerError, match=r"prompt \d could not be finished"):
        run(job(), server)


def test_a_completion_that_an_error_of_the_server_broke_off_goes_on_with_another_seed(
    job: Callable[..., Job], completion_server: MakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(evaluation, "RETRY_S", 0.0)
    server = completion_server()
    broken = b'data: {"error": {"message": "engine error", "code": 500}}\n\n'
    server.behaviour = lambda body: (
        (200, iter([piece([7, 8]), broken]))
        if len(server.bodies) == 1
        else answer([80] * body["max_tokens"], [-1.0] * body["max_tokens"])
    )
    run(job(samples=1, pass_at=[1], rows=1), server)
    first, again = server.bodies
    # With the same seed, the random numbers of the tokens so far would come again.
    assert again["seed"] != first["seed"]


def test_prompts_are_asked_while_the_rewards_of_others_are_awaited(
    job: Callable[..., Job], completion_server: MakeServer
) -> None:
    server, narrow = completion_server(), job(concurrent_requests=SAMPLES, timeout_s=20.0)

    async def evaluated() -> Evaluated:
        loop, all_asked = asyncio.get_running_loop(), asyncio.Event()

        def behaviour(body: dict[str, Any]) -> tuple[int, Any]:
            if len(server.bodies) == ROWS * SAMPLES:
                loop.call_soon_threadsafe(all_asked.set)
            return server.good(body)

        async def reward(*_: object) -> float:
            await all_asked.wait()
            return 0.5

        server.behaviour = behaviour
        task = SimpleNamespace(prompt=lambda index, codec: Prompt(index, (3, index)), reward=reward)
        runner = TaskRunner(task, TextCodec(narrow.spec.model_dir, narrow.spec), narrow.spec)
        state = ServerState(server.url, 7, True, "run:7:f", "vllm")
        return await evaluate(narrow, state, (runner, ROWS), "")

    assert asyncio.run(evaluated()).reward.value == 0.5


def test_a_mistake_in_a_reward_function_is_shown_with_its_row(
    job: Callable[..., Job], completion_server: MakeServer
) -> None:
    with pytest.raises(TaskFailed) as failed:
        run(job("broken"), completion_server())
    text = evaluation.failure(failed.value).text
    assert "my own mistake" in text
    assert "own_rewards.py" in text
    assert "row" in text


def test_a_reward_that_is_no_number_is_the_tasks_mistake_and_not_tried_again(
    job: Callable[..., Job], folder: Path, completion_server: MakeServer
) -> None:
    (folder / "own_task.py").write_text(
        "from titan_grpo.rollout.tasks.built_in import Digits\n"
        "class Undefined(Digits):\n    async def reward(self, *_):\n        return float('nan')\n"
    )
    table = Evaluation(name="own", task="own_task:Undefined", rows=1, samples=SAMPLES)
    server = completion_server()
    with pytest.raises(DataError, match="one of prompt 0 is not") as failed:
        run(Job.of(table, job().spec), server)
    assert not evaluation.failure(failed.value).again
    assert len(server.bodies) == SAMPLES


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"reward": "absent"}, ".reward 'own_rewards:absent' must be a function"),
        ({"dataset": "rollout.dataset/none.jsonl"}, ".dataset must be an existing file"),
        ({"dataset_filter": ["worth > 99"]}, ".dataset '{rows}' has no row that passes"),
        ({"dataset_filter": ["worth > many"]}, ".dataset_filter must compare with a JSON value"),
        ({"dataset_filter": ["size > 9"]}, ".dataset_filter asks for 'size', a column that"),
        ({"dataset_split": "test"}, ".dataset_split must be "),
        ({"prompt": "{text}"}, ".prompt asks for 'text', a column that"),
        ({"tools": "none.json"}, ".tools must be a JSON file"),
        ({"chat_template": "none.jinja"}, ".chat_template cannot be read"),
    ],
)
def test_a_mistake_names_the_tables_keys_and_the_users_paths_as_they_are(
    job: Callable[..., Job], folder: Path, keys: dict[str, list[str] | str], said: str
) -> None:
    with pytest.raises((ConfigError, DataError, TaskFailed)) as refused:
        prepare(job(**keys))
    error = getattr(refused.value, "error", refused.value)
    wanted = said.format(rows=folder / "rows.jsonl")
    assert str(error).startswith(f"evaluation 'own'{wanted}"), str(error)
    assert "rollout." not in str(error).replace("'rollout.dataset/none.jsonl'", "")


def test_an_evaluation_that_takes_too_long_has_no_result(
    job: Callable[..., Job], completion_server: MakeServer
) -> None:
    server = completion_server()
    server.behaviour = server.hang
    with pytest.raises(EvaluationFailed, match=r"it was not over after 0\.5 s"):
        run(job(timeout_s=0.5), server)


@pytest.mark.parametrize("samples", [1, 4, 7])
def test_pass_at_k_is_the_share_of_all_choices_of_k_completions_that_have_one_that_passes(
    samples: int,
) -> None:
    for passed in range(samples + 1):
        outcomes = [True] * passed + [False] * (samples - passed)
        for k in range(1, samples + 1):
            chosen = [any(each) for each in combinations(outcomes, k)]
            assert pass_at_k(samples, passed, k) == pytest.approx(sum(chosen) / len(chosen))


def test_an_estimate_is_the_mean_with_1_96_standard_errors_to_either_side() -> None:
    found = estimate([0.0, 1.0, 1.0, 0.0])
    assert found.value == 0.5
    assert found.low is not None
    assert found.high is not None
    # deviation sqrt(1 / 3), over sqrt(4) prompts
    assert found.high - 0.5 == pytest.approx(1.959964 * (1 / 3) ** 0.5 / 2)
    assert 0.5 - found.low == pytest.approx(found.high - 0.5)
    assert estimate([0.25]) == Estimate(0.25, None, None), "one prompt says nothing of its spread"


def test_completions_of_one_prompt_make_the_interval_no_narrower() -> None:
    once = passes([Prompted((1.0,), (3,)), Prompted((0.0,), (3,))], 1, 1.0)
    many = passes([Prompted((1.0,) * 50, (3,) * 50), Prompted((0.0,) * 50, (3,) * 50)], 1, 1.0)
    assert once == many


def test_a_completion_passes_with_at_least_the_least_reward() -> None:
    prompts = [Prompted((0.5, 0.4), (3, 3)), Prompted((0.1, 0.2), (3, 3))]
    assert passes(prompts, 1, 0.5).value == 0.25
    assert passes(prompts, 2, 0.5).value == 0.5
    assert passes(prompts, 1, 0.0).value == 1.0


@pytest.mark.parametrize(
    ("first", "last", "spans", "kept"),
    [
        (5, 5, (), True),
        (5, 5, ((5, 2),), True),
        (5, 6, ((5, 1), (6, 1)), False),
        (4, 5, ((5, 2),), False),
        (6, 6, ((6, 2),), False),
    ],
)
def test_only_tokens_of_the_version_on_its_own_kv_count(
    first: int, last: int, spans: tuple[tuple[int, int], ...], kept: bool
) -> None:
    whole = Completion((7, 8), (-1.0, -1.0), "stop", 5, 5, "a")
    other = Completion((7, 8), (-1.0, -1.0), "stop", first, last, "a", spans=spans)
    assert of_version(Group(Prompt(0, (1,)), (whole, other)), 5) is kept


def test_the_metrics_have_the_evaluations_name_and_no_bound_that_there_is_not() -> None:
    one = Estimate(0.5, None, None)
    found = Evaluated("test", 7, "a", 1, 2, one, {"2": Estimate(1.0, 0.5, 1.5)}, one, 3, 2.0)
    assert metrics(found) == {
        "evaluation/test/version": 7.0,
        "evaluation/test/refused": 3.0,
        "evaluation/test/seconds": 2.0,
        "evaluation/test/reward": 0.5,
        "evaluation/test/tokens": 0.5,
        "evaluation/test/pass_at_2": 1.0,
        "evaluation/test/pass_at_2_low": 0.5,
        "evaluation/test/pass_at_2_high": 1.5,
    }
    assert "pass@2 1.000 (0.500 to 1.500)" in line(found)
    assert "3 refused" in line(found)
