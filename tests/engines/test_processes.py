"""Real children: their end is noticed at once, asleep, and a deadline is kept."""

import subprocess
import sys
import threading
import time

import pytest

from titan_grpo.subprocesses import wait_process

LONG = [sys.executable, "-c", "input()"]


def test_a_process_that_goes_on_is_a_timeout_and_one_that_ended_its_status() -> None:
    with subprocess.Popen(LONG, stdin=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        with pytest.raises(subprocess.TimeoutExpired):
            wait_process(process, 0.01)
        process.kill()
        assert wait_process(process, 10.0) == -9
        assert wait_process(process, 0.0) == -9


def test_two_threads_may_wait_for_it_and_none_uses_the_processor_meanwhile() -> None:
    found: list[tuple[int, float]] = []

    def wait(process: "subprocess.Popen[bytes]") -> None:
        before = time.thread_time()
        found.append((wait_process(process, 20.0), time.thread_time() - before))

    with subprocess.Popen(LONG, stdin=subprocess.PIPE) as process:
        threads = [threading.Thread(target=wait, args=(process,)) for _ in range(2)]
        for thread in threads:
            thread.start()
        threading.Event().wait(
            1.0
        )  # in which one that looks again and again would use far more than is allowed
        process.communicate(b"\n", 20.0)
        for thread in threads:
            thread.join(20.0)
    assert [status for status, _ in found] == [0, 0]
    assert max(seconds for _, seconds in found) < 0.1
