"""``titan-grpo quickstart``: the main job without a GPU. A tiny model learns a toy task beside real
servers."""

import argparse
import json
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from titan_grpo.commands.processes import run_logged, stop_on_sigterm, torchrun
from titan_grpo.commands.server_group import Engine, ServerGroup
from titan_grpo.errors import ConfigError
from titan_grpo.runkey import Key, find_run_key, with_run_key

ROOT = Path(__file__).resolve().parents[2]

ENGINES: dict[str, tuple[Engine, ...]] = {
    "vllm": ("vllm",),
    "sglang": ("sglang",),
    "both": ("vllm", "sglang"),
}


def _arguments(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="titan-grpo quickstart", description=__doc__)
    parser.add_argument(
        "--engine",
        default="vllm",
        choices=list(ENGINES),
        help="which servers (default vllm); both: of each",
    )
    parser.add_argument(
        "--servers",
        type=int,
        default=1,
        help="servers of that engine, or of each, to start (default 1)",
    )
    parser.add_argument("--steps", type=int, default=30, help="training steps (default 30)")
    parser.add_argument("--nproc", type=int, default=2, help="trainer ranks (default 2)")
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument(
        "--async",
        dest="sync",
        action="store_false",
        help="sync weights in the background (default)",
    )
    mode.add_argument(
        "--sync", dest="sync", action="store_true", help="wait for the servers after every step"
    )
    parser.set_defaults(sync=False)
    parser.add_argument(
        "--out",
        default="outputs/quickstart",
        help="directory of the run (default outputs/quickstart)",
    )
    parser.add_argument(
        "--model", default="qwen3", choices=["qwen3", "qwen3_untied", "qwen3_moe", "llama3"]
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
        default=str(ROOT / "train_configs/quickstart_cpu.toml"),
        help="TOML file of the run",
    )
    options, rest = parser.parse_known_args(argv)
    options.rest = rest
    for name in ("servers", "steps", "nproc"):
        if getattr(options, name) < 1:
            raise ConfigError(f"--{name} must be 1 or more, got {getattr(options, name)}")
    options.pythons = {
        engine: getattr(options, f"{engine}_python") for engine in ENGINES[options.engine]
    }
    for engine, python in options.pythons.items():
        if not Path(python).exists():
            raise ConfigError(
                f"--{engine}-python must be an interpreter, {python} does not exist: run"
                " scripts/setup.sh"
            )
    return options


def _fresh(out: Path) -> None:
    """Refuse to mix two runs: a run's checkpoint would be resumed in silence."""
    if (out / "summary.json").exists() or (out / "checkpoint").exists():
        raise ConfigError(
            f"--out must be a new directory, {out} holds an earlier run: remove it or name another"
        )


def run(argv: list[str], env: Mapping[str, str]) -> int:
    """Make models, start servers, train, say where everything is. Every process is gone at the end,
    however it ends."""
    stop_on_sigterm()
    options = _arguments(argv)
    out = Path(options.out)
    _fresh(out)
    began = time.monotonic()
    try:
        _train(options, out, env)
    except KeyboardInterrupt:
        print("\nstopped; every process that was started has ended", file=sys.stderr)
        return 130
    summary = json.loads((out / "summary.json").read_text())
    print(
        f"done in {time.monotonic() - began:.0f} s: reward {summary['reward_first']:.3f} ->"
        f" {summary['reward_last']:.3f}"
    )
    print(
        f"in {out}: summary.json metrics.jsonl reward.png trace.json (open in ui.perfetto.dev) tb/"
        " hf/ (trained weights)"
    )
    return 0


def _train(options: argparse.Namespace, out: Path, env: Mapping[str, str]) -> None:
    # Imported here: --help and mistakes are answered before torch is loaded.
    from titan_grpo.titan import jobconfig
    from titan_grpo.titan.flavors import FLAVORS
    from titan_grpo.titan.tiny import write_tiny_model

    model, server_model = out / "model", out / "server_model"
    write_tiny_model(options.model, model, seed=1)
    # The servers start from other weights on purpose: what they serve later can only have come from
    # the trainer.
    write_tiny_model(options.model, server_model, seed=2)
    name, flavor = FLAVORS[options.model]
    run_key = find_run_key(env) or Key.generate()
    env = {**with_run_key(env, run_key), "OMP_NUM_THREADS": "1"}
    with ServerGroup(
        options.pythons, str(server_model), out, options.servers, run_key=run_key
    ) as servers:
        arguments = ["--rollout.servers", ",".join(servers.urls), "--job.dump_folder", str(out)]
        arguments += [
            "--model.hf_assets_path",
            str(model),
            "--model.name",
            name,
            "--model.flavor",
            flavor,
        ]
        arguments += ["--training.steps", str(options.steps)]
        arguments += [
            "--grpo.no-async-weight-update" if options.sync else "--grpo.async-weight-update",
            *options.rest,
        ]
        # While the servers start: a mistake in the arguments is said now, and not after the minute
        # they take.
        jobconfig.check_files(
            jobconfig.parse(["--job.config_file", options.config, *arguments], options.nproc), env
        )
        servers.wait_healthy(lambda text: print(text, file=sys.stderr, flush=True))
        print(
            f"training: {options.nproc} ranks, {options.steps} steps; log in {out / 'train.log'}",
            file=sys.stderr,
        )
        run_logged(
            torchrun(options.nproc, options.config, arguments),
            out / "train.log",
            env,
            lambda line: print(line, file=sys.stderr, flush=True),
        )
