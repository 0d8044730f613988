"""Calls of tools that the servers' own parsers read, with the openai client against an engine that
says and reads what a test tells it."""

from pathlib import Path
from typing import Any, NoReturn

import pytest

from tests.rollout.agents import ADD, HELLO, Agent, caller, client_of, says, talker
from tests.rollout.conftest import Behaviour, GroupOf, answer
from titan_grpo.errors import DataError
from titan_grpo.rollout.agents import Agents
from titan_grpo.rollout.codec import TextCodec
from titan_grpo.rollout.task_runner import TaskFailed
from titan_grpo.rollout.tasks.agent import ToolParser, hermes
from titan_grpo.titan.tiny import EOS

openai = pytest.importorskip("openai")

CODER = "So.<function=add><parameter=a>1</parameter></function>"
"""A call of a tool in a format that nothing here reads."""


def reads(
    codec: TextCodec, *texts: str, status: int = 200, log: list[str] | None = None
) -> Behaviour:
    """A vLLM that says one text after the other, and reads calls of CODER's form in tokens."""
    said = says(codec, *texts)

    def behaviour(body: dict[str, Any]) -> tuple[int, Any]:
        if "generate_response" not in body:
            return said(body)
        (choice,) = body["generate_response"]["choices"]
        assert body["chat_request"]["tools"] == [ADD]
        if log is not None:
            log.append(codec.spell(choice["token_ids"]))
        message: dict[str, Any] = {
            "role": "assistant",
            "content": codec.decode(choice["token_ids"]),
        }
        if codec.spell(choice["token_ids"]) == CODER:
            function = {"name": "add", "arguments": '{"a": 1}'}
            message |= {"content": "So.", "tool_calls": [{"id": "x", "function": function}]}
        elif choice["token_ids"]:
            message["content"] = "less of it"
        return status, {"choices": [{"index": 0, "message": message}]}

    return behaviour


def tool_user(seen: list[Any], **options: Any) -> Agent:
    """An agent that asks with a tool until it gets an answer without a call."""

    def agent(base_url: str, api_key: str, row: dict[str, Any]) -> float:
        client = client_of(base_url, api_key)
        messages: list[Any] = [HELLO]
        reason = "tool_calls"
        while reason == "tool_calls":
            made = client.chat.completions.create(
                model="m", messages=messages, tools=[ADD], **options
            )
            message, reason = made.choices[0].message, made.choices[0].finish_reason
            calls = [(c.function.name, c.function.arguments) for c in message.tool_calls or ()]
            seen.append((reason, message.content, calls))
            messages.append(message.model_dump())
            ids = [call.id for call in message.tool_calls or ()]
            messages += [{"role": "tool", "tool_call_id": id_, "content": "2"} for id_ in ids]
        return 1.0

    return agent


def test_calls_of_tools_reach_the_agent_and_go_on_without_being_written_again(
    group_of: GroupOf, codec: TextCodec
) -> None:
    # No template writes it with these spaces.
    text = '<tool_call>{"name":   "add", "arguments": {"a":1}}</tool_call>'
    seen: list[Any] = []
    asked: list[list[int]] = []
    group = group_of(tool_user(seen), [says(codec, text, "two", log=asked)])
    assert seen == [("tool_calls", None, [("add", '{"a": 1}')]), ("stop", "two", [])]
    assert len(group.completions) == 1
    assert codec.spell(asked[1][len(asked[0]) :]) == f"{text}<eos>\ntool: 2\nassistant:"


CALL = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'


@pytest.mark.parametrize("said", [CALL, CALL.removesuffix("</tool_call>")], ids=["closed", "open"])
def test_calls_are_found_where_their_marks_are_special_tokens(
    group_of: GroupOf, model: str, said: str
) -> None:
    def marks(codec: TextCodec) -> TextCodec:
        codec._tokenizer.add_special_tokens(["<tool_call>", "</tool_call>"])
        return codec

    def look(agents: Agents) -> None:
        marks(agents.codec)

    codec, seen = marks(TextCodec(model)), list[Any]()
    assert codec.decode(codec.encode(CALL)) == '{"name": "add", "arguments": {"a": 1}}'
    group_of(tool_user(seen), [says(codec, said, "two")], look=look)
    assert seen == [("tool_calls", None, [("add", '{"a": 1}')]), ("stop", "two", [])]


WRITTEN = "{{ message.role }}: {{ message.content }}"
ONE = "{% if message.tool_calls|length > 1 %}{{ raise_exception('one') }}{% endif %}"
NOT_LAST = "{% if loop.last and message.tool_calls %}{{ raise_exception('last') }}{% endif %}"
NO_RESULTS = "{% if message.role == 'tool' %}{{ raise_exception('role') }}{% endif %}"


@pytest.mark.parametrize(
    ("written", "said", "called"),
    [
        (ONE, CALL, 1),
        (ONE, 2 * CALL, 0),
        (NOT_LAST, CALL, 1),
        (NO_RESULTS, CALL, 1),
    ],
    ids=["one as by Llama 3", "two as by Llama 3", "never last", "no results"],
)
def test_a_call_that_the_template_cannot_write_is_none(
    group_of: GroupOf, codec: TextCodec, tmp_path: Path, written: str, said: str, called: int
) -> None:
    template, seen = tmp_path / "strict.jinja", list[Any]()
    template.write_text(f"{{% for message in messages %}}{written}{WRITTEN}\n{{% endfor %}}")
    agent = caller({"tools": [ADD]}, seen=seen)
    group_of(agent, [says(codec, said)], chat_template=str(template))
    message, reason = seen[0].choices[0].message, seen[0].choices[0].finish_reason
    assert len(message.tool_calls or ()) == called
    assert (reason, message.content) == (("tool_calls", None) if called else ("stop", said))


def test_the_log_says_once_that_the_template_cannot_write_calls(
    group_of: GroupOf, codec: TextCodec, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    template = tmp_path / "text.jinja"
    # As DeepSeek's: of arguments that are a text.
    text = "{% for call in message.tool_calls %}{{ ':' + call.function.arguments }}{% endfor %}"
    template.write_text(f"{{% for message in messages %}}{text}{WRITTEN}\n{{% endfor %}}")
    agent = caller(*[{"tools": [ADD]}] * 2)
    group_of(agent, [says(codec, CALL)], chat_template=str(template))
    (said,) = caplog.messages
    assert said.startswith("calls of tools that the chat template cannot write reach no agent: ")


def test_a_calls_id_is_one_that_mistrals_templates_take(
    group_of: GroupOf, codec: TextCodec, tmp_path: Path
) -> None:
    template, seen = tmp_path / "mistral.jinja", list[Any]()
    template.write_text(
        "{% for message in messages %}{% for call in message.tool_calls %}"
        "{% if call.id|length != 9 %}{{ raise_exception('length 9') }}{% endif %}"
        f"{{% endfor %}}{WRITTEN}\n{{% endfor %}}"
    )
    group_of(tool_user(seen), [says(codec, CALL, "two")], chat_template=str(template))
    assert [reason for reason, _, _ in seen] == ["tool_calls", "stop"]


def test_the_engine_reads_calls_in_the_tokens_of_its_answer_without_the_end_token(
    group_of: GroupOf, codec: TextCodec
) -> None:
    seen: list[Any] = []
    log: list[str] = []
    group = group_of(tool_user(seen), [reads(codec, CODER, "two", log=log)], tool_parser=None)
    # A text without a call comes back whole, whatever the engine left of it.
    assert seen == [("tool_calls", "So.", [("add", '{"a": 1}')]), ("stop", "two", [])]
    assert log == [CODER, "two"]
    assert len(group.completions) == 1
    assert EOS in group.completions[0].token_ids


def test_the_engine_reads_the_text_before_the_agents_stop(
    group_of: GroupOf, codec: TextCodec
) -> None:
    seen: list[Any] = []
    log: list[str] = []

    def stops(body: dict[str, Any]) -> tuple[int, Any]:
        if "generate_response" in body:
            return read(body)
        ids = codec.encode("two;")
        return answer(list(ids), [-1.0] * len(ids), "stop")

    read = reads(codec, "", log=log)
    group_of(tool_user(seen, stop=";"), [stops], tool_parser=None)
    assert (seen, log) == ([("stop", "two", [])], ["two"])


def test_an_answer_that_no_engine_could_read_is_kept_and_read_by_the_next(
    group_of: GroupOf, codec: TextCodec
) -> None:
    seen: list[Any] = []
    again: list[str] = []
    first = reads(codec, CODER, status=503)
    then = reads(codec, "two")

    def second(body: dict[str, Any]) -> tuple[int, Any]:
        if "generate_response" not in body:
            again.append(codec.spell(body["prompt"]))
        return then(body)

    group = group_of(tool_user(seen), [first, second], tool_parser=None)
    assert [reason for reason, _, _ in seen] == ["tool_calls", "stop"]
    # Sampled by the first server, read by the second, and its context added once.
    assert again == [f"<bos>user: hello\nassistant:{CODER}<eos>\ntool: 2\nassistant:"]
    (completion,) = group.completions
    assert (completion.version_first, completion.version_last) == (3, 4)


@pytest.mark.parametrize("status", [400, 500])
def test_a_call_on_which_the_engines_parser_fails_is_no_call(
    group_of: GroupOf, codec: TextCodec, status: int
) -> None:
    seen: list[Any] = []
    group_of(tool_user(seen), [reads(codec, CODER, status=status)], tool_parser=None)
    assert seen == [("stop", CODER, [])]


def breaks(text: str) -> NoReturn:
    raise DataError("no such format")


def leaves(text: str) -> NoReturn:
    raise SystemExit(3)


def calls_with_a_set(text: str) -> tuple[str, list[tuple[str, dict[str, Any]]]]:
    return "", [("add", {"a": {1, 2}})]


@pytest.mark.parametrize(
    ("parser", "error"),
    [
        (breaks, "DataError: no such format"),
        (leaves, "SystemExit: 3"),
        (calls_with_a_set, "TypeError"),
    ],
)
def test_what_a_tool_parser_does_wrong_is_the_users_error(
    group_of: GroupOf, codec: TextCodec, parser: ToolParser, error: str
) -> None:
    with pytest.raises(TaskFailed, match=f"tool_parser failed: {error}"):
        group_of(talker(1, tools=[ADD]), [says(codec, "one")], tool_parser=parser)


@pytest.mark.parametrize(
    "call",
    [
        '{"name": "\\ud800", "arguments": {}}',
        '{"name": "add", "arguments": {"a": "\\ud800"}}',
        '{"name": "add", "arguments": {"a": NaN}}',
        '{"name": "add", "arguments": {"a": 1e999}}',
    ],
    ids=["name", "arguments", "nan", "infinity"],
)
def test_a_call_that_no_request_could_send_back_is_no_call(
    group_of: GroupOf, codec: TextCodec, call: str
) -> None:
    seen: list[Any] = []
    said = f"<tool_call>{call}</tool_call>"
    group_of(tool_user(seen), [says(codec, said)])
    assert seen == [("stop", said, [])]


def test_arguments_of_an_agent_with_a_lone_surrogate_are_refused(
    group_of: GroupOf, codec: TextCodec, tmp_path: Path
) -> None:
    template = tmp_path / "as_json.jinja"
    template.write_text("{{ messages | tojson }}")
    function = {"name": "add", "arguments": '{"a": "\\ud800"}'}
    call = {"id": "x", "type": "function", "function": function}
    messages: list[Any] = [HELLO, {"role": "assistant", "content": "", "tool_calls": [call]}, HELLO]

    def agent(base_url: str, api_key: str, row: dict[str, Any]) -> float:
        client = client_of(base_url, api_key)
        with pytest.raises(openai.BadRequestError, match="lone surrogate"):
            client.chat.completions.create(model="m", messages=messages, tools=[ADD])
        return talker(1)(base_url, api_key, row)

    group = group_of(agent, [says(codec, "one")], chat_template=str(template))
    assert len(group.completions) == 1


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        (f"<think>maybe {CALL}</think>So.{CALL}", f"<think>maybe {CALL}</think>So.", 1),
        (f"or <tool_call>{{</think>\n{CALL}{CALL}", "or <tool_call>{</think>", 2),
        (f"<think>maybe {CALL}</think>No.", None, 0),
        (f"<think>maybe {CALL}", None, 0),
    ],
    ids=["again outside", "torn inside", "inside alone", "cut off"],
)
def test_a_call_that_a_model_drafts_while_it_thinks_is_none(
    text: str, content: str | None, calls: int
) -> None:
    assert hermes(text) == (text if content is None else content, [("add", {"a": 1})] * calls)
