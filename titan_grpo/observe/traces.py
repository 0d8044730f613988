"""The recorder's spans as OpenTelemetry traces, where its SDK and exporter are installed (``pip
install 'titan_grpo[dashboards]'``) and OTEL_EXPORTER_OTLP_ENDPOINT (or ..._TRACES_ENDPOINT) is set.

A trace is what has one version, or one step: a version's copy, digests, transfers and commits, or a
step's waiting and training. Everything else of OpenTelemetry is set by its own variables.
"""

import hashlib
import time
from collections.abc import Mapping
from typing import Any

ENDPOINTS = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")

FLUSH_MS = 5000
"""How long the end waits for a collector, in milliseconds."""


class Traces:
    """Takes the recorder's spans, from its own thread. Exporting is the provider's: a batch
    processor's thread, which drops spans where the collector is gone."""

    def __init__(self, provider: Any, run: str, clock_s: float) -> None:
        """``clock_s``: the recorder's clock now."""
        self._provider, self._run = provider, run
        self._tracer = provider.get_tracer("titan_grpo")
        self._zero_ns = time.time_ns() - int(clock_s * 1e9)
        self._begun = str(self._zero_ns)

    def span(
        self, name: str, start_s: float, stop_s: float, track: str, args: dict[str, Any]
    ) -> None:
        """One span; its times on the recorder's clock."""
        from opentelemetry import trace

        kind = next((key for key in ("step", "version") if key in args), "")
        context = None
        if kind:
            text = f"{self._run} {self._begun} {kind} {args[kind]}"
            number = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=24).digest())
            root = trace.SpanContext(
                number >> 64, number & (2**64 - 1) or 1, True, trace.TraceFlags(1)
            )
            context = trace.set_span_in_context(trace.NonRecordingSpan(root))
        attributes = {"run": self._run, "track": track, **{k: _plain(v) for k, v in args.items()}}
        span = self._tracer.start_span(
            name, context, attributes=attributes, start_time=self._ns(start_s)
        )
        span.end(self._ns(stop_s))

    def close(self) -> None:
        """Export what is left. Bounded."""
        self._provider.force_flush(FLUSH_MS)
        self._provider.shutdown()

    def _ns(self, at_s: float) -> int:
        return self._zero_ns + int(at_s * 1e9)


def _plain(value: Any) -> str | int | float | bool:
    return value if isinstance(value, str | int | float | bool) else str(value)


def from_environment(env: Mapping[str, str], run: str, clock_s: float) -> Traces | None:
    """What the environment asks for; None where it asks for nothing, or nothing is installed."""
    if not any(env.get(name) for name in ENDPOINTS):
        return None
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError:
        return None
    name = env.get("OTEL_SERVICE_NAME") or "titan_grpo"
    provider = TracerProvider(resource=Resource.create({"service.name": name}))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    return Traces(provider, run, clock_s)
