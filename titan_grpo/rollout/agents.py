"""The endpoint that agents call, and the episodes behind it (docs/agents.md).

===== ========================== ================================================================
POST  /v1/chat/completions       a call of an episode, whose key the client shows as its API key
GET   /v1/models                 the one model; /v1/models/{name}: the same under any name
POST  /episodes                  an episode for an agent elsewhere: its id, which is its key, a row
POST  /episodes/{id}/reward      ends an episode: ``{"reward": 1.0}``
===== ========================== ================================================================

An episode outlives the group's stay on one server: when the server fails or leaves, waiting calls
wait until the group resumes elsewhere.

An episode is a list of trajectories, each of which becomes one completion. A call continues a
trajectory's tokens if its messages begin with the trajectory's and the chat template only appends
to their text; any other call starts a new trajectory. An Episode's methods run in the rollout
process's loop, without I/O.
"""

import asyncio
import hmac
import json
import os
import secrets
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, wait
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import unquote

import msgspec

from titan_grpo.config.rollout import required_key
from titan_grpo.errors import NOT_JSON, DataError
from titan_grpo.rollout.codec import TextCodec
from titan_grpo.rollout.httpd import RETRY_AFTER_S, HttpServer, Reply, Request
from titan_grpo.rollout.messages import RolloutSpec
from titan_grpo.rollout.openai_api import (
    NO_KEY,
    TOO_LONG,
    ChatAnswer,
    ChatRequest,
    Message,
    Refused,
    answer_body,
    answer_events,
    model_body,
    models_body,
    parse,
)
from titan_grpo.rollout.task_runner import TaskFailed, TaskRunner
from titan_grpo.rollout.tasks.agent import AgentRows
from titan_grpo.rollout.trajectories import Trajectory, added_text, for_template
from titan_grpo.samples import NO_TOKENS, Completion
from titan_grpo.subprocesses import past_proxies

NO_EPISODE = "the API key must be that of a running episode"
RETRIES = "x-stainless-retry-count"
"""Header in which OpenAI's clients count the repeats of a call."""

REPEATABLE = 10_000
"""Number of episodes, the last ones, whose reward a client may post again."""

GONE_S = 10.0
"""Seconds between two looks whether the client of a waiting call has gone."""


@dataclass(eq=False, slots=True)
class Call:
    """A call of an agent. ``context``: tokens that it adds to its trajectory's part. ``gone``: for
    the call and each of its repeats, whether the client has closed the connection. ``reason``:
    finish reason of its answer, once known."""

    request: ChatRequest
    trajectory: Trajectory
    context: tuple[int, ...]
    rendered: str
    answer: "asyncio.Future[ChatAnswer]"
    gone: list[Callable[[], bool]]
    reason: str = ""

    @property
    def abandoned(self) -> bool:
        """Whether its answer has no waiting client any more, and reached none."""
        return not self.answer.done() and self.closed

    @property
    def closed(self) -> bool:
        """Whether no client's connection is open, as after it gave the call up."""
        return all(gone() for gone in self.gone)


@dataclass(eq=False, slots=True)
class Episode:
    """One run of an agent, identified by ``key``. ``over``: its reward, or the agent's error."""

    key: str
    number: int
    """Index in its group."""
    row: dict[str, Any]
    over: "asyncio.Future[float]"
    left_s: float
    """Rest of ``task_timeout_s``: of the time in which the agent runs and a server serves it."""
    begun: bool = False
    """Whether its agent runs, here or elsewhere."""
    calls: dict[Trajectory, Call] = field(default_factory=dict)
    """The last call of each trajectory."""
    full: bool = False
    """Whether its last call had no room, so that the run's limit ended it."""
    _changed: "asyncio.Future[None] | None" = None

    def ask(
        self,
        codec: TextCodec,
        request: ChatRequest,
        spec: RolloutSpec,
        gone: Callable[[], bool],
        repeat: bool,
    ) -> Call:
        """Queue a call, or return the one that it repeats. ``repeat``: whether the client says that
        it does. Raises Refused if its messages cannot be rendered, or its trajectory has no
        room."""
        if (earlier := self._repeated(request, repeat)) is not None:
            self.full = False
            earlier.gone.append(gone)
            self.notice()
            return earlier
        try:
            messages = [for_template(message) for message in request.messages]
            rendered = codec.render(messages, request.tools)
            going = self._continued(codec, request, rendered, messages)
            trajectory, context = going or (
                Trajectory(codec.encode(rendered), tools=request.tools),
                (),
            )
        except DataError as error:
            raise Refused(400, str(error), "messages") from error
        had = trajectory.delivered + len(context)
        self.full = had >= spec.room(trajectory.prompt)
        if self.full:
            raise Refused(
                400,
                f"an answer must fit rollout.max_completion_tokens = {spec.max_completion_tokens}"
                f" after its sequence's prompt, and training.seq_len = {spec.row_tokens} with it:"
                f" the prompt has {len(trajectory.prompt)} tokens, this call and what was before"
                f" {had}; shorten the messages",
                "messages",
                TOO_LONG,
            )
        if not self.calls:
            trajectory.part = self.number
        answer = asyncio.get_running_loop().create_future()
        call = Call(request, trajectory, context, rendered, answer, [gone])
        self.calls[trajectory] = call
        self.notice()
        return call

    def _repeated(self, request: ChatRequest, repeat: bool) -> Call | None:
        """Return the call that an equal one repeats: one that was abandoned; else any, if the
        client says that it repeats one."""
        # Newest first: a client repeats its last call, whose answer it may lack.
        equal = [call for call in reversed(self.calls.values()) if call.request == request]
        # Of equal calls at once, such as a best of n, the client has the answers of those that it
        # closed no connection of.
        equal.sort(key=lambda call: (not call.abandoned, call.answer.done(), not call.closed))
        return equal[0] if equal and (repeat or equal[0].abandoned) else None

    def _continued(
        self,
        codec: TextCodec,
        request: ChatRequest,
        rendered: str,
        messages: Sequence[Message],
    ) -> tuple[Trajectory, tuple[int, ...]] | None:
        """Return the (longest) trajectory that a call continues, and the tokens that it adds: first
        one whose answer came back as it was, then one whose answer the template writes the same
        (clients set thoughts apart, in a field of their own or with other blanks)."""
        of = {t: messages[: len(t.messages)] for t in self.calls if t.delivered}
        for trajectory in sorted(of, key=lambda t: (list(t.messages) != of[t], -len(t.messages))):
            known, before = of[trajectory], trajectory.messages[:-1]
            same = trajectory.tools == request.tools and self.calls[trajectory].answer.done()
            if same and tuple(known[:-1]) == before and known[len(before) :]:
                answered = known[-1] == trajectory.messages[-1]
                known = known if answered else trajectory.messages
                if (added := added_text(trajectory, known, rendered, codec)) is not None:
                    return trajectory, codec.encode(added)
        return None

    def answered(self, call: Call, delivered: int, tail: str, answer: ChatAnswer) -> None:
        """Answer a call, unless it was abandoned: its tokens are kept for a repeat, and without one
        they are not trained on, since the agent has not acted on them. ``delivered``: number of
        tokens of its trajectory's part; ``tail``: text of the answer's tokens."""
        if call.abandoned:
            return
        trajectory = call.trajectory
        trajectory.messages = tuple(map(for_template, (*call.request.messages, answer.message)))
        trajectory.rendered, trajectory.delivered, trajectory.tail = call.rendered, delivered, tail
        trajectory.written = None
        cut = (
            answer.finish_reason == "length" and answer.completion_tokens != call.request.max_tokens
        )
        trajectory.finish_reason = "length" if cut else "stop"
        if not call.answer.done():
            call.answer.set_result(answer)

    def lost(self, parts: Sequence[Completion]) -> bool:
        """Return whether tokens that the agent has received are missing from the group's parts."""
        return any(
            trajectory.delivered
            and (
                trajectory.part >= len(parts)
                or len(parts[trajectory.part].token_ids) < trajectory.delivered
            )
            for trajectory in self.calls
        )

    @property
    def waiting(self) -> list[Call]:
        """The calls with a client that waits for the answer."""
        return [c for c in self.calls.values() if not (c.answer.done() or c.abandoned)]

    def end(self, text: str) -> None:
        """End the episode; refuse its waiting calls with ``text``."""
        if not self.over.done():
            self.over.cancel()
        for call in self.calls.values():
            if not call.answer.done():
                call.answer.set_exception(Refused(401, text, code=NO_KEY))
                # no deadline: it is done; read it, else asyncio logs it if no client waits
                call.answer.exception()
        self.notice()

    def changed(self) -> "asyncio.Future[None]":
        """Return a future that is done at the next call, or at the end."""
        if self._changed is None or self._changed.done():
            self._changed = asyncio.get_running_loop().create_future()
        return self._changed

    def notice(self) -> None:
        if self._changed is not None and not self._changed.done():
            self._changed.set_result(None)


class Rewarded(msgspec.Struct):
    """Body of ``POST /episodes/{id}/reward``."""

    reward: float


class Agents:
    """Server of agents: runs them, or hands episodes out to them, and answers their requests.

    Methods run in the loop, except ``_admits`` and ``_answer``: in the HTTP server's threads.
    """

    def __init__(
        self, spec: RolloutSpec, task: AgentRows, runner: TaskRunner, codec: TextCodec
    ) -> None:
        """Start listening. Raises ConfigError if the address cannot be bound, or the key is not
        there."""
        self._spec, self._task, self._runner, self.codec = spec, task, runner, codec
        self._groups: dict[int, list[Episode]] = {}
        self._by_key: dict[str, Episode] = {}
        self._offers: deque[Episode] = deque()
        self._running: dict[str, asyncio.Task[None]] = {}
        self._rewarded: dict[str, float] = {}
        """The last posted rewards by key."""
        self._loop = asyncio.get_running_loop()
        self._began = int(time.time())
        self._key = required_key(os.environ, "agent_key_env", spec.agent_key_env)
        what, admits = "rollout.agent_address", self._admits
        self._server = HttpServer(spec.agent_address, "", self._answer, what, admits)
        host, _, port = self._server.address.rpartition(":")
        here = {"0.0.0.0": "127.0.0.1", "[::]": "[::1]"}.get(host, host)
        self.url = f"http://{here}:{port}"
        if task.function is not None:
            # Agents' clients read this when they are made.
            os.environ.update(past_proxies(os.environ, here.strip("[]")))

    async def close(self) -> None:
        for index in list(self._groups):
            self.end(index)
        await asyncio.gather(*self._running.values(), return_exceptions=True)
        await asyncio.to_thread(self._server.close)

    def still_used(self, index: int, parts: Sequence[Completion]) -> list[Completion]:
        """Return the group's parts without those of episodes that must begin again, since tokens
        that their agents received are missing."""
        lost = [episode for episode in self._groups.get(index, ()) if episode.lost(parts)]
        unused = {trajectory.part for episode in lost for trajectory in episode.calls}
        return [NO_TOKENS if at in unused else part for at, part in enumerate(parts)]

    def take(self, index: int, parts: list[Completion]) -> list[Episode]:
        """Return the group's ``group_size`` episodes: the running ones, with new ones in place of
        those whose delivered tokens are missing from ``parts``. What ``parts`` has of such an
        episode is emptied: the new one would take it for its own answer. Raises TaskFailed if
        agents are outside and the row is no JSON."""
        parts[:] = self.still_used(index, parts)
        episodes = self._groups.setdefault(index, [])
        for number in range(self._spec.group_size):
            if number == len(episodes):
                episodes.append(self._made(index, number))
            elif episodes[number].lost(parts):
                self._end(episodes[number])
                episodes[number] = self._made(index, number)
            for trajectory in episodes[number].calls:
                if trajectory.part >= len(parts):
                    trajectory.part = -1
        return list(episodes)

    def end(self, index: int) -> None:
        """End the episodes of a group that is done or given up."""
        for episode in self._groups.pop(index, []):
            self._end(episode)

    def begin(self, episode: Episode) -> None:
        """Run the episode's agent if it is ours and does not run yet."""
        if self._task.function is None or episode.begun:
            return
        episode.begun = True
        task = self._loop.create_task(self._function(self._task.function, episode))
        self._running[episode.key] = task

        def ended(task: asyncio.Task[None]) -> None:
            del self._running[episode.key]
            if not task.cancelled():
                # no deadline: it has ended; a bug of ours ends the process from this callback
                task.result()

        task.add_done_callback(ended)

    def late(self, episode: Episode) -> None:
        """End an episode that had its time."""
        text = (
            f"no reward came within {self._spec.section}.task_timeout_s ="
            f" {self._spec.task_timeout_s:g} in which a server served the episode"
        )
        self._over(episode, TaskFailed("agent", TimeoutError(text)))

    def _made(self, index: int, number: int) -> Episode:
        key, row = f"ep-{secrets.token_hex(16)}", self._task.row(index)
        over, left_s = self._loop.create_future(), self._spec.task_timeout_s
        episode = Episode(key, number, row, over, left_s)
        if self._task.function is None:
            try:
                # Before it is offered: an episode whose answer cannot be written would be lost.
                json.dumps(episode.row)
            except (TypeError, ValueError) as error:
                text = f"a row for an agent outside must be JSON ({error}): {episode.row!r:.200}"
                raise TaskFailed("agent", DataError(text)) from error
            self._offers.append(episode)
        self._by_key[key] = episode
        return episode

    def _end(self, episode: Episode) -> None:
        self._by_key.pop(episode.key, None)
        if task := self._running.get(episode.key):
            task.cancel()
        if episode in self._offers:
            self._offers.remove(episode)
        episode.end(f"{NO_EPISODE}; this one is over")

    async def _function(self, function: Callable[..., Any], episode: Episode) -> None:
        """Run the user's function, and end the episode with its reward."""
        arguments = f"{self.url}/v1", episode.key, dict(episode.row)
        try:
            returned = await self._runner.agent(function, *arguments)
        except TaskFailed as failed:
            # Libraries raise errors of their own for a call without room.
            full = episode.full or getattr(failed.error, "code", "") == TOO_LONG
            self._over(episode, 0.0 if full else failed)
            return
        if returned is not None:
            self._over(episode, returned)
        elif not episode.over.done():
            text = "it must return its reward, a number, or post it to /episodes/{id}/reward"
            self._over(episode, TaskFailed("agent", DataError(text)))

    def _over(self, episode: Episode, outcome: float | TaskFailed) -> None:
        if episode.over.done():
            return
        if isinstance(outcome, TaskFailed):
            episode.over.set_exception(outcome)
            # no deadline: it is done; read the exception, else asyncio logs it if no group waits
            episode.over.exception()
        else:
            episode.over.set_result(outcome)
        episode.notice()

    # What follows answers HTTP requests; _admits and _answer run in the server's threads.

    def _admits(self, request: Request) -> bool:
        """Return whether a request names an episode. Others have no use for a body."""
        names = request.key, *unquote(request.path).split("/")
        return any(name in self._by_key or name in self._rewarded for name in names)

    def _answer(self, request: Request) -> Reply:
        try:
            future = asyncio.run_coroutine_threadsafe(self._decide(request), self._loop)
            while not wait([future], GONE_S).done:
                # Gone: it may repeat its call, and each one would hold a thread and a connection.
                if request.gone():
                    future.cancel()
            # no deadline: it is done
            return future.result()
        except Refused as refused:
            return Reply(refused.status, refused.body)
        except (CancelledError, RuntimeError):  # the loop ends, or has ended
            text = "the rollout process does not answer; the run may be ending"
            return Reply(503, Refused(503, text).body, RETRY_AFTER_S)

    async def _decide(self, request: Request) -> Reply:
        match request.method, request.path.strip("/").split("/"):
            case "GET", ["v1", "models"]:
                self._episode(request.key)
                return Reply(200, models_body(self._began))
            case "GET", ["v1", "models", *_]:  # the name of a model may have a slash
                self._episode(request.key)
                return Reply(200, model_body(self._began))
            case "POST", ["v1", "chat", "completions"]:
                return await self._chat(self._episode(request.key), request)
            case "POST", ["episodes"]:
                return self._hand_out(request)
            case "POST", ["episodes", id_, "reward"]:
                return self._reward(unquote(id_), request)
        raise Refused(
            404,
            "there is POST /v1/chat/completions, GET /v1/models, POST /episodes and POST"
            f" /episodes/ID/reward, got {request.method} {request.path}",
        )

    async def _chat(self, episode: Episode, request: Request) -> Reply:
        asked = parse(request.body, self._spec.temperature)
        repeat = request.headers.get(RETRIES, "0") != "0"
        call = episode.ask(self.codec, asked, self._spec, request.gone, repeat)
        # no deadline: the sampler answers, Episode.end refuses, or _answer finds the client gone
        answer = await asyncio.shield(call.answer)
        return Reply(200, (answer_events if asked.stream else answer_body)(asked, answer))

    def _hand_out(self, request: Request) -> Reply:
        self._want_key(request.key)
        if self._task.function is not None:
            raise Refused(409, 'episodes are handed out with rollout.agent = "outside"')
        # Gone: it gave up while the loop was busy, and will ask again.
        if not self._offers or request.gone():
            return Reply(429, Refused(429, "no episode waits").body, RETRY_AFTER_S)
        episode = self._offers.popleft()
        episode.begun = True
        episode.notice()
        given = {"id": episode.key, "row": episode.row}
        return Reply(200, given | {"timeout_s": self._spec.task_timeout_s})

    def _reward(self, id_: str, request: Request) -> Reply:
        if not (request.key and hmac.compare_digest(id_.encode(), request.key.encode())):
            self._want_key(request.key)
        if id_ not in self._rewarded:
            self._episode(id_)
        try:
            # JSON has no NaN and no infinity.
            reward = msgspec.json.decode(request.body, type=Rewarded).reward
        except NOT_JSON as error:
            text = f'the body must be {{"reward": a finite number}}, got {request.body[:100]!r}'
            raise Refused(400, f"{text}: {error}", "reward") from error
        # Equal: a repeat, whose client lost the first answer.
        if self._rewarded.get(id_) != reward:
            self._over(self._episode(id_), reward)
            self._rewarded[id_] = reward
            if len(self._rewarded) > REPEATABLE:
                del self._rewarded[next(iter(self._rewarded))]
        return Reply(200, {"id": id_, "reward": reward})

    def _episode(self, key: str) -> Episode:
        episode = self._by_key.get(key)
        if episode is None or episode.over.done():
            raise Refused(401, NO_EPISODE, code=NO_KEY)
        return episode

    def _want_key(self, key: str) -> None:
        if self._key and not hmac.compare_digest(key.encode(), self._key.encode()):
            text = "a request needs the header Authorization: Bearer KEY (rollout.agent_key_env)"
            raise Refused(401, text, code=NO_KEY)
