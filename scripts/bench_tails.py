#!/usr/bin/env python
"""What does training see of slow prompts, and what does waiting for them cost?

    python scripts/bench_tails.py [--slow 3 6] [--share 0.1] [--staleness 1 2 4] [--steps 40]
    [--capacity 8] [--servers 2 4 8] [--apart 0.002 0.01] [--slower 4 10] [--no-process]
    [--json PATH]

The real rollout process over real HTTP, a server whose generation takes a set time (no engine), and
a trainer whose step takes a set time. A share of the prompts, evenly spread, takes ``--slow`` times
as long as the others. Four ways to choose what a step is made of: "started" with the task's guess
at lengths, "started" without any, "ready" (any finished groups), and "by token", which is "ready"
with a bound that lets completions end of whose tokens less than half are too stale.

Printed for each: the share of slow prompts among the trained groups, prompts given up, tokens
thrown away, and the seconds; beside them those of the same run in simulated time ("order"), which
has the same client, dispatcher and sampler in one event loop whose clock jumps, so that neither
HTTP nor this machine's load take time: what the order of starts alone costs. Both as multiples
of the least that any order can take that trains prompts in their order: the greatest of

* generation: all groups' durations over the server's capacity, and the last training step;
* training, and a group's duration over 1 + max_staleness steps: V(k+1) = max(V(k), V(k - staleness)
  + longest group of step k) + training, where V(k) is when version k exists.
"""

import asyncio
import json
import sys
import tempfile
import threading
import time
from argparse import Namespace
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from typing import Literal

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the checkout, for tests and scripts

from scripts.common import Table, options_of, write_json
from scripts.timed_rollouts import (
    Pace,
    Played,
    TimedServer,
    Work,
    in_simulated_time,
    label,
    play,
)
from titan_grpo.protocol.messages import ServerState
from titan_grpo.rollout.client import RolloutClient
from titan_grpo.rollout.codec import TextCodec
from titan_grpo.rollout.messages import RolloutSpec
from titan_grpo.rollout.task_runner import Codec, TaskOptions
from titan_grpo.rollout.tasks.functions import task_of
from titan_grpo.samples import Prompt
from titan_grpo.titan.tiny import write_tiny_model

GROUP, PER_STEP = 2, 8
TOKENS = 8
"""Of a completion of a prompt that is not slow."""

START_S = 120.0

Consume = Literal["started", "ready"]

WAYS: tuple[tuple[Consume, bool, float], ...] = (
    ("started", True, 0.0),
    ("started", False, 0.0),
    ("ready", True, 0.0),
    ("ready", True, 0.5),
)
"""rollout.consume, whether lengths are known, rollout.max_stale_token_share."""


@dataclass(frozen=True)
class Setting:
    """One run. Durations in seconds; ``capacity`` in groups."""

    consume: Consume
    lengths_known: bool
    staleness: int
    slow: float
    share: float
    steps: int
    capacity: int
    unit_s: float
    train_s: float
    stale_share: float = 0.0

    @property
    def name(self) -> str:
        if self.stale_share:
            return "by token"
        return self.consume if self.lengths_known else "no lengths"

    def is_slow(self, index: int) -> bool:
        """Every tenth prompt with a share of 0.1, and so on."""
        return int((index + 1) * self.share) > int(index * self.share)

    def tokens(self, index: int) -> int:
        """Of each completion of a prompt."""
        return round(TOKENS * (self.slow if self.is_slow(index) else 1.0))

    def duration_s(self, index: int) -> float:
        """Of the group of a prompt."""
        return self.unit_s * (self.slow if self.is_slow(index) else 1.0)


@dataclass(frozen=True)
class Outcome:
    """``least_s``: see the module. ``thrown``: tokens. ``seconds`` is 0 where only the simulated
    run was made, whose counts these are then."""

    setting: Setting
    trained_share: float
    offered_share: float
    skipped: int
    thrown: int
    seconds: float
    order_s: float
    least_s: float


class Tails:
    """Prompts that say how long their completions take; the options' path has the setting."""

    def __init__(self, options: TaskOptions) -> None:
        self._setting = Setting(**json.loads(options.path))
        if self._setting.lengths_known:
            self.expected_tokens = self._expected_tokens

    def prompt(self, index: int, codec: Codec) -> Prompt:
        """Its index is among the tokens: no two are equal."""
        return Prompt(index, (3 + self._setting.is_slow(index), index, 0))

    def _expected_tokens(self, prompt: Prompt) -> float:
        return TOKENS * (self._setting.slow if prompt.token_ids[0] == 4 else 1.0)

    async def reward(self, prompt: Prompt, text: str, token_ids: Sequence[int]) -> float:
        """Any."""
        return float(len(token_ids))


def server_of(setting: Setting, slower: float = 1.0) -> TimedServer:
    """One that makes ``capacity`` groups at once, in pieces of half a short completion."""

    def work(sequence: Sequence[int]) -> Work:
        tokens = setting.tokens(sequence[1])
        return Work(tokens, slower * setting.duration_s(sequence[1]) / tokens)

    return TimedServer(setting.capacity * GROUP, TOKENS // 2, work)


class ServerThread:
    """A TimedServer in a loop of its own, by the machine's clock."""

    def __init__(self, setting: Setting) -> None:
        self._loop = asyncio.new_event_loop()
        self._listening: Future[tuple[str, TimedServer]] = Future()
        threading.Thread(target=self._run, args=(setting,), daemon=True).start()
        self.url, self._server = self._listening.result(START_S)

    def state(self, version: int) -> ServerState:
        """It holds ``version`` from now on."""
        self._server.version = version
        return ServerState(self.url, version, True, label(version))

    def _run(self, setting: Setting) -> None:
        async def listen() -> None:
            server = server_of(setting)
            self._listening.set_result((await server.listen(), server))

        asyncio.set_event_loop(self._loop)
        self._loop.run_until_complete(listen())
        # no deadline: ends with the process, or by close()
        self._loop.run_forever()

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)


def least_s(setting: Setting) -> float:
    versions = [0.0]
    durations = [setting.duration_s(index) for index in range(setting.steps * PER_STEP)]
    for step in range(setting.steps):
        longest = max(durations[step * PER_STEP : (step + 1) * PER_STEP])
        begun = versions[max(0, step - setting.staleness)]
        versions.append(max(versions[step], begun + longest) + setting.train_s)
    return max(versions[-1], sum(durations) / setting.capacity + setting.train_s)


def spec_of(setting: Setting, model_dir: str) -> RolloutSpec:
    return RolloutSpec(
        model_dir=model_dir,
        task="scripts.bench_tails:Tails",
        task_path=json.dumps(asdict(setting)),
        prompts_per_step=PER_STEP,
        group_size=GROUP,
        max_completion_tokens=round(TOKENS * setting.slow) + 1,
        max_staleness=setting.staleness,
        max_stale_token_share=setting.stale_share,
        max_concurrent_requests=setting.capacity * GROUP,
        consume=setting.consume,
    )


def in_processes(setting: Setting, spec: RolloutSpec) -> Played:
    """One run to its end: this process, the rollout process, the machine's clock."""
    server, played = ServerThread(setting), Played()
    client = RolloutClient(spec)
    try:
        client.start(START_S)
        began = time.monotonic()
        client.set_server(server.state(0))
        for version in range(setting.steps):
            batch = client.next_batch(version, PER_STEP, START_S)
            played.trained.update(group.prompt.index for group in batch)
            time.sleep(setting.train_s)
            client.set_server(server.state(version + 1))
            played.version_s.append(time.monotonic() - began)
        played.counters = client.counters()
    finally:
        client.close()
        server.close()
    return played


async def simulated(setting: Setting, spec: RolloutSpec) -> Played:
    """The same in simulated time."""
    task, codec = task_of(spec), TextCodec(spec.model_dir, spec)
    return await play(spec, task, codec, [server_of(setting)], Pace(setting.steps, setting.train_s))


async def fleet(
    setting: Setting, servers: Sequence[float], apart_s: float, model_dir: str
) -> Played:
    """A run on several servers, see the module; each is so many times as slow as the setting says,
    and makes ``setting.capacity`` groups at once."""
    spec = replace(spec_of(setting, model_dir), max_concurrent_requests=PER_STEP * GROUP * 10)
    task, codec = task_of(spec), TextCodec(spec.model_dir, spec)
    pace = Pace(setting.steps, setting.train_s, further_s=apart_s)
    made = [server_of(setting, slower) for slower in servers]
    return await play(spec, task, codec, made, pace)


def report_fleets(setting: Setting, options: Namespace, model_dir: str) -> list[dict[str, float]]:
    """Print the table of several servers; return its rows."""
    table = Table()
    for staleness, count in product((0, 1), options.servers):
        each = replace(setting, staleness=staleness, capacity=max(1, PER_STEP // count))
        runs = [(1.0, apart_s) for apart_s in (0.0, *options.apart)]
        runs += [(slower, 0.0) for slower in options.slower]

        def took_s(speeds: Sequence[float], apart_s: float, each: Setting = each) -> float:
            return in_simulated_time(fleet(each, speeds, apart_s, model_dir)).version_s[-1]

        together_s, without_s = took_s([1.0] * count, 0.0), took_s([1.0] * (count - 1), 0.0)
        for slower, apart_s in runs:
            seconds = took_s([*[1.0] * (count - 1), slower], apart_s)
            least_s = together_s if slower == 1.0 else without_s
            row = {"staleness": staleness, "servers": count, "apart_s": apart_s, "slower": slower}
            table.add(row | {"seconds": seconds, "/ least": seconds / least_s})
    return table.rows


def train(setting: Setting, model_dir: str, process: bool) -> Outcome:
    spec = spec_of(setting, model_dir)
    alone = in_simulated_time(simulated(setting, spec))
    played = in_processes(setting, spec) if process else alone
    groups = setting.steps * PER_STEP
    slow = sum(times for index, times in played.trained.items() if setting.is_slow(index))
    return Outcome(
        setting,
        slow / groups,
        sum(map(setting.is_slow, range(groups))) / groups,
        played.counters.get("skipped", 0),
        played.counters.get("thrown_tokens", 0),
        played.version_s[-1] if process else 0.0,
        alone.version_s[-1],
        least_s(setting),
    )


def report(found: list[Outcome]) -> int:
    """Print the table; 1 if a run with consume = "started" misses its goal (shares within 1 %, time
    within 1.1 of the least where lengths are known)."""
    table, missed = Table(text=10), 0
    for one in found:
        s = one.setting
        biased = replace(s, consume="ready", lengths_known=True, stale_share=0.0)
        ready = next(o for o in found if o.setting == biased)
        row = {"slow": s.slow, "staleness": s.staleness, "consume": s.name}
        row |= {"offered": one.offered_share, "trained": one.trained_share}
        row |= {"skipped": one.skipped, "thrown away": one.thrown}
        for name in ("seconds", "order_s"):
            took, by_ready = getattr(one, name), getattr(ready, name)
            row |= {name: took, f"{name} / least": took / one.least_s}
            row |= {f"{name} / ready": took / by_ready if by_ready else 0.0}
        table.add(row)
        if s.consume == "started":
            off = abs(one.trained_share - one.offered_share) > 0.01
            took = one.seconds or one.order_s
            missed += off or (s.lengths_known and took > 1.1 * one.least_s)
    return int(missed > 0)


def main() -> int:
    """Run all settings; see ``report`` for the exit code."""
    parser = options_of(__doc__)
    parser.add_argument("--slow", type=float, nargs="+", default=[3.0, 6.0])
    parser.add_argument("--share", type=float, default=0.1)
    parser.add_argument("--staleness", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--capacity", type=int, default=8, help="groups that are made at once")
    parser.add_argument("--servers", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--apart", type=float, nargs="+", default=[0.002, 0.01])
    parser.add_argument("--slower", type=float, nargs="+", default=[4.0, 10.0])
    parser.add_argument(
        "--no-process", dest="process", action="store_false", help="simulated time only"
    )
    options = parser.parse_args()
    found = list[Outcome]()
    with tempfile.TemporaryDirectory() as model_dir:
        write_tiny_model("qwen3", Path(model_dir), seed=1)
        for slow, staleness, way in product(options.slow, options.staleness, WAYS):
            consume, known, share = way
            setting = Setting(
                consume=consume,
                lengths_known=known,
                staleness=staleness,
                slow=slow,
                share=options.share,
                steps=options.steps,
                capacity=options.capacity,
                unit_s=0.25,  # of a fast group
                train_s=0.125,
                stale_share=share,
            )
            found.append(train(setting, model_dir, options.process))
            print(found[-1], file=sys.stderr, flush=True)
        missed = report(found)
        equal = replace(found[0].setting, consume="started", lengths_known=True, share=0.0)
        fleets = report_fleets(equal, options, model_dir)
    write_json(options.json, [*map(asdict, found), *fleets])
    return missed


if __name__ == "__main__":
    sys.exit(main())
