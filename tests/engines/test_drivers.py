"""Drivers against real sockets: each HTTP failure becomes one of ours, with URL and call."""

import asyncio
import re
import socket
import ssl
import subprocess
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.rigs.board import Board
from tests.rigs.sockets import free_port
from titan_grpo.engines import sglang, vllm
from titan_grpo.engines.generation import Sampling, StreamedAnswer
from titan_grpo.engines.http import (
    CA_VARIABLES,
    AsyncDriver,
    Call,
    HttpRefused,
    SyncDriver,
    TlsFailed,
    ignore,
)
from titan_grpo.errors import ConfigError, PeerError, ServerRefused, ServerUnreachable
from titan_grpo.subprocesses import readable


def both(url: str, call: Call[Any], *keys: str) -> list[Any]:
    """Outcome of a call through each driver: the value, or the error."""

    async def run() -> Any:
        driver = AsyncDriver(url, keys[0] if keys else "", 4)
        try:
            return await driver.run(call)
        finally:
            await driver.close()

    def run_sync() -> Any:
        with SyncDriver(url, *keys) as driver:
            return driver.run(call)

    outcomes: list[Any] = []
    for attempt in (run_sync, lambda: asyncio.run(run())):
        try:
            outcomes.append(attempt())
        except PeerError as error:
            outcomes.append(error)
    return outcomes


@pytest.mark.parametrize(
    ("keys", "admin", "other"),
    [(("api", "admin"), "admin", "api"), (("api",), "api", "api"), (("", "admin"), "admin", "")],
)
def test_admin_calls_go_with_the_admin_key_and_without_one_with_the_other(
    board: Board, keys: tuple[str, ...], admin: str, other: str
) -> None:
    board.routes = {"POST /titan_grpo/hello": 200, "GET /model_info": 200}
    with SyncDriver(board.url, *keys) as driver:
        for call in (sglang.hello({}, 60.0), sglang.alive()):
            driver.run(call)
    assert [key for _, key in board.asked] == [admin, other]


def test_a_refusal_carries_status_and_the_start_of_the_body(board: Board) -> None:
    board.routes = {"GET /weight_info": lambda _: (503, {"why": "x" * 1000})}
    for error in both(board.url, vllm.label(), "s3cret"):
        assert isinstance(error, HttpRefused)
        assert error.status == 503
        assert f"{board.url}: GET /weight_info was refused with 503" in str(error)
        assert len(str(error)) < 500


def test_a_page_of_a_web_server_is_shown_in_one_line() -> None:
    # It answers every call with a page of several lines: it has no methods.
    with ThreadingHTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler) as web:
        threading.Thread(target=web.serve_forever).start()
        found = both(f"http://127.0.0.1:{web.server_port}", vllm.label())
        web.shutdown()
    for error in found:
        assert "was refused with 501: <!DOCTYPE" in str(error)
        assert "\n" not in str(error)


@pytest.mark.parametrize(
    "answer",
    [{}, {"choices": [1]}, {"choices": [None]}, None, {"choices": 2}, {"x" * 1_000_000: 1}],
    ids=["empty", "number", "null", "nothing", "no list", "long"],
)
def test_an_answer_of_another_form_is_a_refusal_of_the_named_server(
    board: Board, answer: Any
) -> None:
    """Any other error would end the run as a bug, with one such server among many."""
    call = vllm.generate([1], Sampling(1), 5.0)
    board.routes = {"POST /v1/completions": lambda _: (200, answer)}
    for error in both(board.url, call):
        assert type(error) is ServerRefused
        assert str(error).startswith(f"{board.url}: /v1/completions must answer ")
        assert len(str(error)) < 500


def test_of_a_long_value_in_an_answer_a_refusal_has_the_beginning(board: Board) -> None:
    call = Call("GET", "/number", 60.0, lambda answer: float(answer["number"]))
    board.routes = {"GET /number": lambda _: (200, {"number": "x" * 1_000_000})}
    for error in both(board.url, call):
        assert type(error) is ServerRefused
        assert len(str(error)) < 500


@pytest.mark.parametrize("answer", [b"[" * 100_000, b"<html>", b""], ids=["deep", "page", "empty"])
def test_an_answer_without_json_is_that_of_a_proxy_whose_server_is_away(
    board: Board, answer: bytes
) -> None:
    board.routes = {"POST /v1/completions": lambda _: (200, answer), "GET /health": 200}
    for error in both(board.url, vllm.generate([1], Sampling(1), 5.0)):
        assert (type(error), error.status) == (HttpRefused, 502)
        assert str(error).startswith(f"{board.url}: POST /v1/completions was answered with 200 and")
    assert both(board.url, vllm.health()) == [None, None], "it needs none"


@pytest.mark.parametrize(
    "event",
    [b"[1]", b'{"choices": [1]}', b"[" * 100_000, b"no json"],
    ids=["list", "number", "deep", "text"],
)
def test_an_event_of_another_form_is_a_refusal_of_the_named_server(
    board: Board, event: bytes
) -> None:
    async def run() -> None:
        driver = AsyncDriver(board.url)
        call = vllm.stream([1], Sampling(1), 5.0)
        try:
            await driver.stream(call, StreamedAnswer(call))
        finally:
            await driver.close()

    board.routes = {"POST /v1/completions": lambda _: (200, b"data: " + event + b"\n\n")}
    with pytest.raises(ServerRefused, match=f"^{board.url}: /v1/completions must "):
        asyncio.run(run())


@pytest.fixture
def closing() -> Iterator[Callable[[bytes], str]]:
    """``closing(told)``: URL of a server that answers each of two requests with these bytes, and
    then closes the connection."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve(told: bytes) -> None:
            for _ in range(2):
                connection, _ = listener.accept()
                with connection:
                    connection.recv(1 << 16)
                    connection.sendall(told)

        def start(told: bytes) -> str:
            threading.Thread(target=serve, args=(told,), daemon=True).start()
            return f"http://127.0.0.1:{listener.getsockname()[1]}"

        yield start


@pytest.mark.parametrize(
    "head",
    [
        b"Content-Length: 9999999999999999\r\n\r\n{}",
        b"Content-Length: 99999999999999999999\r\n\r\n{}",
        b"Content-Length: " + b"9" * 400 + b"\r\n\r\n{}",
        b"Transfer-Encoding: chunked\r\n\r\nffffffffffffffffffff\r\n{}",
        b"Transfer-Encoding: chunked\r\n\r\n-5\r\n{}",
    ],
    ids=["more than memory", "no index", "no float", "chunk", "negative"],
)
def test_a_body_of_a_length_that_none_has_is_no_answer_of_the_named_server(
    head: bytes, closing: Callable[[bytes], str]
) -> None:
    url = closing(b"HTTP/1.1 200 OK\r\n" + head)
    for error in both(url, vllm.label(5.0)):
        assert type(error) is ServerUnreachable
        assert str(error).startswith(f"{url}: GET /weight_info failed (")


def test_an_answer_without_a_length_ends_where_the_server_closes_the_connection(
    closing: Callable[[bytes], str],
) -> None:
    """As of a proxy that speaks HTTP/1.0 to its client."""
    url = closing(b'HTTP/1.0 200 OK\r\n\r\n{"weight_version": "7"}')
    assert both(url, vllm.label(60.0)) == ["7", "7"]


def test_a_server_that_closes_without_an_answer_is_unreachable_and_its_error_says_so(
    closing: Callable[[bytes], str],
) -> None:
    url = closing(b"")
    for error in both(url, vllm.label(60.0)):
        assert type(error) is ServerUnreachable
        assert re.match(
            f"{url}: GET /weight_info failed .*(closed|disconnected).* without", str(error)
        )


def test_a_port_without_a_server_is_unreachable_and_named() -> None:
    dead = f"http://127.0.0.1:{free_port()}"
    for error in both(dead, vllm.health()):
        assert isinstance(error, ServerUnreachable)
        # It was refused at once, not after the deadline.
        assert f"{dead}: GET /health failed (ConnectionRefusedError" in str(error)


def test_an_ipv6_address_without_a_port_is_not_read_as_one_with_it() -> None:
    for error in both("http://[2001:db8::1]/base", vllm.health(0.3)):
        assert isinstance(error, ServerUnreachable)
        assert "http://[2001:db8::1]/base: GET /health " in str(error)
        assert "gaierror" not in str(error), "it was looked up as a name"


def test_a_server_that_never_answers_is_unreachable_within_the_deadline(board: Board) -> None:
    board.silent = {"GET /is_paused"}
    for error in both(board.url, vllm.is_paused(timeout_s=0.3)):
        assert isinstance(error, ServerUnreachable)
        assert "GET /is_paused got no answer within 0.3 s (TimeoutError" in str(error)


@pytest.mark.parametrize(
    "told", [b"HTTP/1.1 2", b"HTTP/1.1 200 OK\r\nContent-Length: 9999\r\n\r\n{"]
)
def test_an_answer_that_comes_byte_by_byte_must_be_whole_within_the_deadline(told: bytes) -> None:
    """Each byte began the deadline anew, and such a server held a lane as long as it liked."""

    def serve() -> None:
        for _ in range(2):
            connection, _ = listener.accept()
            with connection, suppress(OSError):
                connection.sendall(told)
                while not readable(0.05, connection.fileno()) or connection.recv(1 << 16):
                    connection.sendall(b"1")

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=serve, daemon=True).start()
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        for error in both(url, vllm.label(0.5)):
            assert type(error) is ServerUnreachable
            assert "GET /weight_info got no answer within 0.5 s (TimeoutError" in str(error)


def test_a_body_may_take_the_longer_the_larger_it_is() -> None:
    """A group of long completions, from a rollout service behind a slow network."""

    def serve() -> None:
        for _ in range(2):
            connection, _ = listener.accept()
            with connection:
                connection.recv(1 << 16)
                size = 8 << 20
                connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % size)
                for _ in range(8):
                    assert not readable(0.1, connection.fileno()), "it was closed"
                    connection.sendall(b" " * (size // 8))

    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor() as threads:
        served = threads.submit(serve)
        found = both(f"http://127.0.0.1:{listener.getsockname()[1]}", vllm.health(0.5))
        assert found == [None, None]
        served.result(60)


def test_a_large_body_that_stops_coming_is_given_up_after_a_silence() -> None:
    def serve() -> None:
        for _ in range(2):
            connection, _ = listener.accept()
            with connection:
                connection.recv(1 << 16)
                connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n{" % (8 << 30))
                assert readable(60.0, connection.fileno()), "it was not given up"

    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor() as threads:
        served = threads.submit(serve)
        for error in both(f"http://127.0.0.1:{listener.getsockname()[1]}", vllm.health(0.5)):
            assert type(error) is ServerUnreachable
        served.result(60)


@pytest.mark.parametrize("reads", [True, False])
def test_a_request_may_take_the_longer_the_larger_it_is_but_not_for_ever(reads: bool) -> None:
    """A manifest, or a long prompt with images, to a server that reads slowly."""
    size = (8 if reads else 1) << 20

    def serve() -> None:
        for _ in range(2):
            connection, _ = listener.accept()
            with connection:
                if not reads:
                    assert over.wait(60)
                    continue
                left = size
                while left > 0 and (came := len(connection.recv(size // 8))):
                    left -= came
                    over.wait(came / size)  # a second for all of it
                connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")

    call = Call("POST", "/hello", 0.3, ignore, json="x" * size)
    over = threading.Event()
    with socket.socket() as listener, ThreadPoolExecutor() as threads:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        served = threads.submit(serve)
        found = both(f"http://127.0.0.1:{listener.getsockname()[1]}", call)
        over.set()
        served.result(60)
    if reads:
        assert found == [None, None]
    else:
        assert [type(error) for error in found] == [ServerUnreachable] * 2


def test_a_connection_on_which_a_server_failed_is_not_used_again(board: Board) -> None:
    board.routes = {"GET /health": 200, "GET /weight_info": 503}

    async def run() -> None:
        driver = AsyncDriver(board.url)
        await driver.run(vllm.health())
        with pytest.raises(HttpRefused):
            await driver.run(vllm.label())
        await driver.run(vllm.health())
        await driver.close()

    with SyncDriver(board.url) as driver:
        driver.run(vllm.health())
        with pytest.raises(HttpRefused):
            driver.run(vllm.label())
        driver.run(vllm.health())
    asyncio.run(run())
    for first, failed, after in (board.ports[:3], board.ports[3:]):
        assert first == failed
        assert after != failed


def calls_at_once(url: str, calls: int, most: int) -> None:
    """So many calls of one driver, of which ``most`` may run at once; then as many again."""

    async def run() -> None:
        driver = AsyncDriver(url, max_connections=most)
        for _ in range(2):
            await asyncio.gather(*(driver.run(vllm.health()) for _ in range(calls)))
        await driver.close()

    asyncio.run(run())


def test_calls_beyond_the_most_wait_for_a_connection_and_use_it_again(board: Board) -> None:
    board.routes = {"GET /health": 200}
    calls_at_once(board.url, 12, most=3)
    assert len(board.ports) == 24
    assert len(set(board.ports)) == 3


def test_connections_that_stay_idle_are_closed_while_others_are_used(board: Board) -> None:
    board.routes = {"GET /health": 200}

    def connected() -> int:
        found = psutil.Process().net_connections("tcp4")
        return sum(bool(c.raddr) and c.raddr.port == board.address[1] for c in found)

    async def run() -> None:
        driver = AsyncDriver(board.url)
        async with asyncio.timeout(60):
            await asyncio.gather(*(driver.run(vllm.health()) for _ in range(5)))
            assert connected() == 5
            while connected() > 1:
                await driver.run(vllm.health())
        await driver.close()
        assert connected() == 0

    asyncio.run(run())


def held(board: Board) -> tuple[threading.Event, threading.Event]:
    """Have /is_paused set the first event, and answer once the second is set; /health answers at
    once."""
    asked, answer = threading.Event(), threading.Event()

    def late(_body: Any) -> tuple[int, Any]:
        asked.set()
        answer.wait(60)
        return 200, {"is_paused": True}

    board.routes = {"GET /health": 200, "GET /is_paused": late}
    return asked, answer


def test_the_wait_for_a_connection_is_no_silence_of_the_server(
    board: Board, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, answer = held(board)

    async def run() -> None:
        loop, later_s = asyncio.get_running_loop(), 0.0
        real = loop.time
        monkeypatch.setattr(loop, "time", lambda: real() + later_s)
        driver = AsyncDriver(board.url, max_connections=1)
        first = asyncio.create_task(driver.run(vllm.is_paused(10_000.0)))
        assert await asyncio.to_thread(asked.wait, 60)
        second = asyncio.create_task(driver.run(vllm.health(60.0)))
        await asyncio.sleep(0)  # it waits
        later_s += 1000.0
        for _ in range(5):  # callbacks that are due, and those that follow them
            await asyncio.sleep(0)
        answer.set()
        await asyncio.gather(first, second)
        await driver.close()

    asyncio.run(run())


def test_a_call_that_is_given_up_makes_room_for_another_one(board: Board) -> None:
    asked, answer = held(board)

    async def run() -> None:
        driver = AsyncDriver(board.url, max_connections=1)
        given_up = asyncio.create_task(driver.run(vllm.is_paused(60.0)))
        assert await asyncio.to_thread(asked.wait, 60)
        given_up.cancel()
        await asyncio.wait([given_up])
        await driver.run(vllm.health())
        await driver.close()

    asyncio.run(run())
    answer.set()
    given_up, after = board.ports
    assert given_up != after


def test_a_connection_that_the_server_closed_while_it_was_idle_is_not_used_again() -> None:
    async def run() -> None:
        closed = asyncio.Event()

        async def answer_once(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")
            await writer.drain()
            writer.close()
            await writer.wait_closed()
            closed.set()

        server = await asyncio.start_server(answer_once, "127.0.0.1", 0)
        driver = AsyncDriver(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
        for _ in range(2):
            await driver.run(vllm.health(60.0))
            await asyncio.wait_for(closed.wait(), 60)
            closed.clear()
            for _ in range(3):
                await asyncio.sleep(0)  # rounds of the loop, in which the end is read
        await driver.close()
        server.close()

    asyncio.run(run())


def test_a_blocking_call_does_not_use_a_connection_that_the_server_closed_while_it_was_idle() -> (
    None
):
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer_twice() -> None:
            for _ in range(2):
                connection, _ = server.accept()
                with connection:
                    connection.recv(4096)
                    connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")
                closed.release()

        closed = threading.Semaphore(0)
        threading.Thread(target=answer_twice, daemon=True).start()
        with SyncDriver(f"http://127.0.0.1:{server.getsockname()[1]}") as driver:
            for _ in range(2):
                driver.run(vllm.health(60.0))
                assert closed.acquire(timeout=60)


def test_two_threads_call_with_one_driver_and_neither_waits_for_the_other(board: Board) -> None:
    asked, answer = held(board)
    with SyncDriver(board.url) as driver, ThreadPoolExecutor(1) as other:
        paused = other.submit(driver.run, vllm.is_paused(60.0))
        assert asked.wait(60)
        driver.run(vllm.health())
        answer.set()
        assert paused.result(60)
    assert len(set(board.ports)) == 2


def test_a_server_behind_a_path_is_asked_below_it_quoted_once(board: Board) -> None:
    asked = "GET /n%C3%B6de/a%20b;7/weight_info"
    board.routes = {asked: lambda _: (200, {"weight_version": "7"})}
    assert both(f"{board.url}/nöde/a%20b;7/", vllm.label()) == ["7", "7"]


@pytest.fixture
def private(tmp_path: Path) -> Iterator[tuple[Board, Path]]:
    """A server with a self-signed certificate, and the certificate."""
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2"]
    command += ["-subj", "/CN=test", "-addext", "subjectAltName=IP:127.0.0.1"]
    subprocess.run(
        [*command, "-keyout", key, "-out", certificate], check=True, capture_output=True, timeout=60
    )
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(certificate, key)
    board = Board(tls)
    board.routes = {"GET /weight_info": lambda _: (200, {"weight_version": "7"})}
    yield board, certificate
    board.close()


def test_a_server_with_a_private_authority_is_trusted_where_ssl_cert_file_names_it(
    private: tuple[Board, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    board, certificate = private
    for variable in CA_VARIABLES:
        monkeypatch.delenv(variable, raising=False)
    for error in both(board.url, vllm.label()):
        assert isinstance(error, TlsFailed)  # which a lane says at once
        assert "CERTIFICATE_VERIFY_FAILED" in str(error)
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
    assert both(board.url, vllm.label()) == ["7", "7"]


def test_an_unusable_ssl_cert_file_is_a_mistake_of_the_configuration(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "missing.pem"))
    with pytest.raises(ConfigError, match=r"SSL_CERT_FILE .*missing\.pem"):
        SyncDriver("https://127.0.0.1:1")
    SyncDriver("http://127.0.0.1:1").close()


def test_an_empty_ssl_cert_file_is_none(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", "")
    monkeypatch.setenv("SSL_CERT_DIR", str(tmp_path))
    SyncDriver("https://127.0.0.1:1").close()
