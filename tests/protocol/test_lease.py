from hypothesis import given
from hypothesis import strategies as st

from tests.rigs.present import present
from titan_grpo.protocol.lease import Lease

TAKEN = present(Lease(10.0).open("run5", "a", 0.0))


def test_a_trainer_whose_requests_come_keeps_the_service_and_a_silent_one_loses_it() -> None:
    renewed = present(TAKEN.renew("a", 8.0))
    assert renewed.due == 18.0
    assert renewed.expire(17.9) is None
    free = present(renewed.expire(18.0))
    assert (repr(free), free.due) == ("<free>", None)
    assert free.renew("a", 19.0) is None
    assert free.renew("", 19.0) is None
    assert free.close("") is None
    assert free.expire(99.0) is None


def test_a_newer_run_replaces_an_older_one_which_is_refused_until_the_newer_one_is_done() -> None:
    newer = present(TAKEN.open("run6", "b", 1.0))
    assert newer.session == "b"
    assert newer.renew("a", 2.0) is None
    assert newer.close("a") is None
    assert newer.open("run5", "c", 2.0) is None
    free = present(newer.close("b"))
    assert repr(free) == "<free>"
    assert present(free.open("run5", "c", 3.0)).run == "run5"


def test_a_run_may_open_anew() -> None:
    assert present(TAKEN.open("run5", "b", 1.0)).session == "b"


@given(st.lists(st.floats(0, 20), min_size=1, max_size=20))
def test_a_lease_is_never_shortened(times: list[float]) -> None:
    lease = TAKEN
    for now in times:
        renewed = present(lease.renew("a", now))
        assert renewed.until == max(lease.until, now + 10.0)
        lease = renewed
