"""A server that reads a version serves it to others meanwhile: block by block, what it has checked,
and no byte of the next version under this one's ticket."""

import select
import socket
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch

from tests.rigs.trainer_handle import wait_until
from titan_grpo.config import WeightSync
from titan_grpo.errors import TitanGrpoError, TransferFailed
from titan_grpo.layout.image import Hashing, SharedImage, fingerprint
from titan_grpo.layout.manifest import Manifest
from titan_grpo.protocol.messages import Joined, RangeSource
from titan_grpo.receive.fetch import (
    NOWHERE,
    BesideReader,
    Content,
    Fetch,
    MemfdReader,
    Open,
    Relaying,
    Sharing,
    TcpReader,
)
from titan_grpo.receive.receiver import Place, Receiver
from titan_grpo.runkey import Key
from titan_grpo.sync.link import LaneLink, LinkOptions
from titan_grpo.sync.relay import Relay
from titan_grpo.sync.transports.channel import ADDRESS
from titan_grpo.sync.transports.range_server import RangeServer
from titan_grpo.sync.transports.sender import Grant

BLOCK, BLOCKS = 4096, 24
TICKET = "ab" * 16
SOON_S = 60.0
"""What ends for another reason than its deadline ends within it, however busy the machine is."""

PATIENT_S = 3.0
"""For a test that waits for it: longer than a block that is there takes on a busy machine."""

manifest = Manifest.build([("a", "uint8", (BLOCK * BLOCKS - 100,))], BLOCK)


class Server:
    """A server's image, and what it serves of it at an address of its own."""

    def __init__(self, host: str) -> None:
        self.image = SharedImage.create(manifest.total_bytes, "test sharing")
        self.sharing = Sharing(host, None)

    def begin(self, ticket: str = TICKET) -> None:
        self.sharing.begin(self.image, manifest, [ticket])

    def source(self, ticket: str = TICKET, wait_s: float = SOON_S, key: Key | None = None) -> Open:
        at = RangeSource(self.sharing.host, self.sharing.port, ticket)
        return partial(TcpReader, at, key, wait_s, whole=True)

    def beside(self, wait_s: float = SOON_S) -> Open:
        at = RangeSource(self.sharing.host, self.sharing.port, TICKET)
        return partial(BesideReader, at, None, wait_s, manifest.parts[0])

    def fetch(self, *others: Open, trainer: Open) -> Fetch:
        relaying = Relaying(frozenset(others), self.sharing.arrived)
        sources = {0: [*others, trainer]}
        made = Fetch(self.image, content, sources, 4 * BLOCK, relaying=relaying)
        made.run(3, SOON_S, (manifest.total_bytes,), lambda _: None)
        return made

    def whole(self) -> bool:
        return torch.equal(self.image.tensor(), good)


good = torch.randint(0, 256, (manifest.total_bytes,), dtype=torch.uint8)
hashing = Hashing("xxh3")
content = Content(manifest, hashing.blocks(good.numpy().data, manifest), hashing)


@pytest.fixture
def trainer() -> Iterator[Open]:
    server = RangeServer()
    at = RangeSource("127.0.0.1", server.listen("127.0.0.1"), "")
    ticket = server.grant(good.numpy().data, None, None)
    yield partial(TcpReader, RangeSource(at.host, at.port, ticket), None, SOON_S)
    server.close()


@pytest.fixture
def servers() -> Iterator[list[Server]]:
    made = [Server(f"127.0.0.{number}") for number in (2, 3, 4)]
    yield made
    for one in made:
        one.sharing.close()
        one.image.close()


def joined(host: str = "", port: int = 0) -> Joined:
    """What a server answers that others read from at this address."""
    at: dict[str, Any] = {"relay_host": host, "relay_port": port}
    return Joined(True, "", "test", 0, "", -1, "", True, **at)


def later(work: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


def test_servers_behind_each_other_read_from_the_trainer_once(
    servers: list[Server], trainer: Open
) -> None:
    first, second, third = servers
    for one in servers:
        one.begin()
    done: dict[str, Fetch] = {}

    def last() -> None:
        done["third"] = third.fetch(second.source(), trainer=trainer)

    def middle() -> None:
        done["second"] = second.fetch(first.source(), trainer=trainer)

    # those behind begin before the first one has a byte
    threads = [later(last), later(middle)]
    done["first"] = first.fetch(trainer=trainer)
    for thread in threads:
        thread.join(SOON_S)
    assert all(one.whole() for one in servers)
    assert [done[name].relay_bytes for name in ("first", "second", "third")] == [
        0,
        manifest.total_bytes,
        manifest.total_bytes,
    ]


def test_a_reader_that_comes_before_the_ticket_waits_for_it(
    servers: list[Server], trainer: Open
) -> None:
    first, second, _ = servers
    second.begin()
    reading = later(lambda: second.fetch(first.source(), trainer=trainer))
    first.begin()
    first.fetch(trainer=trainer)
    reading.join(SOON_S)
    assert second.whole()


def test_a_reader_that_waited_for_its_ticket_may_ask_as_soon_as_it_is_admitted(
    servers: list[Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, got = servers[0], bytearray(BLOCK)
    write, unproven = RangeServer._write, first.sharing._server._unproven

    def until_it_asks(self: RangeServer, peer: Any) -> bool:
        """The reader is faster than the thread that admits it."""
        alive = write(self, peer)
        if peer.grant is not None:
            asked = select.poll()
            asked.register(peer.sock, select.POLLIN)
            assert asked.poll(SOON_S * 1000)
        return alive

    monkeypatch.setattr(RangeServer, "_write", until_it_asks)
    open_reader = first.beside(wait_s=PATIENT_S)
    reading = later(lambda: open_reader().read_into(0, memoryview(got)))
    assert wait_until(lambda: any(peer.greeting for peer in unproven), SOON_S)
    first.image.tensor().copy_(good)
    first.begin()
    first.sharing.arrived(0, 0, BLOCK)
    reading.join(SOON_S)
    assert bytes(got) == bytes(good[:BLOCK].numpy())


@pytest.mark.parametrize("way", [Server.source, Server.beside], ids=["sent", "read from memory"])
def test_a_block_that_is_not_there_is_not_sent_nor_read_from_memory(
    servers: list[Server], way: Callable[..., Open]
) -> None:
    first = servers[0]
    first.begin()
    first.image.tensor().copy_(good)
    first.sharing.arrived(0, 0, BLOCK)
    reader, got = way(first, wait_s=PATIENT_S)(), bytearray(BLOCK)
    reader.read_into(0, memoryview(got))
    assert bytes(got) == bytes(good[:BLOCK].numpy())
    with pytest.raises(TransferFailed, match="too slow: 0 of"):
        reader.read_into(BLOCK, memoryview(got))
    reader.close()


def test_a_server_that_lies_is_asked_once_and_its_reader_has_the_version(
    servers: list[Server], trainer: Open
) -> None:
    liar, second, _ = servers
    liar.begin()
    for start in range(0, manifest.total_bytes, BLOCK):
        liar.sharing.arrived(0, start, min(start + BLOCK, manifest.total_bytes))
    second.begin()
    told = liar.source()
    fetch = second.fetch(told, trainer=trainer)
    assert second.whole()
    assert fetch.lost == {told}
    assert fetch.relay_bytes == 0
    # each of the three threads may have asked before the first answer was judged
    assert fetch.read_bytes <= manifest.total_bytes + 3 * BLOCK


def test_a_server_that_stops_costs_the_blocks_that_are_missing(
    servers: list[Server], trainer: Open
) -> None:
    stuck, second, _ = servers
    stuck.begin()
    stuck.image.tensor().copy_(good)
    for block in range(BLOCKS // 2):
        stuck.sharing.arrived(0, block * BLOCK, (block + 1) * BLOCK)
    second.begin()
    told = stuck.source(wait_s=PATIENT_S)
    fetch = second.fetch(told, trainer=trainer)
    assert second.whole()
    assert fetch.relay_bytes == BLOCKS // 2 * BLOCK
    assert fetch.read_bytes == manifest.total_bytes


def test_a_server_that_only_reads_leaves_a_server_that_stops_and_names_it(
    servers: list[Server],
) -> None:
    stuck, relay = servers[0], Relay(True)
    relay.came("stuck", joined(stuck.sharing.host, stuck.sharing.port), "127.0.0.9")
    stuck.image.tensor().copy_(good)
    stuck.begin(*relay.asked("stuck", 1, 1).serve)
    for block in range(BLOCKS // 2):
        stuck.sharing.arrived(0, block * BLOCK, (block + 1) * BLOCK)
    config = WeightSync(bucket_bytes=4 * BLOCK, connections=1)
    options = LinkOptions(config, "tcp", "127.0.0.9", url="reader", relay=relay)
    link = LaneLink("000000000001-sharing0", 2, manifest, options)
    receiver = Receiver(link.open(), joined(), None, place=Place(host=NOWHERE))

    def serve() -> None:
        with pytest.raises(TitanGrpoError):  # the lane hangs up
            receiver.run()

    serving = later(serve)
    assert link.wait_joined(SOON_S).ok
    assert link.send_manifest().ok
    mark = fingerprint(manifest.digest, content.digests)
    answer = link.send(1, 1, good, content.digests, mark)
    link.close()
    serving.join(SOON_S)
    assert (answer.error, answer.lost) == ("", (0,))
    assert answer.relay_bytes == BLOCKS // 2 * BLOCK


def test_a_server_that_begins_the_next_version_ends_its_readers_of_this_one(
    servers: list[Server],
) -> None:
    first = servers[0]
    first.begin()
    reader = first.source()()
    first.begin("cd" * 16)
    got = bytearray(BLOCK)
    with pytest.raises(TransferFailed):
        reader.read_into(0, memoryview(got))
    reader.close()
    with pytest.raises(TransferFailed):
        first.source()()


def test_a_reader_without_the_run_key_gets_no_byte_of_another_server(servers: list[Server]) -> None:
    sharing = Sharing("127.0.0.5", Key.generate())
    sharing.begin(servers[0].image, manifest, [TICKET])
    with pytest.raises(TransferFailed):
        TcpReader(RangeSource(sharing.host, sharing.port, TICKET), None, SOON_S)
    sharing.close()


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Bytes of versions that sources send over sockets, noted right after: a reader may have the
    last of them before it is noted."""
    out: list[int] = []
    send = Grant.send

    def noted(self: Grant, sock: socket.socket, offset: int, nbytes: int) -> int:
        out.append(send(self, sock, offset, nbytes))
        return out[-1]

    monkeypatch.setattr(Grant, "send", noted)
    return out


def test_a_server_beside_another_takes_its_memory_and_no_byte_over_a_socket(
    servers: list[Server], trainer: Open, sent: list[int]
) -> None:
    first, second, _ = servers
    second.begin()
    # it begins before the first one has a byte
    reading = later(lambda: second.fetch(first.beside(), trainer=trainer))
    first.begin()
    first.fetch(trainer=trainer)
    assert first.whole()
    reading.join(SOON_S)
    assert second.whole()
    assert wait_until(lambda: sum(sent) == manifest.total_bytes, SOON_S)


def test_memory_that_is_written_anew_while_it_is_read_is_noticed(
    servers: list[Server], trainer: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second, _ = servers
    first.begin()
    first.fetch(trainer=trainer)
    read = MemfdReader.read_into

    def late(self: MemfdReader, offset: int, *views: memoryview) -> None:
        first.image.tensor().zero_()  # the next version's first bytes
        read(self, offset, *views)

    monkeypatch.setattr(MemfdReader, "read_into", late)
    second.begin()
    told = first.beside()
    fetch = second.fetch(told, trainer=trainer)
    assert second.whole()
    assert fetch.lost == {told}


def test_a_server_whose_memory_may_not_be_read_is_read_over_the_connection(
    servers: list[Server], trainer: Open, sent: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second, _ = servers
    first.begin()
    first.fetch(trainer=trainer)
    # the sending thread counts what it has sent when the reader may have it already
    assert wait_until(lambda: sum(sent) == manifest.total_bytes, SOON_S)
    sent.clear()
    # as in another pid namespace: that process is not there
    monkeypatch.setattr(Grant, "address", lambda self: ADDRESS.pack(2**31 - 1, 3, 1, 1))
    second.begin()
    fetch = second.fetch(first.beside(), trainer=trainer)
    assert second.whole()
    assert fetch.relay_bytes == manifest.total_bytes
    assert wait_until(lambda: sum(sent) == manifest.total_bytes, SOON_S)
    assert not fetch.lost
