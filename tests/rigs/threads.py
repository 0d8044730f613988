"""A host without a free thread, which no test can make otherwise: no limit holds for root."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest


@contextmanager
def no_free_thread() -> Iterator[None]:

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with pytest.MonkeyPatch.context() as lacking:
        lacking.setattr(threading.Thread, "start", refuse)
        yield
