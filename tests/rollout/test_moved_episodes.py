"""Agents' episodes whose group is on no server for a time, or goes on at another one."""

import asyncio
import threading
from collections.abc import Callable
from itertools import count
from typing import Any, cast

import pytest

from tests.rollout.agents import asking, caller, client_of, saying, says, send, taken, talker
from tests.rollout.conftest import CompletionServer, MakeServer, SamplerOfAgents, answer
from tests.rollout.sampling import holding
from titan_grpo.engines.http import AsyncDriver
from titan_grpo.errors import PeerError
from titan_grpo.rollout.agent_sampler import AgentSampler, Places
from titan_grpo.rollout.agents import Agents, Call, Episode
from titan_grpo.rollout.codec import TextCodec
from titan_grpo.rollout.dispatch import Dispatcher
from titan_grpo.rollout.messages import FromWorker, GroupDone, ServerLeft, Ticket
from titan_grpo.rollout.sampler import Attempt
from titan_grpo.rollout.trajectories import Trajectory
from titan_grpo.samples import NO_TOKENS, Completion, Group

pytest.importorskip("openai")

Outage = Callable[..., Group]


async def attempt(
    sampler: AgentSampler, server: CompletionServer, parts: list[Completion], index: int = 0
) -> Group:
    """The group of a prompt on a server."""
    driver = AsyncDriver(server.url)
    try:
        return await sampler.group(Attempt(Ticket(index), parts, holding(server.url, 3), driver))
    finally:
        await driver.close()


@pytest.fixture
def outage(
    sampler_of_agents: SamplerOfAgents,
    completion_server: MakeServer,
    codec: TextCodec,
    monkeypatch: pytest.MonkeyPatch,
) -> Outage:
    """A factory: an agent -> its group, whose first server dies, and whose second one is there only
    long after ``task_timeout_s``."""
    first, second = completion_server(), completion_server()
    first.behaviour, second.behaviour = lambda _: (500, {}), says(codec, "one")

    def make(
        agent: Callable[..., Any] | None, look: Callable[[Agents], None] = lambda _: None
    ) -> Group:
        async def run() -> Group:
            loop, later_s = asyncio.get_running_loop(), 0.0
            real = loop.time
            monkeypatch.setattr(loop, "time", lambda: real() + later_s)
            parts = [NO_TOKENS]
            async with sampler_of_agents(agent, task_timeout_s=60.0) as (sampler, agents):
                look(agents)
                with pytest.raises(PeerError):
                    await attempt(sampler, first, parts)
                later_s += 1000.0
                for _ in range(5):  # callbacks that are due, and those that follow them
                    await asyncio.sleep(0)
                return await attempt(sampler, second, parts)

        return asyncio.run(run())

    return make


def test_an_outage_of_all_servers_is_no_time_of_an_agent(outage: Outage) -> None:
    keys: list[str] = []
    group = outage(talker(2, keys))
    assert (len(keys), group.completions[0].num_sampled) == (1, 8)


def test_an_outage_of_all_servers_is_no_time_of_an_agent_elsewhere(outage: Outage) -> None:
    threads = []

    def look(agents: Agents) -> None:
        def outside() -> None:
            address = agents.url.removeprefix("http://")
            given = taken(address)
            talker(1)(f"{agents.url}/v1", given["id"], {})
            path = f"/episodes/{given['id']}/reward"
            send(address, "POST", path, given["id"], {"reward": 0.25})

        threads.append(threading.Thread(target=outside))
        threads[0].start()

    group = outage(None, look)
    threads[0].join(60)
    assert group.completions[0].reward == 0.25


def test_agents_whose_group_waits_for_a_server_keep_no_place_from_those_of_another_group(
    sampler_of_agents: SamplerOfAgents, codec: TextCodec, completion_server: MakeServer
) -> None:
    first, second = completion_server(), completion_server()
    first.behaviour, second.behaviour = first.hang, says(codec, "one")

    async def run() -> list[Group]:
        async with sampler_of_agents(talker(1), task_concurrency=1) as (sampler, _):
            parts = [NO_TOKENS]
            moved = asyncio.ensure_future(attempt(sampler, first, parts))
            await asyncio.to_thread(first.wait_for_requests, 1)
            moved.cancel()
            await asyncio.wait([moved], timeout=60)
            # Its agent waits in its call, in a thread of its own.
            return [
                await asyncio.wait_for(attempt(sampler, second, had, index), 30)
                for had, index in (([NO_TOKENS], 1), (parts, 0))
            ]

    assert [group.completions[0].num_sampled for group in asyncio.run(run())] == [4, 4]


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
    first.behaviour = lambda body: says_two(body) if len(asked) < 2 else (500, {})
    second.behaviour = says(codec, "three")

    async def run() -> None:
        async with sampler_of_agents(agent) as (sampler, _):
            parts = [NO_TOKENS]
            with pytest.raises(PeerError):
                await attempt(sampler, first, parts)
            # The second answer became too old, the first one did not.
            parts[1] = NO_TOKENS
            await attempt(sampler, second, parts)

    asyncio.run(run())
    assert heard == [["one", "two"], ["three"] * 3]


def test_episodes_after_a_drop_on_a_server_that_leaves_at_that_moment_sample_all_anew(
    sampler_of_agents: SamplerOfAgents, codec: TextCodec, completion_server: MakeServer
) -> None:
    leaving, staying = completion_server(), completion_server()
    speak = says(codec, "old")
    # The second answer is unfit.
    leaving.behaviour = lambda body: (
        speak(body) if len(leaving.bodies) == 1 else answer([7], [None], "stop")
    )
    staying.behaviour = says(codec, "new")
    heard: list[str] = []
    first_heard = asyncio.Event()
    dispatcher: Dispatcher

    async def agent(base_url: str, api_key: str, row: dict[str, Any]) -> float:
        number = next(numbers)
        if number == 1:
            await first_heard.wait()
        said: Any = {"role": "user", "content": f"I am {number}"}
        ask = client_of(base_url, api_key).chat.completions.create
        reply = await asyncio.to_thread(ask, model="any", messages=[said])
        heard.append(f"{number} {reply.choices[0].message.content}")
        if number == 0:
            first_heard.set()
            try:
                await asyncio.Event().wait()
            finally:  # its group has just been dropped
                dispatcher.on(ServerLeft(leaving.url))
                dispatcher.on(holding(staying.url, 0).state)
        return 1.0

    numbers, drivers = count(), dict[str, AsyncDriver]()

    def connect(url: str) -> AsyncDriver:
        drivers[url] = AsyncDriver(url)
        return drivers[url]

    async def run() -> Group:
        nonlocal dispatcher
        out, failed = asyncio.Queue[FromWorker](), list[BaseException]()
        sizes = {"group_size": 2, "prompts_per_step": 1, "max_staleness": 0}
        async with sampler_of_agents(agent, **sizes) as (sampler, _), asyncio.timeout(60):
            of, runner = sampler._spec, sampler._runner
            dispatcher = Dispatcher(of, sampler, runner, out.put_nowait, failed.append, connect)
            dispatcher.on(holding(leaving.url, 0).state)
            counters: dict[str, int] = {}
            while not isinstance(done := await out.get(), GroupDone):
                assert not failed
                counters |= getattr(done, "counters", {})
            await dispatcher.close()
            assert counters["moved"] == 1
            return done.group

    group = asyncio.run(run())
    assert [drivers[s.url]._connections._closed for s in (leaving, staying)] == [True, True]
    shown = [codec.spell((*group.prompt.token_ids, *c.token_ids)) for c in group.completions]
    assert sorted(heard) == ["0 old", "2 new", "3 new"]
    assert shown == [f"<bos>user: I am {n}\nassistant:new<eos>" for n in (2, 3)]


def test_a_call_whose_client_has_gone_is_not_sampled_at_the_next_server(
    sampler_of_agents: SamplerOfAgents, codec: TextCodec, completion_server: MakeServer
) -> None:
    first, second = completion_server(), completion_server()
    first.behaviour, second.behaviour = first.hang, says(codec, "one")
    gone = threading.Event()

    def agent(base_url: str, api_key: str, row: dict[str, Any]) -> float:
        connection = asking(base_url, api_key)
        first.wait_for_requests(1)
        connection.close()
        gone.set()
        return caller(*saying("a"))(base_url, api_key, row)

    async def run() -> Group:
        async with sampler_of_agents(agent) as (sampler, _):
            parts = [NO_TOKENS]
            moved = asyncio.ensure_future(attempt(sampler, first, parts))
            await asyncio.to_thread(gone.wait, 60)
            moved.cancel()
            await asyncio.wait([moved], timeout=60)
            return await attempt(sampler, second, parts)

    assert [completion.num_sampled for completion in asyncio.run(run()).completions] == [4]
    assert len(second.bodies) == 1


def test_the_episodes_of_an_older_group_get_a_place_before_those_that_wait_longer(
    sampler_of_agents: SamplerOfAgents, codec: TextCodec, completion_server: MakeServer
) -> None:
    hanging, speaking = completion_server(), completion_server()
    hanging.behaviour, speaking.behaviour = hanging.hang, says(codec, "one")
    begun: list[int] = []

    def agent(base_url: str, api_key: str, row: dict[str, Any]) -> float:
        begun.append(row["index"])
        return talker(1)(base_url, api_key, row)

    async def run() -> None:
        async with sampler_of_agents(agent, task_concurrency=1) as (sampler, _):
            has = asyncio.ensure_future(attempt(sampler, hanging, [NO_TOKENS], 1))
            await asyncio.to_thread(hanging.wait_for_requests, 1)
            waiting = []
            for index in (2, 0):
                waiting.append(
                    asyncio.ensure_future(attempt(sampler, speaking, [NO_TOKENS], index))
                )
                await asyncio.sleep(0)
                await asyncio.sleep(0)  # its episode's own task
            has.cancel()
            await asyncio.wait_for(asyncio.gather(*waiting), 60)

    asyncio.run(run())
    assert begun == [1, 0, 2]


def test_a_place_that_comes_with_the_cancellation_of_its_wait_goes_to_the_next() -> None:
    async def hold(places: Places) -> None:
        async with places.place(1):
            raise AssertionError("its wait was cancelled")

    async def run() -> None:
        places = Places(1)
        async with places.place(0):
            waiting = asyncio.ensure_future(hold(places))
            await asyncio.sleep(0)
        waiting.cancel()
        async with asyncio.timeout(60), places.place(2):
            pass
        assert waiting.cancelled()

    asyncio.run(run())


def test_a_finished_group_does_not_wait_for_a_place_to_be_accepted(
    sampler_of_agents: SamplerOfAgents, codec: TextCodec, completion_server: MakeServer
) -> None:
    hanging, speaking = completion_server(), completion_server()
    hanging.behaviour = hanging.hang
    speak, queued = says(codec, "one"), threading.Event()

    def engine(body: dict[str, Any]) -> tuple[int, Any]:
        assert queued.wait(60)
        return speak(body)

    speaking.behaviour = engine

    async def run() -> Group:
        made = sampler_of_agents(talker(1), task_concurrency=1, keeps=lambda group: True)
        async with made as (sampler, _):
            first = asyncio.ensure_future(attempt(sampler, speaking, [NO_TOKENS], 0))
            await asyncio.to_thread(speaking.wait_for_requests, 1)
            other = asyncio.ensure_future(attempt(sampler, hanging, [NO_TOKENS], 1))
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            queued.set()
            group = await asyncio.wait_for(first, 10)
            other.cancel()
            await asyncio.wait([other], timeout=60)
            return group

    assert asyncio.run(run()).completions[0].num_sampled == 4


def test_an_episode_is_lost_with_a_token_that_its_agent_has_and_not_with_its_next_answer() -> None:
    loop = asyncio.new_event_loop()
    trajectory = Trajectory((1,), part=1, delivered=2)
    waiting = Call(cast(Any, None), trajectory, (), "", loop.create_future(), [])
    episode = Episode("ep", 0, {}, loop.create_future(), 60.0, calls={trajectory: waiting})
    loop.close()

    def part(tokens: int) -> Completion:
        return Completion((5,) * tokens, (-1.0,) * tokens, "", 3, 3, "s")

    lost = [episode.lost([part(9), part(tokens)]) for tokens in (1, 2, 3)]
    assert lost == [True, False, False]
    assert episode.lost([part(9)])
