"""Each rule says its sentence when its figure is past the bound, and is silent otherwise."""

import math
from pathlib import Path
from typing import Any

import pytest

from tests.views.runs import Made, make_run
from titan_grpo.observe import names
from titan_grpo.observe.recorder import Recorder
from titan_grpo.observe.report import write_report
from titan_grpo.views import findings as rules
from titan_grpo.views.findings import Facts, Step, facts_of, findings, percent
from titan_grpo.views.run import read_run
from titan_grpo.views.timeline import ServerFigures


def server(port: int = 1, **figures: Any) -> ServerFigures:
    usual: dict[str, Any] = {
        "commits": 10,
        "reconnects": 0,
        "send_median_s": 0.4,
        "send_s": 4.0,
        "drain_s": 0.0,
        "pause_median_s": 0.1,
        "pause_s": 1.0,
        "served_s": 100.0,
        "lag": 0.5,
        "faults": 0,
    }
    return ServerFigures(f"http://host:{port}", **(usual | figures))


def facts(**given: Any) -> Facts:
    usual: dict[str, Any] = {
        "steps": 10,
        "step_s": 100.0,
        "waited_s": 5.0,
        "blocked_s": 0.1,
        "median_step_s": 10.0,
        "longest": Step(4, 12.0, 1.0, 0.01),
        "servers": (server(1), server(2)),
    }
    return Facts(**(usual | given))


def steps(reward_first: float, reward_last: float) -> dict[str, Any]:
    return {
        "first": {names.REWARD: reward_first, names.REWARD_STD: 0.2},
        "last": {names.REWARD: reward_last},
    }


FIRING = {
    "waiting_for_rollouts": (
        facts(waited_s=68.0),
        "bad",
        "the trainer waited 68 s of 1 min 40 s for rollouts (68 %)",
    ),
    "blocked_by_sync": (facts(blocked_s=5.0), "bad", "held the trainer up for 5 s (5 %)"),
    "slow_step": (
        facts(longest=Step(412, 90.0, 80.0, 1.0)),
        "note",
        "step 412 took 90 s, the median is 10 s: 80 s of it were waiting for rollouts",
    ),
    "slow_transfers": (
        facts(servers=(server(1), server(2, send_median_s=1.2, lag=2.0))),
        "bad",
        "host:2's transfers take 3 times as long as the others' (1.2 s against 400 ms):"
        " it is 2.0 versions behind on average",
    ),
    "far_behind": (
        facts(servers=(server(1), server(2, lag=3.0))),
        "note",
        "host:2 was 3.0 versions behind",
    ),
    "often_paused": (
        facts(waited_s=40.0, servers=(server(1, pause_s=20.0),)),
        "bad",
        "host:1 stood still for 20 s of 1 min 40 s (20 %) to load 10 versions, 100 ms each",
    ),
    "held_by_evaluations": (
        facts(servers=(server(1, held_s=10.0, waited_meanwhile_s=4.0), server(2))),
        "bad",
        "evaluations held host:1 on its versions for 10 s (10 % of its time); the trainer waited"
        " 4 s for rollouts meanwhile: with servers of its own",
    ),
    "drains": (facts(servers=(server(1, drain_s=3.0),)), "note", "commits waited 3 s for requests"),
    "never_served": (
        facts(servers=(server(1, commits=0),)),
        "bad",
        "host:1 never held a version, so it generated nothing: unless it has just joined,",
    ),
    "faults": (
        facts(servers=(server(1, faults=4, reconnects=3),)),
        "bad",
        "host:1 had 4 faults, and its lane had to connect again 3 times",
    ),
    "wrong_bytes": (facts(digest_mismatches=2), "bad", "2 transfers or loads of a version"),
    "skipped_versions": (facts(skipped_versions=7), "note", "7 versions were not published"),
    "dropped_groups": (facts(dropped={"stale": 6, "x": 0}), "note", "not trained on: 6 stale"),
    "reward_trend": (facts(**steps(0.8, 0.3)), "bad", "the reward fell: 0.8 in the first fifth"),
    "equal_rewards": (
        facts(last={names.REWARD: 0.0, names.REWARD_STD: 0.0}),
        "bad",
        "all rewards were 0 in the last fifth of the steps, and equal rewards teach nothing",
    ),
    "engine_differs": (
        facts(last={names.ON_POLICY_GAP: 0.3}),
        "bad",
        "differ by 0.3 nats per token on the same weights",
    ),
    "much_is_cut": (
        facts(last={names.CLIP_FRACTION: 0.5}),
        "bad",
        "clipping took the gradient of 50 % of the tokens",
    ),
    "ended_early": (
        facts(ended_by="RunStopped: no rows"),
        "bad",
        "the run did not come to its end: RunStopped: no rows",
    ),
    "errors": (facts(errors=("a", "b")), "bad", "2 errors did not stop the run; first: a"),
}
"""Facts past the bound of a rule, the level, what the sentence has."""


@pytest.mark.parametrize("name", FIRING)
def test_a_rule_says_what_is_past_its_bound(name: str) -> None:
    given, level, text = FIRING[name]
    assert [f.level for f in findings(given) if text in f.text] == [level]


def test_an_asynchronous_run_is_not_told_to_become_asynchronous() -> None:
    (found,) = rules.blocked_by_sync(facts(blocked_s=5.0, asynchronous=True))
    assert found.level == "note"
    assert "held the trainer up for 5 s (5 %): grpo.async_weight_update is on, so" in found.text


@pytest.mark.parametrize("finished", [False, True], ids=["goes on", "has ended"])
def test_faults_and_dropped_groups_are_known_of_a_run_at_any_time_and_without_its_trace(
    tmp_path: Path, finished: bool
) -> None:
    recorder = Recorder(tmp_path)
    recorder.count(names.DIGEST_MISMATCHES, 2)
    recorder.count(names.dropped("stale"), 3)
    recorder.count(names.dropped("no_spread"), 0)
    recorder.count(names.SKIPPED_VERSIONS, 4)
    recorder.error("a lane failed")
    recorder.step(1, recorder.since_last())
    if finished:
        write_report(recorder, "run", "async")
    else:
        recorder.close()
    recorder.trace_path.unlink()
    found = facts_of(read_run(tmp_path))
    assert (found.digest_mismatches, found.dropped) == (2, {"stale": 3, "no_spread": 0})
    assert (found.skipped_versions, found.errors) == (4, ("a lane failed",))
    assert found.asynchronous == finished


def test_a_sound_run_has_no_complaint_and_one_without_a_step_no_finding() -> None:
    sound = facts(**steps(0.3, 0.5), dropped={"no_spread": 0})
    assert {f.level for f in findings(sound)} == {"good"}
    assert findings(Facts()) == []


def test_a_slow_server_is_named_once() -> None:
    found = findings(facts(servers=(server(1), server(2, send_median_s=1.2, lag=3.0))))
    assert sum("host:2" in f.text for f in found) == 1


@pytest.mark.parametrize(("lag", "level"), [(0.2, "note"), (2.0, "bad")])
def test_slow_transfers_are_bad_only_where_the_server_falls_behind(lag: float, level: str) -> None:
    run = facts(servers=(server(1), server(2, send_median_s=1.2, lag=lag)))
    assert [f.level for f in findings(run) if "transfers take" in f.text] == [level]


@pytest.mark.parametrize(
    ("waited_s", "served_s"),
    [(5.0, 100.0), (40.0, 5.0)],
    ids=["the trainer hardly waits", "a trial of seconds"],
)
def test_pauses_that_do_no_harm_are_a_note(waited_s: float, served_s: float) -> None:
    paused = server(1, pause_s=0.2 * served_s, served_s=served_s)
    run = facts(waited_s=waited_s, servers=(paused,))
    assert [f.level for f in findings(run) if "stood still" in f.text] == ["note"]


def test_a_run_whose_servers_are_idle_is_not_only_told_to_add_some() -> None:
    (found,) = rules.waiting_for_rollouts(facts(waited_s=68.0))
    assert "add servers if these are busy, else speed up what asks them" in found.text


def test_a_run_that_may_be_asynchronous_already_is_told_with_an_if() -> None:
    (found,) = rules.blocked_by_sync(facts(blocked_s=5.0))
    assert "if grpo.async_weight_update is off, turn it on" in found.text


def test_the_cut_of_topr_is_not_laid_to_old_data_alone() -> None:
    (found,) = rules.much_is_cut(facts(last={names.IMPORTANCE_CUT: 0.5}))
    assert 'With grpo.policy_loss = "topr" rounding alone does it' in found.text


def test_the_servers_of_a_run_without_its_trace_have_held_versions(tmp_path: Path) -> None:
    make_run(tmp_path, Made(steps=3))
    (tmp_path / "trace.json").unlink()
    found = facts_of(read_run(tmp_path))
    assert [s.commits for s in found.servers] == [4, 4]
    assert not any("never held" in f.text for f in findings(found))


def test_the_first_connection_of_a_resumed_run_is_none_again(tmp_path: Path) -> None:
    for first in (1, 21):
        make_run(tmp_path, Made(first_step=first, faulty_server=1))
    said = [f.text for f in findings(facts_of(read_run(tmp_path)))]
    assert "10.0.0.1:8000 had 4 faults" in said


@pytest.mark.parametrize(
    ("held_s", "meanwhile_s", "level"),
    [(10.0, 5.0, "note"), (50.0, 20.0, "note"), (50.0, 38.0, "bad")],
)
def test_only_waits_that_are_longer_than_at_other_times_are_laid_to_an_evaluation(
    held_s: float, meanwhile_s: float, level: str
) -> None:
    """The trainer waited 40 s of 100 s."""
    held = server(1, held_s=held_s, waited_meanwhile_s=meanwhile_s)
    run = facts(waited_s=40.0, servers=(held,))
    assert [f.level for f in findings(run) if "evaluations held" in f.text] == [level]


@pytest.mark.parametrize(("last", "level"), [(0.5, "good"), (0.31, "note"), (0.1, "bad")])
def test_a_reward_rises_falls_or_stays_against_its_spread(last: float, level: str) -> None:
    assert [f.level for f in rules.reward_trend(facts(**steps(0.3, last)))] == [level]


def test_single_steps_are_no_trend() -> None:
    assert list(rules.reward_trend(facts(steps=9, **steps(0.3, 0.1)))) == []
    gaps = {"first": {names.LOGPROB_GAP: 0.02}, "last": {names.LOGPROB_GAP: 0.05}}
    assert list(rules.engine_differs(facts(**gaps))) != []
    assert list(rules.engine_differs(facts(steps=9, **gaps))) == []


def test_what_is_bad_comes_first() -> None:
    levels = [f.level for f in findings(facts(digest_mismatches=1, skipped_versions=1))]
    assert levels == ["bad", "note", "good", "good"]


def test_one_of_a_kind_is_not_many() -> None:
    one = server(1, faults=1, commits=1, pause_s=20.0)
    said = "; ".join(
        f.text for f in findings(facts(servers=(one,), errors=("a",), skipped_versions=1))
    )
    for text in ("1 error did", "1 fault;", "1 version was not published", "load 1 version,"):
        assert text in said


def test_shares_read_well() -> None:
    assert [percent(x) for x in (0.1234, 0.0012, 1.0, 0.0)] == ["12 %", "0.12 %", "100 %", "0 %"]


def test_a_gap_that_grew_or_is_there_from_the_start_is_named_with_its_likely_cause() -> None:
    rare = {names.gap("probability", 0.01): 0.3, names.gap("probability", math.inf): 0.002}
    run = facts(first={names.LOGPROB_GAP: 0.01}, last={names.LOGPROB_GAP: 0.04, **rare})
    (found,) = rules.engine_differs(run)
    assert "grew from 0.01 to 0.04 nats" in found.text
    assert "grpo.fp32_lm_head" in found.text
    given = {names.ON_POLICY_GAP: 0.3}
    (found,) = rules.engine_differs(facts(last=given, quantised={"http://host:1": "fp8"}))
    assert "http://host:1 with fp8" in found.text


def test_older_tokens_may_differ_more_than_the_fresh_ones_of_the_first_step() -> None:
    """Before, nearly each run of a few steps was told that its gap grew."""
    gaps = {names.LOGPROB_GAP: 0.001}, {names.LOGPROB_GAP: 0.13}
    for before, found in ((0.0, 0), (0.5, 0), (0.9, 1)):
        first, last = (
            {**g, names.STALENESS_TOKENS: a} for g, a in zip(gaps, (before, 1.0), strict=True)
        )
        assert len(list(rules.engine_differs(facts(first=first, last=last)))) == found


def test_a_gap_of_arithmetic_may_grow() -> None:
    run = facts(first={names.LOGPROB_GAP: 0.002}, last={names.LOGPROB_GAP: 0.009})
    assert list(rules.engine_differs(run)) == []
