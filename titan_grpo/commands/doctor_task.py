"""The doctor's findings about a run's task: its code, its dataset and the model's chat template."""

from collections.abc import Generator, Iterator
from dataclasses import replace

from titan_grpo.commands.doctor_host import Finding, ok, problem, warning
from titan_grpo.config import Evaluation
from titan_grpo.errors import ConfigError, DataError
from titan_grpo.rollout.codec import TextCodec
from titan_grpo.rollout.evaluation import Job
from titan_grpo.rollout.messages import RolloutSpec
from titan_grpo.rollout.task_runner import AnyTask, TaskFailed, TaskRunner
from titan_grpo.rollout.tasks.agent import AgentRows, load_parser
from titan_grpo.rollout.tasks.dataset import Rows, open_rows
from titan_grpo.rollout.tasks.functions import (
    FunctionTask,
    Reward,
    load_function,
    task_of,
)

_Found = Generator[Finding, None, AnyTask | None]
"""Yields findings; returns the task, or None if it cannot be made."""

SHOWN = 100
"""Characters of the first prompt in its finding."""


def findings(spec: RolloutSpec) -> Iterator[Finding]:
    """Load what the rollout process would load, and make the first prompt."""
    if spec.agent:
        yield from _agent(spec)
    else:
        task = yield from (_functions(spec) if spec.reward else _class(spec))
        if task is not None:
            yield _prompt(spec, task)
    if spec.accept:
        yield _filter(spec.accept)


def of_evaluation(table: Evaluation, spec: RolloutSpec) -> Iterator[Finding]:
    """Yield the same findings for an [[evaluation]] table of a run with ``spec``."""
    for found in findings(Job.of(table, spec).spec):
        named = found.text.startswith(table.section)
        yield replace(found, text=found.text if named else f"{table.section}: {found.text}")


def _class(spec: RolloutSpec) -> _Found:
    try:
        task = task_of(spec)
    except (ConfigError, DataError) as error:
        yield problem("task", str(error), f"correct {spec.section}.task, or what it names")
        return None
    except TaskFailed as failed:
        yield problem("task", str(failed), "correct that class")
        return None
    yield ok("task", spec.task)
    return task


def _functions(spec: RolloutSpec) -> _Found:
    rewards = []
    for path in spec.reward:
        try:
            rewards.append(Reward.load(path, section=spec.section))
        except ConfigError as error:
            yield problem("reward", str(error), f"correct that module, or {spec.section}.reward")
        else:
            yield ok("reward", path)
    try:
        rows = open_rows(spec)
        # Pass the functions that did load: they may ask for missing columns.
        task = FunctionTask(spec, rewards, rows)
        rows.require_texts()
    except (ConfigError, DataError) as error:
        yield problem("dataset", str(error), "correct the dataset, or the key that asks for it")
        return None
    columns = ", ".join(rows.columns)
    yield ok("dataset", f"{spec.dataset}: {len(rows)} rows with {columns}")
    if spec.prompt and "{" not in spec.prompt:
        yield warning(
            "dataset",
            f"{spec.section}.prompt {spec.prompt!r} names no column: each row has the same prompt",
            f"put the columns' names in braces, such as {{{rows.columns[0]}}}",
        )
    for reward in rewards:
        yield from _nulls(reward, rows)
    return task


def _nulls(reward: Reward, rows: Rows) -> Iterator[Finding]:
    for column in reward.columns():
        if absent := rows.nulls(column):
            yield warning(
                "dataset",
                f"{len(absent)} of {len(rows)} rows have no value (null) in {column!r}, the first"
                f" is row {absent[0]} (from 0): {reward.section}.reward {reward.path!r} gets None",
                f"fill it, leave such rows out with {reward.section}.dataset_filter ="
                f" ['{column} != null'], or let the function expect None",
            )


def _agent(spec: RolloutSpec) -> Iterator[Finding]:
    try:
        task = AgentRows.load(spec)
        load_parser(spec.tool_parser)
    except (ConfigError, DataError) as error:
        yield problem("agent", str(error), "correct that module, or the key that names it")
        return
    yield ok("agent", f"{spec.agent}, with {str(task.row(0))[:SHOWN]}")
    try:
        text = TextCodec(spec.model_dir, spec).render([{"role": "user", "content": "hello"}])
    except (ConfigError, DataError) as error:
        yield problem("chat template", str(error), "set rollout.chat_template")
    else:
        yield ok("chat template", f"{text[:SHOWN]!r}")


def _filter(path: str) -> Finding:
    try:
        load_function("rollout.accept", path)
    except ConfigError as error:
        return problem("filter", str(error), "correct that module, or rollout.accept")
    return ok("filter", path)


def _prompt(spec: RolloutSpec, task: AnyTask) -> Finding:
    """Make the first prompt, which uses the tokenizer and the chat template."""
    try:
        codec = TextCodec(spec.model_dir, spec)
        prompt = TaskRunner(task, codec, spec).prompt(0)
    except ConfigError as error:
        return problem("first prompt", str(error), "correct the model's directory")
    except TaskFailed as failed:
        template = isinstance(failed.error, ConfigError)
        text = str(failed.error) if template else str(failed)
        remedy = (
            f"set {spec.section}.chat_template" if template else "correct the task, or its data"
        )
        return problem("chat template" if template else "first prompt", text, remedy)
    if not prompt.token_ids:
        return warning(
            "first prompt",
            "the first row and the chat template make a prompt without a token",
            "leave empty rows out, or correct the task or the chat template; the run skips them",
        )
    text = codec.spell(prompt.token_ids)
    more = "..." if text[SHOWN:] else ""
    shown = f"{len(prompt.token_ids)} tokens: {text[:SHOWN]!r}{more}"
    if spec.room(prompt.token_ids) < 1:
        return warning(
            "first prompt",
            f"training.seq_len = {spec.row_tokens} leaves no room for a completion after {shown}",
            "raise training.seq_len, or leave long prompts out; the run skips them",
        )
    return ok("first prompt", shown)
