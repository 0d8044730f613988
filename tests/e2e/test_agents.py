"""Agents of the openai client on a real vLLM and a real SGLang: the tokens and log-probabilities of
a conversation, and a model that learns from them."""

import json
import os
import subprocess
import sys
from contextlib import closing

import pytest

from tests.conformance.commits import sender
from tests.conformance.engine import EngineUnderTest
from tests.example_files import command_of
from titan_grpo.protocol.messages import ServerState
from titan_grpo.rollout.client import RolloutClient
from titan_grpo.rollout.codec import TextCodec
from titan_grpo.rollout.spec import RolloutSpec

pytest.importorskip("openai")
pytestmark = [pytest.mark.e2e, pytest.mark.timeout(400)]

VERSION, TURNS, TOKENS, WAIT_S = 60, 6, 8, 120.0
KEY_VARIABLE = "TITAN_GRPO_TEST_AGENTS_KEY"
CLOSE = 0.05
"""Greatest difference of a token's log-probability, sampled and recomputed."""

AGENT = f"""
from openai import OpenAI

def talk(base_url, api_key, row):
    client, messages = OpenAI(base_url=base_url, api_key=api_key), []
    for turn in range({TURNS}):
        messages.append({{"role": "user", "content": f"turn {{turn}}"}})
        asked = {{"model": "any", "messages": messages, "max_tokens": {TOKENS}}}
        if turn % 2:
            chunks = client.chat.completions.create(stream=True, **asked)
            said = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
        else:
            said = client.chat.completions.create(**asked).choices[0].message.content
        messages.append({{"role": "assistant", "content": said}})
    return row["index"]
"""


@pytest.mark.parametrize(
    "shared", ["site", pytest.param("sglang_site", marks=pytest.mark.long)], ids=["vllm", "sglang"]
)
def test_a_conversation_is_of_the_engines_own_tokens_and_log_probabilities(
    shared, request, tmp_path, monkeypatch
) -> None:
    site = request.getfixturevalue(shared)
    (tmp_path / "talking.py").write_text(AGENT)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")
    monkeypatch.setenv(KEY_VARIABLE, site.access.api_key)
    spec = RolloutSpec(
        site.server.spec.model,
        VERSION,
        agent="talking:talk",
        prompts_per_step=2,
        group_size=2,
        max_completion_tokens=400,
        max_staleness=0,
        api_key_env=KEY_VARIABLE,
    )
    with (
        sender(EngineUnderTest.of(site.server, tmp_path, site.access)) as trainer,
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
            for completion in group.completions:
                # One sequence: no turn was written again.
                assert (completion.episode, completion.reward) == (-1, group.prompt.index)
                assert TURNS <= completion.num_sampled <= TURNS * TOKENS
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


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_the_example_learns_to_ask_its_calculator_for_numbers(root, tmp_path) -> None:
    arguments = command_of(root / "examples" / "agent" / "agent.py")
    out, record = tmp_path / "run", tmp_path / "record.jsonl"
    arguments[arguments.index("--out") + 1] = str(out)
    done = subprocess.run(
        [sys.executable, "-m", "titan_grpo.cli", "quickstart", *arguments]
        + ["--sync", "--rollout.record_path", str(record), "--rollout.max_staleness", "0"],
        cwd=root,
        env=dict(os.environ),
        capture_output=True,
        text=True,
        timeout=1150,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    steps = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert len(steps) <= 40
    assert steps[0]["reward/mean"] < 0.3
    assert max(step["reward/mean"] for step in steps[-5:]) > 0.8
    # Every token is of the trainer's own version, so every one is recomputed by it.
    assert max(step["logprob_gap/on_policy_max"] for step in steps) < CLOSE
    # Three turns of every episode are one sequence.
    for line in record.read_text().splitlines():
        for group in json.loads(line)["groups"]:
            assert [each["episode"] for each in group["completions"]] == [-1] * 8
