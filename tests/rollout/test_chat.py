"""Prompts in a model's chat template are, token for token, those of transformers."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from titan_grpo.config.task import TaskKeys
from titan_grpo.errors import ConfigError, DataError
from titan_grpo.rollout.codec import ChatTemplate, TextCodec, check_messages

FEATURES = """
{%- set seen = namespace(users=0) -%}
{{- bos_token -}}
{%- if tools %}
    {{- "tools:\\n" }}
    {%- for tool in tools %}
        {{- tool | tojson }}
        {{- tool | tojson(indent=2) }}
    {%- endfor %}
{%- endif %}
{%- for message in messages %}
    {%- if message.role not in ("system", "user", "assistant", "tool") %}
        {{- raise_exception("unknown role " ~ message.role) }}
    {%- endif %}
    {%- if message.role == "tool" %}{% continue %}{% endif %}
    {%- if message.role == "user" %}{% set seen.users = seen.users + 1 %}{% endif %}
    {%- if message.role == "assistant" %}
{% generation %}{% set inner = 1 %}{{ message.content | trim }}{{ eos_token }}{% endgeneration %}
    {%- else %}
        {{- message.role + ": " + message["content"].strip() + "<&>'" }}
    {%- endif %}
    {%- if message.tool_calls is defined %}
        {{- message.tool_calls | tojson }}
    {%- endif %}
    {%- if inner is defined %}leaked{% endif %}
{%- endfor %}
{{- seen.users }}{{ strftime_now("%Y") }}{{ date_string }}{{ missing }}
    {% if add_generation_prompt %}
assistant:{% if not enable_thinking | default(true) %} <think></think>{% endif %}
    {% endif %}
"""

TALK: list[dict[str, Any]] = [
    {"role": "system", "content": "Be short."},
    {"role": "user", "content": " What is 2<3 & \u00e9?\n"},
    {"role": "assistant", "content": "ask ", "tool_calls": [{"name": "f", "arguments": {"x": 1}}]},
    {"role": "tool", "content": "5"},
    {"role": "user", "content": "And now?"},
]
TOOL: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": "f", "description": "<b>\u00e9</b>"}}
]


def reference(
    model: str,
    template: str | None,
    messages: list[dict[str, Any]],
    tools: list[dict[str, Any]] | None,
    variables: dict[str, Any],
) -> tuple[int, ...]:
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(model)
    options: dict[str, Any] = {} if template is None else {"chat_template": template}
    return tuple(
        tokenizer.apply_chat_template(
            messages, tools, add_generation_prompt=True, return_dict=False, **options, **variables
        )
    )


@pytest.mark.parametrize("variables", [{}, {"enable_thinking": False, "date_string": "today"}])
@pytest.mark.parametrize("tools", [None, TOOL])
@pytest.mark.parametrize("messages", [TALK, TALK[:2], TALK[1:2]])
def test_a_template_gives_the_tokens_that_transformers_gives(
    model: str,
    tmp_path: Path,
    messages: list[dict[str, Any]],
    tools: list[dict[str, Any]] | None,
    variables: dict[str, Any],
) -> None:
    path = tmp_path / "template.jinja"
    path.write_text(FEATURES, encoding="utf-8-sig")  # as some editors write it
    keys = TaskKeys(chat_template=str(path), chat_template_kwargs=variables)
    found = TextCodec(model, keys).chat(messages, tools)
    assert found == reference(model, FEATURES, messages, tools, variables)
    assert found.count(1) == 1  # one <bos>


def test_a_field_without_a_value_is_as_good_as_absent(model: str, tmp_path: Path) -> None:
    """As in transformers, from 5.1 on: JSON tables give each message the fields of all."""
    path = tmp_path / "template.jinja"
    path.write_text(FEATURES)
    codec = TextCodec(model, TaskKeys(chat_template=str(path)))
    assert codec.chat([TALK[1] | {"tool_calls": None}]) == codec.chat(TALK[1:2])


def test_the_models_own_template_gives_the_tokens_that_transformers_gives(model: str) -> None:
    codec = TextCodec(model)
    assert codec.chat(messages=TALK[:2]) == reference(model, None, TALK[:2], None, {})
    assert codec.chat("hi") == (1, *codec.encode("user: hi\nassistant:"))


def test_a_prompt_is_neither_cut_nor_padded_by_what_the_tokenizers_file_was_saved_with(
    model: str, tmp_path: Path
) -> None:
    shutil.copytree(model, tmp_path, dirs_exist_ok=True)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=100)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    codec = TextCodec(str(tmp_path))
    assert codec.chat(TALK[:2]) == reference(str(tmp_path), None, TALK[:2], None, {})
    assert codec.decode(codec.encode("a longer text")) == "a longer text"


def test_templates_that_engines_ship_give_the_tokens_that_transformers_gives(
    model: str, root: Path
) -> None:
    folder = "lib/python3*/site-packages/vllm/transformers_utils/chat_templates/*.jinja"
    paths = sorted((root / ".venv-vllm").glob(folder))
    assert paths, "no templates: has vLLM moved them?"
    for path in paths:
        codec = TextCodec(model, TaskKeys(chat_template=str(path)))
        text = path.read_text()
        assert codec.chat(TALK[:2]) == reference(model, text, TALK[:2], None, {}), path.name


@pytest.mark.parametrize(
    ("files", "tools", "expected"),
    [
        ({"tokenizer_config.json": {"chat_template": "settings"}}, None, "settings"),
        ({"chat_template.json": {"chat_template": "older"}}, None, "older"),
        (
            {
                "tokenizer_config.json": {"chat_template": "settings"},
                "chat_template.jinja": "own{{ bos_token }}",
                "special_tokens_map.json": {"bos_token": {"content": "<s>"}},
            },
            None,
            "own<s>",
        ),
        *(
            (
                {
                    "tokenizer_config.json": {
                        "chat_template": [
                            {"name": "default", "template": "plain"},
                            {"name": "tool_use", "template": "tools"},
                        ]
                    }
                },
                tools,
                expected,
            )
            for tools, expected in ((None, "plain"), (TOOL, "tools"))
        ),
        (
            {"chat_template.jinja": "plain", "additional_chat_templates/tool_use.jinja": "tools"},
            TOOL,
            "tools",
        ),
    ],
)
def test_a_template_is_found_wherever_models_keep_it(
    tmp_path: Path,
    files: dict[str, Any],
    tools: list[dict[str, Any]] | None,
    expected: str,
) -> None:
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(content if isinstance(content, str) else json.dumps(content))
    assert ChatTemplate.of_model(str(tmp_path), TaskKeys()).render(TALK, tools) == expected


def test_a_missing_or_broken_template_is_the_configurations_mistake_in_one_line(
    tmp_path: Path,
) -> None:
    with pytest.raises(
        ConfigError, match=r'has none: set rollout\.chat_template to .* or to "none"'
    ):
        ChatTemplate.of_model(str(tmp_path), TaskKeys())
    broken = tmp_path / "broken.jinja"
    broken.write_text("{% if %}")
    with pytest.raises(ConfigError, match=r"broken\.jinja is no template: Expected an expression"):
        ChatTemplate.of_model(str(tmp_path), TaskKeys(chat_template=str(broken)))
    with pytest.raises(ConfigError, match=r"rollout\.chat_template cannot be read"):
        ChatTemplate.of_model(str(tmp_path), TaskKeys(chat_template=str(tmp_path / "absent.jinja")))


@pytest.mark.parametrize(
    "text", ["{{ raise_exception('no system role') }}", "{{ messages[9].role.x }}", "{{ 1 + 'a' }}"]
)
def test_messages_that_a_template_refuses_are_named(tmp_path: Path, text: str) -> None:
    template = ChatTemplate({"default": text}, {}, "the model")
    with pytest.raises(DataError, match=r"template of the model refuses .*Be short"):
        template.render(TALK)


def test_a_template_cannot_reach_the_interpreter() -> None:
    escape = "{{ messages.__class__.__mro__[1].__subclasses__() }}{{ messages.append(1) }}"
    with pytest.raises(DataError, match="SecurityError"):
        ChatTemplate({"default": escape}, {}, "a stranger").render(TALK)


def test_a_text_is_left_as_it_is_without_a_template(model: str) -> None:
    codec = TextCodec(model, TaskKeys(chat_template="none"))
    assert codec.chat("1+1=") == codec.encode("1+1=")
    with pytest.raises(DataError, match="prompts must be texts"):
        codec.chat(TALK)


@pytest.mark.parametrize(
    ("messages", "fault"),
    [
        (TALK, ""),
        ([], "or an empty one"),
        ("hi", "is no list of messages"),
        ([{"content": "x"}], '"role"'),
        (["x"], '"role"'),
        ([{"role": "user", "content": None}], 'user message without "content"'),
        ([{"role": "system"}, *TALK], 'system message without "content"'),
        ([TALK[0], {"role": "assistant", "content": None}, TALK[0]], ""),
        (TALK[:3], "ends with the assistant"),
    ],
)
def test_messages_that_a_model_cannot_answer_are_told_apart(messages: object, fault: str) -> None:
    found = check_messages(messages)
    assert fault in found
    assert bool(found) == bool(fault)
