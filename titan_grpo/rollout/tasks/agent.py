"""The task of agents that call a chat endpoint (``rollout.agent``, docs/agents.md); parsers of tool
calls in a model's text; and ``load``, which loads any task in the rollout process."""

import inspect
import json
import re
from collections.abc import Callable
from typing import Any

from titan_grpo.config.task import ENGINE, OUTSIDE
from titan_grpo.engines.generation import ToolCalls
from titan_grpo.errors import NOT_JSON, ConfigError
from titan_grpo.rollout.codec import TextCodec
from titan_grpo.rollout.messages import RolloutSpec
from titan_grpo.rollout.task_runner import AnyTask, Codec, Filter
from titan_grpo.rollout.tasks.dataset import Rows, open_rows
from titan_grpo.rollout.tasks.functions import filter_of, load_function, ready
from titan_grpo.samples import Prompt


class AgentRows:
    """Rows for agents. An agent's calls determine the prompt, so a row has none."""

    def __init__(
        self, function: Callable[..., Any] | None, rows: Rows | None, seed: int = 0
    ) -> None:
        """``function``: ``agent(base_url, api_key, row) -> reward``; None: agents are outside."""
        self.function, self._rows, self._seed = function, rows, seed

    @classmethod
    def load(cls, spec: RolloutSpec) -> "AgentRows":
        """Import the function and open the dataset. Raises ConfigError or DataError."""
        outside = spec.agent == OUTSIDE
        function = None if outside else load_function("rollout.agent", spec.agent)
        if function:
            _check_call(function, spec.agent)
        rows = open_rows(spec) if spec.dataset else None
        if outside and rows is not None:
            _check_json(rows, spec.dataset)
        return cls(function, rows, spec.seed)

    def prompt(self, index: int, codec: Codec) -> Prompt:
        """Return a prompt without tokens; its payload is the row's number in the dataset."""
        return Prompt(index, (), {} if self._rows is None else {"row": self._rows.number(index)})

    def row(self, index: int) -> dict[str, Any]:
        """Return the agents' argument: a row of the dataset, or index and seed without one."""
        if self._rows is None:
            return {"index": index, "seed": self._seed}
        return self._rows[self._rows.number(index)]


def _check_call(function: Callable[..., Any], path: str) -> None:
    """Raise ConfigError if the function does not take (base_url, api_key, row)."""
    try:
        inspect.signature(function).bind("base_url", "api_key", {})
    except (TypeError, ValueError) as error:  # ValueError: a function in C without a signature
        raise ConfigError(
            f"rollout.agent {path!r} must take (base_url, api_key, row): {error}"
        ) from error


def _check_json(rows: Rows, name: str) -> None:
    """Raise ConfigError if the first row that passes the filters is no JSON: it goes over HTTP."""
    for column, value in rows[rows.number(0)].items():
        try:
            json.dumps(value)
        except (TypeError, ValueError) as error:
            raise ConfigError(
                f'with rollout.agent = "outside" rows go to the agents as JSON, and column'
                f" {column!r} of rollout.dataset {name!r} has {type(value).__name__}: {error};"
                " convert the column, or remove it from the dataset"
            ) from error


ToolParser = Callable[[str], tuple[str, ToolCalls]]
"""Function from an answer's text to the text without tool calls, and the calls. A text without
calls, or with malformed ones, is returned whole, with no calls."""

# No white space around the group, which JSON allows: it would make the search quadratic in a run of
# blanks, in the loop.
_HERMES = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)


def hermes(text: str) -> tuple[str, ToolCalls]:
    """Parse ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``, one or more after the
    text: Hermes, Qwen 2.5 and Qwen 3. What a model drafts while it thinks is no call.

    >>> hermes('So.<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>')
    ('So.', [('add', {'a': 1})])
    >>> hermes("<tool_call>{broken</tool_call>")
    ('<tool_call>{broken</tool_call>', [])
    >>> hermes('<think>or <tool_call>{"name": "add"}</tool_call>?</think>No.')[1]
    []
    """
    said = text.rpartition("</think>")[2].partition("<think>")[0]
    calls = [_call(found) for found in _HERMES.findall(said)]
    known = [call for call in calls if call is not None]
    if not known or len(known) < len(calls):
        return text, []
    return text[: text.index("<tool_call>", text.rfind("</think>") + 1)].rstrip("\n"), known


def llama3_json(text: str) -> tuple[str, ToolCalls]:
    """Parse ``{"name": ..., "parameters": {...}}`` as the whole text, several separated by ";":
    Llama 3.1 and 3.2, also after ``<|python_tag|>``.

    >>> llama3_json('{"name": "add", "parameters": {"a": 1}}')
    ('', [('add', {'a': 1})])
    """
    rest, calls = text.strip().removeprefix("<|python_tag|>").strip(), []
    while rest:
        try:
            value, end = json.JSONDecoder().raw_decode(rest)
        except NOT_JSON:
            return text, []
        call = _read(value)
        if call is None:
            return text, []
        calls.append(call)
        rest = rest[end:].lstrip(" \n;")
    return ("", calls) if calls else (text, [])


PARSERS: dict[str, ToolParser] = {"hermes": hermes, "llama3_json": llama3_json}
"""Built-in parsers by their value of ``rollout.tool_parser``."""


def load_parser(name: str) -> ToolParser | None:
    """Return the parser for a value of ``rollout.tool_parser``; None: the engine's own. Raises
    ConfigError for an unknown one."""
    if name == ENGINE:
        return None
    if name in PARSERS:
        return PARSERS[name]
    if ":" not in name:
        raise ConfigError(
            f"rollout.tool_parser must be one of {', '.join((*PARSERS, ENGINE))} or"
            f' "package.module:function", got {name!r}'
        )
    return load_function("rollout.tool_parser", name)


def _call(text: str) -> tuple[str, dict[str, Any]] | None:
    try:
        return _read(json.loads(text))
    except NOT_JSON:  # a policy may repeat "[" for thousands of tokens
        return None


def _read(value: Any) -> tuple[str, dict[str, Any]] | None:
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return None
    arguments = value.get("arguments", value.get("parameters", {}))
    return (value["name"], arguments) if isinstance(arguments, dict) else None


def load(spec: RolloutSpec) -> tuple["AnyTask | AgentRows", TextCodec, Filter | None]:
    """Return the task, the tokenizer, and the filter of finished groups. The commands load the same
    before they start a server.

    Raises ConfigError or DataError for a mistake in the config or dataset, TaskFailed if the user's
    code fails.
    """
    task: AnyTask | AgentRows
    if spec.agent:
        task, codec = AgentRows.load(spec), TextCodec(spec.model_dir, spec)
        codec.chat("")  # raises without a chat template
        load_parser(spec.tool_parser)
    else:
        task, codec = ready(spec)
    return task, codec, filter_of(spec, task)
