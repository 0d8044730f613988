"""A leader's handle of its host's sync process (host_main), where that is not rank 0's host: blocks
are hashed and ranges served there, out of the training rank's interpreter.

::

    ranks of the host --copied--> its sync process: hash, serve --hashed--> rank 0's: lanes

Killed, the process is started again with the versions that it has not announced. A version whose
ranges it served fails for its readers; the next one works.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

from titan_grpo.config import WeightSync
from titan_grpo.errors import SyncError
from titan_grpo.layout.image import ImageAddress
from titan_grpo.sync.child import Child, launch
from titan_grpo.sync.part import LOOPBACK, Hashing, ImagePool
from titan_grpo.sync.publisher import Announcer
from titan_grpo.sync.snapshot import Copy


@dataclass(frozen=True, slots=True)
class HostBegin:
    """What the process starts with."""

    run_id: str
    manifest: str
    """Manifest.to_json()."""
    part: int
    images: tuple[ImageAddress, ...]
    store_port: int
    ranks: tuple[int, ...]
    """Of the host, that write."""
    algorithm: str
    key: str = field(repr=False)
    """Hashing.key as digits; empty without a run key."""
    address: str
    """Of this host, where servers read."""
    rank0: tuple[str, int]
    """Host and port of rank 0's ImagePool.hashed."""
    config: WeightSync


class HostSync(Child):
    """Announces this rank's copies, and has the host's part hashed and served. ``take_error`` and
    ``close`` as an Announcer."""

    launch = staticmethod(partial(launch, module="titan_grpo.sync.host_main"))
    NAME = "host's sync process"

    def __init__(
        self,
        pool: ImagePool,
        ranks: Sequence[int],
        hashing: Hashing,
        address: str,
        rank0: tuple[str, int],
        config: WeightSync,
    ) -> None:
        """``ranks``: those that write, this one first. The rest: see HostBegin."""
        super().__init__(config)
        self._handed = HostBegin(
            run_id=pool.run_id,
            manifest=pool.manifest.to_json(),
            part=pool.part,
            images=tuple(image.address for image in pool.images),
            store_port=pool.store.port,
            ranks=tuple(ranks),
            algorithm=hashing.algorithm,
            key=hashing.key.hex() if hashing.key is not None else "",
            address=address,
            rank0=rank0,
            config=config,
        )
        self._jobs: dict[int, int] = {}
        """Version that was not announced yet -> slot."""
        self._error: SyncError | None = None
        self._announcer = Announcer(ranks[0], LOOPBACK, pool.store.port, config.connect_deadline_s)
        self._begun = True
        self._run(self.launch(config))

    def __call__(self, version: int, slot: int, copy: Copy) -> None:
        """This rank copies its share of ``version`` into ``slot``. Never waits."""
        with self.lock:
            # what the slot had is gone
            self._jobs = {v: s for v, s in self._jobs.items() if s != slot} | {version: slot}
            self.post("publish", version, slot)
        self._announcer(version, slot, copy)

    def take_error(self) -> SyncError | None:
        """The first error since the last call."""
        error, self._error = self._error, None
        return self._announcer.take_error() or error

    def close(self, timeout_s: float) -> None:
        """End the process: it serves no more."""
        self._end(timeout_s)
        self._announcer.close(timeout_s)

    def _begin(self) -> None:
        self._pipe.post("begin", self._handed)
        for version, slot in self._jobs.items():
            self._pipe.post("publish", version, slot)

    def _ended(self, text: str) -> None:
        self.failed(f"part {self._handed.part}: {text}; the versions that it served are lost")

    # What the process posts, one after the other.

    def announced(self, version: int) -> None:
        """Rank 0 knows of the part of ``version``, or that it failed."""
        with self.lock:
            self._jobs.pop(version, None)

    def failed(self, text: str) -> None:
        """For the next ``take_error``."""
        self._error = self._error or SyncError(text)
