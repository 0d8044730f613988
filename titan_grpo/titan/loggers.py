"""torchtitan's loggers (TensorBoard, W&B) as parts that a run can do without."""

import logging
from collections.abc import Callable
from typing import Any

from torchtitan.components.metrics import BaseLogger, LoggerContainer

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
