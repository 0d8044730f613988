"""Engines by name: their calls (dialects), their control planes, and detection of the engine at a
URL."""

from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast

from titan_grpo.engines import sglang, vllm
from titan_grpo.engines.generation import QUERY_S, Piece, Sampled, Sampling, ToolCalls
from titan_grpo.engines.http import Call, HttpRefused, ServerAccess, SyncDriver
from titan_grpo.engines.sglang_stock import StockRoutes
from titan_grpo.errors import ConfigError, ProtocolError, ServerRefused, ServerUnfit


class Dialect(Protocol):
    """One engine's HTTP interface, without weights and pauses (see ``ServerControl``). The modules
    engines/vllm.py and engines/sglang.py implement it."""

    NAME: str
    """As in ``rollout.engine``."""

    def health(self, timeout_s: float = ...) -> Call[None]:
        """Succeeds while the server generates; may be refused or hang while it is paused."""

    def label(self, timeout_s: float = ...) -> Call[str]:
        """Return the server's label of its weights."""

    def generate(
        self, prompt_ids: Sequence[int], sampling: Sampling, timeout_s: float
    ) -> Call[Sampled]:
        """Sample one continuation of a token-id prompt, with the log-probability of each sampled
        token under its sampling distribution: plain softmax at the temperature, without the
        sampling defaults of the model's directory."""

    def stream(
        self, prompt_ids: Sequence[int], sampling: Sampling, timeout_s: float, interval: int = ...
    ) -> Call[Piece]:
        """Do as ``generate``, with the answer in pieces of ``interval`` tokens (the first and the
        last may be shorter): ``parse`` reads an event. ``timeout_s`` bounds each silence."""

    def score(
        self, token_ids: Sequence[int], timeout_s: float, cache_salt: str = ...
    ) -> Call[tuple[float, ...]]:
        """Return log-probabilities of a given sequence under the server's weights, at temperature
        1: ``len(token_ids) - 1`` values, since the first token has no context. Value i belongs to
        ``token_ids[i + 1]`` given ``token_ids[: i + 1]``.

        With a unique ``cache_salt`` no part of the answer comes from the prefix cache.
        """

    def tool_parser(self, timeout_s: float) -> Call[str] | None:
        """Return the name of the server's tool-call parser, for engines whose requests name it (the
        call raises ServerUnfit if the server has none); None for other engines."""

    def parse_tool_calls(
        self,
        parser: str,
        token_ids: Sequence[int],
        text: str,
        tools: Sequence[Any],
        timeout_s: float,
    ) -> Call[tuple[str, ToolCalls]]:
        """Parse an answer (without its end token) by the engine's own parser: the text for the
        user, and the tool calls. ``text``: the decoded tokens, special ones included. ``tools``:
        the request's. The parser may shorten the text even if it finds no call."""


class ServerControl(Protocol):
    """Control plane of one server, for one thread at a time. Every method returns or raises
    PeerError by its own deadline.

    Arguments and results are plain data: rollout.engine_calls encodes them by their type hints to
    make the calls in another process.

    A commit is ``pause, load, finish, resume`` and then ``label`` as the read-back; with
    ``weight_sync.kv_after_update = "recompute"`` it has ``drop_kv`` after ``pause``.
    """

    url: str

    @property
    def engine(self) -> str:
        """Name of the server's engine (its dialect's); may be empty before the first call."""

    def label(self) -> str:
        """Return the server's label of the weights that it serves now."""

    def stock(self) -> StockRoutes | None:
        """Return the engine's own update routes if our plugin is missing and weights can be
        streamed over them; else None."""

    def greet(self, hello: Mapping[str, Any]) -> None:
        """Send the lane's hello (or attach) to the server's plugin; the receiver joins in the
        background. Raises ServerUnfit if our plugin is missing."""

    def check_tool_parser(self) -> None:
        """Raise ServerUnfit, with the options that are missing, if the server cannot parse tool
        calls (Dialect.parse_tool_calls)."""

    def paused(self) -> bool:
        """Return whether generation is paused, by this or another client."""

    def pause(self) -> None:
        """Pause generation; running requests keep their state and continue after ``resume``."""

    def drop_kv(self) -> None:
        """On a paused server: drop the KV of running requests and of prefixes, so that it is
        recomputed with the new weights. No token is lost. Raises ServerRefused if the engine does
        not confirm it."""

    def load(self, info: Mapping[str, Any]) -> None:
        """Load the version that ``info`` (a Commit) names. The answer does not prove success: the
        receiver's Applied does."""

    def finish(self, label: str) -> None:
        """Close the update and set the label."""

    def relabel(self, label: str) -> None:
        """Set the label outside an update, during recovery."""

    def resume(self) -> None:
        """Resume generation."""

    def close(self) -> None:
        """Close the connections."""


@dataclass(frozen=True, slots=True)
class RolloutNeeds:
    """What a run's rollouts need of all servers that are not ``exempt``: ``routes`` (the experts of
    each token), ``tool_calls`` (parsing of tool calls)."""

    routes: bool = False
    tool_calls: bool = False
    exempt: Container[str] = ()


DIALECTS: dict[str, Dialect] = {sglang.NAME: sglang, vllm.NAME: vllm}
"""Engines in the order in which ``detect`` tries them; each answers only its own label call."""


def dialect(name: str) -> Dialect:
    """Return the module of an engine. Raises ProtocolError for other names, also "": detection must
    come first."""
    if name not in DIALECTS:
        raise ProtocolError(f"an engine must be one of {', '.join(DIALECTS)}, got {name!r}")
    return DIALECTS[name]


EXPECTED = (
    "vLLM >= 0.32 started with VLLM_SERVER_DEV_MODE=1 (GET /weight_info), or SGLang >= 0.5.21 (GET"
    " /model_info with a weight_version)"
)


def detect(driver: SyncDriver, timeout_s: float) -> str:
    """Return the name of the engine that answers. Raises ServerUnreachable without an answer,
    ServerUnfit for any other kind of server."""
    got = []
    for name, engine in DIALECTS.items():
        call = engine.label(timeout_s)
        try:
            driver.run(call)
            return name
        except HttpRefused as refusal:
            if refusal.status not in (404, 405):
                raise  # a refused key or a server error does not tell which engine it is
            got.append(f"{call.path} {refusal.status}")
        except ServerRefused:
            got.append(f"{call.path} of another form")
    raise ServerUnfit(f"{driver.url}: it must be {EXPECTED}, got {', '.join(got)}")


AUTO = "auto"
"""Value of ``rollout.engine``: detect each server's engine."""


def make_control(engine: str, access: ServerAccess) -> ServerControl:
    """Return the control plane for a value of ``rollout.engine``, without a call to the server.
    Raises ConfigError for any other value."""
    match engine:
        case "vllm":
            return vllm.VllmControl(access)
        case "sglang":
            return sglang.SglangControl(access)
        case "auto":
            # Its __getattr__ has the methods of the interface.
            return cast(ServerControl, DetectingControl(access))
    raise ConfigError(f'an engine must be "auto", "vllm" or "sglang", got {engine!r}')


FIRST = ("check_tool_parser", "stock", "greet")
"""Methods that a lane calls first on a new connection."""


class DetectingControl:
    """ServerControl that detects the server's engine before the first call, and again when a lane
    connects: a restarted server may be another engine."""

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
        """Return a method of ServerControl that detects the engine if necessary."""
        if method.startswith("_") or not hasattr(ServerControl, method):
            raise AttributeError(method)

        def call(*arguments: Any) -> Any:
            if self._control is None or method in FIRST:
                self._detect()
            return getattr(self._control, method)(*arguments)

        return call

    def _detect(self) -> None:
        with self._access.driver() as driver:
            engine = detect(driver, min(QUERY_S, self._access.deadline_s))
        if self.engine != engine:
            self.close()
            self._control = make_control(engine, self._access)

    def close(self) -> None:
        if self._control is not None:
            self._control.close()
            self._control = None
