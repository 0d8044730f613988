"""The model's tokenizer and chat template, as tasks see them.

A template is rendered as Hugging Face's ``apply_chat_template`` with ``add_generation_prompt``
does, without transformers: that loads torch, and takes seconds.
https://huggingface.co/docs/transformers/chat_templating"""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from titan_grpo.config.task import TEXT, TaskKeys
from titan_grpo.errors import ConfigError, DataError


class TextCodec:
    """The tokenizer of a model directory (its ``tokenizer.json``), without special tokens. Uses
    ``tokenizers`` alone: the rollout process loads no transformers."""

    def __init__(self, model_dir: str, keys: TaskKeys | None = None) -> None:
        """``keys``: of the chat template; None: the model's own. It is read when a prompt first
        asks for it: a task that makes its own text needs none."""
        # Imported here: the trainer's side of this room needs no tokenizer.
        from tokenizers import Tokenizer

        path = Path(model_dir) / "tokenizer.json"
        if not path.is_file():
            raise ConfigError(
                "the model's directory (model.hf_assets_path) must have a tokenizer.json, got"
                f" {model_dir!r}"
            )
        self._tokenizer = Tokenizer.from_file(str(path))
        self._model_dir, self._keys = model_dir, keys or TaskKeys()
        self._template: ChatTemplate | None = None

    def encode(self, text: str) -> tuple[int, ...]:
        """Token ids of a text."""
        return tuple(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of token ids."""
        return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=True))

    def chat(
        self, said: str | Sequence[Mapping[str, Any]], tools: Sequence[Any] | None = None
    ) -> tuple[int, ...]:
        """Token ids of a prompt: messages in the chat template, up to where the model answers. A
        text is the user's one message, or with rollout.chat_template = "none" the prompt as it is.

        Raises ConfigError without a template, DataError for messages that it refuses.
        """
        if self._keys.chat_template == TEXT:
            if not isinstance(said, str):
                raise DataError(
                    f'prompts must be texts with {self._keys.section}.chat_template = "{TEXT}", got'
                    f" {said!r:.200}"
                )
            return self.encode(said)
        messages = [{"role": "user", "content": said}] if isinstance(said, str) else said
        # The text has the special tokens that the template writes: no second <bos>.
        return self.encode(self.render(messages, tools))

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Any] | None = None,
        ask: bool = True,
    ) -> str:
        """The text of messages in the chat template; with ``ask`` up to where the model answers.
        Raises as ``chat``."""
        if self._template is None:
            self._template = ChatTemplate.of_model(self._model_dir, self._keys)
        variables = {"add_generation_prompt": ask, **self._keys.chat_template_kwargs}
        return self._template.render(messages, tools, **variables)

    def spell(self, token_ids: Sequence[int]) -> str:
        """Text of token ids, special tokens included."""
        return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=False))


Messages = Sequence[Mapping[str, Any]]

DEFAULT, TOOLS = "default", "tool_use"
"""Names of templates where a model has several: the second one is for prompts with tools."""


class ChatTemplate:
    """The templates of one model, compiled. The text that they make holds all special tokens, so it
    is encoded without further ones."""

    def __init__(
        self, templates: Mapping[str, str], tokens: Mapping[str, str], source: str
    ) -> None:
        """``templates``: text by name. ``tokens``: special tokens by name (bos_token, ...).
        ``source``: where they are from, for messages. Raises ConfigError for one that does not
        compile."""
        self._tokens, self._source = tokens, source
        environment = _environment()
        try:
            self._templates = {
                name: environment.from_string(text) for name, text in templates.items()
            }
        except TemplateError as error:
            raise ConfigError(f"the chat template of {source} is no template: {error}") from error

    @classmethod
    def of_model(cls, model_dir: str, keys: TaskKeys) -> "ChatTemplate":
        """The template of the file that the keys name, or of a directory in the Hugging Face
        layout. Raises ConfigError where there is none."""
        folder, own, key = Path(model_dir), keys.chat_template, f"{keys.section}.chat_template"
        settings = _json_file(folder / "tokenizer_config.json")
        tokens = _special_tokens(_json_file(folder / "special_tokens_map.json") | settings)
        if own:
            return cls({DEFAULT: _read(own, key)}, tokens, own)
        templates = _templates(folder, settings)
        if not templates:
            raise ConfigError(
                "the model must have a chat template (chat_template.jinja, or chat_template in"
                f" tokenizer_config.json), {model_dir!r} has none: set {key} to a"
                f' Jinja file, or to "{TEXT}" for a base model that gets plain text'
            )
        return cls(templates, tokens, model_dir)

    def render(
        self, messages: Messages, tools: Sequence[Any] | None = None, **variables: Any
    ) -> str:
        """The text up to where the model answers. ``variables`` win over special tokens.

        Raises DataError for messages that the template refuses, or breaks at.
        """
        # Arrow gives every row all keys that any row has; a template takes null for content.
        known = [{k: v for k, v in each.items() if v is not None} for each in messages]
        name = TOOLS if tools and TOOLS in self._templates else DEFAULT
        if name not in self._templates:
            have = ", ".join(sorted(self._templates))
            raise ConfigError(f"{self._source} must have a chat template {name!r}, it has {have}")
        given = {"tools": tools or None, "documents": None, "add_generation_prompt": True}
        try:
            return self._templates[name].render(
                **{"messages": known, **given, **self._tokens, **variables}
            )
        except Exception as error:  # the boundary to a model's code
            raise DataError(
                f"the chat template of {self._source} refuses the messages:"
                f" {type(error).__name__}: {error}: {known!r:.300}"
            ) from error


def check_messages(messages: Any) -> str:
    """Why a value is not a list of messages that a model can answer; empty if it is."""
    if not isinstance(messages, list) or not messages:
        return "is no list of messages, or an empty one"
    for message in messages:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            return 'has a message without a "role"'
        # A template writes nothing for it, or "None". A call of a tool has none, which is right.
        if message["role"] in ("system", "user") and message.get("content") is None:
            return f'has a {message["role"]} message without "content"'
    if messages[-1]["role"] == "assistant":
        return "ends with the assistant's message, which the model is to write"
    return ""


def _templates(folder: Path, settings: Mapping[str, Any]) -> dict[str, str]:
    """All templates of a model by name. Files of their own win over the tokenizer's settings."""
    found = settings.get("chat_template")
    if not found:
        found = _json_file(folder / "chat_template.json").get("chat_template")
    if isinstance(found, list):
        templates = {str(each["name"]): str(each["template"]) for each in found}
    else:
        templates = {DEFAULT: found} if isinstance(found, str) else {}
    for path in sorted((folder / "additional_chat_templates").glob("*.jinja")):
        templates[path.stem] = _read(str(path))
    own = folder / "chat_template.jinja"
    return templates | ({DEFAULT: _read(str(own))} if own.is_file() else {})


def _special_tokens(settings: Mapping[str, Any]) -> dict[str, str]:
    """Name -> text of the special tokens in a tokenizer's settings. A token is a text, or an object
    with its text as ``content``."""
    extra = settings.get("extra_special_tokens")
    out = {}
    for name, value in {**settings, **(extra if isinstance(extra, dict) else {})}.items():
        text = value.get("content") if isinstance(value, dict) else value
        if name.endswith("_token") and isinstance(text, str):
            out[name] = text
    return out


def _json_file(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        content = json.loads(_read(str(path)))
    except ValueError as error:
        raise ConfigError(f"{path} must be JSON: {error}") from error
    return content if isinstance(content, dict) else {}


def _read(path: str, what: str = "a file of the chat template") -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{what} cannot be read: {path!r}: {error}") from error


class _Generation(Extension):
    """``{% generation %}...{% endgeneration %}`` marks what the assistant wrote, for training on
    it; here it is its content."""

    tags = {"generation"}  # noqa: RUF012 - jinja2's interface

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


def _environment() -> ImmutableSandboxedEnvironment:
    """What templates of the Hugging Face layout may use. Sandboxed: a template is code of
    unknown origin."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _Generation]
    )
    # A group's prompt is made again after a failure, maybe past midnight, and must be the same.
    began = datetime.now()
    # JSON as it is: jinja2's own filter escapes HTML.
    environment.filters["tojson"] = partial(json.dumps, ensure_ascii=False)
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = began.strftime
    return environment


def _raise(message: str) -> NoReturn:
    raise TemplateError(message)
