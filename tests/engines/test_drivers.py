"""Drivers against real sockets: every HTTP failure becomes one of ours, with the URL and what was
tried."""

import asyncio
import http.server
import json
import ssl
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

import pytest

from titan_grpo.engines import sglang, vllm
from titan_grpo.engines.http import CA_VARIABLES, AsyncDriver, HttpRefused, SyncDriver
from titan_grpo.engines.launch import free_port
from titan_grpo.errors import ConfigError, ServerUnreachable


class Handler(http.server.BaseHTTPRequestHandler):
    """/health echoes the key it saw, /weight_info is a refusal, /is_paused never answers."""

    protocol_version = "HTTP/1.1"
    released = threading.Event()
    ports: ClassVar[list[int]] = []

    def do_GET(self) -> None:
        self.ports.append(self.client_address[1])
        if self.path.startswith("/is_paused"):
            self.released.wait(20)
            return
        code = 503 if self.path.startswith("/weight_info") else 200
        body = json.dumps(
            {"data": [{"id": self.headers.get("Authorization", "none")}], "why": "x" * 1000}
        ).encode()
        self.send_response(code)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Quiet."""


@pytest.fixture
def url() -> Iterator[str]:
    Handler.released.clear()
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    Handler.released.set()
    server.shutdown()
    server.server_close()


def both(url: str, call, api_key: str = ""):
    """Outcome of a call through each driver: the value, or the error."""

    async def run():
        driver = AsyncDriver(url, api_key)
        try:
            return await driver.run(call)
        finally:
            await driver.close()

    outcomes = []
    for attempt in (lambda: SyncDriver(url, api_key).run(call), lambda: asyncio.run(run())):
        try:
            outcomes.append(attempt())
        except (ServerUnreachable, HttpRefused) as error:
            outcomes.append(error)
    return outcomes


def test_the_key_is_sent_as_a_bearer_token(url) -> None:
    assert both(url, vllm.models(), "s3cret") == [["Bearer s3cret"], ["Bearer s3cret"]]


def test_admin_calls_go_with_the_admin_key_and_without_one_with_the_other(board) -> None:
    board.routes = {"POST /pause_generation": 200, "GET /model_info": 200}
    calls = (sglang.pause(5.0), sglang.alive())

    async def run(*keys: str):
        driver = AsyncDriver(board.url, keys[0], 4, *keys[1:])
        for call in calls:
            await driver.run(call)
        await driver.close()

    for keys, seen in (
        (("api", "admin"), ["admin", "api"]),
        (("api",), ["api", "api"]),
        (("", "admin"), ["admin", ""]),
    ):
        with SyncDriver(board.url, *keys) as driver:
            for call in calls:
                driver.run(call)
        asyncio.run(run(*keys))
        assert [key for _, key in board.asked] == seen * 2
        board.asked.clear()


def test_a_refusal_carries_status_and_the_start_of_the_body(url) -> None:
    for error in both(url, vllm.label(), "s3cret"):
        assert isinstance(error, HttpRefused)
        assert error.status == 503
        assert url in str(error)
        assert "GET /weight_info was refused with 503" in str(error)
        assert len(str(error)) < 500


def test_nobody_listening_is_unreachable_and_named() -> None:
    dead = f"http://127.0.0.1:{free_port()}"
    for error in both(dead, vllm.health()):
        assert isinstance(error, ServerUnreachable)
        assert dead in str(error)
        assert "GET /health" in str(error)


def test_a_server_that_never_answers_is_unreachable_within_the_deadline(url) -> None:
    for error in both(url, vllm.is_paused(timeout_s=0.3)):
        assert isinstance(error, ServerUnreachable)
        assert "0.3 s" in str(error)


def test_a_connection_on_which_a_server_failed_is_not_used_again(url) -> None:
    Handler.ports.clear()
    with SyncDriver(url) as driver:
        driver.run(vllm.health())
        with pytest.raises(HttpRefused):
            driver.run(vllm.label())
        driver.run(vllm.health())
    _, failed, after = Handler.ports
    assert after != failed


@pytest.fixture
def https(tmp_path: Path) -> Iterator[tuple[str, Path]]:
    """URL of a server with a self-signed certificate, and the certificate."""
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    command = [
        "openssl",
        "req",
        "-x509",
        "-newkey",
        "rsa:2048",
        "-nodes",
        "-days",
        "2",
        "-subj",
        "/CN=test",
    ]
    command += ["-addext", "subjectAltName=IP:127.0.0.1"]
    subprocess.run(
        [*command, "-keyout", key, "-out", certificate], check=True, capture_output=True, timeout=60
    )
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(certificate, key)
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    server.socket = tls.wrap_socket(server.socket, server_side=True)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"https://127.0.0.1:{server.server_port}", certificate
    server.shutdown()
    server.server_close()


def test_a_server_with_a_private_authority_is_trusted_where_ssl_cert_file_names_it(
    https: tuple[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    address, certificate = https
    for variable in CA_VARIABLES:
        monkeypatch.delenv(variable, raising=False)
    for error in both(address, vllm.models()):
        assert isinstance(error, ServerUnreachable)
        assert "CERTIFICATE_VERIFY_FAILED" in str(error)
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
    assert both(address, vllm.models(), "s3cret") == [["Bearer s3cret"], ["Bearer s3cret"]]


def test_an_unusable_ssl_cert_file_is_a_mistake_of_the_configuration(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "missing.pem"))
    with pytest.raises(ConfigError, match=r"SSL_CERT_FILE .*missing\.pem"):
        SyncDriver("https://127.0.0.1:1")
    SyncDriver("http://127.0.0.1:1").close()
