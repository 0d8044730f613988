import pytest
from hypothesis import given
from hypothesis import strategies as st

from titan_grpo.errors import ProtocolError
from titan_grpo.protocol import lease as T

TAKEN = T.step(T.Lease(10.0), T.Open("run5", "a", 0.0))[0]


def test_a_trainer_that_is_heard_of_keeps_the_service_and_a_silent_one_loses_it() -> None:
    heard, actions = T.step(TAKEN, T.Renewed("a", 8.0))
    assert (heard.due, actions) == (18.0, ())
    assert T.step(heard, T.Ticked(17.9)) == (heard, ())
    free, actions = T.step(heard, T.Ticked(18.0))
    assert (repr(free), actions) == ("<free>", (T.End("a"),))
    assert T.step(free, T.Renewed("a", 19.0)) == (free, (T.Unknown(),))
    assert T.step(free, T.Renewed("", 19.0)) == (free, (T.Unknown(),))


def test_a_newer_run_replaces_an_older_one_which_is_refused_until_the_newer_one_is_done() -> None:
    newer, actions = T.step(TAKEN, T.Open("run6", "b", 1.0))
    assert actions == (T.End("a"), T.Begin("b"))
    assert T.step(newer, T.Renewed("a", 2.0)) == (newer, (T.Unknown(),))
    assert T.step(newer, T.Close("a")) == (newer, (T.Unknown(),))
    assert T.step(newer, T.Open("run5", "c", 2.0)) == (newer, (T.Refuse("run6"),))
    free, actions = T.step(newer, T.Close("b"))
    assert actions == (T.End("b"),)
    assert T.step(free, T.Open("run5", "c", 3.0))[1] == (T.Begin("c"),)


def test_a_run_may_open_anew_and_a_session_needs_a_name_of_its_own() -> None:
    again, actions = T.step(TAKEN, T.Open("run5", "b", 1.0))
    assert (again.session, actions) == ("b", (T.End("a"), T.Begin("b")))
    for run, session in (("run5", "a"), ("", "b"), ("run5", "")):
        with pytest.raises(ProtocolError, match="not listed"):
            T.step(TAKEN, T.Open(run, session, 1.0))


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["open", "heard", "close", "tick"]), st.integers(0, 3), st.floats(0, 9)
        ),
        max_size=40,
    )
)
def test_there_is_one_session_at_most_and_each_that_began_ends_once(
    events: list[tuple[str, int, float]],
) -> None:
    running: set[str] = set()
    state, now = T.Lease(5.0), 0.0
    for number, (kind, run, passes) in enumerate(events):
        now += passes
        last = state.session or "none"
        moves: dict[str, T.Event] = {
            "open": T.Open(f"run{run}", f"s{number}", now),
            "heard": T.Renewed(last if run else "other", now),
            "close": T.Close(last if run else "other"),
            "tick": T.Ticked(now),
        }
        state, actions = T.step(state, moves[kind])
        for action in actions:
            if isinstance(action, T.Begin):
                running.add(action.session)
            elif isinstance(action, T.End):
                running.remove(action.session)
        assert running == ({state.session} if state.session else set())
