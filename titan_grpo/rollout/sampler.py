"""Making one group on one server: requests, the task's turns in between, checks, rewards."""

import asyncio
import hashlib
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from titan_grpo.engines.generation import Answer, Sampled, Sampling
from titan_grpo.engines.http import AsyncDriver
from titan_grpo.engines.server import dialect
from titan_grpo.errors import PeerError, TitanGrpoError
from titan_grpo.protocol.messages import Label
from titan_grpo.rollout.messages import RolloutSpec, Ticket
from titan_grpo.rollout.schedule import Server
from titan_grpo.rollout.task_runner import TaskRunner, at_once
from titan_grpo.samples import (
    TURN_OVER,
    Completion,
    Group,
    Prompt,
    Span,
    context,
    defect,
    spans_from,
    whole_routes,
)

ABORTED = "abort"
"""``finish_reason`` of an answer that an engine cut short; its tokens are as good as any."""


class GroupDropped(TitanGrpoError):
    """A group is not fit for training; ``reason`` is the name it is counted under."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class NotAccepted(TitanGrpoError):
    """A sound group that the user's filter, or the least length, leaves out. Not to be made again:
    that would sample until the outcome is liked. ``reason`` is the name it is counted under."""

    def __init__(self, reason: str, group: Group) -> None:
        super().__init__(reason)
        self.reason, self.group = reason, group


class Interrupted(TitanGrpoError):
    """An engine cut completions short; their tokens are in the group's parts."""


@dataclass(frozen=True, slots=True)
class Job:
    """A group that is being made. ``parts`` has its completions' tokens at any moment."""

    prompt: Prompt
    ticket: Ticket
    parts: list[Completion]
    server: Server
    driver: AsyncDriver


@dataclass(frozen=True, slots=True)
class Ask:
    """A request for the next tokens of a completion, after the prompt and what it has so far."""

    prompt_ids: tuple[int, ...]
    tokens: int
    """The most that it may get."""
    turn_ends: frozenset[str] = frozenset()
    """Reasons of the engine that end a turn and not the completion."""
    stop: tuple[str, ...] = ()
    """Texts at which it ends, besides those of the run and its task."""


class Sampler:
    """Samples groups. One request per completion and turn, so that each has its own seed and fails
    alone."""

    def __init__(self, spec: RolloutSpec, runner: TaskRunner) -> None:
        self._spec, self._runner, self._budget = spec, runner, spec.max_completion_tokens
        texts, tokens = runner.stops
        self._stops = (*spec.stop, *texts), (*spec.stop_token_ids, *tokens)
        self._turn_ends = frozenset(("stop",) if runner.multi_turn else ())

    def forget(self, index: int) -> None:
        """The prompt is given up: nothing of its group is made again."""

    async def close(self) -> None:
        """End what outlives a group's stay on a server: nothing here."""

    async def group(
        self, ticket: Ticket, parts: list[Completion], server: Server, driver: AsyncDriver
    ) -> Group:
        """Finish the completions of ``parts``, which holds their tokens also after an error.

        Raises PeerError where the server failed (the other requests are cancelled), Interrupted
        where it cut completions short, GroupDropped where the result is unfit, NotAccepted where it
        is left out by choice, TaskFailed for what the task raises.
        """
        prompt = self._runner.prompt(ticket.index)
        job = Job(prompt, ticket, parts, server, driver)
        await at_once([self._finish(job, sample) for sample in range(len(parts))])
        if cut := sum(not part.finished for part in parts):
            raise Interrupted(f"{server.url} cut {cut} of {len(parts)} completions short")
        self._check(prompt, parts)
        rewards = await self._runner.rewards(prompt, parts)
        rewarded = zip(parts, rewards, strict=True)
        completions = [replace(c, server=server.url, reward=r) for c, r in rewarded]
        self._check(prompt, completions)
        return await self._accepted(Group(prompt, tuple(completions)))

    async def _accepted(self, group: Group) -> Group:
        """The group. Raises NotAccepted where it is left out by choice."""
        if min(c.num_sampled for c in group.completions) < self._spec.min_completion_tokens:
            raise NotAccepted("too_short", group)
        if not await self._runner.accepts(group):
            raise NotAccepted("not_accepted", group)
        return group

    def _check(self, prompt: Prompt, completions: Sequence[Completion]) -> None:
        for completion in completions:
            if fault := completion_fault(prompt, completion, self._budget):
                raise GroupDropped(fault)

    async def _finish(self, job: Job, sample: int) -> None:
        """Turn after turn, until the completion ends or an engine cuts it short."""
        while not (part := job.parts[sample]).finished:
            if not part.waits:
                room = self._budget - len(part.token_ids)
                await self._sample(job, sample, Ask(job.prompt.token_ids, room, self._turn_ends))
            part = job.parts[sample]
            if not part.waits:
                return
            silent = not part.token_ids or part.sampled[-1:] == (False,)
            room = self._budget - len(part.token_ids)
            full = part.answers + 1 >= self._spec.max_turns or room < 2
            answer = None if silent or full else await self._runner.turn(job.prompt, part)
            job.parts[sample] = answered(part, answer, self._budget)

    async def _sample(self, job: Job, sample: int, ask: Ask) -> str:
        """One request, from the completion's last token to the end of its turn. Returns the
        engine's reason for the end; empty where no request was made."""
        spec, server, part = self._spec, job.server, job.parts[sample]
        if server.state.version is None:
            # The ledger lost track of it between two turns. No token of an unknown version was
            # made, so the episode goes on elsewhere.
            return ""
        label, first = server.state.label, server.state.version
        seed = request_seed(spec.seed, job.ticket.index, sample, job.ticket.attempt, part.answers)
        salt = label or str(first)
        texts, ids = self._stops
        stops = (*texts, *ask.stop), ids
        sampling = Sampling(
            ask.tokens, spec.temperature, seed, salt, *stops, routes=spec.router_replay
        )
        engine, token_ids = dialect(server.state.engine), (*ask.prompt_ids, *part.token_ids)

        def added(sampled: Sampled, last: int | None) -> Completion:
            # None: the ledger lost track of the server meanwhile, so which weights made the tokens
            # is unknown.
            answer = None
            if last is not None:
                answer = versioned(sampled, label, first, last, spec.kv_recomputed)
            if answer is None:
                raise GroupDropped("version_unknown")
            if spec.kv_recomputed and kv_survived(sampled):
                raise GroupDropped("kv_kept")
            return self._added(ask, part, answer)

        if not spec.stream_completions or spec.router_replay:
            # The engines send routes at an answer's end, vLLM not among a stream's events: pieces
            # that a broken stream leaves would be without.
            call = engine.generate(token_ids, sampling, spec.request_timeout_s)
            sampled = await job.driver.run(call)
            job.parts[sample] = added(sampled, server.newest)
            return sampled.finish_reason
        stream = engine.stream(token_ids, sampling, spec.request_timeout_s)
        tokens = TokenStream(Answer(stream), server)
        try:
            await job.driver.stream(stream.call, tokens)
        except (PeerError, asyncio.CancelledError):
            # Keep what came before the break. Where that is unfit, the request is made again from
            # its start.
            with suppress(GroupDropped):
                job.parts[sample] = added(tokens.kept(), tokens.version)
            raise
        sampled = tokens.sampled()
        job.parts[sample] = added(sampled, server.newest)
        return sampled.finish_reason

    def _added(self, ask: Ask, part: Completion, answer: Completion) -> Completion:
        after = went_on(part, answer, self._budget)
        tokens = len(ask.prompt_ids) + len(after.token_ids)
        routed = not self._spec.router_replay or whole_routes(after.routes, tokens)
        if answer.token_ids and not routed:
            raise GroupDropped("no_routes")
        if after.finish_reason in ask.turn_ends:
            after = replace(after, finish_reason=TURN_OVER)
        if after.token_ids and not after.finished:
            # It goes on from these tokens, elsewhere or after the task's answer.
            fault = completion_fault(Prompt(0, ask.prompt_ids), after, self._budget)
            if fault not in ("", "unfinished"):
                raise GroupDropped(fault)
        return after


class TokenStream:
    """A streamed answer, with the newest version that its server may have served at each piece.

    When a server fails, the ledger may lose track of it before its connections break. The pieces
    before that moment stay good: ``kept``, made by ``version`` at the latest (None: none).
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
        if self._server.newest is not None and self._answer.count:
            self._count, self.version = self._answer.count, self._server.newest

    @property
    def whole(self) -> bool:
        """Whether the engine has said how the answer ended."""
        return self._answer.whole

    def kept(self) -> Sampled:
        """The usable part of an answer that broke off: all of it if only the end of the connection
        was missing."""
        whole = self.whole and self._count == self._answer.count
        return self._answer.sampled(self._count, self._answer.finish_reason if whole else ABORTED)

    def sampled(self) -> Sampled:
        """The whole answer."""
        return self._answer.sampled(self._answer.count, self._answer.finish_reason)


def request_seed(seed: int, index: int, sample: int, attempt: int, answers: int = 0) -> int:
    """63-bit seed of one request: the same numbers give the same seed everywhere, different ones
    unrelated seeds. ``answers``: the task's turns before it."""
    text = f"{seed}/{index}/{sample}/{attempt}" + (f"/{answers}" if answers else "")
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def completion_fault(prompt: Prompt, completion: Completion, max_tokens: int) -> str:
    """As ``samples.defect``, and what only an engine's answer can be: longer than it was asked for,
    or not finished."""
    if fault := defect(prompt, completion):
        return fault
    if len(completion.token_ids) > max_tokens:
        return "over_budget"
    return "" if completion.finish_reason in ("stop", "length") else "unfinished"


def went_on(part: Completion, answer: Completion, budget: int) -> Completion:
    """A completion with an engine's answer appended. ``budget``: tokens of the whole; a full one
    that the engine cut short is finished by its length.

    >>> answer = Completion((5, 6), (-1.0, -2.0), "abort", 3, 3, "s")
    >>> [went_on(answer, answer, budget).finish_reason for budget in (5, 4)]
    ['', 'length']
    """
    after = part.then(answer)
    if after.finish_reason == ABORTED:
        full = len(after.token_ids) >= budget
        after = replace(after, finish_reason="length" if full else "")
    return after


def answered(part: Completion, answer: Sequence[int] | None, budget: int) -> Completion:
    """A completion with the task's answer to its turn appended, which no version made; None ends
    it. An answer that leaves no room to go on is left out.

    >>> part = answered(Completion((5,), (-1.0,), "turn", 3, 3, "s"), (8, 9), 4)
    >>> part.token_ids, part.sampled, part.token_spans, part.finish_reason
    ((5, 8, 9), (True, False, False), ((3, 3),), '')
    >>> answered(part, (8,), 4).finish_reason, answered(part, None, 4).finish_reason
    ('length', 'stop')
    """
    if answer is None or len(part.token_ids) + len(answer) >= budget:
        return replace(part, finish_reason="stop" if answer is None else "length")
    return part.then(context(answer, part.token_spans[-1][0]))


def versioned(
    sampled: Sampled, label: str, first: int, last: int, kv_recomputed: bool = False
) -> Completion | None:
    """An answer with the versions behind it. ``first``: the server's when the request was admitted
    to it; ``last``: the newest that it may have served until the answer came.

    The engine's own statement for each token says which weights sampled it, but not on which KV: a
    request that waited over a commit meets the older version's prefix under the salt of its
    admission, or has its prompt computed before and its tokens after. So it is as old as its
    admission, unless commits take the KV away (``kv_recomputed``). None if the engine names weights
    that are not of the run of ``label``.

    Example: admitted at 3, all tokens named 4 -> first 3, last 4, spans ((4, n),).
    """
    spans: list[Span] = []
    if sampled.versions:
        ours = Label.parse(label)
        for text, start, end in sampled.versions:
            shown = Label.parse(text)
            if shown is None or ours is None or shown.run_id != ours.run_id:
                return None
            spans.append((shown.version, end - start))
        named = [version for version, _ in spans]
        first = min(named) if kv_recomputed else min(first, *named)
        last = max(named)
        if sum(tokens for _, tokens in spans) != len(sampled.token_ids):
            spans = []  # not said of every token
    return Completion(
        sampled.token_ids,
        sampled.logprobs,
        sampled.finish_reason,
        first,
        last,
        "",
        spans=spans_from(first, spans),
        routes=sampled.routes,
    )


def kv_survived(sampled: Sampled) -> bool:
    """Whether a request ran over a commit that should have taken its KV, and the engine counts no
    such loss."""
    return sampled.retractions is not None and sampled.retractions < len(sampled.versions) - 1
