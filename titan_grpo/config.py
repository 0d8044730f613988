"""Every knob of titan_grpo, validated. torchtitan merges these sections into its own JobConfig.

A job names this module with ``[job] custom_config_module = "titan_grpo.config"``; torchtitan then finds
``JobConfig`` here and adds the sections ``[grpo]``, ``[rollout]`` and ``[weight_sync]`` to TOML and command line.

No ``from __future__ import annotations`` in this file: torchtitan's merge reads field types as objects.
"""

from dataclasses import dataclass, field
from typing import Any, Literal
from urllib.parse import urlsplit

from titan_grpo import config_grpo
from titan_grpo.config_grpo import GRPO
from titan_grpo.errors import ConfigError

LAUNCH = "launch"
"""The one value of ``rollout.servers`` that is not a URL."""


@dataclass
class Rollout:
    """Where and how completions are sampled."""

    engine: Literal["auto", "vllm", "sglang"] = "auto"
    """Which server software answers at the URLs; auto asks each server when its lane connects, and a fleet may mix."""

    servers: list[str] = field(default_factory=list)
    """Base URLs of the servers, or the single word "launch" to start them on this host. Those of servers_file and servers_slurm
    come on top; `titan-grpo servers add|remove URL --run DIR` changes them while training runs."""

    servers_file: str = ""
    """File with further URLs, one per line, # for comments, looked at every second: a server that it names joins, one that it
    drops leaves. Replace it as a whole (write another file, then rename it); a malformed or empty one changes nothing."""

    servers_slurm: str = ""
    """Environment variable with a SLURM host list, such as SLURM_JOB_NODELIST_HET_GROUP_1: one server on each of its hosts."""

    servers_port: int = 8000
    """Port of the servers that servers_slurm names."""

    launch_engines: list[str] = field(default_factory=lambda: ["vllm"])
    """Engines to start when servers = "launch": "vllm", "sglang", or both side by side."""

    launch_count: int = 1
    """How many servers of each of these engines to start when servers = "launch"."""

    launch_python: str = ""
    """Interpreter of vLLM's own environment, for servers = "launch" (its environment differs from the trainer's)."""

    launch_sglang_python: str = ""
    """Interpreter of SGLang's own environment, likewise."""

    launch_args: list[str] = field(default_factory=list)
    """Arguments added to a launched vLLM server's command line."""

    launch_sglang_args: list[str] = field(default_factory=list)
    """Arguments added to a launched SGLang server's command line."""

    api_key_env: str = ""
    """Name of the environment variable that holds the servers' API key; empty: no key is sent."""

    admin_key_env: str = ""
    """Name of the environment variable that holds the admin key of SGLang servers, which with one take pauses and weights with
    that key only; empty: the API key is sent there too. vLLM has none."""

    source: Literal["task", "atropos", "push"] = "task"
    """task: prompts of a task, sampled on the servers. atropos: batches of an Atropos API. push: groups that environments
    POST."""

    atropos_url: str = ""
    """Base URL of the Atropos API. A step takes one batch, of prompts_per_step * group_size sequences."""

    push_address: str = "127.0.0.1:8900"
    """host:port where environments POST groups (GET /schema there says how). Up to 1 + max_staleness steps' worth may wait;
    a step takes as many groups as make prompts_per_step * group_size completions."""

    push_key_env: str = ""
    """Name of the environment variable with the key that environments must show; empty: none, on a loopback address only."""

    task: str = "digits"
    """A built-in task (digits, gsm8k, calculator) or a dotted path "package.module:Class" to your own."""

    task_path: str = ""
    """Data file of the task (gsm8k: a JSONL file with "question" and "answer")."""

    task_concurrency: int = 64
    """Calls of the task's asynchronous methods in flight; further ones wait."""

    task_timeout_s: float = 600.0
    """Deadline of one such call, in seconds. It ends calls that await, not ones that block."""

    task_error_budget: int = 0
    """How many of any 100 groups in a row may be lost to the task's own exceptions and timeouts (dropped as task_error and
    made again); one more stops the run with its traceback. Errors of servers do not count."""

    max_turns: int = 8
    """With a task of several turns: the most that the model gets in one completion."""

    seed: int = 0
    """Seed of prompt order and of sampling; request seeds derive from it and from prompt and sample index."""

    prompts_per_step: int = 8
    """Groups that one training step consumes."""

    group_size: int = 8
    """Completions per prompt."""

    max_completion_tokens: int = 256
    """Longest completion; with a task of several turns the longest episode after its prompt, the task's tokens included."""

    temperature: float = 1.0
    """Sampling temperature; the trainer divides its logits by the same."""

    max_staleness: int = 1
    """Greatest trainer version minus the version that made a token; 0 is on-policy. Checked at admission and again at use.
    (Elsewhere: max_trajectory_age_steps.)"""

    in_flight_weight_updates: bool = True
    """true: a version is committed while requests run, which go on with it. false: a server finishes its running requests
    first, and gets no others meanwhile; the other servers go on. No completion is of two versions then."""

    consume: Literal["oldest", "freshest"] = "oldest"
    """Which of the finished groups a step takes if there are more: those of the lowest prompts, or those of the newest
    weights (the others may then grow too stale, and are made again)."""

    max_concurrent_requests: int = 64
    """Requests in flight on one server."""

    request_timeout_s: float = 300.0
    """Deadline of one generation request, in seconds. With stream_completions that of each silence of its answer."""

    stream_completions: bool = True
    """Have completions sent in pieces of 32 tokens: when a connection breaks, they go on at another server from the last piece.
    false: they come whole at their end, and a broken connection loses what was made."""

    batch_timeout_s: float = 1800.0
    """How long the trainer waits for one step's groups before it stops the run, in seconds."""

    record_path: str = ""
    """Write every consumed group to this JSONL file."""

    replay_path: str = ""
    """Train on the groups of a recorded file instead of sampling; servers still get every version."""


@dataclass
class WeightSync:
    """How versions travel from the trainer's memory to the servers'."""

    transport: Literal["auto", "gloo", "nccl"] = "auto"
    """Data plane of the lanes; auto is nccl on CUDA and gloo elsewhere."""

    wire_dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    """Floating-point type of the image; masters are cast once, on the trainer."""

    block_bytes: int = 4 << 20
    """Bytes under one digest; a multiple of 4096."""

    bucket_bytes: int = 64 << 20
    """Bytes of one broadcast; a multiple of block_bytes. A lane's device memory is one bucket."""

    slots: int = 2
    """Version images kept in host memory (slots x model bytes). Two let one be written while another is sent."""

    apply: Literal["staged", "streamed"] = "staged"
    """staged: receive whole, then pause only for the local load. streamed: no image on the server but a window of four buckets;
    the server stands still for the whole transfer, and after one that broke off half-way until the next whole one."""

    kv_after_update: Literal["keep", "recompute"] = "keep"
    """KV of requests that run over a commit. keep: they go on with it, so that later tokens are of both weights. recompute: the
    engine throws it away, and each of them is computed anew up to where it was, with the new weights."""

    digest: Literal["xxh3", "blake3"] = "xxh3"
    """Hash of the blocks: xxh3 is the fastest, blake3 is cryptographic. With a run key it is always blake3, keyed."""

    run_key_file: str = ""
    """File with the run key (64 hexadecimal digits): servers that have it take weights from nobody without. The environment
    variables TITAN_GRPO_RUN_KEY and TITAN_GRPO_RUN_KEY_FILE do the same; launched servers are given a key by themselves."""

    bind_host: str = ""
    """Address that the lanes' sockets bind to; empty: loopback if every server is local, else this host's address."""

    connect_deadline_s: float = 60.0
    """Deadline for a server's receiver to join its lane, in seconds."""

    lane_deadline_s: float = 120.0
    """Deadline of one transfer, from its first byte to the receiver's digests, in seconds."""

    commit_deadline_s: float = 60.0
    """Deadline of each commit call (pause, load, version, resume), in seconds."""

    drain_deadline_s: float = 120.0
    """With rollout.in_flight_weight_updates = false: how long a server gets to finish its requests before a commit. What still
    runs then is given up and made again. In seconds."""

    startup_deadline_s: float = 600.0
    """How long the start waits for the first version to be committed by at least one server, in seconds."""

    shutdown_deadline_s: float = 60.0
    """How long the end waits for the newest version to be flushed to the servers, in seconds."""

    max_lag: int = 1000
    """Stop the run at the step boundary after that many versions in a row without a commit on any server; 0: never. Fresh
    rollouts end sooner in that case (rollout.max_staleness, then batch_timeout_s); a run on recorded ones would never end."""

    backoff_s: float = 0.5
    """First pause after a lane failed, in seconds; doubles up to backoff_max_s."""

    backoff_max_s: float = 15.0
    """Longest pause between two attempts of a lane, in seconds."""

    on_sync_error: Literal["continue", "stop"] = "continue"
    """What a latched background error does at the next step boundary: log it and go on, or stop the run."""


@dataclass
class JobConfig:
    """What torchtitan's ConfigManager merges into its own JobConfig; the name is torchtitan's rule."""

    grpo: GRPO = field(default_factory=GRPO)
    rollout: Rollout = field(default_factory=Rollout)
    weight_sync: WeightSync = field(default_factory=WeightSync)


def _rule(broken: bool, key: str, rule: str, value: Any) -> list[str]:
    return [f"{key} must be {rule}, got {value!r}"] if broken else []


def _positive(section: str, obj: Any, names: tuple[str, ...]) -> list[str]:
    out: list[str] = []
    for name in names:
        value = getattr(obj, name)
        out += _rule(value <= 0, f"{section}.{name}", "greater than 0", value)
    return out


def _launch_violations(r: Rollout) -> list[str]:
    wanted, known = r.launch_engines, ("vllm", "sglang")
    bad = not wanted or len(set(wanted)) != len(wanted) or not set(wanted) <= set(known)
    out = _rule(bad, "rollout.launch_engines", '"vllm", "sglang" or both, each once', wanted)
    for engine, key in zip(known, ("launch_python", "launch_sglang_python"), strict=True):
        missing = engine in wanted and not getattr(r, key)
        out += _rule(missing, f"rollout.{key}", f'set when rollout.servers = ["launch"] starts "{engine}"', getattr(r, key))
    other = r.engine != "auto" and any(engine != r.engine for engine in wanted)
    return out + _rule(other, "rollout.engine", f'"auto" for launched servers of {", ".join(wanted)}', r.engine)


def _server_violations(r: Rollout) -> list[str]:
    out = _rule(not 0 < r.servers_port < 65536, "rollout.servers_port", "a port, 1 to 65535", r.servers_port)
    if r.servers == [LAUNCH]:
        return out + _launch_violations(r)
    none = not (r.servers or r.servers_file or r.servers_slurm)
    out += _rule(
        none, "rollout.servers", 'a list of URLs, or ["launch"], unless servers_file or servers_slurm is set', r.servers
    )
    for url in r.servers:
        parts = urlsplit(url)
        bad = parts.scheme not in ("http", "https") or not parts.hostname
        out += _rule(bad, "rollout.servers", "URLs such as http://host:8000", url)
    out += _rule(len(set(r.servers)) != len(r.servers), "rollout.servers", "without repetition", r.servers)
    return out


def _source_violations(r: Rollout) -> list[str]:
    url = urlsplit(r.atropos_url)
    bad = r.source == "atropos" and (url.scheme not in ("http", "https") or not url.hostname)
    out = _rule(bad, "rollout.atropos_url", 'a URL such as http://host:8000 with source = "atropos"', r.atropos_url)
    host, _, port = r.push_address.rpartition(":")
    bad = r.source == "push" and not (host and port.isdigit() and int(port) < 65536)
    out += _rule(bad, "rollout.push_address", "host:port", r.push_address)
    open_door = r.source == "push" and not r.push_key_env and host not in ("localhost", "::1") and not host.startswith("127.")
    out += _rule(
        open_door and not bad,
        "rollout.push_key_env",
        f"set while rollout.push_address is not on loopback (anybody who reaches {r.push_address} could teach the model)",
        r.push_key_env,
    )
    return out


def _drain_violations(r: Rollout) -> list[str]:
    if r.in_flight_weight_updates:
        return []
    why = "no request outlives a commit without them, so finished groups would only wait longer and be staler"
    out = _rule(
        r.max_staleness > 1,
        "rollout.max_staleness",
        f"0 or 1 unless rollout.in_flight_weight_updates is true ({why})",
        r.max_staleness,
    )
    return out + _rule(
        r.source != "task",
        "rollout.in_flight_weight_updates",
        f'true with rollout.source = "{r.source}" (environments ask the servers by themselves; nobody here sees what runs)',
        r.in_flight_weight_updates,
    )


def _rollout_violations(r: Rollout) -> list[str]:
    out = _server_violations(r) + _source_violations(r)
    out += _rule(r.group_size < 2, "rollout.group_size", "2 or more (an advantage needs a group to compare with)", r.group_size)
    out += _rule(r.max_staleness < 0, "rollout.max_staleness", "0 or greater", r.max_staleness)
    out += _drain_violations(r)
    counts = (
        "prompts_per_step",
        "max_completion_tokens",
        "max_concurrent_requests",
        "launch_count",
        "task_concurrency",
        "max_turns",
    )
    out += _positive("rollout", r, (*counts, "temperature", "request_timeout_s", "batch_timeout_s", "task_timeout_s"))
    out += _rule(not 0 <= r.task_error_budget <= 100, "rollout.task_error_budget", "0 to 100", r.task_error_budget)
    out += _rule(
        bool(r.record_path) and r.record_path == r.replay_path,
        "rollout.record_path",
        "another file than rollout.replay_path",
        r.record_path,
    )
    out += _rule(r.task == "gsm8k" and not r.task_path, "rollout.task_path", 'set for task = "gsm8k"', r.task_path)
    return out


def _weight_sync_violations(w: WeightSync) -> list[str]:
    seconds = tuple(n for n in vars(w) if n.endswith("_s"))
    out = _positive("weight_sync", w, seconds)
    out += _rule(
        w.block_bytes <= 0 or w.block_bytes % 4096 != 0, "weight_sync.block_bytes", "a positive multiple of 4096", w.block_bytes
    )
    out += _rule(
        w.block_bytes > 0 and (w.bucket_bytes <= 0 or w.bucket_bytes % w.block_bytes != 0),
        "weight_sync.bucket_bytes",
        f"a positive multiple of weight_sync.block_bytes ({w.block_bytes})",
        w.bucket_bytes,
    )
    out += _rule(w.max_lag < 0, "weight_sync.max_lag", "0 (never) or greater", w.max_lag)
    out += _rule(w.slots < 2, "weight_sync.slots", "2 or more (one is written while another is sent)", w.slots)
    out += _rule(w.backoff_max_s < w.backoff_s, "weight_sync.backoff_max_s", "at least weight_sync.backoff_s", w.backoff_max_s)
    return out


def violations(config: Any) -> list[str]:
    """All broken rules of the three sections, each as "key must be rule, got value". Pure; empty if none."""
    grpo, rollout = config.grpo, config.rollout
    out = config_grpo.violations(grpo, rollout) + _rollout_violations(rollout) + _weight_sync_violations(config.weight_sync)
    out += _rule(
        grpo.async_weight_update and rollout.max_staleness == 0,
        "rollout.max_staleness",
        "1 or more with grpo.async_weight_update (0 would wait for every server at every step)",
        rollout.max_staleness,
    )
    return out


def check(config: Any) -> None:
    """Raise ConfigError with the first broken rule and the number of further ones."""
    broken = violations(config)
    if broken:
        more = f" (and {len(broken) - 1} more)" if len(broken) > 1 else ""
        raise ConfigError(broken[0] + more)
