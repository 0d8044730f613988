"""Both worker transports: what a client may rely on, and which failures the remote one survives."""

import json
import os
import queue
import random
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest

from tests.rigs.present import present
from tests.rigs.signals import signal_at
from tests.rigs.threads import no_free_thread
from tests.rigs.trainer_handle import wait_until
from tests.rollout.cluster import ANY, Cluster
from tests.rollout.conftest import MakeServer, StartClient
from titan_grpo.errors import ConfigError
from titan_grpo.protocol.frames import End, Post
from titan_grpo.protocol.messages import ServerState, new_run_id
from titan_grpo.rollout.child import LocalTransport
from titan_grpo.rollout.client import FRUITLESS, RolloutClient, RolloutsLate
from titan_grpo.rollout.httpd import HttpServer, Reply, Request
from titan_grpo.rollout.messages import (
    FORMAT,
    Answer,
    AskLoad,
    Event,
    Failed,
    FromWorker,
    Message,
    Ready,
    RolloutSpec,
    RolloutStopped,
    ServerLeft,
    decode,
    encode,
)
from titan_grpo.rollout.service import Session
from titan_grpo.samples import Group

PER_STEP, GROUP = 2, 2
WAIT_S = 60.0


@pytest.fixture
def cluster(model_dir: str) -> Iterator[Cluster]:
    sizes: dict[str, Any] = {
        "prompts_per_step": PER_STEP,
        "group_size": GROUP,
        "max_completion_tokens": 4,
        "request_timeout_s": 120.0,
    }
    cluster = Cluster(RolloutSpec(model_dir=model_dir, seed=5, max_staleness=1, **sizes))
    yield cluster
    for close in cluster.closing:
        close()
    cluster.stop()


@pytest.fixture(params=["local", "remote"])
def start(request: pytest.FixtureRequest, cluster: Cluster) -> StartClient:
    """A factory of started clients, over each transport."""
    if request.param == "remote":
        cluster.serve()

    def make(**changes: Any) -> RolloutClient:
        client = cluster.client(
            LocalTransport() if request.param == "local" else cluster.transport(), **changes
        )
        client.start(60)
        return client

    return make


def children() -> set[int]:
    """Rollout processes of this one that run."""
    found = set()
    for child in psutil.Process(os.getpid()).children():
        with suppress(psutil.NoSuchProcess):  # it ends meanwhile, or is a zombie
            if "titan_grpo.rollout.worker" in " ".join(child.cmdline()):
                found.add(child.pid)
    return found


def indices(*batches: list[Group]) -> list[int]:
    return [group.prompt.index for batch in batches for group in batch]


@pytest.mark.parametrize("start", ["local"], indirect=True)
def test_a_long_wait_for_groups_is_named_five_times_before_the_run_ends(
    start: StartClient, caplog: pytest.LogCaptureFixture
) -> None:
    client = start()
    with pytest.raises(RolloutsLate, match=r"0 of 2 groups for version 0 were ready after 0.6 s"):
        client.next_batch(0, 2, 0.6)
    said = [text for text in caplog.messages if "the run ends" in text]
    advice = "Check that the servers take requests and hold a recent version"
    assert [text.partition(" after ")[2] for text in said] == [
        f"{passed} s, and the run ends after 0.6 s (rollout.batch_timeout_s). {advice}"
        for passed in ("0.1", "0.2", "0.3", "0.4", "0.5")
    ]


@pytest.mark.parametrize("start", ["remote"], indirect=True)
def test_a_transport_carries_versions_groups_up_to_the_bound_drains_and_what_is_in_flight(
    start: StartClient, completion_server: MakeServer
) -> None:
    server, client = completion_server(), start()
    client.set_server(ServerState(server.url, 0, True, "0"))
    first = client.next_batch(0, PER_STEP, 60)
    assert len({*indices(first)}) == PER_STEP
    assert {c.server for g in first for c in g.completions} == {server.url}
    client.next_batch(1, PER_STEP, 60)
    with pytest.raises(RolloutsLate, match="0 of 2 groups for version 2"):
        client.next_batch(2, PER_STEP, 0.3)
    assert len(server.bodies) == 2 * PER_STEP * GROUP
    server.behaviour = server.hang
    client.set_server(ServerState(server.url, 1, True, "1"))
    server.wait_for_requests(3 * PER_STEP * GROUP)
    assert client.in_flight(60.0)[server.url] >= PER_STEP * GROUP
    client.set_server(ServerState(server.url, 1, False, "1"))
    client.drain(server.url, 0.0)
    assert client.in_flight(60.0) == {server.url: 0}
    server.behaviour = server.good
    client.set_server(ServerState(server.url, 1, True, "1"))
    assert {group.version for group in client.next_batch(2, PER_STEP, 60)} == {1}


def test_prometheus_reads_what_a_services_session_counted(
    cluster: Cluster, completion_server: MakeServer
) -> None:
    def page() -> str:
        with cluster.http() as http:
            return http.get("/metrics").raise_for_status().text

    cluster.serve()
    assert "titan_grpo_rollout_requests_total 0.0" in page()
    server, client = completion_server(), cluster.client()
    client.start(60)
    client.set_server(ServerState(server.url, 0, True, "0"))
    client.next_batch(0, PER_STEP, 60)
    # The groups' own requests at least: others are on their way.
    (line,) = [x for x in page().splitlines() if x.startswith("titan_grpo_rollout_requests_total")]
    assert float(line.split()[1]) >= PER_STEP * GROUP
    assert 'titan_grpo_server_in_flight{server="' + server.url.removeprefix("http://") in page()


def test_counts_on_their_way_when_a_server_left_do_not_bring_it_back(cluster: Cluster) -> None:
    """Before, Prometheus had its last requests in flight until the session's end."""
    session, url = Session("s", cluster.spec), "http://a:1"
    cluster.closing.append(lambda: session.close(5))
    end = End("s").put(encode(ServerState(url, 0, True, "0"))).put(encode(ServerLeft(url)))
    session.exchange(end.post(0.0, 1 << 20)[1], 0.0)
    session._on_message(Event("", {f"in_flight.{url}": 4, "requests": 9}))
    assert session.counters["requests"] == 9
    assert not any(url in name for name in session.counters)


def test_what_a_killed_process_of_a_service_had_sent_arrives_before_its_end(
    cluster: Cluster,
) -> None:
    """Before, the session was refused at once, with the groups that were on their way."""
    session = Session("s", cluster.spec)
    cluster.closing.append(lambda: session.close(5))
    session._on_message(Event("", {"requests": 3}))
    psutil.Process(*children()).kill()
    came, end = list[Message](), End("s")
    while not (came and isinstance(came[-1], Failed)):
        asked = Post("s", 0, (), end.have, wait=WAIT_S)
        end, new = end.take(session.exchange(asked, WAIT_S))
        assert new, f"no frame came within {WAIT_S:g} s"
        came += [decode(text, FromWorker) for text in new]
    text = "the rollout process ended with signal 9 (out of memory, maybe)"
    assert came == [Event("", {"requests": 3}), Failed("killed", text)]


def test_a_worker_that_cannot_serve_says_why(
    start: StartClient, cluster: Cluster, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=r"tokenizer\.json"):
        start(model_dir=str(tmp_path / "nothing"))
    with pytest.raises(ConfigError, match=r"rollout\.task"):
        start(task="nonsense")


def test_what_is_sent_while_the_process_loads_is_taken_once_it_has(cluster: Cluster) -> None:
    transport, came = LocalTransport(), queue.SimpleQueue[Message]()
    transport.start(cluster.spec, came.put)
    transport.send(ServerState("http://127.0.0.1:9", None, False, ""))
    transport.send(AskLoad(7))
    assert isinstance(came.get(timeout=60), Ready)
    assert came.get(timeout=60) == Answer(7, {"http://127.0.0.1:9": 0})
    transport.close(WAIT_S)


@pytest.mark.usefixtures("ends_by_signals")
@pytest.mark.parametrize("line", [7, 18])
def test_a_signal_in_the_middle_of_the_processs_start_leaves_a_client_that_closes(
    cluster: Cluster, line: int
) -> None:
    """Before, the close raised: there was no thread, or not yet a started one."""
    client = cluster.client(LocalTransport())
    with signal_at(LocalTransport._begin, line), pytest.raises(SystemExit) as caught:
        client.start(WAIT_S)
    assert caught.value.code == 128 + signal.SIGTERM
    client.close(WAIT_S)
    assert not children()


def test_a_closed_transport_leaves_no_process(
    start: StartClient, completion_server: MakeServer
) -> None:
    server, client = completion_server(), start()
    server.behaviour = server.hang
    client.set_server(ServerState(server.url, 0, True, "0"))
    server.wait_for_requests(GROUP)
    assert children()
    begin = time.monotonic()
    client.close(WAIT_S)
    assert time.monotonic() - begin < WAIT_S, "it was killed"
    assert wait_until(lambda: not children(), WAIT_S)
    with pytest.raises(RolloutStopped, match="not running"):
        client.next_batch(0, PER_STEP, 1)


def test_a_killed_process_is_replaced_unless_it_is_the_third_in_a_row_without_a_group(
    start: StartClient, cluster: Cluster, completion_server: MakeServer
) -> None:
    def replaced() -> None:
        """Kill the process, and wait for the next one."""
        (killed,) = before = children()
        psutil.Process(killed).kill()
        assert wait_until(lambda: bool(children() - before), 60)

    server, client = completion_server(), start()
    client.set_server(ServerState(server.url, 0, True, "0"))
    batches = [client.next_batch(0, PER_STEP, 60)]
    replaced()
    client.set_server(ServerState(server.url, 2, True, "2"))
    batches += [client.next_batch(version, PER_STEP, 60) for version in (1, 2)]
    assert indices(*batches) == [*range(3 * PER_STEP)]
    assert any("ended with signal 9" in line for line in cluster.said)
    assert any("finished groups are kept, others are made again" in line for line in cluster.said)
    server.behaviour = server.hang
    for _ in range(1, FRUITLESS):
        replaced()
    psutil.Process(*children()).kill()
    with pytest.raises(RolloutStopped, match=r"signal 9 \(out of memory, maybe\); 3 in a row"):
        [client.next_batch(version, PER_STEP, 60) for version in (3, 4, 5)]


@pytest.mark.parametrize("start", ["local"], indirect=True)
def test_what_a_killed_process_was_making_is_made_with_other_seeds(
    start: StartClient, completion_server: MakeServer
) -> None:
    """With the same ones a completion that ended the process would come again, and end the next."""
    server, client = completion_server(), start()
    client.set_server(ServerState(server.url, 0, True, "0"))
    batches = [client.next_batch(0, PER_STEP, 60)]
    server.behaviour, sent = server.hang, len(server.bodies)
    client.set_server(ServerState(server.url, 1, True, "1"))
    server.wait_for_requests(sent + 1)
    psutil.Process(*children()).kill()
    server.behaviour = server.good
    batches += [client.next_batch(version, PER_STEP, 60) for version in (1, 2)]
    assert indices(*batches) == [*range(3 * PER_STEP)]
    seeds = [body["seed"] for body in server.bodies]
    assert len(set(seeds)) == len(seeds)


def test_a_poll_is_answered_by_the_next_frame_and_not_before(cluster: Cluster) -> None:
    cluster.serve()
    spec = msgspec.to_builtins(cluster.spec, str_keys=True)
    with cluster.http() as http:

        def poll(after: int) -> list[str]:
            asked = {"session": "s", "first": 0, "frames": [], "have": after, "wait": 20}
            answer = http.post("/frames", json=asked).json()
            return [json.loads(text)["frame"] for text in answer["frames"]]

        opening = {"format": FORMAT, "run": "r", "session": "s", "spec": spec}
        assert http.post("/open", json=opening).json() == {"lease_s": cluster.lease_s}
        assert wait_until(lambda: poll(0) == ["Ready"], WAIT_S)
        with ThreadPoolExecutor(1) as pool:
            pending = pool.submit(poll, 1)
            assert not wait([pending], 0.3).done
            asked = {"session": "s", "first": 0, "frames": [encode(AskLoad(1))], "have": 1}
            answer = http.post("/frames", json=asked).json()
            assert (answer["have"], answer["frames"]) == (1, []), "a post without a wait gets none"
            assert pending.result(60) == ["Answer"]


def test_what_is_lost_doubled_delayed_and_reordered_on_the_way_changes_nothing(
    cluster: Cluster, completion_server: MakeServer
) -> None:
    cluster.serve()
    server, chance = completion_server(), random.Random(0)
    ways = ["", "", "", "drop", "lose", "twice", "late"]
    there = cluster.relay(lambda: chance.choice(ways))
    transport = cluster.transport(url=there.url)
    client = cluster.client(transport, max_staleness=3)
    client.start(60)
    client.set_server(ServerState(server.url, 0, True, "0"))
    batches = [client.next_batch(version, PER_STEP, 60) for version in range(4)]
    assert sorted(indices(*batches)) == list(
        range(4 * PER_STEP)
    )  # all that may be made of version 0
    assert client.in_flight(60.0) == {server.url: 0}
    assert not client.counters().keys() & {"sessions_lost", "skipped"}
    assert len(server.bodies) == 4 * PER_STEP * GROUP
    assert there.passed > 4


@pytest.mark.parametrize("answer", ["away", "page"])
def test_a_proxy_without_its_service_is_an_outage_once_the_service_has_answered(
    cluster: Cluster, completion_server: MakeServer, answer: str
) -> None:
    cluster.serve()
    server, away = completion_server(), threading.Event()
    refused = threading.Semaphore(0)

    def way() -> str:
        if not away.is_set():
            return ""
        refused.release()
        return answer

    client = cluster.client(cluster.transport(url=cluster.relay(way).url))
    client.start(60)
    client.set_server(ServerState(server.url, 0, True, "0"))
    assert len(client.next_batch(0, PER_STEP, 60)) == PER_STEP
    away.set()
    client.set_server(ServerState(server.url, 1, True, "1"))
    assert all(refused.acquire(timeout=WAIT_S) for _ in range(3))
    away.clear()
    assert len(client.next_batch(1, PER_STEP, 60)) == PER_STEP


def wait_idle(client: RolloutClient) -> None:
    """Until all that may start has been made: the last answers are still on their way when their
    requests have come."""
    deadline = time.monotonic() + 60
    while sum(client.in_flight(60.0).values()) or client.counters()["ready"] < PER_STEP:
        assert time.monotonic() < deadline, client.counters()


def test_a_restarted_service_gets_the_state_again_and_no_prompt_is_lost_or_used_twice(
    cluster: Cluster, completion_server: MakeServer
) -> None:
    cluster.serve()
    server, client = completion_server(), cluster.client()
    client.start(60)
    client.set_server(ServerState(server.url, 0, True, "0"))
    batches = [client.next_batch(0, PER_STEP, 60)]
    wait_idle(client)
    ready = client.counters()["ready"]
    server.behaviour = server.hang
    client.set_server(ServerState(server.url, 1, True, "1"))
    server.wait_for_requests(3 * PER_STEP * GROUP)
    draining = threading.Thread(target=client.drain, args=(server.url, 120.0), daemon=True)
    draining.start()
    assert client.in_flight(60.0)[server.url] > 0
    assert draining.is_alive()
    cluster.stop()
    cluster.serve()
    draining.join(60)
    assert not draining.is_alive()
    server.wait_for_requests(4 * PER_STEP * GROUP)  # what hung is made again
    assert client.counters()["sessions_lost"] == 1
    assert client.counters()["ready"] == ready == PER_STEP
    server.released.set()
    batches += [client.next_batch(version, PER_STEP, 60) for version in (1, 2)]
    assert sorted(indices(*batches)) == list(range(3 * PER_STEP))
    # The places of the groups that were kept still count: no more runs ahead than before.
    assert client.in_flight(60.0) == {server.url: 0}
    assert len(server.bodies) == 4 * PER_STEP * GROUP
    assert (client.counters()["consumed_groups"], client.counters()["ready"]) == (3 * PER_STEP, 0)


def test_a_message_past_its_time_is_not_delivered(cluster: Cluster) -> None:
    cluster.serve()
    cut = threading.Event()
    relay = cluster.relay(lambda: "drop" if cut.is_set() else "")
    transport = cluster.transport(url=relay.url)
    client = cluster.client(transport)
    client.start(60)
    client.set_server(ServerState("http://127.0.0.1:9", 0, False, "0"))
    assert client.in_flight(60.0) == {"http://127.0.0.1:9": 0}
    answers = transport._end.have
    cut.set()
    assert client.in_flight(0.2) == {}
    cut.clear()
    for _ in range(2):  # once more: what came before its answer has come
        assert client.in_flight(60.0) == {"http://127.0.0.1:9": 0}
    assert transport._end.have == answers + 2


def test_a_silent_trainer_loses_its_session_and_opens_another_when_it_is_back(
    cluster: Cluster, completion_server: MakeServer
) -> None:
    cluster.lease_s = 5.0
    cluster.serve()
    cut = threading.Event()
    relay = cluster.relay(lambda: "drop" if cut.is_set() else "")
    server, transport = completion_server(), cluster.transport(url=relay.url, deadline_s=600.0)
    client = cluster.client(transport)
    client.start(60)
    server.behaviour = server.hang
    client.set_server(ServerState(server.url, 0, True, "0"))
    server.wait_for_requests(PER_STEP * GROUP)
    (child,) = children()
    cut.set()
    assert wait_until(lambda: child not in children(), WAIT_S)
    assert wait_until(lambda: cluster.run() == "", WAIT_S)
    assert wait_until(lambda: any("silent for 5 s" in text for text in cluster.said), WAIT_S)
    server.behaviour = server.good
    cut.clear()
    assert len(client.next_batch(0, PER_STEP, 60)) == PER_STEP
    assert client.counters()["sessions_lost"] >= 1


def test_a_newer_run_replaces_an_older_one_which_stops(
    cluster: Cluster, completion_server: MakeServer
) -> None:
    cluster.serve()
    server, older = completion_server(), cluster.client()
    older.start(60)
    older_run = cluster.run()
    (first,) = children()
    newer = cluster.client()
    newer.start(60)
    assert cluster.run() > older_run
    assert wait_until(lambda: first not in children(), WAIT_S)
    with pytest.raises(RolloutStopped, match="another run, started later, has the rollout service"):
        older.next_batch(0, PER_STEP, 60)
    newer.set_server(ServerState(server.url, 0, True, "0"))
    assert len(newer.next_batch(0, PER_STEP, 60)) == PER_STEP
    newer.close(60)
    assert wait_until(lambda: cluster.run() == "", WAIT_S)


def test_a_run_with_its_clock_behind_gets_the_service_of_a_dead_run(cluster: Cluster) -> None:
    cluster.lease_s = 3.0
    cluster.serve()
    ahead = new_run_id(time.time() + 3600.0)
    spec = msgspec.to_builtins(cluster.spec, str_keys=True)
    dead = threading.Event()

    def renew() -> None:
        sign = {"session": "dead", "first": 0, "frames": [], "have": 0}
        while http.post("/frames", json=sign).is_success and not dead.wait(0.2):
            pass

    with cluster.http() as http:
        http.post("/open", json={"format": FORMAT, "run": ahead, "session": "dead", "spec": spec})
        renewing = threading.Thread(target=renew)
        renewing.start()
        try:
            with pytest.raises(RolloutStopped, match="another run, started later, has the rollout"):
                cluster.client(cluster.transport(deadline_s=0.5)).start(60)
            assert cluster.run() == ahead
        finally:
            dead.set()
            renewing.join()
    cluster.client().start(60)
    assert "" < cluster.run() < ahead


def test_a_wrong_key_and_a_url_of_something_else_are_mistakes_of_the_configuration(
    cluster: Cluster, completion_server: MakeServer
) -> None:
    cluster.serve()
    with pytest.raises(ConfigError, match=r"refuses the key.*rollout\.controller_key_env"):
        cluster.client(cluster.transport(key="other")).start(60)
    other = HttpServer(ANY, "", lambda request: Reply(404, {}), "a test")
    cluster.closing.append(other.close)
    with pytest.raises(
        ConfigError, match=r"rollout\.controller must be the URL of a rollout service"
    ):
        cluster.client(cluster.transport(url=f"http://{other.address}")).start(60)


def test_a_session_for_which_no_thread_starts_is_refused_and_the_next_try_is_served(
    cluster: Cluster,
) -> None:
    cluster.serve()
    spec = msgspec.to_builtins(cluster.spec, str_keys=True)
    opening = {"format": FORMAT, "run": "r", "session": "s", "spec": spec}
    request = Request("POST", "/open", body=json.dumps(opening).encode())
    service = present(cluster.service)
    with no_free_thread():
        assert service._answer(request).status == 503
    assert not children()
    assert service._answer(request).status == 200
    assert children()


def test_a_service_of_another_version_is_a_mistake_of_the_configuration(cluster: Cluster) -> None:
    cluster.serve()
    with cluster.http() as http:
        answer = http.post("/open", json={"format": "another"})
    assert answer.status_code == 400
    assert "must run the same titan_grpo" in answer.json()["error"]


def test_a_silent_service_is_named(cluster: Cluster, caplog: pytest.LogCaptureFixture) -> None:
    with ThreadPoolExecutor(1) as pool:  # its end is that of the start
        pool.submit(cluster.client().start, 60)
        assert wait_until(lambda: f"{cluster.url} does not answer (" in caplog.text, 30.0)
        cluster.serve()
    assert caplog.text.count("does not answer (") == caplog.text.count("answers again") == 1


def test_a_service_that_stays_away_stops_the_run_and_names_url_and_remedy(cluster: Cluster) -> None:
    gone = rf"service {cluster.url} was not there for 0\.5 s.*titan-grpo rollouts --bind"
    with pytest.raises(RolloutStopped, match=gone):
        cluster.client(cluster.transport(deadline_s=0.5)).start(60)
