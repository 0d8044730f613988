"""A rollout service with clients of it, and what may lie between them."""

import dataclasses
import threading
from collections.abc import Callable
from typing import Any

import httpx

from tests.rigs.sockets import free_port
from titan_grpo.rollout.client import RolloutClient
from titan_grpo.rollout.httpd import HttpServer, Reply, Request
from titan_grpo.rollout.messages import RolloutSpec, WorkerTransport
from titan_grpo.rollout.remote import RemoteTransport
from titan_grpo.rollout.service import Service

KEY = "a-secret"
ANY = "127.0.0.1:0"


class Relay:
    """An HTTP server that passes requests on as ``way`` says: "" (as it is), "drop" (before),
    "lose" (the answer), "twice", "late" (after the next one), "away" (it finds no service), or
    "page" (it says so with 200)."""

    def __init__(self, target: str, way: Callable[[], str]) -> None:
        self.target, self.way = target, way
        self.passed = 0
        self._late: list[Request] = []
        self._lock = threading.Lock()
        self._server = HttpServer(ANY, "", self._answer, "the relay")
        self.url = f"http://{self._server.address}"

    def _answer(self, request: Request) -> Reply:
        with self._lock:
            way = self.way()
            late, self._late = self._late, [request] if way == "late" else []
        answers = [
            self._pass(request)
            for _ in range({"drop": 0, "away": 0, "page": 0, "late": 0, "twice": 2}.get(way, 1))
        ]
        for old in late:
            self._pass(old)
        if way == "away":
            return Reply(404, {"error": "default backend"})
        if way == "page":
            return Reply(200, b"<html>", kind="text/html")
        lost = Reply(502, {"error": "lost on the way"})
        return lost if way in ("drop", "lose", "late") else answers[-1]

    def _pass(self, request: Request) -> Reply:
        self.passed += 1
        headers = {"Authorization": f"Bearer {KEY}"}
        url = self.target + request.path
        try:
            answer = httpx.request(
                request.method,
                url,
                content=request.body,
                headers=headers,
                trust_env=False,
                timeout=40,
            )
        except httpx.HTTPError as error:
            return Reply(502, {"error": repr(error)})
        return Reply(answer.status_code, answer.json())

    def close(self) -> None:
        self._server.close()


class Cluster:
    """A service that can be restarted at its address, and clients of it, which all end with the
    test."""

    def __init__(self, spec: RolloutSpec) -> None:
        self.spec = spec
        self.address = f"127.0.0.1:{free_port()}"
        self.said: list[str] = []
        """What the service and the clients report."""
        self.lease_s = 120.0
        self.service: Service | None = None
        self.closing: list[Callable[[], None]] = []

    @property
    def url(self) -> str:
        return f"http://{self.address}"

    def serve(self) -> None:
        self.service = Service(self.address, KEY, self.lease_s, self.said.append)

    def stop(self) -> None:
        if self.service is not None:
            self.service.close()

    def transport(self, **changes: Any) -> RemoteTransport:
        return RemoteTransport(**{"url": self.url, "key": KEY, "deadline_s": 60.0, **changes})

    def client(self, transport: WorkerTransport | None = None, **changes: Any) -> RolloutClient:
        client = RolloutClient(
            dataclasses.replace(self.spec, **changes),
            "",
            transport if transport is not None else self.transport(),
            self.said.append,
        )
        self.closing.insert(0, lambda: client.close(5))
        return client

    def relay(self, way: Callable[[], str]) -> Relay:
        relay = Relay(self.url, way)
        self.closing.append(relay.close)
        return relay

    def http(self) -> httpx.Client:
        """A client of the service's routes."""
        headers = {"Authorization": f"Bearer {KEY}"}
        return httpx.Client(base_url=self.url, headers=headers, trust_env=False, timeout=60)

    def run(self) -> str:
        """The run that has the service."""
        with self.http() as http:
            return str(http.get("/status").json()["run"])
