"""A real server socket: it sleeps until a client connects, and ends on request."""

import http.client
import http.server
import os
import socketserver
import threading
from pathlib import Path

import pytest

from tests.rigs.census import wakes
from tests.rigs.present import present
from titan_grpo.engines.http import Call, SyncDriver
from titan_grpo.errors import ServerUnreachable
from titan_grpo.rollout.httpd import HttpServer, Reply, Serving

UPSTREAMS_LOOK_S = 0.5
"""How often socketserver's own loop wakes."""

TRIES = 20


class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", "4")
        self.end_headers()
        self.wfile.write(b"true")

    def log_message(self, format: str, *args: object) -> None:
        """Quiet."""


class Web(Serving, http.server.HTTPServer):
    pass


class Unix(Serving, socketserver.UnixStreamServer):
    pass


ASK = Call("GET", "/", 60.0, bool)


def test_it_answers_and_does_not_wake_in_between() -> None:
    server = Web(("127.0.0.1", 0), Handler)
    server.begin("web")
    with SyncDriver(f"http://127.0.0.1:{server.server_address[1]}") as driver:
        assert driver.run(ASK)
        thread = next(thread for thread in threading.enumerate() if thread.name == "web")
        own = {present(thread.native_id)}

        def asleep() -> bool:
            before = wakes(os.getpid(), own)
            threading.Event().wait(2.5 * UPSTREAMS_LOOK_S)
            return wakes(os.getpid(), own) == before

        # It may have been about to sleep; what looks again and again is never asleep for so long.
        assert any(asleep() for _ in range(TRIES))
        server.end()
        assert not thread.is_alive()
    with (
        SyncDriver(f"http://127.0.0.1:{server.server_address[1]}") as driver,
        pytest.raises(ServerUnreachable),
    ):
        driver.run(ASK)


def test_it_ends_also_twice(tmp_path: Path) -> None:
    server = Unix(str(tmp_path / "socket"), Handler)
    server.begin("unix thread")
    thread = next(thread for thread in threading.enumerate() if thread.name == "unix thread")
    server.end()
    server.end()
    assert not thread.is_alive()


@pytest.mark.parametrize(
    ("headers", "status"), [({}, 200), ({"Transfer-Encoding": "chunked"}, 400)]
)
def test_a_post_without_a_length_has_no_body_unless_it_comes_in_chunks(
    headers: dict[str, str], status: int
) -> None:
    server = HttpServer("127.0.0.1:0", "", lambda asked: Reply(200, {"got": len(asked.body)}), "x")
    connection = http.client.HTTPConnection(server.address, timeout=20)
    try:
        # As "curl -X POST URL/episodes" does.
        connection.putrequest("POST", "/episodes")
        for name, value in headers.items():
            connection.putheader(name, value)
        connection.endheaders()
        answer = connection.getresponse()
        assert answer.status == status, answer.read()
    finally:
        connection.close()
        server.close()


def test_a_method_that_is_neither_get_nor_post_is_one_line_and_no_page() -> None:
    server = HttpServer("127.0.0.1:0", "", lambda asked: Reply(200, {}), "x")
    connection = http.client.HTTPConnection(server.address, timeout=20)
    try:
        connection.request("PUT", "/v1/models")
        answer = connection.getresponse()
        assert (answer.status, answer.read()) == (501, b"Unsupported method ('PUT')\n")
    finally:
        connection.close()
        server.close()
