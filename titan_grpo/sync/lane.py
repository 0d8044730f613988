"""One server's lane: drives the pure table of protocol/lane.py and performs its actions.

A lane takes images from the slots. A working lane has a thread (lanes.py), which waits for its own
server only, always with a deadline. An idle lane has none: a new image, the end of its receiver, a
stop or its next look at the server wakes it. A server's error closes the epoch and leaves the
thread only as a latched record.
"""

import logging
import re
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial

import torch

from titan_grpo.engines.http import TlsFailed
from titan_grpo.engines.server import ServerControl
from titan_grpo.errors import (
    PeerError,
    ServerRefused,
    ServerTaken,
    ServerUnfit,
    SyncError,
    TitanGrpoError,
    TransferFailed,
)
from titan_grpo.layout.image import SharedImage
from titan_grpo.layout.manifest import Manifest
from titan_grpo.observe import names
from titan_grpo.observe.recorder import Recorder
from titan_grpo.protocol import lane as table
from titan_grpo.protocol.lane import LaneEvent, Observer, Point
from titan_grpo.protocol.messages import UNUSABLE, Applied, Entry, Joined, Label, Staged, Standing
from titan_grpo.protocol.recovery import Health
from titan_grpo.sync.images import ImageSlots, Parts, Published
from titan_grpo.sync.link import LaneLink, LinkOptions, answer_s
from titan_grpo.sync.pause_guard_main import perform, steps
from titan_grpo.sync.server_set import Reports
from titan_grpo.sync.stock import StockLink
from titan_grpo.sync.transports.channel import resolve_bind_host

logger = logging.getLogger(__name__)

LOOK_S = 60.0
"""Seconds between two looks of an idle lane at its server's label and pause, which a late call of a
replaced trainer may have changed. A restart or a takeover needs no look: it ends the receiver."""

SOON_S = 10.0
"""The same for a server without our receiver (after a restart it looks healthy and holds other
weights) and for a half-loaded one (another client must not resume it)."""

STOOD_STILL_S = 0.5
"""Longest time from a proof that the server is this lane's to its label or its resume, in seconds.
After more, a ping proves it again: after a freeze here the server may have been restarted or taken
by another run, which takes longer than this."""

FAILURES = TitanGrpoError, OSError, RuntimeError
"""What ends an epoch, not the lane. The last two: the system has no descriptor or thread left."""


@dataclass(frozen=True, slots=True)
class LaneContext:
    """Context shared by all lanes of a run. ``observer`` is called at every point."""

    run_id: str
    manifest: Manifest
    images: tuple[torch.Tensor, ...]
    shared: tuple[SharedImage | None, ...]
    """The same images, for readers on this host; None: no reading in place."""
    link: LinkOptions
    slots: ImageSlots
    wake: Callable[["ServerLane"], object]
    """Callback that has a lane work now, or once more after its present work. Never waits."""
    recorder: Recorder
    observer: Observer
    look_s: float
    renew: Callable[[str], object]
    """Callback with a server's URL when its connection makes progress. Never waits."""
    drain: Callable[[str], None] | None
    """Callback that waits, with a deadline, until a server that takes no new requests has none
    left; None: requests stay in flight over a commit."""


class ServerLane:
    """Keeps one server on the newest version."""

    def __init__(
        self, context: LaneContext, servers: Reports, control: ServerControl, epoch: int
    ) -> None:
        """``epoch``: the last one of the previous lane to this server in this run, or 0; this
        lane's are higher."""
        self.url = control.url
        self._c, self._servers, self._control = context, servers, control
        self._wake = partial(context.wake, self)
        self._turn = threading.Lock()
        self._stopping, self._ended = threading.Event(), threading.Event()
        self._idle: table.Action | None = None  # work to resume; None: not started
        self._seen_s = 0.0  # when the server last matched its line (monotonic clock)
        self._link: LaneLink | StockLink | None = None
        self._published: Published | None = None
        self._staged: Staged | None = None
        self._number = self._sent = 0
        config = self._config = context.link.config
        self._streamed = config.apply == "streamed"
        self._state = table.Lane(epoch=epoch, streamed=self._streamed)
        self._health = Health(config.backoff_s, config.backoff_max_s)
        self._label = self._held = Label(context.run_id, -1, "")
        self._before = ""  # label before the commit
        self._refusal = self._said = ""  # last refusal and error that were reported
        self._resting = False
        self._published_s = self._paused_s = self._proved_s = 0.0

    @property
    def epoch(self) -> int:
        return self._state.epoch

    def start(self) -> None:
        # Not at the last lane's end: a stop of that may come later, and this one could not pin.
        self._c.slots.forget(self.url)
        self._wake()

    def is_alive(self) -> bool:
        return not self._ended.is_set()

    def join(self, timeout: float) -> None:
        self._ended.wait(timeout)

    def stop(self) -> None:
        """End the lane soon. Any thread; does not wait.

        Abort its wait, except in a commit (it has a deadline; an abort would leave the server
        paused) and in an idle lane (it wakes up and sends its receiver that the run leaves).
        """
        # Under the lock of step(): a commit has either begun, and is not aborted, or never begins.
        with self._turn:
            self._stopping.set()
            ends_soon = self._state.phase in table.COMMITTING | {table.Phase.READY}
        self._c.slots.stop(self.url)
        if not ends_soon:
            self.abort()
        self._wake()

    def abort(self) -> None:
        """Abort the lane's wait, in a commit too. Any thread."""
        if (link := self._link) is not None:
            with suppress(PeerError):
                if self._streamed and self._state.phase in table.COMMITTING:
                    # Not link.abort(): the lane still reads the report and resumes the server.
                    link.cancel()
                else:
                    link.abort()
        self._wake()

    def work(self) -> float | None:
        """Step the table and perform its actions until the lane is idle. Return when to call again
        at the latest (monotonic clock); None: it has ended."""
        if not self.is_alive():
            return None
        try:
            event = table.Started() if self._idle is None else self._perform(self._idle)
            while not isinstance(event, float):
                with self._turn:
                    if self._stopping.is_set() and self._state.stoppable:
                        event = table.Stopped()
                    self._state, actions = table.step(self._state, event)
                for action in actions[:-1]:
                    self._report(action)
                work = self._idle = actions[-1]
                if isinstance(work, table.Leave):
                    break
                event = self._perform(work)
            else:
                return event
        except Exception as error:  # top of a thread: report that the server gets no more versions
            logger.exception("lane %s ended", self.url)
            self._servers.note(self.url, Entry(), self._control.engine)
            cause = f"the lane ended with {error!r}; this server gets no more versions"
            self._servers.latch(SyncError(cause, url=self.url))
        try:
            self._leave()
        finally:
            self._ended.set()
            self._servers.lane_ended(self.url)
        return None

    def _report(self, action: table.Action) -> None:
        match action:
            case table.Release():
                self._unpin()
            case table.Note(entry):
                holds = entry.standing is Standing.HOLDS
                if holds:
                    self._refusal = self._said = ""
                label = self._held if holds else None
                self._servers.note(self.url, entry, self._control.engine, label)

    def _perform(self, work: table.Action) -> table.Event | float:
        """Return the event; of idle work, when it resumes if no wake comes (monotonic clock)."""
        try:
            match work:
                case table.Connect(epoch, term):
                    return self._connect(epoch, term)
                case table.AwaitNewer():
                    return self._await_newer()
                case table.Send(version):
                    return self._send(version)
                case table.Pause():
                    return self._pause()
                case table.Load(version):
                    return self._load(version)
                case table.SetLabel(outcome):
                    return self._set_label(outcome)
                case table.Resume():
                    return self._resume()
                case table.ReadLabel():
                    return self._read_label()
                case table.Rest():
                    return self._rest()
        except ServerTaken as taken:
            self._close_link()
            earlier = taken.age_s > time.monotonic() - self._c.link.started_s
            if self._state.admitted:
                # The other run is newer: this run gives the server up for good.
                self._stopping.set()
                self._servers.taken(self.url, taken.run_id)
            elif not earlier:
                self._refused(str(taken), final=False)
                self._latch(f"another run has this server: {taken}")
            return table.Outranked(taken.term, earlier)
        except FAILURES as error:
            final = isinstance(error, ServerUnfit)
            connecting = self._state.phase is table.Phase.CONNECTING
            if final or (connecting and isinstance(error, ServerRefused | TlsFailed)):
                self._refused(str(error), final)
            what = re.sub(r"\B([A-Z])", r" \1", type(work).__name__).lower()
            self._latch(f"{what} failed: {error}", getattr(error, "block", None))
            return table.Failed()
        raise AssertionError(f"the lane table asked for {work!r}, which no lane performs")

    def _refused(self, reason: str, final: bool) -> None:
        """Report a refusal unless it repeats the last one."""
        before, self._refusal = self._refusal, reason
        if before != reason:
            self._servers.refused(self.url, reason, final)

    def _latch(self, cause: str, block: int | None = None) -> None:
        if not self._stopping.is_set():
            self._c.recorder.count(names.SYNC_FAILURES)
            error = SyncError(cause, url=self.url, version=self._state.version, block=block)
            said, self._said = self._said, str(error)
            # A server that is down for hours fails alike at each attempt: those are only counted.
            if self._said != said:
                # Log each one: a step boundary shows only the first and counts the others.
                logger.warning("weight sync: %s", error)
                self._servers.latch(error)

    def _pass(self, point: Point) -> None:
        version = -1 if self._state.version is None else self._state.version
        epoch = table.wire_epoch(self._state.epoch)
        self._c.observer(LaneEvent(point, self.url, self._c.run_id, epoch, version))

    def _connect(self, epoch: int, term: int) -> table.Event:
        with self._c.recorder.span(names.CONNECT_S, self.url, epoch=epoch):
            needs = self._c.link.needs
            if needs.tool_calls and self.url not in needs.exempt:
                # Before the hello, which takes the server from another run.
                self._control.check_tool_parser()
            self._pass(Point.GREET)
            self._link, self._number = self._make_link(table.wire_epoch(epoch), term), 0
            if self._stopping.is_set():  # a stop before this line found no link to abort
                raise TransferFailed("the lane was stopped while it connected")
            joined = self._link.join(self._control, self._config.connect_deadline_s)
            self._c.renew(self.url)
            # Record no quantization too: the server may have restarted without it.
            self._c.recorder.quantised(self.url, joined.quantization)
            event = self._settle(joined)
            # After settling: the answer proves that the engine has not restarted meanwhile.
            accepted = self._link.send_manifest(lambda _: self._c.renew(self.url))
        if not accepted.ok:
            raise TransferFailed(f"the server's receiver refused the manifest: {accepted.error}")
        if isinstance(self._link, LaneLink) and not self._streamed:
            self._control.greet({"attach": self._link.attach().to_dict()})
        self._pass(Point.CONNECTED)
        self._seen_s = time.monotonic()
        return event

    def _make_link(self, epoch: int, term: int) -> LaneLink | StockLink:
        c = self._c
        stock = self._control.stock() if self._streamed else None
        # Resolve for each connection: the name of a server that starts late may not resolve yet.
        bind_host = resolve_bind_host(c.link.bind_host, self.url)
        options = replace(c.link, bind_host=bind_host, url=self.url)
        if stock is not None:
            return StockLink(c.run_id, epoch, c.manifest, options, stock)
        return LaneLink(c.run_id, epoch, c.manifest, options, term, self._wake)

    def _settle(self, joined: Joined) -> table.Event:
        """Settle the server: a dead lane, receiver or trainer may have left it paused, or with a
        label of other weights."""
        held = joined.held
        for step in steps(self._control, joined, self._c.run_id):
            perform(self._control, step)
        if held is None or held.run_id != self._c.run_id:
            return table.Connected(None, joined.intact)
        self._held = held
        return table.Connected(held.version, joined.intact)

    def _await_newer(self) -> table.Event | float:
        if self._stopping.is_set():
            return table.Failed()
        entry = self._state.entry
        self._published = self._c.slots.pin_newer(self.url, entry.held, self._wake)
        if self._published is not None:
            self._label, self._published_s = self._published.label, self._published.published_s
            return table.Newer(self._published.version)
        link, every_s = self._open_link(), self._c.look_s
        if isinstance(link, StockLink) or entry.standing is Standing.QUARANTINED:
            every_s = min(SOON_S, every_s)
        try:
            if isinstance(link, LaneLink):
                link.check()
            if time.monotonic() >= self._seen_s + every_s:
                self._look()
                self._seen_s = time.monotonic()
        except FAILURES:
            self._c.slots.leave(self.url)
            raise
        return self._seen_s + every_s

    def _look(self) -> None:
        """Check an idle server against its line. Raises ServerRefused if they differ: the next
        connection settles the server."""
        if self._state.entry.standing is Standing.QUARANTINED and not self._control.paused():
            raise ServerRefused("it is half loaded, and another client resumed it")
        if isinstance(self._link, LaneLink):
            self._ping()  # a vanished host closes no connection
        if self._state.entry.held is None:
            return
        self._shown()
        if self._control.paused():
            raise ServerRefused(
                "it is paused, and not by this lane: by a late call of a trainer that was replaced,"
                " or by another client"
            )

    def _shown(self) -> str:
        """Return the server's label. Raises ServerRefused if it is not that of its line."""
        shown = self._control.label()
        if self._state.entry.held is not None and shown != str(self._held):
            raise ServerRefused(
                f"it serves {Label.parse(shown) or 'weights of its own'} instead of"
                f" v{self._held.version}: was it restarted, or do two servers answer at this URL?"
            )
        return shown

    def _send(self, version: int) -> table.Event:
        link, published, recorder = self._open_link(), self._pinned(), self._c.recorder
        self._pass(Point.BEGIN)
        self._number += 1
        digests, fingerprint = published.digests, published.label.fingerprint
        if self._streamed or isinstance(link, StockLink):
            staged = link.offer(self._number, version, digests, fingerprint)
        else:
            image = self._c.shared[published.slot] or self._c.images[published.slot]
            with recorder.span(names.SEND_S, self.url, version=version):
                place = Parts(image, published.elsewhere, published.patches)
                staged = link.send(self._number, version, place, digests, fingerprint, self._moved)
            recorder.observe(names.VERIFY_S, staged.verify_s)
            recorder.count(names.SYNC_BYTES, staged.read_bytes)
        if not staged.ok:
            if staged.bad_block >= 0:
                recorder.count(names.DIGEST_MISMATCHES)
            block = staged.bad_block if staged.bad_block >= 0 else None
            raise TransferFailed(f"the receiver refused it: {staged.error}", block)
        self._staged = staged
        self._pass(Point.STAGED)
        return table.Staged(version)

    def _moved(self, offset: int) -> None:
        self._sent = offset
        self._pass(Point.EXTENT)
        if offset == self._c.manifest.total_bytes:
            self._pass(Point.SENT)

    def _pause(self) -> table.Event:
        recorder = self._c.recorder
        if self._c.drain is not None:
            # Needs no phase of its own: at COMMITTING the server gets no new requests; it is not
            # paused, so the guard has nothing to do; and the pause follows in any case.
            with recorder.span(names.DRAIN_S, self.url, version=self._state.version):
                self._c.drain(self.url)
        self._before = self._shown()
        self._pass(Point.PAUSE)  # waits for the lane's turn, so before the clock of the pause
        self._paused_s = recorder.now()
        self._control.pause()
        if self._config.kv_after_update == "recompute":
            self._control.drop_kv()
        return table.Paused()

    def _load(self, version: int) -> table.Event:
        self._pass(Point.LOAD)
        applied, expected = self._applied(), self._label.fingerprint
        if applied.ok and applied.fingerprint != expected:
            self._c.recorder.count(names.DIGEST_MISMATCHES)
            self._c.recorder.count(names.QUARANTINES)
            self._latch(
                f"the engine must load fingerprint {expected}, it loaded {applied.fingerprint}; it"
                " stays paused"
            )
            return table.Loaded(version, ok=False, intact=False)
        if applied.final:
            self._refused(applied.error, final=True)
        if applied.ok:
            self._c.recorder.observe(names.LOAD_S, applied.load_s)
        else:
            broken = "half loaded, it stays paused until a full sync"
            end = "the engine keeps its version" if applied.intact else broken
            block = applied.bad_block if applied.bad_block >= 0 else None
            self._latch(f"the load failed: {applied.error}; {end}", block)
        if not applied.intact:
            self._c.recorder.count(names.QUARANTINES)
        return table.Loaded(version, applied.ok, applied.intact)

    def _applied(self) -> Applied:
        link, staged, recorder = self._open_link(), self._staged, self._c.recorder
        assert staged is not None
        self._proved_s = time.monotonic()  # by the answer; a freeze may fall on the wait for it
        if isinstance(link, LaneLink) and not self._streamed:
            self._control.load(link.commit(staged).to_dict())
            return link.wait_applied(staged.number, answer_s(self._config.commit_deadline_s))
        image, self._sent = self._c.images[self._pinned().slot], 0
        with recorder.span(names.SEND_S, self.url, version=staged.version):
            applied = link.push(
                self._control, staged, image, self._moved, self._config.commit_deadline_s
            )
        recorder.observe(names.VERIFY_S, applied.verify_s)
        recorder.count(names.SYNC_BYTES, self._sent)
        if applied.bad_block >= 0:
            recorder.count(names.DIGEST_MISMATCHES)
        return applied

    def _set_label(self, outcome: table.Outcome) -> table.Event:
        self._pass(Point.LABEL)
        if not self._streamed:  # a streamed version's receiver may still be ending its transfer
            self._prove()
        labels = {
            table.Outcome.NEW: str(self._label),
            table.Outcome.OLD: self._before,
            table.Outcome.BROKEN: UNUSABLE,
        }
        self._control.finish(labels[outcome])
        return table.Labelled()

    def _resume(self) -> table.Event:
        self._pass(Point.RESUME)
        self._prove()
        self._control.resume()
        recorder = self._c.recorder
        recorder.record_span(
            names.PAUSE_S, self._paused_s, recorder.now(), self.url, version=self._state.version
        )
        self._pass(Point.RESUMED)
        return table.Resumed()

    def _read_label(self) -> table.Event:
        shown, recorder, version = self._control.label(), self._c.recorder, self._label.version
        if shown != str(self._label):
            self._latch(
                f"the read-back must show {self._label}, it shows {shown!r:.200}: another trainer"
                " writes this server"
            )
            return table.ReadBack(None)
        # The label alone proves nothing: a server that restarted since its load takes it, if a
        # stray call has opened an update there.
        self._ping()
        self._held, self._seen_s = self._label, time.monotonic()
        self._health = self._health.answered()
        self._pass(Point.HELD)
        now = recorder.now()
        recorder.record_span(names.COMMIT_S, self._paused_s, now, self.url, version=version)
        recorder.committed(self.url, version)
        recorder.count(names.SYNC_COUNT)
        recorder.observe(names.SYNC_S, now - self._published_s)
        return table.ReadBack(version)

    def _prove(self) -> None:
        """Prove that the server is this lane's, before a call that engines do not fence (label,
        resume): after a freeze here it could fall between the load and the label of another run."""
        link = self._open_link()
        if isinstance(link, LaneLink):  # a stock server fences no epoch
            link.check()
            if time.monotonic() - self._proved_s > STOOD_STILL_S:
                self._ping()

    def _ping(self) -> None:
        self._proved_s = time.monotonic()  # as in _applied
        self._number += 1
        self._open_link().ping(self._number, answer_s(self._config.commit_deadline_s))

    def _rest(self) -> table.Event | float:
        if not self._resting:
            self._close_link()
            self._health, self._resting = self._health.silent(time.monotonic()), True
        if not (self._stopping.is_set() or self._health.askable(time.monotonic())):
            return self._health.until
        self._resting = False
        return table.Rested()

    def _leave(self) -> None:
        link = self._link
        if link is not None:
            try:
                link.bye(answer_s(self._config.commit_deadline_s))
            except PeerError as error:
                # Harmless: the next run waits until this one counts as dead.
                logger.info("%s did not answer that this run leaves: %s", self.url, error)
        self._close_link()
        self._control.close()
        self._c.slots.leave(self.url)

    def _close_link(self) -> None:
        self._unpin()
        link, self._link = self._link, None
        if link is not None:
            try:
                link.close()
            except FAILURES as error:
                # The lane goes on: a newer epoch replaces what is left of this one.
                logger.warning("the connection to %s was closed in part: %s", self.url, error)

    def _unpin(self) -> None:
        if self._published is not None:
            self._published = None
            self._c.slots.unpin(self.url)

    def _open_link(self) -> LaneLink | StockLink:
        if self._link is None:
            raise TransferFailed("the lane is not connected")
        return self._link

    def _pinned(self) -> Published:
        if self._published is None:
            raise TransferFailed("no image is pinned for this lane")
        return self._published
