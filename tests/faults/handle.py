"""The runner's end of one fault run: starts the trainer process, reads its lines, signals it."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any

from tests.faults.judge import Step
from tests.faults.rig import Settings
from titan_grpo.errors import TitanGrpoError
from titan_grpo.protocol.lane_events import Point

START_S = 90.0
ANSWER_S = 30.0
END_S = 60.0
Event = Mapping[str, Any]


class RunFailed(TitanGrpoError):
    """The fault run's own process did not do what it was told; the message has the end of its
    log."""


class TrainerProcess:
    """A running trainer. A context manager: it is gone at the end, also if it is frozen."""

    def __init__(self, settings: Settings, log: Path, env: Mapping[str, str]) -> None:
        self.settings = settings
        self._log = log
        self._changed = threading.Condition()
        self.events: list[Event] = []
        self._ended = False
        self._asked = 0
        self._sending = threading.Lock()
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as file:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.faults.trainer"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=file,
                text=True,
                env={**env, "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"},
            )
        threading.Thread(target=self._read, name="trainer lines", daemon=True).start()
        self._send(asdict(settings))

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    @property
    def run_id(self) -> str:
        """Its run; waits until it has started."""
        return str(self.wait(lambda e: e["event"] == "started", START_S, "its start")["run_id"])

    # What it says.

    def find(self, holds: Callable[[Event], bool], since: int = 0) -> Event | None:
        """The first event from number ``since`` on for which ``holds``; None if there is none
        yet."""
        with self._changed:
            return next((e for e in self.events[since:] if holds(e)), None)

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
                f"the fault run's trainer must report {what} within {timeout_s:g} s, it did not:"
                f" {self.tail()}"
            )
        return event

    def steps(self, since_s: float, until_s: float) -> list[Step]:
        """The steps that ended in a window of the monotonic clock."""
        with self._changed:
            rows = [Step(*row) for e in self.events if e["event"] == "steps" for row in e["rows"]]
        return [step for step in rows if since_s <= step.t <= until_s]

    def published(self) -> dict[int, float]:
        """Version -> when it was published."""
        with self._changed:
            return {e["version"]: e["t"] for e in self.events if e["event"] == "published"}

    def held(self, url: str) -> list[tuple[float, int | None]]:
        """(when, version held) of every change of a server's line in the ledger."""
        with self._changed:
            return [
                (e["t"], e["held"])
                for e in self.events
                if e["event"] == "server" and e["url"] == url
            ]

    def sends(self, url: str) -> list[tuple[float, float]]:
        """(when, seconds) of every transfer to a server, also of those that failed."""
        with self._changed:
            return [
                (e["t"], e["seconds"])
                for e in self.events
                if e["event"] == "send" and e["url"] == url
            ]

    def tail(self) -> str:
        """The last line of its log."""
        lines = self._log.read_text(errors="replace").splitlines()
        return lines[-1] if lines else "(it said nothing)"

    # What it is told.

    def hold(self, url: str, point: Point, occurrence: int) -> None:
        """Hold a lane there."""
        self._send({"do": "hold", "url": url, "point": point.value, "occurrence": occurrence})

    def go(self, how: str = "continue", **details: Any) -> None:
        """Let the held lane go on."""
        self._send({"do": "go", "with": how} | details)

    def forget(self) -> None:
        """Hold nothing that is not held yet."""
        self._send({"do": "forget"})

    def publish(self, on: bool) -> None:
        """Whether it publishes versions."""
        self._send({"do": "publish", "on": on})

    def report(self) -> Event:
        """The ledger now."""
        self._asked += 1
        number, since = self._asked, self.mark()
        self._send({"do": "report", "number": number})
        return self.wait(
            lambda e: e["event"] == "report" and e["number"] == number,
            ANSWER_S,
            "its ledger",
            since,
        )

    def stop(self) -> Event:
        """Have it flush and end; what it says about that."""
        since = self.mark()
        self._send({"do": "stop"})
        return self.wait(lambda e: e["event"] == "ended", END_S, "its end", since)

    def signal(self, number: int) -> None:
        """Send it a signal."""
        if self._process.poll() is None:
            os.kill(self._process.pid, number)

    def kill(self) -> None:
        """SIGKILL; returns when it is gone."""
        self._process.kill()
        self._process.wait(ANSWER_S)

    def __enter__(self) -> "TrainerProcess":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.signal(signal.SIGCONT)
        self.kill()

    def _send(self, command: Mapping[str, Any]) -> None:
        assert self._process.stdin is not None
        try:
            with self._sending:
                self._process.stdin.write(json.dumps(command) + "\n")
                self._process.stdin.flush()
        except OSError as error:
            raise RunFailed(f"the fault run's trainer has ended: {self.tail()}") from error

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            with self._changed:
                self.events.append(json.loads(line))
                self._changed.notify_all()
        with self._changed:
            self._ended = True
            self._changed.notify_all()


def wait_until(holds: Callable[[], bool], timeout_s: float, poll_s: float = 0.05) -> bool:
    """Ask again and again, for what nobody announces: another process's state. False past the
    deadline."""
    deadline, pause = time.monotonic() + timeout_s, threading.Event()
    while not holds():
        if time.monotonic() > deadline:
            return False
        pause.wait(poll_s)
    return True
