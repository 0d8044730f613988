"""Evaluation of one version on one server. ``main`` is the subprocess of a training run;
``titan-grpo evaluate`` calls ``evaluate``.

Sampler, tasks and dataset reader are those of rollouts. The subprocess ends with the evaluation;
training and rollouts lose only the time of its requests on the server."""

import asyncio
import math
import os
import socket
import statistics
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from typing import Any

from titan_grpo.config.rollout import read_key
from titan_grpo.config.task import Evaluation
from titan_grpo.engines.http import AsyncDriver, HttpRefused
from titan_grpo.errors import ConfigError, DataError, PeerError, TitanGrpoError
from titan_grpo.observe import names
from titan_grpo.observe.schema import Estimate, Evaluated
from titan_grpo.protocol.messages import ServerState
from titan_grpo.rollout.dispatch import BAD_REQUEST
from titan_grpo.rollout.messages import RolloutSpec, Ticket
from titan_grpo.rollout.sampler import Attempt, GroupDropped, Interrupted, PromptUnfit, Sampler
from titan_grpo.rollout.schedule import Server
from titan_grpo.rollout.task_runner import TaskFailed, TaskRunner, at_once
from titan_grpo.rollout.tasks.functions import FunctionTask, ready
from titan_grpo.rollout.threads import give_loop_threads
from titan_grpo.samples import LARGEST_REWARD, NO_TOKENS, Group
from titan_grpo.subprocesses import exit_with_parent

Z_95 = statistics.NormalDist().inv_cdf(0.975)
"""Two-sided 95 % quantile of the normal distribution."""

ATTEMPTS = 4
"""Attempts per prompt, if the server fails or its completions are unfit."""

RETRY_S = 1.0
"""Pause between attempts, in seconds."""


@dataclass(frozen=True, slots=True)
class Failure:
    """Human-readable reason for an evaluation without a result. ``again``: the server failed, so a
    retry may succeed."""

    text: str
    again: bool


@dataclass(frozen=True, slots=True)
class Prompted:
    """Rewards and lengths (sampled tokens) of one prompt's completions. The tokens themselves are
    not kept in memory."""

    rewards: tuple[float, ...]
    tokens: tuple[int, ...]

    @classmethod
    def of(cls, group: Group) -> "Prompted":
        """Return the record of a finished, rewarded group."""
        done = group.completions
        return cls(tuple(c.reward for c in done), tuple(c.num_sampled for c in done))


def estimate(values: Sequence[float]) -> Estimate:
    """Return the mean of one value per prompt, +- 1.96 standard errors (Bessel's correction of the
    variance, normal quantile).

    The completions of a prompt are not independent, so the prompt is the unit: clustered standard
    errors with equal clusters (Miller, "Adding Error Bars to Evals", arXiv 2411.00640, section
    2.2). Raises StatisticsError without a value. One value has no interval.

    Worked example: (0, 1, 1, 0): mean 0.5, deviation 0.577, standard error 0.289, interval
    (-0.066, 1.066). The interval is not clipped to the range of the reward.
    """
    mean = statistics.fmean(values)
    if len(values) < 2:
        return Estimate(mean, None, None)
    error = statistics.stdev(values) / math.sqrt(len(values))
    return Estimate(mean, mean - Z_95 * error, mean + Z_95 * error)


def pass_at_k(samples: int, passed: int, k: int) -> float:
    """Return the unbiased estimate of the probability that at least one of ``k`` completions
    passes, from n = ``samples`` completions of which c = ``passed`` pass: 1 - C(n - c, k) / C(n, k)
    (Chen et al., "Evaluating Large Language Models Trained on Code", arXiv 2107.03374, equation 1).
    Needs k <= samples.

    >>> pass_at_k(4, 1, 1), pass_at_k(4, 1, 2), pass_at_k(4, 3, 2)
    (0.25, 0.5, 1.0)
    """
    return 1.0 - math.comb(samples - passed, k) / math.comb(samples, k)


def passes(prompts: Sequence[Prompted], k: int, least: float) -> Estimate:
    """Return pass@k over prompts; a completion passes with a reward of at least ``least``."""
    return estimate(
        [pass_at_k(len(p.rewards), sum(r >= least for r in p.rewards), k) for p in prompts]
    )


def of_version(group: Group, version: int | None) -> bool:
    """Return whether every token of a group was sampled by ``version``, on its KV. The versions are
    per token from engines that name them, else the ledger's at the request's start and end."""
    return all(
        c.version_first == c.version_last == version
        and all(made_by == version for made_by, _ in c.token_spans)
        for c in group.completions
    )


def next_due(every: int, evaluated: int) -> int | None:
    """Return the first version at which an evaluation is due after that of ``evaluated``: the next
    multiple of ``every``; None: only the last version is due.

    >>> next_due(10, 0), next_due(10, 10), next_due(10, 13), next_due(0, 5)
    (10, 20, 20, None)
    """
    return (evaluated // every + 1) * every if every else None


def metrics(scores: Evaluated) -> dict[str, float]:
    """Return the values for metrics.jsonl: ``evaluation/NAME/reward``, ``.../reward_low``,
    ``.../reward_high`` and so on."""
    values: dict[str, float | None] = {
        "version": float(scores.version),
        "refused": float(scores.refused),
        "seconds": scores.seconds,
    }
    estimates = {"reward": scores.reward, "tokens": scores.tokens}
    estimates |= {f"pass_at_{k}": found for k, found in scores.passed.items()}
    for what, found in estimates.items():
        values |= {what: found.value, f"{what}_low": found.low, f"{what}_high": found.high}
    return {f"{names.EVALUATION}/{scores.name}/{k}": v for k, v in values.items() if v is not None}


def line(scores: Evaluated) -> str:
    """Return a summary for the terminal.

    Example: ``evaluation test, version 20: reward 0.412 (0.371 to 0.453), pass@1 0.410 (0.369 to
    0.451), 153 tokens; 400 prompts x 1``.
    """
    parts = [("reward", scores.reward), *((f"pass@{k}", e) for k, e in scores.passed.items())]
    shown = ", ".join(f"{what} {_shown(found)}" for what, found in parts)
    refused = f", {scores.refused} refused" if scores.refused else ""
    return (
        f"evaluation {scores.name}, version {scores.version}: {shown},"
        f" {scores.tokens.value:.0f} tokens; {scores.prompts} prompts x {scores.samples}{refused},"
        f" {scores.seconds:.1f} s"
    )


def _shown(found: Estimate) -> str:
    if found.low is None or found.high is None:
        return f"{found.value:.3f}"
    return f"{found.value:.3f} ({found.low:.3f} to {found.high:.3f})"


class EvaluationFailed(TitanGrpoError):
    """An evaluation has no result. A part of the prompts is not reported: it would be biased to
    those that finish early."""


@dataclass(frozen=True, slots=True)
class Job:
    """Parameters of an evaluation. Without secrets."""

    table: Evaluation
    spec: RolloutSpec

    @classmethod
    def of(cls, table: Evaluation, spec: RolloutSpec) -> "Job":
        """Return the job of a table. ``spec``: the run's, for all that a table does not set."""
        names = Evaluation.__dataclass_fields__.keys() & RolloutSpec.__dataclass_fields__.keys()
        shared = {name: getattr(table, name) for name in names}
        longest = table.max_completion_tokens or spec.max_completion_tokens
        shared |= {"max_completion_tokens": longest, "group_size": table.samples}
        shared |= {
            "section": table.section,
            "accept": "",
            "min_completion_tokens": 0,
            "state": {},
            "waiting": {},
        }
        shared |= {"max_concurrent_requests": table.concurrent_requests}
        return cls(table, replace(spec, **shared))


Prepared = tuple[TaskRunner, int]
"""Runner of the task, and number of prompts."""


def prepare(job: Job) -> Prepared:
    """Load a job's task and tokenizer. Raises the task's ConfigError, DataError or TaskFailed."""
    table, spec = job.table, job.spec
    task, codec = ready(spec)
    runner = TaskRunner(task, codec, spec)
    rows = len(task.rows) if isinstance(task, FunctionTask) else 0
    # At most one epoch: beyond it a prompt would count twice.
    return runner, min(table.rows or rows, rows) if rows else table.rows


async def evaluate(job: Job, state: ServerState, prepared: Prepared, api_key: str) -> Evaluated:
    """Sample and reward every prompt on a server, with the version that it holds.

    Raises TaskFailed if the task fails, DataError for a reward that is no sound number, PeerError
    if a prompt cannot be finished or the server left the version, EvaluationFailed past the
    deadline or if the server refused all prompts.
    """
    give_loop_threads()
    table, spec = job.table, job.spec
    runner, count = prepared
    sampler = Sampler(spec, runner)
    driver, server = AsyncDriver(state.url, api_key, table.concurrent_requests), Server(state)
    places = asyncio.Semaphore(max(1, table.concurrent_requests // table.samples))
    begin = time.monotonic()
    asked = [_group(job, sampler, server, driver, places, index) for index in range(count)]
    try:
        async with asyncio.timeout(table.timeout_s):
            found = await at_once(asked)
    except TimeoutError:
        raise EvaluationFailed(
            f"it was not over after {table.timeout_s:g} s (timeout_s): raise that, or lower rows"
        ) from None
    finally:
        await driver.close()
    prompts = [each for each in found if each is not None]
    if not prompts:
        raise EvaluationFailed(f"{state.url} refused all {count} prompts: are they too long?")
    assert state.version is not None, "a server of an unknown version makes no group"
    return Evaluated(
        table.name,
        state.version,
        state.url,
        len(prompts),
        table.samples,
        estimate([sum(p.rewards) / len(p.rewards) for p in prompts]),
        {str(k): passes(prompts, k, table.pass_reward) for k in table.pass_at},
        estimate([sum(p.tokens) / len(p.tokens) for p in prompts]),
        count - len(prompts),
        time.monotonic() - begin,
    )


async def _group(
    job: Job,
    sampler: Sampler,
    server: Server,
    driver: AsyncDriver,
    places: asyncio.Semaphore,
    index: int,
) -> Prompted | None:
    """Sample and reward one prompt's completions; return None if the server has no room for it.
    Each attempt takes one of the server's ``places``, until its requests are over."""
    ticket, parts = Ticket(index), [NO_TOKENS] * job.table.samples
    for attempt in range(1, ATTEMPTS + 1):
        # no deadline: the evaluation's own one (timeout_s) ends it
        await places.acquire()
        with ExitStack() as place:
            place.callback(places.release)
            try:
                # Rewards need no place: the server would stand idle while a judge thinks.
                group = await sampler.group(
                    Attempt(ticket, parts, server, driver, lambda _: place.close())
                )
            except PromptUnfit:
                return None
            except GroupDropped as error:
                if error.reason == "bad_reward":
                    raise DataError(
                        f"a task's reward must be a number of magnitude {LARGEST_REWARD:g} at most,"
                        f" one of prompt {index} is not (NaN, or larger): correct the task; the"
                        " evaluation has no result"
                    ) from error
                failure: TitanGrpoError = error
                ticket = ticket.dropped()
                parts = [NO_TOKENS] * len(parts)
            except (PeerError, Interrupted) as error:
                if isinstance(error, HttpRefused) and error.status in BAD_REQUEST:
                    return None
                # Retry with a new seed, from the tokens so far.
                failure, ticket = error, ticket.moved(tuple(parts))
            else:
                version = server.state.version
                if of_version(group, version):
                    return Prompted.of(group)
                raise PeerError(
                    f"{server.url} left version {version}: prompt {index} has tokens of another one"
                )
            if attempt < ATTEMPTS:
                await asyncio.sleep(RETRY_S)
    raise PeerError(f"prompt {index} could not be finished: {failure}")


def failure(error: BaseException) -> Failure:
    """Return the failure of an error: the traceback of a user's function, else the message."""
    if isinstance(error, TaskFailed):
        return Failure(error.report, False)
    if isinstance(error, ConfigError | DataError):
        return Failure(str(error), False)
    return Failure(f"{type(error).__name__}: {error}", isinstance(error, PeerError))


def main(sock: socket.socket, parent: int) -> int:
    """Read a Job from the socket, and send back None once it is loaded, or a Failure; then read the
    ServerState of a server, and send back Evaluated or a Failure. End with the trainer."""
    exit_with_parent(parent)
    connection: Connection[Any, Any] = Connection(sock.detach())
    try:
        # no deadline: ends with the trainer
        job: Job = connection.recv()
        key = read_key(os.environ, job.spec.api_key_env)
        prepared = prepare(job)
        connection.send(None)
        # no deadline: likewise
        state: ServerState = connection.recv()
        connection.send(asyncio.run(evaluate(job, state, prepared, key)))
    except Exception as error:  # noqa: BLE001 - top of the process: the trainer shows it
        with suppress(OSError):  # of a trainer that has ended
            connection.send(failure(error))
    return 0
