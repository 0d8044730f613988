"""Reward functions in the rollout process, and the example's."""

import json
import re
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.example_files import command_of, lines_written
from tests.rigs.trainer_handle import wait_until
from tests.rollout.conftest import MakeServer, StartClient
from tests.rollout.rows import SUMS, write_rows
from titan_grpo.errors import TaskError
from titan_grpo.rollout import child
from titan_grpo.rollout.client import RolloutClient
from titan_grpo.rollout.codec import TextCodec
from titan_grpo.rollout.messages import RolloutSpec

MISTAKEN = """
def helper(row):
    return 1 / (row - 3)

def reward(completions, answer):
    return [helper(a) for a in answer]
"""


@pytest.fixture
def started(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    model_dir: str,
    completion_server: MakeServer,
    start_client: StartClient,
) -> StartClient:
    """A factory: the source of a module -> a started client whose reward is its ``reward``."""

    def make(source: str, **changes: Any) -> RolloutClient:
        (tmp_path / "own_rewards.py").write_text(source)
        monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
        spec = RolloutSpec(
            model_dir=model_dir,
            dataset=write_rows(tmp_path / "rows.jsonl", SUMS),
            dataset_shuffle=False,
            max_staleness=0,
            group_size=2,
            chat_template="none",
            **{"prompts_per_step": 2, "reward": ["own_rewards:reward"], **changes},
        )
        return start_client(spec, completion_server())

    return make


@pytest.mark.e2e
def test_a_mistake_in_a_function_shows_its_traceback_and_the_row_and_no_line_of_ours(
    started: StartClient, tmp_path: Path
) -> None:
    made = started(MISTAKEN, prompts_per_step=3)
    with pytest.raises(TaskError) as caught:
        made.next_batch(0, 3, 60)
    text = str(caught.value)
    assert text.splitlines()[0] == (
        "the task's reward failed: ZeroDivisionError: division by zero (rollout.reward"
        f" 'own_rewards:reward', row 2 of {tmp_path}/rows.jsonl:"
        " {'prompt': '2+1=', 'answer': 3, 'level': 2})"
    )
    assert f'File "{tmp_path}/own_rewards.py", line 3, in helper' in text
    assert "return 1 / (row - 3)" in text
    assert "titan_grpo/" not in text
    assert "concurrent" not in text


STUBBORN = """
import asyncio
from titan_grpo.rollout import worker

worker.EXIT_GRACE_S = 1.0  # it passes twice
entered = asyncio.Event()

async def reward(completions, answer):
    if answer[0] == 1:
        await entered.wait()
        raise KeyError("the judge is gone")
    entered.set()
    while True:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            pass
"""


@pytest.mark.e2e
def test_an_error_reaches_the_trainer_while_another_call_ignores_its_cancellation(
    started: StartClient,
) -> None:
    with pytest.raises(TaskError, match="the judge is gone"):
        started(STUBBORN).next_batch(0, 2, 60)


CARELESS = """
import asyncio
import gc

async def note():
    raise OSError("the log is gone")

async def reward(completions, answer):
    forgotten = asyncio.ensure_future(note())
    await asyncio.wait([forgotten])
    del forgotten
    gc.collect()
    # As a session of aiohttp does that is not closed.
    asyncio.get_running_loop().call_exception_handler({"message": "Unclosed client session"})
    return [1.0] * len(completions)
"""


@pytest.mark.e2e
def test_what_a_function_leaves_behind_in_the_loop_does_not_end_the_run(
    started: StartClient,
) -> None:
    groups = started(CARELESS).next_batch(0, 2, 60)
    assert [[c.reward for c in group.completions] for group in groups] == [[1.0, 1.0]] * 2


HOLDING = """
import threading
from titan_grpo.rollout import dispatch

dispatch.QUIET_S, dispatch.HELD_UP_S = 0.4, 1.0  # it looks every tenth of a second

async def reward(completions, answer):
    threading.Event().wait(2.0)
    return [1.0] * len(completions)
"""


@pytest.mark.e2e
def test_a_coroutine_that_holds_up_all_groups_is_named_and_not_their_servers(
    started: StartClient, caplog: pytest.LogCaptureFixture
) -> None:
    assert len(started(HOLDING).next_batch(0, 2, 60)) == 2
    named = r"all groups were held up for [2-9] s: a coroutine of the task"
    assert wait_until(lambda: bool(re.search(named, caplog.text)), 60)
    assert "stands still" not in caplog.text


STOPPED = """
import os
import signal

def reward(completions, answer):
    os.kill(os.getpid(), signal.SIGSTOP)
    return [1.0] * len(completions)
"""


@pytest.mark.e2e
def test_a_rollout_process_that_stands_still_is_named_and_may_go_on(
    started: StartClient, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(child, "SILENT_S", 0.5)
    before = set(psutil.Process().children())
    made = started(STOPPED, prompts_per_step=1)
    (process,) = set(psutil.Process().children()) - before
    assert wait_until(lambda: process.status() == psutil.STATUS_STOPPED, 60)
    caplog.clear()
    named = "the rollout process has given no sign for 1 s: it is stopped, by"
    assert wait_until(lambda: named in caplog.text, 60)
    process.resume()
    assert len(made.next_batch(0, 1, 60)) == 1


HANGING = """
import re
import threading
from pathlib import Path

def reward(completions, answer):
    if first():
        re.match(r"(a+)+$", "a" * 50 + "b")
    return [1.0] * len(completions)

async def awaited(completions, answer):
    if first():
        threading.Event().wait()
    return [1.0] * len(completions)

def first():
    try:
        Path(__file__).with_suffix(".called").touch(exist_ok=False)
    except FileExistsError:
        return False
    return True
"""


@pytest.mark.e2e
@pytest.mark.parametrize("name", ["reward", "awaited"])
def test_a_call_that_nothing_in_its_process_can_end_is_ended_with_the_process(
    started: StartClient,
    name: str,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(child, "SILENT_S", 2.0)
    keys = {"reward": [f"own_rewards:{name}"], "prompts_per_step": 1, "task_timeout_s": 4.0}
    made = started(HANGING, **keys)
    (group,) = made.next_batch(0, 1, 60)
    assert [c.reward for c in group.completions] == [1.0, 1.0]
    assert "no sign for 4 s (rollout.task_timeout_s is over) and was killed" in caplog.text
    assert re.search(rf"own_rewards.py\", line \d+ in {name}", capfd.readouterr().err)
    assert made.counters()["sessions_lost"] == 1


SLOW = """
import asyncio

another = asyncio.Event()

async def reward(completions, answer):
    if answer[0] == 1:
        await another.wait()
    another.set()
    return [1.0] * len(completions)
"""


@pytest.mark.e2e
def test_a_group_that_waits_for_its_rewards_holds_no_place_at_its_server(
    started: StartClient,
) -> None:
    made = started(SLOW, max_concurrent_requests=2)
    assert len(made.next_batch(0, 2, 20)) == 2
    assert set(made.in_flight(60).values()) == {0}


LINES = 10
"""Most that a user writes for an own reward on own rows in the model's chat template."""


@pytest.mark.e2e
def test_the_example_of_an_own_reward_is_ten_lines_and_rewards_its_rows(
    root: Path,
    model: str,
    codec: TextCodec,
    completion_server: MakeServer,
    start_client: StartClient,
) -> None:
    source = root / "examples" / "own_reward" / "rewards.py"
    arguments = command_of(source)
    assert lines_written(source, arguments) <= LINES
    keys = dict(zip(arguments[::2], arguments[1::2], strict=True))
    path = keys["--rollout.dataset"]
    rows = [json.loads(line) for line in (root / path).read_text().splitlines()]
    server = completion_server()

    def answers(body: dict[str, Any]) -> tuple[int, Any]:
        # A model that is right for even seeds, and says letters for odd ones.
        said = codec.decode(body["prompt"])
        a, b = map(int, re.findall(r"\d+", said))
        ids = codec.encode(str(a + b) if body["seed"] % 2 == 0 else "four")
        return server.answer(list(ids), [-1.0] * len(ids), "stop")

    server.behaviour = answers
    reward = [keys["--rollout.reward"]]
    spec = RolloutSpec(model_dir=model, reward=reward, dataset=path, group_size=4, max_staleness=0)
    groups = start_client(spec, server).next_batch(0, 8, 60)
    assert len({group.prompt.payload["row"] for group in groups}) == 8
    for group in groups:
        row = rows[group.prompt.payload["row"]]
        # <bos>, and the template's text.
        template = codec.encode(f"user: {row['prompt']}\nassistant:")
        assert group.prompt.token_ids == (1, *template)
        for completion in group.completions:
            right = codec.decode(completion.token_ids) == row["answer"]
            assert completion.reward == float(right)
    assert {c.reward for group in groups for c in group.completions} == {0.0, 1.0}
