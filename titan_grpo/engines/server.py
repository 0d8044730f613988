"""What an engine's module offers: pure functions that turn arguments into Calls. Whoever talks to a
server of either kind asks ``dialect(name)`` for its module.

Which engine answers at a URL, asked of the server itself: a fleet may mix engines, and a restarted
server may be another.

Making a server's control plane: of a named engine, or of the one that the server says it is."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from titan_grpo.engines import sglang, vllm
from titan_grpo.engines.control import ServerControl, StockRoutes
from titan_grpo.engines.generation import Sampled, Sampling, StreamedCall
from titan_grpo.engines.http import Call, HttpRefused, SyncDriver
from titan_grpo.engines.sglang import SglangControl
from titan_grpo.engines.vllm import VllmControl
from titan_grpo.errors import ConfigError, ProtocolError, ServerRefused


class Dialect(Protocol):
    """One engine's HTTP interface. Modules implement it: engines/vllm.py, engines/sglang.py.

    Weights and pauses are not here: what a lane needs of them is ``engines.control.ServerControl``.
    """

    NAME: str
    """As in ``rollout.engine``."""

    def health(self, timeout_s: float = ...) -> Call[None]:
        """Answered while the server generates; may refuse or hang while it is paused."""

    def alive(self, timeout_s: float = ...) -> Call[None]:
        """Answered at once while the server's front lives: also paused, loading, or behind a long
        queue."""

    def label(self, timeout_s: float = ...) -> Call[str]:
        """The label of the weights that the server shows."""

    def models(self, timeout_s: float = ...) -> Call[list[str]]:
        """Names of the served models."""

    def world_size(self, timeout_s: float = ...) -> Call[int]:
        """Workers that hold a part of the weights."""

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

    def abort_all(self, timeout_s: float = ...) -> Call[None]:
        """End all requests in flight; each of them is answered with what it has."""


DIALECTS: dict[str, Dialect] = {vllm.NAME: vllm, sglang.NAME: sglang}


def dialect(name: str) -> Dialect:
    """The module of an engine. ProtocolError for a name that is none: whoever calls has asked the
    server first."""
    try:
        return DIALECTS[name]
    except KeyError:
        raise ProtocolError(
            f"an engine must be one of {', '.join(DIALECTS)}, got {name!r}: the server was not"
            " asked"
        ) from None


EXPECTED = (
    "vLLM >= 0.32 started with VLLM_SERVER_DEV_MODE=1 (GET /weight_info), or SGLang >= 0.5.21 (GET"
    " /model_info with a weight_version)"
)


def questions(timeout_s: float) -> dict[str, Call[Any]]:
    """Engine -> the call that only it answers in the promised form."""
    return {sglang.NAME: sglang.label(timeout_s), vllm.NAME: vllm.weight_info(timeout_s)}


def is_other(refusal: ServerRefused) -> bool:
    """Whether a refusal says that another engine is there: no such route, or an answer of another
    form. Pure.

    A refused key or a server in trouble says nothing about which engine it is.
    """
    return refusal.status in (404, 405) if isinstance(refusal, HttpRefused) else True


def detect(driver: SyncDriver, timeout_s: float) -> str:
    """The engine's name. ServerUnreachable without an answer, ServerRefused with what is expected
    for a stranger."""
    heard = []
    for name, call in questions(timeout_s).items():
        try:
            driver.run(call)
        except ServerRefused as refusal:
            if not is_other(refusal):
                raise
            heard.append(
                f"{call.path}"
                f" {refusal.status if isinstance(refusal, HttpRefused) else 'of another form'}"
            )
        else:
            return name
    raise ServerRefused(f"{driver.url} must be {EXPECTED}, got {', '.join(heard)}")


AUTO = "auto"
"""``rollout.engine``: ask each server."""

ASK_S = 10.0
"""Longest deadline of the question which engine answers, in seconds."""


@dataclass(frozen=True, slots=True)
class ServerAccess:
    """How a server's control plane is reached. ``admin_key``: empty where the API key does for all;
    vLLM has no other.

    ``deadline_s``: of each call; ``load_deadline_s``: of the load, where that waits for a transfer
    too. Both in seconds.
    """

    url: str
    deadline_s: float
    load_deadline_s: float | None = None
    api_key: str = field(default="", repr=False)
    admin_key: str = field(default="", repr=False)


MakeControl = Callable[[str, ServerAccess], ServerControl]
"""(value of ``rollout.engine``, access) -> control plane. Nothing is asked yet."""


def make_control(engine: str, access: ServerAccess) -> ServerControl:
    """The control plane for a value of ``rollout.engine``; nothing is asked yet. ConfigError for
    any other value."""
    match engine:
        case "vllm":
            return VllmControl(
                access.url, access.api_key, access.deadline_s, access.load_deadline_s
            )
        case "sglang":
            return SglangControl(
                access.url,
                access.api_key,
                access.admin_key,
                access.deadline_s,
                access.load_deadline_s,
            )
        case "auto":
            return AskingControl(access)
    raise ConfigError(f'an engine must be "auto", "vllm" or "sglang", got {engine!r}')


class AskingControl:
    """Asks the server which engine it is, before its first call and again at each greeting, and
    hands every call on to that engine's control."""

    def __init__(self, access: ServerAccess) -> None:
        self._access = access
        self._driver = SyncDriver(access.url, access.api_key, access.admin_key)
        self._control: ServerControl | None = None
        self.url = access.url

    def __repr__(self) -> str:
        return f"<AskingControl {self.url}, {self.engine or 'not asked yet'}>"

    @property
    def engine(self) -> str:
        """See ServerControl."""
        return self._control.engine if self._control is not None else ""

    def _ask(self) -> ServerControl:
        engine = detect(self._driver, min(ASK_S, self._access.deadline_s))
        if self._control is None or self._control.engine != engine:
            self._forget()
            self._control = make_control(engine, self._access)
        return self._control

    def _forget(self) -> None:
        if self._control is not None:
            self._control.close()
            self._control = None

    def _known(self) -> ServerControl:
        return self._control or self._ask()

    def label(self) -> str:
        return self._known().label()

    def stock(self) -> StockRoutes | None:
        return self._ask().stock()

    def greet(self, hello: Mapping[str, Any]) -> None:
        self._ask().greet(hello)

    def paused(self) -> bool:
        return self._known().paused()

    def pause(self) -> None:
        self._known().pause()

    def drop_kv(self) -> None:
        self._known().drop_kv()

    def load(self, info: Mapping[str, Any]) -> None:
        self._known().load(info)

    def finish(self, label: str) -> None:
        self._known().finish(label)

    def relabel(self, label: str) -> None:
        self._known().relabel(label)

    def resume(self) -> None:
        self._known().resume()

    def close(self) -> None:
        self._forget()
        self._driver.close()
