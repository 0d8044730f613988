"""What environments may push: every rule of the schema, the desk's decisions, and the door over
real HTTP."""

import asyncio
import copy
import gzip
import http.client
import json
import threading

import httpx
import pytest

from titan_grpo.errors import ConfigError, DataError
from titan_grpo.rollout import httpd, push
from titan_grpo.rollout.httpd import Reply
from titan_grpo.rollout.push import Desk, Door, parse


def body(**changes):
    completion = {"tokens": [7, 8], "logprobs": [-0.5, -1.5], "reward": 1.0}
    other = {
        "tokens": [9],
        "logprobs": [-0.25],
        "reward": 0,
        "finish_reason": "stop",
        "zero_advantage": True,
    }
    group = {
        "policy_version": 3,
        "prompt_tokens": [5, 6],
        "completions": [completion, other],
        "source": "env",
        "id": "a",
    }
    return {"groups": [group | changes]}


def encoded(content) -> bytes:
    return json.dumps(content).encode()


def test_a_body_becomes_groups() -> None:
    [incoming] = parse(encoded(body()))
    one, two = incoming.group.completions
    assert (incoming.id, incoming.group.version, incoming.group.prompt.token_ids) == (
        "a",
        3,
        (5, 6),
    )
    assert (one.token_ids, one.logprobs, one.reward, one.sampled, one.server) == (
        (7, 8),
        (-0.5, -1.5),
        1.0,
        (),
        "env",
    )
    assert (two.zero_advantage, two.finish_reason, two.reward) == (True, "stop", 0.0)


def set_at(content, path, value):
    content = copy.deepcopy(content)
    place = content
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    return content


FIRST = ("groups", 0)
COMPLETION = (*FIRST, "completions", 0)


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("groups",), [], r"body.groups must not be empty"),
        (("groups",), {}, r"body.groups must be of type array"),
        (("more",), 1, r"body.more is not a field; known are \['groups'\]"),
        (
            (*FIRST, "policy_version"),
            -1,
            r"body.groups\[0\].policy_version must be 0 or greater, got -1",
        ),
        ((*FIRST, "policy_version"), True, r"policy_version must be of type integer"),
        ((*FIRST, "id"), "", r"id must not be empty"),
        ((*FIRST, "prompt_tokens"), [], r"prompt_tokens must not be empty"),
        ((*FIRST, "prompt_tokens"), [5, -6], r"prompt_tokens\[1\] must be 0 or greater"),
        ((*FIRST, "prompt_tokens"), [5, 6.0], r"prompt_tokens\[1\] must be of type integer"),
        ((*FIRST, "completions"), [], r"completions must not be empty"),
        ((*COMPLETION, "reward"), "1", r"completions\[0\].reward must be of type number"),
        ((*COMPLETION, "reward"), float("nan"), r"reward must be of type number"),
        (
            (*COMPLETION, "logprobs"),
            [-0.5],
            r"completions\[0\].logprobs must be as many as tokens \(2\), got 1",
        ),
        (
            (*COMPLETION, "logprobs"),
            [-0.5, 0.7],
            r"completions\[0\].logprobs\[1\] must be 0 or less, got 0.7: is it a prob",
        ),
        ((*COMPLETION, "sampled"), [True], r"sampled must be as many as tokens"),
        ((*COMPLETION, "sampled"), [False, False], r"sampled must have a true one"),
        ((*COMPLETION, "sampled"), [1, 0], r"sampled\[0\] must be of type boolean"),
    ],
)
def test_what_breaks_the_schema_is_refused_by_place_and_rule(path, value, message) -> None:
    with pytest.raises(DataError, match=message):
        parse(encoded(set_at(body(), path, value)))


@pytest.mark.parametrize("name", ["policy_version", "prompt_tokens", "completions"])
def test_a_missing_field_is_named(name) -> None:
    content = body()
    del content["groups"][0][name]
    with pytest.raises(DataError, match=rf"body.groups\[0\] must have '{name}'"):
        parse(encoded(content))


def test_a_context_token_needs_no_log_probability() -> None:
    content = set_at(
        set_at(body(), (*COMPLETION, "sampled"), [True, False]),
        (*COMPLETION, "logprobs"),
        [-0.5, 1.0],
    )
    assert parse(encoded(content))[0].group.completions[0].sampled == (True, False)


def incoming(version=3, id=""):
    content = body(policy_version=version)
    del content["groups"][0]["id"]
    return parse(encoded(body(policy_version=version, id=id) if id else content))


def test_the_desk_takes_what_the_trainer_can_use() -> None:
    desk = Desk(capacity=4, max_staleness=1, trainer_version=3, newest_version=4)
    for version, status in ((1, 409), (2, 202), (3, 202), (4, 202), (5, 409)):
        reply, groups = desk.take(incoming(version), waiting=0)
        assert (reply.status, len(groups)) == (status, int(status == 202)), version
    reply, groups = desk.take(incoming(), waiting=4)
    assert (reply.status, reply.retry_after_s, groups) == (429, 1, [])
    desk.closing = True
    assert desk.take(incoming(), waiting=0)[0].status == 503


def test_a_group_that_is_sent_again_is_taken_once() -> None:
    desk = Desk(capacity=4, max_staleness=1, trainer_version=3, newest_version=3)
    assert desk.take(incoming(id="x"), 0)[0].body == {"taken": 1, "duplicates": 0}
    assert desk.take(incoming(id="x"), 0)[0].body == {"taken": 0, "duplicates": 1}
    assert desk.take([*incoming(id="x"), *incoming(id="y")], 0)[0].body == {
        "taken": 1,
        "duplicates": 1,
    }


def test_a_refused_group_may_be_sent_again() -> None:
    desk = Desk(capacity=4, max_staleness=1, trainer_version=3, newest_version=3)
    assert desk.take(incoming(id="x"), waiting=4)[0].status == 429
    assert desk.take(incoming(id="x"), waiting=0)[0].body["taken"] == 1


def test_one_stale_group_refuses_the_whole_body() -> None:
    desk = Desk(capacity=4, max_staleness=1, trainer_version=3, newest_version=3)
    reply, groups = desk.take([*incoming(3), *incoming(1)], waiting=0)
    assert (reply.status, groups) == (409, [])
    assert "groups[1].policy_version must be 2 or later" in reply.body["error"]


@pytest.fixture
def loop():
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    yield loop
    loop.call_soon_threadsafe(loop.stop)
    thread.join(10)
    loop.close()


@pytest.fixture
def door(loop):
    desk = Desk(capacity=2, max_staleness=1, trainer_version=3, newest_version=3)
    taken = []

    def take(incoming):
        reply, groups = desk.take(incoming, len(taken))
        taken.extend(groups)
        return reply

    door = Door("127.0.0.1:0", "secret", loop, take, lambda: Reply(200, desk.status(len(taken))))
    yield door
    door.close()


@pytest.fixture
def client(door):
    with httpx.Client(
        base_url=f"http://{door.address}",
        headers={"Authorization": "Bearer secret"},
        trust_env=False,
        timeout=10,
    ) as c:
        yield c


def test_groups_go_through_the_door_until_enough_wait(client) -> None:
    assert client.post("/groups", json=body()).json() == {"taken": 1, "duplicates": 0}
    packed = client.post(
        "/groups",
        content=gzip.compress(encoded(body(id="b"))),
        headers={"Content-Encoding": "gzip"},
    )
    assert (packed.status_code, packed.json()["taken"]) == (202, 1)
    full = client.post("/groups", json=body(id="c"))
    assert (full.status_code, full.headers["Retry-After"]) == (429, "1")
    assert client.get("/status").json() == {
        "trainer_version": 3,
        "oldest_usable_version": 2,
        "waiting": 2,
        "capacity": 2,
    }


def test_the_schema_is_published(client) -> None:
    assert client.get("/schema").json() == push.SCHEMA


def test_what_can_not_be_read_is_refused_and_the_door_goes_on(client) -> None:
    assert "must be JSON" in client.post("/groups", content=b"{").json()["error"]
    assert client.post("/groups", json={}).status_code == 400
    torn = client.post(
        "/groups", content=gzip.compress(encoded(body()))[:-9], headers={"Content-Encoding": "gzip"}
    )
    assert torn.status_code == 400
    assert client.post("/groups", content=iter([b"{}"])).status_code == 400
    assert client.get("/nothing").status_code == 404
    assert client.post("/groups", json=body()).status_code == 202


def test_a_body_that_is_too_large_is_refused_before_it_is_read(door) -> None:
    connection = http.client.HTTPConnection(door.address, timeout=10)
    connection.putrequest("POST", "/groups")
    connection.putheader("Authorization", "Bearer secret")
    connection.putheader("Content-Length", str(httpd.MAX_BYTES + 1))
    connection.endheaders()
    assert connection.getresponse().status == 413
    connection.close()


def test_without_the_key_nothing_is_let_in(client) -> None:
    for headers in ({"Authorization": "Bearer other"}, {"Authorization": ""}):
        assert client.post("/groups", json=body(), headers=headers).status_code == 401
    assert (
        client.post("/groups", json=body(), headers={"Origin": "http://a.example"}).status_code
        == 403
    )
    assert client.get("/status").json()["waiting"] == 0


def test_a_loop_that_has_ended_is_503() -> None:
    ended = asyncio.new_event_loop()
    ended.close()
    door = Door("127.0.0.1:0", "", ended, lambda _: Reply(202, {}), lambda: Reply(200, {}))
    try:
        reply = httpx.post(
            f"http://{door.address}/groups", json=body(), trust_env=False, timeout=10
        )
        assert (reply.status_code, reply.headers["Retry-After"]) == (503, "1")
    finally:
        door.close()


def test_an_address_that_can_not_be_bound_is_a_wrong_configuration(loop, door) -> None:
    with pytest.raises(ConfigError, match=r"rollout.push_address must be an address of this host"):
        Door(door.address, "", loop, lambda _: Reply(202, {}), lambda: Reply(200, {}))
