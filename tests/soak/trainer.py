"""The trainer process of the soak: ``python -m tests.soak.trainer``; its orders and its news are
JSON lines.

First line of stdin: the Orders. Then one line per step on stdout; after a calm version it waits for
a line on stdin. The end of stdin ends the process: nobody reads its news any more."""

import json
import os
import queue
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from tests.rigs.small_trainer import BLOCK_BYTES, SmallTrainer
from titan_grpo.config import WeightSync
from titan_grpo.engines.vllm import VllmControl
from titan_grpo.sync.worker import Images

GO_S = 600.0
"""How long a calm may last, in seconds."""

CONNECT_S = 10.0
"""Deadline of a receiver's start, which imports torch, in seconds. One that is killed while it
starts costs all of it."""


@dataclass(frozen=True, slots=True)
class Orders:
    """``corrupt``: (version, url): the image that the url's lane sends next after that version has
    one wrong byte."""

    urls: tuple[str, ...]
    versions: int
    calm: tuple[int, ...]
    corrupt: tuple[tuple[int, str], ...]
    seconds_per_version: float
    deadline_s: float

    @classmethod
    def parse(cls, text: str) -> "Orders":
        """From JSON."""
        data: Mapping[str, Any] = json.loads(text)
        corrupt = tuple((int(version), str(url)) for version, url in data["corrupt"])
        return cls(
            tuple(data["urls"]),
            data["versions"],
            tuple(data["calm"]),
            corrupt,
            data["seconds_per_version"],
            data["deadline_s"],
        )

    def to_json(self) -> str:
        """One line."""
        return json.dumps(asdict(self))

    def config(self) -> WeightSync:
        """Short deadlines; only a receiver's start has a longer one."""
        return WeightSync(
            block_bytes=BLOCK_BYTES,
            bucket_bytes=2 * BLOCK_BYTES,
            lane_deadline_s=self.deadline_s,
            commit_deadline_s=self.deadline_s,
            connect_deadline_s=CONNECT_S,
            backoff_s=0.05,
            backoff_max_s=0.5,
        )


class SentImages(tuple[torch.Tensor, ...]):
    """The images as the lanes read them: one lane's next read gets a copy with a wrong byte if
    ``spoil`` asked for it."""

    spoiled: set[str]
    struck: int

    def __new__(cls, images: Images) -> "SentImages":
        """Nothing is spoiled yet."""
        self = super().__new__(cls, images)
        self.spoiled, self.struck = set(), 0
        return self

    def spoil(self, url: str) -> None:
        """Once, for the lane of ``url``."""
        self.spoiled.add(f"lane {url}")

    def __getitem__(self, index: Any) -> Any:
        image = super().__getitem__(index)
        lane = threading.current_thread().name
        if lane not in self.spoiled:
            return image
        self.spoiled.discard(lane)
        self.struck += 1
        wrong = image.clone()
        wrong[wrong.numel() // 2] ^= 1
        return wrong


@dataclass(frozen=True, slots=True)
class Spent:
    """Time of a piece of the main thread's work. ``waited_s``: neither on a core nor queueing for
    one."""

    wall_s: float
    waited_s: float


class Stopwatch:
    """Measures the calling thread. What the kernel calls run delay is the machine's noise, and no
    wait."""

    def __init__(self) -> None:
        self._delay_s = _run_delay_s()
        self._wall_s, self._cpu_s = time.perf_counter(), time.thread_time()

    def stop(self) -> Spent:
        """Since it was made."""
        cpu_s, wall_s = time.thread_time() - self._cpu_s, time.perf_counter() - self._wall_s
        return Spent(wall_s, max(0.0, wall_s - cpu_s - (_run_delay_s() - self._delay_s)))


def _run_delay_s() -> float:
    try:
        return int(Path("/proc/thread-self/schedstat").read_text().split()[1]) / 1e9
    except OSError:
        return 0.0  # a kernel without it: noise counts as waiting


def say(news: Mapping[str, Any]) -> None:
    """One line to whoever started this process."""
    print(json.dumps(news), flush=True)


def listen() -> "queue.SimpleQueue[str]":
    """Lines of stdin; their end ends the process at once."""
    lines: queue.SimpleQueue[str] = queue.SimpleQueue()

    def read() -> None:
        for line in sys.stdin:
            lines.put(line)
        os._exit(3)

    threading.Thread(target=read, name="orders", daemon=True).start()
    return lines


class Run:
    """The training loop."""

    def __init__(self, orders: Orders, lines: "queue.SimpleQueue[str]", folder: Path) -> None:
        self._orders, self._lines = orders, lines
        self._sent = SentImages(())
        self._trainer = SmallTrainer(
            orders.urls,
            folder,
            orders.config(),
            lambda url: VllmControl(url, "", orders.deadline_s),
            self._keep,
        )
        self._private = {
            name: weight.to(torch.bfloat16) for name, weight in self._trainer.weights.items()
        }
        self._pace = threading.Event()

    def _keep(self, images: Images) -> Images:
        self._sent = SentImages(images)
        return self._sent

    def run(self) -> None:
        """Publish all versions; a step without a free slot publishes nothing and is counted as
        skipped."""
        orders, trainer = self._orders, self._trainer
        trainer.start()
        say({"run_id": trainer.run_id, "pid": os.getpid()})
        corrupt = list(orders.corrupt)
        step = published = 0
        while published < orders.versions:
            step += 1
            due = time.perf_counter() + orders.seconds_per_version
            trainer.step(step)
            for planned in [c for c in corrupt if c[0] <= published]:
                corrupt.remove(planned)
                self._sent.spoil(planned[1])
            news = self._boundary(step)
            published += bool(news["published"])
            calm = bool(news["published"]) and published in orders.calm
            say({**news, "count": published, "calm": calm, "spoiled": self._sent.struck})
            if calm:
                self._lines.get(timeout=GO_S)
            self._pace.wait(max(0.0, due - time.perf_counter()))
        start = time.perf_counter()
        flushed = trainer.worker.flush(step, 30.0)
        trainer.close()
        say({"flushed": flushed, "shutdown_s": time.perf_counter() - start})

    def _boundary(self, step: int) -> dict[str, Any]:
        digest = self._trainer.digest()
        watch = Stopwatch()
        for name, weight in self._trainer.weights.items():
            self._private[name].copy_(weight)
        control = watch.stop()
        watch = Stopwatch()
        published = self._trainer.boundary(step)
        error = self._trainer.worker.servers.take_error()
        spent = watch.stop()
        return {
            "version": step,
            "published": published,
            "digest": digest,
            "boundary": asdict(spent),
            "control": asdict(control),
            "error": str(error or ""),
        }


def main() -> int:
    """Run the orders of the first line."""
    torch.set_num_threads(1)
    lines = listen()
    orders = Orders.parse(lines.get(timeout=GO_S))
    with tempfile.TemporaryDirectory() as folder:
        Run(orders, lines, Path(folder)).run()
    return 0


if __name__ == "__main__":
    sys.exit(main())
