"""From the command line to one checked JobConfig: torchtitan's sections and ours, TOML and
arguments.

torchtitan does not check the types of TOML values: a wrong one surfaces hours later, or never.
"""

import contextlib
import difflib
import io
import math
import re
import tomllib
import traceback
import types
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

from titan_grpo import config as our_config
from titan_grpo.config import older
from titan_grpo.config.evaluation import Evaluation, inherited
from titan_grpo.config.grpo import resolve_aliases
from titan_grpo.config.inert import inert
from titan_grpo.config.task import TEXT
from titan_grpo.errors import ConfigError
from titan_grpo.protocol.model_config import essential
from titan_grpo.rollout.chat import ChatTemplate
from titan_grpo.rollout.tasks.dataset import files_of
from titan_grpo.runkey import find_run_key
from titan_grpo.titan import compat, flavors, merge, named, rules
from titan_grpo.titan.server_urls import known_servers

CONFIG_MODULE = "titan_grpo.config"
"""Default of ``job.custom_config_module``."""

TIMEOUT_MARGIN_S = 60
"""Added to derived collective timeouts, in seconds: rank 0's own deadline must fire first, with its
better message."""


@dataclass(frozen=True, slots=True)
class Job:
    """A merged, checked configuration, and what a person should know of it at the start."""

    config: Any
    notes: tuple[str, ...]
    """What ``grpo.algorithm`` set, and which keys were set and cannot act."""


def parse(argv: Sequence[str], world_size: int | None = None) -> Any:
    """``read(...).config``."""
    return read(argv, world_size).config


def read(argv: Sequence[str], world_size: int | None = None) -> Job:
    """The merged, checked JobConfig. Argument beats TOML beats ``grpo.algorithm`` beats default.

    Derived where neither TOML nor argument gives them: ``job.custom_config_module``,
    ``checkpoint.last_save_model_only`` (false: the last checkpoint can be resumed) and the two
    ``comm`` timeouts (longer than what rank 0 may wait for rollouts).

    Args: argv: arguments without the program's name, such as ``["--job.config_file", "x.toml",
        "--training.steps", "3"]``. world_size: number of trainer ranks, if known; checks the
        parallelism degrees against it.

    Raises:
        ConfigError: a broken rule, in one line. (``--help`` raises SystemExit(0) after printing.)
        UpstreamError: an unsupported torchtitan.
    """
    machine = rules.Machine(on_cpu=compat.prepare(), world_size=world_size)
    args, table = list(argv), load_toml(argv)
    given = given_keys(args) | table_keys(table)
    if not {"job.custom_config_module", "experimental.custom_args_module"} & given:
        args += ["--job.custom_config_module", CONFIG_MODULE]
    config = _merge(args, table)
    notes = []
    if config.grpo.algorithm:
        keys = named.keys_of(config.grpo.algorithm)
        _refuse(mismatches(type(config.grpo), keys, f"{config.grpo.algorithm}: grpo."))
        notes.append(named.expand(config.grpo, keys, given))
        given |= {f"grpo.{name}" for name in keys}
    # Before a deadline is computed with them.
    _refuse(rules.not_finite(config))
    config.evaluation = [_evaluation(n, t, config.rollout) for n, t in enumerate(config.evaluation)]
    _derive(config, given)
    if not config.lora.rank and any(key.startswith("lora.") for key in given):
        _refuse([f"lora.rank must be 1 or greater with a section [lora], got {config.lora.rank}"])
    broken = (
        our_config.violations(config)
        + rules.violations(config, machine)
        + compat.upstream("models").violations(config)
        + _model_violations(config)
    )
    _refuse(broken)
    resolve_aliases(config.grpo)
    return Job(config, (*notes, *inert(config, given)))


def _evaluation(number: int, table: Mapping[str, Any], rollout: Any) -> Evaluation:
    """The settings of one [[evaluation]] table. Raises ConfigError for a mistake in its keys."""
    key = f"evaluation[{number}]."
    _refuse(mismatches(Evaluation, table, key))
    timeout_s = table.get("timeout_s", Evaluation.timeout_s)
    if not 0 < timeout_s < math.inf:
        raise ConfigError(f"{key}timeout_s must be greater than 0, and finite, got {timeout_s!r}")
    return Evaluation(**inherited(dict(table), rollout))


def load_toml(argv: Sequence[str]) -> dict[str, Any]:
    """Content of the file that ``--job.config_file`` names; empty without one.

    Raises:
        ConfigError: the file is missing, unreadable or not TOML.
    """
    path = None
    for position, arg in enumerate(argv):
        key, equals, value = arg.partition("=")
        if key.replace("-", "_") == "__job.config_file":
            path = value if equals else "".join(argv[position + 1 : position + 2])
    if path is None:
        return {}
    if not path or path.startswith("--"):
        raise ConfigError(
            f"job.config_file must name a TOML file, got {path or 'nothing'!r} after"
            " --job.config_file"
        )
    try:
        text = Path(path).read_text(encoding="utf-8")
        if text.startswith("\ufeff"):
            # tomllib would call the first line invalid, in which an editor shows no mistake.
            raise ConfigError(
                f"job.config_file must be TOML without a byte-order mark, {path!r} starts with one:"
                ' save it as "UTF-8", not as "UTF-8 with BOM"'
            )
        return tomllib.loads(text)
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(
            f"job.config_file must be a readable file, got {path!r}: {reason}"
        ) from error
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"job.config_file must be valid TOML, got {path!r}: {error}") from error


def given_keys(argv: Sequence[str]) -> set[str]:
    """Dotted keys that arguments set: ``["--a.no-b", "--c.d=1"]`` -> {"a.b", "c.d"}. Pure."""
    keys = (arg[2:].partition("=")[0].replace("-", "_") for arg in argv if arg.startswith("--"))
    return {key.replace(".no_", ".", 1) for key in keys}


def table_keys(table: dict[str, Any]) -> set[str]:
    """Dotted keys of the first two levels of a TOML table. Pure."""
    return {
        f"{section}.{key}"
        for section, keys in table.items()
        if isinstance(keys, dict)
        for key in keys
    }


def _refuse(broken: list[str]) -> None:
    if broken:
        raise ConfigError(broken[0] + (f" (and {len(broken) - 1} more)" if len(broken) > 1 else ""))


def _merge(args: list[str], table: dict[str, Any]) -> Any:
    """torchtitan's and our sections with the values of the file and the arguments."""
    sections = compat.upstream("models").torchtitan_sections()
    try:
        merged = merge.with_custom(sections, merge.custom_module(args, table))
    except (Exception, SystemExit) as error:  # the boundary to the user's module
        raise ConfigError(
            "job.custom_config_module must be an importable module with a dataclass JobConfig:"
            f" {type(error).__name__}: {one_line(str(error))}{_place(error)}"
        ) from error
    missing = {"grpo", "rollout", "weight_sync"} - set(merged.__dataclass_fields__)
    if missing:
        raise ConfigError(
            f"job.custom_config_module must keep the sections of {CONFIG_MODULE} (subclass its"
            " JobConfig), got one without " + ", ".join(sorted(missing))
        )
    # Before the values are filled in, which takes any type and stops with a traceback at an unknown
    # key.
    _refuse(mismatches(merged, table))
    output = io.StringIO()
    try:
        with contextlib.redirect_stderr(output):
            return merge.with_arguments(merged, args, table)
    except SystemExit as stop:
        if not stop.code:
            raise
        words = one_line(output.getvalue())
        option = re.search(r"--([\w.-]+)", words)
        hint = older.hint(option[1].replace("-", "_")) if option else ""
        raise ConfigError(f"command line: {words}{hint and '; ' + hint}") from stop
    except (ValueError, TypeError) as error:
        raise ConfigError(f"configuration: {one_line(str(error))}") from error


def _place(error: BaseException) -> str:
    """Where a user's module raised, as " (FILE, line N)"."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f" ({frame.filename}, line {frame.lineno})"


def one_line(text: str) -> str:
    """The argument parser's framed, wrapped message as one line without frame, colours and pages of
    help. Pure."""
    plain = re.sub(r"\x1b\[[0-9;]*m", "", text)
    words = " ".join(re.sub(r"[\u2500-\u257f]+", " ", plain).split())
    words = re.sub(
        r"^(Parsing error|Value error|Invalid choice|Unrecognized options)\s+", "", words
    )
    words = re.split(r" Argument helptext| For full helptext", words, maxsplit=1)[0]
    # Of the suggestions the first is kept, without the pages of help that follow it.
    return re.sub(r" Perhaps you meant: (--\S+).*", r"; did you mean \1?", words)


def _derive(config: Any, given: set[str]) -> None:
    if "checkpoint.last_save_model_only" not in given:
        # torchtitan's default drops optimizer, version and data cursor from the last checkpoint.
        # Its HF export needs that.
        config.checkpoint.last_save_model_only = config.checkpoint.last_save_in_hf
    timeouts = ("init_timeout_seconds", "train_timeout_seconds")
    for name, wait in zip(timeouts, rules.rank0_waits_s(config), strict=True):
        if f"comm.{name}" not in given:
            needed = math.ceil(wait) + TIMEOUT_MARGIN_S
            setattr(config.comm, name, max(getattr(config.comm, name), needed))


def _model_violations(config: Any) -> list[str]:
    flavors.register_tiny_flavors()
    name, flavor = config.model.name, config.model.flavor
    try:
        spec = compat.upstream("models").get_spec(name)
    except ValueError:
        return [
            f"model.name must be a model that torchtitan knows (llama3, qwen3, ...), got {name!r}"
        ]
    if spec.state_dict_adapter is None:
        return [
            "model.name must be a model with a Hugging Face state dict adapter (the servers' names"
            f" come from it), got {name!r}"
        ]
    if flavor not in spec.model_args:
        close = difflib.get_close_matches(flavor, list(spec.model_args), n=1)
        hint = f" (did you mean {close[0]!r}?)" if close else ""
        return [
            f"model.flavor must be one of {', '.join(sorted(spec.model_args))} for {name}, got"
            f" {flavor!r}{hint}"
        ]
    args, stages = spec.model_args[flavor], config.parallelism.pipeline_parallel_degree
    found = rules.attention_violation(flavor, args) or rules.tied_violation(flavor, args, stages)
    if not found and config.lora.rank > 0:
        found = _lora_violation(config)
    return [found] if found else []


def _lora_violation(config: Any) -> str:
    """Why the model of this job cannot have the adapters of [lora], or ""."""
    # torchtitan's models are imported by it
    from titan_grpo.titan.export import skeleton

    try:
        skeleton(config)
    except ConfigError as error:
        return str(error)
    return ""


def check_files(config: Any, environ: Mapping[str, str] | None = None) -> None:
    """Files that the run will open: tokenizer and weights in ``model.hf_assets_path``, the task's
    data, a replayed record, the servers file, the run key.

    Args:
        environ: the run's environment variables, if it is to have any about a run key.

    Raises:
        ConfigError: the first that is missing, with the key that names it.
    """
    from titan_grpo.titan.hf_files import read_config

    folder = Path(config.model.hf_assets_path)
    if not folder.is_dir():
        raise ConfigError(
            "model.hf_assets_path must be a directory with the model's Hugging Face files, got"
            f" {str(folder)!r}"
        )
    for name in ("tokenizer.json", "config.json"):
        if not (folder / name).is_file():
            raise ConfigError(f"model.hf_assets_path must contain {name}, got {str(folder)!r}")
    flavor = config.model.flavor
    args = compat.upstream("models").get_spec(config.model.name).model_args[flavor]
    if found := rules.model_violation(flavor, args, essential(read_config(str(folder)))):
        raise ConfigError(found)
    weights = config.checkpoint.initial_load_path or str(folder)
    if config.checkpoint.initial_load_in_hf and not any(Path(weights).glob("*.safetensors")):
        raise ConfigError(
            "checkpoint.initial_load_in_hf needs *.safetensors files in the directory, got"
            f" {weights!r}"
        )
    for key, path in (
        ("rollout.task_path", config.rollout.task_path),
        ("rollout.replay_path", config.rollout.replay_path),
        ("rollout.tools", config.rollout.tools),
    ):
        if path and not Path(path).is_file():
            raise ConfigError(f"{key} must be an existing file, got {path!r}")
    _check_prompts(config.rollout, str(folder))
    if config.rollout.servers_file or config.rollout.servers_slurm:
        known_servers(config.rollout, environ or {})
    find_run_key(environ or {}, config.weight_sync.run_key_file)
    checkpoints = Path(config.job.dump_folder) / config.checkpoint.folder
    complete = any(checkpoints.glob("step-*/.metadata"))
    if config.checkpoint.enable and checkpoints.is_dir() and not complete:
        # torchtitan would load nothing, not even the HF weights.
        raise ConfigError(
            "the checkpoint folder must hold a complete checkpoint or not exist,"
            f" {str(checkpoints)!r} has none (a run was killed while it saved the first one?), and"
            " training would start from random weights: remove the folder"
        )
    if config.checkpoint.enable and complete:
        _check_saver(checkpoints)


def _check_saver(checkpoints: Path) -> None:
    """The newest checkpoint is one that the installed torchtitan can go on from."""
    # torch.distributed.checkpoint is imported by it
    from titan_grpo.titan.export import PREFIX, stored_shapes, versions_in

    newest = checkpoints / f"{PREFIX}{versions_in(checkpoints)[-1]}"
    if reason := compat.other_saver(stored_shapes(newest).keys(), compat.require_torchtitan()):
        raise ConfigError(f"{newest} {reason}")


def _check_prompts(rollout: Any, model_dir: str) -> None:
    """What reward functions' prompts are made of, as far as a look tells: the rollout process
    starts after the servers, which may take minutes."""
    if not rollout.reward or rollout.source != "task" or rollout.replay_path:
        return
    if rollout.controller != "local":  # the files are there, and not here
        return
    files_of(rollout.dataset)
    if rollout.chat_template != TEXT:
        ChatTemplate.of_model(model_dir, rollout.chat_template)


def mismatches(cls: type, data: Mapping[str, Any], prefix: str = "") -> list[str]:
    """Every unknown key and wrongly typed value of a table, as "key must be rule, got value". Pure;
    empty if none.

    Example: ``group_size = "eight"`` under ``[rollout]`` gives
    "rollout.group_size must be an integer, got 'eight'".
    """
    known = {f.name: f.type for f in fields(cls)}
    out: list[str] = []
    for name, value in data.items():
        key = f"{prefix}{name}"
        if name not in known:
            out.append(_unknown(key, name, list(known)))
        elif is_dataclass(known[name]):
            nested: Any = known[name]
            out += (
                mismatches(nested, value, f"{key}.")
                if isinstance(value, Mapping)
                else [f"{key} must be a table, got {value!r}"]
            )
        elif not fits(known[name], value):
            out.append(f"{key} must be {describe(known[name])}, got {value!r}")
    return out


def fits(kind: Any, value: Any) -> bool:
    """Whether a TOML value may stand for a field of type ``kind``. An integer may stand for a
    float, a bool for neither."""
    origin = get_origin(kind)
    if origin is Literal:
        return any(type(value) is type(choice) and value == choice for choice in get_args(kind))
    if origin in (Union, types.UnionType):
        return any(fits(option, value) for option in get_args(kind))
    if origin is list:
        return isinstance(value, list) and all(fits(get_args(kind)[0], item) for item in value)
    if origin is dict:
        return isinstance(value, Mapping)
    if kind is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    if kind in (int, str, bool, types.NoneType):
        return type(value) is kind
    # A type that TOML cannot spell (a callable, say) is left to the dataclass itself.
    return True


def describe(kind: Any) -> str:
    """A type in words: "an integer", "one of 'vllm', 'sglang'", "a list of strings"."""
    origin = get_origin(kind)
    if origin is Literal:
        return "one of " + ", ".join(repr(choice) for choice in get_args(kind))
    if origin in (Union, types.UnionType):
        # TOML has no null, so "or nothing" would be no advice.
        return " or ".join(
            describe(option) for option in get_args(kind) if option is not types.NoneType
        )
    if origin is list:
        return f"a list, each item {describe(get_args(kind)[0])}"
    if origin is dict:
        return "a table"
    words = {int: "an integer", float: "a number", str: "a string", bool: "true or false"}
    return words.get(kind, getattr(kind, "__name__", str(kind)))


def _unknown(key: str, name: str, known: list[str]) -> str:
    close = difflib.get_close_matches(name, known, n=1)
    hint = older.hint(key) or (
        f"did you mean {key.removesuffix(name)}{close[0]}?"
        if close
        else f"known are {', '.join(sorted(known))}"
    )
    return f"{key} is not a key of this version of titan_grpo and torchtitan; {hint}"
