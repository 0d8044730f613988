"""Which server takes the next group: load, health, speed, and shares of a new version."""

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from titan_grpo.protocol.messages import ServerState
from titan_grpo.rollout import schedule
from titan_grpo.rollout.schedule import (
    QUIET,
    QUIET_S,
    SPREAD,
    STUCK_S,
    TRUST,
    Durations,
    Fleet,
    Room,
    Server,
    Spread,
)
from titan_grpo.samples import Completion, Group, Prompt


def cheapest(
    servers: list[Server], requests: int, capacity: int, needed: int, avoid: str
) -> tuple[Server | None, int | None]:
    """The server of the rule, by a look at all of them, and the newest version of any with room.

    A full server takes nothing, an idle one a group of any size. A server that is behind by one
    version is as good as one with one more group.
    """
    room = [
        (s, s.state.version)
        for s in servers
        if s.state.accepting and s.state.version is not None
        if s.health.askable(0.1)
        if s.in_flight == 0 or s.in_flight + requests <= capacity
    ]
    able = [(s, version) for s, version in room if version >= needed]
    able = [(s, version) for s, version in able if s.url != avoid] or able
    newest = max((version for _, version in able), default=0)
    costs = [(s.in_flight + (newest - v) * requests, newest - v, s.url, s) for s, v in able]
    best = min(costs)[3] if costs else None
    return best, max((version for _, version in room), default=None)


@given(st.integers(0, 2**32), st.integers(1, 6), st.sampled_from((4, 20)))
def test_groups_go_one_after_the_other_to_the_cheapest_server_that_may_take_them(
    seed: int, count: int, size: int
) -> None:
    chance = random.Random(seed)
    states = [
        ServerState(
            f"s{i}", chance.choice((None, 2, 3, 4, 5)), chance.random() < 0.7, "label", "vllm"
        )
        for i in range(count)
    ]
    servers = [Server(state) for state in states]
    for server in servers:
        server.in_flight = chance.choice((0, 4, 8, 12, 16))
        if chance.random() < 0.2:
            server.failed(0.0)
    room = Room(servers, size, 16, 0.1)
    for _ in range(12):
        needed, avoid = chance.choice((0, 2, 3, 4, 5)), chance.choice(("", "s0"))
        expected, newest = cheapest(servers, size, 16, needed, avoid)
        before = expected.in_flight if expected is not None else 0
        assert room.newest == newest
        taken = room.take(needed, avoid)
        assert taken is expected
        assert taken is None or taken.in_flight == before + size


def test_a_failing_server_is_paused_for_longer_and_longer() -> None:
    server = Server(ServerState("a", 1, True, "1", "vllm"))
    now, waits = 100.0, []
    for _ in range(7):
        until = server.failed(now)
        waits.append(until - now)
        assert Room([server], 1, 8, until - 0.1).take(1) is None
        now = until
    assert waits == [0.5, 1.0, 2.0, 4.0, 8.0, 15.0, 15.0]
    assert Room([server], 1, 8, now).take(1) is server
    server.succeeded()
    assert server.failed(0.0) == 0.5


def test_an_incident_that_breaks_many_groups_pauses_their_server_once() -> None:
    server = Server(ServerState("a", 1, True, "1", "vllm"))
    assert {server.failed(100.0 + 0.01 * group) for group in range(8)} == {100.5}
    assert Room([server], 1, 8, 100.5).take(1) is server


def share(spread: Spread, servers: list[Server], now: float, groups: int = 5) -> float:
    """For groups of 8 requests that take 4 s; the time to share lasts 1 s."""
    return spread.share(servers, groups * 8, 1.0 / SPREAD, now)


def taken(servers: list[Server], limit: float, now: float = 0.0, size: int = 8) -> list[str]:
    """The servers of one group after the other."""
    room, found = Room(servers, size, 1024, now, limit), list[str]()
    while len(found) < 100 and (server := room.take(0)) is not None:
        found.append(server.url)
    return found


def fleet_at(*versions: int | None) -> tuple[Fleet, list[Server]]:
    fleet = Fleet()
    for i, version in enumerate(versions):
        fleet.note(ServerState(f"s{i}", version, True, "label"), 0.0)
    return fleet, list(fleet)


def servers_at(*versions: int | None) -> list[Server]:
    return fleet_at(*versions)[1]


def now_at(server: Server, version: int, accepting: bool = True) -> None:
    server.note(structs.replace(server.state, version=version, accepting=accepting), 0.0)


def test_a_server_takes_its_share_until_the_others_have_the_version_or_its_time_ends() -> None:
    spread, servers = Spread(), servers_at(7, 6, None)
    assert share(spread, servers, 10.0) == 20, "of two servers: one has no version"
    assert spread.until == 11.0
    assert taken(servers[:1], 20) == ["s0"] * 3
    assert share(spread, servers, 10.9, 2) == 20
    now_at(servers[1], 7)
    assert share(spread, servers, 10.95, 2) == math.inf
    now_at(servers[1], 8)
    now_at(servers[0], 7, accepting=False)
    assert share(spread, servers, 20.0, 2) == 20, "a server in its commit is waited for"
    assert share(spread, servers, 21.0, 2) == math.inf


def test_a_server_that_was_late_is_not_waited_for_until_it_was_in_time() -> None:
    spread, servers = Spread(), servers_at(7, 6, 6)
    assert share(spread, servers, 10.0) == pytest.approx(40 / 3)
    now_at(servers[1], 7)
    assert share(spread, servers, 11.0) == math.inf
    now_at(servers[2], 7)
    assert share(spread, servers, 11.1) == math.inf
    now_at(servers[0], 8)
    assert share(spread, servers, 20.0) == 20, "of two servers: the last one was late"
    now_at(servers[2], 8)
    assert share(spread, servers, 20.5) == pytest.approx(40 / 3), "of three: it was in time"
    now_at(servers[1], 8)
    assert share(spread, servers, 20.6) == math.inf
    now_at(servers[1], 9)
    assert share(spread, servers, 30.0) == pytest.approx(40 / 3)


def test_a_failing_server_is_not_waited_for() -> None:
    spread, servers = Spread(), servers_at(7, 6)
    servers[1].failed(9.9)
    assert share(spread, servers, 10.0) == math.inf


def measured(fleet: Fleet, *token_s: float) -> list[Server]:
    """After a group of 100 tokens on each at second 0; returns those of which something is said."""
    for server, each in zip(fleet, token_s, strict=True):
        server.took(100, 100 * each, 0.0)
    return fleet.compare()


def test_a_slow_server_gets_a_group_when_the_others_have_so_many_that_they_take_as_long() -> None:
    fleet, servers = fleet_at(1, 1, 1)
    assert measured(fleet, 0.01, 0.012, 0.03) == servers[2:]
    assert servers[2].slowness == pytest.approx(2.5)
    assert servers[1].slowness == 1.0, "a fifth more is noise"
    order = taken(servers, 10 * 8, now=1.0)
    assert order[:12] == ["s0", "s1"] * 6
    assert order[12:14] == ["s2", "s0"], "one on it are as 6.25 on another"


def test_a_server_near_the_border_is_not_slow_and_fast_by_turns() -> None:
    fleet, servers = fleet_at(1, 1)
    assert measured(fleet, 0.01, 0.03) == servers[1:]
    assert measured(fleet, 0.01, 0.02) == []
    assert servers[1].slowness == pytest.approx(2.47, abs=0.01)
    changes = [measured(fleet, 0.01, 0.01) for _ in range(20)]
    assert [change for change in changes if change] == [servers[1:]]
    assert servers[1].slowness == 1.0


def test_a_slow_server_has_a_smaller_share_of_a_new_version() -> None:
    fleet, servers = fleet_at(7, 6)
    measured(fleet, 0.01, 0.03)
    assert share(Spread(), servers, 10.0) == pytest.approx(36), "40 requests, 9 to 1"


def test_a_slow_server_does_not_take_what_full_ones_have_sooner() -> None:
    fleet, servers = fleet_at(1, 1, 1)
    measured(fleet, 0.01, 0.01, 0.1)
    assert Room(servers[2:], 8, 16, 1.0).take(0) is servers[2], "there is no other"
    servers[2].in_flight, servers[0].in_flight, servers[1].in_flight = 0, 16, 16
    assert Room(servers, 8, 16, 1.0).take(0) is None
    now_at(servers[2], 2)
    assert Room(servers, 8, 16, 1.0).take(2) is servers[2], "the full ones lack the version"


def test_a_slow_server_gets_one_group_when_its_measurement_is_old() -> None:
    fleet, servers = fleet_at(1, 1)
    measured(fleet, 0.01, 0.1)
    until = TRUST * 10.0
    assert taken(servers, 5 * 8, now=until - 0.1) == ["s0"] * 5
    servers[0].in_flight = 0
    assert sorted(taken(servers, 5 * 8, now=until)) == [*["s0"] * 5, "s1"]
    servers[1].took(100, 1.0, until + 1.0)
    assert fleet.compare() == servers[1:], "what was measured before does not count any more"
    assert servers[1].slowness == 1.0


def test_what_a_server_was_measured_at_before_it_was_restarted_is_forgotten() -> None:
    fleet, servers = fleet_at(1, 1)
    measured(fleet, 0.01, 0.1)
    servers[1].note(structs.replace(servers[1].state, version=None), 0.5)
    now_at(servers[1], 1)
    assert taken(servers, 2 * 8, now=1.0) == ["s0", "s1", "s0", "s1"]


def test_answers_whose_pieces_came_at_once_make_no_other_server_slow() -> None:
    fleet, servers = fleet_at(1, 1)
    for now in range(5):
        servers[0].took(15, 1e-5, now)
        servers[1].took(15, 0.2, now)
    assert fleet.compare() == []


def test_a_short_request_does_not_make_a_server_slow() -> None:
    fleet, servers = fleet_at(1, 1)
    for now in range(5):
        servers[0].took(100, 1.0, now)
        servers[1].took(*((100, 1.0) if now % 2 else (1, 0.1)), now)
    assert fleet.compare() == []


def standing() -> tuple[Fleet, Server, Server]:
    """Two servers with open answers from second 100 on."""
    fleet, (one, other) = fleet_at(1, 1)
    for server in fleet:
        server.in_flight = 8
        server.answer_began(100.0)
    return fleet, one, other


def stuck(fleet: Fleet, now: float) -> list[Server]:
    return [server for server, _ in fleet.stuck(now)]


def goes_on(server: Server, until: float) -> Server:
    """Let a token come every second, from second 100 on."""
    for now in range(100, int(until)):
        server.token_came(now)
    server.token_came(until)
    return server


def test_groups_of_a_server_that_sends_no_token_go_on_elsewhere() -> None:
    fleet, one, other = standing()
    goes_on(other, now := 100.0 + QUIET_S)
    assert fleet.stuck(now - 0.1) == []
    assert fleet.stuck(now) == [(one, QUIET_S)]
    assert Room(fleet, 8, 64, now).take(0, avoid="s1") is other
    now_at(one, 1)
    assert not one.able(now), "it was known to hold this version before"
    now_at(one, 2)
    assert one.able(now), "its lane reached it"


def test_a_stuck_server_gets_groups_again_after_a_time() -> None:
    fleet, one, other = standing()
    goes_on(other, 110.0)
    assert stuck(fleet, 110.0) == [one]
    assert [one.able(now) for now in (110.0 + STUCK_S - 0.1, 110.0 + STUCK_S)] == [0, 1]


def test_groups_stay_where_they_are_if_no_other_server_can_take_them() -> None:
    fleet, one, other = standing()
    assert stuck(fleet, 150.0) == [], "the other one stands still as well"
    other.answers = other.in_flight = 0
    assert stuck(fleet, 150.0) == [one], "the other one is idle"
    fleet.remove(other.url)
    assert stuck(fleet, 300.0) == [], "there is no other"


@pytest.mark.parametrize("pause_s", [3.0, 20.0])
def test_a_pause_of_any_server_makes_all_of_them_be_waited_for_longer(pause_s: float) -> None:
    fleet, one, other = standing()
    goes_on(other, 101.0).token_came(101.0 + pause_s)
    until = other.last_token_s = 100.0 + max(QUIET_S, QUIET * pause_s)
    assert stuck(fleet, until - 0.1) == []
    assert stuck(fleet, until) == [one]


def test_a_server_that_was_stuck_by_mistake_is_waited_for_longer_the_next_time() -> None:
    fleet, one, other = standing()
    goes_on(other, 110.0)
    assert stuck(fleet, 110.0) == [one]
    one.token_came(111.0)
    goes_on(other, 140.0)
    assert stuck(fleet, 140.0) == [], "29 s of silence are less than 5 times 11"


def test_a_time_in_which_nothing_was_read_is_no_servers_silence() -> None:
    fleet, one, other = standing()
    fleet.listen_anew(150.0)
    until = 150.0 + QUIET_S
    for now in range(151, int(until)):
        assert stuck(fleet, now) == []
        other.token_came(now)
    assert stuck(fleet, until) == [one]


def test_a_server_without_open_answers_may_be_silent() -> None:
    """Its groups are with their tools, or their answers come whole."""
    fleet, one, other = standing()
    one.answers = 0
    goes_on(other, 1000.0)
    assert stuck(fleet, 1000.0) == []


def test_groups_leave_a_server_whose_version_has_been_unknown_for_long() -> None:
    fleet, one, other = standing()
    one.answers = 0
    one.note(structs.replace(one.state, version=None), 200.0)
    one.note(structs.replace(one.state, version=None), 205.0)
    goes_on(other, 200.0 + QUIET_S)
    assert stuck(fleet, 200.0 + QUIET_S - 0.1) == []
    assert fleet.stuck(200.0 + QUIET_S) == [(one, QUIET_S)]
    now_at(one, 1)
    assert one.able(211.0)
    assert stuck(fleet, 211.0) == []
    one.answer_began(220.0)
    goes_on(other, 220.0 + QUIET_S)
    assert stuck(fleet, 220.0 + QUIET_S) == [one], "its time without answers was no pause"


def test_a_prompts_last_duration_is_expected_again_and_the_oldest_ones_are_forgotten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(schedule, "REMEMBERED", 2)
    durations, prompts = Durations(), [Prompt(n, (n,)) for n in range(3)]

    def took(number: int, seconds: float) -> None:
        completion = Completion((1,) * 100, (-1.0,) * 100, "stop", 1, 1, "s")
        durations.took(Group(prompts[number], (completion,)), seconds)

    took(0, 2.0)
    assert durations.expected_s(prompts[1], 50.0) == pytest.approx(1.0), "0.02 s a token"
    took(1, 4.0)
    assert durations.expected_s(prompts[2], 50.0) == pytest.approx(1.3), "a new one counts 0.3"
    took(0, 3.0)
    took(2, 1.0)
    assert [durations.expected_s(prompt, 0.0) for prompt in prompts] == [3.0, 0.0, 1.0]
