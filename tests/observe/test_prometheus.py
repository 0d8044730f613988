"""What Prometheus reads of a run, by its own parser; and that the dashboard asks for nothing
else."""

import json
import re

import pytest
from prometheus_client.parser import text_string_to_metric_families

from titan_grpo.observe import names, prometheus
from titan_grpo.observe.recorder import Recorder


def samples(page: bytes) -> dict[tuple[str, str], float]:
    """(name, label's value) -> value."""
    return {
        (sample.name, "".join(sample.labels.values())): sample.value
        for family in text_string_to_metric_families(page.decode())
        for sample in family.samples
    }


def test_a_steps_line_is_a_page_of_gauges_and_counters_with_labels(tmp_path) -> None:
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
    found = samples(prometheus.page(recorder.last_row()))
    assert found["titan_grpo_step", ""] == 7
    assert found["titan_grpo_reward_mean", ""] == 0.25
    assert found["titan_grpo_server_lag", "a:8000"] == 1
    assert found["titan_grpo_server_lag", "b:8000"] == 3
    assert found["titan_grpo_evaluation_pass_at_4", "test"] == 0.5
    assert found["titan_grpo_sync_bytes_total", ""] == 1024
    assert found["titan_grpo_dropped_total", "stale"] == 2
    assert ("titan_grpo_loss_total", "") not in found, "null: it has no value"


@pytest.mark.parametrize("path", ["docker/grafana.json"])
def test_the_dashboard_asks_for_metrics_that_exist(root, path) -> None:
    values = dict.fromkeys(names.MEANING, 1.0) | {"step": 1.0, names.dropped("stale"): 1.0}
    values |= {names.of_server("http://a:1", what): 1.0 for what in names.OF_SERVER}
    values |= {f"{names.EVALUATION}/test/{what}": 1.0 for what in names.OF_EVALUATION}
    known = {name for name, _ in samples(prometheus.page(values))}
    dashboard = json.loads((root / path).read_text())
    asked = [t["expr"] for panel in dashboard["panels"] for t in panel["targets"]]
    asked += [each["query"] for each in dashboard["templating"]["list"]]
    used = {name for text in asked for name in re.findall(r"titan_grpo_\w+", text)}
    assert len(used) > 30
    assert used - known == set()
