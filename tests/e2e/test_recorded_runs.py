"""Runs on recorded rollouts, on a server without an engine. With the whole family of terms on:
resumed, started again, skipped and stopped. And the same steps split over ranks, accumulated and
packed, which end in the same weights."""

import json
import shutil
import sys
from collections.abc import Collection, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from scripts.common import keys
from tests.e2e.conftest import Replay, Runs, Site
from tests.rigs.present import present
from tests.rigs.server_handle import ServerProcess, served
from titan_grpo.observe import names
from titan_grpo.observe.recorder import read_metrics
from titan_grpo.protocol.messages import Label
from titan_grpo.rollout.records import GroupRecorder, ReplayClient
from titan_grpo.titan.export import checkpoint_of
from titan_grpo.titan.flavors import FLAVORS
from titan_grpo.titan.tiny import write_tiny_model

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

PROMPTS = 4
# With Adam's usual eps an element's first steps are the sign of its gradient, rounding included.
SMOOTH = ["--optimizer.eps=1e-2", "--weight_sync.wire_dtype=float32"]


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with ServerProcess() as process:
        yield process


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Plain text for torchtitan's own loader."""
    folder = tmp_path_factory.mktemp("text")
    lines = [
        json.dumps({"text": f"number {n} is followed by {n + 1}, and so on. " * 4})
        for n in range(64)
    ]
    (folder / "data.json").write_text("\n".join(lines))
    return folder


def every_term(text: Path) -> list[str]:
    settings = {
        "grpo.num_microbatches": 2,
        "grpo.num_epochs": 2,
        "grpo.top_entropy_share": 0.5,
        "grpo.m2_threshold": 0.04,
        "grpo.clip_ratio_dual": 3.0,
        "grpo.policy_ratio_type": "sequence",
        "grpo.kl_beta": 0.1,
        "grpo.ref_model_ema": 0.5,
        "grpo.entropy_loss_weight": 0.01,
        "grpo.logit_loss_weight": 0.01,
        "grpo.rollout_is_level": "geometric",
        "grpo.rollout_is_mode": "mask",
        "grpo.advantage_baseline": "leave_one_out",
        "grpo.advantage_normalization": "batch",
        "grpo.ptx_mixin_batchsize": 4,
        "grpo.ptx_scale": 0.1,
        "training.local_batch_size": 2,
        "grpo.token_budget": 256,
        "training.dataset": "c4_test",
        "training.dataset_path": text,
    }
    return [*keys(settings), "--grpo.dynamic_sampling"]


def committed(summary: dict[str, Any]) -> list[int]:
    (server,) = summary["versions_committed"].values()
    versions: list[int] = server["committed"]
    return versions


@pytest.fixture(scope="module")
def arguments(small_replay: Replay, text: Path) -> list[str]:
    """Every term, packed, with a checkpoint in the middle of four steps."""
    steps = ["--training.steps=4", "--checkpoint.interval=2"]
    return [*small_replay.arguments, *SMOOTH, *every_term(text), "--grpo.pack_sequences", *steps]


@pytest.fixture(scope="module")
def whole(
    runs: Runs,
    server: ServerProcess,
    arguments: list[str],
    tmp_path_factory: pytest.TempPathFactory,
) -> Path:
    """Its folder after four steps on two ranks in one go."""
    out = tmp_path_factory.mktemp("whole")
    runs.complete(out, [server.url], *arguments, nproc=2)
    return out


def test_a_run_with_every_term_makes_one_version_per_batch(runs: Runs, whole: Path) -> None:
    versions = committed(runs.summary(whole))
    assert versions[0] == 0
    assert versions[-1] == 4, "two optimizer steps of a batch are one version"
    rows = list(read_metrics(whole / "metrics.jsonl"))
    assert rows[0][names.KL] != 0, "the second optimizer step of a batch sees the first"
    assert rows[0][names.RATIO_MEAN] != 1, "its ratio is against the policy before the batch"
    assert 0 < rows[0][names.ENTROPY] < 4.86
    assert rows[-1][names.PTX_LOSS] < rows[0][names.PTX_LOSS]


def test_a_resumed_run_ends_with_the_very_weights_of_one_in_one_go(
    runs: Runs, server: ServerProcess, whole: Path, arguments: list[str], tmp_path: Path
) -> None:
    before = server.run(served())["label"]
    shutil.copytree(whole / "checkpoint/step-2", tmp_path / "checkpoint/step-2")
    # And in the other mode: in the whole run rank 0 builds the tensors of both.
    more = [*arguments, "--grpo.no-single-rank-load"]
    summary = runs.complete(tmp_path, [server.url], *more, nproc=2)
    assert summary["steps"] == 2
    versions = committed(summary)
    assert (versions[0], versions[-1]) == (2, 4), (
        "the resumed version is published first, and again: it is another run's"
    )
    label = server.run(served())["label"]
    assert (label != before, present(Label.parse(label)).version) == (True, 4)
    assert runs.same_weights(whole, tmp_path)
    assert [row["step"] for row in read_metrics(tmp_path / "metrics.jsonl")] == [3, 4]


def test_a_finished_job_that_is_started_again_says_so_and_keeps_its_files(
    runs: Runs, server: ServerProcess, whole: Path, arguments: list[str]
) -> None:
    kept = ("trace.json", "metrics.jsonl", "summary.json", "hf/model.safetensors")
    before = {name: (whole / name).read_bytes() for name in kept}
    with runs.start(whole, [server.url], *arguments, nproc=2) as training:
        assert training.finish() == 0, training.log
    assert [line for line in training.shown if "step 4 of 4 is done" in line] == training.shown
    assert {name: (whole / name).read_bytes() for name in kept} == before


@pytest.mark.long
def test_every_term_is_the_same_with_the_vocabulary_sharded_over_two_ranks(
    runs: Runs, server: ServerProcess, small_replay: Replay, text: Path, tmp_path: Path
) -> None:
    name, flavor = FLAVORS["llama3"]
    others = replace(runs, model=write_tiny_model("llama3", tmp_path / "model", seed=1))
    arguments = [
        *small_replay.arguments,
        *SMOOTH,
        *every_term(text),
        f"--model.name={name}",
        f"--model.flavor={flavor}",
    ]
    # One data-parallel rank reads other text than two do.
    arguments.append("--grpo.ptx_mixin_batchsize=0")
    found = {}
    for degree in (1, 2):
        out = tmp_path / f"tensor{degree}"
        parallel = f"--parallelism.tensor_parallel_degree={degree}"
        others.complete(out, [server.url], *arguments, parallel, "--training.steps=2", nproc=2)
        found[degree] = list(read_metrics(out / "metrics.jsonl"))
    shown = (names.LOSS, names.GRAD_NORM, names.KL, names.ENTROPY)
    for whole, sharded in zip(found[1], found[2], strict=True):
        for metric in (*shown, names.LOGIT_SQUARE, names.RATIO_MEAN):
            assert sharded[metric] == pytest.approx(whole[metric], rel=2e-4, abs=1e-6), metric


HUGE = (3e38, -3e38, -3e38, -3e38)
"""Rewards of a group that a float32 holds, while it does not hold the first one less their mean."""


def rewritten(
    small_replay: Replay,
    path: Path,
    batches: Collection[int],
    flat: Collection[int] = (),
    huge: Collection[int] = (),
) -> list[str]:
    """A recording of these batches of another, each the next version; in those named ``flat`` every
    reward is the same, in those named ``huge`` one group has HUGE rewards."""
    source = ReplayClient(str(small_replay.path))
    groups = [source.next_batch(version, PROMPTS, 0) for version in range(max(batches) + 1)]
    recorder = GroupRecorder(str(path), 0)
    for version, number in enumerate(batches):
        recorder.write(version, groups[number])
    recorder.close()
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for version in flat:
        for group in lines[version]["groups"]:
            for completion in group["completions"]:
                completion["reward"] = 1.0
    for version in huge:
        for completion, reward in zip(
            lines[version]["groups"][0]["completions"], HUGE, strict=True
        ):
            completion["reward"] = reward
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return [f"--rollout.replay_path={path}"]


def test_a_skipped_step_changes_nothing_publishes_nothing_and_the_next_one_goes_on(
    runs: Runs, server: ServerProcess, small_replay: Replay, tmp_path: Path
) -> None:
    arguments = [
        *small_replay.arguments,
        *SMOOTH,
        "--grpo.reward_collapse_steps=1",
        "--grpo.no-normalize-advantage-std",
    ]
    skipping = rewritten(
        small_replay, tmp_path / "flat.jsonl", (0, 1, 2, 3, 3), flat=(2,), huge=(3,)
    )
    summary = runs.complete(
        tmp_path / "skipped", [server.url], *arguments, *skipping, "--training.steps=5", nproc=2
    )
    assert summary["steps"] == 5
    assert committed(summary)[-1] == 3
    assert checkpoint_of(tmp_path / "skipped", 3).name == "step-5", "what export takes for it"
    # The group is on one rank, and so is the loss that is not a number; a step taken by the other
    # would show in the weights.
    for step, why in ((3, "all rewards were equal"), (4, "the loss is not finite")):
        said = f"step {step}: 1 optimizer step skipped ({why}"
        assert any(said in error for error in summary["errors"])
    without = rewritten(small_replay, tmp_path / "without.jsonl", (0, 1, 3))
    runs.complete(
        tmp_path / "without", [server.url], *arguments, *without, "--training.steps=3", nproc=2
    )
    assert runs.same_weights(tmp_path / "without", tmp_path / "skipped")


def test_a_run_without_a_healthy_step_stops_on_every_rank_and_says_why(
    runs: Runs, server: ServerProcess, small_replay: Replay, tmp_path: Path
) -> None:
    arguments = [
        *small_replay.arguments,
        "--grpo.grad_norm_limit=1e-9",
        "--grpo.max_unhealthy_steps=2",
        "--training.steps=6",
    ]
    with runs.start(tmp_path, [server.url], *arguments, nproc=2) as training:
        assert training.finish() != 0
    assert "no optimizer step was taken in 2 training steps in a row" in training.cause
    assert "the gradient norm is past grpo.grad_norm_limit" in training.cause
    summary = runs.summary(tmp_path)
    assert committed(summary) == [0]
    assert summary["ended_by"].startswith("UnhealthyError: step 2: no optimizer step was taken")


@pytest.fixture(scope="module")
def plain(
    runs: Runs,
    server: ServerProcess,
    small_replay: Replay,
    tmp_path_factory: pytest.TempPathFactory,
) -> Path:
    """Six steps of one term on two ranks."""
    out = tmp_path_factory.mktemp("plain")
    arguments = [*small_replay.arguments, *SMOOTH, "--training.steps=6"]
    assert committed(runs.complete(out, [server.url], *arguments, nproc=2))[-1] == 6
    return out


def assert_trained_alike(
    runs: Runs, one: Path, other: Path
) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Apart by what is rounded otherwise, and no more; the rows of their steps."""
    a, b, begun = (runs.weights(folder) for folder in (one / "hf", other / "hf", runs.model))
    apart, moved = (max(float((x[n] - b[n]).abs().max()) for n in b) for x in (a, begun))
    print(f"largest difference {apart:.2e}, largest movement {moved:.2e}")
    assert apart < 1e-3 * moved
    rows = (read_metrics(folder / "metrics.jsonl") for folder in (one, other))
    return list(zip(*rows, strict=True))


@pytest.mark.parametrize(
    "key", ["last_save_in_hf", pytest.param("load_only", marks=pytest.mark.long)]
)
def test_an_alert_that_stops_a_run_saves_all_that_a_restart_needs_or_says_that_it_saves_nothing(
    runs: Runs, server: ServerProcess, small_replay: Replay, tmp_path: Path, key: str
) -> None:
    arguments = [*small_replay.arguments, "--training.steps=2", f"--checkpoint.{key}"]
    with runs.start(tmp_path, [server.url], *arguments, "--alerts.stop=version >= 0") as training:
        assert training.finish() != 0
    assert "step 1: alerts.stop version >= 0" in training.cause, training.log
    if key == "load_only":
        assert "nothing is saved (checkpoint.load_only)" in training.cause
        assert not (tmp_path / "checkpoint").exists()
        return
    assert "the checkpoint of this step is saved" in training.cause
    summary = runs.complete(tmp_path, [server.url], *arguments)
    assert (summary["steps"], summary["resumes"]) == (2, [2])


SMALL_FILES = """import os, resource, sys
resource.setrlimit(resource.RLIMIT_FSIZE, (3_000_000, 3_000_000))
os.execvp(sys.argv[1], sys.argv[1:])"""


def test_a_disk_that_takes_no_checkpoint_ends_the_run_with_one_line_and_a_report(
    runs: Runs, server: ServerProcess, small_replay: Replay, tmp_path: Path
) -> None:
    # A limit on the size of files fails in the place where a full disk does.
    arguments = [*small_replay.arguments, "--checkpoint.interval=1", "--training.steps=3"]
    inside = (sys.executable, "-c", SMALL_FILES)
    with runs.start(tmp_path, [server.url], *arguments, inside=inside) as training:
        assert training.finish() != 0
    assert "a file of the run could not be written" in training.cause, training.log
    assert training.exitcode == 1
    summary = runs.summary(tmp_path)
    assert summary["steps"] == 1
    assert summary["ended_by"].startswith("CheckpointException: "), summary["ended_by"]


@pytest.mark.long
def test_a_resumed_run_goes_on_with_the_prompts_where_it_stopped(
    runs: Runs, site: Site, tmp_path: Path
) -> None:
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
    runs: Runs, server: ServerProcess, small_replay: Replay, plain: Path, tmp_path: Path
) -> None:
    arguments = [*small_replay.arguments, *SMOOTH, "--training.steps=6", "--grpo.token_budget=64"]
    runs.complete(tmp_path, [server.url], *arguments)
    for a, b in assert_trained_alike(runs, tmp_path, plain):
        for name in (names.LOSS, names.GRAD_NORM, names.LOGPROB_GAP, names.REWARD):
            assert a[name] == pytest.approx(b[name], rel=1e-4, abs=1e-6), (a["step"], name)


@pytest.mark.long
def test_kl_to_a_reference_starts_at_zero_and_grows_as_the_policy_moves(
    runs: Runs, server: ServerProcess, small_replay: Replay, tmp_path: Path
) -> None:
    arguments = [*small_replay.arguments, "--training.steps=4", "--grpo.kl_beta=0.1"]
    runs.complete(tmp_path, [server.url], *arguments, nproc=2)
    kl = [row[names.KL] for row in read_metrics(tmp_path / "metrics.jsonl")]
    assert kl[0] == pytest.approx(0.0, abs=1e-6)
    assert kl[-1] > 1e-4


@pytest.mark.long
def test_packed_rows_train_like_padded_ones_and_the_balance_is_reported(
    runs: Runs, server: ServerProcess, small_replay: Replay, plain: Path, tmp_path: Path
) -> None:
    arguments = [*small_replay.arguments, *SMOOTH, "--training.steps=6", "--grpo.pack_sequences"]
    runs.complete(tmp_path, [server.url], *arguments, nproc=2)
    for step, other in assert_trained_alike(runs, tmp_path, plain):
        assert step[names.WORK_CV] == other[names.WORK_CV] <= step[names.WORK_CV_DEALT]
        assert step[names.BATCH_FILL] >= other[names.BATCH_FILL]


@pytest.mark.long
def test_every_version_of_two_stages_is_committed(
    runs: Runs, server: ServerProcess, small_replay: Replay, tmp_path: Path
) -> None:
    model, out = write_tiny_model("qwen3_untied", tmp_path / "model", seed=1), tmp_path / "out"
    arguments = [
        *small_replay.arguments,
        "--model.flavor=grpo_tiny_untied",
        f"--model.hf_assets_path={model}",
        "--parallelism.pipeline_parallel_degree=2",
        f"--training.steps={3}",
    ]
    assert committed(runs.complete(out, [server.url], *arguments, nproc=2))[-1] == 3
    rows = list(read_metrics(out / "metrics.jsonl"))
    assert len(rows) == 3
    assert all(row[names.LOSS] for row in rows), "the last stage's loss is rank 0's metric"
