"""What the rollout process gets at its start, and the cursor that makes a resumed run continue with
exactly the right prompts."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from titan_grpo.config import Rollout
from titan_grpo.errors import DataError


class Cursor:
    """Set of used prompt indices, as a low-water mark (all below are used) and the used ones above
    it.

    Worked example: after 0, 1, 3 were used, low is 2 and above is {3}; a resumed run begins with 2,
    4, 5, ...
    """

    def __init__(self, low: int = 0, above: tuple[int, ...] = ()) -> None:
        self.low = low
        self._above = set(above)

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> "Cursor":
        """Inverse of ``state``; an empty mapping is the start. Raises DataError on anything
        else."""
        low, above = state.get("low", 0), state.get("above", [])
        ints = isinstance(above, list) and all(isinstance(i, int) for i in [low, *above])
        if not ints or low < 0 or any(i < low for i in above):
            raise DataError(
                "rollout state must be low and above with every index of above >= low, got"
                f" {dict(state)!r:.200}"
            )
        return cls(low, tuple(above))

    def state(self) -> dict[str, Any]:
        """JSON-able: ``{"low": int, "above": sorted list}``."""
        return {"low": self.low, "above": sorted(self._above)}

    def use(self, index: int) -> None:
        """Mark an index as used. Raises DataError if it was: a prompt must not be trained on
        twice."""
        if index < self.low or index in self._above:
            raise DataError(f"prompt {index} was used before: a group came twice")
        self._above.add(index)
        while self.low in self._above:
            self._above.remove(self.low)
            self.low += 1

    def unused(self) -> Iterator[int]:
        """The unused indices as of now, in order, without end. Later ``use`` calls do not change
        it."""
        index, above = self.low, frozenset(self._above)
        while True:
            if index not in above:
                yield index
            index += 1


@dataclass(frozen=True, slots=True)
class RolloutSpec:
    """Everything the rollout process needs to know. Small, and without secrets (keys are named, not
    held).

    ``base_version`` is the trainer's version at the start or at the resume; ``state`` what
    ``RolloutClient.state`` returned when the checkpoint was written (empty: from the first prompt).
    """

    model_dir: str
    base_version: int = 0
    state: dict[str, Any] = field(default_factory=dict)
    reward: list[str] = field(default_factory=list)
    reward_weights: list[float] = field(default_factory=list)
    dataset: str = ""
    dataset_config: str = ""
    dataset_split: str = "train"
    dataset_filter: list[str] = field(default_factory=list)
    dataset_shuffle: bool = True
    prompt: str = ""
    system_prompt: str = ""
    tools: str = ""
    chat_template: str = ""
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    agent: str = ""
    agent_address: str = "127.0.0.1:0"
    agent_key_env: str = ""
    tool_parser: str = "hermes"
    task: str = "digits"
    task_path: str = ""
    task_concurrency: int = 64
    task_timeout_s: float = 600.0
    task_error_budget: int = 0
    max_turns: int = 8
    accept: str = ""
    min_completion_tokens: int = 0
    seed: int = 0
    prompts_per_step: int = 8
    group_size: int = 8
    max_completion_tokens: int = 256
    temperature: float = 1.0
    stop: list[str] = field(default_factory=list)
    stop_token_ids: list[int] = field(default_factory=list)
    max_staleness: int = 1
    max_stale_token_share: float = 0.0
    in_flight_weight_updates: bool = True
    consume: str = "started"
    kv_recomputed: bool = False
    """Servers throw the KV of running requests away at each commit
    (``weight_sync.kv_after_update``)."""
    router_replay: bool = False
    """Completions come with the experts of each token (``grpo.router_replay``)."""
    max_concurrent_requests: int = 64
    request_timeout_s: float = 300.0
    stream_completions: bool = True
    api_key_env: str = ""
    admin_key_env: str = ""
    engine: str = "auto"
    commit_deadline_s: float = 60.0
    """Of each engine call (EngineCall), in seconds."""
    load_deadline_s: float = 60.0
    """Of the load, which may wait for a transfer, in seconds."""
    source: str = "task"
    atropos_url: str = ""
    push_address: str = ""
    push_key_env: str = ""
    places: int = 0
    """Groups used since ``base_version``, less those that made no version; those that are
    ``waiting`` have places behind them."""
    waiting: dict[int, int] = field(default_factory=dict)
    """Prompt index -> completions of the finished groups that the trainer has not used yet."""
    registration: dict[str, Any] = field(default_factory=dict)
    """For an Atropos API: fields of ``atropos.Registration``, without batch_size."""

    def unused_prompts(self) -> Iterator[int]:
        """Indices of the prompts without a group, in order, without end. Raises DataError for a bad
        ``state``."""
        cursor = Cursor.from_state(self.state.get("cursor", {}))
        for index in self.waiting:
            cursor.use(index)
        return cursor.unused()

    @classmethod
    def from_config(
        cls,
        rollout: Rollout,
        model_dir: str,
        base_version: int = 0,
        state: dict[str, Any] | None = None,
    ) -> "RolloutSpec":
        """The spec of a validated ``[rollout]`` section; ``model_dir`` holds tokenizer.json."""
        shared = {f.name for f in fields(cls)} & {f.name for f in fields(rollout)}
        values = {name: getattr(rollout, name) for name in shared}
        return cls(
            model_dir=model_dir, base_version=base_version, state=dict(state or {}), **values
        )
