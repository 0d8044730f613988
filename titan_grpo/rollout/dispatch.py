"""How many groups a task's own errors may cost before the run stops. Pure.

The rollout process's one decision loop: start groups where admission allows, and settle what
becomes of them."""

import asyncio
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass

from titan_grpo.engines.http import AsyncDriver, HttpRefused
from titan_grpo.errors import DataError, PeerError
from titan_grpo.protocol import admission
from titan_grpo.protocol.admission import Admission, too_stale
from titan_grpo.rollout import messages
from titan_grpo.rollout.messages import Ticket
from titan_grpo.rollout.partial import Partial, oldest, worth_keeping
from titan_grpo.rollout.pool import Pool, Server
from titan_grpo.rollout.sampler import GroupDropped, Interrupted, Sampler
from titan_grpo.rollout.spec import RolloutSpec
from titan_grpo.rollout.task_runner import TaskFailed

WINDOW = 100
"""Groups in a row that the budget counts over."""


@dataclass(frozen=True, slots=True)
class ErrorBudget:
    """``allowed`` groups of any WINDOW in a row may end with an error of the task.

    Only groups that the task had its say on are counted: what servers do to a group is neither an
    error nor a success here. ``errors``: numbers, among the counted groups, of those of the last
    WINDOW that ended with one.
    """

    allowed: int
    groups: int = 0
    errors: tuple[int, ...] = ()

    def after(self, failed: bool) -> "ErrorBudget":
        """With one more group counted.

        >>> once = ErrorBudget(1).after(True)
        >>> once.spent, once.after(False).after(True).spent
        (False, True)
        """
        number = self.groups + 1
        errors = (*self.errors, number) if failed else self.errors
        return ErrorBudget(self.allowed, number, tuple(n for n in errors if n > number - WINDOW))

    @property
    def spent(self) -> bool:
        """Whether there were more errors than allowed: the run must stop."""
        return len(self.errors) > self.allowed


MAX_DROPS = 3
MAX_OUTAGES = 20
MAX_SKIPS_IN_A_ROW = 16
"""Prompts given up for their drops with no usable group in between: then it is not the prompts, and
going on would burn through the whole sequence."""

BAD_REQUEST = frozenset({400, 413, 422})
"""Status codes that blame the request (a prompt too long, say), not the server."""


@dataclass(slots=True)
class Running:
    """A group being made: its prompt, what it has so far, where, and the oldest version that made
    or makes any of it."""

    ticket: Ticket
    parts: list[Partial]
    server: Server
    version: int
    given_up: bool = False
    """A drain did not wait for it any longer."""


class Dispatcher:
    """Starts groups, retries, drops, skips. ``send`` carries results to the trainer and must not
    block.

    All methods run in the loop's thread. An exception that is neither a server's nor a drop (a bug,
    or one of the task's beyond its budget) goes to ``fail`` and ends the process.
    """

    def __init__(
        self,
        spec: RolloutSpec,
        sampler: Sampler,
        send: Callable[[messages.FromWorker], None],
        fail: Callable[[BaseException], None],
        api_key: str = "",
    ) -> None:
        self._spec, self._sampler, self._send, self._fail, self._api_key = (
            spec,
            sampler,
            send,
            fail,
            api_key,
        )
        self._pool = Pool(spec.max_concurrent_requests)
        self._admission = Admission(
            spec.base_version, spec.prompts_per_step, spec.max_staleness, spec.places
        )
        self._fresh = spec.unused_prompts()
        self._again: deque[tuple[Ticket, str]] = deque()
        self._running: dict[asyncio.Task[None], Running] = {}
        self._drivers: dict[str, AsyncDriver] = {}
        self._closings: set[asyncio.Task[None]] = set()
        self._drains: dict[int, str] = {}
        self._oldest_usable = spec.base_version - spec.max_staleness
        self._counts: Counter[str] = Counter()
        self._skips_in_a_row = 0
        self._task_errors = ErrorBudget(spec.task_error_budget)
        self._closing = False

    def on(self, message: messages.ToWorker) -> None:
        """Take one message of the trainer."""
        if isinstance(message, messages.ServerState):
            self._pool.set(message)
        elif isinstance(message, messages.ServerLeft):
            self._let_go(message.url)
        elif isinstance(message, messages.Drain):
            self._drain(message)
        elif isinstance(message, messages.AskLoad):
            self._send(messages.Load(self._pool.in_flight()))
        elif isinstance(message, messages.TrainerVersion):
            self._abort_useless(message.version)
        elif isinstance(message, messages.GiveBack):
            self._settle(message.ticket.stale(), "")
        elif isinstance(message, messages.Unversioned):
            for _ in range(message.count):
                self._admission, _ = admission.step(self._admission, admission.GiveBack())
        self._pump()

    async def close(self) -> None:
        """Abort everything in flight and close the connections."""
        self._closing = True
        running = list(self._running)
        for task in running:
            task.cancel()
        await asyncio.gather(*running, *self._closings, return_exceptions=True)
        for driver in self._drivers.values():
            await driver.close()

    def _pump(self) -> None:
        if self._closing:
            return
        now = asyncio.get_running_loop().time()
        while True:
            avoid = self._again[0][1] if self._again else ""
            server = self._pool.pick(self._spec.group_size, now, self._admission.may_start, avoid)
            if server is None or server.version is None:
                return
            ticket = self._again.popleft()[0] if self._again else Ticket(next(self._fresh))
            self._admission, _ = admission.step(self._admission, admission.Start(server.version))
            had = ticket.parts or (Partial(),) * self._spec.group_size
            parts = worth_keeping(
                had, server.version, self._oldest_usable, self._spec.in_flight_weight_updates
            )
            first = oldest(parts)
            self._start(
                Running(
                    ticket,
                    list(parts),
                    server,
                    server.version if first is None else min(first, server.version),
                )
            )

    def _start(self, run: Running) -> None:
        resumed = [
            len(part.token_ids) for part in run.parts if part.token_ids and not part.finish_reason
        ]
        self._counts["resumed"] += len(resumed)
        self._counts["resumed_tokens"] += sum(resumed)
        run.server.in_flight += self._spec.group_size
        task = asyncio.get_running_loop().create_task(self._make(run))
        self._running[task] = run
        task.add_done_callback(self._ended)

    async def _make(self, run: Running) -> None:
        answers = sum(part.answers for part in run.parts)
        self._counts["requests"] += sum(
            not (part.finish_reason or part.waits) for part in run.parts
        )
        try:
            group = await self._sampler.group(
                run.ticket, run.parts, run.server, self._driver(run.server.url)
            )
        finally:
            self._counts["requests"] += sum(part.answers for part in run.parts) - answers
        self._skips_in_a_row = 0
        self._task_errors = self._task_errors.after(failed=False)
        self._counts["tokens"] += sum(c.num_sampled for c in group.completions)
        self._send(messages.GroupDone(run.ticket.done(), group, dict(self._counts)))

    def _ended(self, task: asyncio.Task[None]) -> None:
        run = self._running.pop(task)
        run.server.in_flight -= self._spec.group_size
        if self._closing:
            return
        self._answer_drains(run.server.url)
        leaves = run.server.left or run.given_up
        # no deadline: the task has ended: this is called by its callback, or after its group
        if leaves and (
            task.cancelled() or isinstance(task.exception(), PeerError | GroupDropped | Interrupted)
        ):
            # Its server left the run, or commits a version: made elsewhere, and no budget pays for
            # it.
            self._counts["moved"] += 1
            self._settle(run.ticket.moved(tuple(run.parts)), "")
        elif task.cancelled():
            self._counts["dropped.stale_in_flight"] += 1
            self._say(
                f"group of prompt {run.ticket.index} from {run.server.url} is too stale to be used,"
                " and is made again"
            )
            self._settle(run.ticket.stale(), "")
        # no deadline: the task has ended: this is called by its callback, or after its group
        elif (error := task.exception()) is None:
            self._pool.succeeded(run.server)
        elif isinstance(error, GroupDropped):
            self._drop(run, error.reason)
        elif isinstance(error, TaskFailed):
            self._task_error(run, error)
        elif isinstance(error, HttpRefused) and error.status in BAD_REQUEST:
            self._drop(run, "refused", str(error))
        elif isinstance(error, PeerError):
            self._outage(run, error)
        elif isinstance(error, Interrupted):
            # Somebody aborted requests; that is no reason to give the server a rest.
            self._counts["interrupted"] += 1
            self._say(f"prompt {run.ticket.index} goes on: {error}")
            self._settle(run.ticket.failed(tuple(run.parts)), run.server.url)
        else:
            self._fail(error)
            return
        self._pump()

    def _let_go(self, url: str) -> None:
        self._pool.remove(url)
        tasks = [
            task for task, run in self._running.items() if run.server.left and run.server.url == url
        ]
        for task in tasks:
            task.cancel()
        driver = self._drivers.pop(url, None)
        if driver is not None:
            closing = asyncio.get_running_loop().create_task(self._close_after(tasks, driver))
            self._closings.add(closing)
            closing.add_done_callback(self._closings.discard)

    def _drain(self, asked: messages.Drain) -> None:
        self._drains[asked.number] = asked.url
        asyncio.get_running_loop().call_later(asked.within_s, self._give_up, asked)
        self._answer_drains(asked.url)

    def _give_up(self, asked: messages.Drain) -> None:
        """The drain has waited long enough."""
        if asked.number in self._drains:
            for task, run in self._running.items():
                if run.server.url == asked.url:
                    run.given_up = True
                    task.cancel()

    def _answer_drains(self, url: str) -> None:
        if not any(run.server.url == url for run in self._running.values()):
            for number in [number for number, drained in self._drains.items() if drained == url]:
                del self._drains[number]
                self._send(messages.Drained(number))

    async def _close_after(self, tasks: list[asyncio.Task[None]], driver: AsyncDriver) -> None:
        await asyncio.gather(*tasks, return_exceptions=True)
        await driver.close()

    def _drop(self, run: Running, reason: str, detail: str = "") -> None:
        self._counts[f"dropped.{reason}"] += 1
        text = (
            f"group of prompt {run.ticket.index} from {run.server.url} dropped: {detail or reason}"
        )
        self._say(text)
        ticket = run.ticket.dropped()
        self._settle(ticket, "")
        self._skips_in_a_row += ticket.drops >= MAX_DROPS
        if self._skips_in_a_row >= MAX_SKIPS_IN_A_ROW:
            self._fail(
                DataError(
                    f"{MAX_SKIPS_IN_A_ROW} prompts in a row gave no usable group; the last one:"
                    f" {text}"
                )
            )

    def _task_error(self, run: Running, failed: TaskFailed) -> None:
        self._task_errors = self._task_errors.after(failed=True)
        if not self._task_errors.spent:
            self._drop(run, "task_error", str(failed))
            return
        allowed, error = self._spec.task_error_budget, failed.error
        error.add_note(
            f"{failed}; rollout.task_error_budget allows {allowed} of any {WINDOW} groups in a row"
        )
        self._fail(error)

    def _outage(self, run: Running, error: PeerError) -> None:
        self._counts["outages"] += 1
        loop = asyncio.get_running_loop()
        loop.call_at(self._pool.failed(run.server, loop.time()), self._pump)
        self._say(f"prompt {run.ticket.index} will be retried: {error}")
        self._settle(run.ticket.failed(tuple(run.parts)), run.server.url)

    def _settle(self, ticket: Ticket, avoid: str) -> None:
        """Give the place back; make the group again, or give the prompt up when its budget is
        spent."""
        self._admission, _ = admission.step(self._admission, admission.GiveBack())
        if ticket.drops >= MAX_DROPS or ticket.outages >= MAX_OUTAGES:
            self._counts["skipped"] += 1
            text = (
                f"prompt {ticket.index} skipped after {ticket.drops} drops and {ticket.outages}"
                " outages without a token"
            )
            self._send(messages.Event(text, dict(self._counts), skipped=ticket.index))
        else:
            self._again.append((ticket, avoid))

    def _abort_useless(self, version: int) -> None:
        self._oldest_usable = version - self._spec.max_staleness
        for task, run in self._running.items():
            if too_stale(run.version, version, self._spec.max_staleness):
                task.cancel()

    def _driver(self, url: str) -> AsyncDriver:
        if url not in self._drivers:
            self._drivers[url] = AsyncDriver(url, self._api_key, self._spec.max_concurrent_requests)
        return self._drivers[url]

    def _say(self, text: str) -> None:
        self._send(messages.Event(text, dict(self._counts)))
