"""Real vLLM servers of every kind of model, started with other weights, compute what was committed:
also in two tensor-parallel workers, not without the patch for its CPU reload, and not without a
pause. And what our middleware adds: the two routes that Atropos asks for."""

import json
import re
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.conformance import commits
from tests.conformance.commits import difference, sender
from tests.conformance.crowd import REQUEST_S, prompt
from tests.conformance.engine import (
    MAX_DIFFERENCE,
    EngineUnderTest,
    assert_aborted,
    furthest,
    refusal,
    remake,
)
from tests.conformance.reference import Reference
from tests.e2e.conftest import COMPILED_VARIABLE, Site
from tests.rigs import vllm_unpacked
from titan_grpo.engines.http import Call, HttpRefused, SyncDriver, ignore
from titan_grpo.engines.launch import Server, ServerSpec
from titan_grpo.runkey import EpochKeys, Key
from titan_grpo.titan.flavors import FLAVORS
from titan_grpo.titan.tiny import Kind

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

API_KEY, RUN_KEY = "the-engines-own-key", Key(bytes(range(32)))


@contextmanager
def served(
    kind: Kind, python: str, folder: Path, run_key: Key | None = RUN_KEY, **settings: Any
) -> Iterator[EngineUnderTest]:
    """A server that starts with weights and an API key of its own; ``settings`` go to
    ServerSpec."""
    model, log = remake(100, folder / "start", kind), folder / "server.log"
    settings |= {"cpu_threads": 2, "run_key": run_key, "api_key": API_KEY}
    with Server(ServerSpec(python, str(model), str(log), **settings)) as server:
        server.wait_healthy(300.0)
        yield EngineUnderTest(server, folder, remake=partial(remake, kind=kind))


ELSEWHERE = {"qwen3", "qwen3_moe"}
"""Tested by tests/e2e/test_engine_conformance.py, and on the server below."""


@pytest.fixture(scope="module")
def experts(keyed_server: Server, tmp_path_factory: pytest.TempPathFactory) -> EngineUnderTest:
    """A mixture of experts behind a run key."""
    folder = tmp_path_factory.mktemp("experts")
    return EngineUnderTest(keyed_server, folder, remake=partial(remake, kind="qwen3_moe"))


@pytest.mark.parametrize(
    "check",
    [
        commits.the_server_computes_what_was_committed_also_the_second_time,
        commits.a_version_with_a_tensor_that_the_model_has_not_is_refused_whole,
        *commits.KEYED_CHECKS,
    ],
    ids=lambda check: check.__name__,
)
def test_a_mixture_of_experts_behind_a_run_key(
    check: Callable[[EngineUnderTest], None], experts: EngineUnderTest
) -> None:
    check(experts)


@pytest.mark.long
@pytest.mark.parametrize("kind", [kind for kind in FLAVORS if kind not in ELSEWHERE])
def test_a_server_of_each_architecture_computes_what_was_committed(
    kind: Kind, vllm_python: str, tmp_path: Path
) -> None:
    with served(kind, vllm_python, tmp_path) as e:
        commits.the_server_computes_what_was_committed_also_the_second_time(e)
        commits.a_version_with_a_tensor_that_the_model_has_not_is_refused_whole(e)


@pytest.mark.parametrize("kind", ["qwen3", pytest.param("qwen3_moe", marks=pytest.mark.long)])
def test_layers_that_compute_with_weights_as_they_are_loaded_get_them_by_copies(
    kind: Kind, vllm_python: str, tmp_path: Path
) -> None:
    """As layers do on GPUs, through vLLM's own reload."""
    with served(kind, vllm_python, tmp_path, env=vllm_unpacked.install(tmp_path / "plugin")) as e:
        commits.the_server_computes_each_version_of_one_lane(e)
    log = (tmp_path / "server.log").read_text()
    assert re.findall("the next versions are loaded by the ([0-9]+) copies", log)


@pytest.mark.long
def test_two_tensor_parallel_workers_load_their_halves_refuse_together_and_show_no_key(
    vllm_python: str, tmp_path: Path
) -> None:
    args = ("--tensor-parallel-size", "2", "--distributed-executor-backend", "mp")
    with served("qwen3", vllm_python, tmp_path, args=args) as e:
        commits.the_server_computes_what_was_committed_also_the_second_time(e)
        commits.nobody_without_the_run_key_writes_weights(e)
        commits.a_version_with_a_tensor_that_the_model_has_not_is_refused_whole(e)
        with sender(e) as trainer:
            trainer.sync(1, 1)
            keys = EpochKeys.of(RUN_KEY, trainer.run_id, trainer.epoch)
        info = Call("GET", "/server_info", 60.0, str, params={"config_format": "json"})
        seen = [(tmp_path / "server.log").read_text(), repr(e), e.run(info)]
        for process in psutil.Process().children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                seen += process.cmdline()
        for secret in (RUN_KEY, keys.messages, keys.blocks):
            assert not any(secret.hex() in text for text in seen)


def test_a_launched_server_answers_without_compiling_anything(site: Site) -> None:
    """It needs no compiler then, and its first request takes no 10 s."""
    site.assert_serves()
    compiled = Path(site.server.spec.env[COMPILED_VARIABLE])
    assert [path for path in compiled.rglob("*") if path.is_file()] == []


def test_a_server_that_is_not_paused_takes_no_weights(site: Site, tmp_path: Path) -> None:
    vllm = EngineUnderTest(site.server, tmp_path)
    with sender(vllm) as trainer:
        old = trainer.sync(1, 1)
        weights, _ = trainer.make(2)
        with trainer.link(weights) as link, vllm.crowd(trainer.label(1)) as crowd:
            info = link.commit(trainer.stage(link, weights, 2)).to_dict()
            refused = refusal(partial(trainer.control.load, info))
            assert_aborted(vllm, crowd.end(), [trainer.label(1)])
        assert isinstance(refused, HttpRefused)
        assert refused.status == 409
        assert "not paused" in str(refused)
        assert difference(vllm, old) <= MAX_DIFFERENCE
        new = trainer.sync(2, 2)
        assert difference(vllm, new) <= MAX_DIFFERENCE


UNREPAIRED = """
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from titan_grpo.receive.commit import EngineSide
from titan_grpo.receive.vllm_plugin import TitanWeightTransferEngine, VllmModel
from titan_grpo.receive.commit import Workers


class Unrepaired(TitanWeightTransferEngine):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self._side = EngineSide(VllmModel(self, repair=False), Workers(), "")


def register():
    if "unrepaired" not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine("unrepaired", Unrepaired)
"""


@pytest.mark.long
@pytest.mark.parametrize("kind", ["qwen3", "qwen3_moe"])
def test_without_the_cpu_patch_the_server_computes_other_weights_and_says_nothing(
    kind: Kind, vllm_python: str, tmp_path: Path
) -> None:
    info = tmp_path / "plugins" / "unrepaired-0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: unrepaired\nVersion: 0\n")
    (info / "entry_points.txt").write_text(
        "[vllm.general_plugins]\nunrepaired = unrepaired:register\n"
    )
    (tmp_path / "plugins" / "unrepaired.py").write_text(UNREPAIRED)
    args = ("--weight-transfer-config", '{"backend": "unrepaired"}')
    env = {"PYTHONPATH": str(tmp_path / "plugins")}
    with (
        served(
            kind, vllm_python, tmp_path, run_key=None, weight_transfer=False, args=args, env=env
        ) as e,
        sender(e) as trainer,
    ):
        path = trainer.sync(1, 1)
        assert trainer.control.label() == trainer.label(1)
        assert difference(e, path) > 2 * MAX_DIFFERENCE, (
            "upstream may be right now: read DELETE_WHEN of patches/vllm_cpu_reload.py"
        )


COUNT, TOKENS = 2, 6
ENVIRONMENT_S = 120.0


def test_atroposs_own_server_class_samples_and_scores_by_the_weights_that_are_served(
    site: Site, atropos_python: str, root: Path, tmp_path: Path
) -> None:
    vllm, ids = EngineUnderTest(site.server, tmp_path), prompt(3)
    with commits.sender(vllm) as trainer:
        reference = Reference(trainer.sync(1, 1))
    asked = [site.url, vllm.model, site.access.api_key, COUNT, TOKENS, *ids]
    done = subprocess.run(
        [atropos_python, root / "tests/rigs/atropos_server.py", *map(str, asked)],
        capture_output=True,
        text=True,
        timeout=ENVIRONMENT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout.splitlines()[-1])
    assert answer["healthy"]
    prompt_tokens, sampled, logprobs, reasons = answer["sampled"]
    assert (prompt_tokens, reasons) == (ids, ["length"] * COUNT)
    for tokens, values in zip(sampled, logprobs, strict=True):
        assert len(tokens) == TOKENS
        computed = reference.logprobs([*ids, *tokens])[len(ids) - 1 :]
        assert furthest(values, computed) <= MAX_DIFFERENCE
    known = zip(
        answer["scored"]["prompt_topk_token_ids"],
        answer["scored"]["prompt_topk_logprobs"],
        strict=True,
    )
    scored = [dict(zip(*entry, strict=True)) for entry in known][1:]
    values = [entry[token] for entry, token in zip(scored, ids[1:], strict=True)]
    assert furthest(values, reference.logprobs(ids)) <= MAX_DIFFERENCE


def test_both_routes_ask_for_the_servers_key(site: Site, tmp_path: Path) -> None:
    vllm = EngineUnderTest(site.server, tmp_path)
    body = {"prompt": {"prompt_token_ids": prompt(3)}, "max_tokens": 1}
    health = Call("GET", "/health_generate", REQUEST_S, ignore)
    generate = Call("POST", "/generate", REQUEST_S, ignore, json=body)
    with SyncDriver(site.server.url) as stranger:
        for call in (generate, health):
            vllm.run(call)
            refused = refusal(partial(stranger.run, call))
            assert isinstance(refused, HttpRefused)
            assert refused.status == 401
