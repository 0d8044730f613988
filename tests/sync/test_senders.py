"""Several threads that send one source's images, over real sockets: who is on which, and what a
revoke waits for."""

import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from tests.rigs.interpreter import python
from tests.rigs.present import present
from tests.rigs.sockets import certificate
from tests.rigs.trainer_handle import wait_until
from tests.sync.conftest import SOON_S
from titan_grpo.errors import TransferFailed
from titan_grpo.layout.image import SharedImage
from titan_grpo.protocol.messages import Kind, RangeSource
from titan_grpo.receive.fetch import TcpReader
from titan_grpo.sync.transports.channel import ReceiverChannel, connect
from titan_grpo.sync.transports.range_server import RangeServer
from titan_grpo.sync.transports.sender import Grant
from titan_grpo.sync.transports.tls import Certificate

LOOPBACK = "127.0.0.1"
NBYTES, RANGE = (3 << 20) + 17, 1 << 19
MOST = 3

Has = Callable[[int, int], bool]


class Site:
    """A source with up to MOST sending threads, and an image in a memfd."""

    def __init__(self, shown: Certificate | None) -> None:
        self.server = RangeServer(certificate=shown, most_senders=MOST)
        self.port = self.server.listen(LOOPBACK)
        self.image = SharedImage.create(NBYTES, "test senders")
        self.image.tensor().copy_(torch.randint(2, 256, (NBYTES,), dtype=torch.uint8))
        self.whole = bytes(self.image.buffer)
        self._readers: list[TcpReader] = []
        self.pool = ThreadPoolExecutor(16)

    def source(self, has: Has | None = None, in_memfd: bool = True) -> RangeSource:
        fd = self.image.address.fd if in_memfd else None
        ticket = self.server.grant(self.image.buffer, fd, None, has=has)
        return RangeSource(LOOPBACK, self.port, ticket, pin=self.server.pin)

    def reader(self, source: RangeSource) -> TcpReader:
        self._readers.append(TcpReader(source, None, SOON_S))
        return self._readers[-1]

    def reading(self, source: RangeSource) -> "Reading":
        """A reader that reads the whole image, in ranges, on a thread of its own."""
        got = bytearray(NBYTES)
        return Reading(got, self.pool.submit(read_all, self.reader(source), got))

    def close(self) -> None:
        self.server.close()
        for reader in self._readers:
            reader.close()
        self.pool.shutdown()
        self.image.close()


def read(reader: TcpReader, offset: int, nbytes: int) -> bytes:
    got = bytearray(nbytes)
    reader.read_into(offset, memoryview(got))
    return bytes(got)


def read_all(reader: TcpReader, got: bytearray) -> None:
    for start in range(0, NBYTES, RANGE):
        reader.read_into(start, memoryview(got)[start : start + RANGE])


@dataclass(frozen=True)
class Reading:
    """``got``: what has come, and zeros."""

    got: bytearray
    end: Future[None]

    def whole(self) -> bytes:
        self.end.result(SOON_S)
        return bytes(self.got)

    def broken(self) -> bytes:
        with pytest.raises(TransferFailed):
            self.end.result(SOON_S)
        return bytes(self.got)


def refused(source: RangeSource) -> bool:
    with suppress(TransferFailed):
        TcpReader(source, None, SOON_S).close()
        return False
    return True


def open_files(inode: int) -> list[int]:
    """Descriptors of this process that are this file's; other tests have theirs."""
    found = []
    for fd in map(int, os.listdir("/proc/self/fd")):
        with suppress(OSError):  # one of the listing itself
            if os.fstat(fd).st_ino == inode:
                found.append(fd)
    return found


def senders(site: Site) -> list[str]:
    """Names of the site's sending threads."""
    return [each._loop._thread.name for each in site.server._senders]


@pytest.fixture
def site(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Site]:
    shown = None
    if getattr(request, "param", "") == "tls":
        shown = present(Certificate.load(*certificate(tmp_path, "source"), ("path", "key")))
    made = Site(shown)
    yield made
    made.close()


class Held:
    """Sending threads stop where they are about to read the image, until ``go``."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.there, self.go = threading.Semaphore(0), threading.Event()
        send = Grant._send

        def held(grant: Grant, *about: object) -> int:
            self.there.release()
            assert self.go.wait(SOON_S)
            return send(grant, *about)  # type: ignore[arg-type]

        monkeypatch.setattr(Grant, "_send", held)

    def wait(self, count: int) -> None:
        for _ in range(count):
            assert self.there.acquire(timeout=SOON_S)


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch, site: Site) -> Iterator[Held]:
    made = Held(monkeypatch)
    yield made
    made.go.set()


def test_the_connections_of_a_reader_are_spread_and_threads_are_few(site: Site) -> None:
    asked: list[str] = []

    def has(offset: int, nbytes: int) -> bool:
        asked.append(threading.current_thread().name)
        return True

    source = site.source(has)
    assert senders(site) == []
    for number in range(2 * MOST):
        read(site.reader(source), 0, 1)
        assert len(senders(site)) == min(number + 1, MOST)
    assert [asked.count(name) for name in senders(site)] == [2] * MOST


def test_a_further_thread_starts_only_where_all_have_readers(site: Site) -> None:
    source = site.source()
    for _ in range(MOST):
        reader = site.reader(source)
        read(reader, 0, 1)
        reader.close()
        assert wait_until(lambda: not any(each.load for each in site.server._senders), SOON_S)
    assert len(senders(site)) == 1


@pytest.mark.parametrize(
    ("site", "in_memfd"), [("", False), ("", True), ("tls", False)], indirect=["site"]
)
def test_each_reader_gets_the_bytes_of_its_image_over_all_threads(
    site: Site, in_memfd: bool
) -> None:
    other = torch.full((NBYTES,), 1, dtype=torch.uint8)
    ticket = site.server.grant(other.numpy().data, None, None)
    sources = (
        (site.source(in_memfd=in_memfd), site.whole),
        (RangeSource(LOOPBACK, site.port, ticket, pin=site.server.pin), bytes(other.numpy())),
    )
    got = [(site.reading(source), whole) for source, whole in sources for _ in range(MOST)]
    assert all(each.whole() == whole for each, whole in got)


@pytest.mark.parametrize(
    ("site", "in_memfd"), [("", False), ("", True), ("tls", False)], indirect=["site"]
)
def test_no_thread_reads_an_image_after_its_revoke(site: Site, held: Held, in_memfd: bool) -> None:
    """Each stands right before it reads while the image is revoked, and what it would read, the
    memory or the file behind its descriptor, becomes ones."""
    source = site.source(in_memfd=in_memfd)
    lines = [site.reading(source) for _ in range(MOST)]
    held.wait(MOST)

    def revoke() -> SharedImage | None:
        site.server.revoke(source.ticket)
        if not in_memfd:
            site.image.tensor().fill_(1)
            return None
        # sendfile hands pages on, whatever is in them later: so its number becomes another file's
        other = SharedImage.create(NBYTES, "test another file")
        other.tensor().fill_(1)
        return other

    revoked = site.pool.submit(revoke)
    assert wait_until(lambda: refused(source), SOON_S)
    held.go.set()
    other = revoked.result(SOON_S)
    got = [line.broken() for line in lines]
    assert all(1 not in each and any(each) for each in got)
    if other is not None:
        other.close()


def test_a_revoke_waits_for_no_reader_of_another_image(site: Site, held: Held) -> None:
    line, other = site.reading(site.source()), site.source()
    held.wait(1)
    site.pool.submit(site.server.revoke, other.ticket).result(SOON_S)
    held.go.set()
    assert line.whole() == site.whole


def test_an_image_that_gets_the_ticket_of_another_ends_its_readers(site: Site) -> None:
    source, ones = site.source(), torch.full((NBYTES,), 1, dtype=torch.uint8)
    reader = site.reader(source)
    read(reader, 0, 10)
    site.server.grant(ones.numpy().data, None, None, ticket=source.ticket)
    with pytest.raises(TransferFailed):
        read(reader, 0, 10)
    assert read(site.reader(source), 0, 10) == bytes([1] * 10)


def test_readers_that_wait_for_bytes_go_on_whichever_thread_they_are_on(site: Site) -> None:
    there, asked = threading.Event(), set[str]()

    def has(offset: int, nbytes: int) -> bool:
        asked.add(threading.current_thread().name)
        return there.is_set()

    source = site.source(has)
    lines = [site.reading(source) for _ in range(2 * MOST)]
    assert wait_until(lambda: len(asked) == MOST, SOON_S)
    there.set()
    site.server.arrived(source.ticket)
    assert all(line.whole() == site.whole for line in lines)


def test_a_message_passes_while_every_sending_thread_is_busy(site: Site, held: Held) -> None:
    channel = site.server.channel(LOOPBACK, None)
    at, ticket = (channel.host, channel.port), channel.ticket.hex()
    sock = connect(at, ticket, None, SOON_S, "trainer")
    receiver = ReceiverChannel(sock, "", lambda _: None)
    line = site.reading(site.source())
    held.wait(1)
    channel.send(Kind.ORDER, 7, b"an order")
    assert receiver.take((Kind.ORDER,)).body == b"an order"
    held.go.set()
    assert line.whole() == site.whole
    channel.close()


def test_an_error_that_nobody_foresaw_ends_the_process_which_is_started_again() -> None:
    code = (
        "import threading; from titan_grpo.sync.transports.sender import Loop;"
        f" Loop('source', print).soon(lambda: 1 / 0); threading.Event().wait({SOON_S})"
    )
    done = python("-c", code)
    assert done.returncode == 1
    assert "ZeroDivisionError" in done.stderr


def test_a_source_that_closes_ends_its_readers_and_threads_and_keeps_no_descriptor(
    site: Site, held: Held
) -> None:
    inode = os.fstat(site.image.address.fd).st_ino
    before = open_files(inode)
    source = site.source()
    assert len(open_files(inode)) == len(before) + 1
    lines = [site.reading(source) for _ in range(MOST)]
    held.wait(MOST)
    closing = site.pool.submit(site.server.close)
    assert wait_until(lambda: refused(source), SOON_S)
    held.go.set()
    closing.result(SOON_S)
    for line in lines:
        line.broken()
    assert not any(each._loop._thread.is_alive() for each in site.server._senders)
    assert open_files(inode) == before
