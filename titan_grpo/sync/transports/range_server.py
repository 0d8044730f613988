"""A host's port for receivers: its thread accepts their connections, asks each for its proof, and
carries the messages of all lanes (channel.py). A reader of ranges goes on to one of the sending
threads (sender.py): no message waits for a version's bytes.

All of them sleep while nothing comes or goes. An idle lane costs no thread, and one connection,
whose end says that the lane's receiver is gone.
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
"""Seconds for a reader to prove itself; then its connection is closed. And for a thread to end."""

ANSWER_BYTES = 1 << 20
"""Longest body of a receiver's message."""

READ_BYTES = 64 << 10

RETIRED = 64
"""Tickets that are remembered after they were revoked."""

REST_S = 1.0
"""Back-off after accept() fails (EMFILE), in seconds."""

log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class _Peer:
    """A connection that has not proven itself, or a channel's."""

    sock: socket.socket
    nonce: bytes
    born: float
    inbox: bytearray = field(default_factory=bytearray)
    out: memoryview = field(default_factory=lambda: memoryview(b""))
    greeting: bytes = b""
    """Of one whose ticket has not come: it is parked."""
    channel: LaneChannel | None = None
    """Whose messages it carries."""
    proven: bool = False
    grant: Grant | None = None
    """What it may read: it has proven itself, and is a sending thread's from now on."""


class RangeServer:
    """Serves images, and carries channels, by ticket, on every interface that ``listen`` was asked
    for."""

    def __init__(
        self,
        expects: bool = False,
        certificate: Certificate | None = None,
        most_senders: int | None = None,
    ) -> None:
        """Opens nothing until the first ``listen``. ``expects``: a reader may come GREET_S before
        its ticket is granted, and waits. ``certificate``: all connections are TLS.
        ``most_senders``: sending threads; None: what this process's cores are for."""
        self._expects, self._certificate = expects, certificate
        self.pin = "" if certificate is None else certificate.pin
        """See RangeSource.pin."""
        self._most_senders = most_senders or senders_of(len(os.sched_getaffinity(0)))
        self._lock = threading.Lock()
        self._retired: deque[bytes] = deque(maxlen=RETIRED)
        """Tickets that were revoked: no wait for them is open."""
        self._grants: dict[bytes, Grant] = {}
        self._channels: dict[bytes, LaneChannel] = {}
        self._listeners: dict[str, socket.socket] = {}
        self._loop: Loop | None = None
        self._senders: list[Sender] = []
        """The thread adds them; each stays until ``close``."""
        self._closing = False
        # The thread's own:
        self._unproven: set[_Peer] = set()
        self._joined: dict[LaneChannel, _Peer] = {}
        self._resting: dict[socket.socket, float] = {}
        self._full = False

    def listen(self, host: str, port: int = 0) -> int:
        """The port on this host's address ``host``, opened if it is not yet: ``port``, or a free
        one. ConfigError if the address cannot be bound."""
        with self._lock:
            if host not in self._listeners:
                self._listeners[host] = open_listener(host, port)
                if self._loop is None:
                    self._loop = Loop("range source", self._ready, self._tidy, self._drop_all)
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
        """Serve an image (uint8), or this part of it, to readers that prove ``key``: its ticket, a
        new one unless given; what had that ticket is revoked. ``fd``: of the memfd that ``view``
        maps, if any; it may be closed after this call. ``has``: whether so many bytes from an
        offset are there, which any thread may ask; it must not wait, and ``arrived`` says that it
        may have changed. A range is sent when all of it is there. None: all are."""
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
        """More of that image is there. Never waits."""
        with self._lock:
            grant, senders = self._grants.get(bytes.fromhex(ticket)), list(self._senders)
        if grant is not None:
            for sender in senders:
                sender.arrived(grant)

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
        self._soon(self._send_posted, channel)

    def hang_up(self, channel: LaneChannel) -> None:
        """Close a channel's connection. Idempotent."""
        with self._lock:
            self._channels.pop(channel.ticket, None)
        self._soon(self._hang_up, channel)

    def revoke(self, ticket: str) -> None:
        """Serve the ticket's image no more: see Grant.revoke; then its connections are closed.
        Idempotent."""
        with self._lock:
            grant = self._grants.pop(bytes.fromhex(ticket), None)
            self._retired.append(bytes.fromhex(ticket))
            senders = list(self._senders)
        # Not under the lock: it waits for the threads that send, and the others need the table.
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
        # after the thread that hands readers to them
        for sender in self._senders:
            sender.close(GREET_S)

    def _revoke(self, grant: Grant, senders: Sequence[Sender]) -> None:
        grant.revoke()
        # A sender that is made meanwhile, or a reader on its way to one, finds the grant revoked.
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
        """Drop who proves nothing, listen again after a rest; in how many seconds to look again."""
        now = time.monotonic()
        for peer in [p for p in self._unproven if now - p.born > GREET_S]:
            self._drop(peer)
        for listener in [each for each, until in self._resting.items() if now >= until]:
            del self._resting[listener]
            self._accept_at(listener)
        # None: every peer has proven itself; what it sends, a new connection, and soon() wake
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
        """Let those in that wait for it."""
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
        # the trainer needs descriptors too; a reader takes its ranges over fewer connections then
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
            except OSError:  # it has gone already
                sock.close()
                return
        nonce = secrets.token_bytes(NONCE_BYTES)
        peer = _Peer(sock, nonce, time.monotonic(), out=memoryview(nonce))
        # Without a proof it holds a descriptor for GREET_S at most: see _tidy.
        self._unproven.add(peer)
        self._selector.register(sock, selectors.EVENT_READ, peer)
        self._serve(peer)

    def _serve(self, peer: _Peer) -> None:
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
        """To the sending thread with the fewest readers; to a further one where all have some."""
        self._unproven.discard(peer)
        self._selector.unregister(peer.sock)  # first: no other thread has the socket until then
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
        """Take what has come; whether the connection lives."""
        if peer.channel is None and peer.out:
            return True
        want = READ_BYTES if peer.channel else GREETING.size - len(peer.inbox)
        try:
            # no deadline: the socket does not block
            chunk = peer.sock.recv(1 if peer.greeting else want)
        except WOULD_BLOCK:
            return True
        if not chunk or peer.greeting:  # while it waits for its ticket, it has nothing to say
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

    def _write(self, peer: _Peer) -> bool:
        """Send what the socket takes; whether the connection lives."""
        with suppress(*WOULD_BLOCK):  # it takes no more for now
            while self._next_out(peer):
                peer.out = peer.out[peer.sock.send(peer.out) :]
        return True

    def _next_out(self, peer: _Peer) -> bool:
        """Whether ``peer.out`` has bytes to send."""
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
