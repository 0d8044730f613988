"""The doctor looks at a real vLLM server with our plugin."""

import pytest

from titan_grpo import cli
from titan_grpo.engines import vllm
from titan_grpo.engines.drivers import SyncDriver
from titan_grpo.runkey import KEY_VARIABLE

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(400)]


def test_a_server_that_runs_our_plugin_passes_and_is_left_as_it_was(tiny_server, vllm_python, capsys, monkeypatch) -> None:
    monkeypatch.setenv(KEY_VARIABLE, tiny_server.spec.run_key.hex())
    with SyncDriver(tiny_server.url) as driver:
        before = driver.run(vllm.weight_info())
        arguments = ["doctor", "--server", tiny_server.url, "--engine-python", vllm_python, "--timeout", "60"]
        assert cli.main(arguments) == 0, capsys.readouterr().out
        out = capsys.readouterr().out
        assert "called back, holding its own weights; it has proven that it has our run key" in out
        assert "vLLM finds the receiver there" in out
        assert driver.run(vllm.weight_info()) == before
        driver.run(vllm.health())


def test_a_paused_server_and_a_run_key_that_is_missing_here_are_warnings_with_remedies(tiny_server, capsys) -> None:
    with SyncDriver(tiny_server.url) as driver:
        driver.run(vllm.pause(30))
        try:
            assert cli.main(["doctor", "--server", tiny_server.url, "--timeout", "60"]) == 0
        finally:
            driver.run(vllm.resume(30))
    out = capsys.readouterr().out
    assert f"{tiny_server.url} is paused" in out
    assert "it demands a run key, and there is none here" in out
    assert "2 warnings" in out
