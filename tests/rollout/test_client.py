"""The rollout process as the trainer sees it: a real child, real HTTP, servers that misbehave in
every listed way."""

import json
import os
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from tests.rigs.trainer_handle import wait_until
from tests.rollout.conftest import CompletionServer, MakeServer, StartClient, answer
from titan_grpo.config.task import TaskKeys
from titan_grpo.engines.generation import salt
from titan_grpo.errors import DataError
from titan_grpo.protocol.messages import ServerState
from titan_grpo.rollout.client import RolloutClient
from titan_grpo.rollout.codec import TextCodec
from titan_grpo.rollout.dispatch import MAX_DROPS, MAX_OUTAGES, MAX_SKIPS_IN_A_ROW
from titan_grpo.rollout.messages import RolloutSpec, RolloutStopped
from titan_grpo.rollout.records import ReplayClient
from titan_grpo.rollout.task_runner import TaskOptions
from titan_grpo.rollout.tasks.built_in import correct
from titan_grpo.rollout.tasks.functions import load_task

PER_STEP, GROUP = 2, 3


@pytest.fixture
def spec(model_dir: str) -> RolloutSpec:
    sizes: dict[str, Any] = {
        "prompts_per_step": PER_STEP,
        "group_size": GROUP,
        "max_completion_tokens": 4,
        "request_timeout_s": 120.0,
    }
    return RolloutSpec(model_dir=model_dir, seed=5, max_staleness=1, **sizes)


@pytest.fixture
def start(spec: RolloutSpec, start_client: StartClient) -> StartClient:
    """A factory of started clients; changes of the spec as keywords."""
    return partial(start_client, spec)


def test_a_step_waits_for_the_slow_group_that_was_started_for_it_however_many_are_ready(
    start: StartClient, completion_server: MakeServer, spec: RolloutSpec
) -> None:
    server, client = completion_server(), start()
    # By its tokens: whichever request comes first may be one of the next step.
    task = load_task("digits", TaskOptions(spec.seed))
    slow = list(task.prompt(0, TextCodec(spec.model_dir)).token_ids)
    server.behaviour = lambda b: server.hang(b) if b["prompt"] == slow else server.good(b)
    client.set_server(ServerState(server.url, 0, True, "0"))
    assert wait_until(lambda: client.counters()["ready"] == 2 * PER_STEP - 1, 60.0)
    with pytest.raises(RolloutStopped, match="1 of 2 groups for version 0"):
        client.next_batch(0, PER_STEP, 0.1)
    server.released.set()
    batches = [client.next_batch(version, PER_STEP, 60) for version in (0, 1)]
    assert [[g.prompt.index for g in batch] for batch in batches] == [[0, 1], [2, 3]]
    assert not any(name.startswith("dropped") for name in client.counters())


def test_requests_are_counted_in_flight_before_the_first_of_them_ends(
    start: StartClient, completion_server: MakeServer
) -> None:
    """Before, a server that was full of long completions had none in any figure, until a group of
    them ended."""
    server, client = completion_server(), start()
    server.behaviour = server.hang
    client.set_server(ServerState(server.url, 0, True, "0"))
    full = 2 * PER_STEP * GROUP
    assert wait_until(lambda: client.counters().get(f"in_flight.{server.url}") == full, 60.0)
    server.released.set()
    for version in (0, 1):
        client.next_batch(version, PER_STEP, 60)
    assert client.counters()[f"in_flight.{server.url}"] == 0


def test_groups_that_made_no_version_leave_room_for_as_many_more(
    start: StartClient, completion_server: MakeServer
) -> None:
    server, client = completion_server(), start(max_staleness=0)
    client.set_server(ServerState(server.url, 0, True, "0"))
    client.next_batch(0, PER_STEP, 60)
    client.used_without_version(1)
    assert len(client.next_batch(0, 1, 60)) == 1
    with pytest.raises(RolloutStopped, match="0 of 1 groups"):
        client.next_batch(0, 1, 0.3)
    assert client.counters()["unversioned_groups"] == 1


def test_over_stale_groups_are_dropped_counted_and_made_again(
    start: StartClient, completion_server: MakeServer
) -> None:
    server, client = completion_server(), start()
    client.set_server(ServerState(server.url, 0, True, "0"))
    client.next_batch(0, PER_STEP, 60)
    server.wait_for_requests(2 * PER_STEP * GROUP)
    client.set_server(ServerState(server.url, 5, True, "5"))
    batch = client.next_batch(5, PER_STEP, 60)
    assert {g.version for g in batch} == {5}
    counters = client.counters()
    assert counters.get("dropped.stale", 0) + counters.get("dropped.stale_in_flight", 0) == PER_STEP


@pytest.mark.parametrize(
    "broken", [([5, 6], [-1.0, None]), ([5, 6], [-1.0, None], "abort")], ids=["stop", "abort"]
)
def test_a_broken_completion_drops_its_group_which_counts_as_thrown_away(
    start: StartClient, completion_server: MakeServer, broken: tuple[Any, ...]
) -> None:
    # Only of the step that is taken: whichever request comes first is one of its groups.
    server, client = completion_server(), start(max_staleness=0)

    def behaviour(body: dict[str, Any]) -> tuple[int, Any]:
        if body is server.bodies[0]:
            return 200, iter([server.piece([5, 6])])  # hangs up: its two tokens are kept
        resumed = body["prompt"][-2:] == [5, 6]
        return server.answer(*broken) if resumed else server.good(body)

    server.behaviour = behaviour
    client.set_server(ServerState(server.url, 0, True, "0"))
    batch = client.next_batch(0, PER_STEP, 60)
    assert all(len(c.token_ids) == 4 for g in batch for c in g.completions)
    counters = client.counters()
    assert counters["dropped.bad_logprob"] == 1
    assert counters["made.4"] >= PER_STEP * GROUP
    # The kept tokens; of the last answers, and of those beside them, as many as had come.
    assert 2 <= counters["thrown_tokens"] <= 4 * GROUP


def test_a_prompt_that_always_fails_is_skipped_and_the_run_goes_on(
    start: StartClient, completion_server: MakeServer
) -> None:
    server, client = completion_server(), start(max_staleness=0)

    def behaviour(body: dict[str, Any]) -> tuple[int, Any]:
        too_long = body["prompt"] == server.bodies[0]["prompt"]
        return (400, {"message": "too long"}) if too_long else server.good(body)

    server.behaviour = behaviour
    client.set_server(ServerState(server.url, 0, True, "0"))
    batch = client.next_batch(0, PER_STEP, 60)
    assert len(batch) == PER_STEP
    counters = client.counters()
    assert (counters["skipped"], counters["dropped.refused"]) == (1, 3)
    assert client.state()["cursor"] == {"low": 3, "above": []}  # Two used, one skipped.


def test_a_group_that_was_dropped_is_made_again_at_another_server(
    start: StartClient, completion_server: MakeServer
) -> None:
    # Of servers with equal load the lowest URL comes first: the one that refuses all.
    refusing, good = sorted((completion_server(), completion_server()), key=lambda s: s.url)
    joined = threading.Event()

    def refuse(body: dict[str, Any]) -> tuple[int, Any]:
        assert joined.wait(60)
        return 400, {"message": "my context is shorter"}

    refusing.behaviour = refuse
    client = start(refusing, max_staleness=0, prompts_per_step=1)
    refusing.wait_for_requests(GROUP)
    client.set_server(ServerState(good.url, 0, True, "r:0:f"))
    assert client.in_flight(60.0) == {refusing.url: GROUP, good.url: 0}
    joined.set()
    (group,) = client.next_batch(0, 1, 60)
    assert {completion.server for completion in group.completions} == {good.url}
    counters = client.counters()
    assert (counters["dropped.refused"], "skipped" in counters) == (1, False)


def test_prompts_that_fill_their_rows_are_skipped_at_once_and_stop_no_run_in_which_others_fit(
    start: StartClient, completion_server: MakeServer, spec: RolloutSpec, tmp_path: Path
) -> None:
    server, groups, rows = completion_server(), 3 * MAX_SKIPS_IN_A_ROW, tmp_path / "rows.jsonl"
    questions = ("short", "long" * 50)
    lines = [json.dumps({"question": each, "answer": "#### 1"}) for each in questions * groups]
    rows.write_text("\n".join(lines))
    keys: dict[str, Any] = {"task": "gsm8k", "task_path": str(rows), "chat_template": "none"}
    task = load_task("gsm8k", TaskOptions(spec.seed, str(rows)))
    codec = TextCodec(spec.model_dir, TaskKeys(chat_template="none"))
    short = [len(task.prompt(index, codec).token_ids) < 200 for index in range(2 * groups)]
    fitting = [index for index, fits in enumerate(short) if fits]
    skipped = fitting[-1] + 1 - groups
    assert skipped > MAX_SKIPS_IN_A_ROW
    server.behaviour = server.hang  # no group is usable before all long prompts were skipped
    keys |= {"prompts_per_step": groups, "max_concurrent_requests": groups * GROUP}
    client = start(max_staleness=0, row_tokens=200, **keys)
    client.set_server(ServerState(server.url, 0, True, "0"))
    assert wait_until(lambda: client.counters().get("skipped") == skipped, 60.0)
    server.released.set()
    batch = client.next_batch(0, groups, 60)
    assert [group.prompt.index for group in batch] == fitting
    # At once: no server is asked, and no prompt has a second attempt.
    assert client.counters()["dropped.prompt_too_long"] == skipped
    assert len(server.bodies) == groups * GROUP


def test_a_prompt_without_a_token_is_skipped_at_once_and_no_server_is_asked(
    start: StartClient, completion_server: MakeServer, tmp_path: Path
) -> None:
    server, rows = completion_server(), tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"prompt": p, "answer": "1"}) + "\n" for p in ("", "x")))
    keys: dict[str, Any] = {"reward": [f"{correct.__module__}:correct"], "dataset": str(rows)}
    client = start(server, chat_template="none", dataset_shuffle=False, max_staleness=0, **keys)
    assert [group.prompt.index for group in client.next_batch(0, 2, 60)] == [1, 3]
    counters = client.counters()
    assert (counters["dropped.empty_prompt"], "dropped.refused" in counters) == (2, False)
    assert all(body["prompt"] for body in server.bodies)


@pytest.mark.parametrize(
    ("row_tokens", "reason"),
    [(1, r"training\.seq_len = 1"), (sys.maxsize, "no such parameter")],
    ids=["none fits its row", "the server refuses all"],
)
def test_a_run_without_a_usable_prompt_stops_with_the_reason(
    start: StartClient, completion_server: MakeServer, row_tokens: int, reason: str
) -> None:
    server = completion_server()
    server.behaviour = lambda body: (400, {"message": "no such parameter"})
    client = start(server, row_tokens=row_tokens)
    with pytest.raises(DataError, match=f"in a row gave no usable group.*{reason}"):
        client.next_batch(0, PER_STEP, 60)


def test_an_outage_of_all_servers_costs_a_few_prompts_and_not_the_run(
    start: StartClient, completion_server: MakeServer
) -> None:
    server, client = completion_server(), start(group_size=1, max_staleness=0)
    asked, cut = count(), (MAX_SKIPS_IN_A_ROW + 2 * PER_STEP) * MAX_OUTAGES
    # Aborted at once, so that no server is paused meanwhile.
    server.behaviour = lambda body: (
        server.answer([], [], "abort") if next(asked) < cut else server.hang(body)
    )
    client.set_server(ServerState(server.url, 0, True, "0"))
    server.wait_for_requests(cut + PER_STEP)
    server.released.set()
    groups = client.next_batch(0, PER_STEP, 60)
    assert min(group.prompt.index for group in groups) >= MAX_SKIPS_IN_A_ROW
    assert client.counters()["skipped"] == MAX_SKIPS_IN_A_ROW


def test_a_completion_that_was_cut_short_goes_on_elsewhere_with_its_tokens_versions_and_budget(
    start: StartClient, completion_server: MakeServer
) -> None:
    cutting, other, client = completion_server(), completion_server(), start(max_staleness=1)

    def cut_the_first(body: dict[str, Any]) -> tuple[int, Any]:
        if body["seed"] != cutting.bodies[0]["seed"]:
            return cutting.good(body)
        cutting.released.wait(60)
        return cutting.answer([70, 71, 72], [-0.5, -0.25, -0.125], "abort")

    cutting.behaviour = cut_the_first
    other.behaviour = lambda body: other.answer(
        [80] * body["max_tokens"], [-3.0] * body["max_tokens"]
    )
    client.set_server(ServerState(cutting.url, 0, True, "0"))
    cutting.wait_for_requests(2 * PER_STEP * GROUP)
    client.set_server(ServerState(cutting.url, 0, False, "0"))
    client.set_server(ServerState(other.url, 1, True, "1"))
    assert client.in_flight(60.0)[cutting.url] > 0
    cutting.released.set()
    groups = client.next_batch(0, PER_STEP, 60)
    groups += client.next_batch(1, 2 * PER_STEP, 60)  # all that the bound lets start
    (cut,) = [c for g in groups for c in g.completions if c.token_ids[:3] == (70, 71, 72)]
    assert cut.token_ids == (70, 71, 72, 80)
    assert cut.logprobs == (-0.5, -0.25, -0.125, -3.0)
    assert (cut.version_first, cut.version_last) == (0, 1)
    assert (cut.finish_reason, cut.server) == ("length", other.url)
    first = cutting.bodies[0]
    # Its two siblings were finished.
    (resumed,) = [b for b in other.bodies if b["prompt"][-3:] == [70, 71, 72]]
    assert resumed["prompt"] == [*first["prompt"], 70, 71, 72]
    assert (first["max_tokens"], resumed["max_tokens"]) == (4, 1)
    counters = client.counters()
    assert counters["interrupted"] >= 1
    assert not any(name.startswith("dropped") for name in counters)


@pytest.mark.parametrize(
    ("share", "dropped"),
    [(0.6, None), (0.5, "dropped.stale"), (0.0, "dropped.stale_in_flight")],
)
def test_what_ran_over_commits_is_used_while_less_than_a_share_of_its_tokens_is_too_old(
    start: StartClient, completion_server: MakeServer, share: float, dropped: str | None
) -> None:
    server, client = completion_server(), start(consume="ready", max_stale_token_share=share)
    committed = threading.Event()

    def half_old(body: dict[str, Any]) -> tuple[int, Any]:
        if body["cache_salt"] != salt("r:0:f"):
            return server.hang(body)
        committed.wait(60)
        status, content = server.good(body)
        content["choices"][0]["weight_versions"] = [
            {"version": "r:0:f", "start": 0, "end": 2},
            {"version": "r:2:f", "start": 2, "end": 4},
        ]
        return status, content

    server.behaviour = half_old
    client.set_server(ServerState(server.url, 0, True, "r:0:f"))
    server.wait_for_requests(2 * PER_STEP * GROUP)
    client.set_server(ServerState(server.url, 2, True, "r:2:f"))
    client.set_trainer_version(2)
    client.in_flight(60.0)  # it knows version 2
    committed.set()
    if dropped:
        # The client drops what comes, the worker what it still has.
        assert wait_until(lambda: client.counters().get(dropped) == 2 * PER_STEP, 60.0)
        with pytest.raises(RolloutStopped, match="0 of 2 groups for version 2"):
            client.next_batch(2, PER_STEP, 0.1)
        assert client.counters()[dropped] == 2 * PER_STEP
        return
    batch = client.next_batch(2, PER_STEP, 60)
    assert {c.token_spans for g in batch for c in g.completions} == {((0, 2), (2, 2))}
    assert {g.version for g in batch} == {0}
    assert not any(name.startswith("dropped") for name in client.counters())


def test_a_drain_waits_for_what_runs_and_gives_up_past_its_deadline(
    start: StartClient, completion_server: MakeServer
) -> None:
    server, client = completion_server(), start(max_staleness=0, in_flight_weight_updates=False)
    server.behaviour = server.hang
    client.set_server(ServerState(server.url, 0, True, "0"))
    server.wait_for_requests(PER_STEP * GROUP)
    client.set_server(ServerState(server.url, 0, False, "0"))
    with ThreadPoolExecutor(1) as pool:
        drained = pool.submit(client.drain, server.url, 60.0)
        assert client.in_flight(60.0) == {server.url: PER_STEP * GROUP}
        assert not drained.done()
        server.released.set()
        drained.result(60.0)
    assert client.in_flight(60.0) == {server.url: 0}
    assert {g.version for g in client.next_batch(0, PER_STEP, 60)} == {0}
    stuck = completion_server()
    stuck.behaviour = stuck.hang
    client.set_server(ServerState(stuck.url, 1, True, "1"))
    stuck.wait_for_requests(PER_STEP * GROUP)
    client.set_server(ServerState(stuck.url, 1, False, "1"))
    client.drain(stuck.url, 0.2)
    assert client.in_flight(60.0)[stuck.url] == 0
    client.set_server(ServerState(server.url, 1, True, "1"))
    assert {c.server for g in client.next_batch(1, PER_STEP, 60) for c in g.completions} == {
        server.url
    }
    counters = client.counters()
    assert counters["moved"] >= 1
    assert not any(name.startswith("dropped") or name == "outages" for name in counters)


def test_a_drain_ends_with_the_run_and_with_the_departure_of_its_server(
    start: StartClient, completion_server: MakeServer
) -> None:
    ends: tuple[Callable[[RolloutClient, CompletionServer], None], ...] = (
        lambda c, s: c.remove_server(s.url),
        lambda c, s: c.skip_drains(),
        lambda c, s: c.close(5),
    )
    for end in ends:
        server, client = completion_server(), start()
        server.behaviour = server.hang
        client.set_server(ServerState(server.url, 0, True, "0"))
        server.wait_for_requests(GROUP)
        client.set_server(ServerState(server.url, 0, False, "0"))
        with ThreadPoolExecutor(1) as pool:
            drained = pool.submit(client.drain, server.url, 120.0)
            assert client.in_flight(60.0)[server.url] > 0
            end(client, server)
            drained.result(60.0)


def test_a_prompt_that_is_too_stale_more_often_than_the_drops_of_a_bad_one_is_trained_on(
    start: StartClient, completion_server: MakeServer
) -> None:
    server, client = completion_server(), start(max_staleness=0)
    server.behaviour = server.hang
    for version in range(2 * MAX_DROPS):
        client.set_server(ServerState(server.url, version, True, str(version)))
        server.wait_for_requests((version + 1) * PER_STEP * GROUP)
        client.set_trainer_version(version + 1)
    server.behaviour = server.good
    client.set_server(ServerState(server.url, 2 * MAX_DROPS, True, "last"))
    begun = PER_STEP * (2 * MAX_DROPS + 1)
    batch = client.next_batch(2 * MAX_DROPS, begun, 60)
    assert client.counters()["dropped.stale_in_flight"] >= 2 * MAX_DROPS
    assert {g.prompt.index for g in batch} == set(range(begun))
    assert "skipped" not in client.counters()
    server.released.set()


def test_servers_that_sample_from_another_runs_weights_cost_no_prompt_its_drops(
    start: StartClient, completion_server: MakeServer
) -> None:
    """As those that were taken over or restarted, and of which the ledger does not know it yet."""

    def foreign(body: dict[str, Any]) -> tuple[int, Any]:
        status, content = answer([5] * 4, [-1.0] * 4)
        versions = [{"version": "other:3:f", "start": 0, "end": 4}]
        content["choices"][0]["weight_versions"] = versions
        return status, content

    client = start(max_staleness=0, prompts_per_step=1, group_size=1)
    for _ in range(MAX_DROPS):
        server = completion_server()
        server.behaviour = foreign
        client.set_server(ServerState(server.url, 0, True, "r:0:f"))
        server.wait_for_requests(1)
    client.set_server(ServerState(completion_server().url, 0, True, "r:0:f"))
    (group,) = client.next_batch(0, 1, 60)
    assert group.prompt.index == 0
    assert client.counters()["dropped.version_unknown"] >= MAX_DROPS


def test_a_completion_that_ends_gives_its_slot_to_another_group_while_one_of_its_own_goes_on(
    start: StartClient, completion_server: MakeServer
) -> None:
    server = completion_server()
    server.behaviour = lambda b: server.hang(b) if b is server.bodies[0] else server.good(b)
    # One slot more than a group has: the step's other group has room beside the one that hangs.
    client = start(server, max_staleness=0, max_concurrent_requests=GROUP + 1)
    server.wait_for_requests(PER_STEP * GROUP)
    assert wait_until(lambda: client.counters()["ready"] == 1, 60.0)
    assert client.in_flight(60.0) == {server.url: 1}


def test_a_group_that_goes_on_elsewhere_counts_there_for_what_is_not_finished(
    start: StartClient, completion_server: MakeServer
) -> None:
    failing, other = completion_server(), completion_server()
    fail = threading.Event()

    def behaviour(body: dict[str, Any]) -> tuple[int, Any]:
        if body is not failing.bodies[0]:
            return failing.good(body)
        assert fail.wait(60)
        return 500, {"error": "engine is dead"}

    failing.behaviour, other.behaviour = behaviour, other.hang
    client = start(failing, max_staleness=0, prompts_per_step=1)
    assert wait_until(lambda: client.in_flight(60.0) == {failing.url: 1}, 60.0)
    client.set_server(ServerState(other.url, 0, True, "r:0:f"))
    fail.set()
    other.wait_for_requests(1)
    assert wait_until(lambda: client.in_flight(60.0) == {failing.url: 0, other.url: 1}, 60.0)


def test_the_same_seed_gives_the_same_checked_groups_and_their_record_replays_bit_for_bit(
    start: StartClient, completion_server: MakeServer, tmp_path: Path
) -> None:
    server, path = completion_server(), str(tmp_path / "record.jsonl")
    runs = []
    for record_path in ("", path):
        client = start(server, record_path=record_path, max_staleness=0)
        runs.append(client.next_batch(0, PER_STEP, 60))
        client.record(0, runs[-1])
        client.close()
    assert runs[0] == runs[1] == ReplayClient(path).next_batch(0, PER_STEP, 1)
    assert [(g.prompt.index, len(g.completions)) for g in runs[0]] == [(0, GROUP), (1, GROUP)]
    for completion in (c for group in runs[0] for c in group.completions):
        versions = completion.version_first, completion.version_last
        assert (*versions, completion.server) == (0, 0, server.url)
        assert len(completion.token_ids) == len(completion.logprobs) == 4
        assert 0 <= completion.reward <= 1
    assert {body["cache_salt"] for body in server.bodies} == {salt("r:0:f")}
    assert len({body["seed"] for body in server.bodies}) == PER_STEP * GROUP


def test_groups_of_a_server_that_left_are_made_elsewhere_at_once_and_cost_their_prompts_nothing(
    start: StartClient, completion_server: MakeServer
) -> None:
    leaving, client = completion_server(), start()
    leaving.behaviour = leaving.hang
    client.set_server(ServerState(leaving.url, 0, True, "0"))
    leaving.wait_for_requests(2 * PER_STEP * GROUP)
    assert client.in_flight(60.0) == {leaving.url: 2 * PER_STEP * GROUP}
    client.remove_server(leaving.url)
    staying = completion_server()
    client.set_server(ServerState(staying.url, 0, True, "0"))
    batches = [client.next_batch(version, PER_STEP, 60) for version in (0, 1)]
    groups = [group for batch in batches for group in batch]
    assert sorted(g.prompt.index for g in groups) == list(
        range(2 * PER_STEP)
    )  # they finish in any order
    assert {c.server for g in groups for c in g.completions} == {staying.url}
    counters = client.counters()
    assert counters["moved"] == 2 * PER_STEP
    assert not any(name.startswith("dropped") or name == "outages" for name in counters)
    assert client.in_flight(60.0) == {staying.url: 0}
    # The server may come back.
    client.remove_server(staying.url)
    leaving.behaviour = leaving.good
    client.set_server(ServerState(leaving.url, 1, True, "1"))
    after = [c for group in client.next_batch(2, PER_STEP, 60) for c in group.completions]
    assert {(c.server, c.version_first) for c in after} == {(leaving.url, 1)}


def test_a_resume_names_the_keys_that_give_rows_other_numbers() -> None:
    made = partial(RolloutSpec, model_dir="", reward=["m:f"], dataset_filter=["level > 3"])
    state = json.loads(json.dumps(RolloutClient(made(dataset="a.jsonl", seed=1)).state()))
    assert made(dataset="a.jsonl", seed=1, group_size=4, state=state).changed_rows() == ""
    assert made(dataset="a.jsonl", seed=1, state={"cursor": {}}).changed_rows() == ""
    changed = made(dataset="b.jsonl", seed=2, state=state).changed_rows()
    before = "rollout.seed = 2 (before: 1), rollout.dataset = 'b.jsonl' (before: 'a.jsonl')"
    assert changed == before


def test_a_resume_knows_the_same_rows_by_an_absolute_path_and_from_outside_none() -> None:
    made = partial(RolloutSpec, model_dir="", reward=["m:f"])
    state = RolloutClient(made(dataset="a.jsonl", seed=1)).state()
    assert made(dataset=os.path.abspath("a.jsonl"), seed=1, state=state).changed_rows() == ""
    assert made(dataset="b.jsonl", seed=2, source="push", state=state).changed_rows() == ""


def test_the_counts_of_a_server_end_with_it_and_begin_anew_when_it_comes_back(
    start: StartClient, completion_server: MakeServer
) -> None:
    """Before, each server of a run's life had its metrics and its place in every checkpoint."""
    server, client = completion_server(), start()

    def counted() -> dict[str, int]:
        return {n: c for n, c in client.counters().items() if server.url in n}

    client.set_server(ServerState(server.url, 0, True, "0"))
    client.next_batch(0, PER_STEP, 60)
    before = counted()[f"tokens.{server.url}"]
    assert before >= PER_STEP * GROUP * 4
    assert not any(server.url in name for name in client.state()["counters"])
    client.remove_server(server.url)
    assert client.in_flight(60.0) == {}  # what the worker sent before it knew has come
    assert counted() == {}
    client.set_server(ServerState(server.url, 1, True, "1"))
    client.next_batch(1, PER_STEP, 60)
    client.next_batch(2, PER_STEP, 60)  # version 0 is too old for it: it was sampled just now
    counters = client.counters()
    assert 0 < counters[f"tokens.{server.url}"] <= counters["tokens"] - before
