"""Both engines pass one suite, on real servers: titan_grpo/testing/suites says what it is and what a third engine needs."""

from pathlib import Path

import pytest

from titan_grpo.engines.controls import ServerAccess
from titan_grpo.testing.suites import commits, engine, kv, pieces
from titan_grpo.testing.suites.engine import EngineUnderTest
from titan_grpo.titan.tiny import write_tiny_model

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(400)]

STD = 0.05
"""Weights large enough that two seeds differ by whole units of log-probability, small enough for bf16."""


def remake(seed: int, folder: Path) -> Path:
    return write_tiny_model("qwen3", folder, seed, std=STD, dtype="bfloat16")


@pytest.fixture(scope="module")
def vllm(site, tmp_path_factory) -> EngineUnderTest:
    """The server that all end-to-end tests share."""
    model, folder = Path(site.server.spec.model), tmp_path_factory.mktemp("vllm")
    return EngineUnderTest("vllm", site.access, model, remake, folder, False, False)


@pytest.fixture(scope="module")
def sglang(sglang_site, tmp_path_factory) -> EngineUnderTest:
    """The same, of SGLang."""
    model, folder = Path(sglang_site.server.spec.model), tmp_path_factory.mktemp("sglang")
    return EngineUnderTest(
        "sglang", sglang_site.access, model, remake, folder, True, True, None, sglang_site.restart, follows_seeds=False
    )


@pytest.fixture(scope="module")
def keyed(tiny_server, tmp_path_factory) -> EngineUnderTest:
    """A server with a run key, shared by tests that leave it as they found it."""
    spec, access = tiny_server.spec, ServerAccess(tiny_server.url, 60.0)
    return EngineUnderTest(
        "vllm", access, Path(spec.model), remake, tmp_path_factory.mktemp("keyed"), False, False, run_key=spec.run_key
    )


def named(checks) -> dict:
    return {"argvalues": checks, "ids": [check.__name__ for check in checks]}


@pytest.mark.parametrize("check", **named(engine.CHECKS + pieces.CHECKS + commits.CHECKS + kv.CHECKS))
def test_vllm(check, vllm) -> None:
    check(vllm)


@pytest.mark.parametrize("check", **named(engine.CHECKS + pieces.CHECKS + commits.CHECKS + kv.CHECKS + commits.RESTART_CHECKS))
def test_sglang(check, sglang, sglang_site) -> None:
    check(sglang)
    assert sglang_site.kernel_calls == [], "the stand-in for SGLang's compiled kernels takes part in nothing"


@pytest.mark.parametrize("check", **named(commits.KEYED_CHECKS))
def test_run_key(check, keyed) -> None:
    check(keyed)
