"""The fleet: what servers hold, who is told, and what waits for it."""

import threading
import time

from titan_grpo.errors import SyncError
from titan_grpo.protocol import ledger
from titan_grpo.protocol.messages import Label
from titan_grpo.sync.server_set import Fleet, fresh_label

WAIT_S = 30.0


def fleet(*urls: str) -> tuple[Fleet, list[tuple[str, int | None, bool, str]]]:
    told: list[tuple[str, int | None, bool, str]] = []
    return Fleet(list(urls), lambda *news: told.append(news)), told


def commit(f: Fleet, url: str, version: int) -> None:
    f.apply(url, ledger.Receiving(version))
    f.apply(url, ledger.Committing())
    f.apply(url, ledger.Holds(version), Label("run", version, "f"))


def test_rollouts_are_told_each_change_and_stop_during_a_commit_only():
    f, told = fleet("a")
    commit(f, "a", 1)
    commit(f, "a", 2)
    assert told == [
        ("a", 1, True, "run:1:f"),
        ("a", 1, False, "run:1:f"),
        ("a", 2, True, "run:2:f"),
    ]


def test_a_wait_for_one_server_ends_with_the_first_that_holds_the_version():
    f, _ = fleet("a", "b")
    got: list[list[str]] = []
    waiting = threading.Thread(target=lambda: got.append(f.wait_held(1, WAIT_S, everyone=False)))
    waiting.start()
    commit(f, "b", 2)
    waiting.join(WAIT_S)
    assert got == [["b"]]


def test_a_wait_for_everyone_waits_for_the_known_and_not_for_the_unknown():
    f, _ = fleet("a", "b", "dead")
    commit(f, "a", 1)
    commit(f, "b", 1)
    commit(f, "a", 2)
    assert f.wait_held(2, 0.05, everyone=True) == ["a"]  # b is behind: waited for, in vain
    got: list[list[str]] = []
    waiting = threading.Thread(target=lambda: got.append(f.wait_held(2, WAIT_S, everyone=True)))
    waiting.start()
    start = time.monotonic()
    commit(f, "b", 2)
    waiting.join(WAIT_S)
    assert got == [["a", "b"]]
    assert time.monotonic() - start < WAIT_S  # "dead" is waited for by nobody


def test_the_first_error_is_kept_with_its_place_and_given_once_and_the_others_are_counted():
    f, _ = fleet("a")
    assert f.take_error() is None
    f.latch(SyncError("bytes differ", url="a", version=7, block=3))
    f.latch(SyncError("second"))
    error = f.take_error()
    assert str(error) == "a, version 7, block 3: bytes differ (and 1 more since the last step)"
    assert (error.url, error.version, error.block) == ("a", 7, 3)
    assert f.take_error() is None
    f.latch(SyncError("third"))
    assert str(f.take_error()) == "third"


def test_a_server_that_left_takes_nothing_and_may_come_again():
    f, told = fleet("a", "b")
    commit(f, "a", 1)
    f.remove("a")
    assert told[-1] == ("a", None, False, "run:1:f")
    assert f.wait_held(1, 0.0, everyone=True) == []
    f.add("a")
    assert repr(f.entry("a")) == "unknown(?)"
    commit(f, "a", 2)
    assert told[-1] == ("a", 2, True, "run:2:f")


def test_a_label_of_another_run_or_of_the_engine_says_nothing_about_this_run():
    assert fresh_label("run", "run:3:f") == Label("run", 3, "f")
    assert [fresh_label("run", text) for text in ("other:3:f", "default", "", None)] == [None] * 4
