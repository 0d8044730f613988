"""Servers that are named by a host's name, in the rollout process."""

import threading
from pathlib import Path

import pytest

from tests.rollout.conftest import MakeServer, StartClient
from tests.rollout.rows import SUMS, write_rows
from titan_grpo.protocol.messages import ServerState
from titan_grpo.rollout.messages import RolloutSpec

BUSY = """
import asyncio
import threading

left = []

async def reward(completions, answer):
    for _ in range(40):
        left.append(asyncio.create_task(asyncio.to_thread(threading.Event().wait, 60)))
    return [1.0] * len(completions)
"""


@pytest.mark.e2e
def test_a_connection_does_not_wait_for_what_a_task_put_into_asyncios_threads(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    model_dir: str,
    completion_server: MakeServer,
    start_client: StartClient,
) -> None:
    (tmp_path / "busy.py").write_text(BUSY)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    spec = RolloutSpec(
        model_dir=model_dir,
        dataset=write_rows(tmp_path / "rows.jsonl", SUMS),
        max_staleness=0,
        group_size=2,
        prompts_per_step=1,
        chat_template="none",
        reward=["busy:reward"],
    )
    url = completion_server().url.replace("127.0.0.1", "localhost")
    client = start_client(spec)
    client.set_server(ServerState(url, 0, True, "r:0:f"))
    assert client.next_batch(0, 1, 60)
    threading.Event().wait(1.5)  # until the connections are closed
    client.set_server(ServerState(url, 1, True, "r:1:f"))
    assert client.next_batch(1, 1, 20)
