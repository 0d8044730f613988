"""Making one group on one server: n requests, checks, rewards."""

import asyncio
from dataclasses import replace

from titan_grpo.engines.dialect import dialect
from titan_grpo.engines.drivers import AsyncDriver
from titan_grpo.engines.sampling import Sampled, Sampling
from titan_grpo.errors import TitanGrpoError
from titan_grpo.protocol.version import Label
from titan_grpo.rollout.groups import completion_fault, first_fault, group_fault, request_seed
from titan_grpo.rollout.messages import Ticket
from titan_grpo.rollout.partial import Partial
from titan_grpo.rollout.pool import Server
from titan_grpo.rollout.spec import RolloutSpec
from titan_grpo.rollout.tasks.base import Codec, Task
from titan_grpo.samples import Completion, Group, Prompt


class GroupDropped(TitanGrpoError):
    """A group is not fit for training; ``reason`` is the name it is counted under."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class Interrupted(TitanGrpoError):
    """An engine cut completions short; what they have is in the group's parts."""


class Sampler:
    """Samples groups. One request per completion, so that each has its own seed and one failure is seen alone."""

    def __init__(self, spec: RolloutSpec, task: Task, codec: Codec) -> None:
        self._spec = spec
        self._task = task
        self._codec = codec

    async def group(self, ticket: Ticket, parts: list[Partial], server: Server, driver: AsyncDriver) -> Group:
        """Finish the completions of ``parts``, which always holds what there is, also after an error.

        Raises PeerError where the server failed (the other requests are cancelled), Interrupted where it cut completions
        short, GroupDropped where the result is unfit, and whatever the task raises.
        """
        prompt = self._task.prompt(ticket.index, self._codec)
        try:
            async with asyncio.TaskGroup() as tasks:
                for sample, part in enumerate(parts):
                    if not part.finish_reason:
                        tasks.create_task(self._goes_on(prompt, ticket, sample, parts, server, driver))
        except ExceptionGroup as failures:
            raise failures.exceptions[0] from None
        if any(not part.finish_reason for part in parts):
            raise Interrupted(f"{server.url} cut {sum(not p.finish_reason for p in parts)} of {len(parts)} completions short")
        completions = [part.completion(server.url) for part in parts]
        if fault := first_fault(completions, self._spec.max_completion_tokens):
            raise GroupDropped(fault)
        group = Group(prompt, tuple([await self._rewarded(prompt, c) for c in completions]))
        if fault := group_fault(group, self._spec.group_size, self._spec.max_completion_tokens):
            raise GroupDropped(fault)
        return group

    async def _goes_on(
        self, prompt: Prompt, ticket: Ticket, sample: int, parts: list[Partial], server: Server, driver: AsyncDriver
    ) -> None:
        """One request, from where the completion stands to its end."""
        spec, first, part = self._spec, server.version, parts[sample]
        if first is None:
            raise GroupDropped("version_unknown")
        seed = request_seed(spec.seed, ticket.index, sample, ticket.attempt)
        label, budget = server.label, spec.max_completion_tokens
        sampling = Sampling(part.left(budget), spec.temperature, seed, label or str(first))
        call = dialect(server.engine).generate((*prompt.token_ids, *part.token_ids), sampling, spec.request_timeout_s)
        sampled = await driver.run(call)
        # None: the ledger lost track of the server while this ran, so nobody knows which weights made the tokens.
        last = server.version
        versions = made_by(sampled, label, first, last) if last is not None else None
        if versions is None:
            raise GroupDropped("version_unknown")
        if spec.kv_recomputed and kv_survived(sampled):
            raise GroupDropped("kv_kept")
        after = part.after(sampled, versions, budget)
        if not after.finish_reason and (fault := completion_fault(after.completion(server.url), budget, finished=False)):
            raise GroupDropped(fault)
        parts[sample] = after

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


def kv_survived(sampled: Sampled) -> bool:
    """Whether a request ran over a commit that should have taken its KV, and the engine counts no such loss."""
    return sampled.retractions is not None and sampled.retractions < len(sampled.versions) - 1
