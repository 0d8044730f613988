"""The keys of [alerts] and [dashboards].

No ``from __future__ import annotations`` in this file: torchtitan's merge reads field types as
objects.
"""

from dataclasses import dataclass, field


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
