"""Requests that are at work on a server for as long as a check needs them, however fast the machine
is."""

import asyncio
import random
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import TypeVar

from safetensors.torch import load_file, save_file

from titan_grpo.engines import sglang, vllm
from titan_grpo.engines.generation import Piece, Sampled, Sampling, StreamedAnswer
from titan_grpo.engines.http import AsyncDriver, Call, ServerAccess, ignore
from titan_grpo.engines.server import Dialect
from titan_grpo.titan.tiny import EOS

T = TypeVar("T")

REQUEST_S = 300.0
"""Deadline of one request, in seconds."""

LONG_S = 600.0
"""Deadline of the one whose answer comes whole, so only when a check ends it, in seconds."""

FROZEN_S = 1.0
"""For how long nothing may end that a pause holds, in seconds."""

CROWD = 8
"""Requests at a time."""

CONTEXT, ENDLESS = 16384, 16000
"""Context of the server, in tokens, and the length of a request that is at work until a check
aborts it: no machine makes so many tokens in the time of a check. With its prompt it fits into the
context."""

FEW = 16
"""Tokens of a request behind others: each of them makes as many meanwhile."""


ABORT_ALL = {
    vllm.NAME: Call("POST", "/abort_requests", 60.0, ignore, json={"request_ids": []}),
    sglang.NAME: Call("POST", "/abort_request", 60.0, ignore, json={"abort_all": True}, admin=True),
}
"""Engine -> the call that ends all requests in flight, each with what it has."""


def prompt(seed: int, count: int = 24) -> list[int]:
    """Random ids of ordinary tokens."""
    draw = random.Random(seed)
    return [draw.randrange(4, 100) for _ in range(count)]


def without_end(folder: Path) -> Path:
    """Have a tiny tied model all but never sample its end token: requests are as long as they may
    be."""
    return _with_end(folder, -12.0)


def at_its_end(folder: Path) -> Path:
    """Have a tiny tied model all but always sample its end token: it ends every request."""
    return _with_end(folder, 12.0)


def _with_end(folder: Path, along: float) -> Path:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    embedding = tensors["model.embed_tokens.weight"]
    # What every token has in common, and the end token's row looks along or away from. Layers
    # change little of it.
    embedding[:, 0] = 1.0
    embedding[EOS, 0] = along
    for name in tensors:
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensors[name] = tensors[name] * 0.1
    save_file(tensors, path, metadata={"format": "pt"})
    return folder


class Tokens(StreamedAnswer):
    """An answer whose tokens can be waited for."""

    def __init__(self, call: Call[Piece], changed: threading.Condition) -> None:
        super().__init__(call)
        self._changed = changed

    def take(self, chunk: bytes) -> bool:
        """The next bytes."""
        with self._changed:
            came = super().take(chunk)
            self._changed.notify_all()
            return came


class Crowd:
    """CROWD requests whose answers come in pieces, token by token, and one whose answer comes
    whole: it is the last one."""

    def __init__(
        self, access: ServerAccess, speak: Dialect, label: str, pool: ThreadPoolExecutor
    ) -> None:
        self._access, self._speak, self._changed = access, speak, threading.Condition()
        endless = [
            Sampling(ENDLESS, 1.0, 17 + seed, label, ignore_eos=True) for seed in range(CROWD + 1)
        ]
        whole = pool.submit(self._run, speak.generate(prompt(CROWD), endless[CROWD], LONG_S))
        calls = [speak.stream(prompt(seed), endless[seed], REQUEST_S, 1) for seed in range(CROWD)]
        self._sinks = [Tokens(call, self._changed) for call in calls]
        streams = [
            pool.submit(self._stream, call, sink)
            for call, sink in zip(calls, self._sinks, strict=True)
        ]
        self.running: list[Future[Sampled]] = [*streams, whole]

    def _run(self, call: Call[T]) -> T:
        with self._access.driver() as driver:
            return driver.run(call)

    def _stream(self, call: Call[Piece], sink: Tokens) -> Sampled:
        async def run() -> None:
            driver = AsyncDriver(self._access.url, self._access.api_key)
            try:
                await driver.stream(call, sink)
            finally:
                await driver.close()

        asyncio.run(run())
        return sink.sampled(sink.count, sink.finish_reason)

    def counts(self) -> list[int]:
        """How many tokens of each answer in pieces have come."""
        with self._changed:
            return [sink.count for sink in self._sinks]

    def wait_begun(self) -> None:
        """Until each has tokens."""
        self._wait_beyond([0] * CROWD)

    def wait_still(self) -> None:
        """Until no token comes for FROZEN_S seconds, although none of the requests has ended."""
        deadline = time.monotonic() + REQUEST_S
        while self._changed_from(self.counts(), FROZEN_S):
            assert time.monotonic() < deadline, "tokens kept coming from a paused server"
        self._assert_at_work()

    def end(self) -> list[Sampled]:
        """Have each go on for a few tokens, and abort them all: their answers."""
        before = self.counts()
        self._run(
            self._speak.generate(prompt(2), Sampling(FEW, 1.0, 2, ignore_eos=True), REQUEST_S)
        )
        self._wait_beyond([count + FEW for count in before])
        self._assert_at_work()
        self.abort()
        return [future.result(0) for future in self.running]

    def abort(self) -> None:
        """Until all have ended: an abort ends only what has reached the server."""
        deadline = time.monotonic() + REQUEST_S
        while wait(self.running, 0).not_done:
            assert time.monotonic() < deadline, "aborted requests did not end"
            self._run(ABORT_ALL[self._speak.NAME])
            wait(self.running, 1.0)

    def _changed_from(self, counts: list[int], timeout_s: float) -> bool:
        with self._changed:
            return self._changed.wait_for(lambda: self.counts() != counts, timeout_s)

    def _wait_beyond(self, counts: list[int]) -> None:
        def there() -> bool:
            return all(now > count for now, count in zip(self.counts(), counts, strict=True))

        with self._changed:
            assert self._changed.wait_for(there, REQUEST_S), (counts, self.counts())

    def _assert_at_work(self) -> None:
        ended = [future.result(0) for future in self.running if future.done()]
        assert not ended, f"requests of {ENDLESS} tokens ended before the check ended them: {ended}"
