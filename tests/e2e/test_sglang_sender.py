"""A real sender process is struck in the middle of a transfer to a real SGLang server that has
requests to answer."""

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.conformance.commits import difference, sender
from tests.conformance.crowd import REQUEST_S, prompt
from tests.conformance.engine import LENGTH, MAX_DIFFERENCE, EngineUnderTest, assert_sound
from titan_grpo.engines.generation import Sampled, Sampling
from titan_grpo.protocol.messages import Hello, new_run_id
from titan_grpo.titan.tiny import write_tiny_model

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(400)]

SENDER = Path(__file__).parent.parent / "receive" / "sender_process.py"
STALL_S = 3.0
"""After it the receiver gives up a sender of sender_process.py that is silent."""


def remake(seed: int, folder: Path) -> Path:
    return write_tiny_model("qwen3", folder, seed, std=0.05, dtype="bfloat16")


@dataclass(frozen=True)
class Answer:
    began: float
    ended: float
    sampled: Sampled


class Asked:
    """Answers to requests of several threads, one after the other each; an error of any of them is
    raised by ``requests``."""

    def __init__(self) -> None:
        self.answers: list[Answer] = []
        self.changed = threading.Condition()
        self.ended = threading.Event()

    def ask(self, e: EngineUnderTest, label: str, seed: int) -> None:
        with e.driver() as driver:
            while not self.ended.is_set():
                began = time.monotonic()
                sampled = driver.run(
                    e.speak.generate(prompt(seed), Sampling(LENGTH, cache_salt=label), REQUEST_S)
                )
                with self.changed:
                    self.answers.append(Answer(began, time.monotonic(), sampled))
                    self.changed.notify_all()

    def wait(self, holds: Callable[[Answer], bool]) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: any(map(holds, self.answers)), REQUEST_S), (
                "requests are no longer answered"
            )


@contextmanager
def requests(e: EngineUnderTest, label: str) -> Iterator[Asked]:
    """Four requests at a time, from the first answer on. No request has failed when this ends."""
    asked = Asked()
    with ThreadPoolExecutor(4) as pool:
        running = [pool.submit(asked.ask, e, label, seed) for seed in range(4)]
        try:
            asked.wait(lambda _: True)
            yield asked
        finally:
            asked.ended.set()
        for future in running:
            future.result(REQUEST_S)


@pytest.mark.parametrize(
    ("number", "lasts_s"),
    [(signal.SIGKILL, 0.0), (signal.SIGSTOP, STALL_S)],
    ids=["killed", "frozen"],
)
def test_a_sender_struck_in_mid_transfer_costs_no_request_and_no_version(
    number, lasts_s, sglang_site, tmp_path
):
    e = EngineUnderTest("sglang", sglang_site.access, tmp_path, remake, tmp_path, True, True)
    with sender(e) as before:
        path, label = before.sync(1, 1), before.label(1)
        command = [sys.executable, str(SENDER), new_run_id(time.time()), "2", "half"]
        with subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as struck:
            try:
                before.control.greet(Hello.from_json(struck.stdout.readline()).to_dict())
                assert struck.stdout.readline().strip() == "half"
                with requests(e, label) as asked:
                    # one has been answered, so others are under way
                    struck.send_signal(number)
                    struck_s = time.monotonic()
                    asked.wait(lambda answer: answer.began > struck_s + lasts_s)
                assert any(answer.began < struck_s < answer.ended for answer in asked.answers)
                for answer in asked.answers:
                    assert_sound(e, answer.sampled, [label])
                assert before.control.label() == label
                assert difference(e, path) <= MAX_DIFFERENCE
                # the struck one is still there if it was frozen: it holds up nobody
                with sender(e) as after:
                    assert difference(e, after.sync(2, 2)) <= MAX_DIFFERENCE
            finally:
                struck.kill()
    assert sglang_site.kernel_calls == []
