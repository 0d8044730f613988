"""A real vLLM server and real lanes with ``weight_sync.apply = "streamed"``: it computes what the
trainer's weights say, and a transfer that broke off half-way is known as such until a whole version
is in.
"""

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from titan_grpo.config import WeightSync
from titan_grpo.engines import vllm
from titan_grpo.engines.http import SyncDriver
from titan_grpo.engines.launch import Server, ServerSpec
from titan_grpo.engines.vllm import VllmControl
from titan_grpo.layout.digest import block_digests, fingerprint
from titan_grpo.layout.manifest import Manifest
from titan_grpo.observe.recorder import Recorder
from titan_grpo.protocol.lane_events import LaneEvent, Observer, Point, no_observer
from titan_grpo.protocol.ledger import Standing
from titan_grpo.protocol.messages import UNUSABLE, Label, new_run_id
from titan_grpo.sync.slots import Published
from titan_grpo.sync.worker import ImagePool, SyncOptions, SyncWorker
from titan_grpo.titan.tiny import tiny_weights, write_tiny_model

pytestmark = [pytest.mark.e2e, pytest.mark.long, pytest.mark.timeout(600)]

KIND = "qwen3"
BLOCK, BUCKET = 8 << 10, 16 << 10
STD = 0.05
"""Weights large enough that two seeds differ by whole units of log-probability, small enough for
bf16."""

MAX_DIFFERENCE = 0.05
SENDER = Path(__file__).parent.parent / "receive" / "streaming_sender.py"
CONFIG = WeightSync(
    apply="streamed",
    block_bytes=BLOCK,
    bucket_bytes=BUCKET,
    bind_host="127.0.0.1",
    lane_deadline_s=30.0,
    commit_deadline_s=30.0,
    backoff_s=5.0,
)


class Version:
    """The weights of one seed as an image, and what they compute."""

    def __init__(self, seed: int, folder: Path) -> None:
        tensors = {n: t.bfloat16() for n, t in tiny_weights(KIND, seed, STD).items()}
        self.manifest = Manifest.build(
            [(n, "bfloat16", tuple(t.shape)) for n, t in tensors.items()], BLOCK
        )
        self.image = torch.zeros(self.manifest.total_bytes, dtype=torch.uint8)
        for spec in self.manifest.tensors:
            self.image[spec.offset : spec.offset + spec.nbytes] = (
                tensors[spec.name].flatten().view(torch.uint8)
            )
        self.digests = block_digests(memoryview(self.image.numpy()), self.manifest, "xxh3")
        self.fingerprint = fingerprint(self.manifest.digest, self.digests)
        path = write_tiny_model(KIND, folder / f"{seed}", seed, std=STD, dtype="bfloat16")
        self._model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)

    def difference(self, driver: SyncDriver) -> float:
        """Largest absolute log-probability difference between server and fp32 reference over three
        sequences."""
        ids = torch.randint(4, 124, (3, 10), generator=torch.Generator().manual_seed(0))
        with torch.no_grad():
            logprobs = (
                self._model(ids).logits.log_softmax(-1)[:, :-1].gather(2, ids[:, 1:, None])[..., 0]
            )
        served = torch.tensor([driver.run(vllm.score(row, 60.0)) for row in ids.tolist()])
        return float((served - logprobs).abs().max())


class Trainer:
    """The sync half of a trainer: image slots, ledger and one lane."""

    def __init__(
        self,
        started_s: float,
        url: str,
        manifest: Manifest,
        folder: Path,
        watch: Observer = no_observer,
    ) -> None:
        self.run_id, self.url = new_run_id(started_s), url
        self.recorder = Recorder(folder / f"run{started_s}")
        self.pool = ImagePool.create(manifest, CONFIG.slots, self.run_id)
        self.worker = SyncWorker(
            self.pool,
            CONFIG,
            self.recorder,
            SyncOptions(
                urls=[url],
                make_control=lambda url: VllmControl(url, "", 30.0, 60.0),
                watch=watch,
                guarded=False,
            ),
        )
        self.servers, self.slots = self.worker.servers, self.worker.slots
        self.worker.start()

    def publish(self, version: int, weights: Version, bad_byte: int = -1) -> None:
        """As the sealer does it; ``bad_byte``: this one changes after the digests were made."""
        slot = self.slots.wait_reserved(30.0)
        assert slot is not None
        image = self.pool.tensors()[slot]
        image.copy_(weights.image)
        if bad_byte >= 0:
            image[bad_byte] ^= 1
        self.slots.writing(version, slot, frozenset({0}))
        self.slots.copied(version, 0)
        label = Label(self.run_id, version, weights.fingerprint)
        self.slots.complete(Published(label, slot, weights.digests, self.recorder.now()))

    def wait(self, standing: Standing) -> None:
        """Until the ledger says so."""
        assert self.servers.wait(lambda: self.servers.entry(self.url).standing is standing, 60.0), (
            self.servers
        )

    def close(self) -> None:
        self.worker.close()
        self.recorder.close()
        self.pool.close()


class Site:
    """One running server."""

    def __init__(self, server: Server, driver: SyncDriver, folder: Path) -> None:
        self.url, self.driver, self.folder = server.url, driver, folder
        self.control = VllmControl(server.url, "", 60.0)
        self._started_s = 1_700_000_000.0

    @contextmanager
    def trainer(self, manifest: Manifest, watch: Observer = no_observer) -> Iterator[Trainer]:
        """A trainer that started later than every one before it."""
        self._started_s += 1.0
        made = Trainer(self._started_s, self.url, manifest, self.folder, watch)
        try:
            yield made
        finally:
            made.close()

    def cut_off(self, weights: Version, buckets: int) -> None:
        """A trainer that pauses the server, sends this many buckets and is killed."""
        self._started_s += 1.0
        told = {
            "run_id": new_run_id(self._started_s),
            "epoch": 1,
            "bucket_bytes": BUCKET,
            "timeout_s": 30.0,
        }
        (self.folder / "options.json").write_text(json.dumps(told | {"version": 9, "bad_byte": -1}))
        (self.folder / "manifest.json").write_text(weights.manifest.to_json())
        (self.folder / "image").write_bytes(weights.image.numpy().tobytes())
        command = [sys.executable, str(SENDER), str(self.folder), str(buckets)]
        with subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as sender:
            self.control.greet(json.loads(sender.stdout.readline()))
            commit = json.loads(sender.stdout.readline())
            self.control.pause()
            load = threading.Thread(target=self.control.load, args=(commit,), daemon=True)
            load.start()
            assert sender.stdout.readline().strip() == "sent"
            sender.kill()
            load.join(20.0)
            assert not load.is_alive(), "the engine was not let go when its sender died"


@pytest.fixture(scope="module")
def site(vllm_python, tmp_path_factory) -> Iterator[Site]:
    folder = tmp_path_factory.mktemp("streamed")
    first = write_tiny_model(KIND, folder / "start", 100, std=STD)
    with Server(
        ServerSpec(vllm_python, str(first), str(folder / "server.log"), cpu_threads=2)
    ) as server:
        server.wait_healthy(300.0)
        with SyncDriver(server.url) as driver:
            yield Site(server, driver, folder)


def check_serves(site: Site, trainer: Trainer, version: int, weights: Version) -> None:
    """The server shows this version, goes on generating, and computes what the weights say."""
    assert site.control.label() == str(Label(trainer.run_id, version, weights.fingerprint))
    assert not site.control.paused()
    difference = weights.difference(site.driver)
    print(f"version {version}: max abs log-probability difference {difference:.4f}")
    assert difference <= MAX_DIFFERENCE


def test_the_server_computes_the_streamed_weights_also_after_a_second_update(site, tmp_path):
    first, second = Version(1, tmp_path), Version(2, tmp_path)
    assert first.difference(site.driver) > 1.0, (
        "the server must start with other weights for this to prove anything"
    )
    assert first.manifest.total_bytes > 4 * BUCKET
    with site.trainer(first.manifest) as trainer:
        for version, weights in ((1, first), (2, second)):
            trainer.publish(version, weights)
            assert trainer.servers.wait_held(version, 60.0, everyone=True) == [site.url]
            check_serves(site, trainer, version, weights)
        assert trainer.servers.take_error() is None


@pytest.mark.parametrize("buckets", [1, 30])
def test_a_trainer_killed_in_mid_transfer_is_repaired_by_the_next_one(site, tmp_path, buckets):
    old, lost, new = Version(3, tmp_path), Version(4, tmp_path), Version(5, tmp_path)
    first_tensor = old.manifest.tensors[0].nbytes
    with site.trainer(old.manifest) as trainer:
        trainer.publish(1, old)
        assert trainer.servers.wait_held(1, 60.0, everyone=True)
    site.cut_off(lost, buckets)
    site.driver.run(vllm.health())
    assert site.control.paused()
    with site.trainer(new.manifest) as trainer:
        if buckets * BUCKET < first_tensor:
            trainer.wait(Standing.UNKNOWN)
        else:
            trainer.wait(Standing.QUARANTINED)
            assert site.control.label() == UNUSABLE
            assert site.control.paused()
            assert not trainer.servers.entry(site.url).accepting
        trainer.publish(10, new)
        assert trainer.servers.wait_held(10, 60.0, everyone=False), trainer.servers.take_error()
        check_serves(site, trainer, 10, new)


def test_a_block_that_differs_quarantines_the_server_until_a_newer_version(site, tmp_path):
    bad, good = Version(6, tmp_path), Version(7, tmp_path)
    last = bad.manifest.num_blocks - 1
    with site.trainer(bad.manifest) as trainer:
        trainer.publish(1, bad, bad_byte=bad.manifest.block(last)[0])
        trainer.wait(Standing.QUARANTINED)
        assert site.control.label() == UNUSABLE
        assert site.control.paused()
        trainer.publish(2, good)
        assert trainer.servers.wait_held(2, 60.0, everyone=False)
        check_serves(site, trainer, 2, good)
        assert f"block {last} of" in str(trainer.servers.take_error())


def test_an_aborted_commit_leaves_a_whole_version_running_or_the_server_paused_and_marked(
    site, tmp_path
):
    weights, aborted = Version(8, tmp_path), threading.Event()

    def watch(passing: LaneEvent) -> None:
        if passing.point is Point.EXTENT and passing.version == 2:
            lane = trainer.servers.lane(site.url)
            assert lane is not None
            lane.stop()
            lane.abort()
            aborted.set()

    with site.trainer(weights.manifest, watch) as trainer:
        trainer.publish(1, weights)
        trainer.wait(Standing.HOLDS)
        trainer.publish(2, weights)
        assert aborted.wait(60.0)
    label = site.control.label()
    assert site.control.paused() == (label == UNUSABLE)
    assert label == UNUSABLE or label.startswith(f"{trainer.run_id}:")
