"""The rollout process (one asyncio loop, no torch, no GPU), and the transport to it as a child.
remote.py has the transport to a service."""

import asyncio
import os
import queue
import socket
import subprocess
import threading
import traceback
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

from titan_grpo.engines.http import AsyncDriver
from titan_grpo.errors import ConfigError, DataError
from titan_grpo.rollout import messages
from titan_grpo.rollout.agent_sampler import AgentSampler
from titan_grpo.rollout.agents import Agents
from titan_grpo.rollout.atropos import AtroposSource
from titan_grpo.rollout.dispatch import Dispatcher
from titan_grpo.rollout.engine_calls import EngineCalls
from titan_grpo.rollout.external import External, PushSource
from titan_grpo.rollout.messages import OnMessage, RolloutSpec, RolloutStopped
from titan_grpo.rollout.sampler import Sampler
from titan_grpo.rollout.task_runner import TaskFailed, TaskRunner
from titan_grpo.rollout.tasks.agent import AgentRows, load_parser
from titan_grpo.rollout.tasks.loading import load
from titan_grpo.subprocesses import helper_environment, start_module, wait_process

EXIT_GRACE_S = 5.0


class Worker:
    """The process: a reading and a writing thread around the loop."""

    def __init__(self, connection: "Connection[Any, Any]") -> None:
        self._connection = connection
        self._out: queue.SimpleQueue[messages.FromWorker | None] = queue.SimpleQueue()
        self._stop = asyncio.Event()
        self._error: BaseException | None = None

    async def run(self) -> int:
        """Serve until Stop, a closed connection (the trainer is gone) or an error; returns the exit
        code."""
        # no deadline: ends with the trainer, whose end closes the connection
        spec: RolloutSpec = self._connection.recv()
        writer = threading.Thread(target=self._write_loop, name="write", daemon=True)
        writer.start()
        try:
            await self._serve(spec)
        except Exception as error:  # noqa: BLE001 - top of the process: the trainer raises it
            self._error = error
        if self._error is not None:
            self._out.put(_failed(self._error))
        self._out.put(None)
        writer.join(EXIT_GRACE_S)
        return 1 if self._error is not None else 0

    async def _serve(self, spec: RolloutSpec) -> None:
        source = await self._source(spec)
        loop = asyncio.get_running_loop()
        # Without it a bug in a callback would only be logged, and the trainer would wait for its
        # deadline.
        loop.set_exception_handler(
            lambda _loop, context: self._fail(
                context.get("exception") or RuntimeError(context["message"])
            )
        )
        calls = EngineCalls(spec, self._out.put)
        reader = threading.Thread(
            target=self._read_loop, args=(loop, source, calls), name="read", daemon=True
        )
        self._out.put(messages.Ready())
        reader.start()
        # no deadline: Stop, an error, or the end of the trainer, which the reader turns into Stop
        await self._stop.wait()
        calls.close()
        await source.close()

    async def _source(self, spec: RolloutSpec) -> Dispatcher | External:
        """Where groups come from, started."""
        if spec.source != "task":
            kind = AtroposSource if spec.source == "atropos" else PushSource
            source = kind(spec, self._out.put, self._fail)
            await source.start()
            return source
        task, codec, accept = load(spec)
        runner = TaskRunner(task, codec, spec.task_concurrency, spec.task_timeout_s, accept)
        key = os.environ.get(spec.api_key_env, "")

        def connect(url: str) -> AsyncDriver:
            return AsyncDriver(url, key, spec.max_concurrent_requests)

        sampler = Sampler(spec, runner)
        if isinstance(task, AgentRows):
            parser, agents = load_parser(spec.tool_parser), Agents(spec, task, runner, codec)
            self._out.put(messages.Event(f"agents may talk to {agents.url}/v1", {}))
            sampler = AgentSampler(spec, runner, agents, parser)
        return Dispatcher(spec, sampler, runner, self._out.put, self._fail, connect)

    def _fail(self, error: BaseException) -> None:
        self._error = self._error or error
        self._stop.set()

    def _read_loop(
        self,
        loop: asyncio.AbstractEventLoop,
        source: Dispatcher | External,
        calls: EngineCalls,
    ) -> None:
        def take(message: messages.ToWorker) -> None:
            if isinstance(message, messages.Stop):
                self._stop.set()
            elif not self._stop.is_set():
                source.on(message)

        message: messages.ToWorker | None = None
        while not isinstance(message, messages.Stop):
            try:
                # no deadline: ends with the trainer, whose end closes the connection
                message = self._connection.recv()
            except (EOFError, OSError):
                message = messages.Stop()
            if isinstance(message, messages.EngineCall):
                # Not in the loop: a commit must not wait for a user's reward that blocks it.
                calls.take(message)
                continue
            with suppress(RuntimeError):  # The loop has ended.
                loop.call_soon_threadsafe(take, message)
        # A user's reward that never returns must not keep this process alive after its trainer.
        timer = threading.Timer(EXIT_GRACE_S, os._exit, args=(1,))
        timer.daemon = True
        timer.start()

    def _write_loop(self) -> None:
        # no deadline: run() puts None into the queue; the thread is a daemon
        while (message := self._out.get()) is not None:
            try:
                self._connection.send(message)
            except OSError:
                return  # The trainer is gone; the reading thread ends the loop.


def _failed(error: BaseException) -> messages.Failed:
    if isinstance(error, ConfigError):
        return messages.Failed("config", str(error))
    if isinstance(error, DataError):
        return messages.Failed("data", str(error))
    if isinstance(error, TaskFailed):
        return messages.Failed("task", error.report)
    text = "".join(traceback.format_exception(error))
    return messages.Failed("bug", f"the rollout process failed:\n{text}")


class LocalTransport:
    """Starts ``rollout.worker`` as a child and exchanges pickled messages over a socket pair. The
    child ends with this process, however that dies: its end of the socket closes."""

    def __init__(self) -> None:
        self._out: queue.SimpleQueue[messages.ToWorker | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int | None:
        """Of the child; None while there is none."""
        return None if self._process is None else self._process.pid

    def start(self, spec: RolloutSpec, on_message: OnMessage, timeout_s: float) -> None:
        """Start the process, which loads task and tokenizer."""
        self._on_message = on_message
        # The rollout process has no business on a GPU.
        self._process, self._socket = start_module(
            "titan_grpo.rollout.worker",
            env=helper_environment(os.environ) | {"CUDA_VISIBLE_DEVICES": ""},
        )
        # A second descriptor: the socket can then be shut down while threads sit in the connection.
        self._connection: Connection[Any, Any] = Connection(os.dup(self._socket.fileno()))
        self._connection.send(spec)
        for name, target in (("send", self._send_loop), ("receive", self._receive_loop)):
            thread = threading.Thread(target=target, name=f"rollout-{name}", daemon=True)
            thread.start()
            self._threads.append(thread)

    def send(self, message: messages.ToWorker, within_s: float | None = None) -> None:
        """As WorkerTransport.send; delivery takes no time here."""
        self._out.put(message)

    def close(self, deadline_s: float) -> None:
        """Stop the process (killed past the deadline) and the threads."""
        self._out.put(messages.Stop())
        self._out.put(None)
        if self._process is None:
            return
        try:
            wait_process(self._process, deadline_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            wait_process(self._process, 5.0)
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(5.0)
        self._connection.close()
        self._socket.close()
        self._process = None

    def _send_loop(self) -> None:
        # no deadline: close() puts None into the queue; the thread is a daemon
        while (message := self._out.get()) is not None:
            try:
                self._connection.send(message)
            except OSError:
                return  # The process is gone; the receiving thread reports it.

    def _receive_loop(self) -> None:
        try:
            while True:
                # no deadline: ends with the process, whose end closes the socket
                self._on_message(self._connection.recv())
        except (EOFError, OSError):
            self._on_message(
                RolloutStopped(
                    f"the rollout process ended with {self._exit_status()}; its last output is"
                    " above"
                )
            )
        except Exception as error:  # noqa: BLE001 - top of a thread: next_batch raises it
            self._on_message(
                RolloutStopped(f"the rollout process sent something unreadable: {error!r}")
            )

    def _exit_status(self) -> str:
        process = self._process
        if process is None:
            return "its client"
        with suppress(subprocess.TimeoutExpired):
            return f"exit code {wait_process(process, 5.0)}"
        return "its connection closed while it still runs"


def main(sock: socket.socket, _: int) -> int:
    """Entry point of the process."""
    return asyncio.run(Worker(Connection(sock.detach())).run())
