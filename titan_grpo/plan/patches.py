"""Patches of a simulation (weight_sync.delta), made by the rules of sync.patches."""

from titan_grpo.plan.setup import Setup


class Patches:
    """Chain of patches. Each leads from the previous complete version to the newest one; a version
    without a patch makes all earlier ones useless."""

    def __init__(self, setup: Setup) -> None:
        self._s = setup
        self._whole_s: dict[int, float] = {}
        self._complete: int | None = None
        self._from: int | None = None

    def sent_whole(self, server: int, seconds: float) -> None:
        """Record how long a server took to read a whole version."""
        self._whole_s[server] = seconds

    def make(self) -> float:
        """Make a patch to the version just copied, if wanted. Return the seconds it takes."""
        slowest_s = max(self._whole_s.values(), default=0.0)
        if self._complete is None or not self._s.patches_wanted(slowest_s):
            self._from = None
            return 0.0
        if self._from is None:
            self._from = self._complete
        return self._s.encode_s

    def completed(self, version: int) -> None:
        """Record that servers may read ``version``."""
        self._complete = version

    def bytes_to(self, version: int, held: int | None) -> int:
        """Return the patch bytes for a server with ``held``; 0: it reads the whole version."""
        if self._from is None or held is None or held < self._from:
            return 0
        return self._s.patch_bytes(version - held)
