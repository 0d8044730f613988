"""The model's tokenizer and chat template, as tasks use them.

Templates are rendered like Hugging Face's ``apply_chat_template`` with ``add_generation_prompt``,
but without transformers: its import loads torch, which takes seconds.
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
from titan_grpo.errors import NOT_JSON, ConfigError, DataError


class TextCodec:
    """Tokenizer and chat template of a model directory (``tokenizer.json``). Uses only
    ``tokenizers``: the rollout process does not load transformers."""

    def __init__(self, model_dir: str, keys: TaskKeys | None = None) -> None:
        """``keys``: settings of the chat template; None: the model's own. The template is read at
        its first use: a task that makes its own text needs none."""
        # Imported here: the trainer imports this package too, and needs no tokenizer.
        from tokenizers import Tokenizer

        path = Path(model_dir) / "tokenizer.json"
        if not path.is_file():
            raise ConfigError(
                "the model's directory (model.hf_assets_path) must have a tokenizer.json, got"
                f" {model_dir!r}"
            )
        try:
            self._tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises no narrower one
            raise ConfigError(
                "the model's directory (model.hf_assets_path) must have a tokenizer.json,"
                f" {model_dir!r} has one that is damaged: {error}"
            ) from error
        # The file keeps the settings of a fine-tuning, which would cut or pad prompts silently.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._model_dir, self._keys = model_dir, keys or TaskKeys()
        self._template: ChatTemplate | None = None

    def encode(self, text: str) -> tuple[int, ...]:
        """Return the token ids of a text, without added special tokens. Raises DataError for a
        text that UTF-8 cannot write."""
        try:
            return tuple(self._tokenizer.encode(text, add_special_tokens=False).ids)
        except TypeError as error:
            raise DataError(
                "a text for the tokenizer must be a str without a lone surrogate, got"
                f" {text!r:.100}"
            ) from error

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of token ids, without special tokens."""
        return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=True))

    def chat(
        self, messages: str | Sequence[Mapping[str, Any]], tools: Sequence[Any] | None = None
    ) -> tuple[int, ...]:
        """Return the token ids of a prompt: messages in the chat template, up to the start of the
        model's answer. A text is one user message; with rollout.chat_template = "none" it is the
        prompt itself.

        Raises ConfigError without a template, DataError for messages that it refuses.
        """
        if self._keys.chat_template == TEXT:
            if not isinstance(messages, str):
                raise DataError(
                    f'prompts must be texts with {self._keys.section}.chat_template = "{TEXT}", got'
                    f" {messages!r:.200}"
                )
            return self.encode(messages)
        if isinstance(messages, str):
            messages = [{"role": "user", "content": messages}]
        # The template writes the special tokens itself: encode adds no second <bos>.
        return self.encode(self.render(messages, tools))

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Any] | None = None,
        ask: bool = True,
    ) -> str:
        """Return the text of messages in the chat template; with ``ask`` up to the start of the
        model's answer. Raises as ``chat``."""
        if self._template is None:
            self._template = ChatTemplate.of_model(self._model_dir, self._keys)
        variables = {"add_generation_prompt": ask, **self._keys.chat_template_kwargs}
        return self._template.render(messages, tools, **variables)

    def spell(self, token_ids: Sequence[int]) -> str:
        """Return the text of token ids, special tokens included."""
        return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=False))


Messages = Sequence[Mapping[str, Any]]

DEFAULT, TOOLS = "default", "tool_use"
"""Names of templates if a model has several; the second is for prompts with tools."""


class ChatTemplate:
    """Compiled templates of one model. The rendered text holds all special tokens, so encode it
    without adding any."""

    def __init__(
        self, templates: Mapping[str, str], tokens: Mapping[str, str], source: str
    ) -> None:
        """``templates``: text by name. ``tokens``: special tokens by name (bos_token, ...).
        ``source``: their origin, for error messages. Raises ConfigError if one does not compile."""
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
        """Return the template of the file that the keys name, else of a directory in the Hugging
        Face layout. Raises ConfigError if there is none."""
        folder, own, key = Path(model_dir), keys.chat_template, f"{keys.section}.chat_template"
        settings = _json_file(folder / "tokenizer_config.json")
        tokens = _special_tokens(_json_file(folder / "special_tokens_map.json") | settings)
        if own:
            return cls({DEFAULT: _read(own, key)}, tokens, own)
        templates = templates_of(folder)
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
        """Return the text of messages. ``variables`` take precedence over special tokens.

        Raises DataError if the template raises any error, ConfigError without a default template.
        """
        # Drop null values: Arrow gives every row all keys that any row has, and a template would
        # take null for content.
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
    """Return why a value is no list of messages that a model can answer; empty if it is one."""
    if not isinstance(messages, list) or not messages:
        return "is no list of messages, or an empty one"
    for message in messages:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            return 'has a message without a "role"'
        # A template would write nothing, or "None". An assistant's tool call has no content.
        if message["role"] in ("system", "user") and message.get("content") is None:
            return f'has a {message["role"]} message without "content"'
    if messages[-1]["role"] == "assistant":
        return "ends with the assistant's message, which the model is to write"
    return ""


def templates_of(folder: Path) -> dict[str, str]:
    """Return a model's templates by name; empty: it has none. Template files take precedence over
    tokenizer settings. Raises ConfigError for a file that cannot be read."""
    found = _json_file(folder / "tokenizer_config.json").get("chat_template")
    if not found:
        found = _json_file(folder / "chat_template.json").get("chat_template")
    if isinstance(found, list):
        try:
            templates = {str(each["name"]): str(each["template"]) for each in found}
        except (TypeError, LookupError) as error:
            raise ConfigError(
                f"chat_template in {folder} must be a text, or a list of objects with name and"
                f" template, got {found!r:.100}"
            ) from error
    else:
        templates = {DEFAULT: found} if isinstance(found, str) else {}
    for path in sorted((folder / "additional_chat_templates").glob("*.jinja")):
        templates[path.stem] = _read(str(path))
    own = folder / "chat_template.jinja"
    return templates | ({DEFAULT: _read(str(own))} if own.is_file() else {})


def _special_tokens(settings: Mapping[str, Any]) -> dict[str, str]:
    """Return name -> text of the special tokens in a tokenizer's settings. A token is a text, or an
    object with its text as ``content``."""
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
    except NOT_JSON as error:
        raise ConfigError(f"{path} must be JSON: {error}") from error
    return content if isinstance(content, dict) else {}


def _read(path: str, what: str = "a file of the chat template") -> str:
    try:
        return Path(path).read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{what} cannot be read: {path!r}: {error}") from error


class _Generation(Extension):
    """``{% generation %}...{% endgeneration %}``, which marks the assistant's text for training;
    here it renders its content only."""

    tags = {"generation"}  # noqa: RUF012 - jinja2's interface

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


def _environment() -> ImmutableSandboxedEnvironment:
    """Return the environment that Hugging Face templates expect. Sandboxed: a template is code of
    unknown origin."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _Generation]
    )
    # One fixed time: a prompt made again after a failure, maybe past midnight, must be the same.
    began = datetime.now()
    # Plain JSON: jinja2's own filter escapes HTML.
    environment.filters["tojson"] = partial(json.dumps, ensure_ascii=False)
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = began.strftime
    return environment


def _raise(message: str) -> NoReturn:
    raise TemplateError(message)
