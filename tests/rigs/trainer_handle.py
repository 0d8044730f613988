"""The owner's side of ``trainer_process``: starts it, reads its events, tells it what to do,
signals it."""

import json
import signal
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tests.rigs.signals import send
from tests.rigs.trainer_process import Settings
from titan_grpo.errors import TitanGrpoError
from titan_grpo.subprocesses import start_module, wait_process
from titan_grpo.unix_rpc import Pipe

START_S = 150.0
ANSWER_S = 60.0
END_S = 60.0
Event = Mapping[str, Any]


class RunFailed(TitanGrpoError):
    """The trainer's process did not do what it was told; the message has the end of its log."""


@dataclass(frozen=True, slots=True)
class Step:
    """One training step on the main thread, in seconds; ``t``: its end on the monotonic clock.

    ``no_core``: ready to run, but others had the cores. ``blocked``: within calls of the sync.
    ``ran``: on a core.
    """

    t: float
    wall: float
    no_core: float
    blocked: float
    ran: float

    @property
    def slept(self) -> float:
        """Waited for something other than a core: a lock, another thread, a file, a server."""
        return max(0.0, self.wall - self.no_core - self.ran)

    @property
    def waited(self) -> float:
        """The longest that it can have waited for the sync."""
        return max(self.slept, self.blocked - self.no_core)


class TrainerProcess:
    """A running trainer. A context manager: it is gone at the end, also if it is frozen.

    ``tell`` calls a method of trainer_process.Run there, and never waits. A trainer that has ended
    says nothing more: who waits for what it was told to do learns it.
    """

    def __init__(self, settings: Settings, log: Path, env: Mapping[str, str]) -> None:
        self.settings = settings
        self._log = log
        self._changed = threading.Condition()
        self.events: list[Event] = []
        self._ended = False
        self._asked = 0
        log.parent.mkdir(parents=True, exist_ok=True)
        few = {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
        with log.open("ab") as file:
            self._process, sock = start_module(
                "tests.rigs.trainer_process",
                json.dumps(asdict(settings)),
                env={**env, **few},
                outputs=(None, file),
            )
        self._pipe = Pipe(sock, self)
        self._pipe.start()
        self.tell = self._pipe.post
        self._reader = threading.Thread(target=self._read, name="trainer's events", daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def sync_pid(self) -> int | None:
        """Its sync process, as it said last."""
        with self._changed:
            said = [event["sync_pid"] for event in self.events if "sync_pid" in event]
        return int(said[-1]) if said else None

    @property
    def run_id(self) -> str:
        """Its run; waits until it has started."""
        return str(self.wait(lambda e: e["event"] == "started", START_S, "its start")["run_id"])

    # What it says.

    def find(self, holds: Callable[[Event], bool]) -> Event | None:
        """The first event for which ``holds``; None if there is none yet."""
        with self._changed:
            return next((e for e in self.events if holds(e)), None)

    def mark(self) -> int:
        """The number of the next event."""
        with self._changed:
            return len(self.events)

    def await_event(
        self, holds: Callable[[Event], bool], timeout_s: float, since: int = 0
    ) -> Event | None:
        """As ``find``, waiting; None past the deadline, or when the process has ended without
        it."""
        found: list[Event] = []
        looked = since

        def look() -> bool:
            nonlocal looked
            new, looked = self.events[looked:], len(self.events)
            found.extend(e for e in new if holds(e))
            return bool(found) or self._ended

        with self._changed:
            self._changed.wait_for(look, timeout_s)
        return found[0] if found else None

    def wait(
        self, holds: Callable[[Event], bool], timeout_s: float, what: str, since: int = 0
    ) -> Event:
        """As ``await_event``; RunFailed if it does not come."""
        event = self.await_event(holds, timeout_s, since)
        if event is None:
            raise RunFailed(
                f"the trainer must report {what} within {timeout_s:g} s, it did not: {self.tail()}"
            )
        return event

    def steps(self, since_s: float, until_s: float) -> list[Step]:
        """The steps that ended in a window of the monotonic clock."""
        rows = [Step(*row) for e in self._of("steps") for row in e["rows"]]
        return [step for step in rows if since_s <= step.t <= until_s]

    def published(self) -> dict[int, float]:
        """Version -> when it was published."""
        return {e["version"]: e["t"] for e in self._of("published")}

    def newest(self, until_s: float) -> int:
        """The newest version that was published until then."""
        return max((v for v, t in self.published().items() if t <= until_s), default=1)

    def held(self, url: str) -> list[tuple[float, int | None]]:
        """(when, version held) of every change of a server's line in the ledger."""
        return [(e["t"], e["held"]) for e in self._of("server") if e["url"] == url]

    def after(self, number: int, timeout_s: float) -> list[Event]:
        """The events from ``number`` on, once there is one; none past the deadline. RunFailed if
        the process has ended and there is none."""
        with self._changed:
            self._changed.wait_for(lambda: len(self.events) > number or self._ended, timeout_s)
            if len(self.events) <= number and self._ended:
                raise RunFailed(f"the trainer has ended: {self.tail()}")
            return self.events[number:]

    def sends(self, url: str) -> list[tuple[float, float]]:
        """(when, seconds) of every transfer to a server, also of those that failed."""
        return [(e["t"], e["seconds"]) for e in self._of("send") if e["url"] == url]

    def _of(self, kind: str) -> list[Event]:
        with self._changed:
            return [event for event in self.events if event["event"] == kind]

    def tail(self) -> str:
        """The last line of its log."""
        lines = self._log.read_text(errors="replace").splitlines()
        return lines[-1] if lines else "(it said nothing)"

    # What it is told.

    def report(self) -> Event:
        self._asked += 1
        number, since = self._asked, self.mark()
        self.tell("report", number)
        return self.wait(
            lambda e: e["event"] == "report" and e["number"] == number,
            ANSWER_S,
            "its ledger",
            since,
        )

    def stop(self) -> Event:
        """Have it flush and end; what it says about that."""
        since = self.mark()
        self.tell("stop")
        return self.wait(lambda e: e["event"] == "ended", END_S, "its end", since)

    def signal(self, number: int) -> None:
        """Send it, and its sync process, a signal."""
        if self._process.poll() is None:
            send(self._process.pid, number)
        send(self.sync_pid, number)

    def kill(self) -> None:
        """SIGKILL; returns when it is gone. Its sync process ends with it."""
        self._process.kill()
        wait_process(self._process, ANSWER_S)

    def __enter__(self) -> "TrainerProcess":
        return self

    def __exit__(self, *exc: object) -> None:
        self.signal(signal.SIGCONT)
        self.kill()
        self._reader.join(ANSWER_S)
        self._pipe.close()

    def said(self, event: Event) -> None:
        with self._changed:
            self.events.append(event)
            self._changed.notify_all()

    def _read(self) -> None:
        self._pipe.receive()
        with self._changed:
            self._ended = True
            self._changed.notify_all()


def wait_until(holds: Callable[[], bool], timeout_s: float, poll_s: float = 0.05) -> bool:
    """Ask again and again, for what is not announced: another process's state. False past the
    deadline."""
    deadline, pause = time.monotonic() + timeout_s, threading.Event()
    while not holds():
        if time.monotonic() > deadline:
            return False
        pause.wait(poll_s)
    return True
