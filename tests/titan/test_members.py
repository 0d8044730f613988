"""The members thread with its door and its file, driven as a person and a scheduler drive it."""

import json
import os
import queue
import socket
import stat
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from titan_grpo.cli import main
from titan_grpo.errors import ServerRefused, ServerUnreachable
from titan_grpo.protocol import members
from titan_grpo.titan.control_socket import NAME, ControlSocket, ask
from titan_grpo.titan.membership import Hands, MemberThread
from titan_grpo.titan.server_urls import ServersFile

WAIT_S = 20.0
A, B, C = "http://a:1", "http://b:1", "http://c:1"


class Site:
    """Lanes that only say when they start and end; ``held`` keeps a lane from ending."""

    def __init__(self) -> None:
        self.said: queue.SimpleQueue[str] = queue.SimpleQueue()
        self.held = threading.Event()
        self.held.set()

    @property
    def hands(self) -> Hands:
        return Hands(
            lambda url: self.said.put(f"+{url}"),
            self._leave,
            lambda: [{"url": A, "held": 3}],
            self.said.put,
        )

    def _leave(self, url: str) -> None:
        assert self.held.wait(WAIT_S)
        self.said.put(f"-{url}")

    def next(self) -> str:
        return self.said.get(timeout=WAIT_S)


@pytest.fixture
def site() -> Site:
    return Site()


@pytest.fixture
def start(site: Site, tmp_path: Path) -> Iterator:
    """``start("http://a:1", ...)``: a thread with these configured servers, and those of
    ``file``."""
    made: list[MemberThread] = []

    def begin(*fixed: str, file: Path | None = None, folder: Path = tmp_path) -> MemberThread:
        watched = ServersFile(file) if file is not None else None
        listed = frozenset(watched.read()) if watched is not None else frozenset()
        made.append(
            MemberThread(members.start(frozenset(fixed), listed), site.hands, folder, watched)
        )
        made[-1].start()
        return made[-1]

    yield begin
    for thread in made:
        thread.close()


def command(run: Path, *arguments: str) -> int:
    return main(["servers", *arguments, "--run", str(run)])


def test_a_command_adds_and_removes_and_says_so_in_one_line(start, site, tmp_path, capsys):
    thread = start(A)
    assert command(tmp_path, "add", "http://B:1/") == 0
    assert (
        capsys.readouterr().out
        == f"{B} was added: it gets the newest version before its first rollout\n"
    )
    assert site.next() == f"+{B}"
    assert thread.urls == [A, B]
    assert command(tmp_path, "remove", A) == 0
    assert (
        capsys.readouterr().out
        == f"{A} was removed: it takes no more rollouts and no more versions\n"
    )
    assert site.next() == f"-{A}"
    assert thread.urls == [B]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("add", A), "there already"),
        (("remove", C), "not a server of this run"),
        (("remove", A), "the last server"),
    ],
)
def test_what_is_refused_exits_with_1_and_one_line(start, site, tmp_path, capsys, arguments, words):
    start(A)
    assert command(tmp_path, *arguments) == 1
    error = capsys.readouterr().err
    assert words in error
    assert error.count("\n") == 1
    assert site.said.empty()


def test_a_mistake_in_the_command_exits_with_2(tmp_path, capsys):
    assert command(tmp_path, "add", "no url") == 2
    assert command(tmp_path / "nowhere", "list") == 2
    assert "must be a URL" in capsys.readouterr().err


def test_without_a_trainer_the_command_says_where_it_looked(tmp_path, capsys):
    assert command(tmp_path, "list") == 1
    assert f"no trainer runs in {tmp_path}" in capsys.readouterr().err


def test_the_list_comes_as_a_table_and_as_json(start, tmp_path, capsys):
    start(A)
    assert command(tmp_path, "list") == 0
    assert A in capsys.readouterr().out.splitlines()[1]
    assert command(tmp_path, "list", "--json") == 0
    assert json.loads(capsys.readouterr().out) == [{"url": A, "held": 3}]


def test_a_server_that_is_added_while_its_lane_ends_joins_afterwards(start, site, tmp_path):
    start(A, B)
    site.held.clear()
    answers: queue.SimpleQueue[str] = queue.SimpleQueue()
    remover = threading.Thread(
        target=lambda: answers.put(ask(tmp_path, {"do": "remove", "url": B})["text"])
    )
    remover.start()
    while True:
        try:
            text = ask(tmp_path, {"do": "add", "url": B})["text"]
            break
        except ServerRefused:  # the removal is not there yet
            pass
    assert text.endswith("when its last lane has ended")
    site.held.set()
    assert [site.next(), site.next()] == [f"-{B}", f"+{B}"]
    remover.join(WAIT_S)
    assert "was removed" in answers.get(timeout=WAIT_S)


def replaced(path: Path, text: str) -> None:
    other = path.with_suffix(".new")
    other.write_text(text)
    os.replace(other, path)


def test_a_file_that_changes_moves_servers_and_a_bad_one_does_not(start, site, tmp_path, capsys):
    path = tmp_path / "servers"
    path.write_text(f"{A}\n{B}\n")
    thread = start(file=path)
    assert thread.urls == [A, B]
    replaced(path, f"{A}\nhttp:/broken\n")
    replaced(path, f"{B}\n{C}  # new\n")
    assert {site.next(), site.next()} == {f"+{C}", f"-{A}"}
    replaced(path, "")
    replaced(path, f"{A}\n{B}\n{C}\n")
    assert site.next() == f"+{A}"
    assert thread.urls == [A, B, C]


class Heard(queue.SimpleQueue):
    """In place of stderr. (What comes while pytest takes out what it has captured is lost.)"""

    write = queue.SimpleQueue.put

    def flush(self) -> None:
        """All is there."""


def test_a_bad_file_is_said_once_and_the_last_good_list_stays(start, site, tmp_path, monkeypatch):
    heard = Heard()
    monkeypatch.setattr(sys, "stderr", heard)
    path = tmp_path / "servers"
    path.write_text(f"{A}\n{B}\n")
    thread = start(file=path)
    for text in ("nonsense\n", f"{B}\n", f"{A}\n"):
        replaced(path, text)
        if text == "nonsense\n":
            said = heard.get(timeout=20)
            assert "nonsense" in said
            assert "line 1" in said
            assert "last good list stays" in said
            assert thread.urls == [A, B]
        else:
            assert site.next()
    assert heard.empty()


def test_the_socket_is_for_its_owner_only_and_may_lie_deep(start, tmp_path):
    deep = tmp_path / ("x" * 100) / ("y" * 100)
    deep.mkdir(parents=True)
    start(A, folder=deep)
    assert stat.S_IMODE((deep / NAME).stat().st_mode) == 0o600
    assert ask(deep, {"do": "list"})["servers"]


def test_a_dead_trainers_socket_is_replaced_a_live_ones_is_not(tmp_path):
    with socket.socket(socket.AF_UNIX) as killed:
        killed.bind(str(tmp_path / NAME))
    first = ControlSocket(tmp_path, lambda _: {})
    with pytest.raises(ServerRefused, match="two runs"):
        ControlSocket(tmp_path, lambda _: {})
    (tmp_path / NAME).unlink()
    second = ControlSocket(tmp_path, lambda _: {"text": "second"})
    first.close()
    assert ask(tmp_path, {})["text"] == "second"
    second.close()
    assert not (tmp_path / NAME).exists()
    with pytest.raises(ServerUnreachable, match="no trainer runs"):
        ask(tmp_path, {})


def test_a_silent_or_senseless_caller_holds_up_nobody(start, tmp_path):
    thread = start(A)
    with socket.socket(socket.AF_UNIX) as silent:
        silent.connect(str(tmp_path / NAME))
        with pytest.raises(ServerRefused, match="must be one of add, remove, list"):
            ask(tmp_path, {"do": "explode"})
        assert ask(tmp_path, {"do": "list"})["servers"]
        thread.close()
