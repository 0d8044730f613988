"""The NCCL transport against what torch's process groups do when something is lost. Without a GPU;
test_cuda_nccl.py is with one."""

import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.rigs.threads import no_free_thread
from tests.sync.fake_nccl import ENDLESS_S, ProcessGroupNCCL, fake_nccl
from titan_grpo.errors import TransferFailed
from titan_grpo.sync.transports import broadcast
from titan_grpo.sync.transports.broadcast import NcclTransport, TransportOptions

BYTES = 64
WAIT_S = 90.0


@pytest.fixture
def group(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[ProcessGroupNCCL]]:
    with fake_nccl(monkeypatch) as made:
        yield made


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as pool:
        yield pool


def options(timeout_s: float = WAIT_S) -> TransportOptions:
    return TransportOptions(timeout_s, "127.0.0.1", BYTES, "cuda:0")


def new_store() -> dist.HashStore:
    store = dist.HashStore()
    store.set_timeout(timedelta(seconds=WAIT_S))
    return store


def pair(threads: ThreadPoolExecutor) -> list[NcclTransport]:
    """Both ends of a lane."""
    store = new_store()
    made: list[Future[NcclTransport]] = [
        threads.submit(NcclTransport, store, rank, 2, options()) for rank in range(2)
    ]
    return [future.result(WAIT_S) for future in made]


def test_buckets_arrive(group: Any, threads: ThreadPoolExecutor) -> None:
    trainer, receiver = pair(threads)
    for value in (1, 2):
        image = torch.full((BYTES,), value, dtype=torch.uint8)
        held = torch.zeros(BYTES, dtype=torch.uint8)
        trainer.broadcast(image, WAIT_S)
        receiver.broadcast(held, WAIT_S)
        assert torch.equal(held, image)


def test_a_peer_that_dies_fails_the_transfer_and_does_not_end_the_process(
    group: Any, threads: ThreadPoolExecutor
) -> None:
    trainer, receiver = pair(threads)
    assert trainer._group is not None
    trainer._group.vanish()  # type: ignore[attr-defined]
    with pytest.raises(TransferFailed, match="remote process exited"):
        receiver.broadcast(torch.zeros(BYTES, dtype=torch.uint8), WAIT_S)
    assert group.ends == []


def test_a_peer_that_never_comes_fails_the_opening_at_its_deadline(group: Any) -> None:
    began = time.monotonic()
    with pytest.raises(TransferFailed, match="did not connect 2 ranks within"):
        NcclTransport(new_store(), 0, 2, options(1.0))
    assert time.monotonic() - began < ENDLESS_S / 2


def test_a_device_without_memory_is_a_failed_transfer(
    group: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any, **__: Any) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(vars(broadcast)["torch"], "empty", full)  # what ``group`` put there
    with pytest.raises(TransferFailed, match="CUDA out of memory"):
        NcclTransport(new_store(), 0, 2, options())


@pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")
def test_an_abort_ends_a_transfer_though_nccls_own_call_blocks_and_then_raises(
    group: Any, threads: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on = threading.Event()

    def blocks() -> None:
        go_on.wait(WAIT_S)
        raise RuntimeError("ncclCommAbort failed")

    trainer, receiver = pair(threads)
    monkeypatch.setattr(broadcast, "ABORT_S", 0.1)
    group.on_abort = staticmethod(blocks)
    held = torch.zeros(BYTES, dtype=torch.uint8)
    transfer = threads.submit(receiver.broadcast, held, WAIT_S)
    receiver.abort()
    with pytest.raises(TransferFailed, match="abort"):
        transfer.result(WAIT_S)
    began = time.monotonic()
    receiver.close()
    trainer.close()
    assert time.monotonic() - began < WAIT_S / 2
    go_on.set()


def test_an_abort_without_a_free_thread_raises_nothing_and_the_next_one_ends_the_group(
    group: Any, threads: ThreadPoolExecutor
) -> None:
    aborted = threading.Event()
    trainer, receiver = pair(threads)
    group.on_abort = staticmethod(aborted.set)

    with no_free_thread():
        receiver.abort()
    assert not aborted.is_set()
    receiver.abort()
    assert aborted.wait(WAIT_S)
    for end in (trainer, receiver):
        end.close()
