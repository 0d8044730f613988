"""From which server a server reads a version that others have, or are reading already. A pure
table.

::

    Asked --> Read(the parent, and whom that one reads from): then the trainer, who is asked last
    Answered --> the server has the version, or has not; whom it turned away from is a leaf then

Rules: a server reads from one that asked before it, so no two wait for each other; a host sends to
one reader on another host at a time, since a second one would halve the rate of both; at most DEPTH
servers are behind each other; slow ones, and those that accept no connections, are leaves. What is
stale here costs time and nothing else: each block is judged by the trainer's digest."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from titan_grpo.errors import ProtocolError

DEPTH = 16
"""Most servers behind each other: each one adds the time of a few blocks."""

SLOW = 2.0
"""A server that is so much slower than the one it reads from is slow itself."""

LEAF_VERSIONS = 10
"""For how many versions a server is a leaf that another one could not read from."""


@dataclass(frozen=True, slots=True)
class Node:
    """A server. ``version``: what it has, or reads now (``reading``); ``turn``: of its last
    question, in their order; ``parent``: the server that it reads from, empty for the trainer (see
    Relays.above); ``depth``: servers between the trainer and the end of this one. ``rate``: bytes
    per second of its last version."""

    host: str
    zone: str = ""
    serves: bool = True
    version: int | None = None
    turn: int = 0
    parent: str = ""
    reading: bool = False
    depth: int = 0
    rate: float = 0.0
    slow: bool = False
    leaf_until: int = -1


@dataclass(frozen=True, slots=True)
class Relays:
    """All servers of a run that are connected. ``readers``: of each host that sends to another one
    now, the server there."""

    nodes: Mapping[str, Node] = field(default_factory=dict)
    readers: Mapping[str, str] = field(default_factory=dict)
    turns: int = 0

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
    reader = t.readers.get(node.host)
    return _read_no_more(t, reader) if reader and t.nodes[reader].parent == url else t


def _read_no_more(t: Relays, url: str) -> Relays:
    above = t.above(t.nodes[url])
    if above is None or t.readers.get(above.host) != url:
        return t
    readers = dict(t.readers)
    del readers[above.host]
    return replace(t, readers=readers)


def _parent(t: Relays, url: str, version: int) -> str:
    """The best server to read from; empty: the trainer. Same host, same zone, least depth, rate."""
    host, zone, busy = t.nodes[url].host, t.nodes[url].zone, t.readers
    # what leaves most of them out comes first: a thousand servers are looked through here
    free = [
        (n.host != host, n.zone != zone, n.depth, -n.rate, u)
        for u, n in t.nodes.items()
        if n.version == version
        and (n.host not in busy or n.host == host)
        and n.depth < DEPTH
        and u != url
        and n.serves
        and not n.slow
        and n.leaf_until < version
    ]
    return min(free)[-1] if free else ""


def step(t: Relays, event: Event) -> Outcome:
    """The next state, and for Asked whom to read from. ProtocolError for an event about a server
    that is not there, or about another version."""
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
            t, turn = _quiet(t, url), t.turns + 1
            readers, node = t.readers, t.nodes[url]
            depth, name = 1, _parent(t, url, version)
            if name:
                parent = t.nodes[name]
                depth = parent.depth + 1
                if parent.host != node.host:
                    readers = {**readers, parent.host: url}
            me = replace(node, version=version, turn=turn, parent=name, reading=True, depth=depth)
            after = Relays({**t.nodes, url: me}, readers, turn)
            return after, (Read(after.ancestors(url)),)
        case Answered():
            return _answered(t, event), ()


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
        slow = e.rate * SLOW < wanted
        t, now = _read_no_more(t, e.url), replace(node, reading=False, rate=e.rate, slow=slow)
    nodes = {**t.nodes, e.url: now}
    for url in e.lost:
        # who went on to a newer version, or came anew, is not to blame
        if url in nodes and nodes[url].version == e.version:
            nodes[url] = replace(nodes[url], leaf_until=e.version + LEAF_VERSIONS)
    return replace(t, nodes=nodes)
