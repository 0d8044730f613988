"""Cases in which one server's network is slow, on a site whose struck server lives in a namespace
of its own."""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from tests.faults.bench import Bench
from tests.faults.cases import Case, Kind
from tests.faults.instances import Launch
from tests.faults.lanes import judge_recovery
from tests.faults.netns import Namespace, NotAllowed
from tests.faults.report import Result
from tests.faults.runner import Done, site_bench
from tests.faults.site import Say, Site
from tests.rigs.trainer_handle import RunFailed, TrainerProcess
from tests.rigs.trainer_process import Settings
from titan_grpo.errors import PeerError

WATCH_S = 12.0
"""How long the run is watched without the limit, and how long with it."""

SLOWER = 10.0
DELAY_MS = 20.0


@dataclass(frozen=True, slots=True)
class Plan:
    """What the site is made of. ``launch(host, inside)``: servers at that address, started by that
    command."""

    launch: Callable[[str, str], Launch]
    settings: Settings
    base: Mapping[str, torch.Tensor]
    out: Path
    env: Mapping[str, str]
    say: Say


def run(plan: Plan, cases: Sequence[Case], done: Done) -> dict[str, Any]:
    """Run the cases; figures for the JSON. Where namespaces are not allowed each case is skipped,
    with the reason."""
    figures: dict[str, Any] = {}
    with ExitStack() as stack:
        try:
            space = stack.enter_context(Namespace())
        except NotAllowed as error:
            for case in cases:
                done(Result(case, skipped=f"a network of its own is not allowed here: {error}"))
            return figures
        plan.say(f"network: {len(cases)} cases; one server in namespace {space.name}")
        site = Site(
            plan.launch("127.0.0.1", ""),
            plan.out,
            plan.base,
            plan.launch(space.inner, space.inside),
        )
        settings = replace(plan.settings, bind_host=space.outer)
        bench = site_bench(stack, site, Bench(site, settings, plan.out, plan.env, plan.say))
        for case in cases:
            result, began = Result(case), time.monotonic()
            try:
                figures[case.name] = _perform(bench, space, result)
            except NotAllowed as error:
                result.skipped = str(error)
            except (RunFailed, PeerError) as error:
                result.violations.append(str(error).replace("\n", " "))
            finally:
                space.free()
            result.seconds = time.monotonic() - began
            done(result)
    return figures


def _perform(bench: Bench, space: Namespace, result: Result) -> dict[str, float]:
    trainer, mark = bench.trainer, bench.mark()
    bench.window()
    before = bench.window(WATCH_S)
    free_s = _sending(trainer, bench.site.victim.url, before)
    if result.case.kind is Kind.RATE:
        started = trainer.find(lambda e: e["event"] == "started")
        assert started is not None
        rate = float(started["image_bytes"]) / free_s / SLOWER
        space.limit(rate)
        note = f"limited to {rate / 2**20:.2f} MiB/s"
    else:
        space.delay(DELAY_MS)
        note = f"{DELAY_MS:g} ms each way"
    during = bench.window(WATCH_S)
    slow_s = _sending(trainer, bench.site.victim.url, during)
    space.free()
    lifted = time.monotonic()
    result.notes.append(
        f"{note}: a transfer took {slow_s:.3f} s, {slow_s / free_s:.1f} times as long"
    )
    judge_recovery(bench, result, trainer, lifted)
    bench.judge_time(result, trainer, before, during)
    bench.at_rest(result, trainer)
    bench.judge_servers(result, mark)
    return {
        "transfer_s": free_s,
        "slowed_transfer_s": slow_s,
        "step_ratio": result.steps.value,
        "lag_ratio": result.lag.value,
    }


def _sending(trainer: TrainerProcess, url: str, window: tuple[float, float]) -> float:
    """Median seconds of one transfer to a server in a window. RunFailed if there was none."""
    seconds = [s for t, s in trainer.sends(url) if window[0] <= t <= window[1]]
    if not seconds:
        raise RunFailed(f"the server must get versions within {WATCH_S:g} s, it got none")
    return statistics.median(seconds)
