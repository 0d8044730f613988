"""Relays: servers that read a version from other servers, which have it or are reading it. A pure
table.

::

    Asked --> Read(the parent, and the parent's parent); the trainer is the last resort
    Answered --> the server has the version, or not; a parent that failed becomes a leaf

Rules: a server reads only from servers that asked before it, so no two wait for each other; chains
have at most DEPTH servers; a host sends to one reader on another host, and to DEGREE of them if no
host is free, which halves the rate of both; before such a second reader, the trainer feeds as many
servers as it has hosts; slow servers, and those that accept no connections, are leaves. Then a
trainer host sends its part about as often as there are trainer hosts, however many servers there
are (with one reader a host: servers / DEPTH times), and all have it in twice the time of one. Stale
entries here only cost time: each block is checked against the trainer's digest."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from titan_grpo.errors import ProtocolError

DEPTH = 16
"""Most servers in a chain: each one adds the time of a few blocks."""

DEGREE = 2
"""Most readers on other hosts that a host sends to at a time."""

SLOW = 2.0
"""A server this many times slower than its parent is slow; DEGREE times as many if it was not the
parent host's only reader."""

LEAF_VERSIONS = 10
"""Versions for which a server stays a leaf after another one could not read from it."""


@dataclass(frozen=True, slots=True)
class Node:
    """A server. ``version``: what it has, or reads now (``reading``); ``turn``: number of its last
    Asked; ``parent``: the server that it reads from, empty for the trainer (see Relays.above);
    ``depth``: its place in the chain, 1 for a reader of the trainer. ``shared``: the parent's host
    sends, or sent during this read, to another reader too. ``rate``: bytes per second of the last
    version that it read from another host."""

    host: str
    zone: str = ""
    serves: bool = True
    version: int | None = None
    turn: int = 0
    parent: str = ""
    reading: bool = False
    depth: int = 0
    shared: bool = False
    rate: float = 0.0
    slow: bool = False
    leaf_until: int = -1


@dataclass(frozen=True, slots=True)
class Relays:
    """All connected servers of a run. ``readers``: sending host -> the servers on other hosts that
    read from it now, at most DEGREE. ``roots``: servers that read from the trainer before any host
    sends to a second reader."""

    nodes: Mapping[str, Node] = field(default_factory=dict)
    readers: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    turns: int = 0
    roots: int = 1

    def above(self, node: Node) -> Node | None:
        """Return the parent; None if it has asked for another version since, has connected again,
        or is gone."""
        above = self.nodes.get(node.parent)
        if above is None or above.version != node.version or above.turn >= node.turn:
            return None
        return above

    def ancestors(self, url: str) -> tuple[str, ...]:
        """Return a server's parent and the parent's parent, if they have the same version."""
        node = self.nodes[url]
        out: list[str] = []
        while len(out) < 2 and (above := self.above(node)) is not None:
            out.append(node.parent)
            node = above
        return tuple(out)


# Events.


@dataclass(frozen=True, slots=True)
class Came:
    """A server has connected to its lane. ``serves``: others may read from it."""

    url: str
    host: str
    zone: str
    serves: bool


@dataclass(frozen=True, slots=True)
class Gone:
    """A lane has closed its connection."""

    url: str


@dataclass(frozen=True, slots=True)
class Asked:
    """A server is about to read a version, over the one that it had."""

    url: str
    version: int


@dataclass(frozen=True, slots=True)
class Answered:
    """The server has the version, or gave up. ``rate``: bytes per second; ``lost``: servers that it
    could not read from."""

    url: str
    version: int
    ok: bool
    rate: float = 0.0
    lost: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Read:
    """Read from these servers, the first one first."""

    urls: tuple[str, ...]


Event = Came | Gone | Asked | Answered
Outcome = tuple[Relays, tuple[Read, ...]]


def _quiet(t: Relays, url: str) -> Relays:
    """Remove ``url`` as a reader, and all readers of ``url``: its version is gone."""
    node = t.nodes.get(url)
    if node is None:
        return t
    t = _read_no_more(t, url)
    for reader in t.readers.get(node.host, ()):
        if t.nodes[reader].parent == url:
            t = _read_no_more(t, reader)
    return t


def _read_no_more(t: Relays, url: str) -> Relays:
    above = t.above(t.nodes[url])
    if above is None or url not in (now := t.readers.get(above.host, ())):
        return t
    readers = {**t.readers, above.host: tuple(reader for reader in now if reader != url)}
    if not readers[above.host]:
        del readers[above.host]
    return replace(t, readers=readers)


def _parent(t: Relays, url: str, version: int, depth: int) -> str:
    """Return the best server to read from; empty: the trainer. Preferred in this order: same host,
    same zone, fewest readers, least depth, highest rate."""
    host, zone = t.nodes[url].host, t.nodes[url].zone
    busy = {place: len(readers) for place, readers in t.readers.items()}
    # The most selective condition is first: this scans a thousand servers.
    free = [
        (n.host != host, n.zone != zone, load, n.depth, -n.rate, u)
        for u, n in t.nodes.items()
        if n.version == version
        and ((load := busy.get(n.host, 0)) < DEGREE or n.host == host)
        and n.depth < depth
        and u != url
        and n.serves
        and not n.slow
        and n.leaf_until < version
    ]
    if not free:
        return ""
    elsewhere, _, load, _, _, best = min(free)
    return "" if elsewhere and load and _at_the_trainer(t, version) < t.roots else best


def _at_the_trainer(t: Relays, version: int) -> int:
    """Return how many servers read the version from the trainer."""
    return sum(n.version == version and n.depth == 1 for n in t.nodes.values())


def step(t: Relays, event: Event, depth: int = DEPTH) -> Outcome:
    """Return the next state, and for Asked the servers to read from. ``depth``: in place of DEPTH.
    Raises ProtocolError for an unknown server, or an Answered of another version."""
    if isinstance(event, Asked | Answered) and event.url not in t.nodes:
        raise ProtocolError(f"event {event!r} is about a server that has not come: {t!r}")
    match event:
        case Came(url, host, zone, serves):
            t = _quiet(t, url)
            return replace(t, nodes={**t.nodes, url: Node(host, zone, serves)}), ()
        case Gone(url):
            nodes = dict((t := _quiet(t, url)).nodes)
            nodes.pop(url, None)
            return replace(t, nodes=nodes), ()
        case Asked(url, version):
            return _asked(_quiet(t, url), url, version, depth)
        case Answered():
            return _answered(t, event), ()


def _asked(t: Relays, url: str, version: int, most: int) -> Outcome:
    name, turn = _parent(t, url, version, most), t.turns + 1
    nodes, readers = dict(t.nodes), dict(t.readers)
    depth, beside = 1, tuple[str, ...]()
    if name:
        depth, host = nodes[name].depth + 1, nodes[name].host
        if host != nodes[url].host:
            beside = readers.get(host, ())
            readers[host] = (*beside, url)
    for other in beside:
        nodes[other] = replace(nodes[other], shared=True)
    nodes[url] = replace(
        nodes[url], version=version, turn=turn, parent=name, reading=True, depth=depth,
        shared=bool(beside),
    )  # fmt: skip
    after = replace(t, nodes=nodes, readers=readers, turns=turn)
    return after, (Read(after.ancestors(url)),)


def _answered(t: Relays, e: Answered) -> Relays:
    node = t.nodes[e.url]
    if not node.reading or node.version != e.version:
        raise ProtocolError(f"event {e!r} is not about what the server reads: {node!r}")
    above = t.above(node)
    if not e.ok:
        t, now = _quiet(t, e.url), replace(node, version=None, reading=False, parent="")
    else:
        # All readers behind a slow server are slow: blame one only if it is slower than its parent.
        if above is not None:
            wanted = above.rate
        else:
            wanted = max((n.rate for u, n in t.nodes.items() if u != e.url), default=0.0)
        slow = e.rate * SLOW * (DEGREE if node.shared else 1) < wanted
        beside = above is not None and above.host == node.host
        # No link has the memory's rate: beside it, all others would be slow.
        rate = node.rate if beside else e.rate
        t, now = _read_no_more(t, e.url), replace(node, reading=False, rate=rate, slow=slow)
    nodes = {**t.nodes, e.url: now}
    for url in e.lost:
        # A server that has a newer version, or has connected again, is not to blame.
        if url in nodes and nodes[url].version == e.version:
            nodes[url] = replace(nodes[url], leaf_until=e.version + LEAF_VERSIONS)
    return replace(t, nodes=nodes)
