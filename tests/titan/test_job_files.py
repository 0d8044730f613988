"""The files that a job names, before the run opens them: what is missing or damaged is one line."""

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from tests.titan.conftest import Parse
from titan_grpo.errors import ConfigError, DataError
from titan_grpo.titan import jobconfig, tiny
from titan_grpo.titan.flavors import FLAVORS, parameters_of
from titan_grpo.titan.tiny import Kind


def test_files_that_the_run_needs_are_named_when_missing(
    parse: Parse, tmp_path: Path, model: Path
) -> None:
    hf = "[checkpoint]\nenable = true\ninitial_load_in_hf = true\n"
    good = parse(hf, f"--model.hf_assets_path={model}")
    jobconfig.check_files(good)
    (model / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"checkpoint.initial_load_in_hf needs \*\.safetensors"):
        jobconfig.check_files(good)
    (model / "tokenizer.json").unlink()
    with pytest.raises(ConfigError, match=r"must contain tokenizer\.json"):
        jobconfig.check_files(good)
    with pytest.raises(ConfigError, match=r"model\.hf_assets_path must be a directory"):
        jobconfig.check_files(parse(hf, f"--model.hf_assets_path={tmp_path}/nowhere"))


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}

ABSENT = object()
"""Of a key that config.json does not have: engines take transformers' value."""


@pytest.mark.parametrize(
    ("kind", "changed", "words"),
    [
        ("qwen3", {}, ""),
        ("qwen3_untied", {}, ""),
        ("qwen3_moe", {}, ""),
        ("llama3", {}, ""),
        ("qwen3", {"rope_theta": 1e4}, "rope.rope_theta 10000.0 (the trainer: 1000000"),
        ("qwen3", {"rms_norm_eps": 1e-5}, "rms_norm_eps 1e-05 (the trainer: 1e-06)"),
        ("llama3", {"rope_scaling": None}, "rope.rope_type 'default' (the trainer: 'llama3')"),
        ("llama3", {"rope_scaling": tiny.LLAMA3_ROPE | {"factor": 32.0}}, "rope.factor 32.0 (the"),
        ("qwen3", {"rope_scaling": YARN}, "rope.rope_type 'yarn' (the trainer: 'default')"),
        ("qwen3_moe", {"rope_scaling": YARN}, "rope.rope_type 'yarn' (the trainer: 'default')"),
        ("qwen3", {"attention_bias": True}, "attention_bias True (the trainer: False)"),
        ("llama3", {"mlp_bias": True}, "mlp_bias True (the trainer: False)"),
        ("llama3", {"hidden_act": "gelu"}, "hidden_act 'gelu' (the trainer: 'silu')"),
        ("llama3", {"rms_norm_eps": ABSENT}, "rms_norm_eps 1e-06 (the trainer: 1e-05)"),
        ("qwen3", {"rope_theta": ABSENT}, "rope.rope_theta 10000.0 (the trainer: 1000000"),
        ("qwen3", {"tie_word_embeddings": ABSENT}, "tie_word_embeddings False (the trainer: True)"),
        ("qwen3_moe", {"norm_topk_prob": ABSENT}, "norm_topk_prob False (the trainer: True)"),
        ("qwen3_moe", {"num_experts_per_tok": 4}, "num_experts_per_tok 4 (the trainer: 2)"),
        ("qwen3_moe", {"norm_topk_prob": False}, "norm_topk_prob False (the trainer: True)"),
        ("qwen3_moe", {"routed_scaling_factor": 2.5}, "routed_scaling_factor 2.5 (the trainer: 1"),
        ("qwen3", {"tie_word_embeddings": False}, "tie_word_embeddings False (the trainer: True)"),
        ("llama3", {"tie_word_embeddings": True}, "tie_word_embeddings True (the trainer: False)"),
        ("qwen3", {"num_experts_per_tok": 2}, "num_experts_per_tok 2 (the trainer: 0)"),
        ("qwen3", {"num_hidden_layers": 3}, "num_hidden_layers 3 (the trainer: 2)"),
        ("qwen3", {"hidden_size": 256}, "hidden_size 256 (the trainer: 128)"),
    ],
)
def test_a_flavor_that_computes_another_model_than_config_json_is_refused(
    parse: Parse, tmp_path: Path, kind: Kind, changed: dict[str, Any], words: str
) -> None:
    model = tiny.write_tiny_model(kind, tmp_path / "model")
    path = model / "config.json"
    settings = (json.loads(path.read_text()) | changed).items()
    path.write_text(json.dumps({name: value for name, value in settings if value is not ABSENT}))
    name, flavor = FLAVORS[kind]
    keys = (f"--model.name={name}", f"--model.flavor={flavor}", f"--model.hf_assets_path={model}")
    config = parse("", *keys)
    if not words:
        jobconfig.check_files(config)
        return
    with pytest.raises(ConfigError) as caught:
        jobconfig.check_files(config)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "config.json must be a model's config.json: Expecting property name"),
        ("[" * 100_000, "config.json must be a model's config.json: maximum recursion depth"),
        ("[]", "config.json must be a model's config.json, it has no table"),
        ('{"text_config": "qwen3"}', "text_config in .*config.json must be a table, got 'qwen3'"),
        ('{"rope_scaling": [2]}', r"rope_scaling in .*config.json must be a table, got \[2\]"),
        ('{"text_config": {"rope_parameters": 8}}', "rope_parameters in .* must be a table, got 8"),
    ],
    ids=["torn", "deep", "no table", "text_config", "rope_scaling", "rope_parameters"],
)
def test_a_config_json_that_is_damaged_is_one_line(
    parse: Parse, model: Path, text: str, words: str
) -> None:
    (model / "config.json").write_text(text)
    with pytest.raises(ConfigError, match=words):
        jobconfig.check_files(parse("", f"--model.hf_assets_path={model}"))


@pytest.mark.parametrize(
    "text",
    ["{", "[" * 100_000, '{"weight_map": {"a": 1, "b": "x"}}', '{"weight_map": {"a": [1]}}'],
    ids=["torn", "deep", "numbers", "lists"],
)
def test_an_index_of_weights_that_is_damaged_is_one_line(
    parse: Parse, model: Path, text: str
) -> None:
    (model / "model.safetensors.index.json").write_text(text)
    keys = (f"--model.hf_assets_path={model}", "--checkpoint.enable")
    with pytest.raises(ConfigError, match=r"needs .* in the directory of model"):
        jobconfig.check_files(parse("", *keys, "--checkpoint.initial_load_in_hf"))


def test_weights_that_are_not_the_models_are_one_line(parse: Parse, model: Path) -> None:
    """Before, a missing tensor was a traceback of each rank, and of two of one name the run began
    with either."""
    good = parse("", f"--model.hf_assets_path={model}", "--grpo.kl_beta=0.1")
    weights = load_file(model / "model.safetensors")
    norm = weights.pop("model.norm.weight")

    def refusal() -> str:
        with pytest.raises(ConfigError) as caught:
            jobconfig.check_files(good)
        return str(caught.value)

    save_file({"model.norm.weight": norm + 1}, model / "stale.safetensors")
    assert "has model.norm.weight in model.safetensors and in stale.safetensors, which" in refusal()
    (model / "stale.safetensors").unlink()
    save_file(weights, model / "model.safetensors")
    assert refusal().endswith("no model.norm.weight, qwen3/grpo_tiny needs (128,)")
    save_file({"model.norm.weight": norm[:5]}, model / "rest.safetensors")
    assert refusal().endswith("model.norm.weight of shape (5,), qwen3/grpo_tiny needs (128,)")
    save_file({"model.norm.weight": norm}, model / "rest.safetensors")
    jobconfig.check_files(good)


def test_deepseek_v3_is_built_too_where_no_trainer_is(parse: Parse, model: Path) -> None:
    """Before, titan-grpo plan ended in a traceback: torchtitan completes its arguments late."""
    assert parameters_of("deepseek_v3", "debugmodel") == 33_014_016
    (model / "config.json").write_text("{}")
    named = ("--model.name=deepseek_v3", "--model.flavor=debugmodel")
    keys = (*named, f"--model.hf_assets_path={model}", "--checkpoint.enable")
    with pytest.raises(ConfigError, match=r"of shape .*, deepseek_v3/debugmodel needs \(2048, 256"):
        jobconfig.check_files(parse("", *keys, "--checkpoint.initial_load_in_hf"))


def test_a_run_that_would_write_over_the_weights_that_it_reads_is_refused(
    parse: Parse, tmp_path: Path, model: Path
) -> None:
    """Before, it did, at its end, and said that no version was saved."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run/hf").symlink_to(model)
    here = f"--job.dump_folder={tmp_path}/run"
    with pytest.raises(ConfigError, match=r"^model\.hf_assets_path must be another folder than hf"):
        jobconfig.check_files(parse("", here, f"--model.hf_assets_path={model}"))
    jobconfig.check_files(parse("", f"{here}2", f"--model.hf_assets_path={tmp_path}/run/hf"))


def test_an_index_that_torchtitan_cannot_read_is_one_line(parse: Parse, model: Path) -> None:
    """Before, it was a traceback of each rank, also of a run that reads other weights."""
    index = {"weight_map": {"model.norm.weight": "model.safetensors"}}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ConfigError, match=r"it names 'model\.safetensors': remove it, one file"):
        jobconfig.check_files(parse("", f"--model.hf_assets_path={model}"))


def test_weights_in_numbered_files_with_their_index_are_let_in(parse: Parse, model: Path) -> None:
    file = (model / "model.safetensors").rename(model / "model-00001-of-00001.safetensors")
    index = {"weight_map": dict.fromkeys(load_file(file), file.name)}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    jobconfig.check_files(parse("", f"--model.hf_assets_path={model}", "--grpo.kl_beta=0.1"))


@pytest.mark.parametrize(
    ("key", "job"),
    [
        ("task_path", ["--rollout.task=gsm8k", "--rollout.task_path=/data/there.jsonl"]),
        ("tools", ["--rollout.reward=m:f", "--rollout.dataset=d", "--rollout.tools=/data/there"]),
    ],
)
def test_a_task_on_another_host_has_its_files_there(
    parse: Parse, model: Path, key: str, job: list[str]
) -> None:
    job = [f"--model.hf_assets_path={model}", *job]
    with pytest.raises(ConfigError, match=rf"rollout\.{key} must be an existing file"):
        jobconfig.check_files(parse("", *job))
    jobconfig.check_files(parse("", *job, "--rollout.controller=http://127.0.0.1:8910"))


def test_a_command_of_alerts_that_is_not_there_is_refused_before_an_alert_wants_it(
    parse: Parse, model: Path
) -> None:
    keys = [f"--model.hf_assets_path={model}", "--alerts.run", "reward/mean < 0"]
    jobconfig.check_files(parse("", *keys, "--alerts.command", "echo 'an alert'"))
    with pytest.raises(ConfigError, match=r"alerts\.command .* got 'not-there'"):
        jobconfig.check_files(parse("", *keys, "--alerts.command", "not-there --now"))


def test_a_record_is_no_directory(parse: Parse, model: Path, tmp_path: Path) -> None:
    keys = [f"--model.hf_assets_path={model}", f"--rollout.record_path={tmp_path}"]
    with pytest.raises(ConfigError, match=r"rollout\.record_path must be a file, '/.*' is a dir"):
        jobconfig.check_files(parse("", *keys))
    jobconfig.check_files(parse("", keys[0], f"{keys[1]}/new/record.jsonl"))


@pytest.mark.parametrize("content", ["", "no record", "no record\n", '{"version": 1}\n{}\n'])
def test_what_is_replayed_begins_with_a_batch(
    content: str, parse: Parse, model: Path, tmp_path: Path
) -> None:
    """Before, the ranks found that out after the model was built; and so did the doctor's user."""
    path = tmp_path / "record.jsonl"
    path.write_text(content)
    keys = [f"--model.hf_assets_path={model}", f"--rollout.replay_path={path}"]
    if "version" in content:
        jobconfig.check_files(parse("", *keys))
        return
    with pytest.raises(DataError, match=r"rollout\.replay_path must be a record, .*/record\.jsonl"):
        jobconfig.check_files(parse("", *keys))


@pytest.mark.parametrize("name", ["", "folder"])
def test_a_saved_configuration_is_no_directory(
    parse: Parse, model: Path, tmp_path: Path, name: str
) -> None:
    (tmp_path / "folder").mkdir()
    keys = [f"--model.hf_assets_path={model}", f"--job.dump_folder={tmp_path}"]
    jobconfig.check_files(parse("", *keys, "--job.save_config_file=job.json"))
    with pytest.raises(ConfigError, match=r"job\.save_config_file must be a file, '/.*' is a dir"):
        jobconfig.check_files(parse("", *keys, f"--job.save_config_file={name}"))


@pytest.mark.parametrize(
    "keys",
    [
        ["--rollout.record_path={0}/new/record.jsonl"],
        ["--job.save_config_file={0}/job.json"],
        ["--checkpoint.enable", "--checkpoint.folder={0}"],
        ["--metrics.enable_tensorboard", "--metrics.save_tb_folder={0}/tb"],
        ["--comm.save_traces_folder={0}"],
    ],
    ids=["record", "configuration", "checkpoints", "tensorboard", "traces"],
)
def test_a_file_in_the_place_of_a_folder_is_refused_before_the_run_would_write_there(
    parse: Parse, model: Path, tmp_path: Path, keys: list[str]
) -> None:
    place = tmp_path / "place"
    words = [key.format(place) for key in (f"--model.hf_assets_path={model}", *keys)]
    jobconfig.check_files(parse("", *words))
    place.write_text("")
    with pytest.raises(ConfigError, match=r"must be in a directory .*, '/.*/place' is a file"):
        jobconfig.check_files(parse("", *words))


@pytest.mark.parametrize(
    "keys", [["--model.hf_assets_path={0}"], ["--rollout.replay_path={0}"]], ids=["model", "replay"]
)
def test_a_name_that_no_file_can_have_is_one_line(
    parse: Parse, model: Path, keys: list[str]
) -> None:
    keys = [f"--model.hf_assets_path={model}", *(key.format("x" * 300) for key in keys)]
    with pytest.raises(ConfigError, match=r"cannot be used, 'x{199,}.*: File name too long$"):
        jobconfig.check_files(parse("", *keys))


def test_an_interpreter_of_launched_servers_is_a_program_of_rank_0s_host(
    parse: Parse, model: Path
) -> None:
    keys = [f"--model.hf_assets_path={model}", "--rollout.servers=launch"]
    jobconfig.check_files(parse("", *keys, "--rollout.launch_python=python"))
    config = parse("", *keys, "--rollout.launch_python=/nope")
    with pytest.raises(ConfigError, match=r"rollout\.launch_python .* '/nope' is no file"):
        jobconfig.check_files(config)
    jobconfig.check_files(config, {"RANK": "8"})


def test_a_server_of_the_rollouts_is_no_evaluations_own(parse: Parse, model: Path) -> None:
    keys = [f"--model.hf_assets_path={model}", "--grpo.async_weight_update"]
    table = '[[evaluation]]\nname = "held_out"\ntask = "digits"\nrows = 1\nservers = ["{url}"]\n'
    jobconfig.check_files(parse(table.format(url="http://127.0.0.1:8001"), *keys))
    with pytest.raises(ConfigError, match="would get no rollouts"):
        jobconfig.check_files(parse(table.format(url="http://127.0.0.1:8000"), *keys))
    with pytest.raises(ConfigError, match=r"^evaluation\[0\]\.servers: a server must be a URL"):
        parse(table.format(url="gpu2:8000"), "--grpo.async_weight_update")


def test_what_prompts_are_made_of_is_looked_for_before_servers_start(
    parse: Parse, tmp_path: Path, model: Path
) -> None:
    rows = tmp_path / "rows.jsonl"
    keys = ["--rollout.reward", "rewards:f", "--rollout.dataset", str(rows)]
    keys.append(f"--model.hf_assets_path={model}")
    config = parse("[rollout.chat_template_kwargs]\nenable_thinking = false\n", *keys)
    assert config.rollout.chat_template_kwargs == {"enable_thinking": False}
    with pytest.raises(ConfigError, match=r"rollout\.dataset must be an existing file"):
        jobconfig.check_files(config)
    rows.write_text("{}")
    jobconfig.check_files(config)
    (model / "tokenizer_config.json").unlink()
    with pytest.raises(ConfigError, match="must have a chat template"):
        jobconfig.check_files(config)
    jobconfig.check_files(parse("", *keys, "--rollout.chat_template=none"))


def test_an_evaluations_data_are_looked_for_too_and_named_by_the_tables_key(
    parse: Parse, model: Path
) -> None:
    table = '[[evaluation]]\nname = "held_out"\nreward = ["m:f"]\ndataset = "none.jsonl"\n'
    keys = (f"--model.hf_assets_path={model}", "--grpo.async_weight_update")
    with pytest.raises(ConfigError) as caught:
        jobconfig.check_files(parse(table, *keys))
    rule = "evaluation 'held_out'.dataset must be an existing file or pattern, got 'none.jsonl'"
    assert str(caught.value) == rule


def test_a_run_key_that_is_missing_or_named_twice_is_refused_on_every_rank(
    parse: Parse, tmp_path: Path, model: Path
) -> None:
    config = parse(
        "", f"--weight_sync.run_key_file={tmp_path}/key", f"--model.hf_assets_path={model}"
    )
    with pytest.raises(ConfigError, match=r"weight_sync\.run_key_file must name a readable file"):
        jobconfig.check_files(config)
    (tmp_path / "key").write_text("00" * 32)
    jobconfig.check_files(config, {})
    with pytest.raises(
        ConfigError, match=r"TITAN_GRPO_RUN_KEY and weight_sync\.run_key_file are set"
    ):
        jobconfig.check_files(config, {"TITAN_GRPO_RUN_KEY": "00" * 32})
