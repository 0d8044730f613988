"""URLs, host lists and servers files, as people and schedulers write them."""

import os
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from titan_grpo.config import Rollout
from titan_grpo.config.rollout import server_url, violations
from titan_grpo.errors import ConfigError
from titan_grpo.titan.server_urls import (
    ServersFile,
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
def test_a_host_list_is_expanded_as_slurm_means_it(text, hosts) -> None:
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
    ],
)
def test_what_is_no_host_list_is_refused_with_its_text(text) -> None:
    with pytest.raises(ConfigError, match=r"host"):
        expand_hosts(text)


def compressed(prefix: str, numbers: list[int], width: int) -> str:
    """What SLURM would write for these hosts: runs of numbers as ranges."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and runs[-1][-1] + 1 == number:
            runs[-1].append(number)
        else:
            runs.append([number])
    texts = [
        f"{run[0]:0{width}d}" + (f"-{run[-1]:0{width}d}" if len(run) > 1 else "") for run in runs
    ]
    return f"{prefix}[{','.join(texts)}]"


GROUPS = st.lists(
    st.tuples(
        st.text("abcdxyz-", min_size=1, max_size=5).map(lambda s: f"h{s}"),
        st.sets(st.integers(0, 9999), min_size=1, max_size=30),
        st.integers(4, 6),
    ),
    min_size=1,
    max_size=4,
)


@given(GROUPS)
def test_a_compressed_list_expands_to_the_hosts_it_was_made_of(groups) -> None:
    hosts = [
        f"{prefix}{number:0{width}d}"
        for prefix, numbers, width in groups
        for number in sorted(numbers)
    ]
    text = ",".join(compressed(prefix, sorted(numbers), width) for prefix, numbers, width in groups)
    assert expand_hosts(text) == tuple(dict.fromkeys(hosts))


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
def test_a_broken_servers_file_is_refused_with_its_line(text, words) -> None:
    with pytest.raises(ConfigError, match=words):
        parse_servers(text)


def replaced(path, text: str) -> None:
    other = path.with_suffix(".new")
    other.write_text(text)
    os.replace(other, path)


def test_a_file_is_read_again_only_when_it_changed_and_complains_once(tmp_path) -> None:
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


def test_all_sources_together_give_each_server_once(tmp_path) -> None:
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


def test_one_server_under_two_names_is_refused_wherever_they_are_given(tmp_path) -> None:
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


def test_launched_servers_stand_for_the_word(tmp_path) -> None:
    assert known_servers(Rollout(servers=["launch"]), {}, ("http://127.0.0.1:1",)).urls == [
        "http://127.0.0.1:1"
    ]
