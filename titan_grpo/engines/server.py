"""Engines by name: the functions that make calls (a dialect), the control plane, and which engine
answers at a URL."""

from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast

from titan_grpo.engines import sglang, vllm
from titan_grpo.engines.generation import Sampled, Sampling, StreamedCall, ToolCalls
from titan_grpo.engines.http import Call, HttpRefused, ServerAccess, SyncDriver, requests
from titan_grpo.engines.sglang_stock import StockRoutes
from titan_grpo.errors import ConfigError, ProtocolError, ServerRefused, ServerUnfit


class Dialect(Protocol):
    """One engine's HTTP interface. Modules implement it: engines/vllm.py, engines/sglang.py.

    Weights and pauses are not here: what a lane needs of them is ``ServerControl``.
    """

    NAME: str
    """As in ``rollout.engine``."""

    def health(self, timeout_s: float = ...) -> Call[None]:
        """Answered while the server generates; may refuse or hang while it is paused."""

    def label(self, timeout_s: float = ...) -> Call[str]:
        """The label of the weights that the server shows."""

    def generate(
        self, prompt_ids: Sequence[int], sampling: Sampling, timeout_s: float
    ) -> Call[Sampled]:
        """Sample one continuation of a token-id prompt, with the log-probability of each sampled
        token under the distribution it was drawn from: plain softmax at the temperature, whatever
        the model's directory recommends."""

    def stream(
        self, prompt_ids: Sequence[int], sampling: Sampling, timeout_s: float, interval: int = ...
    ) -> StreamedCall:
        """``generate`` with an answer in pieces of ``interval`` tokens, the first and the last of
        which may be shorter; ``timeout_s`` bounds each silence."""

    def score(
        self, token_ids: Sequence[int], timeout_s: float, cache_salt: str = ...
    ) -> Call[tuple[float, ...]]:
        """Log-probabilities of a given sequence at temperature 1: ``len(token_ids) - 1`` values, of
        all tokens but the first.

        With a ``cache_salt`` that no other request has, nothing in the answer comes from the prefix
        cache.
        """

    def tool_parser(self, timeout_s: float) -> Call[str] | None:
        """The name of the parser of calls of tools that the server was started with, for an engine
        whose requests name it; ServerUnfit where there is none. None: not to be asked."""

    def parse_tool_calls(
        self,
        parser: str,
        token_ids: Sequence[int],
        text: str,
        tools: Sequence[Any],
        timeout_s: float,
    ) -> Call[tuple[str, ToolCalls]]:
        """Have the engine's own parser read an answer that it sampled, without its end token:
        what is left for the user, and the calls. ``text``: of the tokens, with special ones.
        ``tools``: those of the request. What is left of a text without calls may be less than all
        of it."""


class ServerControl(Protocol):
    """Control plane of one server, used by one thread at a time. Every method raises PeerError by
    its own deadline.

    Arguments and results are plain data, encoded by their type hints where calls are made elsewhere
    (rollout.engine_calls): a further method is one here and one in each engine.

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

    def check_tool_parser(self) -> None:
        """ServerUnfit, with the options to start it with, where the server cannot read calls of
        tools (Dialect.parse_tool_calls)."""

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

    @requests(4)
    def load(self, info: Mapping[str, Any]) -> None:
        """Load the version ``info`` names, staged or on its way. The answer proves nothing: the
        receiver's Applied does."""

    @requests(3)
    def finish(self, label: str) -> None:
        """Close the update and set the label."""

    def relabel(self, label: str) -> None:
        """Set the label outside of an update, on a server that is being recovered."""

    def resume(self) -> None:
        """Go on generating."""

    def close(self) -> None:
        """Close the connections."""


@dataclass(frozen=True, slots=True)
class RolloutNeeds:
    """What the run's rollouts need of their servers, which are all but those that are ``exempt``:
    ``routes`` (the experts of each token), ``tool_calls`` (what is a call of a tool in them)."""

    routes: bool = False
    tool_calls: bool = False
    exempt: Container[str] = ()


DIALECTS: dict[str, Dialect] = {sglang.NAME: sglang, vllm.NAME: vllm}
"""In the order in which ``detect`` tries them: an engine answers only its own label call."""


def dialect(name: str) -> Dialect:
    """The module of an engine. ProtocolError for another name: its server was not asked."""
    if name not in DIALECTS:
        raise ProtocolError(f"an engine must be one of {', '.join(DIALECTS)}, got {name!r}")
    return DIALECTS[name]


EXPECTED = (
    "vLLM >= 0.32 started with VLLM_SERVER_DEV_MODE=1 (GET /weight_info), or SGLang >= 0.5.21 (GET"
    " /model_info with a weight_version)"
)


def detect(driver: SyncDriver, timeout_s: float) -> str:
    """Name of the engine that answers. Raises ServerUnreachable without an answer, ServerUnfit
    with what is expected for another kind of server."""
    got = []
    for name, engine in DIALECTS.items():
        call = engine.label(timeout_s)
        try:
            driver.run(call)
            return name
        except HttpRefused as refusal:
            if refusal.status not in (404, 405):
                raise  # a refused key or a server in trouble is no sign of its engine
            got.append(f"{call.path} {refusal.status}")
        except ServerRefused:
            got.append(f"{call.path} of another form")
    raise ServerUnfit(f"{driver.url} must be {EXPECTED}, got {', '.join(got)}")


AUTO = "auto"
"""``rollout.engine``: ask each server."""

ASK_S = 10.0
"""Longest deadline of the question which engine answers, in seconds."""


def make_control(engine: str, access: ServerAccess) -> ServerControl:
    """The control plane for a value of ``rollout.engine``; makes no call yet. ConfigError for any
    other value."""
    match engine:
        case "vllm":
            return vllm.VllmControl(access)
        case "sglang":
            return sglang.SglangControl(access)
        case "auto":
            # Its methods are looked up by name in the interface.
            return cast(ServerControl, DetectingControl(access))
    raise ConfigError(f'an engine must be "auto", "vllm" or "sglang", got {engine!r}')


FIRST = ("check_tool_parser", "stock", "greet")
"""Methods with which a lane begins a connection."""


class DetectingControl:
    """A ServerControl that asks the server for its engine before the first call, and again when a
    lane connects: a restarted server may be another engine."""

    def __init__(self, access: ServerAccess) -> None:
        self._access = access
        self._control: ServerControl | None = None
        self.url = access.url

    def __repr__(self) -> str:
        return f"<DetectingControl {self.url}, {self.engine or 'not asked yet'}>"

    @property
    def engine(self) -> str:
        return self._control.engine if self._control is not None else ""

    def __getattr__(self, method: str) -> Callable[..., Any]:
        """A method of ServerControl."""
        if method.startswith("_") or not hasattr(ServerControl, method):
            raise AttributeError(method)

        def call(*arguments: Any) -> Any:
            if self._control is None or method in FIRST:
                self._detect()
            return getattr(self._control, method)(*arguments)

        return call

    def _detect(self) -> None:
        with self._access.driver() as driver:
            engine = detect(driver, min(ASK_S, self._access.deadline_s))
        if self.engine != engine:
            self.close()
            self._control = make_control(engine, self._access)

    def close(self) -> None:
        if self._control is not None:
            self._control.close()
            self._control = None
