"""What a start waits for, in lines for people: one at once, further ones with the seconds."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from titan_grpo.observe import terminal

EVERY_S = 10.0
BAR = 20


def waiting_line(what: str, passed_s: float, deadline_s: float | None) -> str:
    """One line of a wait that began ``passed_s`` ago; its bar is the part of the deadline that is
    used up. Pure.

    >>> waiting_line("the first commit", 30, 120)
    'waiting for the first commit: 30 s of at most 120 s [#####...............]'
    """
    line = f"waiting for {what}: {passed_s:.0f} s"
    if deadline_s is None:
        return line
    done = min(BAR, int(BAR * passed_s / deadline_s))
    return f"{line} of at most {deadline_s:.0f} s [{'#' * done}{'.' * (BAR - done)}]"


@contextmanager
def waiting(
    what: str,
    deadline_s: float | None = None,
    say: Callable[[str], None] = terminal.print_status,
    every_s: float = EVERY_S,
) -> Iterator[None]:
    """Say what the body waits for: at its start, then every ``every_s`` seconds until it is over.

    The lines come from a thread, because the body may be one call that returns at its end.
    """
    began, over = time.monotonic(), threading.Event()
    say(f"waiting for {what}")

    def tell() -> None:
        while not over.wait(every_s):
            say(waiting_line(what, time.monotonic() - began, deadline_s))

    thread = threading.Thread(target=tell, name="waiting", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(every_s)
