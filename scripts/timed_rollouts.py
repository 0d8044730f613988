"""Rollouts whose generation takes a set time: a server without an engine, and a whole run in
simulated time.

In simulated time one event loop has everything: the trainer's RolloutClient, the Dispatcher with
its places and order of starts, the Sampler, and the server. The loop's clock does not follow the
machine's: it jumps to the next timer whenever nothing is left to do. So a run takes the seconds
that its order takes, on a machine with any load; it is repeatable, and an hour of it takes seconds.
What HTTP and the processes cost is left out: requests and answers have the form that they have on
the wire, and go from function to function.
"""

import asyncio
import json
import math
import selectors
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from itertools import count, groupby
from typing import Any, NamedTuple, TypeVar

from titan_grpo.engines.http import AsyncDriver, Call, Sink
from titan_grpo.protocol.messages import ServerState
from titan_grpo.rollout import messages
from titan_grpo.rollout.client import RolloutClient, RolloutsLate
from titan_grpo.rollout.dispatch import Dispatcher
from titan_grpo.rollout.messages import OnMessage, RolloutSpec, RolloutStopped
from titan_grpo.rollout.sampler import Sampler
from titan_grpo.rollout.task_runner import AnyTask, Codec, TaskRunner
from titan_grpo.samples import Group

T = TypeVar("T")

PROMPT_TOKENS = 3
"""Of every prompt here; what follows them in a request are tokens of an earlier attempt."""

STUCK_S = 60.0
"""Real seconds after which a simulated run without a timer is stuck."""

URL = "http://simulated-{}"

DEADLINE_S = 1e6
"""Simulated seconds that a step may wait for its groups."""


class Work(NamedTuple):
    """A whole completion: its tokens, and the seconds of each."""

    tokens: int
    token_s: float


SampleTokens = Callable[[list[int], int, int, int], tuple[list[int], list[float]]]
"""(prompt and tokens so far, how many more, version, seed) -> (tokens, their log-probabilities)."""


def constant_tokens(
    sequence: list[int], count: int, version: int, seed: int
) -> tuple[list[int], list[float]]:
    """For runs in which nothing but time matters."""
    return [5] * count, [-1.0] * count


def label(version: int) -> str:
    """As a server shows it."""
    return f"r:{version}:f"


class TimedServer:
    """Answers /v1/completions as vLLM does, in pieces, over the time that the prompt takes, with
    the version of each token (as vLLM does from 0.33 on). ``version`` may change while requests
    run: the tokens of later pieces are of that one."""

    def __init__(
        self,
        places: int,
        piece_tokens: int,
        work: Callable[[Sequence[int]], Work],
        sample: SampleTokens = constant_tokens,
    ) -> None:
        """``places``: requests that run at once, the others wait. Made in the loop that serves."""
        self._places = asyncio.Semaphore(places)
        self._piece_tokens, self._work, self._sample = piece_tokens, work, sample
        self.version = 0
        self.stands = (math.inf, math.inf)
        """From when to when it does nothing, by the loop's clock."""

    async def moves(self) -> None:
        """Wait while it stands still."""
        if self.stands[0] <= (now := asyncio.get_running_loop().time()) < self.stands[1]:
            await asyncio.sleep(self.stands[1] - now)

    async def listen(self) -> str:
        """Serve over HTTP from now on; returns the URL."""
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0, backlog=512)
        return f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked"
        try:
            while True:
                # no deadline: the client closes the connection
                asked = await reader.readuntil(b"\r\n\r\n")
                length = next(
                    int(line.split(b":")[1])
                    for line in asked.lower().splitlines()
                    if line.startswith(b"content-length")
                )
                body = json.loads(await reader.readexactly(length))
                writer.write(f"{head}\r\n\r\n".encode())
                async for event in self.events(body):
                    writer.write(f"{len(event):x}\r\n".encode() + event + b"\r\n")
                    await writer.drain()
                writer.write(b"0\r\n\r\n")
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass  # The client is gone.
        finally:
            writer.close()

    async def events(self, body: dict[str, Any]) -> AsyncGenerator[bytes, None]:
        """The answer to a request's JSON, as server-sent events."""
        loop = asyncio.get_running_loop()
        sequence = list(body["prompt"])
        tokens, token_s = self._work(sequence)
        versions = list[int]()
        async with self._places:
            began, done = loop.time(), len(sequence) - PROMPT_TOKENS
            while (have := len(sequence) - PROMPT_TOKENS) < tokens:
                last = min(have + self._piece_tokens, tokens)
                await asyncio.sleep(began + (last - done) * token_s - loop.time())
                await self.moves()
                seed = body["seed"] + have
                ids, logprobs = self._sample(sequence, last - have, self.version, seed)
                sequence += ids
                versions += [self.version] * len(ids)
                choice = {
                    "index": 0,
                    "text": "",
                    "finish_reason": "stop" if last == tokens else None,
                    "token_ids": ids,
                    "logprobs": {"token_logprobs": logprobs},
                    "weight_versions": spans(versions),
                }
                yield f"data: {json.dumps({'choices': [choice]})}\n\n".encode()
        yield b"data: [DONE]\n\n"


class DirectDriver(AsyncDriver):
    """Calls a TimedServer of the same loop, without a connection."""

    def __init__(self, url: str, server: TimedServer) -> None:
        super().__init__(url)
        self._timed = server

    async def stream(self, call: Call[Any], sink: Sink) -> None:
        async with aclosing(self._timed.events(call.json)) as events:
            async for event in events:
                sink.take(event)


def spans(versions: Sequence[int]) -> list[dict[str, Any]]:
    """Which version made which tokens, as the engines say it.

    >>> [(s["version"], s["start"], s["end"]) for s in spans((3, 3, 4))]
    [('r:3:f', 0, 2), ('r:4:f', 2, 3)]
    """
    found, start = list[dict[str, Any]](), 0
    for version, run in groupby(versions):
        end = start + len(list(run))
        found.append({"version": label(version), "start": start, "end": end})
        start = end
    return found


class _Jumps(selectors.DefaultSelector):
    """A selector that does not wait: where nothing is ready, time jumps."""

    now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            found = super().select(STUCK_S)
            if not found:
                raise TimeoutError("a simulated run must have a timer, or something to do")
            return found
        found = super().select(0)
        if not found:
            self.now += timeout
        return found


class SimulatedLoop(asyncio.SelectorEventLoop):
    """An event loop whose clock starts at 0 and jumps to the next timer when nothing is ready."""

    def __init__(self) -> None:
        self._jumps = _Jumps()
        super().__init__(self._jumps)

    def time(self) -> float:
        """Simulated seconds."""
        return self._jumps.now


def in_simulated_time(main: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine to its end in a SimulatedLoop."""
    with asyncio.Runner(loop_factory=SimulatedLoop) as runner:
        return runner.run(main)


class LoopTransport:
    """Between a RolloutClient and a Dispatcher in one event loop, in which all methods are
    called."""

    def __init__(self, task: AnyTask, codec: Codec, servers: Mapping[str, TimedServer]) -> None:
        self._task, self._codec, self._servers = task, codec, servers
        self._numbers, self._drained = count(), dict[int, asyncio.Event]()
        self.came = asyncio.Event()
        """Set by every message to the client."""

    def start(self, spec: RolloutSpec, on_message: OnMessage) -> None:
        self._on_message = on_message
        runner = TaskRunner(self._task, self._codec, spec)

        def connect(url: str) -> AsyncDriver:
            return DirectDriver(url, self._servers[url])

        sampler = Sampler(spec, runner)
        self.dispatcher = Dispatcher(spec, sampler, runner, self._out, self._fail, connect)
        self._out(messages.Ready())

    def send(self, message: messages.ToWorker, within_s: float | None = None) -> None:
        """As WorkerTransport.send. Later, since the client holds its lock."""
        asyncio.get_running_loop().call_soon(self.dispatcher.on, message)

    def close(self, deadline_s: float) -> None:
        """Nothing to end: see ``end``."""

    async def end(self) -> None:
        await self.dispatcher.close()

    async def drain(self, url: str) -> None:
        """Wait for the server's running requests, as RolloutClient.drain does for a thread."""
        number = next(self._numbers)
        self._drained[number] = asyncio.Event()
        self.send(messages.Drain(url, number, DEADLINE_S))
        await asyncio.wait_for(self._drained[number].wait(), DEADLINE_S)

    def _out(self, message: messages.FromWorker) -> None:
        if isinstance(message, messages.Answer):
            self._drained[message.number].set()
        self._on_message(message)
        self.came.set()

    def _fail(self, error: BaseException) -> None:
        self._on_message(RolloutStopped(f"the dispatcher failed: {error!r}"))
        self.came.set()


@dataclass(frozen=True, slots=True)
class Pace:
    """What takes how long, in seconds: a training step; a new version's way to the first server,
    and how much longer it is to each further one, beside which everything goes on. ``drained``: a
    server finishes its requests before each commit."""

    steps: int
    train_s: float
    publish_s: float = 0.0
    further_s: float = 0.0
    drained: bool = False


@dataclass(slots=True)
class Played:
    """A run: when each version existed (from 0), how often each prompt was trained on, the client's
    counters."""

    version_s: list[float] = field(default_factory=lambda: [0.0])
    trained: Counter[int] = field(default_factory=Counter)
    counters: dict[str, int] = field(default_factory=dict)


async def play(
    spec: RolloutSpec,
    task: AnyTask,
    codec: Codec,
    servers: Sequence[TimedServer],
    pace: Pace,
    train: Callable[[int, list[Group]], None] = lambda version, groups: None,
) -> Played:
    """A whole run in the loop that runs. ``train`` makes version ``version + 1`` of groups."""
    loop, played = asyncio.get_running_loop(), Played()
    urls = {URL.format(number): server for number, server in enumerate(servers)}
    transport = LoopTransport(task, codec, urls)
    client = RolloutClient(spec, transport=transport)

    def hold(url: str, version: int, accepting: bool = True) -> None:
        client.set_server(ServerState(url, version, accepting, label(version)))

    async def publish(url: str, way_s: float, newest: asyncio.Queue[int]) -> None:
        while True:
            # no deadline: cancelled at the run's end
            version = await newest.get()
            while not newest.empty():
                version = newest.get_nowait()
            await asyncio.sleep(way_s)
            if pace.drained:
                hold(url, urls[url].version, accepting=False)
                await transport.drain(url)
            await urls[url].moves()
            urls[url].version = version
            hold(url, version)

    async def batch(version: int) -> list[Group]:
        while True:
            transport.came.clear()
            try:
                return client.next_batch(version, spec.prompts_per_step, 0.0)
            except RolloutsLate:
                await asyncio.wait_for(transport.came.wait(), DEADLINE_S)

    client.start(STUCK_S)
    for url in urls:
        hold(url, 0)
    queues = [asyncio.Queue[int]() for _ in servers]
    publishing = [
        loop.create_task(publish(url, pace.publish_s + number * pace.further_s, queue))
        for number, (url, queue) in enumerate(zip(urls, queues, strict=True))
    ]
    for version in range(pace.steps):
        groups = await batch(version)
        played.trained.update(group.prompt.index for group in groups)
        await asyncio.sleep(pace.train_s)
        train(version, groups)
        played.version_s.append(loop.time())
        for queue in queues:
            queue.put_nowait(version + 1)
    played.counters = client.counters()
    for task_of_server in publishing:
        task_of_server.cancel()
    await transport.end()
    client.close()
    return played
