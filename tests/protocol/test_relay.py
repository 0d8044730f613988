"""Who reads from whom: the table of servers that read versions from each other."""

import random
from collections import Counter
from dataclasses import replace

import pytest

from titan_grpo.errors import ProtocolError
from titan_grpo.protocol import relay
from titan_grpo.protocol.relay import Answered, Asked, Came, Gone, Relays, step


class Table:
    def __init__(self, **hosts: str) -> None:
        """``hosts``: of each server, "host" or "host/zone"."""
        self.now = Relays()
        for url, place in hosts.items():
            host, _, zone = place.partition("/")
            self.do(Came(url, host, zone, True))

    def do(self, event: relay.Event) -> None:
        self.now, _ = step(self.now, event)

    def asks(self, url: str, version: int = 1) -> tuple[str, ...]:
        self.now, (read,) = step(self.now, Asked(url, version))
        return read.urls


def test_servers_on_hosts_of_their_own_stand_behind_each_other() -> None:
    table = Table(a="1", b="2", c="3", d="4")
    assert [table.asks(url) for url in "abcd"] == [(), ("a",), ("b", "a"), ("c", "b")]


def test_a_version_that_nobody_has_comes_from_the_trainer() -> None:
    table = Table(a="1", b="2")
    table.asks("a", 1)
    assert table.asks("b", 2) == ()


def test_the_same_host_goes_before_the_same_zone_and_that_before_another() -> None:
    table = Table(a="1/x", b="2/y", c="3/y", d="3/z", e="4/y")
    table.asks("a")
    assert table.asks("b") == ("a",)
    assert table.asks("c") == ("b", "a")
    assert table.asks("d")[0] == "c"
    assert table.asks("e")[0] in "cd"


def test_all_servers_of_a_host_take_a_version_over_its_link_once() -> None:
    table = Table(a="1", b="2", c="2", d="2", e="2")
    assert [table.asks(url)[:1] for url in "abcde"] == [(), ("a",), ("b",), ("b",), ("b",)]


def test_a_host_sends_to_two_others_at_a_time_and_to_the_next_when_one_of_them_has_it() -> None:
    table = Table(a="1", b="2", c="3", d="4")
    for leaf in "bcd":
        table.do(Came(leaf, leaf, "", False))
    table.asks("a")
    assert [table.asks(url) for url in "bcd"] == [("a",), ("a",), ()]
    table.do(Answered("b", 1, True, 1.0))
    table.do(Answered("d", 1, False))
    assert table.asks("d") == ("a",)


def test_a_host_that_sends_to_none_goes_before_one_that_does() -> None:
    table = Table(a="1", b="2", c="3", d="4")
    assert [table.asks(url)[:1] for url in "abc"] == [(), ("a",), ("b",)]
    table.do(Answered("c", 1, True, 1.0))
    assert table.asks("d")[0] == "b"


def test_servers_stand_at_most_depth_behind_each_other() -> None:
    names = [f"s{i:02}" for i in range(relay.DEPTH + 2)]
    table = Table(**{name: name for name in names})
    firsts = [table.asks(name)[:1] for name in names]
    assert firsts[relay.DEPTH :] == [("s00",), (names[relay.DEPTH],)]
    assert max(node.depth for node in table.now.nodes.values()) == relay.DEPTH


def test_a_thousand_servers_take_a_version_from_the_trainer_once() -> None:
    names = [f"s{i:04}" for i in range(1000)]
    table = Table(**{name: name for name in names})
    assert [name for name in names if not table.asks(name)] == ["s0000"]
    children = Counter(node.parent for node in table.now.nodes.values() if node.parent)
    assert max(children.values()) == relay.DEGREE


def test_trainer_hosts_send_to_as_many_servers_before_a_server_sends_to_a_second_one() -> None:
    table = Table(a="1")
    table.now = replace(table.now, roots=3)
    for leaf in "bcde":
        table.do(Came(leaf, leaf, "", False))
    assert [table.asks(url) for url in "abcde"] == [(), ("a",), (), (), ("a",)]


def test_a_version_that_the_trainer_has_sent_comes_from_a_server_with_a_reader() -> None:
    table = Table(a="1", b="2", c="3")
    table.do(Came("b", "2", "", False))
    assert table.asks("a") == ()
    table.do(Answered("a", 1, True, 1.0))
    assert [table.asks(url) for url in "bc"] == [("a",), ("a",)]
    assert table.asks("a", 2) == ()
    assert table.asks("c", 2) == ("a",)


@pytest.mark.parametrize(("rate", "slow"), [(2.5, False), (2.0, True)])
def test_a_reader_beside_another_one_may_take_twice_as_long(rate: float, slow: bool) -> None:
    table = Table(a="1", b="2", c="3")
    table.do(Came("b", "2", "", False))
    for url in "abc":
        table.asks(url)
    for url in "abc":
        table.do(Answered(url, 1, True, 10.0 if url == "a" else rate))
    assert [table.now.nodes[url].slow for url in "abc"] == [False, slow, slow]


def test_a_server_half_as_fast_as_its_parent_is_a_leaf_and_those_behind_it_are_not() -> None:
    table = Table(a="1", b="2", c="3")
    assert [table.asks(url)[:1] for url in "abc"] == [(), ("a",), ("b",)]
    for url, rate in (("a", 10.0), ("b", 4.0), ("c", 4.0)):
        table.do(Answered(url, 1, True, rate))
    assert [table.now.nodes[url].slow for url in "abc"] == [False, True, False]
    table.asks("b", 2)
    assert table.asks("c", 2) == ()
    table.do(Answered("b", 2, True, 10.0))
    table.asks("b", 3)
    assert table.asks("c", 3) == ("b",)


@pytest.mark.parametrize(("rate", "slow"), [(5.0, False), (4.0, True)])
def test_one_that_reads_from_the_trainer_is_slow_beside_the_fastest_other(
    rate: float, slow: bool
) -> None:
    table = Table(a="1", b="2")
    table.asks("a", 1)
    table.do(Answered("a", 1, True, 10.0))
    assert table.asks("b", 2) == ()
    table.do(Answered("b", 2, True, rate))
    assert table.now.nodes["b"].slow is slow


def test_nobody_is_slow_beside_a_server_that_takes_a_version_from_its_own_hosts_memory() -> None:
    table = Table(a="1", b="1", c="2", d="3")
    for version in range(3):
        # b asks when a has the version: it takes it at the memory's rate.
        for url, above, rate in (
            ("a", (), 1.0),
            ("c", ("a",), 1.0),
            ("d", ("a",), 1.0),
            ("b", ("a",), 10.0),
        ):
            assert table.asks(url, version) == above
            table.do(Answered(url, version, True, rate))
    assert not any(node.slow for node in table.now.nodes.values())


def test_the_same_zone_goes_before_the_shorter_way() -> None:
    table = Table(a="1/x", b="2/y", c="3/y")
    table.asks("a")
    table.asks("b")
    table.do(Answered("b", 1, True, 1.0))
    assert table.asks("c") == ("b", "a")


def test_the_faster_one_goes_before() -> None:
    table = Table(a="1", b="2", c="3", d="4")
    for leaf in "cd":
        table.do(Came(leaf, leaf, "", False))
    for url in "acdb":  # c and d read from a, so b reads from the trainer
        table.asks(url)
    for url, rate in (("a", 3.0), ("c", 3.0), ("d", 3.0), ("b", 5.0)):
        table.do(Answered(url, 1, True, rate))
    table.do(Came("e", "5", "", True))
    assert table.asks("e") == ("b",)


def test_a_server_that_asks_again_does_not_read_from_itself() -> None:
    table = Table(a="1", b="2")
    table.asks("a")
    assert table.asks("a") == ()
    assert (table.now.nodes["a"].parent, table.now.nodes["a"].depth) == ("", 1)


def test_nobody_reads_from_a_server_that_gave_up() -> None:
    table = Table(a="1", b="2")
    table.asks("a")
    table.do(Answered("a", 1, False))
    assert table.asks("b") == ()


def test_one_that_another_could_not_read_from_is_a_leaf_for_some_versions() -> None:
    table = Table(a="1", b="2")
    table.asks("a", 1)
    table.asks("b", 1)
    table.do(Answered("b", 1, True, 1.0, lost=("a",)))
    last = 1 + relay.LEAF_VERSIONS
    for version, above in ((2, ()), (last, ()), (last + 1, ("a",))):
        table.asks("a", version)
        assert table.asks("b", version) == above


def test_one_that_went_on_to_the_next_version_is_not_to_blame() -> None:
    table = Table(a="1", b="2")
    table.asks("a", 1)
    table.asks("b", 1)
    table.asks("a", 2)
    table.do(Answered("b", 1, True, 1.0, lost=("a",)))
    assert table.asks("b", 2) == ("a",)


def test_nobody_is_told_to_read_from_a_server_that_left() -> None:
    table = Table(a="1", b="2", c="3")
    table.asks("a")
    table.asks("b")
    table.do(Gone("a"))
    assert table.asks("c") == ("b",)


def test_an_event_of_a_server_that_has_not_come_is_an_error() -> None:
    with pytest.raises(ProtocolError, match="has not come"):
        step(Relays(), Asked("a", 1))
    table = Table(a="1")
    with pytest.raises(ProtocolError, match="not about what the server reads"):
        table.do(Answered("a", 1, True))
    table.asks("a", 2)
    with pytest.raises(ProtocolError, match="not about what the server reads"):
        table.do(Answered("a", 1, True))


def readers(table: Relays) -> dict[str, set[str]]:
    """Of each host, the servers on others that read from it: looked through anew."""
    out: dict[str, set[str]] = {}
    for url, node in table.nodes.items():
        above = table.above(node)
        if node.reading and above is not None and above.host != node.host:
            out.setdefault(above.host, set()).add(url)
    assert all(len(urls) <= relay.DEGREE for urls in out.values()), "a host sends to too many"
    return out


@pytest.mark.parametrize("seed", range(20))
def test_the_readers_of_each_host_are_known_whatever_comes(seed: int) -> None:
    draw, table = random.Random(seed), Table()
    for _ in range(300):
        url, now = draw.choice("abcdef"), table.now
        node = now.nodes.get(url)
        if node is None or draw.random() < 0.1:
            table.do(Came(url, draw.choice("123"), "", draw.random() < 0.9))
        elif draw.random() < 0.1:
            table.do(Gone(url))
        elif node.reading and draw.random() < 0.7:
            lost = tuple(draw.sample("abcdef", draw.choice((0, 0, 1))))
            rate, ok = draw.choice((1.0, 1.0, 3.0)), draw.random() < 0.9
            table.do(Answered(url, node.version or 0, ok, rate, lost))
        else:
            table.asks(url, max(node.version or 0, draw.randrange(4)))
        known = {host: set(urls) for host, urls in table.now.readers.items()}
        assert known == readers(table.now)
