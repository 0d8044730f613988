"""Agents of the openai client and of Pydantic AI on a real vLLM and a real SGLang: the tokens and
log-probabilities of a conversation, and a model that learns from them."""

import os
from collections.abc import Iterator
from contextlib import closing
from itertools import groupby
from pathlib import Path

import msgspec
import pytest

from tests.conformance.commits import sender
from tests.conformance.engine import EngineUnderTest
from tests.e2e.conftest import run_cli
from tests.example_files import command_of
from tests.rigs.labels import PREFIX_CACHES, Checker, Claim, Models
from titan_grpo.config.task import ENGINE
from titan_grpo.observe.recorder import read_metrics
from titan_grpo.protocol.messages import ServerState
from titan_grpo.rollout.client import RolloutClient
from titan_grpo.rollout.codec import TextCodec
from titan_grpo.rollout.messages import RolloutSpec
from titan_grpo.rollout.records import Batch
from titan_grpo.samples import Completion, Group
from titan_grpo.titan import checkpoints, export, jobconfig

pytest.importorskip("openai")
pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

VERSION, TURNS, TOKENS, WAIT_S = 60, 6, 8, 120.0
KEY_VARIABLE = "TITAN_GRPO_TEST_AGENTS_KEY"
CLOSE = 0.05
"""Greatest difference of a token's log-probability, sampled and recomputed."""

OPENAI = f"""
from openai import OpenAI

ADD = {{"type": "function", "function": {{"name": "add", "parameters": {{"type": "object"}}}}}}

def talk(base_url, api_key, row):
    client, messages = OpenAI(base_url=base_url, api_key=api_key), []
    for turn in range({TURNS}):
        messages.append({{"role": "user", "content": f"turn {{turn}}"}})
        asked = {{"model": "any", "messages": messages, "max_tokens": {TOKENS}, "tools": [ADD]}}
        if turn % 2:
            chunks = client.chat.completions.create(stream=True, **asked)
            said = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
        else:
            said = client.chat.completions.create(**asked).choices[0].message.content
        messages.append({{"role": "assistant", "content": said}})
    return row["index"]
"""


PYDANTIC_AI = f"""
from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

async def talk(base_url, api_key, row):
    provider = OpenAIProvider(base_url=base_url, api_key=api_key)
    agent, history = Agent(OpenAIChatModel("any", provider=provider)), []

    @agent.tool_plain
    def calculator(sum: str) -> str:
        return sum[::-1]

    for turn in range({TURNS}):
        settings = {{"max_tokens": {TOKENS}}}
        said = await agent.run(f"turn {{turn}}", message_history=history, model_settings=settings)
        history = said.all_messages()
    return row["index"]

def often_a_call(text):
    call = text and ord(text[-1]) % 4 == 0
    return ("", [("calculator", {{"sum": text}})]) if call else (text, [])
"""


def answers(
    group: Group, completion: Completion
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...], tuple[float, ...]]]:
    """Of each answer in a completion: the tokens before it, its own, their log-probabilities."""
    at = 0
    for mine, turn in groupby(completion.sampled or (True,) * len(completion.token_ids)):
        start, at = at, at + len(list(turn))
        if mine:
            before = group.prompt.token_ids + completion.token_ids[:start]
            yield before, completion.token_ids[start:at], completion.logprobs[start:at]


@pytest.mark.usefixtures("site")  # so that the worker runs them that has this server
@pytest.mark.parametrize(
    ("agent", "shared"),
    [
        pytest.param(OPENAI, "site", id="openai and vLLM"),
        pytest.param(OPENAI, "sglang_site", id="openai and SGLang", marks=pytest.mark.long),
        pytest.param(PYDANTIC_AI, "site", id="Pydantic AI and vLLM", marks=pytest.mark.long),
    ],
)
def test_a_conversation_is_of_the_engines_own_tokens_and_log_probabilities(
    agent: str,
    shared: str,
    request: pytest.FixtureRequest,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    site = request.getfixturevalue(shared)
    (tmp_path / "talking.py").write_text(agent)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")
    monkeypatch.setenv(KEY_VARIABLE, site.access.api_key)
    spec = RolloutSpec(
        model_dir=site.server.spec.model,
        base_version=VERSION,
        agent="talking:talk",
        # The server's own finds no call in what such a model says, and changes nothing of it.
        tool_parser="talking:often_a_call" if agent == PYDANTIC_AI else ENGINE,
        prompts_per_step=2,
        group_size=2,
        max_completion_tokens=800,
        max_staleness=0,
        api_key_env=KEY_VARIABLE,
    )
    with (
        sender(EngineUnderTest(site.server, tmp_path)) as trainer,
        closing(RolloutClient(spec)) as client,
    ):
        trainer.sync(VERSION, VERSION)
        client.start(WAIT_S)
        label = site.driver.run(site.speak.label())
        client.set_server(ServerState(site.url, VERSION, True, label, site.server.spec.engine))
        groups = client.next_batch(VERSION, 2, WAIT_S)
        codec = TextCodec(site.server.spec.model)
        for group in groups:
            assert codec.spell(group.prompt.token_ids) == "<bos>user: turn 0\nassistant:"
            ends: dict[int, list[bool]] = {}
            for completion in group.completions:
                assert completion.reward == group.prompt.index
                empty = [not codec.decode(said) for _, said, _ in answers(group, completion)]
                if agent == OPENAI or completion.episode == -1:
                    # One sequence: no turn was written again.
                    assert completion.episode == -1
                    assert len(empty) >= TURNS
                if agent == PYDANTIC_AI:
                    # It leaves an answer without text out and asks in other words: another history.
                    ends.setdefault(completion.episode, []).append(empty[-1])
                    assert not any(empty[:-1])
                whole = (*group.prompt.token_ids, *completion.token_ids)
                salt = f"agents/{group.prompt.index}/{completion.num_sampled}"
                scores = site.driver.run(site.speak.score(whole, 60.0, salt))
                scored = zip(
                    completion.sampled,
                    completion.logprobs,
                    scores[len(group.prompt.token_ids) - 1 :],
                    strict=True,
                )
                assert max(abs(was - now) for mine, was, now in scored if mine) < CLOSE
            for episode, empty in ends.items():
                # And an answer with text is never followed by another sequence.
                assert episode == -1 or empty == [True] * (len(empty) - 1) + [False]
            assert not any(ends.get(-1, []))


def served(root: Path, run: Path) -> Models:
    """Every version of a run that saved each step, as its servers had it."""
    settings = {"dump_folder": run, "config_file": root / "train_configs/quickstart_cpu.toml"}
    arguments = [f"--job.{key}={value}" for key, value in settings.items()]
    config = jobconfig.parse([*arguments, f"--model.hf_assets_path={run / 'model'}"])
    folders = {0: run / "model"}
    for version in checkpoints.checkpoints_in(run / "checkpoint"):
        folders[version] = run / f"version-{version}"
        export.export_version(
            config, checkpoints.checkpoint_of(run, version), folders[version], "bfloat16"
        )
    return Models(folders)


@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_the_example_learns_to_ask_its_calculator_for_numbers(
    engine: str, root: Path, tmp_path: Path
) -> None:
    arguments = command_of(root / "examples" / "agent" / "agent.py")
    out, record = tmp_path / "run", tmp_path / "record.jsonl"
    arguments[arguments.index("--out") + 1] = str(out)
    saving = ["--checkpoint.interval", "1", "--checkpoint.keep_latest_k", "0"]
    words = [*arguments, *saving, "--engine", engine, "--rollout.record_path", record]
    done = run_cli(root, "quickstart", *words, timeout_s=1150)
    assert done.returncode == 0, done.stderr[-3000:]
    steps = read_metrics(out / "metrics.jsonl")
    assert len(steps) <= 40
    assert steps[0]["reward/mean"] < 0.3
    assert max(step["reward/mean"] for step in steps[-5:]) > 0.8
    assert max(step["staleness/max"] for step in steps) == 1
    checker = Checker(served(root, out), PREFIX_CACHES[engine], CLOSE)
    calls = over_commits = 0
    for line in record.read_text().splitlines():
        for group in msgspec.json.decode(line, type=Batch).groups:
            for completion in group.completions:
                # Three turns of every episode are one sequence.
                assert completion.episode == -1
                claim = Claim(completion.version_first, completion.version_last)
                for before, tokens, logprobs in answers(group, completion):
                    fit = checker.explain(before, tokens, logprobs, claim)
                    assert fit is not None, (completion, len(before))
                    calls += 1
                    over_commits += len(fit.spans) > 1
    assert calls == 3 * 8 * 4 * len(steps)
    assert over_commits > 0
