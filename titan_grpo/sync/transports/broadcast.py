"""Broadcasts from rank 0 with a deadline and an abort, by gloo or NCCL: how whole versions reach
servers in place of ranges, and streamed ones always. And the key-value store at which their ranks
meet, which also carries the notices of the trainer's ranks.

gloo sends straight out of and into the image: no copy on either side.

With NCCL the image stays on the host: the sender copies host -> bucket -> NCCL, the receiver
NCCL -> bucket -> host, in the order of one stream, with few CTAs, so that training kernels keep
most of the device. A lane's communicator lives in the trainer's process, and torch gives each
process group a watchdog that ends the process when a peer is lost. So these groups are made without
one (TORCH_NCCL_BLOCKING_WAIT): ``wait`` looks for errors itself, and raises them. NCCL's blocking
initialisation waits for a missing peer without end, even when it is aborted: it is made
non-blocking (``ncclConfig_t.blocking = 0``), which torch gives up by itself (limit_nccl_opening).
"""

import math
import os
import socket
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

from titan_grpo.errors import ConfigError, TransferFailed
from titan_grpo.protocol.messages import RANGES
from titan_grpo.sync.transports.channel import cannot_listen

LOOPBACK = "127.0.0.1"

REAP_SLACK_S = 5.0
"""How much longer than its own deadline a reaper waits for an abandoned operation, in seconds."""

MAX_CTAS = 4
"""Thread blocks that NCCL may use: a lane competes with training for the device, and a network
needs no more."""

CONNECT_S = 30.0
"""Deadline of a store's own handshake, in seconds."""

BLOCKING_WAIT = "TORCH_NCCL_BLOCKING_WAIT"

ABORT_S = 5.0
"""Seconds that closing waits for NCCL to have aborted."""

T = TypeVar("T")

_environment = threading.Lock()
"""The environment is the process's: lanes that connect at once would put back each other's
value."""


@contextmanager
def store_errors(what: str) -> Iterator[None]:
    """Turn torch's store errors (timeout, lost connection) into TransferFailed that says what was
    awaited."""
    try:
        yield
    except dist.DistError as error:
        lost = isinstance(error, dist.DistNetworkError)
        why = "the connection was lost" if lost else "the deadline passed"
        raise TransferFailed(f"{what}: {why} ({str(error).splitlines()[0]})") from error


def host_store(bind_host: str) -> dist.TCPStore:
    """A TCPStore on a free port of the interface ``bind_host`` (a host name or an address, IPv4 or
    IPv6).

    The listening socket is bound here and handed over: a port that is only looked up and then bound
    by the store can be taken by another process in between, and the store alone would listen on
    every interface. Works under torchrun: it never looks at the agent's store. Raises ConfigError
    if the address cannot be bound.
    """
    try:
        family, _, _, _, address = socket.getaddrinfo(bind_host, 0, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, socket.SOCK_STREAM)
        listener.bind(address)
        listener.listen(128)
    except OSError as error:
        raise cannot_listen(bind_host, error) from error
    port = listener.getsockname()[1]
    with store_errors(f"hosting a store on {bind_host}:{port}"):
        # the store owns the descriptor from here on, also if its constructor fails
        return dist.TCPStore(
            bind_host,
            port,
            is_master=True,
            wait_for_workers=False,
            timeout=timedelta(seconds=CONNECT_S),
            master_listen_fd=listener.detach(),
        )


def join_store(host: str, port: int, timeout_s: float) -> dist.TCPStore:
    """A new connection to a hosted store; TransferFailed names the address if it is not there in
    time.

    One connection serves one blocking call at a time: a thread that must set while another one
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


@dataclass(frozen=True, slots=True)
class TransportOptions:
    """How a transport is opened. ``timeout_s``: of opening and of one transfer; ``bucket_bytes``:
    of one broadcast."""

    timeout_s: float
    bind_host: str
    bucket_bytes: int
    device: str


class Transport(ABC):
    """One communicator with rank 0 as the only sender. Used by one thread; ``abort`` may come from
    any other."""

    @abstractmethod
    def broadcast(self, view: torch.Tensor, timeout_s: float) -> None:
        """Send (rank 0) or fill (others) ``view``: uint8, 1-D, contiguous, on the host; as long on
        every rank.

        Returns when this rank's part is done. Raises TransferFailed when the peer is gone,
        ``timeout_s`` passed or the transport was aborted; it is then of no further use.
        """

    @abstractmethod
    def abort(self) -> None:
        """Make a broadcast in progress, and every later one, raise TransferFailed at once. Any
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
    """Broadcast a whole image (uint8[nbytes]) in buckets under one deadline; the seconds it took.

    ``image`` of 10 bytes with 4-byte buckets goes as [0:4], [4:8], [8:10] on every rank. ``moved``
    is called after each of them with the number of bytes that are through; it must not block.
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
    """Make a call on a daemon thread of its own. ``failed`` is called if it fails: of a request
    that is answered only after this thread has sent bytes, which nothing would take then."""
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
    """What a request returned, or raises its error; TransferFailed if it does not end in time."""
    try:
        return request.result(max(0.0, timeout_s))
    except TimeoutError:
        raise TransferFailed(f"{what} did not end within {timeout_s:.1f} s") from None


class GlooTransport(Transport):
    """A ProcessGroupGloo of its own, outside torch.distributed's registry, bound to one
    interface."""

    def __init__(self, store: dist.Store, rank: int, size: int, options: TransportOptions) -> None:
        """Connect all ranks through ``store``; TransferFailed if one is missing past
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
        """See Transport. A peer that expects another length is not noticed here: its process aborts
        (gloo's rule)."""
        done = threading.Event()
        with self._lock:  # an abort either sees this operation or is seen by it
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
            # The future wakes us; Work.wait() could not be left by an abort (gloo's own abort does
            # not end it).
            work.get_future().add_done_callback(lambda _: done.set())
            in_time = done.wait(timeout_s)
            if self._aborted:
                raise TransferFailed("the transport was aborted during a broadcast")
            if not in_time:
                raise TransferFailed(
                    f"a gloo broadcast must end within {timeout_s:.1f} s; the peer stalls or the"
                    " network is too slow"
                )
            # no deadline: the work has completed: its future was waited for with a deadline
            work.wait()
        except RuntimeError as error:
            raise TransferFailed(
                f"gloo broadcast of {view.numel()} bytes failed: {_line(error)}"
            ) from error
        self._work = None
        self._pending = None

    def abort(self) -> None:
        """See Transport. The abandoned operation ends by its own deadline, or when ``close`` was
        called and the peer goes."""
        with self._lock:
            self._aborted = True
            pending = self._pending
        if pending is not None:
            pending.set()

    def close(self) -> None:
        """See Transport. An operation still in flight is left to a daemon thread: the group's
        destructor would block on it."""
        group, work, self._group, self._work = self._group, self._work, None, None
        if work is not None and not work.is_completed():
            _reap(group, work, self._deadline_s + REAP_SLACK_S)


def _reap(group: dist.ProcessGroupGloo | None, work: dist.Work, timeout_s: float) -> None:
    """Keep group, work and the tensors in it alive until the operation has ended: the references go
    with the thread."""
    finished = threading.Event()
    work.get_future().add_done_callback(lambda _: finished.set())
    threading.Thread(
        target=lambda *_: finished.wait(timeout_s),
        args=(group, work),
        name="gloo-reaper",
        daemon=True,
    ).start()


def limit_nccl_opening(open_s: float) -> None:
    """Have torch give up a non-blocking NCCL initialisation whose peer does not come, after
    ``open_s`` seconds in place of 30 minutes.

    Call it before the process's first NCCL group: torch reads the variable once, at the first use
    of any. What a user has set stays. Blocking groups, as torchtitan's are, never look at it.
    """
    os.environ.setdefault("TORCH_NCCL_NONBLOCKING_TIMEOUT", str(math.ceil(open_s)))


@contextmanager
def no_watchdog() -> Iterator[None]:
    """Within it, a new process group gets no watchdog, and its ``wait`` raises what went wrong.

    The variable is read by the group's constructor; it is put back for the training groups that may
    come later.
    """
    with _environment:
        before = os.environ.get(BLOCKING_WAIT)
        os.environ[BLOCKING_WAIT] = "1"
        try:
            yield
        finally:
            if before is None:
                del os.environ[BLOCKING_WAIT]
            else:
                os.environ[BLOCKING_WAIT] = before


class NcclTransport(Transport):
    """A ProcessGroupNCCL of its own, outside torch.distributed's registry, on a stream of its
    own."""

    def __init__(self, store: dist.Store, rank: int, size: int, options: TransportOptions) -> None:
        """Connect all ranks; TransferFailed if one is missing past the deadline, or the device has
        no memory left. ``options.device``: "cuda" or "cuda:N"."""
        limit_nccl_opening(options.timeout_s)  # of a process that has no other NCCL group
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
            with no_watchdog():
                self._group = dist.ProcessGroupNCCL(store, rank, size, nccl)
            with torch.cuda.device(self._device):
                self._stream = torch.cuda.Stream(self._device)
                self._bucket = torch.empty(
                    options.bucket_bytes, dtype=torch.uint8, device=self._device
                )
            # the communicator is made by the first collective: make it here, where a missing peer
            # is expected
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
        """One broadcast; returns when the bytes are there."""
        with self._lock:
            if self._aborted or self._group is None:
                raise TransferFailed("the transport was aborted or closed")
            group = self._group
        try:
            options = dist.BroadcastOptions()
            options.rootRank = 0
            with torch.cuda.stream(self._stream):
                work = group.broadcast([part], options)  # type: ignore[attr-defined]
                # without a watchdog it waits for the device, and looks for lost peers meanwhile
                work.wait(timedelta(seconds=timeout_s))
        except RuntimeError as error:
            why = "was aborted" if self._aborted else "failed"
            raise TransferFailed(
                f"an NCCL broadcast of {part.numel()} bytes {why}: {_line(error)}"
            ) from error
        if self._aborted:
            raise TransferFailed("an NCCL broadcast was aborted")

    def abort(self) -> None:
        """See Transport. Another thread aborts: NCCL's call may block."""
        with self._lock:
            group, self._group = self._group, None
            if group is None:
                return
            self._aborted = True
            self._ending = threading.Thread(
                target=_abort, args=(group,), name="nccl abort", daemon=True
            )
            self._ending.start()

    def close(self) -> None:
        """See Transport: aborts, since a regular shutdown waits for the peer."""
        self.abort()
        # an interpreter that ends under a thread within NCCL's abort ends with SIGABRT
        if self._ending is not None:
            self._ending.join(ABORT_S)


def _abort(group: "dist.ProcessGroupNCCL") -> None:
    """Thread: end what is under way. The group's destructor runs here too, if this
    is the last reference."""
    # an operation that was aborted before, or a communicator that never came to be, is an error of
    # NCCL's, and its lane has ended
    with suppress(RuntimeError):
        group.abort()


def _line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def nccl_version() -> str:
    """Version of this process's NCCL, as "2.28.9"; empty where it cannot be used."""
    if not (dist.is_nccl_available() and torch.cuda.is_available()):
        return ""
    return ".".join(map(str, torch.cuda.nccl.version()))


def transport_problem(kind: str, trainers_nccl: str = "") -> str:
    """Why this host cannot open transport ``kind``; empty if it can. ``trainers_nccl``: the version
    of the other end (empty: unknown)."""
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
    """Open the communicator that "gloo" or "nccl" names; blocks until all ``size`` ranks are there
    or the deadline passed.

    Raises TransferFailed if a rank does not come, ConfigError for an unknown kind or one that this
    host cannot open.
    """
    if problem := transport_problem(kind):
        raise ConfigError(problem)
    kinds: dict[str, type[GlooTransport | NcclTransport]]
    kinds = {"gloo": GlooTransport, "nccl": NcclTransport}
    return kinds[kind](store, rank, size, options)
