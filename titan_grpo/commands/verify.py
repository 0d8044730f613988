"""``titan-grpo verify``: proves on this machine, with real processes, that servers serve exactly
the trainer's weights.

Three runs on one real server, vLLM or SGLang: asynchronous with live rollouts, which are recorded;
then the recording again, in asynchronous and in synchronous mode. Asserted is that (1) at every
committed version the server's bytes are the trainer's, (2) no request was answered by a mixture of
versions, and versions never went backwards, (3) all runs made the same weights, bit for bit. Exit
code 0: nothing is violated; 1: what is violated is named.
"""

import argparse
import json
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from titan_grpo.commands.processes import stop_on_sigterm
from titan_grpo.errors import ConfigError

ROOT = Path(__file__).resolve().parents[2]
PLANTS = ("bytes", "mixed", "backwards", "modes")


def _arguments(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="titan-grpo verify",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--device",
        default="auto",
        choices=["auto", "cpu", "cuda"],
        help="auto: CUDA with two or more GPUs",
    )
    parser.add_argument(
        "--steps", type=int, default=6, help="training steps of each run (default 6)"
    )
    parser.add_argument("--nproc", type=int, default=2, help="trainer ranks (default 2)")
    parser.add_argument(
        "--out",
        default="",
        help="new directory for logs and evidence (default outputs/verify-<time>)",
    )
    parser.add_argument("--json", default="", metavar="PATH", help="also write the result as JSON")
    # No mixture of experts: rounding in bf16 decides its routing, so log-probabilities do not tell
    # its versions apart.
    parser.add_argument("--model", default="qwen3", choices=["qwen3", "qwen3_untied", "llama3"])
    parser.add_argument(
        "--engine",
        default="vllm",
        choices=["vllm", "sglang"],
        help="the server's software (default vllm)",
    )
    parser.add_argument(
        "--vllm-python",
        default=str(ROOT / ".venv-vllm/bin/python"),
        help="interpreter of vLLM's environment",
    )
    parser.add_argument(
        "--sglang-python",
        default=str(ROOT / ".venv-sglang/bin/python"),
        help="interpreter of SGLang's",
    )
    parser.add_argument(
        "--config",
        default=str(ROOT / "train_configs/verify_2gpu.toml"),
        help="TOML file of the runs",
    )
    # The self-test, for tests/e2e/test_verify.py: plants violations for real, comma-separated; the
    # run must then fail.
    parser.add_argument("--plant", default="", help=argparse.SUPPRESS)
    options, rest = parser.parse_known_args(argv)
    options.rest = rest
    options.plants = tuple(filter(None, options.plant.split(",")))
    if unknown := set(options.plants) - set(PLANTS):
        raise ConfigError(
            f"--plant must name {', '.join(PLANTS)}, got {', '.join(sorted(unknown))}"
        )
    if options.steps < 3 or options.nproc < 1:
        raise ConfigError(
            f"--steps must be 3 or more and --nproc 1 or more, got {options.steps} and"
            f" {options.nproc}"
        )
    options.python = getattr(options, f"{options.engine}_python")
    if not Path(options.python).exists():
        raise ConfigError(
            f"--{options.engine}-python must be an interpreter, {options.python} does not exist:"
            " run scripts/setup.sh"
        )
    out = Path(options.out or f"outputs/verify-{time.strftime('%Y%m%d-%H%M%S')}")
    if out.exists() and any(out.iterdir()):
        raise ConfigError(
            f"--out must be a new directory, {out} has files in it: remove it or name another"
        )
    options.out = out
    return options


def run(argv: list[str], env: Mapping[str, str]) -> int:
    """Run, judge, report. Every process is gone at the end, however it ends."""
    stop_on_sigterm()
    options = _arguments(argv)
    # Imported here: --help and mistakes are answered before torch is loaded.
    from titan_grpo.commands.verify_runs import verify
    from titan_grpo.verify.outcome import table

    began = time.monotonic()
    try:
        result = verify(options, env)
    except KeyboardInterrupt:
        print("\nstopped; every process that was started has ended", file=sys.stderr)
        return 130
    result["seconds"] = time.monotonic() - began
    text = json.dumps(result, indent=2)
    (options.out / "verify.json").write_text(text)
    if options.json:
        Path(options.json).write_text(text)
    print(table(result))
    print(f"{result['seconds']:.0f} s; evidence and logs in {options.out}")
    return 0 if result["passed"] else 1
