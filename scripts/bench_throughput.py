#!/usr/bin/env python
"""What is asynchrony worth where a version takes a tenth, or most, of a step to reach the servers?

    python scripts/bench_throughput.py [--shares 10 40 70] [--steps 20] [--picture PATH.png]
    [--json PATH]        (needs root)

Real: torchtitan's trainer under torchrun on one core, vLLM on the other, weight sync over TCP. Each
server has a network, a pid namespace and a limited link of its own, so that it reads no memory of
the trainer; only its HTTP port is outside the limit. First the steps are timed without a limit: one
run on-policy, where a step is training plus rollouts, and one in which the trainer waits for every
commit (sync). The link is then as fast as makes a sync the wanted share of a synchronous step.
Every share is run in three ways: sync, async with versions committed while requests run (in
flight), and async with servers that finish their requests first (drained). One share also runs
beside a second server whose link is ``SLOWER`` times as slow.

``ideal``: the seconds of the longest of training, rollouts and sync, each measured where nothing
ran beside it. A rollout may be two versions old, in the drained way one. An async run is faster
than the ideal where it leaves out versions.

Of each run there are the processor seconds of a step too: of the trainer, and of the other
processes on its core (``beside``: most is the rollouts' process), of the server, which has the
other core. In the async ways these are what training and rollouts take beside each other, where
cores that share a memory or a clock are slower; in the first row, alone. ``busier``: the share of
the time in which the busier of the two cores works. What the ideal is missed by although this is
near 1 is no waiting.
"""

import argparse
import os
import statistics
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from threading import Event, Thread
from typing import Any

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the checkout, for tests and scripts

from scripts.common import RECIPE, ROOT, Table, keys, options_of, write_json
from tests.faults.netns import Host, Hosts, NotAllowed
from tests.rigs.interpreter import wrapper
from titan_grpo.commands.processes import engine_python, run_logged, stop_on_signals, torchrun
from titan_grpo.engines.launch import Server, ServerSpec
from titan_grpo.errors import TitanGrpoError
from titan_grpo.observe import names
from titan_grpo.observe.recorder import read_metrics
from titan_grpo.titan.flavors import FLAVORS
from titan_grpo.titan.tiny import write_tiny_model

STARTUP_S = 300.0
STALENESS = 2
PROMPTS = 8
"""Of a step, with 8 completions each."""

TOKENS = 96
"""Most of a completion."""

SLOWER = 5.0
SLOW_SHARE = 40
TRAINER, ROLLOUTS, SERVER, OTHERS = "trainer", "rollouts", "server", "others"
"""Roles of processes; others are those of weight sync, and torchrun."""

LOOK_S = 0.05
"""Between two looks for a new line of metrics.jsonl."""

WARM_STEPS = 4
"""Steps at the start that are not counted: compilers, connections, full queues."""

MODES = {
    "sync": ("--grpo.no-async-weight-update",),
    "async, in flight": ("--grpo.async-weight-update",),
    "async, drained": (
        "--grpo.async-weight-update",
        "--rollout.no-in-flight-weight-updates",
        "--rollout.max_staleness",
        "1",  # no request outlives a commit, so more is refused
    ),
}


@dataclass(frozen=True)
class Seen:
    """One run. Seconds are medians over its steps; ``train_s`` is the main thread's work in a step,
    ``sync_s`` from a publish to its commit on the first server."""

    name: str
    share: int
    slow_server: bool
    steps_per_s: float
    step_s: float
    train_s: float
    rollout_wait_s: float
    blocked_s: float
    sync_s: float
    tokens_per_s: float
    versions: int
    cpu_s: dict[str, float]
    """Processor seconds of a step, by role."""

    @property
    def busier(self) -> float:
        """Share of the time in which the busier core works."""
        ours = sum(seconds for role, seconds in self.cpu_s.items() if role != SERVER)
        return max(ours, self.cpu_s[SERVER]) * self.steps_per_s


def parse() -> argparse.Namespace:
    parser, per_cent = options_of(__doc__), "per cent of a sync step"
    parser.add_argument("--shares", nargs="+", type=int, default=[10, 40, 70], help=per_cent)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--picture", type=Path, metavar="PATH.png", help="bars of steps per second")
    options = parser.parse_args()
    if options.steps <= WARM_STEPS:
        parser.error(f"--steps must be over {WARM_STEPS}, which are not counted")
    if not all(0 < share < 100 for share in options.shares):
        parser.error("--shares are per cent of a step, over 0 and under 100")
    if os.geteuid() != 0:
        parser.error("networks with limited links need root")
    return options


@dataclass(frozen=True)
class Served:
    """A server and the link to it."""

    server: Server
    host: Host

    def limit(self, bytes_per_s: float) -> None:
        """``bytes_per_s`` of weights; all requests."""
        self.host.limit_all_but(self.server.spec.port, bytes_per_s)


@contextmanager
def serving_on(host: Host, number: int, model: Path, folder: Path) -> Iterator[Served]:
    """A vLLM that shares no network and no processes with us, on the second core."""
    # With its own /proc it cannot open the trainer's memory: versions go over the link.
    second = "taskset", "-c", str(last_core()), engine_python("vllm")
    spec = ServerSpec(
        wrapper(folder / f"python{number}", *host.inside, *second),
        str(model),
        str(folder / f"server{number}.log"),
        port=8100 + number,
        host=host.address,
        max_num_seqs=128,
        env={"NO_PROXY": "*"},
    )
    with Server(spec) as server:
        server.wait_healthy(STARTUP_S)
        yield Served(server, host)


def last_core() -> int:
    return max(os.sched_getaffinity(0))


def cpu_so_far(hosts: Sequence[Served]) -> Counter[str]:
    """Processor seconds of all processes that this one has started, by role."""
    found = Counter[str]()
    servers = {
        process.pid
        for host in hosts
        for process in psutil.Process(host.server.group).children(recursive=True)
    }
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
            command, used = process.cmdline(), process.cpu_times()
            role = OTHERS
            if process.pid in servers:
                role = SERVER
            elif "titan_grpo.rollout.worker" in command:
                role = ROLLOUTS
            elif "titan_grpo.train" in command and "torch.distributed.run" not in command:
                role = TRAINER
            found[role] += used.user + used.system
    return found


@contextmanager
def cpu_of_steps(metrics: Path, hosts: Sequence[Served]) -> Iterator[dict[str, float]]:
    """Processor seconds of a step that counts, by role, once the run is over."""
    over, seen, found = Event(), list[tuple[int, Counter[str]]](), dict[str, float]()

    def watch() -> None:
        while not over.wait(LOOK_S):
            lines = metrics.read_bytes().count(b"\n") if metrics.exists() else 0
            if lines > max(WARM_STEPS, seen[-1][0] if seen else 0):
                seen.append((lines, cpu_so_far(hosts)))

    thread = Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield found
    finally:
        over.set()
        thread.join(10)
    (first, before), (last, after) = seen[0], seen[-1]
    for role in (TRAINER, ROLLOUTS, OTHERS, SERVER):
        found[role] = (after[role] - before[role]) / (last - first)


def run(
    options: argparse.Namespace,
    folder: Path,
    hosts: Sequence[Served],
    name: str,
    arguments: Sequence[str],
) -> tuple[list[dict[str, Any]], dict[str, float]]:
    """One training run: its lines of metrics.jsonl that count, and their processor seconds."""
    out = folder / name.replace(" ", "_").replace(",", "")
    model, flavor = FLAVORS["qwen3"]
    settings: dict[str, object] = {
        "rollout.servers": ",".join(h.server.url for h in hosts),
        "weight_sync.bind-host": hosts[0].host.switch,
        "weight_sync.transport": "tcp",
        "job.dump_folder": out,
        "training.steps": options.steps,
        "training.local_batch_size": PROMPTS * 8,
        "training.seq_len": 64 + TOKENS,
        "model.name": model,
        "model.flavor": flavor,
        "model.hf_assets_path": folder / "model",
        "rollout.prompts_per_step": PROMPTS,
        "rollout.max_completion_tokens": TOKENS,
        # The server's one core makes no more tokens of more requests: those of a later step would
        # only slow the ones that the trainer waits for.
        "rollout.max_concurrent_requests": PROMPTS * 8,
        "rollout.max_staleness": STALENESS,
        "grpo.num_epochs": 2,
        # The weights change as little as they can: lengths stay as they are.
        "optimizer.lr": 1e-9,
    }
    core, given = str(min(os.sched_getaffinity(0))), [*keys(settings), *arguments]
    command = ["taskset", "-c", core, *torchrun(1, str(ROOT / RECIPE), given)]
    log = folder / f"{out.name}.log"
    metrics = out / "metrics.jsonl"
    with cpu_of_steps(metrics, hosts) as cpu_s:
        run_logged(command, log, {**os.environ, "OMP_NUM_THREADS": "1"}, None)
    return read_metrics(metrics)[WARM_STEPS:], cpu_s


def seen(
    name: str, share: int, slow: bool, run: tuple[Sequence[dict[str, Any]], dict[str, float]]
) -> Seen:
    """What a run's lines say."""
    rows, cpu_s = run

    def median(key: str) -> float:
        return float(statistics.median(row[key] for row in rows if row.get(key) is not None))

    seconds = rows[-1]["time_s"] - rows[0]["time_s"]
    return Seen(
        name=name,
        share=share,
        slow_server=slow,
        steps_per_s=(len(rows) - 1) / seconds,
        step_s=seconds / (len(rows) - 1),
        train_s=median(names.TRAIN_S),
        rollout_wait_s=median(names.ROLLOUT_WAIT_S),
        blocked_s=median(names.BLOCKED_S),
        sync_s=median(names.SYNC_S),
        tokens_per_s=median(names.GENERATED),
        versions=rows[-1][names.SYNC_COUNT] - rows[0][names.SYNC_COUNT],
        cpu_s=cpu_s,
    )


def row(s: Seen, base: Seen, ideal_s: float) -> dict[str, object]:
    """What is printed of a run. ``base``: the synchronous one."""
    return {
        "sync share %": s.share,
        "servers": "one, one slow" if s.slow_server else "one",
        "way": s.name,
        "steps/s": s.steps_per_s,
        "of sync": s.steps_per_s / base.steps_per_s,
        "of ideal": ideal_s * s.steps_per_s,
        "tokens/s": s.tokens_per_s,
        "blocked s": s.blocked_s,
        "waits s": s.rollout_wait_s,
        "sync s": s.sync_s,
        "versions": s.versions,
        "trains s": s.train_s,
        "cpu s: trainer": s.cpu_s[TRAINER],
        "beside": s.cpu_s[ROLLOUTS] + s.cpu_s[OTHERS],
        "server": s.cpu_s[SERVER],
        "busier": s.busier,
    }


def draw(path: Path, found: Sequence[Seen], ideal: dict[int, float]) -> None:
    """Steps per second by way and share."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.add_subplot()
    groups = [(share, False) for share in ideal] + [(SLOW_SHARE, True)] * any(
        s.slow_server for s in found
    )
    for number, name in enumerate(MODES):
        values = [
            next(
                (s.steps_per_s for s in found if (s.share, s.slow_server, s.name) == (*g, name)), 0
            )
            for g in groups
        ]
        bars = axes.bar([i + 0.27 * (number - 1) for i in range(len(groups))], values, 0.26)
        bars.set_label(name)
    for i, (share, _) in enumerate(groups):
        axes.hlines(1 / ideal[share], i - 0.42, i + 0.42, colors="black", linestyles="dashed")
    axes.set_xticks(
        range(len(groups)), [f"{share} %" + ", and a slow server" * slow for share, slow in groups]
    )
    axes.set_xlabel(
        "sync's share of a synchronous step (dashed: 1 / longest of train, rollout, sync)"
    )
    axes.set_ylabel("steps per second")
    axes.legend()
    FigureCanvasAgg(figure).print_png(path)


def measure(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """All runs, one after the other."""
    model = write_tiny_model("qwen3", folder / "model", 1, std=0.05, dtype="bfloat16")
    image_bytes = (model / "model.safetensors").stat().st_size
    with ExitStack() as stack:
        first, second = stack.enter_context(Hosts(2)).hosts
        one = stack.enter_context(serving_on(first, 0, model, folder))
        print(f"one server is up at {one.server.url}; an image has {image_bytes:,} bytes")
        on_policy = (*MODES["sync"], "--rollout.max_staleness", "0")
        alone = seen("on-policy", 0, False, run(options, folder, [one], "on-policy", on_policy))
        free = seen("sync", 0, False, run(options, folder, [one], "free", MODES["sync"]))
        train_s, rollout_s = alone.train_s, alone.rollout_wait_s
        unsynced_s = free.step_s - free.sync_s
        print(
            f"a step: training {train_s:.2f} s, rollouts {rollout_s:.2f} s; synchronous without a"
        )
        print(f"limit {free.step_s:.2f} s, of it sync {free.sync_s:.2f} s\n")
        table = Table(text=18)
        for s in (alone, free):
            table.add(row(s, free, max(train_s, rollout_s, s.sync_s)))
        found, ideal = [alone, free], {}

        def compare(share: int, hosts: Sequence[Served]) -> None:
            base = None
            for name, arguments in MODES.items():
                label = f"{name} {share} {len(hosts)}"
                result = seen(
                    name, share, len(hosts) > 1, run(options, folder, hosts, label, arguments)
                )
                base = base or result
                if len(hosts) == 1 and result is base:
                    ideal[share] = max(train_s, rollout_s, base.sync_s)
                found.append(result)
                table.add(row(result, base, ideal[share]))

        def rate(share: int) -> float:
            return image_bytes / (unsynced_s * share / (100 - share))

        for share in options.shares:
            one.limit(rate(share))
            compare(share, [one])
        if SLOW_SHARE in options.shares:
            other = stack.enter_context(serving_on(second, 1, model, folder))
            one.limit(rate(SLOW_SHARE))
            other.limit(rate(SLOW_SHARE) / SLOWER)
            compare(SLOW_SHARE, [one, other])
    if options.picture:
        draw(options.picture, found, ideal)
    return {
        "image_bytes": image_bytes,
        "train_s": train_s,
        "rollout_s": rollout_s,
        "ideal_s": ideal,
        "staleness": STALENESS,
        "runs": [asdict(s) for s in found],
    }


def main() -> int:
    """Run all, print a table."""
    options = parse()
    stop_on_signals()
    with tempfile.TemporaryDirectory() as name:
        try:
            found = measure(options, Path(name))
        except (NotAllowed, TitanGrpoError) as error:
            print(f"bench_throughput: {error}", file=sys.stderr)
            return 2
    write_json(options.json, found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
