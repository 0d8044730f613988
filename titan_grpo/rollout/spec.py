"""What the rollout process gets at its start, and the cursor that makes a resumed run continue with
exactly the right prompts."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from titan_grpo.config import Rollout
from titan_grpo.config.rollout import WorkerKeys
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


@dataclass(kw_only=True)
class RolloutSpec(WorkerKeys):
    """Everything the rollout process needs to know. Small, and without secrets (keys are named, not
    held). Not changed once it is made.

    ``base_version`` is the trainer's version at the start or at the resume; ``state`` what
    ``RolloutClient.state`` returned when the checkpoint was written (empty: from the first prompt).
    """

    model_dir: str
    base_version: int = 0
    state: dict[str, Any] = field(default_factory=dict)
    kv_recomputed: bool = False
    """Servers throw the KV of running requests away at each commit
    (``weight_sync.kv_after_update``)."""
    router_replay: bool = False
    """Completions come with the experts of each token (``grpo.router_replay``)."""
    commit_deadline_s: float = 60.0
    """Of each engine call (EngineCall), in seconds."""
    load_deadline_s: float = 60.0
    """Of the load, which may wait for a transfer, in seconds."""
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
        values = {f.name: getattr(rollout, f.name) for f in fields(WorkerKeys)}
        return cls(
            model_dir=model_dir, base_version=base_version, state=dict(state or {}), **values
        )
