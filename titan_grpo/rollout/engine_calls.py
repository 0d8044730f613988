"""Calls of a server's control plane that the rollout process makes for a trainer's lanes.

Generic over the interfaces of engines.server: the type hints of their methods define how arguments
and results are encoded, so a new method needs no code here. A call may take as long as a commit, so
a server with calls has its own threads beside the loop that makes rollouts."""

import inspect
import logging
import os
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast, get_type_hints

import msgspec

from titan_grpo.config.rollout import read_key
from titan_grpo.engines.generation import QUERY_S
from titan_grpo.engines.http import ServerAccess
from titan_grpo.engines.server import AUTO, ServerControl, make_control
from titan_grpo.engines.sglang_stock import StockRoutes
from titan_grpo.errors import (
    CROSSING,
    ProtocolError,
    ServerUnreachable,
    TitanGrpoError,
    kind_of,
)
from titan_grpo.rollout.messages import Answer, EngineCall, RolloutSpec

if TYPE_CHECKING:
    from titan_grpo.rollout.client import RolloutClient

logger = logging.getLogger(__name__)

CLOSE = "close"
"""Name of the method without an answer."""

STOCK = "stock."
"""Prefix of the names of StockRoutes' methods. Their first argument is what ``stock`` returned."""

BEGIN = ("load", STOCK + "begin")
"""Methods that begin an update, which ``finish`` ends."""

REQUESTS = {"load": 4, "paused": 4, "greet": 3, "finish": 3, "stock": 2, "drop_kv": 2}
REQUESTS |= {STOCK + "begin": 3}
"""Most requests that a method makes to its server, each with a deadline; others make one."""

MARGIN_S = 5.0
"""Seconds for the round trip, on top of the call's own deadlines."""


def methods_of(interface: type, prefix: str = "") -> dict[str, tuple[tuple[Any, ...], Any]]:
    """Return (types of the arguments, type of the result) of all public methods of an interface
    except ``close``, by name.

    >>> methods_of(ServerControl)["finish"]
    ((<class 'str'>,), <class 'NoneType'>)
    """
    found = {}
    for name, function in inspect.getmembers(interface, inspect.isfunction):
        if not name.startswith("_") and name != CLOSE:
            *parameters, result = get_type_hints(function).values()
            found[prefix + name] = tuple(parameters), result
    return found


METHODS = methods_of(ServerControl) | methods_of(StockRoutes, STOCK)


def value_of(answer: Answer) -> Any:
    """Return the call's result, or raise its error."""
    if answer.kind:
        raise CROSSING.get(answer.kind, ServerUnreachable)(answer.error)
    return answer.value


# The service's side.


class EngineCalls:
    """The calls of all servers. ``answer`` gets the outcomes, on the calls' threads; it must not
    block.

    The calls of a server's control have a thread while there are any, and so have those of its
    update routes. So no thread outlives its server's last call, and none is ended that a later
    call needs: a lane may close a control and open it again while its update routes are in use.
    """

    def __init__(self, spec: RolloutSpec, answer: Callable[[Answer], None]) -> None:
        self._spec, self._answer = spec, answer
        self._lock = threading.Lock()
        self._servers: dict[str, _Server] = {}
        self._waiting: dict[tuple[str, bool], deque[tuple[EngineCall, float]]] = {}
        """By URL, and whether of update routes: calls that have not begun. Each key has a
        thread."""

    def take(self, call: EngineCall) -> None:
        """Queue a call. Any thread; never blocks."""
        of_routes = call.method.startswith(STOCK)
        key, came = (call.url, of_routes), time.monotonic()
        with self._lock:
            if key in self._waiting:
                self._waiting[key].append((call, came))
                return
            self._waiting[key] = deque([(call, came)])
            if call.url not in self._servers:
                self._servers[call.url] = _Server(self._spec, call.url)
        thread = threading.Thread(
            target=self._serve,
            args=(self._servers[call.url], key),
            name=f"{'stock ' if of_routes else ''}calls {call.url}",
            daemon=True,
        )
        try:
            thread.start()
        except RuntimeError as error:
            # This host has no thread left now. The key must not stay: no later call of this server
            # would be made, although threads become free.
            with self._lock:
                unmade = self._waiting.pop(key)
            text = f"{call.url}: no thread could be started for the call: {error}"
            for waiting, _ in unmade:
                kind = kind_of(ServerUnreachable(text))
                self._answer(Answer(waiting.number, None, "", text, kind))

    def _serve(self, server: "_Server", key: tuple[str, bool]) -> None:
        """Make the calls of a key, until there are no more."""
        while True:
            with self._lock:
                if not self._waiting[key]:
                    del self._waiting[key]
                    return
                call, came = self._waiting[key].popleft()
            try:
                if call.method == CLOSE:
                    server.close()
                elif call.method == STOCK + CLOSE:
                    server.close_routes(*call.arguments)
                else:
                    self._answer(_outcome(server, call, came))
            except Exception:  # top of a thread: the key's later calls would never be made
                logger.exception("engine call %s of %s", call.method, call.url)


def _outcome(server: "_Server", call: EngineCall, came: float) -> Answer:
    try:
        if time.monotonic() - came > call.within_s:
            raise ServerUnreachable(
                f"{call.url}: {call.method} was not called: calls before it took"
                f" {call.within_s:.1f} s"
            )
        value = server.call(call)
        return Answer(call.number, value, server.engine)
    except TitanGrpoError as error:
        return Answer(call.number, None, server.engine, str(error), kind_of(error))
    except Exception as error:  # top of a thread: a lane waits for the answer
        logger.exception("engine call %s of %s", call.method, call.url)
        text = f"{call.method} of {call.url} failed by a bug of ours: {error!r}"
        return Answer(call.number, None, server.engine, text, kind_of(error))


class _Server:
    """One server's control plane, used by one thread at a time, and its update routes, used by one
    other."""

    def __init__(self, spec: RolloutSpec, url: str) -> None:
        self._spec, self._url = spec, url
        self._control: ServerControl | None = None
        self._updating = False
        """Whether an update was begun here, and no ``finish`` called since."""
        self._routes: dict[str, StockRoutes] = {}
        """Open update routes by the name that ``stock`` returned, the only one in all sessions."""
        self.engine = ""

    def call(self, call: EngineCall) -> Any:
        """Make one call; return its result as a JSON value. Raises the method's error,
        ProtocolError for an unknown method or arguments of other types, or ServerUnreachable for an
        update that was open in another session: the server may have restarted with the service."""
        if call.method not in METHODS:
            raise ProtocolError(
                f"an engine call must be one of {', '.join(sorted(METHODS))}, got {call.method!r}"
            )
        (kinds, _), arguments = METHODS[call.method], call.arguments
        target: ServerControl | StockRoutes | None
        if call.method.startswith(STOCK):
            target, arguments = self._routes.get(arguments[0]), arguments[1:]
        elif call.method == "finish" and not self._updating:
            target = None
        else:
            target = self._opened()
        if target is None:
            raise ServerUnreachable(
                f"{self._url}: {call.method} was not called: the rollout service lost the session"
                " in which its update was open"
            )
        try:
            typed = [
                msgspec.convert(value, kind) for value, kind in zip(arguments, kinds, strict=True)
            ]
        except (msgspec.ValidationError, ValueError) as error:
            raise ProtocolError(f"arguments of {call.method}: {error}") from error
        if call.method in (*BEGIN, "finish"):
            self._updating = call.method in BEGIN
        try:
            value = getattr(target, call.method.removeprefix(STOCK))(*typed)
        finally:
            self.engine = self._control.engine if self._control is not None else self.engine
        if call.method == "stock" and value is not None:
            name = secrets.token_hex(8)
            self._routes[name] = value
            return name
        return msgspec.to_builtins(value, order="deterministic")

    def _opened(self) -> ServerControl:
        if self._control is None:
            spec = self._spec
            # This process's own keys, from the environment variables that the spec names.
            keys = (read_key(os.environ, n) for n in (spec.api_key_env, spec.admin_key_env))
            deadlines = spec.commit_deadline_s, spec.load_deadline_s
            self._control = make_control(spec.engine, ServerAccess(self._url, *deadlines, *keys))
        return self._control

    def close(self) -> None:
        """Close the control's connections, which a later call opens again."""
        if self._control is not None:
            self._control.close()
            self._control = None

    def close_routes(self, name: str) -> None:
        if (routes := self._routes.pop(name, None)) is not None:
            routes.close()


# The trainer's side.


def _encode(arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(msgspec.to_builtins(argument) for argument in arguments)


class RemoteControl:
    """ServerControl whose calls the rollout service makes, with the service's keys. Used by one
    thread at a time."""

    def __init__(self, client: "RolloutClient", engine: str, access: ServerAccess) -> None:
        """``engine``: value of rollout.engine. The keys of ``access`` are not sent."""
        self._client, self._access = client, access
        self.engine = "" if engine == AUTO else engine
        self.url = access.url

    def __repr__(self) -> str:
        return f"<RemoteControl {self.url}, {self.engine or 'not asked yet'}>"

    def __getattr__(self, method: str) -> Callable[..., Any]:
        if method not in METHODS:
            raise AttributeError(method)
        return lambda *arguments: self._call(method, *arguments)

    def _call(self, method: str, *arguments: Any) -> Any:
        a = self._access
        within_s = REQUESTS.get(method, 1) * a.deadline_s + MARGIN_S
        within_s += 2 * min(QUERY_S, a.deadline_s)  # the service may have to ask which engine it is
        within_s += (a.load_deadline_s or 0.0) if method == "load" else 0.0
        answer = self._client.engine_call(self.url, method, _encode(arguments), within_s)
        self.engine = answer.engine or self.engine
        value = value_of(answer)
        return value if method == "stock" else msgspec.convert(value, METHODS[method][1])

    def stock(self) -> StockRoutes | None:
        name = self._call("stock")
        return (
            None if name is None else cast(StockRoutes, RemoteStock(self._client, self.url, name))
        )

    def close(self) -> None:
        """Let the service close its connections; does not wait for it."""
        self._client.engine_tell(self.url, CLOSE, ())


class RemoteStock:
    """StockRoutes open at the service, by the name that it gave them."""

    def __init__(self, client: "RolloutClient", url: str, name: str) -> None:
        self._client, self._url, self._name = client, url, name

    def __getattr__(self, method: str) -> Callable[..., Any]:
        """Return a method of StockRoutes; its last argument is the deadline of each request."""
        if STOCK + method not in METHODS:
            raise AttributeError(method)

        def call(*arguments: Any) -> Any:
            name, sent = STOCK + method, (self._name, *_encode(arguments))
            within_s = REQUESTS.get(name, 1) * arguments[-1] + MARGIN_S
            answer = self._client.engine_call(self._url, name, sent, within_s)
            return msgspec.convert(value_of(answer), METHODS[name][1])

        return call

    def close(self) -> None:
        """See StockRoutes; does not wait for the service."""
        self._client.engine_tell(self._url, STOCK + CLOSE, (self._name,))
