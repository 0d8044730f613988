"""A start says what it waits for, and since when."""

import threading

import pytest

from titan_grpo.observe.terminal import waiting, waiting_line


def test_a_wait_says_at_once_what_for_and_then_how_long() -> None:
    said: list[str] = []
    enough = threading.Event()

    def say(text: str) -> None:
        said.append(text)
        if len(said) == 3:
            enough.set()

    with waiting("server a", 600.0, say, every_s=0.01):
        assert said == ["waiting for server a"]
        assert enough.wait(30)
    count = len(said)
    assert said[1] == said[2] == f"waiting for server a: 0 s of at most 600 s [{'.' * 20}]"
    assert not enough.wait(0.05) or len(said) == count, "it is silent once the wait is over"


def test_a_wait_that_fails_passes_its_error_on_and_is_silent() -> None:
    with pytest.raises(RuntimeError, match="down"), waiting("a", None, lambda _: None, 0.01):
        raise RuntimeError("down")
    assert "waiting" not in {thread.name for thread in threading.enumerate()}


@pytest.mark.parametrize(
    ("passed", "deadline", "end"),
    [
        (30, None, "x: 30 s"),
        (59.7, 120, "x: 60 s of at most 120 s [#########...........]"),
        (130, 120, f"x: 130 s of at most 120 s [{'#' * 20}]"),
    ],
)
def test_the_bar_is_the_part_of_the_deadline_that_is_used_up(passed, deadline, end) -> None:
    assert waiting_line("x", passed, deadline) == f"waiting for {end}"
