"""What the page holds."""

import json
import os
import re
from pathlib import Path

import pytest

from tests.rigs.present import present
from tests.views.runs import Clock, Made, make_run, url_of
from titan_grpo.commands import report
from titan_grpo.errors import ConfigError
from titan_grpo.observe import names
from titan_grpo.observe.recorder import Recorder
from titan_grpo.observe.report import duration, write_report
from titan_grpo.observe.run_lock import held
from titan_grpo.views import page
from titan_grpo.views.page import decoder
from titan_grpo.views.run import read_run

numbers = decoder([])


def test_a_page_has_the_runs_curves_findings_waits_and_timeline(tmp_path: Path) -> None:
    make_run(tmp_path, Made(steps=20, servers=3, slow_server=1))
    data = page.page_data(read_run(tmp_path), numbers)
    assert data["steps"] == list(range(1, 21))
    assert [chart["title"] for chart in data["charts"]] == [chart.title for chart in page.CHARTS]
    assert "low" not in data["charts"][0]["curves"][0], "each step has its own point"
    assert len(data["charts"][0]["curves"][0]["spread"]) == 20
    texts = [text for _, text in data["findings"]]
    assert any(text.startswith("10.0.0.1:8000's transfers take 5 times as long") for text in texts)
    assert [row["name"] for row in data["timeline"]["rows"]][:2] == ["trainer", "10.0.0.0:8000"]
    assert data["tiles"][3:6] == [["reward", "0.21 → 0.75"], ["servers", "3"], ["commits", "53"]]
    trainer, _, paused, sent, *_ = data["waits"]
    assert (trainer[:2], trainer[3]) == (["trainer", "rollouts"], pytest.approx(0.1))
    # 20 commits of 30 ms each, after the first.
    loading = ["10.0.0.0:8000", "loading a version (generation stands still)", 0.6]
    assert paused[:3] == loading
    assert sent[:2] == ["versions for 10.0.0.0:8000", "their transfer (generation goes on)"]


def test_the_pages_reward_and_median_step_are_those_of_the_summary(tmp_path: Path) -> None:
    """Before, a run of more than 29 steps had other rewards (means over more steps), and the median
    left out each process's first step."""
    make_run(tmp_path, Made(steps=60))
    run = read_run(tmp_path)
    assert run.summary is not None
    shown = f"{run.summary.reward_first:.3g} → {run.summary.reward_last:.3g}"
    tiles = page.page_data(run, numbers)["tiles"]
    assert ["reward", shown] in tiles
    assert run.summary.step_s.median is not None
    assert ["median step", duration(run.summary.step_s.median)] in tiles


def test_the_median_step_is_of_all_steps(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path)
    for step, seconds in enumerate((9.0, 2.0, 4.0, 1.0), 1):
        recorder.step(step, {names.STEP_S: seconds})
    recorder.close()
    assert ["median step", "3 s"] in page.page_data(read_run(tmp_path), numbers)["tiles"]


def test_what_commits_and_versions_of_a_server_waited_for_is_listed_if_there_was_any(
    tmp_path: Path,
) -> None:
    recorder = Recorder(tmp_path)
    recorder.step(1, {names.REWARD: 0.5})
    for name, stop in (
        (names.SEND_S, 1.0),
        (names.DRAIN_S, 0.5),
        (names.PAUSE_S, 0.25),
        (names.HELD_S, 2.0),
    ):
        recorder.record_span(name, 0.0, stop, "http://a:1", version=1)
    recorder.close()
    assert page.page_data(read_run(tmp_path), numbers)["waits"] == [
        ["a:1", "loading a version (generation stands still)", 0.25, 0.0],
        ["commits of a:1", "its requests to finish", 0.5, 0.0],
        ["versions for a:1", "their transfer (generation goes on)", 1.0, 0.0],
        ["versions for a:1", "evaluations there (generation goes on)", 2.0, 0.0],
    ], "it held no version: no share of its time"


def test_every_metric_of_a_run_is_on_the_page(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path)
    recorder.step(1, {names.REWARD: 0.5, "of/tomorrow": 1.0, names.GRAD_NORM: 2.0})
    recorder.close()
    data = page.page_data(read_run(tmp_path), numbers)
    assert [chart["title"] for chart in data["others"]] == ["of/tomorrow", names.GRAD_NORM]


def test_a_long_run_has_bands_from_the_least_to_the_largest_value(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path)
    for step in range(1, 2001):
        recorder.step(step, {names.REWARD: 7.0 if step == 1234 else 0.5})
    recorder.close()
    (curve,) = page.page_data(read_run(tmp_path), numbers)["charts"][0]["curves"]
    assert len(curve["mean"]) == page.BUCKETS
    assert max(curve["high"]) == 7.0
    assert max(curve["mean"]) == 1.8
    assert min(curve["low"]) == 0.5


def test_a_text_of_the_run_cannot_end_the_data_or_become_markup(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path)
    evil = "</script><script>alert(1)</script><!-- {{data}}"
    recorder.error(evil)
    recorder.close()
    text = page.render(read_run(tmp_path), numbers)
    assert text.count("</script>") == page.TEMPLATE.read_text().count("</script>")
    body = present(re.search(r'id="data">(.*)</script>\n<script>', text)).group(1)
    assert evil in json.loads(body)["findings"][0][1]


def test_the_command_writes_one_file_that_asks_for_nothing_else(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_run(tmp_path, Made(steps=3))
    assert report.run([str(tmp_path)], {}) == 0
    text = (tmp_path / "report.html").read_text()
    assert str(tmp_path / "report.html") in capsys.readouterr().out
    assert (
        re.findall(r"""(?:src|href)=["'](?!data:)|https?://(?!10\.0)|@import|url\(""", text) == []
    )
    assert report.run([str(tmp_path), "--out", str(tmp_path / "other.html")], {}) == 0
    assert (tmp_path / "other.html").read_text() == text


def test_a_tokenizer_that_is_named_and_not_there_is_refused(tmp_path: Path) -> None:
    make_run(tmp_path, Made(steps=3))
    with pytest.raises(ConfigError, match=r"--tokenizer must be a folder with a tokenizer\.json"):
        report.run([str(tmp_path), "--tokenizer", str(tmp_path)], {})
    assert not (tmp_path / "report.html").exists()


def test_clocks_of_runs_start_anywhere(tmp_path: Path) -> None:
    make_run(tmp_path / "a", Made(steps=3), Clock(5.0))
    make_run(tmp_path / "b", Made(steps=3), Clock(1e7))
    a, b = (page.page_data(read_run(tmp_path / name), numbers) for name in "ab")
    assert a["timeline"]["exact"] == b["timeline"]["exact"]
    assert url_of(0).endswith(a["timeline"]["rows"][1]["name"])


def with_evaluations(folder: Path, *found: tuple[int, float, float | None]) -> Recorder:
    """A run of 11 steps, and evaluations: (version, reward, lower end of its interval)."""
    common = {"name": "test", "server": "http://a:1", "prompts": 4, "samples": 1, "passed": {}}
    common |= {"tokens": {"value": 5.0, "low": 4.0, "high": 6.0}, "refused": 0, "seconds": 1.0}
    recorder = Recorder(folder)
    for step in range(1, 12):
        recorder.step(step, {names.REWARD: 0.5, names.VERSION: step - 1})
    for version, reward, low in found:
        ends = {"low": low, "high": None if low is None else 1.0}
        recorder.evaluated(common | {"version": version, "reward": {"value": reward, **ends}})
    return recorder


@pytest.mark.parametrize("finished", [False, True], ids=["goes on", "has ended"])
def test_an_evaluation_has_a_chart_with_its_confidence_interval(
    tmp_path: Path, finished: bool
) -> None:
    # Version 0 again: a resumed run repeats what it has lost.
    found = ((0, 0.9, 0.0), (4, 0.6, 0.0), (0, 0.2, 0.0), (8, 0.4, None))
    recorder = with_evaluations(tmp_path, *found)
    if finished:
        write_report(recorder, "run", "async")
    else:
        recorder.close()
    chart = page.page_data(read_run(tmp_path), numbers)["charts"][-1]
    assert chart["title"] == "Evaluation: test"
    (curve,) = chart["curves"]
    assert curve["mean"][:6] == [0.2, 0.3, 0.4, 0.5, 0.6, 0.55], "placed at the version's step"
    assert (curve["mean"][8], curve["low"][8], curve["high"][8]) == (0.4, 0.4, 0.4)
    assert (curve["low"][0], curve["high"][4], curve["high"][9]) == (0, 1, None)


@pytest.mark.parametrize("versions", [(11,), (0, 11), (0, 10, 11)], ids=str)
def test_the_evaluation_of_a_runs_last_version_is_at_its_last_step(
    tmp_path: Path, versions: tuple[int, ...]
) -> None:
    with_evaluations(tmp_path, *((version, version / 11, 0.0) for version in versions)).close()
    (curve,) = page.page_data(read_run(tmp_path), numbers)["charts"][-1]["curves"]
    assert curve["mean"][-1] == 1.0


@pytest.mark.parametrize(
    ("made", "killed", "state"),
    [
        (Made(steps=2), False, "finished"),
        (Made(steps=2, ended_by="RunStopped: no rows"), False, "ended early"),
        (Made(steps=2, finished=False), True, "ended without a summary"),
        (Made(steps=0, finished=False), False, "not finished when this page was made"),
    ],
)
def test_the_page_says_how_far_the_run_is(
    tmp_path: Path, made: Made, killed: bool, state: str
) -> None:
    make_run(tmp_path, made)
    if killed:  # a lock that nobody holds
        with held(tmp_path):
            pass
    data = page.page_data(read_run(tmp_path), page.decoder([]))
    assert data["state"] == state
    said = [text for level, text in data["findings"] if "after step 2 without saying so" in text]
    assert bool(said) == killed


def test_a_run_that_is_resumed_has_not_ended_early_while_it_loads(tmp_path: Path) -> None:
    make_run(tmp_path, Made(steps=2, ended_by="SIGTERM"))
    for path in tmp_path.iterdir():
        os.utime(path, (1e9, 1e9))
    with held(tmp_path):
        assert page.page_data(read_run(tmp_path), numbers)["state"] == (
            "not finished when this page was made"
        )
    assert page.page_data(read_run(tmp_path), numbers)["state"] == "ended early"
