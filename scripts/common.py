"""What the measuring scripts share: options, an engine's server, versions that servers must hold,
figures."""

import argparse
import json
import os
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from titan_grpo.commands.processes import engine_python
from titan_grpo.engines.launch import Server, ServerSpec
from titan_grpo.titan.tiny import TinyShape
from titan_grpo.verify.server import GPU_ARGUMENTS

ROOT = Path(__file__).resolve().parents[1]
RECIPE = "train_configs/quickstart_cpu.toml"
ENGINES = ("vllm", "sglang")
DEVICES = ("cpu", "cuda")
QWEN3_0_6B = TinyShape(
    vocab=151936, hidden=1024, layers=28, heads=16, kv_heads=8, head_dim=128, ffn=3072
)
"""The sizes of Qwen3-0.6B (its config.json): 1.1 GiB in bfloat16. Its tokens past the tokenizer's
128 have no text."""


class _Help(argparse.RawDescriptionHelpFormatter, argparse.ArgumentDefaultsHelpFormatter):
    """A script's own text as it is, and the default of each option."""


def options_of(doc: str | None) -> argparse.ArgumentParser:
    """A parser that shows a script's own text, with ``--json PATH``."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=_Help)
    parser.add_argument("--json", type=new_file, metavar="PATH", help="write the figures there too")
    return parser


def new_file(text: str) -> Path:
    """A path to write to. A wrong one is an error at once, not after the measurement."""
    path = Path(text)
    if path.is_dir() or not os.access(path.parent, os.W_OK):
        raise argparse.ArgumentTypeError(f"must be a file in a folder to write to, got {text!r}")
    return path


def positive(text: str) -> int:
    """An integer of 1 or more."""
    if (value := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"must be 1 or more, got {text!r}")
    return value


def write_json(path: Path | None, figures: Any) -> None:
    """Where a path is given."""
    if path is not None:
        path.write_text(json.dumps(figures, indent=1, default=str) + "\n")


def on_device(engine: str, device: str) -> dict[str, Any]:
    """Of a ServerSpec on ``device``, cpu or cuda (the first GPU, which it shares)."""
    return {"cpu": False, "args": tuple(GPU_ARGUMENTS[engine])} if device == "cuda" else {}


@contextmanager
def serving(
    engine: str, model: Path, log: Path, startup_s: float = 300.0, **settings: Any
) -> Iterator[Server]:
    """A real server of ``model``, once it is healthy. ``settings``: of its ServerSpec."""
    python = engine_python(engine)
    with Server(ServerSpec(python, str(model), str(log), engine, **settings)) as server:
        server.wait_healthy(startup_s)
        yield server


def keys(settings: Mapping[str, object]) -> list[str]:
    """A job's keys as arguments."""
    return [f"--{key}={value}" for key, value in settings.items()]


def deliver(trainer: Any, version: int, tensors: Mapping[str, Any], wait_s: float) -> None:
    """Publish a version with a tests.rigs.trainer.Trainer, and wait until every server holds it."""
    servers = trainer.servers
    if not trainer.publish(version, tensors, wait_s):
        raise SystemExit(f"no slot was free for version {version}: {servers.text()}")
    held = servers.wait_held(version, wait_s, everyone=True)
    if len(held) < len(servers.versions()):
        raise SystemExit(
            f"version {version} must be committed by all servers within {wait_s:g} s,"
            f" {len(held)} of {len(servers.versions())} have it: {servers.take_error()}"
        )


def _cell(value: object) -> str:
    """Return a value as a table shows it; of several all, with a comma between them."""
    if isinstance(value, tuple):
        return ",".join(map(_cell, value))
    return f"{value:.4g}" if isinstance(value, float) else str(value)


class Table:
    """Rows that are printed in columns as they come."""

    def __init__(self, text: int = 8) -> None:
        """``text``: how wide a column of texts is at least, in characters."""
        self.rows: list[dict[str, Any]] = []
        self._text, self._widths = text, list[int]()

    def add(self, row: Mapping[str, Any]) -> None:
        """One more. The names of the first one's values are the head."""
        cells = [_cell(value) for value in row.values()]
        if not self.rows:
            least = [self._text if isinstance(v, str) else 8 for v in row.values()]
            self._widths = [
                2 + max(n, *map(len, p)) for n, *p in zip(least, row, cells, strict=True)
            ]
            self._print(row)
        self._print(cells)
        self.rows.append(dict(row))

    def _print(self, cells: Iterable[str]) -> None:
        print("".join(f"{c:>{w}}" for c, w in zip(cells, self._widths, strict=True)), flush=True)


def spread(values: Sequence[float]) -> str:
    """Median, least and largest."""
    return f"{statistics.median(values):8.4f}  [{min(values):.4f} .. {max(values):.4f}]"
