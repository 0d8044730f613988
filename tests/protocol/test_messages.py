"""The lane's messages: what is written is read back, and what is not exactly a message is
refused."""

import json
import re
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from titan_grpo.errors import PeerError
from titan_grpo.protocol.messages import (
    FORMAT,
    PROBE,
    Applied,
    Commit,
    Hello,
    Joined,
    Label,
    Message,
    Order,
    Patch,
    RangeSource,
    Staged,
    new_run_id,
    reply_address,
)
from titan_grpo.runkey import Key

HELLO = Hello(
    *("0000000003e8-aa", 3, "127.0.0.1", 4000, "ab", "gloo", "d" * 32, "xxh3", 16384, 30.0),
    FORMAT,
)
MESSAGES = [
    HELLO,
    Joined(False, "no", "titan_grpo 0", 12, "r", 4, "f", True),
    Order(2, "receive", 7, "ff"),
    Staged(2, 7, True, "ff", 0.5, 0.1, "", -1),
    Commit("r", 3, 2, 7, "ff", "dd"),
    Applied(2, 7, True, "ff", 24, 0.2, "", True),
]
names = [type(m).__name__ for m in MESSAGES]


@pytest.mark.parametrize("message", MESSAGES, ids=names)
def test_a_message_is_read_back_as_it_was_written(message: Message) -> None:
    assert type(message).from_json(message.to_json()) == message
    assert type(message).from_dict(message.to_dict()) == message


@pytest.mark.parametrize("message", MESSAGES, ids=names)
def test_a_missing_key_is_named(message: Message) -> None:
    for field in msgspec.structs.fields(message):
        data = message.to_dict()
        del data[field.name]
        if field.required:
            with pytest.raises(PeerError, match=f"missing required field `{field.name}`"):
                type(message).from_dict(data)


@pytest.mark.parametrize("message", MESSAGES, ids=names)
def test_an_unknown_key_is_named(message: Message) -> None:
    with pytest.raises(PeerError, match="unknown field `surprise`"):
        type(message).from_dict(message.to_dict() | {"surprise": 1})


@pytest.mark.parametrize("message", MESSAGES, ids=names)
def test_a_value_of_a_wrong_type_is_refused(message: Message) -> None:
    for field in msgspec.structs.fields(message):
        with pytest.raises(PeerError, match=field.name):
            type(message).from_dict(message.to_dict() | {field.name: [None]})


def test_true_is_not_a_number_and_a_whole_number_is_a_float() -> None:
    with pytest.raises(PeerError, match="epoch"):
        Hello.from_dict(HELLO.to_dict() | {"epoch": True})
    assert Hello.from_dict(HELLO.to_dict() | {"timeout_s": 30}).timeout_s == 30


@pytest.mark.parametrize(
    ("key", "value", "rule"),
    [
        ("epoch", 0, ">= 1 - at `$.epoch`"),
        ("port", 70000, "<= 65535 - at `$.port`"),
        ("timeout_s", 0.0, "> 0.0 - at `$.timeout_s`"),
        ("bucket_bytes", 0, ">= 1 - at `$.bucket_bytes`"),
        ("format", FORMAT - 1, f"format must be {FORMAT}, got {FORMAT - 1}"),
    ],
)
def test_an_impossible_hello_is_refused_with_its_rule(key: str, value: object, rule: str) -> None:
    with pytest.raises(PeerError, match=re.escape(rule)):
        Hello.from_dict(HELLO.to_dict() | {key: value})


@pytest.mark.parametrize(("key", "value"), [("term_in_force", 1 << 63), ("lost", (0, -5))])
def test_a_number_that_would_end_the_lane_that_reads_it_is_refused(key: str, value: object) -> None:
    message = next(m for m in MESSAGES if key in m.__struct_fields__)
    with pytest.raises(PeerError, match=key):
        type(message).from_dict(message.to_dict() | {key: value})


def test_an_unknown_order_is_refused() -> None:
    with pytest.raises(PeerError, match="Invalid enum value"):
        Order.from_json(json.dumps(MESSAGES[2].to_dict() | {"op": "delete"}))


@given(st.one_of(st.text(), st.binary()))
def test_anything_else_is_refused_and_never_crashes(text: str | bytes) -> None:
    with pytest.raises(PeerError):
        Staged.from_json(text)


def test_json_nested_too_deeply_is_refused_as_any_other() -> None:
    with pytest.raises(PeerError, match="Joined is not JSON"):
        Joined.from_json("[" * 100_000)


def test_two_runs_of_the_same_millisecond_differ() -> None:
    assert len({new_run_id(1.0) for _ in range(100)}) == 100


KEY = Key(bytes(32))


@pytest.mark.parametrize("message", MESSAGES, ids=names)
def test_a_proof_survives_the_journey_and_a_changed_value_does_not(message: Message) -> None:
    arrived = type(message).from_json(message.proven(KEY).to_json())
    arrived.require_proof(KEY)
    for field in msgspec.structs.fields(message):
        value = getattr(message, field.name)
        # values that are valid in another message of the same type
        valid: dict[str, Any] = {"op": "stream", "apply": "streamed"}
        valid |= {"bucket_bytes": 8192, "format": FORMAT}
        valid |= {"sources": (RangeSource("elsewhere", 1, "00"),)}
        valid |= {"relays": valid["sources"], "serve": ("00",), "lost": (1,)}
        valid |= {"patches": (Patch(6, 7, 1, RangeSource("elsewhere", 1, "00")),)}
        changed = valid.get(field.name, f"{value}x" if isinstance(value, str) else 99)
        if field.name == "proof" or changed == value or isinstance(value, bool | dict):
            continue
        with pytest.raises(PeerError, match="another run key, or changed on its way"):
            msgspec.structs.replace(arrived, **{field.name: changed}).require_proof(KEY)


@pytest.mark.parametrize("message", MESSAGES, ids=names)
def test_both_ends_have_the_same_key_or_neither_has_one(message: Message) -> None:
    message.require_proof(None)
    with pytest.raises(PeerError, match="carries no proof of the run key"):
        message.require_proof(KEY)
    with pytest.raises(PeerError, match=r"its reader has none.*there too \(servers read Hello\)"):
        message.proven(KEY).require_proof(None)
    with pytest.raises(PeerError, match="another run key") as caught:
        message.proven(KEY).require_proof(Key.generate())
    assert KEY.hex() not in str(caught.value)


def test_a_proof_of_one_message_proves_no_other() -> None:
    proofs = {message.proven(KEY).proof for message in MESSAGES}
    assert len(proofs) == len(MESSAGES)


def test_a_hello_of_another_version_can_be_answered() -> None:
    data = HELLO.to_dict() | {"invented_later": 1}
    del data["apply"], data["proof"]
    address = reply_address(data)
    assert address is not None
    assert (address.run_id, address.epoch, address.transport) == (HELLO.run_id, HELLO.epoch, PROBE)
    assert (address.host, address.port, address.ticket) == ("127.0.0.1", 4000, "ab")


@pytest.mark.parametrize("data", [None, [], {}, {"port": 4000}, HELLO.to_dict() | {"port": -1}])
def test_what_has_no_address_gets_no_answer(data: object) -> None:
    assert reply_address(data) is None


@given(
    st.dictionaries(
        st.sampled_from(list(Hello.__struct_fields__)),
        st.integers() | st.text() | st.none(),
    )
)
def test_no_body_makes_the_address_crash(data: dict[str, int | str | None]) -> None:
    reply_address(HELLO.to_dict() | data)


def test_what_an_engine_holds_is_a_label_or_its_initial_weights() -> None:
    joined = Joined(True, "", "titan_grpo 0", 12, "00000000000a-bb", 4, "ff", True)
    assert joined.held == Label("00000000000a-bb", 4, "ff")
    assert msgspec.structs.replace(joined, held_run="", held_version=-1).held is None


@pytest.mark.parametrize(
    "text",
    [None, "", "7", "default", "unusable", "a:b", "a:b:c", "a::b", "a:-7:b", "a:²:b", "a:٣:b"],
)
def test_what_is_no_label_of_a_version_is_none(text: str | None) -> None:
    assert Label.parse(text) is None


def test_a_label_with_more_digits_than_any_version_is_none() -> None:
    assert Label.parse(f"a:{'9' * 18}:b") == Label("a", int("9" * 18), "b")
    assert Label.parse(f"a:{'9' * 19}:b") is None
    assert Label.parse(f"a:{'9' * 5000}:b") is None
