#!/usr/bin/env python
"""Seconds from publish to verified commit, and its goodput as a share of a raw socket and of a
memcpy.

    python scripts/bench_sync.py [--mib 256] [--hosts same|two] [--tls] [--rounds 5] [--json PATH]

Two ranks hold float32 masters sharded by FSDP2. Everything between them and the server is the real
thing: layout, shared images, snapshot, sealer, lane, receiver process. The server has no engine:
its commit lends the image, attaches it and visits every tensor. In each round, one after the other:
a memcpy by one thread, the same bytes through one TCP socket from rank 0 to rank 1, and one
version. Before the figures count, one version is compared with the trainer's.

With ``--hosts two`` (needs root) the server is a process behind HTTP with a network and a pid
namespace of its own: it reads no memory of the trainer, so versions come over TCP, as the raw
socket's bytes do. socket_s over fetch_s is what that is for: such a server copies every tensor and
hashes all of them at each call, so commit_s and total_s are its own.
"""

import argparse
import contextlib
import json
import os
import platform
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, astuple, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the checkout, for tests and scripts

from scripts.common import options_of, positive, spread, write_json
from tests.faults.netns import Host, Hosts, NotAllowed
from tests.rigs.receiver_server import DirectControl, ReceiverServer
from tests.rigs.server_handle import ServerProcess, served_digest
from tests.rigs.sockets import certificate
from titan_grpo.commands.processes import stop_on_signals
from titan_grpo.config import WIRE_BYTES, WeightSync
from titan_grpo.engines.http import ServerAccess
from titan_grpo.engines.server import ServerControl, make_control
from titan_grpo.layout.memory import available_memory
from titan_grpo.observe import names
from titan_grpo.observe.recorder import Recorder
from titan_grpo.receive.commit import tensor_views
from titan_grpo.sync.lanes import SyncOptions
from titan_grpo.sync.process import SyncProcess
from titan_grpo.titan.weight_sync import Stages, TrainerSync
from titan_grpo.verify.recording import content_digest, tensor_digest

RANKS = 2
MEMCPY_BYTES = 256 << 20
"""Of the buffer that memcpy reads again and again: far over any cache."""

PROCESSES_MIB = 2048
"""Of ranks, sync process, receiver and what memcpy and the raw socket use."""

LAYERS, COLUMNS = 16, 4096
WAIT_S = 120.0
ROLE = "TITAN_GRPO_BENCH"
"""Variable with a rank's Role in JSON."""

MEANING = {
    "total_s": "publish to verified commit, on rank 0's clock",
    "copy_s": (
        "float32 shards cast into the image, the slower rank (inside publish: what the trainer"
        " pays)"
    ),
    "digest_s": "the trainer's hash of all blocks",
    "fetch_s": "the lane: until the receiver has every byte, checked",
    "verify_s": (
        "the receiver's checks (part of fetch_s; tcp: summed over threads that also fetch)"
    ),
    "commit_s": "pause, lend, attach, visit, label, resume, read back",
    "rest_s": "total less copy, digest, fetch and commit: hand-overs between threads and ranks",
    "memcpy_s": "as many bytes, one thread, memory that is mapped already",
    "socket_s": (
        "as many bytes, rank 0 to rank 1 (on the server's host), one TCP stream, the same bucket"
        " size"
    ),
}


def parse(argv: list[str]) -> argparse.Namespace:
    parser = options_of(__doc__)
    add = parser.add_argument
    add("--mib", type=positive, default=256, help="bytes of one version on the wire, in MiB")
    add("--rounds", type=positive, default=5, help="measured rounds after one warm-up round")
    add("--wire-dtype", choices=sorted(WIRE_BYTES), default=WeightSync().wire_dtype)
    add("--hosts", choices=("same", "two"), default="same", help="two: namespaces, needs root")
    add("--tls", action="store_true", help="encrypt (with --hosts two)")
    options = parser.parse_args(argv)
    if options.hosts == "two" and os.geteuid() != 0:
        parser.error("--hosts two makes namespaces, which needs root")
    return options


@dataclass(frozen=True)
class Role:
    """The arguments of a rank's process. ``url``: of the server on ``host`` (by its fields); empty:
    the server is on this one."""

    rank: int
    folder: str
    url: str = ""
    host: tuple[str, ...] = ()


class Weights(torch.nn.Module):
    """Matrices of ``COLUMNS`` columns that make up ``options.mib`` MiB on the wire; masters are
    float32."""

    def __init__(self, options: argparse.Namespace) -> None:
        super().__init__()
        rows = (options.mib << 20) // (LAYERS * COLUMNS * WIRE_BYTES[options.wire_dtype])
        if rows < RANKS:
            raise SystemExit(
                f"--mib {options.mib} must leave {RANKS} or more rows for each of {LAYERS} layers"
            )
        # Without memory: whole, in each rank, they would take more than all that is measured.
        self.layers = torch.nn.ParameterList(
            torch.nn.Parameter(torch.empty(rows, COLUMNS, device="meta")) for _ in range(LAYERS)
        )

    def fill(self, rank: int) -> None:
        """Make this rank's shards and give them values."""
        self.to_empty(device="cpu")
        generator = torch.Generator().manual_seed(rank)
        with torch.no_grad():
            for p in self.layers:
                p.to_local().normal_(generator=generator)

    def change(self) -> None:
        """Other values, as an optimizer step makes them; nothing of it is measured."""
        with torch.no_grad():
            for p in self.layers:
                p.to_local().mul_(1.01)


def memory_mib(options: argparse.Namespace) -> int:
    """What all processes need together: masters, slots, the server's staging image, in a server on
    another host its own tensors, and the processes themselves."""
    images = WeightSync().slots + 1 + (options.hosts == "two")
    masters = 4 / WIRE_BYTES[options.wire_dtype]
    return int(options.mib * (images + masters)) + PROCESSES_MIB


class RawSocket:
    """One TCP stream between two ranks: rank 0 sends, rank 1 receives and answers with one byte.
    With a ``space`` rank 1's end is in there. Both use a buffer of one bucket again and again."""

    def __init__(self, rank: int, nbytes: int, bucket_bytes: int, space: Host | None) -> None:
        self._rank, self._nbytes = rank, nbytes
        self._bucket = memoryview(bytearray(min(nbytes, bucket_bytes)))
        address = space.switch if space else "127.0.0.1"
        listener = socket.create_server((address, 0)) if rank == 0 else None
        port: list[Any] = [listener.getsockname()[1] if listener else None]
        dist.broadcast_object_list(port, src=0)
        if listener:
            listener.settimeout(WAIT_S)
            self._peer = listener.accept()[0]
            listener.close()
        else:
            with space.entered() if space else contextlib.nullcontext():
                self._peer = socket.create_connection((address, port[0]), WAIT_S)
        self._peer.settimeout(WAIT_S)
        self._peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def run(self) -> float:
        """Seconds until the receiver has everything (rank 0); the other rank's return value means
        nothing."""
        start = time.perf_counter()
        for offset in range(0, self._nbytes, len(self._bucket)):
            bucket = self._bucket[: self._nbytes - offset]
            if self._rank == 0:
                self._peer.sendall(bucket)
            else:
                self._fill(bucket)
        if self._rank == 0:
            self._peer.recv(1)
        else:
            self._peer.sendall(b"!")
        return time.perf_counter() - start

    def _fill(self, bucket: memoryview) -> None:
        done = 0
        while done < len(bucket):
            got = self._peer.recv_into(bucket[done:])
            if got == 0:
                raise SystemExit("rank 0 ended in the middle of the raw socket's round")
            done += got

    def close(self) -> None:
        self._peer.close()


@dataclass(frozen=True)
class BenchServer:
    """``digest``: of the content that it got as the first version."""

    url: str
    control: ServerControl
    digest: Callable[[], str]


@contextlib.contextmanager
def opened(url: str) -> Iterator[BenchServer]:
    """The one at ``url``, at the other end of a link; without one, in rank 0's process with a
    receiver process of its own."""
    if url:
        control = make_control("vllm", ServerAccess(url, WAIT_S))
        yield BenchServer(url, control, lambda: served_digest(url, WAIT_S))
        return
    seen: dict[str, str] = {}

    def visit(name: str, tensor: torch.Tensor) -> None:
        # Only the first version is hashed: that of the others would be measured.
        if name not in seen:
            seen[name] = tensor_digest(tensor)

    with ReceiverServer("http://127.0.0.1/bench", visit) as server:
        yield BenchServer(server.url, DirectControl(server), lambda: content_digest(seen))


def compare(server: BenchServer, sync: TrainerSync, slot: int) -> None:
    """Raise SystemExit unless the server got the bytes that the trainer published."""
    assert sync.pool is not None
    tensors = tensor_views(sync.pool.images[slot].tensor(), sync.plan.manifest)
    held = content_digest({name: tensor_digest(tensor) for name, tensor in tensors})
    if (found := server.digest()) != held:
        raise SystemExit(f"the server must hold content {held}, the trainer's; it holds {found}")


def memcpy(source: torch.Tensor, target: torch.Tensor, nbytes: int) -> float:
    """Seconds of copying so many bytes; torch uses one thread here (set in ``rank_main``)."""
    start = time.perf_counter()
    for offset in range(0, nbytes, source.nbytes):
        part = slice(0, nbytes - offset)
        target[part].copy_(source[part])
    return time.perf_counter() - start


def one_version(
    sync: TrainerSync, worker: SyncProcess | None, recorder: Recorder | None, version: int
) -> tuple[dict[str, float], int]:
    """Publish ``version`` and, on rank 0, wait for its commit: (figures of rank 0, the slot that
    was used)."""
    box: list[Any] = [worker.slots.wait_reserved(WAIT_S) if worker is not None else None]
    dist.broadcast_object_list(box, src=0)
    dist.barrier()
    start = time.perf_counter()
    sync.publisher.publish(version, box[0], sync.shards())
    copied = torch.tensor([time.perf_counter() - start], dtype=torch.float64)
    figures: dict[str, float] = {}
    if worker is not None and recorder is not None:
        if not worker.servers.wait_held(version, WAIT_S, everyone=True):
            raise SystemExit(
                f"version {version} must be committed within {WAIT_S} s, it was not:"
                f" {worker.servers.take_error()}"
            )
        series = {
            "digest_s": names.DIGEST_S,
            "fetch_s": names.SEND_S,
            "verify_s": names.VERIFY_S,
            "commit_s": names.COMMIT_S,
        }
        figures = {"total_s": time.perf_counter() - start} | {
            k: recorder.series(v)[-1] for k, v in series.items()
        }
    dist.all_reduce(copied, dist.ReduceOp.MAX)
    sync.publisher.fence()
    if figures:
        figures["copy_s"] = copied.item()
        figures["rest_s"] = figures["total_s"] - sum(
            figures[k] for k in ("copy_s", "digest_s", "fetch_s", "commit_s")
        )
    return figures, box[0]


def rounds(options: argparse.Namespace, role: Role, space: Host | None) -> list[dict[str, float]]:
    """All measured rounds; empty on rank 1."""
    rank, folder = role.rank, role.folder
    mesh = init_device_mesh("cpu", (RANKS,))
    model = Weights(options)
    fully_shard(model, mesh=mesh)
    model.fill(rank)
    config = WeightSync(
        wire_dtype=options.wire_dtype,
        bind_host=space.switch if space else "",
    )
    if options.tls:
        # rank 1 serves nothing
        config.tls_certificate, config.tls_key = certificate(Path(folder), f"rank{rank}")
    sync = TrainerSync(Stages([model], model), dict, config, torch.device("cpu"))
    nbytes = sync.plan.manifest.total_bytes
    recorder = Recorder(folder) if rank == 0 else None
    raw = RawSocket(rank, nbytes, config.bucket_bytes, space)
    out = []
    with opened(role.url) as server:
        worker = None
        if recorder is not None:
            assert sync.pool is not None
            made = SyncOptions(
                urls=[server.url],
                make_control=lambda _: server.control,
                remote_writers=sync.plan.others,
            )
            worker = SyncProcess(sync.pool, config, recorder, made)
            worker.start()
        sync.start(worker.publish if worker is not None else None)
        size = min(nbytes, MEMCPY_BYTES)
        source, target = (torch.ones(size, dtype=torch.uint8) for _ in range(2))
        for version in range(options.rounds + 2):
            model.change()
            figures = {"memcpy_s": memcpy(source, target, nbytes) if rank == 0 else 0.0}
            dist.barrier()
            figures["socket_s"] = raw.run()
            more, slot = one_version(sync, worker, recorder, version)
            if rank == 0 and version == 0:
                compare(server, sync, slot)
            out.append(figures | more)
        if worker is not None:
            worker.close()
        sync.close()
    raw.close()
    if recorder is not None:
        recorder.close()
    # Without the compared version, and one warm-up with both slots used.
    return out[2:] if rank == 0 else []


def rank_main(options: argparse.Namespace, role: Role) -> None:
    """One rank: measure, and on rank 0 write rounds.json."""
    torch.set_num_threads(1)
    meeting = f"file://{role.folder}/rendezvous"
    dist.init_process_group("gloo", init_method=meeting, rank=role.rank, world_size=RANKS)
    measured = rounds(options, role, Host(*role.host) if role.url else None)
    dist.destroy_process_group()
    if role.rank == 0:
        Path(role.folder, "rounds.json").write_text(json.dumps(measured))


def machine() -> str:
    """What matters about this machine, without its name."""
    gpu = (
        f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}"
        if torch.cuda.is_available()
        else "no GPU"
    )
    return f"{os.cpu_count()} {platform.machine()} cores, {gpu}, torch {torch.__version__}"


def result(options: argparse.Namespace, measured: list[dict[str, float]]) -> dict[str, Any]:
    """Medians, shares and everything they were made of, as JSON."""
    median = {key: statistics.median(r[key] for r in measured) for key in MEANING}
    shares = {
        "goodput_share_of_socket": median["socket_s"] / median["total_s"],
        "goodput_share_of_memcpy": median["memcpy_s"] / median["total_s"],
        "fetch_share_of_socket": median["socket_s"] / median["fetch_s"],
        "total_over_copy_plus_socket": median["total_s"] / (median["copy_s"] + median["socket_s"]),
    }
    return {
        "options": vars(options) | {"ranks": RANKS},
        "machine": machine(),
        "median": median,
        "goodput_gib_s": options.mib / 1024 / median["total_s"],
        **shares,
        "rounds": measured,
    }


def table(record: dict[str, Any]) -> str:
    """The result for a terminal."""
    o = record["options"]
    lines = [
        (
            f"{o['mib']} MiB ({o['wire_dtype']}) from {RANKS} ranks to one server, {o['hosts']}"
            f" host{'s' * (o['hosts'] == 'two')}; median of {o['rounds']} rounds"
        ),
        "",
    ]
    for key, meaning in MEANING.items():
        lines.append(f"{key:9} {spread([r[key] for r in record['rounds']])}  {meaning}")
    lines += [
        "",
        (
            f"goodput {record['goodput_gib_s']:.2f} GiB/s: {record['goodput_share_of_socket']:.2f}"
            f" of the raw socket, {record['goodput_share_of_memcpy']:.2f} of the memcpy; raw socket"
            f" / fetch {record['fetch_share_of_socket']:.2f}"
        ),
        f"total is {record['total_over_copy_plus_socket']:.2f} x (copy + raw socket)",
        f"machine: {record['machine']}",
    ]
    if o["hosts"] == "two":
        lines.append("commit_s and total_s have the stub server's copies and hashes of all tensors")
    return "\n".join(lines)


def run_ranks(argv: list[str], folder: str, url: str, host: tuple[str, ...]) -> int:
    """Start the ranks and wait; 0 if all went well."""
    roles = [Role(rank, folder, url, host) for rank in range(RANKS)]
    quiet = {"TORCH_CPP_LOG_LEVEL": "ERROR"}
    ranks = [
        subprocess.Popen(
            [sys.executable, __file__, *argv],
            env=os.environ | quiet | {ROLE: json.dumps(asdict(role))},
        )
        for role in roles
    ]
    try:
        codes = [rank.wait(WAIT_S * 5) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    if any(codes):
        print(f"ranks ended with {codes}", file=sys.stderr)
    return int(any(codes))


def main(argv: list[str]) -> int:
    """Start the server's host and the ranks, wait, report."""
    options = parse(argv)
    if (need := memory_mib(options)) > (have := available_memory() >> 20):
        print(
            f"bench_sync: --mib {options.mib} in {options.wire_dtype} needs {need} MiB of memory,"
            f" {have} are available: it would be killed; use fewer MiB, or --wire-dtype float32,"
            " whose masters are smaller",
            file=sys.stderr,
        )
        return 2
    stop_on_signals()  # its namespace and its switch would outlive it
    with contextlib.ExitStack() as stack:
        folder, url = stack.enter_context(tempfile.TemporaryDirectory()), ""
        host: tuple[str, ...] = ()
        if options.hosts == "two":
            try:
                (space,) = stack.enter_context(Hosts(1)).hosts
            except NotAllowed as error:
                print(f"bench_sync: {error}", file=sys.stderr)
                return 2
            server = ServerProcess(host=space.address, inside=space.inside)
            url, host = stack.enter_context(server).url, astuple(space)
        if run_ranks(argv, folder, url, host):
            return 1
        record = result(options, json.loads(Path(folder, "rounds.json").read_text()))
    write_json(options.json, record)
    print(table(record))
    return 0


if __name__ == "__main__":
    told = os.environ.get(ROLE, "")
    if told:
        rank_main(parse(sys.argv[1:]), Role(**json.loads(told)))
    else:
        raise SystemExit(main(sys.argv[1:]))
