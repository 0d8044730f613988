"""From a job's file and arguments to one dataclass: torchtitan's sections and ours.

torchtitan 0.2.2 has such a merge, 0.3 has none: this one gives a file the same meaning on both.
Neither checks the types of TOML values: a wrong one would surface hours later, or never.

Modules whose dataclasses are merged must not use ``from __future__ import annotations``: field
types are read as types.
"""

import contextlib
import difflib
import importlib
import io
import json
import math
import os
import re
import sys
import tomllib
import traceback
import types
from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from dataclasses import field, fields, is_dataclass, make_dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

import msgspec

from titan_grpo.config import older
from titan_grpo.errors import NOT_JSON, ConfigError
from titan_grpo.subprocesses import received

OURS = "titan_grpo.config"
"""Default of ``job.custom_config_module``."""

_TYPES = {
    "str | None": str | None,
    "int | None": int | None,
    "float | None": float | None,
    "float | int": float | int,
    "list[list[str]] | None": list[list[str]] | None,
}


FLAGS = "a boolean is a flag without a value: --grpo.KEY for true, --grpo.no-KEY for false"
"""Remedy of a boolean with a value on the command line."""

DASHES = "a value that begins with - needs =, as in --rollout.launch_args=--enforce-eager"
"""Remedy of an argument whose value was taken for the next argument."""

FILE = "the job's file is named by --job.config_file"
"""Remedy of a TOML file without an option."""

_STRAY = re.compile(r"Unrecognized options: (true|false)\b", re.IGNORECASE)


REFUSED = 5
"""Broken rules that are named in one refusal."""


def _section(name: str, keys: Mapping[str, Any]) -> type:
    """Return the dataclass of a table of sections.toml; that file describes its format."""
    members: list[tuple[str, Any, Any]] = []
    kind: Any
    for key, value in keys.items():
        if not isinstance(value, dict):
            kind = list[str] if isinstance(value, list) else type(value)
            members.append((key, kind, field(default_factory=partial(copy, value))))
        elif value.keys() & {"type", "one_of"}:
            choices = tuple(value.get("one_of", ()))
            kind = Literal[choices] if choices else _TYPES[value["type"]]
            members.append((key, kind, field(default=value.get("default"))))
        else:
            nested = _section(key, value)
            members.append((key, nested, field(default_factory=nested)))
    return make_dataclass(name, members, namespace={"__doc__": f"[{name}]."})


JobConfig: Any = _section(
    "JobConfig", tomllib.loads(Path(__file__).with_name("sections.toml").read_text("utf-8"))
)
"""Dataclass of a whole job file with the sections of torchtitan 0.2.2, without titan_grpo's."""


def argument(args: Sequence[str], key: str) -> str | None:
    """Return the last value that arguments give to a dotted key: "" for a key without a value, None
    without the key."""
    found = None
    for position, arg in enumerate(args):
        name, equals, value = arg.partition("=")
        if name.replace("-", "_") == f"__{key}":
            found = value if equals else "".join(args[position + 1 : position + 2])
    return found


def read_toml(path: str | Path, key: str) -> dict[str, Any]:
    """Return the content of the TOML file that ``key`` names. Raises ConfigError if it is missing,
    unreadable or not TOML."""
    try:
        # utf-8-sig: tomllib refuses the byte-order mark that some editors write.
        return tomllib.loads(Path(path).read_text(encoding="utf-8-sig"))
    except (OSError, ValueError, RecursionError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(
            f"{key} must be a readable TOML file, got {str(path)!r}: {reason}"
        ) from error


def base_of(config: Any) -> str:
    """Return the folder of the Hugging Face files whose weights a job begins with, which are the
    base of its adapters."""
    keys = config.checkpoint
    other = keys.initial_load_path if keys.initial_load_in_hf else None
    return str(other or config.model.hf_assets_path)


def read_config(place: str | Path) -> dict[str, Any]:
    """Return the content of a model's config.json: ``place`` itself, or a file in it; empty if
    there is none. Raises ConfigError if it is unreadable."""
    path = Path(place) / "config.json" if Path(place).is_dir() else Path(place)
    try:
        found = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    except (OSError, *NOT_JSON) as error:
        raise ConfigError(f"{path} must be a model's config.json: {error}") from error
    if not isinstance(found, dict):
        raise ConfigError(f"{path} must be a model's config.json, it has no table")
    text = found.get("text_config") or found
    parts = [("text_config", text)]
    if isinstance(text, dict):
        parts += [(name, text.get(name) or {}) for name in ("rope_parameters", "rope_scaling")]
    for name, part in parts:
        if not isinstance(part, dict):
            raise ConfigError(f"{name} in {path} must be a table, got {part!r:.100}")
    return found


QUANTISED = "quantization_config", "compression_config"
"""Keys of a config.json whose weights are quantised."""


def quantised(config: Mapping[str, Any]) -> bool:
    """Return whether a config.json says that the weights beside it are quantised."""
    return any(config.get(key) for key in QUANTISED)


def load_toml(args: Sequence[str]) -> dict[str, Any]:
    """Return the content of the file that ``--job.config_file`` names; empty without one. Raises
    ConfigError."""
    path = argument(args, "job.config_file")
    if path is None:
        return {}
    if not path or path.startswith("--"):
        raise ConfigError(
            f"job.config_file must name a TOML file, got {path or 'nothing'!r} after"
            " --job.config_file"
        )
    return read_toml(path, "job.config_file")


def given_keys(args: Sequence[str], table: Mapping[str, Any]) -> set[str]:
    """Return the dotted keys that arguments and the first two levels of a file set: ``["--a.no-b",
    "--c.d=1"]`` and ``{"e": {"f": 2}}`` -> {"a.b", "c.d", "e.f"}. Pure."""
    names = (arg[2:].partition("=")[0].replace("-", "_") for arg in args if arg.startswith("--"))
    sections = {name: keys for name, keys in table.items() if isinstance(keys, dict)}
    return {name.replace(".no_", ".", 1) for name in names} | {
        f"{section}.{key}" for section, keys in sections.items() for key in keys
    }


def refuse(broken: Sequence[str]) -> None:
    """Raise ConfigError with the first REFUSED of these lines and the number of others, if there
    are any."""
    if broken:
        more = f" (and {len(broken) - REFUSED} more)" if len(broken) > REFUSED else ""
        raise ConfigError("; ".join(broken[:REFUSED]) + more)


@contextlib.contextmanager
def importing(key: str, what: str = "") -> Iterator[None]:
    """Turn every error of the module that ``key`` names into a ConfigError."""
    # torchrun -m makes the current directory importable; do the same for the titan-grpo command.
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        yield
    except (Exception, SystemExit) as error:  # the boundary to the user's module
        if received:  # not the module's: a signal ends this process
            raise
        frame = traceback.extract_tb(error.__traceback__)[-1]
        raise ConfigError(
            f"{key} must be an importable module{what}: {type(error).__name__}:"
            f" {one_line(str(error))} ({frame.filename}, line {frame.lineno})"
        ) from error


def load(base: Any, args: Sequence[str], table: Mapping[str, Any]) -> Any:
    """Return the sections of ``base`` and of ``job.custom_config_module``, with the values of the
    file and the arguments. Argument beats TOML beats default. Raises ConfigError for a mistake in
    any of these."""
    job = table.get("job", {})
    module = argument(args, "job.custom_config_module")
    if module is None:
        module = str(job.get("custom_config_module", "")) if isinstance(job, Mapping) else ""
    kind: Any = base
    if module:
        with importing("job.custom_config_module", " with a dataclass JobConfig"):
            kind = merged(base, importlib.import_module(module).JobConfig)
    missing = {"grpo", "rollout", "weight_sync"} - set(kind.__dataclass_fields__)
    if missing:
        raise ConfigError(
            f"job.custom_config_module must keep the sections of {OURS} (subclass its JobConfig),"
            " got one without " + ", ".join(sorted(missing))
        )
    # Before _filled, which accepts any type and fails with a traceback at an unknown key.
    refuse(mismatches(kind, table))
    output = io.StringIO()
    try:
        with contextlib.redirect_stderr(output):
            return _with_arguments(kind, args, table)
    except SystemExit as stop:
        if not stop.code or received:  # --help, or a signal
            raise
        words = one_line(output.getvalue())
        option = re.search(r"--([\w.-]+)", words)
        hint = older.hint(option[1].replace("-", "_")) if option else ""
        if _STRAY.match(words):
            hint = FLAGS
        elif re.match(r"Unrecognized options: [^-]\S*\.toml\b", words):
            hint = FILE
        elif words.startswith("Missing value"):
            hint = DASHES
        raise ConfigError(f"command line: {words}{hint and '; ' + hint}") from stop
    except (ValueError, TypeError, AssertionError) as error:  # the last: torchtitan's own checks
        raise ConfigError(f"configuration: {one_line(str(error))}") from error


def one_line(text: str) -> str:
    """Return the argument parser's framed message as one line without frame, colours and help.
    Pure."""
    plain = re.sub(r"\x1b\[[0-9;]*m", "", text)
    # The frame is of hyphens where the standard output has another encoding than UTF-8.
    words = " ".join(re.sub(r"[\u2500-\u257f]+|-{10,}", " ", plain).split())
    words = re.sub(
        r"^(Parsing error|Value error|Invalid choice|Unrecognized options|Missing argument)\s+",
        "",
        words,
    )
    words = re.split(r" Argument helptext| For full helptext", words, maxsplit=1)[0]
    # Keep only the first suggestion, without the help that follows it.
    return re.sub(r" Perhaps you meant: (--[^\s,]+).*", r"; did you mean \1?", words)


def merged(base: Any, custom: Any) -> type:
    """Return a dataclass with the fields of both. Sections that both have are merged; any other
    field that both have is that of ``custom``."""
    theirs = {f.name: f for f in fields(custom)}
    out: list[Any] = []
    for f in fields(base):
        other = theirs.pop(f.name, None)
        if other is not None and is_dataclass(f.type) and is_dataclass(other.type):
            kind = merged(f.type, other.type)
            out.append((f.name, kind, field(default_factory=kind)))
        else:
            chosen = other or f
            out.append((f.name, chosen.type, chosen))
    out += [(f.name, f.type, f) for f in theirs.values()]
    return make_dataclass(f"Merged{base.__name__}", out, bases=(base,))


def _filled(kind: Any, table: Mapping[str, Any]) -> Any:
    """Return an instance of ``kind`` with the values of a table, whose keys must be fields."""
    types = {f.name: f.type for f in fields(kind)}
    values = {
        name: _filled(types[name], value) if is_dataclass(types[name]) else value
        for name, value in table.items()
    }
    return kind(**values)


def _with_arguments(kind: type, args: Sequence[str], table: Mapping[str, Any]) -> Any:
    """Return the configuration with the arguments' values. Raises SystemExit for an invalid
    argument, after the reason is printed to stderr."""
    import tyro

    registry = tyro.constructors.ConstructorRegistry()

    @registry.primitive_rule
    def comma_separated(info: Any) -> Any:
        if info.type not in (list[str], list[int], list[float]):
            return None
        (kind,) = get_args(info.type)
        return tyro.constructors.PrimitiveConstructorSpec(
            nargs=1,
            metavar="A,B,C,...",
            instance_from_str=lambda words: [
                kind(each) for each in words[0].split(",") if words[0]
            ],
            is_instance=lambda value: all(isinstance(each, kind | int) for each in value),
            str_from_instance=lambda value: [",".join(map(str, value))],
        )

    config: Any = tyro.cli(
        kind,
        args=args,
        default=_filled(kind, table),
        registry=registry,
        # Comments as help texts: parsing every class's source for them takes half of the time, so
        # only for --help.
        config=() if {"-h", "--help"} & {*args} else (tyro.conf.HelptextFromCommentsOff,),
    )
    if config.model.tokenizer_path:
        # torchtitan's older name of the directory
        config.model.hf_assets_path = config.model.tokenizer_path
    return config


def mismatches(cls: type, data: Mapping[str, Any], prefix: str = "") -> list[str]:
    """Return every unknown key and wrongly typed value of a table, as "key must be rule, got
    value". Pure.

    Example: ``group_size = "eight"`` under ``[rollout]`` gives
    "rollout.group_size must be an integer, got 'eight'".
    """
    known = {f.name: f.type for f in fields(cls)}
    out: list[str] = []
    for name, value in data.items():
        key = f"{prefix}{name}"
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            hint = older.hint(key) or (
                f"did you mean {prefix}{close[0]}?"
                if close
                else f"known are {', '.join(sorted(known))}"
            )
            out.append(f"{key} is not a key of this version of titan_grpo and torchtitan; {hint}")
        elif is_dataclass(known[name]):
            nested: Any = known[name]
            out += (
                mismatches(nested, value, f"{key}.")
                if isinstance(value, Mapping)
                else [f"{key} must be a table, got {value!r:.200}"]
            )
        elif not fits(known[name], value):
            out.append(f"{key} must be {describe(known[name])}, got {value!r:.200}")
    return out


MAY_BE_INFINITE = {"training.max_norm"}
"""Keys for which infinity means "no bound"."""

IN_FLOAT32 = {
    "grpo.clip_ratio_upper_bound": 3.4e38,
    "grpo.cispo_weight_max": 3.4e38,
    "grpo.rollout_is_threshold": 3.4e38,
    "optimizer.lr": 1e20,  # Adam divides it by 1 - optimizer.beta1
}
"""Keys that torch converts to float32, with the largest value at which it raises no error."""


def unusable(config: Any) -> list[str]:
    """Return a line for each value that nothing can compute with or open: nan (each comparison with
    it is false, so no other rule would find it), infinity, a number past the range of float32 where
    torch takes no more, a whole number of more than 64 bits, a text with a NUL. Pure."""
    values = (each for f in fields(config) for each in _values(f.name, getattr(config, f.name)))
    return [f"{key} must be {rule}" for key, value in values if (rule := _unusable(key, value))]


def _values(key: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield (key, value) of everything in a section. A list's items have its key, tables in it
    their own."""
    if is_dataclass(value):
        for name, each in vars(value).items():
            yield from _values(f"{getattr(value, 'section', key)}.{name}", each)
    elif isinstance(value, list):
        for each in value:
            yield from _values(key, each)
    else:
        yield key, value


def _unusable(key: str, value: Any) -> str:
    """Return the rule that a value breaks, and the value, or ""."""
    if isinstance(value, float) and not math.isfinite(value):
        unbounded = key in MAY_BE_INFINITE and value > 0
        return "" if unbounded else f"a finite number, got {value}"
    if isinstance(value, float) and value > (most := IN_FLOAT32.get(key, math.inf)):
        return f"at most {most:g} (torch computes with it in float32), got {value}"
    if isinstance(value, int) and not -(1 << 63) <= value < 1 << 63:
        return f"a whole number from -2^63 to 2^63 - 1, got {hex(value):.40}"
    if isinstance(value, str) and "\0" in value:
        return f"a text without NUL characters, got {value!r:.100}"
    return ""


def fits(kind: Any, value: Any) -> bool:
    """Whether a TOML value fits a field of type ``kind``. An integer fits a float, a bool neither.
    Types that TOML cannot express are not checked."""
    if isinstance(kind, type) and kind.__module__ not in ("builtins", "types"):
        return True
    try:
        msgspec.convert(value, kind)
    except msgspec.ValidationError:
        return False
    return True


def describe(kind: Any) -> str:
    """Return a type in words: "an integer", "one of 'vllm', 'sglang'", "a table"."""
    origin = get_origin(kind)
    if origin is Literal:
        return "one of " + ", ".join(repr(choice) for choice in get_args(kind))
    if origin in (Union, types.UnionType):
        # Without "or None": TOML has no null.
        return " or ".join(
            describe(option) for option in get_args(kind) if option is not types.NoneType
        )
    if origin is list:
        item = describe(get_args(kind)[0])
        # [NAME] in place of [[NAME]] is TOML too, and makes one table.
        return f"a list, each item {item}{' under [[NAME]]' if item == 'a table' else ''}"
    if origin is dict:
        return "a table"
    words = {int: "an integer", float: "a number", str: "a string", bool: "true or false"}
    return words.get(kind, getattr(kind, "__name__", str(kind)))


def toml_key(name: str) -> str:
    """Format a key as TOML, with quotes where it needs them.

    >>> toml_key("a-b"), toml_key("a.b")
    ('a-b', '"a.b"')
    """
    return name if re.fullmatch("[A-Za-z0-9_-]+", name) else toml(name)


def toml(value: Any) -> str:
    """Format a value as TOML.

    >>> toml([True, "a", {"b": 1.5}])
    '[true, "a", { b = 1.5 }]'
    """
    if isinstance(value, Mapping):
        pairs = (f"{toml_key(name)} = {toml(each)}" for name, each in value.items())
        return f"{{ {', '.join(pairs)} }}"
    if isinstance(value, list):
        return "[" + ", ".join(map(toml, value)) + "]"
    if isinstance(value, bool | str):
        return json.dumps(value, ensure_ascii=False)
    return str(value)
