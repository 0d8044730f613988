"""The trainer's end of one epoch with one server that has our receiver: store, communicator,
transfers."""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta

import torch
import torch.distributed as dist

from titan_grpo.engines.control import ServerControl
from titan_grpo.errors import (
    PeerError,
    ProtocolError,
    ServerRefused,
    ServerTaken,
    ServerUnfit,
    TransferFailed,
)
from titan_grpo.layout.digest import KEYED
from titan_grpo.layout.image import ImageAddress, SharedImage
from titan_grpo.layout.manifest import Manifest
from titan_grpo.protocol import lane
from titan_grpo.protocol.messages import (
    ABORTED,
    CANCEL_KEY,
    MOVED,
    PING_BYTES,
    RECEIVER_RANK,
    TCP,
    Applied,
    Apply,
    Commit,
    Hello,
    Joined,
    Op,
    Order,
    RangeSource,
    Staged,
    key_prefix,
    mark_key,
    marks,
)
from titan_grpo.runkey import EpochKeys, Key
from titan_grpo.sync.load_call import LoadCall
from titan_grpo.sync.transports.base import Transport, TransportOptions, broadcast_image
from titan_grpo.sync.transports.range_server import RangeServer
from titan_grpo.sync.transports.store import (
    delete_value,
    host_store,
    join_store,
    nccl_version,
    open_transport,
    put_value,
    store_errors,
)

Moved = Callable[[int], object]
"""Callback after every bucket with the number of bytes sent; must not block. An error that it
raises ends the transfer."""

MANIFEST_NUMBER = 0
"""Number of the order that hands over the manifest; transfers count from 1."""

ANSWER_S = 2.0
"""Seconds that a live receiver may take for an answer without work."""


def answer_s(commit_deadline_s: float) -> float:
    """Deadline of such an answer: never more than that of a commit call."""
    return min(ANSWER_S, commit_deadline_s)


@dataclass(frozen=True, slots=True)
class LinkOptions:
    """Common to all epochs of a lane. ``timeout_s``: deadline of one transfer, in seconds, beside
    its bytes over ``min_rate`` (bytes per second). ``progress_s``: longest time without progress.

    With transport "tcp", receivers read over ``connections`` connections each from ``source``.
    With a ``run_key`` only servers that prove it are joined, and blocks are hashed with its keys,
    so with blake3 and not with ``digest_algorithm``.
    """

    transport: str
    bind_host: str
    digest_algorithm: str
    bucket_bytes: int
    timeout_s: float
    device: str = "cpu"
    apply: Apply = "staged"
    run_key: Key | None = None
    url: str = ""
    owner: str = ""
    take_over: bool = True
    live_s: float = 0.0
    """See Hello, like ``url`` and ``owner``."""
    started_s: float = field(default_factory=time.monotonic)
    """When the run started, on the monotonic clock."""
    connections: int = 4
    min_rate: int = 50 << 20
    progress_s: float = 10.0
    source: RangeServer | None = None
    """Shared by the lanes of a process; a link without one has its own."""

    def transfer_s(self, nbytes: int) -> float:
        """Deadline of a transfer of ``nbytes``, in seconds."""
        return self.timeout_s + nbytes / self.min_rate

    @property
    def algorithm(self) -> str:
        """How blocks are hashed."""
        return self.digest_algorithm if self.run_key is None else KEYED

    def keys(self, run_id: str, epoch: int) -> EpochKeys | None:
        """The keys of one epoch, None without a run key."""
        return None if self.run_key is None else EpochKeys.of(self.run_key, run_id, epoch)

    def block_key(self, run_id: str) -> bytes | None:
        """Key of the digests of all blocks of a run (layout.digest), None without a run key."""
        keys = self.keys(run_id, 0)
        return None if keys is None else keys.blocks.raw


class LaneLink:
    """One epoch: join, send_manifest, then send + wait_applied (windowed apply: offer + push) as
    often as wanted, close.

    Used by one thread, except ``cancel`` and ``abort``. After a TransferFailed the epoch is over:
    close it and open the next one.
    """

    def __init__(
        self, run_id: str, epoch: int, manifest: Manifest, options: LinkOptions, term: int = 1
    ) -> None:
        """Opens nothing. ``epoch`` must be higher than that of every earlier link to the server.
        ``term`` orders the runs (protocol.fence)."""
        self._run_id, self._epoch, self._manifest, self._options = run_id, epoch, manifest, options
        self._term = term
        keys = options.keys(run_id, epoch)
        self._key = keys.messages if keys is not None else None
        self._lock = threading.Lock()
        self._aborted = False
        self._waiting = ""
        self._next = MANIFEST_NUMBER
        self._host: dist.TCPStore | None = None
        self._store: dist.Store | None = None
        self._alarm: dist.Store | None = None
        self._transport: Transport | None = None
        self._source = options.source or RangeServer()
        self._source_port = 0
        self._presence = ""
        """Ticket of the connection that the receiver keeps open (transport "tcp")."""
        self._joined = False
        self._transfer_s = options.transfer_s(manifest.total_bytes)

    def open(self) -> Hello:
        """Host the store; the ``init_info`` for the server. Raises ConfigError if bind_host is not
        an address of this host."""
        o = self._options
        self._host = host_store(o.bind_host)
        prefix = key_prefix(self._run_id, self._epoch)
        self._store = dist.PrefixStore(prefix, self._host)
        # a waiting thread locks its connection: abort() needs another one to set a key
        self._alarm = dist.PrefixStore(
            prefix, join_store(o.bind_host, self._host.port, o.timeout_s)
        )
        if o.transport == TCP:
            self._source_port = self._source.listen(o.bind_host)
        hello = Hello(
            run_id=self._run_id,
            epoch=self._epoch,
            store_host=o.bind_host,
            store_port=self._host.port,
            transport=o.transport,
            rank=RECEIVER_RANK,
            size=RECEIVER_RANK + 1,
            manifest_digest=self._manifest.digest,
            digest_algorithm=o.algorithm,
            block_bytes=self._manifest.block_bytes,
            bucket_bytes=o.bucket_bytes,
            timeout_s=self._transfer_s,
            apply=o.apply,
            term=self._term,
            url=o.url,
            owner=o.owner,
            take_over=o.take_over,
            age_s=time.monotonic() - o.started_s,
            live_s=o.live_s,
            connections=o.connections,
            progress_s=o.progress_s,
            nccl=nccl_version() if o.transport == "nccl" else "",
        )
        return hello.proven(self._key)

    def join(self, control: ServerControl, timeout_s: float) -> Joined:
        """``open``, send the hello, and ``wait_joined``."""
        control.greet(self.open().to_dict())
        return self.wait_joined(timeout_s)

    def wait_joined(self, timeout_s: float) -> Joined:
        """The receiver's answer, with what its engine holds; then the communicator is open.

        ServerTaken if another run is in force there; ServerUnfit if the receiver refuses for good
        or does not prove this run's key; ServerRefused if it refuses otherwise; TransferFailed if
        no answer comes in time.
        """
        joined = Joined.from_json(
            self._await(f"joined/{RECEIVER_RANK}", timeout_s, "waiting for the server's receiver")
        )
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
        o = self._options
        if o.transport == TCP:
            return joined
        options = TransportOptions(
            min(timeout_s, o.timeout_s), o.bind_host, o.bucket_bytes, o.device
        )
        transport = open_transport(o.transport, self._opened(), 0, RECEIVER_RANK + 1, options)
        with self._lock:
            self._transport = transport
            aborted = self._aborted
        if aborted:
            transport.abort()
        return joined

    def send_manifest(self, timeout_s: float) -> Staged:
        """Hand the manifest over and wait until the receiver has memory for an image of that
        size."""
        self._put("manifest", self._manifest.to_json().encode())
        sources: tuple[RangeSource, ...] = ()
        if self._options.transport == TCP:
            # a broadcast ends with its connection; without one, a receiver that is killed would be
            # noticed at the next deadline only
            self._presence = self._source.watch(self.abort, self._key)
            host = self._options.bind_host
            sources = (RangeSource(host, self._source_port, self._presence),)
        self._post(Order(MANIFEST_NUMBER, "manifest", 0, "", "", sources))
        return self._staged(MANIFEST_NUMBER, timeout_s)

    def send(
        self,
        number: int,
        version: int,
        image: torch.Tensor | SharedImage,
        digests: Sequence[bytes],
        fingerprint: str,
        moved: Moved | None = None,
    ) -> Staged:
        """Send a whole image (uint8[total_bytes], host) and wait for its verification. ``number``
        counts from 1. A receiver on this host reads a SharedImage in place.

        Raises TransferFailed when bytes are lost or late. A Staged that is not ok (digests differ)
        is returned: the epoch goes on, and the image may be sent again under the next number.
        """
        start = time.monotonic()
        shared = image if isinstance(image, SharedImage) else None
        bytes_ = image.tensor() if isinstance(image, SharedImage) else image
        self._check_size(bytes_)
        if self._options.transport == TCP:
            with self._served(bytes_, shared.address if shared else None) as place:
                self._announce("receive", number, version, digests, fingerprint, (place,))
                self._wait_moved(number, moved)
                return self._staged(number, self._options.progress_s)
        self._announce("receive", number, version, digests, fingerprint)
        self._broadcast(bytes_, moved)
        left = max(0.0, start + self._transfer_s - time.monotonic())
        return self._staged(number, left)

    @contextmanager
    def _served(self, image: torch.Tensor, memfd: ImageAddress | None) -> Iterator[RangeSource]:
        """Let the receiver read the image within it."""
        view = memoryview(image.numpy())  # type: ignore[arg-type]
        ticket = self._source.grant(view, memfd.fd if memfd else None, self._key)
        place = memfd.to_json() if memfd else {}
        try:
            yield RangeSource(self._options.bind_host, self._source_port, ticket, place)
        finally:
            self._source.revoke(ticket)

    def _wait_moved(self, number: int, moved: Moved | None) -> None:
        """Wait for each mark of the transfer. TransferFailed if the next one is late: the receiver
        or the network stands still."""
        o, deadline = self._options, time.monotonic() + self._transfer_s
        within_s = o.progress_s + o.bucket_bytes / o.min_rate
        for mark in marks(self._manifest.total_bytes, o.bucket_bytes):
            key, left = mark_key(number, mark), max(0.0, deadline - time.monotonic())
            what = f"waiting for the receiver to have byte {mark} of transfer {number}"
            reached = self._await(key, min(within_s, left), what) == MOVED
            with store_errors(f"forgetting a mark of order {number}"):
                self._opened().delete_key(key)
            if not reached:
                return
            if moved is not None:
                moved(mark)

    def offer(
        self, number: int, version: int, digests: Sequence[bytes], fingerprint: str
    ) -> Staged:
        """Prepare a windowed apply: nothing moves until ``push``. ``number`` counts from 1."""
        self._announce("stream", number, version, digests, fingerprint)
        return self._staged(number, self._options.timeout_s)

    def push(
        self,
        control: ServerControl,
        staged: Staged,
        image: torch.Tensor,
        moved: Moved,
        commit_deadline_s: float,
    ) -> Applied:
        """Send ``image`` (uint8[total_bytes]) through the offered window, into the paused engine.

        The engine's report also when the sending failed: it says whether the engine is intact.
        PeerError if there is no report.
        """
        call = LoadCall(self, control, staged, answer_s(commit_deadline_s))
        call.start()
        failure: TransferFailed | None = None
        try:
            self.stream(image, moved)
        except TransferFailed as error:
            self.cancel()
            failure = error
        # start and finish of an update, the load and the report each have a deadline of their own
        applied = call.result(
            lane.step_s(lane.Phase.LOADING, commit_deadline_s, self._options.timeout_s)
        )
        if failure is not None and applied.ok:
            raise failure  # the two ends disagree about the bytes
        return applied

    def stream(self, image: torch.Tensor, moved: Moved | None = None) -> None:
        """The sending half of ``push``; the engine must be loading.

        Raises TransferFailed when bytes are lost or late, a block differs or the engine gives up:
        the epoch is over, but the engine's report can still be awaited.
        """
        self._check_size(image)
        self._broadcast(image, moved)

    def cancel(self) -> None:
        """End a windowed transfer at once and release the engine. Unlike after ``abort``, the
        engine's report can still be awaited. Any thread; idempotent."""
        with self._lock:
            transport, alarm = self._transport, self._alarm
        if transport is not None:
            transport.abort()
        if alarm is not None:
            with suppress(TransferFailed), store_errors(f"giving epoch {self._epoch} up"):
                alarm.set(CANCEL_KEY, b"1")  # type: ignore[arg-type]

    def commit(self, staged: Staged) -> Commit:
        """The ``update_info`` for a staged or offered transfer."""
        commit = Commit(
            run_id=self._run_id,
            epoch=self._epoch,
            number=staged.number,
            version=staged.version,
            fingerprint=staged.fingerprint,
            manifest_digest=self._manifest.digest,
            image=staged.image,
        )
        return commit.proven(self._key)

    def wait_applied(self, number: int, timeout_s: float) -> Applied:
        """How the commit of that transfer ended in the engine; TransferFailed without a report: the
        engine's version is unknown then.

        The plugin delivers it before /update_weights answers, so a short wait is enough.
        """
        applied = Applied.from_json(
            self._await(
                f"applied/{number}", timeout_s, f"waiting for the engine to apply transfer {number}"
            )
        )
        applied.require_proof(self._key)
        return applied

    def ping(self, number: int, timeout_s: float) -> None:
        """Prove that the receiver of this epoch lives, so that its engine has not restarted.

        TransferFailed if it does not answer in time, at once if the connection is lost. Call it
        between two transfers.
        """
        self._forget(number - 1)
        self._post(Order(number, "ping", 0, "", ""))
        if self._options.transport != TCP:
            self._connected().broadcast(torch.zeros(PING_BYTES, dtype=torch.uint8), timeout_s)
        answer = self._staged(number, timeout_s)
        if not answer.ok:
            raise TransferFailed(
                f"the receiver of epoch {self._epoch} refused a ping: {answer.error}"
            )

    def bye(self, timeout_s: float) -> None:
        """Tell the receiver, if it has joined, that this run leaves the server. Waits for its
        answer: the store ends with ``close``."""
        if self._joined:
            self._unwatch()  # the receiver ends after its answer, which must not count as lost
            number = self._next
            self._post(Order(number, "bye", 0, "", ""))
            self._staged(number, timeout_s)

    def abort(self) -> None:
        """Make the blocked call and every later one raise TransferFailed at once. Any thread;
        idempotent."""
        with self._lock:
            self._aborted = True
            waiting, transport, alarm = self._waiting, self._transport, self._alarm
        if transport is not None:
            transport.abort()
        if waiting and alarm is not None:
            with store_errors(f"aborting epoch {self._epoch}"):
                alarm.set(waiting, ABORTED)  # type: ignore[arg-type]

    def close(self) -> None:
        """Close communicator and store; the receiver then loses its connection and ends.
        Idempotent."""
        self._unwatch()
        with self._lock:
            transport, self._transport = self._transport, None
            self._store = self._alarm = self._host = None
        if transport is not None:
            transport.close()
        if self._options.source is None:
            self._source.close()

    def _unwatch(self) -> None:
        ticket, self._presence = self._presence, ""
        if ticket:
            self._source.revoke(ticket)

    def _check_size(self, image: torch.Tensor) -> None:
        if image.numel() != self._manifest.total_bytes:
            raise ValueError(
                f"the image must have {self._manifest.total_bytes} bytes, got {image.numel()}"
            )

    def _broadcast(self, image: torch.Tensor, moved: Moved | None) -> None:
        o = self._options
        broadcast_image(self._connected(), image, o.bucket_bytes, o.timeout_s, moved)

    def _announce(
        self,
        op: Op,
        number: int,
        version: int,
        digests: Sequence[bytes],
        fingerprint: str,
        sources: tuple[RangeSource, ...] = (),
    ) -> None:
        self._forget(number - 1)
        key = f"digests/{number}"
        self._put(key, b"".join(digests))
        self._post(Order(number, op, version, key, fingerprint, sources))

    def _forget(self, number: int) -> None:
        """Delete the keys of an order that is over: an epoch, and its store, may last as long as
        the run."""
        store = self._opened()
        with store_errors(f"forgetting order {number}"):
            for key in ("order", "staged", "applied"):
                store.delete_key(f"{key}/{number}")
            delete_value(store, f"digests/{number}")

    def _post(self, order: Order) -> None:
        if order.number != self._next:
            raise ProtocolError(
                f"orders count up by one within an epoch: the next is {self._next}, got"
                f" {order.number}"
            )
        self._set(f"order/{order.number}", order.proven(self._key).to_json())
        self._next += 1

    def _staged(self, number: int, timeout_s: float) -> Staged:
        staged = Staged.from_json(
            self._await(
                f"staged/{number}",
                timeout_s,
                f"waiting for the receiver's answer to order {number}",
            )
        )
        staged.require_proof(self._key)
        return staged

    def _await(self, key: str, timeout_s: float, what: str) -> bytes:
        """Block until ``key`` is there, the deadline passes or the link is aborted; its value."""
        store = self._opened()
        with self._lock:  # an abort either finds the key to set here, or is seen here
            self._check_aborted()
            self._waiting = key
        try:
            with store_errors(f"{what} (epoch {self._epoch}, {timeout_s:.1f} s)"):
                store.wait([key], timedelta(seconds=timeout_s))
                value = store.get(key)
        finally:
            with self._lock:
                self._waiting = ""
        if value == ABORTED:
            raise TransferFailed(f"{what}: the link was aborted")
        return bytes(value)

    def _put(self, key: str, value: bytes) -> None:
        """Set a value that may be large."""
        store = self._opened()
        with self._lock:
            self._check_aborted()
        with store_errors(f"setting {key} (epoch {self._epoch})"):
            put_value(store, key, value)

    def _set(self, key: str, value: str | bytes) -> None:
        store = self._opened()
        with self._lock:
            self._check_aborted()
        with store_errors(f"setting {key} (epoch {self._epoch})"):
            store.set(key, value)  # type: ignore[arg-type]

    def _check_aborted(self) -> None:
        if self._aborted:
            raise TransferFailed(f"epoch {self._epoch} was aborted")

    def _opened(self) -> dist.Store:
        if self._store is None:
            raise TransferFailed(f"the link of epoch {self._epoch} is not open")
        return self._store

    def _connected(self) -> Transport:
        if self._transport is None:
            raise TransferFailed(f"the receiver of epoch {self._epoch} has not joined")
        return self._transport
