"""Tasks of several turns, how a task is called, and what its own errors may cost."""

import asyncio
import random
import re
import sys
import threading
from collections.abc import Awaitable, Iterable, Sequence
from functools import partial
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.rigs.present import present
from tests.rollout.conftest import CompletionServer, MakeServer, StartClient
from tests.rollout.sampling import DONE, PROMPT, Letters, holding, runner, sample, sampler_of
from titan_grpo.config.task import TaskKeys
from titan_grpo.errors import ConfigError, PeerError, TaskError
from titan_grpo.protocol.messages import ServerState
from titan_grpo.rollout.codec import TextCodec
from titan_grpo.rollout.messages import RolloutSpec
from titan_grpo.rollout.sampler import Interrupted, Sampler, answered
from titan_grpo.rollout.schedule import Server
from titan_grpo.rollout.task_runner import Codec, TaskFailed, TaskOptions, TaskRunner, Turn, at_once
from titan_grpo.rollout.tasks.built_in import Calculator
from titan_grpo.rollout.tasks.functions import load_task
from titan_grpo.samples import NO_TOKENS, TURN_OVER, Completion, Prompt


def test_a_request_has_the_stops_of_the_run_and_of_its_task(
    completion_server: MakeServer, model_dir: str
) -> None:
    task: Any = load_task("digits", TaskOptions())
    task.stop, task.stop_token_ids = ("\n",), [7]  # as a user's class would say them
    spec = RolloutSpec(model_dir=model_dir, group_size=1, stop=["END"], stop_token_ids=[9])
    made = Sampler(spec, TaskRunner(task, TextCodec(model_dir), spec))
    completions = completion_server()
    server = holding(completions.url, 3)
    sample(made, [NO_TOKENS], server)
    (body,) = completions.bodies
    assert (body["stop"], body["stop_token_ids"]) == (["END", "\n"], [9, 7])


def test_stops_of_a_task_may_be_none() -> None:
    task = SimpleNamespace(reward=None, stop=None, stop_token_ids=None)
    assert TaskRunner(task, Letters(), TaskKeys()).stops == ((), ())


@pytest.mark.parametrize(
    "stops",
    [
        {"stop": "END"},
        {"stop": [""]},
        {"stop": 3},
        {"stop_token_ids": ["7"]},
        {"stop_token_ids": 2},
    ],
)
def test_stops_of_a_task_that_are_none_are_refused_at_its_start(stops: dict[str, Any]) -> None:
    task = SimpleNamespace(reward=None, **stops)
    with pytest.raises(ConfigError, match=f"a task's {next(iter(stops))} must be"):
        Sampler(RolloutSpec(model_dir=""), TaskRunner(task, Letters(), TaskKeys()))


@pytest.mark.parametrize("mistake", ["{}['my key']", "raise SystemExit(3)"])
def test_a_class_that_breaks_when_it_is_made_is_shown_from_its_own_line_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mistake: str
) -> None:
    monkeypatch.delitem(sys.modules, "breaks", raising=False)
    (tmp_path / "breaks.py").write_text(
        f"class Task:\n    def __init__(self, options):\n        {mistake}\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(TaskFailed) as failed:
        load_task("breaks:Task", TaskOptions())
    assert mistake in failed.value.report
    assert "functions.py" not in failed.value.report


def test_an_episode_keeps_its_budget_and_knows_which_tokens_are_the_policys() -> None:
    chance = random.Random(4)
    for _ in range(500):
        part, made, budget, answers = NO_TOKENS, [], 30, 0
        while not part.finished:
            count = chance.randint(1, budget - len(part.token_ids))
            ids = tuple(chance.randrange(99) for _ in range(count))
            made += [(token, -1.0, True) for token in ids]
            version = chance.randrange(9)
            turn = Completion(ids, (-1.0,) * count, TURN_OVER, version, version, "")
            part = part.then(turn)
            context = (
                tuple(chance.randrange(99) for _ in range(chance.randint(1, 9)))
                if chance.random() < 0.8
                else None
            )
            room = budget - len(part.token_ids)
            part = answered(part, context, budget)
            assert part.finish_reason == (
                "stop" if context is None else "length" if len(context) >= room else ""
            )
            if not part.finished:
                made += [(token, 0.0, False) for token in context or ()]
                answers += 1
        assert [t for t, _, _ in made] == list(part.token_ids)
        assert sum(count for _, count in part.token_spans) == len(made)
        assert [p for _, p, _ in made] == list(part.logprobs)
        assert [s for _, _, s in made] == list(part.sampled or [True] * len(made))
        assert part.num_sampled == sum(sampled for _, _, sampled in made)
        assert part.answers == answers
        assert len(made) <= budget


def test_no_more_calls_of_a_task_are_in_flight_than_its_limit() -> None:
    async def run() -> tuple[int, float]:
        inside, most, full = 0, 0, asyncio.Event()

        async def reward(*_: object) -> float:
            nonlocal inside, most
            inside += 1
            most = max(most, inside)
            if inside == 3:
                full.set()
            await asyncio.wait_for(full.wait(), 60)
            inside -= 1
            return 1.0

        three = runner(reward, limit=3)
        rewards = await asyncio.gather(*(three.reward(PROMPT, DONE) for _ in range(20)))
        return most, sum(rewards)

    assert asyncio.run(run()) == (3, 20.0)


class Plain(Letters):
    """A task of plain functions, and one whose functions return awaitables."""

    def prompt(self, index: int, codec: Codec) -> Prompt:
        return PROMPT

    def reward(self, prompt: Prompt, text: str, token_ids: Sequence[int]) -> float:
        assert threading.current_thread() is not threading.main_thread()
        return 0.5

    def wrapped(self, *_: object) -> Awaitable[float]:
        async def reward() -> float:
            return 0.25

        return reward()


def test_plain_functions_run_in_threads_and_coroutines_in_the_loop() -> None:
    plain = Plain()
    assert asyncio.run(runner(plain.reward).reward(PROMPT, DONE)) == 0.5
    assert asyncio.run(runner(plain.wrapped).reward(PROMPT, DONE)) == 0.25
    loop = SimpleNamespace(
        prompt=plain.prompt, turn=lambda *_: (4,), episode_reward=lambda *_: 0.75
    )
    both = TaskRunner(loop, Letters(), TaskKeys())
    assert asyncio.run(both.turn(PROMPT, DONE)) == (4,)
    assert asyncio.run(both.reward(PROMPT, DONE)) == 0.75


def test_a_call_past_its_deadline_is_the_tasks_error() -> None:
    async def never(*_: object) -> None:
        await asyncio.Event().wait()

    with pytest.raises(TaskFailed, match="reward failed: TimeoutError") as caught:
        asyncio.run(runner(never, timeout_s=0.05).reward(PROMPT, DONE))
    assert caught.value.error.__notes__ == [
        "rollout.task_timeout_s = 0.05 ran out in the task's reward"
    ]


def test_a_servers_error_or_a_cancellation_that_a_task_lets_out_is_the_tasks_error() -> None:
    async def judge(*_: object) -> None:
        raise PeerError("the judge is down")

    async def cancelled(*_: object) -> None:
        raise asyncio.CancelledError

    for reward in (judge, cancelled):
        with pytest.raises(TaskFailed):
            asyncio.run(runner(reward).reward(PROMPT, DONE))


@pytest.mark.parametrize("hides", [False, True])
def test_a_cancelled_call_is_cancelled_and_not_the_tasks_error(hides: bool) -> None:
    async def run() -> bool:
        entered = asyncio.Event()

        async def reward(*_: object) -> None:
            entered.set()
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                if hides:
                    raise RuntimeError("the tool was cut off") from None
                raise

        call = asyncio.create_task(runner(reward).reward(PROMPT, DONE))
        await asyncio.wait_for(entered.wait(), 60)
        call.cancel()
        await asyncio.wait([call], timeout=60)
        return call.cancelled()

    assert asyncio.run(run())


def test_an_error_inside_a_tasks_own_task_group_is_its_error_and_no_cancellation() -> None:
    async def reward(*_: object) -> None:
        async def tool() -> None:
            raise ValueError("the tool broke")

        async with asyncio.TaskGroup() as tools:
            tools.create_task(tool())

    with pytest.raises(TaskFailed, match="ExceptionGroup"):
        asyncio.run(runner(reward).reward(PROMPT, DONE))


def test_the_first_error_of_calls_at_once_ends_the_others_and_marks_nobody_as_cancelled() -> None:
    async def run() -> tuple[list[bool], int]:
        ended = []

        async def waits() -> None:
            try:
                await asyncio.Event().wait()
            finally:
                ended.append(True)

        async def breaks() -> None:
            await asyncio.sleep(0)
            raise ValueError("broken")

        with pytest.raises(ValueError, match="broken"):
            await at_once([waits(), breaks(), waits()])
        return ended, present(asyncio.current_task()).cancelling()

    assert asyncio.run(run()) == ([True, True], 0)


def test_calls_at_once_end_with_their_caller() -> None:
    async def run() -> tuple[bool, list[bool]]:
        entered = asyncio.Event()
        ended: list[bool] = []

        async def waits() -> None:
            entered.set()
            try:
                await asyncio.Event().wait()
            finally:
                ended.append(True)

        caller = asyncio.create_task(at_once([waits(), waits()]))
        await asyncio.wait_for(entered.wait(), 60)
        caller.cancel()
        await asyncio.wait([caller], timeout=60)
        return caller.cancelled(), ended

    assert asyncio.run(run()) == (True, [True, True])


@pytest.mark.parametrize("answer", [(), (1, -2), "text"])
def test_an_answer_that_is_no_tokens_is_the_tasks_error(answer: object) -> None:
    async def turn(*_: object) -> object:
        return answer

    task = SimpleNamespace(prompt=turn, turn=turn, episode_reward=turn)
    with pytest.raises(TaskFailed, match="at least one token id"):
        asyncio.run(TaskRunner(task, Letters(), TaskKeys()).turn(PROMPT, DONE))


@pytest.mark.parametrize(
    ("base", "body", "message"),
    [
        ("Digits", "async def turn(self, *_): ...", "both of turn and episode_reward"),
        (
            "",
            "def __init__(self, _): ...\n    def rewards(self, *_): ...",
            "one of the methods reward, group_reward, episode_reward, it has none",
        ),
        (
            "",
            "def __init__(self, _): ...\n    def reward(self, *_): ...",
            r"must have the method prompt\(index, codec\), it has none",
        ),
    ],
    ids=["half a loop", "no reward", "no prompt"],
)
def test_a_class_that_lacks_a_method_is_refused_at_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, base: str, body: str, message: str
) -> None:
    monkeypatch.delitem(sys.modules, "part_task", raising=False)
    (tmp_path / "part_task.py").write_text(
        f"from titan_grpo.rollout.tasks.built_in import Digits\nclass Part({base}):\n    {body}\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ConfigError, match=message):
        load_task("part_task:Part", TaskOptions())


def test_the_calculator_answers_calls_and_rewards_what_the_policy_says_after_them() -> None:
    task, codec = load_task("calculator", TaskOptions(seed=1)), Letters()
    assert isinstance(task, Calculator)
    prompt = task.prompt(4, codec)
    assert prompt == load_task("calculator", TaskOptions(seed=1)).prompt(4, codec)
    total = prompt.payload["sum"]

    def turns(*texts: str) -> list[Turn]:
        return [Turn(codec.encode(text), place % 2 == 0, text) for place, text in enumerate(texts)]

    told = present(asyncio.run(task.turn(prompt, turns("so [12+30]"), codec)))
    assert codec.decode(told) == "=42\n"
    assert asyncio.run(task.turn(prompt, turns("[12+30] is 42"), codec)) is None
    assert asyncio.run(task.episode_reward(prompt, turns("[1+1]", "=2\n", f"it is {total}"))) == 1
    assert asyncio.run(task.episode_reward(prompt, turns("[1+1]", "=2\n", "no idea"))) == 0
    assert asyncio.run(task.episode_reward(prompt, turns(f"[{total}+0]", f"={total}\n"))) == 0


def test_an_episode_that_waited_for_the_task_when_it_was_cancelled_samples_nothing_again() -> None:
    said = tuple(map(ord, "it is 7"))
    parts = [
        Completion(said, (-1.0,) * len(said), TURN_OVER, 3, 4, ""),
        Completion((1,), (-1.0,), "stop", 4, 4, ""),
    ]
    absent = holding("http://127.0.0.1:9", 5)  # A request would fail.
    group = sample(sampler_of("calculator", "", 2, 40), parts, absent)
    assert [(c.token_ids, c.version_first, c.finish_reason) for c in group.completions] == [
        (said, 3, "stop"),
        ((1,), 4, "stop"),
    ]


def test_an_episode_goes_on_elsewhere_when_its_server_became_unknown_after_a_turn() -> None:
    said = tuple(map(ord, "[3+4]"))
    parts = [Completion(said, (-1.0,) * len(said), TURN_OVER, 3, 4, "")]
    unknown = Server(ServerState("http://127.0.0.1:9", None, False, "", "vllm"))
    with pytest.raises(Interrupted):
        sample(sampler_of("calculator", "", 1, 40), parts, unknown)
    assert parts[0].token_ids == (*said, *map(ord, "=7\n"))
    assert not parts[0].waits


def test_the_example_of_the_documentation_is_a_task(root: Path) -> None:
    blocks = re.findall(r"```python\n(.*?)```", (root / "docs" / "tasks.md").read_text(), re.DOTALL)
    space: dict[str, Any] = {}
    for source in blocks:
        exec(source, space)
    assert space["correct"](["is 5", "is 6"], ["5", "5"]) == [1.0, 0.0]
    task, codec = space["GuessTheNumber"](TaskOptions(seed=2)), Letters()
    prompt = task.prompt(3, codec)
    secret = prompt.payload["secret"]
    low, right = Turn((1,), True, str(secret - 1)), Turn((1,), True, str(secret))
    assert TaskRunner(task, codec, TaskKeys()).multi_turn
    assert codec.decode(asyncio.run(task.turn(prompt, [low], codec))) == " too low. Again: "
    assert asyncio.run(task.turn(prompt, [low, Turn((2,), False, "?"), right], codec)) is None
    assert asyncio.run(task.turn(prompt, [Turn((1,), True, "²")], codec)) is None
    assert task.episode_reward(prompt, [right]) == 1.0


GROUP = 2


@pytest.fixture
def start(model_dir: str, start_client: StartClient) -> StartClient:
    """A factory of started clients of the calculator; changes of the spec as keywords."""
    spec = RolloutSpec(
        model_dir=model_dir,
        seed=5,
        max_staleness=0,
        prompts_per_step=2,
        group_size=GROUP,
        max_completion_tokens=40,
        task="calculator",
    )
    return partial(start_client, spec)


def ids(text: str) -> list[int]:
    return [ord(c) - 29 for c in text]


def text_of(token_ids: Iterable[int]) -> str:
    return "".join(chr(t + 29) for t in token_ids)


EOS = 2


@pytest.fixture
def sums(completion_server: MakeServer) -> CompletionServer:
    """A server whose model asks the calculator for the prompt's sum, and then says what it was
    answered."""
    server = completion_server()

    def behaviour(body: dict[str, Any]) -> tuple[int, Any]:
        question, _, rest = text_of(body["prompt"]).partition("?")
        *_, answered = rest.rpartition("=")
        said = f"so {answered.strip(chr(29))}" if "=" in rest else f"[{question.removesuffix('=')}]"
        tokens = [*ids(said), EOS]
        return server.answer(tokens, [-1.0] * len(tokens), "stop")

    server.behaviour = behaviour
    return server


@pytest.mark.e2e
def test_a_tool_loop_makes_episodes_whose_tool_tokens_are_not_trained_on(
    start: StartClient, sums: CompletionServer
) -> None:
    client = start(sums)
    batch = client.next_batch(0, 2, 60)
    for group in batch:
        total = str(group.prompt.payload["sum"])
        for completion in group.completions:
            flagged = zip(completion.sampled, completion.token_ids, strict=True)
            pairs = groupby(flagged, itemgetter(0))
            stretches = [(sampled, [token for _, token in run]) for sampled, run in pairs]
            call, answered, said = (
                text_of(t for t in tokens if t != EOS) for _, tokens in stretches
            )
            assert [sampled for sampled, _ in stretches] == [True, False, True]
            assert (call[0], answered.strip("\x1d\n")) == ("[", f"={total}")
            assert (said, completion.reward) == (f"so {total}", 1.0)
            assert completion.num_sampled == len(completion.token_ids) - len(stretches[1][1])
            assert {
                p for p, s in zip(completion.logprobs, completion.sampled, strict=True) if s
            } == {-1.0}
    counters = client.counters()
    assert counters["requests"] == len(sums.bodies) == 2 * GROUP * 2
    assert counters["tokens"] == sum(c.num_sampled for group in batch for c in group.completions)
    for body in sums.bodies:
        longer = [
            b
            for b in sums.bodies
            if len(b["prompt"]) > len(body["prompt"]) and b["prompt"][0] == body["prompt"][0]
        ]
        assert all(b["max_tokens"] < body["max_tokens"] for b in longer)


BROKEN = """
from titan_grpo.rollout.tasks.built_in import Calculator
class Broken(Calculator):
    async def turn(self, prompt, turns, codec):
        if prompt.index == 0:
            raise KeyError("the tool is gone")
        return await super().turn(prompt, turns, codec)
"""


@pytest.fixture
def broken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A calculator that fails for its first prompt."""
    (tmp_path / "broken_tool.py").write_text(BROKEN)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    return "broken_tool:Broken"


@pytest.mark.e2e
def test_a_tasks_errors_within_their_budget_cost_groups_and_not_the_run(
    start: StartClient, sums: CompletionServer, broken: str
) -> None:
    client = start(sums, task=broken, task_error_budget=3)
    assert [g.prompt.index for g in client.next_batch(0, 2, 60)] == [1, 2]
    counters = client.counters()
    assert (counters["dropped.task_error"], counters["skipped"]) == (3, 1)


@pytest.mark.e2e
def test_a_tasks_error_beyond_its_budget_stops_the_run_with_its_traceback(
    start: StartClient, sums: CompletionServer, broken: str
) -> None:
    client = start(sums, task=broken, task_error_budget=2)
    with pytest.raises(TaskError) as caught:
        client.next_batch(0, 2, 60)
    text = str(caught.value)
    assert re.search(r"(?s)in turn.*the tool is gone.*task_error_budget allows 2", text)
    assert "titan_grpo/" not in text
