"""A stock SGLang server, where nothing of ours runs: weights are streamed over its own routes, as
safely as these allow."""

import threading
from collections.abc import Callable, Iterator
from datetime import timedelta

import pytest

from tests.conformance import commits, streaming
from tests.conformance.crowd import CONTEXT
from tests.conformance.engine import EngineUnderTest, remake
from titan_grpo.engines import sglang
from titan_grpo.engines.http import HttpRefused
from titan_grpo.engines.launch import Server, ServerSpec
from titan_grpo.engines.sglang_stock import Announced, Group, StockRoutes
from titan_grpo.errors import ServerRefused
from titan_grpo.protocol.lane import LaneEvent, Point
from titan_grpo.protocol.messages import Standing
from titan_grpo.runkey import Key
from titan_grpo.sync.lane import STOOD_STILL_S
from titan_grpo.sync.transports.broadcast import host_store

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def stock(
    nothing_outlives_the_tests: None, tmp_path_factory: pytest.TempPathFactory, sglang_python: str
) -> Iterator[EngineUnderTest]:
    folder = tmp_path_factory.mktemp("stock")
    model = remake(100, folder / "model")
    spec = ServerSpec(
        sglang_python,
        str(model),
        str(folder / "server.log"),
        "sglang",
        max_model_len=CONTEXT,
        weight_transfer=False,
        env={"SGLANG_PLUGINS": "none"},
        api_key="api",
        admin_key="adm",
    )
    with Server(spec) as server:
        server.wait_healthy(280.0)
        yield EngineUnderTest(server, folder)


@pytest.mark.parametrize(
    "check", streaming.CHECKS, ids=[check.__name__ for check in streaming.CHECKS]
)
def test_stock_sglang(check: Callable[[EngineUnderTest], None], stock: EngineUnderTest) -> None:
    check(stock)


def test_a_rollout_service_calls_its_routes_for_a_lane_elsewhere(
    stock: EngineUnderTest, through_service: Callable[[EngineUnderTest], EngineUnderTest]
) -> None:
    streaming.streamed_weights_are_computed_also_the_second_time(through_service(stock))


def test_a_staged_lane_says_what_is_missing(stock: EngineUnderTest) -> None:
    with commits.sender(stock) as trainer:
        weights, _ = trainer.make(1)
        with pytest.raises(
            ServerRefused,
            match=r"install titan_grpo in the server's environment.*apply = \"streamed\"",
        ):
            trainer.link(weights).__enter__()


def test_a_run_with_a_run_key_does_not_write_to_a_server_that_can_not_prove_it(
    stock: EngineUnderTest,
) -> None:
    before = stock.run(sglang.label())
    with streaming.trainer(stock, key=Key.generate()) as run:
        weights, _ = run.make(1)
        run.start(weights.manifest)
        assert run.servers.wait(lambda: run.servers.last_error(run.url) is not None, 60.0)
        assert "can neither prove it nor ask for it" in str(run.servers.take_error())
    assert stock.run(sglang.label()) == before


def test_a_group_whose_trainer_is_gone_is_refused_and_the_server_goes_on(
    stock: EngineUnderTest,
) -> None:
    routes = StockRoutes(stock.access)
    store = host_store("127.0.0.1")
    answers: list[HttpRefused] = []

    def join() -> None:
        try:
            routes.init_group(Group("nobody-there", "127.0.0.1", port, 2, "gloo"), 60.0)
        except HttpRefused as error:
            answers.append(error)

    port = store.port
    asking = threading.Thread(target=join, daemon=True)
    asking.start()
    store.wait(["nobody-there/nobody-there//cpu//0/1"], timedelta(seconds=60))
    del store  # the trainer dies before its own rank is there
    asking.join(60.0)
    assert [error.status for error in answers] == [400]
    stock.run(sglang.health())
    streaming.streamed_weights_are_computed_also_the_second_time(stock)


def test_a_lane_that_stood_still_before_its_resume_has_its_commit(stock: EngineUnderTest) -> None:
    def watch(passing: LaneEvent) -> None:
        if passing.point is Point.RESUME:
            threading.Event().wait(2 * STOOD_STILL_S)

    with streaming.trainer(stock, watch) as run:
        weights, _ = run.make(1)
        run.publish(1, weights)
        run.until(Standing.HOLDS, 1)
        assert run.servers.take_error() is None


def test_a_failed_flush_that_left_other_weights_behind_is_never_asked_for() -> None:
    """SGLang answers 400 after it took the weights if the cache cannot be flushed: so no update
    flushes it."""
    from titan_grpo.engines.sglang_stock import update

    assert update("group", Announced(["a"], ["bfloat16"], [(2,)]), 1.0).json["flush_cache"] is False
