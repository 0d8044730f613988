"""Types of TOML values against dataclass fields. torchtitan does not look: a wrong type surfaces hours later, or never."""

import difflib
import types
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any, Literal, Union, get_args, get_origin


def mismatches(cls: type, data: Mapping[str, Any], prefix: str = "") -> list[str]:
    """Every unknown key and wrongly typed value of a table, as "key must be rule, got value". Pure; empty if none.

    Example: ``group_size = "eight"`` under ``[rollout]`` gives
    "rollout.group_size must be an integer, got 'eight'".
    """
    known = {f.name: f.type for f in fields(cls)}
    out: list[str] = []
    for name, value in data.items():
        key = f"{prefix}{name}"
        if name not in known:
            out.append(_unknown(key, name, list(known)))
        elif is_dataclass(known[name]):
            nested: Any = known[name]
            out += mismatches(nested, value, f"{key}.") if isinstance(value, Mapping) else [_wrong(key, "a table", value)]
        elif not fits(known[name], value):
            out.append(_wrong(key, describe(known[name]), value))
    return out


def fits(kind: Any, value: Any) -> bool:
    """Whether a TOML value may stand for a field of type ``kind``. An integer may stand for a float, a bool for neither."""
    origin = get_origin(kind)
    if origin is Literal:
        return any(type(value) is type(choice) and value == choice for choice in get_args(kind))
    if origin in (Union, types.UnionType):
        return any(fits(option, value) for option in get_args(kind))
    if origin is list:
        return isinstance(value, list) and all(fits(get_args(kind)[0], item) for item in value)
    if kind is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    if kind in (int, str, bool, types.NoneType):
        return type(value) is kind
    # A type that TOML can not spell (a callable, say) is left to the dataclass itself.
    return True


def describe(kind: Any) -> str:
    """A type in words: "an integer", "one of 'vllm', 'sglang'", "a list of strings"."""
    origin = get_origin(kind)
    if origin is Literal:
        return "one of " + ", ".join(repr(choice) for choice in get_args(kind))
    if origin in (Union, types.UnionType):
        # TOML has no null, so "or nothing" would be no advice.
        return " or ".join(describe(option) for option in get_args(kind) if option is not types.NoneType)
    if origin is list:
        return f"a list, each item {describe(get_args(kind)[0])}"
    words = {int: "an integer", float: "a number", str: "a string", bool: "true or false"}
    return words.get(kind, getattr(kind, "__name__", str(kind)))


def _wrong(key: str, rule: str, value: Any) -> str:
    return f"{key} must be {rule}, got {value!r}"


def _unknown(key: str, name: str, known: list[str]) -> str:
    close = difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean {key.removesuffix(name)}{close[0]}?" if close else f"known are {', '.join(sorted(known))}"
    return f"{key} is not a key of this version of titan_grpo and torchtitan; {hint}"
