"""Calls that a client gives up, and calls that it repeats: an answer is trained on if an agent got
it, and once."""

import asyncio
import http.client
import json
import threading
from collections.abc import Callable
from typing import Any

import pytest

from tests.rigs.trainer_handle import wait_until
from tests.rollout.agents import HELLO, asking, caller, saying, says, send, talker
from tests.rollout.conftest import GroupOf, SamplerOfAgents
from titan_grpo.rollout import agents
from titan_grpo.rollout.codec import TextCodec
from titan_grpo.samples import NO_TOKENS

openai = pytest.importorskip("openai")

WAIT_S = 60.0


def answer_to(connection: http.client.HTTPConnection) -> Any:
    """The answer to its call; the connection is closed then."""
    try:
        return json.loads(connection.getresponse().read())
    finally:
        connection.close()


def test_a_call_that_openais_client_gives_up_and_repeats_has_one_answer(
    group_of: GroupOf, codec: TextCodec
) -> None:
    asked: list[list[int]] = []
    repeated, speak = threading.Event(), says(codec, "one", log=asked)

    def slow(body: dict[str, Any]) -> tuple[int, Any]:
        assert repeated.wait(WAIT_S)
        return speak(body)

    def note(request: Any) -> None:
        if request.headers["x-stainless-retry-count"] != "0":
            repeated.set()

    def agent(base_url: str, api_key: str, row: dict[str, Any]) -> float:
        client = openai.OpenAI(
            base_url=base_url,
            api_key=api_key,
            timeout=0.3,
            max_retries=100,
            http_client=openai.DefaultHttpxClient(event_hooks={"request": [note]}),
        )
        reply = client.chat.completions.create(model="any", messages=[HELLO])
        assert reply.choices[0].message.content == "one"
        return 1.0

    group = group_of(agent, [slow])
    assert [completion.num_sampled for completion in group.completions] == [4]
    assert len(asked) == 1


Speak = Callable[[dict[str, Any]], tuple[int, Any]]


def held(speak: Speak) -> tuple[Speak, threading.Event, threading.Event]:
    """An engine that sets the first event at a request, and answers once the second is set."""
    arrived, go = threading.Event(), threading.Event()

    def engine(body: dict[str, Any]) -> tuple[int, Any]:
        arrived.set()
        assert go.wait(WAIT_S)
        return speak(body)

    return engine, arrived, go


def test_an_answer_whose_client_has_gone_is_not_trained_on(
    group_of: GroupOf, codec: TextCodec
) -> None:
    engine, arrived, gone = held(says(codec, "one"))

    def agent(base_url: str, api_key: str, row: dict[str, Any]) -> float:
        connection = asking(base_url, api_key)
        assert arrived.wait(WAIT_S)
        connection.close()
        gone.set()
        return caller(*saying(*"abc"))(base_url, api_key, row)

    group = group_of(agent, [engine])
    prompts = [
        codec.spell((*group.prompt.token_ids, *completion.token_ids))
        for completion in group.completions
    ]
    assert prompts == [f"<bos>user: {said}\nassistant:one<eos>" for said in ("a", "b", "c")]


def test_the_last_answer_of_a_sequence_whose_client_has_gone_is_cut_off_it(
    group_of: GroupOf, codec: TextCodec
) -> None:
    speak = says(codec, "one")
    engine, arrived, gone = held(speak)

    def agent(base_url: str, api_key: str, row: dict[str, Any]) -> float:
        caller({})(base_url, api_key, row)
        said = {"role": "assistant", "content": "one"}
        connection = asking(base_url, api_key, messages=[HELLO, said, HELLO])
        assert arrived.wait(WAIT_S)
        connection.close()
        gone.set()
        return caller(*saying(*"abc"))(base_url, api_key, row)

    group = group_of(agent, [lambda body: (engine if len(body["prompt"]) > 40 else speak)(body)])
    first = group.completions[0]
    whole = codec.spell((*group.prompt.token_ids, *first.token_ids))
    assert whole == "<bos>user: hello\nassistant:one<eos>"
    assert first.num_sampled == len(first.token_spans) + 3 == 4


def test_an_equal_call_takes_the_answer_of_a_client_that_has_gone(
    group_of: GroupOf, codec: TextCodec
) -> None:
    asked: list[list[int]] = []
    engine, arrived, gone = held(says(codec, "one", log=asked))

    def agent(base_url: str, api_key: str, row: dict[str, Any]) -> float:
        connection = asking(base_url, api_key)
        assert arrived.wait(WAIT_S)
        connection.close()
        gone.set()
        return talker(2)(base_url, api_key, row)

    group = group_of(agent, [engine])
    assert [completion.num_sampled for completion in group.completions] == [8]
    assert len(asked) == 2


def test_a_call_that_is_given_up_again_and_again_holds_no_connection_for_each_time(
    group_of: GroupOf, codec: TextCodec, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agents, "GONE_S", 0.05)
    engine, arrived, go = held(says(codec, "one"))

    def served() -> int:
        return sum("process_request" in thread.name for thread in threading.enumerate())

    def agent(base_url: str, api_key: str, row: dict[str, Any]) -> float:
        before, first = served(), asking(base_url, api_key)
        assert arrived.wait(WAIT_S)
        for connection in (first, *(asking(base_url, api_key) for _ in range(8))):
            connection.close()
        # The engine's own is one.
        assert wait_until(lambda: served() <= before + 1, WAIT_S)
        go.set()
        return talker(1)(base_url, api_key, row)

    group = group_of(agent, [engine])
    assert [completion.num_sampled for completion in group.completions] == [4]


@pytest.mark.parametrize(("retries", "sequences"), [(1, 1), (0, 2), (None, 2)])
def test_an_equal_call_is_a_repeat_while_another_waits_only_if_the_client_says_so(
    group_of: GroupOf, codec: TextCodec, retries: int | None, sequences: int
) -> None:
    asked: list[list[int]] = []
    engine, arrived, both = held(says(codec, "one", log=asked))

    def agent(base_url: str, api_key: str, row: dict[str, Any]) -> float:
        # Its end does not reach the run, as when a host on the way forgot the connection.
        first = asking(base_url, api_key)
        assert arrived.wait(WAIT_S)
        second = asking(base_url, api_key, retries)
        both.set()
        ids = {answer_to(connection)["id"] for connection in (second, first)}
        assert len(ids) == sequences
        return 1.0

    group = group_of(agent, [engine])
    assert [completion.num_sampled for completion in group.completions] == [4] * sequences
    assert len(asked) == sequences


@pytest.mark.parametrize(("retries", "sequences"), [(1, 1), (0, 2), (None, 2)])
def test_a_repeat_of_an_answered_call_gets_the_same_answer(
    group_of: GroupOf, codec: TextCodec, retries: int | None, sequences: int
) -> None:
    def agent(base_url: str, api_key: str, row: dict[str, Any]) -> float:
        first, second = (answer_to(asking(base_url, api_key, n)) for n in (None, retries))
        assert (first == second) == (sequences == 1)
        return 1.0

    group = group_of(agent, [says(codec, "one")])
    assert [completion.num_sampled for completion in group.completions] == [4] * sequences


def test_a_repeat_of_the_last_of_equal_calls_gets_its_answer_and_not_an_older_one(
    group_of: GroupOf, codec: TextCodec
) -> None:
    def agent(base_url: str, api_key: str, row: dict[str, Any]) -> float:
        answers = [answer_to(asking(base_url, api_key, n)) for n in (None, None, 1)]
        said = [each["choices"][0]["message"]["content"] for each in answers]
        assert said == ["one", "two", "two"]
        return 1.0

    group = group_of(agent, [says(codec, "one", "two")])
    assert [completion.num_sampled for completion in group.completions] == [4] * 2


def test_repeats_of_equal_calls_at_once_get_the_answers_that_their_client_lacks(
    group_of: GroupOf, codec: TextCodec
) -> None:
    def agent(base_url: str, api_key: str, row: dict[str, Any]) -> float:
        def read(connection: http.client.HTTPConnection) -> str:
            return str(json.loads(connection.getresponse().read())["id"])

        calls = [asking(base_url, api_key) for _ in range(4)]
        ids = [read(connection) for connection in calls]
        # As if the client had given these up before their answers came. Others stay open.
        for connection in calls[:3]:
            connection.close()
        repeats = [asking(base_url, api_key, 1) for _ in range(3)]
        assert {read(connection) for connection in repeats} == set(ids[:3])
        for connection in (calls[3], *repeats):
            connection.close()
        return 1.0

    group = group_of(agent, [says(codec, "one")])
    assert len(group.completions) == 4


@pytest.mark.parametrize("over", [False, True], ids=["group running", "group done"])
def test_a_repeated_reward_is_answered_as_the_first_one(
    sampler_of_agents: SamplerOfAgents, over: bool
) -> None:
    async def run() -> list[tuple[int, Any]]:
        async with sampler_of_agents(None) as (_, agents):
            agents.take(0, [NO_TOKENS])
            address = agents.url.removeprefix("http://")
            _, given = await asyncio.to_thread(send, address, "POST", "/episodes")
            key, path = given["id"], f"/episodes/{given['id']}/reward"
            answers = []
            for reward in (0.25, 0.25, 0.5):
                body = {"reward": reward}
                answers.append(await asyncio.to_thread(send, address, "POST", path, key, body))
                if over:
                    agents.end(0)
            return answers

    first, repeated, other = asyncio.run(run())
    assert first == repeated
    assert (first[0], other[0]) == (200, 401)


def test_an_episode_is_not_handed_to_a_client_that_has_gone(
    sampler_of_agents: SamplerOfAgents,
) -> None:
    async def run() -> int:
        async with sampler_of_agents(None) as (_, agents):
            agents.take(0, [NO_TOKENS])
            address = agents.url.removeprefix("http://")
            first = http.client.HTTPConnection(address)
            # Both while the loop is busy: it runs on only at the next await.
            first.request("POST", "/episodes", b"")
            first.close()
            status, _ = await asyncio.to_thread(send, address, "POST", "/episodes")
            return status

    assert asyncio.run(run()) == 200
