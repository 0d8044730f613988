"""Byte ranges of a version image: served by the process that holds it, read by receivers.

A source corrupts nothing: the reader checks each block against the trainer's digests. It serves an
image for as long as the image's ticket is valid. Wire format of one connection, fixed sizes::

    reader                                      source
                                                nonce[32]
    nonce[32] ticket[16] proof[32]
                                                proof[32]     (wrong ticket or proof: it closes)
    offset u64, nbytes u64
                                                nbytes bytes of the image
    ... further ranges

Both proofs are HMACs over both nonces and the ticket under the key of the epoch's messages; zeros
without a run key. A process of the same user on the same host reads the memfd itself (MemfdReader).
"""

import hmac
import os
import secrets
import socket
import struct
from typing import Protocol

from titan_grpo.errors import SyncError, TransferFailed
from titan_grpo.layout.image import ImageAddress, open_memfd
from titan_grpo.protocol.messages import RangeSource
from titan_grpo.runkey import Key

NONCE_BYTES = 32
TICKET_BYTES = 16
PROOF_BYTES = 32

GREETING = struct.Struct(f"{NONCE_BYTES}s{TICKET_BYTES}s{PROOF_BYTES}s")
"""What a reader sends first: its nonce, the ticket, its proof."""

RANGE = struct.Struct("!QQ")
"""One request: offset and length in bytes."""


def proof(key: Key | None, who: str, ours: bytes, theirs: bytes, ticket: bytes) -> bytes:
    """Proof of the epoch's key by ``who`` ("reader" or "source"), PROOF_BYTES long; zeros without
    a key. ``ours`` is the source's nonce."""
    if key is None:
        return bytes(PROOF_BYTES)
    return bytes.fromhex(key.proof(f"range {who} {ours.hex()} {theirs.hex()} {ticket.hex()}"))


class RangeReader(Protocol):
    """Reads ranges of one image from one source. Used by one thread."""

    def read_into(self, offset: int, view: memoryview) -> None:
        """Fill ``view`` (uint8) with the image's bytes from ``offset``. TransferFailed if the
        source is gone, or no byte came within its deadline."""
        ...

    def close(self) -> None:
        """Let go of the source. Idempotent."""
        ...


class MemfdReader:
    """Reads another process's memfd on this host: one copy by the kernel, no socket, no mapping."""

    def __init__(self, memfd: dict[str, int]) -> None:
        """TransferFailed if that process is not on this host, of another user, or gone."""
        self._fd = -1
        try:
            self._fd = open_memfd(ImageAddress.from_json(memfd), os.O_RDONLY)
        except (SyncError, TypeError) as error:
            raise TransferFailed(str(error)) from error

    def read_into(self, offset: int, view: memoryview) -> None:
        """See RangeReader."""
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

    def __init__(self, source: RangeSource, key: Key | None, timeout_s: float) -> None:
        """Connect and exchange proofs. ``timeout_s``: the longest wait for the next byte, in
        seconds. TransferFailed if the source does not answer, or lacks the key."""
        self._name = f"{source.host}:{source.port}"
        try:
            self._socket = socket.create_connection((source.host, source.port), timeout_s)
        except OSError as error:
            raise TransferFailed(
                f"the source at {self._name} cannot be reached: {error}"
            ) from error
        try:
            self._socket.settimeout(timeout_s)
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._greet(bytes.fromhex(source.ticket), key)
        except TransferFailed:
            self._socket.close()
            raise

    def _greet(self, ticket: bytes, key: Key | None) -> None:
        theirs, ours = bytearray(NONCE_BYTES), secrets.token_bytes(NONCE_BYTES)
        self._fill(memoryview(theirs))
        mine = proof(key, "reader", bytes(theirs), ours, ticket)
        self._send(GREETING.pack(ours, ticket, mine))
        answer = bytearray(PROOF_BYTES)
        self._fill(memoryview(answer))
        wanted = proof(key, "source", bytes(theirs), ours, ticket)
        if not hmac.compare_digest(bytes(answer), wanted):
            raise TransferFailed(
                f"the source at {self._name} does not prove the run key: it is not this run's"
                " trainer"
            )

    def read_into(self, offset: int, view: memoryview) -> None:
        """See RangeReader."""
        self._send(RANGE.pack(offset, view.nbytes))
        self._fill(view)

    def _send(self, data: bytes) -> None:
        try:
            self._socket.sendall(data)
        except OSError as error:
            raise TransferFailed(f"the source at {self._name} was lost: {error}") from error

    def _fill(self, view: memoryview) -> None:
        done = 0
        while done < view.nbytes:
            try:
                # no deadline: settimeout in the constructor bounds the wait for each byte
                got = self._socket.recv_into(view[done:])
            except TimeoutError as error:
                raise TransferFailed(
                    f"the source at {self._name} sent no byte within {self._socket.gettimeout()} s"
                ) from error
            except OSError as error:
                raise TransferFailed(f"the source at {self._name} was lost: {error}") from error
            if got == 0:
                raise TransferFailed(
                    f"the source at {self._name} closed the connection: the version is no longer"
                    " served there, or it refused this reader"
                )
            done += got

    def close(self) -> None:
        """See RangeReader."""
        self._socket.close()
