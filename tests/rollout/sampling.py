"""A sampler of a task without the rollout process, groups made by it; the runner of a reward."""

import asyncio
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

from titan_grpo.config.task import TaskKeys
from titan_grpo.engines.http import AsyncDriver
from titan_grpo.protocol.messages import ServerState
from titan_grpo.rollout.codec import TextCodec
from titan_grpo.rollout.messages import RolloutSpec, Ticket
from titan_grpo.rollout.sampler import Attempt, Sampler
from titan_grpo.rollout.schedule import Server
from titan_grpo.rollout.task_runner import Codec, TaskOptions, TaskRunner
from titan_grpo.rollout.tasks.functions import load_task
from titan_grpo.samples import Completion, Group, Prompt

DONE = Completion((5, 6), (-0.5, -1.0), "stop", 0, 0, "")
PROMPT = Prompt(0, (1,))


class Letters:
    """A codec with one token per character."""

    def encode(self, text: str) -> tuple[int, ...]:
        return tuple(map(ord, text))

    def decode(self, token_ids: Sequence[int]) -> str:
        return "".join(map(chr, token_ids))

    spell = decode

    def chat(self, messages: Any, tools: Any = None) -> tuple[int, ...]:
        """No task that is tested with these tokens has messages."""
        raise NotImplementedError


def runner(reward: Callable[..., Any], limit: int = 8, timeout_s: float = 60.0) -> TaskRunner:
    """Of a task that has this reward, ``limit`` calls at once."""
    keys = TaskKeys(task_concurrency=limit, task_timeout_s=timeout_s)
    return TaskRunner(SimpleNamespace(reward=reward), Letters(), keys)


def sampler_of(task: str, model_dir: str, group_size: int, max_tokens: int, *stops: str) -> Sampler:
    spec = RolloutSpec(
        model_dir=model_dir,
        group_size=group_size,
        max_completion_tokens=max_tokens,
        stop=list(stops),
    )
    codec: Codec = Letters() if task == "calculator" else TextCodec(model_dir)
    return Sampler(spec, TaskRunner(load_task(task, TaskOptions()), codec, spec))


def holding(url: str, version: int) -> Server:
    """A server that takes new groups."""
    return Server(ServerState(url, version, True, f"r:{version}:f"))


def sample(sampler: Sampler, parts: list[Completion], server: Server, attempt: int = 0) -> Group:
    """A group of prompt 0."""

    async def run() -> Group:
        driver = AsyncDriver(server.url)
        try:
            return await sampler.group(Attempt(Ticket(0, attempt=attempt), parts, server, driver))
        finally:
            await driver.close()

    return asyncio.run(run())
