"""Thresholds of [alerts] in a real run on a real vLLM."""

import sys

import pytest

from titan_grpo.observe.recorder import read_metrics

pytestmark = [pytest.mark.e2e, pytest.mark.long, pytest.mark.timeout(400)]


def test_a_run_that_an_alert_stops_saves_its_state_and_goes_on_from_it(runs, site, tmp_path):
    out, told = tmp_path / "out", tmp_path / "told"
    script = tmp_path / "tell.py"
    script.write_text(f"import sys\nopen({str(told)!r}, 'a').write(sys.argv[1] + '\\n')\n")
    size = ["--training.steps=8", "--rollout.prompts_per_step=2", "--rollout.group_size=2"]
    alerts = [
        "--alerts.run=version >= 1",
        f"--alerts.command={sys.executable} {script}",
        "--alerts.stop=reward/mean >= 0 for 4",
    ]
    with runs.start(out, [site.url], *size, *alerts, nproc=2) as training:
        assert training.finish() != 0, training.log
        assert "alerts.stop reward/mean >= 0 for 4" in training.cause
    assert [row["step"] for row in read_metrics(out / "metrics.jsonl")] == [1, 2, 3, 4]
    assert (out / "checkpoint" / "step-4" / ".metadata").is_file()
    errors = runs.summary(out)["errors"]
    assert [text.partition(" (")[0] for text in errors] == [
        "alert at step 2: version >= 1",
        "alert at step 4: reward/mean >= 0 for 4",
    ]
    assert told.read_text().startswith("step 2: version >= 1")

    summary = runs.complete(out, [site.url], *size, nproc=2)
    assert (summary["steps"], summary["resumes"]) == (8, [5])
