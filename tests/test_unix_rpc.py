"""Requests over a Unix socket: answers, refusals, other users, deadlines; and the end of a pipe."""

import os
import secrets
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tests.rigs.interpreter import python
from titan_grpo.errors import DataError, PeerError, ServerRefused, ServerUnreachable
from titan_grpo.unix_rpc import Channel, Handler, Pipe, Server, abstract_address, call

Serve = Callable[..., tuple[Server, str]]


@pytest.fixture
def serve() -> Iterator[Serve]:
    servers = []

    def start(handler: Handler, concurrent: bool = False) -> tuple[Server, str]:
        address = abstract_address(secrets.token_hex(8))
        server = Server(address, handler, concurrent)
        server.start()
        servers.append(server)
        return server, address

    yield start
    for server in servers:
        server.close()
        server.join(60)
        assert not server.is_alive()


def test_a_request_brings_the_handlers_answer(serve: Serve) -> None:
    _, address = serve(lambda request: {"twice": 2 * request["number"]})
    answers = [call(address, {"number": n}, 60.0) for n in (1, 2)]
    assert answers == [{"twice": 2}, {"twice": 4}]


CALL = """
import os, sys
from titan_grpo.errors import ServerUnreachable, ServerRefused
from titan_grpo.unix_rpc import call
if sys.argv[2] == "another":
    os.setuid(65534)
try:
    print(call("\\0" + sys.argv[1], {"from": "outside"}, 60.0))
except (ServerUnreachable, ServerRefused):
    print("refused")
"""


@pytest.mark.parametrize(
    ("user", "printed"), [("same", "{'from': 'outside'}"), ("another", "refused")]
)
def test_another_process_is_served_if_it_is_the_same_users(
    serve: Serve, user: str, printed: str
) -> None:
    if user == "another" and os.getuid() != 0:
        pytest.skip("only root can become another user")
    _, address = serve(lambda request: request)
    done = python("-c", CALL, address[1:], user, PYTHONPATH=str(Path(__file__).parents[1]))
    assert done.stdout.strip() == printed, done.stderr


def test_all_answers_come_from_one_thread_that_lives_as_long_as_the_server(serve: Serve) -> None:
    server, address = serve(lambda _: {"thread": threading.current_thread().name})
    assert {call(address, {}, 60.0)["thread"] for _ in range(3)} == {server.name}
    assert server.is_alive()


def test_a_concurrent_server_answers_while_another_request_waits(serve: Serve) -> None:
    release, asked = threading.Event(), threading.Event()

    def handler(request: dict[str, Any]) -> dict[str, bool]:
        if request["wait"]:
            asked.set()
            release.wait(120)
        return {"done": True}

    _, address = serve(handler, concurrent=True)
    first = threading.Thread(target=call, args=(address, {"wait": True}, 120.0), daemon=True)
    first.start()
    assert asked.wait(60)
    assert call(address, {"wait": False}, 60.0) == {"done": True}
    release.set()
    first.join(60)


def test_an_address_without_a_server_is_named_at_once() -> None:
    with pytest.raises(ServerUnreachable, match="no process listens"):
        call(abstract_address(secrets.token_hex(8)), {}, 60.0)


def test_a_refusal_of_the_handler_reaches_the_client(serve: Serve) -> None:
    def handler(request: dict[str, Any]) -> dict[str, str]:
        raise DataError("not like this")

    _, address = serve(handler)
    with pytest.raises(ServerRefused, match="not like this"):
        call(address, {}, 60.0)


def test_a_handlers_bug_costs_one_answer_and_not_the_server(serve: Serve) -> None:
    _, address = serve(lambda request: {"value": 1 / request["divisor"]})
    with pytest.raises(ServerUnreachable, match="without an answer"):
        call(address, {"divisor": 0}, 60.0)
    assert call(address, {"divisor": 1}, 60.0) == {"value": 1.0}


def test_a_handler_that_takes_too_long_is_given_up(serve: Serve) -> None:
    release = threading.Event()
    _, address = serve(lambda _: {"late": release.wait(120)})
    with pytest.raises(ServerUnreachable, match="deadline"):
        call(address, {}, 0.2)
    release.set()


def test_a_client_that_hangs_up_or_sends_no_object_costs_nothing(serve: Serve) -> None:
    _, address = serve(lambda request: request)
    for raw in (b"", b"[1, 2]\n", b"no json\n", b"\xe5\n", b"[" * 99_999 + b"\n"):
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(address)
            client.sendall(raw)
    assert call(address, {"still": "there"}, 60.0) == {"still": "there"}


def test_a_line_without_end_is_read_until_the_deadline() -> None:
    """It held the one thread of a server for ever."""
    ours, theirs = socket.socketpair()

    def send() -> None:
        with suppress(OSError):
            while True:
                theirs.sendall(b"x" * 1000)

    sender = threading.Thread(target=send, daemon=True)
    sender.start()
    channel = Channel(ours)
    with pytest.raises(PeerError, match="no whole message"):
        channel.receive(0.5)
    channel.close()
    sender.join(60)
    assert not sender.is_alive()
    theirs.close()


class Interrupted(socket.socket):
    """A socket whose owner does something else just before it reads."""

    def __init__(self, sock: socket.socket, before: Callable[[], object]) -> None:
        super().__init__(fileno=sock.detach())
        self._before = before

    def recv(self, *arguments: int) -> bytes:
        self._before()
        return super().recv(*arguments)


def test_a_message_that_is_sent_meanwhile_does_not_shorten_the_readers_deadline() -> None:
    """Before, both used the timeout of the socket: a reader that waits for an hour gave up after a
    writer's minute, and its process ended."""
    ours, theirs = socket.socketpair()
    channel = Channel(Interrupted(ours, lambda: channel.send({}, 0.05)))
    late = threading.Timer(0.5, theirs.sendall, [b'{"late": 1}\n'])
    late.start()
    assert channel.receive(60.0) == {"late": 1}
    late.join(60)
    channel.close()
    theirs.close()


def test_a_message_that_is_larger_than_the_sockets_buffer_waits_for_its_reader() -> None:
    ends = [Channel(sock) for sock in socket.socketpair()]
    large = {"text": "x" * 10_000_000}
    with pytest.raises(PeerError, match="stuck"):
        ends[0].send(large, 0.2)
    sender = threading.Thread(target=ends[1].send, args=(large, 60.0), daemon=True)
    sender.start()
    assert ends[0].receive(60.0) == large
    sender.join(60)
    assert not sender.is_alive()
    for end in ends:
        end.close()


def test_a_message_that_was_written_in_part_ends_the_stream() -> None:
    ours, theirs = (Channel(sock) for sock in socket.socketpair())
    with pytest.raises(PeerError, match="stuck"):
        ours.send({"text": "x" * 10_000_000}, 0.2)
    assert theirs.receive(30.0) is None
    with pytest.raises(PeerError, match="gone"):
        ours.send({}, 30.0)
    theirs.send({"last": "line"}, 30.0)
    assert ours.receive(30.0) == {"last": "line"}
    for end in (ours, theirs):
        end.close()


def test_both_ends_of_a_pipe_end_when_a_call_cannot_be_pickled() -> None:
    ends = [Pipe(sock, None) for sock in socket.socketpair()]
    readers = [threading.Thread(target=end.receive, daemon=True) for end in ends]
    for reader in readers:
        reader.start()
    ends[0].post("take", lambda: None)
    ends[0].start()
    for reader in readers:
        reader.join(60)
        assert not reader.is_alive()


def silences(ours: Pipe, first_s: float, silent_s: float) -> list[float]:
    """What is said of the other end's silence before its first call, or until it is said twice."""
    said = list[float]()

    def say(seconds: float) -> None:
        said.append(seconds)
        if len(said) == 2:
            raise AttributeError("enough")

    with pytest.raises(AttributeError):
        ours.receive(first_s, silent_s, say)
    return said


def test_nothing_is_said_of_an_end_that_reads_however_silent_it_is() -> None:
    ours, theirs = (Pipe(sock, None) for sock in socket.socketpair())
    threading.Thread(target=theirs.receive, daemon=True).start()
    for end in (ours, theirs):
        end.start()
    threading.Timer(2.0, theirs.post, ["no_method"]).start()
    assert silences(ours, 0.3, 0.3) == []


@pytest.mark.parametrize(("first_s", "words"), [(0.2, 0), (60.0, 1)])
def test_an_end_that_stands_still_is_named_again_and_again(first_s: float, words: int) -> None:
    one, other = socket.socketpair()
    ours, theirs = Pipe(one, [0]), Pipe(other, None)
    for word in range(words):
        theirs.post("append", word)
    for end in (ours, theirs):
        end.start()
    assert silences(ours, first_s, 0.2) == [0.4, 0.8]
