"""The receiving half of one epoch, free of any engine: joins the lane, fills the image, checks it,
lends it.

Two threads: ``run`` holds the conversation with the lane; ``lend``, ``take`` and ``applied`` come
from the engine's side. A third one of a streamed epoch only waits for the lane to give up.
"""

import os
import socket
import threading
import time
from dataclasses import dataclass
from datetime import timedelta

import msgspec
import torch
import torch.distributed as dist

from titan_grpo.errors import PeerError, TitanGrpoError, TransferFailed
from titan_grpo.layout.digest import KEYED, BlockHasher, digest_block, fingerprint, first_difference
from titan_grpo.layout.image import SharedImage
from titan_grpo.layout.manifest import Manifest
from titan_grpo.protocol import fence, staging
from titan_grpo.protocol.messages import (
    CANCEL_KEY,
    PING_BYTES,
    Applied,
    Commit,
    Hello,
    Joined,
    Order,
    Staged,
    key_prefix,
)
from titan_grpo.receive.window import Window, window_bytes
from titan_grpo.runkey import EpochKeys
from titan_grpo.sync.transports.base import Transport, TransportOptions, broadcast_image
from titan_grpo.sync.transports.store import (
    join_store,
    open_transport,
    store_errors,
    transport_problem,
)

IDLE_S = 60.0
"""Length of one wait for the next order, in seconds; it is repeated, a lost connection ends it at
once."""


@dataclass(frozen=True, slots=True)
class Held:
    """What the engine holds, told to the lane on joining. ``problem``: why its commits would fail
    anyway, or empty.

    ``keyed``: it has a run key.
    """

    run: str = ""
    version: int = -1
    fingerprint: str = ""
    intact: bool = True
    problem: str = ""
    package: str = ""
    keyed: bool = False

    def joined(self, rank: int, problem: str) -> Joined:
        """The answer to Hello."""
        why = self.problem or problem
        return Joined(
            rank=rank,
            ok=not why,
            error=why,
            package=self.package,
            pid=os.getpid(),
            held_run=self.run,
            held_version=self.version,
            held_fingerprint=self.fingerprint,
            intact=self.intact,
            keyed=self.keyed,
        )


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

    def __init__(self, hello: Hello, held: Held, keys: EpochKeys | None) -> None:
        """Nothing is connected yet. ``keys``: of this epoch, if the engine has a run key and the
        Hello has proven it."""
        self._hello, self._held = hello, held
        self._key = keys.messages if keys is not None else None
        self._block_key = keys.blocks.raw if keys is not None else None
        self._turn = threading.Condition()
        self._staging = staging.Staging(streamed=hello.apply == "streamed")
        self._manifest: Manifest | None = None
        self._image: SharedImage | None = None
        self._window: Window | None = None
        self._expected: list[bytes] = []
        self._replies: dist.Store | None = None
        self._handlers = {
            "manifest": self._take_manifest,
            "receive": self._receive,
            "stream": self._offer,
            "ping": self._ping,
        }
        self.streamed = hello.apply == "streamed"
        self.timeout_s = hello.timeout_s

    def answer(self) -> None:
        """Only answer the Hello (a probe, a refusal) and leave."""
        self._join().set(
            f"joined/{self._hello.rank}",
            self._held.joined(self._hello.rank, "").proven(self._key).to_json(),
        )

    def run(self) -> None:
        """Serve the epoch until the lane says bye or is gone. Raises TitanGrpoError with the reason
        if it broke off."""
        hello = self._hello
        orders, self._replies = self._join(), self._join()
        joined = self._held.joined(
            hello.rank, transport_problem(hello.transport) or self._digest_problem()
        )
        with store_errors("answering the trainer's hello"):
            orders.set(f"joined/{hello.rank}", joined.proven(self._key).to_json())
        if not joined.ok:
            raise PeerError(f"refused epoch {hello.epoch} of run {hello.run_id}: {joined.error}")
        here = address_towards(hello.store_host, hello.store_port)
        options = TransportOptions(hello.timeout_s, here, hello.bucket_bytes)
        transport = open_transport(hello.transport, orders, hello.rank, hello.size, options)
        if self.streamed:
            threading.Thread(
                target=self._watch, args=(self._join(), transport), name="watch", daemon=True
            ).start()
        number = 0
        while self._serve(orders, transport, number):
            number += 1

    def lend(self, commit: Commit) -> tuple[SharedImage, Manifest]:
        """The staged image, or the window, for the engine until ``applied``. PeerError if it is not
        what is asked."""
        with self._turn:
            image, manifest = self._image, self._manifest
            if manifest is not None and commit.manifest_digest != manifest.digest:
                raise PeerError(
                    f"commit asks for manifest {commit.manifest_digest}, staged is"
                    f" {manifest.digest}"
                )
            self._step(staging.LendRequested(commit.number, commit.version, commit.fingerprint))
            assert image is not None
            assert manifest is not None
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
            report = msgspec.structs.replace(
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

    def _digest_problem(self) -> str:
        found = self._hello.digest_algorithm
        if self._key is None or found == KEYED:
            return ""
        return (
            f"with a run key the blocks' digests must be {KEYED}, got {found!r}: others take no key"
        )

    def _join(self) -> dist.Store:
        hello = self._hello
        store = join_store(hello.store_host, hello.store_port, hello.timeout_s)
        return dist.PrefixStore(key_prefix(hello.run_id, hello.epoch), store)

    def _serve(self, store: dist.Store, transport: Transport, number: int) -> bool:
        """One order; False after the last one."""
        order = Order.from_json(self._next(store, f"order/{number}"))
        order.require_proof(self._key)
        if order.number != number:
            raise PeerError(
                f"order {number} calls itself {order.number}: lane and receiver lost step"
            )
        if order.op == "bye":
            return False
        try:
            staged = self._handlers[order.op](order, store, transport)
        except TransferFailed:
            raise  # the communicator is of no further use: the epoch ends
        except TitanGrpoError as error:
            staged = _refused(order, str(error))
        with store_errors(f"reporting order {number}"):
            store.set(f"staged/{number}", staged.proven(self._key).to_json())
        if order.op == "stream" and staged.ok:
            self._fill(transport)
        return True

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
                continue  # nothing to do for the lane's next version yet

    def _take_manifest(self, order: Order, store: dist.Store, transport: Transport) -> Staged:
        manifest = Manifest.from_json(bytes(store.get("manifest")).decode())
        if manifest.digest != self._hello.manifest_digest:
            raise PeerError(
                f"the manifest must have digest {self._hello.manifest_digest}, got"
                f" {manifest.digest}"
            )
        image = self._create(manifest)
        with self._turn:
            self._manifest, self._image = manifest, image
        return Staged(order.number, 0, True, "", 0.0, 0.0, "", -1, image.address.to_json())

    def _create(self, manifest: Manifest) -> SharedImage:
        if self.streamed:
            return SharedImage.create(
                window_bytes(manifest.total_bytes, self._hello.bucket_bytes), "titan_grpo window"
            )
        return SharedImage.create(manifest.total_bytes, "titan_grpo staging")

    def _offer(self, order: Order, store: dist.Store, transport: Transport) -> Staged:
        """A streamed transfer: everything but the bytes. The fingerprint covers the digests that
        every block must have."""
        self._require_apply(True)
        image, manifest = self._reserve(order)
        expected = _split(
            bytes(store.get(order.digests_key)), manifest, self._hello.digest_algorithm
        )
        found = fingerprint(manifest.digest, expected)
        if found != order.fingerprint:
            raise PeerError(f"the fingerprint must be {order.fingerprint}, got {found}")
        staged = Staged(
            order.number, order.version, True, found, 0.0, 0.0, "", -1, image.address.to_json()
        )
        with self._turn:
            self._expected = expected
            self._window = Window(image, manifest, self._hello.bucket_bytes)
            self._step(staging.Arrived(order.number, order.version, found, True))
        return staged

    def _fill(self, transport: Transport) -> None:
        """The bytes of a streamed transfer. A failure reaches the lane as the engine's report; then
        the lane ends the epoch."""
        window = self._window
        assert window is not None
        try:
            window.fill(
                transport,
                self._expected,
                self._hello.digest_algorithm,
                self.timeout_s,
                self._block_key,
            )
        except TransferFailed as error:
            window.fail(str(error))
            transport.close()  # the lane's broadcast ends too
        with self._turn:
            self._step(staging.Spent())

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
        image, manifest = self._reserve(order)
        with BlockHasher(image.buffer, manifest, hello.digest_algorithm, self._block_key) as hasher:
            # each bucket is hashed while the next one arrives, and while its bytes are still in the
            # cache
            receive_s = broadcast_image(
                transport, image.tensor(), hello.bucket_bytes, hello.timeout_s, hasher.arrived
            )
            start = time.monotonic()
            expected = _split(bytes(store.get(order.digests_key)), manifest, hello.digest_algorithm)
            found = hasher.digests()
        bad = first_difference(expected, found)
        print_ = fingerprint(manifest.digest, found)
        verify_s = time.monotonic() - start
        error = (
            ""
            if bad is None
            else f"block {bad} of {manifest.num_blocks} differs from what the trainer hashed"
        )
        if not error and print_ != order.fingerprint:
            error = f"the fingerprint must be {order.fingerprint}, got {print_}"
        block = -1 if bad is None else bad
        address = image.address.to_json()
        staged = Staged(
            order.number,
            order.version,
            not error,
            print_,
            receive_s,
            verify_s,
            error,
            block,
            address,
        )
        with self._turn:
            self._step(staging.Arrived(order.number, order.version, print_, staged.ok))
        return staged

    def _reserve(self, order: Order) -> tuple[SharedImage, Manifest]:
        """The image, once the engine has given it back; from here on nothing is staged."""
        with self._turn:
            if self._manifest is None or self._image is None:
                raise PeerError("the manifest must be handed over before the first transfer")
            self._turn.wait_for(
                lambda: self._staging.phase is not staging.Phase.LENT, self._hello.timeout_s
            )
            self._step(staging.Begin(order.number, order.version))
            return self._image, self._manifest

    def _ping(self, order: Order, store: dist.Store, transport: Transport) -> Staged:
        """A sign of life, whatever the memory holds: this process dies with its engine."""
        transport.broadcast(torch.empty(PING_BYTES, dtype=torch.uint8), self._hello.timeout_s)
        return Staged(order.number, 0, True, "", 0.0, 0.0, "", -1, {})

    def _step(self, event: staging.Event) -> tuple[staging.Action, ...]:
        """Under ``_turn``. PeerError if the table refuses."""
        self._staging, actions = staging.step(self._staging, event)
        for action in actions:
            if isinstance(action, fence.Refuse):
                raise PeerError(action.reason)
        return actions


def _split(raw: bytes, manifest: Manifest, algorithm: str) -> list[bytes]:
    size = len(digest_block(memoryview(b""), algorithm))
    if len(raw) != size * manifest.num_blocks:
        raise PeerError(
            f"{manifest.num_blocks} {algorithm} digests must be {size * manifest.num_blocks} bytes,"
            f" got {len(raw)}"
        )
    return [raw[i : i + size] for i in range(0, len(raw), size)]


def _refused(order: Order, error: str) -> Staged:
    return Staged(order.number, order.version, False, "", 0.0, 0.0, error, -1, {})
