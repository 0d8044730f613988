"""Versions that pass through a window into an engine that stands still: a real receiver process,
real senders, no vLLM."""

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest
import torch

from tests.receive.site import BLOCK, BUCKET, Site, Version
from titan_grpo.errors import TransferFailed
from titan_grpo.protocol.messages import Applied
from titan_grpo.receive.commit import Engine, EngineSide
from titan_grpo.receive.window import WINDOW_BUCKETS
from titan_grpo.sync.link import LaneLink

pytestmark = pytest.mark.e2e

DEADLINE_S = 240.0
SOON_S = 120.0
"""What ends for another reason than its deadline ends within it, however busy the machine is."""

STALL_S = 6.0
"""A deadline that a test waits for; also that of the communicator's opening."""

WINDOW = WINDOW_BUCKETS * BUCKET
SHAPES = {
    "larger_than_the_window": (torch.float32, (5, 4099)),
    "scalar": (torch.bfloat16, ()),
    "larger_than_a_bucket": (torch.bfloat16, (3, 3333)),
    "small": (torch.float32, (7,)),
    "last": (torch.bfloat16, (40, 1001)),
}
FIRST_BUCKETS = -(-5 * 4099 * 4 // BUCKET)
"""Buckets until the first tensor is whole."""


class Random(Version):
    """Random weights, different in every element."""

    def __init__(self, seed: int) -> None:
        random = torch.Generator().manual_seed(seed)
        super().__init__(
            {n: torch.randn(s, generator=random).to(d) for n, (d, s) in SHAPES.items()}
        )


class LayerEngine(Engine):
    """Keeps what it is given until the load ends, as engines keep the tensors of an unfinished
    layer."""

    def __init__(self) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self.begun = threading.Event()
        self.loads = 0

    def load(self, tensors: Iterator[tuple[str, torch.Tensor]]) -> None:
        self.loads += 1
        kept = {}
        for name, tensor in tensors:
            kept[name] = tensor
            self.begun.set()
        self.tensors = kept

    def holds(self, version: Version) -> bool:
        return self.tensors.keys() == version.tensors.keys() and all(
            torch.equal(tensor, self.tensors[name]) for name, tensor in version.tensors.items()
        )


class Loading(threading.Thread):
    """The engine's update call, during which it stands still."""

    def __init__(self, side: EngineSide, commit: dict[str, Any]) -> None:
        super().__init__(daemon=True)
        self._side, self._commit = side, commit
        self._report: Applied | None = None
        self.start()

    def run(self) -> None:
        self._report = self._side.commit(self._commit)

    def report(self, within_s: float) -> Applied:
        self.join(within_s)
        assert not self.is_alive(), f"the engine was not let go within {within_s} s"
        assert self._report is not None
        return self._report


class WindowedSite(Site):
    """One engine with its plugin half, and the lanes that a test opens to it."""

    def __init__(self, deadline_s: float = DEADLINE_S) -> None:
        super().__init__(
            engine=LayerEngine(), transport="gloo", lane_deadline_s=deadline_s, apply="streamed"
        )

    def deliver(self, link: LaneLink, number: int, version: int, weights: Version) -> Applied:
        """One transfer, through the engine's update call."""
        staged = link.offer(number, version, weights.digests, weights.fingerprint)
        assert staged.ok, staged
        loading = Loading(self.side, link.commit(staged).to_dict())
        link.stream(weights.image)
        loading.report(DEADLINE_S)
        return link.wait_applied(number, SOON_S)

    def begin(self, version: Version) -> tuple[LaneLink, Loading]:
        """A lane of the next epoch, and the engine's call that waits for its version 2."""
        link = self.connect(version)
        staged = link.offer(1, 2, version.digests, version.fingerprint)
        return link, Loading(self.side, link.commit(staged).to_dict())


@pytest.fixture
def site() -> Iterator[WindowedSite]:
    made = WindowedSite()
    yield made
    made.close()


def test_a_version_passes_bit_for_bit_through_a_window_smaller_than_its_largest_tensor(
    site: WindowedSite,
) -> None:
    one, two = Random(1), Random(2)
    link = site.connect(one)
    assert one.manifest.spec("larger_than_the_window").nbytes > WINDOW
    for number, version in enumerate((one, two), start=1):
        report = site.deliver(link, number, number, version)
        assert report.ok, report.error
        assert report.intact
        assert (report.loaded, report.fingerprint, report.bad_block) == (
            len(SHAPES),
            version.fingerprint,
            -1,
        )
        assert site.engine.holds(version)


def test_a_receiver_gives_a_sign_of_life_after_each_streamed_version(site: WindowedSite) -> None:
    version = Random(1)
    link = site.connect(version)
    for number in (1, 3):
        assert site.deliver(link, number, number, version).ok
        link.ping(number + 1, SOON_S)


def test_the_server_holds_a_window_and_no_whole_image(site: WindowedSite) -> None:
    version = Random(1)
    grant = site.receiver.place(site.connect(version).attach())
    assert grant["image"]["nbytes"] == WINDOW < version.manifest.total_bytes


def send(link: LaneLink, version: Version, buckets: int) -> None:
    """So many buckets, and no more."""
    for start in range(0, buckets * BUCKET, BUCKET):
        link._connected().broadcast(version.image[start : start + BUCKET], DEADLINE_S)


def test_a_sender_gone_before_the_first_tensor_leaves_the_old_version_whole(
    site: WindowedSite,
) -> None:
    old, new = Random(1), Random(2)
    site.deliver(site.connect(old), 1, 1, old)
    link, loading = site.begin(new)
    send(link, new, FIRST_BUCKETS - 1)
    link.close()
    report = loading.report(SOON_S)
    assert not report.ok
    assert report.intact
    assert site.engine.loads == 1
    assert site.engine.holds(old)
    assert site.deliver(site.connect(new), 1, 2, new).ok
    assert site.joined.intact
    assert site.joined.held_version == 1
    assert site.engine.holds(new)


def test_a_sender_gone_after_the_first_tensor_leaves_the_engine_not_intact_until_a_whole_version(
    site: WindowedSite,
) -> None:
    old, new = Random(1), Random(2)
    site.deliver(site.connect(old), 1, 1, old)
    site.engine.begun.clear()
    link, loading = site.begin(new)
    send(link, new, FIRST_BUCKETS)
    assert site.engine.begun.wait(SOON_S)
    link.close()
    report = loading.report(SOON_S)
    assert not report.ok
    assert not report.intact
    link = site.connect(new)
    assert not site.joined.intact
    report = site.deliver(link, 1, 2, new)
    assert report.ok
    assert report.intact
    assert site.engine.holds(new)
    site.connect(new)
    assert site.joined.intact
    assert site.joined.held_version == 2


@pytest.mark.parametrize("buckets", [1, FIRST_BUCKETS])
def test_a_stalled_sender_frees_the_engine_by_the_deadline(buckets: int) -> None:
    site, version = WindowedSite(STALL_S), Random(1)
    with closing(site):
        link, loading = site.begin(version)
        send(link, version, buckets)
        report = loading.report(SOON_S)
        assert 0.75 * STALL_S < report.apply_s < SOON_S
        assert not report.ok
        assert report.intact == (buckets == 1)
        assert site.deliver(site.connect(version), 1, 2, version).ok


@pytest.mark.parametrize(
    ("bad_byte", "intact"), [(5000, True), (FIRST_BUCKETS * BUCKET + WINDOW + 9000, False)]
)
def test_a_corrupted_block_is_named_to_the_lane_and_no_byte_of_its_bucket_reaches_the_engine(
    site: WindowedSite, bad_byte: int, intact: bool
) -> None:
    # a whole window after the first tensor: the receiver can check that block only when the engine
    # has taken the tensor
    version = Random(1)
    link, loading = site.begin(version)
    bad = version.image.clone()
    bad[bad_byte] ^= 1
    with pytest.raises(TransferFailed):
        link.stream(bad)
    loading.report(SOON_S)
    report = link.wait_applied(1, SOON_S)
    assert (report.ok, report.intact) == (False, intact)
    assert report.bad_block == bad_byte // BLOCK
    assert f"block {report.bad_block} of" in report.error
    assert site.engine.tensors == {}


def test_digests_that_do_not_make_the_fingerprint_are_refused_before_the_engine_is_paused(
    site: WindowedSite,
) -> None:
    good, other = Random(1), Random(2)
    link = site.connect(good)
    staged = link.offer(1, 1, good.digests, other.fingerprint)
    assert not staged.ok
    assert "fingerprint" in staged.error
    assert site.deliver(link, 2, 1, good).ok


def test_a_lane_that_gives_up_frees_the_engine_at_once_and_reads_its_report(
    site: WindowedSite,
) -> None:
    link, loading = site.begin(Random(1))
    link.cancel()
    report = loading.report(SOON_S)
    assert not report.ok
    assert report.intact
    assert link.wait_applied(1, SOON_S) == report


def test_an_engine_that_refuses_ends_the_sending(site: WindowedSite) -> None:
    version = Random(1)
    link = site.connect(version)
    staged = link.offer(1, 1, version.digests, version.fingerprint)
    wrong = link.commit(staged).to_dict() | {"fingerprint": "0" * 32}
    report = Loading(site.side, wrong).report(SOON_S)
    assert not report.ok
    assert report.intact
    assert not link.wait_applied(1, SOON_S).ok
    with pytest.raises(TransferFailed):
        link.stream(version.image)


def test_a_killed_receiver_frees_the_engine(site: WindowedSite) -> None:
    version = Random(1)
    link, loading = site.begin(version)
    send(link, version, FIRST_BUCKETS)
    assert site.engine.begun.wait(SOON_S)
    os.kill(site.receiver_pid, signal.SIGKILL)
    report = loading.report(SOON_S)
    assert not report.ok
    assert not report.intact
    assert site.deliver(site.connect(version), 1, 2, version).ok
    assert site.engine.holds(version)
