"""One rank of the test with real DTensors: ``snapshot_ranks.py RANK WORLD KIND FOLDER``. Not a test
module itself.

Rank 0 creates the image, every rank writes its own shards into it, rank 0 compares it with to_hf of
the full tensors.
"""

import sys
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from titan_grpo.layout.image import SharedImage
from titan_grpo.layout.infer import infer_layout
from titan_grpo.layout.plan import assign_writers, chunk_of, copy_ops
from titan_grpo.sync.publisher import Snapshotter
from titan_grpo.titan.compat import prepare

prepare()  # once for all ranks, which are forked after this


def build(kind: str) -> tuple[Any, Any]:
    """A tiny torchtitan model with odd sizes (so that FSDP splits unevenly), and its adapter."""
    if kind == "llama3":
        from torchtitan.models.llama3 import Transformer, TransformerModelArgs
        from torchtitan.models.llama3.model.state_dict_adapter import Llama3StateDictAdapter

        args = TransformerModelArgs(
            dim=96,
            n_layers=2,
            n_heads=4,
            n_kv_heads=2,
            vocab_size=131,
            multiple_of=7,
            max_seq_len=64,
        )
        return Transformer(args), Llama3StateDictAdapter(args, None)
    from torchtitan.models.moe import MoEArgs
    from torchtitan.models.qwen3 import Qwen3Model, Qwen3ModelArgs
    from torchtitan.models.qwen3.model.state_dict_adapter import Qwen3StateDictAdapter

    moe = MoEArgs(
        num_experts=5, num_shared_experts=0, top_k=2, use_grouped_mm=False, load_balance_coeff=None
    )
    args = Qwen3ModelArgs(
        dim=96,
        n_layers=2,
        n_heads=4,
        n_kv_heads=2,
        head_dim=24,
        vocab_size=131,
        hidden_dim=259,
        max_seq_len=64,
        enable_weight_tying=kind == "qwen3",
        moe_enabled=kind == "qwen3_moe",
        moe_inter_dim=37,
        moe_args=moe,
    )
    return Qwen3Model(args), Qwen3StateDictAdapter(args, None)


def fsdp(model: torch.nn.Module, mesh: DeviceMesh | None = None) -> dict[str, torch.Tensor]:
    """Row shards of all parameters, as FSDP2 makes them: uneven, and none of some on the last
    rank."""
    mesh = mesh or init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in cast(torch.nn.ModuleDict, model.layers).values():
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return dict(model.named_parameters())


def hsdp(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Two replicas of row shards."""
    return fsdp(
        model,
        init_device_mesh(
            "cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("replicate", "shard")
        ),
    )


def tensor_parallel(
    model: torch.nn.Module, mesh: DeviceMesh | None = None
) -> dict[str, torch.Tensor]:
    """Column shards of matrices and experts, row shards of the vocabulary and of q and k,
    replicated norms."""
    mesh = mesh or init_device_mesh("cpu", (dist.get_world_size(),))
    shards: dict[str, torch.Tensor] = {}
    for fqn, p in model.named_parameters():
        rows = fqn in ("tok_embeddings.weight", "output.weight") or fqn.endswith(
            ("wq.weight", "wk.weight")
        )
        placement = Replicate() if p.dim() == 1 else Shard(0) if rows else Shard(p.dim() - 1)
        shards[fqn] = distribute_tensor(p.detach(), mesh, [placement])
    return shards


def fsdp_tensor_parallel(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """FSDP over tensor parallel shards: two dimensions of rows, or rows and columns."""
    mesh = init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("dp", "tp"))
    for fqn, shard in tensor_parallel(model, mesh["tp"]).items():
        module, _, name = fqn.rpartition(".")
        setattr(model.get_submodule(module), name, torch.nn.Parameter(shard))
    return fsdp(model, mesh["dp"])


WAYS = {2: (tensor_parallel, fsdp), 4: (hsdp, fsdp_tensor_parallel)}
"""Ways of sharding by number of ranks."""


def expected_bytes(
    adapter: Any, full: dict[str, torch.Tensor], wire: torch.dtype
) -> dict[str, bytes]:
    """What a safetensors file of the model would hold: row-major bytes of every HF tensor, cast
    once."""
    return {
        k: v.to(wire).contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        for k, v in adapter.to_hf(full).items()
    }


def share_image(nbytes: int, rank: int) -> SharedImage:
    image = SharedImage.create(nbytes, "titan_grpo-test") if rank == 0 else None
    box: list[Any] = [image.address if image else None]
    dist.broadcast_object_list(box, src=0)
    return image or SharedImage.attach(box[0])


def main(rank: int, world: int, kind: str, folder: Path) -> None:
    """Run the ways of sharding, one after the other."""
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=world
    )
    for shard in WAYS[world]:
        torch.manual_seed(7)
        model, adapter = build(kind)
        with torch.no_grad():
            # ties the embeddings where the model does
            model.init_weights(buffer_device=torch.device("cpu"))
            for p in model.parameters():
                p.normal_()  # norms too: all ones would hide a wrong row
        full = {fqn: p.detach().clone() for fqn, p in model.named_parameters()}
        params = shard(model)
        layout = infer_layout(
            adapter.to_hf,
            {fqn: tuple(p.shape) for fqn, p in params.items()},
            tied={"output.weight"},
        )
        manifest = layout.manifest("bfloat16", 4096)
        chunks: list[Any] = [None] * world
        dist.all_gather_object(chunks, {fqn: chunk_of(p) for fqn, p in params.items()})
        mine = assign_writers(chunks, layout.shapes)[rank]
        ops = {fqn: copy_ops(layout, manifest, fqn, *chunks[rank][fqn]) for fqn in mine}
        image = share_image(manifest.total_bytes, rank)
        local = {fqn: p.to_local() if isinstance(p, DTensor) else p for fqn, p in params.items()}
        snapshotter = Snapshotter(ops, [image.tensor()], torch.device("cpu"), 1 << 16)
        snapshotter.start(local, 0).wait(60.0)
        dist.barrier()
        if rank == 0:
            wanted = expected_bytes(adapter, full, torch.bfloat16)
            assert [t.name for t in manifest.tensors] == list(wanted)
            wrong = [
                t.name
                for t in manifest.tensors
                if image.buffer[t.offset : t.offset + t.nbytes] != wanted[t.name]
            ]
            print(
                f"{shard.__name__}: {len(wanted)} tensors, {sum(map(len, wanted.values()))} bytes,"
                f" wrong {wrong}"
            )
            assert not wrong
        dist.barrier()
        image.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], Path(sys.argv[4]))
