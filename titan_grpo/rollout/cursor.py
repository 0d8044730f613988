"""Which prompts of the endless sequence are done: what makes a resumed run continue with exactly the right ones."""

from collections.abc import Iterator, Mapping
from typing import Any

from titan_grpo.errors import DataError


class Cursor:
    """Set of used prompt indices, as a low-water mark (all below are used) and the used ones above it.

    Worked example: after 0, 1, 3 were used, low is 2 and above is {3}; a resumed run begins with 2, 4, 5, ...
    """

    def __init__(self, low: int = 0, above: tuple[int, ...] = ()) -> None:
        self.low = low
        self._above = set(above)

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> "Cursor":
        """Inverse of ``state``; an empty mapping is the start. Raises DataError on anything else."""
        low, above = state.get("low", 0), state.get("above", [])
        ints = isinstance(above, list) and all(isinstance(i, int) for i in [low, *above])
        if not ints or low < 0 or any(i < low for i in above):
            raise DataError(f"rollout state must be low and above with every index of above >= low, got {dict(state)!r:.200}")
        return cls(low, tuple(above))

    def state(self) -> dict[str, Any]:
        """JSON-able: ``{"low": int, "above": sorted list}``."""
        return {"low": self.low, "above": sorted(self._above)}

    def use(self, index: int) -> None:
        """Mark an index as used. Raises DataError if it was: a prompt must not be trained on twice."""
        if index < self.low or index in self._above:
            raise DataError(f"prompt {index} was used before: a group came twice")
        self._above.add(index)
        while self.low in self._above:
            self._above.remove(self.low)
            self.low += 1

    def unused(self) -> Iterator[int]:
        """The unused indices as of now, in order, without end. A copy: later ``use`` calls do not change it."""
        low, above = self.low, frozenset(self._above)
        index = low
        while True:
            if index not in above:
                yield index
            index += 1
