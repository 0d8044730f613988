"""When evaluations begin, and what a server that leaves its version costs them: the real process
against an HTTP server that stands for an engine's faults."""

import os
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest

from tests.rigs.jobs import job
from tests.rigs.threads import no_free_thread
from tests.rollout.conftest import CompletionServer, MakeServer, answer
from tests.sync.conftest import MakeRig
from titan_grpo.config.task import Evaluation
from titan_grpo.errors import ConfigError
from titan_grpo.observe import names
from titan_grpo.observe.recorder import Recorder
from titan_grpo.protocol.messages import ServerState
from titan_grpo.rollout.codec import TextCodec
from titan_grpo.rollout.messages import RolloutSpec
from titan_grpo.rollout.task_runner import TaskOptions
from titan_grpo.rollout.tasks.functions import load_task
from titan_grpo.sync.server_set import NoObserver
from titan_grpo.titan import evaluations
from titan_grpo.titan.evaluations import TRIES, Evaluations, evaluation_spec

WAIT_S = 120.0


class Rollouts(NoObserver):
    """What the rollouts were told."""

    def __init__(self) -> None:
        self.told: list[str] = []

    def set_server(self, state: ServerState) -> None:
        self.told.append(state.url)


class Lanes:
    """Which servers are kept on their versions."""

    def __init__(self) -> None:
        self.kept: set[str] = set()
        self.calls: list[tuple[str, str]] = []
        self.changed = threading.Condition()

    def keep(self, url: str) -> None:
        with self.changed:
            self.kept.add(url)
            self.calls.append(("keep", url))

    def go_on(self, url: str) -> None:
        with self.changed:
            self.kept.discard(url)
            self.calls.append(("go on", url))
            self.changed.notify_all()

    def wait_free(self) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: not self.kept, WAIT_S)


Begin = Callable[..., tuple[Evaluations, Lanes, Rollouts, Recorder]]


@pytest.fixture
def begin(tmp_path: Path, model_dir: str) -> Iterator[Begin]:
    """A factory of Evaluations of the digits task, and of ``more`` tables; (evaluations, lanes,
    rollouts, recorder)."""
    made = []

    def start(**keys: Any) -> tuple[Evaluations, Lanes, Rollouts, Recorder]:
        keys = {"name": "digits", "task": "digits", "rows": 3, "samples": 2, **keys}
        spec = keys.pop("spec", RolloutSpec(model_dir=model_dir, max_completion_tokens=4))
        more: list[Evaluation] = keys.pop("more", [])
        recorder, lanes, rollouts = Recorder(tmp_path / "run"), Lanes(), Rollouts()
        tables = [Evaluation(**keys), *more]
        one = Evaluations(tables, spec, rollouts, recorder, lanes.keep, lanes.go_on)
        made.append((one, recorder))
        return one, lanes, rollouts, recorder

    yield start
    for one, recorder in made:
        one.close()
        recorder.close()


def held(
    server: CompletionServer, version: int, accepting: bool = True, committing: int | None = None
) -> ServerState:
    return ServerState(server.url, version, accepting, f"run:{version}:f", "vllm", committing)


def versions(recorder: Recorder) -> list[int]:
    return [each.version for each in recorder.history().evaluations]


def is_evaluation(child: psutil.Process) -> bool:
    # A child that has ended and was not yet waited for has no command line.
    with suppress(psutil.NoSuchProcess):
        return "titan_grpo.rollout.evaluation" in child.cmdline()
    return False


def processes() -> list[psutil.Process]:
    return [*filter(is_evaluation, psutil.Process().children(recursive=True))]


def the_process() -> psutil.Process:
    (process,) = processes()
    return process


def wait_requests(server: CompletionServer, count: int) -> None:
    with server._arrived:  # longer than for others: a process starts first
        assert server._arrived.wait_for(lambda: len(server.bodies) >= count, WAIT_S)


def test_a_version_is_evaluated_where_it_is_due_and_its_server_is_kept_meanwhile(
    begin: Begin, completion_server: MakeServer
) -> None:
    server = completion_server()
    one, lanes, rollouts, recorder = begin(every=4)
    one.check(WAIT_S)
    loaded, seen = the_process(), []

    def look(body: dict[str, Any]) -> tuple[int, Any]:
        seen.append(processes())
        return server.good(body)

    server.behaviour = look
    kept = []
    for version in (0, 1, 3, 5, 6):
        one.set_server(held(server, version))
        kept += [("keep", server.url), ("go on", server.url)] if version in (0, 5) else []
        assert kept[:-1] == lanes.calls[: len(kept) - 1], "before anything newer can be read"
        lanes.wait_free()
        assert lanes.calls == kept
    assert versions(recorder) == [0, 5], "4 was skipped: the next one stands for it"
    values = one.take_values()
    assert values["evaluation/digits/version"] == 5
    assert one.take_values() == {}
    assert one.latest() == values
    one.last(6)
    assert versions(recorder) == [0, 5, 6]
    assert one.latest()["evaluation/digits/version"] == 6
    assert recorder.history().errors == []
    assert len(recorder.series(names.HELD_S)) == 3, "how long each of them held the server"
    assert rollouts.told == [server.url] * 5
    assert len(server.bodies) == 3 * 3 * 2
    assert seen[:6] == [[loaded]] * 6, "what it needs was loaded before its server was held"
    one.close()
    assert processes() == []


def test_a_result_of_one_prompt_has_no_interval_of_the_result_before_it(
    begin: Begin, completion_server: MakeServer
) -> None:
    """Before, Prometheus and the step's line had the new mean between the ends of an older one."""
    server = completion_server()
    one, lanes, _, _ = begin(every=1)
    one.set_server(held(server, 0))
    lanes.wait_free()
    first = one.latest()
    kept = server.bodies[0]["prompt"]

    def refuse_others(body: dict[str, Any]) -> tuple[int, Any]:
        return server.good(body) if body["prompt"] == kept else (400, {"error": "too long"})

    server.behaviour = refuse_others
    one.set_server(held(server, 1))
    lanes.wait_free()
    values = one.latest()
    assert (values["evaluation/digits/version"], values["evaluation/digits/refused"]) == (1, 2)
    ends = {name for name in first if name.endswith(("_low", "_high"))}
    assert first.keys() - values.keys() == ends
    assert len(ends) == 6
    assert one.take_values() == values


@pytest.mark.parametrize(("own", "asked"), [(False, 2), (True, 4)], ids=["launched", "its own"])
def test_no_request_asks_for_more_than_a_launched_server_has_room_for(
    begin: Begin, completion_server: MakeServer, model_dir: str, own: bool, asked: int
) -> None:
    server = completion_server()
    prompt = load_task("digits", TaskOptions()).prompt(0, TextCodec(model_dir)).token_ids
    rollout = {"servers": ["launch"], "max_completion_tokens": 4}
    config = job(rollout=rollout, training={"seq_len": len(prompt) + 2})
    spec = evaluation_spec(config, model_dir)
    one, lanes, _, recorder = begin(spec=spec, servers=[server.url] if own else [])
    server.behaviour = lambda body: answer([80] * body["max_tokens"], [-1.0] * body["max_tokens"])
    one.set_server(held(server, 0))
    lanes.wait_free()
    assert {body["max_tokens"] for body in server.bodies} == {asked}
    (found,) = recorder.history().evaluations
    assert (found.prompts, found.refused, found.tokens.value) == (3, 0, asked)


def test_an_evaluation_for_which_no_thread_starts_keeps_no_server_and_begins_later(
    begin: Begin, completion_server: MakeServer
) -> None:
    server = completion_server()
    one, lanes, rollouts, recorder = begin(every=4)

    with no_free_thread():
        one.set_server(held(server, 0))
    assert lanes.calls == [("keep", server.url), ("go on", server.url)]
    assert rollouts.told == [server.url]
    one.set_server(held(server, 1))
    lanes.wait_free()
    assert versions(recorder) == [1]


def test_an_evaluation_whose_next_try_finds_no_free_thread_is_over_for_those_who_wait(
    begin: Begin, completion_server: MakeServer
) -> None:
    server = completion_server()
    server.behaviour = server.hang
    one, lanes, _, recorder = begin(every=4)
    one.set_server(held(server, 0))
    wait_requests(server, 1)
    waiting = threading.Thread(target=one.wait_idle)
    waiting.start()
    with no_free_thread():
        the_process().kill()
        waiting.join(30.0)
    assert not waiting.is_alive()
    assert lanes.calls[-1] == ("go on", server.url)
    assert len(recorder.series(names.HELD_S)) == 1


@pytest.mark.parametrize(
    ("reward", "dataset", "said"),
    [
        ("own_rewards:other", "rows.jsonl", ".reward 'own_rewards:other' must be a function"),
        ("own_rewards:wants", "rows.jsonl", ".reward 'own_rewards:wants' asks for 'answer'"),
        ("own_rewards:any", "empty.jsonl", ".dataset '{folder}/empty.jsonl' has no rows"),
        (
            "ends:any",
            "rows.jsonl",
            " must load by weight_sync.startup_deadline_s, its process failed: ",
        ),
        ("own_rewards:any", "rows.jsonl", ""),
    ],
)
def test_a_table_that_cannot_be_begun_ends_the_start_in_one_line_with_its_own_key(
    begin: Begin,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    reward: str,
    dataset: str,
    said: str,
) -> None:
    (tmp_path / "own_rewards.py").write_text(
        "def wants(completions, answer):\n    return [0.0]\n\ndef any(**_):\n    return [0.0]\n"
    )
    (tmp_path / "ends.py").write_text("import os\nos._exit(3)\n")
    (tmp_path / "rows.jsonl").write_text('{"prompt": "ab"}\n')
    (tmp_path / "empty.jsonl").write_text("")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")
    keys = {"name": "held_out", "task": "digits", "rows": 0, "chat_template": "none"}
    one, *_ = begin(**keys, reward=[reward], dataset=str(tmp_path / dataset))
    if not said:
        one.check(WAIT_S)
        return
    with pytest.raises(ConfigError) as caught:
        one.check(WAIT_S)
    (line,) = str(caught.value).splitlines()
    assert line.startswith(f"evaluation 'held_out'{said.format(folder=tmp_path)}")
    assert "rollout." not in line


def test_servers_of_its_own_get_no_rollouts_and_others_no_evaluation(
    begin: Begin, completion_server: MakeServer
) -> None:
    shared, own = completion_server(), completion_server()
    one, lanes, rollouts, recorder = begin(servers=[own.url])
    one.set_server(held(shared, 0))
    assert lanes.kept == set()
    one.set_server(held(own, 0))
    assert ("keep", own.url) in lanes.calls
    lanes.wait_free()
    assert versions(recorder) == [0]
    assert rollouts.told == [shared.url]
    assert shared.bodies == []


def test_a_server_that_two_tables_share_goes_on_when_both_are_over(
    begin: Begin, completion_server: MakeServer
) -> None:
    server = completion_server()

    def slow_at_half(body: dict[str, Any]) -> tuple[int, Any]:
        return server.hang(body) if body["temperature"] == 0.5 else server.good(body)

    server.behaviour, shared = slow_at_half, [server.url]
    slow = Evaluation(name="slow", task="digits", rows=1, temperature=0.5, servers=shared)
    one, lanes, _, recorder = begin(servers=shared, more=[slow])
    one.set_server(held(server, 0))
    with one._changed:
        assert one._changed.wait_for(lambda: one._latest, WAIT_S), "one of them is over"
    assert lanes.calls.count(("go on", server.url)) == 0
    server.released.set()
    lanes.wait_free()
    assert [each.name for each in recorder.history().evaluations] == ["digits", "slow"]
    assert lanes.calls.count(("go on", server.url)) == 1


def test_none_begins_on_a_server_that_takes_no_requests_and_none_outlives_the_run(
    begin: Begin, completion_server: MakeServer
) -> None:
    server = completion_server()
    server.behaviour = server.hang
    one, lanes, _, _ = begin(every=1)
    one.set_server(ServerState(server.url, None, True, ""))
    one.set_server(held(server, 0, accepting=False))
    assert lanes.calls == []
    one.set_server(held(server, 0))
    wait_requests(server, 6)
    one.close()
    assert "digits" not in {thread.name for thread in threading.enumerate()}
    lanes.calls.clear()
    one.set_server(held(server, 1))
    assert lanes.calls == []
    server.released.set()


def test_an_evaluation_whose_server_is_lost_has_no_result_and_ends_at_once(
    begin: Begin, completion_server: MakeServer
) -> None:
    server = completion_server()
    server.behaviour = server.hang
    one, lanes, _, recorder = begin()
    one.set_server(held(server, 0))
    wait_requests(server, 6)
    one.set_server(ServerState(server.url, None, False, ""))
    lanes.wait_free()
    server.released.set()
    (error,) = recorder.history().errors
    assert "evaluation digits of version 0 has no result" in error
    assert "left version 0" in error
    assert versions(recorder) == []
    # The first server that reaches a version then takes its place.
    one.set_server(held(completion_server(), 2))
    lanes.wait_free()
    assert versions(recorder) == [2]


def test_the_last_versions_evaluation_that_no_server_can_make_is_said(
    begin: Begin, completion_server: MakeServer
) -> None:
    one, _, _, recorder = begin(at_start=False)
    one.set_server(held(completion_server(), 3))
    one.last(4)
    (error,) = recorder.history().errors
    assert error == (
        "evaluation digits of version 4, the last, has no result: no server that it may use holds"
        " that version"
    )


def end_process(server: CompletionServer, before: int) -> None:
    """What the kernel does where memory runs out, once all requests have come."""
    wait_requests(server, before + 6)
    the_process().kill()


@pytest.mark.parametrize("deaths", [1, TRIES])
def test_an_evaluation_that_dies_is_made_again_on_the_version_that_is_still_held(
    begin: Begin, completion_server: MakeServer, deaths: int
) -> None:
    server = completion_server()
    server.behaviour = server.hang
    one, lanes, _, recorder = begin()
    one.set_server(held(server, 0))
    for death in range(deaths):
        end_process(server, 6 * death)
    if deaths < TRIES:
        server.released.set()
    lanes.wait_free()
    server.released.set()
    assert versions(recorder) == ([0] if deaths < TRIES else [])
    said = "its process failed: it ended with signal 9 (out of memory, maybe)"
    assert [said in error for error in recorder.history().errors] == [True] * deaths
    assert lanes.calls[-1] == ("go on", server.url)
    assert [call for call, _ in lanes.calls].count("go on") == 1, "kept from the first try on"


def test_an_evaluation_that_dies_while_the_run_ends_leaves_its_server_to_the_last_version(
    begin: Begin, completion_server: MakeServer
) -> None:
    server = completion_server()
    server.behaviour = server.hang
    one, lanes, _, recorder = begin()
    one.set_server(held(server, 0))
    one.stop_schedule()
    end_process(server, 0)
    one.wait_idle()
    assert lanes.calls == [("keep", server.url), ("go on", server.url)]
    server.released.set()
    server.behaviour = server.good
    one.set_server(held(server, 1))
    assert lanes.kept == set()
    one.last(1)
    assert versions(recorder) == [1]
    assert len(recorder.history().errors) == 1


def test_an_evaluation_that_fails_in_an_unknown_way_frees_its_server_and_is_said(
    begin: Begin, completion_server: MakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: int) -> None:
        raise SystemError("no such call")

    server = completion_server()
    one, lanes, _, recorder = begin(at_end=False)
    monkeypatch.setattr(os, "setpriority", refuse)
    one.set_server(held(server, 0))
    lanes.wait_free()
    assert "no result: SystemError('no such call')" in recorder.history().errors[0]


def test_a_process_that_survives_its_kill_does_not_cost_the_result(
    begin: Begin, completion_server: MakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one that waits for a disk: it keeps its connection, and no signal ends it."""
    server = completion_server()
    one, lanes, _, recorder = begin()
    one.check(WAIT_S)
    process = the_process()
    with monkeypatch.context() as surviving:
        surviving.setattr(evaluations, "END_S", 0.1)
        surviving.setattr(subprocess.Popen, "kill", lambda _: None)
        surviving.setattr(subprocess.Popen, "poll", lambda _: None)
        surviving.setattr(os, "pidfd_open", lambda _: os.eventfd(0))
        one.set_server(held(server, 0))
        lanes.wait_free()
    assert versions(recorder) == [0]
    assert recorder.history().errors == []
    psutil.wait_procs([process], WAIT_S)


def test_the_last_versions_evaluation_that_another_one_leaves_no_time_is_said(
    begin: Begin, completion_server: MakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = completion_server()
    server.behaviour = server.hang
    one, _, _, recorder = begin()
    one.set_server(held(server, 0))
    wait_requests(server, 6)
    monkeypatch.setattr(Evaluation, "whole_s", 0.1)
    one.last(1)
    assert recorder.history().errors == [
        "evaluation digits of version 0 has no result: it was not over in time",
        "evaluation digits of version 1, the last, has no result: that of version 0 was not over"
        " in time",
    ]
    server.released.set()


def test_the_last_versions_evaluation_that_is_not_over_in_time_is_said(
    begin: Begin, completion_server: MakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = completion_server()
    server.behaviour = server.hang
    one, lanes, _, recorder = begin(at_start=False)
    one.set_server(held(server, 3))
    monkeypatch.setattr(Evaluation, "whole_s", 1.0)
    one.last(3)
    (error,) = recorder.history().errors
    assert error.startswith("evaluation digits of version 3 has no result: it was not over ")
    assert lanes.kept == set()
    server.released.set()


def test_a_mistake_in_the_task_is_said_once_and_training_is_not_concerned(
    begin: Begin, completion_server: MakeServer
) -> None:
    server = completion_server()
    one, lanes, _, recorder = begin(task="no_such_module:Task", every=4)
    one.set_server(held(server, 0))
    lanes.wait_free()
    one.set_server(held(server, 1))
    assert lanes.kept == set(), "not tried again before it is due"
    (error,) = recorder.history().errors
    assert "no_such_module" in error


@pytest.mark.e2e
def test_real_lanes_keep_a_server_on_the_version_that_is_evaluated_while_the_other_one_goes_on(
    rig: MakeRig,
    model_dir: str,
    completion_server: MakeServer,
    tmp_path: Path,
) -> None:
    evaluated, other = completion_server(), completion_server()
    evaluated.behaviour = evaluated.hang
    recorder = Recorder(tmp_path / "evaluations")
    table = Evaluation(name="digits", task="digits", rows=3, servers=[evaluated.url])

    class Speaking(Evaluations):
        """The rig's servers are of no engine."""

        def set_server(self, state: ServerState) -> None:
            super().set_server(msgspec.structs.replace(state, engine="vllm"))

    one = Speaking(
        [table],
        RolloutSpec(model_dir=model_dir, max_completion_tokens=4),
        Rollouts(),
        recorder,
        keep=lambda url: r.slots.keep(url),
        go_on=lambda url: r.slots.go_on(url),
    )
    r = rig(evaluated.url, other.url, observer=one)
    r.publish(0)
    wait_requests(evaluated, 3)
    for version in (1, 2, 3):
        r.publish(version)
        assert r.servers[other.url].wait_version(version, WAIT_S)
    assert r.servers[evaluated.url].versions == [0]
    evaluated.released.set()
    r.everyone(3)
    assert r.servers[evaluated.url].versions == [0, 3]
    assert versions(recorder) == [0]
    assert recorder.history().errors == []
    one.close()
    recorder.close()


def test_a_process_that_was_killed_while_it_waited_costs_nothing(
    begin: Begin, completion_server: MakeServer
) -> None:
    one, lanes, _, recorder = begin()
    one.check(WAIT_S)
    waiting = the_process()
    waiting.kill()
    psutil.wait_procs([waiting], WAIT_S)
    one.set_server(held(completion_server(), 0))
    lanes.wait_free()
    assert versions(recorder) == [0]
    assert recorder.history().errors == []
