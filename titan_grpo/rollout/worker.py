"""Rollout process: one asyncio loop, no torch, no GPU."""

import asyncio
import os
import pickle
import socket
import threading
import traceback
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from titan_grpo.config.rollout import read_key
from titan_grpo.engines.http import AsyncDriver
from titan_grpo.errors import ConfigError, DataError
from titan_grpo.rollout import messages
from titan_grpo.rollout.agent_sampler import AgentSampler
from titan_grpo.rollout.agents import Agents
from titan_grpo.rollout.atropos import AtroposSource
from titan_grpo.rollout.dispatch import Dispatcher
from titan_grpo.rollout.engine_calls import EngineCalls
from titan_grpo.rollout.external import External, PushSource
from titan_grpo.rollout.messages import RolloutSpec
from titan_grpo.rollout.sampler import Sampler
from titan_grpo.rollout.task_runner import TaskFailed, TaskRunner
from titan_grpo.rollout.tasks.agent import AgentRows, load, load_parser
from titan_grpo.rollout.threads import give_loop_threads
from titan_grpo.unix_rpc import Pipe

EXIT_GRACE_S = 5.0


class Worker:
    """Main object of the process. The trainer's calls of ``begin`` and ``take`` come through the
    pipe, on its reading thread; all else runs in the loop."""

    def __init__(self, sock: socket.socket) -> None:
        self._pipe = Pipe(sock, self, self._give_sign)
        self._source: Dispatcher | External | None = None
        self._stop = asyncio.Event()
        self._error: BaseException | None = None

    async def run(self) -> int:
        """Serve until Stop, a closed connection (the trainer is gone) or an error; return the exit
        code."""
        self._loop = asyncio.get_running_loop()
        self._loop.set_exception_handler(self._uncaught)
        give_loop_threads()
        self._pipe.start()
        threading.Thread(target=self._read, name="read", daemon=True).start()
        # no deadline: ends by Stop, an error, or the trainer's end (`_read` turns it into Stop)
        await self._stop.wait()
        try:
            if self._source is not None:
                closing = asyncio.ensure_future(self._source.close())
                # A user's coroutine may ignore its cancellation, and the trainer must not wait for
                # it. Not wait_for: it waits for what it has cancelled.
                await asyncio.wait([closing], timeout=EXIT_GRACE_S)
                if closing.done():
                    # no deadline: it is done; raises its error
                    closing.result()
        except Exception as error:  # noqa: BLE001 - top of the process: the trainer raises it
            self._fail(error)
        if self._error is not None:
            # After the source's end: nothing may follow a Failed message. What ignores its
            # cancellation sends nothing: the loop does not run between this and the pipe's end.
            self._send(_failed(self._error))
        self._pipe.close(EXIT_GRACE_S)
        return 1 if self._error is not None else 0

    def _uncaught(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        if "handle" in context:
            # A callback, which is ours. asyncio would only log a bug in it: the trainer would wait
            # until its deadline.
            self._fail(context["exception"])
        else:
            # A user's, and no reason to end the run: the error of a task that is not awaited, or a
            # session of aiohttp that is not closed.
            loop.default_exception_handler(context)

    def begin(self, spec: RolloutSpec) -> None:
        """Start with the spec: the trainer's first call."""
        self._calls = EngineCalls(spec, self._send)
        # A plain callback, not a task: it must end before the callbacks of the messages that
        # follow, and a task that awaits would continue only after them.
        self._loop.call_soon_threadsafe(self._load, spec)

    def take(self, message: messages.ToWorker) -> None:
        if isinstance(message, messages.EngineCall):
            # Not in the loop: a commit must not wait for a user's reward that blocks the loop.
            self._calls.take(message)
            return
        with suppress(RuntimeError):  # The loop has ended.
            self._loop.call_soon_threadsafe(self._on, message)
        if isinstance(message, messages.Stop):
            # A user's reward that never returns must not keep this process alive after its trainer.
            timer = threading.Timer(EXIT_GRACE_S, os._exit, args=(1,))
            timer.daemon = True
            timer.start()

    def _give_sign(self, give: Callable[[], None]) -> None:
        """Have the loop give it: a coroutine that blocks the loop holds up all groups. Loading may
        take long, and also runs in the loop."""
        if self._source is None:
            give()
            return
        with suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(give)

    def _read(self) -> None:
        try:
            self._pipe.receive()
        finally:
            self.take(messages.Stop())

    def _on(self, message: messages.ToWorker) -> None:
        if isinstance(message, messages.Stop):
            self._stop.set()
        elif self._source is not None and not self._stop.is_set():
            self._source.on(message)

    def _load(self, spec: RolloutSpec) -> None:
        self._source = self._started(spec)
        self._send(messages.Ready())

    def _started(self, spec: RolloutSpec) -> Dispatcher | External:
        """Return the started source of groups. Takes seconds: loads task, dataset and tokenizer."""
        if spec.source == "atropos":
            return AtroposSource(spec, self._send, self._fail)
        if spec.source == "push":
            return PushSource(spec, self._send)
        task, codec, accept = load(spec)
        runner = TaskRunner(task, codec, spec, accept)
        key = read_key(os.environ, spec.api_key_env)

        def connect(url: str) -> AsyncDriver:
            return AsyncDriver(url, key, spec.max_concurrent_requests)

        sampler = Sampler(spec, runner)
        if isinstance(task, AgentRows):
            parser, agents = load_parser(spec.tool_parser), Agents(spec, task, runner, codec)
            self._send(messages.Event(f"agents may talk to {agents.url}/v1", {}))
            sampler = AgentSampler(spec, runner, agents, parser)
        return Dispatcher(spec, sampler, runner, self._send, self._fail, connect)

    def _send(self, message: messages.FromWorker) -> None:
        if isinstance(message, messages.GroupDone):
            payload = message.group.prompt.payload
            try:
                pickle.dumps(payload)
            except Exception as error:  # noqa: BLE001 - the boundary to a user's objects
                text = "a prompt's payload goes to the trainer, so pickle must be able to write it"
                self._fail(DataError(f"{text}, got {payload!r:.200}: {error}"))
                return
        self._pipe.post("on_message", message)

    def _fail(self, error: BaseException) -> None:
        self._error = self._error or error
        self._stop.set()


def _failed(error: BaseException) -> messages.Failed:
    if isinstance(error, ConfigError):
        return messages.Failed("config", str(error))
    if isinstance(error, DataError):
        return messages.Failed("data", str(error))
    if isinstance(error, TaskFailed):
        return messages.Failed("task", error.report)
    text = "".join(traceback.format_exception(error))
    return messages.Failed("bug", f"the rollout process failed:\n{text}")


def main(sock: socket.socket, _: int) -> int:
    """Entry point of the process."""
    return asyncio.run(Worker(sock).run())
