"""Metrics as Prometheus reads them, by its own client library (``pip install
'titan_grpo[dashboards]'``)."""

import re
from collections.abc import Iterable, Mapping
from typing import Any

from titan_grpo.errors import ConfigError
from titan_grpo.observe import names

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

LABELS = {names.SERVER: "server", names.EVALUATION: "evaluation"}
"""First part of a name whose second part is a label's value."""


def require(key: str) -> None:
    """Raise ConfigError naming ``key`` where the library is not there."""
    try:
        import prometheus_client  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            f"{key} needs prometheus_client, which is not installed: pip install"
            " 'titan_grpo[dashboards]', or leave it out"
        ) from error


def series(name: str) -> tuple[str, dict[str, str]]:
    """(name, labels) of a metric, without the ``_total`` of what counts up.

    >>> series("reward/mean"), series("server/a:8000/lag")
    (('titan_grpo_reward_mean', {}), ('titan_grpo_server_lag', {'server': 'a:8000'}))
    >>> series("dropped/stale"), series("evaluation/test/pass_at_4")
    (('titan_grpo_dropped', {'reason': 'stale'}), ('titan_grpo_evaluation_pass_at_4', \
{'evaluation': 'test'}))
    """
    first, _, rest = name.partition("/")
    labels = {}
    if first == names.DROPPED:
        name, labels = first, {"reason": rest}
    elif first in LABELS:
        value, _, what = rest.rpartition("/")
        name, labels = f"{first}/{what}", {LABELS[first]: value}
    return "titan_grpo_" + re.sub(r"\W", "_", name), labels


def page(values: Mapping[str, float | None]) -> bytes:
    """Values by their names in metrics.jsonl, as Prometheus' text. Totals are counters, all others
    gauges; what has no value (null) is left out."""
    from prometheus_client import CollectorRegistry, generate_latest

    class Step:
        def collect(self) -> Iterable[Any]:
            return _families(values)

    registry = CollectorRegistry()
    registry.register(Step())
    return generate_latest(registry)


def _families(values: Mapping[str, float | None]) -> Iterable[Any]:
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

    families: dict[str, Any] = {}
    for name, value in values.items():
        if value is None:
            continue
        shown, labels = series(name)
        if shown not in families:
            counts_up = name in names.TOTALS or name.startswith(names.dropped(""))
            kind = CounterMetricFamily if counts_up else GaugeMetricFamily
            families[shown] = kind(shown, names.meaning(name), labels=list(labels))
        families[shown].add_metric(list(labels.values()), value)
    return families.values()
