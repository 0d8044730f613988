#!/usr/bin/env python
"""What does a group cost rank 0 and the rollout process as servers get more?

    python scripts/bench_fleet.py [--servers 16 64 256 1024] [--groups 8] [--steps 3] [--json PATH]

The real client of rank 0 and the real dispatcher of the rollout process, in two threads of this
process; places, order of starts, choice of servers, counters and messages are the product's. In
place of requests a completion takes a set time, a quarter of it more or less. Each server makes
``--groups`` groups at once, and a step takes as many of each server. At every version each server
reports twice: its commit begins, and it is in.

Printed are processor microseconds of both threads per group. What a group's requests cost, and the
way between the processes, is in bench_streamed.py: it does not depend on the number of servers.
"""

import asyncio
import random
import sys
import threading
import time
from collections.abc import Coroutine, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the checkout, for scripts

from scripts.common import Table, options_of, write_json
from scripts.timed_rollouts import label
from titan_grpo.engines.http import AsyncDriver
from titan_grpo.protocol.messages import ServerState
from titan_grpo.rollout import messages
from titan_grpo.rollout.client import RolloutClient
from titan_grpo.rollout.dispatch import Dispatcher
from titan_grpo.rollout.messages import OnMessage, RolloutSpec, RolloutStopped
from titan_grpo.rollout.sampler import Attempt, Sampler
from titan_grpo.rollout.task_runner import TaskRunner, at_once
from titan_grpo.samples import Completion, Group, Prompt

GROUP, TOKENS = 8, 8
GROUP_S = 2.0
DEADLINE_S = 600.0


@dataclass(frozen=True)
class Cost:
    """Of one number of servers: groups of a step, and microseconds of a processor per group."""

    servers: int
    groups: int
    dispatcher_us: float
    client_us: float


class Timed:
    """A sampler whose completions take a set time."""

    def __init__(self) -> None:
        self._chance = random.Random(1)

    def still_used(self, index: int, parts: Sequence[Completion]) -> Sequence[Completion]:
        return parts

    async def group(self, attempt: Attempt) -> Group:
        version, url = attempt.server.state.version or 0, attempt.server.url

        async def finish() -> None:
            await asyncio.sleep(GROUP_S * self._chance.uniform(0.75, 1.25))
            attempt.ended(attempt)

        await at_once([finish() for _ in range(GROUP)])
        attempt.sampled(attempt)
        one = Completion((5,) * TOKENS, (-1.0,) * TOKENS, "stop", version, version, url, 1.0)
        return Group(Prompt(attempt.ticket.index, (3,)), (one,) * GROUP)

    async def close(self) -> None:
        """Nothing to end."""


class SameLengths:
    """Of the task runner: every completion is expected to be as long."""

    def ahead(self, index: int) -> tuple[Prompt, float]:
        return Prompt(index, (3, index)), float(TOKENS)


class ThreadTransport:
    """The dispatcher in a thread of this process."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.busy_s = 0.0
        """Processor seconds of the thread, once it has ended."""

    def start(self, spec: RolloutSpec, on_message: OnMessage) -> None:

        def fail(error: BaseException) -> None:
            on_message(RolloutStopped(f"the dispatcher failed: {error!r}"))

        self._dispatcher = Dispatcher(
            spec,
            cast(Sampler, Timed()),
            cast(TaskRunner, SameLengths()),
            on_message,
            fail,
            AsyncDriver,
        )
        self._loop.set_exception_handler(
            lambda _, context: fail(context.get("exception") or RuntimeError(context["message"]))
        )
        self._thread.start()
        on_message(messages.Ready())

    def _run(self) -> None:
        began = time.thread_time()
        # no deadline: close() ends it
        self._loop.run_forever()
        self.busy_s = time.thread_time() - began

    def send(self, message: messages.ToWorker, within_s: float | None = None) -> None:
        self._loop.call_soon_threadsafe(self._dispatcher.on, message)

    def close(self, deadline_s: float) -> None:
        """Abort what runs, and end the thread."""
        closing: Coroutine[Any, Any, None] = self._dispatcher.close()
        asyncio.run_coroutine_threadsafe(closing, self._loop).result(deadline_s)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(deadline_s)


def measure(servers: int, groups: int, steps: int) -> Cost:
    """So many steps with so many servers."""
    spec = RolloutSpec(
        model_dir="",
        group_size=GROUP,
        prompts_per_step=servers * groups,
        max_concurrent_requests=groups * GROUP,
        max_completion_tokens=TOKENS,
    )
    transport = ThreadTransport()
    client = RolloutClient(spec, transport=transport)
    client.start(DEADLINE_S)
    urls = [f"http://server{number}:8000" for number in range(servers)]
    for url in urls:
        client.set_server(ServerState(url, 0, True, label(0)))
    began = time.thread_time()
    for version in range(steps):
        assert (
            len(client.next_batch(version, spec.prompts_per_step, DEADLINE_S)) == servers * groups
        )
        for url in urls:
            new = ServerState(url, version, True, label(version), committing=version + 1)
            client.set_server(new)
            client.set_server(ServerState(url, version + 1, True, label(version + 1)))
    asked_s = time.thread_time() - began
    client.close(DEADLINE_S)
    made = servers * groups * steps
    return Cost(servers, servers * groups, transport.busy_s / made * 1e6, asked_s / made * 1e6)


def main() -> int:
    """Print one line per number of servers."""
    parser = options_of(__doc__)
    parser.add_argument("--servers", nargs="+", type=int, default=(16, 64, 256, 1024))
    parser.add_argument("--groups", type=int, default=8, help="of a server at once")
    parser.add_argument("--steps", type=int, default=3)
    options = parser.parse_args()
    table = Table()
    for servers in options.servers:
        table.add(asdict(measure(servers, options.groups, options.steps)))
    write_json(options.json, table.rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
