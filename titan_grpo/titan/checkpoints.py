"""Checkpoints of torchtitan in a run's folder: those that are there, and what a run begins with."""

import re
import shutil
import warnings
from collections.abc import Iterator, Mapping, Set
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from titan_grpo.config import sends_adapters
from titan_grpo.errors import ConfigError, DataError
from titan_grpo.patches.versions import inside
from titan_grpo.receive.checkpoint import INDEX
from titan_grpo.subprocesses import SIGNALLED, received
from titan_grpo.titan import compat, rules
from titan_grpo.titan.flavors import model_of
from titan_grpo.titan.lora import adapter_shapes, is_adapter, skeleton

PREFIX = "step-"
"""Prefix of torchtitan's checkpoint folders, before the training step."""

VERSION = "train_state.version"
"""Name of the version in a checkpoint's state (GRPOTrainer.state_dict, under torchtitan's key)."""

SCHEDULE = "lr_scheduler.last_epoch"
"""Name of the number of steps that the learning rate's schedule has behind it."""

ALPHA = "lora_alpha"
"""Name of lora.alpha in a checkpoint of adapters: no tensor depends on it, but the model does. Only
the checks read it: a checkpoint of an older version of titan_grpo has none."""


def checkpoints_in(folder: Path) -> dict[int, Path]:
    """Return the complete checkpoints in a folder (step-N folders with metadata) by step,
    ascending."""
    places = [path.parent for path in folder.glob(f"{PREFIX}*/.metadata")]
    steps = {place.name.removeprefix(PREFIX): place for place in places}
    return {int(step): steps[step] for step in sorted(filter(str.isdigit, steps), key=int)}


def steps_in(folder: Path) -> dict[str, int]:
    """Return the folders that torchtitan takes for checkpoints as it looks for the newest, by name:
    those with a complete one whose name has "step-" and a number in it. Their steps are values."""
    files = (*folder.glob("*/.metadata"), *folder.glob(f"*/{INDEX}"))
    found = {path.parent.name: re.search(rf"{PREFIX}(\d+)", path.parent.name) for path in files}
    return {name: int(match[1]) for name, match in found.items() if match}


def agreed(newest: int, group: dist.ProcessGroup) -> int:
    """Return the step of the newest checkpoint that this rank finds, -1 without any. Collective.
    Raises ConfigError on every rank if they find different ones: each would load a part of its own,
    and torch.distributed.checkpoint says nothing."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, newest, group=group)
    if len({*found}) > 1:
        other = next(rank for rank, step in enumerate(found) if step != found[0])
        one, its = ("none" if step < 0 else f"{PREFIX}{step}" for step in (found[0], found[other]))
        raise ConfigError(
            "checkpoint.folder must be one folder for all ranks, whose newest checkpoint they load;"
            f" rank 0 finds {one} and rank {other} {its}, so the weights would be of both: let the"
            " hosts share job.dump_folder; if they do, start again in a minute (a network file"
            " system may show new files of another host so late)"
        )
    return newest


def remove_torn(folder: Path, but: Path) -> None:
    """Remove what killed saves have left in a folder, except in the place of the next save:
    torchtitan counts it among keep_latest_k, and removes whole checkpoints in its favour."""
    for place in folder.glob(f"{PREFIX}*"):
        names = {path.name for path in place.rglob("*")}
        whole = any(name.endswith((".metadata", INDEX, ".safetensors")) for name in names)
        if place.name.removeprefix(PREFIX).isdigit() and place != but and not whole:
            shutil.rmtree(place, ignore_errors=True)


def failures_of(error: BaseException) -> list[BaseException]:
    """Return the errors of the ranks of which torch.distributed.checkpoint has made ``error``; none
    of another one."""
    return [cause for cause, _ in getattr(error, "failures", {}).values()]


class Stored(dcp.FileSystemReader):
    """A DCP checkpoint that is loaded from more than once. DCP reads the metadata at each load:
    8 s and 1 GB of memory for that of 512 ranks; here it is read once."""

    _metadata: Metadata | None = None

    def __str__(self) -> str:
        return str(self.path)

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return the metadata, as DCP asks for it. Raises DataError if the checkpoint is
        damaged."""
        if self._metadata is None:
            self._metadata = self._whole(*args, **kwargs)
        return self._metadata

    def _whole(self, *args: Any, **kwargs: Any) -> Metadata:
        try:
            metadata = super().read_metadata(*args, **kwargs)
            ends: dict[str, int] = {}
            for place in metadata.storage_data.values():
                end = place.offset + place.length
                ends[place.relative_path] = max(end, ends.get(place.relative_path, 0))
            len(metadata.state_dict_metadata)
        except Exception as error:  # a damaged pickle raises almost anything
            raise self._damaged(".metadata cannot be read", error) from error
        sizes = {path.name: path.stat().st_size for path in Path(self.path).iterdir()}
        for name, end in sorted(ends.items()):
            if name not in sizes:
                raise self._damaged(f"{name} is missing")
            if sizes[name] < end:
                raise self._damaged(f"{name} has {sizes[name]} of {end} bytes")
        return metadata

    def _damaged(self, damage: str, cause: BaseException | None = None) -> DataError:
        why = f" ({type(cause).__name__}: {' '.join(str(cause).split())})" if cause else ""
        return DataError(
            f"{self} is a damaged checkpoint, and nothing can be loaded from it: {damage}{why};"
            " move it out of its folder to go on from the one before it, or name another"
        )

    def fill(self, state: dict[str, Any]) -> None:
        """Load what ``state`` names in place. Raises DataError if the checkpoint is damaged."""
        try:
            with warnings.catch_warnings():
                # torch warns of no_dist also where it is asked for
                warnings.filterwarnings("ignore", "torch.distributed is disabled")
                dcp.load(state, storage_reader=self, no_dist=True)
        except CheckpointException as error:
            (cause,) = failures_of(error)
            raise self._damaged("its files cannot be read", cause) from error

    def names(self) -> Set[str]:
        """Return the names of all that the checkpoint holds."""
        return self.read_metadata().state_dict_metadata.keys()

    def shapes(self) -> dict[str, TensorStorageMetadata]:
        """Return shape and type of every tensor, by name."""
        found = self.read_metadata().state_dict_metadata.items()
        return {name: each for name, each in found if isinstance(each, TensorStorageMetadata)}

    def number(self, name: str) -> Any:
        """Return the number of this name."""
        state = {name: 0}
        self.fill(state)
        return state[name]

    def load(self, *names: str) -> dict[str, torch.Tensor]:
        """Return these tensors, by name."""
        shapes = self.shapes()
        state = {
            n: torch.empty(tuple(shapes[n].size), dtype=shapes[n].properties.dtype) for n in names
        }
        self.fill(state)
        return state


def lacking(checkpoint: Stored, parts: Set[str]) -> list[str]:
    """Return those of a job's ``parts`` that a checkpoint does not hold. A ``train_state`` without
    a version is not GRPOTrainer's."""
    names = checkpoint.names()
    found = {name.partition(".")[0] for name in names}
    return sorted(parts - (found if VERSION in names else found - {"train_state"}))


def version_of(checkpoint: Path) -> int | None:
    """Return the version that a checkpoint names: less than its step if a training step before it
    changed no weight. None if it names none: it has the weights alone, or is not of GRPOTrainer."""
    stored = Stored(checkpoint)
    if VERSION not in stored.names():
        return None
    return int(stored.number(VERSION))


def checkpoint_of(folder: Path, version: int) -> Path:
    """Return the checkpoint of one version, or of the step of that number if it names no version.
    ``folder`` is the checkpoint folder, or the dump folder above it. Raises ConfigError naming the
    versions in it if this one is missing."""
    known = checkpoints_in(folder) or checkpoints_in(folder / "checkpoint")

    def held(step: int) -> int:
        named = version_of(known[step])
        return step if named is None else named

    for step in known:
        # No version is greater than its step; a live run may be removing older checkpoints.
        if step >= version and held(step) == version:
            return known[step]
    have = [f"{held(s)} ({known[s].name})" if held(s) != s else f"{s}" for s in known]
    found = (
        f"it has {', '.join(have)}"
        if have
        else "it has no complete checkpoint (DCP folders step-N) at all"
    )
    raise ConfigError(
        f"{folder} must hold version {version}: {found}; name another --version or --checkpoint"
    )


RANDOM = (
    "training starts from random weights: no key of [checkpoint] names others (enable = true with"
    " initial_load_in_hf = true loads those of model.hf_assets_path)"
)
"""Note of a start that loads nothing. Not an error: a test or a measurement may want it."""


def check(config: Any, ranks: int | None) -> list[str]:
    """Check what torchtitan would load: the step and the folder are of its choice. Return notes for
    the start. Raises as ``jobconfig.check_files``."""
    keys = config.checkpoint
    folder = Path(config.job.dump_folder) / keys.folder
    steps = steps_in(folder) if keys.enable else {}
    in_hf = keys.enable and (keys.last_save_in_hf or (keys.initial_load_in_hf and not steps))
    if ranks is not None and (in_hf or config.grpo.kl_beta > 0):
        _check_experts(config, ranks)
    if steps:
        _check_newest(config, folder, steps, ranks)
        return _later(config, folder)
    if keys.enable:
        _check_start(config, folder, ranks)
    if keys.initial_load_in_hf or keys.initial_load_path:
        return []
    if sends_adapters(config.lora):
        raise ConfigError(
            'checkpoint.initial_load_in_hf must be true with lora.sync = "adapter", got false: the'
            " servers add the adapters to the weights of their files, and the trainer would train"
            " them on random ones"
        )
    return [RANDOM]


def _check_experts(config: Any, ranks: int) -> None:
    """Check that torchtitan can read and write the experts as Hugging Face files: it knows those of
    a rank only where every rank has as many."""
    p, (_, args) = config.parallelism, model_of(config.model.name, config.model.flavor)
    moe, degree = rules.experts_of(args), p.expert_parallel_degree
    if moe is None:
        return
    parts = rules.data_parallel_ranks(config, ranks) // p.data_parallel_replicate_degree
    if degree > 1:
        parts = parts * p.tensor_parallel_degree // p.expert_tensor_parallel_degree
    other_dimension = degree > 1 or inside(compat.require_torchtitan(), compat.THREE)
    if parts > moe.num_experts and other_dimension:
        parts = degree  # the data-parallel shards are cuts through each expert
    if moe.num_experts % parts != 0:
        raise ConfigError(
            "parallelism.data_parallel_shard_degree must be one at which the ranks that share a"
            f" layer's {moe.num_experts} experts have equal numbers of them, where torchtitan reads"
            " or writes Hugging Face files (checkpoint.initial_load_in_hf, last_save_in_hf,"
            f" grpo.kl_beta), got {parts} such ranks"
        )


def _later(config: Any, folder: Path) -> list[str]:
    """Return a note for checkpoints past the step at which the run begins, if there are any."""
    keys, newest = config.checkpoint, max(checkpoints_in(folder))
    if keys.load_step in (-1, newest):
        if not (newest and "train_state" in keys.exclude_from_loading):
            return []
        return [
            'checkpoint.exclude_from_loading has "train_state": each start with it begins at step 0'
            f" again, and loads {PREFIX}{newest} until a later one is there; to go on from that,"
            " leave it out; to begin with its weights, set another job.dump_folder, and"
            " checkpoint.initial_load_path"
        ]
    step = keys.load_step
    return [
        f"checkpoint.load_step = {step}: each start with this key begins at step {step} again, and"
        f" one without it goes on from {PREFIX}{newest}, of the course that this run leaves; move"
        f" the checkpoints past step {step} out of {str(folder)!r} and leave the key out"
    ]


def _loaded(config: Any) -> set[str]:
    """Return the parts of the state, besides the model, that a run loads as it goes on."""
    return rules.saved_parts(config) - {"model", *config.checkpoint.exclude_from_loading}


def _check_text(config: Any, checkpoint: Stored, ranks: int | None) -> None:
    # torchtitan has one place in the text per data-parallel rank, and cannot share them anew
    if ranks is None or "text" not in _loaded(config):
        return
    saved = sum(name.startswith("text.dp_rank_") for name in checkpoint.names())
    if saved != (now := rules.data_parallel_ranks(config, ranks)):
        raise ConfigError(
            "the number of data-parallel ranks must stay the same where the text of"
            f" grpo.ptx_mixin_batchsize goes on: {checkpoint} was saved by {saved}, this run"
            f' has {now}; with checkpoint.exclude_from_loading = ["text"] the text begins anew'
        )


def _check_schedule(config: Any, checkpoint: Stored) -> None:
    """Check that the learning rate's schedule, where it goes on and the steps begin anew, has a
    rate for each step."""
    loaded, steps = _loaded(config), config.training.steps
    if (
        "train_state" in loaded
        or "lr_scheduler" not in loaded
        or SCHEDULE not in checkpoint.names()
    ):
        return
    end = checkpoint.number(SCHEDULE) + steps
    if end > (config.lr_scheduler.total_steps or steps):
        raise ConfigError(
            'checkpoint.exclude_from_loading must have "lr_scheduler" too, or'
            f" lr_scheduler.total_steps must be at least {end}, got"
            f" {config.checkpoint.exclude_from_loading} and {config.lr_scheduler.total_steps}: the"
            f" schedule goes on from {checkpoint} for {steps} steps, and has no rates past its end"
        )


MISFITS = "Missing key in checkpoint", "Size mismatch between saved"
"""How torch begins what it says of a checkpoint of another model."""


@contextmanager
def known_failures() -> Iterator[None]:
    """Raise, in place of what torch.distributed.checkpoint does, the SystemExit of a signal, which
    it takes for an error of its own, and a ConfigError for a checkpoint of another model."""
    try:
        yield
    except (Exception, CheckpointException) as error:  # torch goes on after a signal's SystemExit
        # Its zip writer finds a torn file, or its next collective a rank that has ended.
        causes = [SystemExit(SIGNALLED + number) for number in received] + failures_of(error)
        for cause in causes:
            if isinstance(cause, SystemExit):
                raise cause from None
        if causes and (found := str(causes[0])).startswith(MISFITS):
            raise ConfigError(
                "[model] and [lora] must be those of the run that saved the checkpoint that this"
                f" one begins with: {' '.join(found.split())}; leave them as they were, or set"
                " another job.dump_folder"
            ) from None  # torchrun's report would have both tracebacks
        raise


def check_saver(checkpoint: Stored) -> None:
    """Raise ConfigError for a checkpoint of the other torchtitan."""
    if reason := compat.other_saver(checkpoint.names(), compat.require_torchtitan()):
        raise ConfigError(f"{checkpoint} {reason}")


def _check_adapters(config: Any, checkpoint: Stored) -> None:
    # torchtitan asks a checkpoint for the model's own parameters, and leaves others in it
    names = checkpoint.names()
    own = set(adapter_shapes(skeleton(config)[0])) if config.lora.rank else set()
    if lost := sorted(set(filter(is_adapter, names)) - own):
        raise ConfigError(
            f"[lora] must have the adapters of {checkpoint} (lora.rank, lora.targets), it has no"
            f" {lost[0]}: what that has learnt would be lost; to go on without it, export the"
            " merged weights (titan-grpo export) and start from those files"
            " (checkpoint.initial_load_in_hf)"
        )
    if missing := sorted(own - names):
        raise ConfigError(
            f"[lora] must be left out, or be that of {checkpoint} (lora.rank, lora.targets), which"
            f" has no {missing[0]}; to train adapters on its weights, export them (titan-grpo"
            " export), and start from those files (checkpoint.initial_load_in_hf) with another"
            " job.dump_folder"
        )


def check_alpha(config: Any, checkpoint: Stored) -> None:
    """Raise ConfigError if adapters were trained with another scale: the policy would be another
    one."""
    own = config.lora.alpha
    if ALPHA in checkpoint.names() and (theirs := checkpoint.number(ALPHA)) != own:
        raise ConfigError(
            f"lora.alpha must be {theirs:g}, with which the adapters of {checkpoint} were trained,"
            f" got {own:g}: the weights that they change would be others"
        )


def _check_start(config: Any, folder: Path, ranks: int | None) -> None:
    """Check what a run begins with whose checkpoint ``folder`` has none."""
    keys, start = config.checkpoint, config.checkpoint.initial_load_path
    if keys.load_step != -1:
        # torchtitan would not look for it, and start from step 0.
        raise ConfigError(
            "checkpoint.load_step must be -1 for a run without checkpoints, got"
            f" {keys.load_step}, and {str(folder)!r} has none: training would start from"
            " step 0; name the run's job.dump_folder, or leave it out"
        )
    if not start or keys.initial_load_in_hf:
        return
    if not (Path(start) / ".metadata").is_file():
        raise ConfigError(
            "checkpoint.initial_load_path must be a folder with a checkpoint of torchtitan (or of"
            f" Hugging Face files with initial_load_in_hf), got {start!r}"
        )
    stored = Stored(start)
    check_saver(stored)
    _check_adapters(config, stored)
    if keys.initial_load_model_only:
        return
    if missing := lacking(stored, _loaded(config)):
        raise ConfigError(
            "checkpoint.initial_load_model_only must be true, got false:"
            f" {start} was saved without {', '.join(missing)}"
        )
    _check_text(config, stored, ranks)
    _check_schedule(config, stored)


def _check_newest(config: Any, folder: Path, steps: Mapping[str, int], ranks: int | None) -> None:
    """Check the checkpoint in ``folder`` that a run goes on from. ``steps``: those of ``steps_in``
    there."""
    keys, loaded = config.checkpoint, _loaded(config)
    odd = sorted(name for name, step in steps.items() if name != f"{PREFIX}{step}")
    if keys.load_step == -1 and odd:
        raise ConfigError(
            f"the checkpoint folder must have no checkpoints but step-N, {str(folder)!r} has"
            f" {', '.join(odd)}: torchtitan counts each as the step in its name when it looks for"
            " the newest, and finds no folder of that step; move it out of that folder"
        )
    complete = {step: Stored(place) for step, place in checkpoints_in(folder).items()}
    step = max(steps.values()) if keys.load_step == -1 else keys.load_step

    def lacks(step: int) -> list[str]:
        if step not in complete:
            return ["train_state"]
        # torchtitan loads the weights alone of step 0.
        return lacking(complete[step], loaded) if step else []

    missing = lacks(step)
    if missing and "train_state" not in missing:
        raise ConfigError(
            f"checkpoint.exclude_from_loading must have {', '.join(missing)} too, got"
            f" {keys.exclude_from_loading}: {complete[step]} was saved without"
        )
    if missing:
        others = [each for each in complete if not lacks(each)]
        if keys.load_step != -1:
            raise ConfigError(
                "checkpoint.load_step must be the step of a complete checkpoint of a GRPO run,"
                f" {str(folder)!r} has {others or 'none'}, got {step}"
            )
        older = f"to go on from step {others[-1]}, move it out of that folder; " if others else ""
        hf = "" if step in complete else " and initial_load_in_hf"
        raise ConfigError(
            f"{folder / f'{PREFIX}{step}'} has trained weights without the state of a GRPO run"
            " (checkpoint.last_save_in_hf or last_save_model_only), so none can go on from it:"
            f" {older}to start from these weights, set another job.dump_folder, and"
            f" checkpoint.initial_load_path{hf}"
        )
    newest = complete[step]
    check_saver(newest)
    _check_adapters(config, newest)
    check_alpha(config, newest)
    if step:
        _check_text(config, newest, ranks)
        _check_schedule(config, newest)
