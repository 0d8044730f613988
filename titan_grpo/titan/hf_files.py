"""Writing a Hugging Face model directory: safetensors shards with their index, and the files beside
them; of any tensors, and of a run's last version, whose parts may be on several hosts."""

import json
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from titan_grpo.config import WeightSync
from titan_grpo.errors import ConfigError, TransferFailed
from titan_grpo.layout.image import Hashing, SharedImage
from titan_grpo.layout.peft import adapter_config, has_adapters
from titan_grpo.receive.commit import tensor_views
from titan_grpo.receive.fetch import Content, Fetch, MemfdReader, Open, TcpReader
from titan_grpo.sync.images import ImagePool, Published
from titan_grpo.sync.process import SyncProcess

ASSETS = (
    "config.json",
    "generation_config.json",
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "chat_template*",
    "*.model",
)
"""What belongs to a model besides its weights; files that are not there are left out."""

SHARD_BYTES = 4 << 30
"""Largest shard, unless one tensor is larger; also the host memory that writing takes."""


@dataclass(frozen=True, slots=True)
class Written:
    """What was written: tensors, bytes of their data, files of weights."""

    tensors: int
    nbytes: int
    shards: int


def write_weights(
    tensors: Iterable[tuple[str, torch.Tensor]], out: Path, shard_bytes: int = SHARD_BYTES
) -> Written:
    """Write named tensors, in their order, as one model.safetensors or as shards with
    model.safetensors.index.json.

    The tensors are taken one by one and a shard is written as soon as it is full, so a generator
    needs the memory of one shard only. Tensors that share storage are copied, since the format
    stores each name on its own.
    """
    where: dict[str, int] = {}
    total = pending_bytes = shards = 0
    pending: dict[str, torch.Tensor] = {}

    def flush() -> None:
        nonlocal pending, pending_bytes, shards
        save_file(pending, out / f"shard-{shards}.partial", metadata={"format": "pt"})
        pending, pending_bytes, shards = {}, 0, shards + 1

    for name, tensor in tensors:
        nbytes = tensor.numel() * tensor.element_size()
        if pending and pending_bytes + nbytes > shard_bytes:
            flush()
        # clone: a view of a stacked parameter would drag its whole storage along, which safetensors
        # refuses.
        pending[name] = tensor.detach().to("cpu").contiguous().clone()
        where[name], pending_bytes, total = shards, pending_bytes + nbytes, total + nbytes
    flush()
    files = (
        ["model.safetensors"]
        if shards == 1
        else [f"model-{n:05}-of-{shards:05}.safetensors" for n in range(1, shards + 1)]
    )
    # The names hold the number of shards, which is known only now.
    for number, file in enumerate(files):
        (out / f"shard-{number}.partial").rename(out / file)
    if shards > 1:
        index = {
            "metadata": {"total_size": total},
            "weight_map": {name: files[shard] for name, shard in where.items()},
        }
        (out / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
    return Written(len(where), total, shards)


def write_adapter(
    tensors: Iterable[tuple[str, torch.Tensor]], out: Path, settings: Mapping[str, Any]
) -> Written:
    """Write an adapter's tensors and ``settings`` as PEFT does; ``out`` is made."""
    out.mkdir(parents=True, exist_ok=True)
    written = write_weights(tensors, out)
    (out / "model.safetensors").rename(out / "adapter_model.safetensors")
    (out / "adapter_config.json").write_text(json.dumps(settings, indent=2) + "\n")
    return written


def copy_assets(source: Path, out: Path, dtype: str) -> None:
    """Copy configuration and tokenizer, with ``dtype`` as the type in config.json.

    Raises ConfigError if there is no config.json: no engine could load the directory.
    """
    if not (source / "config.json").is_file():
        raise ConfigError(
            f"model.hf_assets_path must be a Hugging Face model directory, {str(source)!r} has no"
            " config.json: no server could load what is exported; point it at the directory of the"
            " base model"
        )
    for path in (path for pattern in ASSETS for path in source.glob(pattern)):
        if path.is_file():
            shutil.copyfile(path, out / path.name)
    config = json.loads((out / "config.json").read_text())
    # transformers renamed the key; whichever the base model uses goes on being used.
    config["dtype" if "dtype" in config else "torch_dtype"] = dtype
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n")


@contextmanager
def whole_image(
    pool: ImagePool, hashing: Hashing, published: Published, config: WeightSync
) -> Iterator[torch.Tensor]:
    """Its bytes, uint8[total_bytes]. With one host these are the slot's own; with several, memory
    for all of them. TransferFailed if a host does not serve its part; ConfigError if the memory is
    not there."""
    manifest, mine = pool.manifest, pool.images[published.slot]
    if not published.elsewhere:
        yield mine.tensor()
        return
    total, wait_s = manifest.total_bytes, config.progress_deadline_s
    sources: dict[int, list[Open]] = {
        source.part: [partial(TcpReader, source, hashing.range_key, wait_s)]
        for source in published.elsewhere
    }
    sources[0] = [partial(MemfdReader, mine.address.to_json(), manifest.parts[0])]
    content = Content(manifest, published.digests, hashing)
    with SharedImage.create(total, "titan_grpo whole image") as image:
        fetch = Fetch(image, content, sources, config.bucket_bytes)
        within_s = config.lane_deadline_s + total / config.min_rate
        fetch.run(config.connections, within_s, (total,), lambda _: None)
        if fetch.error:
            raise TransferFailed(f"version {published.version} is not whole here: {fetch.error}")
        yield image.tensor()


def save_version(
    worker: SyncProcess, published: Published, job_config: Any, model_dir: str, run_dir: Path
) -> str:
    """Write a version into the run's folder: as Hugging Face files in "hf", whose names, layout and
    type its image has already, or adapters as PEFT's in "adapter".

    Why it was not written and what to do, else "": other hosts' parts, or memory for them, that are
    missing at its end must not cost a run.
    """
    sync, lora = job_config.weight_sync, job_config.lora
    try:
        with whole_image(worker.pool, worker.hashing, published, sync) as image:
            tensors = tensor_views(image, worker.manifest)
            if has_adapters(worker.manifest):
                # B has its scale in it: alpha is the rank.
                settings = adapter_config(lora.rank, lora.rank, lora.targets, model_dir)
                write_adapter(tensors, run_dir / "adapter", settings)
            else:
                (run_dir / "hf").mkdir(parents=True, exist_ok=True)
                write_weights(tensors, run_dir / "hf")
                copy_assets(Path(model_dir), run_dir / "hf", sync.wire_dtype)
    except (ConfigError, TransferFailed) as error:
        return f"{error}; titan-grpo export makes it from the last checkpoint"
    return ""
