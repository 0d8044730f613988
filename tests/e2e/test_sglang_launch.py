"""A real SGLang server as our launcher starts it hides its keys and leaves idle cores alone. What
it does with requests: tests/e2e/test_engine_conformance.py."""

import os
import time
from pathlib import Path

import psutil
import pytest

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(400)]

IDLE_S, TRIES = 3.0, 5


def processes(group: int) -> list[psutil.Process]:
    """The processes of a group that have not ended."""
    found = []
    for process in psutil.process_iter():
        try:
            if os.getpgid(process.pid) == group and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except (ProcessLookupError, psutil.NoSuchProcess):
            continue
    return found


def cpu_seconds(group: int) -> float:
    return sum(sum(process.cpu_times()[:2]) for process in processes(group))


def test_its_keys_are_in_no_command_line_and_in_no_file_that_others_can_read(sglang_site):
    spec = sglang_site.server.spec
    shown = [" ".join(process.cmdline()) for process in processes(sglang_site.server.group)]
    assert len(shown) >= 3, "HTTP server, scheduler, detokenizer"
    files = [
        path
        for path in Path(spec.log_path).parent.iterdir()
        if path.is_file() and path.stat().st_mode & 0o077
    ]
    shown += [path.read_text(errors="replace") for path in files]
    assert not [text for text in shown if spec.api_key in text or spec.admin_key in text]


def test_an_idle_one_leaves_the_cores_to_others(sglang_site):
    group = sglang_site.server.group

    def share() -> float:
        before, began = cpu_seconds(group), time.monotonic()
        # nothing to wait for: what is measured is a time in which nothing is asked of it
        psutil.wait_procs([psutil.Process(group)], timeout=IDLE_S)
        return (cpu_seconds(group) - before) / (time.monotonic() - began)

    # what it was asked before may still be at work
    assert any(share() < 0.3 for _ in range(TRIES)), "an idle server uses a core"
