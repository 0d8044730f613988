"""Runs fed by the examples of environments: they sample on the run's own vLLM server, and bring
their groups through a real Atropos API, or push them."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.conftest import API_KEY, Runs, Site
from tests.rigs.atropos_api import AtroposApi
from tests.rigs.sockets import free_port
from titan_grpo.engines.server import make_control
from titan_grpo.observe import names
from titan_grpo.observe.recorder import read_metrics
from titan_grpo.subprocesses import end

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

GROUP, PROMPTS, TOKENS, STEPS = 4, 4, 12, 5
END_S = 10.0


@contextmanager
def environment(
    root: Path, name: str, server: str, where: str
) -> Iterator[subprocess.Popen[bytes]]:
    """The example ``name``, until it is ended."""
    script = root / "examples" / "outside" / f"{name}.py"
    process = subprocess.Popen(
        [sys.executable, str(script), server, where],
        env=os.environ | {"VLLM_API_KEY": API_KEY},
        start_new_session=True,
    )
    try:
        yield process
    finally:
        end(process, END_S)


def trained(
    runs: Runs, site: Site, out: Path, example: str, where: str, **source: str
) -> list[dict[str, Any]]:
    """The steps of a run that an example feeds, which brings its groups to ``where``; ``source``:
    what [rollout] says of it."""
    settings = source | {
        "prompts_per_step": PROMPTS,
        "group_size": GROUP,
        "max_completion_tokens": TOKENS,
        "max_staleness": 3,
    }
    arguments = [f"--rollout.{key}={value}" for key, value in settings.items()]
    arguments.append(f"--training.steps={STEPS}")
    with closing(make_control("vllm", site.access)) as control:
        # As a server that was just started: not the version of an earlier test's run.
        control.relabel("default")
    with (
        runs.start(out, [site.url], *arguments) as training,
        environment(runs.root, example, site.url, where),
    ):
        assert training.finish() == 0, training.log
    assert runs.summary(out)["versions_committed"][site.url]["last"] == STEPS
    return read_metrics(out / "metrics.jsonl")


def check(metrics: list[dict[str, Any]]) -> None:
    """What every step has, and the first: it is on-policy, and moved by one token the gap would be
    that of two different tokens."""
    assert [row["step"] for row in metrics] == list(range(1, STEPS + 1))
    assert metrics[0][names.STALENESS_MAX] == 0
    assert metrics[0][names.LOGPROB_GAP] < 0.02
    assert max(row[names.STALENESS_MAX] for row in metrics) <= 3


def test_a_run_trains_on_what_an_environment_posts_to_an_atropos_api(
    runs: Runs, site: Site, atropos_python: str, tmp_path: Path
) -> None:
    with AtroposApi(atropos_python) as api:
        source = {"source": "atropos", "atropos_url": api.url}
        check(trained(runs, site, tmp_path, "atropos", api.url, **source))


@pytest.mark.long
def test_a_run_trains_on_what_an_environment_pushes(runs: Runs, site: Site, tmp_path: Path) -> None:
    address = f"127.0.0.1:{free_port()}"
    source = {"source": "push", "push_address": address}
    check(trained(runs, site, tmp_path, "pushing", f"http://{address}", **source))
