"""All schedules of servers that read versions from each other: they are told of the next version
while others read from them, die, lie, and stand still.

The table of who reads from whom is production's (protocol.relay). An image has BLOCKS blocks, each
the number of the version that lies there, or WRONG; a ticket is the turn of the question that it
was made for. Each server is a host, or all are on one: then they read each other's memory, which
may be another version's between the answer that a block is there and the read."""

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

from tests.model_check.small import Bug, Hope, Result, search_from
from tests.model_check.tables import Violation
from titan_grpo.protocol import relay as r

BLOCKS = 2
WRONG = -1
TRAINER = ""


class Server(NamedTuple):
    """``asked``: turn of its order, 0: none; ``sources``: (server, ticket) and the trainer last,
    those that are left; ``serves``: ticket that it serves under; ``there``: blocks, from the first
    on, that are there and checked; ``told``: the next one is in the memory of the first source,
    or was."""

    staged: int = 0
    version: int = 0
    asked: int = 0
    begun: bool = False
    sources: tuple[tuple[str, int], ...] = ()
    lost: tuple[str, ...] = ()
    serves: int = 0
    there: int = 0
    told: bool = False
    image: tuple[int, ...] = (0,) * BLOCKS
    frozen: bool = False


class World(NamedTuple):
    """``table``: the number of the table's state (_Model.tables). ``sent``: versions of which the
    trainer sent the first block while they were the newest, each as often as that."""

    servers: tuple[tuple[str, Server], ...]
    table: int = 0
    newest: int = 0
    sent: tuple[int, ...] = ()
    faults: int = 0


@dataclass(frozen=True, slots=True)
class Rules:
    """What decides, which a seeded bug replaces."""

    step: Callable[[r.Relays, r.Event, int], r.Outcome] = r.step
    checks: bool = True
    """A reader compares each block with the trainer's digest."""
    clears: bool = True
    """A server that begins a version has none of its blocks."""
    ends: bool = True
    """A server that begins a version serves the one before no more."""
    checks_memory: bool = True
    """And each block that it reads from another one's memory."""
    waits: bool = True
    """It reads a block there when the other one says that it has it."""
    trainer_last: bool = True
    """The trainer is asked when no other server is left."""

    @property
    def bounds(self) -> "Sequence[Bounds]":
        """Where it shows what they break."""
        beside = not (self.checks_memory and self.waits)
        return BOUNDS[3:4] if beside else BOUNDS


Move = tuple[str, World]


class _Model:
    def __init__(self, rules: Rules, bounds: "Bounds", nodes: dict[str, r.Node]) -> None:
        self._rules, self._bounds = rules, bounds
        self.tables: list[r.Relays] = []
        self._numbers: dict[Hashable, int] = {}
        self._answers: dict[Hashable, tuple[int, tuple[str, ...]]] = {}
        self._number(r.Relays(nodes))

    def _number(self, table: r.Relays) -> int:
        """Equal states of the table have one number: worlds are compared by it."""
        nodes, readers = tuple(sorted(table.nodes.items())), tuple(sorted(table.readers.items()))
        number = self._numbers.setdefault((nodes, readers, table.turns), len(self.tables))
        if number == len(self.tables):
            self.tables.append(table)
        return number

    def table(self, w: World, event: r.Event) -> tuple[World, tuple[str, ...]]:
        key = w.table, event
        if key not in self._answers:
            table, actions = self._rules.step(self.tables[w.table], event, self._bounds.depth)
            read = tuple(url for action in actions for url in action.urls)
            self._answers[key] = self._number(table), read
        number, read = self._answers[key]
        return w._replace(table=number), read

    def moves(self, w: World) -> Iterator[Move]:
        if w.newest < self._bounds.versions:
            yield f"version {w.newest + 1} is published", w._replace(newest=w.newest + 1)
        for url, server in w.servers:
            if server.frozen:
                continue
            if not server.asked and server.staged < w.newest:
                yield self._ask(w, url, server)
            elif server.asked and not server.begun:
                yield self._begin(w, url, server)
            elif server.asked and server.there == BLOCKS:
                yield self._answer(w, url, server)
            elif server.asked:
                yield from self._read(w, url, server)
        for url, server in w.servers:
            yield from self._faults(w, url, server)

    def _ask(self, w: World, url: str, server: Server) -> Move:
        after, above = self.table(w, r.Asked(url, w.newest))
        table = self.tables[after.table]
        for parent in above[:1]:
            _check_parent(url, parent, table, self.tables[w.table])
        sources = tuple((u, table.nodes[u].turn) for u in above)
        if self._rules.trainer_last or not sources:
            sources = (*sources, (TRAINER, 0))
        asks = server._replace(version=w.newest, asked=table.turns, begun=False, sources=sources)
        return f"{url} asks for version {w.newest}: {above or 'the trainer'}", _with(
            after, url, asks._replace(lost=())
        )

    def _begin(self, w: World, url: str, server: Server) -> Move:
        there = 0 if self._rules.clears else min(server.there, BLOCKS - 1)
        serves = server.asked if self._rules.ends or not server.serves else server.serves
        begun = server._replace(begun=True, there=there, serves=serves)
        return f"{url} begins version {server.version}", _with(w, url, begun)

    def _answer(self, w: World, url: str, server: Server) -> Move:
        version = server.version
        if server.image != (version,) * BLOCKS:
            raise Violation(f"{url} stages version {version} with blocks {server.image}")
        after, _ = self.table(w, r.Answered(url, version, True, 1.0, server.lost))
        done = server._replace(asked=0, staged=version, sources=(), lost=())
        return f"{url} has version {version}", _with(after, url, done)

    def _read(self, w: World, url: str, server: Server) -> Iterator[Move]:
        if not server.sources:
            return  # it has nobody to ask: the search for a way to the end shows it
        (source, ticket), block = server.sources[0], server.there
        turned = server._replace(
            sources=server.sources[1:], lost=(*server.lost, source), told=False
        )
        if source == TRAINER:
            first = block == 0 and server.version == w.newest
            sent = (*w.sent, server.version) if first else w.sent
            got = self._got(w, url, server, server.version)
            yield f"{url} reads block {block} from the trainer", got._replace(sent=sent)
            return
        parent, nodes = dict(w.servers)[source], self.tables[w.table].nodes
        beside = source in nodes and nodes[source].host == nodes[url].host
        if beside and (server.told or not self._rules.waits):
            # memory is there whatever its server does meanwhile
            if self._rules.checks_memory and parent.image[block] != server.version:
                yield f"{source}'s memory is not version {server.version}", _with(w, url, turned)
            else:
                lies = parent.image[block]
                yield f"{url} reads {source}'s memory", self._got(w, url, server, lies)
        elif parent.frozen:
            yield f"{url} has waited for {source}", _with(w, url, turned)
        elif parent.serves > ticket or (parent.serves == 0 and parent.asked != ticket):
            yield f"{source} does not serve {url} any more", _with(w, url, turned)
        elif parent.serves == ticket and parent.there > block and beside:
            yield f"{source} has block {block}", _with(w, url, server._replace(told=True))
        elif parent.serves == ticket and parent.there > block:
            lies = parent.image[block]
            if self._rules.checks and lies != server.version:
                if not w.faults:
                    raise Violation(f"{source} serves {lies} for version {server.version}")
                yield f"{source} lies to {url}", _with(w, url, turned)
            else:
                yield f"{url} reads block {block} from {source}", self._got(w, url, server, lies)

    def _got(self, w: World, url: str, server: Server, lies: int) -> World:
        image = tuple(lies if i == server.there else b for i, b in enumerate(server.image))
        return _with(w, url, server._replace(image=image, there=server.there + 1, told=False))

    def _faults(self, w: World, url: str, server: Server) -> Iterator[Move]:
        more = w.faults < self._bounds.faults
        if not more and not server.frozen:
            return  # what the table answers to one more would be thrown away
        failed = w._replace(faults=w.faults + 1)
        gone, _ = self.table(failed, r.Gone(url))
        back, _ = self.table(gone, r.Came(url, self.tables[w.table].nodes[url].host, "", True))
        if more:
            yield f"{url} dies and is back", _with(back, url, Server())
        if server.frozen:
            yield (
                f"{url} is killed and is back",
                _with(back._replace(faults=w.faults), url, Server()),
            )
        elif server.asked:
            yield f"{url} stands still", _with(failed, url, server._replace(frozen=True))
        if server.there and not server.asked and server.image[0] != WRONG:
            lies = server._replace(image=(WRONG, *server.image[1:]))
            yield f"{url}'s memory changes", _with(failed, url, lies)


def _with(w: World, url: str, server: Server) -> World:
    return w._replace(servers=tuple((u, server if u == url else s) for u, s in w.servers))


def _check_parent(url: str, parent: str, table: r.Relays, before: r.Relays) -> None:
    nodes = table.nodes
    if nodes[parent].turn >= nodes[url].turn or nodes[parent].version != nodes[url].version:
        raise Violation(f"{url} reads from {parent}, which may wait for it: {nodes}")
    reading = [n for n in nodes.values() if n.reading and table.above(n) is not None]
    reading = [n for n in reading if n.host != nodes[parent].host]
    readers = sum(n.parent == parent for n in reading)
    if readers > r.DEGREE:
        raise Violation(f"{parent} serves {readers} others at once")
    if before.nodes[parent].leaf_until >= (nodes[url].version or 0):
        raise Violation(f"{url} reads from {parent}, from which another one could not read")


def _check(w: World) -> None:
    """Raise Violation for what no state may show."""
    for version in set(w.sent):
        if not w.faults and w.sent.count(version) > 1:
            raise Violation(f"the trainer sends version {version} twice though nobody failed")


class Bounds(NamedTuple):
    """Of one exploration."""

    servers: int
    versions: int
    faults: int
    beside: bool = False
    """All on one host."""
    depth: int = r.DEPTH
    """Of 2: the others read from the first one, not behind each other."""


BOUNDS = (
    Bounds(2, 2, 1),
    Bounds(3, 2, 0),
    Bounds(3, 1, 1),
    Bounds(2, 2, 1, beside=True),
    Bounds(3, 2, 0, beside=True),
    Bounds(3, 2, 0, depth=2),
    Bounds(3, 1, 1, depth=2),
)
"""Explored one after the other."""

FOUR = (Bounds(4, 1, 0),)
"""As few as show that a host sends to more than DEGREE others."""


def explore_relay(rules: Rules | None = None, bounds: Sequence[Bounds] = BOUNDS) -> Result:
    """All states within each of the bounds; from each of them every server gets the last version
    once faults stop. Ends with the first violation."""
    total = Result()
    for each in bounds:
        result = _explore(each, rules or Rules())
        total.states, total.steps = total.states + result.states, total.steps + result.steps
        total.seconds += result.seconds
        if result.violation:
            total.violation, total.trace = result.violation, result.trace
            break
    return total


def _explore(bounds: Bounds, rules: Rules) -> Result:
    names = "abcd"[: bounds.servers]
    nodes = {u: r.Node("one" if bounds.beside else u) for u in names}
    model = _Model(rules, bounds, nodes)
    return search_from(
        World(tuple((u, Server()) for u in names)),
        model.moves,
        _check,
        bounds.faults,
        Hope(
            lambda w: all(s.staged == bounds.versions for _, s in w.servers),
            lambda w: True,
            "not every server gets the last version although faults stop",
        ),
    )


def _reads(choose: Callable[[r.Relays, r.Asked], str | None]) -> Rules:
    """As the table, but who asks reads from the one that is chosen; None: as the table says."""

    def step(t: r.Relays, e: r.Event, depth: int) -> r.Outcome:
        after, actions = r.step(t, e, depth)
        chosen = choose(after, e) if isinstance(e, r.Asked) else None
        if chosen is None:
            return after, actions
        if chosen == TRAINER:
            return after, (r.Read(()),)
        nodes = {**after.nodes, e.url: replace(after.nodes[e.url], parent=chosen)}
        return replace(after, nodes=nodes), (r.Read((chosen,)),)

    return Rules(step=step)


def _first_other(t: r.Relays, e: r.Asked) -> str:
    return min(url for url in t.nodes if url != e.url)


def _first_with_it(t: r.Relays, e: r.Asked) -> str | None:
    """However many read from it."""
    has = [u for u, n in t.nodes.items() if u != e.url and n.version == e.version]
    has = [u for u in has if t.nodes[u].leaf_until < e.version]
    return min(has, key=lambda u: t.nodes[u].turn) if has else None


def _bug(name: str, breaks: str, rules: Rules, bounds: Sequence[Bounds] = ()) -> Bug:
    return Bug(name, breaks, partial(explore_relay, rules, bounds or rules.bounds))


RELAY_BUGS = (
    _bug(
        "two servers may be told to read from each other",
        "a server reads from one that asked before it",
        _reads(_first_other),
    ),
    _bug(
        "a server serves any number of others",
        "a host sends to so many readers at a time and no more",
        _reads(_first_with_it),
        FOUR,
    ),
    _bug(
        "every server reads from the trainer",
        "a version leaves the trainer once while no server fails",
        _reads(lambda t, e: TRAINER),
    ),
    _bug(
        "a server does not check what another one sends",
        "a server that lies costs its readers a block and no more",
        Rules(checks=False),
    ),
    _bug(
        "a server that begins a version says that it has its blocks",
        "a server serves what it has checked and nothing else",
        Rules(clears=False),
    ),
    _bug(
        "a server serves the next version under the ticket of the one before",
        "a server that is told of the next version ends its readers of this one",
        Rules(ends=False),
    ),
    _bug(
        "a server does not check what it reads in another one's memory",
        "memory that is written anew while another server reads it costs that one a block",
        Rules(checks_memory=False),
    ),
    _bug(
        "a server reads another one's memory before that one has the block",
        "a server beside another one asks it for each block before it reads its memory",
        Rules(waits=False),
    ),
    _bug(
        "the trainer is not asked where other servers were named",
        "the trainer is the last source of every server",
        Rules(trainer_last=False),
    ),
)
