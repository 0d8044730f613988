"""Input of a plan: hosts, links, sizes and rates, and the arithmetic that needs no clock.

Rates are GB/s (1e9 bytes) and Gbit/s in the options, bytes per second elsewhere. The options' help
and docs/cluster.md have the sources of the defaults.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Any

from titan_grpo.config import WIRE_BYTES, WeightSync
from titan_grpo.errors import ConfigError
from titan_grpo.protocol import lane
from titan_grpo.protocol.patches import ENCODE_RATE, SHARE, worth_making

GB = 1e9
GBIT = 1e9 / 8
STATE_BYTES = 16
"""Bytes per parameter on the trainer's GPUs: float32 weights, gradients and AdamW's two moments."""

FROZEN_BYTES = 4
"""The same of a parameter that [lora] does not train: its float32 weight."""

MEMORY_S = 0.65 / (1 << 30)
"""Seconds per byte to make a staging image: allocation and first touch, measured on 2 cores."""

HASH_RATE = {"xxh3": 28 * 2.0**30, "blake3": 7 * 2.0**30}
"""Bytes per second that one core hashes."""

HASH_THREADS = 16
"""Threads of the hash on a trainer host of 64 cores or more (layout.image)."""

APPLY_RATE = 2 << 30
"""Bytes of an image per second at which a patch is applied (scripts/bench_delta.py)."""


LARGEST_RUN = 1_000_000
"""Largest product of servers and steps of a plan, and of groups and steps; 1024 servers and 120
steps take 33 to 45 s (docs/measurements.md)."""


LARGEST = 1e18
"""Largest value of an option; the smallest is its inverse."""


def _option(default: Any, text: str) -> Any:
    return field(default=default, metadata={"help": text})


@dataclass(frozen=True)
class Setup:
    """One plan's input. Every field with a help text is an option of the command and a key of its
    files; ``parameters`` is ``model`` there."""

    parameters: int = 8_190_735_360
    adapters: int = 0
    """Elements of the LoRA adapters; 0: every parameter is trained."""

    adapters_only: bool = False
    """A version is the adapters alone (lora.sync = "adapter")."""

    trainer_hosts: int = _option(
        1, "trainer hosts; each is taken to serve an equal part of the image"
    )
    trainer_gpus: int = _option(8, "GPUs of a trainer host")
    trainer_gpu_gb: float = _option(80.0, "memory of one of them, GB")
    trainer_link_gbit: float = _option(100.0, "link of a trainer host, Gbit/s")
    source_gb_s: float = _option(2.5, "what one thread of a host's range source sends, GB/s")
    source_threads: int = _option(
        8,
        "threads of a host's range source, as sync.transports.sender has it: half of the cores, 8"
        " at most (that they send so many times as much is assumed)",
    )
    servers: int = _option(8, "servers")
    servers_per_host: int = _option(1, "servers of one host, which share its link")
    server_gpus: int = _option(1, "GPUs of a server (tensor parallel)")
    server_link_gbit: float = _option(100.0, "link of a server's host, Gbit/s")
    same_host: bool = _option(
        False, "the servers are on the trainer's host: they read its memory, without a socket"
    )
    memory_gb_s: float = _option(5.0, "rate of that for one of weight_sync.connections, GB/s")
    stream_gb_s: float = _option(2.5, "rate of one TCP connection, GB/s")
    copy_gb_s: float = _option(
        10.0, "copy of a rank's shard into the image, by each trainer GPU, GB/s"
    )
    load_gb_s: float = _option(5.0, "an engine's load of a staged version, by each GPU, GB/s")
    call_s: float = _option(0.02, "one call to a server, seconds")
    call_cpu_s: float = _option(
        0.0009, "processor time of the sync process for one call, seconds (measured)"
    )
    step_s: float = _option(30.0, "a training step on groups that are there, seconds")
    groups: int = _option(0, "groups of a step (rollout.prompts_per_step; default: one per server)")
    group_s: float = _option(
        0.0, "a server's time for a group, seconds; each takes 0.5 to 1.5 of it (default: step / 3)"
    )
    in_flight: int = _option(
        0, "groups that a server makes at once (default: twice what the step needs)"
    )
    max_staleness: int = _option(1, "rollout.max_staleness")
    whole_answers: bool = _option(
        False,
        "completions come whole (rollout.stream_completions = false): what a server has of its"
        " groups when it dies is made anew",
    )
    patch_share: float = _option(
        0.04,
        "bytes of a patch over those of a version, with weight_sync.delta (measured: 0.04 at a"
        " learning rate of 1e-6, 0.2 at 1e-5)",
    )
    slow: float = _option(0.0, "share of the servers that are slow, 0 to 1")
    slow_factor: float = _option(
        0.1, "a slow server's share of the others' rate; 0: it stands still in every transfer"
    )
    dying: float = _option(0.0, "share of the servers that die in a minute, 0 to 1")
    restart_s: float = _option(120.0, "a dead server is back after so long, seconds")
    hours: float = _option(1.0, "simulated time")
    seed: int = _option(0, "of the order in which servers die and of the groups' times")
    sync: WeightSync = field(default_factory=WeightSync)

    def __post_init__(self) -> None:
        if broken := next(self._violations(), ""):
            raise ConfigError(broken)

    def _violations(self) -> Iterator[str]:
        zero_too = ("max_staleness", "slow_factor", "call_s", "call_cpu_s")
        for f in fields(self):
            value = getattr(self, f.name)
            if isinstance(value, bool) or not isinstance(value, int | float):
                continue
            may_be_zero = f.default == 0 or f.name in zero_too
            least = 0 if may_be_zero else 1 if isinstance(f.default, int) else None
            if not (value > 0 if least is None else value >= least) or value > LARGEST:
                rule = "greater than 0" if least is None else f"{least} or more"
                yield f"{f.name} must be {rule}, and finite, got {value}"
            if 0 < value < 1 / LARGEST:
                yield f"{f.name} must be {1 / LARGEST:g} or more, got {value}: a time has no end"
        for name in ("slow", "slow_factor", "dying", "patch_share"):
            if getattr(self, name) > 1:
                yield f"{name} is a share and must be 0 to 1, got {getattr(self, name)}"
        steps = max(1.0, self.hours * 3600 / self.step_s)
        for name in ("servers", "groups"):
            count: int = getattr(self, name)
            if count > LARGEST_RUN:
                yield f"{name} must be at most {LARGEST_RUN:,}, got {count:,}"
            elif count * steps > LARGEST_RUN:
                yield (
                    f"{name} x steps must be at most {LARGEST_RUN:,}, which takes minutes, got"
                    f" {count:,} x {steps:,.0f} (hours {self.hours:g}, step_s {self.step_s:g}):"
                    f" --hours {self.hours * LARGEST_RUN / (count * steps):.2g} is in time, or"
                    f" fewer {name}"
                )
        if self.sync.apply != "staged":
            yield (
                'weight_sync.apply must be "staged": a plan is of images that servers fetch, got'
                f" {self.sync.apply!r}"
            )
        if self.sync.transport not in ("auto", "tcp"):
            yield (
                'weight_sync.transport must be "auto" or "tcp": a plan is of reads over TCP, got'
                f" {self.sync.transport!r}"
            )
        if self.same_host and self.trainer_hosts > 1:
            yield (
                "same_host is for one trainer host: a server reads the other hosts' parts over its"
                f" link, got trainer_hosts {self.trainer_hosts} (--no-same-host plans servers on"
                " hosts of their own)"
            )

    # Sizes.

    @property
    def image_bytes(self) -> int:
        """Bytes of a version."""
        elements = self.adapters if self.adapters_only else self.parameters
        return elements * WIRE_BYTES[self.sync.wire_dtype]

    @property
    def trainer_bytes(self) -> float:
        """Host memory of one trainer host for its part of all slots, and the most for the patches
        to the versions in them."""
        slot = 1 + (SHARE if self.sync.delta != "off" else 0)
        return self.sync.slots * slot * self.image_bytes / self.trainer_hosts

    @property
    def server_bytes(self) -> int:
        """Host memory of one server host: a staging image for each of its servers."""
        most = self.servers if self.same_host else self.servers_per_host
        return min(self.servers, most) * self.image_bytes

    @property
    def state_bytes(self) -> float:
        """Memory of one trainer GPU for weights, gradients and optimizer."""
        nbytes = self.parameters * STATE_BYTES
        if self.adapters:
            nbytes = self.parameters * FROZEN_BYTES + self.adapters * STATE_BYTES
        return nbytes / (self.trainer_hosts * self.trainer_gpus)

    @property
    def relays(self) -> bool:
        """Whether servers read from each other."""
        return self.sync.relay and self.servers > 1 and not self.same_host

    @property
    def hop_bytes(self) -> int:
        """Bytes by which a server is ahead of the one that reads from it."""
        return min(self.sync.connections * self.sync.block_bytes, self.image_bytes)

    def patch_bytes(self, behind: int) -> int:
        """Return the bytes of patches over ``behind`` versions; 0 if that is more than is kept."""
        share = behind * self.patch_share
        return int(share * self.image_bytes) if 0 < share <= SHARE else 0

    def patches_wanted(self, slowest_s: float) -> bool:
        """Return whether to make a patch of the next version. ``slowest_s``: the slowest server's
        seconds for a whole version. Patches that are too large for the link are never tried here,
        as their size does not change."""
        if self.same_host or not self.patch_bytes(1):
            return False
        link_share = self.servers * self.patch_share if self.relays else 0.0
        part_bytes = self.image_bytes / self.trainer_hosts
        return worth_making(self.sync.delta, slowest_s, part_bytes, link_share)

    # Rates.

    @property
    def source_limits(self) -> dict[str, float]:
        """Limits of all trainer hosts together, bytes per second; empty with ``same_host``."""
        if self.same_host:
            return {}
        return {
            "the trainer hosts' links": self.trainer_hosts * self.trainer_link_gbit * GBIT,
            "the trainer hosts' range sources (their sending threads)": (
                self.trainer_hosts * self.source_rate
            ),
        }

    @property
    def source_rate(self) -> float:
        """Bytes per second that the threads of one host's range source send."""
        return self.source_threads * self.source_gb_s * GB

    @property
    def reader_rate(self) -> float:
        """Bytes per second that one server's threads read and check."""
        one = (self.memory_gb_s if self.same_host else self.stream_gb_s) * GB
        return self.sync.connections / (1 / one + 1 / HASH_RATE[self.sync.digest])

    @property
    def link_rate(self) -> float:
        """Bytes per second of a server host's link."""
        return float("inf") if self.same_host else self.server_link_gbit * GBIT

    # Times, in seconds.

    @property
    def copy_s(self) -> float:
        """The copy of a version into the image."""
        return self.image_bytes / (self.trainer_hosts * self.trainer_gpus * self.copy_gb_s * GB)

    @property
    def digest_s(self) -> float:
        """The trainer's hash of its part."""
        rate = HASH_THREADS * HASH_RATE[self.sync.digest]
        return self.image_bytes / self.trainer_hosts / rate

    @property
    def encode_s(self) -> float:
        """The making of a patch; all trainer hosts encode their parts at the same time."""
        return self.image_bytes / self.trainer_hosts / ENCODE_RATE

    @property
    def apply_s(self) -> float:
        """A server's application of a patch to its staged image."""
        return self.image_bytes / APPLY_RATE

    @property
    def connect_s(self) -> float:
        """A lane's connection, with the allocation of the receiver's memory."""
        return 3 * self.call_s + self.image_bytes * MEMORY_S

    @property
    def load_s(self) -> float:
        """The load of a version, in the pause."""
        return self.call_s + self.image_bytes / (self.server_gpus * self.load_gb_s * GB)

    @property
    def version_s(self) -> float:
        """Estimate for one version and all servers, from publish to load."""
        times = 1 if self.relays else self.servers
        rates = (rate / times for rate in self.source_limits.values())
        fetch_s = self.image_bytes / min(self.link_rate, self.reader_rate, *rates)
        return self.copy_s + self.digest_s + fetch_s + self.load_s

    @property
    def transfer_deadline_s(self) -> float:
        """Deadline of a transfer, as in sync.link."""
        return self.sync.transfer_s(self.image_bytes)

    @property
    def step_cpu_s(self) -> float:
        """Processor time of the sync process for one step of a commit: 1.4 calls."""
        return 1.4 * self.call_cpu_s

    @property
    def commits_cpu_s(self) -> float:
        """Processor time of the sync process for the commits of a version on all servers."""
        return self.servers * len(lane.COMMITTING) * self.step_cpu_s

    # Generation.

    @cached_property
    def groups_per_step(self) -> int:
        return self.groups or self.servers

    @cached_property
    def mean_group_s(self) -> float:
        return self.group_s or self.step_s / 3

    @cached_property
    def groups_at_once(self) -> int:
        return self.in_flight or max(1, round(2 * self._busy_with + 0.499))

    @property
    def generation_share(self) -> float:
        """A step's groups over those that all servers can make during a step, none of them down.
        From 1 on the trainer waits for groups, whatever else is set."""
        return self._busy_with / self.groups_at_once

    @property
    def _busy_with(self) -> float:
        """Groups that a server makes at once on average if the trainer never waits for any."""
        return self.groups_per_step * self.mean_group_s / self.step_s / self.servers
