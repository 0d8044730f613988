"""Types of TOML values."""

import tomllib
from dataclasses import dataclass, field
from typing import Literal

import pytest

from titan_grpo.config import Alerts
from titan_grpo.titan.jobfile import fits, mismatches


@dataclass
class Inner:
    workers: int = 0


@dataclass
class Section:
    size: int = 1
    rate: float = 0.1
    name: str = ""
    on: bool = False
    kind: Literal["a", "b"] = "a"
    urls: list[str] = field(default_factory=list)
    path: str | None = None
    parts: list[list[str]] | None = None
    inner: Inner = field(default_factory=Inner)


@dataclass
class Job:
    section: Section = field(default_factory=Section)


def found(text: str) -> list[str]:
    return mismatches(Job, tomllib.loads(text))


def test_right_types_pass_and_an_integer_may_stand_for_a_number() -> None:
    text = (
        'size = 2\nrate = 1\nname = "x"\non = true\nkind = "b"\nurls = ["u"]\npath = "p"\nparts ='
        ' [["q"], []]\n'
    )
    assert found("[section]\n" + text + "[section.inner]\nworkers = 3\n") == []


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('size = "eight"', "section.size must be an integer, got 'eight'"),
        ("size = 2.0", "section.size must be an integer, got 2.0"),
        ("size = true", "section.size must be an integer, got True"),
        ("rate = false", "section.rate must be a number, got False"),
        ("on = 1", "section.on must be true or false, got 1"),
        ('kind = "trt"', "section.kind must be one of 'a', 'b', got 'trt'"),
        ('urls = "http://a"', "section.urls must be a list, each item a string, got 'http://a'"),
        ("urls = [1]", "section.urls must be a list, each item a string, got [1]"),
        ("path = 3", "section.path must be a string, got 3"),
        (
            'parts = ["q"]',
            "section.parts must be a list, each item a list, each item a string, got ['q']",
        ),
        ("inner = 1", "section.inner must be a table, got 1"),
        ('inner.workers = "2"', "section.inner.workers must be an integer, got '2'"),
    ],
)
def test_a_wrong_type_is_one_line_with_key_rule_and_value(line: str, message: str) -> None:
    assert found(f"[section]\n{line}\n") == [message]


def test_an_unknown_key_names_its_nearest_neighbour_or_all_of_them() -> None:
    (close,) = found("[section]\nsise = 1\n")
    assert close.startswith("section.sise is not a key")
    assert close.endswith("did you mean section.size?")
    (far,) = found("[elsewhere]\nx = 1\n")
    assert far.endswith("known are section")


def test_of_a_long_value_the_beginning_is_listed() -> None:
    (line,) = mismatches(Alerts, {"run": "x" * 1_000_000}, "alerts.")
    assert line.startswith("alerts.run must be a list, each item a string, got 'xxx")
    assert len(line) < 300


def test_every_mismatch_is_listed() -> None:
    assert len(found('[section]\nsize = ""\nrate = ""\n')) == 2


def test_a_type_that_toml_can_not_spell_is_left_alone() -> None:
    assert fits(dict, {"a": 1})
