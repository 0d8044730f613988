"""A logger that cannot write, against torchtitan's own TensorBoard logger and a disk that is full
(the process's limit on the size of a file, which the kernel enforces)."""

import subprocess
import sys

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

FULL_DISK = """
import resource, signal, sys
from titan_grpo.titan import compat
compat.prepare()
from torchtitan.components.metrics import LoggerContainer, TensorBoardLogger
from titan_grpo.titan.loggers import make_dispensable

class Processor:
    pass

def log(folder, said):
    processor = Processor()
    processor.logger = LoggerContainer()
    processor.logger.add_logger(TensorBoardLogger(f"{sys.argv[1]}/{folder}"))
    if said is not None:
        make_dispensable(processor, said.append)
    for step in range(20_000):
        processor.logger.log({"reward/mean": float(step)}, step)
    processor.logger.close()

signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
try:
    log("alone", None)
except OSError as error:
    print("alone:", type(error).__name__)
said = []
log("wrapped", said)
print("wrapped:", len(said), said)
"""


def test_a_full_disk_under_tensorboard_is_one_warning(tmp_path) -> None:
    command = [sys.executable, "-c", FULL_DISK, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    alone, wrapped = done.stdout.splitlines()
    assert alone == "alone: OSError", "the limit must be one that ends torchtitan's own logger"
    assert wrapped.startswith("wrapped: 1 [")
    assert "TensorBoardLogger failed" in wrapped


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
