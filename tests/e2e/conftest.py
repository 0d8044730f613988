"""Real runs for the end-to-end tests: torchrun with a watched output, one shared server, synthetic
recorded rollouts."""

import os
import random
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import load_file

from scripts.common import RECIPE, keys
from tests.conformance.crowd import CONTEXT
from tests.conformance.engine import EngineUnderTest, remake
from tests.rigs.trainer_handle import wait_until
from titan_grpo.commands.processes import GRACE_S, torchrun
from titan_grpo.engines.generation import Sampling
from titan_grpo.engines.http import ServerAccess, SyncDriver
from titan_grpo.engines.launch import Server, ServerSpec
from titan_grpo.engines.server import Dialect, ServerControl, dialect, make_control
from titan_grpo.observe.schema import Summary
from titan_grpo.observe.terminal import Cause, status_of
from titan_grpo.patches import sglang_cpu
from titan_grpo.protocol.messages import Label
from titan_grpo.rollout.client import RolloutClient
from titan_grpo.rollout.messages import RolloutSpec
from titan_grpo.rollout.records import GroupRecorder
from titan_grpo.rollout.remote import RemoteTransport
from titan_grpo.rollout.service import Service
from titan_grpo.runkey import Key
from titan_grpo.samples import Completion, Group, Prompt
from titan_grpo.subprocesses import end
from titan_grpo.titan.tiny import write_tiny_model
from titan_grpo.verify.server import Devices, server_spec

API_KEY, API_KEY_VARIABLE = "the-engines-own-key", "TITAN_GRPO_TEST_API_KEY"
ADMIN_KEY, ADMIN_KEY_VARIABLE = "the-admins-own-key", "TITAN_GRPO_TEST_ADMIN_KEY"
KEYS = {API_KEY_VARIABLE: API_KEY, ADMIN_KEY_VARIABLE: ADMIN_KEY}
COMPILED_VARIABLE = "TORCHINDUCTOR_CACHE_DIR"
"""Environment variable with the folder of what torch compiles."""

WAIT_S = 400.0
"""Deadline of what a run must come to, in seconds: nothing takes nearly as long, whoever shares the
cores."""

UNPAUSED_S = 60.0
"""Deadline of a pause guard's work after its trainer's end, in seconds."""

STEP = re.compile(r"^step +(\d+)/")


def run_cli(
    root: Path, *words: object, timeout_s: float = WAIT_S
) -> "subprocess.CompletedProcess[str]":
    """``titan-grpo`` with these words, to its end."""
    return subprocess.run(
        [sys.executable, "-m", "titan_grpo.cli", *map(str, words)],
        cwd=root,
        env=os.environ | KEYS,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )


class Training:
    """A torchrun in a process group of its own, its output read line by line. A context manager:
    nothing stays."""

    def __init__(self, command: list[str], cwd: Path) -> None:
        self.lines: list[str] = []
        self._changed = threading.Condition()
        self._ended = False
        self.process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            text=True,
            cwd=cwd,
            env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", **KEYS},
            start_new_session=True,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            with self._changed:
                self.lines.append(line.rstrip())
                self._changed.notify_all()
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    @property
    def shown(self) -> list[str]:
        return [text for line in list(self.lines) if (text := status_of(line)) is not None]

    @property
    def step(self) -> int:
        """The last finished step; 0 before the first."""
        return max(
            (int(found.group(1)) for text in self.shown if (found := STEP.match(text))), default=0
        )

    @property
    def log(self) -> str:
        """The end of everything it said."""
        return "\n".join(self.lines[-60:])

    @property
    def cause(self) -> str:
        """The one line that says why it failed."""
        return self._cause().text

    @property
    def exitcode(self) -> int | None:
        """Exit code of the rank that failed first."""
        return self._cause().exitcode

    def _cause(self) -> Cause:
        cause = Cause()
        for line in self.lines:
            cause.read(line)
        return cause

    def wait_until(self, holds: Callable[[], bool], timeout_s: float = WAIT_S) -> bool:
        """Look again after every line of output; False past the deadline."""
        with self._changed:
            return self._changed.wait_for(lambda: holds() or self._ended, timeout_s) and holds()

    def wait_step(self, step: int) -> None:
        """Until a step is finished; fails the test with the log otherwise."""
        reached = self.wait_until(lambda: self.step >= step)
        assert reached, f"step {step} was not reached:\n{self.log}"

    def run_on(self, seconds: float) -> None:
        """Let it train that long."""
        end = time.monotonic() + seconds
        self.wait_until(lambda: time.monotonic() >= end, seconds)

    def finish(self, timeout_s: float = WAIT_S) -> int:
        code = self.process.wait(timeout_s)
        self._reader.join(10)
        return code

    def stop(self) -> int:
        """SIGTERM to torchrun, which tells its ranks; its exit code."""
        self.process.terminate()
        return self.finish()

    def __enter__(self) -> "Training":
        return self

    def __exit__(self, *exc: object) -> None:
        end(self.process, GRACE_S)
        self._reader.join(10)


@dataclass
class Site:
    """A shared server as the tests look at it."""

    server: Server
    driver: SyncDriver

    @property
    def access(self) -> ServerAccess:
        """With every key that there is."""
        spec = self.server.spec
        return ServerAccess(self.url, 60.0, None, spec.api_key, spec.admin_key)

    @property
    def speak(self) -> Dialect:
        return dialect(self.server.spec.engine)

    def restart(self) -> None:
        """The same server once more in its place."""
        self.server.stop()
        self.server = Server(self.server.spec)
        self.server.wait_healthy(280)

    @property
    def url(self) -> str:
        return self.server.url

    def label(self) -> Label:
        """What it says that it serves."""
        label = Label.parse(self.driver.run(self.speak.label(WAIT_S)))
        assert label is not None, "it serves weights of its own"
        return label

    def paused(self) -> bool:
        control = make_control(self.server.spec.engine, self.access)
        with closing(control):
            return control.paused()

    @property
    def kernel_calls(self) -> list[str]:
        """Functions of SGLang's compiled kernels that were called although only a stand-in is
        there; empty if all is well."""
        path = Path(self.server.spec.env[sglang_cpu.CALLS_VARIABLE])
        return path.read_text().splitlines() if path.exists() else []

    def assert_serves(self) -> None:
        """Healthy, and a request is answered, once the pause guard of a trainer that ended in a
        commit has let it go."""
        self.driver.run(self.speak.health(WAIT_S))
        assert wait_until(lambda: not self.paused(), UNPAUSED_S), "it is left paused"
        assert self.driver.run(
            self.speak.generate([1, 40, 41], Sampling(max_tokens=4), WAIT_S)
        ).token_ids


@dataclass
class Runs:
    """Starts training runs of the tiny model against given servers."""

    root: Path
    model: Path

    @property
    def recipe(self) -> Path:
        """The TOML file that every run starts from."""
        return self.root / RECIPE

    def start(
        self,
        out: Path,
        servers: list[str],
        *arguments: str,
        nproc: int = 1,
        inside: tuple[str, ...] = (),
        node: tuple[str, ...] = ("--standalone",),
    ) -> Training:
        """``inside``: a command line that runs torchrun as its arguments (in a namespace, say).
        ``node``: torchrun's arguments for one of several hosts."""
        settings = {
            "job.dump_folder": out,
            "model.hf_assets_path": self.model,
            "rollout.servers": ",".join(servers),
            "rollout.api_key_env": API_KEY_VARIABLE,
            "rollout.admin_key_env": ADMIN_KEY_VARIABLE,
            "weight_sync.backoff_max_s": 1.0,
        }
        command = torchrun(nproc, RECIPE, [*keys(settings), *arguments])
        standalone = command.index("--standalone")
        command[standalone : standalone + 1] = node
        return Training([*inside, *command], self.root)

    def complete(
        self, out: Path, servers: list[str], *arguments: str, nproc: int = 1
    ) -> dict[str, Any]:
        """Run to the end; its summary."""
        with self.start(out, servers, *arguments, nproc=nproc) as training:
            assert training.finish() == 0, training.log
        return self.summary(out)

    @staticmethod
    def summary(out: Path) -> dict[str, Any]:
        """summary.json, checked against its schema."""
        found = msgspec.json.decode((out / "summary.json").read_bytes(), type=Summary)
        summary: dict[str, Any] = msgspec.to_builtins(found)
        return summary

    def same_weights(self, one: Path, other: Path) -> bool:
        """Whether two runs exported the very same, and others than they began with."""
        a, b, begun = (self.weights(folder) for folder in (one / "hf", other / "hf", self.model))
        assert any(not torch.equal(a[n], begun[n]) for n in a), "training must have changed them"
        return all(torch.equal(a[n], b[n]) for n in a)

    @staticmethod
    def weights(folder: Path) -> dict[str, torch.Tensor]:
        """Tensors of a Hugging Face directory."""
        return load_file(folder / "model.safetensors")


@dataclass(frozen=True)
class Replay:
    """Recorded rollouts that no engine sampled: random tokens, rewarded for digits."""

    path: Path
    prompts: int
    group: int
    tokens: int

    @property
    def arguments(self) -> list[str]:
        """What a run needs to train on them."""
        settings = {
            "rollout.replay_path": self.path,
            "rollout.prompts_per_step": self.prompts,
            "rollout.group_size": self.group,
            "rollout.max_completion_tokens": self.tokens,
        }
        return keys(settings)

    def write(self, versions: int) -> "Replay":
        """One batch for each of the versions 0, 1, ..."""
        rng = random.Random(0)
        recorder = GroupRecorder(str(self.path), 0)
        for version in range(versions):
            recorder.write(
                version, [self._group(rng, version, index) for index in range(self.prompts)]
            )
        recorder.close()
        return self

    def _group(self, rng: random.Random, version: int, index: int) -> Group:
        prompt = Prompt(
            version * self.prompts + index, tuple(rng.randrange(4, 100) for _ in range(8))
        )
        return Group(prompt, tuple(self._completion(rng, version) for _ in range(self.group)))

    def _completion(self, rng: random.Random, version: int) -> Completion:
        ids = tuple(
            rng.randrange(4, 100) for _ in range(rng.randrange(self.tokens // 2, self.tokens + 1))
        )
        # Ids 21 to 30 are the digits of the tiny vocabulary; ln 128 is what a random model gives to
        # any token.
        reward = sum(21 <= i <= 30 for i in ids) / len(ids)
        return Completion(ids, (-4.85,) * len(ids), "length", version, version, "", reward)


@pytest.fixture(scope="session")
def runs(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(root, write_tiny_model("qwen3", tmp_path_factory.mktemp("model"), seed=1))


@contextmanager
def running(spec: ServerSpec) -> Iterator[Site]:
    """A healthy server, which a test may have restarted when it ends."""
    server = Server(spec)
    with SyncDriver(server.url, spec.api_key, spec.admin_key) as driver:
        shared = Site(server, driver)
        try:
            server.wait_healthy(280)
            yield shared
        finally:
            shared.server.stop()


def shared(python: str, folder: Path, engine: str, **settings: Any) -> ServerSpec:
    """A server that starts with other weights than the trainers', and refuses clients without its
    key. ``settings``: more of its ServerSpec."""
    model = write_tiny_model("qwen3", folder / "model", seed=2)
    plain = ServerSpec(python, str(model), str(folder / f"{engine}.log"), engine)
    spec = server_spec(plain, folder, Devices("cpu"))
    args = (*spec.args, "--tool-call-parser", "hermes")
    return replace(spec, max_model_len=CONTEXT, args=args, api_key=API_KEY, **settings)


@pytest.fixture(scope="session")
def site(
    nothing_outlives_the_tests: None, tmp_path_factory: pytest.TempPathFactory, vllm_python: str
) -> Iterator[Site]:
    """A real vLLM server. It records every commit beside its log (verify.site.recorded)."""
    folder = tmp_path_factory.mktemp("site")
    spec = shared(vllm_python, folder, "vllm", tool_calls=True)
    env = {**spec.env, COMPILED_VARIABLE: str(folder / "compiled")}
    with running(replace(spec, env=env)) as found:
        yield found


@pytest.fixture(scope="session")
def sglang_site(
    nothing_outlives_the_tests: None, tmp_path_factory: pytest.TempPathFactory, sglang_python: str
) -> Iterator[Site]:
    """The same of SGLang, with both of its keys."""
    folder = tmp_path_factory.mktemp("sglang_site")
    spec = shared(sglang_python, folder, "sglang", admin_key=ADMIN_KEY)
    env = {**spec.env, sglang_cpu.CALLS_VARIABLE: str(folder / "kernel_calls")}
    with running(replace(spec, env=env)) as found:
        yield found


@pytest.fixture(scope="session")
def keyed_server(
    nothing_outlives_the_tests: None, tmp_path_factory: pytest.TempPathFactory, vllm_python: str
) -> Iterator[Server]:
    """A real vLLM server of a mixture of experts with a run key, and without keys of the engine."""
    folder = tmp_path_factory.mktemp("keyed_server")
    model = remake(100, folder / "model", "qwen3_moe")
    key = Key.generate()
    spec = ServerSpec(vllm_python, str(model), str(folder / "server.log"), run_key=key)
    with Server(spec) as server:
        server.wait_healthy(280)
        yield server


FAR_KEYS = ("TITAN_GRPO_TEST_FAR_API_KEY", "TITAN_GRPO_TEST_FAR_ADMIN_KEY")
"""Variables of a rollout service's environment, and of no other process."""


@pytest.fixture
def through_service(
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Callable[[EngineUnderTest], EngineUnderTest]]:
    """The same server, whose control plane is reached by calls of a rollout service, which alone
    has the keys."""
    with ExitStack() as stack:

        def reached(server: EngineUnderTest) -> EngineUnderTest:
            for name, key in zip(
                FAR_KEYS, (server.access.api_key, server.access.admin_key), strict=True
            ):
                monkeypatch.setenv(name, key)
            spec = RolloutSpec(
                model_dir=str(server.model), api_key_env=FAR_KEYS[0], admin_key_env=FAR_KEYS[1]
            )
            service = Service("127.0.0.1:0", "", 30.0, lambda _: None)
            stack.callback(service.close)
            client = RolloutClient(spec, "", RemoteTransport(f"http://{service.address}", ""))
            stack.callback(client.close)
            client.start(WAIT_S)

            def keyless(engine: str, access: ServerAccess) -> ServerControl:
                return client.control(engine, replace(access, api_key="", admin_key=""))

            return replace(server, make=keyless)

        yield reached


@pytest.fixture(scope="session")
def small_replay(tmp_path_factory: pytest.TempPathFactory) -> Replay:
    """Six versions of 4 x 4 short completions."""
    return Replay(tmp_path_factory.mktemp("replay") / "small.jsonl", 4, 4, 16).write(6)
