"""The servers of a run: what they hold, what the observer sees, who joins and leaves, who waits."""

import queue
import re
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.rigs.threads import no_free_thread
from tests.sync.conftest import WAIT_S, Lane
from titan_grpo.errors import ServerRefused, SyncError, TitanGrpoError
from titan_grpo.observe.recorder import Recorder
from titan_grpo.protocol import members
from titan_grpo.protocol.messages import Entry, Label, ServerState, Standing
from titan_grpo.sync.server_set import ServerSet
from titan_grpo.views.live import Follower
from titan_grpo.views.run import read_trace
from titan_grpo.views.timeline import figures
from titan_grpo.views.timeline import held as held_in


class Site:
    """A set, what its observer saw, and the lanes that it opened."""

    def __init__(
        self, folder: Path, urls: tuple[str, ...], leave_s: float, max_lag: int = 0
    ) -> None:
        self.seen: list[tuple[str, int | None, bool, str]] = []
        self.committing: list[int | None] = []
        self.opened: list[Lane] = []
        self.ending, self.may_open = threading.Event(), threading.Event()
        self.ending.set()
        self.may_open.set()
        self.opening: queue.SimpleQueue[str] = queue.SimpleQueue()
        self.recorder = Recorder(folder)
        self.set = ServerSet(
            members.start(frozenset(urls)),
            self._open,
            self.recorder,
            observer=self,
            leave_s=leave_s,
            max_lag=max_lag,
        )
        self.set.start()

    def _open(self, url: str, epoch: int) -> Lane:
        self.opening.put(url)
        assert self.may_open.wait(WAIT_S)
        self.opened.append(Lane(url, epoch, self.ending))
        return self.opened[-1]

    def set_server(self, state: ServerState) -> None:
        self.seen.append((state.url, state.version, state.accepting, state.label))
        self.committing.append(state.committing)

    def remove_server(self, url: str) -> None:
        self.seen.append((url, None, False, "left"))

    def fail(self, error: TitanGrpoError) -> None:
        self.seen.append(("", None, False, str(error)))

    def commit(self, url: str, version: int) -> None:
        held = self.set.entries()[url].held
        for standing in (Standing.RECEIVING, Standing.COMMITTING):
            self.set.note(url, Entry(standing, held, version), "vllm")
        self.set.note(url, Entry(Standing.HOLDS, version), "vllm", Label("run", version, "f"))


Make = Callable[..., Site]


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Make]:
    made: list[Site] = []

    def make(*urls: str, leave_s: float = WAIT_S, max_lag: int = 0) -> Site:
        made.append(Site(tmp_path, urls, leave_s, max_lag))
        return made[-1]

    yield make
    for one in made:
        one.ending.set()
        one.set.close()
        one.recorder.close()


def test_the_observer_sees_each_change_and_a_stop_during_a_commit_only(site: Make) -> None:
    s = site("a")
    s.commit("a", 1)
    s.commit("a", 2)
    assert s.seen == [
        ("a", 1, True, "run:1:f"),
        ("a", 1, False, "run:1:f"),
        ("a", 2, True, "run:2:f"),
    ]
    assert s.committing == [None, 2, None], "a server may serve it before the ledger knows"


def test_those_who_read_the_run_see_that_a_server_is_lost_and_when_it_is_back(
    site: Make, tmp_path: Path
) -> None:
    s = site("http://a:1")
    for held in (3, None, 3):
        s.set.note("http://a:1", Entry(Standing.HOLDS if held else Standing.UNKNOWN, held), "vllm")
        s.recorder.step(1, {})  # which writes what was said so far
        follower, deadline = Follower(tmp_path), time.monotonic() + WAIT_S
        while follower.state.held != {"http://a:1": held}:
            assert time.monotonic() < deadline
            follower.read()
    s.set.close()
    s.recorder.close()
    assert held_in(read_trace(tmp_path / "trace.json"), "http://a:1")[1].tolist() == [3, -1, 3]


def test_a_wait_for_one_server_ends_with_the_first_that_holds_the_version(site: Make) -> None:
    s = site("a", "b")
    got: list[list[str]] = []
    waiting = threading.Thread(
        target=lambda: got.append(s.set.wait_held(1, WAIT_S, everyone=False))
    )
    waiting.start()
    s.commit("b", 2)
    waiting.join(WAIT_S)
    assert got == [["b"]]


def test_a_wait_for_everyone_waits_for_the_known_and_not_for_the_unknown(site: Make) -> None:
    s = site("a", "b", "dead")
    s.commit("a", 1)
    s.commit("b", 1)
    s.commit("a", 2)
    assert s.set.wait_held(2, 0.05, everyone=True) == ["a"], "b is behind: waited for, in vain"
    got: list[list[str]] = []
    waiting = threading.Thread(target=lambda: got.append(s.set.wait_held(2, WAIT_S, everyone=True)))
    waiting.start()
    start = time.monotonic()
    s.commit("b", 2)
    waiting.join(WAIT_S)
    assert got == [["a", "b"]]
    assert time.monotonic() - start < WAIT_S / 2, "dead is not waited for"


def test_a_wait_ends_when_other_runs_have_all_servers(site: Make) -> None:
    s = site("a", "b")
    s.commit("a", 1)
    s.commit("b", 1)
    got: list[list[str]] = []
    waiting = threading.Thread(target=lambda: got.append(s.set.wait_held(2, WAIT_S, everyone=True)))
    waiting.start()
    s.set.taken("a", "other")
    assert s.set.wait_held(2, 0.05, everyone=False) == []
    assert not got, "b may still serve this run"
    s.set.taken("b", "other")
    waiting.join(WAIT_S / 3)
    assert got == [[]]
    with pytest.raises(SyncError, match="run other took over every server of this run"):
        s.set.reached(1)


def test_the_first_error_is_kept_with_its_place_and_given_once_and_the_others_are_counted(
    site: Make,
) -> None:
    s = site("a")
    assert s.set.take_error() is None
    s.set.latch(SyncError("bytes differ", url="a", version=7, block=3))
    s.set.latch(SyncError("second"))
    assert s.set.latched() == "a, version 7, block 3: bytes differ"
    error = s.set.take_error()
    assert error is not None
    assert s.set.latched() == ""
    assert str(error) == "a, version 7, block 3: bytes differ (and 1 more since the last step)"
    assert (error.url, error.version, error.block) == ("a", 7, 3)
    assert s.set.take_error() is None
    s.set.latch(SyncError("third"))
    assert str(s.set.take_error()) == "third"


def test_each_servers_error_is_a_fault_of_its_own_also_of_two_in_one_step(
    site: Make, tmp_path: Path
) -> None:
    urls = ("http://a:80", "http://a:8000")
    s = site(*urls)
    for url in (*urls, urls[1]):
        s.set.latch(SyncError("send failed: connection reset", url=url, version=7))
    s.set.latch(SyncError("hashing failed", version=7))
    s.set.taken(urls[0], "other")
    s.recorder.error(str(s.set.take_error()))
    s.recorder.error(f"an alert names {urls[1]}")
    s.recorder.close()
    trace = read_trace(tmp_path / "trace.json")
    assert [figures(trace, url).faults for url in urls] == [2, 2]


def test_a_server_that_left_takes_nothing_and_may_come_again_in_a_later_epoch(site: Make) -> None:
    s = site("a", "b")
    s.commit("a", 1)
    assert s.set.remove("a", WAIT_S)
    s.set.note("a", Entry(Standing.HOLDS, 2), "vllm")
    assert s.seen[-1:] == [("a", None, False, "left")], (
        "what its lane reports on its way out is late"
    )
    assert s.set.entries()["a"].standing is Standing.GONE
    assert s.set.wait_held(1, 0.0, everyone=True) == []
    s.set.latch(SyncError("of the time before", url="a"))
    assert s.set.add("a")
    assert repr(s.set.entries()["a"]) == "unknown(?)"
    assert s.set.last_error("a") is None
    s.commit("a", 2)
    assert s.seen[-1:] == [("a", 2, True, "run:2:f")]
    assert [lane.epoch for lane in s.opened] == [1, 1, 2]


def test_a_server_that_is_added_while_its_lane_ends_joins_afterwards(site: Make) -> None:
    s = site("a", "b")
    s.ending.clear()
    assert not s.set.remove("b", 0.0)
    assert not s.set.add("b")
    s.ending.set()
    assert s.set.wait(lambda: "b" in s.set.urls, WAIT_S)
    assert [s.opening.get(timeout=WAIT_S) for _ in range(3)] == ["a", "b", "b"]


def test_a_server_whose_lane_does_not_end_is_not_added_again(site: Make) -> None:
    s = site("a", "b", leave_s=0.1)
    s.ending.clear()
    assert not s.set.remove("b", 0.0)
    assert s.set.wait(lambda: s.set.last_error("b") is not None, WAIT_S)
    assert not s.set.add("b")
    assert s.set.urls == ["a"]


def test_without_a_free_thread_a_server_leaves_and_may_come_again(site: Make) -> None:
    s = site("a", "b")
    with no_free_thread():
        assert s.set.remove("b", 0.0)
    assert s.set.add("b")


def test_a_server_that_is_taken_while_all_leave_or_come_again_ends_no_run(site: Make) -> None:
    s = site("a", "b")
    s.ending.clear()
    assert not s.set.remove("a", 0.0)
    assert not s.set.add("a")
    assert not s.set.remove("b", 0.0)
    s.set.taken("b", "other")
    s.set.reached(1)
    assert not any("took over" in label for *_, label in s.seen)


def test_a_wait_for_a_removal_ends_with_the_run(site: Make) -> None:
    s = site("a", "b")
    s.ending.clear()
    refused: list[str] = []

    def remove() -> None:
        try:
            s.set.remove("b", WAIT_S)
        except ServerRefused as error:
            refused.append(str(error))

    waiting = threading.Thread(target=remove)
    waiting.start()
    assert s.set.wait(lambda: s.set.urls == ["a"], WAIT_S)
    s.set.close(0.1)
    waiting.join(WAIT_S)
    assert refused == ["the run is ending"]


@pytest.mark.parametrize(
    ("resumed_at", "commits", "stops_at"),
    [
        (1, {}, 3),
        (7, {}, 9),  # a resumed run counts from its own first boundary
        (1, {2: "a", 4: "b", 6: "b"}, 8),  # any server's commit counts, however old its version
    ],
)
def test_a_run_whose_servers_commit_nothing_for_max_lag_versions_stops(
    site: Make, resumed_at: int, commits: dict[int, str], stops_at: int
) -> None:
    s, held = site("a", "b", max_lag=2), {"a": 0, "b": 0}
    for version in range(resumed_at, stops_at):
        if url := commits.get(version):
            held[url] += 1
            s.commit(url, held[url])
        s.set.reached(version)
    known = {
        u: f"holds (version {v})" if v else "unknown (of no known version)" for u, v in held.items()
    }
    line = "; ".join(f"{url} {text}" for url, text in known.items())
    with pytest.raises(
        SyncError, match=f"committed anything for 2 versions .*: {re.escape(line)}$"
    ):
        s.set.reached(stops_at)


def test_a_look_at_the_servers_does_not_wait_for_a_lane_that_opens(site: Make) -> None:
    s = site("a")
    assert s.opening.get(timeout=WAIT_S) == "a"
    s.may_open.clear()
    with ThreadPoolExecutor(2) as pool:
        adding = pool.submit(s.set.add, "b")
        assert s.opening.get(timeout=WAIT_S) == "b"
        looking = pool.submit(s.set.lines)
        try:
            assert [line["url"] for line in looking.result(WAIT_S / 3)] == ["a", "b"]
        finally:
            s.may_open.set()
        assert adding.result(WAIT_S)
    assert [lane.name for lane in s.opened] == ["lane a", "lane b"]


def test_a_server_that_is_found_with_the_version_that_it_had_has_committed_nothing(
    site: Make,
) -> None:
    s = site("a", max_lag=2)
    s.commit("a", 1)
    for version in (1, 2):
        s.set.reached(version)
        for entry in (Entry(), Entry(Standing.HOLDS, 1)):
            s.set.note("a", entry, "vllm")
    with pytest.raises(SyncError, match="committed anything for 2 versions"):
        s.set.reached(3)
