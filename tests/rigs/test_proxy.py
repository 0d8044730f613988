"""The scripted proxy, between a real client and a real HTTP server."""

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from tests.rigs.proxy import Act, Proxy
from titan_grpo.engines.http import Call, HttpRefused, SyncDriver
from titan_grpo.errors import PeerError, ServerUnreachable

pytestmark = pytest.mark.timeout(60)


class Counting(ThreadingHTTPServer):
    """Answers every POST with how many it got."""

    daemon_threads = True

    def __init__(self) -> None:
        self.got: list[tuple[str, Any]] = []
        super().__init__(("127.0.0.1", 0), _Handler)
        threading.Thread(target=self.serve_forever, args=(0.05,), daemon=True).start()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Counting

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.got.append((self.path, body))
        answer = json.dumps(len(self.server.got)).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *args: Any) -> None:
        """Quiet."""


@pytest.fixture
def server() -> Iterator[Counting]:
    with Counting() as server:
        yield server
        server.shutdown()


@pytest.fixture
def proxy(server) -> Iterator[Proxy]:
    with Proxy(("127.0.0.1", server.server_port)) as proxy:
        yield proxy


@pytest.fixture
def driver(proxy) -> Iterator[SyncDriver]:
    with SyncDriver(proxy.url) as driver:
        yield driver


def call(path: str = "/x", body: Any = None, timeout_s: float = 5.0, **params: str) -> Call[Any]:
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
    act, outcome, seen, server, proxy, driver
):
    proxy.script(act, "/x")
    try:
        got = driver.run(call(timeout_s=0.5 if act is Act.SILENCE else 5.0))
    except PeerError as error:
        got = type(error)
    assert (got, len(server.got)) == (outcome, seen)
    assert driver.run(call("/y")) == seen + 1
    assert driver.run(call(body={"b": [1, 2]}, mode="keep")) == seen + 2
    assert server.got[-1] == ("/x?mode=keep", {"b": [1, 2]})
    assert proxy.struck == [("/x", act)]


def test_a_value_in_the_body_can_be_replaced_wherever_it_is(server, proxy, driver):
    proxy.script(Act.REWRITE, "/x", {"bytes": 7})
    driver.run(call(body={"info": {"bytes": 1, "other": 2}}))
    assert server.got == [("/x", {"info": {"bytes": 7, "other": 2}})]


def test_a_shut_proxy_refuses_and_an_opened_one_serves_on_the_same_port(server, proxy, driver):
    assert driver.run(call()) == 1
    proxy.shut()
    with pytest.raises(ServerUnreachable):
        driver.run(call())
    proxy.open()
    assert driver.run(call()) == 2


def test_another_server_can_take_over_the_url(server, proxy, driver):
    driver.run(call())
    with Counting() as second:
        proxy.aim(("127.0.0.1", second.server_port))
        # a cut connection may be met once, as when a load balancer moves
        try:
            driver.run(call())
        except ServerUnreachable:
            driver.run(call())
        assert (len(server.got), bool(second.got)) == (1, True)
        second.shutdown()
