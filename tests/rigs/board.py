"""A real HTTP server whose routes a test writes down, and which records its calls and their
keys."""

import http.server
import json
import ssl
import sys
import threading
import time
from collections.abc import Callable, Iterator
from email.utils import formatdate
from typing import Any

Reply = Callable[[Any], tuple[int, Any]]


class Board:
    """``routes``: "METHOD /path" -> a status, or a function of the JSON body that gives (status,
    answer); others get 404. An answer is bytes, or becomes JSON; after an iterator of bytes in its
    place the connection breaks off.

    ``asked``: (route, bearer token) in order; ``paths``, ``queries`` and ``ports`` (of the client):
    the same calls. A route in ``silent`` gets no answer before the test is over. ``tls``: serve
    https. ``ahead_s``: of its clock.
    """

    def __init__(self, tls: ssl.SSLContext | None = None, ahead_s: float = 0.0) -> None:
        self.routes: dict[str, int | Reply] = {}
        self.silent: set[str] = set()
        self.asked: list[tuple[str, str]] = []
        self.paths: list[str] = []
        self.queries: list[str] = []
        self.ports: list[int] = []
        self.over = threading.Event()
        board = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            # An answer is two writes: the second would wait 40 ms for a delayed acknowledgement.
            disable_nagle_algorithm = True

            def do_GET(self) -> None:
                self.answer("GET", None)

            def do_POST(self) -> None:
                raw = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                self.answer("POST", json.loads(raw) if raw else None)

            def answer(self, method: str, body: Any) -> None:
                path, _, query = self.path.partition("?")
                route = f"{method} {path}"
                board.queries.append(query)
                board.ports.append(self.client_address[1])
                board.paths.append(route)
                board.asked.append(
                    (route, (self.headers.get("Authorization") or "").removeprefix("Bearer "))
                )
                if route in board.silent:
                    board.over.wait(120)
                    return
                status, content = board.reply(route, body)
                torn = isinstance(content, Iterator)
                data: Any = content
                if not isinstance(content, bytes | Iterator):
                    data = json.dumps(content).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(1 << 20 if torn else len(data)))
                self.end_headers()
                for part in data if torn else [data]:
                    self.wfile.write(part)
                self.close_connection = torn

            def date_time_string(self, timestamp: float | None = None) -> str:
                return formatdate(time.time() + ahead_s, usegmt=True)

            def log_message(self, format: str, *args: object) -> None:
                """Quiet."""

        class Server(http.server.ThreadingHTTPServer):
            daemon_threads = True
            request_queue_size = 64

            def handle_error(self, request: Any, client_address: Any) -> None:
                """Clients may go away."""
                if not isinstance(sys.exception(), ConnectionError):
                    super().handle_error(request, client_address)

        self._server = Server(("127.0.0.1", 0), Handler)
        if tls is not None:
            self._server.socket = tls.wrap_socket(self._server.socket, server_side=True)
        self.address = "127.0.0.1", self._server.server_port
        scheme = "http" if tls is None else "https"
        self.url = f"{scheme}://127.0.0.1:{self._server.server_port}"
        # Looks so often whether it is to end: each test would end half a second later.
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()

    def reply(self, route: str, body: Any) -> tuple[int, Any]:
        """Status and answer of a call."""
        found = self.routes.get(route, 404)
        return (found, {}) if isinstance(found, int) else found(body)

    def close(self) -> None:
        self.over.set()
        self._server.shutdown()
        self._server.server_close()
