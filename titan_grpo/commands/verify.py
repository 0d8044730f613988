"""``titan-grpo verify``: prove with real processes that a server serves the trainer's weights.

Three runs on one real server, vLLM or SGLang: asynchronous with live rollouts, which are recorded;
then the recording again, asynchronous and synchronous. Asserted: (1) at every committed version the
server's bytes are the trainer's, (2) no request was answered by a mixture of versions, and versions
never went backwards, (3) all runs made the same weights, bit for bit. Exit code 0: no violation; 1:
every violation is named.
"""

import argparse
import json
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from titan_grpo.commands.processes import (
    RECIPES,
    TITLES,
    engine_python,
    require_python,
    stop_on_sigterm,
)
from titan_grpo.errors import ConfigError

TAMPERS = ("bytes", "mixed", "backwards", "modes")


def _arguments(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="titan-grpo verify",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add(
        "--device",
        default="auto",
        choices=["auto", "cpu", "cuda"],
        help="auto: CUDA with two or more GPUs",
    )
    add("--steps", type=int, default=6, help="training steps of each run (default 6)")
    add("--nproc", type=int, default=2, help="trainer ranks (default 2)")
    add("--out", default="", help="new directory for evidence (default outputs/verify-<time>)")
    add("--json", default="", metavar="PATH", help="also write the result as JSON")
    # No mixture of experts: rounding in bf16 decides its routing, so log-probabilities do not tell
    # its versions apart.
    add("--model", default="qwen3", choices=["qwen3", "qwen3_untied", "llama3"])
    add("--engine", default="vllm", choices=["vllm", "sglang"], help="of the server (default vllm)")
    for engine, title in TITLES.items():
        python = engine_python(engine)
        add(f"--{engine}-python", default=python, help=f"interpreter of {title}'s environment")
    config = RECIPES / "verify_2gpu.toml"
    add("--config", default=str(config), help="TOML file of the runs")
    # The self-test (tests/e2e/test_verify.py): cause these violations; the run must fail.
    add("--tamper", default="", help=argparse.SUPPRESS)
    options, rest = parser.parse_known_args(argv)
    options.rest = rest
    options.tampers = tuple(filter(None, options.tamper.split(",")))
    if unknown := set(options.tampers) - set(TAMPERS):
        raise ConfigError(
            f"--tamper must name {', '.join(TAMPERS)}, got {', '.join(sorted(unknown))}"
        )
    if options.steps < 3 or options.nproc < 1:
        raise ConfigError(
            f"--steps must be 3 or more and --nproc 1 or more, got {options.steps} and"
            f" {options.nproc}"
        )
    options.python = getattr(options, f"{options.engine}_python")
    require_python(options.engine, options.python)
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
