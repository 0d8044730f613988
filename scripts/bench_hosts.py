#!/usr/bin/env python
"""Seconds of a version from several trainer hosts to servers on hosts of their own, and each link's
bytes.

    python scripts/bench_hosts.py --trainer-hosts 2 --ranks 2 --receivers 4 --rate 20mbit

Hosts are namespaces of network, names and processes on one switch, each with a limited link: needs
root. ``torchrun --nnodes`` starts ``--ranks`` on each trainer host; masters are float32 and sharded
by FSDP2 over all of them. A receiver is a server without an engine: HTTP routes, plugin half and
receiver process are the real ones. After every version each server's tensors are compared with
the weights that the ranks should hold.

With ``--relay`` servers read from each other (weight_sync.relay). ``--kill-inner`` publishes one
more version, kills a server that is read from in the middle of it, starts it again (not a real
engine), and waits until every server has that version; ``refetched`` is what the dead one's reader
received beyond its usual bytes, over the image.

With ``--engine`` the servers are real ones, which start with other weights (several names take
turns), and ``difference`` is the largest one, in nats, of a log-probability to transformers in
float32 on the version's weights; ``moved`` is what the version changed there, and ``rounding`` the
difference of transformers in bfloat16, the engines' type: what arithmetic does to these weights. A
``difference`` beyond SPARE times as much fails the run, and so does a ``moved`` within it, by which
a wrong version would not be seen.

``--step-s`` publishes a version that often instead, whether servers have the one before or not;
``lag`` is how many versions the slowest server is behind then. ``--delta`` and ``--changed`` show
what patches (weight_sync.delta) do to it.

``--stop-s`` then trains three times that long: with versions, without, and with the last trainer
host's sync process stopped. ``step_s`` has the median step of each; ``stopped_ratio`` is the last
over the second, since no version is complete while the process is stopped: these two only train.
``stopped_versions`` are those published meanwhile, one for each slot. Other load must be steady.

``seconds`` is publish to verified commit on all servers, ``fetch_s`` what the slowest lane needed
for the bytes, ``others_fetch_s`` the slowest one but the ``--slow`` ones. Compare with a run with
``--trainer-hosts 1``.
"""

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from subprocess import PIPE
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the checkout, for tests and scripts

from scripts.common import ROOT, write_json
from scripts.hosts_options import parse
from tests.faults.netns import Host, Hosts, NotAllowed
from tests.rigs.interpreter import wrapper
from tests.rigs.scores import Scores, apart, right, said
from tests.rigs.server_handle import ServerProcess, served_digest
from tests.rigs.watched_sync import WatchedSync
from titan_grpo.commands.processes import engine_python, stop_on_signals
from titan_grpo.config import WeightSync
from titan_grpo.engines.http import ServerAccess
from titan_grpo.engines.launch import Server, ServerSpec
from titan_grpo.engines.server import make_control
from titan_grpo.observe import names
from titan_grpo.observe.recorder import Recorder
from titan_grpo.protocol.lane import LaneEvent, Point
from titan_grpo.protocol.marks import marks
from titan_grpo.sync.host import HostSync
from titan_grpo.sync.lanes import SyncOptions
from titan_grpo.titan.tiny import TinyShape, write_tiny_model
from titan_grpo.titan.weight_sync import Here, Stages, TrainerSync
from titan_grpo.verify.recording import content_digest, tensor_digest

ROLE = "TITAN_GRPO_BENCH_RANK"
"""Environment variable of a rank: its options as JSON."""

COLUMNS = 1024
LAYERS = 8
PORT = 29_517
SERVER_PORT = 8000
BESIDE = ("versions", "no_versions", "stopped")
"""What training goes on beside, one after the other (``--stop-s``)."""

WAIT_S = 500.0
START_S = 1200.0
AT_ONCE = 32
"""Servers that start at the same time."""

CALL_S = 60.0
SPARE = 2.0
"""An engine rounds elsewhere than transformers does, and the largest of some hundred errors
varies."""


class Weights(torch.nn.Module):
    """The same float32 masters everywhere: matrices that make up so many MiB in bfloat16, or the
    model in ``folder``."""

    def __init__(self, mib: int, folder: str, changed: float) -> None:
        super().__init__()
        self._folder, self._every, self._version = folder, round(1 / changed), 0
        if folder:
            tensors = load_file(Path(folder) / "model.safetensors")
        else:
            rows = (mib << 20) // (LAYERS * COLUMNS * 2)
            generator = torch.Generator().manual_seed(7)
            tensors = {
                f"layers.{i}": torch.randn(rows, COLUMNS, generator=generator)
                for i in range(LAYERS)
            }
        self._names = tuple(tensors)
        self.layers = torch.nn.ParameterList(
            torch.nn.Parameter(t.float()) for t in tensors.values()
        )

    def to_hf(self, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Parameters under the names that servers know."""
        return {self._names[int(name.rpartition(".")[2])]: t for name, t in tensors.items()}

    def change(self) -> None:
        """Other values, element by element: the same in a shard and in the whole."""
        with torch.no_grad():
            for p in self.layers:
                if p.dim() < 2 and self._every > 1:
                    continue  # a shard has a part of its only dimension
                whole = p.to_local() if hasattr(p, "to_local") else p
                some = whole[..., self._version % self._every :: self._every]
                some.mul_(1.05 if self._folder else 1.01)
        self._version += 1

    def wire(self) -> dict[str, torch.Tensor]:
        return self.to_hf({n: p.detach().bfloat16() for n, p in self.named_parameters()})

    def digest(self) -> str:
        """What a server that has loaded them says."""
        return content_digest({n: tensor_digest(t) for n, t in self.wire().items()})


def rank_main(options: dict[str, Any]) -> None:
    """One rank. Rank 0 prints a line of JSON for each version, when all servers hold it."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    folder = options["model"]
    whole, model = (Weights(options["mib"], folder, options["changed"]) for _ in range(2))
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    # without relay, each of many servers waits long for its first bucket
    config = WeightSync(
        block_bytes=64 << 10,
        bucket_bytes=1 << 20,
        progress_deadline_s=60.0,
        relay=options["relay"],
        delta=options["delta"],
    )
    cpu = torch.device("cpu")
    sync = TrainerSync(
        Stages([model], model), model.to_hf, config, cpu, here=Here(urls=options["urls"])
    )
    lead = Lead(options, config, sync, whole) if dist.get_rank() == 0 else None
    sync.start(lead.worker.publish if lead is not None else None)
    last = options["versions"]
    for version in range(last + 1 + options["kill"]):
        model.change()
        whole.change()
        paced = options["step_s"] if 0 < version < last else 0.0
        box: list[Any] = [lead.slot(bool(paced)) if lead is not None else None]
        dist.broadcast_object_list(box, src=0)
        began = time.perf_counter()
        if box[0] is not None:
            sync.publisher.publish(version, box[0], sync.shards())
        if lead is not None:
            row = lead.lag(version, began + paced) if paced else lead.committed(version, began)
            print(json.dumps(row), flush=True)
        sync.publisher.fence()
        dist.barrier()
    if options["stop_s"]:
        beside_a_stopped_sync(options, sync, lead, (model, whole), version + 1)
    if lead is not None:
        lead.close()
    dist.barrier()
    sync.close()
    dist.destroy_process_group()


def beside_a_stopped_sync(
    o: dict[str, Any], sync: TrainerSync, lead: "Lead | None", models: Sequence[Weights], at: int
) -> None:
    """Steps beside each of BESIDE, with versions from ``at`` on; then a version."""
    host = sync._announcer if dist.get_rank() == sync.plan.leaders[-1] else None
    seconds: dict[str, list[float]] = {name: [] for name in BESIDE}
    published = Counter[str]()
    work, began, beside = torch.randn(512, 512), time.perf_counter(), BESIDE[0]
    while beside:
        start = time.perf_counter()
        box: list[Any] = [int((start - began) / o["stop_s"])]
        dist.broadcast_object_list(box, src=0)
        before, beside = beside, (*BESIDE, "")[min(box[0], len(BESIDE))]
        if isinstance(host, HostSync) and "stopped" in {before, beside} and before != beside:
            os.kill(host.pid, signal.SIGSTOP if beside else signal.SIGCONT)
        box = [None if lead is None or beside == "no_versions" else lead.slot(bool(beside))]
        dist.broadcast_object_list(box, src=0)
        for _ in range(o["step_products"]):
            torch.mm(work, work)
        for each in models:
            each.change()
        if box[0] is not None:
            sync.publisher.publish(at, box[0], sync.shards())
        sync.publisher.fence()
        dist.barrier()
        if beside:
            seconds[beside].append(time.perf_counter() - start)
            published[beside] += box[0] is not None
        elif lead is not None:
            row = lead.committed(at, start)
            step_s = {name: statistics.median(each) for name, each in seconds.items()}
            row |= {"step_s": step_s, "stopped_versions": published["stopped"]}
            row |= {"stopped_ratio": step_s["stopped"] / step_s["no_versions"]}
            print(json.dumps(row), flush=True)
        at += box[0] is not None


class Lead:
    """Rank 0's servers."""

    def __init__(
        self, options: dict[str, Any], config: WeightSync, sync: TrainerSync, whole: Weights
    ) -> None:
        assert sync.pool is not None
        self._o, self._whole, self._scores = options, whole, Scores()
        urls = self._urls = options["urls"]
        engine = dict(zip(urls, options["engines"], strict=True))
        killer = Killer(len(marks(sync.plan.manifest.total_bytes, config.bucket_bytes)) // 3)
        self._killer, self._recorder = killer, Recorder(options["folder"])
        made = SyncOptions(
            urls=urls,
            make_control=lambda u: make_control(engine[u] or "vllm", ServerAccess(u, CALL_S)),
            remote_writers=sync.plan.others,
            leaders=sync.plan.leaders[1:],
        )
        self.worker = WatchedSync(
            sync.pool, config, self._recorder, made, watch=killer.passed, points={Point.EXTENT}
        )
        killer.sync = self.worker
        self.worker.start()

    def slot(self, paced: bool) -> int | None:
        """For the next version; None: it is skipped."""
        slots = self.worker.slots
        return slots.take_reserved() if paced else slots.wait_reserved(WAIT_S)

    def lag(self, version: int, until: float) -> dict[str, Any]:
        """How far the slowest server is behind at the end of a step."""
        time.sleep(max(0.0, until - time.perf_counter()))
        held = (-1 if v is None else v for v in self.worker.servers.versions().values())
        return {"lag": version - min(held)}

    def committed(self, version: int, began: float) -> dict[str, Any]:
        """When all servers have the version: figures, and what they hold."""
        known, kill = self.worker.servers, self._o["kill"] and version > self._o["versions"]
        self._killer.version = version if kill else None
        holding = known.wait_held(version, WAIT_S, everyone=True)
        seconds = time.perf_counter() - began
        back = kill and not self._o["model"]
        if back:
            known.wait(lambda: set(known.versions().values()) == {version}, WAIT_S)
            holding = [u for u, held in known.versions().items() if held == version]
        if len(holding) != len(self._urls) - (kill and not back):
            raise SystemExit(f"version {version} is at {holding}: {known.take_error()}")
        totals = self._recorder.history().totals
        fetches = sorted(self._recorder.series(names.SEND_S)[-len(self._urls) :])
        figures = {
            "seconds": seconds,
            "fetch_s": fetches[-1],
            "others_fetch_s": fetches[-1 - self._o["slow"]],
            "relayed": totals.get(names.RELAYED_BYTES, 0),
            "spared": totals.get(names.SPARED_BYTES, 0),
        }
        if not self._o["model"]:
            digests = {served_digest(url, CALL_S) for url in self._urls}
            return figures | {"digests_equal": digests == {self._whole.digest()}}
        return figures | self._differences(version, holding)

    def _differences(self, version: int, holding: Sequence[str]) -> dict[str, float]:
        """Largest ones to these weights in float32, in nats: ``difference`` of the servers,
        ``rounding`` of transformers in bfloat16, ``moved`` of the version before."""
        folder = Path(self._o["model"])
        engines = dict(zip(self._urls, self._o["engines"], strict=True))
        save_file(self._whole.wire(), folder / "model.safetensors", metadata={"format": "pt"})
        now, before = right(folder), self._scores
        self._scores = now
        servers = (said(ServerAccess(url, CALL_S), engines[url], str(version)) for url in holding)
        found = {
            "difference": max(apart(scores, now) for scores in servers),
            "rounding": apart(right(folder, torch.bfloat16), now),
        }
        return found | ({"moved": apart(now, before)} if before else {})

    def close(self) -> None:
        self.worker.close()
        self._recorder.close()


class Killer:
    """Names a server that is read from, once its reader has a third of the version ``version``."""

    def __init__(self, marks: int) -> None:
        self._marks, self._passed = marks, Counter[str]()
        self.sync: WatchedSync | None = None
        self.version: int | None = None

    def passed(self, event: LaneEvent) -> None:
        if self.sync is None or event.version != self.version:
            return
        self._passed[event.url] += 1
        inner = self.sync.inner
        if inner is not None and self._passed[inner[1]] == self._marks:
            self.sync = None
            print(json.dumps({"inner": inner[0], "reader": inner[1]}), flush=True)


def serving(host: Host, port: int, engine: str, folder: Path) -> ServerProcess | Server:
    """A server on that host, which has begun to start."""
    if not engine:
        env = {"PYTHONPATH": str(ROOT)}
        return ServerProcess(host.address, port, env=env, inside=host.network)
    name = f"{host.address}-{port}"
    python = wrapper(folder / f"{name}.python", *host.inside, engine_python(engine))
    log, model = str(folder / f"{name}.log"), str(folder / "start")
    return Server(ServerSpec(python, model, log, engine, port, host.address, max_num_seqs=8))


def versions(trainers: Sequence[Host], options: argparse.Namespace, role: str) -> Iterator[Any]:
    """What rank 0 says of each version, as it says it."""
    with ExitStack() as stack:
        nodes = []
        for number, host in enumerate(trainers):
            node = f"--nnodes={len(trainers)} --node_rank={number} --master_port={PORT}"
            node += f" --nproc_per_node={options.ranks} --master_addr={trainers[0].address}"
            file = str(Path(__file__).resolve())
            run = [sys.executable, "-m", "torch.distributed.run", *node.split(), file]
            env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), ROLE: role}
            started = subprocess.Popen([*host.inside, *run], env=env, stdout=PIPE, text=True)
            stack.callback(started.wait)  # no deadline: after a kill
            stack.callback(started.kill)
            nodes.append(started)
        assert nodes[0].stdout is not None
        for line in nodes[0].stdout:
            if line.startswith("{"):
                yield json.loads(line)
        if any(node.wait(WAIT_S) for node in nodes):
            raise SystemExit("a trainer host failed: see above")


def measured(options: argparse.Namespace, stack: ExitStack, folder: str) -> dict[str, Any]:
    count = options.trainer_hosts
    hosts = stack.enter_context(Hosts(count + options.receivers)).hosts
    for number, host in enumerate(hosts):
        slow = count <= number < count + options.slow
        host.limit(options.rate / (10 if slow else 1))
    servers: dict[str, tuple[Host, int, str]] = {}
    for host in hosts[count:]:
        for port in range(SERVER_PORT, SERVER_PORT + options.per_host):
            engine = options.engine[len(servers) % len(options.engine)] if options.engine else ""
            servers[f"http://{host.address}:{port}"] = host, port, engine
    if options.engine:
        shape = TinyShape(hidden=256, layers=max(1, options.mib // 2), head_dim=64, ffn=1024)
        for name, seed in ("start", 100), ("model", 1):
            write_tiny_model("qwen3", Path(folder) / name, seed, std=0.05, shape=shape)
    engines = [engine for _, _, engine in servers.values()]
    with ThreadPoolExecutor(AT_ONCE) as pool:
        starting = {url: pool.submit(serving, *p, Path(folder)) for url, p in servers.items()}
    # Those that did start are ended also if another one did not.
    for each in starting.values():
        if each.exception() is None:
            stack.enter_context(each.result())
    running = {url: each.result() for url, each in starting.items()}
    for server in running.values():
        server.wait_healthy(START_S)
    same = ("mib", "versions", "relay", "delta", "changed", "slow")
    role = {key: getattr(options, key) for key in same}
    role |= {"urls": list(servers), "folder": folder, "kill": options.kill_inner}
    role |= {"model": f"{folder}/model" if options.engine else "", "step_s": options.step_s}
    role |= {"engines": engines, "stop_s": options.stop_s, "step_products": options.step_products}
    rows, links, killed = [], [], {}
    before = [host.moved() for host in hosts]
    for row in versions(hosts[:count], options, json.dumps(role)):
        if "inner" in row:
            killed = row
            inner = running[row["inner"]]
            inner.signal(signal.SIGKILL)
            if isinstance(inner, ServerProcess):
                # it answers the lane, which asks again and again, once it listens
                inner.stop()
                inner.start()
            continue
        now = [host.moved() for host in hosts]
        rows.append(row)
        print(json.dumps(row), file=sys.stderr, flush=True)
        links.append([(b[0] - a[0], b[1] - a[1]) for a, b in zip(before, now, strict=True)])
        before = now
    reader = hosts.index(servers[killed["reader"]][0]) if killed else None
    return figures_of(options, rows, links, killed, reader, image_bytes(options, folder)) | (
        judged(rows) if options.engine else {}
    )


def judged(rows: Sequence[Any]) -> dict[str, Any]:
    """What the log-probabilities of real engines say; ``digests_equal`` too."""
    scored = [row for row in rows if "difference" in row]
    over = max(row["difference"] / row["rounding"] for row in scored)
    told = min(row["moved"] / row["rounding"] for row in scored if "moved" in row)
    keys = ("difference", "rounding", "moved")
    found = {key: max(row.get(key, 0.0) for row in scored) for key in keys}
    return found | {"digests_equal": over <= SPARE < told}


def image_bytes(options: argparse.Namespace, folder: str) -> int:
    if not options.engine:
        return int(options.mib) << 20
    tensors = load_file(Path(folder) / "model" / "model.safetensors")
    return sum(tensor.nbytes for tensor in tensors.values())


def figures_of(
    options: argparse.Namespace,
    rows: Sequence[Any],
    links: Sequence[Any],
    killed: dict[str, str],
    reader: int | None,
    image: int,
) -> dict[str, Any]:
    """What is printed. ``reader``: number of the host that read from the ``killed`` one."""
    count = options.trainer_hosts
    more: dict[str, Any] = {}
    if options.kill_inner:
        if reader is None:
            raise SystemExit("no server was read from by another one: none was killed")
        usual = statistics.median(link[reader][1] for link in links[1:-1])
        more = {"killed": killed, "refetched": (links[-1][reader][1] - usual) / image}
        more |= {"kill_seconds": rows[-1]["seconds"], "kill_sent": links[-1][0][0] / image}
    if options.step_s:
        lags = [row["lag"] for row in rows if "lag" in row]
        more |= {"lag": statistics.median(lags), "most_lag": max(lags)}
    if options.stop_s:
        more |= {key: rows[-1][key] for key in ("step_s", "stopped_ratio", "stopped_versions")}
    # the first version finds lanes that are still connecting
    kept = [i for i in range(1, options.versions + 1) if "seconds" in rows[i]]
    settings = ("trainer_hosts", "ranks", "receivers", "per_host", "relay", "engine", "delta")
    return {
        **{key: getattr(options, key) for key in settings},
        "bytes_per_s": options.rate,
        "image_bytes": image,
        "seconds": statistics.median(rows[i]["seconds"] for i in kept),
        "fetch_s": statistics.median(rows[i]["fetch_s"] for i in kept),
        "others_fetch_s": statistics.median(rows[i]["others_fetch_s"] for i in kept),
        "relayed": rows[-1]["relayed"] / image,
        "spared": rows[-1]["spared"] / image,
        "sent_by_trainer_hosts": [
            statistics.median(links[i][host][0] / image for i in kept) for host in range(count)
        ],
        "received_by_servers": [
            statistics.median(links[i][host][1] / image for i in kept)
            for host in range(count, len(links[0]))
        ],
        "digests_equal": all(row.get("digests_equal", True) for row in rows),
        **more,
        "versions": [row | {"links": link} for row, link in zip(rows, links, strict=True)],
    }


def main(argv: Sequence[str]) -> int:
    """Exit code: 2 without the rights, 1 if a server held other bytes."""
    options = parse(__doc__, argv)
    stop_on_signals()  # its namespaces and servers would outlive it
    if os.geteuid() != 0:
        print("bench_hosts: hosts are namespaces, which need root: run it as root", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        try:
            figures = measured(options, stack, folder)
        except NotAllowed as error:
            print(f"bench_hosts: no namespaces with limited links here: {error}", file=sys.stderr)
            return 2
    print(json.dumps({key: value for key, value in figures.items() if key != "versions"}, indent=1))
    write_json(options.json, figures)
    return 0 if figures["digests_equal"] else 1


if __name__ == "__main__":
    if ROLE in os.environ:
        rank_main(json.loads(os.environ[ROLE]))
    else:
        sys.exit(main(sys.argv[1:]))
