"""From which server a server reads a version that others have, or are reading already. A pure
table.

::

    Asked --> Read(the parent, and whom that one reads from): then the trainer, who is asked last
    Answered --> the server has the version, or has not; whom it turned away from is a leaf then

Rules: a server reads from one that asked before it, so no two wait for each other; at most DEPTH
servers are behind each other; a host sends to one reader on another host, and to DEGREE of them
where no other host could, which halves the rate of both; before that the trainer's hosts send to as
many servers as they are; slow servers, and those that accept no connections, are leaves. Then a
trainer host sends its part about as often as there are trainer hosts, however many servers there
are (with one reader a host: servers / DEPTH times), and all have it in twice the time of one. What
is stale here costs time and nothing else: each block is judged by the trainer's digest."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from titan_grpo.errors import ProtocolError

DEPTH = 16
"""Most servers behind each other: each one adds the time of a few blocks."""

DEGREE = 2
"""Most readers on other hosts that a host sends to at a time."""

SLOW = 2.0
"""A server that is so much slower than the one it reads from is slow itself, and DEGREE times as
much where it was not the only reader."""

LEAF_VERSIONS = 10
"""For how many versions a server is a leaf that another one could not read from."""


@dataclass(frozen=True, slots=True)
class Node:
    """A server. ``version``: what it has, or reads now (``reading``); ``turn``: of its last
    question, in their order; ``parent``: the server that it reads from, empty for the trainer (see
    Relays.above); ``depth``: servers between the trainer and the end of this one. ``shared``: the
    parent's host sends, or sent meanwhile, to another reader too. ``rate``: bytes per second of its
    last version."""

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
    """All servers of a run that are connected. ``readers``: of each host that sends to others now,
    the servers there, at most DEGREE. ``roots``: servers that read from the trainer before a host
    sends to a second one."""

    nodes: Mapping[str, Node] = field(default_factory=dict)
    readers: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    turns: int = 0
    roots: int = 1

    def above(self, node: Node) -> Node | None:
        """The parent, unless it has asked for another version since, came anew, or is gone."""
        above = self.nodes.get(node.parent)
        if above is None or above.version != node.version or above.turn >= node.turn:
            return None
        return above

    def ancestors(self, url: str) -> tuple[str, ...]:
        """Whom a server reads from: its parent, and that one's, if they have the same version."""
        node = self.nodes[url]
        out: list[str] = []
        while len(out) < 2 and (above := self.above(node)) is not None:
            out.append(node.parent)
            node = above
        return tuple(out)


# Events.


@dataclass(frozen=True, slots=True)
class Came:
    """A server has joined its lane. ``serves``: others may read from it."""

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
    """A server is about to read a version; what it had before, it has no more."""

    url: str
    version: int


@dataclass(frozen=True, slots=True)
class Answered:
    """It has the version, or gave up. ``rate``: its bytes per second; ``lost``: servers that it
    turned away from."""

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
    """``url`` reads no more, and what it had it has no more: no server reads from it."""
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
    """The best server to read from; empty: the trainer. Same host, same zone, no reader yet, least
    depth, rate."""
    host, zone = t.nodes[url].host, t.nodes[url].zone
    busy = {place: len(readers) for place, readers in t.readers.items()}
    # what leaves most of them out comes first: a thousand servers are looked through here
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
    """Servers that had to read the version from it."""
    return sum(n.version == version and n.depth == 1 for n in t.nodes.values())


def step(t: Relays, event: Event, depth: int = DEPTH) -> Outcome:
    """The next state, and for Asked whom to read from. ProtocolError for an event about a server
    that is not there, or about another version. ``depth``: see DEPTH."""
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
        # behind a slow one all are slow: only what is slower than its parent is to blame
        if above is not None:
            wanted = above.rate
        else:
            wanted = max((n.rate for u, n in t.nodes.items() if u != e.url), default=0.0)
        slow = e.rate * SLOW * (DEGREE if node.shared else 1) < wanted
        t, now = _read_no_more(t, e.url), replace(node, reading=False, rate=e.rate, slow=slow)
    nodes = {**t.nodes, e.url: now}
    for url in e.lost:
        # who went on to a newer version, or came anew, is not to blame
        if url in nodes and nodes[url].version == e.version:
            nodes[url] = replace(nodes[url], leaf_until=e.version + LEAF_VERSIONS)
    return replace(t, nodes=nodes)
