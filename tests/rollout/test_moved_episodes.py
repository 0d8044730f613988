"""Agents' episodes whose group is on no server for a time, or goes on at another one."""

import asyncio
import threading
from typing import Any

import pytest

from tests.rollout.agents import client_of, says, send, talker
from tests.rollout.conftest import GroupOf, MakeServer, SamplerOfAgents
from tests.rollout.sampling import holding
from titan_grpo.engines.http import AsyncDriver
from titan_grpo.errors import PeerError
from titan_grpo.rollout.agents import Agents
from titan_grpo.rollout.codec import TextCodec
from titan_grpo.rollout.messages import Ticket
from titan_grpo.samples import NO_TOKENS, Completion, Group

pytest.importorskip("openai")

SHORT_S = 4.0
"""Of the clock of an episode that takes a fraction of a second."""


def dies(body: dict[str, Any]) -> tuple[int, Any]:
    return 500, {}


def test_an_outage_of_all_servers_is_no_time_of_an_agent(
    group_of: GroupOf, codec: TextCodec
) -> None:
    keys, agent = [], talker(2)

    def counted(base_url: str, api_key: str, row: dict[str, Any]) -> float:
        keys.append(api_key)
        return agent(base_url, api_key, row)

    behaviours = [dies, says(codec, "one")]
    group = group_of(counted, behaviours, timeout_s=SHORT_S, between_s=SHORT_S + 0.5)
    assert (len(keys), group.completions[0].num_sampled) == (1, 8)


def test_an_outage_of_all_servers_is_no_time_of_an_agent_elsewhere(
    group_of: GroupOf, codec: TextCodec
) -> None:
    threads = []

    def look(agents: Agents) -> None:
        def outside() -> None:
            status: int = 429
            given: dict[str, Any] = {}
            address = agents.url.removeprefix("http://")
            while status == 429:  # the group has not begun
                status, given = send(address, "POST", "/episodes")
            talker(1)(f"{agents.url}/v1", given["id"], {})
            path = f"/episodes/{given['id']}/reward"
            assert send(address, "POST", path, given["id"], {"reward": 0.25})[0] == 200

        threads.append(threading.Thread(target=outside))
        threads[0].start()

    behaviours = [dies, says(codec, "one")]
    group = group_of(
        None, behaviours, timeout_s=SHORT_S, between_s=SHORT_S + 0.5, look=look, agent="outside"
    )
    threads[0].join(60)
    assert group.completions[0].reward == 0.25


def test_an_episode_that_begins_again_samples_its_first_answer_anew(
    sampler_of_agents: SamplerOfAgents, codec: TextCodec, completion_server: MakeServer
) -> None:
    heard: list[list[str]] = []

    def agent(base_url: str, api_key: str, row: dict[str, Any]) -> float:
        client, mine = client_of(base_url, api_key), list[str]()
        heard.append(mine)
        for _ in range(3):  # each a token sequence of its own
            said: Any = {"role": "user", "content": f"hello {len(mine)}"}
            reply = client.chat.completions.create(model="any", messages=[said])
            mine.append(str(reply.choices[0].message.content))
        return 1.0

    first, second = completion_server(), completion_server()
    asked: list[list[int]] = []
    says_two = says(codec, "one", "two", log=asked)
    first.behaviour = lambda body: says_two(body) if len(asked) < 2 else dies(body)
    second.behaviour = says(codec, "three")

    async def run() -> list[Completion]:
        drivers = [AsyncDriver(first.url), AsyncDriver(second.url)]
        async with sampler_of_agents(agent) as (sampler, _):
            parts = [NO_TOKENS]
            with pytest.raises(PeerError):
                await sampler.group(Ticket(0), parts, holding(first.url, 3), drivers[0])
            # The second answer became too old, the first one did not.
            parts[1] = NO_TOKENS
            moved = Ticket(0, attempt=1)
            await sampler.group(moved, parts, holding(second.url, 4), drivers[1])
        for driver in drivers:
            await driver.close()
        return parts

    parts = asyncio.run(run())
    assert heard == [["one", "two"], ["three"] * 3]
    assert {part.version_first for part in parts if part.token_ids} == {4}


def test_agents_whose_group_waits_for_a_server_keep_no_place_from_those_of_another_group(
    sampler_of_agents: SamplerOfAgents, codec: TextCodec, completion_server: MakeServer
) -> None:
    first, second = completion_server(), completion_server()
    first.behaviour, second.behaviour = first.hang, says(codec, "one")

    async def run() -> list[Group]:
        drivers = [AsyncDriver(first.url), AsyncDriver(second.url)]
        async with sampler_of_agents(talker(1), task_concurrency=1) as (sampler, _):
            parts = [NO_TOKENS]
            moved = asyncio.ensure_future(
                sampler.group(Ticket(0), parts, holding(first.url, 3), drivers[0])
            )
            await asyncio.to_thread(first.wait_for_requests, 1)
            moved.cancel()
            await asyncio.wait([moved], timeout=60)
            groups = []
            # The first group's agent waits in its call, in a thread of its own.
            for ticket, had in ((Ticket(1), [NO_TOKENS]), (Ticket(0, attempt=1), parts)):
                made = sampler.group(ticket, had, holding(second.url, 3), drivers[1])
                groups.append(await asyncio.wait_for(made, 30))
        for driver in drivers:
            await driver.close()
        return groups

    groups = asyncio.run(run())
    assert [group.completions[0].num_sampled for group in groups] == [4, 4]
