"""Where a command finds what it starts: its recipe, and the interpreters of the engines."""

from pathlib import Path

from titan_grpo.errors import ConfigError

ROOT = Path(__file__).resolve().parents[2]
"""The checkout; site-packages where the package is installed from a wheel."""

RECIPES = ROOT / "titan_grpo" / "titan" / "recipes"

TITLES = {"vllm": "vLLM", "sglang": "SGLang"}


def in_checkout() -> bool:
    """Whether scripts/setup.sh is there, which makes the engines' environments."""
    return (ROOT / "scripts" / "setup.sh").is_file()


def engine_python(engine: str) -> str:
    """Interpreter of an engine's environment, as scripts/setup.sh makes it; empty without a
    checkout."""
    return str(ROOT / f".venv-{engine}/bin/python") if in_checkout() else ""


def require_python(engine: str, path: str) -> None:
    """Raise ConfigError, with what to do, where there is no interpreter of an engine's."""
    if path and Path(path).exists():
        return
    key, title = f"--{engine}-python", TITLES[engine]
    if in_checkout():
        raise ConfigError(
            f"{key} must be an interpreter, {path} does not exist: run scripts/setup.sh"
        )
    what = f"{path} does not exist" if path else "none is named"
    raise ConfigError(
        f"{key} must be the interpreter of an environment with {title} and titan_grpo, {what}: make"
        f" one (python -m venv {engine}-env; {engine}-env/bin/pip install 'titan_grpo[{engine}]';"
        f" without a GPU as scripts/setup.sh of a checkout does), then {key}"
        f" {engine}-env/bin/python"
    )
