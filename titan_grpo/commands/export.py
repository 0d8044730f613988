"""``titan-grpo export``: write a checkpointed version as Hugging Face safetensors."""

import argparse
from collections.abc import Mapping
from pathlib import Path


def _parser() -> argparse.ArgumentParser:
    out = argparse.ArgumentParser(
        prog="titan-grpo export",
        description="Write a checkpointed version as a Hugging Face directory: safetensors,"
        " configuration, tokenizer.",
        epilog="Every other argument is a job's, at least: --job.config_file X.toml (the job that"
        " was trained).",
    )
    add = out.add_argument
    version = (
        "policy version: steps that changed the weights (of a checkpoint that names no version, one"
        " of the weights alone: its step)"
    )
    add("--version", type=int, required=True, help=version)
    add("--out", type=Path, required=True, metavar="DIR", help="new directory to write")
    where = "folder with step-N (default: where the job puts it)"
    add("--checkpoint", type=Path, metavar="DIR", help=where)
    adapter = "of a job with [lora]: the adapter alone, as PEFT writes it (default: merged weights)"
    add("--adapter", action="store_true", help=adapter)
    dtypes = ("bfloat16", "float16", "float32")
    add("--dtype", choices=dtypes, help="type (default: weight_sync.wire_dtype)")
    return out


def run(argv: list[str], env: Mapping[str, str]) -> int:
    """Export; returns 0. Raises ConfigError for mistakes in the input."""
    args, rest = _parser().parse_known_args(argv)
    from titan_grpo.titan import jobconfig

    config = jobconfig.parse(rest, calls_servers=False)
    # Imported after parsing, which prepares torchtitan for this machine.
    from titan_grpo.titan import checkpoints, export

    folder = args.checkpoint or Path(config.job.dump_folder) / config.checkpoint.folder
    dtype = args.dtype or config.weight_sync.wire_dtype
    write = export.export_adapter if args.adapter else export.export_version
    checkpoint = checkpoints.checkpoint_of(folder, args.version)
    named = checkpoints.version_of(checkpoint)
    with export.whole_or_not_at_all(args.out) as draft:
        written = write(config, checkpoint, draft, dtype)
    what = checkpoint.name if named is None else f"version {named} ({checkpoint.name})"
    size = f"{written.tensors} tensors, {written.nbytes} bytes in {written.shards} file(s), {dtype}"
    print(f"{what}: {size} -> {args.out}")
    return 0
