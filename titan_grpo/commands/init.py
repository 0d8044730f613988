"""``titan-grpo init``: write a job's TOML file from options, without questions."""

import argparse
import shlex
from collections.abc import Iterator, Mapping
from math import gcd
from pathlib import Path
from typing import Any

from titan_grpo.config import JobConfig, older
from titan_grpo.config.rollout import server_url
from titan_grpo.config.task import TEXT, TaskKeys
from titan_grpo.errors import ConfigError, DataError
from titan_grpo.observe.terminal import next_command
from titan_grpo.rollout.codec import ChatTemplate, templates_of
from titan_grpo.rollout.tasks.dataset import open_table
from titan_grpo.rollout.tasks.functions import MESSAGES, TEXTS, said_in
from titan_grpo.titan.jobfile import quantised, read_config, read_toml, toml, toml_key

ANSWERS = ("answer", "solution", "target", "label")
"""Columns that the first reward function can compare with, in order of preference."""

QUESTIONS = ("question", "problem", "instruction", "input")
"""Columns for the prompt of data with neither "prompt" nor "messages"."""

LONGEST = 2048
"""Tokens of a row, unless the model has fewer positions."""

REWARD = '''"""Rewards of this job. A function gets lists of equal length and returns one number for
each completion. Its further arguments are columns of the data."""


def holds_{column}(completions, {column}):
    """1 where the completion's last line holds the row's {column}, else 0."""
    texts = [said if isinstance(said, str) else said[-1]["content"] for said in completions]
    last = [(text.strip().splitlines() or [""])[-1] for text in texts]
    return [float(str(wanted).strip() in line) for line, wanted in zip(last, {column}, strict=True)]
'''

JOB = """# Made by titan-grpo init. titan-grpo config prints every key of [grpo] and [rollout].
#
#   titan-grpo doctor --job.config_file {out}
#   torchrun --nproc_per_node GPUS -m titan_grpo.train --job.config_file {out}

[job]
custom_config_module = "titan_grpo.config"
# Metrics, checkpoints, report and trained weights.
dump_folder = {dump_folder}

[model]
# torchtitan's names of the model, found by the sizes in its config.json.
name = {name}
flavor = {flavor}
# Weights, tokenizer and chat template, in the Hugging Face layout.
hf_assets_path = {model}

[grpo]
# Training goes on while servers get the new weights.
async_weight_update = true

[rollout]
# vLLM and SGLang servers; docs/first_job.md says how each is started.
servers = {servers}
# Your functions: "module:function", found from the directory that the job is started in.
reward = {reward}
dataset = {data}
{prompt}{template}# Groups of one step, and completions of each.
prompts_per_step = 32
group_size = 8
max_completion_tokens = {completion}
# 1 lets the servers generate while a step is trained; 0 is on-policy and slower, and needs
# async_weight_update = false.
max_staleness = 1

[training]
steps = 200
# A row is a prompt and its completion; a microbatch holds up to local_batch_size x seq_len tokens.
seq_len = {length}
local_batch_size = 4

[parallelism]
# All ranks share one copy of the weights (FSDP).
data_parallel_shard_degree = -1

[activation_checkpoint]
mode = "selective"
selective_ac_option = "op"

[optimizer]
name = "AdamW"
lr = 1e-6
weight_decay = 0.0

[lr_scheduler]
warmup_steps = 5
# Constant after the warm-up.
decay_ratio = 0.0

[metrics]
log_freq = 1
enable_tensorboard = true

[checkpoint]
enable = true
interval = 50
keep_latest_k = 3
# Training begins with the weights in model.hf_assets_path.
initial_load_in_hf = true
"""


def _parser() -> argparse.ArgumentParser:
    out = argparse.ArgumentParser(
        prog="titan-grpo init",
        description="Write the commented TOML file of a job: of a model, a data file and servers,"
        " or of a job of the older trainer.",
    )
    add = out.add_argument
    add("--model", default="", metavar="DIR", help="the model's directory (Hugging Face layout)")
    add("--data", default="", metavar="FILE", help="rows: .jsonl, .json, .parquet or .csv")
    add("--servers", default="", metavar="URL,URL", help="the servers' addresses")
    add("--reward", default="", metavar="MODULE:FUNCTION", help="else one is written, for a start")
    add("--flavor", default="", metavar="NAME/FLAVOR", help="torchtitan's model; else by its sizes")
    add("--from", dest="older", default="", metavar="OLD.toml", help="a job of the older trainer")
    add("--out", default="train.toml", metavar="FILE", help="file to write (default train.toml)")
    return out


def run(argv: list[str], env: Mapping[str, str]) -> int:
    """Write the files and print the next command. Raises ConfigError for mistakes in the input."""
    args = _parser().parse_args(argv)
    out = Path(args.out)
    new_only = [n for n in ("model", "data", "servers", "reward", "flavor") if getattr(args, n)]
    if args.older and new_only:
        raise ConfigError(
            f"--from converts a job as it is and would not read --{new_only[0]}: leave one out"
        )
    files = {out: converted(args.older) if args.older else ""}
    if not args.older:
        files |= new(args, out)
    for path in files:
        if path.exists():
            remedy = "name another (--out)" if path == out else "name its function (--reward)"
            raise ConfigError(f"init writes no file that exists, {path} does: {remedy}")
    out.parent.mkdir(parents=True, exist_ok=True)
    for path, text in files.items():
        path.write_text(text, encoding="utf-8")
        print(f"wrote {path}")
    print(next_command("doctor", "--job.config_file", str(out)))
    return 0


def new(args: argparse.Namespace, out: Path) -> dict[Path, str]:
    """Return the files of a new job: its TOML, and a reward function if none is named."""
    for name in ("model", "data", "servers"):
        if not getattr(args, name):
            raise ConfigError(f"init needs --{name} (or --from OLD.toml); see --help")
    settings = read_config(Path(args.model) / "config.json")
    if not settings:
        raise ConfigError(
            f"--model must be a directory with the model's config.json, got {args.model!r}"
        )
    if quantised(settings):
        raise ConfigError(
            f"--model must have unquantised weights, by config.json those in {args.model!r} are"
            " quantised, and servers could not take trained ones in their place: take the"
            " unquantised model"
        )
    if args.reward and not all(args.reward.partition(":")):
        raise ConfigError(f"--reward must be MODULE:FUNCTION, got {args.reward!r}")
    table = _table(args.data)
    columns = table.column_names
    files: dict[Path, str] = {}
    if not args.reward:
        column = _first(ANSWERS, columns)
        if not column:
            raise ConfigError(
                f"init writes a first reward function for a column of {', '.join(ANSWERS)};"
                f" {args.data!r} has {', '.join(columns)}: name yours, --reward MODULE:FUNCTION"
            )
        # In the directory where the job is started: the rollout process imports modules from there.
        rewards = Path("rewards.py")
        if out.resolve() == rewards.resolve():
            raise ConfigError(
                f"{out} is both --out and the reward function that init writes, so one would be"
                " lost: name another file for the job (--out), or your function (--reward)"
            )
        files[rewards] = REWARD.format(column=column)
        args.reward = f"rewards:holds_{column}"
    name, flavor = _flavor(args.flavor, settings)
    positions = settings.get("max_position_embeddings", LONGEST)
    if not isinstance(positions, int) or positions < 2:
        raise ConfigError(
            f"max_position_embeddings in --model's config.json must be a whole number, 2 or more,"
            f" got {positions!r}"
        )
    length = min(LONGEST, positions)
    text = JOB.format(
        out=shlex.quote(str(out)),
        dump_folder=toml(f"outputs/{out.stem}"),
        name=toml(name),
        flavor=toml(flavor),
        model=toml(args.model),
        servers=toml([server_url(url) for url in args.servers.split(",")]),
        reward=toml([args.reward]),
        data=toml(args.data),
        prompt=_prompt(columns, args.data),
        template=_template(args.model, next(iter(table), {})),
        completion=length // 2,
        length=length,
    )
    return {out: text} | files


def _table(data: str) -> Any:
    try:
        return open_table(TaskKeys(dataset=data))
    except (ConfigError, DataError) as error:
        # by the option that was given
        raise type(error)(str(error).replace("rollout.dataset", "--data")) from error


def _first(names: tuple[str, ...], columns: list[str]) -> str:
    return next((name for name in names if name in columns), "")


def _flavor(named: str, settings: Mapping[str, Any]) -> tuple[str, str]:
    """Return torchtitan's name and flavor: as named, or found by the model's sizes. Raises
    ConfigError for a model that a start would refuse."""
    # Imported here: torchtitan takes seconds, and --help does not need it.
    from titan_grpo.titan import compat
    from titan_grpo.titan.flavors import flavor_of, model_of, other_model
    from titan_grpo.titan.rules import ASSETS

    if not named:
        named = "/".join(flavor_of(settings))
    name, slash, flavor = named.partition("/")
    if not slash:
        raise ConfigError(f"--flavor must be NAME/FLAVOR of torchtitan, got {named!r}")
    compat.prepare()
    try:
        _, model_args = model_of(name, flavor)
    except ConfigError as error:
        raise ConfigError(f"--flavor must be torchtitan's, got {named!r}: {error}") from error
    if found := other_model(ASSETS, flavor, model_args, settings):
        raise ConfigError(f"--model cannot be trained as {named}: {found}")
    return name, flavor


def _prompt(columns: list[str], data: str) -> str:
    if {MESSAGES, TEXTS} & set(columns):
        return ""  # used as they are
    column = _first(QUESTIONS, columns)
    if not column:
        raise ConfigError(
            f"the data must have a column that a prompt is made of (messages, prompt,"
            f" {', '.join(QUESTIONS)}); {data!r} has {', '.join(columns)}: rename one"
        )
    return f'# The user\'s message, of columns in braces.\nprompt = "{{{column}}}"\n'


def _template(model: str, row: Mapping[str, Any]) -> str:
    if templates_of(Path(model)):
        ChatTemplate.of_model(model, TaskKeys())  # refuses one that is no template
        return ""
    name, said = said_in(row) if {MESSAGES, TEXTS} & set(row) else ("", "")
    if not isinstance(said, str):
        raise ConfigError(
            f"--model must have a chat template for the messages in --data's column {name!r},"
            f" {model!r} has none: write it to {Path(model) / 'chat_template.jinja'}, or name data"
            " whose prompts are texts"
        )
    return f'# The model has no chat template: it gets plain text.\nchat_template = "{TEXT}"\n'


def converted(path: str) -> str:
    """Return an older trainer's job as TOML text for this one. Raises ConfigError if unreadable,
    or no such job."""
    head = (
        f"# {path}, converted by titan-grpo init --from.",
        "# Keys that changed their names, meanings and defaults: docs/from_the_older_trainer.md.",
    )
    table = read_toml(path, "--from")
    ours = [name for name in vars(JobConfig()) if name in table and name != "grpo"]
    if ours:
        raise ConfigError(
            f"--from must be a job of the older trainer, {path} has {', '.join(ours)} of this one:"
            " its keys would be there twice; it needs no conversion"
        )
    return "\n".join([*head, *_sections(table)]) + "\n"


def _sections(table: Mapping[str, Any]) -> Iterator[str]:
    for section in ("job", "grpo", "peft", "training"):
        if not isinstance(keys := table.get(section, {}), dict):
            raise ConfigError(f"{section} must be a table, got {keys!r:.200}")
    found = older.convert(table.get("grpo", {})) + older.convert_peft(table.get("peft", {}))
    # In TOML all that is of no section comes first; an array of tables may be one value.
    for name, value in table.items():
        if not isinstance(value, dict):
            yield f"{toml_key(name)} = {toml(value)}"
    for section, keys in table.items():
        if section in ("grpo", "peft") or not isinstance(keys, dict):
            continue
        yield f"\n[{toml_key(section)}]"
        for name, value in keys.items():
            if (section, name) != ("job", "custom_config_module"):
                yield f"{toml_key(name)} = {toml(value)}"
        if section == "job":
            yield 'custom_config_module = "titan_grpo.config"'
    adapted = any(each.key.startswith("lora.") for each in found)
    for section in ("lora", "grpo", "rollout") if adapted else ("grpo", "rollout"):
        yield f"\n[{section}]"
        for each in found:
            of, _, name = each.key.partition(".")
            if of != section:
                continue
            if each.note:
                yield f"# {each.note}"
            missing = f"# {name}: has no value here"
            yield missing if each.value is None else f"{name} = {toml(each.value)}"
    yield from _source(table.get("training", {}), {each.key for each in found})


def _source(training: Mapping[str, Any], have: set[str]) -> Iterator[str]:
    """Yield the rest of [rollout]: batches still come from the Atropos API."""
    yield "# Batches of the Atropos API, as before; its address and its environments' group size."
    yield 'source = "atropos"\natropos_url = "http://localhost:8000"'
    batch = training.get("global_batch_size", 0)
    if not isinstance(batch, int):
        raise ConfigError(f"training.global_batch_size must be a whole number, got {batch!r:.200}")
    group = gcd(8, batch) if batch > 0 else 8
    group = group if group > 1 else 8
    yield f"group_size = {group}"
    if batch > 0 and batch % group == 0:
        yield f"prompts_per_step = {batch // group}"
    else:
        yield "# prompts_per_step * group_size are the sequences of a batch.\nprompts_per_step = 8"
    if "rollout.servers" not in have and "rollout.servers_slurm" not in have:
        yield 'servers = ["http://localhost:9000"]'
