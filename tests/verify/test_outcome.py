"""The verification's report: a failed result says so, and no kind of violation is hidden by many of
another."""

from json import dumps
from pathlib import Path

import pytest

from titan_grpo.commands.doctor_host import nccl_version
from titan_grpo.commands.verify_runs import with_nccl_of
from titan_grpo.engines.launch import ServerSpec
from titan_grpo.errors import ConfigError
from titan_grpo.verify.outcome import Run, Violation, outcome, table, throughput
from titan_grpo.verify.server import Devices, choose_devices, server_spec

EMPTY = Run("a run", (), (), (), (), ())
SUMMARY = {
    "mode": "async",
    "steps": 6,
    "steps_per_s": 2.0,
    "versions_committed": {"a": {"committed": [0, 1, 2, 4, 6]}, "b": {"committed": [0, 3, 5, 6]}},
    "sync_count": 9,
    "send_s": {"median": 0.5},
    "commit_s": {"median": 0.1},
    "blocked_s": {"median": None},
}


def test_every_kind_is_shown_beside_a_flood_of_another() -> None:
    found = [Violation("mixed", "a run", f"probe {i}") for i in range(50)] + [
        Violation("modes", "a run", "differ")
    ]
    result = outcome([EMPTY], {}, found, 0.05)
    text = table(result)
    assert not result["passed"]
    assert "VIOLATION modes" in text
    assert "51 violations in all" in text
    assert "FAILED" in text


def test_throughput_is_what_the_summary_says() -> None:
    """Of the commits those in the time of the steps. Before, the first and the last version counted
    too, and three steps had twice their rate."""
    speed = throughput(SUMMARY, image_bytes=10 << 20, gather_s=0.01)
    assert tuple(speed[k] for k in ("steps_per_s", "synced_mib_s", "sent_mib_s", "blocked_s")) == (
        2.0,
        20.0,
        20.0,
        0.0,
    )


@pytest.mark.parametrize(
    ("wanted", "gpus", "ranks", "chosen"),
    [
        ("auto", 0, 2, Devices("cpu")),
        ("auto", 1, 2, Devices("cpu")),
        ("cpu", 8, 2, Devices("cpu")),
        ("auto", 2, 2, Devices("cuda", 1)),
        ("cuda", 8, 2, Devices("cuda", 2)),
        ("cuda", 2, 1, Devices("cuda", 1)),
        ("cuda", 1, 1, Devices("cuda", 0)),
    ],
)
def test_the_server_sits_on_rank_0s_gpu_only_where_there_is_no_other(
    wanted: str, gpus: int, ranks: int, chosen: Devices
) -> None:
    assert choose_devices(wanted, gpus, ranks) == chosen


@pytest.mark.parametrize(("gpus", "ranks"), [(0, 2), (0, 1), (1, 2), (2, 4)])
def test_cuda_without_enough_gpus_is_refused_with_the_remedy(gpus: int, ranks: int) -> None:
    with pytest.raises(ConfigError, match="--device cpu"):
        choose_devices("cuda", gpus, ranks)


def test_a_lane_is_nccl_only_to_a_gpu_of_its_own() -> None:
    transports = {n: choose_devices("cuda", n, 1).transport for n in (1, 2)}
    assert transports == {1: "auto", 2: "nccl"}
    assert choose_devices("cpu", 8, 2).transport == "auto"


@pytest.mark.parametrize(
    ("visible", "gpu", "named"),
    [(None, 1, "1"), ("4,5", 1, "5"), ("3", 0, "3"), ("GPU-1f, GPU-2e", 1, "GPU-2e")],
)
def test_the_server_gets_a_gpu_of_those_that_the_command_may_use(
    visible: str | None, gpu: int, named: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """It got one by its number among these, as a number of the host: another user's GPU."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    plain = ServerSpec("python", "model", str(tmp_path / "log"))
    spec = server_spec(plain, tmp_path, Devices("cuda", gpu))
    assert spec.env["CUDA_VISIBLE_DEVICES"] == named


@pytest.mark.parametrize(
    ("theirs", "transport"), [(nccl_version(), "nccl"), ("9.9.9", "auto"), (None, "nccl")]
)
def test_a_lane_is_nccl_only_between_equal_versions_of_it(
    theirs: str | None, transport: str, tmp_path: Path
) -> None:
    """Else the server refused it, and the proof failed as it is set up by default: vLLM, SGLang and
    the trainer ask for three versions of torch. ``theirs``: None for what is no interpreter."""
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\necho '{'' if theirs is None else dumps({'nccl': theirs})}'\n")
    python.chmod(0o755)
    assert with_nccl_of(str(python), Devices("cuda", 1)).transport == transport
    assert with_nccl_of(str(python), Devices("cpu")) == Devices("cpu")
