"""The doctor looks at real servers with our plugin."""

import json
from pathlib import Path

import pytest

from scripts.common import RECIPE
from tests.e2e.conftest import Site
from tests.rigs.present import present
from titan_grpo import cli
from titan_grpo.engines import sglang, vllm
from titan_grpo.engines.http import SyncDriver
from titan_grpo.engines.launch import Server
from titan_grpo.runkey import KEY_VARIABLE
from titan_grpo.titan.tiny import write_tiny_model

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]


def test_a_server_that_runs_our_plugin_passes_and_is_left_as_it_was(
    keyed_server: Server,
    vllm_python: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(KEY_VARIABLE, present(keyed_server.spec.run_key).hex())
    with SyncDriver(keyed_server.url) as driver:
        before = driver.run(vllm.label())
        arguments = ["doctor", "--server", keyed_server.url, "--timeout", "60"]
        more = ["--engine-python", vllm_python]
        assert cli.main([*arguments, *more]) == 0, capsys.readouterr().out
        out = capsys.readouterr().out
        assert "called back, holding" in out
        assert "it has proven that it has our run key" in out
        assert "vLLM finds the receiver there" in out
        assert driver.run(vllm.label()) == before
        driver.run(vllm.health())


def test_the_fields_in_which_the_trainers_model_is_another_than_the_servers_are_named(
    keyed_server: Server,
    root: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(KEY_VARIABLE, present(keyed_server.spec.run_key).hex())
    model = write_tiny_model("qwen3", tmp_path / "model")
    served = json.loads((Path(keyed_server.spec.model) / "config.json").read_text())
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096}
    other = {"rms_norm_eps": 1e-5, "rope_theta": 1e4, "rope_scaling": yarn}
    (model / "config.json").write_text(json.dumps(served | other))
    job = [f"--job.config_file={root / RECIPE}", f"--model.hf_assets_path={model}"]
    arguments = ["doctor", "--timeout", "60", *job, f"--rollout.servers={keyed_server.url}"]
    assert cli.main(arguments) == 1
    assert (
        "this server computes another model: rms_norm_eps 1e-06 (the trainer: 1e-05),"
        " rope.rope_theta 1000000.0 (the trainer: 10000.0), rope.rope_type 'default' (the trainer:"
        " 'yarn'); start it with the trainer's config.json"
    ) in capsys.readouterr().out


def test_a_paused_server_and_a_run_key_that_is_missing_here_are_warnings_with_remedies(
    keyed_server: Server, capsys: pytest.CaptureFixture[str]
) -> None:
    with SyncDriver(keyed_server.url) as driver:
        driver.run(vllm.pause(30))
        try:
            assert cli.main(["doctor", "--server", keyed_server.url, "--timeout", "60"]) == 0
        finally:
            driver.run(vllm.resume(30))
    out = capsys.readouterr().out
    assert f"{keyed_server.url} is paused" in out
    assert "it demands a run key, and there is none here" in out
    assert "2 warnings" in out


def test_a_real_sglang_with_its_two_keys_passes_and_is_left_as_it_was(
    sglang_site: Site,
    sglang_python: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    spec = sglang_site.server.spec
    monkeypatch.setenv("A_KEY", spec.api_key)
    monkeypatch.setenv("B_KEY", spec.admin_key)
    before = sglang_site.driver.run(sglang.label())
    arguments = ["doctor", "--server", sglang_site.url, "--timeout", "60"]
    arguments += ["--sglang-python", sglang_python]
    keys = ["--api-key-env", "A_KEY", "--admin-key-env", "B_KEY"]
    assert cli.main([*arguments, *keys]) == 0, capsys.readouterr().out
    out = capsys.readouterr().out
    assert "answers, SGLang 0.5." in out
    assert "called back" in out
    assert "SGLang finds the receiver there" in out
    assert cli.main(arguments) == 1
    assert "rollout.api_key_env" in capsys.readouterr().out
    assert cli.main([*arguments, *keys[:2]]) == 1
    assert "or the admin key (rollout.admin_key_env) is not" in capsys.readouterr().out
    assert sglang_site.driver.run(sglang.label()) == before
    sglang_site.assert_serves()
