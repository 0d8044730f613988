"""The keys of [[evaluation]] tables (docs/evaluation.md).

No ``from __future__ import annotations`` in this file: torchtitan's merge reads field types as
objects.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from titan_grpo.config.task import TaskKeys


@dataclass
class Evaluation(TaskKeys):
    """One evaluation. The keys of a task (reward, dataset, prompt, ...) are as in [rollout], and
    those that a table leaves out are [rollout]'s; a table with a reward or a task of its own takes
    no dataset, task or prompt from there. accept, min_completion_tokens and task_error_budget do
    nothing here."""

    name: str = ""
    """Its metrics are evaluation/NAME/...; letters, digits, - and _."""

    every: int = 0
    """Evaluate the first version that a server holds at or past each multiple of this many; 0: only
    at the start and at the end."""

    at_start: bool = True
    """Evaluate the version that training begins, or goes on, from."""

    at_end: bool = True
    """Evaluate the last version."""

    servers: list[str] = field(default_factory=list)
    """Base URLs of servers of its own, which get every version and no rollouts. Empty: those of
    [rollout]; the one that evaluates is held on its version, the others go on. Where there is one
    server only, training then waits for new rollouts."""

    rows: int = 0
    """Prompts, from the first of the sequence; 0: each row of the dataset once."""

    samples: int = 1
    """Completions per prompt."""

    temperature: float = 1.0
    """Sampling temperature; 0 takes the likeliest token."""

    max_completion_tokens: int = 0
    """Longest completion; 0: rollout.max_completion_tokens."""

    pass_at: list[int] = field(default_factory=lambda: [1])
    """The k of each pass@k; none greater than samples."""

    pass_reward: float = 1.0
    """A completion passes with at least this reward."""

    concurrent_requests: int = 32
    """Requests of the evaluation in flight, beside those of rollouts."""

    timeout_s: float = 1800.0
    """An evaluation that takes longer is given up, and its server goes on, in seconds."""


def evaluation_rules(e: Evaluation) -> Iterator[tuple[bool, str, str]]:
    """(broken, key, what it must be and why) of one table, but for its task's keys. Pure."""
    named = re.fullmatch(r"[A-Za-z0-9_-]+", e.name)
    yield named is None, "name", "letters, digits, - and _ (its metrics are evaluation/NAME/...)"
    yield e.every < 0, "every", "0 (only at the start and at the end) or greater"
    yield (
        not (e.every or e.at_start or e.at_end),
        "every",
        "greater than 0 without at_start and at_end (it would never run)",
    )
    yield e.rows < 0, "rows", "0 (each row of the dataset once) or greater"
    yield (
        not (e.rows or e.reward),
        "rows",
        "greater than 0 with a task of a class, whose prompts have no end",
    )
    yield e.samples < 1, "samples", "1 or more"
    yield not 0 <= e.temperature < float("inf"), "temperature", "0 or greater, and finite"
    yield e.max_completion_tokens < 0, "max_completion_tokens", "0 (rollout's) or greater"
    yield (
        not all(1 <= k <= e.samples for k in e.pass_at),
        "pass_at",
        f"numbers from 1 to samples ({e.samples}): pass@k needs k completions of a prompt",
    )
    yield e.concurrent_requests < 1, "concurrent_requests", "1 or more"
    yield not 0 < e.timeout_s < float("inf"), "timeout_s", "greater than 0, and finite"


TASK_CHOICE: tuple[str, ...] = (
    "reward",
    "reward_weights",
    "task",
    "task_path",
    "dataset",
    "dataset_config",
)
TASK_CHOICE += ("dataset_split", "dataset_filter", "prompt", "system_prompt", "tools")
"""Keys that belong to one task: a table that names a reward or a task takes none of them from
[rollout]."""

UNUSED = ("accept", "min_completion_tokens", "task_error_budget")


def inherited(table: dict[str, Any], rollout: TaskKeys) -> dict[str, Any]:
    """A table with the task's keys that it leaves out taken from ``rollout``. Pure.

    Example: ``{"name": "test", "dataset": "test.jsonl"}`` has the rewards of [rollout].
    """
    own = {"reward", "task"} & table.keys()
    taken = {
        name: getattr(rollout, name)
        for name in TaskKeys.__dataclass_fields__
        if name not in UNUSED and not (own and name in TASK_CHOICE)
    }
    return taken | table
