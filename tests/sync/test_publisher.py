"""Ranks other than 0 announce their copies, and the failure of one is not the end of the others."""

from datetime import timedelta

import pytest

from titan_grpo.sync.publisher import Announcer, Copy, copied_key
from titan_grpo.sync.transports.broadcast import host_store

WAIT_S = 90.0


class BrokenCopy(Copy):
    """A device that fails: what CUDA raises is a RuntimeError."""

    def wait(self, timeout_s: float) -> float:
        raise RuntimeError("an illegal address")


def test_an_error_of_the_device_is_reported_and_later_versions_are_still_announced(
    caplog: pytest.LogCaptureFixture,
) -> None:
    store = host_store("127.0.0.1")
    announcer = Announcer(1, store.port, WAIT_S, WAIT_S)
    announcer(1, 0, BrokenCopy(0.0))
    announcer(2, 1, BrokenCopy(0.0))
    announcer(3, 0, Copy(0.5))
    store.wait([copied_key(3, 1)], timedelta(seconds=WAIT_S))
    assert "weight sync: version 2: an illegal address" in caplog.text
    assert not store.check([copied_key(1, 1)])
    assert "rank 1: an illegal address" in str(announcer.take_error())
    assert announcer.take_error() is None
    announcer.close(WAIT_S)
