#!/usr/bin/env python
"""What do staleness, commits in flight, tails of lengths and the off-policy correction cost and
gain in learning?

    python scripts/bench_learning.py [--seeds 5] [--steps 30] [--staleness 0 1 4 8] [--jobs 1]
    [--picture PATH.png] [--json PATH]

Real: the rollouts' client, places, order of starts, sampler and versions per token, and the batch,
the loss and its gradient. Set: time, which is simulated (scripts/timed_rollouts.py), so that a run
is repeatable and no other load changes its staleness. Small: the policy, a table of logits for each
kind of prompt and last token, which the server samples from as it stands at the version that it
holds. The task: each of ten kinds of prompts has a rule, the one right next token after each token;
the reward is the share of a completion's tokens that follow it. With ``tail`` one kind has
completions six times as long. A batch is four optimizer steps, so that stale policies are far ones.

The value shown is exact: the expected reward of the policy, computed from the table, over all kinds
and over the one with the tail. A line of the table is the mean over the seeds, least and largest in
brackets. "Equal time" is the value at the second at which the fastest setting that trains all
prompts alike ended. "Per step" is the mean over all steps: what the same number of steps is worth.
"""

import logging
import statistics
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from functools import lru_cache
from multiprocessing import get_context
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the checkout, for tests and scripts

from scripts.common import options_of, write_json
from scripts.timed_rollouts import (
    PROMPT_TOKENS,
    Pace,
    TimedServer,
    Work,
    in_simulated_time,
    play,
)
from titan_grpo.algorithm.batch import BatchOptions, plan
from titan_grpo.algorithm.distribution import token_logprobs
from titan_grpo.algorithm.loss import grpo_loss
from titan_grpo.config import GRPO
from titan_grpo.rollout.codec import TextCodec
from titan_grpo.rollout.messages import RolloutSpec
from titan_grpo.rollout.task_runner import Codec
from titan_grpo.samples import Group, Prompt
from titan_grpo.titan.tiny import write_tiny_model

KINDS, WORDS = 10, 8
PER_STEP, GROUP = 10, 4
TOKENS, TAIL = 8, 6
TOKEN_S, TRAIN_S, PUBLISH_S = 0.1, 0.2, 0.1
"""Simulated seconds of a token (the server makes every request at once as fast), of a training
step, and from there to the server. A short completion takes 4 training steps, a long one 24."""

MINIBATCHES, RATE = 4, 0.2
CHUNK = 4096

Array = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Setting:
    """One line of the table."""

    tail: bool
    staleness: int
    drained: bool = False
    corrected: bool = True
    consume: Literal["started", "ready"] = "started"

    @property
    def name(self) -> str:
        words = [f"staleness {self.staleness}", "drained" if self.drained else "in flight"]
        words += [] if self.corrected else ["uncorrected"]
        return ", ".join(words if self.consume == "started" else [*words, self.consume])


@dataclass(frozen=True)
class Run:
    """``seconds[k]``, ``value[k]``, ``tail_value[k]``: when version k existed, and what it was
    worth, to all kinds and to the last. ``staleness``: mean over trained tokens. ``tail_share``: of
    the trained groups. ``mixed``: share of the completions with tokens of several versions."""

    setting: Setting
    seed: int
    seconds: list[float]
    value: list[float]
    tail_value: list[float]
    staleness: float
    tail_share: float
    mixed: float


def right_words(seed: int) -> npt.NDArray[np.int64]:
    """[kinds, words]: the right word after each. A cycle through all words, so that a policy that
    is right stays on no word."""
    chance, found = np.random.default_rng((seed, 1)), np.zeros((KINDS, WORDS), np.int64)
    for kind in range(KINDS):
        order = chance.permutation(WORDS)
        found[kind, order] = np.roll(order, -1)
    return found


class Rules:
    """The task."""

    def __init__(self, seed: int, tail: bool) -> None:
        self._right = right_words(seed).tolist()
        self._tail = tail

    def prompt(self, index: int, codec: Codec) -> Prompt:
        """(kind, index, first word)."""
        kind = index % KINDS
        return Prompt(index, (kind, index, index // KINDS % WORDS), {"kind": kind})

    def expected_tokens(self, prompt: Prompt) -> float:
        return tokens_of(prompt.payload["kind"], self._tail)

    async def reward(self, prompt: Prompt, text: str, token_ids: Sequence[int]) -> float:
        """The share of right words."""
        right = self._right[prompt.payload["kind"]]
        before = (prompt.token_ids[-1], *token_ids)
        same = [bool(right[was] == word) for was, word in zip(before, token_ids, strict=False)]
        return sum(same) / len(token_ids)


def tokens_of(kind: int, tail: bool) -> int:
    return TOKENS * TAIL if tail and kind == KINDS - 1 else TOKENS


class Learner:
    """The policy and its versions: ``sample`` is the server's, ``train`` the trainer's."""

    def __init__(self, setting: Setting, seed: int) -> None:
        self._setting, self._right = setting, right_words(seed)
        chance = torch.Generator().manual_seed(seed)
        self._table = torch.randn(KINDS, WORDS, WORDS, generator=chance).requires_grad_()
        self._optimizer = torch.optim.Adam([self._table], lr=RATE)
        self._grpo = GRPO(
            num_microbatches=MINIBATCHES,
            loss_normalization="sequence",
            rollout_is_threshold=2.0 if setting.corrected else 0.0,
            allow_uncorrected_off_policy=not setting.corrected,
        )
        self._options = BatchOptions(
            token_budget=1 << 14,
            max_len=TOKENS * TAIL + PROMPT_TOKENS,
            grpo=GRPO(loss_normalization="sequence", num_microbatches=MINIBATCHES),
        )
        self._versions = list[tuple[Array, Array]]()
        self.values, self.tail_values = list[float](), list[float]()
        self.staleness, self.mixed = list[float](), list[bool]()
        self._made()

    def _made(self) -> None:
        logprobs = self._table.detach().double().log_softmax(-1).numpy()
        self._versions.append((logprobs, np.exp(logprobs).cumsum(-1)))
        values = self._exact(np.exp(logprobs))
        self.values.append(float(values.mean()))
        self.tail_values.append(float(values[-1]))

    def _exact(self, chances: Array) -> Array:
        """[kinds]: the expected reward, of first words that are all as likely."""
        at, hit = np.full((KINDS, 1, WORDS), 1 / WORDS), np.zeros((KINDS, TOKENS * TAIL))
        right = np.take_along_axis(chances, self._right[..., None], -1)
        for place in range(TOKENS * TAIL):
            hit[:, place] = (at @ right)[:, 0, 0]
            at = at @ chances
        lengths = [tokens_of(kind, self._setting.tail) for kind in range(KINDS)]
        return np.array([hit[kind, :n].mean() for kind, n in enumerate(lengths)])

    def sample(
        self, sequence: list[int], count: int, version: int, seed: int
    ) -> tuple[list[int], list[float]]:
        logprobs, sums = self._versions[version]
        kind, word, ids, found = sequence[0], sequence[-1], list[int](), list[float]()
        for draw in np.random.default_rng(seed).random(count):
            after = min(int(sums[kind, word].searchsorted(draw, "right")), WORDS - 1)
            ids.append(after)
            found.append(float(logprobs[kind, word, after]))
            word = after
        return ids, found

    def train(self, version: int, groups: list[Group]) -> None:
        """One training step: a batch's optimizer steps."""
        batch = plan(groups, 1, self._options)
        for completion in (c for group in groups for c in group.completions):
            self.staleness += [
                version - v for v, tokens in completion.token_spans for _ in range(tokens)
            ]
            self.mixed.append(len(completion.token_spans) > 1)
        (micro_batches,) = batch.micro_batches()
        before = self._table.detach().clone()
        at = 0
        for number, count in enumerate(batch.steps):
            self._optimizer.zero_grad()
            for each in micro_batches[at : at + count]:
                each["on_policy"] = (each["oldest"] == version) & (number == 0)
                each["staleness"] = version - each["versions"]
                old = self._logprobs(before, each) if number else None
                loss, _ = grpo_loss(self._logprobs(self._table, each), each, self._grpo, None, old)
                loss.backward()
            self._optimizer.step()
            at += count
        self._made()

    def _logprobs(self, table: torch.Tensor, each: dict[str, torch.Tensor]) -> torch.Tensor:
        inputs = each["inputs"]
        logits = table[inputs[:, :1].expand_as(inputs), inputs.clamp(max=WORDS - 1)]
        return token_logprobs(logits, each["labels"], 1.0, CHUNK)


@lru_cache(1)
def codec(model_dir: str) -> Codec:
    """Read once in each process."""
    return TextCodec(model_dir)


def run(setting: Setting, seed: int, steps: int, model_dir: str) -> Run:
    """One run to its end."""
    torch.set_num_threads(1)
    logging.getLogger("titan_grpo").setLevel(logging.ERROR)  # Groups made again are counted.
    learner = Learner(setting, seed)
    spec = RolloutSpec(
        model_dir=model_dir,
        seed=seed,
        prompts_per_step=PER_STEP,
        group_size=GROUP,
        max_completion_tokens=TOKENS * TAIL + 1,
        max_staleness=setting.staleness,
        in_flight_weight_updates=not setting.drained,
        max_concurrent_requests=PER_STEP * GROUP * 10,
        consume=setting.consume,
    )
    pace = Pace(steps, TRAIN_S, PUBLISH_S, setting.drained)

    def work(sequence: Sequence[int]) -> Work:
        return Work(tokens_of(sequence[0], setting.tail), TOKEN_S)

    async def whole() -> Run:
        server = TimedServer(spec.max_concurrent_requests, TOKENS // 2, work, learner.sample)
        task = Rules(seed, setting.tail)
        played = await play(spec, task, codec(model_dir), [server], pace, learner.train)
        groups = sum(played.trained.values())
        tail = sum(n for index, n in played.trained.items() if index % KINDS == KINDS - 1)
        return Run(
            setting,
            seed,
            played.version_s,
            learner.values,
            learner.tail_values,
            statistics.mean(learner.staleness),
            tail / groups,
            statistics.mean(learner.mixed),
        )

    return in_simulated_time(whole())


def settings_of(bounds: Sequence[int]) -> list[Setting]:
    found = []
    for tail in (False, True):
        found += [Setting(tail, bound) for bound in bounds]
        stale = [bound for bound in bounds if bound]
        found += [Setting(tail, bound, drained=True) for bound in stale]
        found += [Setting(tail, bound, corrected=False) for bound in stale]
        found += [Setting(tail, bound, consume="ready") for bound in stale if tail]
    return found


@dataclass(frozen=True)
class Line:
    """The figures of a setting, over its seeds."""

    setting: Setting
    seconds: float
    staleness: float
    mixed: float
    tail_share: float
    early: list[float]
    per_step: list[float]
    end: list[float]
    tail_end: list[float]


def line(runs: Sequence[Run], early_s: float) -> Line:
    """From the runs of one setting."""

    def at(one: Run, second: float) -> float:
        return one.value[sum(s <= second for s in one.seconds) - 1]

    def mean(name: str) -> float:
        return float(statistics.mean(getattr(one, name) for one in runs))

    return Line(
        runs[0].setting,
        statistics.mean(one.seconds[-1] for one in runs),
        mean("staleness"),
        mean("mixed"),
        mean("tail_share"),
        [at(one, early_s) for one in runs],
        [statistics.mean(one.value) for one in runs],
        [one.value[-1] for one in runs],
        [one.tail_value[-1] for one in runs],
    )


def report(found: Sequence[Run]) -> list[Line]:
    """Print the table and what it says; returns its lines."""
    lines = []
    for tail in (False, True):
        of_tail = [one for one in found if one.setting.tail is tail]
        early_s = min(one.seconds[-1] for one in of_tail if one.setting.consume == "started")
        print(f"\n{'one kind six times as long' if tail else 'all lengths equal'}")
        columns: tuple[str, ...] = ("seconds", "stale", "mixed", "tail")
        columns += ("equal time", "per step", "end", "tail's end")
        widths = (9, 7, 7, 7, 19, 19, 19, 19)
        print(f"{'':34}" + "".join(f"{n:>{w}}" for n, w in zip(columns, widths, strict=True)))
        mine = []
        for setting in dict.fromkeys(one.setting for one in of_tail):
            one = line([r for r in of_tail if r.setting == setting], early_s)
            mine.append(one)
            figures = f"{one.seconds:9.1f}{one.staleness:7.2f}{one.mixed:7.0%}{one.tail_share:7.1%}"
            bands = (one.early, one.per_step, one.end, one.tail_end)
            print(f"{setting.name:34}{figures}{''.join(map(band, bands))}")
        first = mine[0]
        for one in mine[1:]:
            time = first.seconds / one.seconds
            early, per_step = (
                statistics.mean(getattr(one, name)) - statistics.mean(getattr(first, name))
                for name in ("early", "per_step")
            )
            print(
                f"  {one.setting.name}: {time:.2f} times the steps per second of on-policy; "
                f"{early:+.3f} after equal time, {per_step:+.3f} per step"
            )
        lines += mine
    return lines


def band(values: Sequence[float]) -> str:
    """Mean, least and largest."""
    return f"{statistics.mean(values):7.3f} ({min(values):.2f}-{max(values):.2f})".rjust(19)


def draw(found: Sequence[Run], path: Path) -> None:
    """Bands (least to largest of the seeds) around the means, over time and over steps."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(15, 11), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(3, 2, sharey=True)
    most = max(one.setting.staleness for one in found)
    for column, tail in enumerate((False, True)):
        settings = [s for s in dict.fromkeys(r.setting for r in found) if s.tail is tail]
        in_flight = [s for s in settings if s == Setting(tail, s.staleness)]
        far = [s for s in settings if s.staleness == most]
        lengths = "one kind six times as long" if tail else "all lengths equal"
        rows = (
            ("in flight, corrected", in_flight, "seconds"),
            ("in flight, corrected", in_flight, "step"),
            (f"on-policy, and staleness {most}", [in_flight[0], *far], "step"),
        )
        for row, (title, shown, over) in enumerate(rows):
            ax = axes[row, column]
            for setting in shown:
                runs = [one for one in found if one.setting == setting]
                values = np.array([one.value for one in runs])
                steps = np.arange(values.shape[1])
                x = np.mean([one.seconds for one in runs], 0) if over == "seconds" else steps
                (drawn,) = ax.plot(x, values.mean(0), label=setting.name)
                ax.fill_between(
                    x, values.min(0), values.max(0), alpha=0.15, color=drawn.get_color()
                )
            ax.set(title=f"{title}; {lengths}", xlabel=over, ylabel="expected reward")
            ax.grid(visible=True, alpha=0.3)
            ax.legend(fontsize=8)
    figure.savefig(path, dpi=90)


def main() -> int:
    """Run all settings; 0 unless a run fails."""
    parser = options_of(__doc__)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--staleness", type=int, nargs="+", default=[0, 1, 4, 8])
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--picture", type=Path)
    options = parser.parse_args()
    bounds = sorted({0, *options.staleness})
    pairs = [(s, seed) for seed in range(options.seeds) for s in settings_of(bounds)]
    with (
        tempfile.TemporaryDirectory() as model_dir,
        ProcessPoolExecutor(options.jobs, get_context("spawn")) as pool,
    ):
        write_tiny_model("qwen3", Path(model_dir), seed=1)
        runs = [pool.submit(run, s, seed, options.steps, model_dir) for s, seed in pairs]
        # no deadline: simulated runs end, or fail where nothing is left to do
        found = [each.result() for each in runs]
    lines = report(found)
    if options.picture:
        draw(found, options.picture)
    records = {"runs": [asdict(r) for r in found], "lines": [asdict(each) for each in lines]}
    write_json(options.json, records)
    return 0


if __name__ == "__main__":
    sys.exit(main())
