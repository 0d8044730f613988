"""Every knob of [rollout], validated.

No ``from __future__ import annotations`` in this file: torchtitan's merge reads field types as
objects.
"""

import ipaddress
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal
from urllib.parse import urlsplit, urlunsplit

from titan_grpo.config.task import ENGINE, Rules, TaskKeys, broken, task_rules
from titan_grpo.errors import ConfigError

LAUNCH = "launch"
"""The one value of ``rollout.servers`` that is not a URL."""


@dataclass
class WorkerKeys(TaskKeys):
    """How completions are sampled: the keys that the process that makes them gets."""

    engine: Literal["auto", "vllm", "sglang"] = "auto"
    """Which server software answers at the URLs; auto asks each server when its lane connects, and
    a fleet may mix."""

    api_key_env: str = ""
    """Name of the environment variable that holds the servers' API key; empty: no key is sent."""

    admin_key_env: str = ""
    """Name of the environment variable that holds the admin key of SGLang servers, which with one
    take pauses and weights with that key only; empty: the API key is sent there too. vLLM has
    none."""

    source: Literal["task", "atropos", "push"] = "task"
    """task: prompts of a task, sampled on the servers. atropos: batches of an Atropos API. push:
    groups that environments POST."""

    atropos_url: str = ""
    """Base URL of the Atropos API. A step takes one batch, of prompts_per_step * group_size
    sequences."""

    push_address: str = "127.0.0.1:8900"
    """host:port where environments POST groups (GET /schema there says how). Up to 1 +
    max_staleness steps' worth may wait; a step takes as many groups as make prompts_per_step *
    group_size completions."""

    push_key_env: str = ""
    """Name of the environment variable with the key that environments must show; empty: none, on a
    loopback address only."""

    seed: int = 0
    """Seed of prompt order and of sampling; request seeds derive from it and from prompt and sample
    index."""

    prompts_per_step: int = 8
    """Groups that one training step consumes."""

    group_size: int = 8
    """Completions per prompt."""

    max_completion_tokens: int = 256
    """Longest completion; with a task of several turns the longest episode after its prompt, the
    task's tokens included."""

    temperature: float = 1.0
    """Sampling temperature; the trainer divides its logits by the same."""

    stop: list[str] = field(default_factory=list)
    """Texts at which a completion (of a task with turns: a turn) ends; the tokens that hold one are
    part of it and are trained on. A task may name further ones."""

    stop_token_ids: list[int] = field(default_factory=list)
    """Tokens at which it ends, likewise, besides the model's own end tokens."""

    max_staleness: int = 1
    """Greatest trainer version minus the version that made a token; 0 is on-policy. Checked at
    admission and again at use. (Elsewhere: max_trajectory_age_steps.)"""

    max_stale_token_share: float = 0.0
    """Use a completion that depends on older versions than max_staleness allows all the same, where
    less than this share of its tokens was sampled by them (kept KV of theirs does not count); 0: no
    such one. Acts with consume = "ready" or "freshest", whose slow groups else are made again, and
    where engines name the version of each token (SGLang; vLLM from 0.33)."""

    in_flight_weight_updates: bool = True
    """true: a version is committed while requests run, which go on with it. false: a server
    finishes its running requests first, and gets no others meanwhile; the other servers go on. No
    completion is of two versions then."""

    consume: Literal["started", "ready", "freshest"] = "started"
    """Which groups a step takes. started: those of the next prompts in their order; it waits for
    the slow ones among them, so that what is trained on does not depend on speed. ready: any that
    are finished, the lowest prompts first; slow ones are overtaken until they are too stale, so
    training sees fewer of them than there are. freshest: the same, those of the newest weights
    first. Groups from outside have the order in which they come."""

    max_concurrent_requests: int = 64
    """Requests in flight on one server."""

    request_timeout_s: float = 300.0
    """Deadline of one generation request, in seconds. With stream_completions that of each silence
    of its answer."""

    stream_completions: bool = True
    """Have completions sent in pieces of 32 tokens: when a connection breaks, they go on at another
    server from the last piece. false: they come whole at their end, and a broken connection loses
    what was made."""


@dataclass
class Rollout(WorkerKeys):
    """Where and how completions are sampled."""

    servers: list[str] = field(default_factory=list)
    """Base URLs of the servers, or the single word "launch" to start them on this host. Those of
    servers_file and servers_slurm come on top; `titan-grpo servers add|remove URL --run DIR`
    changes them while training runs."""

    take_over: bool = False
    """Take servers from a live run of another dump folder, which stops when it has lost all of
    them. Servers of a run that ended, or gave no sign for weight_sync.commit_deadline_s, and of an
    earlier run in the same dump folder, are taken without it."""

    servers_file: str = ""
    """File with further URLs, one per line, # for comments, looked at every second: a server that
    it names joins, one that it drops leaves. Replace it as a whole (write another file, then rename
    it); a malformed or empty one changes nothing."""

    servers_slurm: str = ""
    """Environment variable with a SLURM host list, such as SLURM_JOB_NODELIST_HET_GROUP_1:
    servers_per_host servers on each of its hosts."""

    servers_port: int = 8000
    """Port of the first server on each host that servers_slurm names; the others' count up."""

    servers_per_host: int = 1
    """Servers on each host that servers_slurm names."""

    launch_engines: list[str] = field(default_factory=lambda: ["vllm"])
    """Engines to start when servers = "launch": "vllm", "sglang", or both side by side."""

    launch_count: int = 1
    """How many servers of each of these engines to start when servers = "launch"."""

    launch_gpus: list[int] = field(default_factory=list)
    """GPUs of launched servers by their numbers on this host, in order, each server the same number
    of them, which is its tensor parallelism: [4, 5, 6, 7] and launch_count = 4 is one each. Leave
    out those of the trainer's ranks. Empty: what rank 0 sees."""

    launch_python: str = ""
    """Interpreter of vLLM's own environment, for servers = "launch" (its environment differs from
    the trainer's)."""

    launch_sglang_python: str = ""
    """Interpreter of SGLang's own environment, likewise."""

    launch_args: list[str] = field(default_factory=list)
    """Arguments added to a launched vLLM server's command line."""

    launch_sglang_args: list[str] = field(default_factory=list)
    """Arguments added to a launched SGLang server's command line."""

    controller: str = "local"
    """Where rollouts are made and engine calls go from. local: a child process of rank 0. A URL
    such as http://host:8910: a service that you start near the servers with `titan-grpo rollouts`;
    model, dataset and reward functions must be at the same place there."""

    controller_key_env: str = ""
    """Name of the environment variable with that service's key; empty: none, on a loopback URL
    only."""

    callback_address: str = ""
    """No longer used, and refused: rank 0 polls the service, which calls nothing back."""

    controller_deadline_s: float = 120.0
    """How long that service may be unreachable before the run stops, in seconds."""

    top_p: float = 1.0
    """Only 1: all of the distribution is sampled from. Log-probabilities of a truncated one are not
    those that the trainer recomputes, and every ratio would be biased."""

    top_k: int = -1
    """Only -1 (all words), for the same reason."""

    batch_timeout_s: float = 1800.0
    """How long the trainer waits for one step's groups before it stops the run, in seconds."""

    record_path: str = ""
    """Write every consumed group to this JSONL file."""

    sample_every: int = 10
    """At the first step and every that many steps samples.jsonl gets up to four completions, with
    the log-probabilities of engine and trainer, for titan-grpo report; 0: none."""

    replay_path: str = ""
    """Train on the groups of a recorded file instead of sampling; servers still get every
    version."""


def server_url(text: str) -> str:
    """A server's URL in the one form that is compared: without a slash at its end, host in lower
    case. Raises ConfigError for another than http://host:port or https://host:port with a path.

    >>> server_url("http://GPU2:8000/")
    'http://gpu2:8000'
    """
    text = text.strip()
    try:
        parts = urlsplit(text)
        host = (parts.hostname or "").encode("idna")  # as a connection writes it
        usable = parts.scheme in ("http", "https") and bool(host) and parts.port != 0
    except ValueError:  # a port past 65535, brackets that do not match, a host that can be none
        usable = False
    if not usable or not text.isprintable() or any(letter in text for letter in "@?# "):
        raise ConfigError(
            "a server must be a URL such as http://host:8000, without user, query and fragment,"
            f" got {text!r}"
        )
    if parts.path.rstrip("/").endswith("/v1"):
        raise ConfigError(
            f"a server must be a URL such as http://host:8000, without /v1, got {text!r}: that is"
            " what a client of OpenAI's API gets"
        )
    return urlunsplit((parts.scheme, parts.netloc.lower(), parts.path.rstrip("/"), "", ""))


def two_names(urls: Iterable[str]) -> str:
    """Two of the URLs that are one server, as text; empty if there are none. The URLs are in the
    form of ``server_url``; one that is there twice is not meant.

    >>> two_names(["http://localhost:8000", "http://127.0.0.1:8000", "http://b"])
    'http://localhost:8000 and http://127.0.0.1:8000'
    """
    found: dict[tuple[str | None, int | None, str], str] = {}
    for url in urls:
        parts = urlsplit(url)
        host = "127.0.0.1" if parts.hostname == "localhost" else parts.hostname
        port = parts.port or {"http": 80, "https": 443}[parts.scheme]
        if (first := found.setdefault((host, port, parts.path), url)) != url:
            return f"{first} and {url}"
    return ""


def is_loopback(host: str) -> bool:
    """Whether a host of an address or a URL is this host, seen from itself."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


def violations(r: Rollout) -> list[str]:
    """All broken rules of the section. Pure; empty if none."""
    urls, out = [], []
    for text in r.servers if r.servers != [LAUNCH] else []:
        try:
            urls.append(server_url(text))
        except ConfigError as error:
            out.append(f"rollout.servers: {error}")
    repeated = len(set(urls)) != len(urls) or bool(two_names(urls))
    rules = (
        *_servers(r),
        (repeated, "servers", "without repetition"),
        *_sources(r),
        *task_rules(r),
        *_controller(r),
        *_sampling(r),
    )
    return out + broken("rollout", r, rules)


def _host(url: str) -> str:
    """Host of a URL; empty for what is no server's URL."""
    try:
        return urlsplit(server_url(url)).hostname or ""
    except ConfigError:
        return ""


def _servers(r: Rollout) -> Rules:
    yield not 0 < r.servers_port < 65536, "servers_port", "a port, 1 to 65535"
    most = 65536 - r.servers_port
    yield not 0 < r.servers_per_host <= most, "servers_per_host", f"1 to {most} (their ports)"
    if r.servers != [LAUNCH]:
        rule = 'a list of URLs, or ["launch"], unless servers_file or servers_slurm is set'
        yield not (r.servers or r.servers_file or r.servers_slurm), "servers", rule
        return
    wanted, known = r.launch_engines, {"vllm": "launch_python", "sglang": "launch_sglang_python"}
    yield (
        not wanted or len(set(wanted)) != len(wanted) or not set(wanted) <= set(known),
        "launch_engines",
        '"vllm", "sglang" or both, each once',
    )
    gpus, count = r.launch_gpus, r.launch_count * len(wanted)
    yield (
        len(set(gpus)) != len(gpus)
        or any(gpu < 0 for gpu in gpus)
        or len(gpus) % max(count, 1) > 0,
        "launch_gpus",
        f"numbers of different GPUs, as many for each of the {count} launched servers",
    )
    if engines_read_calls(r):
        for engine, key in (("vllm", "launch_args"), ("sglang", "launch_sglang_args")):
            named = any(word.split("=")[0] == "--tool-call-parser" for word in getattr(r, key))
            rule = f'with "--tool-call-parser", "NAME" where tool_parser is "{ENGINE}"'
            yield engine in wanted and not named, key, rule
    for engine, key in known.items():
        rule = f'set when rollout.servers = ["launch"] starts "{engine}"'
        yield engine in wanted and not getattr(r, key), key, rule
    rule = f'"auto" for launched servers of {", ".join(wanted)}'
    yield r.engine != "auto" and any(engine != r.engine for engine in wanted), "engine", rule


def engines_read_calls(r: Rollout) -> bool:
    """Whether servers have to read the calls of tools in what they sample."""
    return bool(r.agent) and r.tool_parser == ENGINE and not r.replay_path


def _sources(r: Rollout) -> Rules:
    rule = 'a URL such as http://host:8000 with source = "atropos"'
    yield r.source == "atropos" and not _host(r.atropos_url), "atropos_url", rule
    if r.source == "push":
        yield from _listens(r, "push")
    if r.agent:
        yield r.source != "task", "source", '"task" with rollout.agent'
        yield from _listens(r, "agent")
    if not r.in_flight_weight_updates:
        rule = (
            "0 or 1 unless rollout.in_flight_weight_updates is true (no request outlives a commit"
            " without them, so finished groups would only wait longer and be staler)"
        )
        yield r.max_staleness > 1, "max_staleness", rule
        rule = (
            f'true with rollout.source = "{r.source}" (environments ask the servers by themselves,'
            " and the run does not see their requests)"
        )
        yield r.source != "task", "in_flight_weight_updates", rule


def listens(address: str) -> bool:
    """Whether a text has the form of an address to listen at, "host:port"."""
    host, _, port = address.rpartition(":")
    return bool(host) and port.isdigit() and int(port) < 65536


def _listens(r: Rollout, who: str) -> Rules:
    address: str = getattr(r, f"{who}_address")
    host, usable = address.rpartition(":")[0], listens(address)
    yield not usable, f"{who}_address", "host:port"
    yield (
        usable and not getattr(r, f"{who}_key_env") and not is_loopback(host),
        f"{who}_key_env",
        f"set while rollout.{who}_address is not on loopback (any process that reaches {address}"
        " could teach the model)",
    )


def _controller(r: Rollout) -> Rules:
    rule = "left out (rank 0 polls the service, and accepts no connection from it)"
    yield bool(r.callback_address), "callback_address", rule
    if r.controller == "local":
        return
    host = _host(r.controller)
    yield not host, "controller", '"local" or a URL such as http://host:8910'
    elsewhere = bool(host) and not is_loopback(host)
    rule = (
        "set while rollout.controller is not on loopback (any process that answers there could"
        " teach the model)"
    )
    yield elsewhere and not r.controller_key_env, "controller_key_env", rule
    rule = "URLs while rollout.controller is on another host (launched servers listen on loopback)"
    yield elsewhere and r.servers == [LAUNCH], "servers", rule
    rule = '"local" with rollout.replay_path (nothing is sampled)'
    yield bool(r.replay_path), "controller", rule
    yield r.controller_deadline_s <= 0, "controller_deadline_s", "greater than 0"


def _sampling(r: Rollout) -> Rules:
    yield r.group_size < 2, "group_size", "2 or more (an advantage needs a group to compare with)"
    yield r.max_staleness < 0, "max_staleness", "0 or greater"
    share = r.max_stale_token_share
    yield not 0 <= share < 1, "max_stale_token_share", "0 (off) or greater, and less than 1"
    rule = "0 with rollout.max_staleness = 0 (which promises on-policy data)"
    yield share > 0 and r.max_staleness == 0, "max_stale_token_share", rule
    whole = "(engines give log-probabilities of what is left after a truncation or before it, the"
    whole += " trainer those of the whole distribution: every ratio would be biased)"
    yield r.top_p != 1, "top_p", f"1 {whole}"
    yield r.top_k != -1, "top_k", f"-1 {whole}"
    yield not all(r.stop), "stop", "without an empty text (it would end every completion at once)"
    yield any(token < 0 for token in r.stop_token_ids), "stop_token_ids", "of token ids, 0 or more"
    rule = (
        f"at most rollout.max_completion_tokens = {r.max_completion_tokens} (else every group would"
        " be dropped)"
    )
    yield r.min_completion_tokens > r.max_completion_tokens > 0, "min_completion_tokens", rule
    yield r.sample_every < 0, "sample_every", "0 (none) or greater"
    for name in (
        "prompts_per_step",
        "max_completion_tokens",
        "max_concurrent_requests",
        "launch_count",
        "temperature",
        "request_timeout_s",
        "batch_timeout_s",
    ):
        yield getattr(r, name) <= 0, name, "greater than 0"
    rule = "another file than rollout.replay_path"
    yield bool(r.record_path) and r.record_path == r.replay_path, "record_path", rule
