"""``titan-grpo quickstart``: train a tiny model beside real servers, without a GPU."""

import argparse
import json
import time
from collections.abc import Mapping
from pathlib import Path

from titan_grpo.commands.processes import (
    add_tiny_run,
    in_foreground,
    print_progress,
    require_python,
    run_logged,
    tiny_run,
)
from titan_grpo.config import LAUNCH
from titan_grpo.config.rollout import ARGUMENTS, PYTHONS
from titan_grpo.errors import ConfigError
from titan_grpo.layout.memory import available_memory
from titan_grpo.observe.recorder import SUMMARY

STARTUP_S = 300.0
"""Seconds per server for all of them to start."""

SERVER_BYTES = 1 << 30
"""Memory that each server takes at least: vLLM on a CPU 1.6 GiB."""

TINY_STD, LORA_STD = 0.02, 0.1
"""Standard deviation of the tiny model's weights: without and with --lora."""

ENGINES: dict[str, tuple[str, ...]] = {
    "vllm": ("vllm",),
    "sglang": ("sglang",),
    "both": ("vllm", "sglang"),
}


def _arguments(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="titan-grpo quickstart",
        description="Train a tiny model beside real servers, without a GPU. scripts/quickstart.sh"
        " makes the environments first; it takes --torchtitan 0.2|0.3 too.",
        epilog="Every other argument is the job's, such as --rollout.reward module:function.",
    )
    add = parser.add_argument
    which = "of the servers (default vllm; with --router-replay sglang)"
    add("--engine", choices=list(ENGINES), help=which)
    add("--servers", type=int, default=1, help="servers of each engine to start (default 1)")
    mode = parser.add_mutually_exclusive_group()
    background, waiting = "sync weights in the background (default)", "wait after every step"
    mode.add_argument("--async", dest="sync", action="store_false", help=background)
    mode.add_argument("--sync", dest="sync", action="store_true", help=waiting)
    parser.set_defaults(sync=False)
    out = "outputs/quickstart"
    add("--out", default=out, help=f"directory of the run (default {out})")
    models = ("qwen3", "qwen3_untied", "qwen3_moe", "llama3")
    add_tiny_run(parser, "quickstart_cpu.toml", 30, models)
    replay = "of an MoE: train on the experts that the servers chose (grpo.router_replay)"
    add("--router-replay", action="store_true", help=replay)
    add("--lora", type=int, metavar="RANK", help="train adapters of this rank in place of weights")
    sent = "what servers get of --lora: merged weights (default), or the adapters"
    add("--lora-sync", choices=["merged", "adapter"], help=sent)
    options, rest = parser.parse_known_args(argv)
    options.rest = rest
    for name in ("servers", "steps", "nproc"):
        if getattr(options, name) < 1:
            raise ConfigError(f"--{name} must be 1 or more, got {getattr(options, name)}")
    options.engine = options.engine or ("sglang" if options.router_replay else "vllm")
    options.pythons = {e: getattr(options, f"{e}_python") for e in ENGINES[options.engine]}
    if options.lora_sync and options.lora is None:
        raise ConfigError("--lora-sync must come with --lora RANK")
    if options.lora_sync == "adapter" and options.engine != "vllm":
        raise ConfigError("--lora-sync adapter needs --engine vllm (SGLang takes merged weights)")
    if options.router_replay and options.model != "qwen3_moe":
        raise ConfigError("--router-replay needs --model qwen3_moe (the others have no router)")
    if options.router_replay and options.engine != "sglang":
        raise ConfigError(
            "--router-replay needs --engine sglang here (vLLM sends routes from its V2 model runner"
            " only, which needs Triton and so a GPU)"
        )
    for engine, path in options.pythons.items():
        require_python(engine, path)
    fit = max(1, available_memory() // (SERVER_BYTES * len(options.pythons)))
    if options.servers > fit:
        raise ConfigError(
            f"--servers must be at most {fit} on this machine, got {options.servers}: each server"
            f" takes more than {SERVER_BYTES / 2**30:g} GiB of memory"
        )
    folder = options.out = Path(options.out)
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"--out must be a new directory, {folder} is a file: name another")
    # Refuse a folder with an earlier run: training would silently resume its checkpoint.
    if (folder / SUMMARY).exists() or (folder / "checkpoint").exists():
        raise ConfigError(
            f"--out must be a new directory, {folder} holds an earlier run: remove it or name"
            " another"
        )
    return options


def run(argv: list[str], env: Mapping[str, str]) -> int:
    """Make models, start servers, train, print where the files are. All processes end with it."""
    options = _arguments(argv)
    return in_foreground(lambda: _train(options, env))


def _train(options: argparse.Namespace, env: Mapping[str, str]) -> int:
    # Imported here, so that --help and mistakes do not load torch.
    from titan_grpo.titan.tiny import write_tiny_model

    began = time.monotonic()
    # Before the model is made: it refuses mistakes in the arguments.
    _, command = tiny_run(options, options.out, [LAUNCH], job_arguments(options))
    # Adapters are limited by the frozen weights: with the smaller embedding, no token can get more
    # than a tenth of the probability.
    std = TINY_STD if options.lora is None else LORA_STD
    write_tiny_model(options.model, options.out / "model", seed=1, std=std)
    log = options.out / "train.log"
    print_progress(
        f"starting {options.nproc} ranks for {options.steps} steps, and their servers, about a"
        f" minute on two cores; logs in {log} and beside it"
    )
    run_logged(command, log, {**env, "OMP_NUM_THREADS": "1"}, print_progress)
    summary = json.loads((options.out / SUMMARY).read_text())
    reward = f"{summary['reward_first']:.3f} -> {summary['reward_last']:.3f}"
    print(f"done in {time.monotonic() - began:.0f} s: reward {reward}")
    adapters = options.lora_sync == "adapter"
    trained = "adapter/ (the trained adapter)" if adapters else "hf/ (trained weights)"
    print(
        f"in {options.out}: summary.json metrics.jsonl reward.png trace.json (open in"
        f" ui.perfetto.dev) tb/ {trained}"
    )
    return 0


def job_arguments(options: argparse.Namespace) -> list[str]:
    """Return the arguments of the job that starts these servers and trains beside them."""
    started = len(options.pythons) * options.servers
    out = [f"--rollout.launch_engines={','.join(options.pythons)}"]
    out += [f"--rollout.launch_count={options.servers}"]
    out += [f"--rollout.{PYTHONS[engine]}={path}" for engine, path in options.pythons.items()]
    out += [f"--weight_sync.startup_deadline_s={STARTUP_S * started}"]
    if options.lora_sync != "adapter":  # adapters need the trainer's base weights
        # Other weights than the trainer's: if a server later serves these, the sync brought them.
        out += [f"--rollout.{ARGUMENTS[each]}=--load-format,dummy" for each in options.pythons]
    if options.lora is not None:
        out += [f"--lora.rank={options.lora}", "--optimizer.lr=1e-2"]
        out += [f"--lora.sync={options.lora_sync or 'merged'}"]
    if options.router_replay:
        out += ["--grpo.router-replay"]
    return [*out, f"--grpo.{'no-async' if options.sync else 'async'}-weight-update"]
