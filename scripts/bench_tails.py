#!/usr/bin/env python
"""What does training see of slow prompts, and what does waiting for them cost?

    python scripts/bench_tails.py [--slow 3 6] [--share 0.1] [--staleness 1 2 4] [--steps 40]
    [--capacity 8] [--json PATH]

The real rollout process over real HTTP, a server whose generation takes a set time (no engine), and
a trainer whose step takes a set time. A share of the prompts, evenly spread, takes ``--slow`` times
as long as the others. Three ways to choose what a step is made of: "started" with the task's guess
at lengths, "started" without any, and "ready" (any finished groups).

Printed for each: the share of slow prompts among the trained groups, prompts given up, tokens
thrown away, and the seconds beside the least that any order can take that trains prompts in their
order: the greatest of

* generation: all groups' durations over the server's capacity, and the last training step;
* training, and a group's duration over 1 + max_staleness steps: V(k+1) = max(V(k), V(k - staleness)
  + longest group of step k) + training, where V(k) is when version k exists.
"""

import argparse
import asyncio
import json
import os
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from titan_grpo.protocol.messages import ServerState
from titan_grpo.rollout.client import RolloutClient
from titan_grpo.rollout.spec import RolloutSpec
from titan_grpo.rollout.tasks.base import Codec, TaskOptions
from titan_grpo.samples import Prompt
from titan_grpo.titan.tiny import write_tiny_model

GROUP, PER_STEP = 2, 8
TOKENS = 8
"""Of a completion of a prompt that is not slow."""

START_S = 120.0

ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Setting:
    """One run. Durations in seconds; ``capacity`` in groups."""

    consume: str
    lengths_known: bool
    staleness: int
    slow: float
    share: float
    steps: int
    capacity: int
    unit_s: float
    train_s: float

    def is_slow(self, index: int) -> bool:
        """Every tenth prompt with a share of 0.1, and so on."""
        return int((index + 1) * self.share) > int(index * self.share)

    def duration_s(self, index: int) -> float:
        """Of the group of a prompt."""
        return self.unit_s * (self.slow if self.is_slow(index) else 1.0)


@dataclass(frozen=True)
class Outcome:
    """``least_s``: see the module. ``thrown``: tokens."""

    setting: Setting
    trained_share: float
    offered_share: float
    skipped: int
    thrown: int
    seconds: float
    least_s: float


class Tails:
    """Prompts that say how long their completions take; the options' path has the setting."""

    def __init__(self, options: TaskOptions) -> None:
        self._setting = Setting(**json.loads(options.path))
        if self._setting.lengths_known:
            self.expected_tokens = self._expected_tokens

    def prompt(self, index: int, codec: Codec) -> Prompt:
        """Its index is among the tokens: no two are equal."""
        return Prompt(index, (3 + self._setting.is_slow(index), index))

    def _expected_tokens(self, prompt: Prompt) -> float:
        return TOKENS * (self._setting.slow if prompt.token_ids[0] == 4 else 1.0)

    async def reward(self, prompt: Prompt, text: str, token_ids: Sequence[int]) -> float:
        """Any."""
        return float(len(token_ids))


class TimedServer:
    """Answers /v1/completions as vLLM does, in pieces, over the time that the prompt takes."""

    def __init__(self, setting: Setting) -> None:
        self._setting = setting
        self._loop = asyncio.new_event_loop()
        self._places = asyncio.Semaphore(setting.capacity * GROUP)
        self._url: Future[str] = Future()
        threading.Thread(target=self._run, daemon=True).start()
        self.url = self._url.result(START_S)

    def _run(self) -> None:
        async def listen() -> None:
            server = await asyncio.start_server(self._serve, "127.0.0.1", 0, backlog=256)
            self._url.set_result(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")

        asyncio.set_event_loop(self._loop)
        self._loop.run_until_complete(listen())
        # no deadline: ends with the process, or by close()
        self._loop.run_forever()

    def close(self) -> None:
        """Answer nothing more."""
        self._loop.call_soon_threadsafe(self._loop.stop)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                # no deadline: the client closes the connection
                head = await reader.readuntil(b"\r\n\r\n")
                length = next(
                    int(line.split(b":")[1])
                    for line in head.lower().splitlines()
                    if line.startswith(b"content-length")
                )
                body = json.loads(await reader.readexactly(length))
                async with self._places:
                    await self._answer(body, writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass  # The client is gone.
        finally:
            writer.close()

    async def _answer(self, body: dict, writer: asyncio.StreamWriter) -> None:
        setting, loop = self._setting, asyncio.get_running_loop()
        whole_s = setting.duration_s(body["prompt"][1])
        tokens = round(TOKENS * whole_s / setting.unit_s)
        done = len(body["prompt"]) - 2
        """Tokens of an earlier attempt."""
        head = "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked"
        writer.write(f"{head}\r\n\r\n".encode())
        began = loop.time()
        step = TOKENS // 2
        for last in range(done + step, tokens + step, step):
            last = min(last, tokens)
            await asyncio.sleep(began + (last - done) * whole_s / tokens - loop.time())
            count = last - max(done, last - step)
            choice = {
                "index": 0,
                "text": "",
                "finish_reason": "stop" if last == tokens else None,
                "token_ids": [5] * count,
                "logprobs": {"token_logprobs": [-1.0] * count},
            }
            event = f"data: {json.dumps({'choices': [choice]})}\n\n".encode()
            writer.write(f"{len(event):x}\r\n".encode() + event + b"\r\n")
            await writer.drain()
        event = b"data: [DONE]\n\n"
        writer.write(f"{len(event):x}\r\n".encode() + event + b"\r\n0\r\n\r\n")
        await writer.drain()


def least_s(setting: Setting) -> float:
    """See the module."""
    versions = [0.0]
    durations = [setting.duration_s(index) for index in range(setting.steps * PER_STEP)]
    for step in range(setting.steps):
        longest = max(durations[step * PER_STEP : (step + 1) * PER_STEP])
        begun = versions[max(0, step - setting.staleness)]
        versions.append(max(versions[step], begun + longest) + setting.train_s)
    return max(versions[-1], sum(durations) / setting.capacity + setting.train_s)


def train(setting: Setting, model_dir: str) -> Outcome:
    """One run to its end."""
    server = TimedServer(setting)
    spec = RolloutSpec(
        model_dir,
        task="scripts.bench_tails:Tails",
        task_path=json.dumps(asdict(setting)),
        prompts_per_step=PER_STEP,
        group_size=GROUP,
        max_completion_tokens=round(TOKENS * setting.slow) + 1,
        max_staleness=setting.staleness,
        max_concurrent_requests=setting.capacity * GROUP,
        consume=setting.consume,
    )
    client = RolloutClient(spec)
    try:
        client.start(START_S)
        began, slow = time.monotonic(), 0
        client.set_server(ServerState(server.url, 0, True, "r:0:f"))
        for version in range(setting.steps):
            batch = client.next_batch(version, PER_STEP, START_S)
            slow += sum(setting.is_slow(group.prompt.index) for group in batch)
            time.sleep(setting.train_s)
            client.set_server(ServerState(server.url, version + 1, True, f"r:{version + 1}:f"))
        seconds, counters = time.monotonic() - began, client.counters()
    finally:
        client.close()
        server.close()
    groups = setting.steps * PER_STEP
    return Outcome(
        setting,
        slow / groups,
        sum(map(setting.is_slow, range(groups))) / groups,
        counters.get("skipped", 0),
        counters.get("thrown_tokens", 0),
        seconds,
        least_s(setting),
    )


def report(found: list[Outcome]) -> int:
    """Print the table; 1 if a run with consume = "started" misses its goal (shares within 1 %, time
    within 1.1 of the least where lengths are known)."""
    columns = ("slow", "staleness", "consume", "offered", "trained", "skipped", "thrown away")
    print("".join(f"{name:>12}" for name in (*columns, "seconds", "of least", "of ready")))
    missed = 0
    for one in found:
        s = one.setting
        ready = next(
            o.seconds for o in found if o.setting == replace(s, consume="ready", lengths_known=True)
        )
        name = s.consume if s.lengths_known else "no lengths"
        ratio = one.seconds / one.least_s
        print(
            f"{s.slow:12g}{s.staleness:12}{name:>12}{one.offered_share:12.1%}"
            f"{one.trained_share:12.1%}{one.skipped:12}{one.thrown:12}{one.seconds:12.2f}"
            f"{ratio:12.2f}{one.seconds / ready:12.2f}"
        )
        if s.consume == "started":
            off = abs(one.trained_share - one.offered_share) > 0.01
            missed += off or (s.lengths_known and ratio > 1.1)
    return int(missed > 0)


def main() -> int:
    """Run all settings; see ``report`` for the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--slow", type=float, nargs="+", default=[3.0, 6.0])
    parser.add_argument("--share", type=float, default=0.1)
    parser.add_argument("--staleness", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--capacity", type=int, default=8, help="groups that are made at once")
    parser.add_argument("--unit", type=float, default=0.25, help="seconds of a fast group")
    parser.add_argument("--train", type=float, default=0.125, help="seconds of a training step")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    # The rollout process imports the task from here.
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    found = []
    with tempfile.TemporaryDirectory() as model_dir:
        write_tiny_model("qwen3", Path(model_dir), seed=1)
        for slow in options.slow:
            for staleness in options.staleness:
                for consume, known in (("started", True), ("started", False), ("ready", True)):
                    setting = Setting(
                        consume,
                        known,
                        staleness,
                        slow,
                        options.share,
                        options.steps,
                        options.capacity,
                        options.unit,
                        options.train,
                    )
                    found.append(train(setting, model_dir))
                    print(found[-1], file=sys.stderr, flush=True)
    if options.json:
        options.json.write_text(json.dumps([asdict(one) for one in found], indent=1) + "\n")
    return report(found)


if __name__ == "__main__":
    sys.exit(main())
