"""One rank of a trainer in one of some situations. Not a test module itself.

``trainer_ranks.py RANK FOLDER CASE RANKS PORT ARGUMENTS CASE ...``: four words for each run, to
which the ranks are dealt in order; the folder of a run is named by its place. A rank prints one
JSON line: what its case returns.
"""

import gc
import json
import shlex
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, cast

import psutil
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

from tests.titan.pipeline_rank import job_of, published, train_to
from titan_grpo.errors import ConfigError, SyncError
from titan_grpo.observe.recorder import Recorder
from titan_grpo.receive.checkpoint import INDEX
from titan_grpo.sync.lanes import SyncOptions
from titan_grpo.sync.process import SyncProcess
from titan_grpo.titan.export import export_version
from titan_grpo.titan.jobconfig import check_files
from titan_grpo.titan.jobfile import QUANTISED
from titan_grpo.titan.tiny import write_tiny_model
from titan_grpo.titan.trainer import GRPOTrainer, run
from titan_grpo.titan.verify_train import VerifyTrainer, image_of

NO_FILES = ("--checkpoint.no-enable", "--checkpoint.no-initial_load_in_hf")
SHORTER_S = 4.0


@dataclass(frozen=True)
class Place:
    """One rank of one run, with a model of its own."""

    rank: int
    world: int
    port: str
    folder: Path

    @property
    def model(self) -> Path:
        """Its files."""
        return self.folder / f"model{self.rank}"

    def job(self, *arguments: str) -> Any:
        """The job of this rank."""
        given = (f"--model.hf_assets_path={self.model}", f"--job.dump_folder={self.folder / 'run'}")
        return job_of(self.rank, self.world, self.port, *given, *arguments)


@contextmanager
def made(place: Place, *arguments: str, publishes: bool = False) -> Iterator[GRPOTrainer]:
    """A trainer without rollouts; ``publishes``: to a server that never answers."""
    trainer = GRPOTrainer(place.job(*arguments))
    with ExitStack() as ends:
        if publishes and trainer.controller is not None:
            assert trainer.sync.pool is not None
            options = SyncOptions(urls=["http://127.0.0.1:9"], engine="vllm")
            config, recorder = trainer.job_config.weight_sync, Recorder(place.folder)
            worker = SyncProcess(trainer.sync.pool, config, recorder, options)
            ends.callback(worker.close)
            worker.start()
            trainer.controller.sync_process = worker
            trainer.sync.start(worker.publish)
        else:
            trainer.controller = None  # which has started nothing yet
        yield trainer
    trainer.controller = None
    trainer.close()
    dist.destroy_process_group()


def bias(place: Place) -> list[Any]:
    """Train an MoE whose load balancing bias has a name in its checkpoint, and publish it: layer ->
    whether the bias is what it was before two steps, the type that it has in the image, and whether
    the image has its very numbers; and whether a verification expects this image."""
    # Of the model's files only the tokenizer's are read: the weights are torchtitan's first ones.
    with made(place, "--model.name=deepseek_v3", "--model.flavor=debugmodel", *NO_FILES) as trainer:
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
        with torch.no_grad():
            gathered = trainer.to_hf(VerifyTrainer._gathered(cast(Any, trainer)))
        whole = {name: tensor.contiguous() for name, tensor in gathered.items()}
        expected = image_of(whole, trainer.sync.plan.manifest)
    return [found, bytes(expected) == held.numpy().tobytes()]


def coded(place: Place) -> list[float]:
    """Read quantised files as the reference of the KL term: of a weight that is quantised and of
    one that is not, the largest difference from what the files stand for."""
    with made(place, "--model.name=deepseek_v3", "--model.flavor=debugmodel", *NO_FILES) as trainer:
        to_hf = trainer.own_spec.state_dict_adapter(trainer.model_args, None).to_hf
        weights = {n: w.detach().clone() for n, w in to_hf(trainer.whole.state_dict()).items()}
        scale, scaled, other = 2e-4, "model.layers.0.self_attn.o_proj.weight", "model.norm.weight"
        few = (weights[scaled] / scale).to(torch.float8_e4m3fn)
        wanted = weights | {scaled: few.float() * scale}
        # One scale for each block of 128 by 128 numbers.
        blocks = torch.full([-(-size // 128) for size in few.shape], scale)
        files = weights | {scaled: few, f"{scaled}_scale_inv": blocks}
        (place.model / "model.safetensors").unlink()
        save_file(files, place.model / "model-00001-of-00001.safetensors")
        index = {"weight_map": dict.fromkeys(files, "model-00001-of-00001.safetensors")}
        (place.model / INDEX).write_text(json.dumps(index))
        (place.model / "config.json").write_text(json.dumps({QUANTISED[0]: {"bits": 8}}))
        found = to_hf(trainer.second_model(str(place.model)).state_dict())
    return [(found[name] - wanted[name]).abs().max().item() for name in (scaled, other)]


def routers(place: Place) -> list[Any]:
    """Train an MoE two steps with tensor parallelism: whether the steps changed its routers, and a
    number of each one's weights on this rank."""
    model = ("--model.name=deepseek_v3", "--model.flavor=debugmodel")
    with made(place, *model, "--parallelism.tensor_parallel_degree=2", *NO_FILES) as trainer:
        parameters: list[tuple[str, Any]] = list(trainer.whole.named_parameters())
        gates = [p for name, p in parameters if name.endswith("moe.router.gate.weight")]
        with torch.no_grad():
            for name, parameter in parameters:
                if name.endswith("moe.experts.w2"):  # drawn alike on each rank of a CPU
                    parameter.to_local().mul_(1 + place.rank)
        before = [gate.to_local().clone() for gate in gates]
        train_to(trainer, 2)
        after = [gate.to_local() for gate in gates]
        moved = any(not torch.equal(*pair) for pair in zip(before, after, strict=True))
        return [moved, [float(weight.double().square().sum()) for weight in after]]


def skipped(place: Place) -> list[int]:
    """Skip versions, with a staleness of at most 1: the published version after each of the
    versions 0, 1 and 2, if none of them got a slot at the end of its step."""
    with made(place, *NO_FILES, "--rollout.max_staleness=1", publishes=True) as trainer:
        trainer._publish_now(0)
        said = []
        for trainer.version in range(3):
            trainer._catch_up()
            said.append(trainer._published)
    return said


def blocked(place: Place) -> float:
    """Publish more versions than there are slots, while the sync process stands still for a second:
    the time lost to weight sync."""
    with made(place, *NO_FILES, publishes=True) as trainer:
        trainer._publish_now(0)
        assert trainer.controller is not None
        process = psutil.Process(trainer.controller.sync_process.pid)
        trainer._blocked_s = 0.0
        process.suspend()
        threading.Timer(1.0, process.resume).start()
        for version in (1, 2, 3):
            trainer._publish_now(version)
        return trainer._blocked_s


def committed(place: Place) -> float:
    """Wait in sync mode: how long, after this rank met the other one in a group with a shorter
    timeout, as a checkpoint's collectives do."""
    job = (
        *("--grpo.no-async-weight-update", "--rollout.max_staleness=0"),
        *("--weight_sync.lane_deadline_s=5", "--weight_sync.commit_deadline_s=5"),
    )
    with made(place, *NO_FILES, *job, publishes=True) as trainer:
        group = dist.new_group(backend="gloo", timeout=timedelta(seconds=SHORTER_S))
        dist.barrier()
        begin = time.monotonic()
        trainer._wait_committed()
        dist.barrier(group=group)
        return time.monotonic() - begin


ENDING = threading.Event()


class Slow:
    """State that the checkpoint's thread gets only after the run has begun to end."""

    def __getstate__(self) -> dict[str, Any]:
        if threading.current_thread() is not threading.main_thread():
            ENDING.wait(60.0)
            threading.Event().wait(0.5)
        return {}


class Ended(GRPOTrainer):
    """A trainer without rollouts that saves and fails."""

    def __init__(self, job_config: Any) -> None:
        super().__init__(job_config)
        self.controller = None  # which has started nothing yet
        self.checkpointer.states["slow"] = Slow()

    def train(self) -> None:
        """Save as after a step, and fail."""
        self.checkpointer.save(1)
        raise SyncError("no server is left")

    def close(self, error: BaseException | None = None) -> None:
        """Let the checkpoint's thread go on, and end."""
        ENDING.set()
        super().close(error)


def ended(place: Place) -> list[Any]:
    """End by an error while a thread writes the checkpoint: the error, whether the checkpoint was
    whole as soon as the run had ended, and whether its objects are left out of the interpreter's
    last collection."""
    try:
        run(place.job("--checkpoint.interval=1", "--checkpoint.async_mode=async"), Ended)
    except SyncError as error:
        whole = (place.folder / "run/checkpoint/step-1/.metadata").exists()
        return [str(error), whole, gc.get_freeze_count() > 0]
    return []


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


def tied(place: Place) -> list[Any]:
    """Save Hugging Face files of a model with tied embeddings, whose base model's index names the
    head too, after a run that was killed in its first save: whether it began with the weights of
    the base model, the names in the index that it has written, and those in the files."""
    split(place.model)
    out = place.folder / "run/checkpoint/step-1"
    with made(place, "--checkpoint.last_save_in_hf") as trainer:
        out.mkdir(parents=True)
        (out / "__0_0.distcp").write_bytes(b"half of it")
        trainer.checkpointer.load(-1)
        base = load_file(place.model / FILES[0])["model.embed_tokens.weight"]
        began = torch.equal(trainer.whole.tok_embeddings.weight, base.float())
        train_to(trainer, 1)
    names = json.loads((out / INDEX).read_text())["weight_map"]
    written = [name for file in out.glob("*.safetensors") for name in load_file(file)]
    return [began, sorted(names), sorted(written)]


def scaled(place: Place) -> list[str]:
    """Save adapters: what the start and an export say of the checkpoint to a job with another
    lora.alpha, and to one with the same."""
    with made(place, "--lora.rank=4", "--lora.alpha=12.5") as trainer:
        train_to(trainer, 1)
    said = []
    checkpoint = place.folder / "run/checkpoint/step-1"
    for alpha in ("25", "12.5"):
        job = place.job("--lora.rank=4", f"--lora.alpha={alpha}")
        for use in (
            partial(check_files, job),
            partial(export_version, job, checkpoint, place.folder / "out", "float32"),
        ):
            try:
                use()
                said.append("")
            except ConfigError as error:
                said.append(str(error))
    return said


def kept(place: Place) -> list[str]:
    """Save three times, where two saves of later steps were killed: the checkpoints that are
    left."""
    folder = place.folder / "run/checkpoint"
    with made(place, "--checkpoint.keep_latest_k=2", "--checkpoint.interval=1") as trainer:
        for step in (8, 9):
            (folder / f"step-{step}").mkdir(parents=True)
            (folder / f"step-{step}/__0_0.distcp").write_bytes(b"half of it")
        for step in (1, 2, 3):
            trainer.checkpointer.save(step)
    return sorted(path.parent.name for path in folder.glob("*/.metadata"))


def apart(place: Place) -> str:
    """Load where rank 0 alone sees the newest checkpoint: what this rank says."""
    folder = place.folder / f"rank{place.rank}"
    for step in (2, 4)[: 2 - place.rank]:
        (folder / f"checkpoint/step-{step}").mkdir(parents=True)
        (folder / f"checkpoint/step-{step}/.metadata").touch()
    with made(place, f"--job.dump_folder={folder}") as trainer:
        try:
            trainer.checkpointer.load(-1)
        except ConfigError as error:
            return str(error)
    return "nothing"


def refused(place: Place, *arguments: str) -> list[str]:
    """A run that cannot start: type and text of the error that ends this rank."""
    nobody = ("--rollout.servers=http://127.0.0.1:9", "--weight_sync.startup_deadline_s=120")
    try:
        run(place.job(*nobody, *arguments))
    except Exception as error:  # noqa: BLE001 - whatever it is
        return [type(error).__name__, str(error)]
    return []


CASES: dict[str, Callable[..., Any]] = {
    case.__name__: case
    for case in (
        bias,
        coded,
        routers,
        skipped,
        blocked,
        committed,
        ended,
        tied,
        scaled,
        kept,
        apart,
        refused,
    )
}


def main(number: int, folder: Path, *words: str) -> None:
    """One rank of one run."""
    for run_of, (case, ranks, port, arguments) in enumerate(zip(*[iter(words)] * 4, strict=True)):
        if number < int(ranks):
            place = Place(number, int(ranks), port, folder / str(run_of))
            write_tiny_model("qwen3", place.model, seed=1)
            print(json.dumps(CASES[case](place, *shlex.split(arguments))))
            return
        number -= int(ranks)


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]), *sys.argv[3:])
