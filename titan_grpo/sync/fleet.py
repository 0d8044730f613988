"""The ledger of all servers behind one condition variable, and the latch of background errors."""

import threading
import time
from collections.abc import Callable

from titan_grpo.errors import SyncError
from titan_grpo.protocol.ledger import Entry, Standing
from titan_grpo.protocol.version import Label

OnServer = Callable[[str, int | None, bool, str], None]
"""Called with (url, version held or None, accepting, label) after every change; must not block."""


class Fleet:
    """What every server holds. Lanes write their own line; whoever waits is woken by each change."""

    def __init__(self, urls: list[str], on_server: OnServer) -> None:
        self._entries = {url: Entry() for url in urls}
        self._labels = dict.fromkeys(urls, "")
        self._changed = threading.Condition()
        self._on_server = on_server
        self._error: SyncError | None = None

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

    def mark(self, url: str, change: Callable[[Entry], Entry], label: Label | None = None) -> None:
        """Apply one ledger event to a server's line and tell the rollout side."""
        with self._changed:
            entry = self._entries[url] = change(self._entries[url])
            if label is not None:
                self._labels[url] = str(label)
            text = self._labels[url]
            self._changed.notify_all()
        self._on_server(url, entry.held, entry.accepting, text)

    def latch(self, error: SyncError) -> None:
        """Keep the first background error until the step boundary collects it."""
        with self._changed:
            self._error = self._error or error

    def take_error(self) -> SyncError | None:
        """The latched error, once. Never waits for a lane: the lock is held for assignments only."""
        if self._error is None:
            return None
        with self._changed:
            error, self._error = self._error, None
            return error

    def wait_held(self, version: int, timeout_s: float, everyone: bool) -> list[str]:
        """Wait until a server holds ``version`` or newer, and return who does by then; shorter than that if time is up.

        ``everyone``: wait also for the others, except those about which nothing is known (dead, restarting, quarantined):
        they get the newest version when they answer again, and nobody waits for that.
        """
        deadline = time.monotonic() + timeout_s
        with self._changed:
            while True:
                holding = [u for u, e in self._entries.items() if e.held is not None and e.held >= version]
                behind = [e for u, e in self._entries.items() if u not in holding and e.standing in _KNOWN]
                remaining = deadline - time.monotonic()
                if remaining <= 0 or (holding and not (everyone and behind)):
                    return holding
                self._changed.wait(remaining)


_KNOWN = (Standing.HOLDS, Standing.RECEIVING, Standing.COMMITTING)


def fresh_label(run_id: str, text: str | None) -> Label | None:
    """The label a server shows, if it belongs to this run; None means: nothing is known about its weights."""
    label = Label.parse(text)
    return label if label is not None and label.run_id == run_id else None
