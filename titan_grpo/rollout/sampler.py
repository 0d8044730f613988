"""Making one group on one server: n requests, checks, rewards."""

import asyncio
from dataclasses import replace

from titan_grpo.engines.dialect import dialect
from titan_grpo.engines.drivers import AsyncDriver
from titan_grpo.engines.sampling import Sampled, Sampling
from titan_grpo.errors import TitanGrpoError
from titan_grpo.protocol.version import Label
from titan_grpo.rollout.groups import first_fault, group_fault, request_seed
from titan_grpo.rollout.messages import Ticket
from titan_grpo.rollout.pool import Server
from titan_grpo.rollout.spec import RolloutSpec
from titan_grpo.rollout.tasks.base import Codec, Task
from titan_grpo.samples import Completion, Group, Prompt


class GroupDropped(TitanGrpoError):
    """A group is not fit for training; ``reason`` is the name it is counted under."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class Sampler:
    """Samples groups. One request per completion, so that each has its own seed and one failure is seen alone."""

    def __init__(self, spec: RolloutSpec, task: Task, codec: Codec) -> None:
        self._spec = spec
        self._task = task
        self._codec = codec

    async def group(self, ticket: Ticket, server: Server, driver: AsyncDriver) -> Group:
        """Raises PeerError where the server failed (the other requests are cancelled), GroupDropped where the result is
        unfit, and whatever the task raises."""
        prompt = self._task.prompt(ticket.index, self._codec)
        try:
            async with asyncio.TaskGroup() as tasks:
                running = [
                    tasks.create_task(self._completion(prompt, ticket, sample, server, driver))
                    for sample in range(self._spec.group_size)
                ]
        except ExceptionGroup as failures:
            raise failures.exceptions[0] from None
        completions = [task.result() for task in running]
        if fault := first_fault(completions, self._spec.max_completion_tokens):
            raise GroupDropped(fault)
        group = Group(prompt, tuple([await self._rewarded(prompt, c) for c in completions]))
        if fault := group_fault(group, self._spec.group_size, self._spec.max_completion_tokens):
            raise GroupDropped(fault)
        return group

    async def _completion(self, prompt: Prompt, ticket: Ticket, sample: int, server: Server, driver: AsyncDriver) -> Completion:
        spec, first = self._spec, server.version
        if first is None:
            raise GroupDropped("version_unknown")
        seed = request_seed(spec.seed, ticket.index, sample, ticket.attempt)
        label = server.label
        sampling = Sampling(spec.max_completion_tokens, spec.temperature, seed, label or str(first))
        sampled = await driver.run(dialect(server.engine).generate(prompt.token_ids, sampling, spec.request_timeout_s))
        # None: the ledger lost track of the server while this ran, so nobody knows which weights made the tokens.
        last = server.version
        versions = made_by(sampled, label, first, last) if last is not None else None
        if versions is None:
            raise GroupDropped("version_unknown")
        bounds = {"version_first": min(versions), "version_last": max(versions)}
        return Completion(sampled.token_ids, sampled.logprobs, sampled.finish_reason, server=server.url, **bounds)

    async def _rewarded(self, prompt: Prompt, completion: Completion) -> Completion:
        text = self._codec.decode(completion.token_ids)
        return replace(completion, reward=float(await self._task.reward(prompt, text, completion.token_ids)))


def made_by(sampled: Sampled, label: str, first: int, last: int) -> tuple[int, ...] | None:
    """The versions that made the tokens, ``first`` and ``last`` being those that the ledger had before and after.

    Where the engine says it of each token, that counts; None if it names weights that are not of the run of ``label``.
    """
    if not sampled.versions:
        return first, last
    ours = Label.parse(label)
    spoken = [Label.parse(text) for text, _, _ in sampled.versions]
    known = [s.version for s in spoken if s is not None and ours is not None and s.run_id == ours.run_id]
    return tuple(known) if len(known) == len(spoken) else None
