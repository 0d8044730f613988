"""Thresholds on metrics: how they are read, when they are crossed, and the check from outside."""

import math
import os
import shutil
from pathlib import Path

import pytest

from titan_grpo.commands import watch
from titan_grpo.config import Alerts
from titan_grpo.errors import ConfigError
from titan_grpo.observe import alerts, names
from titan_grpo.observe.alerts import Threshold, rules, step, watched
from titan_grpo.observe.recorder import Recorder
from titan_grpo.observe.report import write_report
from titan_grpo.observe.run_lock import held


def crossings(text: str, values: list[float | None]) -> list[int]:
    """At which of the steps a threshold on the KL is given."""
    state: tuple[Threshold, ...] = (Threshold.parse(text, "key"),)
    found: list[int] = []
    for number, value in enumerate(values):
        state, crossed = step(state, {} if value is None else {names.KL: value})
        found += [number] * len(crossed)
    return found


def test_a_threshold_is_given_when_it_is_crossed_and_again_after_it_ceased_to_hold() -> None:
    assert crossings("loss/kl > 1", [0, 2, 2, 1, 2]) == [1, 4]
    assert crossings("loss/kl >= 1 for 2", [1, 1, 1, 0, 1, 1]) == [1, 5]
    assert crossings("loss/kl < 1", [0.5, 1.0, 0.5]) == [0, 2]
    assert crossings("loss/kl <= 1", [1.0, 1.0]) == [0]
    assert crossings("loss/kl > 1 for 2", [2, None, 2, None, 2]) == [2], "None changes nothing"


@pytest.mark.parametrize("sign", alerts.OPERATORS)
def test_a_value_that_is_not_finite_holds_whatever_the_operator(sign: str) -> None:
    """Before, nan changed nothing in a run, and held in a check of the same run."""
    held = Threshold.parse(f"optim/grad_norm {sign} 100 for 2", "alerts.warn")
    for count, value in enumerate((math.nan, math.inf, -math.inf), 1):
        held = held.after({"optim/grad_norm": value})
        assert held.held == count


def test_every_run_is_told_of_a_gap_on_the_same_weights_with_its_likely_cause() -> None:
    values = {names.ON_POLICY_GAP: 0.06, names.gap("position", 16): 0.01}
    values[names.gap("position", 1024)] = 0.3
    state: tuple[Threshold, ...] = (alerts.GAP,)
    crossed: tuple[Threshold, ...] = ()
    for _ in range(3):
        assert crossed == ()
        state, crossed = step(state, values)
    (said,) = (alerts.line_of(each, values, {}) for each in crossed)
    assert said.startswith("logprob_gap/on_policy_mean >= 0.05 for 3 (0.06): it grows along the")
    assert "RoPE scaling" in said


GROWS = {names.gap("position", 16): 0.01, names.gap("position", 1024): 0.3}
LEARNT = {names.gap("lag", 0): 0.004, names.gap("lag", 1): 0.2}
UNLIKELY = {names.gap("probability", 0.01): 0.3, names.gap("probability", math.inf): 0.01}
NONE_FRESH = {names.gap("lag", 1): 0.2}
FP8 = {"http://a": "fp8", "http://b": ""}

FACTS: dict[str, tuple[dict[str, float], dict[str, str], str]] = {
    "a quantised server": (GROWS, FP8, "(http://a with fp8)"),
    "older versions before it": (LEARNT, FP8, "what the policy learnt since"),
    "a quantised server, and no token of the trainer's version": (NONE_FRESH, FP8, "with fp8"),
    "no token of the trainer's version": (NONE_FRESH, {}, "may be what the policy learnt since"),
    "unlikely tokens": (UNLIKELY, {}, "mostly at tokens that the engine finds unlikely"),
    "no part": ({names.gap("position", 16): 0.2}, {}, "everywhere alike"),
    "kept KV": (GROWS | {names.KEPT_KV: 0.125}, {}, "12 % of the completions ran over a commit"),
}


@pytest.mark.parametrize("which", FACTS)
def test_a_cause_that_the_run_has_seen_is_named_with_its_figures(which: str) -> None:
    last, quantised, words = FACTS[which]
    assert words in alerts.likely_cause(last, quantised)


@pytest.mark.parametrize("last", [GROWS, GROWS | {names.KEPT_KV: 0.0}, {}])
def test_no_kv_and_no_quantisation_are_blamed_that_the_run_has_not(last: dict[str, float]) -> None:
    cause = alerts.likely_cause(last, {"http://b": ""})
    assert not any(word in cause for word in ("quantis", "kv_after_update"))


@pytest.mark.parametrize(
    "text",
    [
        "loss/kl",
        "loss/kl > x",
        "loss/kl > nan",
        "loss/kl > inf",
        "loss/kl == 1",
        "loss/kl > 1 for 0",
        "loss/kl > 1 for " + "1" * 5000,
    ],
    ids=lambda text: text[:20],
)
def test_a_threshold_that_cannot_be_read_names_its_key_and_the_form(text: str) -> None:
    with pytest.raises(ConfigError, match=r"alerts\.warn must be like .* got") as failed:
        watched(Alerts(warn=[text]))
    assert repr(text)[:200] in str(failed.value)


def test_an_unknown_metric_is_refused_and_those_of_servers_and_evaluations_are_known() -> None:
    with pytest.raises(
        ConfigError, match=r"alerts\.stop .*titan-grpo config --metrics .*'reward/meen'"
    ):
        watched(Alerts(stop=["reward/meen < 1"]))
    for name in (
        *("server/a:8000/lag", "evaluation/test/reward", "evaluation/test/pass_at_4_low"),
        *("dropped/stale", "dropped/completion_bad_reward", "logprob_gap/position/more"),
    ):
        watched(Alerts(stop=[f"{name} < 1"]))


@pytest.mark.parametrize(
    "name",
    [
        *("dropped/stael", "logprob_gap/foo/bar", "logprob_gap/position/77"),
        *("evaluation/test/rewrad", "evaluation/test/pass_at_x", "server/lag"),
    ],
)
def test_a_name_that_no_step_will_have_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=r"alerts\.run must name a metric") as failed:
        watched(Alerts(run=[f"{name} > 1"], command="mail me"))
    assert repr(name) in str(failed.value)


def test_each_threshold_has_the_action_of_its_key() -> None:
    found = watched(Alerts(warn=["loss/kl > 1"], run=["loss/kl > 2"], stop=["loss/kl > 3"]))
    assert [(each.action, each.bound) for each in found] == [
        ("warn", 1),
        ("run", 2),
        ("stop", 3),
    ]


@pytest.mark.parametrize(
    ("section", "rule"),
    [
        (Alerts(warn=["loss/kl"]), "alerts.warn must be like"),
        (Alerts(run=["loss/kl > 1"]), "alerts.command must be set where alerts.run is"),
        (Alerts(command="mail me"), "alerts.command must be set where alerts.run is"),
        (Alerts(run=["loss/kl > 1"], command="mail 'me"), "alerts.command must be words"),
        (Alerts(command_timeout_s=-1.0), "alerts.command_timeout_s must be greater"),
    ],
)
def test_a_mistake_in_the_section_is_one_line(section: Alerts, rule: str) -> None:
    (found,) = rules(section)
    assert rule in found
    assert list(rules(Alerts(run=["loss/kl > 1"], command="mail 'm e'"))) == []


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ended")
    recorder = Recorder(folder)
    for number in (1, 2, 3):
        recorder.step(number, {names.KL: float(number), names.REWARD: 0.5})
    write_report(recorder, "run", "async")
    return folder


@pytest.fixture
def run(ended: Path, tmp_path: Path) -> Path:
    """A run of three steps whose KL rises, by a process that has ended."""
    return shutil.copytree(ended, tmp_path, dirs_exist_ok=True)


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["--alert", "loss/kl > 2.5"], 3),
        (["--alert", "loss/kl > 1.5 for 2"], 3),
        (["--alert", "loss/kl > 1.5 for 3"], 0),
        (["--alert", "loss/kl < 2", "--alert", "reward/mean < 0.5"], 0),
        (["--stalled", "60"], 0),
    ],
)
def test_a_check_from_outside_has_an_exit_code_for_a_scheduler(
    run: Path, arguments: list[str], code: int
) -> None:
    assert watch.run([str(run), "--check", *arguments], {}) == code


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_a_check_finds_a_value_that_is_not_finite(
    run: Path, value: float, capsys: pytest.CaptureFixture[str]
) -> None:
    recorder = Recorder(run)
    recorder.step(4, {names.KL: value, names.REWARD: 0.5})
    write_report(recorder, "run", "async")
    arguments = [f"--alert={names.KL} > 2 for 2", f"--alert={names.KL} > 0 for 5"]
    assert watch.run([str(run), "--check", *arguments], {}) == 3
    assert capsys.readouterr().out == "step 4: loss/kl > 2 for 2 (nan)\n"


def test_a_check_takes_the_thresholds_of_a_job(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = tmp_path / "job.toml"
    job.write_text('[alerts]\nwarn = ["loss/kl > 10"]\nstop = ["loss/kl >= 3"]\n')
    assert watch.run([str(run), "--check", "--config", str(job)], {}) == 3
    assert capsys.readouterr().out == "step 3: loss/kl >= 3 (3)\n"


def age(folder: Path) -> None:
    """Make all files of a folder a thousand seconds older, and equally old."""
    old = (folder / "metrics.jsonl").stat().st_mtime - 1000
    for path in folder.iterdir():
        os.utime(path, (old, old))


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ('[alerts]\nwarn = "loss/kl > 3"', r"alerts\.warn must be a list, .*'loss/kl > 3'"),
        ('[alerts]\nwarm = ["loss/kl > 3"]', r"alerts\.warm is not a key .* alerts\.warn\?"),
        ("alerts = 3", "alerts must be a table, got 3"),
    ],
)
def test_a_mistake_in_a_jobs_thresholds_is_named_as_the_run_names_it(
    text: str, rule: str, run: Path, tmp_path: Path
) -> None:
    job = tmp_path / "job.toml"
    job.write_text(text)
    with pytest.raises(ConfigError, match=rule):
        watch.run([str(run), "--check", "--config", str(job)], {})


def test_a_run_that_stands_still_is_found_and_one_that_has_ended_does_not(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    age(run)
    assert watch.run([str(run), "--check", "--stalled", "60"], {}) == 0
    (run / "summary.json").unlink()
    assert watch.run([str(run), "--check", "--stalled", "60"], {}) == 4
    assert "no step after step 3 for 10" in capsys.readouterr().out


def test_a_run_that_was_just_resumed_does_not_stand_still(run: Path) -> None:
    age(run)
    with held(run):
        assert watch.run([str(run), "--check", "--stalled", "60"], {}) == 0
        for path in run.iterdir():
            os.utime(path, (0, 0))
        assert watch.run([str(run), "--check", "--stalled", "60"], {}) == 4


def test_a_check_needs_something_to_look_for_and_a_step_to_look_at(
    run: Path, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match="RUN must be the folder of a run"):
        watch.run([str(run / "metrics.jsonl"), "--check", "--stalled", "60"], {})
    with pytest.raises(ConfigError, match="--check needs"):
        watch.run([str(run), "--check"], {})
    with pytest.raises(ConfigError, match="need --check"):
        watch.run([str(run), "--alert", "loss/kl > 1"], {})
    assert watch.run([str(tmp_path / "none"), "--check", "--alert", "loss/kl > 1"], {}) == 1


def test_the_thresholds_that_hold_are_those_of_the_last_step() -> None:
    texts = "loss/kl > 1", "reward/mean < 1 for 2", "reward/mean < 1 for 4"
    thresholds = [Threshold.parse(text, "k") for text in texts]
    rows = [{names.REWARD: 0.25}, {names.KL: 2.0, names.REWARD: 0.5}, {names.KL: 0.5}]
    (held,) = alerts.over(thresholds, reversed(rows))
    assert str(held) == "reward/mean < 1 for 2 (0.5)"


def test_a_check_reads_of_a_long_run_only_the_steps_that_it_needs(tmp_path: Path) -> None:
    """All of it was gigabytes, at every call of a scheduler."""
    path, filler = tmp_path / "metrics.jsonl", "1" * 200
    # A resumed run made the last ten steps again.
    steps = [*range(1, 50_001), *range(49_991, 50_001)]
    path.write_text(
        "".join(
            f'{{"step": {step}, "{names.KL}": {int(step > 49_996)}, "x": 0.{filler}}}\n'
            for step in steps
        )
    )

    def check(times: int) -> int:
        return watch.run([str(tmp_path), "--check", f"--alert={names.KL} > 0 for {times}"], {})

    assert check(4) == 3
    before = _read_bytes()
    assert check(5) == 0
    assert _read_bytes() - before < path.stat().st_size / 5


def _read_bytes() -> int:
    """Bytes that this process has read so far."""
    return int(Path("/proc/self/io").read_text().split()[1])
