"""One module per command of ``titan-grpo``; each has ``run(argv, env) -> exit code``."""

import tomllib
from pathlib import Path
from typing import Any

from titan_grpo.errors import ConfigError


def read_toml(path: str | Path, option: str) -> dict[str, Any]:
    """A TOML file that an option names. Raises ConfigError, in one line."""
    try:
        return tomllib.loads(Path(path).read_text(encoding="utf-8-sig"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"{option} must be a TOML file, got {str(path)!r}: {error}") from error
