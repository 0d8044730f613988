"""The receiving half of one epoch, free of any engine: joins the lane, fills the image, checks it, lends it.

Two threads: ``run`` holds the conversation with the lane; ``lend``, ``take`` and ``applied`` come from the engine's side.
A third one of a streamed epoch only waits for the lane to give up.
"""

import os
import socket
import threading
import time
from dataclasses import dataclass, replace
from datetime import timedelta

import torch.distributed as dist

from titan_grpo.errors import PeerError, TitanGrpoError, TransferFailed
from titan_grpo.layout.digest import BlockHasher, digest_block, fingerprint, first_difference
from titan_grpo.layout.image import SharedImage
from titan_grpo.layout.manifest import Manifest
from titan_grpo.protocol.wire import CANCEL_KEY, Applied, Commit, Hello, Joined, Order, Staged, key_prefix
from titan_grpo.receive.window import Window, window_bytes
from titan_grpo.sync.transports.base import Transport, TransportOptions, broadcast_image
from titan_grpo.sync.transports.opening import open_transport, transport_problem
from titan_grpo.sync.transports.store import join_store, store_errors

IDLE_S = 60.0
"""Length of one wait for the next order, in seconds; it is repeated, a lost connection ends it at once."""


@dataclass(frozen=True, slots=True)
class Held:
    """What the engine holds, told to the lane on joining. ``problem``: why its commits would fail anyway, or empty."""

    run: str = ""
    version: int = -1
    fingerprint: str = ""
    intact: bool = True
    problem: str = ""
    package: str = ""

    def joined(self, rank: int, problem: str) -> Joined:
        """The answer to Hello."""
        why = self.problem or problem
        return Joined(rank, not why, why, self.package, os.getpid(), self.run, self.version, self.fingerprint, self.intact)


def address_towards(host: str, port: int) -> str:
    """This host's address on the interface that reaches ``host``; nothing is sent. TransferFailed if none does."""
    try:
        family, kind, proto, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, proto) as probe:
            probe.connect(target)
            return str(probe.getsockname()[0])
    except OSError as error:
        raise TransferFailed(f"no route from this server to the trainer at {host}:{port}: {error}") from error


class Receiver:
    """One epoch. Every error ends it with its reason; the process that hosts it then ends too."""

    def __init__(self, hello: Hello, held: Held) -> None:
        """Nothing is connected yet."""
        self._hello, self._held = hello, held
        self._turn = threading.Condition()
        self._staged: Staged | None = None
        self._lent = False
        self._manifest: Manifest | None = None
        self._image: SharedImage | None = None
        self._window: Window | None = None
        self._expected: list[bytes] = []
        self._replies: dist.Store | None = None
        self.streamed = hello.apply == "streamed"
        self.timeout_s = hello.timeout_s

    def answer(self) -> None:
        """Only answer the Hello (a probe, a refusal) and leave."""
        self._join().set(f"joined/{self._hello.rank}", self._held.joined(self._hello.rank, "").to_json())

    def run(self) -> None:
        """Serve the epoch until the lane says bye or is gone. Raises TitanGrpoError with the reason if it broke off."""
        hello = self._hello
        orders, self._replies = self._join(), self._join()
        joined = self._held.joined(hello.rank, transport_problem(hello.transport))
        with store_errors("answering the trainer's hello"):
            orders.set(f"joined/{hello.rank}", joined.to_json())
        if not joined.ok:
            raise PeerError(f"refused epoch {hello.epoch} of run {hello.run_id}: {joined.error}")
        here = address_towards(hello.store_host, hello.store_port)
        options = TransportOptions(hello.timeout_s, here, hello.bucket_bytes)
        transport = open_transport(hello.transport, orders, hello.rank, hello.size, options)
        if self.streamed:
            threading.Thread(target=self._watch, args=(self._join(), transport), name="watch", daemon=True).start()
        number = 0
        while self._serve(orders, transport, number):
            number += 1

    def lend(self, commit: Commit) -> tuple[SharedImage, Manifest]:
        """The staged image, or the window, for the engine until ``applied``. PeerError if it is not what is asked."""
        with self._turn:
            staged, image, manifest = self._staged, self._image, self._manifest
            if staged is None or image is None or manifest is None:
                raise PeerError(f"version {commit.version} is not staged here: nothing is, or a transfer is under way")
            asked = (commit.number, commit.version, commit.fingerprint, commit.manifest_digest)
            here = (staged.number, staged.version, staged.fingerprint, manifest.digest)
            if asked != here:
                raise PeerError(f"commit asks for (number, version, fingerprint, manifest) {asked}, staged is {here}")
            self._lent = True
            if self._window is not None:
                self._window.open()
            return image, manifest

    def take(self, consumed: int, wait_s: float) -> int:
        """See Window.take."""
        window = self._window
        if window is None:
            raise PeerError("no streamed transfer is under way")
        return window.take(consumed, wait_s)

    def applied(self, report: Applied) -> None:
        """Forward the engine's report to the lane, and take the image back."""
        if (window := self._window) is not None:
            window.fail(f"the engine gave up: {report.error}")
            times = {"receive_s": window.receive_s, "verify_s": window.verify_s}
            report = replace(report, **times, bad_block=window.bad_block)
        with self._turn:
            self._lent = False
            self._turn.notify_all()
        if self._replies is None:
            raise PeerError("the receiver has not joined a lane")
        with store_errors(f"reporting transfer {report.number}"):
            self._replies.set(f"applied/{report.number}", report.to_json())

    def _join(self) -> dist.Store:
        hello = self._hello
        store = join_store(hello.store_host, hello.store_port, hello.timeout_s)
        return dist.PrefixStore(key_prefix(hello.run_id, hello.epoch), store)

    def _serve(self, store: dist.Store, transport: Transport, number: int) -> bool:
        """One order; False after the last one."""
        order = Order.from_json(self._next(store, f"order/{number}"))
        if order.number != number:
            raise PeerError(f"order {number} calls itself {order.number}: lane and receiver lost step")
        if order.op == "bye":
            return False
        handler = {"manifest": self._take_manifest, "receive": self._receive, "stream": self._offer, "release": self._release}[
            order.op
        ]
        try:
            staged = handler(order, store, transport)
        except TransferFailed:
            raise  # the communicator is of no further use: the epoch ends
        except TitanGrpoError as error:
            staged = _refused(order, str(error))
        with store_errors(f"reporting order {number}"):
            store.set(f"staged/{number}", staged.to_json())
        if order.op == "stream" and staged.ok:
            self._fill(transport)
        return True

    def _next(self, store: dist.Store, key: str) -> bytes:
        while True:
            try:
                store.wait([key], timedelta(seconds=IDLE_S))
                return bytes(store.get(key))
            except dist.DistNetworkError as error:
                raise TransferFailed("the trainer's store is gone: the trainer ended or closed this epoch") from error
            except dist.DistStoreError:
                continue  # nothing to do for the lane's next version yet

    def _take_manifest(self, order: Order, store: dist.Store, transport: Transport) -> Staged:
        manifest = Manifest.from_json(bytes(store.get("manifest")).decode())
        if manifest.digest != self._hello.manifest_digest:
            raise PeerError(f"the manifest must have digest {self._hello.manifest_digest}, got {manifest.digest}")
        image = self._create(manifest)
        with self._turn:
            self._manifest, self._image = manifest, image
        return Staged(order.number, 0, True, "", 0.0, 0.0, "", -1, image.address.to_json())

    def _create(self, manifest: Manifest) -> SharedImage:
        if self.streamed:
            return SharedImage.create(window_bytes(manifest.total_bytes, self._hello.bucket_bytes), "titan_grpo window")
        return SharedImage.create(manifest.total_bytes, "titan_grpo staging")

    def _offer(self, order: Order, store: dist.Store, transport: Transport) -> Staged:
        """A streamed transfer: everything but the bytes. The fingerprint covers the digests that every block must have."""
        self._require_apply(True)
        image, manifest = self._reserve()
        expected = _split(bytes(store.get(order.digests_key)), manifest, self._hello.digest_algorithm)
        found = fingerprint(manifest.digest, expected)
        if found != order.fingerprint:
            raise PeerError(f"the fingerprint must be {order.fingerprint}, got {found}")
        staged = Staged(order.number, order.version, True, found, 0.0, 0.0, "", -1, image.address.to_json())
        with self._turn:
            self._expected = expected
            self._window = Window(image, manifest, self._hello.bucket_bytes)
            self._staged = staged
        return staged

    def _fill(self, transport: Transport) -> None:
        """The bytes of a streamed transfer. A failure reaches the lane as the engine's report; then the lane ends the epoch."""
        window = self._window
        assert window is not None
        try:
            window.fill(transport, self._expected, self._hello.digest_algorithm, self.timeout_s)
        except TransferFailed as error:
            window.fail(str(error))
            transport.close()  # the lane's broadcast ends too
        with self._turn:
            self._staged = None

    def _watch(self, store: dist.Store, transport: Transport) -> None:
        """Thread: let the engine go as soon as the lane gives up, also while a broadcast stalls."""
        try:
            self._next(store, CANCEL_KEY)
            why = "the trainer gave the transfer up"
        except TransferFailed as error:
            why = str(error)
        if (window := self._window) is not None:
            window.fail(why)
        transport.abort()

    def _require_apply(self, streamed: bool) -> None:
        if streamed != self.streamed:
            raise PeerError(f"this epoch is {self._hello.apply}: the order does not belong to it")

    def _receive(self, order: Order, store: dist.Store, transport: Transport) -> Staged:
        self._require_apply(False)
        hello = self._hello
        image, manifest = self._reserve()
        with BlockHasher(image.buffer, manifest, hello.digest_algorithm) as hasher:
            # each bucket is hashed while the next one arrives, and while its bytes are still in the cache
            receive_s = broadcast_image(transport, image.tensor(), hello.bucket_bytes, hello.timeout_s, hasher.arrived)
            start = time.monotonic()
            expected = _split(bytes(store.get(order.digests_key)), manifest, hello.digest_algorithm)
            found = hasher.digests()
        bad = first_difference(expected, found)
        print_ = fingerprint(manifest.digest, found)
        verify_s = time.monotonic() - start
        error = "" if bad is None else f"block {bad} of {manifest.num_blocks} differs from what the trainer hashed"
        if not error and print_ != order.fingerprint:
            error = f"the fingerprint must be {order.fingerprint}, got {print_}"
        block = -1 if bad is None else bad
        address = image.address.to_json()
        staged = Staged(order.number, order.version, not error, print_, receive_s, verify_s, error, block, address)
        with self._turn:
            self._staged = staged if staged.ok else None
        return staged

    def _reserve(self) -> tuple[SharedImage, Manifest]:
        """The image, once the engine has given it back; from here on nothing is staged."""
        with self._turn:
            if not self._turn.wait_for(lambda: not self._lent, self._hello.timeout_s):
                raise PeerError("the engine still loads the previous version; the next one can not be received over it")
            if self._manifest is None:
                raise PeerError("the manifest must be handed over before the first transfer")
            self._staged = None
            if self._image is None:
                self._image = self._create(self._manifest)
            return self._image, self._manifest

    def _release(self, order: Order, store: dist.Store, transport: Transport) -> Staged:
        with self._turn:
            if self._image is not None and not self._lent:
                self._image.close()
                self._image = self._staged = None
        return Staged(order.number, 0, True, "", 0.0, 0.0, "", -1, {})


def _split(raw: bytes, manifest: Manifest, algorithm: str) -> list[bytes]:
    size = len(digest_block(memoryview(b""), algorithm))
    if len(raw) != size * manifest.num_blocks:
        raise PeerError(f"{manifest.num_blocks} {algorithm} digests must be {size * manifest.num_blocks} bytes, got {len(raw)}")
    return [raw[i : i + size] for i in range(0, len(raw), size)]


def _refused(order: Order, error: str) -> Staged:
    return Staged(order.number, order.version, False, "", 0.0, 0.0, error, -1, {})
