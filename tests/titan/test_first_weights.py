"""Which weights a run begins with: what of [checkpoint] is refused or noted before torchtitan would
load others without a word."""

import json
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from tests.titan.conftest import Parse
from titan_grpo.errors import ConfigError, DataError
from titan_grpo.titan import jobconfig, tiny
from titan_grpo.titan.checkpoints import version_of


def save(dump_folder: Path, step: int, name: str = "attention.wq", **trained: int) -> None:
    parts = {key: {"of": 0} for key in ("optimizer", "lr_scheduler", "dataloader")}
    state = {
        f"layers.0.{name}.weight": torch.zeros(1),
        **({"train_state": trained, **parts} if trained else {}),
    }
    dcp.save(state, checkpoint_id=dump_folder / f"checkpoint/step-{step}", no_dist=True)


@pytest.mark.parametrize("in_hf", [True, False])
def test_a_run_that_left_the_weights_alone_is_told_how_to_go_on(
    parse: Parse, tmp_path: Path, model: Path, in_hf: bool
) -> None:
    keys = ["--checkpoint.enable", f"--job.dump_folder={tmp_path}"]
    keys.append(f"--model.hf_assets_path={model}")
    alone = tmp_path / "checkpoint/step-4"
    if in_hf:
        alone.mkdir(parents=True)
        (alone / "model.safetensors.index.json").write_text("{}")
    else:
        save(tmp_path, 4)
    with pytest.raises(ConfigError, match=r"step-4 has trained weights without .*") as caught:
        jobconfig.check_files(parse("", *keys))
    assert ("initial_load_in_hf" in str(caught.value)) == in_hf
    assert "remove" not in str(caught.value)
    assert "move it" not in str(caught.value)
    save(tmp_path, 2, version=2)
    with pytest.raises(ConfigError, match=r"to go on from step 2, move it out of that folder;"):
        jobconfig.check_files(parse("", *keys))
    jobconfig.check_files(parse("", *keys, "--checkpoint.load_step=2"))
    with pytest.raises(ConfigError, match=r"checkpoint\.load_step must be .* has \[2\], got 4"):
        jobconfig.check_files(parse("", *keys, "--checkpoint.load_step=4"))
    if not in_hf:
        excluded = "optimizer,lr_scheduler,dataloader,train_state"
        jobconfig.check_files(parse("", *keys, f"--checkpoint.exclude_from_loading={excluded}"))


WHOLE = "no-initial_load_model_only --checkpoint.initial_load_path={0}/checkpoint/step-4"
LACKING = r"exclude_from_loading must have dataloader, lr_scheduler, optimizer too, got \['train_st"


@pytest.mark.parametrize(
    ("keys", "rule"),
    [
        ("exclude_from_loading=train_state --job.dump_folder={0}", LACKING),
        (WHOLE, r"initial_load_model_only must be true, .*/step-4 .* dataloader, .*, train_state$"),
    ],
)
def test_a_part_that_a_checkpoint_lacks_is_named_with_the_key_that_leaves_it_out(
    parse: Parse, tmp_path: Path, model: Path, keys: str, rule: str
) -> None:
    save(tmp_path, 4)
    words = f"--job.dump_folder={{0}}/run --checkpoint.enable --checkpoint.{keys}".format(tmp_path)
    with pytest.raises(ConfigError, match=rule):
        jobconfig.check_files(parse("", f"--model.hf_assets_path={model}", *words.split()))


def test_a_first_checkpoint_that_is_not_there_is_refused_before_the_model_is_made(
    parse: Parse, tmp_path: Path, model: Path
) -> None:
    keys = ["--checkpoint.enable", f"--model.hf_assets_path={model}"]
    keys.append(f"--checkpoint.initial_load_path={tmp_path}/checkpoint/step-3")
    config = parse("", *keys, f"--job.dump_folder={tmp_path}/run")
    with pytest.raises(ConfigError, match=r"checkpoint\.initial_load_path must be .*step-3'$"):
        jobconfig.check_files(config)
    save(tmp_path, 3)
    jobconfig.check_files(config)
    save(tmp_path, 3, "attention.qkv_linear.wq")
    with pytest.raises(ConfigError, match=r"step-3 was saved with torchtitan 0\.3, and 0\.2\.2"):
        jobconfig.check_files(config)


def test_the_newest_checkpoint_must_be_one_of_the_installed_torchtitan(
    parse: Parse, tmp_path: Path, model: Path
) -> None:
    config = parse(
        "",
        "--checkpoint.enable",
        f"--job.dump_folder={tmp_path}",
        f"--model.hf_assets_path={model}",
    )
    notes = jobconfig.check_files(config)
    (tmp_path / "checkpoint/step-2").mkdir(parents=True)  # of a run killed in its first save
    assert jobconfig.check_files(config) == notes
    names = ("attention.wq", "attention.qkv_linear.wq")
    for step, name in zip((2, 4), names, strict=True):
        save(tmp_path, step, name, version=step)
        if step == 2:
            jobconfig.check_files(config)
    with pytest.raises(ConfigError, match=r"step-4 was saved with torchtitan 0\.3, and 0\.2\.2"):
        jobconfig.check_files(config)


IN_HF = "--checkpoint.enable --checkpoint.initial_load_in_hf"


@pytest.mark.parametrize(
    ("arguments", "ranks", "parts"),
    [
        (IN_HF, 3, 3),
        (IN_HF, 4, 0),
        ("--checkpoint.enable", 3, 0),
        ("--checkpoint.enable --checkpoint.last_save_in_hf", 3, 3),
        ("--grpo.kl_beta=0.1", 3, 3),
        (f"{IN_HF} --parallelism.expert_parallel_degree=2", 6, 6),
        (f"{IN_HF} --parallelism.expert_parallel_degree=2", 8, 0),
        (f"{IN_HF} --parallelism.expert_parallel_degree=4", 12, 0),
    ],
)
def test_experts_that_ranks_would_read_or_write_in_unequal_parts_are_refused(
    parse: Parse, tmp_path: Path, arguments: str, ranks: int, parts: int
) -> None:
    """Before, every rank ended in torchtitan's traceback. A run that goes on reads no such file."""
    model = tiny.write_tiny_model("qwen3_moe", tmp_path / "moe")
    keys = ["--model.flavor=grpo_tiny_moe", f"--model.hf_assets_path={model}"]
    keys.append(f"--job.dump_folder={tmp_path}")
    config = parse("", *keys, *arguments.split(), world_size=ranks)
    if not parts:
        jobconfig.check_files(config, ranks=ranks)
        return
    with pytest.raises(ConfigError, match=rf"layer's 8 experts .*, got {parts} such ranks$"):
        jobconfig.check_files(config, ranks=ranks)
    if arguments == IN_HF:
        save(tmp_path, 2, version=2)
        assert jobconfig.check_files(config, ranks=ranks) == []


@pytest.mark.parametrize("lost", ["v", "q"])
def test_adapters_that_a_job_would_leave_in_a_checkpoint_are_named(
    parse: Parse, tmp_path: Path, model: Path, lost: str
) -> None:
    """Before, the run went on without what they had learnt."""
    names = [
        f"layers.{n}.attention.w{part}.lora_{end}" for n in "01" for part in "qv" for end in "ab"
    ]
    parts = {key: {"of": 0} for key in ("optimizer", "lr_scheduler", "dataloader")}
    state = {**dict.fromkeys(names, torch.zeros(1)), **parts, "train_state": {"version": 2}}
    dcp.save(state, checkpoint_id=tmp_path / "checkpoint/step-2", no_dist=True)
    keys = ["--checkpoint.enable", f"--model.hf_assets_path={model}"]
    own = [] if lost == "q" else ["--lora.rank=4", "--lora.targets=q_proj"]
    starts = [[*own, f"--job.dump_folder={tmp_path}"]]
    if not own:
        place = f"--checkpoint.initial_load_path={tmp_path}/checkpoint/step-2"
        starts.append([place, f"--job.dump_folder={tmp_path}/run"])
    for start in starts:
        with pytest.raises(ConfigError, match=rf"lora\] must .*step-2 .* no .*\.w{lost}\.lora_a:"):
            jobconfig.check_files(parse("", *keys, *start))
    both = ["--lora.rank=4", "--lora.targets=q_proj,v_proj", f"--job.dump_folder={tmp_path}"]
    assert jobconfig.check_files(parse("", *keys, *both)) == []


def test_adapters_that_a_checkpoint_lacks_are_named(
    parse: Parse, tmp_path: Path, model: Path
) -> None:
    """Before, the start ended in a traceback of torch's."""
    save(tmp_path, 2, version=2)
    keys = ["--checkpoint.enable", f"--job.dump_folder={tmp_path}", "--lora.rank=4"]
    config = parse("", f"--model.hf_assets_path={model}", *keys)
    with pytest.raises(
        ConfigError, match=r"lora\] must be left out, .*step-2 .* has no .*\.lora_a"
    ):
        jobconfig.check_files(config)


@pytest.mark.parametrize("excluded", ["train_state", "train_state,lr_scheduler"])
def test_a_schedule_that_would_go_on_past_its_end_is_refused(
    parse: Parse, tmp_path: Path, model: Path, excluded: str
) -> None:
    """Before, torchtitan stopped the run with an assertion, or the learning rate was negative."""
    parts = {"optimizer": {"of": 0}, "lr_scheduler": {"last_epoch": 4}, "dataloader": {"of": 0}}
    state = {"layers.0.attention.wq.weight": torch.zeros(1), "train_state": {"version": 4}, **parts}
    dcp.save(state, checkpoint_id=tmp_path / "checkpoint/step-4", no_dist=True)
    keys = ["--checkpoint.enable", f"--model.hf_assets_path={model}", "--training.steps=6"]
    anew = [*keys, f"--checkpoint.exclude_from_loading={excluded}"]
    here = f"--job.dump_folder={tmp_path}"
    if "lr_scheduler" in excluded:
        jobconfig.check_files(parse("", *anew, here))
        return
    whole = [f"--checkpoint.initial_load_path={tmp_path}/checkpoint/step-4"]
    whole += ["--checkpoint.no-initial_load_model_only", f"--job.dump_folder={tmp_path}/run"]
    for start in ([here], whole):
        with pytest.raises(ConfigError, match=r'"lr_scheduler" too, or .*total_steps .* least 10,'):
            jobconfig.check_files(parse("", *anew, *start))
        jobconfig.check_files(parse("", *anew, *start, "--lr_scheduler.total_steps=10"))
        jobconfig.check_files(parse("", *keys, *start))


def test_a_damaged_checkpoint_is_named_before_the_model_is_made(
    parse: Parse, tmp_path: Path, model: Path
) -> None:
    keys = ["--checkpoint.enable", f"--job.dump_folder={tmp_path}"]
    config = parse("", *keys, f"--model.hf_assets_path={model}")
    for step in (2, 4):
        save(tmp_path, step, version=step)
    newest = tmp_path / "checkpoint/step-4"
    data = newest / "__0_0.distcp"
    whole = data.read_bytes()
    data.write_bytes(whole[:-1])
    with pytest.raises(DataError, match=r"step-4 is a damaged .*: __0_0\.distcp has \d+ of \d+ by"):
        jobconfig.check_files(config)
    data.write_bytes(bytes(len(whole)))
    with pytest.raises(DataError, match=r"step-4 is a damaged .*: its files cannot be read \("):
        version_of(newest)
    data.unlink()
    with pytest.raises(DataError, match=r"step-4 is a damaged .*: __0_0\.distcp is missing; move"):
        jobconfig.check_files(config)
    for content in (b"", b"\x80\x04torn", b"N."):
        (newest / ".metadata").write_bytes(content)
        with pytest.raises(DataError, match=r"step-4 is a damaged .*: \.metadata cannot be read"):
            jobconfig.check_files(config)
    newest.rename(tmp_path / "damaged")
    jobconfig.check_files(config)


def test_a_moving_reference_may_be_left_out_when_a_run_is_loaded(parse: Parse) -> None:
    moving = "--grpo.kl_beta=0.1 --grpo.ref_model_ema=0.9"
    keys = f"--checkpoint.enable --checkpoint.exclude_from_loading=reference {moving}"
    assert parse("", *keys.split()).checkpoint.exclude_from_loading == ["reference"]


@pytest.mark.parametrize("name", ["step-100.bad", "old-step-100", "step-0100"])
def test_a_folder_that_torchtitan_takes_for_the_newest_checkpoint_is_refused_by_name(
    parse: Parse, tmp_path: Path, model: Path, name: str
) -> None:
    keys = ["--checkpoint.enable", f"--job.dump_folder={tmp_path}"]
    keys.append(f"--model.hf_assets_path={model}")
    save(tmp_path, 50, version=50)
    (tmp_path / "checkpoint/step-50").rename(tmp_path / "checkpoint" / name)
    save(tmp_path, 50, version=50)
    with pytest.raises(ConfigError, match=rf"no checkpoints but step-N, .* has {name}: .* move it"):
        jobconfig.check_files(parse("", *keys))
    jobconfig.check_files(parse("", *keys, "--checkpoint.load_step=50"))
    (tmp_path / "checkpoint" / name / ".metadata").unlink()
    jobconfig.check_files(parse("", *keys))


@pytest.mark.parametrize("part", ["model", "reference"])
def test_what_a_job_must_load_or_does_not_save_is_not_left_out(parse: Parse, part: str) -> None:
    keys = f"--checkpoint.enable --checkpoint.exclude_from_loading=optimizer,{part}"
    rule = (
        r"exclude_from_loading must be some of .* \(dataloader, lr_scheduler, optimizer, train_st"
    )
    with pytest.raises(ConfigError, match=rule):
        parse("", *keys.split())


def test_a_step_to_go_on_from_is_refused_where_no_checkpoints_are(
    parse: Parse, tmp_path: Path, model: Path
) -> None:
    keys = ["--checkpoint.enable", "--checkpoint.initial_load_in_hf", "--checkpoint.load_step=50"]
    keys += [f"--job.dump_folder={tmp_path}/run", f"--model.hf_assets_path={model}"]
    with pytest.raises(ConfigError, match=r"checkpoint\.load_step must be -1 .* got 50, .* step 0"):
        jobconfig.check_files(parse("", *keys))


def test_the_start_says_that_later_checkpoints_stay_beside_the_one_to_go_on_from(
    parse: Parse, tmp_path: Path, model: Path
) -> None:
    keys = ["--checkpoint.enable", f"--job.dump_folder={tmp_path}"]
    keys.append(f"--model.hf_assets_path={model}")
    for step in (2, 4, 6):
        save(tmp_path, step, version=step)
    (line,) = jobconfig.check_files(parse("", *keys, "--checkpoint.load_step=2"))
    assert line.startswith("checkpoint.load_step = 2: each start with this key begins at step 2")
    assert "one without it goes on from step-6, " in line
    assert jobconfig.check_files(parse("", *keys, "--checkpoint.load_step=6")) == []
    excluded = "--checkpoint.exclude_from_loading=train_state"
    (line,) = jobconfig.check_files(parse("", *keys, excluded))
    assert "begins at step 0 again, and loads step-6 until a later one is there" in line


def test_the_start_says_that_weights_are_random_and_only_then(
    parse: Parse, tmp_path: Path, model: Path
) -> None:
    keys = [f"--job.dump_folder={tmp_path}", f"--model.hf_assets_path={model}"]
    enabled = [*keys, "--checkpoint.enable"]
    for job in (keys, enabled):
        (line,) = jobconfig.check_files(parse("", *job))
        assert line.startswith("training starts from random weights: ")
    assert jobconfig.check_files(parse("", *enabled, "--checkpoint.initial_load_in_hf")) == []
    save(tmp_path, 2, version=2)
    assert jobconfig.check_files(parse("", *enabled)) == []


def test_adapters_for_servers_are_not_trained_on_random_weights(
    parse: Parse, tmp_path: Path, model: Path
) -> None:
    """Before, that was a note, and servers added them to the weights of their files."""
    keys = [f"--job.dump_folder={tmp_path}", f"--model.hf_assets_path={model}", "--lora.rank=2"]
    for enabled in ([], ["--checkpoint.enable"]):
        with pytest.raises(ConfigError, match=r"^checkpoint\.initial_load_in_hf must be true"):
            jobconfig.check_files(parse("", *keys, "--lora.sync=adapter", *enabled))
        (line,) = jobconfig.check_files(parse("", *keys, *enabled))
        assert line.startswith("training starts from random weights: ")
    loaded = ["--checkpoint.enable", "--checkpoint.initial_load_in_hf"]
    assert jobconfig.check_files(parse("", *keys, "--lora.sync=adapter", *loaded)) == []


@pytest.mark.parametrize("key", ["grpo.reference_model", "checkpoint.initial_load_path"])
def test_a_reference_and_first_weights_of_another_model_or_not_there_are_refused_by_their_key(
    parse: Parse, tmp_path: Path, model: Path, key: str
) -> None:
    place = tmp_path / "other"
    hf = "--checkpoint.enable --checkpoint.initial_load_in_hf --grpo.kl_beta=0.1"
    config = parse("", f"--model.hf_assets_path={model}", f"--{key}={place}", *hf.split())
    with pytest.raises(ConfigError, match=rf"safetensors files in the directory of {key}, .* none"):
        jobconfig.check_files(config)
    tiny.write_tiny_model("qwen3", place)
    jobconfig.check_files(config)
    index = place / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "model.safetensors", "b": "b.safetensors"}}))
    with pytest.raises(ConfigError, match=r"has no b\.safetensors, which its model.* names"):
        jobconfig.check_files(config)
    index.write_text("torn")
    with pytest.raises(ConfigError, match="has an unreadable model"):
        jobconfig.check_files(config)
    index.unlink()
    weights = place / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:1000])
    with pytest.raises(ConfigError, match=rf"of {key}, .* a damaged one: .*model\.safetensors"):
        jobconfig.check_files(config)
    weights.write_bytes(whole)
    settings = json.loads((place / "config.json").read_text())
    (place / "config.json").write_text(json.dumps(settings | {"rope_theta": 5e6}))
    with pytest.raises(ConfigError, match=rf"the model of {key}, .* other settings than .*theta"):
        jobconfig.check_files(config)


@pytest.mark.parametrize("key", ["model.hf_assets_path", "grpo.reference_model"])
def test_quantised_weights_that_would_be_read_without_their_scales_are_refused(
    parse: Parse, tmp_path: Path, model: Path, key: str
) -> None:
    """Before, a run began with the numbers of a model's FP8 files as its weights."""
    place = tiny.write_tiny_model("qwen3", tmp_path / "other")
    settings = json.loads((place / "config.json").read_text())
    settings["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    (place / "config.json").write_text(json.dumps(settings))
    hf = "--checkpoint.enable --checkpoint.initial_load_in_hf --grpo.kl_beta=0.1"
    keys = f"{hf} --model.hf_assets_path={model} --{key}={place}".split()
    for more in ([], ["--checkpoint.initial_load_in_hf_quantized"]):
        with pytest.raises(
            ConfigError, match=rf"^{key} must be a directory of unquantised weights"
        ):
            jobconfig.check_files(parse("", *keys, *more))


def test_quantised_weights_of_a_model_whose_scales_torchtitan_reads_need_the_key_for_them(
    parse: Parse, model: Path
) -> None:
    (model / "config.json").write_text('{"quantization_config": {"quant_method": "fp8"}}')
    named = f"--model.name=deepseek_v3 --model.flavor=debugmodel --model.hf_assets_path={model}"
    keys = [*named.split(), "--checkpoint.enable", "--checkpoint.initial_load_in_hf"]
    with pytest.raises(
        ConfigError, match=r"^checkpoint\.initial_load_in_hf_quantized must be true"
    ):
        jobconfig.check_files(parse("", *keys))
    jobconfig.check_files(parse("", *keys, "--checkpoint.initial_load_in_hf_quantized"))
    # Read for the KL term alone, where that key is refused.
    jobconfig.check_files(parse("", *named.split(), "--grpo.kl_beta=0.1"))
