"""Sampling of one group on one server: requests, the task's turns in between, checks, rewards."""

import asyncio
import hashlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from titan_grpo.engines.generation import Piece, Sampled, Sampling, StreamedAnswer
from titan_grpo.engines.http import AsyncDriver, Call
from titan_grpo.engines.server import dialect
from titan_grpo.errors import PeerError, TitanGrpoError
from titan_grpo.observe.names import REASONS
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
"""``finish_reason`` of an answer that an engine aborted; its tokens are valid."""


class GroupDropped(TitanGrpoError):
    """A group is unfit for training. ``reason``: name of its counter. Without a text, the reason's
    meaning is the text: it may be the last word of a run."""

    def __init__(self, reason: str, text: str = "") -> None:
        super().__init__(text or f"{reason} ({REASONS[reason]})")
        self.reason = reason


class PromptUnfit(GroupDropped):
    """No completion of the prompt can be trained on, so no further attempt can succeed."""


class PromptEmpty(PromptUnfit):
    """The prompt has no token, and engines refuse such a request."""

    def __init__(self) -> None:
        super().__init__(
            "empty_prompt",
            "a prompt must have a token, and this one has none: leave empty rows out, or correct"
            " the task or the chat template",
        )


class PromptTooLong(PromptUnfit):
    """No completion fits into a row after the prompt."""

    def __init__(self, what: str, spec: RolloutSpec) -> None:
        super().__init__(
            "prompt_too_long",
            f"{what} must be shorter than training.seq_len = {spec.row_tokens}: a row has no room"
            " for a completion of it; raise training.seq_len, or leave long prompts out",
        )


class OtherWeights(GroupDropped):
    """The server used weights, or KV, that it must not. The prompt is not at fault."""


class NotAccepted(TitanGrpoError):
    """A sound group is left out by the user's filter or the minimum length. It must not be made
    again: sampling until acceptance would bias the data. ``reason``: name of its counter."""

    def __init__(self, reason: str, group: Group) -> None:
        super().__init__(reason)
        self.reason, self.group = reason, group


class Interrupted(TitanGrpoError):
    """An engine aborted completions, or its version became unknown; the completions' valid tokens
    so far are in the group's parts."""


@dataclass(slots=True)
class Attempt:
    """Attempt at a group on one server. ``parts`` always holds the tokens that its completions
    have."""

    ticket: Ticket
    parts: list[Completion]
    server: Server
    driver: AsyncDriver
    sampled: Callable[[Any], None] = lambda attempt: None
    """Called with this attempt once the server is not needed any more, before the rewards."""
    ended: Callable[[Any], None] = lambda attempt: None
    """Called likewise for each completion (of agents: episode) once its requests are over; at once
    for one that was finished."""
    asked: Callable[[], None] = lambda: None
    """Called for each request."""
    prompt: Prompt = field(init=False)
    """Set by the sampler."""


@dataclass(frozen=True, slots=True)
class Ask:
    """Request for the next tokens of a completion, after the prompt and its tokens so far."""

    prompt_ids: tuple[int, ...]
    tokens: int
    """Maximum number of new tokens."""
    turn_ends: frozenset[str] = frozenset()
    """Finish reasons of the engine that end the turn but not the completion."""
    stop: tuple[str, ...] = ()
    """Stop texts in addition to those of the run and its task."""


class Sampler:
    """Sampler of groups. It sends one request per completion and turn: each has its own seed and
    fails alone."""

    def __init__(self, spec: RolloutSpec, runner: TaskRunner) -> None:
        self._spec, self._runner = spec, runner
        texts, tokens = runner.stops
        self._stops = (*spec.stop, *texts), (*spec.stop_token_ids, *tokens)
        self._turn_ends = frozenset(("stop",) if runner.multi_turn else ())

    def forget(self, index: int) -> None:
        """Free what is kept for a prompt that was given up: nothing here."""

    def still_used(self, index: int, parts: Sequence[Completion]) -> Sequence[Completion]:
        """Return ``parts``, with NO_TOKENS in place of those that a group would not use any more:
        none here."""
        return parts

    async def close(self) -> None:
        """Free what is kept between a group's attempts: nothing here."""

    async def group(self, attempt: Attempt) -> Group:
        """Finish the completions of ``attempt.parts`` in place (their tokens stay there after an
        error), reward them and return the group.

        Raises PeerError if the server fails (the other requests are cancelled), Interrupted if it
        aborts completions or its version becomes unknown, GroupDropped if the result is unfit
        (PromptUnfit: any result would be), NotAccepted if it is left out by choice, TaskFailed if
        the task fails.
        """
        prompt = attempt.prompt = self._runner.prompt(attempt.ticket.index)
        if not prompt.token_ids:
            raise PromptEmpty
        if self._spec.room(prompt.token_ids) < 1:
            raise PromptTooLong(f"a prompt of {len(prompt.token_ids)} tokens", self._spec)
        parts, url = attempt.parts, attempt.server.url
        await at_once([self._finish(attempt, sample) for sample in range(len(parts))])
        if cut := sum(not part.finished for part in parts):
            raise Interrupted(f"{url} cut {cut} of {len(parts)} completions short")
        attempt.sampled(attempt)
        self._check(prompt, parts)
        rewards = await self._runner.rewards(prompt, parts)
        rewarded = zip(parts, rewards, strict=True)
        completions = [replace(c, server=url, reward=r) for c, r in rewarded]
        self._check(prompt, completions)
        return await self._accepted(Group(prompt, tuple(completions)))

    async def _accepted(self, group: Group) -> Group:
        """Return the group. Raises NotAccepted if it is left out by choice."""
        if min(c.num_sampled for c in group.completions) < self._spec.min_completion_tokens:
            raise NotAccepted("too_short", group)
        if not await self._runner.accepts(group):
            raise NotAccepted("not_accepted", group)
        return group

    def _check(self, prompt: Prompt, completions: Sequence[Completion]) -> None:
        for completion in completions:
            if fault := completion_fault(prompt, completion, self._spec.room(prompt.token_ids)):
                raise GroupDropped(fault)

    async def _finish(self, attempt: Attempt, sample: int) -> None:
        """Sample turn after turn, until the completion ends or the engine aborts it."""
        prompt_ids = attempt.prompt.token_ids
        budget = self._spec.room(prompt_ids)
        while not (part := attempt.parts[sample]).finished:
            if not part.waits:
                room = budget - len(part.token_ids)
                await self._sample(attempt, sample, Ask(prompt_ids, room, self._turn_ends))
            part = attempt.parts[sample]
            if not part.waits:
                break
            silent = not part.token_ids or part.sampled[-1:] == (False,)
            over = silent or part.answers + 1 >= self._spec.max_turns
            answer = None if over else await self._runner.turn(attempt.prompt, part)
            attempt.parts[sample] = answered(part, answer, budget)
        attempt.ended(attempt)

    async def _sample(self, attempt: Attempt, sample: int, ask: Ask) -> str:
        """Send one request, from the completion's last token to the end of its turn. Return the
        engine's finish reason; empty if no request was made."""
        spec, server, part = self._spec, attempt.server, attempt.parts[sample]
        if server.state.version is None:
            # The ledger lost the server's version between two turns. No token of an unknown version
            # was sampled, so the episode resumes elsewhere.
            return ""
        label, first = server.state.label, server.state.version
        ticket = attempt.ticket
        seed = request_seed(spec.seed, ticket.index, sample, ticket.attempt, part.answers)
        salt = label or str(first)
        texts, ids = self._stops
        stops = (*texts, *ask.stop), ids
        sampling = Sampling(
            ask.tokens, spec.temperature, seed, salt, *stops, routes=spec.router_replay
        )
        engine, token_ids = dialect(server.state.engine), (*ask.prompt_ids, *part.token_ids)

        def added(sampled: Sampled, last: int | None) -> str:
            """Append the answer to its part; return its finish reason."""
            if last is None:
                # The ledger lost the server's version meanwhile, so the weights that sampled the
                # tokens are unknown. The prompt is not at fault: this must not spend its drops.
                raise Interrupted(f"the version of {server.url} became unknown")
            sampled = self._stopped(sampled, part, ask)
            answer = versioned(sampled, label, first, last, spec.kv_recomputed)
            if answer is None:
                raise OtherWeights("version_unknown")
            if spec.kv_recomputed and kv_survived(sampled):
                raise OtherWeights("kv_kept")
            attempt.parts[sample] = self._added(ask, part, answer)
            return sampled.finish_reason

        def newest() -> int | None:
            # Without updates in flight, no request runs over a commit: at COMMITTING the server
            # first finishes, or loses, those that it has.
            return server.newest if spec.in_flight_weight_updates else server.state.version

        attempt.asked()
        if not spec.stream_completions or spec.router_replay:
            # No stream: engines send routes at an answer's end (vLLM not in a stream at all), so
            # the pieces of a broken stream would lack them.
            call = engine.generate(token_ids, sampling, spec.request_timeout_s)
            return added(await attempt.driver.run(call), newest())
        stream = engine.stream(token_ids, sampling, spec.request_timeout_s)
        clock = asyncio.get_running_loop().time
        tokens = TokenStream(stream, newest, clock, server.token_came)
        server.answer_began(clock())
        try:
            await attempt.driver.stream(stream, tokens)
        except (PeerError, asyncio.CancelledError):
            # Keep the tokens before the break. If they are unfit, the retry starts without them.
            with suppress(GroupDropped, Interrupted):
                added(tokens.kept(), tokens.version)
            raise
        finally:
            server.answer_ended()
            server.took(*tokens.pace, clock())
        sampled, last = tokens.sampled(tokens.count, tokens.finish_reason), newest()
        if last is None:
            # The same if the ledger lost the server's version before the answer's end.
            sampled, last = tokens.kept(), tokens.version
        return added(sampled, last)

    def _stopped(self, sampled: Sampled, part: Completion, ask: Ask) -> Sampled:
        """Return an answer up to the stop text that it completes from the end of ``part``: an
        engine looks for stops in its own answer alone, so it misses one over a break."""
        flags, ids = part.sampled, part.token_ids
        turn = ids[len(flags) - flags[::-1].index(False) :] if False in flags else ids
        stops = *self._stops[0], *ask.stop
        count = tokens_to_stop(self._runner.spell, turn, sampled.token_ids, stops)
        return sampled if count is None else sampled.first(count, "stop")

    def _added(self, ask: Ask, part: Completion, answer: Completion) -> Completion:
        budget = self._spec.room(ask.prompt_ids)
        after = went_on(part, answer, budget)
        tokens = len(ask.prompt_ids) + len(after.token_ids)
        routed = not self._spec.router_replay or whole_routes(after.routes, tokens)
        if answer.token_ids and not routed:
            raise GroupDropped("no_routes")
        if after.finish_reason in ask.turn_ends:
            after = replace(after, finish_reason=TURN_OVER)
        if after.token_ids and not after.finished:
            # The completion resumes from these tokens, so check them now.
            fault = completion_fault(Prompt(0, ask.prompt_ids), after, budget)
            if fault not in ("", "unfinished"):
                raise GroupDropped(fault)
        return after


class TokenStream(StreamedAnswer):
    """Streamed answer, with the newest version that its server may have served at each piece.

    When a server fails, the ledger may lose its version before the connections break. The pieces
    before that moment stay valid: ``kept``, sampled by ``version`` or older (None: no pieces).
    """

    def __init__(
        self,
        call: Call[Piece],
        newest: Callable[[], int | None],
        clock: Callable[[], float],
        came: Callable[[float], None] = lambda at_s: None,
    ) -> None:
        """``newest``: returns the newest version that the server may serve now; None: unknown.
        ``clock``: in seconds. ``came``: called with its time at each piece."""
        super().__init__(call)
        self._newest, self._clock, self._came, self._count = newest, clock, came, 0
        self.version: int | None = None
        self._first: tuple[int, float] | None = None
        self._last_s = 0.0

    @property
    def pace(self) -> tuple[int, float]:
        """Tokens after the first piece, and the seconds in which they came: without the time that
        the request waited, or that the engine read the prompt."""
        if self._first is None:
            return 0, 0.0
        count, first_s = self._first
        return self.count - count, self._last_s - first_s

    def take(self, chunk: bytes) -> bool:
        before = self.count
        came = super().take(chunk)
        if self.count > before:
            self._last_s = self._clock()
            self._came(self._last_s)
            self._first = self._first or (self.count, self._last_s)
        if (newest := self._newest()) is not None and self.count:
            self._count, self.version = self.count, newest
        return came

    def kept(self) -> Sampled:
        """Return the valid tokens of a broken stream; all of them, with the finish reason, if only
        the end of the connection was missing."""
        whole = self.whole and self._count == self.count
        return self.sampled(self._count, self.finish_reason if whole else ABORTED)


def request_seed(seed: int, index: int, sample: int, attempt: int, answers: int = 0) -> int:
    """Return the 63-bit seed of one request: a BLAKE2b hash of the numbers, the same on every host.
    ``answers``: number of the task's turns before the request."""
    text = f"{seed}/{index}/{sample}/{attempt}" + (f"/{answers}" if answers else "")
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def completion_fault(prompt: Prompt, completion: Completion, max_tokens: int) -> str:
    """Return ``samples.defect``, or "over_budget" for more than ``max_tokens`` tokens, or
    "unfinished"; empty if the completion is sound."""
    if fault := defect(prompt, completion):
        return fault
    if len(completion.token_ids) > max_tokens:
        return "over_budget"
    return "" if completion.finish_reason in ("stop", "length") else "unfinished"


def went_on(part: Completion, answer: Completion, budget: int) -> Completion:
    """Return a completion with an engine's answer appended. ``budget``: maximum tokens of the
    completion; one that an engine aborts at its budget is finished by its length.

    >>> answer = Completion((5, 6), (-1.0, -2.0), "abort", 3, 3, "s")
    >>> [went_on(answer, answer, budget).finish_reason for budget in (5, 4)]
    ['', 'length']
    """
    after = part.then(answer)
    if after.finish_reason == ABORTED:
        full = len(after.token_ids) >= budget
        after = replace(after, finish_reason="length" if full else "")
    return after


def tokens_to_stop(
    spell: Callable[[Sequence[int]], str],
    before: Sequence[int],
    more: Sequence[int],
    stops: Sequence[str],
) -> int | None:
    """Return how many tokens of ``more`` complete a stop text that begins in ``before``; None if
    there is no such text.

    >>> tokens_to_stop(lambda ids: "".join(map(chr, ids)), b"a;", b";b;;", [";;"])
    1
    """
    longest = max(map(len, stops), default=0)
    # Four tokens a character at most, the bytes of its UTF-8: these hold all of a stop but its end.
    before = before[-4 * longest :] if longest > 1 else ()
    known = len(spell(before)) if before else 0
    for count in range(1, len(more) + 1 if before else 0):
        text = spell((*before, *more[:count]))
        if any(text.find(stop, max(0, known + 1 - len(stop))) >= 0 for stop in stops):
            return count
        if len(text) >= known + longest - 1:
            break
    return None


def answered(part: Completion, answer: Sequence[int] | None, budget: int) -> Completion:
    """Return a completion with the task's answer to its turn appended (not sampled); None ends it.
    An answer that leaves no room for a further token is left out, and ends it by its length.

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
    """Return an answer with its versions. ``first``: the server's version when the request was
    sent; ``last``: the newest that it may have served until the answer came.

    An engine may name the weights of each token, but not of the KV below it: a request that waits
    over a commit finds the older version's prefix under its cache salt, or has its prompt computed
    before the commit and its tokens after. So the answer is as old as ``first``, unless commits
    discard the KV (``kv_recomputed``). None if the engine names weights that are not of the run of
    ``label``.

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
            spans = []  # the engine did not name a version for every token
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
    """Return whether the engine counts fewer retractions than the commits that the request ran
    over, each of which should have discarded its KV."""
    return sampled.retractions is not None and sampled.retractions < len(sampled.versions) - 1
