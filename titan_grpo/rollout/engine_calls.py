"""Calls of a server's control plane that the rollout process makes for a trainer's lanes.

Generic over the interfaces of engines.server: the type hints of their methods define how arguments
and results are encoded, so a new method needs no code here. A call may take as long as a commit, so
a server with calls has its own threads beside the loop that makes rollouts."""

import inspect
import itertools
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
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
"""Prefix of the names of StockRoutes' methods. Their first argument is the number that ``stock``
returned."""

MARGIN_S = 5.0
"""Seconds for the round trip, on top of the call's own deadlines."""


class Method:
    """A method of an interface: types of its arguments and result, and its number of requests."""

    def __init__(self, function: Callable[..., Any]) -> None:
        hints = get_type_hints(function)
        self.result = hints.pop("return")
        self.parameters = tuple(hints.values())
        self.requests: int = getattr(function, "requests", 1)


def methods_of(interface: type) -> dict[str, Method]:
    """Return all public methods of a Protocol except ``close``.

    >>> methods_of(ServerControl)["finish"].parameters
    (<class 'str'>,)
    """
    functions = inspect.getmembers(interface, inspect.isfunction)
    return {n: Method(f) for n, f in functions if not n.startswith("_") and n != CLOSE}


METHODS = methods_of(ServerControl) | {
    STOCK + name: method for name, method in methods_of(StockRoutes).items()
}


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
        self._closed = False

    def take(self, call: EngineCall) -> None:
        """Queue a call. Any thread; never blocks."""
        of_routes = call.method.startswith(STOCK)
        key, came = (call.url, of_routes), time.monotonic()
        with self._lock:
            if self._closed:
                return
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

    def close(self) -> None:
        """Take no more calls. Does not wait for those taken; the end of the process closes their
        connections. Idempotent."""
        with self._lock:
            self._closed = True

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
        self._numbers = itertools.count()
        self._routes: dict[int, StockRoutes] = {}
        """Open update routes by the number that ``stock`` returned."""
        self.engine = ""

    def call(self, call: EngineCall) -> Any:
        """Make one call; return its result as a JSON value. Raises the method's error, or
        ProtocolError for an unknown method or arguments of other types."""
        method, arguments = METHODS.get(call.method), call.arguments
        if method is None:
            raise ProtocolError(
                f"an engine call must be one of {', '.join(sorted(METHODS))}, got {call.method!r}"
            )
        target: ServerControl | StockRoutes | None
        if call.method.startswith(STOCK):
            number, arguments = arguments[0], arguments[1:]
            if (target := self._routes.get(number)) is None:
                raise ServerUnreachable(f"{self._url}: its update routes are not open here")
        else:
            if self._control is None:
                spec = self._spec
                # This process's own keys, from the environment variables that the spec names.
                keys = (read_key(os.environ, n) for n in (spec.api_key_env, spec.admin_key_env))
                deadlines = spec.commit_deadline_s, spec.load_deadline_s
                self._control = make_control(
                    spec.engine, ServerAccess(self._url, *deadlines, *keys)
                )
            target = self._control
        try:
            typed = [
                msgspec.convert(value, kind)
                for value, kind in zip(arguments, method.parameters, strict=True)
            ]
        except (msgspec.ValidationError, ValueError) as error:
            raise ProtocolError(f"arguments of {call.method}: {error}") from error
        try:
            value = getattr(target, call.method.removeprefix(STOCK))(*typed)
        finally:
            self.engine = self._control.engine if self._control is not None else self.engine
        if call.method == "stock" and value is not None:
            number = next(self._numbers)
            self._routes[number] = value
            return number
        return msgspec.to_builtins(value, order="deterministic")

    def close(self) -> None:
        """Close the control's connections, which a later call opens again."""
        if self._control is not None:
            self._control.close()
            self._control = None

    def close_routes(self, number: int) -> None:
        if (routes := self._routes.pop(number, None)) is not None:
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
        self._loaded_in: int | None = None
        self.url = access.url

    def __repr__(self) -> str:
        return f"<RemoteControl {self.url}, {self.engine or 'not asked yet'}>"

    def __getattr__(self, method: str) -> Callable[..., Any]:
        """Return a method of ServerControl."""
        if method not in METHODS:
            raise AttributeError(method)
        return lambda *arguments: self._call(method, *arguments)

    def _call(self, method: str, *arguments: Any, generation: int | None = None) -> Any:
        a = self._access
        within_s = METHODS[method].requests * a.deadline_s + MARGIN_S
        within_s += 2 * min(QUERY_S, a.deadline_s)  # the service may have to ask which engine it is
        within_s += (a.load_deadline_s or 0.0) if method == "load" else 0.0
        answer = self._client.engine_call(
            self.url, method, _encode(arguments), within_s, generation
        )
        self.engine = answer.engine or self.engine
        value = value_of(answer)
        return value if method == "stock" else msgspec.convert(value, METHODS[method].result)

    def stock(self) -> StockRoutes | None:
        generation = self._client.generation
        number = self._call("stock", generation=generation)
        if number is None:
            return None
        return cast(StockRoutes, RemoteStock(self._client, self.url, generation, number))

    def load(self, info: Mapping[str, Any]) -> None:
        self._loaded_in = generation = self._client.generation
        self._call("load", info, generation=generation)

    def finish(self, label: str) -> None:
        """See ServerControl. Raises ServerUnreachable if the service lost our session since the
        load: then it is unknown whether the server restarted too."""
        generation, self._loaded_in = self._loaded_in, None
        self._call("finish", label, generation=generation)

    def close(self) -> None:
        """Let the service close its connections; does not wait for it."""
        self._client.engine_tell(self.url, CLOSE, ())


class RemoteStock:
    """StockRoutes open at the service, valid within one generation of the session."""

    def __init__(self, client: "RolloutClient", url: str, generation: int, number: int) -> None:
        self._client, self._url, self._generation, self._number = client, url, generation, number

    def __getattr__(self, method: str) -> Callable[..., Any]:
        """Return a method of StockRoutes; its last argument is the deadline of each request."""
        if STOCK + method not in METHODS:
            raise AttributeError(method)

        def call(*arguments: Any) -> Any:
            name, sent = STOCK + method, (self._number, *_encode(arguments))
            within_s = METHODS[name].requests * arguments[-1] + MARGIN_S
            answer = self._client.engine_call(self._url, name, sent, within_s, self._generation)
            return msgspec.convert(value_of(answer), METHODS[name].result)

        return call

    def close(self) -> None:
        """See StockRoutes; does not wait for the service."""
        self._client.engine_tell(self._url, STOCK + CLOSE, (self._number,))
