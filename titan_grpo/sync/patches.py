"""One trainer host's patches between versions (layout.delta): making, keeping and serving them, and
the decision whether they pay off.

Rank 0's sealer has one ``Patches`` for its host's part, every other host's sync process one for its
own. Rank 0's lanes offer each version with the patches that lead to it.
"""

import logging
import threading
from collections.abc import Callable

import numpy as np
from msgspec.structs import replace
from torch.distributed import TCPStore

from titan_grpo.config import WeightSync
from titan_grpo.layout import delta
from titan_grpo.layout.manifest import Manifest
from titan_grpo.protocol.messages import Patch, RangeSource
from titan_grpo.protocol.patches import SHARE, Place, kept, still_there, worth_making
from titan_grpo.runkey import Key
from titan_grpo.sync.images import ImagePool
from titan_grpo.sync.transports.broadcast import store_errors
from titan_grpo.sync.transports.range_server import RangeServer

logger = logging.getLogger(__name__)

WANTED = "patches"
"""Key in rank 0's store: "1" if patches pay off, as measured by its lanes."""

FADES = 0.9
"""Factor of a patch's size for each version for which it was too large: the larger the patches for
all servers were, the later the next one is tried."""


class Patches:
    """The last patches of a host's part, which receivers read in place of the part. For one thread.

    Each version gets one patch, from the previous complete version, before lanes may pin the new
    one. The old slot may be overwritten meanwhile: then the patch is wrong, a receiver finds wrong
    digests, and reads the blocks themselves. So nothing waits for a patch, and none is trusted.

    Patches that lead to a version are served until its slot is written again (a lane that offers
    them pins it), even if they are no longer kept for the next version.
    """

    def __init__(
        self, pool: ImagePool, server: RangeServer, place: RangeSource, key: Key | None
    ) -> None:
        """``place``: address of ``server``, without a ticket. ``key``: Hashing.range_key."""
        self._pool, self._server, self._place, self._key = pool, server, place, key
        self._part = pool.manifest.parts[pool.part]
        self._room = int(SHARE * self._part.nbytes)
        self._last: Place | None = None
        self._kept: tuple[Patch, ...] = ()
        self._offered: dict[int, tuple[Patch, ...]] = {}
        """Slot -> patches that lead to its version."""
        self._served: set[str] = set()
        """Tickets of the patches that are served."""

    def writing(self, slot: int) -> None:
        """Drop the version in ``slot``, which is overwritten now: it is no base for a patch."""
        self._last = still_there(self._last, slot)
        self._offered.pop(slot, None)
        self._forget()

    def make(self, version: int, slot: int, wanted: bool) -> tuple[Patch, ...]:
        """Make a patch to ``version``, whose part is complete in ``slot``. Return the patches that
        lead to it, oldest first, without a gap; none if it is not ``wanted`` or too large."""
        last, self._last = self._last, (version, slot)
        data = made = None
        if last is not None and wanted:
            images = [self._pool.images[each].buffer for each in (last[1], slot)]
            old, new = (np.frombuffer(image, np.uint8) for image in images)
            try:
                data = delta.encode(old, new, self._part, self._room)
            except MemoryError:  # a version needs no patch
                logger.warning("version %d is sent whole: no memory for a patch", version)
        if last is not None and data is not None:
            ticket = self._server.grant(memoryview(data), None, self._key)
            self._served.add(ticket)
            made = Patch(last[0], version, len(data), replace(self._place, ticket=ticket))
        self._kept = kept(made, self._kept, self._room)
        self._offered[slot] = self._kept
        self._forget()
        return self._kept

    def _forget(self) -> None:
        """Stop serving patches that are neither kept nor offered, which frees their memory."""
        needed = {
            patch.source.ticket
            for chain in (self._kept, *self._offered.values())
            for patch in chain
        }
        for ticket in self._served - needed:
            self._server.revoke(ticket)
        self._served &= needed


class Deliveries:
    """Record of how servers got their versions: decides whether patches pay off. Any thread."""

    def __init__(
        self,
        config: WeightSync,
        manifest: Manifest,
        spared: Callable[[int], object],
        relays: bool = False,
    ) -> None:
        """``spared`` is called with the bytes that a server did not have to read. ``relays``:
        servers read from each other, so the trainer sends a version about once."""
        self._mode, self._total, self._spared = config.delta, manifest.total_bytes, spared
        self._relays, self._share = relays, 0.0
        self._part_bytes = max(part.nbytes for part in manifest.parts)
        self._lock = threading.Lock()
        self._whole_s: dict[str, float] = {}

    def came(self, url: str, read_bytes: int, seconds: float) -> None:
        """Record that a server got a version by reading ``read_bytes`` in ``seconds``."""
        if read_bytes < self._total:
            self._spared(self._total - read_bytes)
            return
        with self._lock:
            self._whole_s[url] = seconds

    def gone(self, url: str) -> None:
        """Forget a server whose lane closed the connection: it will read a whole version first.
        Idempotent."""
        with self._lock:
            self._whole_s.pop(url, None)

    def made(self, share: float) -> None:
        """Record a patch's size, as a share of its part's."""
        self._share = share

    def patches_wanted(self) -> bool:
        """Return whether to make a patch of the next version. Call it once per version."""
        with self._lock:
            slowest_s = max(self._whole_s.values(), default=0.0)
            link_share = self._share * len(self._whole_s) if self._relays else 0.0
        if link_share > 1:
            # Only a patch shows what patches would take now, and none is made of this version.
            self._share *= FADES
        return worth_making(self._mode, slowest_s, self._part_bytes, link_share)


def say_wanted(store: TCPStore, wanted: bool) -> None:
    """Publish to the trainer's other hosts whether to make patches."""
    with store_errors("saying whether patches are made"):
        store.set(WANTED, "1" if wanted else "0")


def is_wanted(store: TCPStore, config: WeightSync) -> bool:
    """Return, on another host, whether to make patches. With "auto" rank 0 decides, as its lanes
    see the servers; its decision may come one version late, at the cost of one patch."""
    if config.delta != "auto":
        return config.delta == "on"
    with store_errors("asking whether patches are made"):
        return bool(store.check([WANTED])) and store.get(WANTED) == b"1"
