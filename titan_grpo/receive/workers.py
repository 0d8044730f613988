"""The processes that hold one model together, as the engine's side of a commit sees them."""

from typing import Any, Protocol


class Workers(Protocol):
    """The processes that hold one model together. All make the same calls in the same order."""

    rank: int
    size: int

    def share(self, value: Any) -> Any:
        """Rank 0's value, on every rank."""
        ...

    def gather(self, value: str) -> list[str]:
        """Every rank's value, on every rank."""
        ...


class OneWorker:
    """A model in one process."""

    rank = 0
    size = 1

    def share(self, value: Any) -> Any:
        """See Workers."""
        return value

    def gather(self, value: str) -> list[str]:
        """See Workers."""
        return [value]
