"""Sources beside the sampler, in the rollout process: batches of an Atropos API, and groups that
environments push.

They take and send the dispatcher's messages. A group from outside cannot be made again, so one that
is given back is only counted. How many may wait is bounded here (``Used`` frees their places), so
that what is trained on is fresh.
"""

import asyncio
import os
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from titan_grpo.engines.http import AsyncDriver, HttpRefused
from titan_grpo.errors import ConfigError, DataError, PeerError, ServerRefused
from titan_grpo.protocol.messages import Label, ServerState
from titan_grpo.rollout import atropos, messages
from titan_grpo.rollout.httpd import Reply
from titan_grpo.rollout.messages import Ticket
from titan_grpo.rollout.partial import length_range
from titan_grpo.rollout.push import Incoming, PushQueue, PushServer
from titan_grpo.rollout.spec import RolloutSpec
from titan_grpo.samples import Group

POLL_S = (0.1, 1.0)
"""First and longest pause between two requests to an API that has no batch yet; it cannot say
when."""

OUTAGE_S = (0.5, 15.0)
"""The same after it did not answer."""

MAX_REJECTED_IN_A_ROW = 64
"""Then what makes the groups is at fault, and waiting would not help."""

Send = Callable[[messages.FromWorker], None]
Fail = Callable[[BaseException], None]


class External:
    """What both sources share: indices of groups, what waits, which versions there are. All methods
    run in the loop."""

    def __init__(self, spec: RolloutSpec, send: Send, fail: Fail) -> None:
        self._spec, self._send, self._fail = spec, send, fail
        self._indices = spec.unused_prompts()
        self._waiting = dict(spec.waiting)
        self._versions: dict[str, int] = {}
        self._counts: Counter[str] = Counter()
        self._trainer_version = spec.base_version
        self._per_step = spec.prompts_per_step * spec.group_size
        """Completions of one step."""

    async def start(self) -> None:
        """Begin."""

    async def close(self) -> None:
        """End."""

    def on(self, message: messages.ToWorker) -> None:
        """Take one message of the trainer."""
        match message:
            case ServerState(url, version) if version is not None:
                self._versions[url] = version
            case messages.ServerLeft(url):
                self._versions.pop(url, None)
            case messages.AskLoad():
                self._send(messages.Load({}))
            case messages.TrainerVersion(version):
                self._trainer_version = version
            case messages.Used(indices):
                for index in indices:
                    self._waiting.pop(index, None)
            case messages.GiveBack(ticket):
                self._waiting.pop(ticket.index, None)
                text = f"group {ticket.index} from outside came too late to be used"
                self._report(text, skipped=ticket.index)

    @property
    def waiting(self) -> int:
        """Completions that were sent and not used yet."""
        return sum(self._waiting.values())

    def _deliver(self, group: Group) -> None:
        index = next(self._indices)
        group = replace(group, prompt=replace(group.prompt, index=index))
        self._waiting[index] = len(group.completions)
        self._counts["external_groups"] += 1
        self._counts["tokens"] += sum(c.num_sampled for c in group.completions)
        for completion in group.completions:
            self._counts[f"made.{length_range(completion.num_sampled)}"] += 1
        self._send(messages.GroupDone(Ticket(index), group, dict(self._counts)))

    def _report(self, text: str, skipped: int | None = None) -> None:
        self._send(messages.Event(text, dict(self._counts), skipped))


class AtroposSource(External):
    """Takes batches from an Atropos API while less than two steps' worth waits for the trainer (one
    with ``max_staleness = 0``).

    A group without a version counts as made by the oldest version that a server held when it can
    have come to the API (atropos.Waiting).
    """

    def __init__(self, spec: RolloutSpec, send: Send, fail: Fail) -> None:
        super().__init__(spec, send, fail)
        self._driver = AsyncDriver(spec.atropos_url, max_connections=1)
        self._registration = atropos.Registration(
            **{**spec.registration, "batch_size": self._per_step}
        )
        self._room = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._rejected_in_a_row = 0
        self._age = atropos.Waiting(spec.base_version, spec.base_version)

    async def start(self) -> None:
        """Register and take batches, in a task of its own."""
        self._room.set()
        self._task = asyncio.get_running_loop().create_task(self._take_batches())
        self._task.add_done_callback(self._ended)

    async def close(self) -> None:
        """Leave the API; what it holds stays there."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        await self._driver.close()

    def on(self, message: messages.ToWorker) -> None:
        """As the base; and see whether there is room for a batch."""
        super().on(message)
        self._update_room()

    def _update_room(self) -> None:
        # The rest stays in the API, which hands out the newest first.
        if self.waiting < self._per_step * (1 + min(self._spec.max_staleness, 1)):
            self._room.set()
        else:
            self._room.clear()

    async def _take_batches(self) -> None:
        known, pause = False, POLL_S[0]
        while True:
            # no deadline: room for a batch, when the trainer takes one; or close(), by cancelling
            await self._room.wait()
            try:
                answer = await (
                    self._driver.run(atropos.batch_call()) if known else self._register()
                )
                known = answer.registered
                if known and not answer.groups:
                    # The servers first: a group that comes meanwhile is not older than that.
                    held = self._oldest_held
                    self._age = self._age.none(held, await self._driver.run(atropos.left_call()))
            except PeerError as error:
                if isinstance(error, HttpRefused) and error.status < 500:
                    raise ConfigError(
                        f"rollout.atropos_url must be that of an Atropos API: {error}"
                    ) from error
                # It may have been restarted or reset; after a reset it answers 500 until a trainer
                # registers.
                known = False
                self._counts["outages"] += 1
                self._report(f"{self._driver.url} gave no batch: {error}")
                pause = await _pause(max(pause, OUTAGE_S[0]), OUTAGE_S[1])
                continue
            if not known:
                continue
            for item in answer.groups:
                self._take(item)
            self._age = self._age.batch() if answer.groups else self._age
            pause = POLL_S[0] if answer.groups else await _pause(pause, POLL_S[1])

    @property
    def _oldest_held(self) -> int:
        return min(self._versions.values(), default=self._trainer_version)

    async def _register(self) -> atropos.Answer:
        """Register (repeating it does no harm) and ask for a batch."""
        await self._driver.run(atropos.register_call(self._registration))
        answer = await self._driver.run(atropos.batch_call())
        if not answer.registered:
            # It was given groups before a trainer, so it takes no registration any more and would
            # never hand them out.
            self._report(
                f"{self._driver.url} held groups from before its registration, and has to throw"
                " them away"
            )
            await self._driver.run(atropos.reset_call())
            await self._driver.run(atropos.register_call(self._registration))
            answer = await self._driver.run(atropos.batch_call())
        if not answer.registered:
            raise ServerRefused(f"{self._driver.url} does not take our registration")
        return answer

    def _take(self, item: Mapping[str, Any]) -> None:
        try:
            group = atropos.group_of(item, self._age.oldest)
            newest = max([self._trainer_version, *self._versions.values()])
            if group.version > newest:
                raise atropos.Rejected(
                    "unknown_version",
                    f"its version {group.version} does not exist, the newest is {newest}",
                )
        except atropos.Rejected as error:
            self._counts[f"dropped.{error.reason}"] += 1
            self._rejected_in_a_row += 1
            self._report(
                f"a group of atropos environment {item.get('env_id')} is not trained on: {error}"
            )
            if self._rejected_in_a_row >= MAX_REJECTED_IN_A_ROW:
                raise DataError(
                    f"{MAX_REJECTED_IN_A_ROW} groups in a row cannot be trained on; the last:"
                    f" {error}"
                ) from error
            return
        self._rejected_in_a_row = 0
        self._deliver(group)
        self._update_room()

    def _ended(self, task: "asyncio.Task[None]") -> None:
        # no deadline: the task has ended: this is its callback
        error = None if task.cancelled() else task.exception()
        if error is not None:
            self._fail(error)


async def _pause(seconds: float, longest: float) -> float:
    """Wait; returns the length of the next pause."""
    await asyncio.sleep(min(seconds, longest))
    return min(2 * seconds, longest)


class PushSource(External):
    """Takes what environments POST, as much as the staleness bound lets the trainer use."""

    def __init__(self, spec: RolloutSpec, send: Send, fail: Fail) -> None:
        super().__init__(spec, send, fail)
        capacity = (1 + spec.max_staleness) * self._per_step
        self._queue = PushQueue(
            capacity, spec.max_staleness, spec.base_version, newest_version=spec.base_version
        )
        self._server: PushServer | None = None

    async def start(self) -> None:
        """Listen. Raises ConfigError where the address cannot be bound."""
        key = os.environ.get(self._spec.push_key_env, "") if self._spec.push_key_env else ""
        loop = asyncio.get_running_loop()
        self._server = PushServer(self._spec.push_address, key, loop, self.take, self.status)
        self._report(f"environments may push groups to http://{self._server.address}/groups")

    async def close(self) -> None:
        """Refuse what still comes, and stop listening."""
        self._queue.closing = True
        if self._server is not None:
            await asyncio.get_running_loop().run_in_executor(None, self._server.close)

    def on(self, message: messages.ToWorker) -> None:
        """As the base; and pass the versions to the queue."""
        super().on(message)
        if isinstance(message, ServerState) and message.version is not None:
            label = Label.parse(message.label)
            self._queue.run = label.run_id if label else self._queue.run
        self._queue.trainer_version = self._trainer_version
        self._queue.newest_version = max(
            [self._trainer_version, *self._versions.values(), self._queue.newest_version]
        )

    def take(self, incoming: list[Incoming]) -> Reply:
        """One POST."""
        reply, groups = self._queue.take(incoming, self.waiting)
        for group in groups:
            self._deliver(group)
        self._counts[f"pushes.{reply.status}"] += 1
        return reply

    def status(self) -> Reply:
        """One GET of the status."""
        return Reply(200, self._queue.status(self.waiting))


def open_source(spec: RolloutSpec, send: Send, fail: Fail) -> External:
    """The source that the spec names, not started yet."""
    kind = AtroposSource if spec.source == "atropos" else PushSource
    return kind(spec, send, fail)
