"""torchtitan's loggers (TensorBoard, W&B) as parts that a run can do without, and with tables of
completions."""

import html
import logging
import re
from collections.abc import Callable, Sequence
from typing import Any

from torchtitan.components.metrics import (
    BaseLogger,
    LoggerContainer,
    TensorBoardLogger,
    WandBLogger,
)

from titan_grpo.titan.shown import COLUMNS, Row

logger = logging.getLogger(__name__)

Warn = Callable[[str], None]


class Dispensable(BaseLogger):  # type: ignore[misc]
    """A logger whose first error is said once, and ends it alone: a full disk or a lost network
    costs its curves, not the run. metrics.jsonl has every value that it would have had."""

    def __init__(self, inner: Any, warn: Warn) -> None:
        self._inner, self._warn = inner, warn
        self._failed = False

    def log(self, metrics: dict[str, Any], step: int) -> None:
        """As BaseLogger.log; nothing after an error."""
        if not self._failed:
            self._run(lambda: self._inner.log(metrics, step), f"at step {step}")

    def table(self, rows: Sequence[Row], step: int) -> None:
        """Completions as a table, where the logger can show one; nothing after an error."""
        if not self._failed:
            self._run(lambda: _table(self._inner, rows, step), f"at step {step}")

    def close(self) -> None:
        """As BaseLogger.close, also after an error: it may still write what it has."""
        self._run(self._inner.close, "at its end")

    def _run(self, call: Callable[[], None], when: str) -> None:
        try:
            call()
        except Exception as error:  # noqa: BLE001 - the boundary to a plugin, W&B raises its own
            if self._failed:
                return
            self._failed = True
            name = type(self._inner).__name__
            self._warn(
                f"{name} failed {when} and gets nothing more: {type(error).__name__}: {error};"
                " training goes on, metrics.jsonl has all values"
            )


def make_dispensable(processor: Any, warn: Warn) -> None:
    """Wrap each logger of torchtitan's metrics processor: one that fails does not stop the
    others."""
    inner = processor.logger
    if isinstance(inner, LoggerContainer):
        inner._loggers = [Dispensable(each, warn) for each in inner._loggers]
    else:
        processor.logger = Dispensable(inner, warn)


def log_table(processor: Any, rows: Sequence[Row], step: int) -> None:
    """Show completions in each logger of a processor whose loggers were made dispensable."""
    inner = processor.logger
    for each in inner._loggers if isinstance(inner, LoggerContainer) else [inner]:
        each.table(rows, step)


def _table(inner: Any, rows: Sequence[Row], step: int) -> None:
    name = f"{inner.tag}/completions" if getattr(inner, "tag", None) else "completions"
    if isinstance(inner, TensorBoardLogger):
        inner.writer.add_text(name, markdown(rows), step)
    elif isinstance(inner, WandBLogger):
        table = inner.wandb.Table(columns=list(COLUMNS), data=[list(row) for row in rows])
        inner.wandb.log({name: table}, step=step)


def markdown(rows: Sequence[Row]) -> str:
    """The table of TensorBoard's text page, which renders Markdown: nothing in a completion is
    markup.

    Example: the cell ``a|b``, a line break, ``<i>`` -> ``a&#124;b⏎&lt;i&gt;``.
    """

    def cell(value: object) -> str:
        text = html.escape(f"{value:.4g}" if isinstance(value, float) else str(value), quote=False)
        marks = re.sub(r"[|*_`\[\]\\]", lambda found: f"&#{ord(found[0])};", text)
        return marks.replace("\n", "⏎")

    lines = [COLUMNS, ["---"] * len(COLUMNS), *([cell(value) for value in row] for row in rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
