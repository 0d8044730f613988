"""What a step's data costs rank 0: python scripts/bench_loading.py [--ranks 64] [--sequences 4096]
[--runs 5]. Prints a table.

Both modes of grpo.single_rank_load on the same random groups: the plan, the tensors of all ranks or
none, and the pickles that one scatter sends; torch makes all of them as long as the longest. Then
what one rank has left to do.
"""

import pickle
import random
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the checkout, for scripts

from scripts.common import Table, options_of, write_json
from titan_grpo.algorithm.balance import TokenCost
from titan_grpo.algorithm.batch import BatchOptions, plan
from titan_grpo.algorithm.rows import build
from titan_grpo.samples import Completion, Group, Prompt

GROUP, LONGEST, MEDIAN_LOG, SPREAD = 8, 8192, 7.0, 0.9
QWEN3_8B = TokenCost(6 * 7.57e9, 36 * 32 * 128 * 2 * 6 / 2)
"""FLOPs of a token, and of each pair of tokens in attention, forward and backward."""


def completion(source: random.Random) -> Completion:
    length = min(LONGEST - 256, max(16, int(source.lognormvariate(MEDIAN_LOG, SPREAD))))
    # Objects of their own, as an engine's answer has them.
    ids = tuple(source.randrange(1000, 150_000) for _ in range(length))
    logprobs = tuple(-source.random() for _ in range(length))
    return Completion(ids, logprobs, "stop", 3, 3, "", source.random())


def step_groups(sequences: int) -> list[Group]:
    source = random.Random(0)
    return [
        Group(
            Prompt(
                index,
                tuple(source.randrange(1000, 150_000) for _ in range(source.randint(50, 250))),
            ),
            tuple(completion(source) for _ in range(GROUP)),
        )
        for index in range(sequences // GROUP)
    ]


def pickled(shares: list[Any]) -> list[int]:
    return [len(pickle.dumps(share)) for share in shares]


def timed(runs: int, work: Callable[[], Any]) -> float:
    """Median seconds on a core."""
    seconds = []
    for _ in range(runs):
        begin = time.thread_time()
        work()
        seconds.append(time.thread_time() - begin)
    return statistics.median(seconds)


def main() -> None:
    parser = options_of(__doc__)
    parser.add_argument("--ranks", type=int, default=64)
    parser.add_argument("--sequences", type=int, default=4096)
    parser.add_argument("--runs", type=int, default=5)
    options = parser.parse_args()
    groups = step_groups(options.sequences)
    tokens = sum(len(g.prompt.token_ids) + len(c.token_ids) for g in groups for c in g.completions)
    print(f"{options.sequences} sequences, {tokens:,} tokens, {options.ranks} ranks")
    table = Table()
    for pack in (False, True):
        settings = BatchOptions(token_budget=32768, max_len=LONGEST, cost=QWEN3_8B, pack=pack)
        planned = timed(options.runs, partial(plan, groups, options.ranks, settings))
        batch = plan(groups, options.ranks, settings)
        own = timed(options.runs, partial(build, batch.rows[0]))
        for single in (True, False):
            shares = batch.micro_batches() if single else batch.rows
            built = timed(options.runs, batch.micro_batches) if single else own
            sent = timed(options.runs, partial(pickled, shares))
            megabytes = max(pickled(shares)) * (options.ranks - 1) / 1e6
            row: dict[str, object] = {"packed": pack, "all by rank 0": single}
            row |= {"planned s": planned, "built s": built, "pickled s": sent}
            row |= {"rank 0 in all s": planned + built + sent, "MB sent": megabytes}
            table.add(row | {"one rank builds s": 0.0 if single else own})
    write_json(options.json, table.rows)


if __name__ == "__main__":
    main()
