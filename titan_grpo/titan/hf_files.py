"""Writer of Hugging Face model directories: safetensors shards with their index, and the files
beside them, of any tensors or of a run's last version, whose parts may be on several hosts."""

import json
import shutil
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from titan_grpo.config import WeightSync
from titan_grpo.errors import ConfigError, StorageError, TransferFailed
from titan_grpo.layout.image import Hashing, SharedImage
from titan_grpo.layout.peft import adapter_config, has_adapters
from titan_grpo.receive.checkpoint import INDEX
from titan_grpo.receive.commit import tensor_views
from titan_grpo.receive.fetch import Content, Fetch, MemfdReader, Open, TcpReader
from titan_grpo.sync.images import ImagePool, Published
from titan_grpo.sync.process import SyncProcess
from titan_grpo.titan.jobfile import QUANTISED, base_of, read_config

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
"""Files to copy beside the weights, if they exist."""

WEIGHTS = (INDEX, "model.safetensors", "model-*-of-*.safetensors")
"""Names of weight files, in the order in which an earlier write's are removed."""

SHARD_BYTES = 4 << 30
"""Size of the largest shard, unless one tensor is larger; also the host memory for writing."""


@dataclass(frozen=True, slots=True)
class Written:
    """Number of tensors, of their bytes, and of weight files written."""

    tensors: int
    nbytes: int
    shards: int


def write_weights(
    tensors: Iterable[tuple[str, torch.Tensor]], out: Path, shard_bytes: int = SHARD_BYTES
) -> Written:
    """Write named tensors, in their order, as one model.safetensors or as shards with
    model.safetensors.index.json, in place of those that are there.

    Takes the tensors one by one and writes a shard as soon as it is full: with a generator, memory
    for one shard is enough. Tensors may share storage: the format stores each name alone.

    Raises StorageError if the disk refuses a shard. After an error none is left, and what was there
    stays.
    """
    where: dict[str, int] = {}
    total = pending_bytes = shards = 0
    pending: dict[str, torch.Tensor] = {}

    def flush() -> None:
        nonlocal pending, pending_bytes, shards
        file = out / f"shard-{shards}.partial"
        try:
            file.touch()
            mode = file.stat().st_mode
            save_file(pending, file, metadata={"format": "pt"})
            # safetensors (0.8) lets the owner alone read it, whatever the umask says; a file system
            # without modes refuses the change, and has no use for it.
            with suppress(OSError):
                file.chmod(mode)
        except (SafetensorError, OSError) as error:
            raise StorageError(
                f"{file} could not be written ({error}), so no weights are saved; make room there"
            ) from error
        pending, pending_bytes, shards = {}, 0, shards + 1

    try:
        for name, tensor in tensors:
            nbytes = tensor.numel() * tensor.element_size()
            if pending and pending_bytes + nbytes > shard_bytes:
                flush()
            # clone: safetensors refuses views of a shared storage, such as a stacked parameter's.
            pending[name] = tensor.detach().to("cpu").contiguous().clone()
            where[name], pending_bytes, total = shards, pending_bytes + nbytes, total + nbytes
        flush()
    except BaseException:
        # The report of a run needs room on the same disk.
        for part in out.glob("shard-*.partial"):
            part.unlink()
        raise
    files = (
        ["model.safetensors"]
        if shards == 1
        else [f"model-{n:05}-of-{shards:05}.safetensors" for n in range(1, shards + 1)]
    )
    # Before the renames, and the index after them: whenever this process is killed, no file of
    # another write lies beside one of these, where an engine would load both.
    for old in [path for pattern in WEIGHTS for path in out.glob(pattern)]:
        old.unlink()
    # Rename: the final names contain the number of shards, which is known only now.
    for number, file in enumerate(files):
        (out / f"shard-{number}.partial").rename(out / file)
    if shards > 1:
        index = {
            "metadata": {"total_size": total},
            "weight_map": {name: files[shard] for name, shard in where.items()},
        }
        (out / INDEX).write_text(json.dumps(index, indent=2) + "\n")
    return Written(len(where), total, shards)


def write_adapter(
    tensors: Iterable[tuple[str, torch.Tensor]], out: Path, settings: Mapping[str, Any]
) -> Written:
    """Write an adapter's tensors and ``settings`` as PEFT does, in one file; create ``out``. The
    host's memory must have room for all of them."""
    out.mkdir(parents=True, exist_ok=True)
    written = write_weights(tensors, out, sys.maxsize)  # PEFT reads no shards
    (out / "model.safetensors").rename(out / "adapter_model.safetensors")
    (out / "adapter_config.json").write_text(json.dumps(settings, indent=2) + "\n")
    return written


def copy_assets(source: Path, out: Path, dtype: str) -> None:
    """Copy configuration and tokenizer, with ``dtype`` as the type in config.json, and without what
    it says of a quantised base model's weights.

    Raises ConfigError if there is no config.json, or a damaged one: no engine could load the
    directory.
    """
    if not (source / "config.json").is_file():
        raise ConfigError(
            f"model.hf_assets_path must be a Hugging Face model directory, {str(source)!r} has no"
            " config.json: no server could load what is exported; point it at the directory of the"
            " base model"
        )
    config = {key: each for key, each in read_config(source).items() if key not in QUANTISED}
    for path in (path for pattern in ASSETS for path in source.glob(pattern)):
        if path.is_file():
            shutil.copyfile(path, out / path.name)
    # transformers renamed the key: keep the base model's, which may have both.
    for key in {"dtype", "torch_dtype"} & config.keys() or {"torch_dtype"}:
        config[key] = dtype
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n")


@contextmanager
def whole_image(
    pool: ImagePool, hashing: Hashing, published: Published, config: WeightSync
) -> Iterator[torch.Tensor]:
    """Yield a version's whole image, uint8[total_bytes]: the slot itself with one host, a new image
    with several. Raises TransferFailed if a host does not serve its part, ConfigError without
    memory for the new image."""
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
    digests = hashing.split(published.digests, manifest.num_blocks)
    content = Content(manifest, digests, hashing)
    with SharedImage.create(total, "titan_grpo whole image") as image:
        fetch = Fetch(image, content, sources, config.bucket_bytes)
        fetch.run(config.connections, config.transfer_s(total), (total,), lambda _: None)
        if fetch.error:
            raise TransferFailed(f"version {published.version} is not whole here: {fetch.error}")
        yield image.tensor()


def last_place(run_dir: Path, adapters: bool) -> Path:
    """Return where a run leaves its last version: whole weights, or adapters."""
    return run_dir / ("adapter" if adapters else "hf")


def save_version(
    process: SyncProcess, version: int, job_config: Any, model_dir: str, run_dir: Path
) -> str:
    """Write the last version into the run's folder: Hugging Face files in "hf" (the image has their
    names, layout and type), or PEFT files of adapters in "adapter". If ``version`` is not complete,
    write the newest that is.

    Return why ``version`` was not written and what to do, else "". Missing parts of other hosts,
    memory for them, or room on the disk must not fail a finished run.
    """
    sync, lora = job_config.weight_sync, job_config.lora
    remedy = "titan-grpo export makes it from the last checkpoint"
    adapters = has_adapters(process.manifest)
    out = last_place(run_dir, adapters)
    published = process.complete
    if published is None:
        return f"no version's image is complete; {remedy}"
    try:
        with whole_image(process.pool, process.hashing, published, sync) as image:
            tensors = tensor_views(image, process.manifest)
            if adapters:
                # The image's B includes the scale: alpha / rank must be 1.
                settings = adapter_config(lora.rank, lora.rank, lora.targets, base_of(job_config))
                write_adapter(tensors, out, settings)
            else:
                out.mkdir(parents=True, exist_ok=True)
                write_weights(tensors, out)
                copy_assets(Path(model_dir), out, sync.wire_dtype)
    except (ConfigError, TransferFailed, StorageError, OSError) as error:
        return f"{error}; {remedy}"
    if published.version != version:
        return f"its image is not complete, so {out} has version {published.version}; {remedy}"
    return ""
