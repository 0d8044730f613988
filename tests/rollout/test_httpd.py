"""A real server socket: it sleeps until a client connects, and ends on request."""

import gzip
import http.client
import os
import socket
import threading
import tracemalloc

import pytest

from tests.rigs.census import wakes
from tests.rigs.present import present
from titan_grpo.engines.http import Call, SyncDriver
from titan_grpo.errors import ServerUnreachable
from titan_grpo.rollout.httpd import MAX_BYTES, HttpServer, Reply

UPSTREAMS_LOOK_S = 0.5
"""How often socketserver's own loop wakes."""

TRIES = 20


ASK = Call("GET", "/", 60.0, bool)


def serving() -> tuple[HttpServer, threading.Thread]:
    """A server, and the thread that accepts its connections."""
    before = set(threading.enumerate())
    server = HttpServer("127.0.0.1:0", "", lambda _: Reply(200, {"any": 1}), "x")
    (thread,) = set(threading.enumerate()) - before
    return server, thread


def test_it_answers_and_does_not_wake_in_between() -> None:
    server, thread = serving()
    with SyncDriver(f"http://{server.address}") as driver:
        assert driver.run(ASK)
        own = {present(thread.native_id)}

        def asleep() -> bool:
            before = wakes(os.getpid(), own)
            threading.Event().wait(2.5 * UPSTREAMS_LOOK_S)
            return wakes(os.getpid(), own) == before

        # It may have been about to sleep; what looks again and again is never asleep for so long.
        assert any(asleep() for _ in range(TRIES))
        server.close()
        assert not thread.is_alive()
    with SyncDriver(f"http://{server.address}") as driver, pytest.raises(ServerUnreachable):
        driver.run(ASK)


def test_it_ends_also_twice() -> None:
    server, thread = serving()
    server.close()
    server.close()
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


def test_a_body_that_is_not_admitted_takes_no_memory_and_its_client_gets_an_answer() -> None:
    """Before, each client without a key took 256 MiB of a 255 KiB body for as long as it liked."""
    packed = gzip.compress(bytes(MAX_BYTES))
    server = HttpServer(
        "127.0.0.1:0",
        "",
        lambda asked: Reply(200, {"got": len(asked.body)}),
        "x",
        lambda asked: asked.path == "/known",
    )
    connection = http.client.HTTPConnection(server.address, timeout=60)
    try:
        tracemalloc.start()
        for body, headers in ((packed, {"Content-Encoding": "gzip"}), (bytes(MAX_BYTES // 8), {})):
            before = tracemalloc.get_traced_memory()[0]
            tracemalloc.reset_peak()
            connection.request("POST", "/unknown", body, headers)
            assert connection.getresponse().read() == b'{"got": 0}'
            assert tracemalloc.get_traced_memory()[1] - before < 1 << 20
        connection.request("POST", "/known", b"abc")
        assert connection.getresponse().read() == b'{"got": 3}'
    finally:
        tracemalloc.stop()
        connection.close()
        server.close()


def test_a_client_that_waits_to_be_asked_for_its_body_is_asked() -> None:
    """As curl does with a large one."""
    server = HttpServer("127.0.0.1:0", "", lambda asked: Reply(200, {"got": len(asked.body)}), "x")
    host, port = server.address.split(":")
    try:
        with socket.create_connection((host, int(port)), timeout=20) as client:
            client.sendall(b"POST / HTTP/1.1\r\nContent-Length: 3\r\nExpect: 100-continue\r\n\r\n")
            answers = client.makefile("rb")
            assert answers.readline().startswith(b"HTTP/1.1 100 ")
            client.sendall(b"abc")
            answers.readline()
            assert answers.readline().startswith(b"HTTP/1.1 200 ")
    finally:
        server.close()


def test_a_path_that_is_no_url_is_refused() -> None:
    server, _ = serving()
    host, port = server.server_address[:2]
    with socket.create_connection((str(host), port), 60.0) as client:
        client.sendall(b"GET http://[ HTTP/1.1\r\nConnection: close\r\n\r\n")
        answer = client.makefile("rb").read()
    server.close()
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert b"the request cannot be read: Invalid IPv6 URL" in answer


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
