"""What every engine must do with weights streamed into it (``weight_sync.apply = "streamed"``),
driven by real lanes."""

import itertools
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from tests.conformance.commits import difference
from tests.conformance.crowd import REQUEST_S, prompt
from tests.conformance.engine import MAX_DIFFERENCE, EngineUnderTest, assert_aborted, assert_sound
from tests.conformance.reference import BLOCK_BYTES, Weights, renamed
from tests.rigs.trainer import SpoiledImages, Trainer
from tests.rigs.watched_sync import WatchedSync
from titan_grpo.config import WeightSync
from titan_grpo.engines.generation import Sampled, Sampling
from titan_grpo.engines.server import AUTO
from titan_grpo.layout.manifest import Manifest
from titan_grpo.protocol.lane import LaneEvent, Observer, Point, no_observer
from titan_grpo.protocol.messages import UNUSABLE, Label, Standing, new_run_id
from titan_grpo.runkey import Key
from titan_grpo.sync.lanes import SyncOptions
from titan_grpo.sync.link import LinkOptions

BUCKET_BYTES = 64 << 10
HALF = 8
"""A bucket at which the engine has taken tensors: the first tensor is shorter than this many, less
those that wait in the ring. Broken off before, the engine is intact and keeps its version."""
WAIT_S = 120.0
"""Deadline of what must happen, in seconds."""

CONFIG = WeightSync(
    apply="streamed",
    bind_host="127.0.0.1",
    block_bytes=BLOCK_BYTES,
    bucket_bytes=BUCKET_BYTES,
    lane_deadline_s=30.0,
    commit_deadline_s=30.0,
    backoff_s=0.5,
    backoff_max_s=1.0,
)


class LaneTrainer:
    """A trainer's side of one server: versions of a run of its own, made by ``remake``."""

    def __init__(
        self, e: EngineUnderTest, watch: Observer = no_observer, key: Key | None = None
    ) -> None:
        self.e, self.url, self._watch, self._key = e, e.access.url, watch, key
        self.run_id = new_run_id(time.time())
        self.folder = e.folder / self.run_id
        self.options = LinkOptions(
            WeightSync(apply="streamed", bucket_bytes=BUCKET_BYTES, lane_deadline_s=30.0),
            "gloo",
            CONFIG.bind_host,
            run_key=key,
        )
        self._trainer: Trainer | None = None

    def make(self, seed: int, rename: Callable[[str], str] = str) -> tuple[Weights, Path]:
        """Weights to send, and the directory that says what they compute."""
        path = self.e.remake(seed, self.folder / f"{seed}")
        return Weights(renamed(path, rename), self.options, self.run_id), path

    def start(self, manifest: Manifest) -> None:
        """The lane; it connects."""
        options = SyncOptions(
            urls=[self.url],
            make_control=lambda _: self.e.make(AUTO, self.e.access),
            run_key=self._key,
            guarded=False,
            tamper=SpoiledImages,
        )
        self._trainer = Trainer(
            manifest,
            CONFIG,
            self.folder / "run",
            options,
            self.run_id,
            partial(WatchedSync, watch=self._watch),
        )
        self.servers = self._trainer.servers
        self._trainer.start()

    def spoil(self, offset: int) -> None:
        """Have the lane send another byte there, once."""
        assert self._trainer is not None
        self._trainer.worker.post("spoil", self.url, offset)

    def publish(self, version: int, weights: Weights) -> str:
        """The label that the server is to show. The first version starts the lane."""
        if self._trainer is None:
            self.start(weights.manifest)
        assert self._trainer is not None
        self._trainer.publish_image(version, weights.image, WAIT_S)
        return str(Label(self.run_id, version, weights.fingerprint))

    def until(self, standing: Standing, version: int | None = None) -> None:
        """Wait until the ledger says so."""

        def there() -> bool:
            entry = self.servers.entries()[self.url]
            return entry.standing is standing and (version is None or entry.held == version)

        assert self.servers.wait(there, WAIT_S), (self.servers, self.servers.take_error())

    def break_off(self) -> None:
        """Abort what the lane waits for."""
        lane = self.servers.lane(self.url)
        assert lane is not None
        lane.abort()


@contextmanager
def trainer(
    e: EngineUnderTest, watch: Observer = no_observer, key: Key | None = None
) -> Iterator[LaneTrainer]:
    """A new run on the server."""
    made = LaneTrainer(e, watch, key)
    try:
        yield made
    finally:
        if made._trainer is not None:
            made._trainer.close()


def assert_serves(e: EngineUnderTest, label: str, path: Path) -> None:
    """The server shows the label, goes on, and computes what the model there does."""
    with e.control() as control:
        assert (control.label(), control.paused()) == (label, False)
    assert difference(e, path) <= MAX_DIFFERENCE


def assert_half_loaded(e: EngineUnderTest) -> None:
    with e.control() as control:
        assert (control.label(), control.paused()) == (UNUSABLE, True)


def streamed_weights_are_computed_also_the_second_time(e: EngineUnderTest) -> None:
    """And labelled; nothing is left paused."""
    with trainer(e) as run:
        for version in (1, 2):
            weights, path = run.make(version)
            assert difference(e, path) > 4 * MAX_DIFFERENCE, (
                "other weights must show for this to prove anything"
            )
            label = run.publish(version, weights)
            run.until(Standing.HOLDS, version)
            assert_serves(e, label, path)
        assert run.servers.take_error() is None


def a_transfer_that_breaks_off_is_known_until_a_whole_one_is_in(e: EngineUnderTest) -> None:
    """The server is half loaded: it stays paused, says so by its label, and takes no rollouts; then
    it gets everything."""
    broken: list[int] = []
    looked = threading.Event()

    def watch(passing: LaneEvent) -> None:
        if passing.point is Point.GREET and broken:
            # Otherwise the next connection may have repaired the server before it was looked at.
            assert looked.wait(WAIT_S)
        if passing.point is Point.EXTENT and passing.version == 2:
            broken.append(passing.version)
            if len(broken) == HALF:
                run.break_off()

    with trainer(e, watch) as run:
        (first, _), (second, _), (third, path) = (run.make(seed) for seed in (11, 12, 13))
        run.publish(1, first)
        run.until(Standing.HOLDS, 1)
        run.publish(2, second)
        run.until(Standing.QUARANTINED)
        assert_half_loaded(e)
        assert not run.servers.entries()[run.url].accepting
        label = run.publish(3, third)
        looked.set()
        run.until(Standing.HOLDS, 3)
        assert_serves(e, label, path)
        error = run.servers.take_error()
        assert error is not None
        assert "version 2" in str(error) or error.version == 2, error


def the_next_trainer_repairs_what_another_one_left_half_loaded(e: EngineUnderTest) -> None:
    """It knows of it by the label alone where no receiver remembers."""

    buckets = itertools.count(1)

    def watch(passing: LaneEvent) -> None:
        if passing.point is Point.EXTENT and next(buckets) == HALF:
            lane = dead.servers.lane(dead.url)
            assert lane is not None
            lane.stop()
            lane.abort()

    with trainer(e, watch) as dead:
        weights, _ = dead.make(21)
        dead.publish(1, weights)
        dead.until(Standing.QUARANTINED)
    assert_half_loaded(e)
    with trainer(e) as run:
        weights, path = run.make(22)
        label = run.publish(5, weights)
        run.until(Standing.HOLDS, 5)
        assert_serves(e, label, path)


def names_that_the_model_has_not_are_refused_before_anything_moves(e: EngineUnderTest) -> None:
    """Whether the engine would have noticed or not."""
    with trainer(e) as run:
        good, path = run.make(31)
        label = run.publish(1, good)
        run.until(Standing.HOLDS, 1)
    with trainer(e) as wrong:
        weights, _ = wrong.make(32, lambda name: name.replace("q_proj", "q_projx"))
        wrong.publish(1, weights)
        assert wrong.servers.wait(lambda: wrong.servers.last_error(wrong.url) is not None, WAIT_S)
        error = wrong.servers.take_error()
        assert "q_proj" in str(error), error
    assert_serves(e, label, path)


def no_request_runs_between_two_buckets_and_none_is_lost(e: EngineUnderTest) -> None:
    """Those that ran before go on afterwards; one that comes between two buckets is made by the new
    version alone."""
    late: list[Future[Sampled]] = []
    with ThreadPoolExecutor(1) as pool:

        def watch(passing: LaneEvent) -> None:
            if passing.point is Point.EXTENT and passing.version == 2 and not late:
                late.append(
                    pool.submit(e.run, e.speak.generate(prompt(9), Sampling(8, 1.0, 9), REQUEST_S))
                )
            if passing.point is Point.SENT and late:
                assert not late[0].done(), "a request was answered by a half-loaded server"

        with trainer(e, watch) as run:
            (first, _), (second, _) = run.make(41), run.make(42)
            before = run.publish(1, first)
            run.until(Standing.HOLDS, 1)
            with e.crowd(before) as crowd:
                after = run.publish(2, second)
                run.until(Standing.HOLDS, 2)
                assert_aborted(e, crowd.end(), [before, after])
            assert_sound(e, late[0].result(REQUEST_S), [after])


def a_byte_that_changed_on_its_way_quarantines_the_server_until_a_newer_version(
    e: EngineUnderTest,
) -> None:
    """What was loaded before it was seen is not served; the error names the block."""
    with trainer(e) as run:
        (first, _), (second, path) = run.make(51), run.make(52)
        run.start(first.manifest)
        last = first.manifest.num_blocks - 1
        run.spoil(first.manifest.block(last)[0][0])
        run.publish(1, first)
        run.until(Standing.QUARANTINED)
        assert_half_loaded(e)
        label = run.publish(2, second)
        run.until(Standing.HOLDS, 2)
        assert_serves(e, label, path)
        assert f"block {last} of" in str(run.servers.take_error())


CHECKS: tuple[Callable[[EngineUnderTest], None], ...] = (
    streamed_weights_are_computed_also_the_second_time,
    a_transfer_that_breaks_off_is_known_until_a_whole_one_is_in,
    the_next_trainer_repairs_what_another_one_left_half_loaded,
    names_that_the_model_has_not_are_refused_before_anything_moves,
    no_request_runs_between_two_buckets_and_none_is_lost,
)
"""They leave the server with weights of their own."""

DIGEST_CHECKS = (a_byte_that_changed_on_its_way_quarantines_the_server_until_a_newer_version,)
"""For a server with our receiver: a stock one checks no digests."""
