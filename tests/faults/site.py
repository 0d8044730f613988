"""The servers of a fault run: one process group each, with what it recorded and what it was seen to
show; and the two seats for them, each behind a proxy: the one that is struck, and the one that must
not notice."""

import json
import random
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import replace
from pathlib import Path
from typing import Protocol

import msgspec
import psutil
import torch
from safetensors import safe_open

from tests.faults.judge import Sample
from tests.rigs.census import descendants
from tests.rigs.interpreter import wrapper
from tests.rigs.proxy import Proxy, address_of
from tests.rigs.server_handle import ServerProcess
from tests.rigs.trainer import digests
from titan_grpo.engines.http import ServerAccess, SyncDriver
from titan_grpo.engines.launch import Server, ServerSpec
from titan_grpo.engines.server import AUTO, ServerControl, detect, make_control
from titan_grpo.errors import ServerRefused, ServerUnreachable
from titan_grpo.verify.outcome import Committed
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

RECEIVER = "titan_grpo.receive.process"
CORES = ("VLLM::EngineCore", "sglang::scheduler")
"""How the processes that hold the weights call themselves. At tensor parallel 2 the first one is
struck."""

FRONTS = ("vllm.entrypoints", "sglang.launch_server")
"""In the command lines of real servers, whose weights are in a process below."""


class Process(Protocol):
    """A server's process group."""

    @property
    def url(self) -> str: ...

    @property
    def group(self) -> int: ...

    def wait_healthy(self, deadline_s: float) -> float:
        """Seconds that its start took; ServerUnreachable if it does not come up."""

    def alive(self) -> bool:
        """Whether its main process runs."""

    def stop(self) -> None:
        """End all of it. Idempotent."""


Say = Callable[[str], None]
Launch = Callable[[Path], Process]
"""Starts a server that records into the folder it is given (verify.site.recorded)."""


def launcher(
    engine: str,
    python: str,
    model: Path,
    devices: Devices,
    host: str,
    inside: Sequence[str] = (),
) -> Launch:
    """Real servers. ``python``: of the engine's environment; ``model``: a folder; ``inside``: a
    command that runs its arguments elsewhere (in a network namespace), or nothing."""

    def launch(folder: Path) -> Process:
        folder.mkdir(parents=True, exist_ok=True)
        inner = wrapper(folder / "python", *inside, "nice", "-n", NICE, python)
        plain = ServerSpec(inner, str(model), str(folder / f"{engine}.log"), engine)
        spec = server_spec(plain, folder, devices)
        # a free port of another host cannot be asked for from here
        return Server(replace(spec, host=host, port=random.randrange(*PORTS) if inside else 0))

    return launch


def engineless_launcher(model: Path, host: str = "127.0.0.1", inside: Sequence[str] = ()) -> Launch:
    """Servers without an engine: they take the tensors of ``model`` (a folder with
    model.safetensors) and nothing else. ``inside``: as ``launcher``'s."""

    def launch(folder: Path) -> Process:
        folder.mkdir(parents=True, exist_ok=True)
        with safe_open(model / "model.safetensors", "pt") as file:
            names = file.keys()  # the file is no mapping
            shapes = json.dumps({name: file.get_slice(name).get_shape() for name in names})
        record = str(recorded(folder).resolve())
        arguments = ("--shapes", shapes, "--record", record)
        return ServerProcess(host, args=arguments, inside=inside)

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
                self._commits += [
                    msgspec.json.decode(line, type=Committed) for line in whole.splitlines()
                ]
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
        self.engine = AUTO
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
        return address_of(self.url)

    @property
    def commits(self) -> list[Committed]:
        """What it recorded so far."""
        return self._record.commits()

    def samples(self, since_s: float = 0.0) -> list[Sample]:
        """What it showed since then."""
        with self._lock:
            return [s for s in self._samples if s.t >= since_s]

    def last(self) -> Sample | None:
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
        with suppress(psutil.Error):
            if text := " ".join(psutil.Process(pid).cmdline()).strip():
                out.append((pid, text))
    return out


class Seat:
    """One address of the trainer's, with whatever answers there now."""

    def __init__(self, name: str, launch: Launch, folder: Path) -> None:
        self.name, self._launch, self._folder = name, launch, folder
        self._number = 0
        self.instance = self._new()
        self.proxy = Proxy(self.instance.address)
        self.retired: list[Instance] = []

    @property
    def url(self) -> str:
        """Where the trainer finds it."""
        return self.proxy.url

    def restart(self) -> float:
        """End what is left of the server, start another one with the weights of the beginning;
        seconds until it answers."""
        self.instance.close()
        self.retired.append(self.instance)
        self.instance = self._new()
        seconds = self.instance.wait_healthy()
        self.proxy.aim(self.instance.address)
        return seconds

    def swap(self, other: Instance) -> Instance:
        """Have another server answer at this address; the one that did before."""
        before, self.instance = self.instance, other
        self.proxy.aim(other.address)
        return before

    def close(self) -> None:
        self.proxy.close()
        self.instance.close()

    def _new(self) -> Instance:
        self._number += 1
        return Instance(
            f"{self.name}{self._number}", self._launch, self._folder / f"{self.name}{self._number}"
        )


class Runs:
    """What every version of every run is made of. ``base``: the model's float32 tensors."""

    def __init__(self, base: Mapping[str, torch.Tensor]) -> None:
        self.base = base
        self._salts: dict[str, int] = {}
        self._known: dict[tuple[str, int], dict[str, str]] = {}

    def register(self, run_id: str, salt: int) -> None:
        self._salts[run_id] = salt

    def salt(self, run_id: str) -> int | None:
        """What tells its weights from other runs'; None for an unknown run."""
        return self._salts.get(run_id)

    def expected(self, run_id: str, version: int) -> Mapping[str, str] | None:
        """Digest of every tensor of that version; None for an unknown run."""
        salt = self._salts.get(run_id)
        if salt is None:
            return None
        key = run_id, version
        if key not in self._known:
            self._known[key] = digests(self.base, version, salt)
        return self._known[key]


class Site:
    """Both seats. A context manager: no server outlives it."""

    def __init__(
        self,
        launch: Launch,
        folder: Path,
        base: Mapping[str, torch.Tensor],
        launch_victim: Launch | None = None,
    ) -> None:
        """``launch_victim``: how the struck server is started, if not as the other one."""
        self.runs = Runs(base)
        with ExitStack() as stack:
            self.victim = Seat("victim", launch_victim or launch, folder)
            stack.callback(self.victim.close)
            self.witness = Seat("witness", launch, folder)
            stack.callback(self.witness.close)
            self._stack = stack.pop_all()

    @property
    def seats(self) -> tuple[Seat, Seat]:
        return self.victim, self.witness

    def wait_healthy(self, say: Say) -> None:
        """Until both answer."""
        began = time.monotonic()
        for seat in self.seats:
            seat.instance.wait_healthy()
            say(f"{seat.name} is healthy after {time.monotonic() - began:.0f} s")

    def __enter__(self) -> "Site":
        return self

    def __exit__(self, *exc: object) -> None:
        self._stack.close()
