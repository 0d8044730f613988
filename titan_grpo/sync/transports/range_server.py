"""A host's port for receivers. Its thread accepts connections, checks each one's proof, and carries
the messages of all lanes (channel.py). It hands readers of ranges to sending threads (sender.py),
so no message waits for a version's bytes.

All threads sleep while nothing comes or goes. An idle lane costs one connection and no thread; the
connection's end means that the lane's receiver is gone.
"""

import hmac
import logging
import os
import resource
import secrets
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from titan_grpo.errors import TransferFailed
from titan_grpo.layout.manifest import Part
from titan_grpo.protocol.messages import Kind
from titan_grpo.runkey import Key
from titan_grpo.sync.transports.channel import (
    GREETING,
    HEADER,
    NONCE_BYTES,
    PROOF_BYTES,
    TICKET_BYTES,
    Frame,
    LaneChannel,
    header,
    keep_alive,
    open_listener,
    proof,
    read_header,
)
from titan_grpo.sync.transports.sender import Grant, Loop, Reader, Sender, senders_of
from titan_grpo.sync.transports.tls import WOULD_BLOCK, Certificate, shaken

GREET_S = 10.0
"""Seconds for a reader to prove itself before its connection is closed, and for a thread to end."""

ANSWER_BYTES = 1 << 20
"""Longest body of a receiver's message."""

READ_BYTES = 64 << 10

RETIRED = 4096
"""Number of revoked tickets that are remembered. A receiver revokes one per trainer host with each
version, and the last versions' readers may still come."""

REST_S = 1.0
"""Back-off after accept() fails (EMFILE), in seconds."""

log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class _Peer:
    """A connection of this thread: not proven yet, or a channel's."""

    sock: socket.socket
    nonce: bytes
    born: float
    inbox: bytearray = field(default_factory=bytearray)
    out: memoryview = field(default_factory=lambda: memoryview(b""))
    greeting: bytes = b""
    """Set while it is parked: its ticket is not granted yet."""
    channel: LaneChannel | None = None
    """Channel whose messages it carries."""
    proven: bool = False
    grant: Grant | None = None
    """Image that it may read: a proven reader, to be handed to a sending thread."""


class RangeServer:
    """Serves images and carries channels, by ticket, on every address given to ``listen``."""

    def __init__(
        self,
        expects: bool = False,
        certificate: Certificate | None = None,
        most_senders: int | None = None,
    ) -> None:
        """Opens nothing before the first ``listen``. ``expects``: a reader may come up to GREET_S
        before its ticket is granted, and waits. ``certificate``: all connections are TLS.
        ``most_senders``: limit of sending threads; None: by this process's cores (senders_of)."""
        self._expects, self._certificate = expects, certificate
        self.pin = "" if certificate is None else certificate.pin
        """See RangeSource.pin."""
        self._most_senders = most_senders or senders_of(len(os.sched_getaffinity(0)))
        self._lock = threading.Lock()
        self._retired: deque[bytes] = deque(maxlen=RETIRED)
        """Revoked tickets: their readers are not parked."""
        self._grants: dict[bytes, Grant] = {}
        self._channels: dict[bytes, LaneChannel] = {}
        self._listeners: dict[str, socket.socket] = {}
        self._loop: Loop | None = None
        self._senders: list[Sender] = []
        """Added by the thread; each stays until ``close``."""
        self._closing = False
        # Used by the thread only:
        self._unproven: set[_Peer] = set()
        self._joined: dict[LaneChannel, _Peer] = {}
        self._resting: dict[socket.socket, float] = {}
        self._full = False

    def listen(self, host: str, port: int = 0) -> int:
        """Return the port on this host's address ``host``; open ``port``, or a free one, if none is
        open. Raises as open_listener, TransferFailed after ``close``, and as Loop."""
        with self._lock:
            if self._closing:  # nothing would accept there
                raise TransferFailed("this source of weights is closed: its process ends")
            if host not in self._listeners:
                # First: if it fails, no listener is left at which nothing accepts.
                if self._loop is None:
                    self._loop = Loop("range source", self._ready, self._tidy, self._drop_all)
                self._listeners[host] = open_listener(host, port)
                self._loop.soon(self._accept_at, self._listeners[host])
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
        """Serve an image (uint8), or ``part`` of it, to readers that prove ``key``. Return its
        ticket: ``ticket``, whose last image is revoked, or a new one. ``fd``: of the memfd that
        ``view`` maps, if any; may be closed after this call. ``has(offset, nbytes)``: whether a
        range is there; called by any thread, must not wait; call ``arrived`` when it may have
        changed. A range is sent once all of it is there. None: all ranges are there."""
        name = bytes.fromhex(ticket) or secrets.token_bytes(TICKET_BYTES)
        made = Grant(view, fd, key, part or Part(((0, view.nbytes),)), has)
        with self._lock:
            before, self._grants[name] = self._grants.get(name), made
            senders = list(self._senders)
        self._soon(self._granted, name)
        if before is not None:
            self._revoke(before, senders)
        return name.hex()

    def arrived(self, ticket: str) -> None:
        """Serve parked readers: more of the ticket's image is there. Never waits."""
        with self._lock:
            grant, senders = self._grants.get(bytes.fromhex(ticket)), list(self._senders)
        if grant is not None:
            for sender in senders:
                sender.arrived(grant)

    def channel(
        self, host: str, key: Key | None, lost: Callable[[], object] = lambda: None
    ) -> LaneChannel:
        """Open a channel at this host's address ``host`` for the one receiver that proves ``key``;
        others can only refuse. ``lost``: see LaneChannel. Raises ConfigError if the address cannot
        be bound."""
        address = host, self.listen(host)
        made = LaneChannel(self, address, secrets.token_bytes(TICKET_BYTES), key, lost)
        with self._lock:
            self._channels[made.ticket] = made
        return made

    def post(self, channel: LaneChannel, *parts: memoryview) -> None:
        """Queue ``parts`` on a channel. Never waits."""
        with self._lock:
            channel.out.extend(part for part in parts if part)
        self._soon(self._send_posted, channel)

    def hang_up(self, channel: LaneChannel) -> None:
        """Close a channel's connection. Idempotent."""
        # First: _drop reports the end of a connection whose channel is in the table as a loss.
        with self._lock:
            self._channels.pop(channel.ticket, None)
        self._soon(self._hang_up, channel)

    def revoke(self, ticket: str) -> None:
        """Stop serving the ticket's image (see Grant.revoke), and close its readers' connections.
        Idempotent."""
        with self._lock:
            grant = self._grants.pop(bytes.fromhex(ticket), None)
            self._retired.append(bytes.fromhex(ticket))
            senders = list(self._senders)
        # Not under the lock: this waits for sending threads, and other callers need the table.
        if grant is not None:
            self._revoke(grant, senders)

    def close(self) -> None:
        """Close everything. Idempotent."""
        with self._lock:
            if self._closing:
                return
            self._closing = True
            grants, channels = list(self._grants.values()), list(self._channels.values())
            self._grants.clear()
            self._channels.clear()
            loop = self._loop
        for grant in grants:
            self._revoke(grant, ())
        for channel in channels:
            channel.abort()
        if loop is not None:
            loop.close(GREET_S)
        # After the loop, which hands readers to them.
        for sender in self._senders:
            sender.close(GREET_S)

    def _revoke(self, grant: Grant, senders: Sequence[Sender]) -> None:
        grant.revoke()
        # A sender that is created meanwhile finds the grant revoked when it gets a reader.
        for sender in senders:
            sender.revoked(grant)

    def _soon(self, work: Callable[..., object], about: object) -> None:
        if self._loop is not None:
            self._loop.soon(work, about)

    # The thread.

    def _ready(self, ready: "_Peer | socket.socket") -> None:
        if isinstance(ready, _Peer):
            self._serve(ready)
        else:
            self._accept(ready)

    def _tidy(self) -> float | None:
        """Drop connections without a proof, listen again after a rest. Return the seconds until the
        next call."""
        now = time.monotonic()
        for peer in [p for p in self._unproven if now - p.born > GREET_S]:
            self._drop(peer)
        for listener in [each for each, until in self._resting.items() if now >= until]:
            del self._resting[listener]
            self._accept_at(listener)
        # None: no deadline is open; sockets and soon() wake the thread.
        return REST_S if self._unproven or self._resting else None

    def _accept_at(self, listener: socket.socket) -> None:
        self._selector.register(listener, selectors.EVENT_READ, listener)

    @property
    def _selector(self) -> selectors.BaseSelector:
        assert self._loop is not None
        return self._loop.selector

    def _drop_all(self) -> None:
        for peer in [*self._unproven, *self._joined.values()]:
            self._drop(peer)
        for listener in self._listeners.values():
            listener.close()

    def _granted(self, ticket: bytes) -> None:
        """Admit the readers that are parked for the ticket."""
        for peer in [p for p in self._unproven if p.greeting and _ticket(p.greeting) == ticket]:
            greeting, peer.greeting = peer.greeting, b""
            if self._greeted(peer, greeting):
                self._serve(peer)
            else:
                self._drop(peer)

    def _send_posted(self, channel: LaneChannel) -> None:
        if (peer := self._joined.get(channel)) is not None:
            self._serve(peer)

    def _hang_up(self, channel: LaneChannel) -> None:
        if (peer := self._joined.get(channel)) is not None:
            self._drop(peer)

    def _accept(self, listener: socket.socket) -> None:
        try:
            # no deadline: the listener does not block
            sock, _ = listener.accept()
        except BlockingIOError:
            return
        except OSError as error:
            log.warning("a server's connection cannot be accepted now: %s; see ulimit -n", error)
            self._selector.unregister(listener)
            self._resting[listener] = time.monotonic() + REST_S
            return
        # The trainer needs descriptors too. A refused reader uses fewer connections.
        open_files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        reading = sum(sender.load for sender in self._senders)
        if len(self._unproven) + len(self._joined) + reading >= open_files // 2:
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
            except OSError:  # it is gone already
                sock.close()
                return
        nonce = secrets.token_bytes(NONCE_BYTES)
        peer = _Peer(sock, nonce, time.monotonic(), out=memoryview(nonce))
        # Without a proof, _tidy closes it after GREET_S.
        self._unproven.add(peer)
        self._selector.register(sock, selectors.EVENT_READ, peer)
        self._serve(peer)

    def _serve(self, peer: _Peer) -> None:
        """Do what the connection can do now without blocking."""
        waits_for = 0
        try:
            waits_for = shaken(peer.sock)
            alive = bool(waits_for) or (
                self._write(peer) and self._read(peer) and self._write(peer)
            )
        except OSError:  # the receiver is gone, or speaks no TLS
            alive = False
        if not alive:
            self._drop(peer)
        elif peer.grant is not None:
            self._hand_over(peer, peer.grant)
        elif waits_for:
            self._selector.modify(peer.sock, waits_for, peer)
        else:
            events = selectors.EVENT_WRITE if peer.out else 0
            if peer.channel is not None or not events:
                events |= selectors.EVENT_READ
            self._selector.modify(peer.sock, events, peer)

    def _hand_over(self, peer: _Peer, grant: Grant) -> None:
        """Hand a reader to the sending thread with the fewest readers, or to a new one if all have
        some."""
        self._unproven.discard(peer)
        self._selector.unregister(peer.sock)  # first: a socket must be in one selector only
        sender = min(self._senders, key=lambda each: each.load, default=None)
        if sender is None or (sender.load > 0 and len(self._senders) < self._most_senders):
            try:
                sender = Sender(f"range sender {len(self._senders)}")
            except (OSError, RuntimeError) as error:
                log.warning("no further thread can send versions now: %s", error)
            else:
                with self._lock:
                    self._senders.append(sender)
        if sender is None:
            peer.sock.close()
        else:
            sender.take(Reader(peer.sock, grant, peer.out))

    def _read(self, peer: _Peer) -> bool:
        """Read what has come; return whether the connection lives."""
        # A reader with a grant may have sent its first range already: that is for a sending thread.
        if peer.grant is not None or (peer.channel is None and peer.out):
            return True
        want = READ_BYTES if peer.channel else GREETING.size - len(peer.inbox)
        try:
            # no deadline: the socket does not block
            chunk = peer.sock.recv(1 if peer.greeting else want)
        except WOULD_BLOCK:
            return True
        if not chunk or peer.greeting:  # a parked reader must send nothing
            return False
        peer.inbox += chunk
        if peer.channel is not None:
            return self._frames(peer, peer.channel)
        if len(peer.inbox) < GREETING.size:
            return True
        message = bytes(peer.inbox)
        peer.inbox.clear()
        return self._greeted(peer, message)

    def _greeted(self, peer: _Peer, message: bytes) -> bool:
        theirs, ticket, claimed = GREETING.unpack(message)
        with self._lock:
            channel, grant = self._channels.get(ticket), self._grants.get(ticket)
            retired = ticket in self._retired
        holder = channel or grant
        if holder is None:
            peer.greeting = message
            return self._expects and not retired
        wanted = proof(holder.key, "reader", peer.nonce, theirs, ticket)
        peer.proven = hmac.compare_digest(claimed, wanted)
        if not peer.proven:
            if channel is None:
                log.warning("a reader of weights did not prove the run key: refused")
                return False
            peer.channel, peer.out = channel, memoryview(bytes(PROOF_BYTES))
            return True
        if channel is not None:
            if channel.joined:
                return False
            channel.joined = True
            self._unproven.discard(peer)
            self._joined[channel] = peer
        peer.channel, peer.grant = channel, None if channel is not None else grant
        peer.out = memoryview(proof(holder.key, "source", peer.nonce, theirs, ticket))
        return True

    def _frames(self, peer: _Peer, channel: LaneChannel) -> bool:
        """Deliver the complete messages in the inbox; return whether the connection lives."""
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
                # Without the key it may send one message: why it does not join.
                if kind is Kind.JOINED:
                    channel.inbox.put(Frame(kind, number, body))
                return False
            if kind is Kind.SIGN:
                self.post(channel, memoryview(header(Frame(kind, number, b""))))
            else:
                channel.inbox.put(Frame(kind, number, body))
        return True

    def _write(self, peer: _Peer) -> bool:
        """Send what the socket takes; return whether the connection lives."""
        with suppress(*WOULD_BLOCK):  # it takes no more for now
            while self._next_out(peer):
                peer.out = peer.out[peer.sock.send(peer.out) :]
        return True

    def _next_out(self, peer: _Peer) -> bool:
        """Refill ``peer.out`` from its channel if empty; return whether it has bytes to send."""
        if not peer.out and peer.channel is not None and peer.proven:
            with self._lock:
                if peer.channel.out:
                    peer.out = peer.channel.out.popleft()
        return bool(peer.out)

    def _drop(self, peer: _Peer) -> None:
        self._selector.unregister(peer.sock)
        peer.sock.close()
        self._unproven.discard(peer)
        channel = peer.channel
        if channel is not None and self._joined.get(channel) is peer:
            del self._joined[channel]
            with self._lock:
                lost = self._channels.pop(channel.ticket, None) is not None
            channel.inbox.end("the connection was lost")
            if lost:
                channel.lost()


def _ticket(greeting: bytes) -> bytes:
    return bytes(GREETING.unpack(greeting)[1])
