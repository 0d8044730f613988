"""The processes that hold one model together, as the engine's side of a commit sees them."""

from typing import Any, Protocol

import torch.distributed as dist


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


class GroupWorkers:
    """Those of an engine's own group: vLLM's and SGLang's coordinators have the same names for what is needed of them."""

    def __init__(self, coordinator: Any) -> None:
        self._group = coordinator.cpu_group
        self.rank: int = coordinator.rank_in_group
        self.size: int = coordinator.world_size

    def share(self, value: Any) -> Any:
        """See Workers."""
        box = [value]
        dist.broadcast_object_list(box, group_src=0, group=self._group)
        return box[0]

    def gather(self, value: str) -> list[str]:
        """See Workers."""
        values = [""] * self.size
        dist.all_gather_object(values, value, group=self._group)
        return values


def workers_of(coordinator: Any) -> Workers:
    """The workers of an engine's group coordinator; without collectives where there is only one."""
    return OneWorker() if coordinator.world_size == 1 else GroupWorkers(coordinator)
