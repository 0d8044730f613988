#!/usr/bin/env python
"""What the controller costs while it waits: processor time of rank 0 and of the rollout process
with 256 requests outstanding.

    python scripts/bench_idle.py [--engine vllm|sglang] [--requests 256] [--remote] [--window 20]
    [--json PATH]

A real run: two CPU ranks, their lanes, pause guard, rollout process, one real server. Once all
requests are at the server it is stopped (SIGSTOP), so that none of them can end while the processor
time is read: whatever is used then is used for waiting. The lanes meanwhile find their server
silent and try again, as they would. With ``--remote`` the rollouts are made, and the engine calls
too, by a rollout service in place of rank 0's child. Printed per process: median over the windows
of user and system time, in percent of one core.
"""

import argparse
import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from signal import SIGCONT, SIGSTOP
from urllib.parse import urlsplit

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the checkout, for tests and scripts

from scripts.common import ENGINES, RECIPE, ROOT, Table, keys, options_of, serving, write_json
from tests.rigs.census import wakes
from tests.rigs.sockets import free_port
from titan_grpo.commands.processes import GRACE_S, torchrun
from titan_grpo.runkey import Key, with_run_key
from titan_grpo.subprocesses import end
from titan_grpo.titan.tiny import write_tiny_model

LIMIT_PERCENT = 2.0
GROUP = 8
TOKENS = 900
START_S = 300.0
SETTLE_S = 2.0
ROLES = {
    "rank 0": "titan_grpo.train",
    "rollouts": "titan_grpo.rollout.worker",
    "service": "titan_grpo.cli",
    "sync": "titan_grpo.sync.process",
    "pause_guard": "titan_grpo.sync.pause_guard_main",
}
"""Process -> module that it runs. torchrun, which starts the ranks, and the other rank are not the
controller."""

CONTROLLER = ("rank 0", "sync", "rollouts", "service")

NEVER = threading.Event()


@dataclass(frozen=True)
class Window:
    """One stretch of time, per process: percent of a core, and how often per second it went to
    sleep and woke."""

    percent: dict[str, float]
    wakes: dict[str, float]


def arguments(options: argparse.Namespace, url: str, out: Path, controller: str) -> list[str]:
    values = {
        "rollout.servers": url,
        "rollout.controller": controller,
        "rollout.prompts_per_step": options.requests // GROUP,
        "rollout.group_size": GROUP,
        "rollout.max_completion_tokens": TOKENS,
        "rollout.max_concurrent_requests": options.requests,
        "rollout.request_timeout_s": 3600,
        "rollout.batch_timeout_s": 3600,
        "training.seq_len": 1024,
        "job.dump_folder": out / "run",
        "model.hf_assets_path": out / "model",
    }
    return keys(values)


@contextmanager
def training(
    options: argparse.Namespace, url: str, out: Path, key: Key
) -> Iterator[psutil.Process]:
    """A run, from its start to its end."""
    env = {**with_run_key(os.environ, key), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    address, controller, commands = f"127.0.0.1:{free_port()}", "local", []
    if options.remote:
        controller = f"http://{address}"
        commands.append([sys.executable, "-m", "titan_grpo.cli", "rollouts", "--bind", address])
    commands.append(torchrun(2, RECIPE, arguments(options, url, out, controller)))
    with (out / "train.log").open("w") as log, ExitStack() as stack:
        for command in commands:
            started = subprocess.Popen(
                command,
                cwd=ROOT,
                env=env,
                text=True,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
            stack.callback(end, started, GRACE_S)
        yield psutil.Process(started.pid)


def controller() -> dict[str, psutil.Process]:
    """Role -> process, of those that are there."""
    below = [
        process
        for process in psutil.Process().children(recursive=True)
        if process.environ().get("RANK", "0") == "0"
    ]
    below = [process for process in below if "torch.distributed.run" not in process.cmdline()]
    return {
        role: process
        for process in below
        for role, module in ROLES.items()
        if module in process.cmdline()
    }


def outstanding(process: psutil.Process, url: str) -> int:
    """Connections to the server: each carries one request."""
    port = urlsplit(url).port
    made = process.net_connections("tcp")
    return sum(
        c.status == psutil.CONN_ESTABLISHED and bool(c.raddr) and c.raddr.port == port for c in made
    )


def wait_outstanding(
    run: psutil.Process, url: str, options: argparse.Namespace, log: Path
) -> dict[str, psutil.Process]:
    """Until the rollout process has that many requests at the server; the controller's
    processes."""
    deadline, count = time.monotonic() + START_S, options.requests
    roles = len(ROLES) - (not options.remote)
    while time.monotonic() < deadline and run.is_running() and run.status() != psutil.STATUS_ZOMBIE:
        found = controller()
        if len(found) == roles and outstanding(found["rollouts"], url) >= count:
            return found
        NEVER.wait(0.2)
    raise SystemExit(
        f"{count} requests must be at the server within {START_S:g} s, they were not; see {log}"
    )


def used(process: psutil.Process) -> tuple[float, int]:
    """(processor seconds, times that it went to sleep) up to now, all threads."""
    times = process.cpu_times()
    return times.user + times.system, wakes(process.pid)


def window(processes: dict[str, psutil.Process], seconds: float) -> Window:
    began, before = time.monotonic(), {role: used(process) for role, process in processes.items()}
    NEVER.wait(seconds)
    took = time.monotonic() - began
    after = {role: used(process) for role, process in processes.items()}
    return Window(
        {role: 100.0 * (after[role][0] - before[role][0]) / took for role in processes},
        {role: (after[role][1] - before[role][1]) / took for role in processes},
    )


def measure(options: argparse.Namespace, out: Path) -> list[Window]:
    """One server, one run, several windows. SystemExit if a request ended meanwhile."""
    key = Key.generate()
    model = write_tiny_model("qwen3", out / "model", seed=1)
    settings = {"max_model_len": 1024, "max_num_seqs": options.requests, "run_key": key}
    with (
        serving(options.engine, model, out / "server.log", **settings) as server,
        training(options, server.url, out, key) as run,
    ):
        processes = wait_outstanding(run, server.url, options, out / "train.log")
        server.signal(SIGSTOP)
        NEVER.wait(SETTLE_S)
        found = [window(processes, options.window) for _ in range(options.windows)]
        left = outstanding(processes["rollouts"], server.url)
        if left < options.requests:
            raise SystemExit(
                f"{options.requests} requests must be outstanding to the end, {left} were"
            )
        # A run that has to end while its server stands still waits for it.
        server.signal(SIGCONT)
    return found


def main() -> int:
    """Print a line per process; 1 if rank 0, rollouts and service together use more than 2 % of a
    core to wait."""
    parser = options_of(__doc__)
    parser.add_argument("--engine", choices=ENGINES, default="vllm")
    parser.add_argument("--remote", action="store_true", help="with a rollout service")
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--window", type=float, default=20.0, help="seconds")
    parser.add_argument("--windows", type=int, default=5)
    options = parser.parse_args()
    out = Path("outputs/bench_idle").resolve()
    out.mkdir(parents=True, exist_ok=True)
    found = measure(options, out)
    print(
        f"{options.requests} requests outstanding, {options.windows} windows of"
        f" {options.window:g} s"
    )
    table = Table(text=12)
    for role in found[0].percent:
        values = [w.percent[role] for w in found]
        row = {"process": role, "% of a core": statistics.median(values)}
        row |= {"least": min(values), "most": max(values)}
        table.add(row | {"wakes/s": statistics.median(w.wakes[role] for w in found)})
    total = statistics.median(sum(w.percent.get(role, 0.0) for role in CONTROLLER) for w in found)
    print(
        f"{'controller':12}{total:13.2f}   all but the pause guard; at most {LIMIT_PERCENT:g} when"
        " idle"
    )
    record = {key: getattr(options, key) for key in ("engine", "remote", "requests")}
    windows = [asdict(w) for w in found]
    write_json(options.json, record | {"controller_percent": total, "windows": windows})
    return int(total > LIMIT_PERCENT)


if __name__ == "__main__":
    sys.exit(main())
