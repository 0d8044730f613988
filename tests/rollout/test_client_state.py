"""What the trainer's end of the rollouts keeps, and what a checkpoint and the next worker get of
it. The worker is the test."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from titan_grpo.protocol.messages import ServerState
from titan_grpo.rollout.client import RolloutClient, RolloutsLate
from titan_grpo.rollout.messages import (
    Event,
    GiveBack,
    GroupDone,
    LeftOut,
    OnMessage,
    Ready,
    RolloutSpec,
    RolloutStopped,
    SessionLost,
    Ticket,
    ToWorker,
    TrainerVersion,
    Used,
)
from titan_grpo.samples import Completion, Group, Prompt

SERVER = ServerState("http://a:1", 0, True, "r:0:f")


class Channel:
    """A WorkerTransport to the test, which keeps what it is sent."""

    deliver: OnMessage

    def __init__(self) -> None:
        self.sent: list[ToWorker] = []

    def start(self, spec: RolloutSpec, on_message: OnMessage) -> None:
        self.deliver = on_message
        on_message(Ready())

    def send(self, message: ToWorker, within_s: float | None = None) -> None:
        self.sent.append(message)

    def close(self, deadline_s: float) -> None:
        """Nothing runs."""

    def finish(self, *indices: int, version: int = 0, **counters: int) -> None:
        """Groups of two completions."""
        for index in indices:
            completion = Completion((5,), (-1.0,), "stop", version, version, SERVER.url)
            group = Group(Prompt(index, (1,)), (completion, completion))
            self.deliver(GroupDone(Ticket(index), group, counters))


Start = Callable[..., tuple[RolloutClient, Channel]]


@pytest.fixture
def start() -> Start:
    def make(**keys: Any) -> tuple[RolloutClient, Channel]:
        channel = Channel()
        spec = RolloutSpec(model_dir="", prompts_per_step=2, group_size=2, **keys)
        client = RolloutClient(spec, "", channel)
        client.start(0.0)
        return client, channel

    return make


def taken(client: RolloutClient, version: int, count: int) -> list[int]:
    return [group.prompt.index for group in client.next_batch(version, count, 0.01)]


def test_a_resume_has_every_prompt_that_a_step_took_as_used_and_no_later_one(start: Start) -> None:
    client, channel = start(consume="ready", max_staleness=2)
    channel.finish(0, 2)
    assert taken(client, 0, 2) == [0, 2]
    channel.finish(1)
    assert taken(client, 1, 1) == [1], "an earlier prompt, after the others"
    channel.finish(5)
    channel.deliver(LeftOut(3, (0.0,), {}))
    state = client.state()
    assert state["cursor"] == {"low": 3, "above": []}
    again, _ = start(consume="ready", max_staleness=2, state=state)
    assert again.state() == state


def test_the_next_worker_goes_on_from_what_steps_took_and_what_waits_for_them(start: Start) -> None:
    client, channel = start(consume="ready", max_staleness=2)
    client.set_server(SERVER)
    of_server = {f"tokens.{SERVER.url}": 7, f"in_flight.{SERVER.url}": 5}
    channel.finish(0, 1, 2, 4, requests=8, **of_server)
    assert taken(client, 1, 3) == [0, 1, 2]
    client.used_without_version(1)
    opened: list[tuple[RolloutSpec, Sequence[ToWorker]]] = []
    for _ in range(2):
        channel.deliver(SessionLost(lambda *given: opened.append(given), "it is gone"))
    (spec, first), (again, _) = opened
    assert spec.state["cursor"] == {"low": 3, "above": []}
    assert (spec.places, spec.waiting) == (2, {4: 2})
    assert (spec.sessions_lost, again.sessions_lost) == (1, 2)
    assert list(first) == [TrainerVersion(1), SERVER]
    # Its counts begin anew, and what ran on the servers is over.
    counters = client.counters()
    assert (counters["requests"], counters[f"tokens.{SERVER.url}"]) == (8, 7)
    assert f"in_flight.{SERVER.url}" not in counters
    channel.finish(3, requests=2)
    assert client.counters()["requests"] == 10


def test_killed_workers_end_the_run_only_where_none_of_three_made_a_group(start: Start) -> None:
    client, channel = start()

    def killed(times: int) -> None:
        for _ in range(times):
            channel.deliver(SessionLost(lambda *_: None, "killed", killed=True))

    killed(2)
    channel.finish(0)
    killed(2)
    channel.deliver(LeftOut(1, (0.0,), {}))
    killed(2)
    channel.finish(2)
    assert taken(client, 0, 2) == [0, 2]
    killed(3)
    with pytest.raises(RolloutStopped, match="3 in a row were killed"):
        taken(client, 0, 2)


def test_counts_of_a_server_that_left_do_not_come_back(start: Start) -> None:
    client, channel = start()
    client.set_server(SERVER)
    channel.finish(0, **{f"tokens.{SERVER.url}": 7})
    client.remove_server(SERVER.url)
    channel.deliver(Event("", {f"tokens.{SERVER.url}": 9, "requests": 4}))
    assert not any(SERVER.url in name for name in client.counters())
    assert client.counters()["requests"] == 4


def test_finished_groups_that_are_too_old_for_the_trainer_go_back(start: Start) -> None:
    client, channel = start(max_staleness=1)
    channel.finish(0, 1)
    with pytest.raises(RolloutsLate, match="0 of 2 groups for version 2"):
        taken(client, 2, 2)
    channel.finish(0, version=0)  # it was on its way
    channel.finish(0, 1, version=1)
    assert taken(client, 2, 2) == [0, 1]
    given_back = [each.ticket.index for each in channel.sent if isinstance(each, GiveBack)]
    assert given_back == [0, 1, 0]
    assert [each.indices for each in channel.sent if isinstance(each, Used)] == [(0, 1)]
    assert client.counters()["dropped.stale"] == 3


def test_groups_from_outside_are_taken_as_soon_as_they_have_a_steps_completions(
    start: Start,
) -> None:
    client, channel = start(source="push")
    channel.finish(0)
    with pytest.raises(RolloutsLate):
        taken(client, 0, 2)
    channel.finish(1)
    assert taken(client, 0, 2) == [0, 1]
