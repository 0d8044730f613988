"""A door between two processes of a server: who knocks is answered, whoever else is not let in,
nobody waits for ever."""

import os
import secrets
import socket
import subprocess
import sys
import threading

import pytest

from titan_grpo.errors import PeerError
from titan_grpo.receive.unix_rpc import Door, address, knock


@pytest.fixture
def open_door():
    doors = []

    def make(handler):
        door = Door(secrets.token_hex(8), handler)
        door.start()
        doors.append(door)
        return door, door._socket.getsockname()[1:].decode().removeprefix("titan_grpo/")

    yield make
    for door in doors:
        door.close()
        door.join(5)
        assert not door.is_alive()


def test_a_knock_brings_the_handlers_answer(open_door) -> None:
    _, name = open_door(lambda message: {"twice": 2 * message["number"]})
    assert [knock(name, {"number": n}, 5.0) for n in (1, 2)] == [{"twice": 2}, {"twice": 4}]


def test_another_process_of_the_same_user_is_let_in(open_door) -> None:
    _, name = open_door(lambda message: message)
    code = (
        f"from titan_grpo.receive.unix_rpc import knock; print(knock({name!r}, {{'from':"
        " 'outside'}, 5.0))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip() == "{'from': 'outside'}"


def test_all_answers_come_from_one_thread_that_lives_as_long_as_the_door(open_door) -> None:
    door, name = open_door(lambda _message: {"thread": threading.current_thread().name})
    assert {knock(name, {}, 5.0)["thread"] for _ in range(3)} == {door.name}
    assert door.is_alive()


def test_nobody_behind_the_door_is_said_at_once() -> None:
    with pytest.raises(PeerError, match="no open door"):
        knock(secrets.token_hex(8), {}, 5.0)


def test_a_handlers_bug_costs_one_answer_and_not_the_door(open_door) -> None:
    def handler(message):
        return {"value": 1 / message["divisor"]}

    _, name = open_door(handler)
    with pytest.raises(PeerError, match="without an answer"):
        knock(name, {"divisor": 0}, 5.0)
    assert knock(name, {"divisor": 1}, 5.0) == {"value": 1.0}


def test_a_handler_that_takes_too_long_is_given_up(open_door) -> None:
    release = threading.Event()
    _, name = open_door(lambda _message: {"late": release.wait(30)})
    with pytest.raises(PeerError, match="deadline"):
        knock(name, {}, 0.2)
    release.set()


def test_who_hangs_up_or_talks_nonsense_is_forgotten(open_door) -> None:
    _, name = open_door(lambda message: message)
    for raw in (b"", b"[1, 2]\n", b"no json\n"):
        with socket.socket(socket.AF_UNIX) as guest:
            guest.connect(address(name))
            guest.sendall(raw)
    assert knock(name, {"still": "there"}, 5.0) == {"still": "there"}


def test_another_user_is_not_let_in(open_door) -> None:
    if os.getuid() != 0:
        pytest.skip("only root can become another user")
    _, name = open_door(lambda message: message)
    code = (
        "import os, sys\n"
        "sys.path.insert(0, sys.argv[1])\n"
        "from titan_grpo.errors import PeerError\n"
        "from titan_grpo.receive.unix_rpc import knock\n"
        "os.setuid(65534)\n"
        "try:\n"
        f"    print(knock({name!r}, {{}}, 5.0))\n"
        "except PeerError:\n"
        "    print('refused')\n"
    )
    root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    done = subprocess.run(
        [sys.executable, "-c", code, root], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip() == "refused"
