"""Servers as people and schedulers write them: URLs, host lists, files; and those of a running
trainer, which commands and the file change."""

import json
import os
import queue
import resource
import socket
import stat
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest

from tests.sync.conftest import Lane
from titan_grpo.cli import main
from titan_grpo.config import Rollout
from titan_grpo.config.rollout import server_url, violations
from titan_grpo.errors import ConfigError, ServerRefused, ServerUnreachable
from titan_grpo.observe.recorder import Recorder
from titan_grpo.protocol import members
from titan_grpo.sync.server_set import ServerSet
from titan_grpo.titan import servers
from titan_grpo.titan.servers import (
    NAME,
    ControlSocket,
    Membership,
    ServersFile,
    ask,
    expand_hosts,
    known_servers,
    parse_servers,
)


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("gpu2", ["gpu2"]),
        ("node[01-03,07],gpu2", ["node01", "node02", "node03", "node07", "gpu2"]),
        ("a[8-11]", ["a8", "a9", "a10", "a11"]),
        ("a[098-101]-ib,b", ["a098-ib", "a099-ib", "a100-ib", "a101-ib", "b"]),
        ("r[1-2]n[1-2]", ["r1n1", "r1n2", "r2n1", "r2n2"]),
        ("a,a[1],a1,a", ["a", "a1"]),
        (" n[5].cluster.example ", ["n5.cluster.example"]),
    ],
)
def test_a_host_list_is_expanded_as_slurm_means_it(text: str, hosts: list[str]) -> None:
    assert list(expand_hosts(text)) == hosts


@pytest.mark.parametrize(
    "text",
    [
        "",
        "a,,b",
        "a[1-3",
        "a]1[",
        "a[]",
        "a[3-1]",
        "a[x]",
        "a[1-]",
        "a[[1]]",
        "a b",
        "a[1-99999999]",
        "a[1-65536],b",
        "a" + "[1,1]" * 40,
        ",".join(["a[1-60000]"] * 3),
        "a[" + ",".join(["1-60000"] * 1000) + "]",
        "a" + "[1-60000]" * 1000,
        "a[" + "1" * 5000 + "]",
    ],
    ids=lambda text: text[:20],
)
def test_what_is_no_host_list_is_refused_with_its_text(text: str) -> None:
    with pytest.raises(ConfigError, match=r"host") as refusal:
        expand_hosts(text)
    assert len(str(refusal.value)) < 500


def test_urls_are_compared_in_one_form() -> None:
    assert server_url(" http://Host:8000/ ") == "http://host:8000"
    assert server_url("https://[::1]:8000/base/") == "https://[::1]:8000/base"
    for text in (
        "host:8000",
        "ftp://host",
        "http://",
        "http://h:70000",
        "http://h:0",
        "http://h:99999",
        "http://u@h:1",
        "http://:password@h:1",
        "http://h:1#top",
        "http://h:1?x=1",
        "http://a b",
        "http://a\x01:1",
        "http://a..b:1",
        f"http://{'a' * 64}:1",
        "http://a:1/v1/",
    ):
        with pytest.raises(ConfigError, match="must be a URL"):
            server_url(text)


def test_a_servers_file_has_a_url_per_line_and_comments() -> None:
    assert parse_servers("# all\nhttp://a:1/ # first\n\n  http://b:1\nhttp://A:1\n") == (
        "http://a:1",
        "http://b:1",
    )
    assert parse_servers("") == ()


@pytest.mark.parametrize(
    ("text", "words"),
    [("http://a:1\nhttp:/b\n", "line 2"), ("http://a:1\nhttp://b", "still being written")],
)
def test_a_broken_servers_file_is_refused_with_its_line(text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        parse_servers(text)


def replaced(path: Path, text: str) -> None:
    other = path.with_suffix(".new")
    other.write_text(text)
    os.replace(other, path)


def test_a_servers_file_may_begin_with_the_mark_that_some_editors_write(tmp_path: Path) -> None:
    path = tmp_path / "servers"
    path.write_text("http://a:1\n", encoding="utf-8-sig")
    assert ServersFile(path).read() == ("http://a:1",)


def test_a_file_is_read_again_only_when_it_changed_and_complains_once(tmp_path: Path) -> None:
    path = tmp_path / "servers"
    file = ServersFile(path)
    with pytest.raises(ConfigError, match="readable file"):
        file.read()
    replaced(path, "http://a:1\n")
    assert file.read() == ("http://a:1",)
    assert file.changed() is None
    replaced(path, "http://b:1\n")
    assert file.changed() == ("http://b:1",)
    replaced(path, "nonsense\n")
    with pytest.raises(ConfigError, match="line 1"):
        file.changed()
    assert file.changed() is None
    path.unlink()
    with pytest.raises(ConfigError, match="readable file"):
        file.changed()
    assert file.changed() is None
    replaced(path, "http://b:1\n")
    assert file.changed() == ("http://b:1",)


def test_a_file_that_could_not_be_read_for_a_while_is_read_though_it_has_not_changed_since(
    tmp_path: Path,
) -> None:
    """As one that gets its mode after the rename, or whose file system had an error."""
    path = tmp_path / "servers"
    replaced(path, "http://a:1\n")
    file = ServersFile(path)
    file.read()
    replaced(path, "http://b:1\n")
    open_files, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, most))
    try:
        with pytest.raises(ConfigError, match="Too many open files"):
            file.changed()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (open_files, most))
    assert file.changed() == ("http://b:1",)


def test_all_sources_together_give_each_server_once(tmp_path: Path) -> None:
    (tmp_path / "servers").write_text("http://n1:9000\nhttp://z:1\n")
    rollout = Rollout(
        servers=["http://a:1/"],
        servers_file=str(tmp_path / "servers"),
        servers_slurm="NODES",
        servers_port=9000,
    )
    known = known_servers(rollout, {"NODES": "n[1-2]"})
    assert known.urls == ["http://a:1", "http://n1:9000", "http://n2:9000", "http://z:1"]
    assert known.listed == ("http://n1:9000", "http://z:1")
    with pytest.raises(ConfigError, match="NODES is not set"):
        known_servers(rollout, {})


def test_one_server_under_two_names_is_refused_wherever_they_are_given(tmp_path: Path) -> None:
    local = Rollout(servers=["http://127.0.0.1:8000"])
    assert any(
        "without repetition" in rule
        for rule in violations(
            replace(local, servers=["http://127.0.0.1:8000", "http://LOCALHOST:8000/"])
        )
    )
    (tmp_path / "servers").write_text("http://localhost:8000\n")
    with pytest.raises(ConfigError, match="must give a server one name"):
        known_servers(replace(local, servers_file=str(tmp_path / "servers")), {})
    with pytest.raises(ConfigError, match="are one server"):
        parse_servers("http://h\nhttp://h:80\n")
    assert parse_servers("http://h:80\nhttp://h:81\n") == ("http://h:80", "http://h:81")


def test_servers_of_an_evaluation_are_others_than_those_of_the_rollouts(tmp_path: Path) -> None:
    (tmp_path / "servers").write_text("http://b:1\n")
    rollout = Rollout(servers=["http://127.0.0.1:1"], servers_file=str(tmp_path / "servers"))
    for url in ("http://127.0.0.1:1", "http://b:1"):
        with pytest.raises(ConfigError, match=rf"\[evaluation\]\] must be none of .*got {url},"):
            known_servers(rollout, {}, apart=[url])
    with pytest.raises(ConfigError, match=r"http://127\.0\.0\.1:1 and http://localhost:1 are one"):
        known_servers(rollout, {}, apart=["http://localhost:1"])
    # Two tables may share one.
    assert C not in known_servers(rollout, {}, apart=[C, C]).urls


def test_an_empty_servers_file_is_refused_where_nothing_else_names_a_server(
    tmp_path: Path,
) -> None:
    (tmp_path / "servers").write_text("# none yet\n")
    with pytest.raises(ConfigError, match="must name a server at the start"):
        known_servers(Rollout(servers_file=str(tmp_path / "servers")), {})
    launching = Rollout(servers=["launch"], servers_file=str(tmp_path / "servers"))
    assert known_servers(launching, {}).urls == [], "as the start is checked, before the launch"


def test_launched_servers_stand_for_the_word(tmp_path: Path) -> None:
    assert known_servers(Rollout(servers=["launch"]), {}, ("http://127.0.0.1:1",)).urls == [
        "http://127.0.0.1:1"
    ]


WAIT_S = 90.0
A, B, C = "http://a:1", "http://b:1", "http://c:1"


@pytest.fixture
def said() -> "queue.SimpleQueue[str]":
    """What the lanes of a run report; those of its first servers are taken out."""
    return queue.SimpleQueue()


def following(said: "queue.SimpleQueue[str]") -> str:
    return said.get(timeout=WAIT_S)


Start = Callable[..., ServerSet]


@pytest.fixture
def start(
    said: "queue.SimpleQueue[str]", tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Start]:
    """``start("http://a:1", ...)``: a run with these configured servers, and those of ``file``."""
    monkeypatch.setattr(servers, "LOOK_S", 0.1)
    ends = ExitStack()

    def begin(*fixed: str, file: Path | None = None, folder: Path = tmp_path) -> ServerSet:
        listed = ServersFile(file).read() if file is not None else ()
        recorder, let_go = Recorder(tmp_path / "records"), threading.Event()
        let_go.set()
        ends.callback(recorder.close)
        made = ServerSet(
            members.start(frozenset(fixed), frozenset(listed)),
            lambda url, epoch: Lane(url, epoch, let_go, said.put),
            recorder,
        )
        made.start()
        for _ in made.urls:
            following(said)
        ends.callback(lambda: made.close(time.monotonic() + WAIT_S))
        ends.callback(Membership(made, folder, dict, file or "").close)
        return made

    with ends:
        yield begin


def command(run: Path, *arguments: str) -> int:
    return main(["servers", *arguments, "--run", str(run)])


def test_a_command_adds_and_removes_and_says_so_in_one_line(
    start: Start, said: "queue.SimpleQueue[str]", tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
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
def test_what_is_refused_exits_with_1_and_one_line(
    start: Start,
    said: "queue.SimpleQueue[str]",
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    arguments: tuple[str, str],
    words: str,
) -> None:
    start(A)
    assert command(tmp_path, *arguments) == 1
    error = capsys.readouterr().err
    assert words in error
    assert error.count("\n") == 1
    assert said.empty()


def test_a_mistake_in_the_command_exits_with_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command(tmp_path, "add", "no url") == 2
    assert command(tmp_path / "nowhere", "list") == 2
    assert "must be a URL" in capsys.readouterr().err


def test_without_a_trainer_the_command_says_where_it_looked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command(tmp_path, "list") == 1
    assert f"no trainer runs in {tmp_path}" in capsys.readouterr().err


def test_the_list_comes_as_a_table_and_as_json(
    start: Start, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    start(A)
    assert command(tmp_path, "list") == 0
    assert A in capsys.readouterr().out.splitlines()[1]
    assert command(tmp_path, "list", "--json") == 0
    (line,) = json.loads(capsys.readouterr().out)
    assert (line["url"], line["standing"], line["held"]) == (A, "unknown", None)


class Heard(queue.SimpleQueue[str]):
    """In place of stderr. (What comes while pytest takes out what it has captured is lost.)"""

    write = queue.SimpleQueue.put

    def flush(self) -> None:
        """All is there."""


def test_a_file_that_changes_moves_servers_and_a_bad_one_is_said_once_and_does_not(
    start: Start, said: "queue.SimpleQueue[str]", tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard = Heard()
    monkeypatch.setattr(sys, "stderr", heard)
    path = tmp_path / "servers"
    path.write_text(f"{A}\n{B}\n")
    thread = start(file=path)
    replaced(path, f"{A}\nnonsense\n")
    complaint = heard.get(timeout=60)
    assert "nonsense" in complaint
    assert "line 2" in complaint
    assert "last good list stays" in complaint
    assert thread.urls == [A, B]
    replaced(path, f"{B}\n{C}  # new\n")
    assert {following(said), following(said)} == {f"+{C}", f"-{A}"}
    replaced(path, "")
    complaint = next(line for line in iter(lambda: heard.get(timeout=60), "") if "without" in line)
    assert complaint.endswith("; the last good list stays in force\n")
    replaced(path, f"{A}\n{B}\n{C}\n")
    assert following(said) == f"+{A}"
    assert thread.urls == [A, B, C]
    rest = [heard.get() for _ in range(heard.qsize())]
    assert not [line for line in rest if "nonsense" in line]


def test_a_line_of_the_file_that_is_a_server_of_the_run_under_another_name_is_said(
    start: Start, said: "queue.SimpleQueue[str]", tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard = Heard()
    monkeypatch.setattr(sys, "stderr", heard)
    path = tmp_path / "servers"
    path.write_text(f"{A}\n")
    thread = start("http://localhost:1", file=path)
    replaced(path, f"{A}\nhttp://127.0.0.1:1\n")
    assert "http://localhost:1 and http://127.0.0.1:1 are one server" in heard.get(timeout=60)
    assert thread.urls == [A, "http://localhost:1"]
    replaced(path, f"{A}\n{B}\n")
    assert following(said) == f"+{B}"


def test_a_refused_list_counts_once_a_command_has_removed_what_it_was_refused_for(
    start: Start, said: "queue.SimpleQueue[str]", tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard = Heard()
    monkeypatch.setattr(sys, "stderr", heard)
    path = tmp_path / "servers"
    path.write_text(f"{A}\n")
    start("http://localhost:1", file=path)
    replaced(path, f"{A}\nhttp://127.0.0.1:1\n")
    assert "are one server" in heard.get(timeout=60)
    assert command(tmp_path, "remove", "http://localhost:1") == 0
    assert {following(said), following(said)} == {"-http://localhost:1", "+http://127.0.0.1:1"}
    rest = [heard.get() for _ in range(heard.qsize())]
    assert not [line for line in rest if "are one server" in line], "it is said once"


def test_the_socket_is_for_its_owner_only_and_may_lie_deep(start: Start, tmp_path: Path) -> None:
    deep = tmp_path / ("x" * 100) / ("y" * 100)
    deep.mkdir(parents=True)
    start(A, folder=deep)
    assert stat.S_IMODE((deep / NAME).stat().st_mode) == 0o600
    assert ask(deep, {"do": "list"})["servers"]
    opened = Path("/proc/self/fd").iterdir()
    assert deep not in [fd.readlink() for fd in opened if fd.is_symlink()], "a call leaves it open"


def test_a_dead_trainers_socket_is_replaced_a_live_ones_is_not(tmp_path: Path) -> None:
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


def test_a_silent_or_senseless_caller_holds_up_nobody(start: Start, tmp_path: Path) -> None:
    start(A)
    with socket.socket(socket.AF_UNIX) as silent:
        silent.connect(str(tmp_path / NAME))
        with pytest.raises(ServerRefused, match="must be one of add, remove, list"):
            ask(tmp_path, {"do": "explode"})
        assert ask(tmp_path, {"do": "list"})["servers"]
