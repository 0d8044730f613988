"""The servers of a run as rank 0 sees them: what each holds, who may sample on it, and how it joins
and leaves."""

import threading
from collections.abc import Mapping
from typing import Any

from titan_grpo.errors import ProtocolError, SyncError
from titan_grpo.observe import terminal
from titan_grpo.observe.recorder import Recorder
from titan_grpo.protocol.ledger import Standing
from titan_grpo.rollout.client import RolloutClient
from titan_grpo.rollout.records import ReplayClient
from titan_grpo.titan.weight_sync import TrainerSync

Rollouts = RolloutClient | ReplayClient


class Crew:
    """Carries news between the sync and the rollouts. Lanes call ``on_server``; the members thread
    calls the rest."""

    def __init__(self, urls: list[str], rollouts: Rollouts, recorder: Recorder) -> None:
        self._rollouts = rollouts
        self._recorder = recorder
        self._sync: TrainerSync | None = None
        self._lock = threading.Lock()
        self._versions: dict[str, int | None] = dict.fromkeys(urls)
        self._highest: dict[str, int] = {}
        self._gone: set[str] = set()
        self._ended = False
        self.version = 0
        """What the trainer is at, for the records."""

    def adopt(self, sync: TrainerSync) -> None:
        """Take over the started sync."""
        self._sync = sync

    def on_server(
        self, url: str, version: int | None, accepting: bool, label: str, engine: str
    ) -> None:
        """A lane's news about its server. Never waits."""
        # The lock: a word that crosses the server's departure must not bring it back to the
        # rollouts.
        with self._lock:
            if url in self._gone or self._ended:
                return
            self._versions[url] = version
            if version is not None:
                self._highest[url] = max(version, self._highest.get(url, version))
            self._rollouts.set_server(url, version, accepting, label, engine)

    def drain(self, url: str, within_s: float) -> None:
        """A lane is about to commit: wait for what runs on its server. Not under the lock: its
        departure must not wait."""
        self._rollouts.drain(url, within_s)

    @property
    def versions(self) -> dict[str, int | None]:
        """Version by server, None where nothing is known. A copy."""
        with self._lock:
            return dict(self._versions)

    @property
    def highest(self) -> dict[str, int]:
        """Highest version that each server was read back with in this run, also of those that left.
        A copy."""
        with self._lock:
            return dict(self._highest)

    def end(self) -> None:
        """The rollouts end: lanes end after them, and what they say then is for nobody."""
        with self._lock:
            self._ended = True

    # The members thread.

    def join(self, url: str) -> None:
        """A server joins the run: its lane brings it the newest version, and then the rollouts hear
        of it."""
        with self._lock:
            self._gone.discard(url)
            self._versions[url] = None
            count = len(self._versions)
        self._recorder.joined(url, self.version)
        terminal.print_status(
            f"{url} joins at version {self.version}: the newest weights first, then rollouts;"
            f" {_servers(count)}"
        )
        self._running().add_server(url)

    def leave(self, url: str) -> None:
        """A server leaves the run: the rollouts go elsewhere at once, then its lane ends (waits for
        that)."""
        with self._lock:
            self._gone.add(url)
            self._versions.pop(url, None)
            count = len(self._versions)
            self._rollouts.remove_server(url)
        self._recorder.left(url, self.version)
        terminal.print_status(
            f"{url} leaves at version {self.version}: its rollouts are made elsewhere;"
            f" {_servers(count)}"
        )
        self._running().remove_server(url)

    def failed(self, text: str) -> None:
        """An error of the membership, for the next step boundary."""
        self._running().latch(SyncError(text))

    def lines(self) -> list[Mapping[str, Any]]:
        """What is known of every server, as JSON-able values."""
        worker = self._running().worker
        if worker is None:
            return []
        in_flight = self._rollouts.in_flight()
        return [
            {
                "url": url,
                "standing": entry.standing.value,
                "held": entry.held,
                "incoming": entry.incoming,
                "accepting": entry.accepting,
                "in_flight": in_flight.get(url),
                "last_error": (
                    ""
                    if (error := worker.last_error(url)) is None
                    else " ".join(error.cause.split())
                ),
            }
            for url, entry in worker.entries().items()
            if entry.standing is not Standing.GONE
        ]

    def text(self) -> str:
        """Every server, its standing and its last error, in one line."""
        return "; ".join(
            f"{line['url']} {line['standing']}"
            + (f", last error: {line['last_error']}" if line["last_error"] else "")
            for line in self.lines()
        )

    def _running(self) -> TrainerSync:
        if self._sync is None:
            raise ProtocolError("the weight sync is not running")
        return self._sync


def _servers(count: int) -> str:
    return f"{count} server{'' if count == 1 else 's'} now"
