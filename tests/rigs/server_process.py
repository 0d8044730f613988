"""The server without an engine as a process of its own: ``python -m tests.rigs.server_process
--port 0``.

It speaks the RL routes of vLLM that ``engines.vllm`` uses, over real HTTP, so the production
``VllmControl`` drives it; behind the routes is a ``ReceiverServer``, with the real plugin half and
the real receiver process. The "model" is a copy of the tensors in this process's own memory,
replaced one by one during a load, so a half load can be seen: ``POST /served`` hashes what is
there.

With ``--token-seconds`` it also answers completions, of one and the same token, after the time that
they take.

It decides nothing about real engines. That an engine computes with the tensors that it was handed,
keeps its requests over a pause or survives a failed load is shown by the tests with real servers,
and only by those."""

import argparse
import json
import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from tests.rigs.receiver_server import DirectControl, ReceiverServer
from titan_grpo.engines.vllm import COMPLETIONS
from titan_grpo.errors import TitanGrpoError
from titan_grpo.layout.manifest import Manifest
from titan_grpo.receive.checkpoint import coverage_problem
from titan_grpo.receive.commit import Engine, EngineSide, Workers
from titan_grpo.rollout.httpd import HttpServer, Reply, Request
from titan_grpo.runkey import find_run_key
from titan_grpo.verify.recording import RecordingSide, content_digest, tensor_digest

TOKEN = 21
"""What its completions are made of."""

Shapes = Mapping[str, tuple[int, ...]]
Route = Callable[[Mapping[str, Any]], Mapping[str, Any]]
"""Answers a request with this query or JSON body."""


class CopiedModel(Engine):
    """An engine with its own copy of every tensor, in memory that stays where it is."""

    def __init__(self, shapes: Shapes | None = None, routes: bool = True) -> None:
        """``shapes``: the model that is served, HF name -> shape; None takes any. ``routes``: see
        Engine."""
        self._shapes, self.routes = shapes, routes
        self.tensors: dict[str, torch.Tensor] = {}
        self.loads = 0

    def refuses(self, manifest: Manifest) -> str:
        return "" if self._shapes is None else coverage_problem(manifest, self._shapes, tied=False)

    def load(self, tensors: Iterator[tuple[str, torch.Tensor]]) -> None:
        """See Engine. What breaks off leaves some tensors new and the others old."""
        for name, tensor in tensors:
            held = self.tensors.get(name)
            if held is None or held.shape != tensor.shape or held.dtype != tensor.dtype:
                self.tensors[name] = tensor.clone()
            else:
                held.copy_(tensor)
        self.loads += 1

    def digest(self) -> str:
        """layout.content's digest of what the memory holds now."""
        return content_digest(
            {name: tensor_digest(tensor) for name, tensor in self.tensors.items()}
        )


class Refused(Exception):
    """The engine raised: vLLM answers 500 and goes on."""


class Server:
    """vLLM's routes. Everything but /health runs on one thread, as in an engine's core, which
    answers in turn.

    That thread also starts the receivers, which are killed when the thread that started them ends:
    an HTTP thread, which ends with its connection, must not.
    """

    def __init__(
        self,
        model: CopiedModel,
        record: Path | None = None,
        side: Callable[[], EngineSide] | None = None,
        token_s: float = 0.0,
        update_s: float = 0.0,
    ) -> None:
        """``record``: a file that gets a line per commit (verify.recording). ``side``: another half
        of ours than the real one. ``token_s``: seconds of a token; 0: there are no completions.
        ``update_s``: seconds that each call of an update takes longer."""
        key, workers = find_run_key(os.environ), Workers()

        def real() -> EngineSide:
            if record is None:
                return EngineSide(model, workers, "", key)
            return RecordingSide(record, model, workers, "", key)

        self._token_s, self._update_s = token_s, update_s
        self._model, self._server = model, ReceiverServer("this server", make_side=side or real)
        self._control = DirectControl(self._server)
        self._engine = ThreadPoolExecutor(1, thread_name_prefix="engine")
        self._updating = False
        self._visible: list[tuple[str, str]] = []
        control = self._control
        self._routes: dict[tuple[str, str], Route] = {
            ("GET", "/weight_info"): lambda _: {"weight_version": control.label()},
            ("GET", "/is_paused"): lambda _: {"is_paused": control.paused()},
            ("GET", "/get_world_size"): lambda _: {"world_size": 1},
            ("POST", "/served"): self._served,
            ("POST", "/pause"): self._does(lambda _: control.pause()),
            ("POST", "/resume"): self._does(lambda _: control.resume()),
            ("POST", "/init_weight_transfer_engine"): self._does(
                lambda body: control.greet(body["init_info"])
            ),
            ("POST", "/start_weight_update"): self._slowly(self._start),
            ("POST", "/update_weights"): self._slowly(self._update),
            ("POST", "/finish_weight_update"): self._slowly(self._finish),
            ("POST", "/update_weight_version"): self._does(
                lambda body: control.relabel(str(body["new_version"]))
            ),
        }

    def answer(self, request: Request) -> Reply:
        """Any thread."""
        if request.path == "/health":
            return Reply(200, {})
        if request.path == COMPLETIONS and self._token_s:
            return self._completion(json.loads(request.body)["max_tokens"])
        route = self._routes.get((request.method, request.path))
        if route is None:
            return Reply(404, {"error": f"no route {request.method} {request.path}"})
        try:
            body = json.loads(request.body) if request.body else {}
            return Reply(200, self._engine.submit(route, body).result())
        except (KeyError, TypeError, ValueError) as error:
            return Reply(
                422, {"error": f"the request must have the fields of the route: {error!r}"}
            )
        except (Refused, TitanGrpoError) as error:
            return Reply(500, {"error": str(error)})

    def _completion(self, tokens: int) -> Reply:
        """All at once, after its time. Requests run beside each other."""
        threading.Event().wait(tokens * self._token_s)
        logprobs = {"token_logprobs": [-1.0] * tokens}
        choice = {"index": 0, "text": "", "finish_reason": "length", "logprobs": logprobs}
        body = json.dumps({"choices": [choice | {"token_ids": [TOKEN] * tokens}]})
        return Reply(200, f"data: {body}\n\ndata: [DONE]\n\n".encode())

    def _served(self, body: Mapping[str, Any]) -> Mapping[str, Any]:
        client = self._server.receiver
        assert client is not None
        return {
            "label": self._server.label,
            "paused": self._server.paused,
            "visible": self._visible[body["after"] :],
            "digest": self._model.digest(),
            "intact": client.state.intact,
            "loads": self._model.loads,
            "pid": os.getpid(),
            "receiver_pid": self._server.receiver_pid,
        }

    def _does(self, action: Callable[[Mapping[str, Any]], None]) -> Route:
        def route(body: Mapping[str, Any]) -> Mapping[str, Any]:
            action(body)
            return self._did()

        return route

    def _slowly(self, action: Route) -> Route:
        def route(body: Mapping[str, Any]) -> Mapping[str, Any]:
            threading.Event().wait(self._update_s)
            return action(body)

        return route

    def _did(self) -> Mapping[str, Any]:
        """Note what a request would meet from here on, if generation goes on."""
        now = (self._server.label, self._model.digest())
        if not self._server.paused and self._visible[-1:] != [now]:
            self._visible.append(now)
        return {"success": True}

    def _start(self, _body: Mapping[str, Any]) -> Mapping[str, Any]:
        if self._updating:
            raise Refused("start_weight_update called while a weight update is already active")
        self._updating = True
        return {}

    def _update(self, body: Mapping[str, Any]) -> Mapping[str, Any]:
        if not self._updating:
            raise Refused("start_weight_update must be called before update_weights")
        self._control.load(body["update_info"])
        return self._did()

    def _finish(self, body: Mapping[str, Any]) -> Mapping[str, Any]:
        if not self._updating:
            raise Refused("finish_weight_update called without a matching start_weight_update")
        self._updating = False
        label = body.get("weight_version")
        if label is None:
            return {}
        self._control.finish(str(label))
        return self._did()


def main(argv: list[str]) -> None:
    """Listen, print ``{"port": N}`` as one line, serve until the process is ended."""
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
    parser.add_argument(
        "--token-seconds", type=float, default=0.0, help="of a completion; 0: it answers none"
    )
    parser.add_argument(
        "--update-seconds", type=float, default=0.0, help="of each call of an update, more"
    )
    parser.add_argument("--no-routes", action="store_true", help="sends no experts of tokens")
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    shapes = None
    if options.shapes:
        shapes = {name: tuple(shape) for name, shape in json.loads(options.shapes).items()}
    record = Path(options.record) if options.record else None
    model = CopiedModel(shapes, routes=not options.no_routes)
    server = Server(model, record, None, options.token_seconds, options.update_seconds)
    http = HttpServer(f"{options.host}:{options.port}", "", server.answer, "--host and --port")
    print(json.dumps({"port": int(http.address.rpartition(":")[2])}), flush=True)
    threading.Event().wait()  # no deadline: a signal ends the process


if __name__ == "__main__":
    main(sys.argv[1:])
