"""The endpoint that agents speak to, and the episodes behind it (docs/agents.md).

===== ========================== ================================================================
POST  /v1/chat/completions       a call of an episode, whose key the client shows as its API key
GET   /v1/models                 the one model
POST  /episodes                  an episode for an agent elsewhere: its id, which is its key, a row
POST  /episodes/{id}/reward      ends an episode: ``{"reward": 1.0}``
===== ========================== ================================================================

An episode lives longer than the group's stay on one server: calls that wait when a server fails, or
is left, wait until the group goes on elsewhere.
"""

import asyncio
import hmac
import json
import math
import os
import secrets
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import TimeoutError as LateError
from typing import Any
from urllib.parse import unquote

from titan_grpo.errors import DataError
from titan_grpo.rollout.codec import TextCodec
from titan_grpo.rollout.episodes import Episode
from titan_grpo.rollout.httpd import RETRY_AFTER_S, HttpServer, Reply, Request
from titan_grpo.rollout.openai_api import (
    NO_KEY,
    TOO_LONG,
    Refused,
    answer_body,
    answer_events,
    models_body,
    parse,
)
from titan_grpo.rollout.partial import Partial
from titan_grpo.rollout.spec import RolloutSpec
from titan_grpo.rollout.task_runner import TaskFailed, TaskRunner
from titan_grpo.rollout.tasks.base import AgentTask

NO_EPISODE = "the API key must be that of a running episode"
GRACE_S = 10.0
"""How much longer than its episode an HTTP request may wait, in seconds."""


class Agents:
    """Runs agents, or hands episodes out to them, and answers their requests.

    Methods run in the loop, except what the HTTP server's threads call.
    """

    def __init__(
        self, spec: RolloutSpec, task: AgentTask, runner: TaskRunner, codec: TextCodec
    ) -> None:
        """Listens. Raises ConfigError where the address cannot be bound."""
        self._spec, self._task, self._runner, self.codec = spec, task, runner, codec
        self._groups: dict[int, list[Episode]] = {}
        self._by_key: dict[str, Episode] = {}
        self._offers: deque[Episode] = deque()
        self._running: dict[str, asyncio.Task[None]] = {}
        self._loop = asyncio.get_running_loop()
        self._began = int(time.time())
        name = spec.agent_key_env
        self._key = os.environ.get(name, "") if name else ""
        self._server = HttpServer(spec.agent_address, "", self._answer, "rollout.agent_address")
        host, _, port = self._server.address.rpartition(":")
        here = {"0.0.0.0": "127.0.0.1", "[::]": "[::1]"}.get(host, host)
        self.url = f"http://{here}:{port}"

    async def close(self) -> None:
        """End all episodes and stop listening."""
        for index in list(self._groups):
            self.end(index)
        await asyncio.gather(*self._running.values(), return_exceptions=True)
        await self._loop.run_in_executor(None, self._server.close)

    def take(self, index: int, parts: Sequence[Partial]) -> list[Episode]:
        """The episodes of a group, one for each of its completions: those that run, and new ones in
        place of those whose tokens are no longer among ``parts``."""
        episodes = self._groups.setdefault(index, [])
        for number in range(self._spec.group_size):
            if number == len(episodes):
                episodes.append(self._begin(index, number))
            elif episodes[number].lost(parts):
                self._end(episodes[number])
                episodes[number] = self._begin(index, number)
            for trajectory in episodes[number].trajectories:
                if trajectory.part >= len(parts):
                    trajectory.part = -1
        return list(episodes)

    def end(self, index: int) -> None:
        """The group is done, or given up: its episodes are over."""
        for episode in self._groups.pop(index, []):
            self._end(episode)

    def _begin(self, index: int, number: int) -> Episode:
        key = f"ep-{secrets.token_hex(16)}"
        episode = Episode(key, number, self._task.row(index), self._loop.create_future())
        self._by_key[key] = episode
        if self._task.function is None:
            self._offers.append(episode)
        else:
            self._run(episode, self._function(self._task.function, episode))
        return episode

    def _run(self, episode: Episode, work: Any) -> None:
        task = self._loop.create_task(work)
        self._running[episode.key] = task
        task.add_done_callback(lambda _: self._running.pop(episode.key, None))

    def _end(self, episode: Episode) -> None:
        self._by_key.pop(episode.key, None)
        if task := self._running.get(episode.key):
            task.cancel()
        if episode in self._offers:
            self._offers.remove(episode)
        episode.end(f"{NO_EPISODE}; this one is over")

    async def _function(self, function: Callable[..., Any], episode: Episode) -> None:
        """Run the user's function to its end."""
        arguments = f"{self.url}/v1", episode.key, dict(episode.row)
        try:
            returned = await self._runner.agent(function, *arguments)
        except TaskFailed as failed:
            full = getattr(failed.error, "code", "") == TOO_LONG
            self._over(episode, 0.0 if full else failed)
            return
        if returned is not None:
            self._over(episode, returned)
        elif not episode.over.done():
            text = "it must return its reward, a number, or post it to /episodes/{id}/reward"
            self._over(episode, TaskFailed("agent", DataError(text)))

    async def _late(self, episode: Episode) -> None:
        """End an episode whose agent is outside and posts no reward."""
        await asyncio.sleep(self._spec.task_timeout_s)
        text = f"no reward came within rollout.task_timeout_s = {self._spec.task_timeout_s:g}"
        self._over(episode, TaskFailed("agent", TimeoutError(text)))

    def _over(self, episode: Episode, outcome: float | TaskFailed) -> None:
        if episode.over.done():
            return
        if isinstance(outcome, TaskFailed):
            episode.over.set_exception(outcome)
            # no deadline: it is done; read, for where no group waits for it now
            episode.over.exception()
        else:
            episode.over.set_result(outcome)
        episode.notice()

    # What follows answers HTTP requests; _answer runs in the server's threads.

    def _answer(self, request: Request) -> Reply:
        future = asyncio.run_coroutine_threadsafe(self._decide(request), self._loop)
        try:
            return future.result(self._spec.task_timeout_s + GRACE_S)
        except Refused as refused:
            return Reply(refused.status, refused.body)
        except (LateError, RuntimeError):  # the loop is busy, or closed
            future.cancel()
            text = "the rollout process does not answer; the run may be ending"
            return Reply(503, Refused(503, text).body, RETRY_AFTER_S)

    async def _decide(self, request: Request) -> Reply:
        match request.method, request.path.strip("/").split("/"):
            case "GET", ["v1", "models"]:
                self._episode(request.key)
                return Reply(200, models_body(self._began))
            case "POST", ["v1", "chat", "completions"]:
                return await self._chat(self._episode(request.key), request.body)
            case "POST", ["episodes"]:
                return self._hand_out(request)
            case "POST", ["episodes", id_, "reward"]:
                return self._reward(unquote(id_), request)
        raise Refused(
            404,
            "there is POST /v1/chat/completions, GET /v1/models, POST /episodes and POST"
            f" /episodes/ID/reward, got {request.method} {request.path}",
        )

    async def _chat(self, episode: Episode, body: bytes) -> Reply:
        asked = parse(body, self._spec.temperature)
        call = episode.ask(self.codec, asked, self._spec.max_completion_tokens)
        # no deadline: the episode's end sets it, at rollout.task_timeout_s at the latest
        answer = await call.answer
        if asked.stream:
            return Reply(200, answer_events(asked, answer))
        return Reply(200, answer_body(asked, answer))

    def _hand_out(self, request: Request) -> Reply:
        self._want_key(request.key)
        if self._task.function is not None:
            raise Refused(409, 'episodes are handed out with rollout.agent = "outside"')
        if not self._offers:
            return Reply(429, Refused(429, "no episode waits").body, RETRY_AFTER_S)
        episode = self._offers.popleft()
        self._run(episode, self._late(episode))
        given = {"id": episode.key, "row": episode.row}
        return Reply(200, given | {"timeout_s": self._spec.task_timeout_s})

    def _reward(self, id_: str, request: Request) -> Reply:
        if not (request.key and hmac.compare_digest(id_.encode(), request.key.encode())):
            self._want_key(request.key)
        episode = self._episode(id_)
        try:
            given = json.loads(request.body)
            reward = given["reward"]
            if isinstance(reward, bool) or not isinstance(reward, (int, float)):
                raise TypeError
            reward = float(reward)
        except (ValueError, TypeError, KeyError, OverflowError) as error:
            shown = request.body[:100]
            text = f'the body must be {{"reward": a number}}, got {shown!r}'
            raise Refused(400, text, "reward") from error
        if not math.isfinite(reward):
            raise Refused(400, f"reward must be finite, got {reward}", "reward")
        self._over(episode, reward)
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
