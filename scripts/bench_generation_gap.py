#!/usr/bin/env python
"""Does a server go on generating while weights arrive? The gaps between the tokens of long
requests, by phase.

    python scripts/bench_generation_gap.py [--engine vllm sglang] [--requests 64] [--kv keep
    recompute] [--json PATH]

Requests of 900 tokens are streamed from a real server, one or more of them at a time. Meanwhile:
nothing; a staged transfer whose sender takes ``--stretch`` seconds over it (a slow network); its
commit. Printed are the longest gaps in seconds, over all requests. The longest of all belongs to
the commit, and is as long as the commit, if nothing else stands in the way of the tokens; with ``kv
= "recompute"`` the first step after it computes the KV of all requests anew.
"""

import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path

import httpx

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the checkout, for tests and scripts

from scripts.common import ENGINES, Table, options_of, serving, write_json
from tests.conformance.commits import BUCKET_BYTES, sender
from tests.conformance.crowd import prompt
from tests.conformance.engine import EngineUnderTest, remake
from titan_grpo.engines.generation import DONE, Events, Sampling
from titan_grpo.engines.server import dialect

TOKENS = 900
STREAM_S = 120.0
QUIET_S = 0.5


@dataclass(frozen=True)
class Gaps:
    """Longest time between two tokens of a request in each phase, how many tokens came during the
    transfer, and the commit's length. Seconds."""

    engine: str
    requests: int
    kv: str
    quiet_s: float
    transfer_s: float
    commit_s: float
    tokens_during_transfer: int
    pause_to_resume_s: float


class Listener(threading.Thread):
    """Streams one long request and notes when each piece came."""

    def __init__(self, engine: str, url: str, seed: int) -> None:
        super().__init__(daemon=True)
        call = dialect(engine).stream(prompt(seed), Sampling(TOKENS, ignore_eos=True), STREAM_S, 1)
        self._url, self._call = url, call
        self.times: list[float] = []
        self.began = threading.Event()

    def run(self) -> None:
        events, call = Events(), self._call
        with httpx.stream(
            call.method, self._url + call.path, json=call.json, timeout=STREAM_S, trust_env=False
        ) as answer:
            for chunk in answer.iter_bytes():
                self.times += [time.monotonic()] * sum(
                    payload != DONE for payload in events.take(chunk)
                )
                if len(self.times) > 20:
                    self.began.set()

    def between(self, start: float, end: float) -> tuple[float, int]:
        """(longest gap that touches the time from ``start`` to ``end``, pieces in it)."""
        pairs = list(zip(self.times, self.times[1:], strict=False))
        gaps = [b - a for a, b in pairs if b >= start and a <= end]
        return max(gaps, default=0.0), sum(start <= t <= end for t in self.times)


def between(listeners: Sequence[Listener], start: float, end: float) -> tuple[float, int]:
    """(longest gap of any, pieces of all)."""
    found = [listener.between(start, end) for listener in listeners]
    return max(gap for gap, _ in found), sum(count for _, count in found)


def measure(engine: str, requests: int, kv: str, stretch_s: float, folder: Path) -> Gaps:
    """One server, one crowd of requests, one version."""
    model = remake(100, folder / "start")
    settings = {"max_model_len": 1024, "max_num_seqs": max(8, requests)}
    with serving(engine, model, folder / "server.log", **settings) as server:
        e = EngineUnderTest(server, folder)
        never = threading.Event()
        with sender(e) as trainer:
            trainer.sync(1, 1)
            weights, _ = trainer.make(2)
            buckets = -(-weights.manifest.total_bytes // BUCKET_BYTES)
            crowd = [Listener(engine, server.url, seed) for seed in range(1, requests + 1)]
            with trainer.link(weights) as link:
                for listener in crowd:
                    listener.start()
                for listener in crowd:
                    assert listener.began.wait(60.0), "no tokens came"
                quiet = time.monotonic()
                never.wait(QUIET_S)
                sent = time.monotonic()
                slowly = lambda _: never.wait(stretch_s / buckets)  # noqa: E731
                staged = trainer.stage(link, weights, 2, slowly)
                paused = time.monotonic()
                drop_kv = trainer.control.drop_kv if kv == "recompute" else bool
                assert trainer.apply(link, staged, trainer.label(2), drop_kv).ok
                resumed = time.monotonic()
                alive = all(listener.is_alive() for listener in crowd)
                assert alive, "the requests must be longer: one has ended"
                never.wait(QUIET_S / 2)
            for listener in crowd:
                listener.join(120.0)
                assert len(listener.times) >= TOKENS / 2, "one was cut short"
    transfer, count = between(crowd, sent, paused)
    return Gaps(
        engine,
        requests,
        kv,
        between(crowd, quiet, sent)[0],
        transfer,
        between(crowd, paused, resumed)[0],
        count,
        resumed - paused,
    )


def main() -> int:
    """Print one line per engine; 1 if an engine stood still during a transfer."""
    parser = options_of(__doc__)
    parser.add_argument("--engine", nargs="+", choices=ENGINES, default=ENGINES)
    parser.add_argument("--requests", type=int, default=1)
    parser.add_argument("--kv", nargs="+", choices=("keep", "recompute"), default=("keep",))
    parser.add_argument("--stretch", type=float, default=1.0)
    options = parser.parse_args()
    found, table = [], Table()
    for engine, kv in product(options.engine, options.kv):
        with tempfile.TemporaryDirectory() as folder:
            found.append(measure(engine, options.requests, kv, options.stretch, Path(folder)))
        table.add(asdict(found[-1]))
    write_json(options.json, table.rows)
    stood = [
        g.engine
        for g in found
        if g.transfer_s > options.stretch / 2 or not g.tokens_during_transfer
    ]
    print(
        f"stood still during the transfer: {', '.join(stood)}"
        if stood
        else "tokens kept coming during every transfer"
    )
    return 1 if stood else 0


if __name__ == "__main__":
    sys.exit(main())
