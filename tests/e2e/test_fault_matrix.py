"""A part of the fault matrix, in real processes: some cases without an engine, the nastiest on a
real vLLM server.

The whole of it is ``scripts/verify_grpo_2gpu.sh --faults all``.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.e2e.conftest import API_KEY, Runs
from tests.e2e.conftest import Site as SharedSite
from tests.faults.bench import SETTLE_S, Bench, site_bench
from tests.faults.cases import select
from tests.faults.report import Result
from tests.faults.runner import Launches, Runner, groups
from tests.faults.site import Process, Site, engineless_launcher
from tests.rigs.proxy import Act
from tests.rigs.trainer_handle import wait_until
from tests.rigs.trainer_process import Settings
from titan_grpo.engines.launch import Server
from titan_grpo.protocol.lane import Point
from titan_grpo.verify.server import recorded

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

ENGINELESS = "engine-kill@extent,link-corrupt@extent"
CAUGHT = {"labelled v0 of run", "its label went back"}
NASTIEST = "receiver-kill@staged,engine-freeze@load,link-lose@load:update,trainer-kill@load"


@pytest.mark.long
def test_faults_without_an_engine_through_the_command(root: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.faults", "--servers", "engineless"]
    command += ["--faults", ENGINELESS, "--out", str(tmp_path / "out")]
    command += ["--json", str(tmp_path / "faults.json")]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=560)
    assert done.returncode == 0, done.stdout + done.stderr
    record = json.loads((tmp_path / "faults.json").read_text())
    assert record["counts"] == {"passed": 2, "failed": 0, "skipped": 0}
    assert {case["case"] for case in record["cases"]} == {case.name for case in select(ENGINELESS)}
    assert all(case["recovery_s"] is not None for case in record["cases"])
    assert len(record["no_case"]) > 500
    assert done.stdout.strip().splitlines()[-1].startswith("PASSED: 2 of 2 cases")


class Shared:
    """The tests' own server, lent to a site: whoever started it ends it."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self.url, self.group = server.url, server.group

    def wait_healthy(self, deadline_s: float) -> float:
        return self._server.wait_healthy(deadline_s)

    def alive(self) -> bool:
        return self._server.alive()

    def stop(self) -> None:
        """Not ours to stop."""


@pytest.fixture(scope="module")
def bench(
    runs: Runs, site: SharedSite, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Bench]:
    """The struck server is the shared one; the other has no engine."""
    folder = tmp_path_factory.mktemp("bench")

    def shared(folder: Path) -> Process:
        folder.mkdir(parents=True)
        recorded(folder).symlink_to(recorded(Path(site.server.spec.log_path).parent))
        return Shared(site.server)

    tensors = load_file(runs.model / "model.safetensors")
    base = {name: tensor.float() for name, tensor in tensors.items()}
    place = Site(engineless_launcher(runs.model), folder / "servers", base, shared)
    settings = Settings(str(runs.model), [], "", 0, api_key=API_KEY)
    with ExitStack() as stack:
        yield site_bench(stack, place, Bench(place, settings, folder, os.environ, print))
    site.assert_serves()


def test_the_nastiest_faults_on_a_real_server(runs: Runs, bench: Bench) -> None:
    plain, found = engineless_launcher(runs.model), list[Result]()
    Runner(bench, Launches(plain, plain), None, found.append).run(groups(select(NASTIEST)))
    assert {result.case.name for result in found} == {case.name for case in select(NASTIEST)}
    assert [f"{result.case.name}: {result.note}" for result in found if result.violations] == []


def test_a_server_that_shows_another_label_than_that_of_its_weights_is_caught(bench: Bench) -> None:
    trainer, mark = bench.trainer, bench.mark()
    found = Result(select("link-twice@label")[0])
    bench.judge_servers(found, mark)
    assert found.violations == []
    victim = bench.site.victim
    bench.hold(found.case.point)
    assert wait_until(lambda: any(s.label for s in victim.instance.samples(mark.t)), SETTLE_S)
    victim.proxy.script(
        Act.REWRITE, "/finish_weight_update", {"weight_version": f"{trainer.run_id}:0:planted"}
    )
    # Held before it reads the label back: until it goes on, the server generates under it.
    trainer.tell("hold", victim.url, Point.RESUMED, 1)
    trainer.tell("go")

    def seen() -> set[str]:
        found.violations.clear()
        bench.judge_servers(found, mark)
        return {what for what in CAUGHT if any(what in said for said in found.violations)}

    assert wait_until(lambda: seen() == CAUGHT, SETTLE_S), found.violations
    assert not any("witness" in violation for violation in found.violations)
