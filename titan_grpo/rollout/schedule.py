"""Choice of the group that starts next, and of its server: the servers' load and health, the places
of protocol/admission.py, the waiting groups and their expected durations. Bookkeeping without I/O;
time is an argument, in seconds of any monotonic clock."""

from bisect import insort
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from heapq import heapify, heappop, heappush
from itertools import takewhile
from math import inf
from statistics import median_low

from titan_grpo.protocol import admission
from titan_grpo.protocol.admission import Admission, Admit, GiveUp, Start, Unversioned, Used
from titan_grpo.protocol.messages import ServerState
from titan_grpo.protocol.recovery import Health
from titan_grpo.rollout.messages import RolloutSpec, Ticket
from titan_grpo.rollout.task_runner import TaskRunner
from titan_grpo.samples import Group, Prompt

HEALTH = Health(first_s=0.5, longest_s=15.0)
"""Back-off of new groups after a server failed to generate, in seconds."""

SMOOTHING = 0.3
"""Weight of the newest value in an exponential moving average."""

SLOW = 2.5
"""Seconds per token, of those of the median server, from which a server counts as slow. Less is
noise, or the load's doing: equal servers get equal loads."""

LEAST_S = 0.3
"""Seconds of measured answers from which a server's speed is known: of a short answer, all pieces
may come at once, which says nothing about the server."""

OLDER = 0.9
"""Weight of all requests before the newest one in the measurement of a server's speed, and of its
longest pause after each step."""

QUIET_S, QUIET = 10.0, 5.0
"""A server is stuck if none of its open answers got a token for QUIET_S seconds and for QUIET times
the longest such pause of late: that of a commit or a long prompt, or of the last stuck server."""

STUCK_S = 60.0
"""How long a stuck server gets no groups, in seconds, unless its lane reaches it before."""

TRUST = 20.0
"""How long a measurement counts, in durations of the measured request. Then a slow server without
groups gets one again, which takes a twentieth of the time."""


@dataclass(slots=True)
class Server:
    """A server: its ``state`` from the ledger, its load, and its health as seen by generation
    requests, which the ledger does not see."""

    state: ServerState
    in_flight: int = 0
    left: bool = False
    health: Health = HEALTH
    slowness: float = 1.0
    """Seconds per token, of those of the median server; 1.0 unless it is slow."""
    sampled: tuple[float, float] = (0.0, 0.0)
    """Tokens of its latest requests, and the seconds that it took for them."""
    known_until: float = 0.0
    """When ``sampled`` is too old to count."""
    answers: int = 0
    """Open streamed answers."""
    last_token_s: float = 0.0
    """When one of them got a token, or the first one was asked for."""
    pause_s: float = 0.0
    """Longest time between two tokens of any open answers, of late."""
    lost_s: float = inf
    """Since when the ledger does not know its version."""
    aside_until: float = -inf
    """Until when it gets no groups, because it was stuck."""

    @property
    def url(self) -> str:
        return self.state.url

    @property
    def newest(self) -> int | None:
        """Newest version that the server may serve; None if unknown. From a commit's pause on, this
        is the committing version: the ledger learns of a commit after the engine has resumed."""
        version, committing = self.state.version, self.state.committing
        return version if version is None else max(version, committing or 0)

    def note(self, state: ServerState, now: float) -> None:
        """Take over the ledger's state. A back-off after failures continues."""
        if state.version is None:
            self.lost_s = min(self.lost_s, now)
            self.slowness, self.sampled, self.known_until = 1.0, (0.0, 0.0), 0.0
        else:
            self.lost_s = inf
            if state.version != self.state.version:
                self.aside_until = -inf
        self.state = state

    def rests(self, now: float) -> bool:
        """Return whether it gets no groups because it failed or was stuck."""
        return now < self.aside_until or not self.health.askable(now)

    def able(self, now: float) -> bool:
        """Return whether it may get groups."""
        return self.state.version is not None and self.state.accepting and not self.rests(now)

    def answer_began(self, now: float) -> None:
        """Note a streamed answer that begins."""
        if not self.answers:
            self.last_token_s = now
        self.answers += 1

    def answer_ended(self) -> None:
        """Note the end of a streamed answer, whole or not."""
        self.answers -= 1

    def token_came(self, now: float) -> None:
        """Note a token of a streamed answer."""
        self.pause_s, self.last_token_s = max(self.pause_s, now - self.last_token_s), now

    def failed(self, now: float) -> float:
        """Start or extend the back-off after a failed group; return the time at which it ends."""
        # One incident breaks all groups in flight: it counts once.
        if self.health.askable(now):
            self.health = self.health.silent(now)
        return self.health.until

    def succeeded(self) -> None:
        """End the back-off after a whole group."""
        self.health = self.health.answered()

    def took(self, tokens: int, seconds: float, now: float) -> None:
        """Note ``tokens`` of a request that came, one after the other, in ``seconds``."""
        if tokens:
            # Sums, not a mean of quotients: a short request says little.
            older = OLDER if now - seconds < self.known_until else 0.0
            self.sampled = older * self.sampled[0] + tokens, older * self.sampled[1] + seconds
            self.known_until = now + TRUST * seconds

    @property
    def weight(self) -> float:
        """Requests of a server that is not slow, for which one of its own counts."""
        # Twice: it makes so many fewer groups in a time, and a step waits so much longer for each.
        return self.slowness**2

    def load(self, requests: int, now: float) -> float:
        """Return its load with ``requests`` more, in requests of a server that is not slow."""
        known = self.in_flight > 0 or now < self.known_until
        return (self.in_flight + requests) * (self.weight if known else 1.0)

    def compared(self, slowness: float) -> bool:
        """Take over its seconds per token, of those of the median server; return whether it is
        slow, or not slow, from now on."""
        was_slow = self.slowness > 1.0
        # Not on and off by noise.
        is_slow = slowness >= (SLOW**0.5 if was_slow else SLOW)
        self.slowness = slowness if is_slow else 1.0
        return is_slow != was_slow

    def still_s(self, patience_s: float, now: float) -> float:
        """Return the seconds for which a server with groups has stood still: for ``patience_s`` or
        more without a token of its open answers, or for QUIET_S or more without a known version;
        0.0 if it has not."""
        silent_s = now - self.last_token_s if self.answers else 0.0
        unknown_s = now - self.lost_s
        if not self.in_flight or (silent_s < patience_s and unknown_s < QUIET_S):
            return 0.0
        return max(silent_s, unknown_s)

    def set_aside(self, now: float) -> None:
        """Keep groups away from it for a time, because it is stuck."""
        self.aside_until = now + STUCK_S
        if self.answers:
            # If it was a mistake, it is not made again at once.
            self.pause_s = max(self.pause_s, now - self.last_token_s)


class Fleet:
    """The servers of a run, and what is said of one by comparison with the others: slow, stuck."""

    def __init__(self) -> None:
        self._servers: dict[str, Server] = {}

    def __iter__(self) -> Iterator[Server]:
        return iter(self._servers.values())

    def get(self, url: str) -> Server | None:
        """Return a server of the run; None if there is none of this URL."""
        return self._servers.get(url)

    @property
    def newest(self) -> int | None:
        """Newest version that any server holds; None if there is none."""
        return max((v for s in self if (v := s.state.version) is not None), default=None)

    def note(self, state: ServerState, now: float) -> None:
        """Take over the ledger's state of a server, which joins the run with its first one."""
        self._servers.setdefault(state.url, Server(state)).note(state, now)

    def remove(self, url: str) -> None:
        """Take a server out of the run. Its groups in flight keep their Server."""
        if (server := self._servers.pop(url, None)) is not None:
            server.left = True

    def compare(self) -> list[Server]:
        """Compare the servers' speeds, once a step; return those that are slow, or not slow, from
        now on. Their longest pauses count less from step to step."""
        for server in self:
            server.pause_s *= OLDER
        each = {s.url: s.sampled[1] / s.sampled[0] for s in self if s.sampled[1] >= LEAST_S}
        if len(each) < 2:
            return []
        median = median_low(each.values())
        return [s for s in self if s.compared(each.get(s.url, median) / median)]

    def listen_anew(self, now: float) -> None:
        """Forget the servers' silence so far: this process read nothing."""
        for server in self:
            server.last_token_s = now

    def stuck(self, now: float) -> list[tuple[Server, float]]:
        """Return the servers that stand still, whose groups had better go on elsewhere, each with
        the seconds for which it has done so, and keep groups away from them; none if no other
        server could take the groups.

        A commit deadline or a request's one would find them too, minutes later. A server that is
        stuck by mistake costs its prompts' prefill.
        """
        patience_s = max(QUIET_S, QUIET * max((s.pause_s for s in self), default=0.0))
        each = [(s, s.still_s(patience_s, now)) for s in self]
        if not any(s.able(now) for s, still_s in each if not still_s):
            return []
        found = [(s, still_s) for s, still_s in each if still_s]
        for server, _ in found:
            server.set_aside(now)
        return found


class Room:
    """Snapshot of the servers that can take a group of ``requests`` at ``now``: they accept, are
    not in back-off, and have at most ``capacity`` requests with it. An idle server takes even a
    larger group; the connection limit of its driver then bounds the requests in flight.

    The cost of a server is its load with the group, plus one group's requests for each version that
    it is behind. So a late server, whose groups go stale first, fills up last. All requests of a
    group go to one server, which has the prompt in its prefix cache after the first request.
    ``share``: load from which a server takes no more (Spread).
    """

    def __init__(
        self,
        servers: Iterable[Server],
        requests: int,
        capacity: int,
        now: float,
        share: float = inf,
    ) -> None:
        self._requests, self._capacity, self._share, self._now = requests, capacity, share, now
        self._heaps: dict[int, list[tuple[float, int, str, Server]]] = {}
        """Version -> heap of (cost, lag, URL, server), cost and lag up to a constant that all
        servers share. One heap per version: a group that needs a minimum version finds its server
        without a scan of all servers."""
        able = [(s, v) for s in servers if (v := s.state.version) is not None and s.able(now)]
        newest = max((v for _, v in able), default=0)
        for server, version in able:
            if version == newest and server.slowness == 1.0 and not self._fits(server):
                # What a full server has sooner, a slow one does not take.
                self._share = min(self._share, server.in_flight)
        for server, version in able:
            if self._takes(server):
                self._heaps.setdefault(version, []).append(self._entry(server, version))
        for heap in self._heaps.values():
            heapify(heap)

    @property
    def newest(self) -> int | None:
        """Newest version of the servers with room; None if there is none."""
        return max((version for version, heap in self._heaps.items() if heap), default=None)

    def take(self, needed: int, avoid: str = "") -> Server | None:
        """Return the cheapest server with version ``needed`` or later, and add the group's requests
        to its load; None without one. ``avoid`` (where the group failed) is the last choice."""
        heaps = [heap for version, heap in self._heaps.items() if version >= needed and heap]
        aside = [(heap, heappop(heap)) for heap in heaps if heap[0][2] == avoid]
        others = [heap for heap in heaps if heap]
        if not others and not aside:
            return None
        heap = min(others, key=lambda heap: heap[0]) if others else aside[0][0]
        server = heappop(heap)[3] if others else aside.pop()[1][3]
        for of, entry in aside:
            heappush(of, entry)
        server.in_flight += self._requests
        if (version := server.state.version) is not None and self._takes(server):
            heappush(heap, self._entry(server, version))
        return server

    def _fits(self, server: Server) -> bool:
        return server.in_flight + self._requests <= self._capacity or server.in_flight == 0

    def _takes(self, server: Server) -> bool:
        load = server.load(self._requests, self._now)
        return self._fits(server) and load < self._share + self._requests

    def _entry(self, server: Server, version: int) -> tuple[float, int, str, Server]:
        load = server.load(self._requests, self._now)
        return load - version * self._requests, -version, server.url, server


SPREAD = 0.25
"""Part of a group's mean duration in which a version should be on all servers, see Spread."""


class Spread:
    """Each server's share of the load while a new version reaches the servers.

    Servers get a version one after the other, and many groups may wait for it. The first server
    would take all that fit, and the others would idle until the next version. So for a short time a
    server takes its share only. A server that misses this time (it is slow or frozen) is not waited
    for again until it has got a version in time.

    Worked example: groups of 8 requests, two servers without load, 5 groups wait. The share is 20
    requests: the first server with the version takes 3 groups. The second one takes the other 2
    when it has the version; if it has not at ``until``, the first one takes them as well.
    """

    def __init__(self) -> None:
        self._version, self._over = -1, True
        self._late = set[str]()
        """URLs of the servers that missed the time for their last version."""
        self.until = 0.0
        """When the time for the newest version ends, by the dispatcher's clock."""

    def share(self, servers: Iterable[Server], requests: int, group_s: float, now: float) -> float:
        """Return the load from which a server takes no more groups (Room); inf: no limit.

        ``requests``: of all groups that wait. ``group_s``: mean duration of a group in seconds, 0.0
        while unknown.
        """
        able = [(s, v) for s in servers if (v := s.state.version) is not None and not s.rests(now)]
        newest = max((v for s, v in able if s.state.accepting), default=-1)
        if newest > self._version:
            self._version, self._over, self.until = newest, False, now + SPREAD * group_s
        if self._over:
            return inf
        self._over = now >= self.until
        for server, version in able:
            if version >= self._version or self._over:
                in_time = version >= self._version
                (self._late.discard if in_time else self._late.add)(server.url)
        sharing = [s for s, _ in able if s.url not in self._late]
        missing = [s for s, v in able if s.url not in self._late and v < self._version]
        if self._over or not missing:
            return inf
        requests += sum(s.in_flight for s in sharing)
        return requests / sum(1 / s.weight for s in sharing)


REMEMBERED = 100_000
"""Number of prompts whose durations are kept; the oldest are evicted first."""


class Durations:
    """Estimates of a group's duration, in seconds: the last measurement of the same prompt, else
    from the task's ``expected_tokens``. Only the order of starts depends on them, and how long
    Spread waits."""

    def __init__(self) -> None:
        self._known: OrderedDict[int, float] = OrderedDict()
        """By the hash of a prompt's tokens: the tokens would be gigabytes for long prompts."""
        self._token_s = 0.0
        self.group_s = 0.0
        """Mean duration of a group; 0.0 while unknown."""

    def expected_s(self, prompt: Prompt, expected_tokens: float) -> float:
        """Return the expected duration of the prompt's group; 0.0 if unknown. ``expected_tokens``:
        the task's estimate, 0.0 without one."""
        # Until the first group has measured the seconds per token, only proportions matter.
        estimate = expected_tokens * (self._token_s or 1e-3)
        return self._known.get(hash(prompt.token_ids), estimate)

    def took(self, group: Group, seconds: float) -> None:
        """Note the duration of a group that was made in one attempt."""
        key = hash(group.prompt.token_ids)
        self._known.pop(key, None)
        self._known[key] = seconds
        if len(self._known) > REMEMBERED:
            self._known.popitem(last=False)
        each = seconds / max(1, max(len(c.token_ids) for c in group.completions))
        weight = SMOOTHING if self._token_s else 1.0
        self._token_s += (each - self._token_s) * weight
        self.group_s += (seconds - self.group_s) * weight


@dataclass(frozen=True, slots=True)
class Waiting:
    """A group that may start: its ticket, the server to avoid, and its expected duration."""

    ticket: Ticket
    avoid: str = ""
    expected_s: float = 0.0


class Starts:
    """Queue of the groups that may start, in the order of their urgency. All methods run in the
    dispatcher's loop; times are seconds of its clock. The prompt of a group is made when the group
    enters the queue (TaskRunner.ahead)."""

    def __init__(self, spec: RolloutSpec, runner: TaskRunner, durations: Durations) -> None:
        self._admission = Admission(
            spec.base_version,
            spec.prompts_per_step,
            spec.max_staleness,
            spec.places,
            tuple(sorted(spec.waiting)),
        )
        self._runner, self._durations = runner, durations
        self._fresh, self._first_attempt = spec.unused_prompts(), spec.sessions_lost
        self._next = next(self._fresh)
        self._again: deque[Waiting] = deque()
        self._waiting: dict[int, Waiting] = {}
        self._order: list[Waiting] | None = None
        """Waiting groups by urgency, and some that have started since; None: sort again."""
        self._trainer: tuple[int, float] | None = None
        self._step_s = 0.0

    @property
    def waiting(self) -> int:
        """Number of queued groups."""
        return len(self._waiting)

    def trainer_at(self, version: int, now: float) -> None:
        """Note that the trainer reached a version, and update the mean duration of a step."""
        if self._trainer is not None and version > self._trainer[0]:
            each = (now - self._trainer[1]) / (version - self._trainer[0])
            self._step_s += (each - self._step_s) * (SMOOTHING if self._step_s else 1.0)
        if self._trainer is None or version != self._trainer[0]:
            self._trainer, self._order = (version, now), None

    def note(self, event: Used | Unversioned | GiveUp) -> None:
        self._admission, _ = admission.step(self._admission, event)
        if not isinstance(event, GiveUp):
            # A given-up place moves only few groups to an earlier step. Do not sort again for that:
            # a user's filter may give up half of the prompts.
            self._order = None

    def again(self, ticket: Ticket, avoid: str = "") -> None:
        """Let ``admit`` queue a group again; it keeps its place."""
        self._again.append(Waiting(ticket, avoid))

    def admit(self, newest: int) -> bool:
        """Queue one group: one to be made again, else that of the next prompt. Return False if
        there is none. ``newest``: newest version of any server. Takes the milliseconds that the
        task needs to make a prompt."""
        if self._again:
            waiting = self._again.popleft()
        elif self._admission.may_start(self._next, newest):
            self._admission, _ = admission.step(self._admission, Admit(self._next, newest))
            waiting = Waiting(Ticket(self._next, self._first_attempt))
            self._next = next(self._fresh)
        else:
            return False
        # None: the task failed. The start of the group raises the error and counts it.
        if (made := self._runner.ahead(waiting.ticket.index)) is not None:
            waiting = replace(waiting, expected_s=self._durations.expected_s(*made))
        self._waiting[waiting.ticket.index] = waiting
        if self._order is not None:
            insort(self._order, waiting, key=self._urgency)
        return True

    def most_urgent(self, best: int) -> Waiting | None:
        """Return the most urgent group that may start on a server that holds ``best``, or None."""
        if self._order is None:
            self._order = sorted(self._waiting.values(), key=self._urgency)
        del self._order[: sum(1 for _ in takewhile(self._started, self._order))]
        waiting = (each for each in self._order if not self._started(each))
        first = next(waiting, None)
        if first is None or self._may_start(first, best):
            return first
        # Test the earliest place first: it needs the oldest version, so if it must wait, all must.
        if not self._may_start(self._waiting[min(self._waiting)], best):
            return None
        return next((each for each in waiting if self._may_start(each, best)), None)

    def _started(self, waiting: Waiting) -> bool:
        return self._waiting.get(waiting.ticket.index) is not waiting

    def _urgency(self, waiting: Waiting) -> tuple[float, int]:
        used_at, index = self._admission.used_at(waiting.ticket.index), waiting.ticket.index
        return admission.urgency(used_at, waiting.expected_s, self._step_s), index

    def _may_start(self, waiting: Waiting, version: int) -> bool:
        return self._admission.may_start(waiting.ticket.index, version)

    def needed_version(self, prompt: int) -> int:
        """Return the oldest version whose server may make the prompt's group."""
        return self._admission.needed_version(prompt)

    def start(self, prompt: int, version: int) -> int:
        """Mark a waiting group as started; return the trainer's version at which it is used."""
        self._admission, (made,) = admission.step(self._admission, Start(prompt, version))
        del self._waiting[prompt]
        return made.used_at
