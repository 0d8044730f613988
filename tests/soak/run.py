"""One soak: a trainer process, server processes, faults, and what all of them show."""

import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from tests.rigs.census import descendants, holdings, shm_entries, shm_of
from tests.rigs.proxy import Proxy
from tests.rigs.server_handle import ServerProcess, served
from tests.rigs.trainer import digests
from tests.rigs.trainer_handle import Event, RunFailed, Step, TrainerProcess, wait_until
from tests.rigs.trainer_process import Settings
from tests.soak.faults import Fault, Injector, Kind, calm_versions, schedule
from tests.soak.judge import Seen
from titan_grpo.errors import PeerError
from titan_grpo.protocol.messages import Label
from titan_grpo.titan.tiny import write_tiny_model
from titan_grpo.verify.recording import content_digest

SEED = 1
"""Of the model."""

STEP_S = 0.01

CONNECT_S = 30.0
"""Deadline of a receiver's start, which imports torch, in seconds. One that is killed while it
starts costs all of it."""

SHUTDOWN_S = 30.0
DEADLINE_S = 1.0
"""Deadline of a transfer and of each call of a commit, in seconds."""

STOP_S = 2.5
"""How long a stopped process stays so: past every deadline of a lane, in seconds."""

CALM_S = 120.0
"""How long a server may take to hold the newest version once faults have ceased: most of it is
starting receivers."""

NEWS_S = 120.0
"""Longest silence of the trainer, in seconds."""

ENDED_S = 20.0
"""How long a process that was told to end may still be there, in seconds."""

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
        self._proxies = [Proxy(("127.0.0.1", server.port)) for server in servers]
        self.faults: tuple[Fault, ...] = schedule(
            options.seed, options.versions, options.window, options.fault_every, len(servers)
        )
        self._calm = calm_versions(options.versions, options.window)
        self.seen = Seen(visible={server.url: [] for server in servers})
        self.injector = Injector(servers, self._proxies, STOP_S, self._look)
        self.corrupted = 0
        self._read_so_far = {server.pid: 0 for server in servers}
        self._lock = threading.Lock()  # a restart looks at its server from a thread of its own
        self._shm: set[str] = set()
        self._started_s = time.monotonic()

    def run(self) -> Seen:
        """The whole of it. Raises RunFailed if the trainer falls silent or ends."""
        model = write_tiny_model("qwen3", self._logs / "model", seed=SEED)
        loaded = load_file(model / "model.safetensors")
        self._base = {name: tensor.float() for name, tensor in loaded.items()}
        settings = Settings(
            model=str(model),
            urls=[proxy.url for proxy in self._proxies],
            run_dir=str(self._logs / "run"),
            salt=SEED,
            deadline_s=DEADLINE_S,
            connect_s=CONNECT_S,
            shutdown_s=SHUTDOWN_S,
            backoff_s=0.05,
            step_s=STEP_S,
            rest_s=self._o.seconds_per_version,
            steps_per_version=1,
            calm=list(self._calm),
            guarded=False,
        )
        with TrainerProcess(settings, self._logs / "trainer.log", os.environ) as trainer:
            self.seen.run_id, seen = trainer.run_id, 0
            while len(self.seen.digests) < self._o.versions:
                events = self._next(trainer, seen)
                seen += len(events)
                for event in events:
                    self._take(event, trainer)
            ended = trainer.stop()
        self._progress(f"shutdown took {ended['flush_s'] + ended['lanes_s']:.1f} s")
        behind = [proxy.url for proxy in self._proxies if proxy.url not in ended["held"]]
        self.seen.final += [f"{url} did not get the newest version in the flush" for url in behind]
        self._judge_end()
        for proxy in self._proxies:
            proxy.close()
        return self.seen

    def _next(self, trainer: TrainerProcess, number: int) -> list[Event]:
        """The events from ``number`` on; meanwhile faults strike when they are due."""
        silent_at = time.monotonic() + NEWS_S
        while (now := time.monotonic()) < silent_at:
            self.injector.work()
            due = self.injector.next_s
            wait_s = silent_at - now if due is None else min(max(0.0, due - now), silent_at - now)
            if events := trainer.after(number, wait_s):
                return events
        raise RunFailed(
            f"the trainer must say something within {NEWS_S:g} s, it was silent: a step that never"
            " ends"
        )

    def _take(self, event: Event, trainer: TrainerProcess) -> None:
        match event["event"]:
            case "steps":
                self.seen.steps += [Step(*row) for row in event["rows"]]
            case "error":
                self.seen.errors += 1
            case "published":
                self._published(event["version"], event["count"], trainer)

    def _published(self, version: int, count: int, trainer: TrainerProcess) -> None:
        self.seen.digests[version] = content_digest(digests(self._base, version, SEED))
        now = time.monotonic()
        for fault in self.faults:
            if fault.version != count:
                continue
            if fault.kind is Kind.CORRUPT:
                trainer.tell("spoil", self._proxies[fault.server].url, False)
                self.corrupted += 1
            else:
                self.injector.plan(fault, now + fault.delay * self._o.seconds_per_version)
        if count in self._calm:
            self._rest(version, count, trainer)

    def _rest(self, version: int, count: int, trainer: TrainerProcess) -> None:
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
            # Both: a lane that lost the last answer of a commit makes that anew.
            told = trainer.report()["servers"]
            behind = [
                index
                for index in behind
                if not (_at_rest(told[self._proxies[index].url], version))
                or not self._holds(index, version)
            ]
            pause.wait(SETTLE_S if behind else 0.0)
        self.seen.recoveries.append(time.monotonic() - start)
        self.seen.late += [
            f"server {NAMES[i]} did not hold version {version} after {CALM_S:g} s" for i in behind
        ]
        self._measure(version, trainer)
        self._tell_progress(count)
        if count < self._o.versions:
            trainer.tell("publish", True)

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

    def _measure(self, version: int, trainer: TrainerProcess) -> None:
        """Every process, and that there is none besides."""
        roles = {"trainer": trainer.pid}
        if (sync := trainer.sync_pid) is not None:
            roles["sync process"] = sync
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
        known = {*roles.values(), *(server.guard_pid for server in self._servers)}
        self.seen.strangers += [f"process {pid} after version {version}" for pid in _staying(known)]
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
        self.seen.strangers += [f"process {pid} at the end" for pid in _staying(set())]
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


def _at_rest(entry: dict[str, Any], version: int) -> bool:
    """Whether the ledger's line of a server says that it holds ``version``, and no more is on its
    way."""
    return (entry["standing"], entry["held"]) == ("holds", version)


def _staying(known: set[int]) -> list[int]:
    """Processes below ours but the ``known`` ones, which do not end by themselves."""
    wait_until(lambda: set(descendants(os.getpid())) <= known, ENDED_S)
    return sorted(set(descendants(os.getpid())) - known)
