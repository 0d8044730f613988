"""The TOML sections of titan_grpo and their rules.

A job names this module with ``[job] custom_config_module = "titan_grpo.config"``. torchtitan's
merge then finds ``JobConfig`` here and adds ``[grpo]``, ``[rollout]``, ``[weight_sync]``,
``[lora]``, ``[alerts]``, ``[dashboards]`` and ``[[evaluation]]`` to TOML and command line.

No ``from __future__ import annotations`` in this file: the merge reads field types as objects.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

from titan_grpo.config.grpo import GRPO
from titan_grpo.config.grpo import violations as grpo_violations
from titan_grpo.config.rollout import ADDRESS, LAUNCH, Rollout, engines_read_calls, host_and_port
from titan_grpo.config.rollout import violations as rollout_violations
from titan_grpo.config.task import Evaluation, Rules, broken, evaluation_rules, task_rules
from titan_grpo.errors import ConfigError

__all__ = (
    "GRPO",
    "LAUNCH",
    "LONGEST_S",
    "Alerts",
    "Dashboards",
    "Evaluation",
    "JobConfig",
    "Lora",
    "Rollout",
    "WeightSync",
    "check_rate",
    "engines_read_calls",
    "violations",
)


WIRE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
"""Bytes of an element by weight_sync.wire_dtype."""


@dataclass
class WeightSync:
    """How versions travel from the trainer's memory to the servers."""

    transport: Literal["auto", "tcp", "nixl", "nccl"] = "auto"
    """Transport of the weights. tcp: servers read versions in ranges, from shared memory on the
    trainer's host and over TCP elsewhere (apply = "staged"). nixl: the same by one-sided reads
    (UCX: RDMA, shared memory, TCP); both ends need titan_grpo[nixl], and there must be one trainer
    host. nccl: broadcasts; both ends need the same NCCL version. auto: tcp, or gloo broadcasts with
    apply = "streamed"; never nccl."""

    connections: int = 4
    """TCP connections over which one server reads a version at a time (transport = "tcp"); with
    more trainer hosts, one to each. When a host has sent its part, its connection stays idle and
    one more is made to another host."""

    min_rate: int = 50 << 20
    """Least acceptable rate of a transfer, in bytes per second: its deadline is lane_deadline_s
    plus its bytes at this rate."""

    progress_deadline_s: float = 10.0
    """Cancel a tcp transfer that moves no bytes for this long plus the time of one bucket (or of
    1/512 of the version, if that is more) at min_rate, in seconds, so that a stalled server does
    not hold an image that others need."""

    delta: Literal["auto", "on", "off"] = "off"
    """Send patches of the changed elements instead of whole versions to servers that hold an
    earlier version (staged, tcp). Each trainer host makes the patches of its part and sends them to
    each server. auto: only while the slowest server's whole version takes four times as long as
    making a patch (about 1 s per GiB of a part), as its last whole version took: with patches, its
    first one after it connected; with relay, only while the patches for all servers are smaller
    together than one version (one is tried again after some versions). Blocks that a patch does not
    reproduce exactly are read from the version."""

    relay: bool = True
    """Let servers on other hosts than the trainer's read a version from each other while they
    receive it (staged, tcp): a trainer host then sends each version about once. A server that
    becomes slow delays the servers behind it by one version. Ranges that a server gives late
    or wrong are read from the next server, and last from the trainer; after a long wait all of them
    from the trainer."""

    zones: list[str] = field(default_factory=list)
    """Patterns of the host names or addresses in servers' URLs, such as "10.0.1.*" or "rack2-*".
    With relay, servers whose first matching pattern is the same read from each other first. A
    server's own TITAN_GRPO_ZONE takes precedence."""

    wire_dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    """Floating-point type of the image. The trainer casts its master weights once."""

    block_bytes: int = 4 << 20
    """Bytes per digest; a multiple of 4096."""

    bucket_bytes: int = 64 << 20
    """Bytes per broadcast; a multiple of block_bytes. A lane uses device memory for one bucket."""

    slots: int = 2
    """Version images kept in host memory (slots x model bytes). Two let one be written while
    another is sent."""

    apply: Literal["staged", "streamed"] = "staged"
    """staged: receive the whole version, then pause the engine for the local load only. streamed:
    no image on the server, only a window of four buckets. The server is paused for the whole
    transfer, and after a broken one until the next transfer completes."""

    kv_after_update: Literal["keep", "recompute"] = "keep"
    """What happens to the KV of requests that are in flight at a commit. keep: they continue on it,
    and later tokens depend on both weights. recompute: the engine drops it and recomputes each
    request's KV with the new weights. With a rollout.source other than "task" it is always
    recompute: requests that are not ours would otherwise reuse prefixes of older weights."""

    digest: Literal["xxh3", "blake3"] = "xxh3"
    """Hash of the blocks: xxh3 is fastest, blake3 cryptographic. With a run key it is keyed
    blake3."""

    run_key_file: str = ""
    """File with the run key (64 hexadecimal digits). Servers with the key refuse weights from
    trainers without it. The environment variables TITAN_GRPO_RUN_KEY and TITAN_GRPO_RUN_KEY_FILE do
    the same; launched servers get a key automatically."""

    tls_certificate: str = ""
    """PEM file with the certificate of the trainer's hosts. Servers learn its hash from the run
    key's proof; no certificate authority is involved. Encrypts weights and all messages of the
    lanes (staged, tcp, with a run key). Empty: no TLS."""

    tls_key: str = ""
    """PEM file with the certificate's private key, without a password."""

    bind_host: str = ""
    """Address that the lanes' sockets bind to. Empty: for each server its own: loopback for a local
    one, else this host's address on the route to it."""

    connect_deadline_s: float = 60.0
    """Deadline for a server's receiver to join its lane, in seconds, and after that for it to read
    the list of tensors (plus its bytes at min_rate). The receiver then allocates memory for a
    version, with progress_deadline_s as the deadline of each such piece."""

    lane_deadline_s: float = 120.0
    """Deadline of one transfer, from its first byte to the receiver's digests, in seconds; the time
    of its bytes at min_rate is added."""

    commit_deadline_s: float = 60.0
    """Deadline of each commit call (pause, load, version, resume), in seconds."""

    drain_deadline_s: float = 120.0
    """With rollout.in_flight_weight_updates = false: how long a server may take to finish its
    requests before a commit, in seconds. Requests still running then are cancelled and
    restarted."""

    startup_deadline_s: float = 600.0
    """How long startup waits for task, dataset and launched servers together, and then for at least
    one server to commit the first version, in seconds; for servers, the bytes of a version at
    min_rate are added. Raise it for a dataset download."""

    shutdown_deadline_s: float = 60.0
    """How long the end waits for the newest version to be flushed to the servers, in seconds; its
    bytes at min_rate are added."""

    max_lag: int = 1000
    """Stop the run at the step boundary after this many versions in a row without a commit on any
    server. 0: never. Runs on fresh rollouts stop sooner (rollout.max_staleness, then
    batch_timeout_s); a run on recorded ones would never stop."""

    backoff_s: float = 0.5
    """First pause after a lane failed, in seconds; it doubles up to backoff_max_s."""

    backoff_max_s: float = 15.0
    """Longest pause between two attempts of a lane, in seconds."""

    on_sync_error: Literal["continue", "stop"] = "continue"
    """What to do at the next step boundary after a background error: log it and go on, or stop the
    run."""

    def moving_s(self, nbytes: int) -> float:
        """Return how long ``nbytes`` take at min_rate, in seconds."""
        return nbytes / self.min_rate

    def transfer_s(self, nbytes: int) -> float:
        """Return the deadline of a transfer of ``nbytes``, in seconds.

        >>> WeightSync(lane_deadline_s=120.0, min_rate=1 << 20).transfer_s(64 << 20)
        184.0
        """
        return self.lane_deadline_s + self.moving_s(nbytes)

    def startup_s(self, nbytes: int) -> float:
        """Return how long the start waits for launched servers, which load a model of ``nbytes``,
        and again for the first commit of a version of that size, in seconds.

        >>> WeightSync(startup_deadline_s=600.0, min_rate=1 << 20).startup_s(64 << 20)
        664.0
        """
        return self.startup_deadline_s + self.moving_s(nbytes)


MOST_SLOTS = 256
"""Bound of weight_sync.slots: a slot's number travels as one byte (sync.images.Reserved)."""

LONGEST_S = 500_000.0
"""Longest deadline, in seconds. A wait may add up four of them, and the system's longest wait is
2^31 ms."""


def check_rate(config: WeightSync, nbytes: int) -> None:
    """Raise ConfigError if ``nbytes`` at min_rate, which deadlines add, are over LONGEST_S."""
    if config.moving_s(nbytes) > LONGEST_S:
        raise ConfigError(
            f"weight_sync.min_rate must be at least {math.ceil(nbytes / LONGEST_S)} for the"
            f" {nbytes} bytes of this model, got {config.min_rate}; its deadlines would be over"
            f" {LONGEST_S:.0f} s, and the system's waits end at 24 days; raise it"
        )


LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""The linear layers of a block of a dense model, as Hugging Face names them."""

MOST_ROWS = 1 << 20
"""Bound of lora.rank; torch fails with a traceback at a number of more than 64 bits."""

LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Values that vLLM takes for --max-lora-rank."""


@dataclass
class Lora:
    """Low-rank adapters (arXiv 2106.09685) in place of training every weight: W + alpha / rank * B
    A, of which only B and A are trained. A job without this section has none."""

    rank: int = 0
    """Rows of A and columns of B, 1 or more. 0 (only without this section): train every weight."""

    alpha: float = 16.0
    """Scale of the adapters: the product B A is multiplied by alpha / rank."""

    targets: list[str] = field(default_factory=lambda: list(LINEAR))
    """Linear layers that get an adapter in every block that has them, by the last part of their
    Hugging Face names."""

    sync: Literal["merged", "adapter"] = "merged"
    """Content of a version. merged: the whole weights with the adapters added. adapter: the
    adapters alone; the servers hold the base model and load each version through vLLM's LoRA (start
    them with --enable-lora)."""


@dataclass
class Alerts:
    """Thresholds on the metrics of a step: "METRIC OPERATOR NUMBER", such as "ratio/max > 10", or
    "reward/mean < 0.1 for 20", which must hold for that many steps in a row. METRIC is a name in
    metrics.jsonl; operators are > >= < <=. An alert fires once, and again only after its condition
    was false in between. A metric that is nan or infinite fulfils every condition; a step without
    the metric changes nothing."""

    warn: list[str] = field(default_factory=list)
    """Log the alert and list it among the run's errors (run and stop do so too)."""

    run: list[str] = field(default_factory=list)
    """Run alerts.command."""

    stop: list[str] = field(default_factory=list)
    """Stop the run, with a checkpoint of that step if checkpoint.enable is set."""

    command: str = ""
    """Command for alerts.run, split into words as in a shell (but run without one), with the alert
    as its last argument. Its output goes to the run's. Training does not wait for it."""

    command_timeout_s: float = 60.0
    """How long the command may run before it is terminated, in seconds."""


@dataclass
class Dashboards:
    """Endpoints for monitoring while the run goes on. Needs 'titan_grpo[dashboards]'."""

    metrics_address: str = ""
    """host:port at which rank 0 answers GET /metrics for Prometheus, without a key. Port 0: any
    free port (see the log). Empty: no endpoint. A rollout service answers at its own address, with
    its own key."""


@dataclass
class JobConfig:
    """Sections that are merged into torchtitan's JobConfig. torchtitan requires this name."""

    grpo: GRPO = field(default_factory=GRPO)
    rollout: Rollout = field(default_factory=Rollout)
    weight_sync: WeightSync = field(default_factory=WeightSync)
    lora: Lora = field(default_factory=Lora)
    alerts: Alerts = field(default_factory=Alerts)
    dashboards: Dashboards = field(default_factory=Dashboards)
    # torchtitan's merge does not turn tables of a list into dataclasses; titan/jobconfig.py does.
    evaluation: list[dict[str, Any]] = field(default_factory=list)


def _weight_sync(w: WeightSync) -> Rules:
    for name in (name for name in vars(w) if name.endswith("_s")):
        yield getattr(w, name) <= 0, name, "greater than 0"
    whole = w.block_bytes > 0 and w.block_bytes % 4096 == 0
    yield not whole, "block_bytes", "a positive multiple of 4096"
    yield (
        whole and (w.bucket_bytes <= 0 or w.bucket_bytes % w.block_bytes != 0),
        "bucket_bytes",
        f"a positive multiple of weight_sync.block_bytes ({w.block_bytes})",
    )
    rule = 'auto or nccl with weight_sync.apply = "streamed"'
    yield w.transport in ("tcp", "nixl") and w.apply == "streamed", "transport", rule
    rule = "set where weight_sync.tls_certificate is, and only there"
    yield bool(w.tls_certificate) != bool(w.tls_key), "tls_key", rule
    yield (
        bool(w.tls_certificate) and (w.apply == "streamed" or w.transport in ("nccl", "nixl")),
        "tls_certificate",
        'empty, or weight_sync.apply = "staged" with transport auto or tcp (the others are not'
        " encrypted)",
    )
    yield w.connections < 1, "connections", "1 or more"
    yield w.min_rate < 1, "min_rate", "1 or more (bytes per second)"
    yield w.max_lag < 0, "max_lag", "0 (never) or greater"
    yield w.slots < 2, "slots", "2 or more (one is written while another is sent)"
    yield w.slots > MOST_SLOTS, "slots", f"at most {MOST_SLOTS} (each is a whole version)"
    yield w.backoff_max_s < w.backoff_s, "backoff_max_s", "at least weight_sync.backoff_s"


def _lora(lora: Lora) -> Rules:
    yield lora.rank < 0, "rank", "1 or greater"
    yield lora.rank > MOST_ROWS, "rank", f"at most {MOST_ROWS} (no layer has as many rows)"
    yield lora.alpha <= 0, "alpha", "greater than 0"
    yield not lora.targets, "targets", "one or more layers"
    rule = f'of {", ".join(LINEAR)} with lora.sync = "adapter" (servers have adapters of these)'
    yield lora.sync == "adapter" and not set(lora.targets) <= set(LINEAR), "targets", rule
    rule = f'at most {LORA_RANKS[-1]} with lora.sync = "adapter" (vLLM loads no larger ones)'
    yield lora.sync == "adapter" and lora.rank > LORA_RANKS[-1], "rank", rule


def _dashboards(d: Dashboards) -> Rules:
    address = d.metrics_address
    yield bool(address) and host_and_port(address) is None, "metrics_address", ADDRESS


def _deadlines(config: Any) -> Iterator[str]:
    """Yield the deadlines of all sections that are over LONGEST_S."""
    rule = f"at most {LONGEST_S:.0f} (the system's longest wait is 24 days)"
    sections = [(name, getattr(config, name)) for name in ("rollout", "weight_sync", "alerts")]
    for section, values in (*sections, *((table.section, table) for table in config.evaluation)):
        seconds = [(name, value) for name, value in vars(values).items() if name.endswith("_s")]
        # Infinity has a rule of its own.
        rules = ((LONGEST_S < value < math.inf, name, rule) for name, value in seconds)
        yield from broken(section, values, rules)


def sends_adapters(lora: Lora) -> bool:
    """Return whether a version is the adapters alone."""
    return lora.rank > 0 and lora.sync == "adapter"


def violations(config: Any) -> list[str]:
    """Return all broken rules of our sections, each as "key must be rule, got value". Pure."""
    grpo, rollout = config.grpo, config.rollout
    both = (
        grpo.async_weight_update and rollout.max_staleness == 0,
        "max_staleness",
        "1 or more with grpo.async_weight_update (0 would wait for every server at every step)",
    )
    return [
        *grpo_violations(grpo, rollout),
        *rollout_violations(rollout),
        *broken("weight_sync", config.weight_sync, _weight_sync(config.weight_sync)),
        *broken("rollout", rollout, [both]),
        *broken("lora", config.lora, _lora(config.lora)),
        *broken("dashboards", config.dashboards, _dashboards(config.dashboards)),
        *_evaluations(config),
        *_deadlines(config),
    ]


def _evaluations(config: Any) -> Iterator[str]:
    tables: list[Evaluation] = config.evaluation
    for table in tables:
        rules = (*evaluation_rules(table), *task_rules(table))
        yield from broken(table.section, table, rules)
    if not tables:
        return
    names = [table.name for table in tables]
    if len(set(names)) < len(names):
        yield f"evaluation names must differ, got {', '.join(names)}"
    if not config.grpo.async_weight_update:
        yield (
            "grpo.async_weight_update must be true with [[evaluation]] (a step would wait for the"
            " server that is held on its version), got False"
        )
    if config.rollout.controller != "local":
        yield (
            'rollout.controller must be "local" with [[evaluation]] (evaluations call the servers'
            f" from rank 0's host), got {config.rollout.controller!r:.200}"
        )
