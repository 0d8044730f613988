"""Building groups and refusing broken ones.

Text to token ids and back, with the ``tokenizers`` library alone: the rollout process loads no
transformers.

Making one group on one server: requests, the task's turns in between, checks, rewards."""

import asyncio
import hashlib
import math
from collections.abc import Coroutine, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from titan_grpo.engines.generation import Answer, Sampled, Sampling
from titan_grpo.engines.http import AsyncDriver
from titan_grpo.engines.server import dialect
from titan_grpo.errors import ConfigError, PeerError, TitanGrpoError
from titan_grpo.protocol.messages import Label
from titan_grpo.rollout.messages import Ticket
from titan_grpo.rollout.partial import ABORTED, Partial
from titan_grpo.rollout.pool import Server
from titan_grpo.rollout.spec import RolloutSpec
from titan_grpo.rollout.task_runner import Asker
from titan_grpo.samples import Completion, Group, Prompt, sound_reward


def request_seed(seed: int, index: int, sample: int, attempt: int, answers: int = 0) -> int:
    """63-bit seed of one request: the same numbers give the same seed everywhere, different ones
    unrelated seeds.

    ``answers``: the task's turns before it.
    """
    text = f"{seed}/{index}/{sample}/{attempt}" + (f"/{answers}" if answers else "")
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def completion_fault(completion: Completion, max_tokens: int, finished: bool = True) -> str | None:
    """Why a completion must not be trained on (the name it is counted under), or None. One that is
    not ``finished`` may have nothing yet.

    One bad completion drops its whole group: advantages compare members, and a group short of the
    failures of one kind would be biased.
    """
    if finished and not completion.token_ids:
        return "empty"
    if (
        len(completion.token_ids) != len(completion.logprobs)
        or len(completion.token_ids) > max_tokens
    ):
        return "wrong_length"
    if not all(math.isfinite(x) for x in completion.logprobs):
        return "bad_logprob"
    if any(x > 0 for x in completion.logprobs):
        return "positive_logprob"
    if finished and completion.finish_reason not in ("stop", "length"):
        return "unfinished"
    return None if sound_reward(completion.reward) else "bad_reward"


def group_fault(group: Group, size: int, max_tokens: int) -> str | None:
    """First fault of a group's completions, ``wrong_size`` if some are missing, or None."""
    if len(group.completions) != size:
        return "wrong_size"
    return first_fault(group.completions, max_tokens)


def first_fault(completions: Sequence[Completion], max_tokens: int) -> str | None:
    """First fault among completions, or None."""
    return next((fault for c in completions if (fault := completion_fault(c, max_tokens))), None)


class TextCodec:
    """The tokenizer of a model directory (its ``tokenizer.json``). No special tokens are added when
    encoding."""

    def __init__(self, model_dir: str) -> None:
        # Imported here: the trainer's side of this room needs no tokenizer.
        from tokenizers import Tokenizer

        path = Path(model_dir) / "tokenizer.json"
        if not path.is_file():
            raise ConfigError(
                "the rollout process needs a tokenizer.json in model.hf_assets_path, got"
                f" {model_dir!r}"
            )
        self._tokenizer = Tokenizer.from_file(str(path))

    def encode(self, text: str) -> tuple[int, ...]:
        """Token ids of a text."""
        return tuple(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of token ids, without special tokens."""
        return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=True))


T = TypeVar("T")


class GroupDropped(TitanGrpoError):
    """A group is not fit for training; ``reason`` is the name it is counted under."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class Interrupted(TitanGrpoError):
    """An engine cut completions short; what they have is in the group's parts."""


class Sampler:
    """Samples groups. One request per completion and turn, so that each has its own seed and one
    failure is seen alone."""

    def __init__(self, spec: RolloutSpec, asker: Asker) -> None:
        self._spec, self._asker = spec, asker

    async def group(
        self, ticket: Ticket, parts: list[Partial], server: Server, driver: AsyncDriver
    ) -> Group:
        """Finish the completions of ``parts``, which always holds what there is, also after an
        error.

        Raises PeerError where the server failed (the other requests are cancelled), Interrupted
        where it cut completions short, GroupDropped where the result is unfit, TaskFailed for what
        the task raises.
        """
        prompt = self._asker.prompt(ticket.index)
        await at_once(
            [
                self._finish(prompt, ticket, sample, parts, server, driver)
                for sample in range(len(parts))
            ]
        )
        if any(not part.finish_reason for part in parts):
            raise Interrupted(
                f"{server.url} cut {sum(not p.finish_reason for p in parts)} of {len(parts)}"
                " completions short"
            )
        completions = [part.completion(server.url) for part in parts]
        if fault := first_fault(completions, self._spec.max_completion_tokens):
            raise GroupDropped(fault)
        rewards = await at_once([self._asker.reward(prompt, c) for c in completions])
        group = Group(
            prompt, tuple(replace(c, reward=r) for c, r in zip(completions, rewards, strict=True))
        )
        if fault := group_fault(group, self._spec.group_size, self._spec.max_completion_tokens):
            raise GroupDropped(fault)
        return group

    async def _finish(
        self,
        prompt: Prompt,
        ticket: Ticket,
        sample: int,
        parts: list[Partial],
        server: Server,
        driver: AsyncDriver,
    ) -> None:
        """Turn after turn, until the completion ends or an engine cuts it short."""
        while not parts[sample].finish_reason:
            if not parts[sample].waits:
                await self._goes_on(prompt, ticket, sample, parts, server, driver)
            if not parts[sample].waits:
                return
            parts[sample] = await self._told(prompt, parts[sample])

    async def _told(self, prompt: Prompt, part: Partial) -> Partial:
        """With what the task says to a turn; it is not asked where nothing could follow, or nothing
        came."""
        spec, stretches = self._spec, part.stretches()
        silent = not stretches or not stretches[-1][0]
        if (
            silent
            or part.answers + 1 >= spec.max_turns
            or part.left(spec.max_completion_tokens) < 2
        ):
            return part.told(None, spec.max_completion_tokens)
        return part.told(await self._asker.turn(prompt, part), spec.max_completion_tokens)

    async def _goes_on(
        self,
        prompt: Prompt,
        ticket: Ticket,
        sample: int,
        parts: list[Partial],
        server: Server,
        driver: AsyncDriver,
    ) -> None:
        """One request, from where the completion stands to the end of its turn."""
        spec, first, part = self._spec, server.version, parts[sample]
        if first is None:
            # Lost between two turns: nothing was made that is of no version, so the episode goes on
            # elsewhere.
            return
        seed = request_seed(spec.seed, ticket.index, sample, ticket.attempt, part.answers)
        sampling = Sampling(
            part.left(spec.max_completion_tokens),
            spec.temperature,
            seed,
            server.label or str(first),
        )
        speak, token_ids = dialect(server.engine), (*prompt.token_ids, *part.token_ids)
        added = partial(self._added, part, server.label, first, server.url)
        if not spec.stream_completions:
            sampled = await driver.run(speak.generate(token_ids, sampling, spec.request_timeout_s))
            parts[sample] = added(sampled, server.version)
            return
        call = speak.stream(token_ids, sampling, spec.request_timeout_s)
        heard = Heard(Answer(call), server)
        try:
            await driver.stream(call.call, heard)
        except (PeerError, asyncio.CancelledError):
            # What broke off is kept; where it is unfit, the request is made again as if nothing had
            # come.
            with suppress(GroupDropped):
                parts[sample] = added(heard.kept(), heard.version)
            raise
        parts[sample] = added(heard.sampled(), server.version)

    def _added(
        self, part: Partial, label: str, first: int, url: str, sampled: Sampled, last: int | None
    ) -> Partial:
        """``part`` with an answer to a request that was made under ``label`` when the ledger had
        ``first``, and ``last`` at its end. Raises GroupDropped."""
        spec, budget = self._spec, self._spec.max_completion_tokens
        # None: the ledger lost track of the server while this ran, so nobody knows which weights
        # made the tokens.
        versions = made_by(sampled, label, first, last) if last is not None else None
        if versions is None:
            raise GroupDropped("version_unknown")
        if spec.kv_recomputed and kv_survived(sampled):
            raise GroupDropped("kv_kept")
        after = part.after(sampled, versions, budget)
        if self._asker.multi_turn and after.finish_reason == "stop":
            after = after.waiting()
        if not after.finish_reason and (
            fault := completion_fault(after.completion(url), budget, finished=False)
        ):
            raise GroupDropped(fault)
        return after


class Heard:
    """A streamed answer of a server, with what the ledger had of that server when each part of it
    came.

    When a server fails, the ledger may lose track of it before its connections break. What came
    until then is as good as before: ``kept``, made by ``version`` at the latest; None where that is
    nothing.
    """

    def __init__(self, answer: Answer, server: Server) -> None:
        self._answer, self._server = answer, server
        self._count = 0
        self.version: int | None = None

    def take(self, chunk: bytes) -> None:
        """The next bytes."""
        self._answer.take(chunk)
        self._note()

    def end(self) -> None:
        """There are no more."""
        self._answer.end()
        self._note()

    def _note(self) -> None:
        if self._server.version is not None and self._answer.count:
            self._count, self.version = self._answer.count, self._server.version

    @property
    def whole(self) -> bool:
        """Whether the engine has said how the answer ended."""
        return self._answer.whole

    def kept(self) -> Sampled:
        """What can be kept of an answer that broke off: a whole one, if nothing but the
        connection's end was missing."""
        whole = self.whole and self._count == self._answer.count
        return self._answer.sampled(self._count, self._answer.finish_reason if whole else ABORTED)

    def sampled(self) -> Sampled:
        """The whole answer."""
        return self._answer.sampled(self._answer.count, self._answer.finish_reason)


async def at_once(calls: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """The results, in their order. The first error cancels the other calls, and is raised once they
    have ended."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(call) for call in calls]
    except ExceptionGroup as failures:
        raise failures.exceptions[0] from None
    # no deadline: the task has ended: this is called by its callback, or after its group
    return [task.result() for task in tasks]


def made_by(sampled: Sampled, label: str, first: int, last: int) -> tuple[int, ...] | None:
    """The versions that made the tokens, ``first`` and ``last`` being those that the ledger had
    before and after.

    Where the engine says it of each token, that counts; None if it names weights that are not of
    the run of ``label``.
    """
    if not sampled.versions:
        return first, last
    ours = Label.parse(label)
    spoken = [Label.parse(text) for text, _, _ in sampled.versions]
    known = [
        s.version for s in spoken if s is not None and ours is not None and s.run_id == ours.run_id
    ]
    return tuple(known) if len(known) == len(spoken) else None


def kv_survived(sampled: Sampled) -> bool:
    """Whether a request ran over a commit that should have taken its KV, and the engine counts no
    such loss."""
    return sampled.retractions is not None and sampled.retractions < len(sampled.versions) - 1
