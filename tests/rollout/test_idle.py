"""A real client and its rollout process with requests outstanding: no thread wakes, and none uses
a core."""

import os
import threading

import psutil

from tests.rigs.census import wakes
from tests.rigs.present import present
from tests.rollout.conftest import MakeServer
from titan_grpo.protocol.messages import ServerState
from titan_grpo.rollout.child import LocalTransport
from titan_grpo.rollout.client import RolloutClient
from titan_grpo.rollout.messages import RolloutSpec

REQUESTS, QUIET_S, TRIES = 64, 1.0, 20
MOST_WAKES = 6
"""Of all threads together in that time: those that were about to sleep when they were counted
first. Any loop that looks again ten times a second makes more."""


def used(pid: int, threads: set[int] | None = None) -> tuple[int, float]:
    """By all threads of a process, or by some: times that they went to sleep, seconds of a core."""
    every = psutil.Process(pid).threads()
    times = [each for each in every if threads is None or each.id in threads]
    return wakes(pid, threads), sum(each.user_time + each.system_time for each in times)


def test_waiting_for_completions_costs_nothing(
    completion_server: MakeServer, model_dir: str
) -> None:
    server, transport = completion_server(), LocalTransport()
    server.behaviour = server.hang
    spec = RolloutSpec(model_dir=model_dir, prompts_per_step=8, group_size=8, max_staleness=0)
    client = RolloutClient(spec, "", transport)
    client.start(60)
    named = [thread for thread in threading.enumerate() if thread.name.startswith("rollout-")]
    ours = {present(thread.native_id) for thread in named}
    pid = present(transport._process).pid
    client.set_server(ServerState(server.url, 0, True, "0"))
    server.wait_for_requests(REQUESTS)
    assert ours
    assert sum(client.in_flight(60).values()) == REQUESTS

    def quiet() -> bool:
        before = *used(pid), *used(os.getpid(), ours)
        threading.Event().wait(QUIET_S)
        after = *used(pid), *used(os.getpid(), ours)
        woke, seconds, woke_here, seconds_here = (b - a for a, b in zip(before, after, strict=True))
        return woke + woke_here <= MOST_WAKES and seconds + seconds_here <= 0.02 * QUIET_S

    # On a busy machine the last work on the requests takes a while; a loop that polls is never
    # quiet.
    assert any(quiet() for _ in range(TRIES))
    server.released.set()
    client.close(5)
