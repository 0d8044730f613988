"""What a lane asks of a server, in the order in which it asks. One small seam; one implementation
per engine."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from titan_grpo.engines.sglang_stock import Announced, Group

NOT_RECOMPUTED = (
    'older weights would go on in it, so nothing is committed; weight_sync.kv_after_update = "keep"'
    " allows that"
)
"""What a refusal of ``drop_kv`` ends with."""


class StockRoutes(Protocol):
    """These routes of one server, for one thread beside the lane's control. Every method raises
    PeerError by its deadline."""

    def workers(self, timeout_s: float) -> int:
        """Tensor-parallel workers."""

    def parameter_names(self, timeout_s: float) -> frozenset[str]:
        """See the function."""

    def init_group(self, group: "Group", timeout_s: float) -> None:
        """See the function."""

    def destroy_group(self, name: str, timeout_s: float) -> None:
        """See the function."""

    def begin(self, timeout_s: float) -> None:
        """Open an update; one that was left open is ended first."""

    def update(self, group: str, announced: "Announced", timeout_s: float) -> None:
        """See the function."""

    def close(self) -> None:
        """Close the connections. Idempotent."""


class ServerControl(Protocol):
    """Control plane of one server, used by one lane thread. Every method raises PeerError by its
    own deadline.

    A commit is ``pause, load, finish, resume`` and then ``label`` as the read-back; with
    ``weight_sync.kv_after_update = "recompute"`` it has ``drop_kv`` after ``pause``.
    """

    url: str

    @property
    def engine(self) -> str:
        """Which engine answers there: the name of its dialect, empty as long as nobody has
        asked."""

    def label(self) -> str:
        """The label of the weights that the server serves now, as the server says it."""

    def stock(self) -> StockRoutes | None:
        """The engine's own update routes if our plugin is not there and streaming over them is
        possible; None otherwise."""

    def greet(self, hello: Mapping[str, Any]) -> None:
        """Tell the server's receiver where its lane is; returns at once, the receiver joins in the
        background."""

    def paused(self) -> bool:
        """Whether generation is frozen, by us or by anybody."""

    def pause(self) -> None:
        """Freeze generation; running requests keep their state and go on after ``resume``."""

    def drop_kv(self) -> None:
        """On a paused server: throw away the KV of running requests and of prefixes, to be computed
        anew with the weights that come. No token is lost. ServerRefused where the engine does not
        say that it did."""

    def load(self, info: Mapping[str, Any]) -> None:
        """Load the version ``info`` names, staged or on its way. The answer proves nothing: the
        receiver's Applied does."""

    def finish(self, label: str) -> None:
        """Close the update and set the label."""

    def relabel(self, label: str) -> None:
        """Set the label outside of an update: what a server found after somebody's death has to
        show."""

    def resume(self) -> None:
        """Go on generating."""

    def close(self) -> None:
        """Close the connections."""
