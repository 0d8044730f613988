"""Every knob of titan_grpo, validated. ``titan.jobfile`` adds these sections to torchtitan's.

A job names this module with ``[job] custom_config_module = "titan_grpo.config"``; the merge then
finds ``JobConfig`` here and adds the sections ``[grpo]``, ``[rollout]``, ``[weight_sync]``,
``[lora]``, ``[alerts]``, ``[dashboards]`` and ``[[evaluation]]`` to TOML and command line.

No ``from __future__ import annotations`` in this file: the merge reads field types as objects.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

from titan_grpo.config.grpo import GRPO
from titan_grpo.config.grpo import violations as grpo_violations
from titan_grpo.config.rollout import LAUNCH, Rollout, engines_read_calls, listens
from titan_grpo.config.rollout import violations as rollout_violations
from titan_grpo.config.task import Evaluation, Rules, broken, evaluation_rules, task_rules

__all__ = (
    "GRPO",
    "LAUNCH",
    "Alerts",
    "Dashboards",
    "Evaluation",
    "JobConfig",
    "Lora",
    "Rollout",
    "WeightSync",
    "engines_read_calls",
    "violations",
)


@dataclass
class WeightSync:
    """How versions travel from the trainer's memory to the servers'."""

    transport: Literal["auto", "tcp", "nixl", "nccl"] = "auto"
    """Data plane of the lanes. tcp: servers read versions in ranges, out of the trainer's memory if
    they are on its host, else over TCP; for apply = "staged". nixl: the same, by one-sided reads
    (UCX: RDMA, shared memory, TCP) where both ends have titan_grpo[nixl], from one trainer host.
    nccl: broadcasts, with one version of NCCL at both ends; by choice only. auto is tcp, and gloo's
    broadcasts for apply = "streamed"."""

    connections: int = 4
    """TCP connections with which a server reads a version (transport = "tcp")."""

    min_rate: int = 50 << 20
    """Least rate of a transfer of a staged version in bytes per second: its deadline is
    lane_deadline_s plus its bytes at this rate."""

    progress_deadline_s: float = 10.0
    """A transfer by tcp that moves no bytes for so long is given up, in seconds (beside a bucket's
    time at min_rate): a server that stands still keeps no image from the others."""

    delta: Literal["auto", "on", "off"] = "off"
    """Patches of changed elements in place of whole versions, for servers that hold an earlier one
    (staged by tcp); each trainer host makes those of its part and sends them to each server. auto:
    where the slowest server's whole version takes four times as long as making a patch, which is
    about 1 s for a GiB of a part, and with relay while all servers' patches are less than a
    version. What a patch does not make exactly is read from the version."""

    relay: bool = True
    """Whether servers on other hosts than the trainer's read versions from each other, while they
    read them (staged by tcp): a trainer host sends each version about once. A server that becomes
    slow delays the servers behind it by one version. What a server does not give in time, or gives
    wrongly, is read from the next one, at last from the trainer."""

    zones: list[str] = field(default_factory=list)
    """Patterns of servers' host names or addresses, such as "10.0.1.*" or "rack2-*": with relay,
    servers that the same (first) pattern fits read from each other first. A server's own
    TITAN_GRPO_ZONE goes before."""

    wire_dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    """Floating-point type of the image; masters are cast once, on the trainer."""

    block_bytes: int = 4 << 20
    """Bytes under one digest; a multiple of 4096."""

    bucket_bytes: int = 64 << 20
    """Bytes of one broadcast; a multiple of block_bytes. A lane's device memory is one bucket."""

    slots: int = 2
    """Version images kept in host memory (slots x model bytes). Two let one be written while
    another is sent."""

    apply: Literal["staged", "streamed"] = "staged"
    """staged: receive whole, then pause only for the local load. streamed: no image on the server
    but a window of four buckets; the server stands still for the whole transfer, and after one that
    broke off half-way until the next whole one."""

    kv_after_update: Literal["keep", "recompute"] = "keep"
    """KV of requests that run over a commit. keep: they go on with it, so that later tokens are of
    both weights. recompute: the engine throws it away, and each of them is computed anew up to
    where it was, with the new weights. With a rollout.source outside it is always recompute:
    requests that are not ours would meet the prefixes of older weights."""

    digest: Literal["xxh3", "blake3"] = "xxh3"
    """Hash of the blocks: xxh3 is the fastest, blake3 is cryptographic. With a run key it is always
    blake3, keyed."""

    run_key_file: str = ""
    """File with the run key (64 hexadecimal digits): servers that have it refuse weights from
    trainers without it. The environment variables TITAN_GRPO_RUN_KEY and TITAN_GRPO_RUN_KEY_FILE
    do the same; launched servers are given a key by themselves."""

    tls_certificate: str = ""
    """PEM file with the certificate that the trainer's hosts show to servers, which know its hash
    by the run key's proof and ask no authority. Weights and all messages of the lanes are encrypted
    (staged by tcp, with a run key). Empty: no TLS."""

    tls_key: str = ""
    """PEM file with its private key, without a password."""

    bind_host: str = ""
    """Address that the lanes' sockets bind to; empty: loopback if every server is local, else this
    host's address."""

    connect_deadline_s: float = 60.0
    """Deadline for a server's receiver to join its lane, in seconds. Its memory for a version is
    made after that: progress_deadline_s is the deadline of each bucket of it."""

    lane_deadline_s: float = 120.0
    """Deadline of one transfer, from its first byte to the receiver's digests, in seconds; its
    bytes at min_rate are added."""

    commit_deadline_s: float = 60.0
    """Deadline of each commit call (pause, load, version, resume), in seconds."""

    drain_deadline_s: float = 120.0
    """With rollout.in_flight_weight_updates = false: how long a server gets to finish its requests
    before a commit. What still runs then is given up and made again. In seconds."""

    startup_deadline_s: float = 600.0
    """How long the start waits for task, dataset and launched servers together, and then for the
    first version to be committed by at least one server, in seconds. Raise it for a dataset that is
    downloaded."""

    shutdown_deadline_s: float = 60.0
    """How long the end waits for the newest version to be flushed to the servers, in seconds."""

    max_lag: int = 1000
    """Stop the run at the step boundary after that many versions in a row without a commit on any
    server; 0: never. Fresh rollouts end sooner in that case (rollout.max_staleness, then
    batch_timeout_s); a run on recorded ones would never end."""

    backoff_s: float = 0.5
    """First pause after a lane failed, in seconds; doubles up to backoff_max_s."""

    backoff_max_s: float = 15.0
    """Longest pause between two attempts of a lane, in seconds."""

    on_sync_error: Literal["continue", "stop"] = "continue"
    """What a latched background error does at the next step boundary: log it and go on, or stop the
    run."""


LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""The linear layers of a block of a dense model, as Hugging Face names them."""

LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Values that vLLM takes for --max-lora-rank."""


@dataclass
class Lora:
    """Low-rank adapters (arXiv 2106.09685) in place of training every weight: W + alpha / rank *
    B A, of which B and A are trained. A job without this section has none."""

    rank: int = 0
    """Rows of A and columns of B, 1 or more; without the section 0: every weight is trained."""

    alpha: float = 16.0
    """The product of B and A counts alpha / rank times."""

    targets: list[str] = field(default_factory=lambda: list(LINEAR))
    """Linear layers that get an adapter, by the last part of their names in a Hugging Face
    checkpoint, in every block that has them."""

    sync: Literal["merged", "adapter"] = "merged"
    """What a version is. merged: the whole weights, with the adapters added. adapter: the adapters
    alone; the servers have the base model, and load each version by their own LoRA (vLLM, started
    with --enable-lora)."""


@dataclass
class Alerts:
    """Thresholds on the metrics of a step: "METRIC OPERATOR NUMBER", such as "ratio/max > 10", or
    "reward/mean < 0.1 for 20", which must hold in so many steps in a row. Metrics are the names of
    metrics.jsonl; operators > >= < <=. Each is said once, and again when it has ceased to hold in
    between. A step without the metric changes nothing."""

    warn: list[str] = field(default_factory=list)
    """Say it, and list it among the run's errors (as run and stop do too)."""

    run: list[str] = field(default_factory=list)
    """Run alerts.command."""

    stop: list[str] = field(default_factory=list)
    """Stop the run, with a checkpoint of that step (checkpoint.enable)."""

    command: str = ""
    """What alerts.run runs, in words as a shell's (no shell runs it), with the alert as a further
    argument; its output goes to the run's. Training does not wait for it."""

    command_timeout_s: float = 60.0
    """How long the command may take before it is ended, in seconds."""


@dataclass
class Dashboards:
    """What others may look at while the run goes on. Needs 'titan_grpo[dashboards]'."""

    metrics_address: str = ""
    """host:port at which rank 0 answers GET /metrics for Prometheus, without a key; port 0: any
    that is free (the log says which). Empty: it does not listen. A rollout service answers at its
    own address, with its own key."""


@dataclass
class JobConfig:
    """What is merged into torchtitan's JobConfig; torchtitan gave modules like this one the
    name."""

    grpo: GRPO = field(default_factory=GRPO)
    rollout: Rollout = field(default_factory=Rollout)
    weight_sync: WeightSync = field(default_factory=WeightSync)
    lora: Lora = field(default_factory=Lora)
    alerts: Alerts = field(default_factory=Alerts)
    dashboards: Dashboards = field(default_factory=Dashboards)
    # torchtitan's merge makes no dataclasses of tables in a list: titan/jobconfig.py does.
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
    yield w.backoff_max_s < w.backoff_s, "backoff_max_s", "at least weight_sync.backoff_s"


def _lora(lora: Lora) -> Rules:
    yield lora.rank < 0, "rank", "1 or greater"
    yield lora.alpha <= 0, "alpha", "greater than 0"
    yield not lora.targets, "targets", "one or more layers"
    rule = f'of {", ".join(LINEAR)} with lora.sync = "adapter" (servers have adapters of these)'
    yield lora.sync == "adapter" and not set(lora.targets) <= set(LINEAR), "targets", rule
    rule = f'at most {LORA_RANKS[-1]} with lora.sync = "adapter" (vLLM loads no larger ones)'
    yield lora.sync == "adapter" and lora.rank > LORA_RANKS[-1], "rank", rule


def _dashboards(d: Dashboards) -> Rules:
    yield bool(d.metrics_address) and not listens(d.metrics_address), "metrics_address", "host:port"


def sends_adapters(lora: Lora) -> bool:
    """Whether a version is the adapters alone."""
    return lora.rank > 0 and lora.sync == "adapter"


def violations(config: Any) -> list[str]:
    """All broken rules of our sections, each as "key must be rule, got value". Pure; empty if
    none."""
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
    ]


def _evaluations(config: Any) -> Iterator[str]:
    """Broken rules of the [[evaluation]] tables."""
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
            f" from rank 0's host), got {config.rollout.controller!r}"
        )
