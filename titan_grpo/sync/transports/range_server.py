"""The trainer's port for receivers: one thread serves ranges of all images to all of them, and
carries the messages of all lanes (channel.py).

It sleeps while nothing comes or goes. An idle lane costs no thread, and one connection, whose end
says that the lane's receiver is gone.
"""

import hmac
import logging
import os
import resource
import secrets
import selectors
import socket
import ssl
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice

from titan_grpo.layout.manifest import Part
from titan_grpo.protocol.messages import Kind
from titan_grpo.runkey import Key
from titan_grpo.sync.transports.channel import (
    ADDRESS,
    ADDRESS_ONLY,
    GREETING,
    HEADER,
    NONCE_BYTES,
    PROOF_BYTES,
    RANGE,
    TICKET_BYTES,
    Frame,
    LaneChannel,
    header,
    keep_alive,
    open_listener,
    proof,
    read_header,
)
from titan_grpo.sync.transports.tls import WOULD_BLOCK, Certificate, send_records, shaken

GREET_S = 10.0
"""Seconds for a reader to prove itself; then its connection is closed."""

ANSWER_BYTES = 1 << 20
"""Longest body of a receiver's message."""

READ_BYTES = 64 << 10

SEND_BYTES = 8 << 20
"""Most bytes handed to the kernel in one call, so that one connection does not delay the others."""

TLS_BYTES = 1 << 20
"""The same where this thread encrypts them."""

LONG_BYTES = 256 << 10
"""A piece of an image that is worth a call of its own."""

PIECES = 512
"""Most pieces in one call; the kernel takes 1024."""

RETIRED = 64
"""Tickets that are remembered after they were revoked."""

REST_S = 1.0
"""Back-off after accept() fails (EMFILE), in seconds."""

log = logging.getLogger(__name__)


def _ticket(greeting: bytes) -> bytes:
    return bytes(GREETING.unpack(greeting)[1])


@dataclass(frozen=True, slots=True)
class _Grant:
    """An image that may be read. ``fd``: a descriptor of our own; -1 if only ``view`` is there."""

    view: memoryview
    fd: int
    key: Key | None
    part: Part
    has: Callable[[int, int], bool] | None
    """Whether so many bytes from an offset are there; None: all are."""

    def send(self, sock: socket.socket, offset: int, nbytes: int) -> int:
        """Hand some bytes to the kernel without blocking; how many."""
        stop = offset + min(nbytes, SEND_BYTES)
        pieces = list(islice(self.part.pieces(offset, stop), PIECES))
        low, high = pieces[0]
        alone = len(pieces) == 1 or high - low >= LONG_BYTES
        if isinstance(sock, ssl.SSLSocket):
            some = self.view[low:high] if alone else b"".join(self.view[a:b] for a, b in pieces)
            return send_records(sock, memoryview(some)[:TLS_BYTES])
        if self.fd >= 0 and alone:
            return os.sendfile(sock.fileno(), self.fd, low, high - low)
        # one call for short pieces: each by itself would be a packet of its own
        return sock.sendmsg([self.view[a:b] for a, b in pieces])

    def address(self) -> bytes:
        """Where a reader on this host finds the image, as ADDRESS; zeros: in no memfd."""
        if self.fd < 0:
            return bytes(ADDRESS.size)
        about = os.fstat(self.fd)
        return ADDRESS.pack(os.getpid(), self.fd, about.st_size, about.st_ino)


@dataclass(slots=True, eq=False)
class _Peer:
    """One connection. ``left``: bytes of the current range that are still to be sent."""

    sock: socket.socket
    nonce: bytes
    born: float
    ticket: bytes = b""
    proven: bool = False
    inbox: bytearray = field(default_factory=bytearray)
    out: memoryview = field(default_factory=lambda: memoryview(b""))
    offset: int = 0
    left: int = 0
    address_only: bool = False
    """It reads them from the memfd."""
    parked: bool = False
    """Its ticket, or the range that it asked for, has not come yet."""
    greeting: bytes = b""
    """Of one whose ticket has not come."""
    channel: LaneChannel | None = None
    """Whose messages it carries; None: it reads ranges."""


class RangeServer:
    """Serves images, and carries channels, by ticket, on every interface that ``listen`` was asked
    for."""

    def __init__(self, expects: bool = False, certificate: Certificate | None = None) -> None:
        """Opens nothing until the first ``listen``. ``expects``: a reader may come GREET_S before
        its ticket is granted, and waits. ``certificate``: all connections are TLS."""
        self._expects, self._certificate = expects, certificate
        self.pin = "" if certificate is None else certificate.pin
        """See RangeSource.pin."""
        self._retired: deque[bytes] = deque(maxlen=RETIRED)
        """Tickets that were revoked: no wait for them is open."""
        self._lock = threading.Lock()
        self._grants: dict[bytes, _Grant] = {}
        self._channels: dict[bytes, LaneChannel] = {}
        self._unsent: set[bytes] = set()
        """Tickets of channels and images that have something new to send."""
        self._revoked: set[bytes] = set()
        """Tickets whose connections are still to be closed."""
        self._listeners: dict[str, socket.socket] = {}
        self._unproven: set[_Peer] = set()
        self._peers: dict[bytes, set[_Peer]] = {}
        """The others, by ticket."""
        self._resting: dict[socket.socket, float] = {}
        self._selector: selectors.BaseSelector | None = None
        self._thread: threading.Thread | None = None
        self._closing = self._full = False

    def listen(self, host: str, port: int = 0) -> int:
        """The port on this host's address ``host``, opened if it is not yet: ``port``, or a free
        one. ConfigError if the address cannot be bound."""
        with self._lock:
            if host not in self._listeners:
                self._listeners[host] = open_listener(host, port)
                self._selector_().register(self._listeners[host], selectors.EVENT_READ)
                self._wake()
            return int(self._listeners[host].getsockname()[1])

    def grant(
        self,
        view: memoryview,
        fd: int | None,
        key: Key | None,
        part: Part | None = None,
        ticket: str = "",
        has: Callable[[int, int], bool] | None = None,
    ) -> str:
        """Serve an image (uint8), or this part of it, to readers that prove ``key``: its ticket, a
        new one unless given. ``fd``: of the memfd that ``view`` maps, if any; it may be closed
        after this call. ``has``: a range is sent when all of it is there; say so by ``arrived``."""
        name = bytes.fromhex(ticket) or secrets.token_bytes(TICKET_BYTES)
        part = part or Part(((0, view.nbytes),))
        with self._lock:
            # a descriptor of our own: a closed one's number may be another file's by then
            own = os.dup(fd) if fd is not None else -1
            self._grants[name] = _Grant(view, own, key, part, has)
            self._unsent.add(name)
            self._wake()
        return name.hex()

    def arrived(self, ticket: str) -> None:
        """More of that image is there. Never waits."""
        with self._lock:
            self._unsent.add(bytes.fromhex(ticket))
            self._wake()

    def channel(
        self, host: str, key: Key | None, lost: Callable[[], object] = lambda: None
    ) -> LaneChannel:
        """A channel at this host's address ``host`` for the one receiver that proves ``key``;
        others can only refuse. ``lost``: see LaneChannel. ConfigError if the address cannot be
        bound."""
        address = host, self.listen(host)
        made = LaneChannel(self, address, secrets.token_bytes(TICKET_BYTES), key, lost)
        with self._lock:
            self._channels[made.ticket] = made
        return made

    def post(self, channel: LaneChannel, *parts: memoryview) -> None:
        """Send ``parts`` over a channel, after what is on its way. Never waits."""
        with self._lock:
            channel.out.extend(part for part in parts if part)
            self._unsent.add(channel.ticket)
            self._wake()

    def hang_up(self, channel: LaneChannel) -> None:
        """Close a channel's connection. Idempotent."""
        with self._lock:
            self._channels.pop(channel.ticket, None)
            self._revoked.add(channel.ticket)
            self._wake()

    def revoke(self, ticket: str) -> None:
        """Serve the ticket's image no more: its connections are closed. Idempotent."""
        with self._lock:
            grant = self._grants.pop(bytes.fromhex(ticket), None)
            if grant is not None and grant.fd >= 0:
                os.close(grant.fd)
            self._revoked.add(bytes.fromhex(ticket))
            self._retired.append(bytes.fromhex(ticket))
            self._wake()

    def close(self) -> None:
        """Close everything. Idempotent."""
        with self._lock:
            if self._closing:
                return
            self._closing = True
            thread = self._thread
            # before the thread has ended: it looks a grant up under the lock, and finds none
            for grant in self._grants.values():
                if grant.fd >= 0:
                    os.close(grant.fd)
            self._grants.clear()
            channels = list(self._channels.values())
            self._channels.clear()
            self._wake()
        for channel in channels:
            channel.abort()
        if thread is not None:
            thread.join(GREET_S)

    def _selector_(self) -> selectors.BaseSelector:
        """Under the lock: the selector, with the thread that waits in it."""
        if self._selector is None:
            self._selector = selectors.DefaultSelector()
            self._wake_read, self._wake_write = socket.socketpair()
            self._wake_read.setblocking(False)
            self._wake_write.setblocking(False)
            self._selector.register(self._wake_read, selectors.EVENT_READ)
            self._thread = threading.Thread(
                target=self._run, args=(self._selector,), name="range source", daemon=True
            )
            self._thread.start()
        return self._selector

    def _wake(self) -> None:
        if self._selector is not None:
            with suppress(BlockingIOError):  # full: the thread is about to wake anyway
                self._wake_write.send(b".")

    # The thread.

    def _run(self, selector: selectors.BaseSelector) -> None:
        while not self._closing:
            # timeout None: every peer has proven itself; what it sends, a new connection, a new
            # listener, post(), revoke(), hang_up() or close() wakes
            timeout_s = REST_S if self._unproven or self._resting else None
            # no deadline: see the line above; the thread is a daemon
            for entry, _ in selector.select(timeout_s):
                sock = entry.fileobj
                if sock is self._wake_read:
                    self._drain()
                elif entry.data is None:
                    self._accept(selector, sock)  # type: ignore[arg-type]
                else:
                    self._serve(selector, entry.data)
            self._tidy(selector)
        for peer in self._all():
            self._drop(selector, peer)
        for listener in self._listeners.values():
            listener.close()
        with self._lock:  # a caller wakes an open socket or none
            self._selector = None
            self._wake_read.close()
            self._wake_write.close()
        selector.close()

    def _drain(self) -> None:
        with suppress(BlockingIOError):
            # no deadline: the socket does not block
            while self._wake_read.recv(4096):
                pass

    def _all(self) -> list[_Peer]:
        return [*self._unproven, *(peer for peers in self._peers.values() for peer in peers)]

    def _tidy(self, selector: selectors.BaseSelector) -> None:
        """Send what is new, drop who proves nothing or has no valid ticket, listen again after a
        rest."""
        now = time.monotonic()
        with self._lock:
            unsent, self._unsent = self._unsent, set()
            revoked, self._revoked = self._revoked, set()
        for peer in [p for p in self._unproven if p.parked and _ticket(p.greeting) in unsent]:
            peer.parked, greeting, peer.greeting = False, peer.greeting, b""
            if self._greeted(peer, greeting):
                self._serve(selector, peer)
            else:
                self._drop(selector, peer)
        for peer in [peer for ticket in unsent for peer in self._peers.get(ticket, ())]:
            self._serve(selector, peer)
        gone = [peer for ticket in revoked for peer in self._peers.get(ticket, ())]
        for peer in [*gone, *(p for p in self._unproven if now - p.born > GREET_S)]:
            self._drop(selector, peer)
        for listener, until in list(self._resting.items()):
            if now >= until:
                del self._resting[listener]
                selector.register(listener, selectors.EVENT_READ)

    def _accept(self, selector: selectors.BaseSelector, listener: socket.socket) -> None:
        try:
            # no deadline: the listener does not block
            sock, _ = listener.accept()
        except BlockingIOError:
            return
        except OSError as error:
            log.warning("a server's connection cannot be accepted now: %s; see ulimit -n", error)
            selector.unregister(listener)
            self._resting[listener] = time.monotonic() + REST_S
            return
        # the trainer needs descriptors too; a reader takes its ranges over fewer connections then
        open_files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        if len(self._all()) >= open_files // 2:
            if not self._full:
                log.warning(
                    "servers' connections may be half of the %d files that this process may open"
                    " (ulimit -n), and are: further ones are closed, so servers read over fewer,"
                    " and new ones may not join; raise it",
                    open_files,
                )
            self._full = True
            sock.close()
            return
        sock.setblocking(False)
        with suppress(OSError):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            keep_alive(sock)
        if self._certificate is not None:
            try:
                sock = self._certificate.context.wrap_socket(
                    sock, server_side=True, do_handshake_on_connect=False
                )
            except OSError:  # it has gone already
                sock.close()
                return
        nonce = secrets.token_bytes(NONCE_BYTES)
        peer = _Peer(sock, nonce, time.monotonic(), out=memoryview(nonce))
        # Without a proof it holds a descriptor for GREET_S at most: see _tidy.
        self._unproven.add(peer)
        selector.register(sock, selectors.EVENT_READ, peer)
        self._serve(selector, peer)

    def _serve(self, selector: selectors.BaseSelector, peer: _Peer) -> None:
        """Whatever the connection can do now without blocking."""
        waits_for = 0
        try:
            waits_for = shaken(peer.sock)
            alive = bool(waits_for) or (
                self._write(peer) and self._read(peer) and self._write(peer)
            )
        except OSError:  # a receiver that went away, or no TLS
            alive = False
        if not alive:
            self._drop(selector, peer)
            return
        if waits_for:
            selector.modify(peer.sock, waits_for, peer)
            return
        events = selectors.EVENT_WRITE if (peer.out or peer.left) and not peer.parked else 0
        if peer.channel is not None or not events:
            events |= selectors.EVENT_READ
        selector.modify(peer.sock, events, peer)

    def _read(self, peer: _Peer) -> bool:
        """Take what has come; whether the connection lives."""
        if peer.parked:
            return self._waits(peer)
        if peer.channel is None and (peer.out or peer.left):
            return True
        want = READ_BYTES if peer.channel else RANGE.size if peer.ticket else GREETING.size
        try:
            # no deadline: the socket does not block
            chunk = peer.sock.recv(want if peer.channel else want - len(peer.inbox))
        except WOULD_BLOCK:
            return True
        if not chunk:
            return False
        peer.inbox += chunk
        if peer.channel is not None:
            return self._frames(peer, peer.channel)
        if len(peer.inbox) < want:
            return True
        message = bytes(peer.inbox)
        peer.inbox.clear()
        return self._range(peer, message) if peer.ticket else self._greeted(peer, message)

    def _waits(self, peer: _Peer) -> bool:
        """Whether a parked connection lives: its reader has nothing to say."""
        with suppress(*WOULD_BLOCK):
            # no deadline: the socket does not block
            peer.sock.recv(1)
            return False
        return True

    def _greeted(self, peer: _Peer, message: bytes) -> bool:
        theirs, ticket, claimed = GREETING.unpack(message)
        with self._lock:
            channel, grant = self._channels.get(ticket), self._grants.get(ticket)
        holder = channel or grant
        if holder is None:
            peer.parked = self._expects and ticket not in self._retired
            peer.greeting = message
            return peer.parked
        wanted = proof(holder.key, "reader", peer.nonce, theirs, ticket)
        peer.proven = hmac.compare_digest(claimed, wanted)
        if channel is not None and peer.proven:
            if channel.joined:
                return False
            channel.joined = True
        elif channel is None and not peer.proven:
            log.warning("a reader of weights did not prove the run key: refused")
            return False
        peer.ticket, peer.channel = ticket, channel
        if peer.proven:
            self._unproven.discard(peer)
            self._peers.setdefault(ticket, set()).add(peer)
            ours = proof(holder.key, "source", peer.nonce, theirs, ticket)
        else:
            ours = bytes(PROOF_BYTES)
        peer.out = memoryview(ours)
        return True

    def _frames(self, peer: _Peer, channel: LaneChannel) -> bool:
        """Hand over the whole messages that have come; whether the connection lives."""
        while len(peer.inbox) >= HEADER.size:
            read = read_header(peer.inbox[: HEADER.size])
            if read is None or read[2] > ANSWER_BYTES:
                log.warning("a receiver sent what is no message: its connection is closed")
                return False
            kind, number, nbytes = read
            if len(peer.inbox) < HEADER.size + nbytes:
                return True
            body = bytes(peer.inbox[HEADER.size : HEADER.size + nbytes])
            del peer.inbox[: HEADER.size + nbytes]
            if not peer.proven:
                # without the key it may say one thing: why it does not join
                if kind is Kind.JOINED:
                    channel.inbox.put(Frame(kind, number, body))
                return False
            if kind is Kind.SIGN:
                self.post(channel, memoryview(header(Frame(kind, number, b""))))
            else:
                channel.inbox.put(Frame(kind, number, body))
        return True

    def _range(self, peer: _Peer, message: bytes) -> bool:
        peer.offset, nbytes = RANGE.unpack(message)
        peer.address_only, peer.left = bool(nbytes & ADDRESS_ONLY), nbytes & ~ADDRESS_ONLY
        with self._lock:
            grant = self._grants.get(peer.ticket)
        return grant is not None and peer.offset + peer.left <= grant.part.nbytes

    def _write(self, peer: _Peer) -> bool:
        """Send what the socket takes; whether the connection lives."""
        with suppress(*WOULD_BLOCK):  # it takes no more for now
            return self._write_all(peer)
        return True

    def _write_all(self, peer: _Peer) -> bool:
        while self._next_out(peer) or peer.left:
            if peer.out:
                peer.out = peer.out[peer.sock.send(peer.out) :]
                continue
            # under the lock: after revoke() returns, no byte of the image is read any more
            with self._lock:
                grant = self._grants.get(peer.ticket)
                if grant is None:
                    return False
                peer.parked = grant.has is not None and not grant.has(peer.offset, peer.left)
                if peer.parked:
                    return True
                if peer.address_only:
                    peer.out, peer.left = memoryview(grant.address()), 0
                    continue
                sent = grant.send(peer.sock, peer.offset, peer.left)
            if sent == 0:
                return False
            peer.offset += sent
            peer.left -= sent
        return True

    def _next_out(self, peer: _Peer) -> bool:
        """Whether ``peer.out`` has bytes to send."""
        if not peer.out and peer.channel is not None and peer.proven:
            with self._lock:
                if peer.channel.out:
                    peer.out = peer.channel.out.popleft()
        return bool(peer.out)

    def _drop(self, selector: selectors.BaseSelector, peer: _Peer) -> None:
        selector.unregister(peer.sock)
        peer.sock.close()
        self._unproven.discard(peer)
        if peers := self._peers.get(peer.ticket):
            peers.discard(peer)
            if not peers:
                del self._peers[peer.ticket]
        if peer.channel is not None and peer.proven:
            with self._lock:
                lost = self._channels.pop(peer.ticket, None) is not None
            peer.channel.inbox.end("the connection was lost")
            if lost:
                peer.channel.lost()
