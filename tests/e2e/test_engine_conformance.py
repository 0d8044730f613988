"""Both engines pass one suite, on real servers: titan_grpo/testing/suites says what it is and what a third engine needs."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from titan_grpo.engines.controls import ServerAccess
from titan_grpo.engines.launch import Server, ServerSpec
from titan_grpo.runkey import Key
from titan_grpo.testing.suites import commits, engine
from titan_grpo.testing.suites.engine import EngineUnderTest
from titan_grpo.titan.tiny import write_tiny_model

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

STD = 0.05
"""Weights large enough that two seeds differ by whole units of log-probability, small enough for bf16."""


def remake(seed: int, folder: Path) -> Path:
    return write_tiny_model("qwen3", folder, seed, std=STD, dtype="bfloat16")


@pytest.fixture(scope="module")
def vllm(site, tmp_path_factory) -> EngineUnderTest:
    """The server that all end-to-end tests share."""
    access = ServerAccess(site.url, 60.0, None, site.api_key)
    folder = tmp_path_factory.mktemp("vllm")
    return EngineUnderTest(
        "vllm", access, Path(site.server.spec.model), remake, folder, says_versions=False, guards_control=False
    )


@pytest.fixture(scope="module")
def sglang(nothing_outlives_the_tests, tmp_path_factory, sglang_python) -> Iterator[EngineUnderTest]:
    """A server with every key there is, stopped at the end of this file."""
    folder = tmp_path_factory.mktemp("sglang")
    key, model = Key.generate(), remake(100, folder / "model")
    spec = ServerSpec(
        sglang_python, str(model), str(folder / "server.log"), "sglang", run_key=key, api_key="api", admin_key="adm"
    )
    with restartable(spec) as (server, restart):
        access = ServerAccess(server.url, 60.0, None, "api", "adm")
        yield EngineUnderTest("sglang", access, model, remake, folder, True, True, key, restart)


@contextmanager
def restartable(spec: ServerSpec):
    """A server, and what starts it again in its place."""
    running = [Server(spec)]
    running[0].wait_healthy(280.0)

    def restart() -> None:
        running[0].stop()
        running.append(Server(replace(running.pop().spec)))
        running[0].wait_healthy(280.0)

    try:
        yield running[0], restart
    finally:
        running[0].stop()


def named(checks) -> dict:
    return {"argvalues": checks, "ids": [check.__name__ for check in checks]}


@pytest.mark.parametrize("check", **named(engine.CHECKS + commits.CHECKS))
def test_vllm(check, vllm) -> None:
    check(vllm)


@pytest.mark.parametrize("check", **named(engine.CHECKS + commits.CHECKS + commits.KEYED_CHECKS + commits.RESTART_CHECKS))
def test_sglang(check, sglang) -> None:
    check(sglang)
