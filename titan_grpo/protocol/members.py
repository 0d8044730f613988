"""Which servers belong to the run. A pure table: configuration, file and commands decide which are
wanted, lanes which are present.

::

    wanted = (configured or listed in the file or added by command) and not removed by command

    (absent) --wanted--> PRESENT (has a lane) --not wanted--> LEAVING (its lane ends) --Ended--> ..
                                                    `-- wanted again: joins when its lane has ended

A command outweighs the file: a removed server stays removed until a command adds it, or the file
drops it and lists it again. The last wanted server cannot be removed. An empty file changes
nothing: a file may be empty for a moment while it is rewritten."""

from dataclasses import dataclass, replace

from titan_grpo.errors import ProtocolError

Urls = frozenset[str]


@dataclass(frozen=True, slots=True)
class Members:
    """State of the table. ``fixed``: servers configured or launched at the start; ``listed``: last
    good content of the watched file; ``added``, ``removed``: by command."""

    fixed: Urls = frozenset()
    listed: Urls = frozenset()
    added: Urls = frozenset()
    removed: Urls = frozenset()
    present: Urls = frozenset()
    leaving: Urls = frozenset()

    def __repr__(self) -> str:
        parts = (("here", self.present), ("leaving", self.leaving), ("removed", self.removed))
        return (
            "<"
            + "; ".join(f"{name} {' '.join(sorted(urls))}" for name, urls in parts if urls)
            + ">"
        )

    @property
    def wanted(self) -> Urls:
        """The servers that should have a lane."""
        return (self.fixed | self.listed | self.added) - self.removed


def start(fixed: Urls, listed: Urls = frozenset()) -> Members:
    """Return a run's first state, with all servers present. Raises ProtocolError for none."""
    if not fixed | listed:
        raise ProtocolError("a run starts with one server or more")
    return Members(fixed=fixed, listed=listed, present=fixed | listed)


@dataclass(frozen=True, slots=True)
class Listed:
    """The watched file has new, readable content."""

    urls: Urls


@dataclass(frozen=True, slots=True)
class Add:
    """A command adds a server."""

    url: str


@dataclass(frozen=True, slots=True)
class Remove:
    """A command removes a server."""

    url: str


@dataclass(frozen=True, slots=True)
class Ended:
    """The lane of a leaving server has ended."""

    url: str


Event = Listed | Add | Remove | Ended


@dataclass(frozen=True, slots=True)
class Join:
    """Start a lane: the server gets the newest version before its first rollout."""

    url: str


@dataclass(frozen=True, slots=True)
class Leave:
    """Send the server no more rollouts; end its lane, then report Ended."""

    url: str


@dataclass(frozen=True, slots=True)
class Refuse:
    """The event changes nothing, for this reason."""

    reason: str


Action = Join | Leave | Refuse


def _after(m: Members, event: Event) -> Members | Refuse:
    """Return the state after an event, before servers join or leave."""
    match event:
        case Listed(urls):
            if not urls:
                return Refuse(
                    "a list without a server changes nothing (so looks a file that is being"
                    " rewritten)"
                )
            after = replace(m, listed=urls, removed=m.removed - (urls - m.listed))
            if not after.wanted:
                return Refuse("every listed server was removed by command: none would be left")
            return after
        case Add(url):
            if url in m.wanted:
                return Refuse(f"{url} is there already")
            return replace(m, added=m.added | {url}, removed=m.removed - {url})
        case Remove(url):
            if url not in m.wanted:
                return Refuse(f"{url} is not a server of this run")
            if m.wanted == {url}:
                return Refuse(
                    f"{url} is the last server, and without one no rollout is made: add another"
                    " first"
                )
            return replace(m, added=m.added - {url}, removed=m.removed | {url})
        case Ended(url):
            if url not in m.leaving:
                raise ProtocolError(f"event {event!r} is not listed for members {m!r}")
            return replace(m, leaving=m.leaving - {url})


def step(members: Members, event: Event) -> tuple[Members, tuple[Action, ...]]:
    """Return the next state, and the servers that join, then those that leave.

    Raises ProtocolError for Ended of a server that is not leaving.

    >>> m = start(frozenset({"a", "b"}))
    >>> m, actions = step(m, Remove("a"))
    >>> m, actions
    (<here b; leaving a; removed a>, (Leave(url='a'),))
    >>> step(m, Remove("b"))[1][0].reason.partition(",")[0]
    'b is the last server'
    >>> step(step(m, Ended("a"))[0], Add("a"))
    (<here a b>, (Join(url='a'),))
    """
    after = _after(members, event)
    if isinstance(after, Refuse):
        return members, (after,)
    joins = after.wanted - after.present - after.leaving
    leaves = after.present - after.wanted
    after = replace(after, present=after.present - leaves | joins, leaving=after.leaving | leaves)
    return after, (*map(Join, sorted(joins)), *map(Leave, sorted(leaves)))
