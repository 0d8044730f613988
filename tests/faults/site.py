"""The two servers of a fault run, each behind a proxy: the one that is struck, and the one that
must not notice."""

import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path

import torch

from tests.faults.instances import Instance, Launch
from tests.rigs.content import digests
from tests.rigs.proxy import Proxy

Say = Callable[[str], None]


class Seat:
    """One address of the trainer's, with whatever answers there now."""

    def __init__(self, name: str, launch: Launch, folder: Path) -> None:
        self.name, self._launch, self._folder = name, launch, folder
        self._number = 0
        self.instance = self._new()
        self.proxy = Proxy(self.instance.address)
        self.retired: list[Instance] = []

    @property
    def url(self) -> str:
        """Where the trainer finds it."""
        return self.proxy.url

    def restart(self) -> float:
        """End what is left of the server, start another one with the weights of the beginning;
        seconds until it answers."""
        self.instance.close()
        self.retired.append(self.instance)
        self.instance = self._new()
        seconds = self.instance.wait_healthy()
        self.proxy.aim(self.instance.address)
        return seconds

    def swap(self, other: Instance) -> Instance:
        """Have another server answer at this address; the one that did before."""
        before, self.instance = self.instance, other
        self.proxy.aim(other.address)
        return before

    def close(self) -> None:
        """End proxy and server."""
        self.proxy.close()
        self.instance.close()

    def _new(self) -> Instance:
        self._number += 1
        return Instance(
            f"{self.name}{self._number}", self._launch, self._folder / f"{self.name}{self._number}"
        )


class Runs:
    """What every version of every run is made of. ``base``: the model's float32 tensors."""

    def __init__(self, base: Mapping[str, torch.Tensor]) -> None:
        self.base = base
        self._salts: dict[str, int] = {}
        self._known: dict[tuple[str, int], dict[str, str]] = {}

    def register(self, run_id: str, salt: int) -> None:
        """A run has begun."""
        self._salts[run_id] = salt

    def salt(self, run_id: str) -> int | None:
        """What tells its weights from other runs'; None for an unknown run."""
        return self._salts.get(run_id)

    def expected(self, run_id: str, version: int) -> Mapping[str, str] | None:
        """Digest of every tensor of that version; None for an unknown run."""
        salt = self._salts.get(run_id)
        if salt is None:
            return None
        key = run_id, version
        if key not in self._known:
            self._known[key] = digests(self.base, version, salt)
        return self._known[key]


class Site:
    """Both seats. A context manager: no server outlives it."""

    def __init__(
        self,
        launch: Launch,
        folder: Path,
        base: Mapping[str, torch.Tensor],
        launch_victim: Launch | None = None,
    ) -> None:
        """``launch_victim``: how the struck server is started, if not as the other one."""
        self.runs = Runs(base)
        with ExitStack() as stack:
            self.victim = Seat("victim", launch_victim or launch, folder)
            stack.callback(self.victim.close)
            self.witness = Seat("witness", launch, folder)
            stack.callback(self.witness.close)
            self._stack = stack.pop_all()

    @property
    def seats(self) -> tuple[Seat, Seat]:
        """Victim and witness."""
        return self.victim, self.witness

    def wait_healthy(self, say: Say) -> None:
        """Until both answer."""
        began = time.monotonic()
        for seat in self.seats:
            seat.instance.wait_healthy()
            say(f"{seat.name} is healthy after {time.monotonic() - began:.0f} s")

    def __enter__(self) -> "Site":
        return self

    def __exit__(self, *exc: object) -> None:
        self._stack.close()
