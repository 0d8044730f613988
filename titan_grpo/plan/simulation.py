"""A run in simulated time: the tables of protocol/, driven as sync/ and rollout/ drive them, over a
simulated clock and network.

The tables are those of production (lane, image_slots, admission, recovery, relay); only
the work they wait for is simulated. Of a transfer, only the bytes take time. A server that dies
loses its weights and its lane's epoch; the lane notices at once, as it does in production when the
connection ends. Other servers continue its groups from the streamed tokens, as in
rollout/dispatch.py.
"""

import heapq
import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from titan_grpo.errors import ProtocolError
from titan_grpo.plan.network import TRAINER, Network
from titan_grpo.plan.patches import Patches
from titan_grpo.plan.setup import Setup
from titan_grpo.protocol import admission, image_slots, lane, recovery, relay
from titan_grpo.protocol.admission import Admission, too_stale
from titan_grpo.protocol.image_slots import SlotTable

RANKS = frozenset({0})
"""One writer: all ranks of a simulated trainer copy in the same time."""

MOMENT_S = 1e-6
"""A group with less time left is complete: sums of times are not exact."""


@dataclass
class Result:
    """Figures from the first step on, after the start of servers and trainer. Times are in seconds,
    lags and staleness in versions."""

    steps: int = 0
    published: int = 0
    skipped: int = 0
    start_s: float = 0.0
    """From the start of the run to that of its first step."""
    stall_s: float = 0.0
    """The trainer's waits for groups, and for its copy."""
    stall_for_versions_s: float = 0.0
    """Part of it in which a step's last group waited for a server with a fresh enough version."""
    stall_for_copy_s: float = 0.0
    simulated_s: float = 0.0
    lags: list[int] = field(default_factory=list)
    """Lag of each server that holds a version, at each step's end (the values of
    servers/lag_mean)."""
    without: int = 0
    """Servers that held none at a step's end, summed over the steps."""
    staleness: list[int] = field(default_factory=list)
    """Of each used group: the trainer's version minus the oldest that made any of it."""
    send_s: list[float] = field(default_factory=list)
    """Duration of each transfer that arrived."""
    commit_s: list[float] = field(default_factory=list)
    """From publish to read-back, for each version on each server."""
    pause_s: list[float] = field(default_factory=list)
    """Duration of each commit's pause."""
    failed_transfers: int = 0
    deaths: int = 0
    patched: int = 0
    """Transfers of patches in place of a version."""
    moved: int = 0
    """Groups whose server died: others continued them, or made them anew."""
    busy_s: dict[str, float] = field(default_factory=dict)
    """See Network.busy_s."""
    sent_bytes: float = 0.0
    """Bytes that the trainer hosts sent."""


@dataclass(slots=True)
class _Server:
    number: int
    slow: bool
    lane: lane.Lane
    health: recovery.Health
    alive: bool = True
    engine: int | None = None
    patch: int = 0
    """Bytes of the patch that it reads in place of a version; 0: none."""
    work: int = 0
    """Number of the lane's present work; events of earlier work are ignored."""
    sent_at: float = 0.0
    paused_at: float | None = None
    paused_s: float = 0.0
    groups: dict[int, float] = field(default_factory=dict)
    """Group -> ``generated_s`` at its end."""
    held_up: list[int] = field(default_factory=list)
    """Groups whose scheduled end fell into a pause."""

    def generated_s(self, now: float) -> float:
        """Return ``now`` less all pauses of the server."""
        return (now if self.paused_at is None else self.paused_at) - self.paused_s


class Simulation:
    """One simulated run; call ``run`` once."""

    def __init__(self, setup: Setup) -> None:
        s = self._s = setup
        self._random, self._wakes = random.Random(s.seed), random.Random(f"wakes {s.seed}")
        self._now = 0.0
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0
        self._todo: deque[tuple[_Server, lane.Event]] = deque()
        health = recovery.Health(s.sync.backoff_s, s.sync.backoff_max_s)
        num_slow = round(s.slow * s.servers)
        slow = set(self._random.sample(range(s.servers), num_slow))
        self._servers = [_Server(n, n in slow, lane.Lane(), health) for n in range(s.servers)]
        # Images.
        self._slots = SlotTable.of(s.sync.slots)
        self._reserved: int | None = None
        self._waiting: dict[int, int | None] = {}
        self._reached: dict[int, float] = {}
        """Version -> the end of its step."""
        self._network = Network(s, slow, self._random)
        self._relays = relay.Relays(roots=s.trainer_hosts)
        # Calls: the sync process makes one at a time, for AT_WORK lanes (sync/turns.py).
        self._process_free_s = 0.0
        self._at_work: dict[int, float] = {}
        """Server -> end of its lane's turn, if it does not end it earlier."""
        self._turns: deque[_Server] = deque()
        self._patches = Patches(s)
        # Groups.
        self._admission = Admission(0, s.groups_per_step, s.max_staleness)
        self._next = 0
        self._again: list[int] = []
        self._made_by: dict[int, int] = {}
        """Group -> the oldest version that made any of it."""
        self._left_s: dict[int, float] = {}
        """Seconds left of each group in ``_again``."""
        self._unstarted: dict[int, int] = {}
        self._unmade: dict[int, int] = {}
        self._late_s: dict[int, float] = {}
        """Step -> seconds by which its last group began after the trainer made the oldest version
        fresh enough for it; 0 if no server was idle for want of that version."""
        self._spare: set[int] = set()
        # Trainer.
        self._version = self._published = 0
        self._idle_since: float | None = 0.0
        self._first_step: float | None = None
        self.result = Result()

    def run(self) -> Result:
        """Simulate; deterministic for one setup."""
        s = self._s
        end = s.hours * 3600
        self._reserve()
        self._publish(0)
        for server in self._servers:
            self._todo.append((server, lane.Started()))
            self._schedule_death(server)
        while True:
            self._drain()
            at = self._heap[0][0] if self._heap else float("inf")
            arrives = self._network.next_end(self._now)
            now = min(at, arrives)
            if now > end:
                break
            self._now = now
            if arrives <= at:
                self._arrive()
            else:
                heapq.heappop(self._heap)[-1]()
        result = self.result
        result.busy_s, result.sent_bytes = self._network.busy_s, self._network.sent_bytes
        if self._first_step is not None:
            result.simulated_s = end - self._first_step
            if self._idle_since is not None:
                self._stalled(end)
        else:
            result.start_s = end
        return result

    def _after(self, seconds: float, happens: Callable[[], None]) -> None:
        self._count += 1
        heapq.heappush(self._heap, (self._now + seconds, self._count, happens))

    # Lanes.

    def _drain(self) -> None:
        """Step the lanes through all events that are due now, in order."""
        while self._todo:
            server, event = self._todo.popleft()
            server.work += 1
            server.lane, actions = lane.step(server.lane, event)
            for action in actions[:-1]:
                match action:
                    case lane.Release():
                        self._step_slots(image_slots.Unpin(str(server.number)))
                        self._reserve()
                    case lane.Note():
                        self._fill(server, idle=True)
            self._perform(server, actions[-1])

    def _perform(self, server: _Server, work: lane.Action) -> None:
        s = self._s
        match work:
            case lane.Connect():
                # None after a restart: the engine has its initial weights.
                up = lane.Connected(server.engine, intact=True)
                if server.alive:
                    self._work(server, s.connect_s, up)
                else:
                    self._work(server, self._call_s(), lane.Failed())
            case lane.AwaitNewer():
                self._waiting[server.number] = server.lane.entry.held
                self._pin(server)
            case lane.Send():
                n = server.number
                server.sent_at = self._now
                version, held = server.lane.version or 0, server.lane.entry.held
                server.patch = self._patches.bytes_to(version, held)
                parent = TRAINER if server.patch else self._parent(server)
                self._network.begin(n, server.patch or s.image_bytes, parent, self._now)
                still = server.slow and s.slow_factor == 0
                deadline_s = s.sync.progress_deadline_s if still else s.transfer_deadline_s
                self._work(server, deadline_s, lane.Failed())
            case lane.Pause():
                self._turns.append(server)
                self._next_turn()
            case lane.Load(version):
                self._end_turn(server)
                loaded = lane.Loaded(version, ok=True, intact=True)
                self._work(server, self._call_s() + s.load_s - s.call_s, loaded)
            case lane.SetLabel():
                self._begin_turn(server)
                server.engine = server.lane.version
                self._work(server, self._call_s(), lane.Labelled())
            case lane.Resume():
                self._work(server, self._call_s(), lane.Resumed())
            case lane.ReadLabel():
                self._resumed(server)
                self._work(server, self._call_s(), lane.ReadBack(server.engine))
            case lane.Rest():
                self._resumed(server)
                server.health = server.health.silent(self._now)
                self._work(server, server.health.until - self._now, lane.Rested())
            case _:
                raise ProtocolError(f"no plan performs {work!r}")

    def _call_s(self) -> float:
        """Return the seconds until a call that a lane makes now is answered."""
        begins = max(self._now, self._process_free_s)
        self._process_free_s = begins + self._s.step_cpu_s
        return self._process_free_s - self._now + self._s.call_s

    def _next_turn(self) -> None:
        while self._turns and len(self._at_work) < lane.AT_WORK:
            server = self._turns.popleft()
            if server.lane.phase is lane.Phase.PAUSING and server.paused_at is None:
                self._begin_turn(server)
                server.paused_at = self._now
                self._work(server, self._call_s(), lane.Paused())

    def _begin_turn(self, server: _Server) -> None:
        end = self._at_work[server.number] = self._now + lane.TURN_S
        self._after(lane.TURN_S, partial(self._turn_ends, server, end))

    def _turn_ends(self, server: _Server, end: float) -> None:
        if self._at_work.get(server.number) == end:  # it has begun no other one
            self._end_turn(server)

    def _end_turn(self, server: _Server) -> None:
        self._at_work.pop(server.number, None)
        self._next_turn()

    def _work(self, server: _Server, seconds: float, event: lane.Event) -> None:
        self._after(seconds, partial(self._came_back, server, server.work, event))

    def _came_back(self, server: _Server, work: int, event: lane.Event) -> None:
        """Handle the end of a lane's work."""
        if work != server.work:
            return
        match event:
            case lane.Failed() if server.lane.phase is lane.Phase.SENDING:
                self._stop_transfer(server)
            case lane.ReadBack(version):
                self._end_turn(server)
                if version is not None:
                    server.health = server.health.answered()
                    if self._first_step is not None:
                        self.result.commit_s.append(self._now - self._reached[version])
        self._todo.append((server, event))

    def _relay(self, event: relay.Event) -> tuple[relay.Read, ...]:
        self._relays, actions = relay.step(self._relays, event)
        return actions

    def _parent(self, server: _Server) -> int:
        """Return the server from which this one reads its next version, or TRAINER."""
        version, url = server.lane.version, str(server.number)
        if not self._s.relays or version is None:
            return TRAINER
        if url not in self._relays.nodes:
            host = str(server.number // self._s.servers_per_host)
            self._relay(relay.Came(url, host, "", serves=True))
        (read,) = self._relay(relay.Asked(url, version))
        return int(read.urls[0]) if read.urls else TRAINER

    def _stop_transfer(self, server: _Server) -> None:
        self._network.stop(server.number)
        self._relay(relay.Gone(str(server.number)))
        self.result.failed_transfers += 1

    # Images, as sync.images steps them.

    def _step_slots(self, event: image_slots.Event) -> tuple[image_slots.Action, ...]:
        self._slots, actions = image_slots.step(self._slots, event)
        return actions

    def _reserve(self) -> None:
        if self._reserved is not None:
            return  # the table has one reservation at a time
        for action in self._step_slots(image_slots.Reserve(tuple(self._waiting.values()))):
            if isinstance(action, image_slots.Promise):
                self._reserved = action.slot
                # As GRPOTrainer._catch_up: the trainer waits for groups that no server may begin.
                starved = too_stale(self._published, self._version, self._s.max_staleness)
                if starved and self._idle_since is not None:
                    self._publish(self._version)

    def _pin(self, server: _Server) -> None:
        n = server.number
        held = self._waiting[n]
        if self._slots.revocable(held) and self._reserved is not None:
            self._step_slots(image_slots.Revoke(self._reserved))
            self._reserved = None
        for action in self._step_slots(image_slots.Pin(str(n), held)):
            if isinstance(action, image_slots.Read):
                del self._waiting[n]
                self._todo.append((server, lane.Newer(action.version)))
        self._reserve()

    def _publish(self, version: int) -> None:
        slot, self._reserved = self._reserved, None
        self._reached.setdefault(version, self._now)
        if slot is None:
            self.result.skipped += self._first_step is not None
            return
        self._published = version
        self.result.published += self._first_step is not None
        self._step_slots(image_slots.Write(slot, version, RANKS))
        self._reserve()
        self._after(self._s.copy_s, partial(self._copied, version))

    def _copied(self, version: int) -> None:
        self._step_slots(image_slots.Copied(version, 0))
        self._after(self._s.digest_s + self._patches.make(), partial(self._hashed, version))

    def _hashed(self, version: int) -> None:
        self._patches.completed(version)
        self._step_slots(image_slots.Complete(version))
        self._reserve()
        waiting = list(self._waiting)
        # All lanes wake at once; the threads' order is the system's.
        self._wakes.shuffle(waiting)
        for n in waiting:
            self._pin(self._servers[n])

    def _arrive(self) -> None:
        for n in self._network.take_arrived(self._now):
            server = self._servers[n]
            if self._first_step is not None:
                self.result.send_s.append(self._now - server.sent_at)
            version = server.lane.version
            assert version is not None
            if server.patch:
                self.result.patched += self._first_step is not None
                self._work(server, self._s.apply_s, lane.Staged(version))
                continue
            self._patches.sent_whole(n, self._now - server.sent_at)
            if str(n) in self._relays.nodes:
                rate = self._s.image_bytes / max(self._now - server.sent_at, 1e-9)
                self._relay(relay.Answered(str(n), version, True, rate))
            self._todo.append((server, lane.Staged(version)))

    # Deaths.

    def _schedule_death(self, server: _Server) -> None:
        if self._s.dying > 0:
            seconds = self._random.expovariate(self._s.dying / 60)
            self._after(seconds, partial(self._die, server))

    def _die(self, server: _Server) -> None:
        self._schedule_death(server)
        if not server.alive:
            return
        server.alive, server.engine = False, None
        self.result.deaths += 1
        self._after(self._s.restart_s, partial(setattr, server, "alive", True))
        lost, generated_s = dict(server.groups), server.generated_s(self._now)
        server.groups.clear()
        server.held_up.clear()
        server.paused_at = None
        self._end_turn(server)
        self._waiting.pop(server.number, None)
        self._relay(relay.Gone(str(server.number)))
        self._network.leave(server.number)
        if server.lane.phase is lane.Phase.SENDING:
            self._stop_transfer(server)
        if server.lane.phase is not lane.Phase.BACKOFF:
            self._todo.append((server, lane.Failed()))
            self._drain()
        self.result.moved += len(lost)
        for group, end in lost.items():
            heapq.heappush(self._again, group)
            self._left_s[group] = self._group_s() if self._s.whole_answers else end - generated_s
            self._unstarted[group // self._s.groups_per_step] += 1
        for n in sorted(self._spare):
            if not self._again:
                break
            self._fill(self._servers[n])

    # Groups.

    def _fill(self, server: _Server, idle: bool = False) -> None:
        """Give a server groups until it is full or no group may start on its version. ``idle``: it
        had room before."""
        n, room = server.number, self._s.groups_at_once
        idle = idle or bool(self._spare)
        # A dead server accepts for its lane until the lane notices.
        while server.alive and len(server.groups) < room and server.lane.entry.accepting:
            version = server.lane.entry.held
            assert version is not None
            if self._again and self._admission.may_start(self._again[0], version):
                group = heapq.heappop(self._again)
            elif self._admission.may_start(self._next, version):
                group = self._next
                self._next += 1
                self._step_admission(admission.Admit(group, version))
                step = group // self._s.groups_per_step
                self._unstarted.setdefault(step, self._s.groups_per_step)
                self._unmade.setdefault(step, self._s.groups_per_step)
            else:
                break
            self._step_admission(admission.Start(group, version))
            self._made_by[group] = min(version, self._made_by.get(group, version))
            step = group // self._s.groups_per_step
            self._unstarted[step] -= 1
            if not self._unstarted[step]:
                oldest = max(0, step - self._s.max_staleness)
                self._late_s[step] = self._now - self._reached[oldest] if idle else 0.0
            seconds = self._left_s.pop(group) if group in self._left_s else self._group_s()
            server.groups[group] = server.generated_s(self._now) + seconds
            self._after(seconds, partial(self._group_ends, server, group))
        if server.alive and server.lane.entry.accepting and len(server.groups) < room:
            self._spare.add(n)
        else:
            self._spare.discard(n)

    def _step_admission(self, event: admission.Event) -> None:
        self._admission, _ = admission.step(self._admission, event)

    def _group_ends(self, server: _Server, group: int) -> None:
        if group not in server.groups:
            return  # the server died; the group is made elsewhere, or here again
        if server.paused_at is not None:
            server.held_up.append(group)
            return
        left_s = server.groups[group] - server.generated_s(self._now)
        if left_s > MOMENT_S:  # a pause came in between
            self._after(left_s, partial(self._group_ends, server, group))
            return
        del server.groups[group]
        self._made(group)
        self._fill(server)

    def _resumed(self, server: _Server) -> None:
        if server.paused_at is None:
            return
        server.paused_s += self._now - server.paused_at
        if self._first_step is not None:
            self.result.pause_s.append(self._now - server.paused_at)
        server.paused_at = None
        for group in server.held_up:
            left_s = server.groups[group] - server.generated_s(self._now)
            self._after(left_s, partial(self._group_ends, server, group))
        server.held_up.clear()

    def _group_s(self) -> float:
        return self._s.mean_group_s * self._random.uniform(0.5, 1.5)

    def _made(self, group: int) -> None:
        step = group // self._s.groups_per_step
        self._unmade[step] -= 1
        if step == self._version and not self._unmade[step] and self._idle_since is not None:
            self._begin_step()

    # Trainer.

    def _begin_step(self) -> None:
        """Begin the next step: all its groups are complete."""
        s, result, version = self._s, self.result, self._version
        if self._first_step is None:
            self._first_step = result.start_s = self._now
            self._network.busy_s.clear()
            self._network.sent_bytes = 0.0
            result.deaths = result.moved = result.failed_transfers = 0
        else:
            self._stalled(self._now)
        self._idle_since = None
        groups = range(version * s.groups_per_step, (version + 1) * s.groups_per_step)
        result.staleness += (version - self._made_by.pop(group) for group in groups)
        self._step_admission(admission.Used(tuple(groups)))
        # The next optimizer step waits for the copy of the last version.
        late = max(0.0, s.copy_s - s.step_s)
        result.stall_s += late
        result.stall_for_copy_s += late
        self._after(s.step_s + late, self._step_ends)

    def _stalled(self, now: float) -> None:
        assert self._idle_since is not None
        stall_s = now - self._idle_since
        self.result.stall_s += stall_s
        if self._unstarted.get(self._version, 1):
            late_s = stall_s if self._spare else 0.0
        else:
            late_s = self._late_s[self._version]
        self.result.stall_for_versions_s += min(stall_s, late_s)

    def _step_ends(self) -> None:
        result = self.result
        result.steps += 1
        held = [server.lane.entry.held for server in self._servers]
        result.lags += (max(0, self._version - own) for own in held if own is not None)
        result.without += held.count(None)
        step, self._version = self._version, self._version + 1
        del self._unmade[step], self._unstarted[step], self._late_s[step]
        self._publish(self._version)
        self._idle_since = self._now
        if not self._unmade.get(self._version, 1):
            self._begin_step()


def quantile(values: Sequence[float], share: float) -> float:
    """Return the value that has a ``share`` of all values below it; nan without values."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else float("nan")
