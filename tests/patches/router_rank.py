"""One rank of the test of an MoE's gradients under tensor parallelism: ``router_rank.py RANK
FOLDER``, of four ranks. Not a test module itself."""

import sys
from copy import deepcopy
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from titan_grpo.patches import torchtitan_router_gradient
from titan_grpo.titan.compat import prepare

prepare()  # once for all ranks, which are forked after this

from torchtitan.models.llama4.infra.parallelize import apply_moe_ep_tp  # noqa: E402 - after it
from torchtitan.models.moe import MoE, MoEArgs  # noqa: E402

WIDTH = 16


def model_of(layer: MoE) -> Any:
    """A model of one layer, as torchtitan's functions see it."""
    block = torch.nn.Module()
    block.moe_enabled, block.moe = True, layer  # type: ignore[assignment]
    model = torch.nn.Module()
    model.layers = torch.nn.ModuleDict({"0": block})
    return model


def gradients(layer: MoE, given: torch.Tensor, weights: torch.Tensor) -> dict[str, torch.Tensor]:
    """The gradients of the input and of the router's weights, of the output's sum with weights."""
    (layer(given) * weights).sum().backward()
    found = {"input": given.grad, "gate": layer.router.gate.weight.grad}
    return {n: g.full_tensor() if isinstance(g, DTensor) else g for n, g in found.items()}


def main(rank: int, folder: Path) -> None:
    """Print which gradients are not those of a layer that no ranks share, for each way of sharing
    and of scoring."""
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=4
    )
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("ep", "etp"))
    four = init_device_mesh("cpu", (4,), mesh_dim_names=("all",))
    ways: dict[str, tuple[DeviceMesh, dict[str, Any]]] = {
        "tensor": (four, {"ep_mesh": None, "etp_mesh": None, "ep_etp_mesh": None}),
        "borrowed": (four, {"ep_mesh": four, "etp_mesh": None, "ep_etp_mesh": None}),
        "both": (
            mesh["etp"],
            {"ep_mesh": mesh["ep"], "etp_mesh": mesh["etp"], "ep_etp_mesh": mesh},
        ),
    }
    for (way, (tp, meshes)), before, shared in product(ways.items(), (False, True), (0, 1)):
        args = MoEArgs(num_experts=4, num_shared_experts=shared, top_k=2, use_grouped_mm=False)
        args.score_before_experts, args.load_balance_coeff = before, None
        torch.manual_seed(5)
        plain = MoE(args, WIDTH, 8)
        for parameter in plain.parameters():
            torch.nn.init.normal_(parameter, std=0.5)
        split, rows = deepcopy(plain), torch.randn(2, 8, WIDTH)
        weights = torch.randn(rows.shape)
        wanted = gradients(plain, rows.clone().requires_grad_(), weights)
        apply_moe_ep_tp(model_of(split), tp_mesh=tp, **meshes)
        torchtitan_router_gradient.apply([split], tp, way == "borrowed")
        mine = (distribute_tensor(each, tp, [Shard(1)]) for each in (rows, weights))
        given, weights = next(mine).requires_grad_(), next(mine).to_local()
        found = gradients(split, given, weights)
        wrong = [n for n in wanted if not torch.allclose(found[n], wanted[n], atol=1e-5)]
        print(f"{way}, scores before {before}, {shared} shared: wrong {wrong}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
