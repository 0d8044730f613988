"""A tokenizer on disk, and an HTTP server that answers /v1/completions as vLLM does and can be told
to misbehave."""

import asyncio
import dataclasses
import json
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.rigs.board import Board
from tests.rollout.sampling import holding
from titan_grpo.engines.http import AsyncDriver
from titan_grpo.errors import PeerError
from titan_grpo.protocol.messages import ServerState
from titan_grpo.rollout.agent_sampler import AgentSampler
from titan_grpo.rollout.agents import Agents
from titan_grpo.rollout.client import RolloutClient
from titan_grpo.rollout.codec import TextCodec
from titan_grpo.rollout.messages import RolloutSpec, Ticket
from titan_grpo.rollout.sampler import Attempt
from titan_grpo.rollout.task_runner import Filter, TaskRunner
from titan_grpo.rollout.tasks.agent import AgentRows, ToolParser, hermes
from titan_grpo.samples import NO_TOKENS, Group
from titan_grpo.titan.tiny import write_tiny_model

Behaviour = Callable[[dict[str, Any]], tuple[int, Any]]
MakeServer = Callable[[], "CompletionServer"]
GroupOf = Callable[..., Group]
SamplerOfAgents = Callable[..., AbstractAsyncContextManager[tuple[AgentSampler, Agents]]]
StartClient = Callable[..., RolloutClient]


def good(body: dict[str, Any]) -> tuple[int, Any]:
    """Four tokens that depend on the request's seed."""
    ids = [3 + (body["seed"] >> shift) % 90 for shift in (0, 8, 16, 24)]
    return answer(ids, [-1.0 - i for i in range(4)])


def answer(
    ids: list[int], logprobs: Sequence[float | None], reason: str | None = "length"
) -> tuple[int, Any]:
    """A 200 with one choice."""
    choice = {
        "index": 0,
        "text": "",
        "finish_reason": reason,
        "token_ids": ids,
        "logprobs": {"token_logprobs": logprobs},
    }
    return 200, {"choices": [choice]}


def piece(ids: list[int], reason: str | None = None) -> bytes:
    """An event of a streamed answer: tokens of log-probability -1."""
    _, content = answer(ids, [-1.0] * len(ids), reason)
    return b"data: " + json.dumps(content).encode() + b"\n\n"


def in_pieces(content: Any) -> bytes:
    """An answer as events: its first token, then the others with the rest. One without choices
    comes whole."""
    if not isinstance(content, dict) or "choices" not in content:
        return json.dumps(content).encode()
    (choice,) = content["choices"]
    ids, values = choice["token_ids"], choice["logprobs"]["token_logprobs"]
    _, first = answer(ids[:1], values[:1], None)
    last = choice | {"token_ids": ids[1:], "logprobs": {"token_logprobs": values[1:]}}
    events = json.dumps(first), json.dumps({"choices": [last]}), "[DONE]"
    return "".join(f"data: {event}\n\n" for event in events).encode()


class CompletionServer(Board):
    """A real HTTP server on loopback. ``behaviour`` may be replaced while it runs; ``bodies`` are
    the requests it got."""

    good = staticmethod(good)
    answer = staticmethod(answer)
    piece = staticmethod(piece)

    def __init__(self) -> None:
        self.behaviour: Behaviour = good
        self.bodies: list[dict[str, Any]] = []
        self.released = threading.Event()
        self._arrived = threading.Condition()
        super().__init__()

    def reply(self, route: str, body: Any) -> tuple[int, Any]:
        with self._arrived:
            self.bodies.append(body)
            self._arrived.notify_all()
        status, content = self.behaviour(body)
        whole = isinstance(content, Iterator) or not body.get("stream")
        return status, content if whole else in_pieces(content)

    def hang(self, body: dict[str, Any]) -> tuple[int, Any]:
        """Answer only once the test is over."""
        self.released.wait(120)
        return good(body)

    def wait_for_requests(self, count: int) -> None:
        """Until ``count`` requests have arrived in all."""
        with self._arrived:
            assert self._arrived.wait_for(lambda: len(self.bodies) >= count, 60)

    def close(self) -> None:
        self.released.set()
        super().close()


@pytest.fixture
def completion_server() -> Iterator[MakeServer]:
    servers: list[CompletionServer] = []

    def make() -> CompletionServer:
        servers.append(CompletionServer())
        return servers[-1]

    yield make
    for server in servers:
        server.close()


@pytest.fixture
def start_client() -> Iterator[StartClient]:
    """A factory: a spec, and changes of it -> a started client; ``server`` holds version 0 then."""
    clients: list[RolloutClient] = []

    def make(
        spec: RolloutSpec,
        server: CompletionServer | None = None,
        record_path: str = "",
        **changes: Any,
    ) -> RolloutClient:
        client = RolloutClient(dataclasses.replace(spec, **changes), record_path)
        clients.append(client)
        client.start(60)
        if server is not None:
            client.set_server(ServerState(server.url, 0, True, "r:0:f"))
        return client

    yield make
    for client in clients:
        client.close(5)


@pytest.fixture
def model_dir(tmp_path: Path) -> str:
    """A directory with a one-character-per-token tokenizer."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    vocab = {"<pad>": 0, "<bos>": 1, "<eos>": 2} | {chr(c): c - 29 for c in range(32, 127)}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(["<pad>", "<bos>", "<eos>"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    return str(tmp_path)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The tiny model, with its chat template."""
    return str(write_tiny_model("qwen3", tmp_path_factory.mktemp("model")))


@pytest.fixture(scope="module")
def codec(model: str) -> TextCodec:
    return TextCodec(model)


@pytest.fixture
def sampler_of_agents(model: str) -> SamplerOfAgents:
    """A factory: an agent, a filter of its groups, changes of the spec -> their sampler, and the
    endpoint."""

    @asynccontextmanager
    async def made(
        agent: Callable[..., Any] | None,
        tool_parser: ToolParser | None = hermes,
        /,
        keeps: Filter | None = None,
        **changes: Any,
    ) -> AsyncIterator[tuple[AgentSampler, Agents]]:
        sizes = {"group_size": 1, "max_completion_tokens": 400, "task_timeout_s": 60.0}
        name = "outside" if agent is None else "an:agent"
        spec = RolloutSpec(model_dir=model, **({"agent": name} | sizes | changes))
        task, codec = AgentRows(agent, None), TextCodec(spec.model_dir, spec)
        runner = TaskRunner(task, codec, spec, keeps)
        agents = Agents(spec, task, runner, codec)
        try:
            yield AgentSampler(spec, runner, agents, tool_parser), agents
        finally:
            await agents.close()

    return made


@pytest.fixture
def group_of(sampler_of_agents: SamplerOfAgents, completion_server: MakeServer) -> GroupOf:
    """A factory: an agent, engines -> the group that they make."""

    def make(
        agent: Callable[..., Any] | None,
        behaviours: Sequence[Behaviour],
        /,
        timeout_s: float = 60.0,
        look: Callable[[Agents], None] | None = None,
        tool_parser: ToolParser | None = hermes,
        keeps: bool = True,
        **changes: Any,
    ) -> Group:
        """One attempt for each behaviour of an engine, each on another server; the last is the
        group's. ``look``: called with the endpoint before the first. ``keeps``: whether an attempt
        has the tokens of the one before."""

        async def run() -> Group:
            group: Group | None = None
            none = [NO_TOKENS] * changes.get("group_size", 1)
            parts = list(none)
            made = sampler_of_agents(agent, tool_parser, task_timeout_s=timeout_s, **changes)
            async with made as (sampler, agents):
                if look is not None:
                    look(agents)
                for attempt, behaviour in enumerate(behaviours):
                    engine = completion_server()
                    engine.behaviour = behaviour
                    parts = parts if keeps else list(none)
                    server = holding(engine.url, 3 + attempt)
                    driver = AsyncDriver(engine.url)
                    try:
                        ticket = Ticket(0, attempt=attempt)
                        group = await sampler.group(Attempt(ticket, parts, server, driver))
                    except PeerError:
                        assert attempt < len(behaviours) - 1
                    finally:
                        await driver.close()
            assert group is not None, "no behaviour was given"
            return group

        return asyncio.run(run())

    return make
