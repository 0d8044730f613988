"""One server's lane: a thread that drives the pure table of protocol/lane.py and performs what it asks for.

Consumes images from the shelf; waits for its own server only, always with a deadline; is woken by a new image or a stop.
An error of the server closes the epoch and never leaves this thread except as a latched record.
"""

import logging
import threading
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

import torch

from titan_grpo.config import WeightSync
from titan_grpo.engines.control import ServerControl
from titan_grpo.errors import PeerError, ServerRefused, SyncError, TitanGrpoError, TransferFailed
from titan_grpo.layout.manifest import Manifest
from titan_grpo.observe import names
from titan_grpo.observe.recorder import Recorder
from titan_grpo.protocol import lane as table
from titan_grpo.protocol import ledger
from titan_grpo.protocol.version import UNUSABLE, Label
from titan_grpo.protocol.wire import Applied, Staged
from titan_grpo.sync.fleet import Fleet, fresh_label
from titan_grpo.sync.sender import LaneLink, LinkOptions
from titan_grpo.sync.shelf import Published, Shelf
from titan_grpo.sync.streaming import load_while_sending

logger = logging.getLogger(__name__)

IDLE_CHECK_S = 10.0
"""How often an idle lane reads its server's label back: a restarted server looks healthy and holds other weights."""


@dataclass(frozen=True, slots=True)
class LaneContext:
    """What all lanes of a run share."""

    run_id: str
    manifest: Manifest
    images: tuple[torch.Tensor, ...]
    config: WeightSync
    link: LinkOptions
    shelf: Shelf
    fleet: Fleet
    recorder: Recorder


class LaneThread(threading.Thread):
    """Keeps one server on the newest version."""

    def __init__(self, context: LaneContext, control: ServerControl) -> None:
        super().__init__(name=f"lane {control.url}", daemon=True)
        self.url = control.url
        self._c = context
        self._control = control
        self._stopping = threading.Event()
        self._link: LaneLink | None = None
        self._published: Published | None = None
        self._staged: Staged | None = None
        self._number = 0
        self._state = table.Lane()
        self._streamed = context.config.apply == "streamed"

    def __repr__(self) -> str:
        return f"<LaneThread {self.url} {self._state!r}>"

    def stop(self) -> None:
        """End the lane now. Any thread; does not wait.

        What it waits for is aborted, but not a commit: that has a deadline, and its server would stay paused.
        """
        self._stopping.set()
        self._c.shelf.stop(self.url)
        if self._state.phase is not table.Phase.COMMITTING:
            self.abort()

    def abort(self) -> None:
        """Abort whatever the lane waits for, a commit too. Any thread."""
        link = self._link
        if link is not None:
            with suppress(PeerError):
                if self._streamed and self._state.phase is table.Phase.COMMITTING:
                    link.cancel()  # the engine's report can still be read, and the server be resumed
                else:
                    link.abort()

    def run(self) -> None:
        """The lane's loop: table, action, event, table."""
        event: table.Event = table.Started()
        try:
            while True:
                self._state, action = table.step(self._state, table.Stopped() if self._stopping.is_set() else event)
                if isinstance(action, table.Leave):
                    break
                event = self._perform(action)
        except Exception as error:  # top of a thread: a silent death would leave the server on its version
            logger.exception("lane %s ended", self.url)
            self._c.fleet.mark(self.url, ledger.unknown)
            self._c.fleet.latch(SyncError(f"{self.url}: the lane ended with {error!r}; this server gets no more versions"))
        finally:
            self._leave()

    def _perform(self, action: table.Action) -> table.Event:
        try:
            match action:
                case table.Connect(epoch):
                    return self._connect(epoch)
                case table.AwaitNewer():
                    return self._await_newer()
                case table.Send(version):
                    return self._send(version)
                case table.Commit(version):
                    return self._commit(version)
                case table.Rest(failures):
                    return self._rest(failures)
        except TitanGrpoError as error:
            return self._failed(action, error)
        raise AssertionError(f"the lane table asked for {action!r}, which no lane performs")

    def _failed(self, action: table.Action, error: TitanGrpoError) -> table.Event:
        if not self._stopping.is_set():
            message = f"{self.url}: {type(action).__name__.lower()} failed: {error}"
            self._c.recorder.count(names.SYNC_FAILURES)
            self._c.fleet.latch(SyncError(message))
        entry = self._c.fleet.entry(self.url)
        if entry.standing is ledger.Standing.RECEIVING:
            self._c.fleet.mark(self.url, ledger.transfer_failed)
        elif entry.standing is not ledger.Standing.QUARANTINED:
            self._c.fleet.mark(self.url, ledger.unknown)
        return table.Failed(str(error))

    def _connect(self, epoch: int) -> table.Event:
        deadline_s = self._c.config.connect_deadline_s
        with self._c.recorder.span(names.CONNECT_S, self.url, epoch=epoch):
            self._link = LaneLink(self._c.run_id, epoch, self._c.manifest, self._c.link)
            self._number = 0
            self._control.greet(self._link.open().to_dict())
            joined = self._link.wait_joined(deadline_s)
            accepted = self._link.send_manifest(deadline_s)
        if not accepted.ok:
            raise TransferFailed(f"the server's receiver refused the manifest: {accepted.error}")
        self._c.fleet.mark(self.url, ledger.unknown)
        if not joined.intact:
            # the lane before this one may have died before it could say so; if it could, its update is closed
            if self._control.label() != UNUSABLE:
                with suppress(ServerRefused):
                    self._control.finish(UNUSABLE)
            self._c.fleet.mark(self.url, ledger.quarantined)
            return table.Connected()
        if self._control.paused():
            # A lane, or a trainer, that died during a commit left it so; its engine holds one whole version.
            self._control.resume()
        label = fresh_label(self._c.run_id, self._control.label())
        if label is not None and (joined.held_run, joined.held_version) == (label.run_id, label.version):
            self._c.fleet.mark(self.url, partial(ledger.holds, version=label.version), label)
        return table.Connected()

    def _await_newer(self) -> table.Event:
        while not self._stopping.is_set():
            entry = self._c.fleet.entry(self.url)
            self._published = self._c.shelf.pin_newer(self.url, entry.held, IDLE_CHECK_S)
            if self._published is not None:
                return table.Newer(self._published.version)
            if self._stopping.is_set() or entry.held is None:
                continue
            label = fresh_label(self._c.run_id, self._control.label())
            if label is None or label.version != entry.held:
                raise ServerRefused(f"it serves {label or 'weights of its own'} instead of v{entry.held}: was it restarted?")
        return table.Failed("stopped")

    def _send(self, version: int) -> table.Event:
        link, published, recorder = self._open_link(), self._pinned(), self._c.recorder
        self._number += 1
        self._c.fleet.mark(self.url, partial(ledger.receiving, version=version))
        self._label, self._published_s = published.label, published.published_s
        if self._streamed:
            staged = link.offer(self._number, version, published.digests, published.label.fingerprint)
            if not staged.ok:
                raise TransferFailed(f"version {version} was refused by the receiver: {staged.error}")
            self._staged = staged
            return table.Staged(version)
        image = self._c.images[published.slot]
        try:
            with recorder.span(names.SEND_S, self.url, version=version):
                staged = link.send(self._number, version, image, published.digests, published.label.fingerprint)
        finally:
            self._unpin()
        recorder.observe(names.VERIFY_S, staged.verify_s)
        recorder.count(names.SYNC_BYTES, image.numel())
        if not staged.ok:
            if staged.bad_block >= 0:
                recorder.count(names.DIGEST_MISMATCHES)
            raise TransferFailed(f"version {version}, block {staged.bad_block}: {staged.error}")
        self._staged = staged
        return table.Staged(version)

    def _commit(self, version: int) -> table.Event:
        recorder, label = self._c.recorder, self._label
        self._c.fleet.mark(self.url, ledger.committing)
        with recorder.span(names.COMMIT_S, self.url, version=version):
            before = self._control.label()
            self._pause_load_resume(before, label)
            read_back = self._control.label()
        if read_back != str(label):
            raise ServerRefused(f"the read-back must show {label}, it shows {read_back!r}: another trainer writes this server")
        self._c.fleet.mark(self.url, partial(ledger.holds, version=version), label)
        recorder.committed(self.url, version)
        recorder.count(names.SYNC_COUNT)
        recorder.observe(names.SYNC_S, recorder.now() - self._published_s)
        return table.Committed(version)

    def _pause_load_resume(self, before: str, label: Label) -> None:
        recorder = self._c.recorder
        start = recorder.now()
        try:
            self._control.pause()
            applied = self._load()
        except PeerError:
            # Nothing is known: the load may still run. The next epoch reads back what the engine holds, and resumes it.
            self._c.fleet.mark(self.url, ledger.unknown)
            raise
        if not applied.intact:
            self._control.finish(UNUSABLE)
            recorder.count(names.QUARANTINES)
            self._c.fleet.mark(self.url, ledger.quarantined)
            raise TransferFailed(
                f"version {applied.version} was half loaded: {applied.error}; it stays paused until a full sync"
            )
        self._control.finish(str(label) if applied.ok else before)
        self._control.resume()
        recorder.record_span(names.PAUSE_S, start, recorder.now(), self.url, version=label.version)
        if not applied.ok:
            raise TransferFailed(f"version {applied.version} was refused by the engine: {applied.error}")
        if applied.fingerprint != label.fingerprint:
            recorder.count(names.DIGEST_MISMATCHES)
            raise TransferFailed(
                f"version {label.version} must have fingerprint {label.fingerprint}, got {applied.fingerprint}"
            )

    def _load(self) -> Applied:
        link, staged, recorder = self._open_link(), self._staged, self._c.recorder
        assert staged is not None
        if not self._streamed:
            self._control.load(link.commit(staged).to_dict())
            return link.wait_applied(staged.number, self._c.config.commit_deadline_s)
        image = self._c.images[self._pinned().slot]
        try:
            with recorder.span(names.SEND_S, self.url, version=staged.version):
                applied = load_while_sending(link, self._control, staged, image, self._c.config)
        finally:
            self._unpin()
        recorder.observe(names.VERIFY_S, applied.verify_s)
        recorder.count(names.SYNC_BYTES, image.numel())
        if applied.bad_block >= 0:
            recorder.count(names.DIGEST_MISMATCHES)
        return applied

    def _rest(self, failures: int) -> table.Event:
        self._close_link()
        config = self._c.config
        self._stopping.wait(table.backoff_s(failures, config.backoff_s, config.backoff_max_s))
        return table.Rested()

    def _leave(self) -> None:
        link = self._link
        if link is not None and not self._stopping.is_set():
            with suppress(PeerError):
                link.bye(self._number + 1)
        self._close_link()
        self._control.close()

    def _close_link(self) -> None:
        self._unpin()
        link, self._link = self._link, None
        if link is not None:
            link.close()

    def _unpin(self) -> None:
        if self._published is not None:
            self._published = None
            self._c.shelf.unpin(self.url)

    def _open_link(self) -> LaneLink:
        if self._link is None:
            raise TransferFailed("the lane is not connected")
        return self._link

    def _pinned(self) -> Published:
        if self._published is None:
            raise TransferFailed("no image is pinned for this lane")
        return self._published
