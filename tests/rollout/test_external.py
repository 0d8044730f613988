"""Groups from outside, through the real rollout process: a real Atropos API server, and
environments that push."""

import os
import re
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.rigs.atropos_api import AtroposApi, until
from tests.rigs.sockets import free_port
from tests.rollout.conftest import StartClient
from titan_grpo.errors import ConfigError
from titan_grpo.protocol.messages import ServerState
from titan_grpo.rollout.client import RolloutClient, RolloutsLate
from titan_grpo.rollout.messages import RolloutSpec

pytestmark = pytest.mark.e2e

REGISTRATION = {
    "max_token_len": 64,
    "num_steps": 10,
    "starting_step": 0,
    "checkpoint_dir": "",
    "save_checkpoint_interval": 0,
    "wandb_group": "titan_grpo",
    "wandb_project": "titan_grpo",
}
M = -100


def scored(size: int = 2, env: int = 0, **changes: Any) -> dict[str, Any]:
    """A group as environments post it; its scores tell it from others."""
    whole = {
        "tokens": [[5, 6, 7 + k] for k in range(size)],
        "masks": [[M, M, 7 + k] for k in range(size)],
        "scores": [float(k) for k in range(size)],
        "inference_logprobs": [[1.0, 1.0, -0.5 - k] for k in range(size)],
        "env_id": env,
    }
    return whole | changes


@pytest.fixture(scope="module")
def api(atropos_python: str) -> Iterator[AtroposApi]:
    with AtroposApi(atropos_python) as server:
        yield server


@pytest.fixture
def atropos(api: AtroposApi, start_client: StartClient) -> StartClient:
    """``atropos(**spec)`` starts a client on a server without data; steps of 4 sequences."""

    def start(reset: bool = True, **changes: Any) -> RolloutClient:
        if reset:
            api.reset()
        values = {
            "prompts_per_step": 2,
            "group_size": 2,
            "max_staleness": 0,
            "row_tokens": 64,
            "source": "atropos",
            "atropos_url": api.url,
        }
        spec = RolloutSpec(model_dir="", registration=REGISTRATION, **{**values, **changes})
        return start_client(spec)

    return start


def test_batches_of_a_real_atropos_server_become_groups(
    api: AtroposApi, atropos: StartClient
) -> None:
    client = atropos()
    env = api.environment(group_size=2)
    assert api.ask("GET", "/info") == {"batch_size": 4, "max_token_len": 64}
    api.post(scored(env=env), scored(env=env, overrides=[{}, {"set_advantage_to_zero": True}]))
    one, two = client.next_batch(0, 2, 60)
    assert one.prompt.token_ids == (5, 6)
    assert [(c.token_ids, c.logprobs, c.reward) for c in one.completions] == [
        ((7,), (-0.5,), 0.0),
        ((8,), (-1.5,), 1.0),
    ]
    assert [c.zero_advantage for c in two.completions] == [False, True]
    assert (one.version, one.completions[0].server) == (0, f"atropos environment {env}")
    assert [g.prompt.index for g in (one, two)] == [0, 1]
    assert client.state()["cursor"] == {"low": 2, "above": []}


def test_groups_of_several_sizes_make_a_step_by_their_sequences(
    api: AtroposApi, atropos: StartClient
) -> None:
    client = atropos(prompts_per_step=4)
    env = api.environment(group_size=4)
    # Groups of another size than the environment's wait in the server until they make one of it.
    api.post(scored(2, env), scored(4, env), scored(2, env))
    groups = client.next_batch(0, 4, 60)
    assert sorted(len(g.completions) for g in groups) == [2, 2, 4]


def test_a_group_without_log_probabilities_is_dropped_and_counted(
    api: AtroposApi, atropos: StartClient
) -> None:
    client = atropos()
    env = api.environment(group_size=2)
    api.post(
        scored(env=env, inference_logprobs=None),
        scored(env=env, group_overrides={"policy_version": 1}),
    )
    until(lambda: client.counters().get("dropped.no_logprobs") == 1, "both groups were dropped")
    advice = f"environments run, and send groups to {api.url}"
    with pytest.raises(RolloutsLate, match=rf"dropped.no_logprobs.*{re.escape(advice)}"):
        client.next_batch(0, 2, 0.1)
    api.post(scored(env=env), scored(env=env))
    assert len(client.next_batch(0, 2, 60)) == 2
    counters = client.counters()
    assert (counters["dropped.no_logprobs"], counters["dropped.unknown_version"]) == (1, 1)


def test_stale_groups_are_dropped_and_others_taken_in_their_place(
    api: AtroposApi, atropos: StartClient
) -> None:
    client = atropos()
    client.set_server(ServerState("http://s", 5, True, "label", "vllm"))
    client.in_flight(60.0)  # the rollout process knows version 5
    env = api.environment(group_size=2)
    old, new = {"policy_version": 3}, {"policy_version": 5}
    api.post(scored(env=env, group_overrides=old), scored(env=env, group_overrides=new))
    api.post(scored(env=env, generation_params=new), scored(env=env, generation_params=new))
    assert [g.version for g in client.next_batch(5, 2, 60)] == [5, 5]
    # The API hands out the newest batch first, so the old one may not have been met.
    assert client.counters().get("dropped.stale", 0) <= 1


def test_a_group_without_a_version_that_waited_is_as_old_as_when_it_came(
    api: AtroposApi, atropos: StartClient
) -> None:
    client = atropos(max_staleness=5)
    client.set_server(ServerState("http://s", 0, True, "label", "vllm"))
    env = api.environment(group_size=2)
    api.post(scored(env=env))  # half of a batch, which waits for the other
    client.set_server(ServerState("http://s", 5, True, "later", "vllm"))
    api.post(scored(env=env))
    assert [group.version for group in client.next_batch(5, 2, 60)] == [0, 0]


def test_groups_that_wait_from_before_a_run_was_resumed_may_be_of_any_version(
    api: AtroposApi, atropos: StartClient
) -> None:
    client = atropos()
    env = api.environment(group_size=2)
    api.post(*[scored(env=env) for _ in range(12)])
    assert len(client.next_batch(0, 2, 60)) == 2
    client.close()
    again = atropos(reset=False, base_version=40, max_staleness=40)
    assert [group.version for group in again.next_batch(40, 2, 60)] == [0, 0]


def test_a_server_that_was_restarted_is_registered_again(
    api: AtroposApi, atropos: StartClient
) -> None:
    client = atropos()
    api.environment(group_size=2)
    api.restart()
    env = api.environment(group_size=2)
    api.post(scored(env=env), scored(env=env))
    assert len(client.next_batch(0, 2, 60)) == 2


def test_a_server_that_had_data_before_a_trainer_is_set_back_since_it_would_never_hand_it_out(
    api: AtroposApi, atropos: StartClient
) -> None:
    api.restart()
    api.post(scored())
    api.ask("POST", "/register", REGISTRATION | {"batch_size": 4})
    assert api.ask("GET", "/batch")["status"] == "error"
    client = atropos(reset=False)
    env = api.environment(group_size=2)
    api.post(scored(env=env), scored(env=env))
    assert len(client.next_batch(0, 2, 60)) == 2
    assert client.counters()["consumed_groups"] == 2


def test_what_is_no_atropos_api_is_a_wrong_configuration(
    api: AtroposApi, atropos: StartClient
) -> None:
    with pytest.raises(ConfigError, match=r"rollout.atropos_url must be that of an Atropos API"):
        # Its start raises it where the answer comes that soon.
        atropos(atropos_url=f"{api.url}/nothing").next_batch(0, 2, 60)


PUSH_KEY_ENV = "TITAN_GRPO_TEST_PUSH_KEY"


@pytest.fixture
def push(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[RolloutClient, httpx.Client]]:
    monkeypatch.setenv(PUSH_KEY_ENV, "k")
    address = f"127.0.0.1:{free_port()}"
    values: dict[str, Any] = {"prompts_per_step": 2, "group_size": 2, "max_staleness": 1}
    client = RolloutClient(
        RolloutSpec(
            model_dir="",
            source="push",
            push_address=address,
            push_key_env=PUSH_KEY_ENV,
            base_version=3,
            **values,
        )
    )
    client.start(60)
    headers = {"Authorization": f"Bearer {os.environ[PUSH_KEY_ENV]}"}
    with httpx.Client(
        base_url=f"http://{address}", headers=headers, trust_env=False, timeout=60
    ) as http:
        yield client, http
    client.close()


def pushed(version: int, *ids: str) -> dict[str, Any]:
    completions = [{"tokens": [7], "logprobs": [-0.5], "reward": r} for r in (0.0, 1.0)]
    return {
        "groups": [
            {
                "id": i,
                "policy_version": version,
                "prompt_tokens": [5, 6],
                "completions": completions,
            }
            for i in ids
        ]
    }


def test_pushed_groups_are_trained_on_and_held_back_by_the_bound(
    push: tuple[RolloutClient, httpx.Client],
) -> None:
    client, http = push
    assert http.post("/groups", json=pushed(3, "a", "b", "c", "d")).json()["taken"] == 4
    assert http.post("/groups", json=pushed(3, "e")).status_code == 429
    assert [g.prompt.index for g in client.next_batch(3, 2, 60)] == [0, 1]
    until(lambda: http.get("/status").json()["waiting"] == 4, "the places are free")
    assert http.post("/groups", json=pushed(3, "e")).status_code == 202
    assert http.post("/groups", json=pushed(4, "f")).status_code == 409
    # The trainer goes on; what is left of version 3 may be used at 4, and no longer at 5.
    assert [g.version for g in client.next_batch(4, 2, 60)] == [3, 3]
    with pytest.raises(RolloutsLate, match=r"Check that environments run, and push groups to the"):
        client.next_batch(5, 2, 1)
    until(lambda: http.get("/status").json()["waiting"] == 0, "the stale one is let go")
    assert client.counters()["dropped.stale"] == 1
    assert http.post("/groups", json=pushed(3, "g")).status_code == 409
    assert http.get("/status").json()["run"] == ""
    client.set_server(ServerState("http://s", 5, True, "018f-ab:5:9c5e", "vllm"))
    assert http.post("/groups", json=pushed(5, "h", "i")).status_code == 202
    until(lambda: http.get("/status").json()["run"] == "018f-ab", "the server's label is read")
    assert [g.version for g in client.next_batch(5, 2, 60)] == [5, 5]
    assert client.state()["cursor"]["above"] == []
