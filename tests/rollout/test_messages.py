"""Messages over JSON: each kind of them comes back as it was, and nothing else is accepted."""

import json
import math
from typing import Any, get_args, get_type_hints

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from titan_grpo.errors import DataError, PeerError
from titan_grpo.rollout import messages
from titan_grpo.rollout.messages import FromWorker, RolloutSpec, ToWorker, decode, encode
from titan_grpo.samples import Group, Prompt

NUMBERS = st.floats(allow_nan=False, allow_infinity=False)
INTEGERS = st.integers(-(2**63), 2**64 - 1)
JSON = st.recursive(
    st.none() | st.booleans() | INTEGERS | NUMBERS | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=5,
)
st.register_type_strategy(
    Prompt, st.builds(Prompt, payload=st.dictionaries(st.text(), JSON, max_size=3))
)
st.register_type_strategy(float, NUMBERS)
st.register_type_strategy(int, INTEGERS)

KINDS = [(kind, direction) for direction in (ToWorker, FromWorker) for kind in get_args(direction)]


@pytest.mark.parametrize(
    ("kind", "direction"), KINDS, ids=lambda value: getattr(value, "__name__", "")
)
def test_every_message_comes_back_as_it_was(kind: type[msgspec.Struct], direction: Any) -> None:
    any_json = {Any: JSON, tuple[Any, ...]: st.lists(JSON, max_size=3).map(tuple)}
    hints = get_type_hints(kind)
    fields = {name: hints[name] for name in kind.__struct_fields__}
    values = {n: any_json[h] if h in any_json else st.from_type(h) for n, h in fields.items()}

    @settings(max_examples=25, deadline=None)
    @given(st.builds(kind, **values))
    def comes_back(message: Any) -> None:
        text = encode(message)
        assert json.loads(text)["frame"] == kind.__name__
        assert decode(text, direction) == message

    comes_back()


def test_a_message_has_the_counters_that_changed_since_the_one_before() -> None:
    counters = messages.Counters()
    counters.add("requests", 8)
    counters.set("in_flight.a", 4)
    assert counters.changed() == {"requests": 8, "in_flight.a": 4}
    counters.add("requests")
    assert counters.changed() == {"requests": 9}
    assert counters.changed() == {}


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "3",
        "nonsense",
        "{}",
        '{"frame": "Ready"',
        '{"frame": "System"}',
        '{"frame": "Answer"}',
        '{"frame": "Answer", "number": "many"}',
        '{"frame": "Ready", "more": 1}',
        '{"frame": "Stop"}',
        pytest.param('{"frame": "Answer", "number": 1, "value": ' + "[" * 99_999, id="deep"),
    ],
)
def test_what_is_no_message_is_refused(text: str) -> None:
    with pytest.raises(PeerError, match="frame cannot be read"):
        decode(text, FromWorker)


@pytest.mark.parametrize("value", [math.nan, object(), {"y": 1j}])
def test_a_payload_without_a_json_form_is_the_tasks_mistake(value: object) -> None:
    prompt = Prompt(0, (1,), {"x": value})
    done = messages.GroupDone(messages.Ticket(0), Group(prompt, ()), {})
    with pytest.raises(DataError, match="prompts need a JSON payload"):
        encode(done)


@pytest.mark.parametrize(
    "message", [messages.Event("\ud800!", {}), messages.Failed("task", "\ud800!")]
)
def test_a_users_text_that_utf_8_cannot_write_is_shown_escaped(message: FromWorker) -> None:
    """A policy may write such an escape, and an agent's error quote it."""
    assert decode(encode(message), FromWorker).text == r"\ud800!"


def test_the_spec_comes_back_as_it_was() -> None:
    state = {"cursor": {"low": 1, "above": [3]}}
    spec = RolloutSpec(
        model_dir="m", state=state, waiting={7: 2}, places=4, registration={"a": [1]}
    )
    text = json.dumps(msgspec.to_builtins(spec, str_keys=True))
    assert decode(text, RolloutSpec) == spec
