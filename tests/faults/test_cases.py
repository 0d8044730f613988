"""The fault matrix is complete: nothing is skipped without a word."""

import pytest

from tests.faults.__main__ import main
from tests.faults.cases import CALLS, Kind, Who, all_cases, entry, listing, product, reasons, select
from tests.faults.lanes import STRIKES
from tests.faults.runner import groups
from titan_grpo.cli import guarded
from titan_grpo.errors import ConfigError
from titan_grpo.protocol.lane import Point

ENGINES = tuple(CALLS)


@pytest.mark.parametrize("engine", ENGINES)
def test_every_combination_is_a_case_or_has_a_written_reason(engine: str) -> None:
    places = list(product())
    assert len(places) == len(set(places)) == len(Who) * len(Point) * len(Kind)
    for place in places:
        found = entry(place, engine)
        assert found, place
        if isinstance(found, str):
            assert len(found.split()) >= 5, f"{place}: a reason says why"
        else:
            assert all((case.who, case.point, case.kind) == place for case in found)


@pytest.mark.parametrize("engine", ENGINES)
def test_every_kind_and_every_who_strikes_somewhere_and_every_point_is_struck(engine: str) -> None:
    cases = all_cases(engine)
    assert {case.kind for case in cases} == set(Kind)
    # a server whose HTTP process outlives its engine is struck as a whole too
    assert {case.who for case in cases} == set(Who) - ({Who.SERVER} if engine == "vllm" else set())
    assert {case.point for case in cases} == set(Point)
    assert len(cases) + len(reasons(engine)) >= len(list(product()))


@pytest.mark.parametrize("engine", ENGINES)
def test_a_trainer_and_an_engine_can_die_freeze_and_be_replaced_at_every_point(engine: str) -> None:
    names = {case.name for case in all_cases(engine)}
    both = [f"{who}-{kind}" for who in ("trainer", "sync", "engine") for kind in ("kill", "freeze")]
    for what in (*both, "trainer-zombie", "engine-old", "engine-other", "engine-end"):
        assert {f"{what}@{point.value}" for point in Point} <= names


@pytest.mark.parametrize("engine", ENGINES)
def test_every_control_call_meets_every_fault_of_a_call(engine: str) -> None:
    struck = {
        (case.kind, case.point, case.call) for case in all_cases(engine) if case.who is Who.LINK
    }
    for kind in (Kind.RESET, Kind.ERROR, Kind.LOSE, Kind.SILENCE, Kind.TWICE, Kind.REFUSE):
        for point, calls in CALLS[engine].items():
            assert {(kind, point, call) for call in calls.values()} <= struck


@pytest.mark.parametrize("engine", ENGINES)
def test_every_case_has_a_name_of_its_own_and_somebody_who_performs_it(engine: str) -> None:
    cases = all_cases(engine)
    assert len({case.name for case in cases}) == len(cases)
    for name, group in groups(cases).items():
        if name not in ("trainer", "network"):
            assert all((case.who, case.kind) in STRIKES for case in group)
    assert sum(map(len, groups(cases).values())) == len(cases)


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("receiver-kill@staged", ["receiver-kill@staged"]),
        ("link-lose@load", ["link-lose@load:start", "link-lose@load:update"]),
        ("engine-late", ["engine-late@greet"]),
        ("link-rate@begin, receiver-kill@sent", ["receiver-kill@sent", "link-rate@begin"]),
        (
            "trainer-*@resumed",
            ["trainer-kill@resumed", "trainer-freeze@resumed", "trainer-zombie@resumed"],
        ),
    ],
)
def test_cases_are_selected_by_name_or_pattern_in_the_matrix_order(
    text: str, names: list[str]
) -> None:
    assert [case.name for case in select(text)] == names


def test_all_selects_the_whole_matrix() -> None:
    assert select("all") == all_cases()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("engine-fire", "must be all, a pattern or WHO-KIND@POINT"),
        ("receiver-kill@greet", "is no case: there is no receiver of an epoch before its hello"),
        (" , ", "got nothing"),
    ],
)
def test_a_name_that_selects_nothing_is_refused_with_the_reason(text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as refused:
        select(text)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("engine", ENGINES)
def test_the_listing_names_every_case_and_every_reason(engine: str) -> None:
    text = listing(all_cases(engine), engine)
    assert all(case.name in text for case in all_cases(engine))
    assert all(reason in text for reason in reasons(engine).values())


def test_a_whole_server_is_struck_only_where_its_parts_do_not_end_together() -> None:
    assert [case.name for case in select("server-kill@load", "sglang")] == ["server-kill@load"]
    with pytest.raises(ConfigError, match="vLLM's HTTP process ends with its engine"):
        select("server-kill@load", "vllm")


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["--faults", "link-lose@extent"], 2, "is no case: no control call is made"),
        (["--faults", "all", "--deadline", "0.1"], 2, "--deadline must be 1 second or more"),
        (["--faults", "all", "--deadline", "nan"], 2, "and finite, got nan"),
        (["--faults", "all", "--json", "/none/of.json"], 2, "--json must be a file"),
        (["--faults", "engine-freeze", "--list"], 0, "engine-freeze@load"),
    ],
)
def test_the_command_refuses_a_mistake_in_one_line_and_lists_without_running_anything(
    arguments: list[str], code: int, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert guarded(main, [*arguments, "--servers", "engineless"], "verify") == code
    said = capsys.readouterr()
    assert words in (said.err if code else said.out)
    assert len(said.err.strip().splitlines()) == (1 if code else 0)
