"""The last patches between versions (layout.delta), which receivers take instead of versions.

The sealer makes one per version, from the version that was complete before, before lanes may pin
the new one. The old one's slot may be written anew meanwhile: then the patch is wrong, and a
receiver sees that by the digests and reads the blocks themselves. So nothing waits for a patch, and
none is ever trusted.
"""

import threading
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from titan_grpo.config import WeightSync
from titan_grpo.layout import delta

SHARE = 1 / 4
"""Of an image, which all patches that are kept may have."""

ENCODE_RATE = 1 << 30
"""Bytes of an image per second that one thread makes a patch of (scripts/bench_delta.py)."""

WORTH = 4.0
"""How much longer than making a patch the slowest server's whole version must take."""


@dataclass(frozen=True, slots=True)
class Made:
    """What makes version ``version`` of version ``base``."""

    base: int
    version: int
    data: bytes


class Patches:
    """Those of one trainer host, which has the whole image. ``make`` is for one thread."""

    def __init__(
        self, config: WeightSync, total_bytes: int, spared: Callable[[int], object]
    ) -> None:
        """``spared`` is called with the bytes that a server did not read."""
        self._mode, self._total, self._spared = config.delta, total_bytes, spared
        self._kept: tuple[Made, ...] = ()
        self._lock = threading.Lock()
        self._whole_s: dict[str, float] = {}

    def sent(self, url: str, read_bytes: int, seconds: float) -> None:
        """A server has a version, by so many bytes in so long. Any thread."""
        if read_bytes < self._total:
            self._spared(self._total - read_bytes)
            return
        with self._lock:
            self._whole_s[url] = seconds

    def wanted(self) -> bool:
        """Whether a patch is worth its making now."""
        with self._lock:
            slowest = max(self._whole_s.values(), default=0.0)
        worth = slowest > WORTH * self._total / ENCODE_RATE
        return self._mode == "on" or (self._mode == "auto" and worth)

    def make(self, base: int, old: memoryview, version: int, new: memoryview) -> tuple[Made, ...]:
        """Patches up to ``version``, oldest first, without a gap; none where it is not worth it.
        ``old`` and ``new``: the images of both (uint8)."""
        room = int(SHARE * self._total)
        data = None
        if self.wanted():
            data = delta.encode(np.frombuffer(old, np.uint8), np.frombuffer(new, np.uint8), room)
        chain: list[Made] = []
        if data is not None:
            for made in (Made(base, version, data), *reversed(self._kept)):
                room -= len(made.data)
                if room < 0 or (chain and chain[0].base != made.version):
                    break
                chain.insert(0, made)
        self._kept = tuple(chain)
        return self._kept
