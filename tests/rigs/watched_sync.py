"""A sync process whose lanes ask at points of the protocol how to go on. All else is a trainer's:
``Trainer(..., sync=partial(WatchedSync, watch=watch))``."""

import socket
import threading
import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from tests.rigs.sockets import cut
from tests.rigs.trainer import SpoiledImages
from titan_grpo.protocol.lane import LaneEvent, Observer, Point
from titan_grpo.sync.child import perform
from titan_grpo.sync.process import Main, SyncProcess
from titan_grpo.sync.relay import Relay


def inner_server(relays: Relay) -> tuple[str, str] | None:
    """A server that reads and is read from now, and its reader; one that reads from another server
    first. None if there is none."""
    with relays._lock:
        nodes = relays._table.nodes
        reading = {u: n.parent for u, n in nodes.items() if n.reading and relays._table.above(n)}
        both = [(p, u) for u, p in reading.items() if nodes[p].reading]
        return min(both, key=lambda pair: pair[0] not in reading, default=None)


class WatchedSync(SyncProcess):
    """Rank 0's end. ``inner``: a server that is read from and its reader, at the last point."""

    MODULE = "tests.rigs.watched_sync"

    def __init__(
        self,
        *assembly: Any,
        watch: Observer,
        points: Iterable[Point] = Point,
        say: Callable[..., object] = lambda *_, **__: None,
        note: Callable[[LaneEvent, float], object] = lambda *_: None,
    ) -> None:
        """``watch`` is called for every lane's ``points``, on a thread of its own; the lane waits
        for it, and a PeerError is met as if the server had failed. ``say`` gets the kind and the
        values of events. ``note``
        gets every point and when it was passed (monotonic clock); no lane waits for that."""
        self._watch, self._say, self.passed = watch, say, note
        self._points = "", frozenset(points)
        self.inner: tuple[str, str] | None = None
        super().__init__(*assembly)

    def watch_at(self, url: str, points: Iterable[Point]) -> None:
        """Have only the lane of ``url`` ask, at these points."""
        with self.lock:
            self._points = url, frozenset(points)
            self.post("watch_at", *self._points)

    def _begin(self) -> None:
        super()._begin()
        self._pipe.post("watch_at", *self._points)

    def request(self, number: int, what: str, url: str, *arguments: Any) -> None:
        if what != "passing":
            super().request(number, what, url, *arguments)
            return
        event, self.inner = arguments
        work = partial(self._pipe.answer, number, lambda: self._watch(event))
        threading.Thread(target=work, name=f"watch {url}", daemon=True).start()

    def connecting(self, url: str, epoch: int) -> None:
        self._say("connecting", url=url, sync_pid=self.pid)
        super().connecting(url, epoch)

    def cut(self, connections: int) -> None:
        self._say("cut", connections=connections)


class WatchedMain(Main):
    """The process's end."""

    _points: tuple[str, frozenset[Point]] = "", frozenset()

    def _observe(self, event: LaneEvent) -> None:
        super()._observe(event)
        self._pipe.post("passed", event, time.monotonic())
        url, points = self._points
        if event.point in points and url in ("", event.url):
            self._pipe.ask("passing", event.url, event, inner_server(self.lanes.relay))

    def watch_at(self, url: str, points: frozenset[Point]) -> None:
        self._points = url, points

    def spoil(self, url: str, offset: int) -> None:
        SpoiledImages.spoiled[f"lane {url}"] = offset

    def cut(self, pid: int) -> None:
        """Shut every TCP connection to ``pid``."""
        self._pipe.post("cut", cut(pid))


def main(sock: socket.socket, parent: int) -> None:
    """Entry point of the process."""
    perform(sock, parent, WatchedMain)
