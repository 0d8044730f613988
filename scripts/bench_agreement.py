#!/usr/bin/env python
"""Do servers compute what the trainer's weights say? Every engine, architecture and number of
tensor-parallel workers.

    python scripts/bench_agreement.py [--engine vllm sglang] [--kind qwen3 ...] [--tp 1 2]
        [--device cuda] [--started] [--args=--quantization=fp8] [--json PATH]

Each row starts a real server with other weights, syncs three versions in the background (staged)
over one lane, of which it may load the last two as copies, and compares its log-probabilities with
transformers in fp32 on the same bfloat16 weights. With ``--started`` it then compares them with
those of a server that starts with the last version's weights, which judges quantised ones too.
Exit code 1 if one differs by more than 0.05.
"""

import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, get_args

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the checkout, for tests and scripts

from scripts.common import DEVICES, ENGINES, Table, on_device, options_of, serving, write_json
from tests.conformance.commits import CANDIDATES, difference, sender
from tests.conformance.crowd import REQUEST_S, prompt
from tests.conformance.engine import MAX_DIFFERENCE, EngineUnderTest, furthest, remake
from tests.conformance.reference import Reference
from titan_grpo.errors import PeerError
from titan_grpo.titan.tiny import Kind


@dataclass(frozen=True)
class Row:
    """One server. Differences in nats: to the first version before it came, then to each version
    after it was committed; ``started``: to a server that started with the last, -1 if not
    measured."""

    engine: str
    kind: str
    tp: int
    before: float
    after: tuple[float, ...]
    started: float = -1.0
    failure: str = ""

    @property
    def ok(self) -> bool:
        """Other weights showed, and the synced ones agree."""
        apart = max(self.after, default=0.0) if self.started < 0 else self.started
        shown = self.before > 4 * MAX_DIFFERENCE
        return not self.failure and shown and apart <= MAX_DIFFERENCE


def measure(
    engine: str, kind: Kind, folder: Path, settings: Mapping[str, Any], started: bool = False
) -> Row:
    """Start, sync three times, compare. ``settings``: of the ServerSpec."""
    model = remake(100, folder / "start", kind)
    with serving(engine, model, folder / "server.log", **settings) as server:
        e = EngineUnderTest(server, folder, remake=partial(remake, kind=kind))
        with sender(e) as trainer:
            before = difference(e, trainer.make(1)[1])
            after = list[float]()
            for path in trainer.sync_each((1, 2, 3)):
                after.append(difference(e, path))
            ours = scores(e, path)
        tp = settings.get("tensor_parallel", 1)
        row = Row(engine, kind, tp, before, tuple(after))
    if not started:
        return row
    with serving(engine, path, folder / "started.log", **settings) as server:
        theirs = scores(EngineUnderTest(server, folder), path)
    return replace(row, started=max(map(furthest, ours, theirs)))


def scores(e: EngineUnderTest, folder: Path) -> list[tuple[float, ...]]:
    """Log-probabilities of three sequences' tokens."""
    rows = Reference(folder).clearest([prompt(seed, 16) for seed in range(CANDIDATES)], 3)
    return [e.run(e.speak.score(ids, REQUEST_S, f"{folder}{n}")) for n, ids in enumerate(rows)]


def main() -> int:
    """Print the table; 1 if a row is not right."""
    parser = options_of(__doc__)
    parser.add_argument("--engine", nargs="+", choices=ENGINES, default=ENGINES)
    parser.add_argument("--kind", nargs="+", choices=get_args(Kind), default=get_args(Kind))
    parser.add_argument("--tp", nargs="+", type=int, default=(1, 2))
    parser.add_argument("--device", choices=DEVICES, default="cpu", help="cuda: on the first GPU")
    started = "compare with a server that starts with the last version, too"
    parser.add_argument("--started", action="store_true", help=started)
    parser.add_argument("--args", nargs="+", default=(), help="further options of each server")
    options = parser.parse_args()
    rows: list[Row] = []
    table = Table(text=14)
    for engine, kind, tp in product(options.engine, options.kind, options.tp):
        settings = on_device(engine, options.device) | {"tensor_parallel": tp}
        settings["args"] = (*settings.get("args", ()), *options.args)
        start = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            try:
                row = measure(engine, kind, Path(folder), settings, options.started)
            except (PeerError, AssertionError) as error:
                said = (str(error).splitlines() or ["failed"])[0]
                row = Row(engine, kind, tp, 0.0, (), failure=said)
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
