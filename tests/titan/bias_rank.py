"""One rank that trains an MoE whose load balancing bias has a name in its checkpoint, and publishes
it: ``bias_rank.py RANK PORT FOLDER``. Not a test module itself.

Prints one JSON line: layer -> whether the bias is what it was before two steps, the type that it
has in the image, and whether the image has its very numbers.
"""

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from tests.titan.pipeline_rank import job_of, published, train_to
from titan_grpo.titan.tiny import write_tiny_model
from titan_grpo.titan.trainer import GRPOTrainer


def main(rank: int, port: str, folder: Path) -> None:
    # Of these files only the tokenizer's are read: the weights are torchtitan's own first ones.
    model = write_tiny_model("qwen3", folder / "model", seed=1)
    job = (
        *("--model.name=deepseek_v3", "--model.flavor=debugmodel"),
        *("--checkpoint.no-enable", "--checkpoint.no-initial_load_in_hf"),
        *(f"--model.hf_assets_path={model}", f"--job.dump_folder={folder / 'run'}"),
    )
    trainer = GRPOTrainer(job_of(rank, 1, port, *job))
    trainer.controller = None  # which has started nothing yet
    biases = {
        name.split(".")[1]: buffer
        for name, buffer in trainer.whole.named_buffers()
        if name.endswith(".moe.expert_bias")
    }
    # Not zero, as a checkpoint's.
    began = {layer: torch.linspace(-0.01, 0.01, len(bias)) for layer, bias in biases.items()}
    for layer, bias in biases.items():
        bias.copy_(began[layer])
    train_to(trainer, 2)
    held, found = published(trainer), {}
    tensors = {spec.name: spec for spec in trainer.sync.plan.manifest.tensors}
    for layer, bias in biases.items():
        spec = tensors[f"model.layers.{layer}.mlp.gate.e_score_correction_bias"]
        sent = held[spec.offset : spec.offset + spec.nbytes].view(torch.float32)
        found[layer] = [torch.equal(bias, began[layer]), spec.dtype, torch.equal(sent, bias)]
    print(json.dumps(found))
    trainer.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], Path(sys.argv[3]))
