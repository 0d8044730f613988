"""What a trainer waits for at the end of a run, of a step in sync mode, and before a step. And the
settings with which it goes on, and the files that it leaves for Hugging Face."""

import json
import signal
from concurrent.futures import Future
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from tests.rigs.ranks import run_ranks
from tests.rigs.sockets import free_port
from titan_grpo.config import Lora
from titan_grpo.errors import ConfigError
from titan_grpo.observe.run_lock import LOCK, held
from titan_grpo.titan import compat

compat.prepare()

from torchtitan.components.lr_scheduler import build_lr_schedulers  # noqa: E402 - after it
from torchtitan.components.optimizer import build_optimizers  # noqa: E402
from torchtitan.config import LRScheduler, Optimizer  # noqa: E402

from titan_grpo.titan.checkpoints import checkpoints_in  # noqa: E402
from titan_grpo.titan.trainer import GRPOTrainer  # noqa: E402

SCRIPT = Path(__file__).with_name("trainer_ranks.py")

Run = tuple[str, int, str]
"""(case, ranks, arguments)."""


def said_by(folder: Path, *runs: Run) -> list[list[Any]]:
    """What each rank of each run says (trainer_ranks.py), all runs at once."""
    words = [word for name, ranks, more in runs for word in (name, ranks, free_port(), more)]
    outputs = run_ranks(SCRIPT, sum(n for _, n, _ in runs), str(folder), *map(str, words))
    said = iter([json.loads(out.splitlines()[-1]) for out in outputs])
    return [list(islice(said, ranks)) for _, ranks, _ in runs]


RECOMPUTED = "--activation_checkpoint."
RUNS: dict[str, Run] = {
    "lock": ("refused", 1, ""),
    "address": ("refused", 1, "--weight_sync.bind_host=203.0.113.9"),  # RFC 5737: no host has it
    "rate": ("refused", 2, "--weight_sync.min_rate=1"),
    "task": ("refused", 2, "--rollout.task=no.such.module:Task"),
    "torchtitan": (
        "refused",
        2,
        f"{RECOMPUTED}mode=selective {RECOMPUTED}selective_ac_option=op"
        f" {RECOMPUTED}per_op_sac_force_recompute_mm_shapes_by_fqns=attention",
    ),
    "routers": ("routers", 2, ""),
    "apart": ("apart", 2, ""),
    **{
        case: (case, 1, "")
        for case in ("bias", "coded", "skipped", "blocked", "ended", "tied", "scaled", "kept")
    },
}


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    """What each rank of each run says, with the dump folder of the first one locked."""
    folder = tmp_path_factory.mktemp("runs")
    with held(folder / "0/run"):
        found = dict(zip(RUNS, said_by(folder, *RUNS.values()), strict=True))
    return found | {"files of the live run": [path.name for path in (folder / "0/run").iterdir()]}


@pytest.mark.e2e
def test_a_checkpoint_that_is_being_written_is_whole_when_the_run_has_ended_by_an_error(
    said: dict[str, list[Any]],
) -> None:
    """And the process then ends soon: its last collection of torch's objects took seconds, rank
    after rank."""
    assert said["ended"] == [["no server is left", True, True]]


@pytest.mark.e2e
@pytest.mark.parametrize(
    ("run", "text"),
    [
        ("lock", "job.dump_folder must not be that of a live run"),
        ("address", "weight_sync.bind_host must be an address of this host"),
        ("rate", "weight_sync.min_rate"),
        ("task", "no.such.module"),
        ("torchtitan", "torchtitan cannot build this job: ValueError: per_op_sac_force"),
    ],
)
def test_a_run_that_cannot_start_is_refused_in_one_line_on_every_rank(
    said: dict[str, list[Any]], run: str, text: str
) -> None:
    """What rank 0 alone knew ended the others by a lost connection, and torchtitan's refusal was a
    traceback of each."""
    first, *others = said[run]
    assert first[0] == "ConfigError"
    assert text in first[1]
    assert "\n" not in first[1]
    if run == "lock":
        assert said["files of the live run"] == [LOCK]
    if run == "torchtitan":
        assert others == [first]  # each knows it
    else:
        assert all(other == ["RunStopped", f"ConfigError: {first[1]}"] for other in others)


@pytest.mark.e2e
@pytest.mark.long
def test_the_other_ranks_wait_for_commits_in_a_group_that_outlasts_rank_0(tmp_path: Path) -> None:
    (waited,) = said_by(tmp_path, ("committed", 2, ""))
    assert min(waited) > 5


@pytest.mark.e2e
def test_versions_that_no_slot_was_free_for_are_skipped_until_rollouts_would_wait_for_ever(
    said: dict[str, list[Any]],
) -> None:
    """Servers hold version 0, and groups for the trainer at version 2 need version 1 or 2."""
    assert said["skipped"] == [[0, 0, 2]]


@pytest.mark.e2e
def test_a_wait_for_a_slot_is_time_lost_to_weight_sync(said: dict[str, list[Any]]) -> None:
    """Before, it counted as a wait for rollouts, and the page's remedy was more servers."""
    (lost_s,) = said["blocked"]
    assert 0.9 < lost_s < 60


@pytest.mark.e2e
def test_the_reference_is_read_from_quantised_files_with_their_scales(
    said: dict[str, list[Any]],
) -> None:
    """Before, the KL term drew the policy to numbers that were thousands of times as large."""
    assert said["coded"] == [[0.0, 0.0]]


@pytest.mark.e2e
def test_a_bias_that_the_models_adapter_exports_is_in_a_version_as_the_run_began_with_it(
    said: dict[str, list[Any]],
) -> None:
    """An MoE's load balancing bias, which routes tokens and has no gradient."""
    ((found, _),) = said["bias"]
    assert len(found) == 5, "the first of six layers is dense"
    for kept, dtype, same in found.values():
        assert (kept, dtype, same) == (True, "float32", True)


@pytest.mark.e2e
def test_a_verification_expects_such_a_bias_in_a_version_as_it_is(
    said: dict[str, list[Any]],
) -> None:
    ((_, expected),) = said["bias"]
    assert expected


@pytest.mark.e2e
def test_tensor_parallel_ranks_train_the_same_router(said: dict[str, list[Any]]) -> None:
    """They differed after the first step, and servers got rank 0's."""
    first, second = said["routers"]
    assert first[0], "no step has changed them"
    assert first == second


@pytest.mark.e2e
def test_a_run_that_was_killed_in_its_first_save_begins_with_its_weights_again(
    said: dict[str, list[Any]],
) -> None:
    """torchtitan loads nothing where its folder is there and has no checkpoint."""
    ((began, *_),) = said["tied"]
    assert began


@pytest.mark.e2e
def test_the_last_save_for_hugging_face_has_only_names_that_have_values(
    said: dict[str, list[Any]],
) -> None:
    """Before, a tied head in the base model's index left a file that nothing can read."""
    ((_, names, written),) = said["tied"]
    assert names == written
    assert "model.embed_tokens.weight" in names
    assert "lm_head.weight" not in names


@pytest.mark.e2e
def test_ranks_of_which_some_do_not_see_the_newest_checkpoint_load_none(
    said: dict[str, list[Any]],
) -> None:
    """Before, each loaded its part of the newest one that it saw."""
    one, other = said["apart"]
    assert one == other
    assert "rank 0 finds step-4 and rank 1 step-2" in one


@pytest.mark.e2e
def test_what_killed_saves_have_left_costs_no_whole_checkpoint(said: dict[str, list[Any]]) -> None:
    """Before, torchtitan removed all three: two halves of later steps were the newest two."""
    assert said["kept"] == [["step-2", "step-3"]]


@pytest.mark.e2e
def test_adapters_are_used_with_the_scale_alone_with_which_they_were_trained(
    said: dict[str, list[Any]],
) -> None:
    ((start, export, *same),) = said["scaled"]
    assert start == export
    assert start.startswith("lora.alpha must be 12.5, with which the adapters of ")
    assert same == ["", ""]


@pytest.mark.parametrize("written", [True, False])
def test_a_checkpoint_that_was_not_written_is_said_and_in_time_for_the_summary_if_it_can_be(
    written: bool,
) -> None:
    saving: Future[None] = Future()
    said: list[str] = []

    def fail() -> None:
        saving.set_exception(OSError(28, "No space left on device"))

    def close(error: object = None) -> None:
        said.append("summary")
        if not written:
            fail()

    if written:
        fail()
    part = SimpleNamespace(close=lambda: None)
    trainer: Any = GRPOTrainer.__new__(GRPOTrainer)
    trainer.checkpointer = SimpleNamespace(close=part.close, save_future=saving)
    trainer.metrics_processor = trainer.sync = part
    trainer.controller = SimpleNamespace(close=close, warn=said.append)
    trainer.close()
    (line,) = [text for text in said if text != "summary"]
    assert line.startswith("the last checkpoint was not written: OSError: [Errno 28] No space left")
    assert said.index(line) == (0 if written else 1)


def trainer_of(**keys: Any) -> Any:
    """A trainer of one small layer, with its optimizer and its schedule of ten steps."""
    settings = Optimizer(**{"implementation": "for-loop", **keys})
    trainer: Any = GRPOTrainer.__new__(GRPOTrainer)
    training = SimpleNamespace(steps=10)
    disabled = SimpleNamespace(enable=False, keep_latest_k=0)
    trainer.job_config = SimpleNamespace(
        optimizer=settings, training=training, checkpoint=disabled, lora=Lora()
    )
    trainer.step = 3
    trainer.model_parts = [torch.nn.Linear(2, 1)]
    trainer.optimizers = build_optimizers(trainer.model_parts, settings, None)
    schedule = LRScheduler(warmup_steps=2, decay_ratio=0.5)
    trainer.lr_schedulers = build_lr_schedulers(trainer.optimizers, schedule, 10)
    return trainer


def rates(trainer: Any, steps: int) -> list[float]:
    """The learning rate of each of the next steps."""
    found = []
    for _ in range(steps):
        found.append(trainer.learning_rate())
        trainer.model_parts[0](torch.ones(2)).sum().backward()
        trainer.optimizers.step()
        trainer.lr_schedulers.step()
    return found


def test_a_run_that_goes_on_has_the_settings_of_its_job_from_its_first_step_on() -> None:
    """Before, they were the checkpoint's to its end: a lower optimizer.lr did nothing."""
    first = trainer_of(lr=1.0)
    numbers = {"lr": 0.25, "beta2": 0.5, "eps": 1e-3, "weight_decay": 0.0}
    second = trainer_of(name="Adam", implementation="fused", **numbers)
    assert rates(first, 3) == [0.5, 1.0, 1.0]

    def load(step: int) -> bool:
        for name in ("optimizers", "lr_schedulers"):
            getattr(second, name).load_state_dict(getattr(first, name).state_dict())
        return step == -1

    checkpointer = SimpleNamespace(load=load, maybe_wait_for_staging=None, dcp_save=None)
    second._hook(checkpointer)
    assert checkpointer.load()
    (group,) = second.optimizers.optimizers[0].param_groups
    assert (group["betas"], group["eps"], group["weight_decay"]) == ((0.9, 0.5), 1e-3, 0.0)
    assert not group["decoupled_weight_decay"]
    assert group["fused"]
    assert rates(second, 7) == rates(trainer_of(lr=0.25), 10)[3:]


def test_a_checkpoint_has_the_version_beside_the_step_and_a_resume_goes_on_from_both() -> None:
    """A training step that changed no weight made no version."""
    first, second = (GRPOTrainer.__new__(GRPOTrainer) for _ in range(2))
    first.step, first.ntokens_seen, first.version = 5, 900, 3
    second.load_state_dict(first.state_dict())
    assert (second.step, second.ntokens_seen, second.version) == (5, 900, 3)


def test_a_moving_reference_follows_each_version_and_no_step_that_made_none() -> None:
    trainer: Any = GRPOTrainer.__new__(GRPOTrainer)
    trainer.policy, trainer.reference = torch.nn.Linear(1, 1), torch.nn.Linear(1, 1)
    for model, value in (trainer.policy, 4.0), (trainer.reference, 0.0):
        for parameter in model.parameters():
            parameter.data.fill_(value)
    trainer.controller, trainer.version, trainer._moving = None, 0, True
    trainer._grpo = SimpleNamespace(ref_model_ema=0.75)
    seen = []
    for taken in (1, 0, 2):
        trainer._make_version(SimpleNamespace(taken=taken), None)
        seen.append((trainer.version, trainer.reference.bias.item()))
    assert seen == [(1, 1.0), (1, 1.0), (2, 1.75)]


class Unwritable:
    """What ends a save in the middle."""

    def __getstate__(self) -> dict[str, Any]:
        raise OSError("the disk is full")


class Signalled:
    """A signal in the middle of a save, after which torch's zip writer finds a torn file (or not:
    ``torn``)."""

    def __init__(self, torn: bool) -> None:
        self._torn = torn

    def __getstate__(self) -> dict[str, Any]:
        try:
            signal.raise_signal(signal.SIGTERM)
        finally:
            if self._torn:
                raise RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 0")
        raise AssertionError("the signal does not return")


@pytest.fixture
def checkpointer(tmp_path: Path) -> Any:
    """With our hooks, and without the rest of a trainer."""

    def save(state: dict[str, Any], checkpoint_id: str, alone: bool = True) -> None:
        try:
            dcp.save(state, checkpoint_id=checkpoint_id, no_dist=True)
        except CheckpointException:
            if alone:
                raise
            # A rank keeps its error to itself, and looks for the others.
            raise RuntimeError("Connection closed by peer") from None

    def load(_: int) -> None:
        dcp.load({"weight": torch.zeros(4)}, checkpoint_id=checkpoint, no_dist=True)

    checkpoint = tmp_path / "step-2"
    made = SimpleNamespace(load=load, maybe_wait_for_staging=None, dcp_save=save)
    trainer_of(lr=1.0)._hook(made)
    return made


def test_the_checkpoint_folder_may_be_a_link_to_one_that_is_made_at_the_first_save(
    checkpointer: Any, tmp_path: Path
) -> None:
    (tmp_path / "checkpoint").symlink_to(tmp_path / "scratch" / "run")
    checkpointer.dcp_save({"weight": torch.zeros(9)}, checkpoint_id=f"{tmp_path}/checkpoint/step-2")
    assert checkpoints_in(tmp_path / "scratch" / "run").keys() == {2}


def test_a_checkpoint_whose_second_writing_broke_off_is_no_whole_one(
    checkpointer: Any, tmp_path: Path
) -> None:
    """As when a run goes on from an older one (load_step), and dies in that of a later step."""
    checkpointer.dcp_save({"weight": torch.zeros(9)}, checkpoint_id=f"{tmp_path}/step-2")
    assert checkpoints_in(tmp_path).keys() == {2}
    with pytest.raises(CheckpointException, match="the disk is full"):
        checkpointer.dcp_save(
            {"weight": torch.ones(9), "other": Unwritable()}, checkpoint_id=f"{tmp_path}/step-2"
        )
    assert not checkpoints_in(tmp_path)


@pytest.mark.usefixtures("ends_by_signals")
@pytest.mark.parametrize(("torn", "alone"), [(True, True), (False, True), (False, False)])
def test_a_signal_in_the_middle_of_a_checkpoint_ends_the_run_as_at_any_other_time(
    checkpointer: Any, tmp_path: Path, torn: bool, alone: bool
) -> None:
    """Before, torch's traceback ended the rank, or an advice to make room on the disk, and the
    summary had that as the end's cause."""
    state, place = {"other": Signalled(torn)}, f"{tmp_path}/step-2"
    with pytest.raises(SystemExit) as caught:
        checkpointer.dcp_save(state, checkpoint_id=place, alone=alone)
    assert caught.value.code == 128 + signal.SIGTERM


def test_a_checkpoint_of_another_model_is_refused_in_one_line(
    checkpointer: Any, tmp_path: Path
) -> None:
    """Before, the start of a run with another model, or another lora.rank, ended in a traceback."""
    for name in ("weight", "bias"):
        checkpointer.dcp_save({name: torch.zeros(9)}, checkpoint_id=f"{tmp_path}/step-2")
        with pytest.raises(ConfigError, match=r"\[lora\] must be those of .*: .* weight"):
            checkpointer.load(-1)
