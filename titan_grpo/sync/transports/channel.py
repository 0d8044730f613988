"""A receiver's connections to a source (range_server.py): a greeting, then ranges of an image, or
the messages of one epoch.

A source cannot corrupt a version: the reader checks each block against the trainer's digests. It
serves an image while the image's ticket is valid. Of an image in parts, a source serves its host's
part (layout.manifest): offsets count in the part's stream. Fixed sizes::

    reader                                      source
                                                nonce[32]
    nonce[32] ticket[16] proof[32]
                                                proof[32]     (wrong ticket or proof: it closes)
    offset u64, nbytes u64
                                                nbytes bytes of the part
    ... further ranges

A reader on the source's host sets the highest bit of nbytes. Once the range is there, it gets the
memfd's address (4 u64, as in ImageAddress; zeros: there is none) in place of the bytes. The readers
are in receive/fetch.py.

Both proofs are HMACs over both nonces and the ticket, under Hashing.range_key or, for an epoch's
ticket, EpochKeys.messages; zeros without a run key.

With an epoch's ticket, both ends send frames after the greeting, in order: kind u8, number u64,
nbytes u64, then nbytes bytes. The end of the connection means that the other end is gone.
"""

import errno
import hmac
import math
import secrets
import select
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from ipaddress import ip_address
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from titan_grpo.errors import ConfigError, TransferFailed
from titan_grpo.protocol.messages import Kind
from titan_grpo.runkey import Key
from titan_grpo.sync.transports.tls import WOULD_BLOCK, secured

if TYPE_CHECKING:
    from titan_grpo.sync.transports.range_server import RangeServer

NONCE_BYTES = 32
TICKET_BYTES = 16
PROOF_BYTES = 32

GREETING = struct.Struct(f"{NONCE_BYTES}s{TICKET_BYTES}s{PROOF_BYTES}s")
"""A reader's first message: its nonce, the ticket, its proof."""

RANGE = struct.Struct("!QQ")
"""One request: offset and length in bytes."""

ADDRESS_ONLY = 1 << 63
"""Bit of a request's length: answer with ADDRESS."""

ADDRESS = struct.Struct("!QQQQ")
"""Process, descriptor, bytes and inode of the image's memfd."""


def proof(key: Key | None, who: str, ours: bytes, theirs: bytes, ticket: bytes) -> bytes:
    """Return the proof of the epoch's key by ``who`` ("reader" or "source"), PROOF_BYTES long;
    zeros without a key. ``ours`` is the source's nonce, ``theirs`` the reader's."""
    if key is None:
        return bytes(PROOF_BYTES)
    return bytes.fromhex(key.proof(f"range {who} {ours.hex()} {theirs.hex()} {ticket.hex()}"))


ANYWHERE = "192.0.2.1"
"""An address that no host has (RFC 5737): the route to it is the default route."""


def addresses_towards(*hosts: str) -> Iterator[str]:
    """Yield this host's address on the route to each of ``hosts``, then on the default route,
    without those that have no route or do not resolve (yet). Sends no packet: connecting a UDP
    socket only picks a route."""
    for host in (*hosts, ANYWHERE):
        with suppress(OSError, UnicodeError):  # the latter: no name that can be looked up
            family, kind, _, _, address = socket.getaddrinfo(host, 80, type=socket.SOCK_DGRAM)[0]
            with socket.socket(family, kind) as probe:
                probe.connect(address)
                found = str(probe.getsockname()[0])
            yield found


def resolve_bind_host(configured: str, url: str) -> str:
    """Return the local address for the sockets of a server's lane: the configured one, else
    loopback for a local server, else the source address of the route to the server (to anywhere, if
    its name does not resolve yet)."""
    from titan_grpo.config.rollout import is_loopback  # not for a receiver

    host = urlsplit(url).hostname or ""
    ways = iter(()) if is_loopback(host) else addresses_towards(host)
    return configured or next(ways, "127.0.0.1")


def open_listener(host: str, port: int = 0) -> socket.socket:
    """Return a non-blocking listener on this host's address ``host``. Raises ConfigError if it
    cannot be bound, or stands for all addresses, or no descriptor is left."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        family, kind, proto, _, address = found[0]
        if ip_address(str(address[0]).partition("%")[0]).is_unspecified:
            raise OSError("it stands for all addresses, and servers need one to connect to")
        listener = socket.socket(family, kind, proto)
        # A process before this one had the port: its connections may still be closing.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(1024)
        listener.setblocking(False)
    # UnicodeError: what is neither an address nor a name that can be looked up, as "10.0..5".
    except (OSError, UnicodeError) as error:
        raise _cannot_listen(host, error) from error
    return listener


def check_address(bind_host: str) -> None:
    """Raise ConfigError if weight_sync.bind_host is not an address of this host."""
    if bind_host:
        open_listener(bind_host).close()


def _cannot_listen(host: str, error: OSError | UnicodeError) -> ConfigError:
    """Return the error that says what to change: only one of the two settings can name an address
    of another host."""
    if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
        return ConfigError(
            f"the port for servers on {host!r} needs a descriptor, there is none left ({error});"
            " servers could not read versions here; raise the limit on open files (ulimit -n)"
        )
    return ConfigError(
        "weight_sync.bind_host must be an address of this host (on a server TITAN_GRPO_RELAY_HOST,"
        f" or 'none'), got {host!r} ({error}); servers could not read versions here; set it to this"
        " host's address in their network"
    )


def connect(
    address: tuple[str, int],
    ticket: str,
    key: Key | None,
    timeout_s: float,
    what: str,
    pin: str = "",
) -> socket.socket:
    """Return a connection on which both ends have proven the key, within ``timeout_s`` seconds in
    all; they remain its longest wait for a byte. Raises TransferFailed if ``what`` does not answer,
    or lacks the key or the ``pin``'s certificate."""
    name, until = f"{what} at {address[0]}:{address[1]}", time.monotonic() + timeout_s
    try:
        sock = socket.create_connection(address, _left(until, name))
    except OSError as error:
        raise TransferFailed(f"the {name} cannot be reached: {error}") from error
    try:
        # The handshake of TLS waits for the socket's timeout at most.
        sock.settimeout(_left(until, name))
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock = secured(sock, pin, name) if pin else sock
        sock.settimeout(timeout_s)
        _greet(sock, bytes.fromhex(ticket), key, name, until)
    except TransferFailed:
        sock.close()
        raise
    return sock


def _left(until: float, name: str, came: str = "") -> float:
    """Return the seconds until ``until`` (monotonic clock). Raises TransferFailed if it is past;
    ``came``: what the source ``name`` has sent."""
    left = until - time.monotonic()
    if left <= 0:
        raise TransferFailed(f"the {name} was too slow{came}")
    return left


def _greet(sock: socket.socket, ticket: bytes, key: Key | None, name: str, until: float) -> None:
    theirs, ours = bytearray(NONCE_BYTES), secrets.token_bytes(NONCE_BYTES)
    fill(sock, memoryview(theirs), name, until)
    mine = proof(key, "reader", bytes(theirs), ours, ticket)
    send_all(sock, GREETING.pack(ours, ticket, mine), name)
    answer = bytearray(PROOF_BYTES)
    fill(sock, memoryview(answer), name, until)
    wanted = proof(key, "source", bytes(theirs), ours, ticket)
    if not hmac.compare_digest(bytes(answer), wanted):
        raise TransferFailed(f"the {name} does not prove the run key: it is not this run's trainer")


def send_all(sock: socket.socket, data: bytes, name: str) -> None:
    """Send to the source ``name``. Raises TransferFailed if it is lost."""
    try:
        sock.sendall(data)
    except OSError as error:
        raise TransferFailed(f"the {name} was lost: {error}") from error


def fill(sock: socket.socket, view: memoryview, name: str, until: float = math.inf) -> None:
    """Fill ``view`` from the source ``name``. Raises TransferFailed if it is lost, sends no byte
    within the socket's timeout, or has not sent all by ``until`` (monotonic clock)."""
    done, longest_s = 0, sock.gettimeout()
    assert longest_s is not None
    while done < view.nbytes:
        if until < math.inf:
            # Each time: a source that sends a byte and stalls would be waited for anew.
            left_s = _left(until, name, f": {done} of {view.nbytes} bytes came")
            sock.settimeout(min(longest_s, left_s))
        try:
            # no deadline: settimeout here or in connect() bounds the wait for each byte
            got = sock.recv_into(view[done:])
        except TimeoutError as error:
            if time.monotonic() >= until:
                continue  # _left says so
            raise TransferFailed(f"the {name} sent no byte within {longest_s} s") from error
        except OSError as error:
            raise TransferFailed(f"the {name} was lost: {error}") from error
        if got == 0:
            raise TransferFailed(
                f"the {name} closed the connection: the version is no longer served there, or it"
                " refused this reader"
            )
        done += got
    sock.settimeout(longest_s)


# The messages of one epoch.

HEADER = struct.Struct("!BQQ")
"""Kind, number, length of the body."""

MOST_BYTES = 1 << 30
"""Longest body that a receiver accepts: a manifest, or a version's digests."""

SEND_S = 10.0
"""Longest wait until the trainer takes the next byte of an answer, in seconds."""

ALIVE = ((socket.TCP_KEEPIDLE, 30), (socket.TCP_KEEPINTVL, 10), (socket.TCP_KEEPCNT, 3))
"""The kernel ends an idle connection after 60 s without a sign of the other host."""


@dataclass(frozen=True, slots=True)
class Frame:
    """One message. ``number``: its order's."""

    kind: Kind
    number: int
    body: bytes | bytearray


def header(frame: Frame) -> bytes:
    """Return the bytes before the body."""
    return HEADER.pack(frame.kind, frame.number, len(frame.body))


def read_header(data: bytes | bytearray) -> tuple[Kind, int, int] | None:
    """Return kind, number and length; None for an unknown kind."""
    kind, number, nbytes = HEADER.unpack(data)
    return (Kind(kind), number, nbytes) if kind in Kind._value2member_map_ else None


def keep_alive(sock: socket.socket) -> None:
    """Have the kernel end the connection to a vanished host."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in ALIVE:
        sock.setsockopt(socket.IPPROTO_TCP, option, value)


class Inbox:
    """Queue of received frames, until the connection ends. One thread puts, any takes."""

    def __init__(self) -> None:
        self._turn = threading.Condition()
        self._frames: deque[Frame] = deque()
        self._end = ""
        self._aborted = False
        self._count = 0

    @property
    def ended(self) -> str:
        """Why no further frame comes; empty while some may."""
        return self._end

    def put(self, frame: Frame) -> None:
        """Add a frame; a SIGN is only counted."""
        with self._turn:
            self._count += 1
            if frame.kind is not Kind.SIGN:
                self._frames.append(frame)
            self._turn.notify_all()

    def end(self, why: str, aborted: bool = False) -> None:
        """End the queue: no frame follows. Queued ones can still be taken, unless ``aborted``. The
        first reason counts."""
        with self._turn:
            self._end = self._end or why
            self._aborted |= aborted
            self._turn.notify_all()

    def take(self, number: int | None, kinds: tuple[Kind, ...], timeout_s: float | None) -> Frame:
        """Return the next frame of these kinds, with this number if given. Drop the frames before
        it: their waits are over. Raises TransferFailed past the deadline, or at the end."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        with self._turn:
            while True:
                while self._frames and not self._aborted:
                    frame = self._frames.popleft()
                    if frame.kind in kinds and number in (None, frame.number):
                        return frame
                if self._end:
                    raise TransferFailed(self._end)
                left = None if deadline is None else deadline - time.monotonic()
                if left is not None and left <= 0:
                    raise TransferFailed(f"the deadline of {timeout_s:.1f} s passed")
                # no deadline: only where timeout_s is None, until the connection ends
                self._turn.wait(left)

    def answered(self, ask: Callable[[], None], timeout_s: float) -> bool:
        """Call ``ask`` and wait for any frame; return whether one came in time."""
        with self._turn:
            before = self._count  # first: the answer may be here when ask() returns
        ask()
        with self._turn:
            self._turn.wait_for(lambda: self._count > before or bool(self._end), timeout_s)
            return self._count > before


class LaneChannel:
    """The trainer's end. The source's thread owns the socket, so ``send`` never waits."""

    def __init__(
        self,
        source: "RangeServer",
        address: tuple[str, int],
        ticket: bytes,
        key: Key | None,
        lost: Callable[[], object],
    ) -> None:
        """Made by RangeServer.channel. ``lost`` is called on the source's thread when the
        receiver's connection ends before ``close``; it must not block."""
        self.host, self.port = address
        self.pin = source.pin
        """See RangeSource."""
        self.ticket, self.key, self.lost = ticket, key, lost
        self.inbox = Inbox()
        self.out: deque[memoryview] = deque()
        """Bytes still to be sent; under the source's lock."""
        self.joined = False
        """Whether its one receiver has connected and proven the key."""
        self._source = source

    def send(self, kind: Kind, number: int, body: bytes = b"") -> None:
        """Queue a frame for the source's thread. Raises TransferFailed if the connection ended."""
        self.check()
        frame = Frame(kind, number, body)
        self._source.post(self, memoryview(header(frame)), memoryview(body))

    def check(self) -> None:
        """Raise TransferFailed if the connection has ended."""
        if why := self.inbox.ended:
            raise TransferFailed(why)

    def take(self, number: int, kinds: tuple[Kind, ...], timeout_s: float, what: str) -> Frame:
        """``Inbox.take``, with ``what`` the caller waits for in the error."""
        try:
            return self.inbox.take(number, kinds, timeout_s)
        except TransferFailed as error:
            raise TransferFailed(f"{what}: {error}") from error

    def abort(self) -> None:
        """Make the blocked call and all later ones raise TransferFailed. Any thread."""
        self.inbox.end("the link was aborted", aborted=True)

    def close(self) -> None:
        """Close the connection at once, without what is queued; the receiver ends. Idempotent."""
        self.inbox.end("the link was closed", aborted=True)
        self._source.hang_up(self)


class _Duplex:
    """A socket for one reading and one sending thread. TLS has one state for both directions, so
    calls take a lock, and none blocks."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._sock, self._turn = sock, threading.Lock()

    def recv_into(self, view: memoryview) -> int:
        """Wait for bytes; return how many came, 0 at the end."""
        while True:
            with self._turn, suppress(*WOULD_BLOCK):
                # no deadline: the socket does not block
                return self._sock.recv_into(view)
            # no deadline: an idle trainer sends nothing; keep_alive ends the connection to a
            # vanished host
            self._wait(select.POLLIN, None)

    def send_all(self, data: bytes | bytearray) -> None:
        """Send all. Raises OSError if no byte is taken for SEND_S seconds or the peer is gone."""
        left = memoryview(data)
        while left:
            with self._turn, suppress(*WOULD_BLOCK):
                left = left[self._sock.send(left) :]
                continue
            if not self._wait(select.POLLOUT, SEND_S):
                raise TimeoutError(f"it took no byte for {SEND_S:.0f} s")

    def _wait(self, event: int, timeout_s: float | None) -> bool:
        poll = select.poll()
        poll.register(self._sock, event)
        return bool(poll.poll(None if timeout_s is None else timeout_s * 1000))


class ReceiverChannel:
    """The receiver's end: a thread reads; any thread sends."""

    def __init__(self, sock: socket.socket, trainer: str, gave_up: Callable[[str], object]) -> None:
        """Read from the socket that ``connect`` returned. ``trainer``: its address, for messages.
        ``gave_up`` is called with the reason, on the reading thread, if the lane cancels a transfer
        or the connection ends."""
        self._name = trainer
        keep_alive(sock)
        self.local_host = str(sock.getsockname()[0])
        """This host's address towards the trainer."""
        self._socket = _Duplex(sock)
        self._gave_up = gave_up
        self._sending = threading.Lock()
        self._inbox = Inbox()
        self.last_frame_s = time.monotonic()
        """Time of the last frame, or of the connection's end (monotonic clock)."""
        threading.Thread(target=self._read, name="channel", daemon=True).start()

    def send(self, kind: Kind, number: int, body: bytes = b"") -> None:
        """Send a frame. Raises TransferFailed if the trainer is gone, or takes no byte for SEND_S
        seconds."""
        frame = Frame(kind, number, body)
        try:
            with self._sending:
                self._socket.send_all(header(frame) + body)
        except OSError as error:
            raise TransferFailed(f"the trainer at {self._name} was lost: {error}") from error

    def take(self, kinds: tuple[Kind, ...]) -> Frame:
        """Wait for the next frame of these kinds. Raises TransferFailed if the connection ends."""
        return self._inbox.take(None, kinds, None)

    def ask_sign(self, timeout_s: float) -> None:
        """Ask the trainer's process for a sign and wait for a frame, which sets ``last_frame_s``.
        Raises TransferFailed if the question cannot be sent."""
        self._inbox.answered(lambda: self.send(Kind.SIGN, 0), timeout_s)

    def _read(self) -> None:
        """Thread: receive frames until the connection ends."""
        why = f"the trainer at {self._name} ended, or closed this epoch"
        try:
            while (frame := self._frame()) is not None:
                self.last_frame_s = time.monotonic()
                self._inbox.put(frame)
                if frame.kind is Kind.CANCEL:
                    self._gave_up("the trainer gave the transfer up")
        except (OSError, TransferFailed) as error:
            why = f"{why}: {error}"
        self.last_frame_s = time.monotonic()  # the connection stood until now
        self._inbox.end(why)
        self._gave_up(why)

    def _frame(self) -> Frame | None:
        """Read the next frame; None at the end."""
        head = bytearray(HEADER.size)
        if not self._fill(head):
            return None
        read = read_header(head)
        if read is None or read[2] > MOST_BYTES:
            raise TransferFailed(f"it sent what is no frame ({head.hex()})")
        kind, number, nbytes = read
        body = bytearray(nbytes)
        return Frame(kind, number, body) if self._fill(body) else None

    def _fill(self, data: bytearray) -> bool:
        view, done = memoryview(data), 0
        while done < len(data):
            # no deadline: see _Duplex
            got = self._socket.recv_into(view[done:])
            if got == 0:
                return False
            done += got
        return True
