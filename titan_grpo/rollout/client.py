"""Rank 0's handle of its rollouts. child.py has the transport to a rollout process as a child,
remote.py the one to a service."""

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from itertools import accumulate, count, islice
from typing import Any, cast

from titan_grpo.config.task import OUTSIDE
from titan_grpo.engines.http import ServerAccess
from titan_grpo.engines.server import ServerControl
from titan_grpo.errors import (
    ConfigError,
    DataError,
    ServerUnreachable,
    TaskError,
    TitanGrpoError,
)
from titan_grpo.protocol.messages import ServerState
from titan_grpo.rollout import messages
from titan_grpo.rollout.child import LocalTransport
from titan_grpo.rollout.engine_calls import RemoteControl
from titan_grpo.rollout.messages import (
    Cursor,
    Message,
    RolloutSpec,
    RolloutStopped,
    SessionLost,
    WorkerTransport,
)
from titan_grpo.rollout.records import GroupRecorder
from titan_grpo.samples import Group
from titan_grpo.subprocesses import unbroken

logger = logging.getLogger(__name__)

PARTS = 6
"""Parts of a batch's deadline. After each but the last, a line says what the batch waits for."""

FRUITLESS = 3
"""So many killed workers in a row that made no group end the run: the next would end like them. One
or two may have been killed for a reason that is gone."""

DRAIN_MARGIN_S = 5.0
"""Seconds that a drain waits for the rollout process's answer beyond its own deadline."""


class RolloutsLate(RolloutStopped):
    """Too few groups were ready by the deadline: the servers do not take requests, or hold no
    version recent enough."""


class RolloutClient:
    """Client of the worker at the other end of a transport: sends it versions, takes finished
    groups. Only next_batch, start, drain, engine_call, in_flight and close block, with deadlines.

    A worker that lost the session (``SessionLost``) gets the state again, if it is not the third in
    a row that was killed (FRUITLESS). Finished groups keep their places in the admission;
    unfinished groups are made again.
    """

    def __init__(
        self,
        spec: RolloutSpec,
        record_path: str = "",
        transport: WorkerTransport | None = None,
        report: Callable[[str], None] = logger.warning,
    ) -> None:
        """``transport``: None for a child process. ``report``: called with a line, on a thread of
        the transport, when a session was lost."""
        self._report = report
        self._spec = spec
        self._transport: WorkerTransport = transport or LocalTransport()
        self._cursor = Cursor.from_state(spec.state.get("cursor", {}))
        self._end = self._cursor.end
        """Index after the last prompt that a step took."""
        self._own: Counter[str] = Counter(spec.state.get("counters", {}))
        self._theirs: dict[str, int] = {}
        self._record = (
            GroupRecorder(record_path, spec.base_version, self._cursor) if record_path else None
        )
        self._ready: dict[int, messages.GroupDone] = {}
        self._left_out: list[float] = []
        self._error: TitanGrpoError | None = None
        self._running = self._started = self._closing = self._skip_drains = False
        self._fruitless = 0
        """Killed workers since the last group."""
        self._numbers = count()
        self._asked: dict[int, tuple[messages.ToWorker, Future[messages.Answer]]] = {}
        """Messages that wait for an answer, by number."""
        self._servers: dict[str, ServerState] = {}
        self._version = spec.base_version
        self._places = 0
        """Groups used since the start, minus those that made no version."""
        self._changed = threading.Condition()

    def start(self, timeout_s: float) -> None:
        """Start the worker and wait until its task and tokenizer are loaded.

        Raises the ConfigError or DataError of the task or tokenizer, RolloutStopped past the
        deadline.
        """
        self._running = True
        with unbroken():
            self._transport.start(self._spec, self._on_message)
        with self._changed:
            self._changed.wait_for(lambda: self._started or self._error is not None, timeout_s)
            self._raise_latched()
            if not self._started:
                raise RolloutStopped(
                    "the rollout process must load task, dataset and tokenizer within"
                    f" {timeout_s:.0f} s, they are not there; raise weight_sync.startup_deadline_s"
                )

    def set_server(self, state: ServerState) -> None:
        """Pass on what a server holds and whether it takes new groups. Any thread; never blocks."""
        with self._changed:
            self._servers[state.url] = state
            self._transport.send(state)

    def remove_server(self, url: str) -> None:
        """Remove a server from the run; its groups are made elsewhere. Any thread; never blocks."""
        with self._changed:
            self._servers.pop(url, None)
            for counters in (self._own, self._theirs):
                messages.forget(counters, url)
            self._transport.send(messages.ServerLeft(url))

    def drain(self, url: str, within_s: float) -> None:
        """Wait up to ``within_s`` seconds for the server's requests in flight; then the rest are
        cancelled and made again. The ledger keeps new groups away meanwhile. Any thread. Returns at
        once if the run is ending or the worker is gone."""

        def drain(number: int) -> messages.Drain:
            return messages.Drain(url, number, 0.0 if self._skip_drains else within_s)

        with suppress(ServerUnreachable):
            self._call(url, "drain", drain, within_s + DRAIN_MARGIN_S)

    def skip_drains(self) -> None:
        """End current drains and make later ones return at once: no batch will be taken any more.
        Any thread; never blocks."""
        with self._changed:
            self._skip_drains = True
            for asked, _ in self._asked.values():
                if isinstance(asked, messages.Drain):
                    at_once = messages.Drain(asked.url, asked.number, 0.0)
                    self._transport.send(at_once, DRAIN_MARGIN_S)

    def control(self, engine: str, access: ServerAccess) -> ServerControl:
        """Return a ServerControl like make_control's; the worker makes its calls with its own
        keys."""
        # The cast: RemoteControl finds the interface's methods by name, at run time.
        return cast(ServerControl, RemoteControl(self, engine, access))

    def engine_call(
        self, url: str, method: str, arguments: tuple[Any, ...], within_s: float
    ) -> messages.Answer:
        """Let the worker call a server (messages.EngineCall), and wait for the outcome. Any thread.

        Raises ServerUnreachable if no outcome comes within ``within_s`` seconds, or the worker is
        gone.
        """

        def call(number: int) -> messages.EngineCall:
            return messages.EngineCall(number, url, method, arguments, within_s)

        return self._call(url, method, call, within_s)

    def _call(
        self, url: str, what: str, ask: Callable[[int], messages.ToWorker], within_s: float
    ) -> messages.Answer:
        """Send the message that ``ask`` makes for a number, and wait for its answer. Raises
        ServerUnreachable if none comes within ``within_s`` seconds, or the worker is gone."""
        future: Future[messages.Answer] = Future()
        with self._changed:
            if self._error is not None or self._closing or not self._running:
                raise ServerUnreachable(
                    f"{url}: {what} was not called: the rollouts have ended, and engine calls with"
                    " them"
                )
            number = next(self._numbers)
            message = ask(number)
            self._asked[number] = message, future
            self._transport.send(message, within_s)
        try:
            return future.result(within_s)
        except TimeoutError:
            raise ServerUnreachable(
                f"{url}: no outcome of {what} came from the rollouts within {within_s:g} s"
            ) from None
        finally:
            with self._changed:
                self._asked.pop(number, None)

    def engine_tell(self, url: str, method: str, arguments: tuple[Any, ...]) -> None:
        """Make an engine call without an outcome. Never blocks."""
        with self._changed:
            if self._running:
                number = next(self._numbers)
                self._transport.send(
                    messages.EngineCall(number, url, method, arguments, DRAIN_MARGIN_S)
                )

    def in_flight(self, timeout_s: float = 1.0) -> dict[str, int]:
        """Return the requests in flight by server URL; empty without an answer in ``timeout_s``."""
        try:
            return dict(self._call("all servers", "in_flight", messages.AskLoad, timeout_s).value)
        except ServerUnreachable:
            return {}

    def set_trainer_version(self, version: int) -> None:
        """Pass on the trainer's version; the worker aborts groups in flight that are too stale for
        it. Never blocks."""
        with self._changed:
            self._version = version
            self._transport.send(messages.TrainerVersion(version))

    def next_batch(self, version: int, count: int, timeout_s: float) -> list[Group]:
        """Return ``count`` groups for the trainer at ``version``, in the order of
        ``rollout.consume``, none staler than the bound (see Completion.fresh_enough).

        Groups from outside may have any size; then return as many as together have the completions
        of ``count`` groups. Groups too stale are dropped, counted (``dropped.stale``) and made
        again. A long wait is named (PARTS). Raises RolloutsLate past the deadline, RolloutStopped
        if the process died, and the ConfigError, DataError or TaskError that ended it.
        """
        began, part = time.monotonic(), 1
        self.set_trainer_version(version)
        with self._changed:
            self._drop_stale(tuple(self._ready))
            self._raise_latched()
            while not (chosen := self._chosen(count)):
                passed_s = timeout_s * part / PARTS
                left_s = began + passed_s - time.monotonic()
                if not self._changed.wait_for(self._more(count), left_s):
                    if part == PARTS:
                        raise self._late(version, count, timeout_s)
                    self._name_wait(version, count, passed_s, timeout_s)
                    part += 1
                self._raise_latched()
            done = [self._ready.pop(index) for index in chosen]
            for item in done:
                self._cursor.use(item.ticket.index)
            self._end = max(self._end, *(index + 1 for index in chosen))
            self._own["consumed_groups"] += len(done)
            self._places += len(done)
            self._transport.send(messages.Used(tuple(chosen)))
        return [item.group for item in done]

    def record(self, version: int, groups: Sequence[Group], whole: bool = True) -> None:
        """Write the groups of the step from ``version`` if ``rollout.record_path`` is set
        (``whole``: see records.Batch). Raises StorageError if the file cannot be written."""
        if self._record is not None:
            self._record.write(version, groups, whole)

    def _chosen(self, count: int) -> list[int]:
        """Return the prompt indices of the groups for a step; none until all are ready."""
        spec = self._spec
        if self._in_order:
            started = self._started_for(count)
            return started if all(index in self._ready for index in started) else []
        ready = consumption_order(self._ready, spec.consume)
        if spec.source == "task":
            return ready[:count] if len(ready) >= count else []
        sizes = accumulate(len(self._ready[index].group.completions) for index in ready)
        enough = next((n for n, size in enumerate(sizes, 1) if size >= count * spec.group_size), 0)
        return ready[:enough]

    def _more(self, count: int) -> Callable[[], bool]:
        """Return the predicate "choose again". It runs after every message, and a step may have
        thousands of groups: so it does not scan them all."""
        missing = [i for i in self._started_for(count) if i not in self._ready]
        used, ready = self._cursor.used, len(self._ready)
        least = count if self._spec.source == "task" else 1

        def more() -> bool:
            if self._error is not None or self._cursor.used != used:
                return True
            if not self._in_order:
                return len(self._ready) >= max(least, ready + 1)
            while missing and missing[-1] in self._ready:
                missing.pop()
            return not missing

        return more

    @property
    def _in_order(self) -> bool:
        # Groups from outside have no order of starts, only one of arrival.
        return self._spec.source == "task" and self._spec.consume == "started"

    def _started_for(self, count: int) -> list[int]:
        return list(islice(self._cursor.unused(), count))

    def take_left_out(self) -> list[float]:
        """Return the rewards of the groups that were left out by choice since the last call."""
        with self._changed:
            taken, self._left_out = self._left_out, []
        return taken

    def used_without_version(self, count: int) -> None:
        """Let ``count`` more groups start, since as many consumed ones made no version (left out of
        the batch, or their step was skipped)."""
        with self._changed:
            self._own["unversioned_groups"] += count
            self._places -= count
            self._transport.send(messages.Unversioned(count))

    def counters(self) -> dict[str, int]:
        """Return the counts so far, those before a resume included: ``consumed_groups``,
        ``unversioned_groups``, ``requests``, ``tokens``, ``tokens.<url>`` of one server since it
        joined, ``commits``, requests ``in_flight_at_commits``, ``outages``, ``interrupted``,
        ``skipped``, ``moved`` (groups whose server left, stood still or was drained), ``resumed``
        (completions that went on from ``resumed_tokens`` tokens), ``dropped.<reason>``,
        ``thrown_tokens``, completions by length as ``made.<n>`` (messages.length_range),
        ``sessions_lost``, ``late_answers``; and now: ``in_flight.<url>`` requests, ``ready``
        groups."""
        with self._changed:
            both = Counter(self._own)
            both.update(self._theirs)
            return {**both, "ready": len(self._ready)}

    def state(self) -> dict[str, Any]:
        """Return a JSON-able state for an exact resume (``RolloutSpec.state``), without the counts
        of single servers: they may be gone by then. Call it at a step boundary.

        Prompts past the last one that a step took are unused in it, those left out or given up
        too: the accepted groups there are made again, and so must have the same chance as these.
        """
        counts = {n: c for n, c in self.counters().items() if not messages.server_of(n)}
        del counts["ready"]
        with self._changed:
            cursor, rows = self._cursor.before(self._end), self._spec.rows()
            return {"cursor": cursor.state(), "counters": counts, "rows": rows}

    def close(self, deadline_s: float = 10.0) -> None:
        """End the worker within the deadline. Idempotent; raises nothing."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._transport.close(deadline_s)
        with self._changed:
            self._running = False
            self._lose("the rollouts have ended, and engine calls with them")
        if self._record is not None:
            self._record.close()

    def _on_message(self, message: Message) -> None:
        match message:
            case TitanGrpoError():
                self.fail(message)
                return
            case messages.Failed(kind, text):
                kinds = {"config": ConfigError, "data": DataError, "task": TaskError}
                self.fail(kinds.get(kind, RolloutStopped)(text))
                return
            case SessionLost():
                self._resync(message)
                return
        with self._changed:
            match message:
                case messages.Ready():
                    self._started = True
                case messages.Answer(number):
                    _, future = self._asked.pop(number, (None, None))
                    if future is None:
                        self._own["late_answers"] += 1
                    elif not future.done():
                        future.set_result(message)
                case messages.GroupDone(ticket, _, counters):
                    self._fruitless = 0
                    self._count(counters)
                    self._ready[ticket.index] = message
                    self._drop_stale((ticket.index,))
                case messages.LeftOut(index, rewards, counters):
                    self._fruitless = 0
                    self._count(counters)
                    self._cursor.use(index)
                    self._left_out += rewards
                case messages.Event(text, counters, skipped):
                    self._count(counters)
                    if skipped is not None:
                        self._cursor.use(skipped)
                    if text:
                        logger.warning("rollout: %s", text)
            self._changed.notify_all()

    def _count(self, counters: Mapping[str, int]) -> None:
        # A message on its way when a server left still names it.
        for name, n in counters.items():
            url = messages.server_of(name)
            if not url or url in self._servers:
                self._theirs[name] = n

    def _resync(self, lost: SessionLost) -> None:
        with self._changed:
            self._fruitless += lost.killed
            if self._fruitless >= FRUITLESS:
                text = f"{lost.why}; {FRUITLESS} in a row were killed, and made no group between"
                self.fail(RolloutStopped(f"{text}. Its last output says more"))
                return
            theirs, self._theirs = self._theirs, {}
            self._own.update({n: c for n, c in theirs.items() if messages.IN_FLIGHT not in n})
            self._lose(f"{lost.why}; it was making the call, whose outcome is unknown")
            self._own["sessions_lost"] += 1
            spec = replace(
                self._spec,
                state={"cursor": self._cursor.state()},
                places=self._places,
                waiting={index: len(done.group.completions) for index, done in self._ready.items()},
                sessions_lost=self._own["sessions_lost"],
            )
            lost.resync(spec, (messages.TrainerVersion(self._version), *self._servers.values()))
            self._changed.notify_all()
        self._report(
            f"{lost.why}: it begins again; {len(spec.waiting)} finished groups are kept, others are"
            " made again"
        )

    def _drop_stale(self, indices: Sequence[int]) -> None:
        """Give back the finished groups that are too stale for the trainer, to be made again."""
        oldest = self._version - self._spec.max_staleness
        share = self._spec.max_stale_token_share
        stale = [
            index
            for index in indices
            if not all(c.fresh_enough(oldest, share) for c in self._ready[index].group.completions)
        ]
        for index in stale:
            done = self._ready.pop(index)
            self._own["dropped.stale"] += 1
            self._own["thrown_tokens"] += sum(c.num_sampled for c in done.group.completions)
            self._transport.send(messages.GiveBack(done.ticket))

    def _late(self, version: int, count: int, timeout_s: float) -> RolloutsLate:
        counts = dict(self._own) | self._theirs
        return RolloutsLate(
            f"{self._num_ready(count)} of {count} groups for version {version} were ready after"
            f" {timeout_s:g} s (rollout.batch_timeout_s); counts so far: {counts}. {self._advice()}"
        )

    def _name_wait(self, version: int, count: int, passed_s: float, timeout_s: float) -> None:
        text = (
            f"{self._num_ready(count)} of {count} groups for version {version} are ready after"
            f" {passed_s:g} s, and the run ends after {timeout_s:g} s (rollout.batch_timeout_s)."
            f" {self._advice()}"
        )
        logger.warning("rollout: %s", text)

    def _num_ready(self, count: int) -> int:
        if self._in_order:
            return sum(index in self._ready for index in self._started_for(count))
        return len(self._ready)

    def _advice(self) -> str:
        """Return what to look at if groups do not come."""
        spec = self._spec
        match spec.source:
            case "push":
                return (
                    "Check that environments run, and push groups to the address in"
                    f" rollout.push_address ({spec.push_address})"
                )
            case "atropos":
                return f"Check that environments run, and send groups to {spec.atropos_url}"
        advice = "Check that the servers take requests and hold a recent version"
        if spec.agent == OUTSIDE:
            advice += (
                ", and that each episode that an agent takes gets its reward (one without ends"
                f" after rollout.task_timeout_s = {spec.task_timeout_s:g})"
            )
        counts = dict(self._own) | self._theirs
        if left_out := sum(counts.get(f"dropped.{r}", 0) for r in ("not_accepted", "too_short")):
            advice += (
                f"; {left_out} groups were left out by rollout.accept, a task's should_accept or"
                " rollout.min_completion_tokens: let these keep more, or raise"
                " rollout.batch_timeout_s"
            )
        return advice

    def fail(self, error: TitanGrpoError) -> None:
        """Make ``next_batch`` raise ``error`` from now on. Any thread; never blocks."""
        with self._changed:
            if self._error is None and not self._closing:
                self._error = error
            self._lose(f"the rollouts have ended, and engine calls with them: {error}")
            self._changed.notify_all()

    def _lose(self, why: str) -> None:
        """Fail all waiting calls, whose outcome at the server is unknown."""
        asked, self._asked = self._asked, {}
        for _, future in asked.values():
            if not future.done():
                future.set_exception(ServerUnreachable(why))

    def _raise_latched(self) -> None:
        if self._error is not None:
            raise self._error
        if not self._running:
            raise RolloutStopped(
                "the rollout client is not running: start it first, and do not use it after close"
            )


def consumption_order(ready: Mapping[int, messages.GroupDone], consume: str) -> list[int]:
    """Return the prompt indices of finished groups in the order in which steps take them:
    "freshest" by newest weights, then by prompt; else by prompt."""
    if consume == "freshest":
        return sorted(ready, key=lambda index: (-ready[index].group.version, index))
    return sorted(ready)
