"""The explorer itself: what its command ends with, and bounds that the command's own run has not.

The run of scripts/test.sh finds nothing in the production tables, and every bug that is seeded into
them.
"""

import json
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tests.model_check import __main__ as command
from tests.model_check import server as srv
from tests.model_check import steps
from tests.model_check import trainer as trn
from tests.model_check.bugs import BUGS
from tests.model_check.hosts import explore_hosts
from tests.model_check.relay import BOUNDS
from tests.model_check.search import Bounds, Explorer
from tests.model_check.small import Bug, Result
from tests.model_check.tables import Tables
from titan_grpo.cli import guarded
from titan_grpo.protocol import lane as lanes
from titan_grpo.protocol.messages import Entry


def test_one_streaming_server_with_a_fault_at_every_step_breaks_no_rule() -> None:
    result = Explorer(Bounds(servers=1, versions=2, faults=1, streamed=True)).run()
    assert result.complete
    assert (result.violation, result.trace) == ("", [])
    assert result.states > 10_000


def test_trainers_whose_clocks_are_behind_take_over_and_the_ones_before_stay_refused() -> None:
    result = Explorer(Bounds(servers=1, versions=2, faults=1), Tables.with_clocks_behind()).run()
    assert (result.violation, result.trace, result.complete) == ("", [], True)
    assert result.states > 10_000


@pytest.mark.parametrize("streamed", [False, True], ids=["staged", "streamed"])
def test_two_faults_on_one_server_break_no_rule(streamed: bool) -> None:
    result = Explorer(Bounds(servers=1, versions=1, faults=2, streamed=streamed)).run()
    assert (result.violation, result.trace, result.complete) == ("", [], True)
    assert result.states > 20_000


def test_two_trainer_hosts_offer_and_stage_whole_versions_and_cost_each_other_one_at_most() -> None:
    result = explore_hosts(versions=4, faults=2)
    assert (result.violation, result.trace) == ("", [])
    assert result.states > 20_000


def test_there_is_a_seeded_bug_for_each_rule_of_the_protocol() -> None:
    broken = {bug.breaks.partition(":")[0] for bug in BUGS}
    assert {f"rule {n}" for n in range(1, 9)} <= broken


def test_the_order_of_servers_and_ranks_makes_no_other_states() -> None:
    one, two = (Explorer(Bounds(ranks=r, servers=1, versions=2, faults=0)).run() for r in (2, 3))
    assert one.states < two.states < 3 * one.states


def test_the_command_ends_with_a_summary_of_states_and_seeded_bugs(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "ALL_BUGS", BUGS[:2])
    monkeypatch.setattr(command, "BOUNDS", BOUNDS[:1])
    path = tmp_path / "out.json"
    arguments = ["--servers", "1", "--versions", "2", "--faults", "0", "--json", str(path)]
    assert guarded(command.run, arguments, "explore") == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("explored all ")
    assert last.endswith("0 violations; seeded bugs caught: 2 of 2")
    report = json.loads(path.read_text())
    assert all(bug["caught"] and bug["trace"] for bug in report["bugs"])


@pytest.mark.parametrize(("broken", "missed"), [(1, 0), (0, 1)], ids=["a rule", "a seeded bug"])
def test_the_command_fails_if_a_rule_is_broken_or_a_seeded_bug_is_missed(
    broken: int, missed: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "ALL_BUGS", [Bug("planted", "rule 0", Result)] * missed)
    monkeypatch.setattr(command, "explore_hosts", lambda _: Result(violation="planted" * broken))
    monkeypatch.setattr(command, "BOUNDS", BOUNDS[:1])
    arguments = ["--servers", "1", "--versions", "2", "--faults", "0"]
    assert guarded(command.run, arguments, "explore") == 1
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.endswith(f"{broken} violations; seeded bugs caught: 0 of {missed}")


def test_an_exploration_that_ran_out_of_time_does_not_pass(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert guarded(command.run, ["--seconds", "0.01", "--no-bugs"], "explore") == 1
    assert "explored NOT all" in capsys.readouterr().out.splitlines()[-1]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--servers 0", "--servers must be from 1 to 4, got 0"),
        ("--json /none/of.json", "--json must be a file that can be written"),
    ],
)
def test_a_wrong_option_is_named_before_anything_is_explored(
    words: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert guarded(command.run, words.split(), "explore") == 2
    shown = capsys.readouterr()
    assert said in shown.err
    assert shown.out == ""


class LongRun(RuleBasedStateMachine):
    """Long random runs with any number of faults: three servers, three ranks, ten versions, no
    reduction of any kind."""

    versions, tables = 10, Tables()

    def __init__(self) -> None:
        super().__init__()
        self.side = trn.start(3, 2, self.tables)
        self.servers = [srv.Server(lane=lanes.Lane(streamed=i == 2)) for i in range(3)]
        self.newest: list[int | None] = [None] * 3

    @rule(index=st.integers(0, 2), choice=st.integers(0, 99), faulty=st.booleans())
    def server_moves(self, index: int, choice: int, faulty: bool) -> None:
        moves = [m for m in steps.moves(self.servers[index], self.tables) if faulty or not m.fault]
        if moves:
            move = moves[choice % len(moves)]
            if move.effect == "unpin":
                self.side = trn.unpin(self.side, str(index), self.tables)
            self.servers[index] = move.after

    @rule(index=st.integers(0, 2))
    def lane_pins(self, index: int) -> None:
        state = self.servers[index]
        if steps.wants_newer(state):
            self.side, version = trn.pin(self.side, str(index), state.lane.entry.held, self.tables)
            if version is not None:
                self.servers[index] = steps.pin(state, version, self.tables)

    @precondition(lambda self: bool(trn.moves(self.side, self.versions, self.tables)))
    @rule(choice=st.integers(0, 99))
    def trainer_moves(self, choice: int) -> None:
        moves = trn.moves(self.side, self.versions, self.tables)
        self.side = moves[choice % len(moves)].after

    @rule(late=st.lists(st.booleans(), min_size=3, max_size=3), chance=st.integers(0, 19))
    def trainer_is_replaced(self, late: list[bool], chance: int) -> None:
        if chance == 0:
            after = [steps.orphans(state, self.tables) for state in self.servers]
            self.servers = [
                choices[0 if wanted else -1] for choices, wanted in zip(after, late, strict=True)
            ]
            self.side = trn.start(3, 2, self.tables, max(0, self.side.trained - 1))
            self.newest = [None] * 3

    @invariant()
    def nothing_is_torn(self) -> None:
        trn.check(self.side)
        for state in self.servers:
            srv.check(state)

    @invariant()
    def what_the_ledger_says_never_goes_back_within_an_epoch_of_knowledge(self) -> None:
        for index, state in enumerate(self.servers):
            if state.lane.entry == Entry():
                self.newest[index] = None
            held = state.lane.entry.held
            if held is not None:
                newest = self.newest[index]
                assert newest is None or held >= newest
                self.newest[index] = held


TestLongRun = LongRun.TestCase
TestLongRun.settings = settings(max_examples=25, stateful_step_count=300, deadline=None)
