"""Evaluations of a training run: their schedule, servers, processes and results.

While an evaluation runs on a server, its lane keeps the server on its version (``ImageSlots.keep``)
and then sends the newest one. Training and all other servers continue meanwhile.
"""

import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from typing import Any

import msgspec

from titan_grpo.config import Rollout
from titan_grpo.config.task import Evaluation
from titan_grpo.errors import ConfigError, TitanGrpoError
from titan_grpo.observe import names, terminal
from titan_grpo.observe.recorder import Recorder
from titan_grpo.observe.schema import Evaluated
from titan_grpo.protocol.messages import ServerState
from titan_grpo.rollout import evaluation
from titan_grpo.rollout.evaluation import Failure, Job
from titan_grpo.rollout.messages import RolloutSpec
from titan_grpo.subprocesses import helper_environment, how_ended, start_module, wait_process
from titan_grpo.sync.server_set import ServerObserver

logger = logging.getLogger(__name__)

END_S = 5.0
"""Seconds for the processes to end after they are killed."""

NICE = 10
"""Niceness of an evaluation's process: training comes first on the cores of rank 0's host."""

TRIES = 3
"""Starts of one due evaluation, if each fails in a way that allows a retry."""


@dataclass(slots=True)
class _Running:
    """An evaluation in progress."""

    url: str
    version: int
    due: int
    """``_Table.due`` when it began."""
    broken: str = ""
    """Why its outcome does not count; empty if it does."""
    process: "_Process | None" = None


@dataclass(slots=True)
class _Table:
    job: Job
    due: int | None
    """Version from which the next evaluation is due; None: none is scheduled."""
    evaluated: int | None = None
    running: _Running | None = None
    tries: int = 0
    """Failed tries of the due evaluation so far."""
    spare: "_Process | None" = None
    """Process for the next evaluation: it loads in advance, while no server is held for it."""


def evaluation_spec(job_config: Any, model_dir: str, version: int = 0) -> RolloutSpec:
    """Return the spec of evaluations on the job's servers, from ``version`` on. On servers that the
    job starts, which have room for a row, no request asks for more: vLLM would shorten it and
    SGLang refuse it, so each would evaluate other prompts. What others have room for is unknown."""
    rollout: Rollout = job_config.rollout
    spec = RolloutSpec.from_config(rollout, model_dir, version)
    if not rollout.launches:
        return spec
    return replace(spec, row_tokens=job_config.training.seq_len)


def _due(table: Evaluation, before: Sequence[Evaluated]) -> int | None:
    """Return from which version on the first evaluation is due without at_start. One that the
    process before did not finish still is."""
    made = [each.version for each in before if each.name == table.name]
    return evaluation.next_due(table.every, max(made, default=0))


def replace_values(values: dict[str, float], outcome: Evaluated) -> None:
    """Put an evaluation's metrics in place of its earlier ones. A result may have fewer: one prompt
    has no interval."""
    first = f"{names.EVALUATION}/{outcome.name}/"
    for name in [name for name in values if name.startswith(first)]:
        del values[name]
    values |= evaluation.metrics(outcome)


class Evaluations:
    """ServerObserver between the server set and the rollouts. It forwards to ``rollouts``, except
    for servers that only evaluate. Lanes call it under the set's lock; these calls never block."""

    def __init__(
        self,
        tables: Sequence[Evaluation],
        spec: RolloutSpec,
        rollouts: ServerObserver,
        recorder: Recorder,
        keep: Callable[[str], None],
        go_on: Callable[[str], None],
    ) -> None:
        """``spec``: of evaluations on the training servers (``evaluation_spec``). ``keep``,
        ``go_on``: between these calls a server's lane gets no newer version."""
        self._rollouts, self._recorder = rollouts, recorder
        self._keep, self._go_on = keep, go_on
        self.own = frozenset(url for table in tables for url in table.servers)
        first = spec.base_version
        # Of a new run, the history may be that of an older one in the same folder.
        history = recorder.history().evaluations if first else []
        before = [each for each in history if each.version <= first]  # the rest is abandoned
        # What servers of its own have room for is unknown.
        elsewhere = replace(spec, row_tokens=sys.maxsize)
        self._tables = [
            _Table(
                Job.of(table, elsewhere if table.servers else spec),
                first if table.at_start else _due(table, before),
            )
            for table in tables
        ]
        self._servers: dict[str, ServerState] = {}
        self._kept_since: dict[str, float] = {}
        """By server: start of the first evaluation that keeps it, on the recorder's clock."""
        self._values: dict[str, float] = {}
        self._latest: dict[str, float] = {}
        for outcome in before:
            replace_values(self._latest, outcome)
        self._threads: list[threading.Thread] = []
        self._closing = self._stopped = self._last = False
        self._changed = threading.Condition()

    def check(self, within_s: float) -> None:
        """Load every table's task, in the process that will evaluate it first. Raises ConfigError
        if a task cannot start, or they are not all loaded within ``within_s`` seconds."""
        deadline = time.monotonic() + within_s
        for table in self._tables:
            try:
                table.spare = _Process(table.job)
                outcome = table.spare.loaded(max(0.0, deadline - time.monotonic()))
            except (OSError, EOFError) as error:
                raise ConfigError(
                    f"evaluation {table.job.table.name!r} must load by"
                    " weight_sync.startup_deadline_s, its process failed:"
                    f" {error or type(error).__name__}"
                ) from error
            if isinstance(outcome, Failure):
                raise ConfigError(outcome.text)

    # Called by ServerSet.

    def set_server(self, state: ServerState) -> None:
        if state.url not in self.own:
            self._rollouts.set_server(state)
        with self._changed:
            self._servers[state.url] = state
            for table in self._tables:
                run = table.running
                if run is not None and run.url == state.url and state.version != run.version:
                    self._break(run, f"{run.url} left version {run.version}")
            # Safe to keep now: the lane that reports this state has not begun a newer image.
            self._begin(state)

    def remove_server(self, url: str) -> None:
        if url not in self.own:
            self._rollouts.remove_server(url)
        with self._changed:
            self._servers.pop(url, None)
            for table in self._tables:
                if table.running is not None and table.running.url == url:
                    self._break(table.running, f"{url} left the run")

    def fail(self, error: TitanGrpoError) -> None:
        self._rollouts.fail(error)

    # Called by rank 0's main thread.

    def take_values(self) -> dict[str, float]:
        """Return the metrics of the evaluations that ended since the last call."""
        with self._changed:
            values, self._values = self._values, {}
        return values

    def latest(self) -> dict[str, float]:
        """Return the metrics of each evaluation's last result. Any thread."""
        with self._changed:
            return dict(self._latest)

    def last(self, version: int) -> None:
        """Evaluate the last ``version``, which the servers hold, for tables with at_end. Wait for
        all evaluations until their deadlines, then end them."""
        with self._changed:
            self._stopped, self._last = False, True
            for table in self._tables:
                again = table.job.table.at_end and table.evaluated != version
                table.due = version if again else None
            for state in list(self._servers.values()):
                self._begin(state)
        self.wait_idle()
        with self._changed:
            self._stopped = True  # there is no time for a retry
            late = [table.running for table in self._tables]
            for each in late:
                if each is not None:
                    self._break(each, "it was not over in time")
            self._changed.wait_for(self._idle, END_S)  # their threads record that
        for table, run in zip(self._tables, late, strict=True):
            if table.due != version:
                continue
            why = (
                "no server that it may use holds that version"
                if run is None
                else f"that of version {run.version} was not over in time"
            )
            self._recorder.error(
                f"evaluation {table.job.table.name} of version {version}, the last, has no result:"
                f" {why}"
            )

    def wait_idle(self) -> None:
        """Wait until no evaluation runs, or the longest deadline has passed."""
        longest = max((table.job.table.whole_s for table in self._tables), default=0.0)
        running = [t.running for t in self._tables if t.running is not None]
        if running:
            shown = ", ".join(t.job.table.name for t in self._tables if t.running is not None)
            terminal.print_status(f"waiting for the evaluations {shown}, {longest:g} s at most")
        with self._changed:
            self._changed.wait_for(self._idle, longest)

    def stop_schedule(self) -> None:
        """Clear the schedule: until ``last`` no evaluation begins, no retry either."""
        with self._changed:
            self._stopped = True
            for table in self._tables:
                table.due = None

    def close(self) -> None:
        """End all processes and threads. Bounded; idempotent."""
        with self._changed:
            self._closing = True
            for table in self._tables:
                if table.running is not None:
                    self._break(table.running, "the run ended")
                if table.spare is not None:
                    table.spare.kill()
            threads = list(self._threads)
        deadline = time.monotonic() + END_S
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        for table in self._tables:
            if table.spare is not None:
                table.spare.end()

    # Under the condition.

    def _idle(self) -> bool:
        return all(table.running is None for table in self._tables)

    def _begin(self, state: ServerState) -> None:
        """Start the evaluations that are due on a server with this state."""
        if self._closing or state.version is None or not state.accepting:
            return
        for table in self._tables:
            wanted = table.job.table.servers
            here = state.url in wanted if wanted else state.url not in self.own
            due = table.due is not None and state.version >= table.due
            if not here or not due or table.running is not None:
                continue
            assert table.due is not None
            table.running = run = _Running(state.url, state.version, table.due)
            table.due = evaluation.next_due(table.job.table.every, state.version)
            self._kept_since.setdefault(state.url, self._recorder.now())
            self._keep(state.url)
            thread = threading.Thread(
                target=self._run,
                args=(table, run, state),
                name=table.job.table.name,
                daemon=True,
            )
            try:
                thread.start()
            except RuntimeError as error:
                # This host has no thread left now: the server must not stay on its version.
                name = table.job.table.name
                logger.warning("evaluation %s waits for a later version: %s", name, error)
                table.running, table.due = None, run.due
                self._let_go(run)
                continue
            self._threads = [t for t in self._threads if t.is_alive()] + [thread]

    def _let_go(self, run: _Running) -> None:
        """Let the lane of an evaluation's server go on, unless another one runs there."""
        if any(t.running is not None and t.running.url == run.url for t in self._tables):
            return
        since, now = self._kept_since.pop(run.url, None), self._recorder.now()
        if since is None:  # it goes on already: no thread was free for this try
            return
        if run.url not in self.own:  # an evaluation-only server delays no rollout
            self._recorder.record_span(names.HELD_S, since, now, run.url, version=run.version)
        self._go_on(run.url)

    def _break(self, run: _Running, why: str) -> None:
        run.broken = run.broken or why
        if run.process is not None:
            run.process.kill()

    # One thread per evaluation.

    def _run(self, table: _Table, run: _Running, state: ServerState) -> None:
        try:
            outcome = self._outcome(table, run, state)
        except (OSError, EOFError) as error:
            outcome = Failure(f"its process failed: {error or type(error).__name__}", True)
        except Exception as error:  # top of a thread: the server must not stay held
            logger.exception("evaluation %s", table.job.table.name)
            outcome = Failure(repr(error), True)
        if run.broken:
            outcome = Failure(run.broken, True)
        # Record before ``go_on``: a waiter for the server's next version then finds the result.
        # Not under the condition: lanes would wait for it while a line is printed.
        if isinstance(outcome, Evaluated):
            self._recorder.evaluated(msgspec.to_builtins(outcome))
            terminal.print_status(evaluation.line(outcome))
        elif not self._closing:
            what = f"evaluation {table.job.table.name} of version {run.version}"
            text = f"{what} has no result: {outcome.text}"
            self._recorder.error(text)
            terminal.print_status(text)
        with self._changed:
            table.running = None
            if isinstance(outcome, Evaluated):
                table.evaluated, table.tries = outcome.version, 0
                for values in (self._values, self._latest):
                    replace_values(values, outcome)
            else:
                self._try_again(table, run, outcome)
            self._let_go(run)
            self._changed.notify_all()
        self._prepare_next(table)

    def _prepare_next(self, table: _Table) -> None:
        """Start the next evaluation's process in advance, while no server is held for it."""
        with self._changed:
            more = table.due is not None or (table.job.table.at_end and not self._last)
            if not more or table.spare is not None or table.running is not None or self._closing:
                return
        try:
            spare: _Process | None = _Process(table.job, NICE)
        except OSError as error:
            logger.warning("the next evaluation starts its process when it is due: %s", error)
            return
        with self._changed:
            if not self._closing and table.spare is None:
                table.spare, spare = spare, None
        if spare is not None:
            spare.kill()
            spare.end()

    def _try_again(self, table: _Table, run: _Running, failure: Failure) -> None:
        """Schedule a failed evaluation again: on the same server if it still holds the version,
        else on the first server that reaches one. After ``stop_schedule`` do not: it would keep its
        server for as long again, and the flush that follows waits for that server."""
        table.tries += 1
        if self._stopped or not failure.again or table.tries >= TRIES:
            table.tries = 0
            return
        table.due = run.due
        state = self._servers.get(run.url)
        # Its lane is still kept on this version.
        if state is not None and state.version == run.version:
            self._begin(state)

    def _outcome(self, table: _Table, run: _Running, state: ServerState) -> Evaluated | Failure:
        with self._changed:
            process, table.spare = table.spare, None
        if process is not None and process.ended():
            process.end()
            process = None  # it died while it waited (out of memory, say): costs no try
        process = process or _Process(table.job, NICE)
        try:
            with self._changed:
                run.process = process
                if run.broken:
                    process.kill()
            asked = table.job.table
            try:
                return process.evaluate(state, asked.whole_s)
            except TimeoutError:
                process.kill()
                return Failure(f"it was not over after {asked.timeout_s:g} s (timeout_s)", False)
        finally:
            process.end()


class _Process:
    """Subprocess that loads a table's task, then evaluates one version. Used by one thread at a
    time, except ``kill``."""

    def __init__(self, job: Job, nice: int = 0) -> None:
        """Start the process, which begins to load. ``nice``: its niceness meanwhile. Raises
        OSError."""
        self._process, socket = start_module(
            "titan_grpo.rollout.evaluation",
            env=helper_environment(os.environ) | {"CUDA_VISIBLE_DEVICES": ""},
        )
        self._connection: Connection[Any, Any] = Connection(socket.detach())
        self._loaded = False
        try:
            if nice:  # at once: its imports take most of its processor time
                os.setpriority(os.PRIO_PROCESS, self._process.pid, nice)
            self._connection.send(job)
        except BaseException:
            self.kill()
            self.end()
            raise

    def loaded(self, within_s: float) -> Failure | None:
        """Wait until the task is loaded; return the Failure if it cannot be. Raises TimeoutError,
        and OSError or EOFError if the process fails."""
        if self._loaded:
            return None
        failure: Failure | None = self._answer(within_s)
        self._loaded = failure is None
        return failure

    def evaluate(self, state: ServerState, within_s: float) -> Evaluated | Failure:
        """Evaluate on a server. Raises as ``loaded``."""
        deadline = time.monotonic() + within_s
        if failure := self.loaded(within_s):
            return failure
        os.setpriority(os.PRIO_PROCESS, self._process.pid, NICE)
        self._connection.send(state)
        outcome: Evaluated | Failure = self._answer(max(0.0, deadline - time.monotonic()))
        return outcome

    def _answer(self, within_s: float) -> Any:
        if not self._connection.poll(within_s):
            raise TimeoutError(f"no answer within {within_s:g} s")
        try:
            # no deadline: the answer has begun to arrive, or the process has ended.
            return self._connection.recv()
        except EOFError as error:
            status = None
            with suppress(subprocess.TimeoutExpired):
                status = wait_process(self._process, END_S)
            raise EOFError(f"it ended with {how_ended(status)}") from error

    def ended(self) -> bool:
        return self._process.poll() is not None

    def kill(self) -> None:
        """Kill the process, from any thread. That closes its connections, so servers abort its
        requests."""
        self._process.kill()

    def end(self) -> None:
        """Wait for the end of a process that has answered or was killed. Bounded: it may survive
        its kill for a while. Idempotent."""
        self._connection.close()
        try:
            wait_process(self._process, END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            # Killed, it may still wait for a disk, say: nothing here depends on its end.
            with suppress(subprocess.TimeoutExpired):
                wait_process(self._process, END_S)
