"""The doctor looks at a real vLLM server with our plugin."""

import pytest

from titan_grpo import cli
from titan_grpo.engines import vllm
from titan_grpo.engines.drivers import SyncDriver

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(400)]


def test_a_server_that_runs_our_plugin_passes_and_is_left_as_it_was(tiny_server, vllm_python, capsys) -> None:
    with SyncDriver(tiny_server.url) as driver:
        before = driver.run(vllm.weight_info())
        arguments = ["doctor", "--server", tiny_server.url, "--engine-python", vllm_python, "--timeout", "60"]
        assert cli.main(arguments) == 0, capsys.readouterr().out
        out = capsys.readouterr().out
        assert "called back, holding its own weights" in out
        assert "vLLM finds the receiver there" in out
        assert driver.run(vllm.weight_info()) == before
        driver.run(vllm.health())


def test_a_server_that_was_left_paused_is_a_warning_with_the_remedy(tiny_server, capsys) -> None:
    with SyncDriver(tiny_server.url) as driver:
        driver.run(vllm.pause(30))
        try:
            assert cli.main(["doctor", "--server", tiny_server.url, "--timeout", "60"]) == 0
        finally:
            driver.run(vllm.resume(30))
    out = capsys.readouterr().out
    assert f"{tiny_server.url} is paused" in out
    assert "1 warnings" in out
