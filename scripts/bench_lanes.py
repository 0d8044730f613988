#!/usr/bin/env python
"""What servers cost the trainer's processes: threads, descriptors and wakes of one that is idle,
and what a version a second to all of them does to a ticker on rank 0's main thread.

    python -m scripts.bench_lanes [--servers 256] [--mib 1] [--versions 20] [--window 60] [--pin]
    [--json PATH]

The servers are stubs in one process of their own, each with a port, an HTTP server with vLLM's
routes, and the real receiving half of an epoch, on a thread instead of in a process; the image is
fetched, checked and committed. The trainer's processes (rank 0's, its sync process and the pause
guard) may have 1024 descriptors each (``ulimit -n``). They are counted with one server and with all
of them: a figure per server is the difference over the number of the others. The ticker sleeps for
a millisecond on the main thread again and again: before there is a sync, and while another thread
publishes versions. The pause of a commit is that of servers whose load takes next to no time: what
is left are calls, which the lanes make in one process and the stubs answer in one. The stubs take
only what the trainer's processes leave of the cores, as servers on other hosts would (SCHED_IDLE).
With ``--pin`` the threads of rank 0's own process have the last core for themselves, in both
measurements, and the stubs, the sync process and its pause guard have the others: a trainer's host
has more cores than its ranks.
"""

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the checkout, for tests and scripts

from scripts.common import deliver, options_of, positive, write_json
from tests.rigs.census import wakes
from tests.rigs.server_process import CopiedModel, Server
from tests.rigs.trainer import Trainer
from titan_grpo.config import WeightSync
from titan_grpo.errors import TitanGrpoError
from titan_grpo.layout.manifest import Manifest
from titan_grpo.observe import names
from titan_grpo.protocol.messages import Applied, Commit, Hello, Joined
from titan_grpo.receive.receiver import Receiver
from titan_grpo.rollout.httpd import HttpServer
from titan_grpo.sync.lanes import SyncOptions

ROLE = "TITAN_GRPO_BENCH_LANES"
DESCRIPTORS = 1024
WAIT_S = 300.0
TICK_S = 0.001
SETTLE_S = 3.0
NEVER = threading.Event()
ALL_CORES = os.sched_getaffinity(0)


class ThreadSide:
    """An engine's half whose receivers are threads of this process. One epoch at a time."""

    def __init__(self) -> None:
        self.receiver = None
        self._serving: Receiver | None = None
        self._held = ("", -1, "")
        self._epoch = 0

    def hello(self, data: dict[str, Any]) -> None:
        """A newer epoch. An Attach maps nothing: the memory is this process's already."""
        if "attach" in data:
            return
        hello = Hello.from_dict(data)
        joined = Joined(True, "", "stub", os.getpid(), *self._held, True)
        self._serving = Receiver(hello, joined, None)
        threading.Thread(target=self._run, args=(self._serving,), daemon=True).start()

    def _run(self, receiver: Receiver) -> None:
        with suppress(TitanGrpoError):  # the lane closed the epoch
            receiver.run()

    def commit(self, data: dict[str, Any]) -> None:
        """Take the staged image and give it back."""
        commit = Commit.from_dict(data)
        assert self._serving is not None
        self._serving.lend(commit)
        number, version, print_ = commit.number, commit.version, commit.fingerprint
        self._held = (commit.run_id, version, print_)
        self._serving.applied(Applied(number, version, True, print_, 1, 0.0, "", True))

    def close(self) -> None:
        """Threads end with their lanes."""


def serve(count: int) -> None:
    """The servers' process: print the URLs, serve until it is killed."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
    # No server on another host would take anything from the trainer's cores.
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    torch.set_num_threads(1)
    https = []
    for _ in range(count):
        server = Server(CopiedModel(), side=ThreadSide)  # type: ignore[arg-type]
        https.append(HttpServer("127.0.0.1:0", "", server.answer, "the stub"))
    print(json.dumps([f"http://{http.address}" for http in https]), flush=True)
    NEVER.wait()  # no deadline: a signal ends the process


@contextmanager
def stubs(count: int, pinned: bool) -> Iterator[list[str]]:
    if pinned:
        pin(last=False)
    process = subprocess.Popen(
        [sys.executable, "-m", "scripts.bench_lanes"],
        env={**os.environ, ROLE: f"serve {count}", "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    os.sched_setaffinity(0, ALL_CORES)
    try:
        assert process.stdout is not None
        yield json.loads(process.stdout.readline())
    finally:
        process.kill()
        process.communicate()


def holdings() -> dict[str, float]:
    """Threads, descriptors and wakes so far of this process and its children."""
    out = {"threads": 0.0, "descriptors": 0.0, "wakes": 0.0}
    me = psutil.Process()
    for process in (me, *me.children(recursive=True)):
        out["threads"] += process.num_threads()
        out["descriptors"] += process.num_fds()
        out["wakes"] += wakes(process.pid)
    return out


def ticks(seconds: float) -> list[float]:
    """How long each sleep of a millisecond took, on this thread."""
    out, end = [], time.perf_counter() + seconds
    while (start := time.perf_counter()) < end:
        time.sleep(TICK_S)
        out.append(time.perf_counter() - start)
    return out


def pin(last: bool) -> None:
    """Let the threads of this process, and what they start, run on the last core, or on the
    others."""
    cores = sorted(ALL_CORES)
    for task in Path("/proc/self/task").iterdir():
        os.sched_setaffinity(int(task.name), cores[-1:] if last else cores[:-1])


def p99(values: list[float]) -> float:
    return statistics.quantiles(values, n=100)[98]


def train(options: argparse.Namespace, urls: list[str], folder: str) -> dict[str, float]:
    """The trainer's process: figures with these servers."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (DESCRIPTORS, DESCRIPTORS))
    torch.set_num_threads(1)
    rows = (options.mib << 20) // 2048
    manifest = Manifest.build([("w", "bfloat16", (rows, 1024))], 1 << 20)
    config = WeightSync(
        bind_host="127.0.0.1", block_bytes=1 << 20, bucket_bytes=1 << 20,
        connect_deadline_s=120.0, commit_deadline_s=60.0, progress_deadline_s=60.0,
    )  # fmt: skip
    if options.pin:
        pin(last=True)
    figures = {"tick_p99_alone": p99(ticks(options.versions))}
    if options.pin:
        pin(last=False)  # the sync process is started so
    sync = SyncOptions(urls=urls, engine="vllm")
    with Trainer(manifest, config, Path(folder), sync) as trainer:
        if options.pin:
            pin(last=True)
        trainer.start()
        weights = {"w": torch.randn(rows, 1024)}
        deliver(trainer, 1, weights, WAIT_S)
        time.sleep(SETTLE_S)
        before, began = holdings(), time.monotonic()
        time.sleep(options.window)
        after, took = holdings(), time.monotonic() - began
        figures |= {k: after[k] for k in ("threads", "descriptors")}
        figures["wakes"] = (after["wakes"] - before["wakes"]) / took
        published = [1]
        trainer.recorder.since_last()

        def publish() -> None:
            for version in range(2, options.versions + 2):
                started = time.monotonic()
                if trainer.publish(version, weights):
                    published.append(version)
                NEVER.wait(max(0.0, 1.0 - (time.monotonic() - started)))

        thread = threading.Thread(target=publish, daemon=True)
        thread.start()
        taken = ticks(options.versions)
        thread.join(WAIT_S)
        figures["tick_p99"] = p99(taken)
        reached = trainer.servers.wait_held(published[-1], WAIT_S, everyone=True)
        figures["published"] = len(published)
        figures["lost"] = len(urls) - len(reached)
        figures["pause_s"] = trainer.recorder.since_last()[names.PAUSE_S]
        commits = trainer.recorder.history().commits
        figures["deliveries"] = sum(len(versions) for versions in commits.values())
    return figures


def run_trainer(argv: list[str], urls: list[str]) -> dict[str, float]:
    """``train`` in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder, "figures.json")
        subprocess.run(
            [sys.executable, "-m", "scripts.bench_lanes", *argv],
            env={**os.environ, ROLE: f"train {folder}", "OMP_NUM_THREADS": "1"},
            input=json.dumps(urls),
            text=True,
            check=True,
            timeout=4 * WAIT_S,
        )
        return dict(json.loads(result.read_text()))


def parse(argv: list[str]) -> argparse.Namespace:
    parser = options_of(__doc__)
    parser.add_argument("--servers", type=int, default=256)
    parser.add_argument("--mib", type=positive, default=1, help="bytes of a version, in MiB")
    parser.add_argument("--versions", type=positive, default=20, help="published, one a second")
    parser.add_argument("--window", type=positive, default=60, help="seconds in which all is idle")
    parser.add_argument("--pin", action="store_true", help="rank 0's process on the last core")
    options = parser.parse_args(argv)
    if options.servers < 2:
        parser.error(
            f"--servers must be 2 or more, got {options.servers}: one is compared with all"
        )
    return options


def main(argv: list[str]) -> int:
    """Both runs, and the table."""
    options = parse(argv)
    count = options.servers
    with stubs(count, options.pin) as urls:
        one, some = run_trainer(argv, urls[:1]), run_trainer(argv, urls)
    keys = ("threads", "descriptors", "wakes")
    per = {key: (some[key] - one[key]) / (count - 1) for key in keys}
    alone, beside = some["tick_p99_alone"], some["tick_p99"]
    record = {
        "servers": count,
        "per_server": per,
        "tick_p99_s": {"without": alone, "with": beside},
        "tick_p99_ratio": beside / alone,
        "one": one,
        "all": some,
    }
    write_json(options.json, record)
    print(
        f"{count} idle servers, each costs the trainer's processes {per['threads']:.2f} threads,"
        f" {per['descriptors']:.2f} descriptors, {per['wakes']:.2f} wakes a second"
    )
    print(
        f"1 ms ticker on the main thread, p99: {alone * 1e3:.2f} ms without a sync,"
        f" {beside * 1e3:.2f} ms with a version a second to all servers ({beside / alone:.2f} x)"
    )
    print(
        f"{some['published']:.0f} versions published, {some['deliveries']:.0f} deliveries read"
        f" back (the others skipped by a newer one), {some['lost']:.0f} servers without the newest"
    )
    print(
        f"a commit's pause: {some['pause_s'] * 1e3:.0f} ms in the mean, with one server"
        f" {one['pause_s'] * 1e3:.0f} ms"
    )
    return 1 if some["lost"] else 0


if __name__ == "__main__":
    role, _, rest = os.environ.get(ROLE, "").partition(" ")
    if role == "serve":
        serve(int(rest))
    elif role == "train":
        found = train(parse(sys.argv[1:]), json.loads(sys.stdin.read()), rest)
        Path(rest, "figures.json").write_text(json.dumps(found))
    else:
        raise SystemExit(main(sys.argv[1:]))
