"""A fleet of one vLLM and one SGLang server: whichever of them freezes, the other one and the
trainer go on."""

import signal
import statistics
from pathlib import Path

import pytest

from titan_grpo.observe import names
from titan_grpo.observe.recorder import read_metrics

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

FREEZE_S, DEADLINE_S = 8.0, 4
STEPS = 20
"""Steps that are made while a server is frozen, however long that takes."""

DEADLINES = {
    "lane_deadline_s": DEADLINE_S,
    "commit_deadline_s": DEADLINE_S,
    "connect_deadline_s": 30,
}
"""A receiver starts with an import of torch, which takes its time where cores are shared."""


def rows(out: Path, first: int, last: int) -> list[dict]:
    return [row for row in read_metrics(out / "metrics.jsonl") if first <= row["step"] <= last]


def busy_seconds(found: list[dict]) -> list[float]:
    """Per step: training, and what the weight sync cost the main thread; without the wait for
    rollouts."""
    return [row[names.TRAIN_S] + row[names.BLOCKED_S] for row in found]


def test_a_frozen_server_costs_the_trainer_and_the_other_engine_nothing(
    runs, site, sglang_site, make_replay, tmp_path, record_property
):
    replay = make_replay(tmp_path / "replay.jsonl", prompts=2, group=4, tokens=8).write(12000)
    deadlines = [f"--weight_sync.{name}={seconds}" for name, seconds in DEADLINES.items()]
    # steps are short here: a freeze is hundreds of versions long
    arguments = [*replay.arguments, *deadlines, "--weight_sync.max_lag=0", "--training.steps=12000"]
    servers = (site, sglang_site)
    with runs.start(tmp_path, [server.url for server in servers], *arguments, nproc=2) as training:
        training.wait_step(30)
        assert training.wait_until(lambda: all(server.label().version > 0 for server in servers)), (
            training.log
        )
        spans = [(10, training.step)]
        for frozen, other in ((sglang_site, site), (site, sglang_site)):
            began = training.step
            frozen.server.signal(signal.SIGSTOP)
            training.run_on(FREEZE_S)
            training.wait_step(began + STEPS)
            ended = training.step
            assert training.wait_until(lambda at=ended, to=other: to.label().version >= at), (
                f"versions of {other.url} stand still: {training.log}"
            )
            frozen.server.signal(signal.SIGCONT)
            spans.append((began + 1, ended))
            # a new lane, and on it the newest version whole
            assert training.wait_until(lambda at=ended, to=frozen: to.label().version >= at), (
                training.log
            )
        training.stop()
    quiet, *frozen_spans = (rows(tmp_path, *span) for span in spans)
    usual = statistics.median(busy_seconds(quiet))
    for name, found in zip(("SGLang", "vLLM"), frozen_spans, strict=True):
        busy, blocked = busy_seconds(found), [row[names.BLOCKED_S] for row in found]
        figures = (
            f"{name} frozen for {FREEZE_S} s: {len(busy)} steps, median"
            f" {statistics.median(busy):.4f} s (before: "
        )
        figures += (
            f"{usual:.4f} s), blocked median {statistics.median(blocked):.5f} s, longest"
            f" {max(blocked):.5f} s"
        )
        print(figures)
        record_property(f"freeze_{name}", figures)
        # What waits for the frozen server waits for a deadline, or for as long as it is frozen. How
        # long a step takes otherwise is for the machine to say, and for those who share it.
        assert max(blocked) < DEADLINE_S / 2, figures
    for server in servers:
        server.assert_serves()
