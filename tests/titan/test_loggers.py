"""A logger that cannot write, against torchtitan's own TensorBoard logger and a disk that is full
(the kernel's /dev/full)."""

import time
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from titan_grpo.titan import compat

compat.prepare()

from tensorboard.backend.event_processing.event_accumulator import (  # noqa: E402
    EventAccumulator,
)
from torchtitan.components.metrics import (  # noqa: E402
    BaseLogger,
    LoggerContainer,
    TensorBoardLogger,
)

from titan_grpo.titan.loggers import Dispensable, log_table, make_dispensable  # noqa: E402

WAIT_S = 60.0


def processor_on_a_full_disk(folder: Path) -> Any:
    """torchtitan's own TensorBoard logger; its file is one that the kernel writes nothing to."""

    class Processor:
        logger = LoggerContainer()

    Processor.logger.add_logger(TensorBoardLogger(str(folder)))
    (file,) = folder.glob("events*")
    file.unlink()
    file.symlink_to("/dev/full")
    return Processor


def log_until(processor: Any, ended: Callable[[], object]) -> None:
    """TensorBoard's thread writes, and a later call has its error."""
    end, steps = time.monotonic() + WAIT_S, count(1)
    while not ended():
        assert time.monotonic() < end, "no error within the deadline"
        processor.logger.log({"reward/mean": 1.0}, next(steps))


# TensorBoard's own thread ends with the error that the test is about.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_full_disk_under_tensorboard_is_one_warning(tmp_path) -> None:
    alone = processor_on_a_full_disk(tmp_path / "alone")
    with pytest.raises(OSError, match="No space left"):
        log_until(alone, lambda: False)
    wrapped, said = processor_on_a_full_disk(tmp_path / "wrapped"), []
    make_dispensable(wrapped, said.append)
    log_until(wrapped, lambda: said)
    wrapped.logger.log({"reward/mean": 1.0}, 1_000)
    wrapped.logger.close()
    assert len(said) == 1
    assert "TensorBoardLogger failed" in said[0]


class Lost(BaseLogger):
    """A logger whose service cannot be reached."""

    def log(self, metrics, step) -> None:
        raise ConnectionError("no route to host")

    def close(self) -> None:
        raise ConnectionError("no route to host")


class Kept(BaseLogger):
    """A logger that works."""

    def __init__(self) -> None:
        self.steps: list[int] = []

    def log(self, metrics, step) -> None:
        self.steps.append(step)


def test_the_other_loggers_go_on_when_one_fails() -> None:
    class Processor:
        logger = LoggerContainer()

    said, kept = [], Kept()
    for each in (Lost(), kept):
        Processor.logger.add_logger(each)
    make_dispensable(Processor, said.append)
    for step in (1, 2):
        Processor.logger.log({"a": 1.0}, step)
    Processor.logger.close()
    assert kept.steps == [1, 2]
    assert len(said) == 1
    assert "Lost failed at step 1 and gets nothing more: ConnectionError" in said[0]


def test_a_single_logger_is_wrapped_too() -> None:
    class Processor:
        logger = Lost()

    said: list[str] = []
    make_dispensable(Processor, said.append)
    assert isinstance(Processor.logger, Dispensable)
    Processor.logger.close()
    assert "at its end" in said[0]


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
def test_what_ends_a_process_passes(error) -> None:
    class Ending(BaseLogger):
        def log(self, metrics, step) -> None:
            raise error

    with pytest.raises(error):
        Dispensable(Ending(), print).log({}, 1)


COMPLETIONS = [(0.5, "3 to 4", "http://a:1", 0.0125, "2+|3=", "5\n<i>*x*")]


def test_completions_are_a_table_of_tensorboards_text_page(tmp_path) -> None:
    class Processor:
        logger = LoggerContainer()

    said: list[str] = []
    Processor.logger.add_logger(TensorBoardLogger(str(tmp_path)))
    Processor.logger.add_logger(Kept())
    make_dispensable(Processor, said.append)
    log_table(Processor, COMPLETIONS, 7)
    Processor.logger.close()
    assert said == []
    events = EventAccumulator(str(tmp_path)).Reload()
    (event,) = events.Tensors("completions/text_summary")
    assert event.step == 7
    text = event.tensor_proto.string_val[0].decode()
    row = "| 0.5 | 3 to 4 | http://a:1 | 0.0125 | 2+&#124;3= | 5⏎&lt;i&gt;&#42;x&#42; |"
    assert text.splitlines()[2] == row
