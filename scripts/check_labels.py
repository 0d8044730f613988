#!/usr/bin/env python
"""Whether every token is of the weights that it is said to be of: a real server, real commits under
load, and every completion recomputed.

    python scripts/check_labels.py --engine vllm|sglang [--staleness 2] [--completions 200]
        [--kv keep|recompute] [--json PATH]

A real sync sends a sequence of weights, each other than the one before, to a real server, while the
rollout process keeps more requests there than it runs at a time, so that some wait over commits.
Each version's weights are also kept as a directory. Transformers then recompute each completion's
log-probabilities from the versions that it is said to be of, on the KV that these allow
(tests/rigs/labels.py). Exit code 1 if a completion does not fit, if one is of older weights
than the bound on staleness allows, or if too few ran over a commit for this to mean anything.
"""

import argparse
import os
import sys
import tempfile
import time
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors.torch import load_file

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the checkout, for tests and scripts

from scripts.common import ENGINES, options_of, serving, write_json
from tests.rigs.labels import PREFIX_CACHES, Checker, Claim, Models
from tests.rigs.tasks import LONG
from tests.rigs.trainer import Trainer, manifest_of
from titan_grpo.config import WeightSync
from titan_grpo.engines.generation import Sampled, Sampling
from titan_grpo.engines.http import SyncDriver
from titan_grpo.engines.server import dialect
from titan_grpo.rollout.client import RolloutClient
from titan_grpo.rollout.messages import RolloutSpec
from titan_grpo.samples import Completion, Group
from titan_grpo.sync.lanes import SyncOptions
from titan_grpo.titan.tiny import write_tiny_model

WAIT_S = 300.0
PROMPTS, GROUP, TOKENS = 4, 8, 48
"""Groups of a step, completions of a group, most tokens of a completion."""
RUNNING = 8
"""Requests that the server runs at a time; the others wait in its queue."""
NAMES_VERSIONS = {"vllm": False, "sglang": True}
LEAST_SHARE = 0.05
"""Share of the completions that must have met a commit."""
UNSALTED = 4
"""Commits at the end, each followed by a request without a salt."""
UNSALTED_PROMPT = [40 + number % 50 for number in range(150)]
UNSALTED_LIMIT = 0.05
Asked = tuple[int, Sampled]
"""A version that the server held, and what a request without a salt got."""


@dataclass
class Result:
    """What is printed and written."""

    engine: str
    staleness: int
    tolerance: float
    completions: int = 0
    fit: int = 0
    versions: int = 0
    over_a_commit: int = 0
    """Completions whose bounds are more than one version."""
    older_kv: int = 0
    """Completions that fit only on a prefix of older KV than their first token's version."""
    unsalted: int = 0
    """Requests without a salt, each asked when a commit was in."""
    unsalted_difference: float = 0.0
    """Largest difference of their log-probabilities to those of the new weights alone, in nats."""
    largest_kv_age: int = 0
    """Trainer's version at use minus the oldest version behind a completion, as recomputed."""
    prefixes: dict[int, int] = field(default_factory=dict)
    """Of the completions on older KV: tokens of that prefix -> how many."""
    counters: dict[str, int] = field(default_factory=dict)
    wrong: list[dict[str, Any]] = field(default_factory=list)


def parse() -> argparse.Namespace:
    parser = options_of(__doc__)
    add = parser.add_argument
    add("--engine", choices=ENGINES, required=True)
    add("--staleness", type=int, default=2, help="rollout.max_staleness")
    add("--completions", type=int, default=200, help="how many to check at least")
    add("--kv", choices=("keep", "recompute"), default="keep", help="kv_after_update")
    add("--tolerance", type=float, default=0.02, help="of each log-probability, in nats")
    add("--out", default="", metavar="DIR", help="keep weights, log and completions there")
    return parser.parse_args()


class Run:
    """Sends the weights of ``folder(version)``, each other than the one before."""

    def __init__(self, out: Path, url: str, client: RolloutClient, kv: Any) -> None:
        self._out, self._client = out, client
        tensors = load_file(self.folder(0) / "model.safetensors")
        config = WeightSync(bind_host="127.0.0.1", kv_after_update=kv)
        manifest = manifest_of(tensors, config.block_bytes)
        sync = SyncOptions(urls=[url], observer=client)
        self.trainer = Trainer(manifest, config, out / "run", sync)

    def folder(self, version: int) -> Path:
        """The directory of a version's weights, made when it is first asked for."""
        path = self._out / f"v{version}"
        if not path.exists():
            write_tiny_model("qwen3", path, 100 + version, std=0.05)
        return path

    def publish(self, version: int) -> None:
        """Send ``version``; does not wait for the server."""
        shards = load_file(self.folder(version) / "model.safetensors")
        servers = self.trainer.servers
        if not self.trainer.publish(version, {n: t.float() for n, t in shards.items()}, WAIT_S):
            raise SystemExit(f"no slot was free for version {version}: {servers.text()}")
        self._client.set_trainer_version(version)
        if (error := servers.take_error()) is not None:
            raise SystemExit(f"weight sync: {error}")


def ask_unsalted(run: Run, version: int, url: str, engine: str) -> list[Asked]:
    """Commit some versions from ``version`` on, and ask the same prompt without a salt after each
    of them."""
    asked: list[Asked] = []
    with SyncDriver(url) as driver:
        for number in range(version, version + UNSALTED):
            run.publish(number)
            if not run.trainer.servers.wait_held(number, WAIT_S, everyone=True):
                raise SystemExit(f"version {number} was not committed")
            call = dialect(engine).generate(UNSALTED_PROMPT, Sampling(8), WAIT_S)
            asked.append((number, driver.run(call)))
    return asked


def collect(
    args: argparse.Namespace, out: Path, result: Result
) -> tuple[list[tuple[int, Group]], list[Asked]]:
    """(trainer's version at use, group) of at least ``--completions`` completions, and the requests
    without a salt."""
    model = write_tiny_model("qwen3", out / "start", 7, std=0.05, dtype="float32")
    settings = {"max_model_len": 512, "dtype": "float32", "max_num_seqs": RUNNING}
    spec = RolloutSpec(
        model_dir=str(model),
        task=LONG,
        prompts_per_step=PROMPTS,
        group_size=GROUP,
        max_completion_tokens=TOKENS,
        max_staleness=args.staleness,
        max_concurrent_requests=PROMPTS * GROUP * (1 + args.staleness),
        kv_recomputed=args.kv == "recompute",
    )
    taken: list[tuple[int, Group]] = []
    with serving(args.engine, model, out / "server.log", WAIT_S, **settings) as running:
        client = RolloutClient(spec)
        try:
            client.start(WAIT_S)
            run = Run(out, running.url, client, args.kv)
            with run.trainer:
                run.trainer.start()
                run.publish(0)
                version = 0
                while sum(len(group.completions) for _, group in taken) < args.completions:
                    groups = client.next_batch(version, PROMPTS, WAIT_S)
                    taken += [(version, group) for group in groups]
                    version += 1
                    run.publish(version)
                asked = ask_unsalted(run, version + 1, running.url, args.engine)
                result.versions = version + 1 + UNSALTED
                result.counters = client.counters()
        finally:
            client.close()
    return taken, asked


def claim_of(completion: Completion, engine: str) -> Claim:
    spans = completion.token_spans if NAMES_VERSIONS[engine] else None
    return Claim(completion.version_first, completion.version_last, spans)


def check(taken: list[tuple[int, Group]], asked: list[Asked], out: Path, result: Result) -> None:
    """Recompute every completion; fills ``result``."""
    folders = {version: out / f"v{version}" for version in range(result.versions)}
    models = Models(folders)
    for version, sampled in asked:
        rows, _ = models.feed(version, [*UNSALTED_PROMPT, *sampled.token_ids], None)
        rows = rows[len(UNSALTED_PROMPT) - 1 :]
        off = [
            abs(float(row[token]) - logprob)
            for row, token, logprob in zip(rows, sampled.token_ids, sampled.logprobs, strict=False)
        ]
        result.unsalted += 1
        result.unsalted_difference = max(result.unsalted_difference, *off)
    checker = Checker(models, PREFIX_CACHES[result.engine], result.tolerance)
    for version, group in taken:
        for completion in group.completions:
            claim = claim_of(completion, result.engine)
            found = checker.explain(
                group.prompt.token_ids, completion.token_ids, completion.logprobs, claim
            )
            result.completions += 1
            result.over_a_commit += claim.first < claim.last
            if found is None:
                wrong = {"claim": asdict(claim), "tokens": len(completion.token_ids)}
                result.wrong.append(wrong | {"prompt": group.prompt.index})
                continue
            result.fit += 1
            if found.prefix:
                result.older_kv += 1
                result.prefixes[found.prefix] = result.prefixes.get(found.prefix, 0) + 1
            age = version - min(found.oldest_kv, *(made_by for made_by, _ in found.spans))
            result.largest_kv_age = max(result.largest_kv_age, age)


def main() -> int:
    args = parse()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    torch.set_num_threads(1)
    result = Result(args.engine, args.staleness, args.tolerance)
    begin = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="check_labels") as folder:
        out = Path(args.out or folder)
        out.mkdir(parents=True, exist_ok=True)
        taken, asked = collect(args, out, result)
        (out / "taken.json").write_bytes(msgspec.json.encode(taken))
        made_s = time.monotonic() - begin
        check(taken, asked, out, result)
    bounds = Counter(
        str((c.version_first, c.version_last)) for _, g in taken for c in g.completions
    )
    figures = asdict(result) | {"bounds": dict(bounds), "seconds": time.monotonic() - begin}
    write_json(args.json, figures)
    print(
        f"{result.engine}: {result.completions} completions of {result.versions} versions in"
        f" {made_s:.0f} s, {result.over_a_commit} over a commit; {result.fit} fit the versions that"
        f" they are said to be of within {result.tolerance} nats; {result.older_kv} on a prefix of"
        f" older KV; oldest version behind one {result.largest_kv_age} before the trainer's at use"
        f" (bound {result.staleness}); {result.unsalted} requests without a salt after a commit"
        f" differ from the new weights by {result.unsalted_difference:.4f} nats at most (limit"
        f" {UNSALTED_LIMIT})"
    )
    for wrong in result.wrong[:10]:
        print(f"  does not fit: {wrong}")
    if result.over_a_commit < LEAST_SHARE * result.completions:
        print("too few completions ran over a commit: this run shows nothing")
        return 1
    true = result.fit == result.completions and result.largest_kv_age <= result.staleness
    return int(not true or result.unsalted_difference > UNSALTED_LIMIT)


if __name__ == "__main__":
    sys.exit(main())
