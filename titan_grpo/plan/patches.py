"""Which versions of a simulation have patches (weight_sync.delta), as sync.patches makes them."""

from titan_grpo.plan.setup import Setup


class Patches:
    """A patch leads from the version that was complete before to the newest
    one; a gap makes all earlier ones useless."""

    def __init__(self, setup: Setup) -> None:
        self._s = setup
        self._whole_s: dict[int, float] = {}
        self._complete: int | None = None
        self._from: int | None = None

    def sent_whole(self, server: int, seconds: float) -> None:
        """A server has read a whole version in so long."""
        self._whole_s[server] = seconds

    def make(self) -> float:
        """A patch of the version that is copied, or none. Seconds that it takes."""
        slowest_s = max(self._whole_s.values(), default=0.0)
        if self._complete is None or not self._s.patches_wanted(slowest_s):
            self._from = None
            return 0.0
        if self._from is None:
            self._from = self._complete
        return self._s.encode_s

    def completed(self, version: int) -> None:
        """Servers may read it now."""
        self._complete = version

    def bytes_to(self, version: int, held: int | None) -> int:
        """What a server reads that holds an earlier version; 0: the whole version."""
        if self._from is None or held is None or held < self._from:
            return 0
        return self._s.patch_bytes(version - held)
