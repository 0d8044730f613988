"""The lane's messages: what is written is read back, and what is not exactly a message is refused."""

import dataclasses
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from titan_grpo.errors import PeerError
from titan_grpo.protocol.wire import Applied, Commit, Hello, Holding, Joined, Order, Staged, key_prefix, new_run_id

HELLO = Hello("0000000003e8-aa", 3, "127.0.0.1", 4000, "gloo", 1, 2, "d" * 32, "xxh3", 4096, 16384, 30.0)
MESSAGES = [
    HELLO,
    Joined(1, False, "no", "titan_grpo 0", 12, "r", 4, "f", True),
    Order(2, "receive", 7, "digests/2", "ff"),
    Staged(2, 7, True, "ff", 0.5, 0.1, "", -1, {"pid": 1, "fd": 2}),
    Commit("r", 3, 2, 7, "ff", "dd", {"pid": 1}),
    Applied(2, 7, True, "ff", 24, 0.2, "", True),
]
names = [type(m).__name__ for m in MESSAGES]


@pytest.mark.parametrize("message", MESSAGES, ids=names)
def test_a_message_is_read_back_as_it_was_written(message):
    assert type(message).from_json(message.to_json()) == message
    assert type(message).from_dict(message.to_dict()) == message


@pytest.mark.parametrize("message", MESSAGES, ids=names)
def test_a_missing_key_is_named(message):
    for key in message.to_dict():
        data = message.to_dict()
        del data[key]
        with pytest.raises(PeerError, match=f"lacks {key}"):
            type(message).from_dict(data)


@pytest.mark.parametrize("message", MESSAGES, ids=names)
def test_an_unknown_key_is_named(message):
    with pytest.raises(PeerError, match="unknown keys surprise"):
        type(message).from_dict(message.to_dict() | {"surprise": 1})


@pytest.mark.parametrize("message", MESSAGES, ids=names)
def test_a_value_of_a_wrong_type_is_refused(message):
    for field in dataclasses.fields(message):
        with pytest.raises(PeerError, match=field.name):
            type(message).from_dict(message.to_dict() | {field.name: [1]})


def test_true_is_not_a_number_and_a_whole_number_is_a_float():
    with pytest.raises(PeerError, match="epoch"):
        Hello.from_dict(HELLO.to_dict() | {"epoch": True})
    assert Hello.from_dict(HELLO.to_dict() | {"timeout_s": 30}).timeout_s == 30


@pytest.mark.parametrize(
    ("key", "value", "rule"),
    [
        ("epoch", 0, "epoch >= 1"),
        ("store_port", 70000, "store_port"),
        ("rank", 0, "rank 0 is the lane"),
        ("size", 1, "rank < size"),
        ("timeout_s", 0.0, "timeout_s > 0"),
        ("bucket_bytes", 5000, "multiple of block_bytes"),
        ("block_bytes", 0, "multiple of block_bytes"),
    ],
)
def test_an_impossible_hello_is_refused_with_its_rule(key, value, rule):
    with pytest.raises(PeerError, match=rule):
        Hello.from_dict(HELLO.to_dict() | {key: value})


def test_an_unknown_order_is_refused():
    with pytest.raises(PeerError, match="op is one of"):
        Order.from_json(json.dumps(MESSAGES[2].to_dict() | {"op": "delete"}))


@given(st.one_of(st.text(), st.binary()))
def test_anything_else_is_refused_and_never_crashes(text):
    with pytest.raises(PeerError):
        Staged.from_json(text)


@given(st.floats(0, 4e9), st.floats(0, 4e9))
def test_run_ids_sort_by_their_start_time(a, b):
    if int(a * 1000) < int(b * 1000):
        assert new_run_id(a) < new_run_id(b)


def test_two_runs_of_the_same_millisecond_differ():
    assert len({new_run_id(1.0) for _ in range(100)}) == 100


def test_the_prefix_holds_run_and_epoch():
    assert key_prefix("r", 3) == "r/3"


def hello(run: str, epoch: int) -> Hello:
    return dataclasses.replace(HELLO, run_id=run, epoch=epoch)


ORDERS = st.tuples(st.sampled_from(["a", "b", "c"]), st.integers(1, 4))


@given(st.lists(ORDERS, max_size=12))
def test_admitted_epochs_only_ever_get_newer(orders):
    holding, admitted = Holding(), []
    for run, epoch in orders:
        if not holding.refuses_hello(hello(run, epoch)):
            holding = holding.admitted(hello(run, epoch))
            admitted.append((run, epoch))
    assert admitted == sorted(set(admitted))


def commit(run: str, epoch: int, version: int) -> Commit:
    return Commit(run, epoch, 1, version, "f", "d", {})


def applied(version: int, ok: bool, intact: bool) -> Applied:
    return Applied(1, version, ok, "f" if ok else "", 1, 0.0, "" if ok else "no", intact)


def test_versions_go_forward_within_a_run_and_may_repeat():
    holding = Holding(order=("r", 1)).after(commit("r", 1, 5), applied(5, True, True))
    assert holding.refuses_commit(commit("r", 1, 5)) == ""
    assert "older than version 5" in holding.refuses_commit(commit("r", 1, 4))


def test_a_new_run_may_start_at_a_lower_version():
    holding = Holding(order=("r", 1)).after(commit("r", 1, 5), applied(5, True, True)).admitted(hello("s", 1))
    assert holding.refuses_commit(commit("s", 1, 0)) == ""
    assert "in force" in holding.refuses_commit(commit("r", 1, 6))


def test_a_failed_commit_keeps_the_version_and_says_whether_it_is_whole():
    held = Holding(order=("r", 1)).after(commit("r", 1, 5), applied(5, True, True))
    refused = held.after(commit("r", 1, 6), applied(6, False, True))
    assert (refused.version, refused.intact) == (5, True)
    broken = held.after(commit("r", 1, 6), applied(6, False, False))
    assert (broken.version, broken.intact) == (5, False)
    assert broken.after(commit("r", 1, 6), applied(6, True, True)).intact
