#!/usr/bin/env python
"""What does it cost to have completions streamed? Tokens per second, and CPU seconds on both sides,
with and without.

    python scripts/bench_streamed.py [--engine vllm sglang] [--requests 64 256] [--intervals 0 1 8
    32] [--tokens 512]

Requests of ``--tokens`` tokens each are sent at once to a real server of a tiny model, by the
driver of the rollout process. Interval 0 is unstreamed; the others are the tokens in a piece.
``client`` is the CPU time of this process and ``server`` that of all processes of the server, both
in milliseconds per 1000 tokens. Rounds of all intervals alternate; medians are printed.
"""

import argparse
import asyncio
import statistics
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the checkout, for tests and scripts

from scripts.common import ENGINES, Table, options_of, serving, write_json
from tests.conformance.crowd import prompt
from tests.rigs.census import cpu_seconds
from titan_grpo.engines.generation import Sampling, StreamedAnswer
from titan_grpo.engines.http import AsyncDriver
from titan_grpo.engines.launch import Server
from titan_grpo.engines.server import dialect
from titan_grpo.titan.tiny import write_tiny_model

REQUEST_S = 300.0


@dataclass(frozen=True)
class Cost:
    """One round. Tokens per second of wall time; CPU milliseconds per 1000 tokens."""

    tokens_per_s: float
    client_ms: float
    server_ms: float


async def one(engine: str, driver: AsyncDriver, seed: int, tokens: int, interval: int) -> int:
    """One request; its tokens."""
    speak, sampling = dialect(engine), Sampling(tokens, 1.0, seed, ignore_eos=True)
    if not interval:
        return len((await driver.run(speak.generate(prompt(seed), sampling, REQUEST_S))).token_ids)
    call = speak.stream(prompt(seed), sampling, REQUEST_S, interval)
    answer = StreamedAnswer(call)
    await driver.stream(call, answer)
    return len(answer.sampled(answer.count, answer.finish_reason).token_ids)


async def round_of(engine: str, server: Server, requests: int, tokens: int, interval: int) -> Cost:
    driver = AsyncDriver(server.url, max_connections=requests)
    before, cpu, wall = cpu_seconds(server.group), time.process_time(), time.perf_counter()
    made = await asyncio.gather(
        *(one(engine, driver, seed, tokens, interval) for seed in range(1, requests + 1))
    )
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    used = cpu_seconds(server.group) - before
    await driver.close()
    assert sum(made) == requests * tokens, made
    return Cost(sum(made) / wall, cpu * 1e6 / sum(made), used * 1e6 / sum(made))


def measure(engine: str, options: argparse.Namespace, folder: Path, table: Table) -> None:
    """One server; all numbers of requests and all intervals."""
    model = write_tiny_model("qwen3", folder / "model", 100, std=0.05, dtype="bfloat16")
    settings = {
        "max_model_len": 1024,
        "max_num_seqs": max(options.requests),
        "weight_transfer": False,
    }
    with serving(engine, model, folder / "server.log", **settings) as server:
        asyncio.run(round_of(engine, server, 8, 64, 0))
        for requests in options.requests:
            rounds: dict[int, list[Cost]] = {interval: [] for interval in options.intervals}
            for _ in range(options.rounds):
                for interval, costs in rounds.items():
                    costs.append(
                        asyncio.run(round_of(engine, server, requests, options.tokens, interval))
                    )
            for interval, costs in rounds.items():
                middle = [
                    statistics.median(column)
                    for column in zip(*(asdict(c).values() for c in costs), strict=True)
                ]
                row = {"engine": engine, "requests": requests, "interval": interval}
                table.add(row | asdict(Cost(*middle)))


def main() -> int:
    """Print one line per engine, number of requests and interval."""
    parser = options_of(__doc__)
    parser.add_argument("--engine", nargs="+", choices=ENGINES, default=ENGINES)
    parser.add_argument("--requests", nargs="+", type=int, default=(64, 256))
    parser.add_argument("--intervals", nargs="+", type=int, default=(0, 1, 8, 32))
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    table = Table()
    for engine in options.engine:
        with tempfile.TemporaryDirectory() as folder:
            measure(engine, options, Path(folder), table)
    write_json(options.json, table.rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
