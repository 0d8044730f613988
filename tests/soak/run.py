"""One soak: a trainer process, server processes, faults, and what all of them show."""

import json
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from tests.rigs.census import descendants, holdings, shm_entries, shm_of
from tests.rigs.server_handle import ServerProcess, served
from tests.soak.faults import Injector
from tests.soak.judge import Seen
from tests.soak.plan import Fault, Kind, calm_versions, schedule
from tests.soak.trainer import Orders
from titan_grpo.errors import PeerError, SyncError
from titan_grpo.protocol.messages import Label

DEADLINE_S = 1.0
"""Deadline of a transfer and of each call of a commit, in seconds."""

STOP_S = 2.5
"""How long a stopped process stays so: past every deadline of a lane, in seconds."""

CALM_S = 60.0
"""How long a server may take to hold the newest version once faults have ceased: most of it is
starting receivers."""

NEWS_S = 120.0
"""Longest silence of the trainer, in seconds."""

SETTLE_S = 0.05
"""Between two looks at the same thing, in seconds."""

NAMES = "ab"


@dataclass(frozen=True, slots=True)
class Options:
    """What to run. ``fault_every``: one fault per so many versions, 0: none. ``window``: versions
    between two calms."""

    versions: int
    seconds_per_version: float
    seed: int
    fault_every: int
    window: int


class Trainer:
    """The trainer process: its news as a queue, None at its end."""

    def __init__(self, orders: Orders, log_path: Path) -> None:
        """Start it; what it has to say besides its news goes to ``log_path``."""
        command = [sys.executable, "-m", "tests.soak.trainer"]
        with log_path.open("wb") as log:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True
            )
        self.news: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read, name="trainer's news", daemon=True)
        self._reader.start()
        self.tell(orders.to_json())

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    def tell(self, line: str) -> None:
        """One line to its stdin."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.write(line + "\n")
            self._process.stdin.flush()

    def wait(self, timeout_s: float) -> int:
        """Its exit status."""
        return self._process.wait(timeout_s)

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self.news.put(json.loads(line))
        self.news.put(None)

    def __enter__(self) -> "Trainer":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._process.kill()
        self._process.wait()
        self._reader.join(5.0)
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with suppress(BrokenPipeError):
            self._process.stdin.close()
        self._process.stdout.close()


class Soak:
    """Runs ``options`` on running ``servers`` and returns what was seen; ``progress`` gets a line
    now and then."""

    def __init__(
        self,
        options: Options,
        servers: Sequence[ServerProcess],
        logs: Path,
        progress: Callable[[str], None],
    ) -> None:
        self._o, self._servers, self._logs, self._progress = options, servers, logs, progress
        self.faults: tuple[Fault, ...] = schedule(
            options.seed, options.versions, options.window, options.fault_every, len(servers)
        )
        self._calm = calm_versions(options.versions, options.window)
        self.seen = Seen(visible={server.url: [] for server in servers})
        self.injector = Injector(servers, STOP_S, self._look)
        self.corrupted = 0
        self._read_so_far = {server.pid: 0 for server in servers}
        self._lock = threading.Lock()  # a restart looks at its server from a thread of its own
        self._shm: set[str] = set()
        self._started_s = time.monotonic()

    def run(self) -> Seen:
        """The whole of it. Raises SyncError if the trainer falls silent or ends with an error."""
        corrupt = tuple(
            (f.version, self._servers[f.server].url) for f in self.faults if f.kind is Kind.CORRUPT
        )
        orders = Orders(
            urls=tuple(server.url for server in self._servers),
            versions=self._o.versions,
            calm=self._calm,
            corrupt=corrupt,
            seconds_per_version=self._o.seconds_per_version,
            deadline_s=DEADLINE_S,
        )
        with Trainer(orders, self._logs / "trainer.log") as trainer:
            while (news := self._next(trainer)) is not None:
                self._take(news, trainer)
            status = trainer.wait(10.0)
            if status != 0:
                raise SyncError(f"the trainer must end with status 0, it ended with {status}")
        self._judge_end()
        return self.seen

    def _next(self, trainer: Trainer) -> dict[str, Any] | None:
        """The next news; meanwhile faults strike when they are due."""
        silent_at = time.monotonic() + NEWS_S
        while time.monotonic() < silent_at:
            self.injector.work()
            due = self.injector.next_s
            wait_s = NEWS_S if due is None else max(0.0, due - time.monotonic())
            with suppress(queue.Empty):
                return trainer.news.get(timeout=min(wait_s, NEWS_S))
        raise SyncError(
            f"the trainer must say something within {NEWS_S:g} s, it was silent: a step that never"
            " ends"
        )

    def _take(self, news: Mapping[str, Any], trainer: Trainer) -> None:
        seen = self.seen
        if "run_id" in news:
            seen.run_id = news["run_id"]
        elif "flushed" in news:
            self._progress(f"shutdown took {news['shutdown_s']:.1f} s")
            behind = [server.url for server in self._servers if server.url not in news["flushed"]]
            seen.final += [f"{url} did not get the newest version in the flush" for url in behind]
        else:
            seen.waits.append(news["boundary"]["waited_s"])
            seen.boundaries.append(news["boundary"]["wall_s"])
            seen.controls.append(news["control"]["wall_s"])
            seen.control_waits.append(news["control"]["waited_s"])
            seen.errors += bool(news["error"])
            self.corrupted = news["spoiled"]
            if not news["published"]:
                seen.skipped += 1
                return
            seen.digests[news["version"]] = news["digest"]
            now = time.monotonic()
            for fault in self.faults:
                if fault.version == news["count"]:
                    self.injector.plan(fault, now + fault.delay * self._o.seconds_per_version)
            if news["calm"]:
                self._rest(news["version"], news["count"], trainer)

    def _rest(self, version: int, count: int, trainer: Trainer) -> None:
        """A calm: faults come to their end, every server gets the newest version, everything is
        measured."""
        pause = threading.Event()
        while self.injector.busy:
            self.injector.work()
            pause.wait(SETTLE_S)
        self.injector.finish(CALM_S)
        start = time.monotonic()
        behind = list(range(len(self._servers)))
        while behind and time.monotonic() - start < CALM_S:
            behind = [index for index in behind if not self._holds(index, version)]
            pause.wait(SETTLE_S if behind else 0.0)
        self.seen.recoveries.append(time.monotonic() - start)
        self.seen.late += [
            f"server {NAMES[i]} did not hold version {version} after {CALM_S:g} s" for i in behind
        ]
        self._measure(version, trainer)
        self._tell_progress(count)
        trainer.tell("go")

    def _look(self, index: int) -> dict[str, Any] | None:
        """Read what a server has shown since the last look; None if it does not answer."""
        server = self._servers[index]
        with self._lock:
            try:
                now: dict[str, Any] = server.run(
                    served(self._read_so_far[server.pid], timeout_s=6.0)
                )
            except (PeerError, KeyError):
                return None
            self.seen.visible[server.url] += [(label, digest) for label, digest in now["visible"]]
            self._read_so_far[server.pid] += len(now["visible"])
        return now

    def _holds(self, index: int, version: int) -> bool:
        self._read_so_far.setdefault(self._servers[index].pid, 0)
        now = self._look(index)
        label = Label.parse(now["label"]) if now is not None else None
        return (
            now is not None and label is not None and label.version == version and not now["paused"]
        )

    def _measure(self, version: int, trainer: Trainer) -> None:
        """Every process, and that there is none besides."""
        roles = {"trainer": trainer.pid}
        for index in range(len(self._servers)):
            now = self._look(index)
            if now is None:
                continue
            roles[f"server {NAMES[index]}"] = now["pid"]
            if now["receiver_pid"] is not None:
                roles[f"receiver {NAMES[index]}"] = now["receiver_pid"]
            self.seen.paused += (
                [f"server {NAMES[index]} after version {version}"] if now["paused"] else []
            )
            if now["digest"] != self.seen.digests[version] or not now["intact"]:
                self.seen.wrong_now.append(
                    f"server {NAMES[index]} holds {now['digest'][:8]} at version {version}"
                )
        guards = {server.guard_pid for server in self._servers}
        strangers = set(descendants(os.getpid())) - set(roles.values()) - guards
        self.seen.strangers += [
            f"process {pid} after version {version}" for pid in sorted(strangers)
        ]
        for pid in roles.values():
            self._shm |= shm_of(pid)
        self.seen.calms.append(
            {role: held for role, pid in roles.items() if (held := holdings(pid)) is not None}
        )

    def _judge_end(self) -> None:
        newest = max(self.seen.digests)
        for index, server in enumerate(self._servers):
            if not self._holds(index, newest):
                self.seen.final.append(f"server {NAMES[index]} does not serve version {newest}")
            if not server.alive():
                self.seen.final.append(f"server {NAMES[index]} has died")
        self.seen.final += self.injector.failed_starts

    def after(self) -> None:
        """What is left when everything was stopped."""
        self.seen.strangers += [f"process {pid} at the end" for pid in descendants(os.getpid())]
        self.seen.shm_left += sorted(self._shm & shm_entries())

    def _tell_progress(self, count: int) -> None:
        held = self.seen.calms[-1].get("trainer")
        struck = sum(self.injector.struck.values()) + self.corrupted
        rss = (
            f"{held.rss / 2**20:.0f} MiB, {held.fds} fds, {held.threads} threads"
            if held is not None
            else "gone"
        )
        now_s, recovered_s = time.monotonic() - self._started_s, self.seen.recoveries[-1]
        done = f"version {count}/{self._o.versions}  faults {struck}/{len(self.faults)}"
        self._progress(f"{now_s:6.0f} s  {done}  recovered in {recovered_s:.1f} s  trainer {rss}")
