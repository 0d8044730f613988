"""Report of a plan: figures of one simulated run as JSON-able values and as text, and advice on
settings.

Advice comes from simulations, never from a rule of thumb. To compare settings they have at most
LEAST_SERVERS servers and a proportional share of the trainer hosts' links: only the ratio matters.
The run with all changes is simulated with all servers.
"""

import math
import statistics
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from titan_grpo.plan.setup import GB, Setup
from titan_grpo.plan.simulation import Result, Simulation, quantile

MB = 1e6

LEAST_SERVERS = 64
"""Most servers of a simulation that compares settings (a trial)."""

SERVER_HOURS = 128
"""Most servers times hours of the run with all changes: one hour of 1,024 servers takes most of a
minute to simulate."""

TRIAL_STEPS = 14
"""Duration of a trial, in steps, or in versions if those take longer than a step."""

WORTH = 0.03
"""Share by which a change must improve the score."""

CHANGES = 3
"""Most changes to propose."""

STALL_SHARE = 0.001
"""Stall below which a run has none."""


@dataclass(frozen=True)
class Change:
    """One setting with its old and its proposed value."""

    setting: str
    old: str
    new: str

    def __str__(self) -> str:
        return f"{self.setting}: {self.old} -> {self.new}"


def stall_share(result: Result) -> float:
    """Return the share of time that the trainer waited, for a run with at least one step."""
    return result.stall_s / result.simulated_s


def score(result: Result) -> float:
    """Return how bad a run was: 0 without stall, lag and staleness."""
    if not result.steps:
        return 100.0
    lag = statistics.fmean(result.lags) if result.lags else 10.0
    return (
        10 * stall_share(result) + min(10.0, lag) + 0.1 * statistics.fmean(result.staleness or [0])
    )


def smaller(setup: Setup) -> Setup:
    """Return the setup of a trial: fewer servers, and proportionally less of what they share."""
    servers = min(setup.servers, LEAST_SERVERS)
    share = servers / setup.servers
    # With relays the trainer sends to a few servers, however many there are.
    sent = 1.0 if setup.relays else share
    small = replace(
        setup,
        servers=servers,
        trainer_link_gbit=setup.trainer_link_gbit * sent,
        source_gb_s=setup.source_gb_s * sent,
        groups=max(1, round(setup.groups_per_step * share)),
        in_flight=setup.groups_at_once,
    )
    # A trial that ends before its second version shows no stall.
    trial_s = setup.connect_s + TRIAL_STEPS * max(setup.step_s, small.version_s)
    return replace(small, hours=min(setup.hours, trial_s / 3600))


def fed_hosts(setup: Setup) -> int:
    """Return how many trainer hosts send a version to every server in half a step."""
    one = min(setup.source_limits.values(), default=math.inf) / setup.trainer_hosts
    return math.ceil(2 * setup.servers * setup.image_bytes / (setup.step_s * one))


def candidates(setup: Setup) -> Iterator[tuple[Change, Setup]]:
    """Yield changes of single settings, cheap ones first."""
    sync = setup.sync

    def of_sync(name: str, value: Any) -> tuple[Change, Setup]:
        change = Change(f"weight_sync.{name}", f"{getattr(sync, name)}", f"{value}")
        return change, replace(setup, sync=replace(sync, **{name: value}))

    def of_setup(name: str, value: Any, shown: str = "") -> tuple[Change, Setup]:
        change = Change(shown or name, f"{getattr(setup, name):g}", f"{value:g}")
        return change, replace(setup, **{name: value})

    yield of_setup("max_staleness", setup.max_staleness + 1, "rollout.max_staleness")
    if sync.wire_dtype == "float32":
        yield of_sync("wire_dtype", "bfloat16")
    if setup.source_limits and not sync.relay:
        yield of_sync("relay", True)
    yield of_sync("connections", 2 * sync.connections)
    yield of_sync("lane_deadline_s", 4 * sync.lane_deadline_s)
    yield of_sync("slots", sync.slots + 1)
    requests = replace(setup, in_flight=2 * setup.groups_at_once)
    yield (
        Change(
            "groups of one server at once (rollout.max_concurrent_requests)",
            f"{setup.groups_at_once}",
            f"{requests.groups_at_once}",
        ),
        requests,
    )
    for times in (2, 4):
        longer = replace(
            setup, groups=times * setup.groups_per_step, step_s=times * setup.step_s,
            group_s=setup.mean_group_s, in_flight=setup.groups_at_once,
        )  # fmt: skip
        change = Change(
            "rollout.prompts_per_step (and the step's time with it)",
            f"{setup.groups_per_step} ({setup.step_s:g} s)",
            f"{longer.groups} ({longer.step_s:g} s)",
        )
        yield change, longer
    if setup.source_limits:
        for hosts in sorted({2 * setup.trainer_hosts, fed_hosts(setup)}):
            if hosts > setup.trainer_hosts:
                yield of_setup("trainer_hosts", hosts)
        link, source = setup.source_limits.values()
        name = "trainer_link_gbit" if link < source else "source_gb_s"
        yield of_setup(name, 2 * getattr(setup, name))
        yield of_setup("server_link_gbit", 2 * setup.server_link_gbit)
    if setup.servers_per_host > 1 and not setup.same_host:
        yield of_setup("servers_per_host", setup.servers_per_host // 2)
    yield of_setup("server_gpus", 2 * setup.server_gpus)


def advice(setup: Setup, whole: Result) -> tuple[list[Change], Result]:
    """Return up to CHANGES settings, each the one that helps most given those before it, and the
    run with all of them. Empty if no single one helps, or if all together do not at full size.

    ``whole``: the run without changes. A trial has few servers and so few deaths, and may miss
    their stall: if no change helps there, a greater max_staleness is tried at full size.
    """
    changes: list[Change] = []
    present = setup
    result = Simulation(smaller(present)).run()
    while len(changes) < CHANGES:
        best = score(result) * (1 - WORTH) - 0.01
        found: tuple[Change, Setup, Result] | None = None
        for change, changed in candidates(present):
            if any(change.setting == before.setting for before in changes):
                continue
            tried = Simulation(smaller(changed)).run()
            if score(tried) < best:
                best, found = score(tried) * (1 - WORTH), (change, changed, tried)
        if found is None:
            break
        changes.append(found[0])
        _, present, result = found
    hours = min(setup.hours, SERVER_HOURS / setup.servers)
    if not changes and whole.steps and stall_share(whole) > STALL_SHARE:
        change, changed = next(candidates(setup))
        result = Simulation(replace(changed, hours=hours)).run()
        if result.steps and stall_share(result) < stall_share(whole) / 2:
            changes.append(change)
    elif changes:
        result = Simulation(replace(present, hours=hours)).run()
        if score(result) >= score(whole):
            changes.clear()
    return changes, result


def limit(setup: Setup, result: Result) -> tuple[str, float]:
    """Return the limit that bounded transfers longest, and its share of their time."""
    total = sum(result.busy_s.values())
    if not total:
        return "none: nothing was sent", 0.0
    name = max(result.busy_s, key=lambda key: result.busy_s[key])
    return name, result.busy_s[name] / total


def figures(setup: Setup, result: Result) -> dict[str, Any]:
    """Return the report's figures as JSON-able values; None where nothing was measured."""
    source = min(setup.source_limits.values(), default=math.inf)
    rest = setup.copy_s + setup.digest_s
    name, share = limit(setup, result)

    def spread(values: list[float]) -> dict[str, float] | None:
        if not values:
            return None
        return {
            "median": quantile(values, 0.5),
            "p95": quantile(values, 0.95),
            "most": max(values),
        }

    lags = [float(lag) for lag in result.lags]
    return {
        "memory": {
            "image_bytes": setup.image_bytes,
            "trainer_host_bytes": setup.trainer_bytes,
            "server_host_bytes": setup.server_bytes,
            "trainer_gpu_state_bytes": setup.state_bytes,
            "trainer_gpu_fits": setup.state_bytes < setup.trainer_gpu_gb * GB,
        },
        "seconds": {
            "connect": setup.connect_s,
            "copy": setup.copy_s,
            "digest": setup.digest_s,
            "fetch": spread(result.send_s),
            "pause": spread(result.pause_s),
            "publish_to_commit": spread(result.commit_s),
            "transfer_deadline": setup.transfer_deadline_s,
            "sync_processor_per_version": setup.commits_cpu_s,
        },
        "network": {
            "limit": name,
            "limit_share": share,
            "sent_per_version": result.sent_bytes / setup.image_bytes / max(1, result.published),
            "source_bytes_per_s": None if math.isinf(source) else source,
            "servers_fed_in_a_step": (
                None
                if math.isinf(source)
                else int(source * max(0.0, setup.step_s - rest) / setup.image_bytes)
            ),
            "trainer_hosts_for_half_a_step": None if math.isinf(source) else fed_hosts(setup),
        },
        "run": {
            "simulated_s": result.simulated_s,
            "start_s": result.start_s,
            "steps": result.steps,
            "versions_published": result.published,
            "versions_skipped": result.skipped,
            "stall_s": result.stall_s,
            "stall_share": stall_share(result) if result.simulated_s else None,
            "stall_for_versions_s": result.stall_for_versions_s,
            "stall_for_copy_s": result.stall_for_copy_s,
            "lag": spread(lags),
            "generation_share": setup.generation_share,
            "staleness": spread([float(value) for value in result.staleness]),
            "servers_without_a_version": (result.without / result.steps if result.steps else None),
            "deaths": result.deaths,
            "groups_moved": result.moved,
            "failed_transfers": result.failed_transfers,
            "patched_transfers": result.patched,
        },
    }


def text(setup: Setup, found: Mapping[str, Any], changes: list[Change], then: Result) -> str:
    """Return the report as text for a terminal."""
    memory, seconds, run = found["memory"], found["seconds"], found["run"]
    hosts = math.ceil(setup.servers / setup.servers_per_host)
    where = "on the trainer's host" if setup.same_host else f"on {_many(hosts, 'host')}"
    lines = [
        f"{_parameters(setup.parameters)} parameters, {_gb(setup.image_bytes)} a version;"
        f" {_many(setup.trainer_hosts, 'trainer host')} x {setup.trainer_gpus} GPUs,"
        f" {_many(setup.servers, 'server')} {where}; {setup.slow:.0%} slow,"
        f" {setup.dying:.0%} die in a minute",
        "",
        f"memory    trainer host {_gb(memory['trainer_host_bytes'])} ({setup.sync.slots} slots);"
        f" server host {_gb(memory['server_host_bytes'])}; trainer GPU"
        f" {_gb(memory['trainer_gpu_state_bytes'])} of {setup.trainer_gpu_gb:g} GB for weights,"
        " gradients and AdamW, before activations"
        + ("" if memory["trainer_gpu_fits"] else ": IT DOES NOT FIT"),
        f"version   copy {seconds['copy']:.2f} s, digests {seconds['digest']:.2f} s, fetch"
        f" {_spread(seconds['fetch'], 's')}, publish to commit"
        f" {_spread(seconds['publish_to_commit'], 's')}",
        f"          generation stands still {_spread(seconds['pause'], 's')}; a server's connection"
        f" takes {seconds['connect']:.1f} s",
        *_network(setup, found),
        f"groups    a step's need {_percent(setup.generation_share)} of what"
        f" {_many(setup.servers, 'server')} can make in a step of {setup.step_s:g} s"
        f" ({setup.groups_at_once} at once on each, {setup.mean_group_s:.3g} s a group)"
        + ("" if setup.generation_share < 1 else ": NOT ENOUGH, the trainer waits for groups"),
        f"calls     {seconds['sync_processor_per_version']:.2f} s of the sync process for those of"
        f" a version, in each step of {setup.step_s:g} s",
    ]
    if not run["steps"]:
        lines.append(f"run       NO STEP in {setup.hours:g} h: {_why_none(setup, found)}")
    else:
        lines += [
            f"run       {run['simulated_s']:.0f} s after a start of {run['start_s']:.0f} s:"
            f" {run['steps']} steps, {run['versions_published']} versions published,"
            f" {run['versions_skipped']} skipped; {run['deaths']} deaths,"
            f" {run['groups_moved']} groups moved, {run['failed_transfers']} transfers failed",
            f"stall     {run['stall_s']:.1f} s ({run['stall_share']:.1%}) the trainer waited:"
            f" {run['stall_for_versions_s']:.1f} s for versions on servers,"
            f" {run['stall_for_copy_s']:.1f} s for its copy, the rest for groups in the making",
            f"lag       {_spread(run['lag'])} versions at a step's end;"
            f" {run['servers_without_a_version']:.1f} servers hold none",
            f"staleness {_spread(run['staleness'])} versions of the groups that were used",
        ]
    lines.append("")
    if not changes:
        lines.append("change    nothing: no single setting makes it better by much")
    else:
        lines += [
            f"{'change' if n == 1 else '':9} {n}. {change}" for n, change in enumerate(changes, 1)
        ]
        after = (
            f"stall {stall_share(then):.1%}, median lag {quantile(then.lags, 0.5):g}"
            if then.steps
            else "still no step"
        )
        lines.append(f"          with {'it' if len(changes) == 1 else 'them'}, simulated: {after}")
    return "\n".join(lines)


def _network(setup: Setup, found: Mapping[str, Any]) -> Iterator[str]:
    network = found["network"]
    share = network["limit_share"]
    yield f"network   limit: {network['limit']}, in {share:.0%} of the transfers' time"
    if network["source_bytes_per_s"] is None:
        return
    if found["run"]["patched_transfers"]:
        yield (
            "          patches come from the trainer to each server: its hosts send"
            f" {network['sent_per_version']:.2g} times a version's bytes"
        )
        return
    if setup.relays:
        yield (
            "          servers read from each other: the trainer sends a version"
            f" {network['sent_per_version']:.1f} times"
        )
        return
    fed, rate = network["servers_fed_in_a_step"], network["source_bytes_per_s"]
    yield (
        f"          the trainer sends {_gb(rate)}/s: {_many(fed, 'server')}"
        f" get every version within a step of {setup.step_s:g} s"
    )
    if fed < setup.servers:
        need = network["trainer_hosts_for_half_a_step"]
        yield (
            f"          NOT ENOUGH for {setup.servers}: {_many(need, 'trainer host')} would send a"
            " version to all of them in half a step; with weight_sync.relay servers serve servers"
        )


def _why_none(setup: Setup, found: Mapping[str, Any]) -> str:
    if found["run"]["failed_transfers"]:
        return (
            f"transfers do not end within {setup.transfer_deadline_s:.0f} s"
            " (weight_sync.lane_deadline_s, and the version at weight_sync.min_rate)"
        )
    return "the first version did not reach the servers in that time"


def _gb(nbytes: float) -> str:
    return f"{_short(nbytes / GB)} GB" if nbytes >= GB / 10 else f"{_short(nbytes / MB)} MB"


def _parameters(count: int) -> str:
    return f"{_short(count / 1e9)} billion" if count >= 1e8 else f"{_short(count / 1e6)} million"


def _percent(share: float) -> str:
    return "less than 1%" if 0 < share < 0.005 else f"{share:.0%}"


def _short(value: float) -> str:
    return f"{value:.3g}" if value < 999.5 else f"{value:,.0f}"


def _many(count: int, what: str) -> str:
    return f"{count:,} {what}{'' if count == 1 else 's'}"


def _spread(values: Mapping[str, float] | None, unit: str = "") -> str:
    if values is None:
        return "unknown"
    scale = 1.0
    if unit == "s" and values["most"] < 0.1:
        unit, scale = "ms", 1000.0
    unit = unit and f" {unit}"
    shown = (values[key] * scale for key in ("median", "p95", "most"))
    median, late, most = (
        f"{value:.2f}{unit}" if value < 1 and unit else f"{value:.3g}{unit}" for value in shown
    )
    return f"{median} (95 %: {late}, most {most})"
