"""Engine calls that the controller makes for a lane: the trainer's end. Each is a frame there, and a future for its outcome."""

from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import asdict
from typing import Any, Protocol

from titan_grpo.engines.controls import ASK_S, AUTO, ServerAccess
from titan_grpo.engines.sglang_stock import Announced, Group, StockRoutes
from titan_grpo.errors import ServerUnreachable
from titan_grpo.rollout.engine_calls import CLOSE, ERRORS, STOCK
from titan_grpo.rollout.messages import EngineAnswer

MARGIN_S = 5.0
"""How much longer than the call's own deadlines its outcome is waited for, in seconds: the way there and back."""

STEPS = {"paused": 4, "drop_kv": 2, "load": 5, "finish": 4}
"""Most requests that a method makes of its server, each with a deadline; other methods make one, and two ask the engine."""


class Outstanding:
    """Calls without an outcome, by number. Used under the client's lock; their futures are waited for without it."""

    def __init__(self) -> None:
        self._futures: dict[int, Future[EngineAnswer]] = {}
        self.era = 0
        """How often the far end has forgotten everything: what it holds between two calls holds within an era."""

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

    def engine_call(self, url: str, method: str, arguments: tuple[Any, ...], within_s: float, era: int | None) -> EngineAnswer:
        """Wait for the outcome. ServerUnreachable if there is none within ``within_s`` seconds, or ``era`` is over."""

    def engine_tell(self, url: str, method: str, arguments: tuple[Any, ...]) -> None:
        """A call without an outcome. Never blocks, raises nothing."""


class RemoteControl:
    """A ServerControl whose calls are made by the controller, with the controller's keys. Used by one lane thread."""

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
        """A controller that was restarted since the load can not tell whether the server was restarted too: then it fails."""
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
        return value_of(self._caller.engine_call(self._url, STOCK + method, arguments, within_s, self._era))

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
        fields = {"names": list(announced.names), "dtypes": list(announced.dtypes), "shapes": shapes}
        self._call("update", group, fields, timeout_s=timeout_s)

    def close(self) -> None:
        self._caller.engine_tell(self._url, STOCK + CLOSE, (self._number,))


def value_of(answer: EngineAnswer) -> Any:
    """What a call returned, or raises what it raised."""
    if answer.kind:
        raise ERRORS.get(answer.kind, ServerUnreachable)(answer.error)
    return answer.value
