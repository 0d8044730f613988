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
more version, kills a server that is read from in the middle of it, starts it again, and waits until
everybody has that version; ``refetched`` is what the dead one's reader received beyond its usual
bytes, over the image.

``seconds`` is publish to verified commit on all servers, ``fetch_s`` what the slowest lane needed
for the bytes. Compare with a run with ``--trainer-hosts 1``.
"""

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the checkout, for tests and scripts

from tests.faults.netns import Host, Hosts, NotAllowed
from tests.rigs.server_handle import served
from titan_grpo.commands.processes import stop_on_sigterm
from titan_grpo.config import WeightSync
from titan_grpo.engines.http import ServerAccess, SyncDriver
from titan_grpo.engines.server import make_control
from titan_grpo.layout.digest import content_digest, tensor_digest
from titan_grpo.observe import names
from titan_grpo.observe.recorder import Recorder
from titan_grpo.protocol.lane_events import LaneEvent, Point
from titan_grpo.sync.relay import Relay
from titan_grpo.sync.worker import SyncOptions, SyncWorker
from titan_grpo.titan.hosts import Here
from titan_grpo.titan.weight_sync import TrainerSync

ROOT = Path(__file__).resolve().parents[1]
ROLE = "TITAN_GRPO_BENCH_RANK"
"""Environment variable of a rank: its options as JSON."""

COLUMNS = 1024
LAYERS = 8
PORT = 29_517
SERVER_PORT = 8000
WAIT_S = 500.0
CALL_S = 60.0
UNITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}


def rate(text: str) -> float:
    """Bytes per second: ``rate("20mbit") == 2.5e6``."""
    found = re.fullmatch(r"([0-9.]+)(kbit|mbit|gbit)", text)
    if found is None:
        raise argparse.ArgumentTypeError(f"must be like 20mbit, got {text!r}")
    return float(found[1]) * UNITS[found[2]] / 8


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--trainer-hosts", type=int, default=2, help="hosts that train")
    parser.add_argument("--ranks", type=int, default=2, help="ranks on each of them")
    parser.add_argument("--receivers", type=int, default=4, help="hosts with a server each")
    parser.add_argument("--per-host", type=int, default=1, help="servers on each of these hosts")
    parser.add_argument("--relay", action=argparse.BooleanOptionalAction, default=False)
    parser.add_argument("--kill-inner", action="store_true", help="needs --relay and 3 receivers")
    parser.add_argument("--rate", type=rate, default="20mbit", help="of each link, each way")
    parser.add_argument("--mib", type=int, default=8, help="bytes of one version, in MiB")
    parser.add_argument("--versions", type=int, default=3, help="measured ones, after the first")
    parser.add_argument("--json", default="", metavar="PATH", help="write every figure there")
    return parser.parse_args(argv)


class Weights(torch.nn.Module):
    """Matrices that make up so many MiB in bfloat16; masters are float32, the same everywhere."""

    def __init__(self, mib: int) -> None:
        super().__init__()
        rows = (mib << 20) // (LAYERS * COLUMNS * 2)
        generator = torch.Generator().manual_seed(7)
        self.layers = torch.nn.ParameterList(
            torch.nn.Parameter(torch.randn(rows, COLUMNS, generator=generator))
            for _ in range(LAYERS)
        )

    def change(self) -> None:
        """Other values, element by element: the same in a shard and in the whole."""
        with torch.no_grad():
            for p in self.layers:
                (p.to_local() if hasattr(p, "to_local") else p).mul_(1.01)

    def digest(self) -> str:
        """What a server that has loaded them says."""
        named = self.named_parameters()
        return content_digest({n: tensor_digest(p.to(torch.bfloat16)) for n, p in named})


def rank_main(options: dict[str, Any]) -> None:
    """One rank. Rank 0 prints a line of JSON for each version, when all servers hold it."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, urls = dist.get_rank(), options["urls"]
    whole, model = Weights(options["mib"]), Weights(options["mib"])
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    # without relay, each of many servers waits long for its first bucket
    config = WeightSync(
        block_bytes=64 << 10,
        bucket_bytes=1 << 20,
        progress_deadline_s=60.0,
        relay=options["relay"],
    )
    cpu = torch.device("cpu")
    sync = TrainerSync(model, dict, config, cpu, here=Here(urls=urls))
    worker = recorder = None
    killer = Killer(sync.plan.manifest.total_bytes // config.bucket_bytes // 3)
    if rank == 0:
        assert sync.pool is not None
        recorder = Recorder(options["folder"])
        made = SyncOptions(
            urls=urls,
            make_control=lambda url: make_control("vllm", ServerAccess(url, CALL_S)),
            remote_writers=sync.plan.others,
            leaders=sync.plan.leaders[1:],
            lane_observer=killer.passed,
        )
        worker = SyncWorker(sync.pool, config, recorder, made)
        killer.relay = worker.relay
        worker.start()
    sync.start(worker.publish if worker is not None else None)
    for version in range(options["versions"] + 1 + options["kill"]):
        model.change()
        whole.change()
        box: list[Any] = [worker.slots.wait_reserved(WAIT_S) if worker is not None else None]
        dist.broadcast_object_list(box, src=0)
        began = time.perf_counter()
        sync.publish(version, box[0])
        if worker is not None and recorder is not None:
            killer.version = version if version > options["versions"] else None
            holding = worker.servers.wait_held(version, WAIT_S, everyone=True)
            seconds = time.perf_counter() - began
            if killer.version is not None:
                holding = worker.servers.wait_held(version, WAIT_S, everyone=True)
                known = worker.servers
                known.wait(lambda: set(known.versions().values()) == {version}, WAIT_S)  # noqa: B023
                holding = [u for u, held in known.versions().items() if held == version]
            if len(holding) != len(urls):
                raise SystemExit(
                    f"version {version} is at {holding}: {worker.servers.take_error()}"
                )
            figures = {
                "seconds": seconds,
                "fetch_s": max(recorder.series(names.SEND_S)[-len(urls) :]),
                "digests_equal": [held(url) for url in urls] == [whole.digest()] * len(urls),
            }
            print(json.dumps(figures), flush=True)
        sync.fence()
        dist.barrier()
    if worker is not None and recorder is not None:
        worker.close()
        recorder.close()
    dist.barrier()
    sync.close()
    dist.destroy_process_group()


class Killer:
    """Names a server that is read from, once its reader has a third of the version ``version``."""

    def __init__(self, marks: int) -> None:
        self._marks, self._passed = marks, Counter[str]()
        self.relay: Relay | None = None
        self.version: int | None = None

    def passed(self, event: LaneEvent) -> None:
        """See lane_events.Observer."""
        if self.relay is None or event.point is not Point.EXTENT or event.version != self.version:
            return
        self._passed[event.url] += 1
        inner = self.relay.inner()
        if inner is not None and self._passed[inner[1]] == self._marks:
            self.relay = None
            print(json.dumps({"inner": inner[0], "reader": inner[1]}), flush=True)


def held(url: str) -> str:
    """Digest of what the server's memory holds."""
    with SyncDriver(url) as driver:
        return str(driver.run(served(timeout_s=CALL_S))["digest"])


def started(stack: ExitStack, host: Host, command: Sequence[str], **env: str) -> Any:
    """A Python process on that host, which ends with ``stack``."""
    process = subprocess.Popen(
        [*host.inside, sys.executable, *command],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **env},
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
    )
    stack.callback(process.wait)  # no deadline: after a kill
    stack.callback(process.kill)
    return process


def serving(stack: ExitStack, host: Host, port: int) -> Any:
    """A server on that host, which says a line when it listens."""
    args = ["-m", "tests.rigs.server_process", "--host", host.address, "--port", str(port)]
    return started(stack, host, args)


def versions(trainers: Sequence[Host], options: argparse.Namespace, role: str) -> Iterator[Any]:
    """What rank 0 says of each version, as it says it."""
    env = {ROLE: role}
    with ExitStack() as stack:
        nodes = []
        for number, host in enumerate(trainers):
            node = f"--nnodes={len(trainers)} --node_rank={number} --master_port={PORT}"
            node += f" --nproc_per_node={options.ranks} --master_addr={trainers[0].address}"
            file = str(Path(__file__).resolve())
            if len(trainers) * options.ranks == 1:  # torchrun would only watch it
                alone = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": host.address}
                nodes.append(started(stack, host, [file], MASTER_PORT=str(PORT), **alone, **env))
                continue
            command = ["-m", "torch.distributed.run", *node.split(), file]
            nodes.append(started(stack, host, command, **env))
        for line in nodes[0].stdout:
            if line.startswith("{"):
                yield json.loads(line)
        if any(node.wait(WAIT_S) for node in nodes):
            raise SystemExit("a trainer host failed: see above")


def measured(options: argparse.Namespace, stack: ExitStack, folder: str) -> dict[str, Any]:
    """All figures."""
    count = options.trainer_hosts
    hosts = stack.enter_context(Hosts(count + options.receivers)).hosts
    for host in hosts:
        host.limit(options.rate)
    servers: dict[str, tuple[Host, int]] = {}
    for host in hosts[count:]:
        for port in range(SERVER_PORT, SERVER_PORT + options.per_host):
            servers[f"http://{host.address}:{port}"] = host, port
    running = {url: serving(stack, *place) for url, place in servers.items()}
    for server in running.values():
        server.stdout.readline()  # no deadline: it listens, or has ended
    role = {"urls": list(servers), "mib": options.mib, "versions": options.versions}
    role |= {"folder": folder, "relay": options.relay, "kill": options.kill_inner}
    rows, links, killed = [], [], {}
    before = [host.moved() for host in hosts]
    for row in versions(hosts[:count], options, json.dumps(role)):
        if "inner" in row:
            killed = row
            running[row["inner"]].kill()
            running[row["inner"]].wait()  # no deadline: after a kill
            # it answers the lane, which asks again and again, once it listens
            running[row["inner"]] = serving(stack, *servers[row["inner"]])
            continue
        now = [host.moved() for host in hosts]
        rows.append(row)
        links.append([(b[0] - a[0], b[1] - a[1]) for a, b in zip(before, now, strict=True)])
        before = now
    image = options.mib << 20
    more: dict[str, Any] = {}
    if options.kill_inner:
        if not killed:
            raise SystemExit("no server was read from by another one: none was killed")
        reader = hosts.index(servers[killed["reader"]][0])
        usual = statistics.median(link[reader][1] for link in links[1:-1])
        more = {"killed": killed, "refetched": (links[-1][reader][1] - usual) / image}
        more |= {"kill_seconds": rows[-1]["seconds"], "kill_sent": links[-1][0][0] / image}
    kept = range(1, options.versions + 1)  # the first version finds lanes that are still connecting
    return {
        "trainer_hosts": count,
        "ranks": options.ranks,
        "receivers": options.receivers,
        "servers": len(servers),
        "relay": options.relay,
        "bytes_per_s": options.rate,
        "image_bytes": image,
        "seconds": statistics.median(rows[i]["seconds"] for i in kept),
        "fetch_s": statistics.median(rows[i]["fetch_s"] for i in kept),
        "sent_by_trainer_hosts": [
            statistics.median(links[i][host][0] / image for i in kept) for host in range(count)
        ],
        "received_by_servers": [
            statistics.median(links[i][host][1] / image for i in kept)
            for host in range(count, len(hosts))
        ],
        "digests_equal": all(row["digests_equal"] for row in rows),
        **more,
        "versions": [row | {"links": link} for row, link in zip(rows, links, strict=True)],
    }


def main(argv: Sequence[str]) -> int:
    """Exit code: 2 without the rights, 1 if a server held other bytes."""
    options = parse(argv)
    stop_on_sigterm()  # its namespaces and servers would outlive it
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
    if options.json:
        Path(options.json).write_text(json.dumps(figures, indent=1) + "\n")
    return 0 if figures["digests_equal"] else 1


if __name__ == "__main__":
    if ROLE in os.environ:
        rank_main(json.loads(os.environ[ROLE]))
    else:
        sys.exit(main(sys.argv[1:]))
