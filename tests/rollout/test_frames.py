"""Messages over JSON: each kind of them, whatever is in it, comes back as it was, and nothing else
is believed."""

import json
import math
from dataclasses import fields
from typing import Any, get_args, get_type_hints

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from titan_grpo.errors import DataError, PeerError
from titan_grpo.rollout import codec, messages
from titan_grpo.rollout.codec import decode, encode, spec_from_json, spec_to_json
from titan_grpo.rollout.messages import FromWorker, ToWorker
from titan_grpo.rollout.spec import RolloutSpec
from titan_grpo.samples import Completion, Group, Prompt

NUMBERS = st.floats(allow_nan=False, allow_infinity=False)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | NUMBERS | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=5,
)
st.register_type_strategy(
    Prompt, st.builds(Prompt, payload=st.dictionaries(st.text(), JSON, max_size=3))
)
st.register_type_strategy(float, NUMBERS)


def anything(kind):
    """Any message of that kind; where it may hold any value, any JSON value."""
    hints = get_type_hints(kind)
    any_json = {Any: JSON, tuple[Any, ...]: st.lists(JSON, max_size=3).map(tuple)}
    values = {f.name: hints[f.name] for f in fields(kind)}
    return st.builds(
        kind,
        **{
            name: any_json[hint] if hint in any_json else st.from_type(hint)
            for name, hint in values.items()
        },
    )


KINDS = [(kind, direction) for direction in (ToWorker, FromWorker) for kind in get_args(direction)]


@pytest.mark.parametrize(
    ("kind", "direction"), KINDS, ids=lambda value: getattr(value, "__name__", "")
)
def test_every_message_comes_back_as_it_was(kind, direction):
    @settings(max_examples=25, deadline=None)
    @given(anything(kind))
    def comes_back(message):
        text = encode(message, direction)
        assert json.loads(text)[codec.TAG] == kind.__name__
        assert decode(text, direction) == message

    comes_back()


@given(st.lists(NUMBERS))
def test_numbers_keep_all_their_bits(numbers):
    logprobs = tuple(numbers)
    completion = Completion((1,) * len(logprobs), logprobs, "length", 0, 0, "")
    done = messages.GroupDone(messages.Ticket(0), Group(Prompt(0, (1,)), (completion,)), {})
    back = decode(encode(done, FromWorker), FromWorker).group.completions[0].logprobs
    assert [x.hex() for x in back] == [x.hex() for x in numbers]


def test_the_spec_comes_back_as_it_was():
    spec = RolloutSpec(
        "m",
        state={"cursor": {"low": 1, "above": [3]}},
        waiting={7: 2},
        places=4,
        registration={"a": [1]},
    )
    assert spec_from_json(json.loads(json.dumps(spec_to_json(spec)))) == spec


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
        '{"frame": "Load"}',
    ]
    + [
        '{"frame": "Load", "in_flight": {"a": "many"}}',
        '{"frame": "Ready", "more": 1}',
        '{"frame": "Stop"}',
    ],
)
def test_what_is_no_message_is_refused(text):
    with pytest.raises(PeerError, match=r"frame can not be read|frame must be JSON"):
        decode(text, FromWorker)
    with pytest.raises(PeerError, match="can not be read"):
        spec_from_json({"model_dir": "m", "nonsense": 1})


@pytest.mark.parametrize("value", [math.nan, object(), {"y": 1j}])
def test_a_payload_without_a_json_form_is_the_tasks_mistake(value):
    prompt = Prompt(0, (1,), {"x": value})
    done = messages.GroupDone(messages.Ticket(0), Group(prompt, ()), {})
    with pytest.raises(DataError, match="prompts need a JSON payload"):
        encode(done, FromWorker)


def test_the_format_tells_other_messages_apart():
    lines = set(codec.shape(ToWorker))
    assert "Ticket(index: <class 'int'>, attempt: <class 'int'>" in " ".join(lines)
    assert any(line.startswith("Partial(") for line in lines)
    assert any(line.startswith("Prompt(") for line in codec.shape(FromWorker))
