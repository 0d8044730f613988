#!/usr/bin/env python
"""Do servers compute what the trainer's weights say? Every engine, architecture and number of
tensor-parallel workers.

    python scripts/bench_agreement.py [--engine vllm sglang] [--kind qwen3 ...] [--tp 1 2] [--json
    PATH]

Each row starts a real server with other weights, syncs two versions in the background (staged) and
compares the server's log-probabilities with transformers in fp32 on the same bfloat16 weights. Exit
code 1 if one differs by more than 0.05.
"""

import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import get_args

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the checkout, for tests and scripts

from scripts.common import DEVICES, ENGINES, Table, on_device, options_of, serving, write_json
from tests.conformance.commits import difference, sender
from tests.conformance.engine import MAX_DIFFERENCE, EngineUnderTest, remake
from titan_grpo.errors import PeerError
from titan_grpo.titan.tiny import Kind


@dataclass(frozen=True)
class Row:
    """One server. Differences in nats: to the first version before it came, then to each version
    after it was committed."""

    engine: str
    kind: str
    tp: int
    before: float
    after: tuple[float, ...]
    failure: str = ""

    @property
    def ok(self) -> bool:
        """Other weights showed, and the synced ones agree."""
        return (
            not self.failure
            and self.before > 4 * MAX_DIFFERENCE
            and max(self.after) <= MAX_DIFFERENCE
        )


def measure(engine: str, kind: Kind, tp: int, folder: Path, device: str = "cpu") -> Row:
    """Start, sync twice, compare."""
    model = remake(100, folder / "start", kind)
    settings = {"tensor_parallel": tp} | on_device(engine, device)
    with serving(engine, model, folder / "server.log", **settings) as server:
        e = EngineUnderTest(server, folder, remake=partial(remake, kind=kind))
        with sender(e) as trainer:
            before = difference(e, trainer.make(1)[1])
            after = tuple(difference(e, trainer.sync(version, version)) for version in (1, 2))
    return Row(engine, kind, tp, before, after)


def main() -> int:
    """Print the table; 1 if a row is not right."""
    parser = options_of(__doc__)
    parser.add_argument("--engine", nargs="+", choices=ENGINES, default=ENGINES)
    parser.add_argument("--kind", nargs="+", choices=get_args(Kind), default=get_args(Kind))
    parser.add_argument("--tp", nargs="+", type=int, default=(1, 2))
    parser.add_argument("--device", choices=DEVICES, default="cpu", help="cuda: on the first GPU")
    options = parser.parse_args()
    rows: list[Row] = []
    table = Table(text=14)
    for engine, kind, tp in product(options.engine, options.kind, options.tp):
        start = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            try:
                row = measure(engine, kind, tp, Path(folder), options.device)
            except (PeerError, AssertionError) as error:
                row = Row(engine, kind, tp, 0.0, (), (str(error).splitlines() or ["failed"])[0])
        rows.append(row)
        table.add({**asdict(row), "seconds": time.monotonic() - start, "ok": row.ok})
    write_json(options.json, table.rows)
    wrong = [row for row in rows if not row.ok]
    worst = max((max(row.after) for row in rows if row.after), default=0.0)
    print(
        f"{len(rows) - len(wrong)} of {len(rows)} agree; largest difference {worst:.4f} nat"
        f" (allowed {MAX_DIFFERENCE})"
    )
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
