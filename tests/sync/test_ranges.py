"""A source and its readers over real sockets and memfds: who is served what, and until when."""

import os
import resource
import socket
import threading
import time
from collections.abc import Iterator

import pytest
import torch

from tests.rigs.sockets import descriptors_left
from tests.sync.conftest import SOON_S, read
from titan_grpo.errors import ConfigError, TransferFailed
from titan_grpo.layout.image import SharedImage
from titan_grpo.layout.manifest import Part
from titan_grpo.protocol.messages import RangeSource
from titan_grpo.receive.fetch import NOWHERE, RELAY_HOST, MemfdReader, TcpReader
from titan_grpo.runkey import Key
from titan_grpo.sync.transports.channel import (
    GREETING,
    NONCE_BYTES,
    PROOF_BYTES,
    addresses_towards,
    check_address,
    open_listener,
    proof,
)
from titan_grpo.sync.transports.range_server import GREET_S, RangeServer

LOOPBACK = "127.0.0.1"
NBYTES = (3 << 20) + 17
WHOLE = Part(((0, NBYTES),))
KEY, OTHER_KEY = Key(bytes(range(32))), Key(bytes(range(1, 33)))


@pytest.fixture
def server() -> Iterator[RangeServer]:
    made = RangeServer()
    yield made
    made.close()


@pytest.fixture
def image() -> Iterator[SharedImage]:
    with SharedImage.create(NBYTES, "test ranges") as made:
        made.tensor().copy_(torch.randint(0, 256, (NBYTES,), dtype=torch.uint8))
        yield made


def place(server: RangeServer, image: SharedImage, key: Key | None = None) -> RangeSource:
    """Where the server serves the image, from its memfd."""
    ticket = server.grant(image.buffer, image.address.fd, key)
    return RangeSource(LOOPBACK, server.listen(LOOPBACK), ticket, image.address.to_json())


@pytest.mark.parametrize("in_memfd", [True, False])
@pytest.mark.parametrize(("offset", "nbytes"), [(0, NBYTES), (5, 1), (NBYTES - 4096, 4096)])
def test_a_range_arrives_byte_for_byte(
    server: RangeServer, image: SharedImage, in_memfd: bool, offset: int, nbytes: int
) -> None:
    ticket = server.grant(image.buffer, image.address.fd if in_memfd else None, None)
    source = RangeSource(LOOPBACK, server.listen(LOOPBACK), ticket)
    assert read(source, offset, nbytes) == bytes(image.buffer[offset : offset + nbytes])


def test_a_reader_of_the_same_host_reads_the_memfd_without_the_source(image: SharedImage) -> None:
    reader, got = MemfdReader(image.address.to_json(), WHOLE), bytearray(100)
    reader.read_into(1000, memoryview(got))
    reader.close()
    assert bytes(got) == bytes(image.buffer[1000:1100])


def test_a_memfd_that_is_not_on_this_host_is_a_failed_transfer(image: SharedImage) -> None:
    elsewhere = image.address.to_json() | {"inode": image.address.inode + 1}
    with pytest.raises(TransferFailed, match="inode"):
        MemfdReader(elsewhere, WHOLE)


def test_one_connection_reads_many_ranges_and_two_images_are_not_mixed_up(
    server: RangeServer, image: SharedImage
) -> None:
    other = torch.full((NBYTES,), 7, dtype=torch.uint8)
    port = server.listen(LOOPBACK)
    first = RangeSource(LOOPBACK, port, server.grant(image.buffer, None, None))
    second = RangeSource(LOOPBACK, port, server.grant(other.numpy().data, None, None))
    readers = [TcpReader(source, None, SOON_S) for source in (first, second)]
    for offset in (0, 1 << 20, 2 << 20):
        got = [bytearray(4096), bytearray(4096)]
        for reader, target in zip(readers, got, strict=True):
            reader.read_into(offset, memoryview(target))
        assert bytes(got[0]) == bytes(image.buffer[offset : offset + 4096])
        assert set(got[1]) == {7}
    for reader in readers:
        reader.close()


@pytest.mark.parametrize("key", [None, OTHER_KEY])
def test_a_reader_without_the_run_key_gets_no_byte(
    server: RangeServer, image: SharedImage, key: Key | None
) -> None:
    with pytest.raises(TransferFailed):
        read(place(server, image, KEY), 0, 10, key)


def test_a_reader_with_the_run_key_is_served(server: RangeServer, image: SharedImage) -> None:
    assert read(place(server, image, KEY), 0, 10, KEY) == bytes(image.buffer[:10])


def test_a_source_that_does_not_prove_the_run_key_is_not_read() -> None:
    def pretend(listener: socket.socket) -> None:
        sock, _ = listener.accept()
        sock.sendall(bytes(NONCE_BYTES))
        sock.recv(GREETING.size, socket.MSG_WAITALL)
        sock.sendall(bytes(32))
        sock.close()

    with socket.create_server((LOOPBACK, 0)) as listener:
        thread = threading.Thread(target=pretend, args=(listener,), daemon=True)
        thread.start()
        source = RangeSource(LOOPBACK, listener.getsockname()[1], "00" * 16)
        with pytest.raises(TransferFailed, match="does not prove the run key"):
            read(source, 0, 10, KEY)
        thread.join(SOON_S)


def test_a_proof_of_another_connection_is_refused(server: RangeServer, image: SharedImage) -> None:
    source = place(server, image, KEY)
    ticket, nonce = bytes.fromhex(source.ticket), bytes(NONCE_BYTES)
    overheard = GREETING.pack(nonce, ticket, proof(KEY, "reader", nonce, nonce, ticket))
    with socket.create_connection((LOOPBACK, source.port), SOON_S) as sock:
        sock.recv(NONCE_BYTES, socket.MSG_WAITALL)
        sock.sendall(overheard)
        assert sock.recv(1) == b""


def test_a_greeting_may_come_in_pieces(server: RangeServer, image: SharedImage) -> None:
    source = place(server, image)
    ticket, nonce = bytes.fromhex(source.ticket), bytes(NONCE_BYTES)
    with socket.create_connection((LOOPBACK, source.port), SOON_S) as sock:
        theirs = sock.recv(NONCE_BYTES, socket.MSG_WAITALL)
        greeting = GREETING.pack(nonce, ticket, proof(None, "reader", theirs, nonce, ticket))
        sock.sendall(greeting[:1])
        read(source, 0, 1)  # when this reader is served, the first piece has been read
        sock.sendall(greeting[1:])
        answer = sock.recv(PROOF_BYTES, socket.MSG_WAITALL)
    assert answer == proof(None, "source", theirs, nonce, ticket)


def test_a_source_that_may_open_no_more_files_says_so_once(
    server: RangeServer,
    image: SharedImage,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    source = place(server, image)
    monkeypatch.setattr(resource, "getrlimit", lambda _: (4, 4))
    held = [TcpReader(source, None, SOON_S) for _ in range(2)]
    for _ in range(2):
        with pytest.raises(TransferFailed, match=r"closed the connection|was lost"):
            TcpReader(source, None, SOON_S)
    assert [record.message.count("ulimit -n") for record in caplog.records] == [1]
    for reader in held:
        reader.close()


def test_an_unknown_ticket_is_refused(server: RangeServer, image: SharedImage) -> None:
    source = RangeSource(LOOPBACK, server.listen(LOOPBACK), "00" * 16)
    with pytest.raises(TransferFailed):
        read(source, 0, 10)


@pytest.mark.parametrize("offset", [NBYTES, NBYTES - 5, 1 << 63])
def test_a_range_outside_the_image_is_refused(
    server: RangeServer, image: SharedImage, offset: int
) -> None:
    with pytest.raises(TransferFailed):
        read(place(server, image), offset, 10)


def test_a_revoked_ticket_ends_its_open_connections(
    server: RangeServer, image: SharedImage
) -> None:
    source = place(server, image)
    reader = TcpReader(source, None, SOON_S)
    reader.read_into(0, memoryview(bytearray(10)))
    server.revoke(source.ticket)
    with pytest.raises(TransferFailed):
        reader.read_into(0, memoryview(bytearray(NBYTES)))
    reader.close()


def test_a_reader_that_stands_still_does_not_delay_another_one(
    server: RangeServer, image: SharedImage
) -> None:
    source = place(server, image)
    with socket.create_connection((LOOPBACK, source.port), SOON_S):  # never says a word
        assert read(source, 0, NBYTES) == bytes(image.buffer)


def test_a_source_that_sends_nothing_fails_the_reader_at_its_deadline() -> None:
    with socket.create_server((LOOPBACK, 0)) as silent:
        source = RangeSource(LOOPBACK, silent.getsockname()[1], "00" * 16)
        with pytest.raises(TransferFailed, match="too slow: 0 of 32 bytes"):
            TcpReader(source, None, 0.3)


@pytest.mark.parametrize("sent", [b"", bytes(NONCE_BYTES + PROOF_BYTES)], ids=["nonce", "range"])
def test_a_source_that_stalls_after_a_late_byte_is_not_waited_for_anew(sent: bytes) -> None:
    """The greeting, and a range of another server, have one deadline for all their bytes."""
    within_s, late, at = 2.0, threading.Event(), list[float]()

    def stall(listener: socket.socket) -> None:
        sock, _ = listener.accept()
        sock.sendall(sent)
        late.wait(0.8 * within_s)
        at.append(time.monotonic())
        sock.sendall(b"x")
        late.wait(SOON_S)
        sock.close()

    with socket.create_server((LOOPBACK, 0)) as listener:
        thread = threading.Thread(target=stall, args=(listener,), daemon=True)
        thread.start()
        source = RangeSource(LOOPBACK, listener.getsockname()[1], "00" * 16)
        until = time.monotonic() + within_s
        with pytest.raises(TransferFailed, match="too slow: 1 of"):
            TcpReader(source, None, within_s, lambda: until).read_into(0, memoryview(bytearray(10)))
        waited_s = time.monotonic() - at[0]
        late.set()
        thread.join(SOON_S)
    assert waited_s < within_s


def test_a_served_and_revoked_image_leaves_no_descriptor_behind(
    server: RangeServer, image: SharedImage
) -> None:
    server.listen(LOOPBACK)
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        source = place(server, image)
        read(source, 0, 100)
        server.revoke(source.ticket)
    reader = TcpReader(place(server, image), None, SOON_S)  # its greeting follows the drops
    reader.close()
    server.close()
    assert len(os.listdir("/proc/self/fd")) <= before


def test_a_port_without_a_descriptor_gets_advice_about_open_files_not_about_the_address() -> None:
    with descriptors_left(0), pytest.raises(ConfigError, match="ulimit -n") as refused:
        open_listener(LOOPBACK)
    assert "bind_host" not in str(refused.value)


def test_a_source_without_a_descriptor_for_its_thread_serves_once_there_is_one(
    server: RangeServer, image: SharedImage
) -> None:
    with descriptors_left(1), pytest.raises(OSError, match="Too many open files"):
        server.listen(LOOPBACK)
    assert read(place(server, image), 0, 10) == bytes(image.buffer[:10])


def test_a_source_that_is_closed_opens_no_port(server: RangeServer) -> None:
    server.listen(LOOPBACK)
    server.close()
    for host in (LOOPBACK, "127.0.0.2"):
        with pytest.raises(TransferFailed, match="is closed"):
            server.listen(host)


@pytest.mark.parametrize("further", [0, 64, 1000])
def test_a_reader_of_a_version_that_is_over_is_refused_at_once_however_many_hosts_had_parts_of_it(
    image: SharedImage, further: int
) -> None:
    server = RangeServer(expects=True)
    source = place(server, image)
    for ticket in (source.ticket, *(place(server, image).ticket for _ in range(further))):
        server.revoke(ticket)
    start = time.monotonic()
    with pytest.raises(TransferFailed, match="no longer served"):
        read(source, 0, 1)
    assert time.monotonic() - start < GREET_S / 2
    server.close()


@pytest.mark.parametrize("address", ["10.0..5", "a" * 64, "0.0.0.0", "::"])
def test_what_is_no_address_of_one_host_is_refused_at_the_start(address: str) -> None:
    with pytest.raises(ConfigError, match="bind_host must be an address of this host"):
        check_address(address)


def test_no_way_leads_to_what_is_no_name() -> None:
    assert list(addresses_towards("10.0..5")) == list(addresses_towards())


def test_an_address_that_no_socket_can_listen_at_names_the_settings_of_trainer_and_server() -> None:
    """203.0.113.5 belongs to no host (RFC 5737), as the outer address of a container does not."""
    names = f"bind_host must be .*on a server {RELAY_HOST}, or '{NOWHERE}'"
    with pytest.raises(ConfigError, match=names):
        open_listener("203.0.113.5")
