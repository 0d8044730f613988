"""What Prometheus reads of a run, by its own parser, and that the dashboard asks for nothing else;
spans of the recorder in the OpenTelemetry SDK, whose own exporter keeps them."""

import json
import re
import sys
import threading
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import (
    BatchSpanProcessor,
    SimpleSpanProcessor,
    SpanExporter,
    SpanExportResult,
)
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import (
    ALWAYS_OFF,
    ALWAYS_ON,
    DEFAULT_OFF,
    ParentBasedTraceIdRatio,
    Sampler,
)
from prometheus_client.parser import text_string_to_metric_families

from tests.rigs.present import present
from titan_grpo.observe import dashboards, names
from titan_grpo.observe.recorder import PENDING_LIMIT, Recorder, read_metrics

EXPORTER = "opentelemetry.exporter.otlp.proto.http.trace_exporter"


def traced(folder: Path, processor: SpanProcessor) -> Recorder:
    """A recorder whose spans go to this processor."""
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(processor)
    clock = time.perf_counter
    return Recorder(folder, clock, dashboards.Traces(provider, "run", clock()))


def samples(page: bytes) -> dict[tuple[str, str], float]:
    """(name, label's value) -> value."""
    return {
        (sample.name, "".join(sample.labels.values())): sample.value
        for family in text_string_to_metric_families(page.decode())
        for sample in family.samples
    }


def test_a_steps_line_is_a_page_of_gauges_and_counters_with_labels(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path)
    recorder.count(names.SYNC_BYTES, 1024)
    recorder.count(names.dropped("stale"), 2)
    own = {
        names.REWARD: 0.25,
        names.LOSS: float("nan"),
        names.of_server("http://a:8000", "lag"): 1.0,
        names.of_server("http://b:8000", "lag"): 3.0,
        "evaluation/test/pass_at_4": 0.5,
    }
    recorder.step(7, own | recorder.since_last())
    recorder.close()
    found = samples(dashboards.page(recorder.last_row()))
    assert found["titan_grpo_step", ""] == 7
    assert found["titan_grpo_reward_mean", ""] == 0.25
    assert found["titan_grpo_server_lag", "a:8000"] == 1
    assert found["titan_grpo_server_lag", "b:8000"] == 3
    assert found["titan_grpo_evaluation_pass_at_4", "test"] == 0.5
    assert found["titan_grpo_sync_bytes_total", ""] == 1024
    assert found["titan_grpo_dropped_total", "stale"] == 2
    assert ("titan_grpo_loss_total", "") not in found, "null: it has no value"


def test_a_name_that_stands_for_several_metrics_has_a_meaning_of_them_all() -> None:
    """Before, the drops had that of the reason that came first, and the step had none."""
    values = {"step": 3.0, names.dropped("bad_reward"): 1.0, names.dropped("stale"): 2.0}
    text = dashboards.page(values).decode()
    said = {each.name: each.documentation for each in text_string_to_metric_families(text)}
    assert said == {
        "titan_grpo_step": "the last training step that ended",
        "titan_grpo_dropped": "groups dropped, and completions left out, by reason",
    }


def test_the_dashboard_asks_for_metrics_that_exist(root: Path) -> None:
    values = dict.fromkeys(names.MEANING, 1.0) | {"step": 1.0, names.dropped("stale"): 1.0}
    values |= {names.of_server("http://a:1", what): 1.0 for what in names.OF_SERVER}
    values |= {f"{names.EVALUATION}/test/{what}": 1.0 for what in names.OF_EVALUATION}
    known = {name for name, _ in samples(dashboards.page(values))}
    dashboard = json.loads((root / "docker" / "grafana.json").read_text())
    asked = [t["expr"] for panel in dashboard["panels"] for t in panel["targets"]]
    asked += [each["query"] for each in dashboard["templating"]["list"]]
    used = {name for text in asked for name in re.findall(r"titan_grpo_\w+", text)}
    assert len(used) > 30
    assert used - known == set()


def test_what_has_one_version_is_one_trace_with_the_recorders_times(tmp_path: Path) -> None:
    kept = InMemorySpanExporter()
    recorder = traced(tmp_path, SimpleSpanProcessor(kept))
    before_ns, start_s = time.time_ns(), recorder.now()
    for version in (3, 4):
        with recorder.span(names.COPY_S, "main thread", version=version):
            pass
        recorder.record_span(names.SEND_S, start_s, start_s + 2.5, "http://a:1", version=version)
    recorder.close()
    spans = kept.get_finished_spans()
    assert [span.name for span in spans] == [names.COPY_S, names.SEND_S] * 2
    by_version = [
        {s.context.trace_id for s in spans if present(s.attributes)["version"] == v} for v in (3, 4)
    ]
    assert [len(ids) for ids in by_version] == [1, 1]
    assert by_version[0] != by_version[1]
    send = spans[1]
    assert present(send.attributes)["track"] == "http://a:1"
    assert send.start_time is not None
    assert send.end_time is not None
    assert send.end_time - send.start_time == pytest.approx(2.5e9, abs=1e3)
    assert abs(send.start_time - before_ns) < 1e9


def test_a_collector_that_is_gone_is_named_and_the_files_are_whole(tmp_path: Path) -> None:
    answered = threading.Event()

    class Gone(SpanExporter):
        def export(self, spans: object) -> SpanExportResult:
            answered.wait(60)
            return SpanExportResult.FAILURE

    recorder = traced(tmp_path, BatchSpanProcessor(Gone()))
    recorder.add_span("train", 1.0, 2.0, "main thread", step=1)
    (problem,) = recorder.close(0.5)
    assert "the last spans were not exported within 0.25 s" in problem
    assert "OTEL_EXPORTER_OTLP_ENDPOINT" in problem
    assert recorder.close() == [problem]
    assert json.loads((tmp_path / "trace.json").read_text())[-1]["name"] == "train"
    answered.set()


@pytest.mark.parametrize(
    ("waiting", "lost"), [(8, 2), (2, 4)], ids=["refused", "refused, and too many that wait"]
)
def test_spans_that_the_collector_did_not_take_are_counted_at_the_end(
    waiting: int, lost: int
) -> None:
    answers = [SpanExportResult.FAILURE, SpanExportResult.SUCCESS, SpanExportResult.SUCCESS]
    begun, goes_on = threading.Event(), threading.Event()

    class Refuses(SpanExporter):
        def export(self, spans: object) -> SpanExportResult:
            begun.set()
            assert goes_on.wait(60)
            return answers.pop(0)

    exporter: Any = dashboards.Counted(Refuses())
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(exporter, waiting, max_export_batch_size=2))
    traces = dashboards.Traces(provider, "run", 0.0, exporter)
    for step in range(6):
        traces.span("train", 1.0, 2.0, "main thread", {"step": step})
        assert step != 1 or begun.wait(60), "the first two are on their way"
    goes_on.set()
    assert traces.close(60).startswith(f"{lost} of 6 spans are not at the collector")


HALF = ParentBasedTraceIdRatio(0.5)


@pytest.mark.parametrize(
    ("disabled", "sampler", "least", "most"),
    [
        ("", ALWAYS_ON, 200, 200),
        ("", ALWAYS_OFF, 0, 0),
        ("", DEFAULT_OFF, 0, 0),
        ("", HALF, 50, 150),
        ("true", ALWAYS_ON, 0, 0),
    ],
)
def test_spans_that_the_collector_took_or_sampling_left_out_are_not_missing(
    monkeypatch: pytest.MonkeyPatch, disabled: str, sampler: Sampler, least: int, most: int
) -> None:
    monkeypatch.setenv("OTEL_SDK_DISABLED", disabled)
    kept = InMemorySpanExporter()
    exporter: Any = dashboards.Counted(kept)
    provider = TracerProvider(sampler, shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(exporter))
    traces = dashboards.Traces(provider, "run", 0.0, exporter)
    for step in range(100):
        for name in ("rollout wait", "train"):
            traces.span(name, 1.0, 2.0, "main thread", {"step": step})
    assert traces.close(60) == ""
    spans = kept.get_finished_spans()
    assert least <= len(spans) <= most
    assert len(spans) == 2 * len({span.context.trace_id for span in spans}), "a trace is whole"


@pytest.mark.parametrize(
    ("variable", "text", "name"),
    [
        ("OTEL_SERVICE_NAME", "", "titan_grpo"),
        ("OTEL_SERVICE_NAME", "mine", "mine"),
        ("OTEL_RESOURCE_ATTRIBUTES", "team=a,service.name=mine", "mine"),
    ],
)
def test_a_service_has_the_name_that_the_environment_gives_it(
    monkeypatch: pytest.MonkeyPatch, variable: str, text: str, name: str
) -> None:
    kept = InMemorySpanExporter()
    # In place of the exporter's package, which is not installed for tests.
    package = ModuleType(EXPORTER)
    vars(package)["OTLPSpanExporter"] = lambda: kept
    monkeypatch.setitem(sys.modules, EXPORTER, package)
    monkeypatch.setenv(variable, text)
    environment = {variable: text, "OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:9"}
    traces = dashboards.traces_of(environment, "run", 0.0)
    assert isinstance(traces, dashboards.Traces)
    traces.span("train", 1.0, 2.0, "main thread", {"step": 1})
    assert traces.close(60) == ""
    assert [s.resource.attributes["service.name"] for s in kept.get_finished_spans()] == [name]


def test_an_exporter_that_raises_is_named_and_the_recorder_goes_on(tmp_path: Path) -> None:
    class Broken(SpanProcessor):
        def on_end(self, span: ReadableSpan) -> None:
            raise ValueError("no such exporter")

    recorder = traced(tmp_path, Broken())
    for step in (1, 2):
        recorder.add_span("train", 1.0, 2.0, "main thread", step=step)
        recorder.step(step, {names.REWARD: 0.5})
    assert recorder.close() == ["spans are not exported: ValueError: no such exporter"]
    assert len(read_metrics(tmp_path / "metrics.jsonl")) == 2


def test_spans_that_wait_for_a_slow_exporter_are_bounded(tmp_path: Path) -> None:
    goes_on, taken = threading.Event(), []

    class Slow(SpanProcessor):
        def on_end(self, span: ReadableSpan) -> None:
            goes_on.wait(60)
            taken.append(span.name)

    recorder = traced(tmp_path, Slow())
    for step in range(PENDING_LIMIT):
        recorder.add_span("train", 1.0, 2.0, "main thread", step=step)
    goes_on.set()
    (problem,) = recorder.close(60)
    assert "events are not in it: the disk did not keep up" in problem
    assert 0 < len(taken) <= PENDING_LIMIT / 2 + 1, "each has an event in the queue too"


def test_nothing_is_exported_unless_the_environment_names_a_collector() -> None:
    assert dashboards.traces_of({}, "run", 0.0) is None


@pytest.mark.parametrize(
    ("package", "variable", "why"),
    [
        (None, "", rf"OTEL_EXPORTER_OTLP_ENDPOINT is set, and {EXPORTER} is not installed: pip"),
        (
            ModuleType(EXPORTER),
            "OTEL_BSP_MAX_EXPORT_BATCH_SIZE",
            "OpenTelemetry refuses its variables: ValueError: max_export_batch_size must be less",
        ),
    ],
)
def test_a_run_whose_spans_cannot_be_exported_goes_on_and_says_so_at_once_and_at_its_end(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    tmp_path: Path,
    package: ModuleType | None,
    variable: str,
    why: str,
) -> None:
    """Before, it said nothing where a package was missing, and a wrong variable ended it."""
    monkeypatch.setitem(sys.modules, EXPORTER, package)
    if package is not None:
        vars(package)["OTLPSpanExporter"] = InMemorySpanExporter
        monkeypatch.setenv(variable, "99999")
    environment = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:9"}
    recorder = Recorder(tmp_path, traces=dashboards.traces_of(environment, "run", 0.0))
    assert re.match(f"spans are not exported: {why}", caplog.messages[0])
    recorder.add_span("train", 1.0, 2.0, "main thread", step=1)
    assert recorder.close() == caplog.messages
    assert json.loads((tmp_path / "trace.json").read_text())[-1]["name"] == "train"
