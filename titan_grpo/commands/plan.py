"""``titan-grpo plan``: predict a run on a cluster from its size and links, before it is rented."""

import argparse
import json
import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, fields
from operator import attrgetter
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from titan_grpo.commands.processes import print_progress, require_file
from titan_grpo.config import sends_adapters
from titan_grpo.config.rollout import gpus_each, is_loopback
from titan_grpo.errors import ConfigError
from titan_grpo.observe.output import write_whole
from titan_grpo.plan.setup import Setup
from titan_grpo.titan.jobfile import describe, fits, read_config, read_toml

OPTIONS = {f.name: f for f in fields(Setup) if "help" in f.metadata}

MACHINES = (
    "trainer_hosts",
    "trainer_gpus",
    "trainer_link_gbit",
    "server_link_gbit",
    "source_threads",
    "step_s",
)
"""Options that matter most and are in no job's file."""


LARGEST_MODEL = 1e15
"""Parameters."""

SAY_S = 5.0
"""Seconds of simulation before a line says that it takes longer."""


def _parser() -> argparse.ArgumentParser:
    out = argparse.ArgumentParser(
        prog="titan-grpo plan",
        description="Run the sync's own tables (lanes, image slots, admission, backoff)"
        " against a simulated clock and network, and print memory, time per version, lag,"
        " staleness, which link is the limit, and up to three settings to change.",
        epilog="Later beats earlier, a file of options beats a job's, an option beats both. Exit"
        " code 2: bad input. The default rates are assumptions: set those of your machines.",
    )
    out.add_argument(
        "files", nargs="*", type=Path, metavar="FILE",
        help="a job's TOML (its [weight_sync], [rollout] and [model]), or a TOML with these"
        " options as keys (servers = 64, model = \"qwen3/8B\"), or both",
    )  # fmt: skip
    out.add_argument(
        "--job.config_file", dest="job", type=Path, metavar="FILE",
        help="the job's TOML, as for torchrun and titan-grpo doctor",
    )  # fmt: skip
    out.add_argument(
        "--model", metavar="M",
        help="torchtitan's NAME/FLAVOR, a config.json or its folder, or a number of parameters"
        " such as 8.2e9 (default: as many as Qwen3 8B)",
    )  # fmt: skip
    out.add_argument("--json", type=Path, metavar="P", help="write every figure there")
    for name, option in OPTIONS.items():
        text = option.metadata["help"].replace("%", "%%")
        if "default" not in text:
            text += f" (default: {option.default})"
        flag = "--" + name.replace("_", "-")
        if option.type is bool:
            out.add_argument(flag, action=argparse.BooleanOptionalAction, help=text)
        else:
            out.add_argument(flag, type=option.type, metavar="N", help=text)
    return out


def run(argv: list[str], env: Mapping[str, str]) -> int:
    """Print the plan; returns 0. Raises ConfigError for mistakes in the input."""
    args = _parser().parse_args(argv)
    tables = {path: read_toml(path, "FILE") for path in args.files}
    if args.job is not None:
        tables[args.job] = read_toml(args.job, "--job.config_file")
    options: dict[str, Any] = {}
    for path, table in tables.items():
        options |= {} if is_job(table) else of_options(path, table)
    options |= {name: value for name in OPTIONS if (value := getattr(args, name)) is not None}
    given: dict[str, Any] = {}
    for path, table in tables.items():
        given |= of_job(path, env, options.get("servers")) if is_job(table) else {}
    given |= options
    of_file = given.pop("model", None)
    model = of_file if args.model is None else args.model
    if model is not None:
        if given.get("adapters"):
            raise ConfigError(
                "--model must be left out with a job that has [lora], whose adapters are of its own"
                f" model, got {model!r}"
            )
        given["parameters"] = parameters(str(model))
    setup = Setup(**given)
    if args.json is not None:
        require_file("--json", args.json)
    # Imported here, so that --help does not load numpy.
    from titan_grpo.plan import report
    from titan_grpo.plan.simulation import Simulation

    with _progress(setup):
        result = Simulation(setup).run()
        found = report.figures(setup, result)
        changes, then = report.advice(setup, result)
    print(report.text(setup, found, changes, then))
    assumed = [f"{name} {getattr(setup, name):g}" for name in MACHINES if name not in given]
    if assumed:
        print(f"assumed   {', '.join(assumed)}: set them by options of these names")
    if args.json is not None:
        record = {
            "setup": asdict(setup),
            **found,
            "changes": [str(change) for change in changes],
        }
        write_whole(args.json, json.dumps(record, indent=1) + "\n")
    return 0


@contextmanager
def _progress(setup: Setup) -> Iterator[None]:
    """Say what takes so long, once, if the block does."""
    text = (
        f"simulating {setup.hours:g} h of {setup.servers} servers, and then settings to change: a"
        " minute for 1024 servers and 120 steps; --hours and --servers make it shorter"
    )
    timer = threading.Timer(SAY_S, print_progress, [text])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def is_job(table: Mapping[str, Any]) -> bool:
    """Return whether a file is a job's (it has tables) and not one of options (it has none)."""
    return any(isinstance(value, dict | list) for value in table.values())


def of_options(path: Path, table: dict[str, Any]) -> dict[str, Any]:
    """Check and return a file of options."""
    for name, value in table.items():
        if name == "model":
            continue
        if name not in OPTIONS:
            known = ", ".join(["model", *OPTIONS])
            raise ConfigError(f"FILE {path}: unknown key {name!r}; there are {known}")
        if not fits(kind := OPTIONS[name].type, value):
            raise ConfigError(f"FILE {path}: {name} must be {describe(kind)}, got {value!r:.200}")
    return table


def of_job(path: Path, env: Mapping[str, str], servers: int | None = None) -> dict[str, Any]:
    """Return a plan's options from a job's TOML file. ``env`` may have a SLURM host list.
    ``servers``: number of servers given beside the file, which need not name any then
    (servers_slurm may be an argument of the run). If it exceeds the file's number, all servers are
    taken to be on other hosts."""
    # Imported here: torchtitan takes seconds.
    from titan_grpo.titan.flavors import parameters_of
    from titan_grpo.titan.jobconfig import ANY_SERVER, parse
    from titan_grpo.titan.lora import adapter_elements
    from titan_grpo.titan.servers import known_servers

    config = parse(["--job.config_file", str(path)], calls_servers=False)
    rollout = config.rollout
    if rollout.servers == [ANY_SERVER] and servers is None:
        raise ConfigError(
            f"FILE {path} must name servers (rollout.servers, servers_file or servers_slurm), or"
            " --servers N must say how many there are"
        )
    for key, why in (
        ("grpo.async_weight_update", "each step waits for every server"),
        ("rollout.in_flight_weight_updates", "a server finishes its requests before each commit"),
    ):
        if not attrgetter(key)(config):
            raise ConfigError(
                f"{key} must be true for a plan (without it {why}, and no plan has such waits), got"
                f" false in {path}"
            )
    out: dict[str, Any] = {
        "sync": config.weight_sync,
        "groups": rollout.prompts_per_step,
        "max_staleness": rollout.max_staleness,
        "whole_answers": not rollout.stream_completions,
        "in_flight": max(1, rollout.max_concurrent_requests // rollout.group_size),
        "parameters": parameters_of(config.model.name, config.model.flavor),
        "adapters": adapter_elements(config),
        "adapters_only": sends_adapters(config.lora),
    }
    launched = rollout.launch_count * len(rollout.launch_engines)
    if rollout.launches:
        out["server_gpus"] = max(1, gpus_each(rollout))
    try:
        local = tuple(f"http://127.0.0.1:{port}" for port in range(1, launched + 1))
        urls = known_servers(rollout, env, local).urls
    except ConfigError as error:
        if servers is None:
            raise ConfigError(f"{error} (--servers N plans for N servers without it)") from error
        urls = []  # neither the file nor SLURM's variable need be here before the run
    hosts = Counter(urlsplit(url).hostname or "" for url in urls)
    out["servers"] = servers or len(urls)
    out["servers_per_host"] = max(hosts.values(), default=rollout.servers_per_host)
    out["same_host"] = out["servers"] <= len(urls) and all(map(is_loopback, hosts))
    return out


def parameters(model: str) -> int:
    """Return a model's number of parameters, from a number, torchtitan's NAME/FLAVOR or a
    config.json."""
    with suppress(ValueError):
        if not 1 <= float(model) <= LARGEST_MODEL:
            raise ConfigError(
                f"--model must be 1 to {LARGEST_MODEL:g} where it is a number of parameters, got"
                f" {model}"
            )
        return int(float(model))
    from titan_grpo.titan.flavors import flavor_of, parameters_of

    if settings := read_config(model):
        return parameters_of(*flavor_of(settings))
    name, slash, flavor = model.partition("/")
    if not slash:
        raise ConfigError(
            "--model must be NAME/FLAVOR of torchtitan, a config.json or a number of parameters,"
            f" got {model!r}"
        )
    return parameters_of(name, flavor)
