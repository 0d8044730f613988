"""What all rooms' tests share: the parsed sources, the servers' interpreter, and a check that
nothing outlives the run."""

import ast
import gc
import os
import signal
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
from hypothesis import HealthCheck, settings

ROOT = Path(__file__).resolve().parent.parent

# Before torch is imported, here or in a process that a test starts. The tensors are tiny. Where
# other processes want the cores, threads wait for each other at each of their operations: three
# short sequences through the reference model took 1.8 s, and 0.03 s on one thread.
os.environ["OMP_NUM_THREADS"] = "1"

# Of what a test starts, and of pytest's workers, which start later.
os.environ["PYTHONPATH"] = os.pathsep.join(
    filter(None, (str(ROOT / "tests/rigs/collector"), os.environ.get("PYTHONPATH")))
)

# How long a draw takes says something about who else needs the two cores, and nothing about the
# code.
settings.register_profile(
    "shared_cores", deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("shared_cores")


SHARED = {
    "sglang_site": "servers",
    "keyed_server": "servers",
    "site": "servers",
    "sources": "sources",
}
"""Fixture that takes long to make (a server that starts, all files parsed) -> group of the tests
that use it: one worker runs them, on one. Servers are in one group, since some tests use two."""

FIRST = "tests/e2e/"
"""What takes longest comes first, so that no worker is left alone with it in the end."""

SLOW = (
    "tests/layout/test_image.py",
    "tests/model_check/",
    "tests/patches/",
    "tests/receive/test_vllm_lora.py",
    "tests/rollout/test_agent_runs.py",
    "tests/rollout/test_broken_off.py",
    "tests/rollout/test_client.py",
    "tests/rollout/test_engine_calls.py",
    "tests/rollout/test_filter.py",
    "tests/rollout/test_idle.py",
    "tests/rollout/test_transports.py",
    "tests/sync/test_patches.py",
    "tests/sync/test_transports.py",
    "tests/titan/",
    "tests/verify/test_reference.py",
    "tests/views/test_browser.py",
)
"""What ``scripts/test.sh --fast`` leaves out besides real servers: it searches states, imports
torchtitan, or starts an interpreter or a browser per test."""


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave the files unread that ``--fast`` leaves out: to import them takes longer than many
    tests."""
    fast = "not slow" in config.getoption("markexpr") and collection_path.is_relative_to(ROOT)
    path = collection_path.relative_to(ROOT).as_posix() if fast else ""
    return True if path.startswith((*SLOW, FIRST)) else None


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Import all files without the garbage collector, which finds nothing there and takes a third
    of the time; what they made is left out of the collections during the tests."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(tryfirst=True)  # xdist reads the groups in a hook of the same name
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Keep each file on one worker (``--dist loadgroup``), those that share a server together.

    Files that start processes come before the others, which fill the workers up in the end.
    """
    groups: dict[Path, str] = {}
    for item in items:
        for fixture, group in SHARED.items():
            known = (
                item._fixtureinfo.name2fixturedefs.get(fixture, ())
                if isinstance(item, pytest.Function)
                else ()
            )
            if known and known[-1].scope == "session":
                groups[item.path] = group
    for item in items:
        path = item.path.relative_to(ROOT).as_posix()
        if item.get_closest_marker("xdist_group") is None:
            item.add_marker(pytest.mark.xdist_group(groups.get(item.path, path)))
        if path.startswith(SLOW):
            item.add_marker(pytest.mark.slow)
    long = {item.path for item in items if {"e2e", "slow"} & {m.name for m in item.iter_markers()}}
    items.sort(
        key=lambda item: (
            groups.get(item.path) != "servers",
            FIRST not in item.path.as_posix(),
            item.path not in long,
        )
    )


@dataclass(frozen=True)
class Source:
    """One Python file of the project. ``path`` is relative to the root; the package's patches
    appear as ``patches/...``."""

    path: str
    text: str
    tree: ast.Module


@pytest.fixture(scope="session")
def root() -> Path:
    return ROOT


@pytest.fixture(scope="session")
def tracked() -> list[Path]:
    """Files that are committed or would be: everything that git does not ignore, without links."""
    listing = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        check=True,
        text=True,
    )
    paths = [ROOT / name for name in listing.stdout.split("\0") if name]
    return sorted(p for p in paths if p.is_file() and not p.is_symlink())


@pytest.fixture(scope="session")
def sources(tracked: list[Path]) -> list[Source]:
    out = []
    for path in tracked:
        if path.suffix == ".py":
            text = path.read_text()
            out.append(Source(path.relative_to(ROOT).as_posix(), text, ast.parse(text, str(path))))
    return out


def _interpreter(engine: str) -> str:
    """Its absence is a failure, not a skip: the real server is the point."""
    python = ROOT / f".venv-{engine}" / "bin" / "python"
    if not python.exists():
        pytest.fail(
            f"the environment .venv-{engine} is missing, so no real server can be tested; run"
            " scripts/setup.sh"
        )
    return str(python)


@pytest.fixture(scope="session")
def vllm_python() -> str:
    """Interpreter of the vLLM environment."""
    return _interpreter("vllm")


@pytest.fixture(scope="session")
def sglang_python() -> str:
    """Interpreter of the SGLang environment."""
    return _interpreter("sglang")


@pytest.fixture(scope="session")
def atropos_python() -> str:
    """Interpreter of the environment with the Atropos API."""
    return _interpreter("atropos")


@pytest.fixture
def ends_by_signals() -> Iterator[None]:
    """Handle the signals that end a job as a trainer's rank does."""
    from titan_grpo.subprocesses import ENDING, received, stop

    handlers = {number: signal.signal(number, stop) for number in ENDING}
    yield
    received.clear()
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.fixture(scope="session", autouse=True)
def nothing_outlives_the_tests() -> Iterator[None]:
    """Fail the run if a process that a test started is still there at its end."""
    yield
    left = [
        p
        for p in psutil.Process().children(recursive=True)
        if "resource_tracker" not in " ".join(_command(p))
    ]
    _, alive = psutil.wait_procs(left, timeout=60)
    names = [" ".join(_command(p))[:200] for p in alive]
    for process in alive:
        process.kill()
    assert not names, f"processes left behind by tests (now killed): {names}"


def _command(process: psutil.Process) -> list[str]:
    try:
        return list(process.cmdline())
    except psutil.NoSuchProcess:
        return []
