"""A server that reads a version serves it to others meanwhile: block by block, what it has checked,
and no byte of the next version under this one's ticket."""

import random
import select
import socket
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch

from tests.rigs.trainer_handle import wait_until
from titan_grpo.config import WeightSync
from titan_grpo.errors import TitanGrpoError, TransferFailed
from titan_grpo.layout.image import Hashing, SharedImage, fingerprint
from titan_grpo.layout.manifest import Manifest
from titan_grpo.protocol.marks import marks
from titan_grpo.protocol.messages import Joined, RangeSource
from titan_grpo.receive.fetch import (
    NOWHERE,
    BesideReader,
    Content,
    Fetch,
    MemfdReader,
    Open,
    Patience,
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
BUCKET = 4 * BLOCK
RATE = 50 << 20
TICKET = "ab" * 16
SOON_S = 60.0
"""What ends for another reason than its deadline ends within it, however busy the machine is."""

PATIENT_S = 3.0
"""For a test that waits for it: longer than a block that is there takes on a busy machine."""

manifest = Manifest.build([("a", "uint8", (BLOCK * BLOCKS - 100,))], BLOCK)


def patient(wait_s: float = SOON_S) -> Patience:
    return Patience(wait_s, RATE)


class Server:
    """A server's image, and what it serves of it at an address of its own."""

    def __init__(self, host: str) -> None:
        self.image = SharedImage.create(manifest.total_bytes, "test sharing")
        self.sharing = Sharing(host, None)
        self.longest_s = 0.0
        """Longest time between two marks of its fetch."""

    def begin(self, ticket: str = TICKET) -> None:
        self.sharing.begin(self.image, manifest, [ticket])

    def has(self, blocks: int, ticket: str = TICKET) -> "Server":
        """Serve the first blocks; the others do not come."""
        self.begin(ticket)
        self.image.tensor().copy_(good)
        for block in range(blocks):
            self.sharing.arrived(0, block * BLOCK, (block + 1) * BLOCK)
        return self

    def source(self, patience: Patience | None = None, ticket: str = TICKET) -> Open:
        at = RangeSource(self.sharing.host, self.sharing.port, ticket)
        return partial(TcpReader, at, None, SOON_S, (patience or patient()).until)

    def beside(self, patience: Patience | None = None) -> Open:
        at = RangeSource(self.sharing.host, self.sharing.port, TICKET)
        until = (patience or patient()).until
        return partial(BesideReader, at, None, SOON_S, until, manifest.parts[0])

    def fetch(
        self,
        *others: Open,
        trainer: Open,
        patience: Patience | None = None,
        threads: int = 3,
    ) -> Fetch:
        relaying = Relaying(frozenset(others), self.sharing.arrived, patience or patient())
        sources = {0: [*others, trainer]}
        made = Fetch(self.image, content, sources, BUCKET, relaying=relaying)
        at = [time.monotonic()]
        ahead = marks(manifest.total_bytes, BUCKET)
        made.run(threads, SOON_S, ahead, lambda _: at.append(time.monotonic()))
        self.longest_s = max(after - before for before, after in pairwise(at))
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
        one.sharing._server.close()
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
    open_reader = first.beside(patient(PATIENT_S))
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
    reader, got = way(servers[0].has(1), patient(PATIENT_S))(), bytearray(BLOCK)
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
    second.begin()
    patience = patient(PATIENT_S)
    told = stuck.has(BLOCKS // 2).source(patience)
    fetch = second.fetch(told, trainer=trainer, patience=patience)
    assert second.whole()
    assert fetch.lost == {told}
    assert fetch.relay_bytes == BLOCKS // 2 * BLOCK
    assert fetch.read_bytes == manifest.total_bytes


def test_servers_that_stand_still_are_waited_for_once_whatever_their_number(
    servers: list[Server], trainer: Open
) -> None:
    """Before, the wait for the second one passed the lane's progress deadline."""
    parent, above, reader = servers
    reader.begin()
    patience = patient(PATIENT_S)
    first = parent.has(BLOCKS // 2).source(patience)
    second = above.has(BLOCKS // 2, "cd" * 16).source(patience, "cd" * 16)
    fetch = reader.fetch(first, second, trainer=trainer, patience=patience)
    assert reader.whole()
    assert fetch.lost == {first}, "the other one was not asked"
    assert reader.longest_s < 2 * PATIENT_S


def test_a_server_that_sends_each_block_just_in_time_is_left_before_the_mark_is_late(
    servers: list[Server], trainer: Open
) -> None:
    """Before, each range had its own wait, and no mark came in time."""
    slow, reader, _ = servers
    reader.begin()
    slow.has(0)
    done = threading.Event()

    def trickle() -> None:
        for block in range(BLOCKS):
            if done.wait(0.7 * PATIENT_S):
                return
            slow.sharing.arrived(0, block * BLOCK, (block + 1) * BLOCK)

    trickling = later(trickle)
    patience = patient(PATIENT_S)
    told = slow.source(patience)
    fetch = reader.fetch(told, trainer=trainer, patience=patience, threads=1)
    done.set()
    trickling.join(SOON_S)
    assert reader.whole()
    assert fetch.lost == {told}
    assert reader.longest_s < 2 * PATIENT_S


def test_the_next_server_is_asked_where_one_fails_at_once(
    servers: list[Server], trainer: Open
) -> None:
    gone, above, reader = servers
    reader.begin()
    gone.has(BLOCKS).sharing._server.close()
    patience = patient()
    first, second = gone.source(patience), above.has(BLOCKS).source(patience)
    fetch = reader.fetch(first, second, trainer=trainer, patience=patience)
    assert reader.whole()
    assert fetch.lost == {first}
    assert fetch.relay_bytes == manifest.total_bytes


def test_no_wait_for_other_servers_outlasts_what_was_allowed_since_the_mark(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = mark_s = 0.0
    since, rng = 0, random.Random(3)
    monkeypatch.setattr(time, "monotonic", lambda: now)
    patience = patient(7.0)
    for _ in range(10_000):
        now += rng.expovariate(2.0)
        nbytes, marked = rng.randrange(100 << 20), rng.random() < 0.2
        patience.came(nbytes, marked)
        mark_s, since = (now, 0) if marked else (mark_s, since + nbytes)
        assert patience.until() <= min(now, mark_s + since / RATE) + 7.000001


def test_a_server_that_only_reads_leaves_a_server_that_stops_and_names_it(
    servers: list[Server],
) -> None:
    stuck, relay = servers[0], Relay(True)
    relay.came("stuck", joined(stuck.sharing.host, stuck.sharing.port), "127.0.0.9")
    stuck.has(BLOCKS // 2, *relay.asked("stuck", 1, 1).serve)
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
    answer = link.send(1, 1, good, b"".join(content.digests), mark)
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
    sharing._server.close()


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
