"""From arguments and TOML to one checked configuration: what is derived, and what is refused in one
line."""

import io
import re
import sys
from pathlib import Path

import pytest

from tests.titan.conftest import MINIMAL, Parse
from titan_grpo.config import Rollout
from titan_grpo.errors import ConfigError
from titan_grpo.titan import jobconfig, jobfile


def test_a_minimal_file_gets_our_sections_and_the_derived_values(parse: Parse) -> None:
    config = parse()
    assert config.job.custom_config_module == "titan_grpo.config"
    assert config.rollout.servers == ["http://127.0.0.1:8000"]
    assert config.checkpoint.last_save_model_only is False
    # Sync mode: 300 + (60 + 120 + 60) + margin 60; at the start 600 more.
    assert (config.comm.train_timeout_seconds, config.comm.init_timeout_seconds) == (600, 1200)


def test_arguments_beat_the_file_and_flags_have_a_negative(parse: Parse) -> None:
    extra = "[grpo]\nasync_weight_update = true\n"
    assert parse(extra).grpo.async_weight_update is True
    config = parse(
        extra,
        "--grpo.no-async-weight-update",
        "--training.steps=3",
        "--rollout.servers",
        "http://a:1,http://b:2",
    )
    assert config.grpo.async_weight_update is False
    assert config.training.steps == 3
    assert config.rollout.servers == ["http://a:1", "http://b:2"]


def test_keys_of_the_existing_trainer_are_taken_in_both_spellings(parse: Parse) -> None:
    extra = (
        "[grpo]\ngrpo_by_token = true\ntemperature = 1.0\nrollout_is_threshold = 4.0\nkl_beta ="
        " 0.1\nref_model_ema = 0.99\n"
    )
    assert parse(extra).grpo.grpo_by_token is True
    assert parse("", "--grpo.grpo_by_token", "False").grpo.grpo_by_token is False
    assert parse().grpo.grpo_by_token is None


def test_what_the_user_gives_is_not_derived(parse: Parse) -> None:
    config = parse(
        "[checkpoint]\nlast_save_model_only = true\n[comm]\ntrain_timeout_seconds = 7000\n"
    )
    assert config.checkpoint.last_save_model_only is True
    assert config.comm.train_timeout_seconds == 7000
    assert parse("", "--checkpoint.last-save-model-only").checkpoint.last_save_model_only is True


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ('[grpo]\nkl_beta = "x"\n', "grpo.kl_beta must be a number, got 'x'"),
        ("[optimizer]\nlr = true\n", "optimizer.lr must be a number, got True"),
        ("[optimizer]\nlr = 0\n", "optimizer.lr must be greater than 0"),
        (
            "[comm]\ntrain_timeout_seconds = 100\n",
            "comm.train_timeout_seconds must be greater than 540",
        ),
        (
            "[checkpoint]\ninitial_load_in_hf = true\n",
            "checkpoint.enable must be true with checkpoint.initial_load_in_hf",
        ),
        (
            "[checkpoint]\nenable = true\nlast_save_in_hf = true\nlast_save_model_only = false\n",
            "checkpoint.last_save_model_only must be true, or left out, with last_save_in_hf",
        ),
        (
            "[checkpoint]\nenable = true\ninitial_load_in_hf_quantized = true\n",
            "checkpoint.initial_load_in_hf_quantized must be false without initial_load_in_hf",
        ),
        ("[validation]\nenable = true\n", "validation.enable must be false"),
        ("[model.x]\n", "model.x is not a key"),
        (
            '[[evaluation]]\nname = "x"\nrows = 1\ntimeout_s = inf\n',
            "evaluation 'x'.timeout_s must be a finite number, got inf",
        ),
        ("[comm]\nmode = 'fake_backend'\n", 'comm.mode must be "default"'),
        ("not toml", "job.config_file must be a readable TOML file"),
    ],
)
def test_a_broken_file_is_refused_in_one_line(parse: Parse, extra: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        parse(extra)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("module", "message"),
    [
        ("raise RuntimeError('boom')", r"RuntimeError: boom \(.*its_module.py, line 1\)"),
        ("raise SystemExit(3)", "SystemExit: 3"),
        ("JobConfig = 3", "with a dataclass JobConfig: TypeError"),
    ],
)
def test_a_custom_config_module_that_fails_is_refused_in_one_line(
    parse: Parse, module: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "its_module.py").write_text(module)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "its_module", raising=False)
    with pytest.raises(ConfigError, match="job.custom_config_module must be .*" + message) as error:
        parse("", "--job.custom_config_module=its_module")
    assert "\n" not in str(error.value)


@pytest.mark.usefixtures("ends_by_signals")
def test_a_signal_in_a_custom_config_module_is_no_mistake_in_it(
    parse: Parse, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "its_slow_module.py").write_text("import signal; signal.raise_signal(15)")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(SystemExit) as caught:
        parse("", "--job.custom_config_module=its_slow_module")
    assert caught.value.code == 128 + 15


def test_a_model_that_a_custom_import_registers_is_known(
    parse: Parse, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before, the job was refused as one of a model that torchtitan does not have."""
    (tmp_path / "its_model.py").write_text(
        "from torchtitan.protocols import train_spec\n"
        "train_spec._extra_train_specs['its'] = train_spec.get_train_spec('qwen3')\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    job = parse("", "--model.name=its", "--experimental.custom_import=its_model")
    assert job.model.name == "its"
    with pytest.raises(ConfigError, match=r"custom_import must be an importable .*'its_mode'"):
        parse("", "--experimental.custom_import=its_mode")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--job.config_file"], "must name a TOML file, got 'nothing'"),
        (["--job.config_file="], "must name a TOML file, got 'nothing'"),
        (["--job.config_file", "--training.steps"], "must name a TOML file, got '--training"),
    ],
)
def test_a_config_file_that_is_none_is_refused_in_one_line(
    arguments: list[str], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        jobconfig.parse(arguments)


def test_a_config_file_may_begin_with_a_byte_order_mark(tmp_path: Path) -> None:
    marked = tmp_path / "job.toml"
    marked.write_bytes(b"\xef\xbb\xbf" + MINIMAL.encode())
    assert jobconfig.parse(["--job.config_file", str(marked)]).job.config_file == str(marked)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("optimizer.lr", "nan"),
        ("rollout.temperature", "inf"),
        ("rollout.batch_timeout_s", "nan"),
        ("weight_sync.startup_deadline_s", "-inf"),
        ("grpo.kl_beta", "nan"),
    ],
)
def test_a_number_that_is_not_finite_is_refused(parse: Parse, key: str, value: str) -> None:
    section, _, name = key.partition(".")
    for extra, arguments in ((f"[{section}]\n{name} = {value}\n", []), ("", [f"--{key}={value}"])):
        if section == "rollout" and extra:
            continue  # the minimal file has that section already
        with pytest.raises(ConfigError, match=f"{key} must be a finite number, got {value}"):
            parse(extra, *arguments)


def test_the_smallest_whole_number_of_64_bits_is_taken(parse: Parse) -> None:
    assert parse("", f"--debug.seed={-(1 << 63)}").debug.seed == -(1 << 63)


def test_no_bound_on_the_gradient_norm_is_infinity(parse: Parse) -> None:
    assert parse("", "--training.max_norm=inf").training.max_norm == float("inf")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--training.stepz 3", "command line: .*--training.stepz.*did you mean --training.steps"),
        ("--grpo.sglang-urls http://a:1", "command line: .*; it is rollout.servers here"),
        ("--rollout.engine trt", "command line: invalid choice 'trt'"),
        ("--rollout.launch_args --x", "command line: Missing value .*launch-args'.*needs =, as in"),
        (
            "--parallelism.tensor_parallel_degree=3",
            "seq_len must be a multiple of parallelism.tensor_parallel_degree",
        ),
        (
            "--optimizer.early_step_in_backward --grpo.no-async-weight-update",
            "early_step_in_backward must be false",
        ),
        (
            "--training.seq_len=16",
            "training.seq_len must be greater than rollout.max_completion_tokens \\(16;",
        ),
        ("--grpo.token_budget=32", "grpo.token_budget must be 0"),
        (
            "--grpo.ptx_mixin_batchsize=3",
            "grpo.ptx_mixin_batchsize must be a multiple of .* \\(8; every rank",
        ),
        ("--model.converters=quantize.linear.float8", "model.converters must be empty"),
        (
            "--experimental.custom_args_module=mine",
            "custom_args_module must be empty .*, got 'mine'",
        ),
        (
            "--grpo.pack_sequences --compile.enable",
            "compile.enable must be false with grpo.pack_sequences",
        ),
        (
            "--grpo.router_replay --compile.enable",
            "compile.enable must be false with grpo.router_replay",
        ),
        (
            "--grpo.router_replay --rollout.agent=examples.guessing:play",
            "grpo.router_replay must be false with agents",
        ),
        (
            "--grpo.pack_sequences --parallelism.tensor_parallel_degree=2",
            "must be 1 with grpo.pack_sequences",
        ),
        ("--training.local_batch_size=0", "training.local_batch_size must be 1 or more, got 0"),
        ("--parallelism.tensor_parallel_degree=0", "tensor_parallel_degree must be 1 or more"),
        ("--parallelism.data_parallel_shard_degree=0", "data_parallel_shard_degree must be -1"),
        # What others are computed from is refused first.
        ("--parallelism.pipeline_parallel_degree=0", "pipeline_parallel_degree must be 1 or more"),
        (
            "--model.flavor=grpo_tiny_moe --parallelism.expert_parallel_degree=0",
            "expert_parallel_degree must be 1 or more",
        ),
        ("--weight_sync.min_rate=0", "weight_sync.min_rate must be 1 or more .*, got 0"),
        (
            "--weight_sync.lane_deadline_s=1e308 --weight_sync.commit_deadline_s=1e308",
            "weight_sync.lane_deadline_s must be at most 500000 .*, got 1e\\+308",
        ),
        ("--validation.steps=0", "configuration: validation steps must be positive or -1"),
        (f"--lora.rank={10**10}", "lora.rank must be at most 1048576 .*, got 10{10}$"),
        (
            f"--lora.rank={10**30}",
            r"lora.rank must be a whole number from -2\^63 to 2\^63 - 1, got 0xc",
        ),
        ("--job.dump_folder=a\0b", "job.dump_folder must be a text without NUL .*, got 'a.x00b'"),
        (
            f"--rollout.stop_token_ids=1,{1 << 63}",
            "rollout.stop_token_ids must be a whole number .*, got 0x8000000000000000$",
        ),
        (
            f"--comm.train_timeout_seconds={10**10}",
            "comm.train_timeout_seconds must be at most 1000000000 .*, got 10{10}$",
        ),
        (
            f"--comm.trace_buf_size={1 << 31}",
            "comm.trace_buf_size must be at most 2147483647 .*, got",
        ),
        (
            "--activation_checkpoint.determinism_check=yes",
            """activation_checkpoint.determinism_check must be "default" or "none", got 'yes'""",
        ),
        (
            "--activation_checkpoint.memory_budget=2",
            "activation_checkpoint.memory_budget must be from 0 to 1, got 2.0",
        ),
        (
            "--compile.enable --compile.components=modle",
            r"""compile.components must be of "model" and "loss" .*, got \['modle'\]""",
        ),
        (
            "--compile.enable --compile.backend=inducktor",
            "compile.backend must be one of .*inductor.*, got 'inducktor'",
        ),
        ("--checkpoint.interval=0", "checkpoint.interval must be 1 or more, got 0"),
        (
            "--checkpoint.enable --checkpoint.keep_latest_k=1",
            "checkpoint.keep_latest_k must be 0 .* or 2 or more .*, got 1",
        ),
        (
            "--checkpoint.enable --checkpoint.keep_latest_k=-3",
            "checkpoint.keep_latest_k must be 0 .* or 2 or more .*, got -3",
        ),
        ("--metrics.log_freq=0", "metrics.log_freq must be 1 or more, got 0"),
        ("--training.gc_freq=0", "training.gc_freq must be 1 or more, got 0"),
        ("--training.max_norm=-1", "training.max_norm must be greater than 0"),
        ("--optimizer.name=Adamax", "optimizer.name must be"),
        (
            "--activation_checkpoint.debug --activation_checkpoint.selective_ac_option=op",
            'activation_checkpoint.debug must be false with selective_ac_option = "op"',
        ),
        ("--optimizer.eps=1e-300", "optimizer.eps must be at least 1e-37 .*, got 1e-300"),
        ("--optimizer.lr=1e39", "optimizer.lr must be at most 1e\\+20 .*, got 1e\\+39"),
        ("--grpo.clip_ratio_upper_bound=1e39", "clip_ratio_upper_bound must be at most 3.4e"),
        ("--grpo.cispo_weight_max=1e39", "grpo.cispo_weight_max must be at most 3.4e"),
        ("--grpo.rollout_is_threshold=1e39", "grpo.rollout_is_threshold must be at most 3.4e"),
        ("--optimizer.beta2=1.5", "optimizer.beta2 must be 0 or more, and below 1, got 1.5"),
        ("--lr_scheduler.warmup_steps=-2", "lr_scheduler.warmup_steps must be 0 or more, got -2"),
        (
            "--lr_scheduler.total_steps=3 --training.steps=6",
            "total_steps must be left out, or at least training.steps \\(6; .* negative\\), got 3",
        ),
        ("--lr_scheduler.decay_ratio=2", "lr_scheduler.decay_ratio must be from 0 to 1, got 2.0"),
        ("--rollout.servers=", "rollout.servers must be a list of URLs"),
        (
            "--rollout.reward=a:b --rollout.dataset=c --rollout.reward_weights=nan",
            "rollout.reward_weights must be a finite number, got nan",
        ),
        ("--model.flavor=grpo_tinny", "model.flavor must be one of .*did you mean 'grpo_tiny'"),
        ("--model.name=nope", "model.name must be a model that torchtitan knows"),
        (
            "--model.name=llama3 --model.flavor=8B_varlen",
            "model.flavor must be one with plain causal attention",
        ),
        (
            "--job.custom_config_module=titan_grpo.nope",
            "job.custom_config_module must be an importable module",
        ),
        (
            "--job.custom_config_module=torchtitan.config",
            "must keep the sections of titan_grpo.config",
        ),
        (
            "--job.config_file=missing.toml",
            "job.config_file must be a readable TOML file, got 'missing.toml'",
        ),
    ],
)
def test_a_broken_rule_is_refused_in_one_line(parse: Parse, arguments: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        parse("", *arguments.split())
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "message", "instead"),
    [
        (
            "--activation_checkpoint.mode=memory_budget",
            r"activation_checkpoint\.mode must be none, .* with compile\.enable",
            "--compile.enable --compile.components=model",
        ),
        (
            "--activation_checkpoint.mode=selective --activation_checkpoint.selective_ac_option=x",
            r"""selective_ac_option must be "op", or a number .*, got 'x'""",
            "--activation_checkpoint.selective_ac_option=op",
        ),
        (
            "--parallelism.tensor_parallel_degree=2 --parallelism.enable_async_tensor_parallel",
            r"enable_async_tensor_parallel must be false, or true with compile\.enable",
            "--compile.enable",
        ),
        (
            "--profiling.enable_profiling --profiling.profile_freq=3",
            r"profiling\.profile_freq must be at least .* \(3 and 1\), got 3",
            "--profiling.profiler_warmup=2",
        ),
    ],
)
def test_what_would_end_every_rank_in_torchtitan_is_refused_in_one_line(
    parse: Parse, arguments: str, message: str, instead: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        parse("", *arguments.split())
    parse("", *arguments.split(), *instead.split())


@pytest.mark.parametrize(
    "arguments",
    [
        "--parallelism.tensor_parallel_degree=2",
        "--checkpoint.async_mode=async_with_pinned_mem",
        "--profiling.enable_profiling",
        "--training.gc_debug",
        "--training.enable_cpu_offload",
        "--weight_sync.transport=nccl",
        "--rollout.servers=launch --rollout.launch_python=python --grpo.router_replay"
        " --model.flavor=grpo_tiny_moe",
    ],
)
def test_what_a_cpu_cannot_run_is_refused_by_ranks_and_by_no_command_that_only_reads_a_job(
    parse: Parse, arguments: str
) -> None:
    parse("", *arguments.split())
    with pytest.raises(ConfigError, match="on CPU"):
        parse("", *arguments.split(), world_size=2)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--grpo.async_weight_update=false"], "Unrecognized options: false; a boolean is a flag"),
        (["--training.steps=3", "--checkpoint.enable", "True"], "--grpo.no-KEY for false"),
        (["--grpo.async_weight_updat"], "did you mean --grpo.async-weight-update?"),
        (["job.toml"], "options: job.toml; the job's file is named by --job.config_file"),
    ],
)
def test_a_boolean_with_a_value_is_refused_with_its_flags_and_a_misspelt_one_with_its_name(
    parse: Parse, arguments: list[str], words: str
) -> None:
    with pytest.raises(ConfigError, match=re.escape(words)):
        parse("", *arguments)


def test_a_table_under_single_brackets_is_refused_with_the_double_ones(parse: Parse) -> None:
    with pytest.raises(ConfigError, match=re.escape("each item a table under [[NAME]], got {")):
        parse('[evaluation]\nname = "test"\ntask = "digits"\n')


def test_a_mistake_on_the_command_line_is_the_same_line_where_the_output_is_ascii(
    parse: Parse, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), encoding="ascii"))
    with pytest.raises(ConfigError) as caught:
        parse("", "--training.stepz", "3")
    said = "command line: Unrecognized options: --training.stepz, 3; did you mean --training.steps?"
    assert str(caught.value) == said
    with pytest.raises(ConfigError, match="a boolean is a flag without a value"):
        parse("", "--grpo.async_weight_update", "true")


def test_lists_on_the_command_line_have_commas(parse: Parse) -> None:
    numbers = ("--rollout.reward_weights=1,0.5", "--rollout.stop_token_ids=3,4")
    rollout = parse(
        "", "--rollout.reward=a:b,c:d", "--rollout.dataset=rows.jsonl", *numbers
    ).rollout
    assert (rollout.reward, rollout.reward_weights) == (["a:b", "c:d"], [1.0, 0.5])
    assert rollout.stop_token_ids == [3, 4]


def test_several_broken_rules_are_all_named_and_many_counted(parse: Parse) -> None:
    with pytest.raises(ConfigError) as caught:
        parse("[validation]\nenable = true\n", "--optimizer.lr=0", "--training.seq_len=16")
    for key in ("optimizer.lr", "training.seq_len", "validation.enable"):
        assert f"{key} must be " in str(caught.value)
    unknown = [f"key_{number}" for number in range(jobfile.REFUSED + 2)]
    with pytest.raises(ConfigError, match=r"key_4 is not a key \(and 2 more\)$"):
        jobfile.refuse([f"{name} is not a key" for name in unknown])


def test_a_config_module_of_the_working_directory_is_found_as_torchrun_finds_it(
    parse: Parse, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my_settings.py").write_text("from titan_grpo.config import JobConfig\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p not in ("", str(tmp_path))])
    assert parse("", "--job.custom_config_module=my_settings").grpo is not None


def test_servers_of_an_evaluation_are_urls_in_the_form_that_is_compared(parse: Parse) -> None:
    table = '[[evaluation]]\nname = "held_out"\ntask = "digits"\nrows = 1\nservers = ["{url}"]\n'
    (found,) = parse(table.format(url="http://GPU2:8000/"), "--grpo.async_weight_update").evaluation
    assert found.servers == ["http://gpu2:8000"]


def test_template_variables_that_are_no_table_are_refused() -> None:
    (found,) = jobfile.mismatches(Rollout, {"chat_template_kwargs": "x"}, "rollout.")
    assert found == "rollout.chat_template_kwargs must be a table, got 'x'"


def test_keys_given_by_arguments_are_found_in_every_spelling_and_those_of_the_file() -> None:
    argv = ["--a.b-c", "1", "--a.no-d", "--e.f_g=2", "value"]
    assert jobfile.given_keys(argv, {"h": {"i": 1}}) == {"a.b_c", "a.d", "e.f_g", "h.i"}
