"""The text of the PTX mix-in, from torchtitan's own loader and a tiny model's tokenizer."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch.distributed.checkpoint as dcp

from tests.titan.conftest import Parse
from titan_grpo.errors import ConfigError
from titan_grpo.titan import jobconfig
from titan_grpo.titan.tiny import write_tiny_model

if TYPE_CHECKING:
    from titan_grpo.titan.data import TextMixin

ROWS, LENGTH = 2, 32


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model("qwen3", tmp_path_factory.mktemp("model"), seed=0)


@pytest.fixture
def mixin(model: Path, tmp_path: Path) -> Callable[..., "TextMixin"]:
    """``mixin(rank, dataset, field=...)``: the share of one of two ranks; ``field`` is of the
    model's spec."""
    lines = [json.dumps({"text": f"line {n} of a text " * 3}) for n in range(40)]
    (tmp_path / "data.json").write_text("\n".join(lines))

    def make(rank: int = 0, dataset: str = "c4_test", **fields: Any) -> "TextMixin":
        settings = {
            "model.name": "qwen3",
            "model.flavor": "grpo_tiny",
            "model.hf_assets_path": model,
            "rollout.servers": "http://127.0.0.1:8000",
            "rollout.max_completion_tokens": 16,
            "training.local_batch_size": ROWS,
            "training.seq_len": LENGTH,
            "training.dataset": dataset,
            "training.dataset_path": tmp_path,
            "grpo.ptx_mixin_batchsize": 3 * 2 * ROWS,
        }
        config = jobconfig.parse([f"--{key}={value}" for key, value in settings.items()], 2)
        from torchtitan.protocols.train_spec import get_train_spec

        from titan_grpo.titan.data import TextMixin

        return TextMixin(replace(get_train_spec("qwen3"), **fields), config, 2, rank)

    return make


def test_each_rank_takes_its_own_text_in_whole_batches(mixin: Callable[..., "TextMixin"]) -> None:
    taken = [mixin(rank).take() for rank in (0, 1)]
    for pairs in taken:
        assert [tuple(inputs.shape) for inputs, _ in pairs] == [(ROWS, LENGTH)] * 3
        assert all((inputs[:, 1:] == labels[:, :-1]).all() for inputs, labels in pairs)
    assert not (taken[0][0][0] == taken[1][0][0]).all()


def test_the_text_goes_on_where_a_checkpoint_left_it(mixin: Callable[..., "TextMixin"]) -> None:
    first = mixin()
    first.take()
    resumed = mixin()
    resumed.loader.load_state_dict(first.loader.state_dict())
    expected = first.take()
    assert all((a == b).all() for (a, _), (b, _) in zip(resumed.take(), expected, strict=True))


def test_a_text_is_not_shared_anew_over_another_number_of_ranks(
    parse: Parse, model: Path, tmp_path: Path
) -> None:
    parts = {key: {"of": 0} for key in ("optimizer", "lr_scheduler", "dataloader")}
    text = {"dp_rank_0": b"", "dp_rank_1": b"", "world_size": 2}
    state = {**parts, "text": text, "train_state": {"version": 2}}
    dcp.save(state, checkpoint_id=tmp_path / "checkpoint/step-2", no_dist=True)
    keys = ["--checkpoint.enable", f"--job.dump_folder={tmp_path}"]
    keys += [f"--model.hf_assets_path={model}", "--grpo.ptx_mixin_batchsize=8"]
    jobconfig.check_files(parse("", *keys), ranks=2)
    sharded = parse("", *keys, "--parallelism.tensor_parallel_degree=2")
    jobconfig.check_files(sharded, ranks=4)
    first = [*keys, f"--job.dump_folder={tmp_path}/run", "--checkpoint.no-initial_load_model_only"]
    first.append(f"--checkpoint.initial_load_path={tmp_path}/checkpoint/step-2")
    jobconfig.check_files(parse("", *first), ranks=2)
    for ranks in (1, 4):
        for job in (keys, first):
            with pytest.raises(ConfigError, match=rf"step-2 was saved by 2, this run has {ranks};"):
                jobconfig.check_files(parse("", *job), ranks=ranks)
        anew = parse("", *keys, "--checkpoint.exclude_from_loading=text")
        jobconfig.check_files(anew, ranks=ranks)


def test_a_text_that_torchtitan_does_not_know_is_refused_with_its_keys(
    mixin: Callable[..., "TextMixin"],
) -> None:
    with pytest.raises(
        ConfigError, match=r"training\.dataset and training\.dataset_path must name .* got 'nope'"
    ):
        mixin(dataset="nope")


def test_a_model_without_a_text_loader_is_refused_with_the_jobs_own_words(
    mixin: Callable[..., "TextMixin"],
) -> None:
    with pytest.raises(ConfigError, match=r"must be 0 for a model\.name that .* got 12$"):
        mixin(build_tokenizer_fn=None)
