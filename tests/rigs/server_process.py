"""A server without an engine, as a process of its own: ``python -m tests.rigs.server_process --port
0``.

It speaks the RL routes of vLLM that ``engines.vllm`` uses, over real HTTP, so the production
``VllmControl`` drives it; behind the routes are the real plugin half and the real receiver process.
The "model" is a copy of the tensors in this process's own memory, replaced one by one during a
load, so a half load can be seen: ``GET /served`` hashes what is there.

It decides nothing about real engines. That an engine computes with the tensors that it was handed,
keeps its requests over a pause or survives a failed load is shown by the tests with real servers,
and only by those."""

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import torch

from titan_grpo.errors import TitanGrpoError
from titan_grpo.layout.digest import content_digest, tensor_digest
from titan_grpo.layout.manifest import Manifest
from titan_grpo.receive.checkpoint import coverage_problem
from titan_grpo.receive.commit import EngineSide, OneWorker
from titan_grpo.runkey import find_run_key
from titan_grpo.verify.recording import RecordingSide

OWN_LABEL = "default"
"""What the server shows before the first commit, as vLLM does."""

IDLE_S = 60.0
"""A connection without a request is closed after this, in seconds."""

Shapes = Mapping[str, tuple[int, ...]]


class CopiedModel:
    """receive.engine's Engine: its own copy of every tensor, in memory that stays where it is."""

    def __init__(self, shapes: Shapes | None = None) -> None:
        """``shapes``: the model that is served, HF name -> shape; None takes any."""
        self._shapes = shapes
        self.tensors: dict[str, torch.Tensor] = {}
        self.loads = 0

    def refuses(self, manifest: Manifest) -> str:
        """See Engine."""
        return "" if self._shapes is None else coverage_problem(manifest, self._shapes, tied=False)

    def load(self, tensors: Iterator[tuple[str, torch.Tensor]]) -> int:
        """See Engine. What breaks off leaves some tensors new and the others old."""
        count = 0
        for name, tensor in tensors:
            held = self.tensors.get(name)
            if held is None or held.shape != tensor.shape or held.dtype != tensor.dtype:
                self.tensors[name] = tensor.clone()
            else:
                held.copy_(tensor)
            count += 1
        self.loads += 1
        return count

    def digest(self) -> str:
        """layout.content's digest of what the memory holds now."""
        return content_digest(
            {name: tensor_digest(tensor) for name, tensor in self.tensors.items()}
        )


class Refused(Exception):
    """The engine raised: vLLM answers 500 and goes on."""


class Server:
    """State and routes. Everything but /health runs on one thread, as in an engine's core, which
    answers in turn.

    That thread also starts the receivers, which are killed when the thread that started them ends:
    an HTTP thread, which ends with its connection, must not.
    """

    def __init__(self, model: CopiedModel, record: Path | None = None) -> None:
        """``record``: a file that gets a line per commit (receive.recording)."""
        self._model = model
        key = find_run_key(os.environ)
        workers = OneWorker()
        self._side = (
            EngineSide(model, workers, "", key)
            if record is None
            else RecordingSide(model, workers, "", record, key)
        )
        self.engine = ThreadPoolExecutor(1, thread_name_prefix="engine")
        self._label, self._paused, self._updating = OWN_LABEL, False, False
        self._labels: list[str] = []
        self._visible: list[tuple[str, str]] = []
        self.routes: dict[tuple[str, str], Callable[[Mapping[str, Any]], dict[str, Any]]] = {
            ("GET", "/weight_info"): lambda _: {"weight_version": self._label},
            ("GET", "/is_paused"): lambda _: {"is_paused": self._paused},
            ("GET", "/get_world_size"): lambda _: {"world_size": 1},
            ("GET", "/served"): self._served,
            ("POST", "/pause"): self._pause,
            ("POST", "/resume"): self._resume,
            ("POST", "/init_weight_transfer_engine"): self._init,
            ("POST", "/start_weight_update"): self._start,
            ("POST", "/update_weights"): self._update,
            ("POST", "/finish_weight_update"): self._finish,
            ("POST", "/update_weight_version"): lambda body: self._set_label(
                str(body["new_version"])
            ),
        }

    def _served(self, query: Mapping[str, Any]) -> dict[str, Any]:
        first = int(query.get("after", 0))
        client = self._side.receiver
        assert client is not None
        return {
            "label": self._label,
            "paused": self._paused,
            "versions": self._labels,
            "visible": self._visible[first:],
            "digest": self._model.digest(),
            "intact": client.state.intact,
            "loads": self._model.loads,
            "pid": os.getpid(),
            "receiver_pid": client.pid,
        }

    def _show(self) -> None:
        """Generation goes on, or goes on under another label: what a request would meet from here
        on."""
        now = (self._label, self._model.digest())
        if not self._paused and self._visible[-1:] != [now]:
            self._visible.append(now)

    def _pause(self, _body: Mapping[str, Any]) -> dict[str, Any]:
        self._paused = True
        return {"status": "paused"}

    def _resume(self, _body: Mapping[str, Any]) -> dict[str, Any]:
        self._paused = False
        self._show()
        return {"status": "resumed"}

    def _init(self, body: Mapping[str, Any]) -> dict[str, Any]:
        self._side.hello(dict(body["init_info"]))
        return {"message": "Weight transfer initialized"}

    def _start(self, _body: Mapping[str, Any]) -> dict[str, Any]:
        if self._updating:
            raise Refused("start_weight_update called while a weight update is already active")
        self._updating = True
        return {"message": "Weight update started"}

    def _update(self, body: Mapping[str, Any]) -> dict[str, Any]:
        if not self._updating:
            raise Refused("start_weight_update must be called before update_weights")
        self._side.commit(dict(body["update_info"]))
        self._show()  # if nobody paused it, requests meet whatever is there now
        return {"message": "Weights updated"}

    def _finish(self, body: Mapping[str, Any]) -> dict[str, Any]:
        if not self._updating:
            raise Refused("finish_weight_update called without a matching start_weight_update")
        self._updating = False
        label = body.get("weight_version")
        return (
            self._set_label(str(label))
            if label is not None
            else {"message": "Weight update finished"}
        )

    def _set_label(self, label: str) -> dict[str, Any]:
        if label != self._label:
            self._labels.append(label)
        self._label = label
        self._show()
        return {"success": True, "new_version": label}


class Handler(BaseHTTPRequestHandler):
    """One connection. The class attribute ``served`` is set per server."""

    served: Server
    protocol_version = "HTTP/1.1"
    timeout = IDLE_S
    # one packet per answer: header and body in two would wait for the caller's delayed
    # acknowledgement
    wbufsize = 1 << 16
    disable_nagle_algorithm = True

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: thousands of calls say nothing new."""

    def do_GET(self) -> None:
        """See the routes."""
        query = parse_qs(urlsplit(self.path).query)
        self._handle("GET", {key: values[-1] for key, values in query.items()})

    def do_POST(self) -> None:
        """See the routes."""
        raw = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        try:
            body = json.loads(raw) if raw else {}
        except json.JSONDecodeError as error:
            self._answer(400, {"error": f"the body must be JSON: {error}"})
            return
        self._handle("POST", body)

    def _handle(self, method: str, body: Mapping[str, Any]) -> None:
        path = urlsplit(self.path).path
        if path == "/health":
            self._answer(200, {})
        elif (route := self.served.routes.get((method, path))) is None:
            self._answer(404, {"error": f"no route {method} {path}"})
        else:
            self._answer(*self._run(route, body))

    def _run(
        self, route: Callable[[Mapping[str, Any]], dict[str, Any]], body: Mapping[str, Any]
    ) -> tuple[int, dict[str, Any]]:
        try:
            return 200, self.served.engine.submit(route, body).result()
        except (KeyError, TypeError, ValueError) as error:
            return 422, {"error": f"the request must have the fields of the route: {error!r}"}
        except (Refused, TitanGrpoError) as error:
            return 500, {"error": str(error)}

    def _answer(self, status: int, answer: Mapping[str, Any]) -> None:
        data = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


class HttpServer(ThreadingHTTPServer):
    """One daemon thread per connection."""

    daemon_threads = True
    request_queue_size = 64

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A caller that went away is no news; anything else is."""
        if not isinstance(sys.exc_info()[1], ConnectionError | TimeoutError):
            super().handle_error(request, client_address)


def main(argv: list[str]) -> int:
    """Listen, print ``{"port": N, "pid": N}`` as one line, serve until the process is ended."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--host", default="127.0.0.1", help="address to bind")
    parser.add_argument("--port", type=int, default=0, help="port; 0: any that is free")
    parser.add_argument(
        "--shapes",
        default="",
        metavar="JSON",
        help='the served model, {"name": [rows, columns]}; empty: any',
    )
    parser.add_argument(
        "--record",
        default="",
        metavar="PATH",
        help="append a line per commit to this file; empty: none",
    )
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    shapes = (
        {name: tuple(shape) for name, shape in json.loads(options.shapes).items()}
        if options.shapes
        else None
    )
    record = Path(options.record) if options.record else None
    handler = type("BoundHandler", (Handler,), {"served": Server(CopiedModel(shapes), record)})
    with HttpServer((options.host, options.port), handler) as http:
        print(json.dumps({"port": http.server_address[1], "pid": os.getpid()}), flush=True)
        http.serve_forever()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
