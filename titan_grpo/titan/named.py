"""Named algorithms: files of [grpo] keys that ``grpo.algorithm`` names."""

import tomllib
from collections.abc import Collection
from pathlib import Path
from typing import Any

from titan_grpo.config.grpo import GRPO
from titan_grpo.errors import ConfigError

FOLDER = Path(__file__).with_name("algorithms")


def names() -> list[str]:
    """Names of the algorithms that come with the package."""
    return sorted(path.stem for path in FOLDER.glob("*.toml"))


def keys_of(algorithm: str) -> dict[str, Any]:
    """The [grpo] keys that an algorithm sets: one of ``names``, or a path that ends with .toml.

    Raises ConfigError where there is no such file, or it holds anything but a table [grpo].
    """
    own = algorithm.endswith(".toml")
    if not own and algorithm not in names():
        raise ConfigError(
            f"grpo.algorithm must be one of {', '.join(names())}, or a file that ends with .toml,"
            f" got {algorithm!r}"
        )
    path = Path(algorithm) if own else FOLDER / f"{algorithm}.toml"
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"grpo.algorithm must name a readable TOML file, got {algorithm!r}: {error}"
        ) from error
    keys = table.get("grpo")
    if set(table) != {"grpo"} or not isinstance(keys, dict) or "algorithm" in keys:
        raise ConfigError(
            f"{path} must have the one table [grpo], without the key algorithm, to be a"
            " grpo.algorithm"
        )
    return keys


def expand(grpo: GRPO, keys: dict[str, Any], given: Collection[str]) -> str:
    """Set ``keys`` in the section, but for those that the job sets itself (dotted, in ``given``);
    says what was set and what was kept."""
    kept = {name for name in keys if f"grpo.{name}" in given}
    if "grpo.grpo_by_token" in given:
        kept |= {"loss_normalization"} & set(keys)
    for name in keys.keys() - kept:
        value = keys[name]
        setattr(grpo, name, float(value) if isinstance(getattr(grpo, name), float) else value)
    said = [f"{name} = {_toml(keys[name])}" for name in keys if name not in kept]
    text = f"grpo.algorithm = {_toml(grpo.algorithm)} sets " + ", ".join(said)
    if kept:
        own = [f"{name} = {_toml(getattr(grpo, name))} (not {_toml(keys[name])})" for name in kept]
        text += "; the job itself sets " + ", ".join(sorted(own))
    return text


def _toml(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else repr(value).replace("'", '"')
