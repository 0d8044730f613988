"""Making a server's control plane: of a named engine, or of the one that the server says it is."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from titan_grpo.engines.control import ServerControl
from titan_grpo.engines.detect import detect
from titan_grpo.engines.drivers import SyncDriver
from titan_grpo.engines.sglang_control import SglangControl
from titan_grpo.engines.sglang_stock import StockRoutes
from titan_grpo.engines.vllm_control import VllmControl
from titan_grpo.errors import ConfigError

AUTO = "auto"
"""``rollout.engine``: ask each server."""

ASK_S = 10.0
"""Longest deadline of the question which engine answers, in seconds."""


@dataclass(frozen=True, slots=True)
class ServerAccess:
    """How a server's control plane is reached. ``admin_key``: empty where the API key does for all; vLLM has no other.

    ``deadline_s``: of each call; ``load_deadline_s``: of the load, where that waits for a transfer too. Both in seconds.
    """

    url: str
    deadline_s: float
    load_deadline_s: float | None = None
    api_key: str = field(default="", repr=False)
    admin_key: str = field(default="", repr=False)


MakeControl = Callable[[str, ServerAccess], ServerControl]
"""(value of ``rollout.engine``, access) -> control plane. Nothing is asked yet."""


def make_control(engine: str, access: ServerAccess) -> ServerControl:
    """The control plane for a value of ``rollout.engine``; nothing is asked yet. ConfigError for any other value."""
    match engine:
        case "vllm":
            return VllmControl(access.url, access.api_key, access.deadline_s, access.load_deadline_s)
        case "sglang":
            return SglangControl(access.url, access.api_key, access.admin_key, access.deadline_s, access.load_deadline_s)
        case "auto":
            return AskingControl(access)
    raise ConfigError(f'an engine must be "auto", "vllm" or "sglang", got {engine!r}')


class AskingControl:
    """Asks the server which engine it is, before its first call and again at each greeting, and hands every call on to
    that engine's control."""

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
