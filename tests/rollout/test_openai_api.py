"""Chat completions as data: what a request may ask, what is refused by name, and the tools that an
answer calls."""

import json
import time
from typing import Any

import pytest

from titan_grpo.rollout.codec import ChatTemplate
from titan_grpo.rollout.openai_api import (
    ChatAnswer,
    ChatRequest,
    Refused,
    answer_body,
    answer_events,
    parse,
    plain,
)
from titan_grpo.rollout.tasks.agent import hermes, llama3_json

HELLO = [{"role": "user", "content": "hello"}]
TOOL = {"type": "function", "function": {"name": "add", "parameters": {}}}


def request(**fields: Any) -> ChatRequest:
    return parse(json.dumps({"model": "any", "messages": HELLO} | fields).encode(), 1.0)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("n", 2),
        ("logit_bias", {"5": 1}),
        ("response_format", {"type": "json_object"}),
        ("temperature", 0.5),
        ("top_p", 0.9),
        ("top_logprobs", 3),
        ("presence_penalty", 0.1),
        ("seed", 7),
        ("tool_choice", "required"),
        ("parallel_tool_calls", False),
        ("tools", [{"type": "retrieval"}]),
        ("stop", [""]),
        ("max_completion_tokens", 0),
        ("max_tokens", True),
        ("messages", []),
        ("a_field_of_next_year", 1),
    ],
)
def test_a_field_that_cannot_be_done_is_refused_with_its_name_and_value(
    field: str, value: object
) -> None:
    with pytest.raises(Refused, match=f"{field} must be .*, got") as refused:
        request(**{field: value})
    error = refused.value.body["error"]
    assert (refused.value.status, error["param"]) == (400, field)
    assert error["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    "body",
    [b"{", b"[]", b'"text"', b'{"stop": "\\ud800"}', b'{"stop": "\xff"}', b"[" * 100_000],
    ids=["torn", "a list", "a text", "a lone surrogate", "no text", "deep"],
)
def test_a_body_that_is_no_object_is_refused(body: bytes) -> None:
    with pytest.raises(Refused, match="the body must be"):
        parse(body, 1.0)


def test_fields_of_a_usual_client_are_read_and_null_is_left_out() -> None:
    found = request(
        n=1,
        temperature=1,
        top_p=None,
        logit_bias=None,
        seed=None,
        user="me",
        max_tokens=9,
        stop="END",
        tools=[TOOL],
        stream=True,
        stream_options={"include_usage": True},
    )
    assert (found.max_tokens, found.stop, found.tools) == (9, ("END",), (TOOL,))
    assert (found.stream, found.usage, found.calls) == (True, True, True)
    assert not request(tools=[TOOL], tool_choice="none").calls


def test_messages_have_one_form_whatever_a_client_adds() -> None:
    call = {"id": "c", "type": "function", "function": {"name": "add", "arguments": "{}"}}
    said = {"role": "assistant", "content": None, "tool_calls": [call], "refusal": None}
    assert plain(said) == {"role": "assistant", "content": "", "tool_calls": [call]}
    assert plain(said | {"tool_calls": [call | {"index": 0}], "audio": None}) == plain(said)


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning"])
def test_thoughts_in_a_field_of_their_own_reach_the_template(name: str) -> None:
    said = {"role": "assistant", "content": "4"}
    assert plain(said | {name: ""}) == said
    reads = "{% for m in messages %}{{ m.reasoning_content or '' }}>{{ m.reasoning or '' }}"
    template = ChatTemplate({"default": f"{reads}{{% endfor %}}"}, {}, "x")
    assert template.render([plain(said | {name: "2+2"})]) == "2+2>2+2"
    with pytest.raises(Refused, match=r"messages\[0\].reasoning must be a text"):
        request(messages=[said | {name: ["2+2"]}])


@pytest.mark.parametrize(
    ("message", "place"),
    [
        ("text", r"messages\[0\] "),
        ({"role": "user", "content": [{"type": "image_url"}]}, r"messages\[0\].content"),
        ({"role": "user", "content": None}, r"messages\[0\].content must be a text"),
        ({"role": "system"}, r"messages\[0\].content must be a text"),
        ({"role": "assistant", "tool_calls": [{}]}, r"messages\[0\].tool_calls"),
        ({"role": "assistant", "function_call": {"name": "f"}}, r"messages\[0\].function_call"),
        ({"role": "critic", "content": "bad"}, r"messages\[0\].role must be one of system, user"),
    ],
)
def test_a_message_of_another_form_is_refused_with_its_place(message: object, place: str) -> None:
    with pytest.raises(Refused, match=place):
        request(messages=[message])


def test_a_developers_message_is_the_systems_for_the_template() -> None:
    (message,) = request(messages=[{"role": "developer", "content": "Be short."}]).messages
    assert message == {"role": "system", "content": "Be short."}


def test_a_streamed_call_of_tools_has_its_log_probabilities() -> None:
    call = {"id": "c", "type": "function", "function": {"name": "add", "arguments": "{}"}}
    message = {"role": "assistant", "content": "", "tool_calls": [call]}
    answer = ChatAnswer("id", 0, message, "tool_calls", 1, 1, (("<call>", -0.5),))
    sent = answer_events(request(tools=[TOOL], stream=True, logprobs=True), answer)
    events = [json.loads(line[6:]) for line in sent.split(b"\n\n")[:-2]]
    found = [each["choices"][0]["logprobs"] for each in events]
    assert [each["content"][0]["logprob"] for each in found if each] == [-0.5]


def test_the_events_of_an_answer_are_of_its_only_choice() -> None:
    answer = ChatAnswer("id", 0, {"role": "assistant", "content": "a"}, "stop", 1, 1, ())
    sent = answer_events(request(stream=True), answer).split(b"\n\n")[:-2]
    assert {json.loads(line[6:])["choices"][0]["index"] for line in sent} == {0}


def test_a_token_with_a_part_of_a_character_has_no_bytes() -> None:
    shown = (("é", -0.5), ("\ufffd", -1.0))
    answer = ChatAnswer("id", 0, {"role": "assistant", "content": "é"}, "stop", 1, 2, shown)
    (choice,) = answer_body(request(logprobs=True), answer)["choices"]
    assert [each["bytes"] for each in choice["logprobs"]["content"]] == [[195, 169], None]


def test_calls_of_the_hermes_format_are_read_in_their_order() -> None:
    text = 'Two.\n<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>\n'
    text += '<tool_call>{"name": "g", "arguments": {}}</tool_call>'
    assert hermes(text) == ("Two.", [("f", {"x": 1}), ("g", {})])


@pytest.mark.parametrize(
    "text",
    [
        "none",
        "<tool_call>[]</tool_call>",
        '<tool_call>{"name": 3}</tool_call>',
        "{}",
        f"<tool_call>{'[' * 100_000}</tool_call>",
        '{"name": ' * 100_000,
    ],
    ids=lambda text: text[:20],
)
def test_a_text_that_calls_nothing_comes_back_whole(text: str) -> None:
    assert hermes(text) == (text, [])
    assert llama3_json(text) == (text, [])


def test_a_run_of_blanks_in_a_call_costs_no_more_than_other_text() -> None:
    text = '<tool_call>{"name": "' + " " * 40_000 + "x"
    began = time.process_time()
    assert hermes(text) == (text, [])
    assert time.process_time() - began < 1.0


def test_calls_of_llama_3_are_the_whole_text() -> None:
    one = '{"name": "f", "parameters": {"x": 1}}'
    assert llama3_json(f"<|python_tag|>{one}; {one}")[1] == [("f", {"x": 1})] * 2
    assert llama3_json(f"{one} and more") == (f"{one} and more", [])
