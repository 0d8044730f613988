"""One trainer host's patches between versions (layout.delta): made, kept and served to receivers;
and whether they are worth their making.

Rank 0's sealer has one ``Patches`` for its host's part, every other host's sync process one for its
own. What leads to a version is offered with it, by rank 0's lanes.
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
from titan_grpo.protocol.patches import Place, kept, still_there
from titan_grpo.runkey import Key
from titan_grpo.sync.images import ImagePool
from titan_grpo.sync.transports.broadcast import store_errors
from titan_grpo.sync.transports.range_server import RangeServer

logger = logging.getLogger(__name__)

SHARE = 1 / 4
"""Of a part, which the patches may have that are kept for the next version."""

ENCODE_RATE = 1 << 30
"""Bytes of a part per second that one thread makes a patch of (scripts/bench_delta.py)."""

WORTH = 4.0
"""How much longer than making a patch the slowest server's whole version must take."""

WANTED = "patches"
"""Key in rank 0's store: "1" where patches are worth it, by what its lanes have seen."""


class Patches:
    """The last patches of a host's part, which receivers read in place of it. For one thread.

    One is made per version, from the version that was whole before, before lanes may pin the new
    one. The old one's slot may be written anew meanwhile: then the patch is wrong, and a receiver
    sees that by the digests and reads the blocks themselves. So nothing waits for a patch, and none
    is ever trusted.

    Those that lead to a version are served until its slot is written again: a lane that offers them
    pins it. So a server may take longer for them than they are kept for the next version.
    """

    def __init__(
        self, pool: ImagePool, server: RangeServer, place: RangeSource, key: Key | None
    ) -> None:
        """``place``: where ``server`` is read, without a ticket. ``key``: EpochKeys.ranges."""
        self._pool, self._server, self._place, self._key = pool, server, place, key
        self._part = pool.manifest.parts[pool.part]
        self._room = int(SHARE * self._part.nbytes)
        self._last: Place | None = None
        self._kept: tuple[Patch, ...] = ()
        self._offered: dict[int, tuple[Patch, ...]] = {}
        """With the version in each slot."""
        self._served: set[str] = set()
        """Tickets."""

    def writing(self, slot: int) -> None:
        """A version is written into ``slot``, which no lane pins: what lay there is no base."""
        self._last = still_there(self._last, slot)
        self._offered.pop(slot, None)
        self._forget()

    def make(self, version: int, slot: int, wanted: bool) -> tuple[Patch, ...]:
        """The host's part of ``version`` is whole in ``slot``: the patches that lead to it, oldest
        first, without a gap. None where they are not ``wanted``, or too large."""
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
        """Serve those no more that are neither kept nor offered: their memory is free then."""
        needed = {
            patch.source.ticket
            for chain in (self._kept, *self._offered.values())
            for patch in chain
        }
        for ticket in self._served - needed:
            self._server.revoke(ticket)
        self._served &= needed


class Deliveries:
    """How servers got their versions, by what the lanes report: whether patches are worth their
    making. Any thread."""

    def __init__(
        self,
        config: WeightSync,
        manifest: Manifest,
        spared: Callable[[int], object],
        relays: bool = False,
    ) -> None:
        """``spared`` is called with the bytes that a server did not read. ``relays``: servers read
        from each other, so that the trainer sends a version about once."""
        self._mode, self._total, self._spared = config.delta, manifest.total_bytes, spared
        self._relays, self._share = relays, 0.0
        # the hosts make theirs at the same time
        self._make_s = max(part.nbytes for part in manifest.parts) / ENCODE_RATE
        self._lock = threading.Lock()
        self._whole_s: dict[str, float] = {}

    def came(self, url: str, read_bytes: int, seconds: float) -> None:
        """A server has a version, by so many bytes in so long."""
        if read_bytes < self._total:
            self._spared(self._total - read_bytes)
            return
        with self._lock:
            self._whole_s[url] = seconds

    def gone(self, url: str) -> None:
        """Its lane has closed the connection: the next version is read whole. Idempotent."""
        with self._lock:
            self._whole_s.pop(url, None)

    def made(self, share: float) -> None:
        """A patch has so much of its part."""
        self._share = share

    def patches_wanted(self) -> bool:
        """Whether a patch is worth its making now: for the slowest server, and for the trainer's
        links, which carry one to each server, but with relays a version once."""
        with self._lock:
            slowest_s = max(self._whole_s.values(), default=0.0)
            all_patches = self._share * len(self._whole_s)
        worth = slowest_s > WORTH * self._make_s and not (self._relays and all_patches > 1)
        return self._mode == "on" or (self._mode == "auto" and worth)


def say_wanted(store: TCPStore, wanted: bool) -> None:
    """Let the trainer's other hosts know whether patches are worth it."""
    with store_errors("saying whether patches are made"):
        store.set(WANTED, "1" if wanted else "0")


def is_wanted(store: TCPStore, config: WeightSync) -> bool:
    """On another host: whether patches are made. With "auto" it is rank 0's to say, whose lanes
    see the servers; late by a version at most, which costs one patch made or not made."""
    if config.delta != "auto":
        return config.delta == "on"
    with store_errors("asking whether patches are made"):
        return bool(store.check([WANTED])) and store.get(WANTED) == b"1"
