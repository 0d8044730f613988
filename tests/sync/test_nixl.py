"""Ranges by one-sided reads, over UCX's shared memory and TCP: real agents, real receivers."""

import gc
import importlib.util
import os
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.receive.site import Site, Weights
from tests.rigs.present import present
from tests.sync.conftest import MakeRig
from titan_grpo.errors import ServerUnfit, TransferFailed
from titan_grpo.layout.image import Hashing, SharedImage
from titan_grpo.layout.manifest import Manifest
from titan_grpo.protocol.messages import RangeSource
from titan_grpo.receive.fetch import Content, Fetch, Open, TcpReader
from titan_grpo.sync.transports import nixl
from titan_grpo.sync.transports.nixl import PACKAGES, NixlReader, NixlSource
from titan_grpo.sync.transports.range_server import RangeServer

pytestmark = pytest.mark.e2e
needs_nixl = pytest.mark.skipif(
    importlib.util.find_spec("nixl") is None, reason="nixl is not installed (titan_grpo[nixl])"
)

SOON_S = 60.0
"""What ends for another reason than its deadline ends within it, however busy the machine is."""

BLOCK, BLOCKS = 4096, 600
manifest = Manifest.build([("a", "uint8", (BLOCK * BLOCKS - 100,))], BLOCK)
good = torch.randint(0, 256, (manifest.total_bytes,), dtype=torch.uint8)
hashing = Hashing("xxh3")
content = Content(manifest, hashing.blocks(good.numpy().data, manifest), hashing)

ELSEWHERE = """
import sys, torch
from titan_grpo.sync.transports.nixl import NixlSource
image = torch.full((int(sys.argv[1]),), 7, dtype=torch.uint8)
source = NixlSource()
print(source.place(image.data_ptr(), image.nbytes), flush=True)
sys.stdin.read()
"""


@pytest.fixture(scope="module", autouse=True)
def agents() -> Iterator[None]:
    """They use no RDMA, and none is left: one that serves looks for work without a rest, on a core
    of its own, as long as it is there."""
    os.environ.setdefault("UCX_TLS", "tcp,shm,cma,self")
    yield
    nixl._reader.cache_clear()
    gc.collect()
    left = [each for each in gc.get_objects() if type(each) is nixl._Agent]
    assert left == [], [gc.get_referrers(each) for each in left]


@pytest.fixture(scope="module")
def source() -> NixlSource:
    return NixlSource()


@pytest.fixture
def over_tcp() -> Iterator[Open]:
    server = RangeServer()
    ticket = server.grant(good.numpy().data, None, None)
    at = RangeSource("127.0.0.1", server.listen("127.0.0.1"), ticket)
    yield partial(TcpReader, at, None, SOON_S)
    server.close()


def fetch(*sources: Open) -> tuple[Fetch, torch.Tensor]:
    with SharedImage.create(manifest.total_bytes, "test nixl") as image:
        made = Fetch(image, content, {0: sources}, 64 * BLOCK)
        made.run(3, SOON_S, (manifest.total_bytes,), lambda _: None)
        return made, image.tensor().clone()


def offered(source: NixlSource, image: torch.Tensor, wait_s: float = SOON_S) -> Open:
    return partial(NixlReader, source.place(image.data_ptr(), image.nbytes), wait_s)


@needs_nixl
def test_an_image_arrives_by_one_sided_reads_alone(source: NixlSource) -> None:
    made, image = fetch(offered(source, good))
    assert made.error == ""
    assert torch.equal(image, good)
    assert made.read_bytes == manifest.total_bytes


@needs_nixl
def test_a_slot_that_is_written_anew_while_it_is_read_is_seen_and_read_elsewhere(
    source: NixlSource, over_tcp: Open
) -> None:
    slot = good.clone()
    slot[slot.numel() // 2 :] += 1  # the next version is half written
    made, _ = fetch(offered(source, slot))
    assert "differs from what the trainer hashed" in made.error
    assert made.bad_block >= BLOCKS // 2 - 1
    made, image = fetch(offered(source, slot), over_tcp)
    assert made.error == ""
    assert torch.equal(image, good)


@needs_nixl
def test_a_killed_source_is_a_failed_transfer_and_another_one_is_read(over_tcp: Open) -> None:
    command = [sys.executable, "-c", ELSEWHERE, str(manifest.total_bytes)]
    elsewhere = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=os.getcwd()
    )
    lines = (
        line for line in present(elsewhere.stdout) if line.count(":") == 1 and line[:1].isdigit()
    )
    place = next(lines).strip()
    reader = NixlReader(place, SOON_S)
    got = bytearray(BLOCK)
    reader.read_into(BLOCK, memoryview(got))
    assert set(got) == {7}
    elsewhere.kill()
    elsewhere.communicate(timeout=SOON_S)
    with pytest.raises(TransferFailed, match="the source was lost"):
        reader.read_into(0, memoryview(got))
    reader.close()
    # a reader for each of the fetch's threads: one is used by one thread
    made, image = fetch(partial(NixlReader, place, SOON_S), over_tcp)
    assert made.error == ""
    assert torch.equal(image, good)


class NoRanges(RangeServer):
    """Serves channels, and no image by TCP."""

    def grant(self, *args: Any, **named: Any) -> str:
        ticket = super().grant(*args, **named)
        self.revoke(ticket)
        return ticket


@needs_nixl
def test_versions_reach_a_receiver_process_by_one_sided_reads(source: NixlSource) -> None:
    site = Site(transport="nixl", nixl=source, source=NoRanges())
    try:
        versions = [Weights(1.0), Weights(2.0)]
        link = site.connect(versions[0])
        for number, version in enumerate(versions, 1):
            assert site.deliver(link, number, number, version).ok
            assert site.engine.value() == number
    finally:
        site.close()


@needs_nixl
def test_the_sync_offers_its_slots_and_servers_of_other_hosts_get_every_version(
    rig: MakeRig,
) -> None:
    run = rig("a", far=True, transport="nixl")
    for version in (1, 2, 3):
        run.deliver(version)
    assert run.loaded["a"].value() == 3.0


def test_a_server_without_nixl_is_refused_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for package in PACKAGES:
        (tmp_path / f"{package}.py").write_text("raise ImportError('planted: not installed')\n")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")
    site = Site(transport="nixl")
    try:
        with pytest.raises(ServerUnfit, match="transport is nixl, which this environment lacks"):
            site.connect(Weights(1.0))
    finally:
        site.close()
