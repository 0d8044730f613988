"""The keys of [rollout] that define prompts and rewards (docs/tasks.md), and [[evaluation]] tables,
which have them too and add their own (docs/evaluation.md).

No ``from __future__ import annotations`` in this file: torchtitan's merge reads field types as
objects.
"""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

Rule = tuple[bool, str, str]
"""(whether it is broken, key, what the key must be and why)."""

Rules = Iterator[Rule]


def broken(section: str, values: Any, rules: Iterable[Rule]) -> list[str]:
    """Return the broken rules, each as "section.key must be rule, got value". With an empty
    ``section``, ``values`` is an object with sections and the keys are dotted."""
    prefix = f"{section}." if section else ""
    return [
        f"{prefix}{key} must be {rule}, got {attrgetter(key)(values)!r:.200}"
        for is_broken, key, rule in rules
        if is_broken
    ]


TEXT = "none"
"""Value of ``rollout.chat_template`` for prompts as plain text; all others are files."""

ROLLOUT = "rollout"
"""Section of these keys outside [[evaluation]] tables."""

OUTSIDE = "outside"
"""Value of ``rollout.agent`` for agents that take episodes over HTTP; all others are functions."""


ENGINE = "engine"
"""Value of ``rollout.tool_parser`` for the parser of the server that sampled the answer."""


@dataclass
class TaskKeys:
    """Prompts and rewards: reward functions with a dataset, or a task class."""

    reward: list[str] = field(default_factory=list)
    """Reward functions, each "package.module:function", called once per group with lists: prompts,
    completions, completion_ids and the dataset's columns by name. Each returns a list of numbers,
    None where it does not apply. Replaces rollout.task."""

    reward_weights: list[float] = field(default_factory=list)
    """Weight of each function in the sum that is the reward. Empty: 1 each."""

    dataset: str = ""
    """Rows for the reward functions: files (.jsonl, .json, .parquet, .csv; patterns such as
    data/*.parquet are allowed), a directory, or a name on the Hugging Face Hub."""

    dataset_config: str = ""
    """Configuration of a Hub dataset that has several, such as "main"."""

    dataset_split: str = "train"
    """Split of the dataset; "train[:1000]" takes its first 1000 rows. Files are one split,
    "train"."""

    dataset_filter: list[str] = field(default_factory=list)
    """Conditions "COLUMN OPERATOR VALUE", such as 'level >= 3' or 'subject in ["algebra",
    "geometry"]'; rows that fail one are left out. Operators: == != < <= > >= in, not in. Values are
    JSON. A null passes == null and != only."""

    dataset_shuffle: bool = True
    """true: each epoch has its own order, determined by rollout.seed and the epoch's number; a
    resumed run continues with the next row. false: the dataset's order."""

    prompt: str = ""
    """The user's message, with columns in braces: "Question: {question}". Empty: the column
    "messages" or "prompt", which holds a text or a list of messages."""

    system_prompt: str = ""
    """System message for prompts that have none."""

    tools: str = ""
    """JSON file with a list of tool schemas for the chat template. A row's column "tools" takes
    precedence. (To run tools, write a task of several turns.)"""

    chat_template: str = ""
    """Template that turns messages into a prompt's text. Empty: the model's own; a path: a Jinja
    file; "none": texts are used as they are (a base model)."""

    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    """Variables for the chat template, such as { enable_thinking = false }."""

    agent: str = ""
    """Agent "package.module:function", called as agent(base_url, api_key, row) for each completion:
    it uses base_url as OpenAI's API and returns its reward. "outside": agents in other processes
    take episodes from agent_address and post their rewards. Rows come from rollout.dataset.
    Replaces rollout.task and rollout.reward."""

    agent_address: str = "127.0.0.1:0"
    """host:port of the endpoint for agents. Port 0: any free port (see the log)."""

    agent_key_env: str = ""
    """Environment variable with the key that outside agents must send to take episodes. Empty (on a
    loopback address only): no key."""

    tool_parser: str = "hermes"
    """Format of the model's tool calls: "hermes" (also Qwen), "llama3_json",
    "package.module:function", or "engine" for the parser that the servers were started with
    (docs/agents.md)."""

    task: str = "digits"
    """A built-in task (digits, gsm8k, calculator) or a dotted path "package.module:Class" to your
    own."""

    task_path: str = ""
    """Data file of the task (gsm8k: a JSONL file with "question" and "answer")."""

    task_concurrency: int = 64
    """Largest number of calls of the task's functions in flight; further calls wait. Of an agent's
    function: of episodes that servers serve at once. No bound on agents outside."""

    task_timeout_s: float = 600.0
    """Deadline of one such call, in seconds. A plain function is ended at its next line of Python,
    an agent's at its next request; one that waits in C code runs on, and its result is dropped. A
    call that blocks the event loop or holds the interpreter is ended with the rollout process,
    after 120 s or this if that is more, and the process is started again. An agent's clock stands
    still while no server serves its group."""

    task_error_budget: int = 0
    """How many of any 100 groups in a row may be lost to the task's own exceptions and timeouts
    (dropped as task_error and made again). One more stops the run with its traceback. Errors of
    servers do not count."""

    max_turns: int = 8
    """For a task of several turns: largest number of the model's turns in one completion."""

    accept: str = ""
    """Filter "package.module:function", called with each finished, rewarded group
    (titan_grpo.samples.Group): returns whether to train on it. Replaces the task's should_accept. A
    dropped group (counted: dropped/not_accepted) is not made again; the next prompt takes its
    place."""

    min_completion_tokens: int = 0
    """Drop groups with a completion of fewer sampled tokens, like the filter does (counted:
    dropped/too_short). 0: none."""

    @property
    def section(self) -> str:
        """Prefix of these keys' names in messages."""
        return ROLLOUT


OF_DATASET = ("dataset_config", "dataset_split")
"""Keys that say which part of rollout.dataset is meant: those of one dataset suit no other."""


def task_rules(r: TaskKeys) -> Rules:
    """Yield the rules of these keys. Pure."""
    for name in ("task_concurrency", "max_turns", "task_timeout_s"):
        yield getattr(r, name) <= 0, name, "greater than 0"
    yield not 0 <= r.task_error_budget <= 100, "task_error_budget", "0 to 100"
    yield r.min_completion_tokens < 0, "min_completion_tokens", "0 (off) or greater"
    rule = 'empty or "package.module:function"'
    yield bool(r.accept) and not all(r.accept.partition(":")), "accept", rule
    yield r.task == "gsm8k" and not r.task_path, "task_path", 'set for task = "gsm8k"'
    if not r.dataset:
        unset, rule = TaskKeys(), "left out without rollout.dataset (nothing else reads it)"
        for name in (*OF_DATASET, "dataset_filter", "dataset_shuffle"):
            yield getattr(r, name) != getattr(unset, name), name, rule
    if r.agent:
        yield from _agent_rules(r)
        return
    if not r.reward:
        for name in ("dataset", "prompt", "system_prompt", "tools", "reward_weights"):
            rule = "empty without rollout.reward (a task of a class makes its own prompts)"
            yield bool(getattr(r, name)), name, rule
        return
    yield not r.dataset, "dataset", "set with rollout.reward (prompts are its rows)"
    yield r.task != "digits", "task", "left out with rollout.reward, which takes its place"
    count = len(r.reward)
    rule = f"empty or one weight for each of the {count} functions of rollout.reward"
    yield len(r.reward_weights) not in (0, count), "reward_weights", rule
    if r.chat_template == TEXT:
        for name in ("system_prompt", "tools", "chat_template_kwargs"):
            rule = 'empty with rollout.chat_template = "none" (a plain text has no place for it)'
            yield bool(getattr(r, name)), name, rule


def _agent_rules(r: TaskKeys) -> Rules:
    rule = f'"package.module:function", or "{OUTSIDE}"'
    yield r.agent != OUTSIDE and not all(r.agent.partition(":")), "agent", rule
    for name in ("reward", "reward_weights", "prompt", "system_prompt", "tools"):
        yield bool(getattr(r, name)), name, "empty with rollout.agent (agents say what is asked)"
    yield r.task != "digits", "task", "left out with rollout.agent, which takes its place"
    rule = "a template with rollout.agent (calls are chats)"
    yield r.chat_template == TEXT, "chat_template", rule


LEAST_TEMPERATURE = 0.01
"""vLLM samples at this one where a request names a smaller one, other than 0."""

GREATEST_TEMPERATURE = 2.0
"""vLLM refuses a request with a greater one; SGLang takes any."""

EVALUATION_MARGIN_S = 30.0
"""Seconds that an evaluation's process may take beyond its own deadline."""


@dataclass
class Evaluation(TaskKeys):
    """One evaluation. [rollout]'s keys of the task, which are its last ones, from reward on, are
    keys here too and default to its values; a table with its own reward or task takes no dataset,
    task or prompt from there, and one with another dataset no dataset_config and dataset_split.
    agent is refused here; accept, min_completion_tokens and task_error_budget have no effect."""

    name: str = ""
    """Its metrics are evaluation/NAME/...; allowed: letters, digits, - and _."""

    every: int = 0
    """Evaluate the first version that a server holds at or after each multiple of this many
    versions. 0: only at the start and at the end."""

    at_start: bool = True
    """Evaluate the version that training starts or resumes from."""

    at_end: bool = True
    """Evaluate the last version."""

    servers: list[str] = field(default_factory=list)
    """Base URLs of the evaluation's own servers, which get every version and no rollouts. Empty:
    the servers of [rollout]. The one that evaluates keeps its version and the others go on; with a
    single server, training waits for new rollouts meanwhile."""

    rows: int = 0
    """Number of prompts, from the start of the sequence. 0: each row of the dataset once."""

    samples: int = 1
    """Completions per prompt."""

    temperature: float = 1.0
    """Sampling temperature; 0 is greedy."""

    max_completion_tokens: int = 0
    """Longest completion. 0: rollout.max_completion_tokens."""

    pass_at: list[int] = field(default_factory=lambda: [1])
    """Values of k for pass@k; none larger than samples."""

    pass_reward: float = 1.0
    """Least reward of a completion that passes."""

    concurrent_requests: int = 32
    """Largest number of the evaluation's requests in flight, besides those of rollouts."""

    timeout_s: float = 1800.0
    """Deadline of an evaluation, in seconds. It is cancelled then and its server released."""

    @property
    def whole_s(self) -> float:
        """Return the longest time of one evaluation and of the end of its process, in seconds."""
        return self.timeout_s + EVALUATION_MARGIN_S

    @property
    def section(self) -> str:
        """``evaluation 'NAME'``."""
        return f"evaluation {self.name!r}"


def evaluation_rules(e: Evaluation) -> Rules:
    """Yield the rules of one table, except those of its task's keys. Pure."""
    named = re.fullmatch(r"[A-Za-z0-9_-]+", e.name)
    yield named is None, "name", "letters, digits, - and _ (its metrics are evaluation/NAME/...)"
    yield e.every < 0, "every", "0 (only at the start and at the end) or greater"
    rule = "greater than 0 without at_start and at_end (it would never run)"
    yield not (e.every or e.at_start or e.at_end), "every", rule
    yield e.rows < 0, "rows", "0 (each row of the dataset once) or greater"
    rule = "empty: an evaluation calls no agent, it needs a reward and a dataset, or a task"
    yield bool(e.agent), "agent", rule
    rule = "greater than 0 with a task of a class, whose prompts have no end"
    yield not (e.rows or e.reward or e.agent), "rows", rule
    yield e.samples < 1, "samples", "1 or more"
    rule = f"0 or at least {LEAST_TEMPERATURE} (vLLM would sample at that instead)"
    yield e.temperature != 0 and e.temperature < LEAST_TEMPERATURE, "temperature", rule
    yield e.max_completion_tokens < 0, "max_completion_tokens", "0 (rollout's) or greater"
    rule = f"numbers from 1 to samples ({e.samples}): pass@k needs k completions of a prompt"
    yield not all(1 <= k <= e.samples for k in e.pass_at), "pass_at", rule
    yield e.concurrent_requests < 1, "concurrent_requests", "1 or more"
    yield e.timeout_s <= 0, "timeout_s", "greater than 0"


TASK_CHOICE = {"reward", "reward_weights", "task", "task_path", "prompt", "system_prompt", "tools"}
TASK_CHOICE |= {"agent", "dataset", *OF_DATASET, "dataset_filter", "dataset_shuffle"}
"""Keys that belong to one task: a table with its own reward or task inherits none of them from
[rollout]."""

UNUSED = ("accept", "min_completion_tokens", "task_error_budget")


def inherited(table: dict[str, Any], rollout: TaskKeys) -> dict[str, Any]:
    """Return ``table`` with the task's keys that it leaves out taken from ``rollout``. Pure.

    Example: ``{"name": "test", "dataset": "test.jsonl"}`` gets the rewards of [rollout].
    """
    left_out = {*UNUSED}
    if {"reward", "task"} & table.keys():
        left_out |= TASK_CHOICE
    if table.get("dataset", rollout.dataset) != rollout.dataset:
        left_out |= {*OF_DATASET}
    taken = {
        name: getattr(rollout, name)
        for name in TaskKeys.__dataclass_fields__
        if name not in left_out
    }
    return taken | table
