"""Broadcasts from rank 0 by gloo or NCCL, with a deadline and an abort. They carry all streamed
versions, and staged ones if the transport is not one of ranges. Also the key-value store at which
the ranks meet, and which carries the notices of the trainer's ranks.

gloo sends straight from image to image: no copy on either side.

With NCCL the image stays on the host: the sender copies host -> bucket -> NCCL, the receiver
NCCL -> bucket -> host, in the order of one stream, with few CTAs, so that training kernels keep
most of the device. torch gives each process group a watchdog that ends the process if a peer is
lost, and with it all lanes. So these groups have none (TORCH_NCCL_BLOCKING_WAIT): ``wait`` checks
for errors itself, and raises them. NCCL's blocking initialisation waits for a missing peer forever,
even when aborted. So it is non-blocking (``ncclConfig_t.blocking = 0``), and torch ends it past a
deadline (prepare_nccl).
"""

import logging
import math
import os
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist

from titan_grpo.errors import ConfigError, PeerError, TransferFailed
from titan_grpo.protocol.messages import RANGES
from titan_grpo.sync.transports.channel import open_listener

LOOPBACK = "127.0.0.1"

REAP_SLACK_S = 5.0
"""Seconds that a reaper waits for an abandoned operation, beyond TransportOptions.timeout_s."""

MAX_CTAS = 4
"""Most thread blocks of NCCL: a lane competes with training for the device, and a network needs no
more."""

CONNECT_S = 30.0
"""Default deadline of a hosted store's operations, in seconds."""

PIECE = 1 << 20
"""Most characters of a value in a store: torch's store closes the connection on which a value over
8 MiB comes."""

ABORT_S = 5.0
"""Seconds that ``close`` waits for NCCL's abort."""

T = TypeVar("T")

logger = logging.getLogger(__name__)


@contextmanager
def store_errors(what: str) -> Iterator[None]:
    """Turn torch's store errors (timeout, lost connection) into a TransferFailed that names
    ``what`` was awaited."""
    try:
        yield
    except dist.DistError as error:
        lost = isinstance(error, dist.DistNetworkError)
        why = "the connection was lost" if lost else "the deadline passed"
        raise TransferFailed(f"{what}: {why} ({str(error).splitlines()[0]})") from error


def host_store(bind_host: str) -> dist.TCPStore:
    """Host a TCPStore on a free port of the interface ``bind_host`` (a host name or an address,
    IPv4 or IPv6). Works under torchrun: never uses the agent's store. Raises as open_listener."""
    # Bound here, not by the store: that would listen on every interface, and another process could
    # take a port that was only looked up.
    listener = open_listener(bind_host)
    port = listener.getsockname()[1]
    with store_errors(f"hosting a store on {bind_host}:{port}"):
        # The store owns the descriptor from here on, also if its constructor fails.
        return dist.TCPStore(
            bind_host,
            port,
            is_master=True,
            wait_for_workers=False,
            timeout=timedelta(seconds=CONNECT_S),
            master_listen_fd=listener.detach(),
        )


def join_store(host: str, port: int, timeout_s: float) -> dist.TCPStore:
    """Open a connection to a hosted store. Raises TransferFailed with the address if it does not
    answer within ``timeout_s`` seconds.

    A connection serves one blocking call at a time: a thread that must set a key while another one
    waits needs its own.
    """
    with store_errors(f"joining the store at {host}:{port}"):
        return dist.TCPStore(
            host,
            port,
            is_master=False,
            wait_for_workers=False,
            timeout=timedelta(seconds=timeout_s),
        )


def put_text(store: dist.TCPStore, key: str, text: str) -> None:
    """Set ``key`` to a text of any length, in pieces; return when the store has it."""
    first, *others = [text[at : at + PIECE] for at in range(0, len(text), PIECE)] or [""]
    for number, piece in enumerate(others, 1):
        store.set(f"{key}/{number}", piece)
    store.set(key, f"{len(others)} {first}")  # last: readers wait for this one
    # A set has no answer, so one into a lost connection may raise nothing.
    store.check([key])


def get_text(store: dist.TCPStore, key: str) -> str:
    """Return what ``put_text`` has set; it must be there. Raises PeerError for anything else."""
    others, _, first = (found := store.get(key)).partition(b" ")
    try:
        numbers = range(1, int(others) + 1)
        return (first + b"".join(store.get(f"{key}/{number}") for number in numbers)).decode()
    except ValueError as error:  # not a number, or not UTF-8
        raise PeerError(f"{key} in the store must be a text in pieces: {found[:80]!r}") from error


def delete_text(store: dist.TCPStore, key: str) -> None:
    """Delete what ``put_text`` has set, if anything."""
    store.delete_key(key)
    number = 1
    while store.delete_key(f"{key}/{number}"):
        number += 1


@dataclass(frozen=True, slots=True)
class TransportOptions:
    """Options of a transport. ``timeout_s``: deadline of opening, and of an operation without its
    own; ``bucket_bytes``: most bytes of one broadcast."""

    timeout_s: float
    bind_host: str
    bucket_bytes: int
    device: str


class Transport(ABC):
    """One communicator with rank 0 as the only sender. Used by one thread; any other may call
    ``abort``."""

    @abstractmethod
    def broadcast(self, view: torch.Tensor, timeout_s: float) -> None:
        """Send (rank 0) or fill (others) ``view``: uint8, 1-D, contiguous, on the host, of the same
        length on every rank.

        Returns when this rank's part is done. Raises TransferFailed if the peer is gone,
        ``timeout_s`` seconds passed or the transport was aborted; it is then of no further use.
        """

    @abstractmethod
    def abort(self) -> None:
        """Make the broadcast in progress and all later ones raise TransferFailed at once. Any
        thread; idempotent."""

    @abstractmethod
    def close(self) -> None:
        """Free sockets and buffers without blocking on the peer. Idempotent."""


def broadcast_image(
    transport: Transport,
    image: torch.Tensor,
    bucket_bytes: int,
    timeout_s: float,
    moved: Callable[[int], object] | None = None,
) -> float:
    """Broadcast a whole image (uint8[nbytes]) in buckets under one deadline; return the seconds.

    An ``image`` of 10 bytes with 4-byte buckets goes as [0:4], [4:8], [8:10] on every rank.
    ``moved`` is called after each bucket with the bytes sent so far; it must not block. Raises
    TransferFailed past ``timeout_s`` seconds, and as ``Transport.broadcast``.
    """
    start = time.monotonic()
    for offset in range(0, image.numel(), bucket_bytes):
        left = start + timeout_s - time.monotonic()
        if left <= 0:
            raise TransferFailed(
                f"a transfer must end within {timeout_s} s, {offset} of {image.numel()} bytes had"
                " moved by then; raise weight_sync.lane_deadline_s if the network is that slow"
            )
        transport.broadcast(image[offset : offset + bucket_bytes], left)
        if moved is not None:
            moved(min(offset + bucket_bytes, image.numel()))
    return time.monotonic() - start


def beside(
    call: Callable[[], T], name: str, failed: Callable[[], object] = lambda: None
) -> Future[T]:
    """Make a call on a daemon thread of its own. ``failed`` is called if it raises: the caller may
    be sending bytes that nothing reads then."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(call())
        except Exception as error:  # noqa: BLE001 - top of a thread: the caller waits for it
            future.set_exception(error)
            failed()

    threading.Thread(target=run, name=name, daemon=True).start()
    return future


def outcome(request: Future[T], timeout_s: float, what: str) -> T:
    """Return a request's result, or raise its error. Raises TransferFailed if it does not end
    within ``timeout_s`` seconds."""
    try:
        return request.result(max(0.0, timeout_s))
    except TimeoutError:
        raise TransferFailed(f"{what} did not end within {timeout_s:.1f} s") from None


class GlooTransport(Transport):
    """A ProcessGroupGloo of its own, outside torch.distributed's registry, bound to one
    interface."""

    def __init__(self, store: dist.Store, rank: int, size: int, options: TransportOptions) -> None:
        """Connect all ranks through ``store``. Raises TransferFailed if one is missing past
        ``options.timeout_s``."""
        self._lock = threading.Lock()
        self._aborted = False
        self._pending: threading.Event | None = None
        self._work: dist.Work | None = None
        self._deadline_s = options.timeout_s
        try:
            gloo = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
            gloo._timeout = timedelta(seconds=options.timeout_s)
            gloo._threads = 1  # one operation at a time; more threads would only wait
            gloo._devices = [
                dist.ProcessGroupGloo.create_device(hostname=options.bind_host, lazy_init=False)
            ]
            self._group: dist.ProcessGroupGloo | None = dist.ProcessGroupGloo(
                store, rank, size, gloo
            )
        except RuntimeError as error:
            raise TransferFailed(
                f"gloo on {options.bind_host} did not connect {size} ranks within"
                f" {options.timeout_s} s: {_line(error)}"
            ) from error

    def broadcast(self, view: torch.Tensor, timeout_s: float) -> None:
        """See Transport. A wrong length is not found here: the peer's process aborts (gloo's
        rule)."""
        done = threading.Event()
        with self._lock:  # an abort finds this operation, or this finds the abort
            if self._aborted:
                raise TransferFailed("the transport was aborted")
            self._pending = done
        if self._group is None:
            raise TransferFailed("the transport is closed")
        try:
            options = dist.BroadcastOptions()
            options.rootRank = 0
            options.timeout = timedelta(seconds=timeout_s)
            work = self._work = self._group.broadcast([view], options)  # type: ignore[attr-defined]
            # Wait for the future: neither our abort nor gloo's ends Work.wait().
            work.get_future().add_done_callback(lambda _: done.set())
            in_time = done.wait(timeout_s)
            if self._aborted:
                raise TransferFailed("the transport was aborted during a broadcast")
            if not in_time:
                raise TransferFailed(
                    f"a gloo broadcast must end within {timeout_s:.1f} s; the peer stalls or the"
                    " network is too slow"
                )
            # no deadline: the work is complete, as its future is done
            work.wait()
        except RuntimeError as error:
            raise TransferFailed(
                f"gloo broadcast of {view.numel()} bytes failed: {_line(error)}"
            ) from error
        self._work = None
        self._pending = None

    def abort(self) -> None:
        """See Transport. The abandoned operation ends by its own deadline or, after ``close``, when
        the peer goes."""
        with self._lock:
            self._aborted = True
            pending = self._pending
        if pending is not None:
            pending.set()

    def close(self) -> None:
        # Leave an operation in flight to a reaper: the group's destructor would block on it.
        group, work, self._group, self._work = self._group, self._work, None, None
        if work is not None and not work.is_completed():
            _reap(group, work, self._deadline_s + REAP_SLACK_S)


def _reap(group: dist.ProcessGroupGloo | None, work: dist.Work, timeout_s: float) -> None:
    """Keep group, work and its tensors alive, by a thread's references, until the operation has
    ended, or for ``timeout_s`` seconds."""
    finished = threading.Event()
    work.get_future().add_done_callback(lambda _: finished.set())
    threading.Thread(
        target=lambda *_: finished.wait(timeout_s),
        args=(group, work),
        name="gloo-reaper",
        daemon=True,
    ).start()


def prepare_nccl(open_s: float) -> None:
    """Have torch make NCCL groups without a watchdog, and give up a non-blocking initialisation
    after ``open_s`` seconds, in place of 30 minutes.

    It applies to all groups of the process. Sync and receiver processes have lanes' alone, and
    start without the trainer's TORCH_NCCL variables (subprocesses.helper_environment).
    """
    os.environ["TORCH_NCCL_BLOCKING_WAIT"] = "1"  # read by each group
    # read by the first one
    os.environ.setdefault("TORCH_NCCL_NONBLOCKING_TIMEOUT", str(math.ceil(open_s)))


class NcclTransport(Transport):
    """A ProcessGroupNCCL of its own, outside torch.distributed's registry, on a stream of its
    own."""

    def __init__(self, store: dist.Store, rank: int, size: int, options: TransportOptions) -> None:
        """Connect all ranks. Raises TransferFailed if one is missing past the deadline, or the
        device has no memory left. ``options.device``: "cuda" or "cuda:N"."""
        prepare_nccl(options.timeout_s)
        name = options.device if options.device.startswith("cuda") else "cuda"
        self._device = (
            torch.device(name) if ":" in name else torch.device("cuda", torch.cuda.current_device())
        )
        self._rank = rank
        self._lock = threading.Lock()
        self._aborted = False
        self._group: dist.ProcessGroupNCCL | None = None
        self._ending: threading.Thread | None = None
        nccl = dist.ProcessGroupNCCL.Options(is_high_priority_stream=False)
        nccl._timeout = timedelta(seconds=options.timeout_s)
        nccl.config.blocking = 0
        nccl.config.min_ctas = 1
        nccl.config.max_ctas = MAX_CTAS
        try:
            self._group = dist.ProcessGroupNCCL(store, rank, size, nccl)
            with torch.cuda.device(self._device):
                self._stream = torch.cuda.Stream(self._device)
                self._bucket = torch.empty(
                    options.bucket_bytes, dtype=torch.uint8, device=self._device
                )
            # The first collective creates the communicator: do it here, where a missing peer is
            # expected.
            self._run(self._bucket[:1], options.timeout_s)
        except RuntimeError as error:  # torch.OutOfMemoryError and DistBackendError are too
            self.close()
            raise TransferFailed(f"NCCL on {self._device}: {_line(error)}") from error
        except TransferFailed as error:
            self.close()
            raise TransferFailed(
                f"NCCL did not connect {size} ranks within {options.timeout_s:.1f} s: {error}"
            ) from error

    def broadcast(self, view: torch.Tensor, timeout_s: float) -> None:
        part = self._bucket[: view.numel()]
        try:
            with torch.cuda.stream(self._stream):
                if self._rank == 0:
                    part.copy_(view, non_blocking=True)
                self._run(part, timeout_s)
                if self._rank != 0:
                    view.copy_(part)
        except RuntimeError as error:
            raise TransferFailed(f"NCCL on {self._device}: {_line(error)}") from error

    def _run(self, part: torch.Tensor, timeout_s: float) -> None:
        """Make one broadcast; return when the bytes are there."""
        with self._lock:
            if self._aborted or self._group is None:
                raise TransferFailed("the transport was aborted or closed")
            group = self._group
        try:
            options = dist.BroadcastOptions()
            options.rootRank = 0
            with torch.cuda.stream(self._stream):
                work = group.broadcast([part], options)  # type: ignore[attr-defined]
                # Without a watchdog this blocks until the device is done, and checks for lost
                # peers.
                work.wait(timedelta(seconds=timeout_s))
        except RuntimeError as error:
            why = "was aborted" if self._aborted else "failed"
            raise TransferFailed(
                f"an NCCL broadcast of {part.numel()} bytes {why}: {_line(error)}"
            ) from error
        if self._aborted:
            raise TransferFailed("an NCCL broadcast was aborted")

    def abort(self) -> None:
        """See Transport. Aborts on another thread: NCCL's call may block."""
        with self._lock:
            if self._group is None:
                return
            self._aborted = True
            group = (self._group,)
            ending = threading.Thread(target=_abort, args=group, name="nccl abort", daemon=True)
            try:
                ending.start()
            except RuntimeError as error:
                # This host has no thread left now. Raising would end the source of all lanes; the
                # group stays for the next abort or close, an operation until its own deadline.
                logger.warning("a broken NCCL transport is not aborted yet: %s", error)
                return
            self._group, self._ending = None, ending

    def close(self) -> None:
        """See Transport. Aborts: a regular shutdown waits for the peer."""
        self.abort()
        # Join it: an interpreter that exits during NCCL's abort dies by SIGABRT.
        if self._ending is not None:
            self._ending.join(ABORT_S)


def _abort(group: "dist.ProcessGroupNCCL") -> None:
    """Thread: abort the group's operation. The group's destructor also runs here, if this is the
    last reference."""
    # NCCL raises for an operation aborted before, or a communicator never made: nothing is left.
    with suppress(RuntimeError):
        group.abort()


def _line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def nccl_version() -> str:
    """Return the version of this process's NCCL, as "2.28.9"; empty if it cannot be used."""
    if not (dist.is_nccl_available() and torch.cuda.is_available()):
        return ""
    return ".".join(map(str, torch.cuda.nccl.version()))


def transport_problem(kind: str, trainers_nccl: str = "") -> str:
    """Return why this host cannot open transport ``kind``; empty if it can. ``trainers_nccl``:
    NCCL's version at the other end (empty: unknown)."""
    if kind == "nccl":
        ours = nccl_version()
        if not ours:
            return (
                "weight_sync.transport is nccl, but this host has no CUDA device or a torch without"
                " NCCL; use tcp"
            )
        if trainers_nccl not in ("", ours):
            return (
                f"weight_sync.transport nccl needs one version of NCCL at both ends, this server"
                f" has {ours} and the trainer {trainers_nccl}: NCCL refuses to connect them;"
                " install the same torch at both ends, or use tcp"
            )
    elif kind not in ("gloo", *RANGES):
        return f"weight_sync.transport must be tcp, nixl, gloo or nccl here, got {kind!r}"
    return ""


def open_transport(
    kind: str, store: dist.Store, rank: int, size: int, options: TransportOptions
) -> Transport:
    """Open a communicator of ``kind`` "gloo" or "nccl"; blocks until all ``size`` ranks are there
    or the deadline passed.

    Raises TransferFailed if a rank is missing, ConfigError for a kind that this host cannot open.
    """
    if problem := transport_problem(kind):
        raise ConfigError(problem)
    if kind == "nccl":
        return NcclTransport(store, rank, size, options)
    return GlooTransport(store, rank, size, options)
