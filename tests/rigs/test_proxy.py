"""The scripted proxy, between a real client and a real HTTP server."""

from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest

from tests.rigs.board import Board
from tests.rigs.proxy import Act, Proxy
from tests.rigs.trainer_handle import wait_until
from titan_grpo.engines.http import Call, HttpRefused, SyncDriver
from titan_grpo.errors import PeerError, ServerUnreachable

pytestmark = pytest.mark.timeout(60)


class Counting(Board):
    """Answers every POST with how many it got."""

    def __init__(self) -> None:
        super().__init__()
        self.got: list[Any] = []
        self.routes = {f"POST /{path}": self.count for path in "xy"}

    def count(self, body: Any) -> tuple[int, int]:
        self.got.append(body)
        return 200, len(self.got)


@pytest.fixture
def server() -> Iterator[Counting]:
    with closing(Counting()) as server:
        yield server


@pytest.fixture
def proxy(server: Counting) -> Iterator[Proxy]:
    with Proxy(server.address) as proxy:
        yield proxy


@pytest.fixture
def driver(proxy: Proxy) -> Iterator[SyncDriver]:
    with SyncDriver(proxy.url) as driver:
        yield driver


def call(path: str = "/x", body: Any = None, timeout_s: float = 30.0, **params: str) -> Call[Any]:
    return Call("POST", path, timeout_s, lambda a: a, json=body or {"a": 1}, params=params)


@pytest.mark.parametrize(
    ("act", "outcome", "seen"),
    [
        (Act.FAIL, HttpRefused, 0),
        (Act.LOSE, ServerUnreachable, 1),
        (Act.RESET, ServerUnreachable, 0),
        (Act.SILENCE, ServerUnreachable, 0),
        (Act.TWICE, 1, 2),
    ],
)
def test_an_act_strikes_one_request_of_its_path_and_the_server_sees_it_as_often_as_it_says(
    act: Act,
    outcome: int | type[Exception],
    seen: int,
    server: Counting,
    proxy: Proxy,
    driver: SyncDriver,
) -> None:
    proxy.script(act, "/x")
    try:
        got = driver.run(call(timeout_s=0.5 if act is Act.SILENCE else 30.0))
    except PeerError as error:
        got = type(error)
    # A caller that gives up may do so before the proxy has read what it asked.
    assert wait_until(lambda: proxy.struck == [("/x", act)], 30.0)
    assert (got, len(server.got)) == (outcome, seen)
    assert driver.run(call("/y")) == seen + 1
    assert driver.run(call(body={"b": [1, 2]}, mode="keep")) == seen + 2
    assert (server.got[-1], server.queries[-1]) == ({"b": [1, 2]}, "mode=keep")
    assert proxy.struck == [("/x", act)]


def test_a_value_in_the_body_can_be_replaced_wherever_it_is(
    server: Counting, proxy: Proxy, driver: SyncDriver
) -> None:
    proxy.script(Act.REWRITE, "/x", {"bytes": 7})
    driver.run(call(body={"info": {"bytes": 1, "other": 2}}))
    assert server.got == [{"info": {"bytes": 7, "other": 2}}]
