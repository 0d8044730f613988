"""A tokenizer on disk, and an HTTP server that answers /v1/completions as vLLM does and can be told
to misbehave.

A behaviour may give an iterator of bytes in place of the content, after which it hangs up.
"""

import http.server
import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

Behaviour = Callable[[dict[str, Any]], tuple[int, Any]]


def good(body: dict[str, Any]) -> tuple[int, Any]:
    """Four tokens that depend on the request's seed."""
    ids = [3 + (body["seed"] >> shift) % 90 for shift in (0, 8, 16, 24)]
    return answer(ids, [-1.0 - i for i in range(4)])


def answer(ids: list[int], logprobs: list[float | None], reason: str = "length") -> tuple[int, Any]:
    """A 200 with one choice."""
    choice = {
        "index": 0,
        "text": "",
        "finish_reason": reason,
        "token_ids": ids,
        "logprobs": {"token_logprobs": logprobs},
    }
    return 200, {"choices": [choice]}


def piece(ids: list[int], reason: str | None = None) -> bytes:
    """An event of a streamed answer: tokens of log-probability -1."""
    choice = {
        "index": 0,
        "text": "",
        "finish_reason": reason,
        "token_ids": ids,
        "logprobs": {"token_logprobs": [-1.0] * len(ids)},
    }
    return b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n"


def in_pieces(content: Any) -> bytes:
    """An answer as events: its first token, then the others with the rest. One without choices
    comes whole."""
    if not isinstance(content, dict) or "choices" not in content:
        return json.dumps(content).encode()
    (choice,) = content["choices"]
    values = choice["logprobs"]["token_logprobs"]
    first = choice | {
        "finish_reason": None,
        "token_ids": choice["token_ids"][:1],
        "logprobs": {"token_logprobs": values[:1]},
    }
    last = choice | {
        "token_ids": choice["token_ids"][1:],
        "logprobs": {"token_logprobs": values[1:]},
    }
    events = [json.dumps({"choices": [one]}) for one in (first, last)]
    return "".join(f"data: {event}\n\n" for event in (*events, "[DONE]")).encode()


class CompletionServer:
    """A real HTTP server on loopback. ``behaviour`` may be replaced while it runs; ``bodies`` are
    the requests it got."""

    good = staticmethod(good)
    answer = staticmethod(answer)
    piece = staticmethod(piece)

    def __init__(self) -> None:
        self.behaviour: Behaviour = good
        self.bodies: list[dict[str, Any]] = []
        self.released = threading.Event()
        self._arrived = threading.Condition()
        outer = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with outer._arrived:
                    outer.bodies.append(body)
                    outer._arrived.notify_all()
                status, content = outer.behaviour(body)
                # Bytes in pieces are an answer that never ends: the connection does.
                torn = isinstance(content, Iterator)
                data = (
                    b""
                    if torn
                    else in_pieces(content)
                    if body.get("stream")
                    else json.dumps(content).encode()
                )
                self.send_response(status)
                self.send_header("Content-Length", str(1 << 20 if torn else len(data)))
                self.end_headers()
                for part in content if torn else [data]:
                    self.wfile.write(part)
                self.close_connection = torn

            def log_message(self, format: str, *args: object) -> None:
                """Quiet."""

        class Server(http.server.ThreadingHTTPServer):
            daemon_threads = True
            request_queue_size = 64

            def handle_error(self, request: Any, client_address: Any) -> None:
                """Clients may go away."""

        self._server = Server(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        # Looks so often whether it is to end: each test would end half a second later.
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()

    def hang(self, body: dict[str, Any]) -> tuple[int, Any]:
        """Answer only once the test is over."""
        self.released.wait(120)
        return good(body)

    def wait_for_requests(self, count: int) -> None:
        """Until ``count`` requests have arrived in all."""
        with self._arrived:
            assert self._arrived.wait_for(lambda: len(self.bodies) >= count, 60)

    def close(self) -> None:
        self.released.set()
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def completion_server() -> Iterator[Callable[[], CompletionServer]]:
    """A factory of servers."""
    servers: list[CompletionServer] = []

    def make() -> CompletionServer:
        servers.append(CompletionServer())
        return servers[-1]

    yield make
    for server in servers:
        server.close()


@pytest.fixture
def model_dir(tmp_path: Path) -> str:
    """A directory with a one-character-per-token tokenizer."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    vocab = {"<pad>": 0, "<bos>": 1, "<eos>": 2} | {chr(c): c - 29 for c in range(32, 127)}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(["<pad>", "<bos>", "<eos>"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    return str(tmp_path)
