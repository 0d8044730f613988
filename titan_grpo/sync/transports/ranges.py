"""Byte ranges of a version image: served by the process that holds it, read by receivers.

A source corrupts nothing: the reader checks each block against the trainer's digests. It serves an
image for as long as the image's ticket is valid. Of an image that several hosts have, a source
serves its host's part (layout.parts): offsets are those of the part's stream. Wire format of one
connection, fixed sizes::

    reader                                      source
                                                nonce[32]
    nonce[32] ticket[16] proof[32]
                                                proof[32]     (wrong ticket or proof: it closes)
    offset u64, nbytes u64
                                                nbytes bytes of the part
    ... further ranges

A reader on the source's host sets the highest bit of nbytes and gets the memfd's address (4 u64, as
in ImageAddress; zeros: there is none) in place of the bytes, when they are there.

Both proofs are HMACs over both nonces and the ticket under EpochKeys.ranges; zeros without a run
key. A process of the same user on the same host reads the memfd itself: the trainer's
(MemfdReader), or another server's (BesideReader).
"""

import hmac
import math
import os
import secrets
import socket
import struct
import time
from typing import Protocol

from titan_grpo.errors import SyncError, TransferFailed
from titan_grpo.layout.image import ImageAddress, open_memfd
from titan_grpo.layout.parts import Part
from titan_grpo.protocol.messages import RangeSource
from titan_grpo.runkey import Key
from titan_grpo.sync.transports.tls import secured

NONCE_BYTES = 32
TICKET_BYTES = 16
PROOF_BYTES = 32

GREETING = struct.Struct(f"{NONCE_BYTES}s{TICKET_BYTES}s{PROOF_BYTES}s")
"""What a reader sends first: its nonce, the ticket, its proof."""

RANGE = struct.Struct("!QQ")
"""One request: offset and length in bytes."""

ADDRESS_ONLY = 1 << 63
"""Of a request's length: answer with ADDRESS."""

ADDRESS = struct.Struct("!QQQQ")
"""Process, descriptor, bytes and inode of the image's memfd."""


def proof(key: Key | None, who: str, ours: bytes, theirs: bytes, ticket: bytes) -> bytes:
    """Proof of the epoch's key by ``who`` ("reader" or "source"), PROOF_BYTES long; zeros without
    a key. ``ours`` is the source's nonce."""
    if key is None:
        return bytes(PROOF_BYTES)
    return bytes.fromhex(key.proof(f"range {who} {ours.hex()} {theirs.hex()} {ticket.hex()}"))


class RangeReader(Protocol):
    """Reads ranges of one part of an image from one source. Used by one thread."""

    def read_into(self, offset: int, *views: memoryview) -> None:
        """Fill ``views`` (uint8), one after the other, with the part's bytes from ``offset``.
        TransferFailed if the source is gone, or no byte came within its deadline."""
        ...

    def close(self) -> None:
        """Let go of the source. Idempotent."""
        ...


class MemfdReader:
    """Reads another process's memfd on this host: one copy by the kernel, no socket, no mapping."""

    def __init__(self, memfd: dict[str, int], part: Part | None = None) -> None:
        """``part``: which one the memfd has pages of; None: the whole image. TransferFailed if that
        process is not on this host, of another user, or gone."""
        self._fd, self._part = -1, part
        try:
            self._fd = open_memfd(ImageAddress.from_json(memfd), os.O_RDONLY)
        except (SyncError, TypeError) as error:
            raise TransferFailed(str(error)) from error

    def read_into(self, offset: int, *views: memoryview) -> None:
        """See RangeReader."""
        for view in views:
            stop = offset + view.nbytes
            pieces = [(offset, stop)] if self._part is None else self._part.pieces(offset, stop)
            done = 0
            for low, high in pieces:
                self._read(low, view[done : done + high - low])
                done += high - low
            offset = stop

    def _read(self, offset: int, view: memoryview) -> None:
        done = 0
        while done < view.nbytes:
            try:
                got = os.preadv(self._fd, [view[done:]], offset + done)
            except OSError as error:
                raise TransferFailed(f"the image's memfd cannot be read: {error}") from error
            if got == 0:
                raise TransferFailed(f"the image's memfd ends before byte {offset + view.nbytes}")
            done += got

    def close(self) -> None:
        """See RangeReader."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


class TcpReader:
    """One TCP connection to a source."""

    def __init__(
        self, source: RangeSource, key: Key | None, timeout_s: float, whole: bool = False
    ) -> None:
        """Connect and exchange proofs. ``timeout_s``: the longest wait for the next byte, or for a
        ``whole`` range, in seconds. TransferFailed if the source does not answer, or lacks the
        key."""
        self._range_s = timeout_s if whole else math.inf
        self._name = f"source at {source.host}:{source.port}"
        at = source.host, source.port
        self._socket = connect(at, source.ticket, key, timeout_s, "source", source.pin)

    def read_into(self, offset: int, *views: memoryview) -> None:
        """See RangeReader."""
        nbytes = sum(view.nbytes for view in views)
        _send(self._socket, RANGE.pack(offset, nbytes), self._name)
        until = time.monotonic() + self._range_s
        for view in views:
            _fill(self._socket, view, self._name, until)

    def address(self, offset: int, nbytes: int) -> dict[str, int]:
        """Where the image is on the source's host, once these bytes are there; TransferFailed as
        for ``read_into``."""
        _send(self._socket, RANGE.pack(offset, nbytes | ADDRESS_ONLY), self._name)
        answer = bytearray(ADDRESS.size)
        _fill(self._socket, memoryview(answer), self._name, time.monotonic() + self._range_s)
        return ImageAddress(*ADDRESS.unpack(answer)).to_json()

    def close(self) -> None:
        """See RangeReader."""
        self._socket.close()


class BesideReader:
    """Reads from another server on this host: asks it for each range, and takes the bytes from its
    memfd. Over the connection where the kernel does not let it: in containers of their own."""

    def __init__(self, source: RangeSource, key: Key | None, timeout_s: float, part: Part) -> None:
        """As TcpReader, for ``whole`` ranges; ``part``: the source's."""
        self._tcp, self._part = TcpReader(source, key, timeout_s, whole=True), part
        self._memfd: MemfdReader | None = None
        self._apart = False

    def read_into(self, offset: int, *views: memoryview) -> None:
        """See RangeReader. That server may write its image anew meanwhile: the reader's check of
        the blocks finds it."""
        if not self._apart:
            address = self._tcp.address(offset, sum(view.nbytes for view in views))
            if self._memfd is None:
                try:
                    self._memfd = MemfdReader(address, self._part)
                except TransferFailed:
                    self._apart = True
        if self._memfd is not None:
            self._memfd.read_into(offset, *views)
        else:
            self._tcp.read_into(offset, *views)

    def close(self) -> None:
        """See RangeReader."""
        self._tcp.close()
        if self._memfd is not None:
            self._memfd.close()


def connect(
    address: tuple[str, int],
    ticket: str,
    key: Key | None,
    timeout_s: float,
    what: str,
    pin: str = "",
) -> socket.socket:
    """A connection on which both ends have proven the key; ``timeout_s`` stays the longest wait for
    the next byte. TransferFailed if ``what`` does not answer, or lacks the key or the certificate
    of the ``pin``."""
    name = f"{what} at {address[0]}:{address[1]}"
    try:
        sock = socket.create_connection(address, timeout_s)
    except OSError as error:
        raise TransferFailed(f"the {name} cannot be reached: {error}") from error
    try:
        sock.settimeout(timeout_s)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock = secured(sock, pin, name) if pin else sock
        _greet(sock, bytes.fromhex(ticket), key, name)
    except TransferFailed:
        sock.close()
        raise
    return sock


def _greet(sock: socket.socket, ticket: bytes, key: Key | None, name: str) -> None:
    theirs, ours = bytearray(NONCE_BYTES), secrets.token_bytes(NONCE_BYTES)
    _fill(sock, memoryview(theirs), name)
    mine = proof(key, "reader", bytes(theirs), ours, ticket)
    _send(sock, GREETING.pack(ours, ticket, mine), name)
    answer = bytearray(PROOF_BYTES)
    _fill(sock, memoryview(answer), name)
    wanted = proof(key, "source", bytes(theirs), ours, ticket)
    if not hmac.compare_digest(bytes(answer), wanted):
        raise TransferFailed(f"the {name} does not prove the run key: it is not this run's trainer")


def _send(sock: socket.socket, data: bytes, name: str) -> None:
    try:
        sock.sendall(data)
    except OSError as error:
        raise TransferFailed(f"the {name} was lost: {error}") from error


def _fill(sock: socket.socket, view: memoryview, name: str, until: float = math.inf) -> None:
    done = 0
    while done < view.nbytes:
        if time.monotonic() > until:
            raise TransferFailed(f"the {name} was too slow: {done} of {view.nbytes} bytes came")
        try:
            # no deadline: settimeout in connect() bounds the wait for each byte
            got = sock.recv_into(view[done:])
        except TimeoutError as error:
            raise TransferFailed(f"the {name} sent no byte within {sock.gettimeout()} s") from error
        except OSError as error:
            raise TransferFailed(f"the {name} was lost: {error}") from error
        if got == 0:
            raise TransferFailed(
                f"the {name} closed the connection: the version is no longer served there, or it"
                " refused this reader"
            )
        done += got
