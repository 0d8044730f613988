"""Calls of tools in a model's text, by the format that the model writes. Pure.

The engines' own parsers sit behind their chat routes, which take messages and not tokens, so they
cannot be asked: what is sampled here must be token in, token out.
"""

import json
import re
from collections.abc import Callable
from typing import Any

Calls = list[tuple[str, dict[str, Any]]]
"""(name of the tool, its arguments), in their order."""

ToolParser = Callable[[str], tuple[str, Calls]]
"""From an answer's text to what is left for the user, and the calls in it. A text that calls no
tool, or does so in a form that cannot be read, comes back whole, with no calls."""

_HERMES = re.compile(r"<tool_call>\s*(.*?)\s*(?:</tool_call>|\Z)", re.DOTALL)


def hermes(text: str) -> tuple[str, Calls]:
    """``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``, once or several times after
    the text: Hermes, Qwen 2.5 and Qwen 3.

    >>> hermes('So.<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>')
    ('So.', [('add', {'a': 1})])
    >>> hermes("<tool_call>{broken</tool_call>")
    ('<tool_call>{broken</tool_call>', [])
    """
    calls = [_call(found) for found in _HERMES.findall(text)]
    known = [call for call in calls if call is not None]
    if not known or len(known) < len(calls):
        return text, []
    return text[: text.index("<tool_call>")].rstrip("\n"), known


def llama3_json(text: str) -> tuple[str, Calls]:
    """``{"name": ..., "parameters": {...}}`` as the whole text, several of them parted by ";":
    Llama 3.1 and 3.2, also after ``<|python_tag|>``.

    >>> llama3_json('{"name": "add", "parameters": {"a": 1}}')
    ('', [('add', {'a': 1})])
    """
    rest, calls = text.strip().removeprefix("<|python_tag|>").strip(), []
    while rest:
        try:
            value, end = json.JSONDecoder().raw_decode(rest)
        except ValueError:
            return text, []
        call = _read(value)
        if call is None:
            return text, []
        calls.append(call)
        rest = rest[end:].lstrip(" \n;")
    return ("", calls) if calls else (text, [])


PARSERS: dict[str, ToolParser] = {"hermes": hermes, "llama3_json": llama3_json}
"""By the values of ``rollout.tool_parser`` that are no function of the user's."""


def _call(text: str) -> tuple[str, dict[str, Any]] | None:
    try:
        return _read(json.loads(text))
    except ValueError:
        return None


def _read(value: Any) -> tuple[str, dict[str, Any]] | None:
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return None
    arguments = value.get("arguments", value.get("parameters", {}))
    return (value["name"], arguments) if isinstance(arguments, dict) else None
