"""Commands and the servers file of a running trainer, as a person and a scheduler use them."""

import json
import os
import queue
import socket
import stat
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from titan_grpo.cli import main
from titan_grpo.errors import ServerRefused, ServerUnreachable
from titan_grpo.observe.recorder import Recorder
from titan_grpo.protocol import members
from titan_grpo.sync.server_set import ServerSet
from titan_grpo.titan.membership import NAME, ControlSocket, Membership, ask
from titan_grpo.titan.server_urls import ServersFile

WAIT_S = 20.0
A, B, C = "http://a:1", "http://b:1", "http://c:1"


class Lane(threading.Thread):
    """Reports its start and its end."""

    engine = "vllm"

    def __init__(self, url: str, epoch: int, said: "queue.SimpleQueue[str]") -> None:
        super().__init__(name=f"lane {url}", daemon=True)
        self.url, self.epoch, self._said = url, epoch, said
        self._stopping = threading.Event()

    def run(self) -> None:
        self._said.put(f"+{self.url}")
        assert self._stopping.wait(WAIT_S)
        self._said.put(f"-{self.url}")

    def stop(self) -> None:
        self._stopping.set()

    def abort(self) -> None:
        """Nothing can be aborted."""


@pytest.fixture
def said() -> "queue.SimpleQueue[str]":
    """What the lanes of a run report; those of its first servers are taken out."""
    return queue.SimpleQueue()


def following(said: "queue.SimpleQueue[str]") -> str:
    return said.get(timeout=WAIT_S)


Start = Callable[..., ServerSet]


@pytest.fixture
def start(said: "queue.SimpleQueue[str]", tmp_path: Path) -> Iterator[Start]:
    """``start("http://a:1", ...)``: a run with these configured servers, and those of ``file``."""
    ends = ExitStack()

    def begin(*fixed: str, file: Path | None = None, folder: Path = tmp_path) -> ServerSet:
        watched = ServersFile(file) if file is not None else None
        listed = watched.read() if watched is not None else ()
        recorder = Recorder(tmp_path / "records")
        ends.callback(recorder.close)
        servers = ServerSet(
            members.start(frozenset(fixed), frozenset(listed)),
            lambda _, url, epoch: Lane(url, epoch, said),
            recorder,
        )
        servers.start()
        for _ in servers.urls:
            following(said)
        ends.callback(lambda: servers.close(time.monotonic() + WAIT_S))
        ends.callback(Membership(servers, folder, dict, watched).close)
        return servers

    with ends:
        yield begin


def command(run: Path, *arguments: str) -> int:
    return main(["servers", *arguments, "--run", str(run)])


def test_a_command_adds_and_removes_and_says_so_in_one_line(start, said, tmp_path, capsys):
    thread = start(A)
    assert command(tmp_path, "add", "http://B:1/") == 0
    assert (
        capsys.readouterr().out
        == f"{B} was added: it gets the newest version before its first rollout\n"
    )
    assert following(said) == f"+{B}"
    assert thread.urls == [A, B]
    assert command(tmp_path, "remove", A) == 0
    assert (
        capsys.readouterr().out
        == f"{A} was removed: it takes no more rollouts and no more versions\n"
    )
    assert following(said) == f"-{A}"
    assert thread.urls == [B]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("add", A), "there already"),
        (("remove", C), "not a server of this run"),
        (("remove", A), "the last server"),
    ],
)
def test_what_is_refused_exits_with_1_and_one_line(start, said, tmp_path, capsys, arguments, words):
    start(A)
    assert command(tmp_path, *arguments) == 1
    error = capsys.readouterr().err
    assert words in error
    assert error.count("\n") == 1
    assert said.empty()


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
    (line,) = json.loads(capsys.readouterr().out)
    assert (line["url"], line["standing"], line["held"]) == (A, "unknown", None)


def replaced(path: Path, text: str) -> None:
    other = path.with_suffix(".new")
    other.write_text(text)
    os.replace(other, path)


def test_a_file_that_changes_moves_servers_and_a_bad_one_does_not(start, said, tmp_path, capsys):
    path = tmp_path / "servers"
    path.write_text(f"{A}\n{B}\n")
    thread = start(file=path)
    assert thread.urls == [A, B]
    replaced(path, f"{A}\nhttp:/broken\n")
    replaced(path, f"{B}\n{C}  # new\n")
    assert {following(said), following(said)} == {f"+{C}", f"-{A}"}
    replaced(path, "")
    replaced(path, f"{A}\n{B}\n{C}\n")
    assert following(said) == f"+{A}"
    assert thread.urls == [A, B, C]


class Heard(queue.SimpleQueue):
    """In place of stderr. (What comes while pytest takes out what it has captured is lost.)"""

    write = queue.SimpleQueue.put

    def flush(self) -> None:
        """All is there."""


def test_a_bad_file_is_said_once_and_the_last_good_list_stays(start, said, tmp_path, monkeypatch):
    heard = Heard()
    monkeypatch.setattr(sys, "stderr", heard)
    path = tmp_path / "servers"
    path.write_text(f"{A}\n{B}\n")
    thread = start(file=path)
    for text in ("nonsense\n", f"{B}\n", f"{A}\n"):
        replaced(path, text)
        if text == "nonsense\n":
            complaint = heard.get(timeout=60)
            assert "nonsense" in complaint
            assert "line 1" in complaint
            assert "last good list stays" in complaint
            assert thread.urls == [A, B]
        else:
            assert following(said)
    rest = [heard.get() for _ in range(heard.qsize())]
    assert not [line for line in rest if "servers:" in line]


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
    start(A)
    with socket.socket(socket.AF_UNIX) as silent:
        silent.connect(str(tmp_path / NAME))
        with pytest.raises(ServerRefused, match="must be one of add, remove, list"):
            ask(tmp_path, {"do": "explode"})
        assert ask(tmp_path, {"do": "list"})["servers"]
