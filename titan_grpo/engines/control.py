"""Control plane of one server: the interface that a lane calls, one implementation per engine.

Arguments and results are plain data, encoded by their type hints where calls are made elsewhere
(rollout.engine_calls): a further method is one here and one in each engine."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

NOT_RECOMPUTED = (
    'older weights would go on in it, so nothing is committed; weight_sync.kv_after_update = "keep"'
    " allows that"
)
"""End of a refusal of ``drop_kv``."""

F = TypeVar("F", bound=Callable[..., Any])


def requests(count: int) -> Callable[[F], F]:
    """Mark a method that makes up to ``count`` requests of its server, each with a deadline; others
    make one."""

    def mark(method: F) -> F:
        method.requests = count  # type: ignore[attr-defined]
        return method

    return mark


@dataclass(frozen=True, slots=True)
class Group:
    """A process group of one transfer. Rank 0 is the trainer, the server's workers are 1 to ``size
    - 1``."""

    name: str
    host: str
    port: int
    size: int
    backend: str


@dataclass(frozen=True, slots=True)
class Announced:
    """Contents of one broadcast, in order: tensors by name, dtype (torch's name without "torch."),
    and shape."""

    names: Sequence[str]
    dtypes: Sequence[str]
    shapes: Sequence[Sequence[int]]


class StockRoutes(Protocol):
    """Update routes of a server without our plugin, over connections of their own, for one thread
    beside the lane's control. Every method raises PeerError by ``timeout_s``, the deadline of each
    request."""

    def workers(self, timeout_s: float) -> int:
        """Tensor-parallel workers."""

    def parameter_names(self, timeout_s: float) -> frozenset[str]:
        """Names of the model's parameters."""

    def init_group(self, group: Group, timeout_s: float) -> None:
        """Have the workers join; answers when all ranks are there."""

    def destroy_group(self, name: str, timeout_s: float) -> None:
        """Leave the group; refused by a server that does not have it, as after a restart."""

    @requests(3)
    def begin(self, timeout_s: float) -> None:
        """Open an update; one that was left open is ended first."""

    def update(self, group: str, announced: Announced, timeout_s: float) -> None:
        """Receive one broadcast of exactly the announced bytes, and load it."""

    def close(self) -> None:
        """Close the connections. Idempotent."""


class ServerControl(Protocol):
    """Control plane of one server, used by one thread at a time. Every method raises PeerError by
    its own deadline.

    A commit is ``pause, load, finish, resume`` and then ``label`` as the read-back; with
    ``weight_sync.kv_after_update = "recompute"`` it has ``drop_kv`` after ``pause``.
    """

    url: str

    @property
    def engine(self) -> str:
        """Name of the engine there (that of its dialect); empty before the first call."""

    def label(self) -> str:
        """Label of the weights that the server serves now, as the server reports it."""

    @requests(2)
    def stock(self) -> StockRoutes | None:
        """The engine's own update routes if our plugin is not there and streaming over them is
        possible; else None."""

    @requests(2)
    def greet(self, hello: Mapping[str, Any]) -> None:
        """Send the server's receiver the address of its lane. Returns at once, the receiver joins
        in the background. ServerUnfit where our plugin is not there."""

    @requests(4)
    def paused(self) -> bool:
        """Whether generation is frozen, by us or by another client."""

    def pause(self) -> None:
        """Freeze generation; running requests keep their state and go on after ``resume``."""

    @requests(2)
    def drop_kv(self) -> None:
        """On a paused server: drop the KV of running requests and of prefixes, to be computed again
        with the new weights. No token is lost. ServerRefused where the engine does not confirm
        it."""

    @requests(5)
    def load(self, info: Mapping[str, Any]) -> None:
        """Load the version ``info`` names, staged or on its way. The answer proves nothing: the
        receiver's Applied does."""

    @requests(2)
    def finish(self, label: str) -> None:
        """Close the update and set the label."""

    def relabel(self, label: str) -> None:
        """Set the label outside of an update, on a server that is being recovered."""

    def resume(self) -> None:
        """Go on generating."""

    def close(self) -> None:
        """Close the connections."""
