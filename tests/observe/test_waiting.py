"""A start says what it waits for, and since when."""

import re
import threading

import pytest

from titan_grpo.observe.terminal import waiting, waiting_line


def telling() -> list[threading.Thread]:
    """The threads of waits."""
    return [thread for thread in threading.enumerate() if thread.name == "waiting"]


def test_a_wait_says_at_once_what_for_and_then_how_long() -> None:
    said: list[str] = []
    enough = threading.Event()

    def say(text: str) -> None:
        said.append(text)
        if len(said) == 3:
            enough.set()

    with waiting("server a", 600.0, say, every_s=0.01):
        assert said[0] == "waiting for server a"
        assert enough.wait(60)
    for thread in telling():
        thread.join(60)
    assert not telling(), "it is silent once the wait is over"
    line = re.compile(r"waiting for server a: \d+ s of at most 600 s \[#*\.+\]")
    assert all(map(line.fullmatch, said[1:3]))


def test_a_wait_that_fails_passes_its_error_on_and_is_silent() -> None:
    with pytest.raises(RuntimeError, match="down"), waiting("a", None, lambda _: None, 60.0):
        raise RuntimeError("down")
    assert not telling()


@pytest.mark.parametrize(
    ("passed", "deadline", "end"),
    [
        (30, None, "x: 30 s"),
        (59.7, 120, "x: 60 s of at most 120 s [#########...........]"),
        (130, 120, f"x: 130 s of at most 120 s [{'#' * 20}]"),
    ],
)
def test_the_bar_is_the_part_of_the_deadline_that_is_used_up(
    passed: float, deadline: int | None, end: str
) -> None:
    assert waiting_line("x", passed, deadline) == f"waiting for {end}"
