"""From the command line to one checked JobConfig: named algorithms, derived values, the rules, and
the files that a run opens."""

import importlib
import math
import re
import shlex
import shutil
from collections.abc import Collection, Mapping, Sequence
from operator import attrgetter
from pathlib import Path
from typing import Any

import msgspec

from titan_grpo import config as our_config
from titan_grpo.config import sends_adapters
from titan_grpo.config.grpo import GRPO, resolve_aliases
from titan_grpo.config.inert import inert
from titan_grpo.config.rollout import PYTHONS, Rollout, server_url
from titan_grpo.config.task import TEXT, Evaluation, TaskKeys, inherited
from titan_grpo.errors import NOT_JSON, ConfigError, DataError
from titan_grpo.receive.checkpoint import INDEX, Shape, file_shapes
from titan_grpo.rollout.codec import ChatTemplate
from titan_grpo.rollout.records import check_record
from titan_grpo.rollout.tasks.built_in import GSM8K_SOURCE
from titan_grpo.rollout.tasks.dataset import files_of
from titan_grpo.runkey import Key, find_run_key
from titan_grpo.sync.transports.tls import check_certificate
from titan_grpo.titan import compat, rules
from titan_grpo.titan.flavors import model_of, other_model
from titan_grpo.titan.jobfile import (
    OURS,
    given_keys,
    importing,
    load,
    load_toml,
    mismatches,
    quantised,
    read_config,
    read_toml,
    refuse,
    toml,
    unusable,
)
from titan_grpo.titan.servers import known_servers

ALGORITHMS = Path(__file__).with_name("algorithms")
"""Folder of the named algorithms: TOML files of [grpo] keys."""

TWO_NAMES = {"loss_normalization": "grpo_by_token", "overlong_cache_tokens": "overlong_cache_share"}
TWO_NAMES |= {other: name for name, other in TWO_NAMES.items()}
"""Each [grpo] key of a pair that sets one thing -> the other one."""

TIMEOUT_MARGIN_S = 60
"""Seconds added to derived collective timeouts: rank 0's own deadline must expire first, because
its message says more."""

ANY_SERVER = "http://server:8000"
"""Placeholder for the servers of a job that names none."""


def parse(argv: Sequence[str], world_size: int | None = None, calls_servers: bool = True) -> Any:
    """Return the configuration of ``read`` alone."""
    return read(argv, world_size, calls_servers)[0]


def read(
    argv: Sequence[str], world_size: int | None = None, calls_servers: bool = True
) -> tuple[Any, list[str], list[str]]:
    """Return the merged, checked JobConfig, and lines for the start: what ``grpo.algorithm`` set,
    and which given keys have no effect. Argument beats TOML beats ``grpo.algorithm`` beats default.

    Derived if neither TOML nor argument gives them: ``job.custom_config_module``,
    ``checkpoint.last_save_model_only`` (false: the last checkpoint can be resumed) and the two
    ``comm`` timeouts (longer than rules.rank0_waits_s).

    Args: argv: arguments without the program's name, such as ``["--job.config_file", "x.toml",
        "--training.steps", "3"]``. world_size: number of trainer ranks that run on machines like
        this one; checks the parallelism degrees against it, and the job against this machine's
        device. None: the trainer's machines are unknown. calls_servers: False for a command that
        calls none of the run's servers. A job need not name any then (they may be arguments of
        the run), and has ANY_SERVER.

    Raises:
        ConfigError: a broken rule, in one line. (``--help`` raises SystemExit(0) after printing.)
        UpstreamError: an unsupported torchtitan.
    """
    here_on_cpu = compat.prepare()
    # A command that only reads the job may run on a machine without the trainer's GPUs.
    on_cpu = None if world_size is None else here_on_cpu
    args, table = list(argv), load_toml(argv)
    given = given_keys(args, table)
    if "job.custom_config_module" not in given:
        args += ["--job.custom_config_module", OURS]
    config = load(compat.upstream().SECTIONS, args, table)
    if module := config.experimental.custom_import:
        # Before the rules: it may register the model.
        with importing("experimental.custom_import"):
            importlib.import_module(module)
    r = config.rollout
    if not (calls_servers or r.servers or r.servers_file or r.servers_slurm):
        r.servers = [ANY_SERVER]
    expanded = []
    if config.grpo.algorithm:
        keys = algorithm_keys(config.grpo.algorithm)
        refuse(mismatches(type(config.grpo), keys, f"{config.grpo.algorithm}: grpo."))
        expanded.append(expand(config.grpo, keys, given))
        given |= {f"grpo.{name}" for name in keys}
    config.evaluation = [_evaluation(n, t, config.rollout) for n, t in enumerate(config.evaluation)]
    # In this order: each part computes with numbers that the parts before have checked.
    refuse(unusable(config))
    refuse(our_config.violations(config))
    _derive(config, given)
    if not config.lora.rank and any(key.startswith("lora.") for key in given):
        refuse([f"lora.rank must be 1 or greater with a section [lora], got {config.lora.rank}"])
    refuse(rules.violations(config, on_cpu, world_size))
    refuse(compat.upstream().violations(config, on_cpu is True))
    refuse(_compiler(config.compile))
    refuse(_model_violations(config))
    resolve_aliases(config.grpo)
    unused = inert(config, given, rules.inert(config))
    # It means nothing here, and torchtitan refuses one that its data-parallel ranks do not divide.
    config.training.global_batch_size = -1
    return config, expanded, unused


def _evaluation(number: int, table: Mapping[str, Any], rollout: Any) -> Evaluation:
    """Return the settings of one [[evaluation]] table. Raises ConfigError for a mistake in its
    keys."""
    key = f"evaluation[{number}]."
    refuse(mismatches(Evaluation, table, key))
    try:
        # Normalised: the run compares URLs in this form.
        servers = [server_url(url) for url in table.get("servers", ())]
    except ConfigError as error:
        raise ConfigError(f"{key}servers: {error}") from error
    return Evaluation(**inherited({**table, "servers": servers}, rollout))


def algorithms() -> list[str]:
    """Return the names of the algorithms in the package."""
    return sorted(path.stem for path in ALGORITHMS.glob("*.toml"))


def algorithm_keys(algorithm: str) -> dict[str, Any]:
    """Return the [grpo] keys of an algorithm: one of ``algorithms``, or a path that ends with
    .toml. Raises ConfigError if that file is missing or has anything but a table [grpo]."""
    own = algorithm.endswith(".toml")
    if not own and algorithm not in algorithms():
        raise ConfigError(
            f"grpo.algorithm must be one of {', '.join(algorithms())}, or a file that ends with"
            f" .toml, got {algorithm!r:.200}"
        )
    path = Path(algorithm) if own else ALGORITHMS / f"{algorithm}.toml"
    table = read_toml(path, "grpo.algorithm")
    keys = table.get("grpo")
    if set(table) != {"grpo"} or not isinstance(keys, dict) or "algorithm" in keys:
        raise ConfigError(
            f"{path} must have the one table [grpo], without the key algorithm, to be a"
            " grpo.algorithm"
        )
    return keys


def expand(grpo: GRPO, keys: dict[str, Any], given: Collection[str]) -> str:
    """Set an algorithm's ``keys`` in the section, except those that the job sets itself (dotted,
    in ``given``) under either name. Return a text that says what was set and what was
    kept."""
    kept: dict[str, str] = {}
    for name in keys:
        for own in (name, TWO_NAMES.get(name, name)):
            if f"grpo.{own}" in given:
                kept.setdefault(name, own)
    for name in keys.keys() - kept.keys():
        value = keys[name]
        setattr(grpo, name, float(value) if isinstance(getattr(grpo, name), float) else value)
    said = [f"{name} = {toml(keys[name])}" for name in keys if name not in kept]
    text = f"grpo.algorithm = {toml(grpo.algorithm)} sets " + ", ".join(said)
    if kept:
        said = [
            f"{own} = {toml(getattr(grpo, own))} (not {'' if own == name else f'{name} = '}"
            f"{toml(keys[name])})"
            for name, own in kept.items()
        ]
        text += "; the job itself sets " + ", ".join(sorted(said))
    return text


def _derive(config: Any, given: set[str]) -> None:
    if "checkpoint.last_save_model_only" not in given:
        # true, torchtitan's default, drops optimizer, version and data cursor from the last
        # checkpoint; only its HF export needs that.
        config.checkpoint.last_save_model_only = config.checkpoint.last_save_in_hf
    for name, wait in zip(rules.TIMEOUTS, rules.rank0_waits_s(config), strict=True):
        if f"comm.{name}" not in given:
            needed = math.ceil(wait) + TIMEOUT_MARGIN_S
            setattr(config.comm, name, max(getattr(config.comm, name), needed))


def _compiler(keys: Any) -> list[str]:
    if not keys.enable:
        return []
    # not at the top: it imports torch's compiler
    from torch._dynamo.backends.registry import list_backends

    if keys.backend in list_backends(()):
        return []
    known = ", ".join(list_backends())
    return [f"compile.backend must be one of {known}, got {keys.backend!r:.200}"]


def _model_violations(config: Any) -> list[str]:
    try:
        _, args = model_of(config.model.name, config.model.flavor)
        if found := rules.model_violations(config, args):
            return found
        if config.lora.rank > 0:
            # not at the top: it imports torch.distributed
            from titan_grpo.titan.lora import skeleton

            skeleton(config)
    except ConfigError as error:
        return [str(error)]
    return []


def check_python(rollout: Rollout, engine: str) -> None:
    """Raise ConfigError if the interpreter of an engine's launched servers is no program here."""
    name = PYTHONS[engine]
    path: str = getattr(rollout, name)
    if shutil.which(path) is None:
        why = "cannot be executed" if Path(path).is_file() else "is no file"
        raise ConfigError(
            f"rollout.{name} must be the interpreter of the engine's environment, {path!r} {why}"
        )


def check_files(
    config: Any,
    environ: Mapping[str, str] | None = None,
    ranks: int | None = None,
    all_files: bool = True,
) -> list[str]:
    """Check the files that the run opens: tokenizer and weights in ``model.hf_assets_path``, other
    weights that it reads, the task's data, a replayed record, the servers file, the run key, the
    certificate, the alerts' command, the checkpoint folder. Return notes for the start.

    Args:
        environ: the run's environment variables: a run key, a SLURM host list.
        ranks: number of trainer ranks; None: unknown.
        all_files: False: without the data of reward functions and the interpreters of servers, for
            a caller that tries them.

    Raises:
        ConfigError: the first problem, with the key that names the file.
        DataError: the checkpoint to go on from, or the replayed record, is damaged.
    """
    try:
        return _check_files(config, environ or {}, ranks, all_files)
    except OSError as error:  # a folder that may not be searched, a name that is too long
        raise ConfigError(
            f"a file of the job cannot be used, {str(error.filename)!r:.200}: {error.strerror}"
        ) from error


def _check_files(
    config: Any, environ: Mapping[str, str], ranks: int | None, all_files: bool
) -> list[str]:
    folder = Path(config.model.hf_assets_path)
    if not folder.is_dir():
        raise ConfigError(
            "model.hf_assets_path must be a directory with the model's Hugging Face files, got"
            f" {str(folder)!r}"
        )
    for name in ("tokenizer.json", "config.json"):
        if not (folder / name).is_file():
            raise ConfigError(f"model.hf_assets_path must contain {name}, got {str(folder)!r}")
    _check_models(config)
    rollout = config.rollout
    # A remote controller has the task's files on its own host.
    here = rollout.source == "task" and not rollout.replay_path and rollout.controller == "local"
    for name in ("replay_path", *(("task_path", "tools") if here else ())):
        if (path := getattr(rollout, name)) and not Path(path).is_file():
            source = f" ({GSM8K_SOURCE})" if name == "task_path" and rollout.task == "gsm8k" else ""
            raise ConfigError(f"rollout.{name} must be an existing file, got {path!r}{source}")
    if rollout.replay_path:
        check_record(rollout.replay_path)
    _check_written(config)
    # Rank 0's host alone starts servers.
    starts_servers = rollout.launches and environ.get("RANK", "0") == "0"
    for engine in rollout.launch_engines if all_files and starts_servers else ():
        check_python(rollout, engine)
    tasks = [*([rollout] if here else []), *config.evaluation]
    for table in tasks if all_files else ():
        _check_prompts(table, str(folder))
    apart = [url for table in config.evaluation for url in table.servers]
    known_servers(rollout, environ, apart=apart)
    run_key = find_run_key(environ, config.weight_sync.run_key_file)
    # Servers that the run launches get a new key from it.
    own_key = Key.generate() if rollout.launches else None
    check_certificate(config.weight_sync, run_key or own_key)
    if (words := shlex.split(config.alerts.command)) and shutil.which(words[0]) is None:
        raise ConfigError(
            f"alerts.command must be a program that is here, got {words[0]!r}: an alert would"
            " find nothing to run"
        )
    # not at the top: it imports torch.distributed.checkpoint
    from titan_grpo.titan.checkpoints import check

    return check(config, ranks)


FOLDERS = {
    "checkpoint.folder": "checkpoint.enable",
    "metrics.save_tb_folder": "metrics.enable_tensorboard",
    "profiling.save_traces_folder": "profiling.enable_profiling",
    "profiling.save_memory_snapshot_folder": "profiling.enable_memory_snapshot",
    "comm.save_traces_folder": "comm.trace_buf_size",
}
"""Key of a folder that torchtitan makes in job.dump_folder -> the key with which it does."""


def _check_written(config: Any) -> None:
    """Check that what the run writes can be made: no file is in a folder's place, nor a folder in a
    file's."""
    dump, record = config.job.dump_folder, config.rollout.record_path
    saved = config.job.save_config_file
    files = {"rollout.record_path": Path(record)} if record else {}
    files |= {"job.save_config_file": Path(dump, saved)} if saved is not None else {}
    folders = {
        key: Path(dump, attrgetter(key)(config))
        for key, switch in FOLDERS.items()
        if attrgetter(switch)(config)
    }
    for key, path in files.items():
        if path.is_dir():
            raise ConfigError(f"{key} must be a file, {str(path)!r} is a directory")
        folders[key] = path.parent
    for key, path in folders.items():
        there = next(each for each in (path, *path.parents) if each.exists())
        if not there.is_dir():
            raise ConfigError(
                f"{key} must be in a directory that can be made, {str(there)!r} is a file"
            )


def _check_models(config: Any) -> None:
    """Check config.json, and the files of weights that are read, in each folder of a model."""
    keys, grpo = config.checkpoint, config.grpo
    folders = [(rules.ASSETS, "")]
    if keys.initial_load_in_hf:
        key = "checkpoint.initial_load_path" if keys.initial_load_path else rules.ASSETS
        folders.append((key, "checkpoint.initial_load_in_hf"))
    if grpo.kl_beta > 0:
        key = "grpo.reference_model" if grpo.reference_model else rules.ASSETS
        folders.append((key, "grpo.kl_beta"))
    spec, args = model_of(config.model.name, config.model.flavor)
    left = Path(config.job.dump_folder, "hf").resolve()
    for key, reader in folders:
        place = Path(attrgetter(key)(config))
        if not sends_adapters(config.lora) and place.resolve() == left:
            raise ConfigError(
                f"{key} must be another folder than hf in job.dump_folder, got {str(place)!r}: the"
                " run writes its last version there, over these weights; move them, or set another"
                " job.dump_folder"
            )
        settings = read_config(place)
        if found := other_model(key, config.model.flavor, args, settings):
            raise ConfigError(found)
        if reader and quantised(settings):
            _check_quantised(config, key, reader, spec.state_dict_adapter)
        if reader and (lost := _lost_weights(config, place, quantised(settings))):
            raise ConfigError(
                f"{reader} needs *.safetensors files in the directory of {key}, {str(place)!r} has"
                f" {lost}"
            )
        # torchtitan reads the index beside the assets, and of a second model, whatever it loads
        if not key.startswith("checkpoint.") and (name := _unnumbered(place)):
            raise ConfigError(
                f"{INDEX} in the directory of {key} must name files with numbers (torchtitan reads"
                f" them), in {str(place)!r} it names {name!r}: remove it, one file needs no index"
            )


def _check_quantised(config: Any, key: str, reader: str, adapter: type) -> None:
    """Refuse a folder of quantised weights that torchtitan would read without their scales.
    ``reader``: the key that has them read; for the KL term the folder's config.json is enough."""
    name, there = config.model.name, repr(str(attrgetter(key)(config)))
    # torchtitan's base class reads quantised files as they are, with a warning.
    if "get_hf_storage_reader" not in vars(adapter):
        raise ConfigError(
            f"{key} must be a directory of unquantised weights ({name} is read without its scales),"
            f" config.json in {there} says that its are quantised: take the unquantised model"
        )
    first = reader == "checkpoint.initial_load_in_hf"
    if first and not config.checkpoint.initial_load_in_hf_quantized:
        raise ConfigError(
            "checkpoint.initial_load_in_hf_quantized must be true for the quantised weights (by its"
            f" config.json) of {key}, {there}: they would be read without their scales"
        )


class _Index(msgspec.Struct):
    """A checkpoint's index: name of a tensor -> file."""

    weight_map: dict[str, str]


def _indexed(folder: Path) -> set[str]:
    """Return the files that a folder's index names; empty without one."""
    path = folder / INDEX
    if not path.is_file():
        return set()
    return set(msgspec.json.decode(path.read_bytes(), type=_Index).weight_map.values())


def _unnumbered(folder: Path) -> str:
    """Return a file without a number that a folder's index names, or "" (also of an unreadable
    one)."""
    try:
        names = sorted(_indexed(folder))
    except (OSError, *NOT_JSON):
        return ""
    return next((name for name in names if not re.search(r"\d", name)), "")


def _lost_weights(config: Any, folder: Path, coded: bool) -> str:
    """Return what a folder of safetensors files lacks of the job's model, or has twice, or "".
    ``coded``: they are quantised, in shapes of their own."""
    there = {path.name for path in folder.glob("*.safetensors")}
    if not there:
        return "none"
    try:
        lost = sorted(_indexed(folder) - there)
    except (OSError, *NOT_JSON) as error:
        return f"an unreadable {INDEX} ({error})"
    if lost:
        return f"no {lost[0]}, which its {INDEX} names"
    found: dict[str, tuple[Shape, str]] = {}
    for file in sorted(there):
        try:
            shapes = file_shapes(folder / file)
        except DataError as error:
            return f"a damaged one: {error}"
        for name, shape in shapes.items():
            if (first := found.setdefault(name, (shape, file))[1]) != file:
                return f"{name} in {first} and in {file}, which torchtitan reads too: move one out"
    if coded or config.checkpoint.initial_load_in_hf_quantized:
        return ""
    for name, shape in _tensors(config).items():
        if name not in found or found[name][0] != shape:
            have = f"{name} of shape {found[name][0]}" if name in found else f"no {name}"
            return f"{have}, {config.model.name}/{config.model.flavor} needs {shape}"
    return ""


def _tensors(config: Any) -> dict[str, Shape]:
    """Return the shapes of the job's model by their names in Hugging Face files."""
    # not at the top: they import torch's DTensor and torchtitan's models
    import torch

    from titan_grpo.titan.weight_sync import stored_tensors

    spec, args = model_of(config.model.name, config.model.flavor)
    to_hf = spec.state_dict_adapter(args, None).to_hf
    with torch.device("meta"):
        model = spec.model_cls(args)
    theirs = to_hf(dict(stored_tensors([model], to_hf)))
    return {name: tuple(tensor.shape) for name, tensor in theirs.items()}


def _check_prompts(keys: TaskKeys, model_dir: str) -> None:
    """Check the files of reward functions' prompts, without loading the task: the process that
    loads it finds its other mistakes."""
    if not keys.reward:
        return
    files_of(keys)
    if keys.chat_template != TEXT:
        ChatTemplate.of_model(model_dir, keys)
