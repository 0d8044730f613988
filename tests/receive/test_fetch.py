"""Transfers in ranges from real sources that lie, vanish or are overwritten: what is staged is what
the trainer hashed."""

import threading
from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise

import pytest
import torch

from titan_grpo.config import WeightSync
from titan_grpo.errors import TransferFailed
from titan_grpo.layout.image import Hashing, SharedImage
from titan_grpo.layout.manifest import Manifest, Part
from titan_grpo.protocol.marks import mark_bytes, marks
from titan_grpo.protocol.messages import Kind, RangeSource, Staged
from titan_grpo.receive import fetch as module
from titan_grpo.receive.fetch import Content, Fetch, Open, RangeReader, TcpReader
from titan_grpo.sync.link import LaneLink, LinkOptions
from titan_grpo.sync.transports.channel import ReceiverChannel, connect
from titan_grpo.sync.transports.range_server import RangeServer

BLOCK, BLOCKS = 4096, 24
SOON_S = 60.0
"""What ends for another reason than its deadline ends within it, however busy the machine is."""


class Site:
    """A version, sources that serve it, and a receiver's image."""

    def __init__(self) -> None:
        self.manifest = Manifest.build([("a", "uint8", (BLOCK * BLOCKS - 100,))], BLOCK)
        self.good = torch.randint(0, 256, (self.manifest.total_bytes,), dtype=torch.uint8)
        hashing = Hashing("xxh3")
        digests = hashing.blocks(self.good.numpy().data, self.manifest)
        self.content = Content(self.manifest, digests, hashing)
        self.image = SharedImage.create(self.manifest.total_bytes, "test fetch")
        self.server = RangeServer()
        self.port = self.server.listen("127.0.0.1")
        self.marks: list[int] = []

    def source(self, content: torch.Tensor) -> tuple[str, Open]:
        """A source of these bytes: its ticket, and how to open it."""
        ticket = self.server.grant(content.numpy().data, None, None)
        return ticket, partial(TcpReader, RangeSource("127.0.0.1", self.port, ticket), None, SOON_S)

    def fetch(self, *sources: Open, threads: int = 3) -> Fetch:
        made = Fetch(self.image, self.content, {0: sources}, 4 * BLOCK)
        made.run(threads, SOON_S, marks(self.manifest.total_bytes, 4 * BLOCK), self.marks.append)
        return made

    def whole(self) -> bool:
        return torch.equal(self.image.tensor(), self.good)


@pytest.fixture
def site(monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    monkeypatch.setattr(module, "RANGE_BYTES", 2 * BLOCK)  # 12 ranges in an image of 96 KiB
    made = Site()
    yield made
    made.server.close()
    made.image.close()


class Hooked:
    """A reader that calls ``before`` ahead of each range."""

    def __init__(self, reader: RangeReader, before: Callable[[int], None]) -> None:
        self._reader, self._before = reader, before

    def read_into(self, offset: int, *views: memoryview) -> None:
        self._before(offset)
        self._reader.read_into(offset, *views)

    def close(self) -> None:
        self._reader.close()


@pytest.mark.parametrize("threads", [1, 3, 50])
def test_a_version_arrives_and_every_mark_is_passed_in_order(site: Site, threads: int) -> None:
    fetch = site.fetch(site.source(site.good)[1], threads=threads)
    assert (fetch.error, fetch.bad_block) == ("", -1)
    assert site.whole()
    assert site.marks == list(marks(site.manifest.total_bytes, 4 * BLOCK))


def test_a_transfer_has_few_marks_however_large_it_is() -> None:
    total, bucket = 2 << 40, 64 << 20
    found = marks(total, bucket)
    assert len(found) <= 512
    assert found[-1] == total
    assert {after - before for before, after in pairwise((0, *found))} == {
        mark_bytes(total, bucket)
    }
    assert mark_bytes(total, bucket) % bucket == 0
    assert marks(3 * bucket + 1, bucket) == (bucket, 2 * bucket, 3 * bucket, 3 * bucket + 1)


def test_a_lane_waits_for_a_mark_as_long_as_its_bytes_may_take() -> None:
    """Of several buckets, where a bucket's time and progress_deadline_s are less."""
    bucket, rate = 4096, 1 << 16
    manifest = Manifest.build([("a", "uint8", (512 * 256 * bucket,))], bucket)
    config = WeightSync(
        block_bytes=bucket, bucket_bytes=bucket, progress_deadline_s=0.2, min_rate=rate
    )
    link = LaneLink("run", 1, manifest, LinkOptions(config, "tcp", "127.0.0.1"))
    hello = link.open()
    at = hello.host, hello.port
    sock = connect(at, hello.ticket, None, SOON_S, "trainer")
    receiver = ReceiverChannel(sock, "", lambda _: None)
    answer = Staged(1, 1, True, "").to_json().encode()
    timer = threading.Timer(0.7, receiver.send, (Kind.STAGED, 1, answer))
    timer.start()
    assert link._moving(1, None, 0).ok
    timer.join()
    link.close()


def test_a_bucket_is_whole_ranges_so_its_mark_waits_for_no_byte_after_it(site: Site) -> None:
    """Before, a range was 4 MiB whatever the bucket: all marks of a smaller image came at once."""
    _, open_ = site.source(site.good)
    read: list[int] = []
    sources = {0: [lambda: Hooked(open_(), read.append)]}
    made = Fetch(site.image, site.content, sources, BLOCK)
    made.run(1, SOON_S, marks(site.manifest.total_bytes, BLOCK), site.marks.append)
    assert read == list(range(0, site.manifest.total_bytes, BLOCK))
    assert made.error == ""


def test_a_source_that_lies_is_replaced_by_the_next_one(site: Site) -> None:
    bad = site.good.clone()
    bad[5 * BLOCK + 3] ^= 1
    fetch = site.fetch(site.source(bad)[1], site.source(site.good)[1])
    assert fetch.error == ""
    assert site.whole()


def test_a_block_that_differs_at_every_source_is_named_and_nothing_is_staged(site: Site) -> None:
    bad = site.good.clone()
    bad[5 * BLOCK + 3] ^= 1
    fetch = site.fetch(site.source(bad)[1], site.source(bad.clone())[1])
    assert fetch.bad_block == 5
    assert "block 5 of 24" in fetch.error
    assert len(site.marks) < BLOCKS // 4


def test_what_is_missing_is_read_again_when_a_connection_breaks(site: Site) -> None:
    _, open_ = site.source(site.good)
    broken: list[int] = []

    def break_once(reader: RangeReader, offset: int) -> None:
        if offset == 6 * BLOCK and not broken:
            broken.append(offset)
            assert isinstance(reader, TcpReader)
            reader._socket.close()

    def hooked() -> RangeReader:
        reader = open_()
        return Hooked(reader, partial(break_once, reader))

    assert site.fetch(hooked).error == ""
    assert broken
    assert site.whole()


def test_the_rest_comes_from_another_source_when_one_vanishes(site: Site) -> None:
    ticket, open_ = site.source(site.good)
    taken = []

    def vanish(offset: int) -> None:
        taken.append(offset)
        if len(taken) == 4:
            site.server.revoke(ticket)

    fetch = site.fetch(lambda: Hooked(open_(), vanish), site.source(site.good)[1])
    assert fetch.error == ""
    assert len(taken) >= 4
    assert site.whole()


def test_a_version_whose_only_source_vanishes_is_not_staged(site: Site) -> None:
    ticket, open_ = site.source(site.good)

    def vanish(offset: int) -> None:
        if offset >= 6 * BLOCK:
            site.server.revoke(ticket)

    fetch = site.fetch(lambda: Hooked(open_(), vanish))
    assert fetch.error
    assert fetch.bad_block == -1


def test_a_slot_that_is_reused_under_its_reader_is_noticed(site: Site) -> None:
    slot = site.good.clone()
    _, open_ = site.source(slot)

    def reuse(offset: int) -> None:
        if offset >= 6 * BLOCK:
            slot.add_(1)  # the trainer writes the next version

    fetch = site.fetch(lambda: Hooked(open_(), reuse), threads=1)
    assert fetch.error
    assert fetch.bad_block >= 6


def test_one_thread_finishes_what_the_others_cannot_connect_for(site: Site) -> None:
    """A source that serves many receivers accepts only some of their connections."""
    _, open_ = site.source(site.good)
    turn = threading.Lock()
    opened: list[int] = []

    def only_one() -> RangeReader:
        with turn:
            if opened:
                raise TransferFailed("planted: no more connections")
            opened.append(1)
        return open_()

    assert site.fetch(only_one, threads=4).error == ""
    assert site.whole()


def test_a_source_that_another_thread_cannot_open_serves_the_thread_that_has_it_open(
    site: Site,
) -> None:
    """Before, the thread that had it open gave up with the other one: all was sent again."""
    _, open_ = site.source(site.good)
    refused = threading.Event()
    opened: list[threading.Thread] = []

    def wait_refused(offset: int) -> None:
        refused.wait(SOON_S)

    def only_one() -> RangeReader:
        opened.append(threading.current_thread())
        if opened[0] is not threading.current_thread():
            raise TransferFailed("planted: no more connections")
        return Hooked(open_(), wait_refused)

    def never() -> RangeReader:
        refused.set()  # the thread without a connection asks here, after the first source
        raise TransferFailed("planted: not there")

    assert site.fetch(only_one, never, threads=2).error == ""
    assert refused.is_set()
    assert site.whole()


def test_a_block_that_was_bad_is_not_named_where_the_range_failed_for_another_reason(
    site: Site,
) -> None:
    bad = site.good.clone()
    bad[3] ^= 1
    _, lying = site.source(bad)
    asked: list[int] = []

    def lie_once(offset: int) -> None:
        asked.append(offset)
        if len(asked) > 1:
            raise TransferFailed("planted: gone")

    fetch = site.fetch(lambda: Hooked(lying(), lie_once), threads=1)
    assert fetch.error == "planted: gone"
    assert fetch.bad_block == -1


def test_a_thread_stays_with_a_host_so_a_version_of_many_hosts_costs_few_connections() -> None:
    """Before, once one part had ended, threads changed the part after most ranges, until each had
    connections to all hosts."""
    hosts = 16
    ends = [BLOCK * end for end in (0, 5, *range(26, 16 * 20 + 1, 21))]
    parts = [Part((extent,)) for extent in pairwise(ends)]
    manifest = Manifest.build([("a", "uint8", (ends[-1],))], BLOCK).with_parts(parts)
    good = torch.randint(0, 256, (manifest.total_bytes,), dtype=torch.uint8)
    hashing = Hashing("xxh3")
    content = Content(manifest, hashing.blocks(good.numpy().data, manifest), hashing)
    server, in_step = RangeServer(), threading.Barrier(hosts)
    opened: list[str] = []
    at = "127.0.0.1", server.listen("127.0.0.1")

    def wait(offset: int) -> None:
        in_step.wait(SOON_S)

    def open_(ticket: str) -> RangeReader:
        opened.append(ticket)
        reader = TcpReader(RangeSource(*at, ticket), None, SOON_S)
        return Hooked(reader, wait)

    tickets = [server.grant(good.numpy().data, None, None, part) for part in parts]
    sources = {part: [partial(open_, ticket)] for part, ticket in enumerate(tickets)}
    with SharedImage.create(manifest.total_bytes, "test fetch") as image:
        fetch = Fetch(image, content, sources, BLOCK)
        fetch.run(4, SOON_S, (), lambda _: None)
        assert fetch.error == ""
        assert torch.equal(image.tensor(), good)
    server.close()
    assert hosts <= len(opened) <= 2 * hosts


def test_a_fetch_without_a_source_says_so(site: Site) -> None:
    assert "no source" in site.fetch().error
