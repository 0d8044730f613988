"""Sampling of a group of agents' episodes: one server answers the agents' calls, each as a turn of
a completion."""

import asyncio
import json
import logging
import secrets
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from heapq import heappop, heappush
from itertools import count

from titan_grpo.config.task import OUTSIDE
from titan_grpo.engines.generation import ToolCalls
from titan_grpo.engines.http import HttpRefused
from titan_grpo.engines.server import dialect
from titan_grpo.errors import DataError, PeerError
from titan_grpo.rollout.agents import Agents, Call, Episode
from titan_grpo.rollout.codec import TextCodec
from titan_grpo.rollout.messages import RolloutSpec
from titan_grpo.rollout.openai_api import ChatAnswer, ChatRequest, Message, tool_call
from titan_grpo.rollout.sampler import (
    ABORTED,
    Ask,
    Attempt,
    GroupDropped,
    Interrupted,
    PromptTooLong,
    Sampler,
    answered,
    completion_fault,
)
from titan_grpo.rollout.task_runner import TaskFailed, TaskRunner, at_once
from titan_grpo.rollout.tasks.agent import ToolParser, hermes
from titan_grpo.rollout.trajectories import Trajectory, for_template
from titan_grpo.samples import (
    NO_TOKENS,
    TURN_OVER,
    Completion,
    Group,
    Prompt,
    context,
    shared_prefix,
    spans_from,
)

logger = logging.getLogger(__name__)

UNREADABLE = frozenset({400, 500})
"""Status codes with which an engine answers if its parser itself fails on a malformed call. That is
no outage: each further server would fail in the same way, and the prompt would be given up, so that
the policy never learnt from it."""

TURN_ENDS = frozenset(("stop", "length"))
"""Finish reasons that end a turn: all, since only its agent ends an episode."""


class Places:
    """A number of places. A free one goes to the oldest group: with a first-in-first-out queue, an
    episode that moves to another server would wait there for groups that have not begun, while its
    tokens become too old."""

    def __init__(self, free: int) -> None:
        self._free, self._number = free, count()
        self._waiting: list[tuple[int, int, asyncio.Future[None]]] = []

    @asynccontextmanager
    async def place(self, index: int) -> AsyncIterator[None]:
        """Hold a place for an episode of the group of prompt ``index``."""
        given = asyncio.get_running_loop().create_future()
        heappush(self._waiting, (index, next(self._number), given))
        self._give()
        try:
            # no deadline: the episodes that hold the places end, or their groups move
            await given
            yield
        finally:
            # Not cancelled: the place was given, even if the wait for it was cancelled just then.
            if not given.cancelled():
                self._free += 1
                self._give()

    def _give(self) -> None:
        while self._free and self._waiting:
            _, _, given = heappop(self._waiting)
            if not given.done():  # else the wait was cancelled
                self._free -= 1
                given.set_result(None)


class AgentSampler(Sampler):
    """Sampler of agents' groups. ``group`` answers the calls of a group's episodes on one server;
    if the server fails, the episodes resume on the group's next server."""

    def __init__(
        self,
        spec: RolloutSpec,
        runner: TaskRunner,
        agents: Agents,
        tool_parser: ToolParser | None,
    ) -> None:
        """``tool_parser``: None for the one of the server that sampled the answer."""
        super().__init__(spec, runner)
        self._agents, self._tool_parser = agents, tool_parser
        # Agents outside run without us: they need no place.
        self._places = Places(sys.maxsize if spec.agent == OUTSIDE else spec.task_concurrency)
        self._said_unwritable = False
        self._parser_names: dict[tuple[str, str], str] = {}
        """By URL and engine. Fetched once: a server that restarts with another parser as its
        default still parses with the one that a request names."""

    def forget(self, index: int) -> None:
        """End the episodes of a prompt that was given up."""
        self._agents.end(index)

    def still_used(self, index: int, parts: Sequence[Completion]) -> Sequence[Completion]:
        """See Sampler; here those of episodes that must begin again."""
        return self._agents.still_used(index, parts)

    async def close(self) -> None:
        await self._agents.close()

    async def group(self, attempt: Attempt) -> Group:
        """See Sampler.group. ``attempt.parts`` grows if an episode has several trajectories."""
        index = attempt.ticket.index
        attempt.prompt = self._runner.prompt(index)
        try:
            episodes = self._agents.take(index, attempt.parts)
            await at_once([self._serve(attempt, episode) for episode in episodes])
            attempt.sampled(attempt)
            group = await self._accepted(self._group(attempt, episodes))
        except (PeerError, Interrupted, asyncio.CancelledError):
            raise  # Keep the episodes: they resume with the group.
        except BaseException:
            self._agents.end(index)
            raise
        self._agents.end(index)
        return group

    async def _serve(self, attempt: Attempt, episode: Episode) -> None:
        """Begin or resume an episode, and serve it until it is over."""
        # The place is the service's, not the agent's: an agent whose group waits for a server must
        # not keep those that servers could serve from running, or both would wait for each other.
        if not episode.over.done():
            async with self._places.place(attempt.ticket.index):
                self._agents.begin(episode)
                await self._answers(attempt, episode)
        # no deadline: it is done; raises the agent's error
        episode.over.result()
        attempt.ended(attempt)

    async def _answers(self, attempt: Attempt, episode: Episode) -> None:
        """Answer the episode's calls, concurrently if the agent makes several, until it is over or
        had its time."""
        serving: dict[Call, asyncio.Task[None]] = {}
        time_s, until_s = asyncio.get_running_loop().time, None
        try:
            while not episode.over.done():
                for call in episode.waiting:
                    if call not in serving:
                        serving[call] = asyncio.ensure_future(self._answer(attempt, episode, call))
                if episode.begun and until_s is None:
                    until_s = time_s() + episode.left_s
                # None: it waits for an agent outside to take it, without a deadline
                left_s = None if until_s is None else until_s - time_s()
                changed = episode.changed()
                done, _ = await asyncio.wait(
                    {changed, *serving.values()},
                    timeout=left_s,
                    return_when=asyncio.FIRST_COMPLETED,
                )
                if not done:
                    self._agents.late(episode)
                for call in [call for call, task in serving.items() if task.done()]:
                    # no deadline: it has ended
                    serving.pop(call).result()
        finally:
            if until_s is not None:
                episode.left_s = until_s - time_s()
            for task in serving.values():
                task.cancel()
            # no deadline: all were cancelled
            await asyncio.gather(*serving.values(), return_exceptions=True)

    async def _answer(self, attempt: Attempt, episode: Episode, call: Call) -> None:
        trajectory, parts = call.trajectory, attempt.parts
        if trajectory.part < 0:
            trajectory.part = len(parts)
            parts.append(NO_TOKENS)
        at, room = trajectory.part, self._spec.room(trajectory.prompt)
        # Append the call's context once. The part is longer than delivered if an earlier server
        # failed after it had sampled this answer whole.
        if parts[at].waits and len(parts[at].token_ids) == trajectory.delivered:
            parts[at] = answered(parts[at], call.context, room)
        # Start of the answer within the part.
        before = trajectory.delivered + len(call.context)
        most = call.request.max_tokens or room
        while not parts[at].waits:
            left = min(room, before + most) - len(parts[at].token_ids)
            if left <= 0:
                parts[at] = replace(parts[at], finish_reason=TURN_OVER)
                call.reason = "length"
                break
            ask = Ask(trajectory.prompt, left, TURN_ENDS, call.request.stop)
            call.reason = await self._sample(attempt, at, ask)
            if not parts[at].waits:
                raise Interrupted(f"{attempt.server.url} cut an answer to an agent short")
        if call.reason in ("", ABORTED):
            # Ended by the run's limit, or its connection broke just before the last line.
            full = len(parts[at].token_ids) >= min(room, before + most)
            call.reason = "length" if full else "stop"
        await self._deliver(attempt, episode, call, before)

    async def _deliver(self, attempt: Attempt, episode: Episode, call: Call, before: int) -> None:
        """Answer a call with the tokens of its trajectory's part from ``before`` on. Raises
        PeerError if the server must parse tool calls and fails."""
        codec, part, reason = self._agents.codec, attempt.parts[call.trajectory.part], call.reason
        ids = part.token_ids[before:]
        text = codec.decode(ids)
        if reason == "stop":
            text = before_stop(text, call.request.stop)
        message: Message = {"role": "assistant", "content": text}
        if call.request.calls:
            content, found = await self._read(attempt, call, ids, text)
            # Ids of nine letters and digits: Mistral's templates refuse others.
            calls = [tool_call(secrets.token_hex(5)[:9], *each) for each in found]
            with_calls = message | {"content": content, "tool_calls": calls}
            if not calls:
                message["content"] = content
            elif why := unwritable(codec, call.request, with_calls):
                if not self._said_unwritable:
                    self._said_unwritable = True
                    logger.warning("%s (said once)", why)
            else:
                message, reason = with_calls, "tool_calls" if reason == "stop" else reason
        shown: tuple[tuple[str, float], ...] = ()
        if call.request.logprobs:
            shown = tuple(
                (codec.spell((token,)), logprob)
                for token, logprob in zip(ids, part.logprobs[before:], strict=True)
            )
        answer = ChatAnswer(
            f"chatcmpl-{secrets.token_hex(12)}",
            int(time.time()),
            message,
            reason,
            len(call.trajectory.prompt) + before,
            len(ids),
            shown,
        )
        episode.answered(call, len(part.token_ids), codec.spell(ids), answer)

    async def _read(
        self, attempt: Attempt, call: Call, ids: tuple[int, ...], text: str
    ) -> tuple[str, list[tuple[str, str]]]:
        """Return the text of an answer without its tool calls, and the tool calls: name and
        arguments as JSON."""
        codec = self._agents.codec
        if call.reason == "stop":
            ids = unended(codec, ids, call.request.stop)
        if self._tool_parser is not None:
            try:
                content, calls = self._tool_parser(text)
                # Its marks are special tokens of some models, which the text lacks.
                marked = self._tool_parser is hermes and not calls
                if marked and (found := hermes(codec.spell(ids)))[1]:
                    content, calls = found
                made = _as_json(calls)
                return (text, []) if made is None else (str(content), made)
            except (Exception, SystemExit) as error:  # the boundary to a user's code
                raise TaskFailed("tool_parser", error) from error
        if not ids:
            return text, []
        engine, within_s = dialect(attempt.server.state.engine), self._spec.request_timeout_s
        where = attempt.server.url, attempt.server.state.engine
        if where not in self._parser_names:
            question = engine.tool_parser(within_s)
            name = "" if question is None else await attempt.driver.run(question)
            self._parser_names[where] = name
        name, tools = self._parser_names[where], call.request.tools
        asked = engine.parse_tool_calls(name, ids, codec.spell(ids), tools, within_s)
        try:
            content, calls = await attempt.driver.run(asked)
        except HttpRefused as error:
            if error.status not in UNREADABLE:
                raise
            logger.warning("a malformed call of a tool is none: %s", error)
            return text, []
        made = _as_json(calls)
        return (content, made) if made else (text, [])

    def _group(self, attempt: Attempt, episodes: Sequence[Episode]) -> Group:
        """Return the group of finished episodes. Its prompt is the common prefix of all prompts;
        each trajectory becomes a completion after it. Raises GroupDropped, TaskFailed."""
        made: list[tuple[Trajectory, Completion]] = []
        for episode in episodes:
            delivered = [each for each in episode.calls if each.delivered]
            if not delivered and episode.full:
                what = f"the first call of an agent (row {episode.row!r:.200})"
                raise PromptTooLong(what, self._spec)
            if not delivered:
                text = (
                    "an agent must make a call and wait for its answer, one of row"
                    f" {episode.row!r:.200} has none"
                )
                raise TaskFailed("agent", DataError(text))
            # no deadline: it is done (_serve has returned)
            reward = episode.over.result()
            for trajectory in delivered:
                # Cut the tokens after the last delivered answer: the agent has not seen them.
                completion = replace(
                    first_tokens(attempt.parts[trajectory.part], trajectory.delivered),
                    finish_reason="length" if episode.full else trajectory.finish_reason,
                    server=attempt.server.url,
                    reward=reward,
                    episode=episode.number if len(delivered) > 1 else -1,
                )
                prompt = Prompt(attempt.prompt.index, trajectory.prompt)
                room = self._spec.room(trajectory.prompt)
                if fault := completion_fault(prompt, completion, room):
                    raise GroupDropped(fault)
                made.append((trajectory, completion))
        shared = shared_prefix([trajectory.prompt for trajectory, _ in made])
        completions = [
            context(t.prompt[len(shared) :], c.token_spans[0][0]).then(c) for t, c in made
        ]
        group = Group(replace(attempt.prompt, token_ids=shared), tuple(completions))
        if not shared:
            raise GroupDropped("empty_prompt")
        return group


def before_stop(text: str, stops: Sequence[str]) -> str:
    """Return a text up to the first of its stops.

    >>> before_stop("a, b", (";", ","))
    'a'
    """
    return min((text.partition(stop)[0] for stop in stops), key=len, default=text)


def unwritable(codec: TextCodec, request: ChatRequest, message: Message) -> str:
    """Return why the chat template cannot write an answer with calls, or "": the agent's next
    request would be refused. (Llama 3's template refuses a second call in one answer; DeepSeek's
    takes the arguments for a text.)"""
    known = [*map(for_template, (*request.messages, message))]
    results = [
        {"role": "tool", "tool_call_id": each["id"], "content": ""}
        for each in message["tool_calls"]
    ]
    why: list[str] = []
    # Either is enough: some templates want no answer last, some know no results of tools.
    for after, ask in (([], False), (results, True)):
        try:
            codec.render([*known, *after], request.tools, ask)
            return ""
        except DataError as error:
            why.append(str(error))
    return f"calls of tools that the chat template cannot write reach no agent: {why[0]}"


def unended(codec: TextCodec, ids: tuple[int, ...], stops: Sequence[str]) -> tuple[int, ...]:
    """Return an answer's tokens without its end token or the agent's stop, for a parser. With a
    stop they are new tokens, encoded from the text before it."""
    text = codec.spell(ids)
    if (before := before_stop(text, stops)) != text:
        return codec.encode(before)
    special = codec.spell(ids[-1:]) and not codec.decode(ids[-1:])
    return ids[:-1] if special else ids


def first_tokens(part: Completion, count: int) -> Completion:
    """Return a completion's first ``count`` tokens (at least one).

    >>> part = Completion((5, 6), (-1.0, -2.0), "", 3, 4, "s", spans=((3, 1), (4, 1)))
    >>> first_tokens(part, 1).token_ids, first_tokens(part, 1).token_spans
    ((5,), ((3, 1),))
    """
    spans, left = [], count
    for version, tokens in part.token_spans:
        spans.append((version, min(tokens, left)))
        left -= spans[-1][1]
    return replace(
        part,
        token_ids=part.token_ids[:count],
        logprobs=part.logprobs[:count],
        sampled=part.sampled[:count],
        spans=spans_from(part.version_first, spans),
    )


def _as_json(calls: ToolCalls) -> list[tuple[str, str]] | None:
    """Return calls with their arguments as JSON; None if one has a lone surrogate (a policy may
    write such an escape), NaN or an infinity (1e999): JSON has none, and the agent could not send
    it back."""
    calls = [(str(name), dict(arguments)) for name, arguments in calls]
    try:
        json.dumps(calls, ensure_ascii=False, allow_nan=False).encode()
    except ValueError:
        return None
    return [(name, json.dumps(arguments)) for name, arguments in calls]
