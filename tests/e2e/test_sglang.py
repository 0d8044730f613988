"""What is particular to a real SGLang server of ours: it hides its keys and leaves idle cores
alone, a sender that freezes in mid-transfer costs it nothing, and no exception leaves our weight
loader, which would end it. All else: tests/e2e/test_engine_conformance.py."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.conformance.commits import difference, sender
from tests.conformance.crowd import REQUEST_S, prompt
from tests.conformance.engine import (
    LENGTH,
    MAX_DIFFERENCE,
    EngineUnderTest,
    assert_aborted,
    assert_sound,
    remake,
)
from tests.e2e.conftest import Site
from tests.rigs import half_sender
from tests.rigs.census import cpu_seconds, in_group
from tests.rigs.present import present
from titan_grpo.engines.generation import Sampling
from titan_grpo.engines.launch import Server, ServerSpec
from titan_grpo.protocol.messages import Hello, new_run_id

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

IDLE_S, TRIES = 3.0, 5


def test_its_keys_are_in_no_command_line_and_in_no_file_that_others_can_read(
    sglang_site: Site,
) -> None:
    spec = sglang_site.server.spec
    shown = [" ".join(process.cmdline()) for process in in_group(sglang_site.server.group)]
    assert len(shown) >= 3, "HTTP server, scheduler, detokenizer"
    files = [
        path
        for path in Path(spec.log_path).parent.iterdir()
        if path.is_file() and path.stat().st_mode & 0o077
    ]
    shown += [path.read_text(errors="replace") for path in files]
    assert not [text for text in shown if spec.api_key in text or spec.admin_key in text]


def test_an_idle_one_leaves_the_cores_to_others(sglang_site: Site) -> None:
    group = sglang_site.server.group

    def share() -> float:
        before, began = cpu_seconds(group), time.monotonic()
        # nothing to wait for: what is measured is a time in which nothing is asked of it
        psutil.wait_procs([psutil.Process(group)], timeout=IDLE_S)
        return (cpu_seconds(group) - before) / (time.monotonic() - began)

    # what it was asked before may still be at work
    assert any(share() < 0.3 for _ in range(TRIES)), "an idle server uses a core"


SENDER = Path(half_sender.__file__)
STALL_S = 3.0
"""How long requests are made while a sender is silent."""


def test_a_sender_that_freezes_in_mid_transfer_costs_no_request_and_no_version(
    sglang_site: Site, tmp_path: Path
) -> None:
    e = EngineUnderTest(sglang_site.server, tmp_path)
    with sender(e) as before:
        path, label = before.sync(1, 1), before.label(1)
        command = [sys.executable, str(SENDER), new_run_id(time.time())]
        with subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as frozen:
            try:
                before.control.greet(Hello.from_json(present(frozen.stdout).readline()).to_dict())
                assert present(frozen.stdout).readline().strip() == "half"
                with e.crowd(label) as crowd:

                    def ask() -> None:
                        sampling = Sampling(LENGTH, cache_salt=label)
                        call = e.speak.generate(prompt(9), sampling, REQUEST_S)
                        assert_sound(e, e.run(call), [label])

                    frozen.send_signal(signal.SIGSTOP)
                    given_up_s = time.monotonic() + STALL_S
                    ask()
                    while time.monotonic() < given_up_s:
                        ask()
                    ask()
                    assert_aborted(e, crowd.end(), [label])
                assert before.control.label() == label
                assert difference(e, path) <= MAX_DIFFERENCE
                # the frozen one is still there: it holds up no other
                with sender(e) as after:
                    assert difference(e, after.sync(2, 2)) <= MAX_DIFFERENCE
            finally:
                frozen.kill()
    assert sglang_site.kernel_calls == []


BREAKING = """
from titan_grpo.receive import commit


class Breaking(commit.EngineSide):
    count = 0

    def taken(self, name, tensor):
        self.count += 1
        if self.count == 5:
            raise RuntimeError("planted in the middle of a load")


def start():
    commit.make_side = Breaking
"""


@pytest.mark.long
def test_a_load_that_raises_half_way_is_reported_and_the_next_version_is_whole(
    sglang_python: str, tmp_path: Path
) -> None:
    info = tmp_path / "plugins" / "breaking-0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: breaking\nVersion: 0\n")
    (info / "entry_points.txt").write_text("[sglang.srt.plugins]\nbreaking = breaking:start\n")
    (tmp_path / "plugins" / "breaking.py").write_text(BREAKING)
    model = remake(100, tmp_path / "model")
    env = {"PYTHONPATH": str(tmp_path / "plugins")}
    with Server(
        ServerSpec(sglang_python, str(model), str(tmp_path / "server.log"), "sglang", env=env)
    ) as server:
        server.wait_healthy(200.0)
        e = EngineUnderTest(server, tmp_path)
        with sender(e) as trainer:
            weights, _ = trainer.make(1)
            with trainer.link(weights) as link:
                applied = trainer.load(link, trainer.stage(link, weights, 1))
            assert not applied.ok
            assert not applied.intact
            assert "planted in the middle of a load" in applied.error
            e.require_alive()
            assert trainer.control.paused()
            assert difference(e, trainer.sync(1, 2)) <= MAX_DIFFERENCE
            assert not trainer.control.paused()
        assert server.alive()
