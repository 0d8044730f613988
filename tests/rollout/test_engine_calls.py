"""Engine calls through the worker, over each transport: real processes, and servers that answer
what a test wrote down."""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tests.rigs.board import Board
from tests.rigs.sockets import free_port
from tests.rigs.threads import no_free_thread
from tests.rollout.conftest import MakeServer
from titan_grpo.engines.http import HttpRefused, ServerAccess
from titan_grpo.engines.server import ServerControl, make_control
from titan_grpo.engines.sglang_stock import MOST, Announced, Group
from titan_grpo.errors import (
    ProtocolError,
    ServerRefused,
    ServerUnreachable,
    TransferFailed,
    kind_of,
)
from titan_grpo.protocol.messages import ServerState
from titan_grpo.rollout.child import LocalTransport
from titan_grpo.rollout.client import RolloutClient
from titan_grpo.rollout.engine_calls import (
    CLOSE,
    METHODS,
    REQUESTS,
    EngineCalls,
    RemoteControl,
    value_of,
)
from titan_grpo.rollout.messages import Answer, EngineCall, RolloutSpec
from titan_grpo.rollout.remote import RemoteTransport
from titan_grpo.rollout.service import Service

ENGINE_KEY, KEY_VARIABLE = "the-engines-own-key", "TITAN_GRPO_TEST_ENGINE_KEY"
CALL_S, WAIT_S = 60.0, 60.0
HOLD_S = 2 * CALL_S
"""A call that is held ends by its own deadline before."""

VLLM: dict[str, Any] = {
    "GET /weight_info": {"weight_version": "r:1:f"},
    "GET /is_paused": {"is_paused": True},
    "POST /reset_prefix_cache": {"success": True},
} | {
    f"POST /{name}": {}
    for name in (
        *("init_weight_transfer_engine", "pause", "resume", "start_weight_update"),
        *("update_weights", "finish_weight_update", "update_weight_version"),
    )
}

STOCK = {
    "GET /model_info": {"weight_version": "default"},
    "GET /server_info": {"tp_size": 2, **MOST},
    "POST /weights_checker": {"ranks": [{"checksums": {"a": 1, "b": 2}}]},
} | {
    f"POST /{name}": {}
    for name in (
        *("init_weights_update_group", "destroy_weights_update_group", "begin_weight_update"),
        *("update_weights_from_distributed", "end_weight_update", "update_weight_version"),
    )
}


class Engine(Board):
    """A server with these answers by route, and the bodies that it got. The route in ``held`` is
    answered when the test lets it go, or is over."""

    def __init__(self, answers: dict[str, Any]) -> None:
        super().__init__()
        self.held, self.holding, self.released = "", threading.Event(), threading.Event()
        self.bodies: list[Any] = []
        self.routes = {route: partial(self._answer, route, answers[route]) for route in answers}

    def _answer(self, route: str, answer: Any, body: Any) -> tuple[int, Any]:
        self.bodies.append(body)
        if route == self.held:
            self.holding.set()
            self.released.wait(HOLD_S)
        return 200, answer

    def close(self) -> None:
        self.released.set()
        super().close()


@pytest.fixture
def engine() -> Iterator[Callable[..., Engine]]:
    made: list[Engine] = []

    def make(answers: dict[str, Any] = VLLM) -> Engine:
        made.append(Engine(answers))
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.fixture
def spec(model_dir: str, monkeypatch: pytest.MonkeyPatch) -> RolloutSpec:
    monkeypatch.setenv(KEY_VARIABLE, ENGINE_KEY)
    return RolloutSpec(
        model_dir=model_dir,
        api_key_env=KEY_VARIABLE,
        commit_deadline_s=CALL_S,
        load_deadline_s=CALL_S,
    )


class Far:
    """A service at one address, which may be started again there."""

    def __init__(self) -> None:
        self.address = f"127.0.0.1:{free_port()}"
        self.start()

    def start(self) -> None:
        self.service = Service(self.address, "", 120.0, lambda _: None)

    def restart(self) -> None:
        self.service.close()
        self.start()


@pytest.fixture
def far() -> Iterator[Far]:
    one = Far()
    yield one
    one.service.close()


@pytest.fixture(params=["local", "remote"])
def client(request: pytest.FixtureRequest, spec: RolloutSpec) -> Iterator[RolloutClient]:
    link = (
        LocalTransport()
        if request.param == "local"
        else RemoteTransport(f"http://{request.getfixturevalue('far').address}", "")
    )
    one = RolloutClient(spec, "", link)
    one.start(60)
    yield one
    one.close(5)


def control(client: RolloutClient, engine: Engine, name: str = "auto") -> ServerControl:
    """Without a key: the worker has it."""
    return client.control(name, ServerAccess(engine.url, CALL_S))


def everything(one: ServerControl) -> list[object]:
    """What a lane asks of a server, and what it is answered."""
    one.greet({"run": "r", "epoch": 2})
    calls: tuple[Callable[[], object], ...] = (
        one.stock,
        lambda: one.engine,
        one.label,
        one.paused,
        one.pause,
        one.drop_kv,
        lambda: one.load({"number": 1}),
        lambda: one.finish("r:2:g"),
        lambda: one.relabel("r:3:h"),
        one.resume,
    )
    return [call() for call in calls]


def test_what_reaches_the_server_is_what_a_control_from_here_would_send(
    client: RolloutClient, engine: Callable[..., Engine]
) -> None:
    near, away = engine(), engine()
    direct = make_control("auto", ServerAccess(near.url, CALL_S, None, ENGINE_KEY))
    assert everything(control(client, away)) == everything(direct)
    direct.close()
    assert (away.asked, away.bodies) == (near.asked, near.bodies)
    assert ("POST /update_weights", ENGINE_KEY) in away.asked


def test_a_stock_servers_own_routes_are_called_as_from_here(
    client: RolloutClient, engine: Callable[..., Engine]
) -> None:
    near, away = engine(STOCK), engine(STOCK)
    direct = make_control("auto", ServerAccess(near.url, CALL_S, None, ENGINE_KEY))
    found = []
    for one in (direct, control(client, away)):
        routes = one.stock()
        assert routes is not None
        found.append([routes.workers(CALL_S), routes.parameter_names(CALL_S)])
        routes.init_group(Group("g", "127.0.0.1", 1, 3, "gloo"), CALL_S)
        routes.begin(CALL_S)
        routes.update("g", Announced(["a"], ["bfloat16"], [(2, 3)]), CALL_S)
        one.finish("r:2:g")
        routes.destroy_group("g", CALL_S)
        routes.close()
        one.close()
    assert found[0] == found[1] == [2, {"a", "b"}]
    assert (away.asked, away.bodies) == (near.asked, near.bodies)


def test_errors_keep_their_types_and_words(
    client: RolloutClient, engine: Callable[..., Engine]
) -> None:
    server = engine({"GET /weight_info": {"weight_version": "7"}})
    one = control(client, server)
    with pytest.raises(ServerRefused, match=f"{server.url}: POST /resume was refused with 404"):
        one.resume()
    with pytest.raises(ProtocolError, match=r"must be one of .*got '__class__'"):
        value_of(client.engine_call(server.url, "__class__", (), CALL_S))
    nobody = client.control("auto", ServerAccess(f"http://127.0.0.1:{free_port()}", CALL_S))
    with pytest.raises(ServerUnreachable, match=r"GET /model_info failed \(Connection"):
        nobody.label()


def test_a_server_that_hangs_holds_up_neither_another_one_nor_the_rollouts(
    client: RolloutClient,
    engine: Callable[..., Engine],
    completion_server: MakeServer,
) -> None:
    hangs, answers, prompts = engine(), engine(), completion_server()
    hangs.held = "POST /pause"
    with ThreadPoolExecutor(1) as pool:
        paused = pool.submit(control(client, hangs).pause)
        assert hangs.holding.wait(WAIT_S)
        assert control(client, answers).label() == "r:1:f"
        client.set_server(ServerState(prompts.url, 0, True, "0"))
        assert client.next_batch(0, 1, WAIT_S)
        assert not paused.done()
        hangs.released.set()
        paused.result(WAIT_S)


def test_an_outcome_that_is_late_is_dropped_and_what_waited_too_long_is_not_called(
    client: RolloutClient, engine: Callable[..., Engine]
) -> None:
    server = engine()
    server.held = "GET /weight_info"
    assert control(client, server).engine == ""

    def given_up(method: str, within_s: float) -> None:
        with pytest.raises(
            ServerUnreachable,
            match=f"no outcome of {method} came from the rollouts within {within_s:g} s",
        ):
            client.engine_call(server.url, method, (), within_s)

    with ThreadPoolExecutor(1) as pool:
        hanging = pool.submit(given_up, "paused", 2.0)
        assert server.holding.wait(WAIT_S)
        given_up("pause", 0.1)
        client.in_flight(WAIT_S)  # by its answer the pause has come too, and is behind the other
        given_up("paused", 0.5)
        hanging.result(WAIT_S)
    server.released.set()
    control(client, server).resume()
    assert "POST /pause" not in server.paths
    # What is late before it is sent has no answer at all.
    assert 1 <= client.counters()["late_answers"] <= 3


def test_threads_end_with_their_calls_and_routes_outlive_a_close_of_their_servers_control(
    spec: RolloutSpec, engine: Callable[..., Engine]
) -> None:
    server, answers = engine(STOCK), SimpleQueue[Answer]()
    calls = EngineCalls(spec, answers.put)

    def made(method: str, *arguments: Any) -> Any:
        calls.take(EngineCall(0, server.url, method, arguments, CALL_S))
        return value_of(answers.get(timeout=WAIT_S))

    number = made("stock")
    for _ in range(2):
        calls.take(EngineCall(0, server.url, CLOSE, (), CALL_S))
        assert made("label") == "default"
        assert made("stock.workers", number, CALL_S) == 2
        for thread in threading.enumerate():
            if server.url in thread.name:
                thread.join(WAIT_S)
                assert not thread.is_alive()


def test_a_close_that_fails_does_not_end_the_calls_of_its_server(
    spec: RolloutSpec, engine: Callable[..., Engine], caplog: pytest.LogCaptureFixture
) -> None:
    server, answers = engine(STOCK), SimpleQueue[Answer]()
    calls = EngineCalls(spec, answers.put)
    calls.take(EngineCall(0, server.url, "stock", (), CALL_S))
    number = value_of(answers.get(timeout=WAIT_S))
    calls.take(EngineCall(1, server.url, "stock.close", (), CALL_S))  # without its number
    calls.take(EngineCall(2, server.url, "stock.workers", (number, CALL_S), CALL_S))
    assert value_of(answers.get(timeout=WAIT_S)) == 2
    assert f"engine call stock.close of {server.url}" in caplog.text


def test_a_call_for_which_no_thread_starts_fails_at_once_and_the_next_one_is_made(
    spec: RolloutSpec, engine: Callable[..., Engine]
) -> None:
    server, answers = engine(STOCK), SimpleQueue[Answer]()
    calls = EngineCalls(spec, answers.put)

    with no_free_thread():
        calls.take(EngineCall(7, server.url, "label", (), CALL_S))
    answer = answers.get(timeout=WAIT_S)
    assert answer.number == 7
    with pytest.raises(ServerUnreachable, match="no thread could be started"):
        value_of(answer)
    calls.take(EngineCall(8, server.url, "label", (), CALL_S))
    assert value_of(answers.get(timeout=WAIT_S)) == "default"


def test_no_call_is_made_after_the_end(
    client: RolloutClient, engine: Callable[..., Engine]
) -> None:
    server = engine()
    server.held = "POST /pause"
    one = control(client, server)
    with ThreadPoolExecutor(1) as pool:
        pausing = pool.submit(one.pause)
        assert server.holding.wait(WAIT_S)
        client.close(5)
        calls: tuple[Callable[[], object], ...] = (lambda: pausing.result(WAIT_S), one.resume)
        for act in calls:
            with pytest.raises(ServerUnreachable, match="the rollouts have ended"):
                act()
    one.close()


def test_a_service_that_was_restarted_fails_what_it_had_begun_and_nothing_else(
    spec: RolloutSpec, far: Far, engine: Callable[..., Engine]
) -> None:
    server = engine()
    client = RolloutClient(spec, "", RemoteTransport(f"http://{far.address}", ""))
    client.start(60)
    one = control(client, server)
    one.load({"number": 1})
    routes = control(client, engine(STOCK)).stock()
    assert routes is not None
    server.held = "POST /pause"
    with ThreadPoolExecutor(1) as pool:
        pausing = pool.submit(one.pause)
        assert server.holding.wait(WAIT_S)
        far.restart()
        with pytest.raises(ServerUnreachable, match="lost this run's session; it was making"):
            pausing.result(WAIT_S)
    lost = "was not called: the rollout service lost the session"
    with pytest.raises(ServerUnreachable, match=f"finish {lost}"):
        one.finish("r:2:g")
    with pytest.raises(ServerUnreachable, match=f"workers {lost}"):
        routes.workers(CALL_S)
    assert not {"POST /finish_weight_update", "POST /resume"} & {*server.paths}
    one.resume()
    assert one.label() == "r:1:f"
    client.close(5)


def test_calls_hold_no_key() -> None:
    asked: list[tuple[Any, ...]] = []

    def engine_call(*call: Any) -> Answer:
        asked.append(call)
        return Answer(0)

    client = cast(RolloutClient, SimpleNamespace(engine_call=engine_call))
    access = ServerAccess("http://a:1", 60.0, None, ENGINE_KEY, ENGINE_KEY)
    one = RemoteControl(client, "auto", access)
    one.greet({"run": "r"})
    one.load({"number": 1})
    one.finish("r:2:g")
    assert [method for _, method, *_ in asked] == ["greet", "load", "finish"]
    assert ENGINE_KEY not in repr(asked)


def test_an_error_crosses_as_the_nearest_that_has_a_name_there() -> None:
    assert [kind_of(e) for e in (HttpRefused("no", 500), TransferFailed("t"), KeyError("k"))] == [
        "ServerRefused",
        "TransferFailed",
        "ProtocolError",
    ]


def test_the_table_of_requests_names_methods() -> None:
    assert REQUESTS.keys() <= METHODS.keys()
