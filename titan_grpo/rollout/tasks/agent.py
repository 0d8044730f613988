"""A task whose completions an agent makes, by calls of a chat endpoint: ``rollout.agent``
(docs/agents.md)."""

from collections.abc import Callable
from typing import Any

from titan_grpo.config.task import OUTSIDE
from titan_grpo.errors import ConfigError
from titan_grpo.rollout.spec import RolloutSpec
from titan_grpo.rollout.tasks.base import Codec
from titan_grpo.rollout.tasks.dataset import Rows
from titan_grpo.rollout.tasks.functions import FunctionOptions, load_function, open_rows
from titan_grpo.rollout.tool_calls import PARSERS, ToolParser
from titan_grpo.samples import Prompt


class AgentRows:
    """Rows for agents. What a group is asked, and so its prompt, is the agent's to say."""

    def __init__(
        self, function: Callable[..., Any] | None, rows: Rows | None, seed: int = 0
    ) -> None:
        """``function``: ``agent(base_url, api_key, row) -> reward``; None: agents are outside."""
        self.function, self._rows, self._seed = function, rows, seed

    @classmethod
    def load(cls, spec: RolloutSpec) -> "AgentRows":
        """Import the function and open the dataset. Raises ConfigError or DataError."""
        outside = spec.agent == OUTSIDE
        function = None if outside else load_function("rollout.agent", spec.agent)
        rows = open_rows(FunctionOptions.of(spec)) if spec.dataset else None
        return cls(function, rows, spec.seed)

    def prompt(self, index: int, codec: Codec) -> Prompt:
        """No tokens; the payload is the row's number in the dataset."""
        return Prompt(index, (), {} if self._rows is None else {"row": self._rows.number(index)})

    def row(self, index: int) -> dict[str, Any]:
        """What the agents of a group get: a row of the dataset, or index and seed without one."""
        if self._rows is None:
            return {"index": index, "seed": self._seed}
        return self._rows[self._rows.number(index)]


def load_parser(name: str) -> ToolParser:
    """The parser of a value of ``rollout.tool_parser``. Raises ConfigError."""
    if name in PARSERS:
        return PARSERS[name]
    if ":" not in name:
        raise ConfigError(
            f'rollout.tool_parser must be one of {", ".join(PARSERS)} or "package.module:function",'
            f" got {name!r}"
        )
    return load_function("rollout.tool_parser", name)
