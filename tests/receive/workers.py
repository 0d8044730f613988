"""Workers of one engine as threads of one process, for tests of what several workers do in step."""

import threading
from collections.abc import Callable
from typing import Any

from titan_grpo.receive.commit import Workers


class Team:
    """The exchanges of ``size`` workers. A worker that leaves one out ends the others' wait with
    BrokenBarrierError."""

    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size, timeout=120.0)
        self.values: list[Any] = [None] * size
        self.members = [Member(self, rank) for rank in range(size)]


def everywhere(size: int, call: Callable[[int], Any]) -> list[Any]:
    """What each worker's call, by its rank and on a thread of its own, returns or raises."""
    ends: list[Any] = [None] * size

    def work(rank: int) -> None:
        try:
            ends[rank] = call(rank)
        except BaseException as error:  # noqa: BLE001 - the test compares it with a report
            ends[rank] = error

    threads = [threading.Thread(target=work, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(150.0)
    return ends


class Member(Workers):
    """One worker of a team; see commit.Workers."""

    def __init__(self, team: Team, rank: int) -> None:
        super().__init__()
        self._team, self.rank, self.size = team, rank, len(team.values)

    def gather(self, value: str) -> list[str]:
        self._team.values[self.rank] = value
        self._team.barrier.wait()
        values = list(self._team.values)
        self._team.barrier.wait()
        return values

    def share(self, value: Any) -> Any:
        return self.gather(value)[0]
