"""Runs on the same recorded rollouts end in the same weights: split over ranks, accumulated,
packed. Resumed: tests/e2e/test_algorithm_runs.py."""

import json
import sys
from pathlib import Path

import pytest
import torch

from titan_grpo.observe import names
from titan_grpo.observe.recorder import read_metrics

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

# With Adam's usual eps an element's first steps are the sign of its gradient, rounding included.
SMOOTH = ["--optimizer.eps=1e-2", "--weight_sync.wire_dtype=float32"]


@pytest.fixture(scope="module")
def whole(runs, site, small_replay, tmp_path_factory) -> Path:
    """Six steps on two ranks."""
    out = tmp_path_factory.mktemp("whole")
    arguments = [*small_replay.arguments, *SMOOTH, "--training.steps=6"]
    summary = runs.complete(out, [site.url], *arguments, nproc=2)
    assert summary["versions_committed"][site.url]["last"] == 6
    return out


def largest_difference(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    assert a.keys() == b.keys()
    return max(float((a[name] - b[name]).abs().max()) for name in a)


SMALL_FILES = """import os, resource, sys
resource.setrlimit(resource.RLIMIT_FSIZE, (3_000_000, 3_000_000))
os.execvp(sys.argv[1], sys.argv[1:])"""


def test_a_disk_that_takes_no_checkpoint_ends_the_run_with_one_line_and_a_report(
    runs, site, small_replay, tmp_path
):
    # A limit on the size of files fails in the place where a full disk does.
    arguments = [*small_replay.arguments, "--checkpoint.interval=1", "--training.steps=3"]
    inside = (sys.executable, "-c", SMALL_FILES)
    with runs.start(tmp_path, [site.url], *arguments, inside=inside) as training:
        assert training.finish() != 0
    assert "a file of the run could not be written" in training.cause, training.log
    assert training.exitcode == 1
    assert runs.summary(tmp_path)["steps"] == 1
    site.assert_serves()


@pytest.mark.long
def test_a_resumed_run_goes_on_with_the_prompts_where_it_stopped(runs, site, tmp_path):
    record = tmp_path / "record.jsonl"
    arguments = [
        f"--rollout.record_path={record}",
        "--rollout.max_completion_tokens=8",
        "--rollout.prompts_per_step=4",
    ]
    for steps in (2, 4):
        runs.complete(tmp_path, [site.url], *arguments, f"--training.steps={steps}")
    batches = [json.loads(line) for line in record.read_text().splitlines()]
    assert [batch["version"] for batch in batches] == [0, 1, 2, 3]
    prompts = [group["prompt"]["index"] for batch in batches for group in batch["groups"]]
    # Finished in any order, yet none twice and none left behind for good: only the last ones may
    # still be on their way.
    assert len(set(prompts)) == len(prompts) == 16
    assert max(prompts) < 16 + 2 * 4


@pytest.mark.long
def test_one_rank_with_many_micro_batches_trains_like_two_ranks_with_one_each(
    runs, site, small_replay, whole, tmp_path
):
    arguments = [*small_replay.arguments, *SMOOTH, "--training.steps=6", "--grpo.token_budget=64"]
    runs.complete(tmp_path, [site.url], *arguments)
    one, two = runs.weights(tmp_path / "hf"), runs.weights(whole / "hf")
    difference, moved = (
        largest_difference(one, two),
        largest_difference(two, runs.weights(runs.model)),
    )
    print(f"largest difference {difference:.2e}, largest movement {moved:.2e}")
    assert difference < 1e-3 * moved
    for a, b in zip(
        read_metrics(tmp_path / "metrics.jsonl"), read_metrics(whole / "metrics.jsonl"), strict=True
    ):
        for name in (names.LOSS, names.GRAD_NORM, names.LOGPROB_GAP, names.REWARD):
            assert a[name] == pytest.approx(b[name], rel=1e-4, abs=1e-6), (a["step"], name)


@pytest.mark.long
def test_kl_to_a_reference_starts_at_zero_and_grows_as_the_policy_moves(
    runs, site, small_replay, tmp_path
):
    runs.complete(
        tmp_path,
        [site.url],
        *small_replay.arguments,
        "--training.steps=4",
        "--grpo.kl_beta=0.1",
        nproc=2,
    )
    kl = [row[names.KL] for row in read_metrics(tmp_path / "metrics.jsonl")]
    assert kl[0] == pytest.approx(0.0, abs=1e-6)
    assert kl[-1] > 1e-4


@pytest.mark.long
def test_packed_rows_train_like_padded_ones_and_the_balance_is_reported(
    runs, site, small_replay, whole, tmp_path
):
    runs.complete(
        tmp_path,
        [site.url],
        *small_replay.arguments,
        *SMOOTH,
        "--training.steps=6",
        "--grpo.pack_sequences",
        nproc=2,
    )
    packed, padded = runs.weights(tmp_path / "hf"), runs.weights(whole / "hf")
    difference, moved = (
        largest_difference(packed, padded),
        largest_difference(padded, runs.weights(runs.model)),
    )
    print(f"largest difference {difference:.2e}, largest movement {moved:.2e}")
    assert difference < 1e-3 * moved
    for step, other in zip(
        read_metrics(tmp_path / "metrics.jsonl"), read_metrics(whole / "metrics.jsonl"), strict=True
    ):
        assert step[names.WORK_CV] == other[names.WORK_CV] <= step[names.WORK_CV_DEALT]
        assert step[names.BATCH_FILL] >= other[names.BATCH_FILL]
