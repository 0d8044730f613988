"""One rank of the test with sharded adapters: ``lora_rank.py RANK WORLD KIND FOLDER``. Not a test
module itself.

Rank 0 creates the image, every rank writes its own merged rows into it, rank 0 compares it with the
sum of the whole matrices in float64.
"""

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from tests.sync.snapshot_ranks import build, expected_bytes, fsdp, fsdp_tensor_parallel, share_image
from titan_grpo.config import Lora
from titan_grpo.layout.plan import CopyOp
from titan_grpo.sync.publisher import Snapshotter, local_shards
from titan_grpo.titan import lora
from titan_grpo.titan.weight_sync import Stages, named_tensors, plan_writes

LORA = Lora(rank=5, alpha=12.0)


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.detach()


def adapters_alone(model: torch.nn.Module, adapter: Any, rank: int) -> list[str]:
    """Names of an image of the adapters that do not have the bytes of the whole matrices, on rank
    0."""
    plan = plan_writes(Stages([model], model), adapter.to_hf, "bfloat16", 4096, adapters_only=True)
    image = share_image(plan.manifest.total_bytes, rank)
    shards = lora.adapter_shards(model)
    copier = Snapshotter(plan.ops, [image.tensor()], torch.device("cpu"), 1 << 10)
    copier.start(shards, 0).wait(60.0)
    full = {name: whole(p) for name, p in named_tensors([model]) if lora.is_adapter(name)}
    dist.barrier()
    held, wrong = image.tensor(), []
    for spec, of in zip(plan.manifest.tensors, plan.layout.tensors, strict=True):
        tensor = full[of.fqn]
        if of.fqn.endswith(lora.B):
            layer = of.fqn.removesuffix(lora.B)
            # rows move as the weight's do: its first column says where each of them comes from
            rows = torch.arange(len(tensor))[:, None].expand(-1, full[layer + lora.A].shape[1])
            (moved,) = adapter.to_hf({f"{layer}.weight": rows.contiguous()}).values()
            tensor = 12.0 / 5 * tensor[moved[:, 0]]
        expected = tensor.bfloat16().contiguous().view(torch.uint8).flatten()
        if not torch.equal(held[spec.offset : spec.offset + spec.nbytes], expected):
            wrong.append(spec.name)
    dist.barrier()
    image.close()
    return wrong


def main(rank: int, world: int, kind: str, folder: Path) -> None:
    """Both ways of sharding, one after the other."""
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=world
    )
    for shard in (fsdp, fsdp_tensor_parallel):
        torch.manual_seed(7)
        model, adapter = build(kind)
        names = lora.put_on(model, adapter.to_hf, LORA)
        assert len(names) == 14, names
        with torch.no_grad():
            for p in model.parameters():
                p.normal_()
        shard(model)
        lora.start_values(model, seed=3)
        started = {n: whole(layer.lora_a).clone() for n, layer in lora.adapted(model)}
        with torch.no_grad():
            for n, layer in lora.adapted(model):
                assert not whole(layer.lora_b).any(), "the first policy is the base model"
                assert started[n].unique().numel() == started[n].numel(), "no row twice"
                assert isinstance(layer.lora_b, DTensor)
                local = layer.lora_b.to_local()
                local.copy_(torch.randn(local.shape))
        plan = plan_writes(Stages([model], model), adapter.to_hf, "bfloat16", 4096)
        image = share_image(plan.manifest.total_bytes, rank)
        ops: dict[str, list[CopyOp]] = plan.ops
        merged = lora.merged_shards(model, set(ops))
        shards: dict[str, Any] = {**local_shards(named_tensors([model]), set(ops)), **merged}
        Snapshotter(ops, [image.tensor()], torch.device("cpu"), 1 << 10).start(shards, 0).wait(60.0)
        layers = dict(lora.adapted(model))
        full = {}
        for fqn, tensor in named_tensors([model]):
            full[fqn] = whole(tensor).double()
            if put_on := layers.get(fqn.removesuffix(".weight")):
                up, down = whole(put_on.lora_b).double(), whole(put_on.lora_a).double()
                full[fqn] += 12.0 / 5 * up @ down
        exported = {n: t for n, t in full.items() if n in plan.layout.shapes}
        dist.barrier()
        if rank == 0:
            held = image.tensor()
            wrong = [
                spec.name
                for spec in plan.manifest.tensors
                if held[spec.offset : spec.offset + spec.nbytes].numpy().tobytes()
                != expected_bytes(adapter, exported, torch.bfloat16)[spec.name]
            ]
            drawn = float(started["layers.0.attention.wq"].sum())
            print(f"{shard.__name__}: {len(merged)} merged, wrong {wrong}, drawn {drawn:.6f}")
        dist.barrier()
        image.close()
        alone = adapters_alone(model, adapter, rank)
        if rank == 0:
            print(f"{shard.__name__}: adapters alone, wrong {alone}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], Path(sys.argv[4]))
