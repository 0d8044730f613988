"""One rank that saves Hugging Face files of a model with tied embeddings, whose base model's index
names the head too, after a run that was killed in its first save: ``tied_rank.py RANK PORT
FOLDER``. Not a test module itself.

Prints one JSON line: whether it began with the weights of the base model, the names in the index
that it has written, and those in the files.
"""

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from tests.titan.pipeline_rank import job_of, train_to
from titan_grpo.receive.checkpoint import INDEX
from titan_grpo.titan.tiny import write_tiny_model
from titan_grpo.titan.trainer import GRPOTrainer

FILES = [f"model-0000{number}-of-00002.safetensors" for number in (1, 2)]


def split(model: Path) -> None:
    """Divide the weights of a model into two files: the second one has the head."""
    weights = load_file(model / "model.safetensors")
    (model / "model.safetensors").unlink()
    heads = {"lm_head.weight": weights["model.embed_tokens.weight"].clone()}
    placed: dict[str, str] = {}
    for file, tensors in zip(FILES, (weights, heads), strict=True):
        save_file(tensors, model / file, metadata={"format": "pt"})
        placed |= dict.fromkeys(tensors, file)
    (model / INDEX).write_text(json.dumps({"weight_map": placed}))


def main(rank: int, port: str, folder: Path) -> None:
    model = write_tiny_model("qwen3", folder / "model", seed=1)
    split(model)
    given = (f"--model.hf_assets_path={model}", f"--job.dump_folder={folder / 'run'}")
    trainer = GRPOTrainer(job_of(rank, 1, port, *given, "--checkpoint.last_save_in_hf"))
    trainer.controller = None  # which has started nothing yet
    out = folder / "run/checkpoint/step-1"
    out.mkdir(parents=True)
    (out / "__0_0.distcp").write_bytes(b"half of it")
    trainer.checkpointer.load(-1)
    base = load_file(model / FILES[0])["model.embed_tokens.weight"]
    began = torch.equal(trainer.whole.tok_embeddings.weight, base.float())
    train_to(trainer, 1)
    placed = json.loads((out / INDEX).read_text())["weight_map"]
    written = [name for file in out.glob("*.safetensors") for name in load_file(file)]
    print(json.dumps([began, sorted(placed), sorted(written)]))
    trainer.close()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], Path(sys.argv[3]))
