"""The receiving half of one epoch, independent of the engine: join the lane, fill the image, check
it, lend it to the engine.

Three threads: the channel's thread reads the lane's orders, ``run`` serves them, and a third calls
``lend``, ``take`` and ``applied`` for the engine. Torch takes seconds to import: only gloo and NCCL
transfers import it.
"""

import math
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from msgspec.structs import replace

from titan_grpo.errors import ConfigError, PeerError, TitanGrpoError, TransferFailed
from titan_grpo.layout.image import Hashing, ImageAddress, SharedImage, fingerprint
from titan_grpo.layout.manifest import Manifest
from titan_grpo.protocol import server
from titan_grpo.protocol.marks import mark_bytes, marks
from titan_grpo.protocol.messages import (
    NIXL,
    RANGES,
    Applied,
    Commit,
    Hello,
    Joined,
    Kind,
    Order,
    RangeSource,
    Staged,
)
from titan_grpo.protocol.patches import leading_from
from titan_grpo.receive.fetch import (
    NOWHERE,
    BesideReader,
    Content,
    Fetch,
    MemfdReader,
    Open,
    Patience,
    Relaying,
    Sharing,
    TcpReader,
)
from titan_grpo.receive.patches import apply_patches
from titan_grpo.runkey import EpochKeys
from titan_grpo.sync.transports.channel import (
    Frame,
    ReceiverChannel,
    connect,
    header,
    send_all,
)
from titan_grpo.sync.transports.nixl import NixlReader, nixl_problem
from titan_grpo.sync.transports.tls import Certificate, WrongCertificate

if TYPE_CHECKING:
    from titan_grpo.receive.window import Window
    from titan_grpo.sync.transports.broadcast import Transport

SIGN_S = 1.0
"""Seconds to wait for the trainer's sign of life after asking for one."""


@dataclass(frozen=True, slots=True)
class Place:
    """Address of this server for other servers. ``host``: where it serves them; empty: its address
    towards the trainer; NOWHERE: it does not serve them. ``zone``: see Joined. ``certificate``:
    paths of its TLS certificate and of the key; without one it does not serve others if the trainer
    uses TLS."""

    host: str = ""
    zone: str = ""
    certificate: tuple[str, str] = "", ""


CERTIFICATE = "TITAN_GRPO_TLS_CERTIFICATE"
"""Environment variable: path of the certificate (Place.certificate)."""

CERTIFICATE_KEY = "TITAN_GRPO_TLS_KEY"
"""Environment variable: path of its key."""


class Receiver:
    """Receiver of one epoch. Any error ends the epoch, and its process with it."""

    def __init__(
        self,
        hello: Hello,
        joined: Joined,
        keys: EpochKeys | None,
        device: str = "cpu",
        place: Place | None = None,
    ) -> None:
        """Connect nothing yet. ``joined``: the engine's answer to the Hello. ``keys``: the epoch's,
        if the engine has a run key and the Hello has proven it. ``device``: the engine's."""
        self._device, self._place = device, place or Place()
        self._sharing: Sharing | None = None
        self._hello, self._joined = hello, replace(joined, pid=os.getpid())
        self._key = keys.messages if keys is not None else None
        blocks = keys.blocks if keys is not None else None
        self._hashing = Hashing(hello.digest_algorithm, blocks)
        self._range_key = self._hashing.range_key
        self._turn = threading.Condition()
        self.streamed = hello.apply == "streamed"
        self.timeout_s = hello.timeout_s
        self._staging = server.Staging(streamed=self.streamed)
        self._manifest: Manifest | None = None
        self._image: SharedImage | None = None
        self._manifest_text: SharedImage | None = None
        self._window: Window | None = None
        self._transport: Transport | None = None
        self._base: int | None = None
        """Version in the image when the current transfer began: patches apply to it."""
        self._channel: ReceiverChannel | None = None
        self._born_s = time.monotonic()
        self._bye: Order | None = None
        """The trainer's last order, "bye"."""

    def answer(self, within_s: float) -> None:
        """Answer the Hello (a probe, a refusal) and serve no epoch."""
        with self._join(min(within_s, self.timeout_s)) as sock:
            body = self._answer()
            send_all(sock, header(Frame(Kind.JOINED, 0, body)) + body, "trainer")

    def run(self) -> None:
        """Serve the epoch until the lane's bye, which ``confirm_bye`` answers later. Raises
        TitanGrpoError if the epoch ends in another way."""
        hello = self._hello
        sock, trainer = self._join(self.timeout_s), f"{hello.host}:{hello.port}"
        channel = self._channel = ReceiverChannel(sock, trainer, self._give_up)
        if self._joined.ok and (problem := self._problem()):
            self._joined = replace(self._joined, ok=False, error=problem, final=True)
        if self._joined.ok and hello.relay_wait_s:
            try:
                self._joined = replace(self._joined, **self._share(channel))
            except ConfigError as error:
                self._joined = replace(self._joined, ok=False, error=str(error), final=True)
        channel.send(Kind.JOINED, 0, self._answer())
        if not self._joined.ok:
            raise PeerError(
                f"refused epoch {hello.epoch} of run {hello.run_id}: {self._joined.error}"
            )
        if hello.transport not in RANGES:
            self._transport = self._open_transport(channel)
        number = 0
        while self._serve(channel, number):
            number += 1

    def _share(self, channel: ReceiverChannel) -> dict[str, str | int]:
        """Start serving other servers, if possible; return the fields of Joined that say where.
        Raises ConfigError if the certificate or the address is unusable."""
        place, hello = self._place, self._hello
        certificate = Certificate.load(*place.certificate, (CERTIFICATE, CERTIFICATE_KEY))
        here = channel.local_host
        host = place.host or here
        # On the trainer's own host, relaying gains nothing: others reach the trainer as easily.
        if host in (NOWHERE, hello.host) or (hello.pin and certificate is None):
            return {"relay_host": here, "zone": place.zone}
        self._sharing = Sharing(host, self._range_key, certificate)
        pin = certificate.pin if certificate is not None else ""
        port = self._sharing.port
        return {"relay_host": host, "relay_port": port, "relay_pin": pin, "zone": place.zone}

    def _problem(self) -> str:
        """Return why this host cannot serve the epoch, or ""."""
        hello = self._hello
        try:
            self._hashing.block(())
        except ConfigError as error:
            return str(error)
        if hello.transport in RANGES:
            return nixl_problem() if hello.transport == NIXL else ""
        from titan_grpo.sync.transports.broadcast import transport_problem

        return transport_problem(hello.transport, hello.nccl)

    def _open_transport(self, channel: ReceiverChannel) -> "Transport":
        """Open the communicator of gloo or NCCL."""
        from titan_grpo.sync.transports.broadcast import (
            TransportOptions,
            join_store,
            open_transport,
        )

        hello = self._hello
        options = TransportOptions(
            hello.timeout_s, channel.local_host, hello.bucket_bytes, self._device
        )
        store = join_store(hello.host, hello.store_port, hello.timeout_s)
        return open_transport(hello.transport, store, 1, 2, options)

    def confirm_bye(self) -> None:
        """Answer the lane's bye, if there was one."""
        if self._bye is not None and self._channel is not None:
            self._reply(self._channel, _staged(self._bye))

    @property
    def signed_s(self) -> float:
        """Time of the trainer's last frame (monotonic clock); minus infinity after its bye."""
        if self._bye is not None:
            return -math.inf
        return self._born_s if self._channel is None else self._channel.last_frame_s

    def last_sign_s(self) -> float:
        """Ask the trainer's process for a sign of life, then return ``signed_s``."""
        if self._channel is not None:
            with suppress(TransferFailed):
                self._channel.ask_sign(SIGN_S)
        return self.signed_s

    def place(self) -> tuple[ImageAddress, ImageAddress]:
        """Return the addresses of the image (or window) and the manifest's JSON; lend nothing.
        Raises PeerError before the manifest has arrived."""
        with self._turn:
            if self._image is None or self._manifest_text is None:
                raise PeerError("the manifest must be handed over before its memory is attached")
            return self._image.address, self._manifest_text.address

    def lend(self, commit: Commit) -> tuple[ImageAddress, ImageAddress]:
        """Lend the staged image (or window) to the engine until ``applied``; return the addresses
        of it and of the manifest's JSON. Raises PeerError if the commit names something else."""
        with self._turn:
            image, manifest, text = self._image, self._manifest, self._manifest_text
            if manifest is not None and commit.manifest_digest != manifest.digest:
                raise PeerError(
                    f"commit asks for manifest {commit.manifest_digest}, staged is"
                    f" {manifest.digest}"
                )
            self._step(server.LendRequested(commit.number, commit.version, commit.fingerprint))
            assert image is not None
            assert text is not None
            if self._window is not None:
                self._window.open()
            return image.address, text.address

    def take(self, consumed: int, wait_s: float) -> int:
        window = self._window
        if window is None:
            raise PeerError("no windowed apply is under way")
        return window.take(consumed, wait_s)

    def applied(self, report: Applied) -> None:
        """Take the image back, and forward the engine's report to the lane."""
        if (window := self._window) is not None:
            window.fail(f"the engine gave up: {report.error}")
            report = replace(report, verify_s=window.verify_s, bad_block=window.bad_block)
        with self._turn:
            self._step(server.Returned())
            self._turn.notify_all()
        if self._channel is None:
            raise PeerError("the receiver has not joined a lane")
        text = report.proven(self._key).to_json()
        self._channel.send(Kind.APPLIED, report.number, text.encode())

    def _join(self, within_s: float) -> socket.socket:
        hello = self._hello
        at = (hello.host, hello.port), hello.ticket
        try:
            return connect(*at, self._key, within_s, "trainer", hello.pin)
        except WrongCertificate as error:
            # Connect without the key to what may be a man in the middle: only the refusal is sent.
            self._joined = replace(self._joined, ok=False, error=str(error), final=True)
            return connect(*at, None, within_s, "trainer", error.shown)

    def _answer(self) -> bytes:
        return self._joined.proven(self._key).to_json().encode()

    def _serve(self, channel: ReceiverChannel, number: int) -> bool:
        """Serve the next order, which must have ``number``; return False after the bye."""
        blob: bytes | bytearray = b""
        while (frame := channel.take((Kind.BLOB, Kind.ORDER))).kind is Kind.BLOB:
            blob = frame.body
        order = Order.from_json(frame.body)
        order.require_proof(self._key)
        if order.number != number:
            raise PeerError(
                f"order {number} calls itself {order.number}: lane and receiver lost step"
            )
        try:
            match order.op:
                case "bye":
                    self._bye = order
                    return False
                case "manifest":
                    staged = self._take_manifest(order, blob, channel)
                case "receive" if self._transport is not None:
                    staged = self._receive(order, blob, self._transport)
                case "receive":
                    staged = self._fetch(order, blob, channel)
                case "stream":
                    staged = self._offer(order, blob)
                case _:
                    # ping: proof that the engine has not restarted, or this process would be gone
                    staged = _staged(order)
        except TransferFailed:
            raise  # the connection or communicator is unusable: end the epoch
        except TitanGrpoError as error:
            staged = _staged(order, error=str(error))
        self._reply(channel, staged)
        if order.op == "stream" and staged.ok and self._transport is not None:
            self._fill(self._transport)
        return True

    def _reply(self, channel: ReceiverChannel, staged: Staged) -> None:
        channel.send(Kind.STAGED, staged.number, staged.proven(self._key).to_json().encode())

    def _give_up(self, why: str) -> None:
        """Release an engine that waits for the window: the lane has cancelled or is gone. Runs on
        the channel's thread, as ``run`` may hang in a stalled broadcast."""
        if (window := self._window) is not None:
            window.fail(why)
        if (transport := self._transport) is not None:
            transport.abort()

    def _take_manifest(
        self, order: Order, text: bytes | bytearray, channel: ReceiverChannel
    ) -> Staged:
        """Check the manifest and allocate the image. Allocation takes minutes for large models:
        each mark is reported to the lane."""
        manifest = Manifest.from_json(text)
        if manifest.digest != self._hello.manifest_digest:
            raise PeerError(
                f"the manifest must have digest {self._hello.manifest_digest}, got"
                f" {manifest.digest}"
            )
        if self.streamed:
            from titan_grpo.receive.window import window_bytes

            size = window_bytes(manifest.total_bytes, self._hello.bucket_bytes)
            image = SharedImage.create(size, "titan_grpo window")
        else:
            left = deque(marks(manifest.total_bytes, self._hello.bucket_bytes))

            def made(nbytes: int) -> None:
                while left and nbytes >= left[0]:
                    left.popleft()
                    channel.send(Kind.MOVED, order.number)

            image = SharedImage.create(manifest.total_bytes, "titan_grpo staging", made=made)
        shared = SharedImage.create(len(text), "titan_grpo manifest")
        shared.buffer[:] = text
        with self._turn:
            self._manifest, self._image, self._manifest_text = manifest, image, shared
        return _staged(order)

    def _offer(self, order: Order, digests: bytes | bytearray) -> Staged:
        """Prepare a windowed transfer, before any bytes: check the fingerprint over ``digests``,
        and create the window."""
        from titan_grpo.receive.window import Window

        image, manifest = self._reserve(order, streamed=True)
        content = self._content(order, digests, manifest)
        with self._turn:
            self._window = Window(image, content, self._hello.bucket_bytes)
            self._step(server.Arrived(order.number, order.version, order.fingerprint, True))
        return _staged(order, order.fingerprint)

    def _content(self, order: Order, digests: bytes | bytearray, manifest: Manifest) -> Content:
        """Return the version's expected content. Raises PeerError unless the digests make the
        order's fingerprint."""
        expected = self._hashing.split(digests, manifest.num_blocks)
        found = fingerprint(manifest.digest, expected)
        if found != order.fingerprint:
            raise PeerError(f"the fingerprint must be {order.fingerprint}, got {found}")
        return Content(manifest, expected, self._hashing)

    def _fill(self, transport: "Transport") -> None:
        """Receive the bytes of a windowed transfer. A failure reaches the lane in the engine's
        report; the lane then ends the epoch."""
        window = self._window
        assert window is not None
        try:
            window.fill(transport, self.timeout_s)
        except TransferFailed as error:
            window.fail(str(error))
            transport.close()  # ends the lane's broadcast too
        with self._turn:
            self._step(server.Spent())

    def _fetch(self, order: Order, digests: bytes | bytearray, channel: ReceiverChannel) -> Staged:
        """Read the version from its sources, and report each mark to the lane."""
        hello, began = self._hello, time.monotonic()
        image, manifest = self._reserve(order, streamed=False)
        content = self._content(order, digests, manifest)
        patches = leading_from(self._base, order.patches)
        patched, patch_bytes = apply_patches(
            image, manifest, patches, self._range_key, hello.progress_s, hello.connections
        )
        # Begins after the patches: the lane allows them their own time.
        patience = Patience(hello.relay_wait_s, hello.min_rate)
        others = [self._other(source, manifest, patience) for source in order.relays]
        sharing, relaying = self._sharing if order.serve else None, None
        if sharing is not None:
            sharing.begin(image, manifest, order.serve)
        if others or sharing is not None:  # a server without readers may read from others
            arrived = sharing.arrived if sharing is not None else lambda *_: None
            relaying = Relaying(frozenset(others), arrived, patience)
        sources = self._opens(order, others, manifest)
        total, bucket = manifest.total_bytes, hello.bucket_bytes
        fetch = Fetch(image, content, sources, mark_bytes(total, bucket), patched, relaying)

        def moved(_: int) -> None:
            channel.send(Kind.MOVED, order.number)

        fetch.run(hello.connections, hello.timeout_s, marks(total, bucket), moved)
        if fetch.error and sharing is not None:
            sharing.end()
        return replace(
            self._arrived(order, fetch.error),
            receive_s=time.monotonic() - began,
            verify_s=fetch.verify_s,
            bad_block=fetch.bad_block,
            read_bytes=patch_bytes + fetch.read_bytes,
            relay_bytes=fetch.relay_bytes,
            lost=tuple(i for i, other in enumerate(others) if other in fetch.lost),
        )

    def _arrived(self, order: Order, error: str) -> Staged:
        """Record the end of a transfer; return the answer to its order."""
        with self._turn:
            self._step(server.Arrived(order.number, order.version, order.fingerprint, not error))
        return _staged(order, order.fingerprint, error)

    def _other(self, source: RangeSource, manifest: Manifest, patience: Patience) -> Open:
        """Return the opener of another server: through its memfd if it is on this host."""
        how = source, self._range_key, self._hello.relay_wait_s, patience.until
        if source.host == self._joined.relay_host and source.part < len(manifest.parts):
            return partial(BesideReader, *how, manifest.parts[source.part])
        return partial(TcpReader, *how)

    def _opens(
        self, order: Order, others: Sequence[Open], manifest: Manifest
    ) -> dict[int, list[Open]]:
        """Return the openers of each part's sources, in order of preference: the trainer's memfd on
        this host, ``others`` (the order's relays), then the trainer over the network."""
        out: dict[int, list[Open]] = {}
        for source in order.sources:
            opens = out.setdefault(source.part, [])
            if source.memfd and source.part < len(manifest.parts):
                opens.append(partial(MemfdReader, source.memfd, manifest.parts[source.part]))
        for source, other in zip(order.relays, others, strict=True):
            out.setdefault(source.part, []).append(other)
        for source in order.sources:
            opens = out.setdefault(source.part, [])
            if source.nixl:
                opens.append(partial(NixlReader, source.nixl, self._hello.progress_s))
            opens.append(partial(TcpReader, source, self._range_key, self._hello.progress_s))
        return out

    def _receive(self, order: Order, digests: bytes | bytearray, transport: "Transport") -> Staged:
        from titan_grpo.sync.transports.broadcast import broadcast_image

        hello = self._hello
        image, manifest = self._reserve(order, streamed=False)
        receive_s = broadcast_image(transport, image.tensor(), hello.bucket_bytes, hello.timeout_s)
        start = time.monotonic()
        content = self._content(order, digests, manifest)
        found = self._hashing.blocks(image.buffer, manifest)
        pairs = enumerate(zip(found, content.digests, strict=True))
        bad = next((block for block, (ours, theirs) in pairs if ours != theirs), -1)
        return replace(
            self._arrived(order, "" if bad < 0 else content.differs(bad)),
            receive_s=receive_s,
            verify_s=time.monotonic() - start,
            bad_block=bad,
            read_bytes=manifest.total_bytes,
        )

    def _reserve(self, order: Order, streamed: bool) -> tuple[SharedImage, Manifest]:
        """Wait until the engine has returned the image, then mark it as being overwritten. Raises
        PeerError if the engine still has it after the Hello's ``timeout_s``."""
        if streamed != self.streamed:
            raise PeerError(f"this epoch is {self._hello.apply}: the order does not belong to it")
        with self._turn:
            if self._manifest is None or self._image is None:
                raise PeerError("the manifest must be handed over before the first transfer")
            self._turn.wait_for(
                lambda: self._staging.phase is not server.Phase.LENT, self._hello.timeout_s
            )
            now = self._staging
            # Before the image is overwritten: other servers must not read two versions of it.
            if self._sharing is not None:
                self._sharing.end()
            self._base = now.version if now.phase is server.Phase.STAGED else None
            self._step(server.Begin(order.number, order.version))
            return self._image, self._manifest

    def _step(self, event: server.StagingEvent) -> None:
        """Apply an event; hold ``_turn``. Raises PeerError if the table refuses it."""
        self._staging, refusal = server.staging(self._staging, event)
        if refusal:
            raise PeerError(refusal)


def _staged(order: Order, fingerprint: str = "", error: str = "") -> Staged:
    return Staged(order.number, order.version, not error, fingerprint, error=error)
