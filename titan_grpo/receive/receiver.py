"""The receiving half of one epoch, free of any engine: joins the lane, fills the image, checks it,
lends it.

Two threads: ``run`` serves the lane's orders; ``lend``, ``take`` and ``applied`` are called for the
engine. A third one, of a windowed apply, waits for the lane's cancel.
"""

import math
import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist
from msgspec.structs import replace

from titan_grpo.errors import PeerError, TitanGrpoError, TransferFailed
from titan_grpo.layout.digest import (
    KEYED,
    block_digests,
    digest_block,
    fingerprint,
    first_difference,
)
from titan_grpo.layout.image import ImageAddress, SharedImage
from titan_grpo.layout.manifest import Manifest
from titan_grpo.protocol import fence, staging
from titan_grpo.protocol.messages import (
    CANCEL_KEY,
    ENDED,
    MOVED,
    PING_BYTES,
    TCP,
    Applied,
    Commit,
    Hello,
    Joined,
    Order,
    RangeSource,
    Staged,
    key_prefix,
    mark_key,
    marks,
)
from titan_grpo.receive.fetch import Content, Fetch, Open
from titan_grpo.receive.window import Window, window_bytes
from titan_grpo.runkey import EpochKeys
from titan_grpo.sync.transports.base import Transport, TransportOptions, broadcast_image
from titan_grpo.sync.transports.ranges import MemfdReader, TcpReader
from titan_grpo.sync.transports.store import (
    get_value,
    join_store,
    open_transport,
    store_errors,
    transport_problem,
)

SIGN_S = 1.0
"""Seconds for the trainer to give a sign when it is asked for one."""

IDLE_S = 60.0
"""Length of one wait for the next order, in seconds. It is repeated; a lost connection ends it at
once."""


def address_towards(host: str, port: int) -> str:
    """This host's address on the interface that reaches ``host``; nothing is sent. TransferFailed
    if none does."""
    try:
        family, kind, proto, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, proto) as probe:
            probe.connect(target)
            return str(probe.getsockname()[0])
    except OSError as error:
        raise TransferFailed(
            f"no route from this server to the trainer at {host}:{port}: {error}"
        ) from error


class Receiver:
    """One epoch. Every error ends it with its reason; the process that hosts it then ends too."""

    def __init__(
        self, hello: Hello, joined: Joined, keys: EpochKeys | None, device: str = "cpu"
    ) -> None:
        """Nothing is connected yet. ``joined``: the engine's answer to the Hello. ``keys``: of this
        epoch, if the engine has a run key and the Hello has proven it. ``device``: the engine's."""
        self._device = device
        self._hello, self._joined = hello, replace(joined, pid=os.getpid())
        self._key = keys.messages if keys is not None else None
        self._block_key = keys.blocks.raw if keys is not None else None
        self._turn = threading.Condition()
        self.streamed = hello.apply == "streamed"
        self.timeout_s = hello.timeout_s
        self._staging = staging.Staging(streamed=self.streamed)
        self._manifest: Manifest | None = None
        self._image: SharedImage | None = None
        self._manifest_text: SharedImage | None = None
        self._window: Window | None = None
        self._expected: Sequence[bytes] = ()
        self._replies: dist.Store | None = None
        self.signed_s = time.monotonic()
        """When the trainer gave its last sign (monotonic clock); minus infinity: it left."""
        self._bye: int | None = None
        """Number of the order by which it left."""
        self._presence: TcpReader | None = None
        """Reads nothing: the lane sees by it at once that this process has ended."""
        self._ahead: list[int] = []
        """Marks of the transfer under way that the lane still waits for."""

    def answer(self) -> None:
        """Only answer the Hello (a probe, a refusal)."""
        self._answer(self._join())

    def run(self) -> None:
        """Serve the epoch until the lane says bye, which ``confirm_bye`` answers. Raises
        TitanGrpoError with the reason if it ends in another way."""
        hello = self._hello
        orders, self._replies = self._join(), self._join()
        problem = transport_problem(hello.transport, hello.nccl)
        if self.streamed and hello.transport == TCP:
            problem = "weight_sync.transport tcp is for weight_sync.apply staged, got streamed"
        if self._key is not None and hello.digest_algorithm != KEYED:
            problem = (
                f"with a run key the blocks' digests must be {KEYED}, got"
                f" {hello.digest_algorithm!r}: others take no key"
            )
        if self._joined.ok and problem:
            self._joined = replace(self._joined, ok=False, error=problem, final=True)
        self._answer(orders)
        if not self._joined.ok:
            raise PeerError(
                f"refused epoch {hello.epoch} of run {hello.run_id}: {self._joined.error}"
            )
        transport = None
        if hello.transport != TCP:
            here = address_towards(hello.store_host, hello.store_port)
            options = TransportOptions(hello.timeout_s, here, hello.bucket_bytes, self._device)
            transport = open_transport(hello.transport, orders, hello.rank, hello.size, options)
        if self.streamed:
            # a connection of its own: one connection serves one blocking call at a time
            watched = self._join(), transport
            threading.Thread(target=self._watch, args=watched, name="watch", daemon=True).start()
        number = 0
        while self._serve(orders, transport, number):
            number += 1
        self.signed_s = -math.inf
        self._bye = number

    def confirm_bye(self) -> None:
        """Answer the lane's bye, if it said one."""
        if self._bye is not None and self._replies is not None:
            self._reply(self._replies, self._bye, _staged(Order(self._bye, "bye", 0, "", "")))

    def last_sign_s(self) -> float:
        """Ask the trainer, whose process hosts the lane's store, and return ``signed_s``."""
        if self.signed_s == -math.inf:
            return self.signed_s  # it said bye, though its store may still answer
        with suppress(TransferFailed), store_errors("asking for the trainer"):
            self._join(SIGN_S).check(["alive"])
            self.signed_s = time.monotonic()
        return self.signed_s

    def lend(self, commit: Commit) -> tuple[ImageAddress, ImageAddress]:
        """The staged image, or the window, for the engine until ``applied``, and the memory that
        holds the manifest's JSON. PeerError if it is not what the commit names."""
        with self._turn:
            image, manifest, text = self._image, self._manifest, self._manifest_text
            if manifest is not None and commit.manifest_digest != manifest.digest:
                raise PeerError(
                    f"commit asks for manifest {commit.manifest_digest}, staged is"
                    f" {manifest.digest}"
                )
            self._step(staging.LendRequested(commit.number, commit.version, commit.fingerprint))
            assert image is not None
            assert text is not None
            if self._window is not None:
                self._window.open()
            return image.address, text.address

    def take(self, consumed: int, wait_s: float) -> int:
        """See Window.take."""
        window = self._window
        if window is None:
            raise PeerError("no windowed apply is under way")
        return window.take(consumed, wait_s)

    def applied(self, report: Applied) -> None:
        """Forward the engine's report to the lane, and take the image back."""
        if (window := self._window) is not None:
            window.fail(f"the engine gave up: {report.error}")
            report = replace(
                report,
                receive_s=window.receive_s,
                verify_s=window.verify_s,
                bad_block=window.bad_block,
            )
        with self._turn:
            self._step(staging.Returned())
            self._turn.notify_all()
        if self._replies is None:
            raise PeerError("the receiver has not joined a lane")
        with store_errors(f"reporting transfer {report.number}"):
            self._replies.set(f"applied/{report.number}", report.proven(self._key).to_json())

    def _join(self, timeout_s: float | None = None) -> dist.Store:
        hello = self._hello
        store = join_store(hello.store_host, hello.store_port, timeout_s or hello.timeout_s)
        return dist.PrefixStore(key_prefix(hello.run_id, hello.epoch), store)

    def _answer(self, store: dist.Store) -> None:
        with store_errors("answering the trainer's hello"):
            store.set(f"joined/{self._hello.rank}", self._joined.proven(self._key).to_json())

    def _serve(self, store: dist.Store, transport: Transport | None, number: int) -> bool:
        """One order; False after the last one."""
        try:
            text = self._next(store, f"order/{number}")
        finally:
            self.signed_s = time.monotonic()  # also without an order: the connection stood
        order = Order.from_json(text)
        order.require_proof(self._key)
        if order.number != number:
            raise PeerError(
                f"order {number} calls itself {order.number}: lane and receiver lost step"
            )
        self._ahead = []
        try:
            match order.op:
                case "bye":
                    return False
                case "manifest":
                    staged = self._take_manifest(order, store)
                case "receive" if transport is not None:
                    staged = self._receive(order, store, transport)
                case "receive":
                    staged = self._fetch(order, store)
                case "stream":
                    staged = self._offer(order, store)
                case _:
                    staged = self._ping(order, transport)
        except TransferFailed:
            raise  # the communicator is of no further use: the epoch ends
        except TitanGrpoError as error:
            staged = _staged(order, error=str(error))
        if not staged.ok and self._ahead:
            self._moved(store, number, self._ahead[0], ENDED)
        self._reply(store, number, staged)
        if order.op == "stream" and staged.ok and transport is not None:
            self._fill(transport)
        return True

    def _reply(self, store: dist.Store, number: int, staged: Staged) -> None:
        with store_errors(f"reporting order {number}"):
            store.set(f"staged/{number}", staged.proven(self._key).to_json())

    def _next(self, store: dist.Store, key: str) -> bytes:
        while True:
            try:
                store.wait([key], timedelta(seconds=IDLE_S))
                return bytes(store.get(key))
            except dist.DistNetworkError as error:
                raise TransferFailed(
                    "the trainer's store is gone: the trainer ended or closed this epoch"
                ) from error
            except dist.DistStoreError:
                continue  # no order yet

    def _take_manifest(self, order: Order, store: dist.Store) -> Staged:
        with store_errors("reading the manifest"):
            text = get_value(store, "manifest")
        manifest = Manifest.from_json(text.decode())
        if manifest.digest != self._hello.manifest_digest:
            raise PeerError(
                f"the manifest must have digest {self._hello.manifest_digest}, got"
                f" {manifest.digest}"
            )
        for source in order.sources:
            self._presence = TcpReader(source, self._key, self._hello.progress_s)
        if self.streamed:
            size = window_bytes(manifest.total_bytes, self._hello.bucket_bytes)
            image = SharedImage.create(size, "titan_grpo window")
        else:
            image = SharedImage.create(manifest.total_bytes, "titan_grpo staging")
        shared = SharedImage.create(len(text), "titan_grpo manifest")
        shared.buffer[:] = text
        with self._turn:
            self._manifest, self._image, self._manifest_text = manifest, image, shared
        return _staged(order, image=image)

    def _offer(self, order: Order, store: dist.Store) -> Staged:
        """A windowed transfer: everything but the bytes. The fingerprint covers the digests that
        every block must have."""
        image, manifest = self._reserve(order, streamed=True)
        expected = self._digests(order, store, manifest)
        found = fingerprint(manifest.digest, expected)
        if found != order.fingerprint:
            raise PeerError(f"the fingerprint must be {order.fingerprint}, got {found}")
        with self._turn:
            self._expected = expected
            self._window = Window(image, manifest, self._hello.bucket_bytes)
            self._step(staging.Arrived(order.number, order.version, found, True))
        return _staged(order, fingerprint=found, image=image)

    def _fill(self, transport: Transport) -> None:
        """The bytes of a windowed transfer. A failure reaches the lane as the engine's report; then
        the lane ends the epoch."""
        window, algorithm = self._window, self._hello.digest_algorithm
        assert window is not None
        try:
            window.fill(transport, self._expected, algorithm, self.timeout_s, self._block_key)
        except TransferFailed as error:
            window.fail(str(error))
            transport.close()  # ends the lane's broadcast too
        with self._turn:
            self._step(staging.Spent())

    def _watch(self, store: dist.Store, transport: Transport | None) -> None:
        """Thread: release the engine as soon as the lane cancels, also while a broadcast stalls."""
        try:
            self._next(store, CANCEL_KEY)
            why = "the trainer gave the transfer up"
        except TransferFailed as error:
            why = str(error)
        if (window := self._window) is not None:
            window.fail(why)
        if transport is not None:
            transport.abort()

    def _fetch(self, order: Order, store: dist.Store) -> Staged:
        """Read the version from its sources. The lane sees each bucket that has arrived."""
        hello, began = self._hello, time.monotonic()
        if self._manifest is not None:
            self._ahead = list(marks(self._manifest.total_bytes, hello.bucket_bytes))
        image, manifest = self._reserve(order, streamed=False)
        expected = self._digests(order, store, manifest)
        print_ = fingerprint(manifest.digest, expected)
        error, bad, verify_s = "", -1, 0.0
        if print_ != order.fingerprint:
            error = f"the fingerprint must be {order.fingerprint}, got {print_}"
        else:
            content = Content(manifest, expected, hello.digest_algorithm, self._block_key)
            fetch = Fetch(image, content, self._opens(order.sources), hello.bucket_bytes)
            moved = partial(self._moved, store, order.number)
            fetch.run(hello.connections, hello.timeout_s, tuple(self._ahead), moved)
            error, bad, verify_s = fetch.error, fetch.bad_block, fetch.verify_s
        with self._turn:
            self._step(staging.Arrived(order.number, order.version, print_, not error))
        return replace(
            _staged(order, print_, error, image),
            receive_s=time.monotonic() - began,
            verify_s=verify_s,
            bad_block=bad,
        )

    def _moved(self, store: dist.Store, number: int, mark: int, value: bytes = MOVED) -> None:
        """Tell the lane that the transfer moves, or, by another value, that it has ended."""
        self._ahead.remove(mark)
        with store_errors(f"reporting progress of transfer {number}"):
            store.set(mark_key(number, mark), value)  # type: ignore[arg-type]

    def _opens(self, sources: Sequence[RangeSource]) -> list[Open]:
        """How to open each source; a memfd of this host before any socket."""
        local: list[Callable[[], MemfdReader]] = [
            partial(MemfdReader, source.memfd) for source in sources if source.memfd
        ]
        wait_s = self._hello.progress_s
        return [*local, *(partial(TcpReader, source, self._key, wait_s) for source in sources)]

    def _receive(self, order: Order, store: dist.Store, transport: Transport) -> Staged:
        hello = self._hello
        image, manifest = self._reserve(order, streamed=False)
        receive_s = broadcast_image(transport, image.tensor(), hello.bucket_bytes, hello.timeout_s)
        start = time.monotonic()
        expected = self._digests(order, store, manifest)
        found = block_digests(image.buffer, manifest, hello.digest_algorithm, self._block_key)
        bad = first_difference(expected, found)
        print_ = fingerprint(manifest.digest, found)
        error = ""
        if bad is not None:
            error = f"block {bad} of {manifest.num_blocks} differs from what the trainer hashed"
        elif print_ != order.fingerprint:
            error = f"the fingerprint must be {order.fingerprint}, got {print_}"
        with self._turn:
            self._step(staging.Arrived(order.number, order.version, print_, not error))
        return replace(
            _staged(order, print_, error, image),
            receive_s=receive_s,
            verify_s=time.monotonic() - start,
            bad_block=-1 if bad is None else bad,
        )

    def _reserve(self, order: Order, streamed: bool) -> tuple[SharedImage, Manifest]:
        """The image, once the engine has given it back; from here on nothing is staged."""
        if streamed != self.streamed:
            raise PeerError(f"this epoch is {self._hello.apply}: the order does not belong to it")
        with self._turn:
            if self._manifest is None or self._image is None:
                raise PeerError("the manifest must be handed over before the first transfer")
            self._turn.wait_for(
                lambda: self._staging.phase is not staging.Phase.LENT, self._hello.timeout_s
            )
            self._step(staging.Begin(order.number, order.version))
            return self._image, self._manifest

    def _ping(self, order: Order, transport: Transport | None) -> Staged:
        """Proof that the engine has not restarted: this process would have died with it."""
        if transport is not None:
            transport.broadcast(torch.empty(PING_BYTES, dtype=torch.uint8), self._hello.timeout_s)
        return _staged(order)

    def _digests(self, order: Order, store: dist.Store, manifest: Manifest) -> list[bytes]:
        """The digests that the trainer's blocks have."""
        with store_errors("reading the digests"):
            raw = get_value(store, order.digests_key)
        algorithm = self._hello.digest_algorithm
        size = len(digest_block(memoryview(b""), algorithm))
        if len(raw) != size * manifest.num_blocks:
            raise PeerError(
                f"{manifest.num_blocks} {algorithm} digests must be {size * manifest.num_blocks}"
                f" bytes, got {len(raw)}"
            )
        return [raw[i : i + size] for i in range(0, len(raw), size)]

    def _step(self, event: staging.Event) -> None:
        """Under ``_turn``. PeerError if the table refuses."""
        self._staging, actions = staging.step(self._staging, event)
        for action in actions:
            if isinstance(action, fence.Refuse):
                raise PeerError(action.reason)


def _staged(
    order: Order, fingerprint: str = "", error: str = "", image: SharedImage | None = None
) -> Staged:
    address = {} if image is None else image.address.to_json()
    return Staged(order.number, order.version, not error, fingerprint, 0.0, 0.0, error, -1, address)
