"""``titan-grpo doctor``: look at this machine and its servers before a run, and say what to do."""

import argparse
import resource
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from titan_grpo.commands import doctor_checks as checks
from titan_grpo.commands import doctor_facts as facts
from titan_grpo.commands import doctor_options, doctor_tokenizer
from titan_grpo.commands.doctor_checks import Finding
from titan_grpo.commands.doctor_options import Options
from titan_grpo.config import LAUNCH, WeightSync
from titan_grpo.config.lora import sends_adapters
from titan_grpo.errors import ConfigError
from titan_grpo.layout.image import available_memory
from titan_grpo.protocol.model_config import essential
from titan_grpo.rollout.messages import FORMAT
from titan_grpo.rollout.spec import RolloutSpec
from titan_grpo.runkey import find_run_key

WIRE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}


@dataclass
class Wanted:
    """What the run would use, from the job's configuration and the command line."""

    servers: list[str] = field(default_factory=list)
    api_key_env: str = ""
    admin_key_env: str = ""
    pythons: dict[str, str] = field(default_factory=dict)
    """Engine -> interpreter that launched servers of it use."""
    model: str = ""
    model_fields: Mapping[str, Any] = field(default_factory=dict)
    """protocol.model_config.essential of it."""
    sync: WeightSync = field(default_factory=WeightSync)
    launch_gpus: list[int] = field(default_factory=list)
    requests: int = 0
    """In flight on one server at most."""
    controller: str = ""
    """URL of the rollout service, if there is to be one."""
    controller_key_env: str = ""
    options: Options = field(default_factory=Options)
    """What a server must be started with."""
    task: RolloutSpec | None = None
    """What a rollout process of this host would make prompts and rewards of."""


def parser() -> argparse.ArgumentParser:
    """Arguments of the command; torchtitan's parser reads the others: a job's command line fits."""
    out = argparse.ArgumentParser(
        prog="titan-grpo doctor",
        description="Check versions, memory, ports, environment and servers. Exit code 1 if"
        " there is a problem.",
        epilog="Every other argument is a job's: titan-grpo doctor --job.config_file X.toml"
        " [--rollout.servers URL]",
    )
    add = out.add_argument
    add("--server", action="append", default=[], metavar="URL", help="a server (may be repeated)")
    add("--engine-python", default="", metavar="PATH", help="interpreter of launched vLLM servers")
    add("--sglang-python", default="", metavar="PATH", help="the same of SGLang")
    add("--api-key-env", default="", metavar="NAME", help="variable with the servers' API key")
    add("--admin-key-env", default="", metavar="NAME", help="variable with SGLang's admin key")
    add("--timeout", type=float, default=10.0, metavar="SECONDS", help="of each question")
    return out


def wanted(
    args: argparse.Namespace, rest: list[str], env: Mapping[str, str]
) -> tuple[Wanted, Finding | None]:
    """What to look at, and a finding about the configuration itself."""
    named = {"vllm": args.engine_python, "sglang": args.sglang_python}
    out = Wanted(
        servers=list(args.server),
        api_key_env=args.api_key_env,
        admin_key_env=args.admin_key_env,
        pythons={engine: python for engine, python in named.items() if python},
    )
    if not rest:
        return out, None
    from titan_grpo.titan import jobconfig
    from titan_grpo.titan.hf_files import read_config
    from titan_grpo.titan.server_urls import known_servers

    try:
        config = jobconfig.parse(rest)
        out.model_fields = essential(read_config(config.model.hf_assets_path))
        rollout, sync = config.rollout, config.weight_sync
        launched = rollout.servers == [LAUNCH]
        if not launched or rollout.servers_file or rollout.servers_slurm:
            known = known_servers(rollout, env).urls
            out.servers += [url for url in known if url not in out.servers]
    except ConfigError as error:
        remedy = "correct the TOML file or the command line"
        return out, checks.problem("configuration", str(error), remedy)
    if launched:
        pythons = {"vllm": rollout.launch_python, "sglang": rollout.launch_sglang_python}
        out.pythons = {engine: pythons[engine] for engine in rollout.launch_engines} | out.pythons
    out.api_key_env = out.api_key_env or rollout.api_key_env
    out.admin_key_env = out.admin_key_env or rollout.admin_key_env
    out.model, out.sync = config.model.hf_assets_path, sync
    adapters = config.lora.rank if sends_adapters(config.lora) else 0
    out.options = Options(adapters, config.grpo.router_replay)
    out.requests, out.launch_gpus = rollout.max_concurrent_requests, rollout.launch_gpus
    out.controller = "" if rollout.controller == "local" else rollout.controller
    out.controller_key_env = rollout.controller_key_env
    if rollout.source == "task" and not rollout.replay_path and not out.controller:
        out.task = RolloutSpec.from_config(rollout, out.model)
    return out, checks.ok("configuration", "valid")


def machine(want: Wanted, env: Mapping[str, str]) -> Iterator[Finding]:
    """Look at this environment and this host."""
    yield checks.python(sys.version_info[:3])
    for name, allowed in checks.RANGES.items():
        yield checks.package(name, facts.installed(name), allowed)
    yield checks.torchrun(env)
    elements = facts.model_elements(Path(want.model)) if want.model else None
    size = None if elements is None else elements * WIRE_BYTES[want.sync.wire_dtype]
    yield checks.memory(available_memory(), size, want.sync.slots)
    gpus = facts.gpus()
    yield from checks.gpus(gpus, want.launch_gpus, size)
    yield checks.shared_memory(facts.shm_size(), len(gpus))
    if (deadlines := checks.first_version(size, want.sync)) is not None:
        yield deadlines
    open_files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    yield checks.descriptors(open_files, len(want.servers), want.requests)
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    yield checks.locked_memory(locked, facts.infiniband())
    towards = {facts.address_towards_server(url) for url in want.servers} or {"127.0.0.1"}
    for host in [want.sync.bind_host] if want.sync.bind_host else sorted(towards):
        yield checks.bind(host, facts.listen_error(host))
    for engine, python in want.pythons.items():
        answer, error = facts.engine_answer(python)
        yield from checks.engine(python, answer, error, engine)
        if answer is not None and want.sync.transport == "nccl":
            yield checks.nccl(facts.nccl(), answer["nccl"], python)


def _key(env: Mapping[str, str], setting: str, name: str) -> str:
    if name and not env.get(name):
        raise ConfigError(
            f"rollout.{setting} names {name}, which is not set: servers would refuse us; export it"
        )
    return env[name] if name else ""


def findings(
    args: argparse.Namespace, rest: list[str], env: Mapping[str, str]
) -> Iterator[Finding]:
    """Look at everything, one finding after the other. Raises ConfigError for a missing key."""
    want, configuration = wanted(args, rest, env)
    access = facts.Access(
        args.timeout,
        want.sync.bind_host,
        _key(env, "api_key_env", want.api_key_env),
        _key(env, "admin_key_env", want.admin_key_env),
        find_run_key(env, want.sync.run_key_file),
        want.model_fields,
    )
    if configuration:
        yield configuration
    yield from machine(want, env)
    if want.task:
        # Imported here: it needs packages whose absence the doctor has to be able to report.
        from titan_grpo.commands import doctor_task

        yield from doctor_task.findings(want.task)
    if want.controller:
        key = _key(env, "controller_key_env", want.controller_key_env)
        answer, error = facts.controller_answer(want.controller, key, args.timeout)
        yield checks.controller(want.controller, answer, error, FORMAT)
    for url in want.servers:
        found = facts.server_facts(url, access)
        yield from checks.server(found)
        if configuration and configuration.status == "ok":
            yield from doctor_options.findings(url, found.engine, want.options, access)
        if want.model and (of := doctor_tokenizer.finding(url, want.model, access)):
            yield of


def run(argv: list[str], env: Mapping[str, str]) -> int:
    """Print all findings as they come; 0 if there is no problem among them, else 1."""
    found: Counter[str] = Counter()
    for finding in findings(*parser().parse_known_args(argv), env):
        found[finding.status] += 1
        print(finding.line(), flush=True)
    print(f"{found['problem']} problems, {found['warning']} warnings")
    return 1 if found["problem"] else 0
