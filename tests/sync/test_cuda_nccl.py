"""NCCL lanes on a GPU: whatever becomes of the other end, the transfer fails in time, and the
trainer's process and its own groups live on."""

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from titan_grpo.sync.transports.broadcast import host_store

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA"),
    pytest.mark.timeout(180),
]

END = Path(__file__).with_name("nccl_end.py")


class End:
    """A process with one end of a lane; ``told`` reads what it says."""

    def __init__(self, rank: int, port: int, scenario: str, log: Path) -> None:
        self._log = log.open("w")
        self.process = subprocess.Popen(
            [sys.executable, str(END), str(rank), str(port), scenario],
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
        )

    def told(self) -> dict[str, Any]:
        """The next line; fails with the log when there is none."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("{"):
                found: dict[str, Any] = json.loads(line)
                return found
        code = self.process.wait(30)
        raise AssertionError(f"exit code {code}: {Path(self._log.name).read_text()[-3000:]}")

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        self._log.close()


@contextmanager
def ends(scenario: str, folder: Path, ranks: tuple[int, ...] = (0, 1)) -> Iterator[list[End]]:
    store = host_store("127.0.0.1")
    with ExitStack() as stack:
        made = []
        for rank in ranks:
            made.append(End(rank, store.port, scenario, folder / f"{rank}.log"))
            stack.callback(made[-1].close)
        yield made


def test_a_receiver_that_never_comes_fails_the_opening_at_its_deadline(tmp_path: Path) -> None:
    with ends("absent", tmp_path, (0,)) as (trainer,):
        told = trainer.told()
        assert "did not connect 2 ranks within 3.0 s" in told["error"]
        assert 2.5 < told["after_s"] < 20.0
        assert trainer.told() == {"trains_on": 1.0}


@pytest.mark.parametrize("scenario", ["kill", "stop", "abort"])
def test_a_lane_that_breaks_in_a_transfer_ends_alone(tmp_path: Path, scenario: str) -> None:
    with ends(scenario, tmp_path) as (trainer, receiver):
        for end in (trainer, receiver):
            assert end.told() == {"ready": True}
        if scenario != "abort":
            number = signal.SIGKILL if scenario == "kill" else signal.SIGSTOP
            receiver.process.send_signal(number)
        told = trainer.told()
        assert told["error"]
        assert told["after_s"] < 30.0
        if scenario == "abort":
            assert "abort" in told["error"]
        assert trainer.told() == {"trains_on": 1.0}


def test_a_trainer_that_dies_fails_the_receivers_transfer(tmp_path: Path) -> None:
    with ends("kill", tmp_path) as (trainer, receiver):
        for end in (trainer, receiver):
            assert end.told() == {"ready": True}
        trainer.process.kill()
        assert receiver.told()["after_s"] < 30.0
