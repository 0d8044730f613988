"""Decision loop of the rollout process: start groups as admission allows, handle their outcomes."""

import asyncio
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from titan_grpo.algorithm.advantages import by_episode
from titan_grpo.engines.http import AsyncDriver, HttpRefused
from titan_grpo.errors import DataError, PeerError
from titan_grpo.protocol.admission import GiveUp, Unversioned, Used, too_stale
from titan_grpo.protocol.messages import ServerState
from titan_grpo.rollout import messages
from titan_grpo.rollout.messages import RolloutSpec, Ticket
from titan_grpo.rollout.sampler import (
    Attempt,
    GroupDropped,
    Interrupted,
    NotAccepted,
    OtherWeights,
    PromptUnfit,
    Sampler,
)
from titan_grpo.rollout.schedule import QUIET_S, Durations, Fleet, Room, Server, Spread, Starts
from titan_grpo.rollout.task_runner import TaskFailed, TaskRunner
from titan_grpo.samples import NO_TOKENS, Completion, Group

WINDOW = 100
"""Number of latest groups over which ``rollout.task_error_budget`` counts errors."""

MAX_DROPS = 3
MAX_OUTAGES = 20
MAX_SKIPS_IN_A_ROW = 16
"""Limit of prompts skipped for their drops, and of those for their outages, without a usable group
in between. So many in a row point to a fault elsewhere; continuing would use up the whole sequence
of prompts."""

HELD_UP_S = 5.0
"""Seconds without a turn of the loop from which that is reported."""

ADMIT_S = 0.02
"""Seconds in which the prompts of further groups are made in one turn of the loop."""

BAD_REQUEST = frozenset({400, 413, 422})
"""Status codes of a faulty request (a prompt that is too long, say), not of a faulty server."""


@dataclass(slots=True, eq=False, kw_only=True)
class Running(Attempt):
    """Group in flight. ``version``: the oldest that its tokens depend on."""

    version: int
    began_s: float
    requests: int
    """Requests that it counts for on its server: one for each completion that has not ended."""
    freed: bool = False
    """Whether its requests are over: the server has no part in its rewards."""
    moved: bool = False
    """Whether it was cancelled to go on elsewhere: its server was stuck, or a drain took long."""


class Dispatcher:
    """State machine that starts, retries, drops and skips groups.

    ``send`` passes results to the trainer and must not block. ``connect`` makes the driver for a
    server's URL. ``fail`` gets errors that must end the process: bugs, too many skipped prompts,
    and task errors beyond the budget. All methods run in the event loop's thread.
    """

    def __init__(
        self,
        spec: RolloutSpec,
        sampler: Sampler,
        runner: TaskRunner,
        send: Callable[[messages.FromWorker], None],
        fail: Callable[[BaseException], None],
        connect: Callable[[str], AsyncDriver],
    ) -> None:
        self._spec, self._sampler, self._connect = spec, sampler, connect
        self._send, self._fail = send, fail
        self._fleet, self._durations, self._spread = Fleet(), Durations(), Spread()
        self._starts = Starts(spec, runner, self._durations)
        self._running: dict[asyncio.Task[None], Running] = {}
        self._drivers: dict[str, AsyncDriver] = {}
        self._closings: set[asyncio.Task[None]] = set()
        self._drains: dict[int, str] = {}
        self._oldest_usable = spec.base_version - spec.max_staleness
        self._counts = messages.Counters()
        self._in_a_row: Counter[str] = Counter()
        """Skipped prompts since the last usable group, by cause."""
        self._task_errors: deque[bool] = deque(maxlen=WINDOW)
        """Whether each of the last groups ended with a task error. Server failures do not count."""
        self._closing = self._pumping = self._looking = False
        self._held_up_s = 0.0
        """The longest time without a turn of the loop that was reported."""

    def on(self, message: messages.ToWorker) -> None:
        match message:
            case ServerState():
                self._note_commit(message)
                self._fleet.note(message, asyncio.get_running_loop().time())
                self._note_in_flight(message.url)
            case messages.ServerLeft():
                self._remove(message.url)
            case messages.Drain():
                self._drains[message.number] = message.url
                asyncio.get_running_loop().call_later(message.within_s, self._end_drain, message)
                self._answer_drains(message.url)
            case messages.AskLoad():
                in_flight = {server.url: server.in_flight for server in self._fleet}
                self._send(messages.Answer(message.number, in_flight))
            case messages.TrainerVersion():
                self._oldest_usable = message.version - self._spec.max_staleness
                self._starts.trainer_at(message.version, asyncio.get_running_loop().time())
                self._compare_servers()
                for task, run in self._running.items():
                    if self._hopeless(run, message.version):
                        task.cancel()
            case messages.GiveBack():
                self._requeue(message.ticket.moved(()))
            case messages.Used():
                self._starts.note(Used(message.indices))
            case messages.Unversioned():
                self._starts.note(Unversioned(message.count))
        self._pump_soon()

    def _compare_servers(self) -> None:
        for server in self._fleet.compare():
            if server.slowness > 1.0:
                than = f"{server.slowness:.1f} times as long as the median server for a token"
                self._report(f"{server.url} takes {than}: it gets fewer groups")
            else:
                self._report(f"{server.url} is not slow any more")

    def _look_later(self) -> None:
        loop = asyncio.get_running_loop()
        due_s = loop.time() + QUIET_S / 4
        loop.call_at(due_s, self._look, due_s)

    def _look(self, due_s: float) -> None:
        """Look for stuck servers while groups are in flight, and move the groups of these. A look
        that comes long after ``due_s`` says that this process did nothing meanwhile."""
        if self._closing:
            return
        loop, self._looking = asyncio.get_running_loop(), bool(self._running)
        if self._looking:
            self._look_later()
        now = loop.time()
        if now - due_s >= HELD_UP_S:
            # The servers' tokens of that time wait to be read.
            self._fleet.listen_anew(now)
            self._say_held_up(now - due_s)
        for server, seconds in self._fleet.stuck(now):
            text = f"{server.url} stands still for {seconds:.0f} s: its groups go on elsewhere"
            self._report(text)
            loop.call_at(server.aside_until, self._pump)
            self._move(server.url)

    def _say_held_up(self, seconds: float) -> None:
        if seconds >= 2 * self._held_up_s:
            self._held_up_s = seconds
            self._report(
                f"all groups were held up for {seconds:.0f} s: a coroutine of the task computed or"
                " waited without await, or this process was suspended; a plain function and"
                " asyncio.to_thread hold up nothing"
            )

    def _hopeless(self, run: Running, version: int) -> bool:
        """Return whether the group is too stale for a trainer at ``version`` or later."""
        if not too_stale(run.version, version, self._spec.max_staleness):
            return False
        share = self._spec.max_stale_token_share
        # A running request may still add fresh tokens, so only finished completions decide.
        return not share or any(
            not part.fresh_enough(self._oldest_usable, share) for part in run.parts if part.finished
        )

    async def close(self) -> None:
        """Abort everything in flight and close the connections."""
        self._closing = True
        running = list(self._running)
        for task in running:
            task.cancel()
        await asyncio.gather(*running, *self._closings, return_exceptions=True)
        await self._sampler.close()
        for driver in self._drivers.values():
            await driver.close()

    def _pump_soon(self) -> None:
        """Schedule one ``_pump`` for all events of this loop iteration: each pump looks at all
        servers, and many servers may report in one iteration."""
        if not self._pumping:
            self._pumping = True
            asyncio.get_running_loop().call_soon(self._pump)

    def _pump(self) -> None:
        """Start as many groups as admission and the servers' capacity allow."""
        self._pumping = False
        loop = asyncio.get_running_loop()
        newest = self._fleet.newest
        if self._closing or newest is None:
            return
        until = loop.time() + ADMIT_S
        while self._starts.admit(newest):
            if loop.time() >= until:
                # The loop must turn: thousands of prompts may get a place at once.
                self._pump_soon()
                break
        room, started = self._room(loop.time()), False
        while (best := room.newest) is not None:
            # A server with an older version may still start a group for an earlier step.
            waiting = self._starts.most_urgent(best)
            if waiting is None:
                break
            needed = self._starts.needed_version(waiting.ticket.index)
            server = room.take(needed, waiting.avoid)
            assert server is not None, "one has room and the best version"
            self._start(waiting.ticket, server)
            started = True
        if started:
            # The trainer would else know of these requests when the first group of them ends.
            self._report("")

    def _room(self, now: float) -> Room:
        """Return the servers that can take a group, by capacity and by share (Spread)."""
        spread, ends = self._spread, self._spread.until
        size, capacity = self._spec.group_size, self._spec.max_concurrent_requests
        waiting = self._starts.waiting * size
        share = spread.share(self._fleet, waiting, self._durations.group_s, now)
        if spread.until != ends:
            # What the shares left over starts then, if no server reports before.
            asyncio.get_running_loop().call_at(spread.until, self._pump_soon)
        return Room(self._fleet, size, capacity, now, share)

    def _start(self, ticket: Ticket, server: Server) -> None:
        spec, loop, version = self._spec, asyncio.get_running_loop(), server.state.version
        assert version is not None, "no group starts on a server of an unknown version"
        used_at = self._starts.start(ticket.index, version)
        had = ticket.parts or (NO_TOKENS,) * spec.group_size
        needed = max(self._oldest_usable, used_at - spec.max_staleness)
        mix, share = spec.in_flight_weight_updates, spec.max_stale_token_share
        kept = worth_keeping(had, version, needed, mix, share)
        parts = list(self._sampler.still_used(ticket.index, kept))
        self._throw_away([was for was, part in zip(had, parts, strict=True) if part is not was])
        oldest = min([version, *(part.version_first for part in parts if part.token_ids)])
        if server.url not in self._drivers:
            self._drivers[server.url] = self._connect(server.url)
        driver, began_s, size = self._drivers[server.url], loop.time(), spec.group_size
        calls = self._free, self._free_one, partial(self._counts.add, "requests")
        attempt = ticket, parts, server, driver, *calls
        run = Running(*attempt, version=oldest, began_s=began_s, requests=size)
        resumed = [len(p.token_ids) for p in parts if p.token_ids and not p.finished]
        self._counts.add("resumed", len(resumed))
        self._counts.add("resumed_tokens", sum(resumed))
        self._note_in_flight(server.url)
        task = loop.create_task(self._make(run))
        self._running[task] = run
        task.add_done_callback(self._ended)
        if not self._looking:
            self._looking = True
            self._look_later()

    async def _make(self, run: Running) -> None:
        whole = not any(part.token_ids for part in run.parts)
        group = await self._sampler.group(run)
        tokens = self._note_finished(run, group)
        # Answers to an agent that it did not wait for are in no completion.
        unused = sum(part.num_sampled for part in run.parts) - tokens
        self._counts.add("thrown_tokens", unused)
        self._counts.made(group.completions)
        if whole:
            self._durations.took(group, asyncio.get_running_loop().time() - run.began_s)
        self._send(messages.GroupDone(run.ticket.done(), group, self._counts.changed()))

    def _note_finished(self, run: Running, group: Group) -> int:
        """Note a group that its task finished; return its number of sampled tokens."""
        self._in_a_row.clear()
        self._task_errors.append(False)
        tokens = sum(c.num_sampled for c in group.completions)
        self._counts.add("tokens", tokens)
        if not run.server.left:
            self._counts.add(messages.TOKENS + run.server.url, tokens)
        return tokens

    def _free_one(self, run: Running) -> None:
        """Count one request less: a completion ended, or was finished when the group started."""
        run.requests -= 1
        run.server.in_flight -= 1
        self._note_in_flight(run.server.url)
        spec = self._spec
        # Only when a group has room: a pump looks at all servers.
        if run.server.in_flight + spec.group_size <= spec.max_concurrent_requests:
            self._pump_soon()

    def _free(self, run: Running) -> None:
        """Take a group off its server once its requests are over."""
        if not run.freed:
            run.freed = True
            run.server.in_flight -= run.requests
            self._note_in_flight(run.server.url)
            self._answer_drains(run.server.url)
            self._pump_soon()

    def _ended(self, task: asyncio.Task[None]) -> None:
        run = self._running.pop(task)
        # As long as it was sampled, it moves with its server.
        moved = run.moved or (run.server.left and not run.freed)
        self._free(run)
        if self._closing:
            return
        ticket, url = run.ticket, run.server.url
        # no deadline: the task has ended (this is its done callback)
        error = asyncio.CancelledError() if task.cancelled() else task.exception()
        match error:
            case None:
                run.server.succeeded()
            case NotAccepted():
                run.server.succeeded()
                self._leave_out(run, error)
            # The server left the run, stood still, or was drained for a commit: this costs no
            # budget.
            case PeerError() | Interrupted() | asyncio.CancelledError() if moved:
                self._counts.add("moved")
                self._requeue(ticket.moved(tuple(run.parts)))
            case GroupDropped() if moved:
                # Without its tokens: an agent's episodes ended with the group, and new ones would
                # take what those had sampled for their own.
                self._counts.add("moved")
                self._throw_away(run.parts)
                self._requeue(ticket.moved(()))
            case asyncio.CancelledError():
                self._counts.add("dropped.stale_in_flight")
                self._report(f"group of prompt {ticket.index} from {url} is too stale: made again")
                self._requeue(ticket.moved(tuple(run.parts)))
            case OtherWeights():
                self._counts.add(f"dropped.{error.reason}")
                self._throw_away(run.parts)
                self._server_failed(run, f"{url} used other weights ({error})", ())
            case GroupDropped():
                self._drop(run, error.reason, str(error), isinstance(error, PromptUnfit))
            case TaskFailed():
                self._task_error(run, error)
            case HttpRefused() if error.status in BAD_REQUEST:
                self._drop(run, "refused", str(error))
            case PeerError():
                self._counts.add("outages")
                self._server_failed(run, str(error), tuple(run.parts))
            case Interrupted():
                # The engine aborted the requests and is healthy, or the ledger lost the server's
                # version and so keeps new groups away: no back-off.
                self._counts.add("interrupted")
                self._report(f"prompt {ticket.index} goes on: {error}")
                self._requeue(ticket.failed(tuple(run.parts)), avoid=url)
            case _:
                self._fail(error)
                return
        self._pump_soon()

    def _server_failed(self, run: Running, why: str, kept: tuple[Completion, ...]) -> None:
        """Requeue a group whose server failed, and let the server rest."""
        loop = asyncio.get_running_loop()
        loop.call_at(run.server.failed(loop.time()), self._pump)
        self._report(f"prompt {run.ticket.index} will be retried: {why}")
        self._requeue(run.ticket.failed(kept), avoid=run.server.url)

    def _remove(self, url: str) -> None:
        """Cancel the groups of a server that left the run, then close its driver."""
        self._fleet.remove(url)
        self._counts.forget(url)
        tasks = [t for t, run in self._on(url) if run.server.left]
        for task in tasks:
            task.cancel()
        driver = self._drivers.pop(url, None)
        if driver is None:
            return

        async def close() -> None:
            await asyncio.gather(*tasks, return_exceptions=True)
            await driver.close()

        closing = asyncio.get_running_loop().create_task(close())
        self._closings.add(closing)
        closing.add_done_callback(self._closings.discard)

    def _end_drain(self, drain: messages.Drain) -> None:
        """Cancel what still runs on the server at the drain's deadline."""
        if drain.number in self._drains:
            self._move(drain.url)

    def _move(self, url: str) -> None:
        """Cancel what runs on a server, to go on elsewhere."""
        for task, run in self._on(url):
            run.moved = True
            task.cancel()

    def _on(self, url: str) -> list[tuple[asyncio.Task[None], Running]]:
        """Return the groups with requests on a server."""
        return [
            (task, run)
            for task, run in self._running.items()
            if run.server.url == url and not run.freed
        ]

    def _answer_drains(self, url: str) -> None:
        if not self._in_flight(url):
            for number in [number for number, drained in self._drains.items() if drained == url]:
                del self._drains[number]
                self._send(messages.Answer(number))

    def _drop(self, run: Running, reason: str, detail: str, last: bool = False) -> None:
        """Requeue a group without its tokens, or skip its prompt after the ``last`` attempt."""
        self._counts.add(f"dropped.{reason}")
        text = f"group of prompt {run.ticket.index} from {run.server.url} dropped: {detail}"
        self._report(text)
        self._throw_away(run.parts)
        ticket = run.ticket.dropped()
        if not last and ticket.drops < MAX_DROPS:
            # Elsewhere, if there is room: the fault may be the server's, and one that fails at once
            # is always the idlest.
            self._starts.again(ticket, run.server.url)
            return
        # One that is skipped at once is so before a group that was started with it can be usable.
        cause, allowed = ("at once", len(self._running)) if last else ("drops", 0)
        if (skips := self._skip(ticket, cause)) >= MAX_SKIPS_IN_A_ROW + allowed:
            self._fail(
                DataError(f"{skips} prompts in a row gave no usable group; the last one: {text}")
            )

    def _leave_out(self, run: Running, verdict: NotAccepted) -> None:
        """Report a group that was left out by choice; the next prompt takes its place."""
        self._note_finished(run, verdict.group)
        self._counts.add(f"dropped.{verdict.reason}")
        self._throw_away(run.parts)
        self._starts.note(GiveUp(run.ticket.index))
        rewards = tuple(each.reward for each in by_episode(verdict.group.completions)[0])
        self._send(messages.LeftOut(run.ticket.index, rewards, self._counts.changed()))

    def _task_error(self, run: Running, failed: TaskFailed) -> None:
        self._task_errors.append(True)
        allowed = self._spec.task_error_budget
        if sum(self._task_errors) <= allowed:
            self._drop(run, "task_error", str(failed))
            return
        failed.add_note(
            f"rollout.task_error_budget allows {allowed} of any {WINDOW} groups in a row"
        )
        self._fail(failed)

    def _requeue(self, ticket: Ticket, avoid: str = "") -> None:
        """Requeue the group in its place, or skip the prompt if its outages are spent."""
        if ticket.outages >= MAX_OUTAGES:
            if self._in_a_row["outages"] < MAX_SKIPS_IN_A_ROW:
                self._skip(ticket, "outages")
                return
            # No prompt has a usable group: the servers are at fault, and the outages speak against
            # no prompt. They must not end the run either; batch_timeout_s bounds them.
            ticket = replace(ticket, outages=0)
        self._starts.again(ticket, avoid)

    def _skip(self, ticket: Ticket, cause: str) -> int:
        """Give a prompt up; return how many were for this cause, in a row."""
        self._in_a_row[cause] += 1
        self._starts.note(GiveUp(ticket.index))
        self._sampler.forget(ticket.index)
        self._throw_away(ticket.parts)
        self._counts.add("skipped")
        self._report(
            f"prompt {ticket.index} skipped after {ticket.drops} drops and {ticket.outages} outages"
            " without a token",
            ticket.index,
        )
        return self._in_a_row[cause]

    def _throw_away(self, parts: Sequence[Completion]) -> None:
        self._counts.add("thrown_tokens", sum(part.num_sampled for part in parts))
        self._counts.made(part for part in parts if part.token_ids)

    def _note_commit(self, state: ServerState) -> None:
        """Count the requests in flight on a server when its commit begins."""
        known = self._fleet.get(state.url)
        before = known.state.committing if known is not None else None
        if state.committing not in (None, before):
            self._counts.add("commits")
            self._counts.add("in_flight_at_commits", self._in_flight(state.url))

    def _note_in_flight(self, url: str) -> None:
        if (server := self._fleet.get(url)) is not None:
            self._counts.set(messages.IN_FLIGHT + url, server.in_flight)

    def _in_flight(self, url: str) -> int:
        """Return the requests in flight on a server; 0 for one that is not in the run."""
        return 0 if (server := self._fleet.get(url)) is None else server.in_flight

    def _report(self, text: str, skipped: int | None = None) -> None:
        self._send(messages.Event(text, self._counts.changed(), skipped))


def worth_keeping(
    parts: Sequence[Completion], version: int, needed: int, mix: bool, stale_share: float = 0.0
) -> tuple[Completion, ...]:
    """Return the parts with which a group resumes on a server that holds ``version``; an unusable
    part is replaced by NO_TOKENS.

    ``needed``: oldest version that the trainer can use at the group's step. ``stale_share``: see
    Completion.fresh_enough. ``mix``: whether an unfinished completion may resume on another
    version.
    """

    def usable(part: Completion) -> bool:
        unmixed = mix or part.finished or part.version_last == version
        return not part.token_ids or (part.fresh_enough(needed, stale_share) and unmixed)

    return tuple(part if usable(part) else NO_TOKENS for part in parts)
