"""Runs on recorded rollouts, on a server without an engine. With the whole family of terms on:
resumed, started again, skipped and stopped; beside a server that is not there."""

import json
import shutil
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import checkpoint
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from scripts.common import keys
from tests.e2e.conftest import Replay, Runs, Site
from tests.rigs.present import present
from tests.rigs.server_handle import ServerProcess, served
from tests.rigs.sockets import free_port
from titan_grpo.observe import names
from titan_grpo.observe.recorder import read_metrics
from titan_grpo.protocol.messages import Label
from titan_grpo.rollout.records import GroupRecorder, ReplayClient
from titan_grpo.samples import Group
from titan_grpo.titan.checkpoints import checkpoint_of
from titan_grpo.titan.tiny import write_tiny_model
from titan_grpo.views.timeline import TRAINER_STATES

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
    """By the only server that is there."""
    held: list[list[int]] = [each["committed"] for each in summary["versions_committed"].values()]
    (versions,) = filter(None, held)
    return versions


@pytest.fixture(scope="module")
def arguments(small_replay: Replay, text: Path) -> list[str]:
    """Every term, packed, with a checkpoint in the middle of four steps."""
    steps = ["--training.steps=4", "--checkpoint.interval=2"]
    shown = "--job.save_config_file=job.json"
    terms = [*SMOOTH, *every_term(text), "--grpo.pack_sequences"]
    return [*small_replay.arguments, *terms, *steps, shown]


@pytest.fixture(scope="module")
def absent() -> str:
    """URL of a server that is not there."""
    return f"http://127.0.0.1:{free_port()}"


@pytest.fixture(scope="module")
def whole(
    runs: Runs,
    server: ServerProcess,
    absent: str,
    arguments: list[str],
    tmp_path_factory: pytest.TempPathFactory,
) -> Path:
    """Its folder after four steps on two ranks in one go."""
    out = tmp_path_factory.mktemp("whole")
    runs.complete(out, [server.url, absent], *arguments, nproc=2)
    return out


def test_a_run_with_every_term_makes_one_version_per_batch(runs: Runs, whole: Path) -> None:
    versions = committed(runs.summary(whole))
    assert versions[0] == 0
    assert versions[-1] == 4, "two optimizer steps of a batch are one version"
    rows = list(read_metrics(whole / "metrics.jsonl"))
    assert rows[0][names.KL] != 0, "the second optimizer step of a batch sees the first"
    assert rows[0][names.RATIO_MEAN] != 1, "its ratio is against the policy before the batch"
    assert 0 < rows[0][names.ENTROPY] < 4.86
    # Of all ranks' text: each rank's own share of the tokens would give their sum.
    assert rows[-1][names.PTX_LOSS] < rows[0][names.PTX_LOSS] < 1.5 * 4.86
    assert json.loads((whole / "job.json").read_text())["model"]["name"] == "qwen3"


def test_a_runs_trace_has_every_state_of_its_trainer_that_the_page_shows(whole: Path) -> None:
    trace = json.loads((whole / "trace.json").read_text())
    assert {event["name"] for event in trace} >= set(TRAINER_STATES.values())


def test_a_server_without_the_last_version_at_the_end_is_an_error_of_the_summary(
    runs: Runs, whole: Path, absent: str
) -> None:
    errors = runs.summary(whole)["errors"]
    (error,) = [each for each in errors if "did not hold version 4 at the end" in each]
    assert error.startswith(f"{absent} did not")
    # A server of unknown state is not waited for, and the deadline is 60 s.
    assert float(error.split(" at the end, after ")[1].split(" s;")[0]) < 60, error
    assert "last error: connect failed: " in error


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


@pytest.mark.parametrize("killed", [True, pytest.param(False, marks=pytest.mark.long)])
def test_a_finished_job_that_has_not_saved_its_last_version_saves_it_when_it_is_started_again(
    runs: Runs,
    server: ServerProcess,
    whole: Path,
    arguments: list[str],
    tmp_path: Path,
    killed: bool,
) -> None:
    """It was killed before that, or could not: a host's part was missing, a disk was full."""
    out, before = tmp_path / "out", runs.summary(whole)
    shutil.copytree(whole, out)
    shutil.rmtree(out / "hf")
    if killed:
        (out / "summary.json").unlink()
    summary = runs.complete(out, [server.url], *arguments, nproc=2)
    assert runs.same_weights(whole, out)
    assert json.loads((out / "hf/config.json").read_text())["torch_dtype"] == "float32"
    assert summary == before | {"run": "out"}


LARGE, HUGE = (1e6, -1e6, -1e6, -1e6), (3e38, -3e38, -3e38, -3e38)
"""Rewards of a group whose gradient is past any sensible limit; and of one whose mean less its
first reward is no float32."""


def unhealthy(small_replay: Replay, path: Path) -> list[str]:
    """A recording of healthy batches, but that the second has no spread, and the first group of
    some others is struck."""
    source, recorder = ReplayClient(str(small_replay.path)), GroupRecorder(str(path), 0)
    batches = [source.next_batch(version, PROMPTS, 0) for version in range(5)]
    struck = {2: LARGE, 3: HUGE, 5: LARGE, 6: LARGE, 7: LARGE, 8: LARGE}
    for version in range(9):
        groups = batches[min(version, 4)]
        if version == 1:
            groups = [rewarded(group, (1.0,) * len(group.completions)) for group in groups]
        elif version in struck:
            groups = [rewarded(groups[0], struck[version]), *groups[1:]]
        recorder.write(version, groups)
    recorder.close()
    return [f"--rollout.replay_path={path}"]


def rewarded(group: Group, rewards: Sequence[float]) -> Group:
    pairs = zip(group.completions, rewards, strict=True)
    return replace(group, completions=tuple(replace(c, reward=reward) for c, reward in pairs))


def saved(folder: Path) -> dict[str, torch.Tensor]:
    """The tensors of a checkpoint: weights, and what the optimizer keeps of each."""
    stored = FileSystemReader(folder).read_metadata().state_dict_metadata
    tensors = {
        name: torch.empty(each.size, dtype=each.properties.dtype)
        for name, each in stored.items()
        if isinstance(each, TensorStorageMetadata)
    }
    checkpoint.load(tensors, checkpoint_id=folder)
    return tensors


def test_skipped_steps_change_nothing_and_too_many_in_a_row_stop_the_run_on_every_rank(
    runs: Runs, server: ServerProcess, small_replay: Replay, tmp_path: Path
) -> None:
    settings = {
        "grpo.reward_collapse_steps": 1,
        "grpo.grad_norm_limit": 1e3,
        "grpo.max_unhealthy_steps": 4,
        "checkpoint.interval": 1,
        "training.steps": 20,
    }
    arguments = [*small_replay.arguments, *unhealthy(small_replay, tmp_path / "unhealthy.jsonl")]
    arguments += [*keys(settings), "--grpo.no-normalize-advantage-std"]
    out = tmp_path / "out"
    synchronous = "--grpo.no-async-weight-update"
    with runs.start(out, [server.url], *arguments, synchronous, nproc=2) as training:
        assert training.finish() != 0
    assert "no optimizer step was taken in 4 training steps in a row" in training.cause
    assert "the gradient norm is past grpo.grad_norm_limit" in training.cause
    summary = runs.summary(out)
    assert summary["ended_by"].startswith("UnhealthyError: step 9: no optimizer step was taken")
    # The struck group is on one rank, and so is the loss that is not a number; a step taken by the
    # other would show in the weights.
    reasons = (
        "all rewards were equal",
        "the gradient norm is past grpo.grad_norm_limit",
        "the loss is not finite",
    )
    for step, why in enumerate(reasons, 2):
        said = f"step {step}: 1 optimizer step skipped ({why}"
        assert any(said in error for error in summary["errors"]), summary["errors"]
    rows = read_metrics(out / "metrics.jsonl")
    assert min(row[names.STALENESS] for row in rows) == 0, "no token is newer than the trainer"
    # Had a skipped step left its gradient behind, the fifth one would have been skipped too.
    assert committed(summary) == [0, 1, 2]
    assert checkpoint_of(out, 2).name == "step-5", "what export takes for it"
    first, skipped, fifth, last = (saved(out / f"checkpoint/step-{n}") for n in (1, 4, 5, 8))
    assert any("exp_avg" in name for name in first)
    for before, after in ((first, skipped), (fifth, last)):
        assert all(torch.equal(before[name], after[name]) for name in before)
    assert any(not torch.equal(skipped[name], fifth[name]) for name in fifth)


def stopped_by_an_alert(
    runs: Runs, server: ServerProcess, out: Path, *arguments: str, nproc: int
) -> str:
    """Why a run ended that an alert stops at its third step."""
    alert = "--alerts.stop=reward/mean >= 0 for 3"
    with runs.start(out, [server.url], *arguments, alert, nproc=nproc) as training:
        assert training.finish() != 0
    assert "step 3: alerts.stop reward/mean >= 0 for 3" in training.cause, training.log
    return training.cause


SMALL_FILES = """import os, resource, sys
resource.setrlimit(resource.RLIMIT_FSIZE, (3_000_000, 3_000_000))
os.execvp(sys.argv[1], sys.argv[1:])"""


def test_an_alert_is_told_and_saves_all_that_a_restart_needs_whose_disk_takes_no_checkpoint(
    runs: Runs, server: ServerProcess, small_replay: Replay, tmp_path: Path
) -> None:
    out, told, script = tmp_path / "out", tmp_path / "told", tmp_path / "tell.sh"
    script.write_text(f'echo "$1" >>"{told}"\n')
    size = [*small_replay.arguments, "--training.steps=6", "--checkpoint.last_save_in_hf"]
    run = ["--alerts.run=version >= 1", f"--alerts.command=sh {script}"]
    cause = stopped_by_an_alert(runs, server, out, *size, *run, nproc=2)
    assert "the checkpoint of this step is saved" in cause
    assert told.read_text().startswith("step 2: version >= 1")
    errors = [text.partition(" (")[0] for text in runs.summary(out)["errors"]]
    assert "alert at step 2: version >= 1" in errors
    assert "alert at step 3: reward/mean >= 0 for 3" in errors

    # A limit on the size of files fails in the place where a full disk does.
    inside = (sys.executable, "-c", SMALL_FILES)
    small = [*size, "--checkpoint.interval=1"]
    with runs.start(out, [server.url], *small, inside=inside) as training:
        assert training.finish() != 0
    assert "a file of the run could not be written" in training.cause, training.log
    assert training.exitcode == 1
    summary = runs.summary(out)
    assert (summary["steps"], summary["resumes"]) == (4, [4])
    assert summary["ended_by"].startswith("a file of the run could not be written"), summary[
        "ended_by"
    ]


@pytest.mark.long
def test_an_alert_that_stops_a_run_says_that_nothing_is_saved_where_that_is_so(
    runs: Runs, server: ServerProcess, small_replay: Replay, tmp_path: Path
) -> None:
    arguments = [*small_replay.arguments, "--training.steps=4", "--checkpoint.load_only"]
    cause = stopped_by_an_alert(runs, server, tmp_path, *arguments, nproc=1)
    assert "nothing is saved (checkpoint.load_only)" in cause
    assert not (tmp_path / "checkpoint").exists()


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
def test_kl_to_a_reference_starts_at_zero_and_grows_as_the_policy_moves(
    runs: Runs, server: ServerProcess, small_replay: Replay, tmp_path: Path
) -> None:
    """Packed: the reference must tell the sequences of a row apart too."""
    arguments = [*small_replay.arguments, *SMOOTH, "--training.steps=6", "--grpo.kl_beta=0.1"]
    runs.complete(tmp_path, [server.url], *arguments, "--grpo.pack_sequences", nproc=2)
    rows = list(read_metrics(tmp_path / "metrics.jsonl"))
    assert rows[0][names.KL] == pytest.approx(0.0, abs=1e-6)
    assert rows[-1][names.KL] > 1e-4
    assert all(row[names.WORK_CV] <= row[names.WORK_CV_DEALT] for row in rows), "the ranks' work"


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
