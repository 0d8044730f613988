"""Evaluations beside a real training run on a real vLLM, and of its weights alone."""

import json
from pathlib import Path

import pytest

from scripts.common import keys
from tests.e2e.conftest import API_KEY_VARIABLE, Runs, Site, Training, run_cli
from titan_grpo.commands.processes import torchrun
from titan_grpo.observe.recorder import read_metrics

pytestmark = [pytest.mark.e2e, pytest.mark.long, pytest.mark.timeout(900)]

STEPS, ROWS, SAMPLES = 12, 12, 4
"""Of the run; of the example's table."""


def job(runs: Runs, folder: Path) -> Path:
    """The example's, put together as its first comment says."""
    path, example = folder / "job.toml", runs.root / "examples" / "evaluation" / "digits.toml"
    path.write_text(runs.recipe.read_text() + example.read_text())
    return path


def arguments(runs: Runs, site: Site, out: Path) -> list[str]:
    settings = {
        "job.dump_folder": out,
        "model.hf_assets_path": runs.model,
        "rollout.servers": site.url,
        "rollout.api_key_env": API_KEY_VARIABLE,
        "training.steps": STEPS,
    }
    return [*keys(settings), "--grpo.async-weight-update"]


def test_a_run_is_evaluated_at_its_start_in_between_and_at_its_end_and_its_weights_alone_as_well(
    runs: Runs, site: Site, tmp_path: Path
) -> None:
    path, out = job(runs, tmp_path), tmp_path / "out"
    command = torchrun(1, str(path), arguments(runs, site, out))
    with Training(command, runs.root) as training:
        assert training.finish(400) == 0, training.log
    summary = runs.summary(out)
    assert summary["errors"] == []
    found = summary["evaluations"]
    versions = [each["version"] for each in found]
    assert versions[0] == 0
    assert versions[-1] == STEPS
    assert len(versions) >= 3, "and one in between"
    assert versions == sorted(set(versions))
    for each in found:
        assert (each["prompts"], each["samples"], each["refused"]) == (ROWS, SAMPLES, 0)
        assert each["reward"]["low"] <= each["reward"]["value"] <= each["reward"]["high"]
        assert each["passed"]["1"]["value"] <= each["passed"][str(SAMPLES)]["value"]
        assert 0 < each["tokens"]["value"] <= 8
    # The server was held on each of them, and went on with the newest.
    committed = summary["versions_committed"][site.url]["committed"]
    assert set(versions) <= set(committed)
    assert committed[-1] == STEPS
    rows = read_metrics(out / "metrics.jsonl")
    shown = [row["evaluation/digits/version"] for row in rows if "evaluation/digits/version" in row]
    assert set(shown) <= set(versions)
    assert shown[0] == 0
    assert shown[-1] == STEPS, "the last step's line has what came after it"
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))

    # The last version is still on the server: the same prompts and seeds.
    result = tmp_path / "alone.json"
    alone = ["--out", result, f"--job.config_file={path}", *arguments(runs, site, out)]
    done = run_cli(runs.root, "evaluate", "--server", site.url, *alone, timeout_s=200)
    assert done.returncode == 0, done.stderr
    (again,) = json.loads(result.read_text())
    assert (again["version"], again["server"]) == (STEPS, site.url)
    assert again["reward"]["value"] == pytest.approx(found[-1]["reward"]["value"], abs=0.1)
    assert "evaluation digits, version 12: reward" in done.stdout
