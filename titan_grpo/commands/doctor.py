"""``titan-grpo doctor``: check this machine and its servers before a run, and name remedies."""

import argparse
import resource
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from titan_grpo.commands import doctor_host as host
from titan_grpo.commands import doctor_servers as servers
from titan_grpo.commands.doctor_host import Finding
from titan_grpo.commands.doctor_servers import Needs
from titan_grpo.config import (
    WIRE_BYTES,
    Evaluation,
    Rollout,
    WeightSync,
    engines_read_calls,
    sends_adapters,
)
from titan_grpo.config.rollout import PYTHONS, required_key, server_url
from titan_grpo.errors import ConfigError, DataError
from titan_grpo.layout.memory import available_memory
from titan_grpo.receive.checkpoint import essential
from titan_grpo.rollout.messages import RolloutSpec
from titan_grpo.runkey import find_run_key
from titan_grpo.sync.transports.channel import resolve_bind_host

LONGEST_S = 3600.0
"""Largest --timeout."""

CORRECT = "correct the TOML file or the command line"
INTENDED = "the start of the run says so too; correct the job if this is not intended"


@dataclass
class Wanted:
    """What the run would use, from the job's configuration and the command line."""

    servers: list[str]
    """All: of rollouts, and those that evaluations have for themselves."""
    pythons: dict[str, str]
    """Engine -> interpreter of its launched servers."""
    rollout: Rollout
    sync: WeightSync = field(default_factory=WeightSync)
    model: str = ""
    model_fields: Mapping[str, Any] = field(default_factory=dict)
    """receive.checkpoint.essential of the model's config.json."""
    dump_folder: Path | None = None
    """None without a valid job."""
    checkpoints: int = 0
    """The most that the run keeps on the disk."""
    adapters: int = 0
    """Elements of the adapters that are trained; 0: every weight is."""
    sends_adapters: bool = False
    """Whether a version is the adapters alone."""
    needs: Needs | None = None
    """Needs of the job; None without a valid job."""
    evaluations: Sequence[Evaluation] = ()

    def needs_of(self, url: str) -> Needs | None:
        """Return what the job needs of this server: of one that gets no rollouts, less."""
        own = (each for table in self.evaluations for each in table.servers)
        if self.needs is None or url not in own:
            return self.needs
        options = replace(self.needs.options, routes=False)
        return replace(self.needs, options=options, tool_calls=False)


def parser() -> argparse.ArgumentParser:
    """Make the command's parser. Other arguments go to torchtitan's: a job's command line fits."""
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
) -> tuple[Wanted, list[Finding]]:
    """Return what to check, and findings about the configuration itself."""
    named = {"vllm": args.engine_python, "sglang": args.sglang_python}
    keys = {"api_key_env": args.api_key_env, "admin_key_env": args.admin_key_env}
    out = Wanted(
        [server_url(url) for url in args.server],
        {engine: python for engine, python in named.items() if python},
        Rollout(**keys, max_concurrent_requests=0),
    )
    if not rest:
        return out, []
    from titan_grpo.titan import jobconfig
    from titan_grpo.titan.jobfile import read_config
    from titan_grpo.titan.lora import adapter_elements
    from titan_grpo.titan.servers import known_servers

    try:
        config, expanded, notes = jobconfig.read(rest)
        out.model_fields = essential(read_config(config.model.hf_assets_path))
        rollout = config.rollout
        tokens = servers.tokens_here(config.model.hf_assets_path)
        own = [url for table in config.evaluation for url in table.servers]
        if not rollout.launches or rollout.servers_file or rollout.servers_slurm:
            known = known_servers(rollout, env, apart=own).urls
            out.servers += [url for url in known if url not in out.servers]
    except ConfigError as error:
        return out, [host.problem("configuration", str(error), CORRECT)]
    if rollout.launches:
        pythons = {engine: getattr(rollout, PYTHONS[engine]) for engine in rollout.launch_engines}
        out.pythons = pythons | out.pythons
    out.rollout = replace(rollout, **{name: value for name, value in keys.items() if value})
    out.model, out.sync = config.model.hf_assets_path, config.weight_sync
    out.dump_folder, saving = Path(config.job.dump_folder), config.checkpoint
    if saving.enable:
        kept = saving.interval, saving.keep_latest_k
        out.checkpoints = host.kept_checkpoints(config.training.steps, *kept)
    out.adapters, out.sends_adapters = adapter_elements(config), sends_adapters(config.lora)
    rank = config.lora.rank if out.sends_adapters else 0
    out.evaluations = config.evaluation
    out.servers += [url for url in dict.fromkeys(own) if url not in out.servers]
    options = servers.Options(rank, config.grpo.router_replay, config.training.seq_len)
    reads = engines_read_calls(rollout)
    streamed = out.sync.apply == "streamed" and out.sync.transport != "nccl"
    out.needs = Needs(options, tokens, reads, streamed)
    try:
        # Without the data of reward functions and interpreters: they are tried, which says more.
        notes += jobconfig.check_files(config, env, all_files=False)
        found = [host.ok("configuration", "valid")]
    except (ConfigError, DataError) as error:
        found = [host.problem("configuration", str(error), CORRECT)]
    found += [host.ok("start", text) for text in expanded]
    return out, found + [host.warning("start", note, INTENDED) for note in notes]


def machine(want: Wanted, env: Mapping[str, str]) -> Iterator[Finding]:
    """Check this environment and this host."""
    yield host.ok("python", ".".join(map(str, sys.version_info[:3])))
    for name, allowed in host.RANGES.items():
        yield host.package(name, host.installed(name), allowed)
    yield host.torchrun(env)
    elements, width = None, WIRE_BYTES[want.sync.wire_dtype]
    if want.model:
        try:
            elements = host.model_elements(Path(want.model))
        except DataError as error:
            yield host.problem("model", str(error), "copy the model's directory again")
    model_bytes = None if elements is None else elements * width
    version_bytes = want.adapters * width if want.sends_adapters else model_bytes
    yield host.memory(available_memory(), version_bytes, want.sync.slots)
    if want.dump_folder is not None:
        each = None if elements is None else host.checkpoint_bytes(elements, want.adapters)
        yield host.dump_folder(host.Place.of(want.dump_folder), each, want.checkpoints)
    gpus = host.found_gpus()
    yield from host.gpus(gpus, want.rollout, model_bytes, env.get("CUDA_VISIBLE_DEVICES", ""))
    if want.sync.transport == "nccl" and not gpus:
        text = 'torch sees no GPU here, so weight_sync.transport = "nccl" is refused on this host'
        yield host.warning("nccl", text, 'set it to "auto", or train on a host with GPUs')
    yield host.shared_memory(host.shm_size(), len(gpus))
    if (deadlines := host.first_version(version_bytes, want.sync)) is not None:
        yield deadlines
    open_files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    r = want.rollout
    started = r.launch_count * len(r.launch_engines) if r.launches else 0
    count = len(want.servers) + started
    yield host.descriptors(open_files, count, r.max_concurrent_requests)
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    yield host.locked_memory(locked, host.infiniband())
    towards = {resolve_bind_host("", url) for url in want.servers} or {"127.0.0.1"}
    for address in [want.sync.bind_host] if want.sync.bind_host else sorted(towards):
        yield host.bind(address)
    for engine, python in want.pythons.items():
        answer = host.engine_answer(python)
        yield from host.engine(python, answer, engine)
        if isinstance(answer, dict) and want.sync.transport == "nccl":
            yield host.nccl(host.nccl_version(), answer["nccl"], python)


def findings(
    args: argparse.Namespace, rest: list[str], env: Mapping[str, str]
) -> Iterator[Finding]:
    """Check everything, one finding after the other. Raises ConfigError for a missing key, or a
    --timeout out of range."""
    if not 0 < args.timeout <= LONGEST_S:
        raise ConfigError(f"--timeout must be in (0, {LONGEST_S:g}], got {args.timeout:g}")
    want, configuration = wanted(args, rest, env)
    rollout = want.rollout
    access = servers.Access(
        args.timeout,
        want.sync.bind_host,
        required_key(env, "api_key_env", rollout.api_key_env),
        required_key(env, "admin_key_env", rollout.admin_key_env),
        find_run_key(env, want.sync.run_key_file),
        want.model_fields,
    )
    yield from configuration
    yield from machine(want, env)
    elsewhere = rollout.controller != "local"
    if want.needs:
        # Imported here: it needs packages that the doctor must be able to report as missing.
        from titan_grpo.commands import doctor_task

        spec = RolloutSpec.from_config(rollout, want.model)
        if rollout.source == "task" and not rollout.replay_path and not elsewhere:
            row = want.needs.options.context
            yield from doctor_task.findings(replace(spec, row_tokens=row))
        for table in want.evaluations:
            yield from doctor_task.of_evaluation(table, spec)
    if elsewhere:
        key = required_key(env, "controller_key_env", rollout.controller_key_env)
        yield servers.controller(rollout.controller, key, args.timeout)
    for url in want.servers:
        needs = want.needs_of(url)
        yield from servers.server(servers.server_facts(url, access, needs), needs)


def run(argv: list[str], env: Mapping[str, str]) -> int:
    """Print findings as they come. Returns 1 if one is a problem, else 0."""
    found: Counter[str] = Counter()
    for finding in findings(*parser().parse_known_args(argv), env):
        found[finding.status] += 1
        print(finding.line(), flush=True)
    kinds = ("problem", "warning")
    print(", ".join(f"{found[kind]} {kind}{'s' * (found[kind] != 1)}" for kind in kinds))
    return 1 if found["problem"] else 0
