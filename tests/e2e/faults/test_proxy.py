"""The scripted proxy, between a real client and a real HTTP server."""

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from tests.rigs.proxy import Act, Proxy
from titan_grpo.engines.http import Call, HttpRefused, SyncDriver
from titan_grpo.errors import ServerUnreachable

pytestmark = pytest.mark.timeout(60)


class Counting(ThreadingHTTPServer):
    """Answers every POST with what it got, and counts."""

    daemon_threads = True

    def __init__(self, name: str) -> None:
        self.name = name
        self.got: list[tuple[str, Any]] = []
        super().__init__(("127.0.0.1", 0), _Handler)
        threading.Thread(target=self.serve_forever, args=(0.05,), daemon=True).start()

    @property
    def address(self) -> tuple[str, int]:
        return "127.0.0.1", self.server_address[1]


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Counting

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.got.append((self.path, body))
        answer = json.dumps({"name": self.server.name, "number": len(self.server.got)}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *args: Any) -> None:
        """Quiet."""


@pytest.fixture
def server() -> Iterator[Counting]:
    with Counting("first") as server:
        yield server
        server.shutdown()


@pytest.fixture
def proxy(server) -> Iterator[Proxy]:
    with Proxy(server.address) as proxy:
        yield proxy


@pytest.fixture
def driver(proxy) -> Iterator[SyncDriver]:
    driver = SyncDriver(proxy.url)
    yield driver
    driver.close()


def call(path: str = "/x", body: Any = None, timeout_s: float = 5.0, **params: str) -> Call[Any]:
    return Call("POST", path, timeout_s, lambda a: a, json=body or {"a": 1}, params=params)


def test_requests_pass_with_their_query_and_body(server, driver):
    assert driver.run(call("/x", {"b": [1, 2]}, mode="keep"))["name"] == "first"
    assert server.got == [("/x?mode=keep", {"b": [1, 2]})]


def test_a_planted_500_does_not_reach_the_server_and_strikes_once(server, proxy, driver):
    proxy.script(Act.FAIL, "/x")
    assert driver.run(call("/y"))["number"] == 1
    with pytest.raises(HttpRefused, match="500"):
        driver.run(call())
    assert driver.run(call())["number"] == 2
    assert proxy.struck == [("/x", Act.FAIL)]


def test_a_lost_answer_was_work_that_the_server_did(server, proxy, driver):
    proxy.script(Act.LOSE, "/x")
    with pytest.raises(ServerUnreachable):
        driver.run(call())
    assert len(server.got) == 1


def test_a_reset_connection_never_reaches_the_server(server, proxy, driver):
    proxy.script(Act.RESET, "/x")
    with pytest.raises(ServerUnreachable):
        driver.run(call())
    assert server.got == []
    assert driver.run(call())["number"] == 1


def test_silence_lasts_until_the_callers_deadline(server, proxy, driver):
    proxy.script(Act.SILENCE, "/x")
    with pytest.raises(ServerUnreachable, match="got no answer within"):
        driver.run(call(timeout_s=0.2))
    assert server.got == []


def test_a_request_delivered_twice_gets_the_first_answer(server, proxy, driver):
    proxy.script(Act.TWICE, "/x")
    assert driver.run(call())["number"] == 1
    assert len(server.got) == 2


def test_a_value_in_the_body_can_be_replaced_wherever_it_is(server, proxy, driver):
    proxy.script(Act.REWRITE, "/x", {"bytes": 7})
    driver.run(call(body={"info": {"bytes": 1, "other": 2}}))
    assert server.got == [("/x", {"info": {"bytes": 7, "other": 2}})]


def test_a_shut_proxy_refuses_and_an_opened_one_serves_on_the_same_port(server, proxy, driver):
    assert driver.run(call())["number"] == 1
    proxy.shut()
    with pytest.raises(ServerUnreachable):
        driver.run(call())
    proxy.open()
    assert driver.run(call())["number"] == 2


def test_another_server_can_take_over_the_url(proxy, driver):
    assert driver.run(call())["name"] == "first"
    with Counting("second") as second:
        proxy.aim(second.address)
        # a cut connection may be met once, as when a load balancer moves
        try:
            answer = driver.run(call())
        except ServerUnreachable:
            answer = driver.run(call())
        assert answer["name"] == "second"
        second.shutdown()
