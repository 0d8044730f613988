"""A real sender process is struck in the middle of a transfer to a real SGLang server that has
requests to answer."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.conformance.commits import difference, sender
from tests.conformance.crowd import REQUEST_S, prompt
from tests.conformance.engine import (
    LENGTH,
    MAX_DIFFERENCE,
    EngineUnderTest,
    assert_aborted,
    assert_sound,
)
from titan_grpo.engines.generation import Sampling
from titan_grpo.protocol.messages import Hello, new_run_id

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(400)]

SENDER = Path(__file__).parent.parent / "receive" / "sender_process.py"
STALL_S = 3.0
"""After it the receiver gives up a sender of sender_process.py that is silent."""


@pytest.mark.parametrize(
    ("number", "lasts_s"),
    [(signal.SIGKILL, 0.0), (signal.SIGSTOP, STALL_S)],
    ids=["killed", "frozen"],
)
def test_a_sender_struck_in_mid_transfer_costs_no_request_and_no_version(
    number, lasts_s, sglang_site, tmp_path
):
    e = EngineUnderTest.of(sglang_site.server, tmp_path)
    with sender(e) as before:
        path, label = before.sync(1, 1), before.label(1)
        command = [sys.executable, str(SENDER), new_run_id(time.time()), "2", "half"]
        with subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as struck:
            try:
                before.control.greet(Hello.from_json(struck.stdout.readline()).to_dict())
                assert struck.stdout.readline().strip() == "half"
                with e.crowd(label) as crowd:

                    def ask() -> None:
                        sampling = Sampling(LENGTH, cache_salt=label)
                        call = e.speak.generate(prompt(9), sampling, REQUEST_S)
                        assert_sound(e, e.run(call), [label])

                    struck.send_signal(number)
                    given_up_s = time.monotonic() + lasts_s
                    ask()
                    while time.monotonic() < given_up_s:
                        ask()
                    ask()
                    assert_aborted(e, crowd.end(), [label])
                assert before.control.label() == label
                assert difference(e, path) <= MAX_DIFFERENCE
                # the struck one is still there if it was frozen: it holds up no other
                with sender(e) as after:
                    assert difference(e, after.sync(2, 2)) <= MAX_DIFFERENCE
            finally:
                struck.kill()
    assert sglang_site.kernel_calls == []
