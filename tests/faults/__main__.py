"""``scripts/verify_grpo_2gpu.sh --faults NAMES``: every fault of the matrix in real processes, and
what happens at the far end."""

import argparse
import json
import math
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from tests.faults import report
from tests.faults.bench import Bench, site_bench
from tests.faults.cases import Case, listing, select
from tests.faults.netns import Host
from tests.faults.runner import Launches, Reference, Runner, groups, run_network
from tests.faults.site import Launch, Site, engineless_launcher, launcher
from tests.rigs.trainer_process import Settings
from titan_grpo.cli import guarded
from titan_grpo.commands.processes import (
    engine_python,
    new_folder,
    print_progress,
    require_file,
    require_python,
    stop_on_signals,
)
from titan_grpo.commands.verify_runs import with_nccl_of
from titan_grpo.errors import ConfigError
from titan_grpo.titan.tiny import write_tiny_model
from titan_grpo.verify.server import choose_devices

MODEL, OTHER_MODEL = "qwen3", "llama3"


def _arguments(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="scripts/verify_grpo_2gpu.sh",
        description="Inject the matrix's faults into real trainers, lanes, receivers and servers.",
    )
    parser.add_argument(
        "--faults",
        default="all",
        metavar="NAMES",
        help="all, or cases and patterns: receiver-kill@load,*@resume",
    )
    parser.add_argument("--list", action="store_true", help="print the cases and end")
    parser.add_argument("--engine", default="vllm", choices=["vllm", "sglang"])
    parser.add_argument("--device", default="auto", choices=["auto", "cpu", "cuda"])
    parser.add_argument("--deadline", type=float, default=3.0, help="a lane's, in seconds")
    parser.add_argument("--out", default="", help="new directory for logs and evidence")
    parser.add_argument("--json", default="", metavar="PATH", help="also write the result as JSON")
    parser.add_argument("--vllm-python", default=engine_python("vllm"))
    parser.add_argument("--sglang-python", default=engine_python("sglang"))
    # engineless: for tests of the matrix itself; what passes for a user is a real engine.
    parser.add_argument("--servers", default="real", choices=["real", "engineless"])
    options = parser.parse_args(argv)
    if not 1 <= options.deadline < math.inf:
        raise ConfigError(
            f"--deadline must be 1 second or more, and finite, got {options.deadline:g}"
        )
    if options.json:
        require_file("--json", Path(options.json))
    if options.servers == "engineless" and options.engine != "vllm":
        raise ConfigError(
            f"--engine must be vllm with --servers engineless, got {options.engine}: they speak its"
            " routes only"
        )
    options.python = getattr(options, f"{options.engine}_python")
    if options.servers == "real":
        require_python(options.engine, options.python)
    options.out = new_folder(options.out, "faults")
    return options


def main(argv: list[str], env: Mapping[str, str]) -> int:
    """Select the cases, and list or run them."""
    stop_on_signals()
    options = _arguments(argv)
    cases = select(options.faults, options.engine)
    if options.list:
        print(listing(cases, options.engine))
        return 0
    return run(options, cases, env)


def run(options: argparse.Namespace, cases: Sequence[Case], env: Mapping[str, str]) -> int:
    """Run the cases; 0 if every one that could run passed. The table is printed and the JSON
    written also after Ctrl-C."""
    results: list[report.Result] = []
    began = time.monotonic()
    extra: dict[str, Any] = {
        name: getattr(options, name) for name in ("device", "engine", "servers")
    }
    extra["deadline_s"] = options.deadline

    def done(result: report.Result) -> None:
        results.append(result)
        print_progress(report.line(result))

    code = 1
    try:
        Matrix(options, env, done).run(cases, extra)
        code = int(len(results) != len(cases) or any(r.verdict == report.FAILED for r in results))
    except KeyboardInterrupt:
        print_progress("stopped; every process that was started has ended")
        code = 130
    finally:
        extra["seconds"] = time.monotonic() - began
        text = json.dumps(report.outcome(results, extra), indent=1)
        (options.out / "faults.json").write_text(text)
        if options.json:
            Path(options.json).write_text(text)
        print(report.table(results))
        print(
            f"evidence and logs in {options.out}; every combination that is no case has its reason"
            " in faults.json"
        )
        print(report.summary(results, extra["seconds"], len(cases)), flush=True)
    return code


class Matrix:
    """Models, sites and runners for the wanted cases."""

    def __init__(self, options: argparse.Namespace, env: Mapping[str, str], done: Any) -> None:
        self._o, self._done = options, done
        options.out.mkdir(parents=True, exist_ok=True)
        wanted = "cpu" if options.device == "auto" else options.device
        devices = choose_devices(wanted, torch.cuda.device_count(), ranks=1)
        self._devices = with_nccl_of(options.python, devices)
        self._env = self._devices.trainer_environment(env)
        # Other weights than the trainer's on purpose: what a server serves later can only have come
        # from the trainer.
        kinds = {"model": (MODEL, 1), "server_model": (MODEL, 2), "other_model": (OTHER_MODEL, 3)}
        for name, (kind, seed) in kinds.items():
            write_tiny_model(kind, options.out / name, seed=seed)  # type: ignore[arg-type]
        self._base = {
            n: t.float() for n, t in load_file(options.out / "model" / "model.safetensors").items()
        }

    def run(self, cases: Sequence[Case], extra: dict[str, Any]) -> None:
        """All groups; the network's on a site of its own."""
        wanted, out = groups(cases), self._o.out
        slow = wanted.pop("network", [])
        if wanted:
            with ExitStack() as stack:
                bench = self._bench(stack, out)
                real = self._o.servers == "real"
                check = Reference(out / "model", bench.site.runs, out).check if real else None
                launches = Launches(self._launch("server_model"), self._launch("other_model"))
                Runner(bench, launches, check, self._done).run(wanted)
        if slow:

            def make(stack: ExitStack, host: Host) -> Bench:
                victim = self._launch("server_model", host.address, host.network)
                return self._bench(stack, out / "network", victim, host.switch)

            extra["network"] = run_network(slow, make, self._done)

    def _bench(
        self, stack: ExitStack, out: Path, victim: Launch | None = None, bind: str = "127.0.0.1"
    ) -> Bench:
        """On a site of its own. ``victim``: how its struck server is started, if otherwise."""
        cuda = self._devices.kind == "cuda"
        settings = Settings(
            model=str(self._o.out / "model"),
            urls=[],
            run_dir="",
            salt=0,
            deadline_s=self._o.deadline,
            bind_host=bind,
            transport=self._devices.transport,
            device="cuda:0" if cuda else "cpu",
            engine=self._o.engine,
        )
        site = Site(self._launch("server_model"), out, self._base, victim)
        return site_bench(stack, site, Bench(site, settings, out, self._env, print_progress))

    def _launch(self, model: str, host: str = "127.0.0.1", inside: Sequence[str] = ()) -> Launch:
        o, folder = self._o, self._o.out / model
        if o.servers == "engineless":
            return engineless_launcher(folder, host, inside)
        return launcher(o.engine, o.python, folder, self._devices, host, inside)


if __name__ == "__main__":
    sys.exit(guarded(main, sys.argv[1:], "scripts/verify_grpo_2gpu.sh"))
