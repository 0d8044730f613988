"""A real run whose servers change under it: one joins late, the first one leaves and comes back."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from titan_grpo.engines.launch import Server, ServerSpec

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

TALKATIVE = """#!/bin/bash
arguments=()
for each in "$@"; do [ "$each" = --disable-uvicorn-access-log ] || arguments+=("$each"); done
exec {python} "${{arguments[@]}}"
"""
"""An interpreter that starts the server with its access log: what the server itself says about who asked what, and when."""

REQUEST = re.compile(r'"(?:GET|POST) (/[\w/]+)(?:\?\S*)? HTTP/1.1" 200')


def servers(out: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """``titan-grpo servers ... --run out``."""
    command = [sys.executable, "-m", "titan_grpo.cli", "servers", *arguments, "--run", str(out)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def requests(log: Path) -> list[str]:
    """Paths of the requests that a server has answered, in order."""
    return REQUEST.findall(log.read_text(errors="replace"))


def test_a_late_server_gets_the_newest_version_before_its_first_rollout_and_the_first_one_may_leave(
    runs, site, vllm_python, tmp_path
):
    wrapper, log, out = tmp_path / "python", tmp_path / "late.log", tmp_path / "out"
    wrapper.write_text(TALKATIVE.format(python=vllm_python))
    wrapper.chmod(0o755)
    assert servers(tmp_path, "list").returncode == 1, "no run yet"
    with (
        Server(ServerSpec(python=str(wrapper), model=str(runs.model), log_path=str(log))) as late,
        runs.start(out, [site.url], "--training.steps=5000") as training,
    ):
        training.wait_step(2)
        late.wait_healthy(200)
        added = servers(out, "add", late.url)
        assert (added.returncode, late.url in added.stdout) == (0, True), added.stderr
        assert training.wait_until(lambda: "/v1/completions" in requests(log)), training.log
        assert servers(out, "add", late.url).returncode == 1
        lines = {line["url"]: line for line in json.loads(servers(out, "list", "--json").stdout)}
        assert set(lines) == {site.url, late.url}
        assert all(line["accepting"] for line in lines.values() if line["standing"] == "holds")

        removed = servers(out, "remove", site.url)
        assert removed.returncode == 0, removed.stderr
        left_at, label = training.step, site.label()
        site.assert_serves()
        training.wait_step(left_at + 4)
        assert site.label() == label, "a server that left gets no more versions"
        refused = servers(out, "remove", late.url)
        assert (refused.returncode, "last server" in refused.stderr) == (1, True)

        assert servers(out, "add", site.url).returncode == 0
        assert training.wait_until(lambda: site.label().version > label.version), training.log
        training.stop()
    site.assert_serves()
    asked = requests(log)
    commit = [
        asked.index(path) for path in ("/init_weight_transfer_engine", "/update_weights", "/finish_weight_update", "/resume")
    ]
    assert [*commit, asked.index("/v1/completions")] == sorted([*commit, asked.index("/v1/completions")]), asked[:40]
    summary = runs.summary(out)
    changes = [(change["server"], change["event"]) for change in summary["membership"]]
    assert changes == [(late.url, "joined"), (site.url, "left"), (site.url, "joined")]
    assert summary["versions_committed"][late.url]["committed"][0] >= 1
    assert summary["digest_mismatches"] == 0
    assert summary["errors"] == []
