"""Spans of the recorder in the OpenTelemetry SDK, whose own exporter keeps them."""

import time

import pytest

pytest.importorskip("opentelemetry.sdk")
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from titan_grpo.observe import names, traces
from titan_grpo.observe.recorder import Recorder


def test_what_has_one_version_is_one_trace_with_the_recorders_times(tmp_path) -> None:
    kept, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(kept))
    clock = time.perf_counter
    recorder = Recorder(tmp_path, clock, traces.Traces(provider, "run", clock()))
    before_ns, start_s = time.time_ns(), clock()
    for version in (3, 4):
        with recorder.span(names.COPY_S, "main thread", version=version):
            pass
        recorder.record_span(names.SEND_S, start_s, start_s + 2.5, "http://a:1", version=version)
    recorder.close()
    spans = kept.get_finished_spans()
    assert [span.name for span in spans] == [names.COPY_S, names.SEND_S] * 2
    by_version = [
        {s.context.trace_id for s in spans if s.attributes["version"] == v} for v in (3, 4)
    ]
    assert [len(ids) for ids in by_version] == [1, 1]
    assert by_version[0] != by_version[1]
    send = spans[1]
    assert send.attributes["track"] == "http://a:1"
    assert send.end_time - send.start_time == pytest.approx(2.5e9, abs=1e3)
    assert abs(send.start_time - before_ns) < 1e9


def test_nothing_is_exported_unless_the_environment_names_a_collector() -> None:
    assert traces.from_environment({}, "run", 0.0) is None
