"""Live metrics as Prometheus text, and the recorder's spans as OpenTelemetry traces. Both: ``pip
install 'titan_grpo[dashboards]'``. Traces need OTEL_EXPORTER_OTLP_ENDPOINT (or
..._TRACES_ENDPOINT).

One trace has the spans of one version (copy, digests, transfers, commits) or of one step (waiting,
training). OpenTelemetry's own variables configure everything else.
"""

import hashlib
import logging
import re
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from titan_grpo.errors import ConfigError
from titan_grpo.observe import names

logger = logging.getLogger(__name__)

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

LABELS = {names.SERVER: "server", names.EVALUATION: "evaluation"}
"""First part of a name -> label whose value is the name's middle part."""


def require(key: str) -> None:
    """Raise ConfigError naming ``key`` if the library is missing."""
    try:
        import prometheus_client  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            f"{key} needs prometheus_client, which is not installed: pip install"
            " 'titan_grpo[dashboards]', or leave it out"
        ) from error


def series(name: str) -> tuple[str, dict[str, str]]:
    """Return (name, labels) of a metric, without the ``_total`` of counters.

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


NO_DROPS = {names.dropped(reason): 0.0 for reason in names.REASONS}
"""Values before the first drop: a counter that first appears with its first increment hides it from
Prometheus' rate()."""


def page(values: Mapping[str, float | None]) -> bytes:
    """Return values (by their names in metrics.jsonl) as Prometheus text. Totals are counters, all
    others gauges; null values are left out."""
    from prometheus_client import CollectorRegistry, generate_latest

    class Step:
        def collect(self) -> Iterable[Any]:
            return _families(values)

    registry = CollectorRegistry()
    registry.register(Step())
    return generate_latest(registry)


HELP = {
    "titan_grpo_step": "the last training step that ended",
    "titan_grpo_dropped": "groups dropped, and completions left out, by reason",
}
"""Meanings of the names that are no metric's, or stand for several."""


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
            help_ = HELP.get(shown) or names.meaning(name)
            families[shown] = kind(shown, help_, labels=list(labels))
        families[shown].add_metric(list(labels.values()), value)
    return families.values()


ENDPOINTS = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
ATTRIBUTES = "OTEL_RESOURCE_ATTRIBUTES"


class Counted:
    """An exporter's spans that its collector took (``taken``), for the batch processor."""

    def __init__(self, exporter: Any) -> None:
        self._exporter, self.taken = exporter, 0

    def export(self, spans: Sequence[Any]) -> Any:
        """Pass spans on. A batch that raises, or is refused, is not counted."""
        result = self._exporter.export(spans)
        self.taken += len(spans) * (result.name == "SUCCESS")
        return result

    def __getattr__(self, name: str) -> Any:
        return getattr(self._exporter, name)


class Traces:
    """Exporter of the recorder's spans, which come from its thread. The provider exports from a
    batch processor's thread, which drops spans while the collector is gone."""

    def __init__(
        self,
        provider: Any,
        run: str,
        clock_s: float,
        counted: Counted | None = None,
        problem: str = "",
    ) -> None:
        """``clock_s``: the recorder's clock now. ``counted``: the provider's only exporter.
        ``problem``: why there is no provider."""
        self._provider, self._run, self._counted = provider, run, counted
        self._made = 0
        self._tracer: Any = provider and provider.get_tracer("titan_grpo")
        self._zero_ns = time.time_ns() - int(clock_s * 1e9)
        self._begun = str(self._zero_ns)
        self._problem = problem

    def span(
        self, name: str, start_s: float, stop_s: float, track: str, args: dict[str, Any]
    ) -> None:
        """Export one span; its times are on the recorder's clock. After the first error, which
        ``close`` returns, all spans are ignored."""
        if self._problem:
            return
        try:
            self._export(name, start_s, stop_s, track, args)
        except Exception as error:  # noqa: BLE001 - the boundary to a plugin, close() returns it
            self._problem = f"spans are not exported: {type(error).__name__}: {error}"

    def _export(
        self, name: str, start_s: float, stop_s: float, track: str, args: dict[str, Any]
    ) -> None:
        from opentelemetry import trace

        kind = next((key for key in ("step", "version") if key in args), "")
        context = None
        if kind:
            text = f"{self._run} {self._begun} {kind} {args[kind]}"
            number = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=24).digest())
            trace_id = number >> 64
            # Samplers that ask the parent leave a trace out, or take it, as they would its root.
            taken = self._provider.sampler.should_sample(None, trace_id, name).decision.is_sampled()
            flags = trace.TraceFlags(taken)
            root = trace.SpanContext(trace_id, number & (2**64 - 1) or 1, True, flags)
            context = trace.set_span_in_context(trace.NonRecordingSpan(root))
        plain = (str, int, float, bool)
        shown = {k: v if isinstance(v, plain) else str(v) for k, v in args.items()}
        attributes = {"run": self._run, "track": track, **shown}
        span = self._tracer.start_span(
            name, context, attributes=attributes, start_time=self._ns(start_s)
        )
        # One that records nothing is OTEL_SDK_DISABLED's.
        self._made += span.is_recording() and span.get_span_context().trace_flags.sampled
        span.end(self._ns(stop_s))

    def close(self, deadline_s: float) -> str:
        """Export the rest and shut the provider down. Returns why spans are missing, else ""."""
        if self._provider is None:
            return self._problem
        # In a thread: shutdown() takes no deadline, and waits 30 s or longer for a collector that
        # is gone.
        end = threading.Thread(target=self._provider.shutdown, name="end of traces", daemon=True)
        end.start()
        end.join(deadline_s)
        if end.is_alive() and not self._problem:
            self._problem = (
                f"the last spans were not exported within {deadline_s:g} s:"
                f" {' or '.join(ENDPOINTS)} must name a collector that answers"
            )
        # After the shutdown, which exports the last ones.
        lost = self._made - self._counted.taken if self._counted is not None else 0
        if lost and not self._problem:
            self._problem = (
                f"{lost} of {self._made} spans are not at the collector, which refused them or did"
                " not keep up; the log says more"
            )
        return self._problem

    def _ns(self, at_s: float) -> int:
        return self._zero_ns + int(at_s * 1e9)


def traces_of(env: Mapping[str, str], run: str, clock_s: float) -> Traces | None:
    """Return the exporter that the environment configures; None without an endpoint."""
    endpoint = next((name for name in ENDPOINTS if env.get(name)), "")
    if not endpoint:
        return None
    try:
        return _traces(env, run, clock_s)
    except ImportError as error:
        why = (
            f"{endpoint} is set, and {error.name} is not installed: pip install"
            " 'titan_grpo[dashboards]', or unset it"
        )
    except Exception as error:  # noqa: BLE001 - the boundary to a plugin
        why = f"OpenTelemetry refuses its variables: {type(error).__name__}: {error}"
    problem = f"spans are not exported: {why}"
    logger.warning("%s", problem)
    return Traces(None, run, clock_s, problem=problem)


def _traces(env: Mapping[str, str], run: str, clock_s: float) -> Traces:
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    named = env.get("OTEL_SERVICE_NAME") or "service.name=" in env.get(ATTRIBUTES, "")
    resource = Resource.create({} if named else {"service.name": "titan_grpo"})
    # Not again at the process's end, which would wait for a collector that is gone: close() does.
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    exporter: Any = Counted(OTLPSpanExporter())
    provider.add_span_processor(BatchSpanProcessor(exporter))
    return Traces(provider, run, clock_s, exporter)
