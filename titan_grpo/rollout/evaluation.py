"""One evaluation of one version on one server: ``python -m titan_grpo.rollout.evaluation --fd N``
is the process in which a training run has it made; ``titan-grpo evaluate`` calls ``evaluate``.

The sampler, the tasks and the dataset's reader are those of rollouts. A process of its own ends
with the evaluation, and takes no time from training or rollouts but its requests' on the server."""

import argparse
import asyncio
import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from typing import Any

from titan_grpo.config.evaluation import Evaluation
from titan_grpo.engines.http import AsyncDriver, HttpRefused
from titan_grpo.errors import PeerError, TitanGrpoError
from titan_grpo.rollout import scores
from titan_grpo.rollout.dispatch import BAD_REQUEST
from titan_grpo.rollout.messages import Ticket
from titan_grpo.rollout.partial import Partial
from titan_grpo.rollout.pool import Server
from titan_grpo.rollout.sampler import GroupDropped, Interrupted, Sampler
from titan_grpo.rollout.scores import Failure, Prompted, Scores
from titan_grpo.rollout.spec import RolloutSpec
from titan_grpo.rollout.task_runner import TaskFailed, TaskRunner
from titan_grpo.rollout.tasks.functions import FunctionTask, codec_of, task_of

ATTEMPTS = 4
"""How often a prompt is tried whose server fails, or whose completions are unfit."""

RETRY_S = 1.0
"""Pause before another attempt, in seconds."""


class EvaluationFailed(TitanGrpoError):
    """There is no result: nothing is reported of a part of the prompts, which would be those that
    were easy to finish."""


@dataclass(frozen=True, slots=True)
class Job:
    """What is evaluated, by which rules, and where. Without secrets."""

    name: str
    spec: RolloutSpec
    rows: int
    pass_at: tuple[int, ...]
    pass_reward: float
    prompts_at_once: int
    timeout_s: float
    url: str = ""
    engine: str = ""
    version: int = 0
    label: str = ""

    @classmethod
    def of(cls, table: Evaluation, spec: RolloutSpec) -> "Job":
        """That of a table, on no server yet. ``spec``: the run's, for what a table does not say."""
        shared = {name: getattr(table, name) for name in table.__dataclass_fields__}
        shared = {k: v for k, v in shared.items() if k in RolloutSpec.__dataclass_fields__}
        longest = table.max_completion_tokens or spec.max_completion_tokens
        shared |= {"max_completion_tokens": longest, "group_size": table.samples}
        shared |= {"accept": "", "min_completion_tokens": 0, "state": {}, "waiting": {}}
        at_once = max(1, table.concurrent_requests // table.samples)
        spec = replace(spec, max_concurrent_requests=table.concurrent_requests, **shared)
        return cls(
            table.name,
            spec,
            table.rows,
            tuple(table.pass_at),
            table.pass_reward,
            at_once,
            table.timeout_s,
        )

    def on(self, url: str, engine: str, version: int, label: str) -> "Job":
        """The same on a server that holds ``version``."""
        return replace(self, url=url, engine=engine, version=version, label=label)


async def evaluate(job: Job, api_key: str, done: Callable[[], None] = lambda: None) -> Scores:
    """Sample and reward every prompt; ``done`` is called after each.

    Raises ConfigError or DataError as the task does, PeerError where a prompt cannot be finished or
    the server left the version, EvaluationFailed past the deadline and without a prompt.
    """
    task = task_of(job.spec)
    spec = job.spec
    runner = TaskRunner(task, codec_of(spec), spec.task_concurrency, spec.task_timeout_s)
    rows = len(task.rows) if isinstance(task, FunctionTask) else 0
    # Beyond one epoch a prompt would count twice.
    count = min(job.rows or rows, rows) if rows else job.rows
    one = _Run(job, Sampler(job.spec, runner), api_key)
    begin = time.monotonic()
    tasks = [asyncio.ensure_future(one.prompt(index, done)) for index in range(count)]
    try:
        async with asyncio.timeout(job.timeout_s):
            found = await asyncio.gather(*tasks)
    except TimeoutError:
        raise EvaluationFailed(
            f"it was not over after {job.timeout_s:g} s (timeout_s): raise that, or lower rows"
        ) from None
    finally:
        for each in tasks:
            each.cancel()
        # no deadline: all have ended, or were cancelled
        await asyncio.gather(*tasks, return_exceptions=True)
        await one.driver.close()
    prompts = [each for each in found if each is not None]
    if not prompts:
        raise EvaluationFailed(f"{job.url} refused all {count} prompts: are they too long for it?")
    return Scores(
        job.name,
        job.version,
        job.url,
        len(prompts),
        job.spec.group_size,
        scores.estimate([sum(p.rewards) / len(p.rewards) for p in prompts]),
        {k: scores.passes(prompts, k, job.pass_reward) for k in job.pass_at},
        scores.estimate([sum(p.tokens) / len(p.tokens) for p in prompts]),
        count - len(prompts),
        time.monotonic() - begin,
    )


class _Run:
    def __init__(self, job: Job, sampler: Sampler, api_key: str) -> None:
        self._job, self._sampler = job, sampler
        self.driver = AsyncDriver(job.url, api_key, job.spec.max_concurrent_requests)
        self._server = Server(job.url, job.version, True, job.label, job.engine)
        self._places = asyncio.Semaphore(job.prompts_at_once)

    async def prompt(self, index: int, done: Callable[[], None]) -> Prompted | None:
        """One prompt's completions; None: the server refuses it."""
        async with self._places:
            found = await self._tried(index)
        done()
        return found

    async def _tried(self, index: int) -> Prompted | None:
        ticket, parts = Ticket(index), [Partial()] * self._job.spec.group_size
        for attempt in range(1, ATTEMPTS + 1):
            try:
                group = await self._sampler.group(ticket, parts, self._server, self.driver)
            except HttpRefused as error:
                if error.status in BAD_REQUEST:
                    return None
                failure: TitanGrpoError = error
            except GroupDropped as error:
                failure, ticket = error, ticket.dropped()
                parts = [Partial()] * len(parts)
            except (PeerError, Interrupted) as error:
                # With a new seed, and from the tokens that came.
                failure, ticket = error, ticket.moved(tuple(parts))
            else:
                if scores.of_version(group, self._job.version):
                    return Prompted.of(group)
                raise PeerError(
                    f"{self._job.url} left version {self._job.version}: prompt {index} has tokens"
                    " of another one"
                )
            if attempt < ATTEMPTS:
                await asyncio.sleep(RETRY_S)
        raise PeerError(f"prompt {index} could not be finished: {failure}")


def failure_text(error: BaseException) -> str:
    """Why there is no result, for people: the traceback of a user's function, else the message."""
    return error.report if isinstance(error, TaskFailed) else f"{type(error).__name__}: {error}"


def main() -> int:
    """Read a job from the descriptor, send back Scores or a Failure."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--fd", type=int, required=True)
    # Ctrl-C reaches the whole foreground group; the trainer decides when this process ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    connection: Connection[Any, Any] = Connection(parser.parse_args().fd)
    # no deadline: ends with the trainer, whose end closes the connection
    job: Job = connection.recv()
    threading.Thread(target=_end_with, args=(connection,), daemon=True).start()
    key = os.environ.get(job.spec.api_key_env, "") if job.spec.api_key_env else ""
    outcome: Scores | Failure
    try:
        outcome = asyncio.run(evaluate(job, key))
    except Exception as error:  # noqa: BLE001 - top of the process: the trainer shows it
        outcome = Failure(failure_text(error), isinstance(error, PeerError))
    connection.send(outcome)
    return 0


def _end_with(connection: "Connection[Any, Any]") -> None:
    """End this process when the trainer's end of the connection closes."""
    try:
        # no deadline: that is the end
        connection.recv()
    except (EOFError, OSError):
        os._exit(1)


if __name__ == "__main__":
    raise SystemExit(main())
