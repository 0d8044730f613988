"""Prove with real processes that a server serves exactly the trainer's weights.

Three runs on one real server, vLLM or SGLang: asynchronous with live rollouts, which are recorded;
then the recording replayed, asynchronously and synchronously. Asserted: (1) at every committed
version the server's bytes equal the trainer's, (2) no answer mixes versions, and versions never go
backwards, (3) all runs make the same weights, bit for bit. Exit code 0: no violation; 1: every
violation is named. Every argument that is not listed below is a job's.
"""

import argparse
from collections.abc import Mapping
from pathlib import Path

from titan_grpo.commands.processes import (
    add_tiny_run,
    in_foreground,
    new_folder,
    require_file,
    require_python,
)
from titan_grpo.errors import ConfigError

DEVICE_HELP = "auto: CUDA with two or more GPUs; cuda with --nproc 1: also on one, which both share"


def arguments(argv: list[str]) -> argparse.Namespace:
    """Parse and check the arguments. Raises ConfigError."""
    parser = argparse.ArgumentParser(
        prog="titan-grpo verify",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    devices = ["auto", "cpu", "cuda"]
    add("--device", default="auto", choices=devices, help=DEVICE_HELP)
    add(
        "--out",
        default="",
        help="new directory for evidence (default outputs/verify-<time>-<process>)",
    )
    add("--json", default="", metavar="PATH", help="also write the result as JSON")
    # No mixture of experts: bf16 rounding affects its routing, so log-probabilities cannot tell its
    # versions apart.
    add_tiny_run(parser, "verify_2gpu.toml", 6, ("qwen3", "qwen3_untied", "llama3"))
    add("--engine", default="vllm", choices=["vllm", "sglang"], help="of the server (default vllm)")
    options, rest = parser.parse_known_args(argv)
    options.rest = rest
    if options.steps < 3 or options.nproc < 1:
        raise ConfigError(
            f"--steps must be 3 or more and --nproc 1 or more, got {options.steps} and"
            f" {options.nproc}"
        )
    options.python = getattr(options, f"{options.engine}_python")
    require_python(options.engine, options.python)
    out = options.out = new_folder(options.out, "verify")
    # A file beside the evidence is in order: its directory is made with the first run.
    if options.json and Path(options.json).absolute().parent != out.absolute():
        require_file("--json", Path(options.json))
    return options


def run(argv: list[str], env: Mapping[str, str]) -> int:
    """Run, judge and report. All processes end with it."""
    options = arguments(argv)
    # Imported here, so that --help and mistakes do not load torch.
    from titan_grpo.commands.verify_runs import verify

    return in_foreground(lambda: verify(options, env))
