"""A fleet of one vLLM and one SGLang server: whichever of them freezes, the other one and the
trainer go on; one joins late, the first one leaves and comes back, and where a failed sync stops
the run, that one does."""

import json
import signal
import statistics
import subprocess
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.conftest import WAIT_S, Runs, Site, run_cli
from tests.rigs.proxy import Act, Proxy, address_of
from titan_grpo.engines.sglang import GENERATE
from titan_grpo.observe import names
from titan_grpo.observe.recorder import read_metrics
from titan_grpo.protocol.messages import Label

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

FREEZE_S, DEADLINE_S = 5.0, 4
STEPS = 20
"""Steps that are made while a server is frozen, however long that takes."""

DEADLINES = {
    "lane_deadline_s": DEADLINE_S,
    "commit_deadline_s": DEADLINE_S,
    "connect_deadline_s": 30,
}
"""A receiver starts with an import of torch, which takes its time where cores are shared."""


PROMPTS = 4
SPARSE = [
    f"--rollout.prompts_per_step={PROMPTS}",
    "--rollout.group_size=2",
    "--rollout.max_completion_tokens=4",
]
"""Two completions of four tokens, and a digit is rare: many groups have no spread, and dynamic
sampling takes others."""


def rows(out: Path, first: int, last: int) -> list[dict[str, Any]]:
    return [row for row in read_metrics(out / "metrics.jsonl") if first <= row["step"] <= last]


def shown(server: Site) -> tuple[str, int]:
    """Run and version of a server's label, which rise; none: weights of its own."""
    label = Label.parse(server.driver.run(server.speak.label(WAIT_S)))
    return ("", -1) if label is None else (label.run_id, label.version)


def reached(server: Site, least: tuple[str, int]) -> bool:
    return shown(server) >= least


def test_a_frozen_server_costs_the_trainer_and_the_other_engine_nothing(
    runs: Runs, site: Site, sglang_site: Site, tmp_path: Path
) -> None:
    deadlines = [f"--weight_sync.{name}={seconds}" for name, seconds in DEADLINES.items()]
    # A group that waited for the deadline of its requests would wait too long for this test.
    deadlines.append(f"--rollout.request_timeout_s={2 * WAIT_S}")
    arguments = [*SPARSE, *deadlines, "--training.steps=12000"]
    servers = (site, sglang_site)
    before = max(shown(server) for server in servers)
    with runs.start(tmp_path, [server.url for server in servers], *arguments, nproc=2) as training:
        training.wait_step(30)
        # Training begins with the first server that holds a version.
        assert training.wait_until(lambda: min(map(shown, servers)) > before), training.log
        (run,) = {shown(server)[0] for server in servers}
        spans = [(10, training.step)]
        for stopped, other in ((sglang_site, site), (site, sglang_site)):
            began = training.step
            stopped.server.signal(signal.SIGSTOP)
            training.run_on(FREEZE_S)
            training.wait_step(began + STEPS)
            ended = training.step
            assert training.wait_until(partial(reached, other, (run, ended))), (
                f"versions of {other.url} stand still: {training.log}"
            )
            stopped.server.signal(signal.SIGCONT)
            spans.append((began + 1, ended))
            # a new lane, and on it the newest version whole
            assert training.wait_until(partial(reached, stopped, (run, ended))), training.log
        training.stop()
    for frozen, span in zip(("no server", "SGLang", "vLLM"), spans, strict=True):
        found = rows(tmp_path, *span)
        blocked = [row[names.BLOCKED_S] for row in found]
        busy = statistics.median(row[names.TRAIN_S] + row[names.BLOCKED_S] for row in found)
        usual, most = statistics.median(blocked), max(blocked)
        print(f"{frozen} frozen: a step {busy:.4f} s, blocked {usual:.5f} s, {most:.5f} s at most")
        # What waits for the frozen server waits for a deadline, or for as long as it is frozen.
        assert frozen == "no server" or most < DEADLINE_S / 2
    for server in servers:
        server.assert_serves()


LOAD = "/titan_grpo/load"
COMMIT = ("/titan_grpo/hello", LOAD, "/continue_generation")
"""What a lane asks of SGLang, in its order."""


def no_spread(out: Path) -> float:
    """Groups without spread that the run has dropped so far."""
    return max((row.get(names.dropped("no_spread"), 0) for row in rows(out, 1, 5000)), default=0)


def test_a_late_server_gets_the_newest_version_before_its_first_rollout_and_the_first_one_may_leave(
    runs: Runs, site: Site, sglang_site: Site, tmp_path: Path
) -> None:
    out = tmp_path / "out"

    def servers(*words: str, run: Path = out) -> "subprocess.CompletedProcess[str]":
        return run_cli(runs.root, "servers", *words, "--run", run)

    arguments = [*SPARSE, "--grpo.dynamic_sampling", "--training.steps=5000"]
    arguments.append("--weight_sync.on_sync_error=stop")
    assert servers("list", run=tmp_path).returncode == 1, "no run yet"
    # The proxy notes what the late server is asked, and in which order.
    with (
        Proxy(address_of(sglang_site.url)) as late,
        runs.start(out, [site.url], *arguments) as training,
    ):
        training.wait_step(2)
        added = servers("add", late.url)
        assert (added.returncode, late.url in added.stdout) == (0, True), added.stderr
        assert training.wait_until(lambda: GENERATE in late.granted), training.log
        assert servers("add", late.url).returncode == 1
        lines = {line["url"]: line for line in json.loads(servers("list", "--json").stdout)}
        assert set(lines) == {site.url, late.url}
        assert all(line["accepting"] for line in lines.values() if line["standing"] == "holds")

        removed = servers("remove", site.url)
        assert removed.returncode == 0, removed.stderr
        left_at, label = training.step, site.label()
        site.assert_serves()
        training.wait_step(left_at + 4)
        assert site.label() == label, "a server that left gets no more versions"
        refused = servers("remove", late.url)
        assert (refused.returncode, "last server" in refused.stderr) == (1, True)

        assert servers("add", site.url).returncode == 0
        assert training.wait_until(lambda: site.label().version > label.version), training.log
        # Each gives its place back: without that, so many would leave no place to start another
        # group in.
        assert training.wait_until(lambda: no_spread(out) > 2 * PROMPTS), training.log
        training.wait_step(training.step + 2)

        late.script(Act.FAIL, LOAD)
        assert training.finish() != 0
        for server in (site, sglang_site):
            server.assert_serves()
    assert training.exitcode == 1
    failed = f"{late.url}, version "
    for words in (failed, f"{LOAD} was refused with 500"):
        assert words in training.cause, training.log
    order = [late.granted.index(path) for path in (*COMMIT, GENERATE)]
    assert order == sorted(order), late.granted[:40]
    summary = runs.summary(out)
    changes = [(change["server"], change["event"]) for change in summary["membership"]]
    assert changes == [(late.url, "joined"), (site.url, "left"), (site.url, "joined")]
    assert summary["versions_committed"][late.url]["committed"][0] >= 1
    assert summary["digest_mismatches"] == 0
    assert [error for error in summary["errors"] if failed not in error] == []
    assert max(row[names.STALENESS_MAX] for row in read_metrics(out / "metrics.jsonl")) <= 1
