"""Trainer's end of one epoch with a server that has our receiver: channel, communicator, sends."""

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from msgspec.structs import replace
from torch.distributed import TCPStore

from titan_grpo.config import WeightSync
from titan_grpo.engines.server import RolloutNeeds, ServerControl
from titan_grpo.errors import (
    PeerError,
    ServerRefused,
    ServerTaken,
    ServerUnfit,
    TransferFailed,
)
from titan_grpo.layout.image import KEYED, Hashing, ImageAddress, SharedImage
from titan_grpo.layout.manifest import Manifest
from titan_grpo.protocol import lane
from titan_grpo.protocol.marks import mark_bytes, marks
from titan_grpo.protocol.messages import (
    FORMAT,
    RANGES,
    Applied,
    Attach,
    Commit,
    Hello,
    Joined,
    Kind,
    Order,
    Patch,
    RangeSource,
    Staged,
)
from titan_grpo.protocol.patches import leading_from
from titan_grpo.runkey import EpochKeys, Key
from titan_grpo.sync.images import Parts
from titan_grpo.sync.patches import Deliveries
from titan_grpo.sync.relay import Relay
from titan_grpo.sync.transports.broadcast import (
    Transport,
    TransportOptions,
    beside,
    broadcast_image,
    host_store,
    nccl_version,
    open_transport,
    outcome,
)
from titan_grpo.sync.transports.channel import Frame, LaneChannel
from titan_grpo.sync.transports.nixl import NixlSource
from titan_grpo.sync.transports.range_server import RangeServer

Moved = Callable[[int], object]
"""Callback after every bucket with the number of bytes sent. Must not block; an error that it
raises ends the transfer."""

LANE_RANK, RECEIVER_RANK = 0, 1
"""Ranks in the communicator of gloo or NCCL."""

MANIFEST_NUMBER = 0
"""Number of the manifest's order; transfers count from 1."""

ANSWER_S = 2.0
"""Seconds that a live receiver may take for an answer that needs no work."""


def answer_s(commit_deadline_s: float) -> float:
    """Return the deadline of such an answer: at most that of a commit call."""
    return min(ANSWER_S, commit_deadline_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """What a run's lanes say of it to each server. See Hello for ``owner``, ``take_over`` and
    ``model``."""

    run_key: Key | None = None
    owner: str = ""
    take_over: bool = True
    started_s: float = field(default_factory=time.monotonic)
    """Start of the run, on the monotonic clock."""
    model: Mapping[str, Any] = field(default_factory=dict)
    needs: RolloutNeeds = field(default_factory=RolloutNeeds)


@dataclass(frozen=True, slots=True)
class LinkOptions(RunOptions):
    """Options common to all epochs of a lane: the run's ``config``, and what it leaves open.

    Receivers read ranges from ``source``. With a ``run_key`` a server must prove it to join, and
    blocks are hashed with its keys (keyed blake3 in place of ``config.digest``).
    """

    config: WeightSync
    transport: str
    """Never "auto"."""
    bind_host: str
    """See weight_sync.bind_host; in one server's options never empty."""
    device: str = "cpu"
    url: str = ""
    """See Hello."""
    source: RangeServer | None = None
    """Shared by the lanes of a process. None: the link creates its own."""
    nixl: NixlSource | None = None
    """With transport "nixl": offers the images for one-sided reads too."""
    deliveries: Deliveries | None = None
    """Gets the bytes and the duration of each transfer."""
    relay: Relay = field(default_factory=Relay)
    """Assigns servers to read from each other."""

    def keys(self, run_id: str, epoch: int) -> EpochKeys | None:
        """Return the keys of one epoch, None without a run key."""
        return None if self.run_key is None else EpochKeys.of(self.run_key, run_id, epoch)

    def hashing(self, run_id: str) -> Hashing:
        """Return the hash of a run's blocks."""
        keys = self.keys(run_id, 0)
        return Hashing(self.config.digest) if keys is None else Hashing(KEYED, keys.blocks)


class LaneLink:
    """One epoch: join, send_manifest, any number of send + wait_applied (streamed: offer + push),
    close.

    Used by one thread, except ``cancel`` and ``abort``. A TransferFailed ends the epoch: close it
    and open the next one.
    """

    def __init__(
        self,
        run_id: str,
        epoch: int,
        manifest: Manifest,
        options: LinkOptions,
        term: int = 1,
        lost: Callable[[], object] = lambda: None,
    ) -> None:
        """Opens nothing. ``epoch``: higher than that of every earlier link to the server. ``term``
        orders the runs (protocol.server). ``lost`` is called when the receiver's connection ends,
        on a thread that it must not block."""
        self._run_id, self._epoch, self._manifest, self._options = run_id, epoch, manifest, options
        self._term, self._lost = term, lost
        keys = options.keys(run_id, epoch)
        self._key = keys.messages if keys is not None else None
        self._range_key = options.hashing(run_id).range_key
        self._lock = threading.Lock()
        """Held where channel or transport are set, which ``abort`` ends from other threads."""
        self._aborted = False
        self._next = MANIFEST_NUMBER
        self._source = options.source or RangeServer()
        self._channel: LaneChannel | None = None
        self._store: TCPStore | None = None
        """Rendezvous of gloo's or NCCL's ranks."""
        self._transport: Transport | None = None
        self._joined = False
        self._base: int | None = None
        """Version in the receiver's staging memory, the base of patches."""
        self._transfer_s = options.config.transfer_s(manifest.total_bytes)

    def open(self) -> Hello:
        """Listen; return the Hello (``init_info``) for the server. Raises ConfigError if bind_host
        is not an address of this host."""
        o, config = self._options, self._options.config
        channel = self._source.channel(o.bind_host, self._key, self._ended)
        with self._lock:
            self._channel = channel
            aborted = self._aborted  # an abort before this line found no channel to abort
        if aborted:
            channel.abort()
        if o.transport not in RANGES:
            self._store = host_store(o.bind_host)
        hello = Hello(
            run_id=self._run_id,
            epoch=self._epoch,
            host=channel.host,
            port=channel.port,
            ticket=channel.ticket.hex(),
            transport=o.transport,
            manifest_digest=self._manifest.digest,
            digest_algorithm=o.hashing(self._run_id).algorithm,
            bucket_bytes=config.bucket_bytes,
            timeout_s=self._transfer_s,
            format=FORMAT,
            apply=config.apply,
            term=self._term,
            url=o.url,
            owner=o.owner,
            take_over=o.take_over,
            age_s=time.monotonic() - o.started_s,
            live_s=config.commit_deadline_s,
            connections=config.connections,
            progress_s=config.progress_deadline_s,
            relay_wait_s=o.relay.wait_s(config, self._manifest.block_bytes),
            min_rate=config.min_rate,
            store_port=0 if self._store is None else self._store.port,
            nccl=nccl_version() if o.transport == "nccl" else "",
            pin=channel.pin,
            model=dict(o.model),
            routes=o.needs.routes and o.url not in o.needs.exempt,
        )
        return hello.proven(self._key)

    def join(self, control: ServerControl, timeout_s: float) -> Joined:
        """Open, send the hello, and return ``wait_joined``."""
        control.greet(self.open().to_dict())
        return self.wait_joined(timeout_s)

    def wait_joined(self, timeout_s: float) -> Joined:
        """Wait for the receiver's answer and open the communicator; return the answer, with the
        label that the engine holds.

        Raises ServerTaken if another run is in force there, ServerUnfit if the receiver refuses for
        good or does not prove this run's key, ServerRefused if it refuses otherwise, TransferFailed
        past the deadline.
        """
        channel = self._opened()
        what = (
            f"waiting for the server's receiver to connect to {channel.host}:{channel.port} (if it"
            " cannot, the server's log says why; weight_sync.bind_host sets the address)"
        )
        frame = channel.take(0, (Kind.JOINED,), timeout_s, what)
        joined = Joined.from_json(frame.body)
        if joined.final:
            raise ServerUnfit(joined.error)
        if not joined.ok and joined.run_in_force in ("", self._run_id):
            raise ServerRefused(joined.error)
        try:
            joined.require_proof(self._key)
        except PeerError as error:
            raise ServerUnfit(str(error)) from error
        if not joined.ok:
            raise ServerTaken(
                joined.error, joined.run_in_force, joined.term_in_force, joined.age_in_force_s
            )
        self._joined = True
        o, store = self._options, self._store
        o.relay.came(o.url, joined, channel.host)
        if store is None:
            return joined
        options = TransportOptions(
            min(timeout_s, o.config.lane_deadline_s),
            o.bind_host,
            o.config.bucket_bytes,
            o.device,
        )
        transport = open_transport(o.transport, store, LANE_RANK, RECEIVER_RANK + 1, options)
        with self._lock:
            self._transport = transport
            # an abort, or the connection's end, before this line found no transport to abort
            aborted = self._aborted or bool(self._opened().inbox.ended)
        if aborted:
            transport.abort()
        return joined

    def send_manifest(self, moved: Moved | None = None) -> Staged:
        """Send the manifest and wait until the receiver has memory for an image of that size. The
        manifest has a deadline, then each mark of the memory; ``moved`` gets the bytes made so far.
        """
        self._post(Order(MANIFEST_NUMBER, "manifest", 0, ""), self._manifest.encoded)
        return self._moving(MANIFEST_NUMBER, moved, 0)

    def send(
        self,
        number: int,
        version: int,
        image: torch.Tensor | SharedImage | Parts,
        digests: bytes,
        fingerprint: str,
        moved: Moved | None = None,
    ) -> Staged:
        """Send a whole image (uint8[total_bytes], host) and wait for its verification. ``number``
        counts from 1. ``digests``: of all blocks. A receiver on this host reads a SharedImage in
        place. Offers the patches of ``image`` that lead from the receiver's staged version to
        ``version``.

        Raises TransferFailed if bytes are lost or late. A returned Staged may be not ok (digests
        differ): the epoch continues, and the image may be sent again under the next number.
        """
        start, o = time.monotonic(), self._options
        image, elsewhere, patches = image if isinstance(image, Parts) else Parts(image)
        shared = image if isinstance(image, SharedImage) else None
        bytes_ = image.tensor() if isinstance(image, SharedImage) else image
        if self._options.transport in RANGES:
            staged, self._base = self._base, None  # unknown if this transfer fails
            offered = self._offered(leading_from(staged, patches))
            with self._served(bytes_, shared.address if shared else None) as place:
                others = o.relay.asked(o.url, version, len(self._manifest.parts))
                sources = (place, *elsewhere)
                order = Order(number, "receive", version, fingerprint, sources, offered)
                order = replace(order, relays=others.sources, serve=others.serve)
                self._post(order, digests)
                answer = self._moving(number, moved, sum(patch.nbytes for patch in offered))
            o.relay.answered(o.url, answer, others, self._manifest.total_bytes)
            if answer.ok:
                self._base = version
                if o.deliveries is not None:
                    o.deliveries.came(o.url, answer.read_bytes, answer.receive_s)
            return answer
        self._post(Order(number, "receive", version, fingerprint), digests)
        transport, bucket_bytes = self._connected(), o.config.bucket_bytes
        broadcast_image(transport, bytes_, bucket_bytes, self._transfer_s, moved)
        left = max(0.0, start + self._transfer_s - time.monotonic())
        return self._staged(number, left)

    @contextmanager
    def _served(self, image: torch.Tensor, memfd: ImageAddress | None) -> Iterator[RangeSource]:
        """Serve the image to the receiver inside the ``with`` block."""
        view = image.numpy().data
        fd, part = memfd.fd if memfd else None, self._manifest.parts[0]
        ticket = self._source.grant(view, fd, self._range_key, part)
        place = memfd.to_json() if memfd else {}
        try:
            channel = self._opened()
            offers = self._options.nixl
            at = offers.place(image.data_ptr(), image.nbytes) if offers is not None else ""
            yield RangeSource(channel.host, channel.port, ticket, place, 0, channel.pin, at)
        finally:
            self._source.revoke(ticket)

    def _offered(self, patches: Sequence[Patch]) -> tuple[Patch, ...]:
        """Return ``patches``, those of rank 0's host with the address that this server reads."""
        host, port = self._opened().host, self._opened().port
        return tuple(
            patch
            if patch.part
            else replace(patch, source=replace(patch.source, host=host, port=port))
            for patch in patches
        )

    def _moving(self, number: int, moved: Moved | None, patch_bytes: int) -> Staged:
        """Wait for the receiver's marks, then return its answer; it comes early if the receiver
        gives up. Raises TransferFailed if a mark is late: receiver or network stands still."""
        config, deadline = self._options.config, time.monotonic() + self._transfer_s
        total, bucket = self._manifest.total_bytes, config.bucket_bytes
        within_s = config.progress_deadline_s + config.moving_s(mark_bytes(total, bucket))
        before_s = 0.0  # what comes before the first mark
        if number == MANIFEST_NUMBER:
            # All lanes may send it at once, and each receiver reads it whole.
            before_s = config.connect_deadline_s + config.moving_s(len(self._manifest.encoded))
        if patch_bytes:  # all patches arrive and are applied
            before_s = config.moving_s(patch_bytes + total)
        for mark in marks(total, bucket):
            wait_s = min(within_s + before_s, max(0.0, deadline - time.monotonic()))
            before_s = 0.0
            what = f"waiting for the receiver to have byte {mark} of transfer {number}"
            frame = self._opened().take(number, (Kind.MOVED, Kind.STAGED), wait_s, what)
            if frame.kind is Kind.STAGED:
                return self._proven(frame)
            if moved is not None:
                moved(mark)
        return self._staged(number, config.progress_deadline_s)

    def offer(self, number: int, version: int, digests: bytes, fingerprint: str) -> Staged:
        """Prepare a streamed apply: no byte moves before ``push``. ``number`` counts from 1."""
        self._post(Order(number, "stream", version, fingerprint), digests)
        return self._staged(number, self._options.config.lane_deadline_s)

    def push(
        self,
        control: ServerControl,
        staged: Staged,
        image: torch.Tensor,
        moved: Moved,
        commit_deadline_s: float,
    ) -> Applied:
        """Send ``image`` (uint8[total_bytes]) through the offered window, into the paused engine.

        Return the engine's report, also if sending failed: it says whether the engine is intact.
        Raises PeerError without a report.
        """

        def load() -> Applied:
            control.load(self.commit(staged).to_dict())
            applied = self.wait_applied(staged.number, answer_s(commit_deadline_s))
            if not applied.ok:
                self.cancel()
            return applied

        call = beside(load, "load", self.cancel)
        failure: TransferFailed | None = None
        try:
            self.stream(image, moved)
        except TransferFailed as error:
            self.cancel()
            failure = error
        # The update's start and end, the load and the report each have a deadline of their own.
        load_s = lane.step_s(lane.Phase.LOADING, commit_deadline_s, self._transfer_s)
        # After a failed broadcast too: only the report says what the engine holds now.
        applied = outcome(call, load_s, f"the load call of transfer {staged.number}")
        if failure is not None and applied.ok:
            raise failure  # the two ends disagree about the bytes
        return applied

    def stream(self, image: torch.Tensor, moved: Moved | None = None) -> None:
        """Broadcast the image of a streamed apply; the engine must be loading.

        Raises TransferFailed if bytes are lost or late, a block differs or the engine gives up: the
        epoch is over, but the engine's report can still be awaited.
        """
        bucket_bytes = self._options.config.bucket_bytes
        broadcast_image(self._connected(), image, bucket_bytes, self._transfer_s, moved)

    def cancel(self) -> None:
        """End a streamed transfer at once and release the engine. Unlike after ``abort``, its
        report can still be awaited. Any thread; idempotent."""
        self._abort_transport()
        if (channel := self._channel) is not None:
            with suppress(TransferFailed):
                channel.send(Kind.CANCEL, 0)

    def attach(self) -> Attach:
        """Return the order for the engine to map the receiver's memory. Needs the manifest."""
        return Attach(run_id=self._run_id, epoch=self._epoch).proven(self._key)

    def commit(self, staged: Staged) -> Commit:
        """Return the ``update_info`` for a staged or offered transfer."""
        commit = Commit(
            run_id=self._run_id,
            epoch=self._epoch,
            number=staged.number,
            version=staged.version,
            fingerprint=staged.fingerprint,
            manifest_digest=self._manifest.digest,
        )
        return commit.proven(self._key)

    def wait_applied(self, number: int, timeout_s: float) -> Applied:
        """Return the engine's report of that transfer's commit. Raises TransferFailed without one:
        the engine's version is then unknown.

        The plugin delivers it before /update_weights answers, so a short wait suffices.
        """
        what = f"waiting for the engine to apply transfer {number}"
        frame = self._opened().take(number, (Kind.APPLIED,), timeout_s, what)
        applied = Applied.from_json(frame.body)
        applied.require_proof(self._key)
        return applied

    def ping(self, number: int, timeout_s: float) -> None:
        """Prove that the engine has not restarted: its receiver would have died with it.

        Raises TransferFailed past the deadline, at once if the connection is lost. Call it between
        two transfers.
        """
        self._post(Order(number, "ping", 0, ""))
        answer = self._staged(number, timeout_s)
        if not answer.ok:
            raise TransferFailed(f"the receiver refused a ping: {answer.error}")

    def bye(self, timeout_s: float) -> None:
        """Send the receiver, if it has joined, that this run leaves the server. Waits for its
        answer: ``close`` ends the connection, and would drop the message."""
        if self._joined:
            number = self._next
            self._post(Order(number, "bye", 0, ""))
            self._staged(number, timeout_s)

    def abort(self) -> None:
        """Make the blocked call and all later ones raise TransferFailed at once. Any thread;
        idempotent."""
        with self._lock:
            self._aborted = True
            channel = self._channel
        self._abort_transport()
        if channel is not None:
            channel.abort()

    def close(self) -> None:
        """Close communicator and channel; the receiver then loses its connection and ends.
        Idempotent."""
        self._options.relay.gone(self._options.url)
        if self._options.deliveries is not None:
            self._options.deliveries.gone(self._options.url)
        with self._lock:
            transport, self._transport = self._transport, None
            channel, self._channel = self._channel, None
            self._store = None
        if channel is not None:
            channel.close()
        if transport is not None:
            transport.close()
        if self._options.source is None:
            self._source.close()

    def check(self) -> None:
        """Raise TransferFailed if the link has ended: its receiver is gone, or it was aborted."""
        self._opened().check()

    def _ended(self) -> None:
        self._abort_transport()
        self._lost()

    def _abort_transport(self) -> None:
        with self._lock:
            transport = self._transport
        if transport is not None:
            transport.abort()

    def _post(self, order: Order, blob: bytes = b"") -> None:
        """Send an order, preceded by its ``blob``."""
        channel = self._opened()
        if blob:
            channel.send(Kind.BLOB, order.number, blob)
        channel.send(Kind.ORDER, order.number, order.proven(self._key).to_json().encode())
        self._next += 1

    def _staged(self, number: int, timeout_s: float) -> Staged:
        what = f"waiting for the receiver's answer to order {number}"
        return self._proven(self._opened().take(number, (Kind.STAGED,), timeout_s, what))

    def _proven(self, frame: Frame) -> Staged:
        staged = Staged.from_json(frame.body)
        staged.require_proof(self._key)
        return staged

    def _opened(self) -> LaneChannel:
        if self._channel is None:
            raise TransferFailed(f"the link of epoch {self._epoch} is not open")
        return self._channel

    def _connected(self) -> Transport:
        if self._transport is None:
            raise TransferFailed(f"the receiver of epoch {self._epoch} has not joined")
        return self._transport
