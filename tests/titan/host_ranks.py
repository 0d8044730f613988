"""One rank of a trainer on several hosts: ``host_ranks.py RANK FOLDER WAY HOSTS WAY HOSTS ...``.
Not a test module itself.

``HOSTS`` names the host of each rank, as ``aabb``. For each way of sharding rank 0 brings three
versions to a server without an engine, which must see the tensors that the ranks hold together.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.rigs.receiver_server import DirectControl, ReceiverServer
from tests.sync.snapshot_ranks import build, fsdp, fsdp_tensor_parallel, hsdp
from titan_grpo.config import WeightSync
from titan_grpo.observe.recorder import Recorder
from titan_grpo.sync.lanes import SyncOptions
from titan_grpo.sync.process import SyncProcess
from titan_grpo.titan.weight_sync import Here, Stages, TrainerSync, named_tensors

WAYS = {"fsdp": fsdp, "hsdp": hsdp, "fsdp_tensor_parallel": fsdp_tensor_parallel}
VERSIONS = (0, 1, 2)
WAIT_S = 120.0


def owned_bytes(sync: TrainerSync) -> int:
    """Memory behind this rank's first image, if it is a leader's."""
    return 0 if sync.pool is None else os.fstat(sync.pool.images[0].address.fd).st_blocks * 512


def main(rank: int, folder: Path, *ways: str) -> None:
    """One way after the other; prints a line of JSON for each."""
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=len(ways[1])
    )
    for way, hosts in zip(ways[::2], ways[1::2], strict=True):
        print(json.dumps(published(rank, way, hosts, folder / way)))
    dist.destroy_process_group()


def published(rank: int, way: str, hosts: str, folder: Path) -> dict[str, Any]:
    """Publish, and on rank 0 compare; what is found."""
    torch.manual_seed(7)
    model, adapter = build("llama3")
    with torch.no_grad():
        model.init_weights(buffer_device=torch.device("cpu"))
    WAYS[way](model)
    config = WeightSync(block_bytes=4096, bucket_bytes=16384)
    number = sorted(set(hosts)).index(hosts[rank])
    here = Here(name=hosts[rank], address=f"127.0.0.{number + 1}")
    cpu = torch.device("cpu")
    sync = TrainerSync(Stages([model], model), adapter.to_hf, config, cpu, here=here)
    seen: dict[str, torch.Tensor] = {}
    recorder = worker = server = None
    if rank == 0:
        recorder = Recorder(folder)
        server = ReceiverServer("http://127.0.0.1/a", lambda n, t: seen.update({n: t.clone()}))
        assert sync.pool is not None
        worker = SyncProcess(
            sync.pool,
            config,
            recorder,
            SyncOptions(
                urls=[server.url],
                make_control=lambda _: DirectControl(server),
                remote_writers=sync.plan.others,
                leaders=sync.plan.leaders[1:],
            ),
        )
        worker.start()
    sync.start(worker.publish if worker else None)
    wrong: list[str] = []
    for version in VERSIONS:
        with torch.no_grad():
            for _, tensor in named_tensors([model]):
                tensor.add_(version)
        box: list[Any] = [worker.slots.wait_reserved(WAIT_S) if worker else None]
        dist.broadcast_object_list(box, src=0)
        sync.publisher.publish(version, box[0], sync.shards())
        full = {
            name: (t.full_tensor() if hasattr(t, "full_tensor") else t).to(torch.bfloat16)
            for name, t in named_tensors([model])
            if name in sync.plan.layout.by_fqn
        }
        if worker:
            assert worker.servers.wait_held(version, WAIT_S, everyone=True), (
                worker.servers.take_error()
            )
            wanted = adapter.to_hf(full)
            wrong += [f"{version} {n}" for n in wanted if not torch.equal(wanted[n], seen[n])]
        sync.publisher.fence()
    owned: list[int] = [0] * len(hosts)
    dist.all_gather_object(owned, owned_bytes(sync))
    error = sync.take_error()
    dist.barrier()
    if worker and server and recorder:
        worker.close()
        server.close()
        recorder.close()
    found = {
        "wrong": wrong,
        "error": error,
        "hosts": sync.plan.hosts,
        "owned": owned,
        "total": sync.plan.manifest.total_bytes,
    }
    sync.close()
    return found


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]), *sys.argv[3:])
