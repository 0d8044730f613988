"""``titan-grpo doctor``: look at this machine and its servers before a run, and say what to do."""

import argparse
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from titan_grpo.commands import doctor_checks, doctor_facts
from titan_grpo.config import LAUNCH
from titan_grpo.errors import ConfigError
from titan_grpo.layout.image import available_memory
from titan_grpo.rollout.codec import FORMAT
from titan_grpo.runkey import find_run_key

WIRE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}


@dataclass
class Wanted:
    """What the run would use, from the job's configuration and the command line."""

    servers: list[str] = field(default_factory=list)
    api_key_env: str = ""
    admin_key_env: str = ""
    bind_host: str = ""
    pythons: dict[str, str] = field(default_factory=dict)
    """Engine -> interpreter that launched servers of it use."""
    model: str = ""
    slots: int = 2
    wire_bytes: int = 2
    run_key_file: str = ""
    controller: str = ""
    """URL of the rollout service, if there is to be one."""
    controller_key_env: str = ""


def parser() -> argparse.ArgumentParser:
    """Arguments of the command; everything it does not know goes to torchtitan's parser, so a job's
    command line fits."""
    out = argparse.ArgumentParser(
        prog="titan-grpo doctor",
        description=(
            "Check versions, memory, ports, environment and servers. Exit code 1 if a problem was"
            " found."
        ),
        epilog=(
            "Every other argument is read as a job's: titan-grpo doctor --job.config_file X.toml"
            " [--rollout.servers URL]"
        ),
    )
    out.add_argument(
        "--server",
        action="append",
        default=[],
        metavar="URL",
        help="a server to look at (may be repeated)",
    )
    out.add_argument(
        "--engine-python",
        default="",
        metavar="PATH",
        help="interpreter that launched vLLM servers would use",
    )
    out.add_argument("--sglang-python", default="", metavar="PATH", help="the same of SGLang")
    out.add_argument(
        "--api-key-env",
        default="",
        metavar="NAME",
        help="environment variable with the servers' API key",
    )
    out.add_argument(
        "--admin-key-env",
        default="",
        metavar="NAME",
        help="environment variable with SGLang's admin key",
    )
    out.add_argument(
        "--timeout",
        type=float,
        default=10.0,
        metavar="SECONDS",
        help="deadline of each question to a server",
    )
    return out


def wanted(
    args: argparse.Namespace, rest: list[str], env: Mapping[str, str]
) -> tuple[Wanted, doctor_checks.Finding | None]:
    """What to look at, and what the configuration itself is like."""
    out = Wanted(
        servers=list(args.server), api_key_env=args.api_key_env, admin_key_env=args.admin_key_env
    )
    named = {"vllm": args.engine_python, "sglang": args.sglang_python}
    out.pythons = {engine: python for engine, python in named.items() if python}
    if not rest:
        return out, None
    from titan_grpo.titan import jobconfig
    from titan_grpo.titan.server_urls import known_servers

    try:
        config = jobconfig.parse(rest)
        rollout, sync = config.rollout, config.weight_sync
        launched = rollout.servers == [LAUNCH]
        if not launched or rollout.servers_file or rollout.servers_slurm:
            out.servers += [
                url for url in known_servers(rollout, env).urls if url not in out.servers
            ]
    except ConfigError as error:
        return out, doctor_checks.Finding(
            "problem", "configuration", str(error), "correct the TOML file or the command line"
        )
    if launched:
        pythons = {"vllm": rollout.launch_python, "sglang": rollout.launch_sglang_python}
        out.pythons = {engine: pythons[engine] for engine in rollout.launch_engines} | out.pythons
    out.api_key_env = out.api_key_env or rollout.api_key_env
    out.admin_key_env = out.admin_key_env or rollout.admin_key_env
    out.bind_host, out.slots, out.wire_bytes = (
        sync.bind_host,
        sync.slots,
        WIRE_BYTES[sync.wire_dtype],
    )
    out.model, out.run_key_file = config.model.hf_assets_path, sync.run_key_file
    out.controller = "" if rollout.controller == "local" else rollout.controller
    out.controller_key_env = rollout.controller_key_env
    return out, doctor_checks.Finding("ok", "configuration", "valid")


def machine(want: Wanted, env: Mapping[str, str]) -> list[doctor_checks.Finding]:
    """Findings about this environment and this host."""
    out = [doctor_checks.python(sys.version_info[:3])]
    out += [
        doctor_checks.package(name, doctor_facts.installed(name), allowed)
        for name, allowed in doctor_checks.RANGES.items()
    ]
    out.append(doctor_checks.torchrun(env))
    elements = doctor_facts.model_elements(Path(want.model)) if want.model else None
    size = None if elements is None else elements * want.wire_bytes
    out.append(doctor_checks.memory(available_memory(), size, want.slots))
    out.append(doctor_checks.shared_memory(doctor_facts.shm_size(), accelerators()))
    hosts = (
        [want.bind_host]
        if want.bind_host
        else sorted({doctor_facts.address_towards(url) for url in want.servers} or {"127.0.0.1"})
    )
    out += [doctor_checks.bind(host, doctor_facts.listen_error(host)) for host in hosts]
    for engine, python in want.pythons.items():
        out += doctor_checks.engine(python, *doctor_facts.engine_answer(python), engine)
    return out


def accelerators() -> int:
    """GPUs that torch sees; 0 if torch is not there (which has a finding of its own)."""
    if doctor_facts.installed("torch") is None:
        return 0
    import torch

    return torch.cuda.device_count()


def _key(env: Mapping[str, str], setting: str, name: str) -> str:
    if name and not env.get(name):
        raise ConfigError(
            f"rollout.{setting} names {name}, which is not set: servers would refuse us; export it"
        )
    return env[name] if name else ""


def run(argv: list[str], env: Mapping[str, str]) -> int:
    """Print all findings as they come; 0 if there is no problem among them, else 1."""
    args, rest = parser().parse_known_args(argv)
    want, configuration = wanted(args, rest, env)
    api_key, admin_key = (
        _key(env, "api_key_env", want.api_key_env),
        _key(env, "admin_key_env", want.admin_key_env),
    )
    run_key = find_run_key(env, want.run_key_file)
    access = doctor_facts.Access(args.timeout, want.bind_host, api_key, admin_key, run_key)
    problems = warnings = 0

    def show(findings: list[doctor_checks.Finding]) -> None:
        nonlocal problems, warnings
        for finding in findings:
            problems += finding.status == "problem"
            warnings += finding.status == "warning"
            print(finding.line(), flush=True)

    show([configuration] if configuration else [])
    show(machine(want, env))
    if want.controller:
        key = _key(env, "controller_key_env", want.controller_key_env)
        show(
            [
                doctor_checks.controller(
                    want.controller,
                    *doctor_facts.controller_answer(want.controller, key, args.timeout),
                    FORMAT,
                )
            ]
        )
    for url in want.servers:
        show(doctor_checks.server(doctor_facts.server_facts(url, access)))
    print(f"{problems} problems, {warnings} warnings")
    return 1 if problems else 0
