"""What environments may push: every rule of the schema, the queue's decisions, and the server
over real HTTP."""

import asyncio
import copy
import gzip
import http.client
import importlib
import json
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

import httpx
import pytest
from httpx import Client

from titan_grpo.errors import ConfigError, DataError, ProtocolError
from titan_grpo.protocol.messages import ServerState
from titan_grpo.rollout import external, httpd
from titan_grpo.rollout.external import PushSource, parse
from titan_grpo.rollout.messages import RolloutSpec, Used

T = TypeVar("T")


def body(**changes: Any) -> dict[str, Any]:
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


def encoded(content: object) -> bytes:
    return json.dumps(content).encode()


def test_a_body_becomes_groups() -> None:
    [incoming] = parse(encoded(body()))
    one, two = incoming.group.completions
    assert (incoming.id, incoming.group.version) == ("a", 3)
    assert incoming.group.prompt.token_ids == (5, 6)
    assert (one.token_ids, one.logprobs, one.sampled) == ((7, 8), (-0.5, -1.5), ())
    assert (one.reward, one.server) == (1.0, "env")
    assert (two.zero_advantage, two.finish_reason, two.reward) == (True, "stop", 0.0)


def set_at(content: Any, path: tuple[str | int, ...], value: object) -> Any:
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
        (("groups",), [], r"^body.groups: Expected `array` of length >= 1, got '\[\]'"),
        (("groups",), {}, r"^body.groups: Expected `array`, got `object`"),
        (("more",), 1, r"^body: Object contains unknown field `more`"),
        (FIRST, {}, r"^body.groups\[0\]: .*missing required field `policy_version`"),
        (FIRST, {"policy_version": 3}, "missing required field `prompt_tokens`"),
        (FIRST, {"policy_version": 3, "prompt_tokens": [5]}, "required field `completions`"),
        ((*FIRST, "policy_version"), -1, r"^body.groups\[0\].policy_version: .* >= 0, got '-1'"),
        ((*FIRST, "policy_version"), True, r"policy_version: Expected `int`"),
        ((*FIRST, "id"), "", r"id: Expected `str` of length >= 1"),
        ((*FIRST, "prompt_tokens"), [], r"prompt_tokens: Expected `array` of length >= 1"),
        ((*FIRST, "prompt_tokens"), [5, -6], r"prompt_tokens\[1\]: Expected `int` >= 0, got '-6'"),
        (
            (*FIRST, "prompt_tokens"),
            [5, 1 << 31],
            r"prompt_tokens\[1\]: Expected `int` <= 2147483647",
        ),
        ((*COMPLETION, "tokens"), [1 << 31, 7], r"tokens\[0\]: Expected `int` <= 2147483647"),
        ((*FIRST, "prompt_tokens"), [5, 6.5], r"prompt_tokens\[1\]: Expected `int`"),
        ((*FIRST, "completions"), [], r"completions: Expected `array` of length >= 1"),
        ((*COMPLETION, "reward"), "1", r"completions\[0\].reward: Expected `float`, got `str`"),
        ((*COMPLETION, "reward"), float("nan"), r"the body must be JSON"),
        ((*COMPLETION, "logprobs"), [-0.5], r"logprobs must be as many as tokens \(2\), got 1"),
        (
            (*COMPLETION, "logprobs"),
            [-0.5, 0.7],
            r"logprobs\[1\] must be 0 or less, got 0.7: is it",
        ),
        ((*COMPLETION, "sampled"), [True], r"sampled must be as many as tokens"),
        ((*COMPLETION, "sampled"), [False, False], r"sampled must have a true one"),
        ((*COMPLETION, "sampled"), [1, 0], r"sampled\[0\]: Expected `bool`, got `int`"),
    ],
)
def test_what_breaks_the_schema_is_refused_by_place_rule_and_value(
    path: tuple[str | int, ...], value: object, message: str
) -> None:
    with pytest.raises(DataError, match=message):
        parse(encoded(set_at(body(), path, value)))


NO_TEXT = "('utf-8'|Invalid UTF-8)"
"""How msgspec says it before 0.23, and from then on."""


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b'{"groups": [{"policy_version": "3", "prompt_tok', "the body must be JSON: Unterminated"),
        (
            b'{"groups": [{"policy_version": "3"}], "x": "\xff"}',
            f"the body must be JSON: {NO_TEXT}",
        ),
        (b'{"groups": [{"id": "caf\xe9"}]}', f"the body must be JSON: {NO_TEXT}"),
        (b'{"groups": ' + b"[" * 100_000, "the body must be JSON: maximum recursion depth"),
        (b'{"groups": [3], "groups": []}', r"body.groups\[0\]: Expected `object`, got `int`$"),
    ],
    ids=["torn", "no text", "no text in a field", "deep", "a key twice"],
)
def test_what_is_no_json_behind_its_first_fault_is_refused_in_one_line(
    text: bytes, message: str
) -> None:
    with pytest.raises(DataError, match=f"^{message}") as refused:
        parse(text)
    assert "\n" not in str(refused.value)


def test_a_row_that_the_trainer_has_no_room_for_is_refused_with_the_key_of_its_length() -> None:
    assert len(parse(encoded(body()), row_tokens=4)) == 1
    rule = r"^body.groups\[0\].completions\[0\].tokens must be at most training.seq_len \(3\) .* 4:"
    with pytest.raises(DataError, match=rule):
        parse(encoded(body()), row_tokens=3)


def test_a_context_token_needs_no_log_probability() -> None:
    content = set_at(
        set_at(body(), (*COMPLETION, "sampled"), [True, False]),
        (*COMPLETION, "logprobs"),
        [-0.5, 1.0],
    )
    assert parse(encoded(content))[0].group.completions[0].sampled == (True, False)


@pytest.fixture
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    yield loop
    loop.call_soon_threadsafe(loop.stop)
    thread.join(60)
    loop.close()


def in_loop(loop: asyncio.AbstractEventLoop, act: Callable[[], T]) -> T:
    async def acting() -> T:
        return act()

    return asyncio.run_coroutine_threadsafe(acting(), loop).result(60)


def listening(loop: asyncio.AbstractEventLoop, address: str = "127.0.0.1:0") -> PushSource:
    """A source of a run at version 3 for which four completions may wait, and its server."""
    spec = RolloutSpec(
        model_dir="",
        source="push",
        push_address=address,
        push_key_env="PUSH_KEY",
        prompts_per_step=1,
        group_size=2,
        max_staleness=1,
        base_version=3,
    )
    return in_loop(loop, lambda: PushSource(spec, lambda _: None))


@pytest.fixture
def source(
    loop: asyncio.AbstractEventLoop, monkeypatch: pytest.MonkeyPatch
) -> Iterator[PushSource]:
    monkeypatch.setenv("PUSH_KEY", "secret")
    source = listening(loop)
    yield source
    asyncio.run_coroutine_threadsafe(source.close(), loop).result(60)


@pytest.fixture
def client(source: PushSource) -> Iterator[Client]:
    with httpx.Client(
        base_url=f"http://{source.address}",
        headers={"Authorization": "Bearer secret"},
        trust_env=False,
        timeout=60,
    ) as c:
        yield c


def test_groups_are_taken_until_enough_wait(client: Client) -> None:
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
        "run": "",
        "trainer_version": 3,
        "oldest_usable_version": 2,
        "waiting": 4,
        "capacity": 4,
    }


def test_groups_of_versions_that_the_trainer_can_use_are_taken(
    client: Client, source: PushSource, loop: asyncio.AbstractEventLoop
) -> None:
    in_loop(loop, lambda: source.on(ServerState("http://s", 4, True, "r:4:f")))
    for version, status in ((1, 409), (5, 409), (2, 202), (4, 202)):
        sent = body(policy_version=version, id=str(version))
        assert client.post("/groups", json=sent).status_code == status, version


def test_a_group_that_is_sent_again_is_taken_once_and_a_refused_one_may_be_sent_again(
    client: Client, source: PushSource, loop: asyncio.AbstractEventLoop
) -> None:
    one, two, three = (body(id=name)["groups"] for name in "abc")
    assert client.post("/groups", json={"groups": one}).json() == {"taken": 1, "duplicates": 0}
    assert client.post("/groups", json={"groups": one}).json() == {"taken": 0, "duplicates": 1}
    both = client.post("/groups", json={"groups": one + two})
    assert both.json() == {"taken": 1, "duplicates": 1}
    assert client.post("/groups", json={"groups": three}).status_code == 429
    in_loop(loop, lambda: source.on(Used((0, 1))))
    assert client.post("/groups", json={"groups": three}).json()["taken"] == 1


def test_a_body_that_comes_before_enough_wait_is_taken_whole(client: Client) -> None:
    groups = [group for n in range(5) for group in body(id=str(n))["groups"]]
    assert client.post("/groups", json={"groups": groups}).json()["taken"] == 5
    assert client.get("/status").json()["waiting"] == 10
    assert client.post("/groups", json=body(id="late")).status_code == 429


def test_an_id_is_known_until_as_many_others_came_as_are_remembered(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(external, "REMEMBERED_IDS", 2)
    groups = [body(id=name)["groups"][0] for name in "abacba"]
    answer = client.post("/groups", json={"groups": groups}).json()
    # c evicts a: the last one is new again.
    assert answer == {"taken": 4, "duplicates": 2}


def test_one_stale_group_refuses_the_whole_body(client: Client) -> None:
    groups = body()["groups"] + body(policy_version=1, id="b")["groups"]
    refused = client.post("/groups", json={"groups": groups})
    assert refused.status_code == 409
    assert "groups[1].policy_version must be 2 or later" in refused.json()["error"]
    assert client.get("/status").json()["waiting"] == 0


def test_the_schema_is_published(client: Client) -> None:
    assert client.get("/schema").json() == json.loads(json.dumps(external.SCHEMA))


def test_what_can_not_be_read_is_refused_and_the_server_goes_on(client: Client) -> None:
    assert "must be JSON" in client.post("/groups", content=b"{").json()["error"]
    assert client.post("/groups", json={}).status_code == 400
    torn = client.post(
        "/groups", content=gzip.compress(encoded(body()))[:-9], headers={"Content-Encoding": "gzip"}
    )
    assert torn.status_code == 400
    assert client.post("/groups", content=iter([b"{}"])).status_code == 400
    assert client.get("/nothing").status_code == 404
    assert client.post("/groups", json=body()).status_code == 202


def test_a_body_that_is_too_large_is_refused_before_it_is_read(source: PushSource) -> None:
    connection = http.client.HTTPConnection(source.address, timeout=60)
    connection.putrequest("POST", "/groups")
    connection.putheader("Authorization", "Bearer secret")
    connection.putheader("Content-Length", str(httpd.MAX_BYTES + 1))
    connection.endheaders()
    assert connection.getresponse().status == 413
    connection.close()


def test_a_body_that_is_too_large_once_unpacked_is_refused(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = encoded(body())
    monkeypatch.setattr(httpd, "MAX_BYTES", len(plain))
    for content, status in ((plain, 202), (plain + b" ", 413)):
        packed = gzip.compress(content)
        assert len(packed) < len(plain)
        sent = client.post("/groups", content=packed, headers={"Content-Encoding": "gzip"})
        assert sent.status_code == status


@pytest.mark.parametrize(("rest", "status"), [(b"]}", 202), (b"]", 400)])
def test_all_members_of_a_gzipped_body_are_read(client: Client, rest: bytes, status: int) -> None:
    """Before, the first one alone was, and without a word (RFC 1952, 2.2: a file may have more)."""
    plain = encoded(body())
    assert plain.endswith(b"]}")
    packed = gzip.compress(plain[:-2]) + gzip.compress(rest)
    sent = client.post("/groups", content=packed, headers={"Content-Encoding": "gzip"})
    assert sent.status_code == status


def test_a_push_that_is_decided_late_is_answered_as_it_was_decided(
    client: Client, source: PushSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    decided_late = threading.Event()
    take = source._take

    def slow(incoming: Sequence[external.Incoming]) -> httpd.Reply:
        decided_late.wait(0.7)
        return take(incoming)

    monkeypatch.setattr(external, "DECIDE_S", 0.5)
    monkeypatch.setattr(source, "_take", slow)
    assert client.post("/groups", json=body()).status_code == 202


def test_a_push_that_cannot_be_handed_on_is_503(
    client: Client, source: PushSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    def gone(_: Sequence[external.Incoming]) -> httpd.Reply:
        raise ProtocolError("rank 0 is gone")

    monkeypatch.setattr(source, "_take", gone)
    assert client.post("/groups", json=body()).status_code == 503


def test_without_the_key_nothing_is_taken(client: Client) -> None:
    for headers in ({"Authorization": "Bearer other"}, {"Authorization": ""}):
        assert client.post("/groups", json=body(), headers=headers).status_code == 401
    assert (
        client.post("/groups", json=body(), headers={"Origin": "http://a.example"}).status_code
        == 403
    )
    assert client.get("/status").json()["waiting"] == 0


def test_a_loop_that_has_ended_is_503() -> None:
    async def start() -> PushSource:
        spec = RolloutSpec(model_dir="", source="push", push_address="127.0.0.1:0")
        return PushSource(spec, lambda _: None)

    source = asyncio.run(start())
    try:
        reply = httpx.post(
            f"http://{source.address}/groups", json=body(), trust_env=False, timeout=60
        )
        assert (reply.status_code, reply.headers["Retry-After"]) == (503, "1")
    finally:
        asyncio.run(source.close())


def test_an_address_that_can_not_be_bound_is_a_wrong_configuration(
    loop: asyncio.AbstractEventLoop, source: PushSource
) -> None:
    with pytest.raises(ConfigError, match=r"rollout.push_address must be an address of this host"):
        listening(loop, source.address)


@pytest.fixture
def example(root: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """examples/outside/pushing.py, which waits for 0.2 s for what does not answer."""
    monkeypatch.syspath_prepend(root / "examples" / "outside")
    module = importlib.import_module("pushing")
    monkeypatch.setattr(sys.modules["sampling"], "PATIENCE_S", 0.2)
    return module


class Pushed:
    """A run that gives these answers to pushed groups, listens no more after the last of them, and
    an engine whose version is the number of groups so far. ``versions``: those of the groups;
    ``ids``: theirs."""

    def __init__(self, *statuses: int) -> None:
        self.versions: list[int] = []
        self.ids: list[str] = []
        self.statuses = list(statuses)
        self.server = httpd.HttpServer("127.0.0.1:0", "", self._run, "a test")
        self.engine = httpd.HttpServer("127.0.0.1:0", "", self._engine, "a test")

    def listen_again(self, *statuses: int) -> None:
        self.statuses = list(statuses)
        self.server = httpd.HttpServer(self.server.address, "", self._run, "a test")

    def close(self) -> None:
        self.server.close()
        self.engine.close()

    def _run(self, request: httpd.Request) -> httpd.Reply:
        (group,) = json.loads(request.body)["groups"]
        self.versions.append(group["policy_version"])
        self.ids.append(group["id"])
        status = self.statuses.pop(0)
        if not self.statuses:
            self.server.close()
        return httpd.Reply(status, {}, 1)

    def _engine(self, request: httpd.Request) -> httpd.Reply:
        if request.path == "/weight_info":
            return httpd.Reply(200, {"weight_version": f"r:{len(self.versions)}:f"})
        choice = {"token_ids": [21], "logprobs": {"token_logprobs": [-0.5]}}
        return httpd.Reply(200, {"choices": [choice]})


def test_the_example_goes_on_after_a_503_and_ends_when_the_run_does_not_listen_any_more(
    example: ModuleType,
) -> None:
    with closing(Pushed(503, 429, 202, 503)) as run:
        example.main(f"http://{run.engine.address}", f"http://{run.server.address}")
    # The first group was sent until it was taken, then another one was made.
    assert run.versions == [0, 0, 0, 3]
    first, again, taken, other = run.ids
    assert first == again == taken != other


def test_the_example_waits_for_a_run_that_is_started_again(
    example: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    ask = example.ask
    refusals: list[OSError] = []

    def asked(url: str, body: Any = None) -> Any:
        try:
            return ask(url, body)
        except OSError as error:
            if not refusals:
                run.listen_again(202, 503)
            refusals.append(error)
            raise

    monkeypatch.setattr(example, "ask", asked)
    with closing(Pushed(202, 503)) as run:
        example.main(f"http://{run.engine.address}", f"http://{run.server.address}")
    # The second group met a run that was ending, and was taken by the one that came after it.
    assert run.versions == [0, 1, 1, 3]
    assert len(refusals) > 1


def test_a_key_that_is_named_and_not_there_opens_no_endpoint(
    loop: asyncio.AbstractEventLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PUSH_KEY", raising=False)
    with pytest.raises(ConfigError, match=r"rollout\.push_key_env must name .* PUSH_KEY is empty"):
        listening(loop)
