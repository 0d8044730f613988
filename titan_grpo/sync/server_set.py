"""The servers of a run, behind one lock: members, versions held, servers open to rollouts.

::

    commands, servers file --add, remove, listed--> members --Join--> a lane starts
                                                           `--Leave--> a lane ends
    lanes --note, latch--> ledger lines --set_server, remove_server--> observer (the rollouts)
    main thread --reached, take_error, wait_held-->
"""

import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from titan_grpo.errors import ServerRefused, SyncError, TitanGrpoError
from titan_grpo.observe import terminal
from titan_grpo.observe.recorder import Recorder
from titan_grpo.protocol import members
from titan_grpo.protocol.messages import Entry, Label, ServerState, Standing

if TYPE_CHECKING:
    from titan_grpo.sync.images import Published

logger = logging.getLogger(__name__)

JOIN_S = 10.0
"""Seconds for all lanes to end, unless a flush or a commit sets the deadline."""

LEAST_S = 1.0
"""Least seconds for the lanes to end after a flush that used up its deadline."""

_KNOWN = (Standing.HOLDS, Standing.RECEIVING, Standing.COMMITTING)


class ServerObserver(Protocol):
    """Observer of the servers' states. Called under the set's lock, in the order of the changes;
    must not block."""

    def set_server(self, state: ServerState) -> None:
        """A server's line changed."""

    def remove_server(self, url: str) -> None:
        """A server left the run."""

    def fail(self, error: TitanGrpoError) -> None:
        """Other runs have all servers of the run."""


class NoObserver:
    """ServerObserver that ignores all changes."""

    def set_server(self, state: ServerState) -> None:
        """See ServerObserver."""

    def remove_server(self, url: str) -> None:
        """See ServerObserver."""

    def fail(self, error: TitanGrpoError) -> None:
        """See ServerObserver."""


class Reports(Protocol):
    """Receiver of the lanes' reports."""

    def note(self, url: str, entry: Entry, engine: str, label: Label | None = None) -> None:
        """Note a server's entry. ``engine``: its name, empty while unknown; ``label``: of the
        version that the server was just found to hold."""

    def refused(self, url: str, reason: str, final: bool) -> None:
        """A server refused this run; ``final``: it always will, unless restarted otherwise."""

    def taken(self, url: str, run: str) -> None:
        """Another run took a server from this one."""

    def latch(self, error: SyncError) -> None:
        """Keep a background error until the step boundary collects it."""

    def sealed(self, version: int, published: "Published | None") -> None:
        """A version is complete; None: it failed."""

    def lane_ended(self, url: str) -> None:
        """A lane has ended."""


class Lane(Protocol):
    """One server's lane, in this process or another."""

    url: str

    @property
    def epoch(self) -> int:
        """Number of connections so far."""

    def start(self) -> None:
        """Start; does not wait for the server."""

    def stop(self) -> None:
        """End at once, or after the commit in progress. Does not wait."""

    def abort(self) -> None:
        """Abort the lane's wait, in a commit too."""

    def join(self, timeout: float) -> None:
        """Wait up to ``timeout`` seconds for the end."""

    def is_alive(self) -> bool:
        """Return whether the lane has not ended."""


OpenLane = Callable[[str, int], Lane]
"""(url, last epoch of the server's previous lane) -> a lane that is not started."""


@dataclass(slots=True)
class _Server:
    entry: Entry = field(default_factory=Entry)
    label: str = ""
    lane: Lane | None = None
    epoch: int = 0
    highest: int = -1
    """Highest version read back in this run."""
    error: SyncError | None = None
    refusal: str = ""
    """Reason of its last refusal, until it holds a version."""
    final: bool = False
    """Whether the refusal is for good: a retry changes nothing."""
    taken_by: str = ""
    """Run that took it from this one."""


class ServerSet:
    """All servers of one run. Any thread may call any method; the docstring says if it waits."""

    def __init__(
        self,
        first: members.Members,
        open_lane: OpenLane,
        recorder: Recorder,
        *,
        observer: ServerObserver | None = None,
        leave_s: float = JOIN_S,
        max_lag: int = 0,
    ) -> None:
        """``first``: the servers that the run starts with. ``leave_s``: seconds for the lane of a
        leaving server to end; must cover a commit. ``max_lag``: see weight_sync.max_lag."""
        self._members = first
        self._servers = {url: _Server() for url in self.urls}
        self._open_lane, self._recorder, self._leave_s = open_lane, recorder, leave_s
        self._observer = observer or NoObserver()
        self._changing = threading.Lock()
        """Serialises changes of the members; taken before ``_changed``. The main thread takes it
        only at the start and at the end of the run."""
        self._changed = threading.Condition()
        self._max_lag = max_lag
        self._version = 0
        self._since: int | None = None
        """The trainer's version at the first boundary after the last commit; None: none since."""
        self._error: SyncError | None = None
        self._further = 0
        self._lost: SyncError | None = None
        self._ended = False
        self._left_s = JOIN_S

    def __repr__(self) -> str:
        return "<ServerSet " + ", ".join(f"{u} {e!r}" for u, e in self.entries().items()) + ">"

    def start(self) -> None:
        with self._changing:
            for url in self.urls:
                self._open(url)

    def flush(self, version: int, timeout_s: float) -> list[str]:
        """Wait until all answering servers hold ``version``, the last one; return those that do.

        ``timeout_s`` bounds this call and the following ``close`` together: a quarter of it
        (at most ``JOIN_S``) is kept for the lanes to end.
        """
        start = time.monotonic()
        holding = self.wait_held(version, timeout_s - min(JOIN_S, timeout_s / 4), everyone=True)
        self._left_s = max(LEAST_S, timeout_s - (time.monotonic() - start))
        return holding

    def close(self, within_s: float = JOIN_S) -> float:
        """Stop all lanes and wait up to ``within_s`` seconds for them, or less if a flush left
        less. Return the deadline (monotonic clock), or 0 if the set was closed before.

        Commits may end in that time. The pause guard recovers the server of a lane that does not.
        """
        within_s = min(within_s, self._left_s)
        deadline = time.monotonic() + within_s
        with self._changing, self._changed:
            if self._ended:
                return 0.0
            self._ended = True
            self._changed.notify_all()
            lanes = [s.lane for s in self._servers.values() if s.lane is not None]
        for lane in _end(lanes, deadline, min(1.0, within_s / 4)):
            self._recorder.error(
                f"the lane of {lane.url} did not end within {within_s:.1f} s: the server or the"
                " sync process does not answer. If the server is paused, the pause guard goes on"
                " until it has resumed it"
            )
        return deadline

    # Members.

    @property
    def urls(self) -> list[str]:
        """Servers that are in the run and not leaving, sorted."""
        return sorted(self._members.present)

    def add(self, url: str) -> bool:
        """Add a server: it gets the newest version before its first rollout. Return False if it has
        to wait for the end of its last lane. Raises ServerRefused with the reason."""
        self._change(members.Add(url))
        return url in self._members.present

    def remove(self, url: str, timeout_s: float) -> bool:
        """Remove a server: stop its rollouts at once, abort its transfer, finish its commit (else
        it would stay paused). Wait up to ``timeout_s`` seconds for its lane to end; return whether
        it did. Raises ServerRefused with the reason if the server cannot leave."""
        self._change(members.Remove(url))
        with self._changed:
            self._changed.wait_for(
                lambda: self._ended or url not in self._members.leaving, timeout_s
            )
            if self._ended:
                raise ServerRefused("the run is ending")
            return url not in self._members.leaving

    def listed(self, urls: Iterable[str]) -> None:
        """Apply new content of the servers file. Raises ServerRefused with the reason if it is
        rejected."""
        self._change(members.Listed(frozenset(urls)))

    def _change(self, event: members.Event) -> None:
        """Change the members; one change at a time."""
        with self._changing:
            with self._changed:
                if self._ended:
                    raise ServerRefused("the run is ending")
                self._members, actions = members.step(self._members, event)
                for action in actions:
                    match action:
                        case members.Join(url):
                            self._joins(url)
                        case members.Leave(url):
                            self._leaves(url)
                        case members.Refuse(reason):
                            raise ServerRefused(reason)
                self._changed.notify_all()
                count, version = len(self._members.present), self._version
            # Without _changed from here on: the main thread must not wait for prints and lanes.
            now = f"{count} server{'' if count == 1 else 's'} now"
            for action in actions:
                match action:
                    case members.Join(url):
                        self._recorder.joined(url, version)
                        terminal.print_status(
                            f"{url} joins at version {version}: the newest weights first, then"
                            f" rollouts; {now}"
                        )
                        self._open(url)
                    case members.Leave(url):
                        self._recorder.left(url, version)
                        terminal.print_status(
                            f"{url} leaves at version {version}: its rollouts are made elsewhere;"
                            f" {now}"
                        )
        # Without any lock: the end of a lane is a change too.
        for url in (action.url for action in actions if isinstance(action, members.Leave)):
            name = f"leave {url}"
            try:
                threading.Thread(target=self._end_lane, args=(url,), name=name, daemon=True).start()
            except RuntimeError:  # no free thread: the caller's waits for the lane's end
                self._end_lane(url)

    def _joins(self, url: str) -> None:
        server = self._servers.setdefault(url, _Server())
        server.entry = Entry()
        server.label = server.refusal = server.taken_by = ""
        server.final, server.error = False, None
        self._observer.set_server(ServerState(url, None, False, "", ""))

    def _leaves(self, url: str) -> None:
        # GONE first: the lane's last reports must not bring the server back.
        server = self._servers[url]
        server.entry = Entry(Standing.GONE)
        self._observer.remove_server(url)

    def _open(self, url: str) -> None:
        """Open a server's lane. Under ``_changing``: no thread ends the lane before it is set."""
        self._recorder.known_server(url)
        # Continue the count of epochs: a receiver refuses one that it has seen.
        lane = self._open_lane(url, self._servers[url].epoch)
        with self._changed:
            self._servers[url].lane = lane
        lane.start()

    def _end_lane(self, url: str) -> None:
        lane = self._servers[url].lane
        assert lane is not None
        slow = _end([lane], time.monotonic() + self._leave_s, JOIN_S)
        if slow:
            cause = "its lane did not end: the server cannot be added again in this run"
            self.latch(SyncError(cause, url=url))
            return
        with self._changed:
            self._servers[url].epoch, self._servers[url].lane = lane.epoch, None
        with suppress(ServerRefused):  # if the run is ending
            self._change(members.Ended(url))

    # Ledger.

    def note(self, url: str, entry: Entry, engine: str, label: Label | None = None) -> None:
        """See Reports. Call the observer if the state changed."""
        with self._changed:
            server = self._servers[url]
            if server.entry.standing is Standing.GONE:
                return  # its lane still reports while it ends
            before, server.entry = server.entry, entry
            if label is not None:
                server.label = str(label)
            held = entry.held
            if held is not None:
                server.refusal, server.final = "", False
                if held > server.highest:
                    server.highest, self._since = held, None
            if (before.held is None) != (held is None):
                self._recorder.holds(url, held)
            if (before.accepting, before.held) != (entry.accepting, held) and not self._ended:
                # Under the lock: after a concurrent removal this call would bring the server back.
                self._observer.set_server(
                    ServerState(url, held, entry.accepting, server.label, engine, entry.committing)
                )
            self._changed.notify_all()

    def entries(self) -> dict[str, Entry]:
        """Return a copy of all lines, also of servers that have left."""
        with self._changed:
            return {url: server.entry for url, server in self._servers.items()}

    def versions(self) -> dict[str, int | None]:
        """Return each server's version, None if unknown."""
        return {u: e.held for u, e in self.entries().items() if e.standing is not Standing.GONE}

    def lane(self, url: str) -> Lane | None:
        with self._changed:
            return self._servers[url].lane

    def reached(self, version: int) -> None:
        """Note that the trainer is at ``version``. Raises SyncError if no server has committed a
        version, however old, for weight_sync.max_lag versions, or other runs have all servers.

        Live rollouts stop such a run anyway: without commits no group is fresh enough, and the wait
        for groups reaches its deadline. Recorded rollouts do not.
        """
        with self._changed:
            if self._lost is not None:
                raise self._lost
            self._version = version
            self._since = version if self._since is None else self._since
            behind = version - self._since
        if 0 < self._max_lag <= behind:
            raise SyncError(
                f"no server has committed anything for {behind} versions"
                f" (weight_sync.max_lag), and the trainer is at version {version}: {self.text()}"
            )

    def lines(self, in_flight: Mapping[str, int] | None = None) -> list[dict[str, Any]]:
        """Return the state of every server that has not left, as JSON-able values."""
        with self._changed:
            return [
                {
                    "url": url,
                    "standing": server.entry.standing.value,
                    "held": server.entry.held,
                    "incoming": server.entry.incoming,
                    "accepting": server.entry.accepting,
                    "in_flight": (in_flight or {}).get(url),
                    "last_error": " ".join(server.error.cause.split()) if server.error else "",
                }
                for url, server in self._servers.items()
                if server.entry.standing is not Standing.GONE
            ]

    def text(self) -> str:
        """Return every server's standing, version and last error, in one line."""
        return "; ".join(
            f"{line['url']} {line['standing']}"
            + (" (of no known version)" if line["held"] is None else f" (version {line['held']})")
            + (f", last error: {line['last_error']}" if line["last_error"] else "")
            for line in self.lines()
        )

    # Refusals.

    def refused(self, url: str, reason: str, final: bool) -> None:
        """Record a refusal and print a new reason; ``final``: the server refuses until it is
        restarted otherwise."""
        reason = reason.removeprefix(f"{url}: ")  # some name it, and so does what is printed
        with self._changed:
            server = self._servers[url]
            known = reason == server.refusal
            server.refusal, server.final = reason, final
            self._changed.notify_all()
        if not known:  # print at once: without a server the first step boundary may never come
            terminal.print_status(f"{url} refuses this run: {reason}")

    def taken(self, url: str, run: str) -> None:
        """Record that another run took a server. After the last one, ``reached`` raises."""
        text = f"run {run} took it over: it gets no more versions from this run"
        terminal.print_status(f"{url}: {text}")
        with self._changed:
            # Its lane ends and reports no more: without this line rollouts would still be made
            # there, with the other run's weights, and a wait for all servers would wait for it.
            self.note(url, Entry(), "")
            self._servers[url].taken_by = run
            lost = [self._servers[u].taken_by for u in self._members.present]
            if lost and all(lost):  # none is present while all of them leave or come again
                self._lost = SyncError(
                    f"run {', '.join(sorted(set(lost)))} took over every server of this run"
                )
                self._observer.fail(self._lost)
        self.latch(SyncError(text, url=url))

    def unfit(self) -> str:
        """Return each server's reason if none can ever serve this run; empty if one may."""
        with self._changed:
            servers = {url: self._servers[url] for url in self.urls}
            if not all(server.final for server in servers.values()):
                return ""
            return "; ".join(f"{url}: {server.refusal}" for url, server in servers.items())

    # Errors.

    def latch(self, error: SyncError) -> None:
        """Keep the first error until ``take_error`` collects it; count the others. A server's error
        is a fault on its track of the trace."""
        if error.url:
            details = {"version": error.version, "message": error.cause}
            self._recorder.instant("sync failure", error.url, **details)
        with self._changed:
            if self._error is None:
                self._error = error
            else:
                self._further += 1
                if not error.url:  # a lane logs its own
                    logger.warning("weight sync: %s", error)
            if error.url in self._servers:
                self._servers[error.url].error = error
            self._changed.notify_all()

    def take_error(self) -> SyncError | None:
        """Return the latched error once, with the number of errors after it. Never waits long: the
        lock is held for assignments only."""
        if self._error is None:
            return None
        with self._changed:
            error, further = self._error, self._further
            self._error, self._further = None, 0
        return error.followed_by(further)

    def latched(self) -> str:
        """Return the first error that ``take_error`` has not collected; empty if there is none."""
        error = self._error
        return str(error) if error is not None else ""

    def last_error(self, url: str) -> SyncError | None:
        """Return a server's last background error, collected or not."""
        with self._changed:
            return self._servers[url].error

    # Waits.

    def wait(self, fact: Callable[[], bool], timeout_s: float) -> bool:
        """Wait until ``fact()``, checked after every change; return False past the deadline."""
        with self._changed:
            return self._changed.wait_for(fact, timeout_s)

    def wait_held(self, version: int, timeout_s: float, everyone: bool) -> list[str]:
        """Wait until a server holds ``version`` or newer; return the servers that do by then. End
        the wait at once if no server can ever serve this run, or other runs have all servers.

        ``everyone``: wait for the others too, except those of unknown state (dead, restarting,
        quarantined): they get the newest version when they answer again.
        """
        holding: list[str] = []

        def done() -> bool:
            holding.clear()
            behind = False
            for url, server in self._servers.items():
                if server.entry.held is not None and server.entry.held >= version:
                    holding.append(url)
                else:
                    behind = behind or server.entry.standing in _KNOWN
            if self._lost is not None or self.unfit():
                return True
            return bool(holding) and not (everyone and behind)

        self.wait(done, timeout_s)
        return holding


def _end(lanes: Sequence[Lane], deadline: float, abort_s: float) -> list[Lane]:
    """Stop all lanes and wait for them together; abort the rest ``abort_s`` before the deadline
    (monotonic clock). Return the lanes that have not ended by then."""
    for lane in lanes:
        lane.stop()
    slow = _join(lanes, deadline - abort_s)
    for lane in slow:
        logger.warning("lane %s was stopped and goes on: what it waits for is aborted", lane.url)
        lane.abort()
    slow = _join(slow, deadline)
    for lane in slow:
        logger.warning("lane %s did not end by its deadline", lane.url)
    return slow


def _join(lanes: Iterable[Lane], deadline: float) -> list[Lane]:
    for lane in lanes:
        lane.join(max(0.0, deadline - time.monotonic()))
    return [lane for lane in lanes if lane.is_alive()]
