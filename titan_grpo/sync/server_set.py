"""The ledger of all servers behind one condition variable, and the latch of background errors."""

import threading
import time
from collections.abc import Callable

from titan_grpo.errors import SyncError
from titan_grpo.protocol import ledger
from titan_grpo.protocol.ledger import Entry, Standing
from titan_grpo.protocol.messages import Label

OnServer = Callable[[str, int | None, bool, str], None]
"""Called with (url, version held or None, accepting, label) after every change; must not block."""


class Fleet:
    """What every server holds. Lanes write their own line; whoever waits is woken by each
    change."""

    def __init__(self, urls: list[str], on_server: OnServer) -> None:
        self._entries = {url: Entry() for url in urls}
        self._labels = dict.fromkeys(urls, "")
        self._changed = threading.Condition()
        self._on_server = on_server
        self._error: SyncError | None = None
        self._further = 0
        self._last: dict[str, SyncError] = {}

    def __repr__(self) -> str:
        return "<Fleet " + ", ".join(f"{url} {e!r}" for url, e in self.entries().items()) + ">"

    def entries(self) -> dict[str, Entry]:
        """A copy of all lines."""
        with self._changed:
            return dict(self._entries)

    def entry(self, url: str) -> Entry:
        """One server's line."""
        with self._changed:
            return self._entries[url]

    def apply(self, url: str, event: ledger.Event, label: Label | None = None) -> None:
        """Apply one ledger event to a server's line and tell the rollout side if that changes what
        it may do."""
        with self._changed:
            self._entries[url], actions = ledger.step(self._entries[url], event)
            if label is not None:
                self._labels[url] = str(label)
            entry, text = self._entries[url], self._labels[url]
            self._changed.notify_all()
        if actions:
            self._on_server(url, entry.held, entry.accepting, text)

    def add(self, url: str) -> None:
        """A server joins, for the first time or again: nothing is known about it."""
        with self._changed:
            if url in self._entries:
                self._entries[url], _ = ledger.step(self._entries[url], ledger.Came())
            else:
                self._entries[url] = Entry()
            self._labels[url] = ""
            self._changed.notify_all()
        self._on_server(url, None, False, "")

    def remove(self, url: str) -> None:
        """A server has left: it takes no more rollouts, and nobody waits for it. Its line stays, as
        GONE."""
        self.apply(url, ledger.Left())

    def latch(self, error: SyncError) -> None:
        """Keep the first background error until the step boundary collects it; count those that
        follow."""
        with self._changed:
            if self._error is None:
                self._error = error
            else:
                self._further += 1
            if error.url:
                self._last[error.url] = error
            self._changed.notify_all()

    def take_error(self) -> SyncError | None:
        """The latched error, once, with the number of those that followed it.

        Never waits for a lane: the lock is held for assignments only.
        """
        if self._error is None:
            return None
        with self._changed:
            error, further = self._error, self._further
            self._error, self._further = None, 0
        return error.followed_by(further)

    def last_error(self, url: str) -> SyncError | None:
        """The last background error of a server, collected or not; it says nothing about what came
        after it."""
        with self._changed:
            return self._last.get(url)

    def wait(self, fact: Callable[[], bool], timeout_s: float) -> bool:
        """Wait until ``fact`` is true, looked at after every change of a line and every error;
        False past the deadline."""
        with self._changed:
            return self._changed.wait_for(fact, timeout_s)

    def wait_held(self, version: int, timeout_s: float, everyone: bool) -> list[str]:
        """Wait until a server holds ``version`` or newer, and return who does by then; shorter than
        that if time is up.

        ``everyone``: wait also for the others, except those about which nothing is known (dead,
        restarting, quarantined): they get the newest version when they answer again, and nobody
        waits for that.
        """
        deadline = time.monotonic() + timeout_s
        with self._changed:
            while True:
                holding = [
                    u for u, e in self._entries.items() if e.held is not None and e.held >= version
                ]
                behind = [
                    e for u, e in self._entries.items() if u not in holding and e.standing in _KNOWN
                ]
                remaining = deadline - time.monotonic()
                if remaining <= 0 or (holding and not (everyone and behind)):
                    return holding
                self._changed.wait(remaining)


_KNOWN = (Standing.HOLDS, Standing.RECEIVING, Standing.COMMITTING)


def fresh_label(run_id: str, text: str | None) -> Label | None:
    """The label a server shows, if it belongs to this run; None means: nothing is known about its
    weights."""
    label = Label.parse(text)
    return label if label is not None and label.run_id == run_id else None
