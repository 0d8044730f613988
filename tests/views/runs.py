"""Runs as the recorder writes them, with a clock that is moved by hand: nothing waits."""

import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec

from titan_grpo.observe import names, report
from titan_grpo.observe.recorder import Recorder
from titan_grpo.observe.schema import Shown, ShownStep
from titan_grpo.rollout.messages import IN_FLIGHT
from titan_grpo.titan.step_records import rollout_values, server_values

STEP_S = 1.0
"""A step of a made run; a transfer takes a third of it."""


class Clock:
    """A clock that a run moves."""

    def __init__(self, now: float = 1000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


@dataclass
class Made:
    """What a run is made like."""

    steps: int = 20
    servers: int = 2
    waiting: float = 0.1
    """Share of a step in which the trainer waits for rollouts."""
    slow_server: int = -1
    """Its transfers take five times as long: it takes every second version."""
    faulty_server: int = -1
    """It fails at every tenth version."""
    first_step: int = 1
    """Greater: a resumed run."""
    finished: bool = True
    ended_by: str = ""


def url_of(server: int) -> str:
    return f"http://10.0.0.{server}:8000"


def make_run(
    folder: Path,
    made: Made,
    clock: Clock | None = None,
    pace: Callable[[int], object] = lambda step: None,
) -> None:
    """Record a run in ``folder``; ``pace`` is called after each step."""
    clock, draw = clock or Clock(), random.Random(7)
    recorder = Recorder(folder, clock=clock)
    for server in range(made.servers):
        recorder.known_server(url_of(server))
        now = clock.now
        recorder.record_span(names.CONNECT_S, now, now + 0.5, url_of(server), epoch=1)
        _commit(recorder, server, made.first_step - 1, now + 0.5, 0.1)
    clock.now += 1.0
    for step in range(made.first_step, made.first_step + made.steps):
        _step(recorder, made, step, clock, draw)
        pace(step)
    if made.finished:
        report.write_report(recorder, folder.name, "async", made.ended_by)
    else:
        recorder.close()


def _step(recorder: Recorder, made: Made, step: int, clock: Clock, draw: random.Random) -> None:
    begin, length = clock.now, STEP_S * draw.uniform(0.9, 1.1)
    waited, blocked = length * made.waiting, length * 0.005
    trained = length - waited - blocked
    parts = {
        "rollout wait": (begin, begin + waited),
        "train": (begin + waited, begin + waited + trained),
        "publish": (begin + waited + trained, begin + length),
    }
    for name, (start, stop) in parts.items():
        recorder.add_span(name, start, stop, "main thread", step=step)
    clock.now = end = begin + length
    recorder.record_span(names.DIGEST_S, end, end + 0.01, "sealer", version=step)
    for server in range(made.servers):
        slow = server == made.slow_server
        if slow and step % 2:
            continue
        if server == made.faulty_server and step % 10 == 0:
            cause = "send failed: connection reset"
            recorder.instant("sync failure", url_of(server), version=step, message=cause)
            recorder.error(f"version {step} to {url_of(server)}: {cause}")
            continue
        _commit(recorder, server, step, end + 0.01, 5 * STEP_S / 3 if slow else STEP_S / 3)
    if step == 1 or step % 10 == 0:
        recorder.sample(msgspec.to_builtins(_shown(step, draw)))
    progress = step / (made.first_step + made.steps)
    recorder.step(
        step,
        {
            **_others(made, step, draw),
            names.REWARD: 0.1 + 0.7 * progress + draw.gauss(0, 0.03),
            names.REWARD_STD: 0.2,
            names.STALENESS: draw.random(),
            names.STALENESS_MAX: 1.0,
            names.COMPLETION_TOKENS: 15 + draw.random(),
            names.ROLLOUT_WAIT_S: waited,
            names.TRAIN_S: trained,
            names.BLOCKED_S: blocked,
            names.STEP_S: length,
            names.GRAD_NORM: draw.uniform(0.5, 1.0),
            names.LOSS: draw.gauss(0, 0.05),
            names.LOGPROB_GAP: 0.05 + 0.01 * draw.random(),
            names.LOGPROB_GAP_MAX: 0.5,
            names.RATIO_MEAN: 1.0,
            names.CLIP_FRACTION: 0.01,
            names.CLIPPED_LOW: 0.005 * draw.random(),
            names.CLIPPED_HIGH: 0.01 * draw.random(),
            names.LAG: draw.random(),
            names.LAG_MAX: 1.0,
            names.IMPORTANCE_MEAN: 1.0,
            names.IMPORTANCE_CUT: 0.02 * draw.random(),
            names.VETOED: 0.0,
            names.KEPT: 1.0,
            **({names.ON_POLICY_GAP: 0.002} if step % 3 == 0 else {}),
            names.gap("position", 16): 0.04,
            names.gap("probability", 0.1): 0.05,
            names.gap("lag", 1): 0.06,
        },
    )


def _others(made: Made, step: int, draw: random.Random) -> dict[str, float]:
    """What a run with everything turned on has besides: a value of every name, those of each
    server, and an evaluation at every hundredth step."""
    recorders = {*names.TOTALS, *names.WORK, names.ON_POLICY_GAP}
    values = {name: draw.random() for name in names.MEANING if name not in recorders}
    servers = [url_of(server) for server in range(made.servers)]
    counters = {f"{IN_FLIGHT}{url}": draw.randrange(100) for url in servers}
    counters |= {f"tokens.{url}": draw.randrange(1000) for url in servers} | {"tokens": 1000}
    values |= rollout_values({}, counters, STEP_S)
    values |= server_values(step - 1, {url: max(0, step - draw.randrange(1, 4)) for url in servers})
    if step % 100 == 0:
        what = {name: draw.random() for name in (*names.OF_EVALUATION, "pass_at_4")}
        values |= {f"{names.EVALUATION}/test/{n}": v for n, v in (what | {"version": step}).items()}
    return values


def _shown(step: int, draw: random.Random) -> ShownStep:
    """Two completions of 12 tokens with growing gaps; the last token of the second is no sampled
    one."""
    out = []
    for number in range(2):
        engine = [-draw.random() for _ in range(12)]
        trainer: list[float | None] = [logprob - 0.1 * k for k, logprob in enumerate(engine)]
        out.append(
            Shown(
                url_of(number),
                draw.random(),
                max(0, step - 2),
                step - 1,
                [1, 2, 3],
                [draw.randrange(4, 100) for _ in range(12)],
                engine,
                [*trainer[:-1], None] if number else trainer,
            )
        )
    return ShownStep(step, step - 1, "no such folder", out)


def _commit(recorder: Recorder, server: int, version: int, begin: float, send_s: float) -> None:
    """One version's way to a server, as its lane records it."""
    url, sent = url_of(server), begin + send_s
    resumed = sent + 0.03
    recorder.record_span(names.SEND_S, begin, sent, url, version=version)
    recorder.observe(names.VERIFY_S, 0.001)
    recorder.count(names.SYNC_BYTES, 1 << 20)
    recorder.record_span(names.PAUSE_S, sent, resumed, url, version=version)
    recorder.record_span(names.COMMIT_S, sent, resumed + 0.005, url, version=version)
    recorder.committed(url, version)
    recorder.count(names.SYNC_COUNT)
    recorder.observe(names.SYNC_S, resumed + 0.005 - begin)
