"""A real run whose servers change under it: one joins late, the first one leaves and comes back."""

import json
import subprocess
import sys
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tests.rigs.proxy import Proxy
from titan_grpo.engines.sglang import GENERATE
from titan_grpo.observe import names
from titan_grpo.observe.recorder import read_metrics

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

COMMIT = ("/titan_grpo/hello", "/update_weights_from_tensor", "/continue_generation")
"""What a lane asks of SGLang, in its order."""


PROMPTS = 4
SPARSE = [
    f"--rollout.prompts_per_step={PROMPTS}",
    "--rollout.group_size=2",
    "--rollout.max_completion_tokens=4",
]
"""Two completions of four tokens, and a digit is rare: many groups have no spread, and dynamic
sampling takes others."""


def servers(out: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """``titan-grpo servers ... --run out``."""
    command = [sys.executable, "-m", "titan_grpo.cli", "servers", *arguments, "--run", str(out)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_a_late_server_gets_the_newest_version_before_its_first_rollout_and_the_first_one_may_leave(
    runs, site, sglang_site, tmp_path
):
    out, parts = tmp_path / "out", urlsplit(sglang_site.url)
    arguments = [*SPARSE, "--grpo.dynamic_sampling", "--training.steps=5000"]
    assert servers(tmp_path, "list").returncode == 1, "no run yet"
    # The proxy notes what the late server is asked, and in which order.
    with (
        Proxy((parts.hostname, parts.port)) as late,
        runs.start(out, [site.url], *arguments) as training,
    ):
        training.wait_step(2)
        added = servers(out, "add", late.url)
        assert (added.returncode, late.url in added.stdout) == (0, True), added.stderr
        assert training.wait_until(lambda: GENERATE in late.granted), training.log
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
    for server in (site, sglang_site):
        server.assert_serves()
    order = [late.granted.index(path) for path in (*COMMIT, GENERATE)]
    assert order == sorted(order), late.granted[:40]
    summary = runs.summary(out)
    changes = [(change["server"], change["event"]) for change in summary["membership"]]
    assert changes == [(late.url, "joined"), (site.url, "left"), (site.url, "joined")]
    assert summary["versions_committed"][late.url]["committed"][0] >= 1
    assert summary["digest_mismatches"] == 0
    assert summary["errors"] == []
    # Each gave its place back: without that, so many would have left no place to start another
    # group in.
    assert summary["dropped"]["no_spread"] > 2 * PROMPTS
    assert max(row[names.STALENESS_MAX] for row in read_metrics(out / "metrics.jsonl")) <= 1
