"""``titan-grpo verify`` against a real server: passes where nothing is wrong, and names every
violation that the self-test causes."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

STEPS = 4


def verify(
    root: Path, out: Path, *arguments: str, program: tuple[str, ...] = ("titan_grpo.cli", "verify")
) -> tuple[subprocess.CompletedProcess[str], dict[str, Any]]:
    """Exit code and output, and the JSON result."""
    command = [sys.executable, "-m", *program, "--device", "cpu", "--steps", str(STEPS)]
    command += ["--out", str(out / "run"), "--json", str(out / "result.json"), *arguments]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=500)
    assert (out / "result.json").exists(), done.stdout + done.stderr
    return done, json.loads((out / "result.json").read_text())


@pytest.mark.usefixtures("vllm_python", "sglang_python")
@pytest.mark.parametrize("engine", ["vllm", pytest.param("sglang", marks=pytest.mark.long)])
def test_a_good_run_passes_with_all_its_evidence(engine: str, root: Path, tmp_path: Path) -> None:
    done, result = verify(root, tmp_path, "--engine", engine)
    assert done.returncode == 0, done.stdout + done.stderr
    assert result["engine"] == engine
    assert result["passed"]
    assert result["violations"] == []
    assert [run["run"] for run in result["runs"]] == ["async live", "async replay", "sync replay"]
    assert len({run["final_digest"] for run in result["runs"]}) == 1
    for run in result["runs"]:
        assert run["versions_made"] == STEPS + 1
        assert run["versions_committed"] >= 2
        assert run["worst_fit_nats"] <= result["tolerance_nats"] < run["separation_nats"] / 2
        assert run["throughput"]["steps_per_s"] > 0
        assert run["throughput"]["sent_mib_s"] > 0
    modes = {run["run"]: run["throughput"]["mode"] for run in result["runs"]}
    assert modes == {"async live": "async", "async replay": "async", "sync replay": "sync"}
    assert result["runs"][2]["versions_committed"] == STEPS + 1, "synchronous mode skips no version"
    assert "PASSED" in done.stdout
    if engine == "vllm":  # before, it took 256 tokens and 64 requests, whatever the job asked for
        log = (tmp_path / "run/vllm0.log").read_text()
        assert "'max_model_len': 64" in log
        assert "'max_num_seqs': 128" in log


@pytest.fixture(scope="module")
def tampered(
    root: Path, tmp_path_factory: pytest.TempPathFactory, vllm_python: str
) -> tuple[subprocess.CompletedProcess[str], dict[str, Any]]:
    """One verification, on one server, in which every kind of violation is caused."""
    out = tmp_path_factory.mktemp("tampered")
    return verify(root, out, program=("tests.rigs.tampered_verify",))


@pytest.mark.long
@pytest.mark.parametrize(
    ("kind", "run", "words"),
    [
        ("bytes", "async live", f"version {STEPS} on worker 0: 1 of "),
        (
            "backwards",
            "async live",
            f"was answered by version {STEPS - 1} after version {STEPS} had been seen",
        ),
        ("mixed", "async live", "fits no version"),
        ("foreign", "async live", "was committed by another run"),
        ("modes", "async live and sync replay", "versions [2, 3, 4] differ"),
    ],
)
def test_a_violation_is_named(
    tampered: tuple[subprocess.CompletedProcess[str], dict[str, Any]],
    kind: str,
    run: str,
    words: str,
) -> None:
    done, result = tampered
    assert done.returncode == 1, done.stdout + done.stderr
    found = [v for v in result["violations"] if (v["kind"], v["run"]) == (kind, run)]
    assert any(words in v["message"] for v in found), result["violations"]
    assert f"VIOLATION {kind} in run {run}" in done.stdout


@pytest.mark.long
def test_what_was_done_to_one_run_is_not_held_against_another(
    tampered: tuple[subprocess.CompletedProcess[str], dict[str, Any]],
) -> None:
    _, result = tampered
    assert "async replay" not in {v["run"] for v in result["violations"]}
    # The file is written from the image with the flipped bit, the versions are what the trainer
    # had.
    between = [
        v["message"] for v in result["violations"] if v["run"] == "async live and async replay"
    ]
    assert between == ["the files of the trained weights differ"]
