"""A receiver's memory is made while its lane watches: it may take long, but not stand still."""

import errno
import os
import threading
import time
from collections.abc import Callable

import pytest
import torch

from tests.receive.site import Version
from titan_grpo.config import WeightSync
from titan_grpo.errors import TitanGrpoError, TransferFailed
from titan_grpo.layout import image
from titan_grpo.protocol.messages import Joined, Staged
from titan_grpo.receive.receiver import Receiver
from titan_grpo.sync.link import LaneLink, LinkOptions

PIECE = 1 << 20
PROGRESS_S = 3.0
TRIES = 10


def connect(mib: int, moved: Callable[[int], object] | None = None) -> tuple[Staged, float]:
    """A lane hands the manifest of an image of ``mib`` MiB to a receiver; its answer, and after how
    many seconds. ``moved``: see LaneLink.send_manifest."""
    version = Version({"w": torch.zeros(mib << 20, dtype=torch.uint8)})
    config = WeightSync(
        bucket_bytes=PIECE,
        lane_deadline_s=60.0,
        min_rate=1 << 40,
        progress_deadline_s=PROGRESS_S,
    )
    options = LinkOptions(config, "tcp", "127.0.0.1")
    link = LaneLink("000000000001-memory00", 2, version.manifest, options)
    receiver = Receiver(link.open(), Joined(True, "", "test", 0, "", -1, "", True), None)

    def serve() -> None:
        with pytest.raises(TitanGrpoError):  # the lane hangs up
            receiver.run()

    threading.Thread(target=serve, daemon=True).start()
    try:
        assert link.wait_joined(180.0).ok
        began = time.monotonic()
        return link.send_manifest(moved), time.monotonic() - began
    finally:
        link.close()


@pytest.fixture
def slow_memory(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[int], object]], None]:
    """Have each piece of an image wait, by its offset, before the kernel gives it."""
    real = os.posix_fallocate

    def wait(how: Callable[[int], object]) -> None:
        def fallocate(fd: int, offset: int, nbytes: int) -> None:
            how(offset)
            real(fd, offset, nbytes)

        monkeypatch.setattr(os, "posix_fallocate", fallocate)

    monkeypatch.setattr(image, "PIECE_BYTES", PIECE)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0})  # one thread makes it
    return wait


def test_memory_that_takes_longer_than_any_deadline_of_a_piece_is_waited_for(
    slow_memory: Callable[[Callable[[int], object]], None],
) -> None:
    slow_memory(lambda _: threading.Event().wait(1.2 * PROGRESS_S / 12))
    staged, seconds = connect(12)
    assert staged.ok
    assert seconds > PROGRESS_S


def test_memory_that_does_not_come_is_given_up_after_the_progress_deadline(
    slow_memory: Callable[[Callable[[int], object]], None],
) -> None:
    never = threading.Event()
    slow_memory(lambda offset: offset < 2 * PIECE or never.wait(60.0))
    with pytest.raises(TransferFailed, match=f"to have byte {3 * PIECE} of transfer 0"):
        connect(4)
    never.set()


def test_memory_that_the_kernel_refuses_is_named_to_the_lane(
    slow_memory: Callable[[Callable[[int], object]], None],
) -> None:
    def refuse(_: int) -> None:
        raise OSError(errno.ENOMEM, "planted")

    slow_memory(refuse)
    staged, _ = connect(4)
    assert not staged.ok
    assert "image titan_grpo staging must have" in staged.error


def test_a_lane_sees_each_bucket_that_has_its_memory() -> None:
    seen: list[int] = []
    assert connect(4, seen.append)[0].ok
    assert seen == [PIECE, 2 * PIECE, 3 * PIECE, 4 * PIECE]


def test_other_threads_run_while_memory_is_mapped(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks, done = [0], threading.Event()

    def tick() -> None:
        while not done.wait(0.001):
            ticks[0] += 1

    def often(made: image.SharedImage) -> bool:
        before, began = ticks[0], time.monotonic()
        with image.SharedImage.attach(made.address):
            ticked, seconds = ticks[0] - before, time.monotonic() - began
        return ticked > 100 * seconds

    nbytes = 512 << 20
    monkeypatch.setattr(image, "PIECE_BYTES", nbytes)  # one call of the kernel
    ticker = threading.Thread(target=tick)
    with image.SharedImage.create(nbytes, "test threads") as made:
        ticker.start()
        try:
            # A call that holds the interpreter's lock lets no other thread run: one tick or two in
            # all, however often it is made. Other processes may have the cores for a while.
            assert any(often(made) for _ in range(TRIES))
        finally:
            done.set()
            ticker.join()
