"""Servers under test: one process group each, with what it recorded and what it was seen to
show."""

import json
import os
import random
import signal
import threading
import time
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol
from urllib.parse import urlsplit

from safetensors import safe_open

from tests.faults.judge import Sample
from tests.rigs.census import descendants
from tests.rigs.server_handle import ServerProcess
from titan_grpo.engines.control import ServerControl
from titan_grpo.engines.http import ServerAccess, SyncDriver
from titan_grpo.engines.launch import Server
from titan_grpo.engines.server import detect, make_control
from titan_grpo.errors import ServerRefused, ServerUnreachable
from titan_grpo.verify.evidence import Committed
from titan_grpo.verify.server import Devices, recorded, server_spec

PORTS = (20000, 30000)
"""Of servers in a network of their own, where every port is free."""

LOOK_S = 0.1
"""Between two looks at a server."""

ASK_S = 1.0
"""Deadline of one look."""

STARTUP_S = 300.0
NICE = "5"
"""Servers give way to the trainer where both share the cores: what is measured is the waiting, not
the sharing."""

RECEIVER = "titan_grpo.receive.receiver_main"
CORES = ("VLLM::EngineCore", "sglang::scheduler")
"""How the processes that hold the weights call themselves. At tensor parallel 2 the first one is
struck."""

FRONTS = ("vllm.entrypoints", "sglang.launch_server")
"""In the command lines of real servers, whose weights are in a process below."""


class Process(Protocol):
    """A server's process group."""

    url: str
    group: int

    def wait_healthy(self, deadline_s: float) -> float:
        """Seconds that its start took; ServerUnreachable if it does not come up."""

    def alive(self) -> bool:
        """Whether its main process runs."""

    def stop(self) -> None:
        """End all of it. Idempotent."""


Launch = Callable[[Path], Process]
"""Starts a server that records into the folder it is given (verify.site.recorded)."""


@dataclass(frozen=True, slots=True)
class Software:
    """What real servers run. ``python``: the interpreter of the engine's environment; ``model``: a
    folder."""

    engine: str
    python: str
    model: Path
    devices: Devices


def launcher(software: Software, host: str = "127.0.0.1", inside: str = "") -> Launch:
    """Real servers. ``inside``: a command that runs its arguments elsewhere (in a network
    namespace)."""

    def launch(folder: Path) -> Process:
        folder.mkdir(parents=True, exist_ok=True)
        wrapper = folder / "python"
        wrapper.write_text(f'#!/bin/sh\nexec {inside} nice -n {NICE} {software.python} "$@"\n')
        wrapper.chmod(0o755)
        spec = server_spec(
            str(wrapper.resolve()), software.model, folder, software.devices, engine=software.engine
        )
        # a free port of another host cannot be asked for from here
        return Server(replace(spec, host=host, port=random.randrange(*PORTS) if inside else 0))

    return launch


def engineless_launcher(model: Path, host: str = "127.0.0.1") -> Launch:
    """Servers without an engine: they take the tensors of ``model`` (a folder with
    model.safetensors) and nothing else."""

    def launch(folder: Path) -> Process:
        folder.mkdir(parents=True, exist_ok=True)
        with safe_open(model / "model.safetensors", "pt") as file:
            names = file.keys()  # the file is no mapping
            shapes = json.dumps({name: file.get_slice(name).get_shape() for name in names})
        record = str(recorded(folder).resolve())
        return ServerProcess(host, args=("--shapes", shapes, "--record", record))

    return launch


class Record:
    """A server's growing file of commits, read on from where it was read to. Any thread."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._offset = 0
        self._commits: list[Committed] = []

    def commits(self) -> list[Committed]:
        """All of them so far."""
        with self._lock:
            if self._path.exists():
                with self._path.open("rb") as file:
                    file.seek(self._offset)
                    # the last line may be half written
                    whole = file.read().rpartition(b"\n")[0]
                for line in whole.splitlines():
                    fields = json.loads(line)
                    self._commits.append(
                        Committed(**{key: fields[key] for key in Committed.__slots__})
                    )
                self._offset += len(whole) + (1 if whole else 0)
            return list(self._commits)


class Instance:
    """One life of a server, watched from its start to its end. A context manager."""

    def __init__(self, name: str, launch: Launch, folder: Path) -> None:
        self.name = name
        self._record = Record(recorded(folder))
        self._lock = threading.Lock()
        self._samples: list[Sample] = []
        self._ended = threading.Event()
        self._process = launch(folder)
        self.url = self._process.url
        self.expected_dead = False
        self.engine = ""
        """Which one it is, once it has answered."""
        self._thread = threading.Thread(target=self._watch, name=f"look at {name}", daemon=True)

    def wait_healthy(self) -> float:
        """Until it answers; then it is watched."""
        seconds = self._process.wait_healthy(STARTUP_S)
        with SyncDriver(self.url) as driver:
            self.engine = detect(driver, STARTUP_S)
        self._thread.start()
        return seconds

    @property
    def address(self) -> tuple[str, int]:
        """Where it listens."""
        parts = urlsplit(self.url)
        return parts.hostname or "", parts.port or 0

    @property
    def commits(self) -> list[Committed]:
        """What it recorded so far."""
        return self._record.commits()

    def samples(self, since_s: float = 0.0) -> list[Sample]:
        """What it showed since then."""
        with self._lock:
            return [s for s in self._samples if s.t >= since_s]

    def last(self) -> Sample | None:
        """What it showed last."""
        with self._lock:
            return self._samples[-1] if self._samples else None

    def alive(self) -> bool:
        """Whether server and engine run."""
        return self._process.alive() and self.engine_pid() is not None

    def engine_pid(self) -> int | None:
        """The process that holds the weights: vLLM's core, SGLang's scheduler, or the server where
        that is one process."""
        if not self._process.group:
            return None
        below = processes_below(self._process.group)
        core = [pid for pid, title in below if title.startswith(CORES)]
        if core:
            return core[0]
        front = _titles([self._process.group])
        real = any(name in title for _, title in front for name in FRONTS)
        return None if real or not front else self._process.group

    def receiver_pid(self) -> int | None:
        """The receiver of the epoch in force."""
        found = [pid for pid, title in processes_below(self._process.group) if RECEIVER in title]
        return found[-1] if found else None

    def pids(self) -> list[int]:
        """Every process of it, that which answers HTTP first."""
        return (
            [self._process.group, *(pid for pid, _ in processes_below(self._process.group))]
            if self._process.group
            else []
        )

    def control(self, deadline_s: float) -> ServerControl:
        """Calls to it past the proxy, for one thread; whoever asked for it closes it."""
        return make_control(self.engine, ServerAccess(self.url, deadline_s))

    def close(self) -> None:
        """End it. Idempotent."""
        self._ended.set()
        self.expected_dead = True
        self._process.stop()
        if self._thread.is_alive():
            self._thread.join(5.0)

    def __enter__(self) -> "Instance":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _watch(self) -> None:
        with closing(self.control(ASK_S)) as control:
            while not self._ended.wait(LOOK_S):
                sample = self._look(control)
                with self._lock:
                    self._samples.append(sample)

    def _look(self, control: ServerControl) -> Sample:
        before = len(self.commits)
        try:
            first = control.paused()
            label = control.label()
            paused = control.paused()
        except (ServerUnreachable, ServerRefused):
            return Sample(time.monotonic(), None, False, before, steady=False)
        after = len(self.commits)
        return Sample(
            time.monotonic(), label, paused, after, steady=not (first or paused) and before == after
        )


def processes_below(pid: int) -> list[tuple[int, str]]:
    """(pid, command line) of every process below ``pid``, oldest first."""
    return _titles(descendants(pid))


def _titles(pids: list[int]) -> list[tuple[int, str]]:
    out = []
    for pid in pids:
        with suppress(OSError):
            text = (
                Path(f"/proc/{pid}/cmdline")
                .read_bytes()
                .replace(b"\0", b" ")
                .decode(errors="replace")
                .strip()
            )
            if text:
                out.append((pid, text))
    return out


def send(pid: int | None, number: int) -> None:
    """Signal a process that may be gone."""
    if pid is not None:
        with suppress(ProcessLookupError):
            os.kill(pid, number)


def thaw(pid: int | None) -> None:
    """Let a frozen process go on."""
    send(pid, signal.SIGCONT)
