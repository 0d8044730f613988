"""Task of reward functions and a dataset: ``rollout.reward`` and ``rollout.dataset``
(docs/tasks.md). The functions have the signature of TRL's GRPOTrainer:
https://huggingface.co/docs/trl/grpo_trainer#using-a-custom-reward-function"""

import asyncio
import importlib
import inspect
import json
import math
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from string import Formatter
from typing import Any

from titan_grpo.config.rollout import WorkerKeys
from titan_grpo.config.task import ROLLOUT
from titan_grpo.errors import NOT_JSON, ConfigError, DataError, TitanGrpoError
from titan_grpo.rollout.codec import TextCodec, check_messages
from titan_grpo.rollout.messages import RolloutSpec
from titan_grpo.rollout.task_runner import (
    AnyTask,
    Codec,
    Filter,
    TaskFailed,
    TaskOptions,
    as_reward,
    at_once,
    call,
    in_order,
    stops_of,
    unfinished,
)
from titan_grpo.rollout.tasks.dataset import Rows, open_rows
from titan_grpo.rollout.threads import Threads
from titan_grpo.samples import Prompt

BUILT_IN = {
    "calculator": "titan_grpo.rollout.tasks.built_in:Calculator",
    "digits": "titan_grpo.rollout.tasks.built_in:Digits",
    "gsm8k": "titan_grpo.rollout.tasks.built_in:gsm8k",
}

GIVEN = ("prompts", "completions", "completion_ids")
"""Arguments of a reward function besides the dataset's columns, which they override by name."""

REWARDING = ("reward", "group_reward", "episode_reward")
"""Methods of a task that reward completions; a task has one of them."""

MESSAGES, TEXTS = "messages", "prompt"
"""Columns of the prompt without ``rollout.prompt``. Either may hold texts or lists of messages."""

RENDERED = (MESSAGES, TEXTS, "tools")
"""Columns that a template renders as they are."""


@dataclass(frozen=True, slots=True)
class Reward:
    """A reward function with its weight."""

    path: str
    function: Callable[..., Any]
    weight: float = 1.0
    section: str = ROLLOUT
    """Config section of the key that names it, for error messages."""

    @classmethod
    def load(cls, path: str, weight: float = 1.0, section: str = ROLLOUT) -> "Reward":
        """Import a function. Raises ConfigError as ``load_function``."""
        return cls(path, load_function(f"{section}.reward", path), weight, section)

    def check(self, rows: Rows) -> None:
        """Raise ConfigError if the function requires an argument that is no column, or one that
        cannot be passed by name, or if its parameters are unknown."""
        for name, parameter in self._parameters().items():
            if parameter.kind is parameter.POSITIONAL_ONLY:
                raise ConfigError(
                    f"{self.section}.reward {self.path!r} must take its arguments by name, got"
                    f" {name!r} before a / in its parameters: take the / away"
                )
        for name in self.columns():
            rows.require(name, f"{self.section}.reward {self.path!r} asks for {name!r}")

    def columns(self) -> list[str]:
        """Return the columns without which the function cannot be called."""
        return [
            name
            for name, parameter in self._parameters().items()
            if parameter.default is parameter.empty
            and parameter.kind not in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL)
            and name not in GIVEN
        ]

    def wanted(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """Return the arguments that the function takes: all, if it has ``**kwargs``."""
        parameters = self._parameters()
        if any(p.kind == p.VAR_KEYWORD for p in parameters.values()):
            return arguments
        return {name: value for name, value in arguments.items() if name in parameters}

    def _parameters(self) -> dict[str, inspect.Parameter]:
        try:
            return dict(inspect.signature(self.function).parameters)
        except ValueError as error:  # some functions in C
            raise ConfigError(
                f"{self.section}.reward {self.path!r} must be a function whose parameters Python"
                f" knows: {error}; name one of yours that calls it"
            ) from error


class FunctionTask:
    """Task whose prompts are rows of a dataset in the model's chat template. A completion's reward
    is the weighted sum of the functions' rewards."""

    def __init__(self, keys: WorkerKeys, rewards: Sequence[Reward], rows: Rows) -> None:
        """Raises ConfigError for missing columns, DataError for null in a prompt's column."""
        for reward in rewards:
            reward.check(rows)
        self._columns(keys, rows)
        self._keys, self._rewards, self.rows = keys, rewards, rows
        self._tools = _tools(keys)
        self._threads = Threads(keys.task_concurrency * max(1, len(rewards)))

    @classmethod
    def load(cls, keys: WorkerKeys) -> "FunctionTask":
        """Import the functions and open the dataset. Raises ConfigError or DataError."""
        # Functions first: most mistakes are there, and opening a dataset takes seconds.
        weights = keys.reward_weights or [1.0] * len(keys.reward)
        rewards = [
            Reward.load(path, weight, keys.section)
            for path, weight in zip(keys.reward, weights, strict=True)
        ]
        return cls(keys, rewards, open_rows(keys))

    def prompt(self, index: int, codec: Codec) -> Prompt:
        """Return the prompt of row ``index``: every row once per epoch, shuffled by (seed, epoch)
        unless ``dataset_shuffle`` is false. The payload is the row's number in the dataset."""
        number, system_prompt = self.rows.number(index), self._keys.system_prompt
        row = self.rows[number]
        row |= {name: without_nulls(row[name]) for name in RENDERED if name in row}
        try:
            said = self._said(row)
            if system_prompt:
                said = with_system(said, system_prompt)
            token_ids = codec.chat(said, self._tools_of(row))
        except DataError as error:
            raise DataError(f"row {number} of {self.rows.name}: {error}") from error
        return Prompt(index, token_ids, {"row": number})

    async def group_reward(
        self, prompt: Prompt, texts: Sequence[str], token_ids: Sequence[Sequence[int]]
    ) -> list[float]:
        """Run the functions concurrently, plain ones in threads, and return the weighted sums.
        Raises their error, with a note that names function and row; DataError for answers that are
        no rewards."""
        number = int(prompt.payload["row"])
        found = await at_once(
            [self._score(reward, number, texts, token_ids) for reward in self._rewards]
        )
        weights = [reward.weight for reward in self._rewards]
        totals = [weighted_sum(each, weights) for each in zip(*found, strict=True)]
        if None in totals:
            text = texts[totals.index(None)]
            error = DataError(
                "every reward function returned None, so the completion has no reward: return a"
                f" number from one of them for {text!r:.200}"
            )
            error.add_note(self._shown(number))
            raise error
        return [total for total in totals if total is not None]

    async def _score(
        self, reward: Reward, number: int, texts: Sequence[str], token_ids: Sequence[Sequence[int]]
    ) -> list[float | None]:
        # Read the row for each function: none sees another one's changes to it.
        row = self.rows[number]
        said, count = self._said(row), len(texts)
        completions: list[Any] = list(texts)
        if isinstance(said, list):
            completions = [[{"role": "assistant", "content": text}] for text in texts]
        arguments = {column: [value] * count for column, value in row.items()} | {
            "prompts": [said] * count,
            "completions": completions,
            "completion_ids": [list(ids) for ids in token_ids],
        }
        try:
            answer = await call(self._threads, reward.function, **reward.wanted(arguments))
            return read_rewards(answer, count)
        except (Exception, asyncio.CancelledError) as error:
            note = f"{reward.section}.reward {reward.path!r}, {self._shown(number)}"
            if isinstance(error, asyncio.CancelledError):
                unfinished(note)
            else:
                error.add_note(note)
            raise

    def _shown(self, number: int) -> str:
        row = repr(self.rows[number])
        return f"row {number} of {self.rows.name}: {row[:500]}{'...' if row[500:] else ''}"

    def _said(self, row: dict[str, Any]) -> Any:
        """Return the row's prompt: a text, or a list of messages. Raises DataError otherwise."""
        if self._keys.prompt:
            try:
                return _Filled().vformat(self._keys.prompt, (), row)
            except (ValueError, TypeError, AttributeError, LookupError) as error:
                raise DataError(
                    f"{self._keys.section}.prompt {self._keys.prompt!r} does not fit: {error}"
                ) from error
        name, value = said_in(row)
        if isinstance(value, str):
            return value
        if fault := check_messages(value):
            raise DataError(
                f"column {name!r} must have texts, or messages that a model can answer; one"
                f" {fault}, got {value!r:.200}"
            )
        return value

    def _tools_of(self, row: dict[str, Any]) -> Any:
        tools = row.get("tools") or self._tools
        try:
            return json.loads(tools) if isinstance(tools, str) else tools
        except NOT_JSON as error:
            raise DataError(f"column 'tools' must be JSON, got {tools!r:.100}: {error}") from error

    @staticmethod
    def _columns(keys: WorkerKeys, rows: Rows) -> None:
        prompt, key = keys.prompt, f"{keys.section}.prompt"
        if not prompt:
            if MESSAGES not in rows.columns:
                rows.require(TEXTS, f"without {key} a run asks for {TEXTS!r} or {MESSAGES!r}")
            name = MESSAGES if MESSAGES in rows.columns else TEXTS
            rows.require_values(name, f"a prompt is made of {name!r}")
            return
        try:
            names = [name for _, name, _, _ in Formatter().parse(prompt) if name is not None]
        except ValueError as error:
            raise ConfigError(
                f"{key} must be a text with columns in braces ({{{{ and }}}} are braces), got"
                f" {prompt!r}: {error}"
            ) from error
        for name in names:
            column = name.partition(".")[0].partition("[")[0]
            hint = "" if column.isidentifier() else " ({{ and }} are braces)"
            rows.require_values(column, f"{key}{hint} asks for {column!r}")


def said_in(row: Mapping[str, Any]) -> tuple[str, Any]:
    """Return the column of a row's prompt without ``rollout.prompt``, and its value: a text, or
    what should be messages. Of JSON in a text, as in a CSV file, return the messages."""
    name = MESSAGES if MESSAGES in row else TEXTS
    value = row[name]
    if name == MESSAGES and isinstance(value, str):
        with suppress(*NOT_JSON):
            found = json.loads(value)
            return name, value if check_messages(found) else found
    return name, value


class _Filled(Formatter):
    """``str.format`` with an error for null in place of the text "None"."""

    def get_field(self, field_name: str, args: Any, kwargs: Any) -> Any:
        """See Formatter. Raises ValueError for null."""
        value, first = super().get_field(field_name, args, kwargs)
        if value is None:
            raise ValueError(f"{field_name} has no value (null)")
        return value, first


def without_nulls(value: Any) -> Any:
    """Return a row's value without keys of null: Arrow gives every object of a column all keys that
    any has, and a template would write them. Pure.

    >>> without_nulls([{"a": {"b": None, "c": [None, 1]}}])
    [{'a': {'c': [None, 1]}}]
    """
    if isinstance(value, dict):
        return {key: without_nulls(each) for key, each in value.items() if each is not None}
    return list(map(without_nulls, value)) if isinstance(value, list) else value


def with_system(said: Any, system_prompt: str) -> list[Any]:
    """Return the messages with a system message first: their own, if they have one. Pure."""
    messages = [{"role": "user", "content": said}] if isinstance(said, str) else said
    own = messages[0]["role"] == "system"
    return [*([] if own else [{"role": "system", "content": system_prompt}]), *messages]


def task_of(spec: RolloutSpec) -> AnyTask:
    """Return the run's task: reward functions with a dataset, or a class. Raises ConfigError,
    DataError or TaskFailed."""
    if spec.reward:
        return FunctionTask.load(spec)
    return load_task(spec.task, TaskOptions(spec.seed, spec.task_path), spec.section)


def load_task(name: str, options: TaskOptions, section: str = ROLLOUT) -> AnyTask:
    """Return a built-in task, or an instance of "package.module:Class". Raises ConfigError if it is
    not found, refuses its options, or lacks a method or has a wrong attribute; TaskFailed if its
    constructor fails."""
    path = BUILT_IN.get(name, name)
    if ":" not in path:
        raise ConfigError(
            f'{section}.task must be one of {sorted(BUILT_IN)} or "package.module:Class", got'
            f" {name!r}"
        )
    make = load_function(f"{section}.task", path)
    try:
        task: AnyTask = make(options)
    except TitanGrpoError:
        raise
    except (Exception, SystemExit) as error:  # the boundary to a user's code
        raise TaskFailed(f"{name}(TaskOptions)", error) from error
    if hasattr(task, "turn") != hasattr(task, "episode_reward"):
        raise ConfigError(
            f"{section}.task {name!r} must have both of turn and episode_reward, or neither: it has"
            " one of them"
        )
    if not any(hasattr(task, name) for name in REWARDING):
        raise ConfigError(
            f"{section}.task {name!r} must have one of the methods {', '.join(REWARDING)}, it has"
            " none: its completions would have no rewards; add one, or correct its name"
        )
    if not hasattr(task, "prompt"):
        raise ConfigError(
            f"{section}.task {name!r} must have the method prompt(index, codec), it has none: add"
            " it, or correct its name"
        )
    stops_of(task)
    return task


def load_function(key: str, path: str) -> Callable[..., Any]:
    """Return the function or class "package.module:name" that ``key`` names. Raises ConfigError if
    it is not found, or if its import fails (in one line, with the place)."""
    module_name, _, name = path.partition(":")
    file = "/" in module_name or module_name.endswith(".py") or module_name[:1] == "."
    if not name or not module_name or file:
        raise ConfigError(
            f'{key} must be "package.module:function" (a module\'s name as in import, no path of a'
            f" file), got {path!r}"
        )
    try:
        module = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:  # the boundary to a user's code
        if isinstance(error, ModuleNotFoundError) and error.name == module_name:
            reason = "put its folder on PYTHONPATH, or start in it"
        elif isinstance(error, SyntaxError):
            reason = f"{error.filename}:{error.lineno}"
        else:
            *_, last = traceback.extract_tb(error.__traceback__)
            reason = f"{last.filename}:{last.lineno}"
        raise ConfigError(
            f"{key} {path!r} cannot be imported: {type(error).__name__}: {error} ({reason})"
        ) from error
    function: Callable[..., Any] | None = getattr(module, name, None)
    if not callable(function):
        found = "nothing" if function is None else f"{function!r:.80}"
        raise ConfigError(
            f"{key} {path!r} must be a function, {module.__file__} has {found} by that name"
        )
    return function


def filter_of(spec: RolloutSpec, task: AnyTask) -> Filter | None:
    """Return the filter of finished groups: ``rollout.accept``, else the task's ``should_accept``,
    else None. Raises ConfigError if it cannot be imported."""
    if spec.accept:
        return load_function("rollout.accept", spec.accept)
    return getattr(task, "should_accept", None)


def ready(spec: RolloutSpec) -> tuple[AnyTask, TextCodec]:
    """Return the run's task and the model's tokenizer. Raises as ``task_of``, also if the first row
    makes no prompt: so a missing chat template fails the start, not the first group."""
    task, codec = task_of(spec), TextCodec(spec.model_dir, spec)
    if isinstance(task, FunctionTask):
        task.prompt(0, codec)
    return task, codec


def read_rewards(answer: Any, count: int) -> list[float | None]:
    """Return a function's answer as numbers. Raises DataError unless it is ``count`` finite numbers
    or Nones.

    >>> read_rewards([1, None, True], 3)
    [1.0, None, 1.0]
    """
    try:
        found = [None if each is None else as_reward(each) for each in in_order(answer)]
    except (TypeError, ValueError, OverflowError):
        found = []
    finite = all(each is None or math.isfinite(each) for each in found)
    if len(found) != count or not finite:
        raise DataError(
            f"a reward function must return a list of {count} finite numbers, one for each"
            f" completion (None: it does not apply), got {answer!r:.200}"
        )
    return found


def weighted_sum(rewards: Sequence[float | None], weights: Sequence[float]) -> float | None:
    """Return the sum over the functions that apply to a completion; None if none applies.

    >>> weighted_sum([1.0, None, 0.5], [1.0, 5.0, 2.0])
    2.0
    """
    parts = [
        weight * reward
        for reward, weight in zip(rewards, weights, strict=True)
        if reward is not None
    ]
    return sum(parts) if parts else None


def _tools(keys: WorkerKeys) -> list[Any] | None:
    path, key = keys.tools, f"{keys.section}.tools"
    if not path:
        return None
    try:
        tools = json.loads(Path(path).read_text(encoding="utf-8-sig"))
    except (OSError, *NOT_JSON) as error:
        raise ConfigError(f"{key} must be a JSON file, got {path!r}: {error}") from error
    if not isinstance(tools, list):
        raise ConfigError(f"{key} must hold a list of tool schemas, got {tools!r:.100}")
    return tools
