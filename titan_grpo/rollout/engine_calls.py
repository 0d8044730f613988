"""Engine calls for a trainer that makes its own elsewhere: the controller's end, a thread per
server around its ServerControl.

A call may take as long as a commit, so it is nothing for the loop that makes rollouts.

Engine calls that the controller makes for a lane: the trainer's end. Each is a frame there, and a
future for its outcome."""

import itertools
import logging
import os
import queue
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import asdict
from typing import Any, Protocol

from titan_grpo.engines.control import ServerControl, StockRoutes
from titan_grpo.engines.server import ASK_S, AUTO, ServerAccess, make_control
from titan_grpo.engines.sglang_stock import Announced, Group
from titan_grpo.errors import (
    ConfigError,
    PeerError,
    ProtocolError,
    ServerRefused,
    ServerUnreachable,
    TitanGrpoError,
    TransferFailed,
    UpstreamError,
)
from titan_grpo.rollout.messages import EngineAnswer, EngineCall
from titan_grpo.rollout.spec import RolloutSpec

logger = logging.getLogger(__name__)

METHODS = frozenset(
    {"label", "stock", "greet", "paused", "pause", "drop_kv", "load", "finish", "relabel", "resume"}
)
"""Methods of a ServerControl that are called from afar; and ``close``, which has no answer."""

STOCK = "stock."
"""Before the methods of StockRoutes."""

CLOSE = "close"

ERRORS: dict[str, type[TitanGrpoError]] = {
    kind.__name__: kind
    for kind in (
        ServerRefused,
        ServerUnreachable,
        TransferFailed,
        PeerError,
        ConfigError,
        UpstreamError,
        ProtocolError,
    )
}
"""Errors that cross by name and text. Others cross as the nearest of them that they are."""

Called = tuple[EngineCall, float]
"""With when it came."""


def kind_of(error: BaseException) -> str:
    """The name under which an error crosses; ProtocolError for what no server can be blamed for."""
    return next(
        (kind.__name__ for kind in type(error).__mro__ if kind.__name__ in ERRORS),
        ProtocolError.__name__,
    )


def access_of(spec: RolloutSpec, url: str, environ: Mapping[str, str]) -> ServerAccess:
    """How a server is reached from here: with this process's own keys, by the names that the spec
    says."""
    api_key, admin_key = (
        environ.get(name, "") if name else "" for name in (spec.api_key_env, spec.admin_key_env)
    )
    return ServerAccess(url, spec.commit_deadline_s, spec.load_deadline_s, api_key, admin_key)


class Plane(Protocol):
    """What one thread calls: a server's control, or its update routes. Opened by what needs it."""

    @property
    def engine(self) -> str:
        """What answers there, empty as long as nobody has asked."""

    def call(self, call: EngineCall) -> Any:
        """Make it; a JSON value. Raises TitanGrpoError."""

    def close(self, call: EngineCall | None = None) -> None:
        """Close the connections that ``call`` names, or all; a later call opens them anew."""


class EngineCalls:
    """Makes the calls of all servers. ``answer`` must not block; it is called by the servers'
    threads."""

    def __init__(self, spec: RolloutSpec, answer: Callable[[EngineAnswer], None]) -> None:
        self._spec, self._answer = spec, answer
        self._lock = threading.Lock()
        self._queues: dict[str, queue.SimpleQueue[Called | None]] = {}
        self._closed = False

    def take(self, call: EngineCall) -> None:
        """Any thread; never blocks."""
        stock = STOCK if call.method.startswith(STOCK) else ""
        with self._lock:
            if self._closed:
                return
            if call.url not in self._queues:
                control = ControlPlane(self._spec, call.url)
                self._begin(call.url, control)
                self._begin(STOCK + call.url, StockPlane(control))
            self._queues[stock + call.url].put((call, time.monotonic()))

    def close(self) -> None:
        """Take no more. What a server has not answered is not waited for. Idempotent."""
        with self._lock:
            self._closed = True
            for calls in self._queues.values():
                calls.put(None)

    def _begin(self, name: str, plane: Plane) -> None:
        calls = self._queues[name] = queue.SimpleQueue()
        threading.Thread(
            target=self._serve, args=(plane, calls), name=f"calls {name}", daemon=True
        ).start()

    def _serve(self, plane: Plane, calls: "queue.SimpleQueue[Called | None]") -> None:
        # no deadline: close() of its owner puts None into the queue; the thread is a daemon
        while (called := calls.get()) is not None:
            if called[0].method.removeprefix(STOCK) == CLOSE:
                plane.close(called[0])
            else:
                self._answer(_outcome(plane, *called))
        plane.close()


def _outcome(plane: Plane, call: EngineCall, came: float) -> EngineAnswer:
    try:
        if time.monotonic() - came > call.within_s:
            raise ServerUnreachable(
                f"{call.url}: {call.method} was not called: calls before it took"
                f" {call.within_s:.1f} s"
            )
        return EngineAnswer(call.number, plane.call(call), plane.engine)
    except TitanGrpoError as error:
        return EngineAnswer(call.number, None, plane.engine, str(error), kind_of(error))
    except Exception as error:  # top of a thread: a lane waits for the answer
        logger.exception("engine call %s of %s", call.method, call.url)
        text = f"{call.method} of {call.url} failed by a bug of ours: {error!r}"
        return EngineAnswer(call.number, None, plane.engine, text, kind_of(error))


class ControlPlane:
    """A server's control, made at its first call."""

    def __init__(self, spec: RolloutSpec, url: str) -> None:
        self._spec, self._url = spec, url
        self._control: ServerControl | None = None
        self.engine = ""
        self._numbers = itertools.count()
        self.routes: dict[int, StockRoutes] = {}
        """What ``stock`` found and nobody closed yet, by the number that it answered."""

    def call(self, call: EngineCall) -> Any:
        """See Plane."""
        if call.method not in METHODS:
            raise ProtocolError(
                f"an engine call must be one of {', '.join(sorted(METHODS))}, got {call.method!r}"
            )
        if self._control is None:
            self._control = make_control(
                self._spec.engine, access_of(self._spec, self._url, os.environ)
            )
        try:
            value = getattr(self._control, call.method)(*call.arguments)
        finally:
            self.engine = self._control.engine
        if call.method != "stock" or value is None:
            return value
        number = next(self._numbers)
        self.routes[number] = value
        return number

    def close(self, call: EngineCall | None = None) -> None:
        """See Plane."""
        if self._control is not None:
            self._control.close()
            self._control = None


class StockPlane:
    """The update routes that the control found. They go beside the lane's control, so they have a
    thread of their own."""

    def __init__(self, control: ControlPlane) -> None:
        self._control = control

    @property
    def engine(self) -> str:
        """See Plane."""
        return self._control.engine

    def call(self, call: EngineCall) -> Any:
        """See Plane. The number of the routes comes first; what is no JSON value came as a
        dictionary of its fields."""
        number, *arguments = call.arguments
        routes = self._control.routes.get(number)
        if routes is None:
            raise ServerUnreachable(f"{call.url}: its update routes are not open here")
        match call.method.removeprefix(STOCK), arguments:
            case "workers", [within_s]:
                return routes.workers(within_s)
            case "parameter_names", [within_s]:
                return sorted(routes.parameter_names(within_s))
            case "init_group", [group, within_s]:
                return routes.init_group(Group(**group), within_s)
            case "destroy_group", [name, within_s]:
                return routes.destroy_group(name, within_s)
            case "begin", [within_s]:
                return routes.begin(within_s)
            case "update", [name, announced, within_s]:
                return routes.update(name, Announced(**announced), within_s)
        raise ProtocolError(f"no update route is called by {call!r}")

    def close(self, call: EngineCall | None = None) -> None:
        """See Plane."""
        for number in list(self._control.routes) if call is None else call.arguments:
            if (routes := self._control.routes.pop(number, None)) is not None:
                routes.close()


MARGIN_S = 5.0
"""How much longer than the call's own deadlines its outcome is waited for, in seconds: the way
there and back."""

STEPS = {"paused": 4, "drop_kv": 2, "load": 5, "finish": 4}
"""Most requests that a method makes of its server, each with a deadline; other methods make one,
and two ask the engine."""


class Outstanding:
    """Calls without an outcome, by number. Used under the client's lock; their futures are waited
    for without it."""

    def __init__(self) -> None:
        self._futures: dict[int, Future[EngineAnswer]] = {}
        self.era = 0
        """How often the far end has forgotten everything: what it holds between two calls holds
        within an era."""

    def begin(self, number: int) -> "Future[EngineAnswer]":
        """A call is about to be sent."""
        self._futures[number] = Future()
        return self._futures[number]

    def answered(self, answer: EngineAnswer) -> bool:
        """False for an outcome that nobody waits for any more."""
        future = self._futures.pop(answer.number, None)
        if future is not None:
            future.set_result(answer)
        return future is not None

    def give_up(self, number: int) -> None:
        """Past its deadline."""
        self._futures.pop(number, None)

    def lose(self, why: str) -> None:
        """No outcome of what is open will come: whether the server did it is unknown."""
        self.era += 1
        lost, self._futures = self._futures, {}
        for future in lost.values():
            future.set_exception(ServerUnreachable(why))


class Caller(Protocol):
    """The one object that engine calls go through (RolloutClient)."""

    @property
    def era(self) -> int:
        """See Outstanding."""

    def engine_call(
        self, url: str, method: str, arguments: tuple[Any, ...], within_s: float, era: int | None
    ) -> EngineAnswer:
        """Wait for the outcome. ServerUnreachable if there is none within ``within_s`` seconds, or
        ``era`` is over."""

    def engine_tell(self, url: str, method: str, arguments: tuple[Any, ...]) -> None:
        """A call without an outcome. Never blocks, raises nothing."""


class RemoteControl:
    """A ServerControl whose calls are made by the controller, with the controller's keys. Used by
    one lane thread."""

    def __init__(self, caller: Caller, engine: str, access: ServerAccess) -> None:
        """``engine``: a value of rollout.engine. The keys of ``access`` stay here."""
        self._caller, self._access = caller, access
        self._engine = "" if engine == AUTO else engine
        self._loaded_in: int | None = None
        self.url = access.url

    def __repr__(self) -> str:
        return f"<RemoteControl {self.url}, {self._engine or 'not asked yet'}>"

    @property
    def engine(self) -> str:
        """See ServerControl."""
        return self._engine

    def _call(self, method: str, *arguments: Any, era: int | None = None) -> Any:
        a = self._access
        within_s = STEPS.get(method, 1) * a.deadline_s + 2 * min(ASK_S, a.deadline_s) + MARGIN_S
        if method == "load":
            within_s += a.load_deadline_s or 0.0
        answer = self._caller.engine_call(self.url, method, arguments, within_s, era)
        self._engine = answer.engine or self._engine
        return value_of(answer)

    def label(self) -> str:
        return str(self._call("label"))

    def stock(self) -> StockRoutes | None:
        era = self._caller.era
        number = self._call("stock", era=era)
        return None if number is None else RemoteStock(self._caller, self.url, era, int(number))

    def greet(self, hello: Mapping[str, Any]) -> None:
        self._call("greet", dict(hello))

    def paused(self) -> bool:
        return bool(self._call("paused"))

    def pause(self) -> None:
        self._call("pause")

    def drop_kv(self) -> None:
        self._call("drop_kv")

    def load(self, info: Mapping[str, Any]) -> None:
        self._loaded_in = era = self._caller.era
        self._call("load", dict(info), era=era)

    def finish(self, label: str) -> None:
        """A controller that was restarted since the load can not tell whether the server was
        restarted too: then it fails."""
        era, self._loaded_in = self._loaded_in, None
        self._call("finish", label, era=era)

    def relabel(self, label: str) -> None:
        self._call("relabel", label)

    def resume(self) -> None:
        self._call("resume")

    def close(self) -> None:
        """Let the controller close its connections; not waited for."""
        self._caller.engine_tell(self.url, CLOSE, ())


class RemoteStock:
    """StockRoutes that the controller has open, in one of its lives."""

    def __init__(self, caller: Caller, url: str, era: int, number: int) -> None:
        self._caller, self._url, self._era, self._number = caller, url, era, number

    def _call(self, method: str, *arguments: Any, timeout_s: float) -> Any:
        # opening an update may end another one first
        within_s = (3 if method == "begin" else 1) * timeout_s + MARGIN_S
        arguments = (self._number, *arguments, timeout_s)
        return value_of(
            self._caller.engine_call(self._url, STOCK + method, arguments, within_s, self._era)
        )

    def workers(self, timeout_s: float) -> int:
        return int(self._call("workers", timeout_s=timeout_s))

    def parameter_names(self, timeout_s: float) -> frozenset[str]:
        return frozenset(self._call("parameter_names", timeout_s=timeout_s))

    def init_group(self, group: Group, timeout_s: float) -> None:
        self._call("init_group", asdict(group), timeout_s=timeout_s)

    def destroy_group(self, name: str, timeout_s: float) -> None:
        self._call("destroy_group", name, timeout_s=timeout_s)

    def begin(self, timeout_s: float) -> None:
        self._call("begin", timeout_s=timeout_s)

    def update(self, group: str, announced: Announced, timeout_s: float) -> None:
        shapes = [list(shape) for shape in announced.shapes]
        fields = {
            "names": list(announced.names),
            "dtypes": list(announced.dtypes),
            "shapes": shapes,
        }
        self._call("update", group, fields, timeout_s=timeout_s)

    def close(self) -> None:
        self._caller.engine_tell(self._url, STOCK + CLOSE, (self._number,))


def value_of(answer: EngineAnswer) -> Any:
    """What a call returned, or raises what it raised."""
    if answer.kind:
        raise ERRORS.get(answer.kind, ServerUnreachable)(answer.error)
    return answer.value
