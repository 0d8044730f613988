"""A real client and its rollout process with requests outstanding: no thread wakes, and none uses
a core."""

import os
import threading
from dataclasses import dataclass
from pathlib import Path

from tests.rigs.present import present
from tests.rollout.conftest import MakeServer
from titan_grpo.protocol.messages import ServerState
from titan_grpo.rollout.client import RolloutClient
from titan_grpo.rollout.messages import RolloutSpec
from titan_grpo.rollout.worker import LocalTransport

REQUESTS, QUIET_S, TRIES = 64, 1.0, 20
MOST_WAKES = 6
"""Of all threads together in that time: those that were about to sleep when they were counted
first. Any loop that looks again ten times a second makes more."""


@dataclass(frozen=True)
class Used:
    wakes: int
    seconds: float


def used(pid: int, threads: list[int] | None = None) -> Used:
    """By all threads of a process, or by some: times that they went to sleep, seconds of a core."""
    wakes = ticks = 0
    for task in Path(f"/proc/{pid}/task").iterdir():
        if threads is None or int(task.name) in threads:
            lines = (task / "status").read_text().splitlines()
            wakes += next(
                int(line.split()[1]) for line in lines if line.startswith("voluntary_ctxt_switches")
            )
            fields = (task / "stat").read_text().rpartition(")")[2].split()
            ticks += int(fields[11]) + int(fields[12])
    return Used(wakes, ticks / os.sysconf("SC_CLK_TCK"))


def test_waiting_for_completions_costs_nothing(
    completion_server: MakeServer, model_dir: str
) -> None:
    server, transport = completion_server(), LocalTransport()
    server.behaviour = server.hang
    spec = RolloutSpec(model_dir=model_dir, prompts_per_step=8, group_size=8, max_staleness=0)
    client = RolloutClient(spec, "", transport)
    client.start(60)
    named = [thread for thread in threading.enumerate() if thread.name.startswith("rollout-")]
    ours = [present(thread.native_id) for thread in named]
    pid = present(transport.pid)
    client.set_server(ServerState(server.url, 0, True, "0"))
    server.wait_for_requests(REQUESTS)
    assert ours
    assert sum(client.in_flight(60).values()) == REQUESTS

    def quiet() -> bool:
        before = used(pid), used(os.getpid(), ours)
        threading.Event().wait(QUIET_S)
        after = used(pid), used(os.getpid(), ours)
        wakes = sum(b.wakes - a.wakes for a, b in zip(before, after, strict=True))
        return (
            wakes <= MOST_WAKES
            and sum(b.seconds - a.seconds for a, b in zip(before, after, strict=True))
            <= 0.02 * QUIET_S
        )

    # On a busy machine the last work on the requests takes a while; a loop that polls is never
    # quiet.
    assert any(quiet() for _ in range(TRIES))
    server.released.set()
    client.close(5)
