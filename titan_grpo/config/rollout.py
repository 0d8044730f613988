"""The section ``[rollout]`` and its rules.

No ``from __future__ import annotations`` in this file: torchtitan's merge reads field types as
objects.
"""

import ipaddress
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal
from urllib.parse import urlsplit, urlunsplit

from titan_grpo.config.task import (
    ENGINE,
    GREATEST_TEMPERATURE,
    LEAST_TEMPERATURE,
    Rules,
    TaskKeys,
    broken,
    task_rules,
)
from titan_grpo.errors import ConfigError

LAUNCH = "launch"
"""Value of ``rollout.servers`` that starts servers; all others are URLs."""

PYTHONS = {"vllm": "launch_python", "sglang": "launch_sglang_python"}
"""Engine -> key of [rollout] with the interpreter of its launched servers."""

ARGUMENTS = {"vllm": "launch_args", "sglang": "launch_sglang_args"}
"""Engine -> key of [rollout] with further arguments of its launched servers."""


@dataclass
class WorkerKeys(TaskKeys):
    """Keys that the rollout process gets: how completions are sampled."""

    engine: Literal["auto", "vllm", "sglang"] = "auto"
    """Server software at the URLs. auto: detect it on each server when its lane connects; a run
    may have both."""

    api_key_env: str = ""
    """Environment variable with the servers' API key. Empty: no key is sent."""

    admin_key_env: str = ""
    """Environment variable with the admin key of SGLang servers; one that has such a key accepts
    pauses and weights only with it. Empty: the API key is sent there too. vLLM has no admin key."""

    source: Literal["task", "atropos", "push"] = "task"
    """task: prompts of a task, sampled on the servers. atropos: batches from an Atropos API. push:
    groups that environments POST."""

    atropos_url: str = ""
    """Base URL of the Atropos API. A step takes a batch of prompts_per_step * group_size
    sequences."""

    push_address: str = "127.0.0.1:8900"
    """host:port where environments POST groups (GET /schema there describes the format). While
    groups for 1 + max_staleness steps wait, no more are taken (a body that came before is taken
    whole); a step takes as many groups as make prompts_per_step * group_size completions."""

    push_key_env: str = ""
    """Environment variable with the key that environments must send. Empty (on a loopback address
    only): no key."""

    seed: int = 0
    """Seed of prompt order and sampling; request seeds derive from it, prompt and sample index."""

    prompts_per_step: int = 8
    """Groups per training step."""

    group_size: int = 8
    """Completions per prompt."""

    max_completion_tokens: int = 256
    """Longest completion. For a task of several turns: longest episode after its prompt, the task's
    tokens included. Less after a long prompt: both together have at most training.seq_len tokens.
    """

    temperature: float = 1.0
    """Sampling temperature; the trainer divides its logits by it too."""

    stop: list[str] = field(default_factory=list)
    """Texts that end a completion (of a task with turns: a turn). The tokens that contain such a
    text are part of the completion and are trained on. A task may add further ones."""

    stop_token_ids: list[int] = field(default_factory=list)
    """Tokens that end it in the same way, besides the model's own end tokens."""

    max_staleness: int = 1
    """Largest allowed trainer version minus the oldest version that a completion depends on; 0:
    on-policy, with grpo.async_weight_update = false alone. Checked when a group starts and again
    when it is used. (Elsewhere: max_trajectory_age_steps.)"""

    max_stale_token_share: float = 0.0
    """Use a completion in spite of max_staleness if less than this share of its sampled tokens is
    of versions that are too old (kept KV of such versions does not count). 0: never. Acts with
    consume = "ready" or "freshest", where such groups are otherwise made again, and on engines that
    report each token's version (SGLang; vLLM from 0.33)."""

    in_flight_weight_updates: bool = True
    """true: commit a version while requests run; they continue on it. false: a server first
    finishes its running requests and gets no new ones, while other servers go on. No completion
    then has two versions; one that is broken off begins again where the weights are others, so long
    ones are rarer in training: give weight_sync.drain_deadline_s their time. false needs
    max_staleness of 1 or 0, and source = "task"."""

    consume: Literal["started", "ready", "freshest"] = "started"
    """Groups that a step takes. started: those of the next prompts in order; the step waits for the
    slow ones, so training data does not depend on speed. ready: any finished groups, lowest prompts
    first; slow groups are overtaken and may become too stale, so training sees fewer of them.
    freshest: like ready, but newest weights first. Groups from outside have no such order: unless
    freshest, they are taken as they arrive."""

    max_concurrent_requests: int = 64
    """Largest number of requests in flight on one server. A group starts where there is room for
    all of its completions; each frees its place when it ends (an episode: when it is over). A group
    larger than this starts on a server without requests, and its requests wait for each other.
    docs/protocol.md says how groups are shared among servers."""

    request_timeout_s: float = 300.0
    """Deadline of one generation request, in seconds. If its answer is streamed
    (stream_completions, without grpo.router_replay): longest time without data from it. The groups
    of a server that stands still go on elsewhere before that, after 10 s or more."""

    stream_completions: bool = True
    """Receive completions in pieces of 32 tokens: after a broken connection they continue on
    another server from the last piece. false: they arrive whole, and a broken connection loses
    them."""


@dataclass
class Rollout(WorkerKeys):
    """Where and how completions are sampled."""

    servers: list[str] = field(default_factory=list)
    """Base URLs of the servers, or the single word "launch" to start servers on this host, and
    again if they end. Servers of servers_file and servers_slurm are added; `titan-grpo servers
    add|remove URL --run DIR` changes the list while training runs."""

    take_over: bool = False
    """Take servers from a live run with another dump folder; that run stops when it has lost all of
    them. Not needed for servers of a run that ended, that gave no sign for
    weight_sync.commit_deadline_s, or that has the same dump folder."""

    servers_file: str = ""
    """File with further URLs, one per line, # for comments, read every second: a new URL joins, a
    removed one leaves. Replace the file as a whole (write another, then rename it); a malformed or
    empty file changes nothing."""

    servers_slurm: str = ""
    """Environment variable with a SLURM host list, such as SLURM_JOB_NODELIST_HET_GROUP_1; each
    host has servers_per_host servers."""

    servers_port: int = 8000
    """Port of the first server on each host of servers_slurm; further servers have the next
    ones."""

    servers_per_host: int = 1
    """Servers on each host of servers_slurm."""

    launch_engines: list[str] = field(default_factory=lambda: ["vllm"])
    """Engines to start with servers = "launch": "vllm", "sglang", or both side by side."""

    launch_count: int = 1
    """Servers to start per engine with servers = "launch"."""

    launch_gpus: list[int] = field(default_factory=list)
    """GPUs of launched servers, by their numbers on this host. Each server gets the same number of
    them, in order, as its tensor parallelism: [4, 5, 6, 7] and launch_count = 4 is one each. Leave
    out the GPUs of the trainer's ranks. Empty: the GPUs that rank 0 sees."""

    launch_python: str = ""
    """Python interpreter of vLLM's environment (not the trainer's), for servers = "launch"."""

    launch_sglang_python: str = ""
    """The same for SGLang."""

    launch_args: list[str] = field(default_factory=list)
    """Arguments added to a launched vLLM server's command line."""

    launch_sglang_args: list[str] = field(default_factory=list)
    """Arguments added to a launched SGLang server's command line."""

    controller: str = "local"
    """Where rollouts are made. local: in a child process of rank 0. A URL such as http://host:8910:
    in a service that you start near the servers with `titan-grpo rollouts`; calls to engines go
    through it too. Model, dataset and reward functions must have the same paths there."""

    controller_key_env: str = ""
    """Environment variable with that service's key. Empty (on a loopback URL only): no key."""

    callback_address: str = ""
    """No longer used, and refused: rank 0 polls the service, which opens no connection to it."""

    controller_deadline_s: float = 120.0
    """How long that service may be unreachable before the run stops, in seconds."""

    top_p: float = 1.0
    """Only 1: sample from the whole distribution. Log-probabilities of a truncated one differ from
    those that the trainer recomputes, which would bias every ratio."""

    top_k: int = -1
    """Only -1 (no limit), for the same reason."""

    batch_timeout_s: float = 1800.0
    """How long the trainer waits for the groups of one step before it stops the run, in seconds."""

    record_path: str = ""
    """JSONL file that gets the groups of each step (with grpo.dynamic_sampling, those that it
    kept)."""

    sample_every: int = 10
    """Add up to four completions of rank 0's first microbatch (those of the highest and the lowest
    reward and of the largest gap, then the first ones) to samples.jsonl, with the log-probabilities
    of engine and trainer, at the first step and every this many steps (for titan-grpo report). 0:
    never."""

    replay_path: str = ""
    """Recorded file (see record_path) to train on instead of sampling. Servers still get all
    versions."""

    @property
    def launches(self) -> bool:
        """Whether the run starts its servers."""
        return self.servers == [LAUNCH]


def server_url(text: str) -> str:
    """Return a server's URL in the form in which URLs are compared: no slash at the end, host in
    lower case. Raises ConfigError unless it is http://host:port or https://host:port with an
    optional path.

    >>> server_url("http://GPU2:8000/")
    'http://gpu2:8000'
    """
    text = text.strip()
    try:
        parts = urlsplit(text)
        host = (parts.hostname or "").encode("idna")  # as it is sent on the wire
        usable = parts.scheme in ("http", "https") and bool(host) and parts.port != 0
    except ValueError:  # port above 65535, unmatched brackets, invalid host
        usable = False
    if not usable or not text.isprintable() or any(letter in text for letter in "@?# "):
        # Logs are read by others than a password is for.
        shown = re.sub("^(.*//)?.*@", r"\1...@", text)
        raise ConfigError(
            "a server must be a URL such as http://host:8000, without user, query and fragment,"
            f" got {shown!r:.200}"
        )
    if parts.path.rstrip("/").endswith("/v1"):
        raise ConfigError(
            f"a server must be a URL such as http://host:8000, without /v1, got {text!r:.200}: that"
            " is what a client of OpenAI's API gets"
        )
    return urlunsplit((parts.scheme, parts.netloc.lower(), parts.path.rstrip("/"), "", ""))


def read_key(environ: Mapping[str, str], variable: str) -> str:
    """Return the key of a server or service that an environment variable holds; empty without one.
    Raises ConfigError for a key that no HTTP header can carry.

    >>> read_key({"KEY": "s3cret"}, "KEY"), read_key({}, "KEY"), read_key({}, "")
    ('s3cret', '', '')
    """
    key = environ.get(variable, "")
    if key.strip() != key or not (key.isascii() and key.isprintable()):
        raise ConfigError(
            f"the environment variable {variable} must hold a key of printable ASCII characters"
            f" without white space at its ends, got {len(key)} characters with others: every call"
            f" with it would fail; export {variable}=$(cat FILE) takes the line's end off"
        )
    return key


def required_key(environ: Mapping[str, str], setting: str, variable: str) -> str:
    """Return the key in the environment variable that ``rollout.<setting>`` names; empty if it
    names none. Raises ConfigError if the variable is empty: an HttpServer with an empty key asks
    for none, and the rules see the name only.

    >>> required_key({"KEY": "s3cret"}, "push_key_env", "KEY"), required_key({}, "push_key_env", "")
    ('s3cret', '')
    """
    key = read_key(environ, variable)
    if variable and not key:
        raise ConfigError(
            f"rollout.{setting} must name an environment variable with a key, {variable} is empty"
            " here, and there would be no key at all; export it where this process is started, or"
            f" leave rollout.{setting} out"
        )
    return key


PORTS = {"http": 80, "https": 443}
"""Ports of URLs without one."""


def two_names(urls: Iterable[str]) -> str:
    """Return two different URLs of one server as text, or "" if there are none. ``urls`` are in the
    form of ``server_url``; exact repetitions are ignored.

    >>> two_names(["http://localhost:8000", "http://127.0.0.1:8000", "http://b"])
    'http://localhost:8000 and http://127.0.0.1:8000'
    """
    found: dict[tuple[str | None, int | None, str], str] = {}
    for url in urls:
        parts = urlsplit(url)
        host = "127.0.0.1" if parts.hostname == "localhost" else parts.hostname
        port = parts.port or PORTS[parts.scheme]
        if (first := found.setdefault((host, port, parts.path), url)) != url:
            return f"{first} and {url}"
    return ""


def is_loopback(host: str) -> bool:
    """Return whether a host of an address or URL is this host's loopback."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


def violations(r: Rollout) -> list[str]:
    """Return all broken rules of the section. Pure."""
    urls, out = [], []
    for text in [] if r.launches else r.servers:
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
    """Return the host of a server URL, or "" if the URL is unusable."""
    try:
        return urlsplit(server_url(url)).hostname or ""
    except ConfigError:
        return ""


def _servers(r: Rollout) -> Rules:
    yield not 0 < r.servers_port < 65536, "servers_port", "a port, 1 to 65535"
    most = 65536 - r.servers_port
    yield not 0 < r.servers_per_host <= most, "servers_per_host", f"1 to {most} (their ports)"
    if not r.launches:
        rule = 'a list of URLs, or ["launch"], unless servers_file or servers_slurm is set'
        yield not (r.servers or r.servers_file or r.servers_slurm), "servers", rule
        return
    wanted, known = r.launch_engines, PYTHONS
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
        for engine, key in ARGUMENTS.items():
            named = any(word.split("=")[0] == "--tool-call-parser" for word in getattr(r, key))
            rule = f'with "--tool-call-parser", "NAME" where tool_parser is "{ENGINE}"'
            yield engine in wanted and not named, key, rule
    for engine, key in known.items():
        rule = f'set when rollout.servers = ["launch"] starts "{engine}"'
        yield engine in wanted and not getattr(r, key), key, rule
    rule = f'"auto" for launched servers of {", ".join(wanted)}'
    yield r.engine != "auto" and any(engine != r.engine for engine in wanted), "engine", rule


def engines_read_calls(r: Rollout) -> bool:
    """Return whether servers must parse the tool calls in what they sample."""
    return bool(r.agent) and r.tool_parser == ENGINE and not r.replay_path


def known_gpus(r: Rollout) -> int:
    """Return the number of GPUs of all servers; 0 where it is unknown: only launched servers tell.

    >>> launching = Rollout(servers=[LAUNCH], launch_gpus=[4, 5])
    >>> known_gpus(launching), known_gpus(Rollout(servers=["http://a:1"], launch_gpus=[4, 5]))
    (2, 0)
    """
    others = r.servers_file or r.servers_slurm
    return len(r.launch_gpus) if r.launches and not others else 0


def gpus_each(r: Rollout) -> int:
    """Return the number of GPUs of each launched server; 0 without ``launch_gpus``.

    >>> gpus_each(Rollout(launch_gpus=[4, 5, 6, 7], launch_count=2)), gpus_each(Rollout())
    (2, 0)
    """
    return len(r.launch_gpus) // (r.launch_count * len(r.launch_engines))


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


ADDRESS = "host:port ([host]:port with IPv6)"
"""Form of an address to listen at, for messages."""


def host_and_port(address: str) -> tuple[str, int] | None:
    """Return the two parts of an address to listen at, the host without brackets; None for a text
    without its form.

    >>> host_and_port("[::1]:8910"), host_and_port("::1:8910"), host_and_port("[::1:8910")
    (('::1', 8910), None, None)
    """
    found = re.fullmatch(r"(?:\[([^][]*:[^][]*)\]|([^][:]+)):([0-9]{1,5})", address)
    if found is None or int(found[3]) > 65535:
        return None
    return found[1] or found[2], int(found[3])


def _listens(r: Rollout, who: str) -> Rules:
    address: str = getattr(r, f"{who}_address")
    place = host_and_port(address)
    yield place is None, f"{who}_address", ADDRESS
    yield (
        place is not None and not getattr(r, f"{who}_key_env") and not is_loopback(place[0]),
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
    yield elsewhere and r.launches, "servers", rule
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
    least = LEAST_TEMPERATURE
    rule = f"{least} or greater (below it vLLM samples at {least}, and the trainer would not)"
    yield r.temperature < least, "temperature", rule
    most = GREATEST_TEMPERATURE
    rule = f'at most {most:g} unless rollout.engine is "sglang" (vLLM refuses requests above it)'
    yield r.temperature > most and r.engine != "sglang" and not r.replay_path, "temperature", rule
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
        "request_timeout_s",
        "batch_timeout_s",
    ):
        yield getattr(r, name) <= 0, name, "greater than 0"
    rule = "another file than rollout.replay_path"
    yield bool(r.record_path) and r.record_path == r.replay_path, "record_path", rule
