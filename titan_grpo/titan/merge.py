"""torchtitan's sections and ours as one dataclass, filled from a TOML table and from arguments.

torchtitan 0.2.2 has such a merge, 0.3 has none: with this one a file means the same on both.

No ``from __future__ import annotations`` in modules whose dataclasses are merged: field types are
read as types.
"""

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import field, fields, is_dataclass, make_dataclass
from typing import Any


def custom_module(args: Sequence[str], table: Mapping[str, Any]) -> str:
    """The value of ``job.custom_config_module``; argument beats TOML; "" without one."""
    job = table.get("job", {})
    given = str(job.get("custom_config_module", "")) if isinstance(job, Mapping) else ""
    for position, arg in enumerate(args):
        key, equals, value = arg.partition("=")
        if key.replace("-", "_") == "__job.custom_config_module":
            given = value if equals else args[position + 1]
    return given


def with_custom(base: type, module: str) -> Any:
    """``base`` merged with the dataclass JobConfig of a module that has this name; without a name
    ``base``. Raises whatever the module raises, and AttributeError for one without JobConfig."""
    return merged(base, importlib.import_module(module).JobConfig) if module else base


def merged(base: Any, custom: Any) -> type:
    """A dataclass with the fields of both; sections that both have are merged, other fields are
    those of ``custom``."""
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


def filled(kind: Any, table: Mapping[str, Any]) -> Any:
    """The dataclass with the values of a table, whose keys are fields."""
    types = {f.name: f.type for f in fields(kind)}
    values = {
        name: filled(types[name], value)
        if is_dataclass(types[name]) and isinstance(value, Mapping)
        else value
        for name, value in table.items()
    }
    return kind(**values)


def with_arguments(kind: type, args: Sequence[str], table: Mapping[str, Any]) -> Any:
    """Argument beats TOML beats default. Raises SystemExit for an unknown argument, after it
    printed why to stderr."""
    import tyro

    registry = tyro.constructors.ConstructorRegistry()

    @registry.primitive_rule
    def comma_separated(info: Any) -> Any:
        if info.type != list[str]:
            return None
        return tyro.constructors.PrimitiveConstructorSpec(
            nargs=1,
            metavar="A,B,C,...",
            instance_from_str=lambda words: words[0].split(","),
            is_instance=lambda value: all(isinstance(each, str) for each in value),
            str_from_instance=lambda value: [",".join(value)],
        )

    config: Any = tyro.cli(kind, args=args, default=filled(kind, table), registry=registry)
    if config.model.tokenizer_path:
        # torchtitan's older name of the directory
        config.model.hf_assets_path = config.model.tokenizer_path
    return config
