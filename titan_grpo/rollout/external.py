"""Sources beside the sampler, in the rollout process: batches taken from an Atropos API, groups
pushed to a door of ours.

They speak the dispatcher's messages. A group that comes from outside can not be made again, so one
that is given back is only counted; how many may wait is bounded here (``Used`` tells what was
taken), so that what is trained on is fresh.
"""

import asyncio
import os
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

from titan_grpo.engines.http import AsyncDriver, HttpRefused
from titan_grpo.errors import ConfigError, DataError, PeerError, ServerRefused
from titan_grpo.rollout import atropos, messages
from titan_grpo.rollout.httpd import Reply
from titan_grpo.rollout.messages import Ticket
from titan_grpo.rollout.push import Desk, Door, Incoming
from titan_grpo.rollout.spec import RolloutSpec
from titan_grpo.samples import Group

POLL_S = (0.1, 1.0)
"""First and longest pause between two questions to an API that has no batch yet; it has no way to
say when."""

OUTAGE_S = (0.5, 15.0)
"""The same after it did not answer."""

MAX_REJECTED_IN_A_ROW = 64
"""Then it is not the groups but what makes them, and waiting would not help."""

Send = Callable[[messages.FromWorker], None]
Fail = Callable[[BaseException], None]


class External:
    """What both sources share: numbers for groups, what waits, which versions there are. All
    methods run in the loop."""

    def __init__(self, spec: RolloutSpec, send: Send, fail: Fail) -> None:
        self._spec, self._send, self._fail = spec, send, fail
        self._indices = spec.unused_prompts()
        self._waiting = dict(spec.waiting)
        self._versions: dict[str, int] = {}
        self._counts: Counter[str] = Counter()
        self._trainer_version = spec.base_version
        self._ahead = spec.prompts_per_step * spec.group_size
        """Completions of one step."""

    async def start(self) -> None:
        """Begin."""

    async def close(self) -> None:
        """End."""

    def on(self, message: messages.ToWorker) -> None:
        """Take one message of the trainer."""
        if isinstance(message, messages.ServerState) and message.version is not None:
            self._versions[message.url] = message.version
        elif isinstance(message, messages.ServerLeft):
            self._versions.pop(message.url, None)
        elif isinstance(message, messages.AskLoad):
            self._send(messages.Load({}))
        elif isinstance(message, messages.TrainerVersion):
            self._trainer_version = message.version
        elif isinstance(message, messages.Used):
            for index in message.indices:
                self._waiting.pop(index, None)
        elif isinstance(message, messages.GiveBack):
            self._waiting.pop(message.ticket.index, None)
            self._say(
                f"group {message.ticket.index} from outside came too late to be used",
                skipped=message.ticket.index,
            )

    def _deliver(self, group: Group) -> None:
        index = next(self._indices)
        group = replace(group, prompt=replace(group.prompt, index=index))
        self._waiting[index] = len(group.completions)
        self._counts["external_groups"] += 1
        self._counts["tokens"] += sum(c.num_sampled for c in group.completions)
        self._send(messages.GroupDone(Ticket(index), group, dict(self._counts)))

    @property
    def waiting(self) -> int:
        """Completions that were sent and not taken yet."""
        return sum(self._waiting.values())

    def _say(self, text: str, skipped: int | None = None) -> None:
        self._send(messages.Event(text, dict(self._counts), skipped=skipped))


class AtroposSource(External):
    """Takes batches from an Atropos API while the trainer has less than a step's worth and one more
    waiting.

    A group without a version counts as made by the oldest version that a server holds when it is
    taken.
    """

    def __init__(self, spec: RolloutSpec, send: Send, fail: Fail) -> None:
        super().__init__(spec, send, fail)
        self._driver = AsyncDriver(spec.atropos_url, max_connections=1)
        self._registration = atropos.Registration(
            **{**spec.registration, "batch_size": self._ahead}
        )
        self._room = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._rejected_in_a_row = 0

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
        """As the base; and look whether there is room for a batch."""
        super().on(message)
        self._look_for_room()

    def _look_for_room(self) -> None:
        # A step's worth for the trainer and one ahead; the rest stays in the API, which hands out
        # the newest first.
        if self.waiting < self._ahead * (1 + min(self._spec.max_staleness, 1)):
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
            except PeerError as error:
                if isinstance(error, HttpRefused) and error.status < 500:
                    raise ConfigError(
                        f"rollout.atropos_url must be that of an Atropos API: {error}"
                    ) from error
                # It may have been restarted or reset; reset, it answers 500 until a trainer
                # registers.
                known, pause = False, await self._outage(error, pause)
                continue
            if not known:
                continue
            for item in answer.groups:
                self._take(item)
            pause = POLL_S[0] if answer.groups else await self._paused(pause, POLL_S)

    async def _register(self) -> atropos.Answer:
        """Register, at the start or because the server was restarted, and ask for a batch. A second
        time does no harm."""
        await self._driver.run(atropos.register_call(self._registration))
        answer = await self._driver.run(atropos.batch_call())
        if not answer.registered:
            # It was given groups before a trainer, so it takes no registration any more and would
            # never hand them out.
            self._say(
                f"{self._driver.url} held groups of before its registration, and has to throw them"
                " away"
            )
            await self._driver.run(atropos.reset_call())
            await self._driver.run(atropos.register_call(self._registration))
            answer = await self._driver.run(atropos.batch_call())
        if not answer.registered:
            raise ServerRefused(f"{self._driver.url} does not take our registration")
        return answer

    def _take(self, item: object) -> None:
        assert isinstance(item, dict)
        held = self._versions.values()
        try:
            group = atropos.group_of(item, min(held) if held else self._trainer_version)
            newest = max([self._trainer_version, *held])
            if group.version > newest:
                raise atropos.Rejected(
                    "unknown_version",
                    f"its version {group.version} does not exist, the newest is {newest}",
                )
        except atropos.Rejected as error:
            self._counts[f"dropped.{error.reason}"] += 1
            self._rejected_in_a_row += 1
            self._say(
                f"a group of atropos environment {item.get('env_id')} is not trained on: {error}"
            )
            if self._rejected_in_a_row >= MAX_REJECTED_IN_A_ROW:
                raise DataError(
                    f"{MAX_REJECTED_IN_A_ROW} groups in a row can not be trained on; the last:"
                    f" {error}"
                ) from error
            return
        self._rejected_in_a_row = 0
        self._deliver(group)
        self._look_for_room()

    async def _outage(self, why: object, pause: float) -> float:
        self._counts["outages"] += 1
        self._say(f"{self._driver.url} gave no batch: {why}")
        return await self._paused(max(pause, OUTAGE_S[0]), OUTAGE_S)

    async def _paused(self, pause: float, bounds: tuple[float, float]) -> float:
        """Wait; how long the next pause is."""
        await asyncio.sleep(min(pause, bounds[1]))
        return min(2 * pause, bounds[1])

    def _ended(self, task: "asyncio.Task[None]") -> None:
        # no deadline: the task has ended: this is called by its callback, or after its group
        error = None if task.cancelled() else task.exception()
        if error is not None:
            self._fail(error)


class PushSource(External):
    """Lets in what environments POST to the door, as much as the staleness bound lets the trainer
    use."""

    def __init__(self, spec: RolloutSpec, send: Send, fail: Fail) -> None:
        super().__init__(spec, send, fail)
        self._desk = Desk(
            (1 + spec.max_staleness) * self._ahead,
            spec.max_staleness,
            spec.base_version,
            spec.base_version,
        )
        self._door: Door | None = None

    async def start(self) -> None:
        """Open the door. Raises ConfigError where the address can not be bound."""
        key = os.environ.get(self._spec.push_key_env, "") if self._spec.push_key_env else ""
        self._door = Door(
            self._spec.push_address, key, asyncio.get_running_loop(), self.take, self.status
        )
        self._say(f"environments may push groups to http://{self._door.address}/groups")

    async def close(self) -> None:
        """Refuse what still comes, and close the door."""
        self._desk.closing = True
        if self._door is not None:
            await asyncio.get_running_loop().run_in_executor(None, self._door.close)

    def on(self, message: messages.ToWorker) -> None:
        """As the base; and tell the desk which versions there are."""
        super().on(message)
        self._desk.trainer_version = self._trainer_version
        self._desk.newest_version = max(
            [self._trainer_version, *self._versions.values(), self._desk.newest_version]
        )

    def take(self, incoming: list[Incoming]) -> Reply:
        """One POST."""
        reply, groups = self._desk.take(incoming, self.waiting)
        for group in groups:
            self._deliver(group)
        self._counts[f"pushes.{reply.status}"] += 1
        return reply

    def status(self) -> Reply:
        """One GET of the status."""
        return Reply(200, self._desk.status(self.waiting))


def open_source(spec: RolloutSpec, send: Send, fail: Fail) -> External:
    """The source that the spec names, not started yet."""
    return (
        AtroposSource(spec, send, fail)
        if spec.source == "atropos"
        else PushSource(spec, send, fail)
    )
