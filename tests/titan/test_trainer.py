"""What a trainer waits for at the end of a run, of a step in sync mode, and before a step. And the
settings with which it goes on, and the files that it leaves for Hugging Face."""

import json
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from tests.rigs.ranks import run_ranks
from tests.rigs.sockets import free_port
from titan_grpo.titan import compat

compat.prepare()

from torchtitan.components.lr_scheduler import build_lr_schedulers  # noqa: E402 - after it
from torchtitan.components.optimizer import build_optimizers  # noqa: E402
from torchtitan.config import LRScheduler, Optimizer  # noqa: E402

from titan_grpo.titan.export import checkpoints_in  # noqa: E402
from titan_grpo.titan.trainer import GRPOTrainer  # noqa: E402

SCRIPT = Path(__file__).with_name("ended_rank.py")


@pytest.mark.e2e
def test_a_checkpoint_that_is_being_written_is_whole_when_the_run_has_ended_by_an_error(
    tmp_path: Path,
) -> None:
    """And the process then ends soon: its last collection of torch's objects took seconds, rank
    after rank."""
    (said,) = run_ranks(SCRIPT, 1, str(free_port()), str(tmp_path))
    assert json.loads(said.splitlines()[-1]) == ["no server is left", True, True]


@pytest.mark.e2e
def test_what_rank_0_alone_knows_ends_the_other_ranks_with_its_words(tmp_path: Path) -> None:
    """Before, they ended by a lost connection: hundreds of tracebacks around the one line."""
    task = "--rollout.task=no.such.module:Task"
    words = str(free_port()), "--weight_sync.min_rate=1", str(free_port()), task
    script = Path(__file__).with_name("refused_rank.py")
    said = [json.loads(s.splitlines()[-1]) for s in run_ranks(script, 4, str(tmp_path), *words)]
    for first, second in (said[:2], said[2:]):
        assert first[0] == "ConfigError"
        assert second == ["RunStopped", f"ConfigError: {first[1]}"]
    assert "min_rate" in said[0][1]
    assert "no.such.module" in said[2][1]


@pytest.mark.e2e
def test_what_torchtitan_refuses_as_it_builds_a_job_is_one_line_on_every_rank(
    tmp_path: Path,
) -> None:
    """Before, it was a traceback of each."""
    script = Path(__file__).with_name("refused_rank.py")
    section = "--activation_checkpoint."
    words = f"{section}mode=selective {section}selective_ac_option=op"
    words += f" {section}per_op_sac_force_recompute_mm_shapes_by_fqns=attention"
    for said in run_ranks(script, 2, str(tmp_path), str(free_port()), words):
        kind, text = json.loads(said.splitlines()[-1])
        assert kind == "ConfigError"
        assert "torchtitan cannot build this job: ValueError: per_op_sac_force" in text
        assert "\n" not in text


@pytest.mark.e2e
@pytest.mark.long
def test_the_other_ranks_wait_for_commits_in_a_group_that_outlasts_rank_0(tmp_path: Path) -> None:
    script = Path(__file__).with_name("committed_rank.py")
    waited = [
        json.loads(s.splitlines()[-1])
        for s in run_ranks(script, 2, str(free_port()), str(tmp_path))
    ]
    assert min(waited) > 5


@pytest.mark.e2e
def test_versions_that_no_slot_was_free_for_are_skipped_until_rollouts_would_wait_for_ever(
    tmp_path: Path,
) -> None:
    """Servers hold version 0, and groups for the trainer at version 2 need version 1 or 2."""
    script = Path(__file__).with_name("skipped_rank.py")
    (said,) = run_ranks(script, 1, str(free_port()), str(tmp_path))
    assert json.loads(said.splitlines()[-1]) == [0, 0, 2]


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
    training, disabled = SimpleNamespace(steps=10), SimpleNamespace(enable=False)
    trainer.job_config = SimpleNamespace(optimizer=settings, training=training, checkpoint=disabled)
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


class Unwritable:
    """What ends a save in the middle."""

    def __getstate__(self) -> dict[str, Any]:
        raise OSError("the disk is full")


@pytest.fixture
def checkpointer() -> Any:
    """With our hooks, and without the rest of a trainer."""

    def save(state: dict[str, Any], checkpoint_id: str, **_: Any) -> None:
        dcp.save(state, checkpoint_id=checkpoint_id, no_dist=True)

    made = SimpleNamespace(load=None, maybe_wait_for_staging=None, dcp_save=save)
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


@pytest.fixture(scope="module")
def tied(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """See tied_rank.py."""
    script, folder = Path(__file__).with_name("tied_rank.py"), tmp_path_factory.mktemp("tied")
    (said,) = run_ranks(script, 1, str(free_port()), str(folder))
    return json.loads(said.splitlines()[-1])


@pytest.mark.e2e
def test_a_run_that_was_killed_in_its_first_save_begins_with_its_weights_again(tied: Any) -> None:
    """torchtitan loads nothing where its folder is there and has no checkpoint."""
    began, *_ = tied
    assert began


@pytest.mark.e2e
def test_the_last_save_for_hugging_face_has_only_names_that_have_values(tied: Any) -> None:
    """Before, a tied head in the base model's index left a file that nothing can read."""
    _, names, written = tied
    assert names == written
    assert "model.embed_tokens.weight" in names
    assert "lm_head.weight" not in names
