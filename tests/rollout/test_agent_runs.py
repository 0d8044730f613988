"""Agents in a rollout process of their own: what is counted, and how a run stops."""

import os
import re
import shutil
import subprocess
import threading
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.rigs.sockets import free_port
from tests.rigs.trainer_handle import wait_until
from tests.rollout.agents import says
from tests.rollout.conftest import MakeServer, StartClient
from titan_grpo.protocol.messages import ServerState
from titan_grpo.rollout.client import RolloutsLate
from titan_grpo.rollout.codec import TextCodec
from titan_grpo.rollout.messages import RolloutSpec

pytest.importorskip("openai")

AGENT = """
import openai

def solve(base_url, api_key, row):
    client = openai.OpenAI(base_url=base_url, api_key=api_key)
    client.chat.completions.create(model="any", messages=[{"role": "user", "content": "hi"}])
    return 1.0
"""


@pytest.fixture
def run_of_agents(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, start_client: StartClient
) -> StartClient:
    """A factory: changes of the spec -> a started client of a rollout process with an agent."""
    (tmp_path / "own_agent.py").write_text(AGENT)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")
    sizes: dict[str, Any] = {"prompts_per_step": 2, "group_size": 2, "max_staleness": 0}
    return partial(start_client, RolloutSpec(model_dir=model, agent="own_agent:solve", **sizes))


def test_an_episode_that_ended_is_in_flight_no_more_while_others_of_its_group_are(
    run_of_agents: StartClient, codec: TextCodec, completion_server: MakeServer
) -> None:
    engine, speak = completion_server(), says(codec, "one")
    engine.behaviour = lambda body: (engine.hang if body is engine.bodies[0] else speak)(body)
    client = run_of_agents(engine, prompts_per_step=1)
    engine.wait_for_requests(2)
    assert wait_until(lambda: client.in_flight(60.0) == {engine.url: 1}, 60)


THREE_SEQUENCES = """
import openai
from pathlib import Path

def solve(base_url, api_key, row):
    client = openai.OpenAI(base_url=base_url, api_key=api_key)
    for said in "abc":
        while said == "b" and not Path(__file__).with_name("committed").exists():
            pass
        message = {"role": "user", "content": said}
        client.chat.completions.create(model="any", messages=[message])
    return 1.0
"""


def test_an_episode_that_begins_again_is_as_new_as_its_server_and_all_its_tokens_are_thrown_away(
    run_of_agents: StartClient, codec: TextCodec, completion_server: MakeServer, tmp_path: Path
) -> None:
    (tmp_path / "own_agent.py").write_text(THREE_SEQUENCES)
    engine, speak = completion_server(), says(codec, "one")
    engine.behaviour = lambda body: engine.hang(body) if len(engine.bodies) > 2 else speak(body)
    one = {"prompts_per_step": 1, "group_size": 1, "max_concurrent_requests": 1}
    client = run_of_agents(engine, **one)

    def commit(version: int) -> None:
        client.set_server(ServerState(engine.url, version, True, f"r:{version}:f"))
        client.in_flight(60)  # the rollout process knows it

    engine.wait_for_requests(1)
    commit(1)
    (tmp_path / "committed").touch()
    engine.wait_for_requests(3)
    commit(2)
    # Only the first answer is too old for it.
    client.set_trainer_version(1)
    engine.wait_for_requests(4)
    client.set_trainer_version(2)
    for _ in range(5):  # a cancelled group is counted a few turns of the loop later
        client.in_flight(60)
    engine.released.set()
    client.next_batch(2, 1, 60)
    counters = client.counters()
    assert (counters["dropped.stale_in_flight"], counters["thrown_tokens"]) == (1, 8)
    assert counters["requests"] == len(engine.bodies) == 6


GIVES_UP = """
import http.client, json, openai
from pathlib import Path

def solve(base_url, api_key, row):
    connection = http.client.HTTPConnection(base_url.split("/")[2], timeout=60)
    body = json.dumps({"model": "any", "messages": [{"role": "user", "content": "hello"}]})
    headers = {"Authorization": f"Bearer {api_key}"}
    connection.request("POST", "/v1/chat/completions", body, headers)
    while not Path(__file__).with_name("asked").exists():
        pass
    connection.close()
    Path(__file__).with_name("gone").touch()
    client = openai.OpenAI(base_url=base_url, api_key=api_key)
    for said in "abc":
        message = {"role": "user", "content": said}
        client.chat.completions.create(model="any", messages=[message])
    return 1.0
"""


def test_tokens_of_an_answer_that_nobody_waited_for_count_as_thrown_away(
    run_of_agents: StartClient, codec: TextCodec, completion_server: MakeServer, tmp_path: Path
) -> None:
    (tmp_path / "own_agent.py").write_text(GIVES_UP)
    engine, speak, answered = completion_server(), says(codec, "one"), threading.Event()

    def behaviour(body: dict[str, Any]) -> tuple[int, Any]:
        if body is engine.bodies[0]:
            (tmp_path / "asked").touch()
            assert wait_until((tmp_path / "gone").exists, 60)
            answered.set()
        assert answered.wait(60)
        return speak(body)

    engine.behaviour = behaviour
    client = run_of_agents(engine, prompts_per_step=1, group_size=1)
    (group,) = client.next_batch(0, 1, 60)
    assert [completion.num_sampled for completion in group.completions] == [4, 4, 4]
    assert client.counters()["thrown_tokens"] == 4


def test_the_agent_and_the_parser_of_the_docs_do_what_they_say(
    run_of_agents: StartClient,
    codec: TextCodec,
    completion_server: MakeServer,
    root: Path,
    tmp_path: Path,
) -> None:
    agent, parser = re.findall(
        r"```python\n(.*?)```", (root / "docs" / "agents.md").read_text(), re.DOTALL
    )
    (tmp_path / "own_agent.py").write_text(agent)
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"question": "What is 2+3?", "answer": "5"}\n')
    engine = completion_server()
    engine.behaviour = says(codec, "It is 5.")
    client = run_of_agents(engine, dataset=str(rows))
    for group in client.next_batch(0, 2, 60):
        assert codec.decode(group.prompt.token_ids) == "user: What is 2+3?\nassistant:"
        assert [completion.reward for completion in group.completions] == [1.0, 1.0]
    names: dict[str, Any] = {}
    exec(parser, names)
    assert names["parse"]("sum: 2 3") == ("", [("sum", {"of": "2 3"})])
    assert names["parse"]("It is 5.") == ("It is 5.", [])


CURL = """
set -eu
json='Content-Type: application/json'
post() { curl -sS -X POST -H "$json" -H "Authorization: Bearer ${key-}" "$@"; }
field() { python3 -c "import json, sys; print(json.load(sys.stdin)$1)"; }
hello='{"model": "policy", "messages": [{"role": "user", "content": "hi"}]'
for number in 1 2; do
    until key="$(post $1/episodes | field '["id"]' 2>/dev/null)"; do sleep 0.1; done
    curl -sS -H "Authorization: Bearer $key" $1/v1/models | field '["data"][0]["id"]'
    post $1/v1/chat/completions -d "$hello}" | field '["choices"][0]["message"]["content"]'
    post -N $1/v1/chat/completions -d "$hello, \\"stream\\": true}" | tail -n 2
    post $1/v1/chat/completions -d "$hello, \\"n\\": 2}" | field '["error"]["param"]'
    post $1/episodes/$key/reward -d '{"reward": 0.5}' >/dev/null
done
key=none
post $1/v1/chat/completions -d "$hello}" -o /dev/null -w '%{http_code}\\n'
"""


@pytest.mark.skipif(shutil.which("curl") is None, reason="there is no curl")
def test_curl_takes_episodes_talks_and_posts_rewards(
    run_of_agents: StartClient,
    codec: TextCodec,
    completion_server: MakeServer,
    caplog: pytest.LogCaptureFixture,
) -> None:
    client = run_of_agents(agent="outside", prompts_per_step=1)
    (address,) = re.findall(r"agents may talk to (http://\S+)/v1", caplog.text)
    engine = completion_server()
    engine.behaviour = says(codec, "one")
    client.set_server(ServerState(engine.url, 0, True, "r:0:f", "vllm"))
    with subprocess.Popen(
        ["bash", "-c", CURL, "curl", address], stdout=subprocess.PIPE, text=True
    ) as playing:
        try:
            (group,) = client.next_batch(0, 1, 60)
            said, _ = playing.communicate(timeout=60)
        finally:
            playing.kill()
    assert {completion.reward for completion in group.completions} == {0.5}
    assert said.split() == ["policy", "one", "data:", "[DONE]", "n"] * 2 + ["401"]


def test_a_run_of_outside_agents_that_is_late_says_which_key_ends_an_episode_without_a_reward(
    run_of_agents: StartClient, completion_server: MakeServer
) -> None:
    client = run_of_agents(completion_server(), agent="outside", task_timeout_s=90.0)
    with pytest.raises(RolloutsLate, match=r"gets its reward .*rollout\.task_timeout_s = 90\)$"):
        client.next_batch(0, 1, 0.3)


@pytest.fixture
def player(root: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """The example's command, with the real library in an environment of its own, and a key."""
    monkeypatch.setenv("AGENT_KEY", "key of the run")
    monkeypatch.setenv("PATIENCE_S", "3")
    subprocess.run(
        [root / "scripts" / "setup.sh", "--only", "verifiers"],
        check=True,
        stdout=subprocess.DEVNULL,
        timeout=900,
    )
    return root / ".venv-verifiers/bin/python", root / "examples/verifiers/play.py"


@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    ("answer", "reward"), [("it is 22", 0.25), pytest.param("", 0.0, id="no answer")]
)
def test_an_environment_of_verifiers_plays_unchanged(
    run_of_agents: StartClient,
    codec: TextCodec,
    completion_server: MakeServer,
    player: tuple[Path, Path],
    answer: str,
    reward: float,
) -> None:
    """It may start before the run, and the run may end while calls of it wait."""
    engine, speak = completion_server(), says(codec, answer)
    of_the_step = re.compile(r"user: 1[01]\+")
    engine.behaviour = lambda body: (
        speak if of_the_step.search(codec.spell(body["prompt"])) else engine.hang
    )(body)
    address = f"127.0.0.1:{free_port()}"
    with subprocess.Popen(
        [*player, f"http://{address}"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as playing:
        try:
            assert playing.stdout is not None
            assert playing.stdout.readline().startswith(f"waiting for a run at http://{address}: ")
            keys = {"agent_address": address, "agent_key_env": "AGENT_KEY"}
            client = run_of_agents(engine, agent="outside", max_staleness=1, **keys)
            groups = client.next_batch(0, 2, 200)
            engine.wait_for_requests(8)
            client.close(5)
            said, complaints = playing.communicate(timeout=60)
        finally:
            playing.kill()
    assert [[c.reward for c in group.completions] for group in groups] == [[reward] * 2] * 2
    for group in groups:
        # A row of the environment, through the model's own template.
        assert re.fullmatch(
            r"<bos>user: (\d+)\+\1=\?\nassistant:", codec.spell(group.prompt.token_ids)
        )
        for completion in group.completions:
            assert codec.decode(completion.token_ids) == answer
    assert (said, playing.returncode) == ("the run has ended\n", 0), complaints


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_the_player_of_verifiers_ends_where_no_episodes_are_handed_out(
    run_of_agents: StartClient, player: tuple[Path, Path], caplog: pytest.LogCaptureFixture
) -> None:
    run_of_agents()
    (address,) = re.findall(r"agents may talk to (http://\S+)/v1", caplog.text)
    played = subprocess.run([*player, address], capture_output=True, text=True, timeout=200)
    assert played.returncode == 1
    assert played.stderr.splitlines()[-1].startswith(f"{address}/episodes answered 409: ")
