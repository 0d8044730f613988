"""What every transport must do, on every transport that this host can open; and the store that
lanes meet at."""

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from tests.rigs.board import Board
from tests.rigs.sockets import descriptors_left
from titan_grpo.config import WeightSync
from titan_grpo.engines.http import ServerAccess
from titan_grpo.engines.sglang import SglangControl
from titan_grpo.engines.sglang_stock import MOST, StockRoutes
from titan_grpo.errors import (
    ConfigError,
    PeerError,
    ServerRefused,
    ServerUnfit,
    TransferFailed,
)
from titan_grpo.layout.manifest import Manifest
from titan_grpo.protocol.messages import Hello, Kind, Staged
from titan_grpo.runkey import Key
from titan_grpo.sync.link import LaneLink, LinkOptions
from titan_grpo.sync.probe import ask_receiver
from titan_grpo.sync.stock import StockLink
from titan_grpo.sync.transports.broadcast import (
    Transport,
    TransportOptions,
    broadcast_image,
    delete_text,
    get_text,
    host_store,
    join_store,
    open_transport,
    put_text,
)
from titan_grpo.sync.transports.channel import ReceiverChannel, connect
from titan_grpo.sync.transports.range_server import RangeServer

LOOPBACK = "127.0.0.1"
needs_two_gpus = pytest.mark.skipif(
    torch.cuda.device_count() < 2, reason="no CUDA: NCCL needs a device per rank"
)
KINDS = ["gloo", pytest.param("nccl", marks=needs_two_gpus)]
MUCH = 64 << 20
"""More bytes than two sockets buffer, so that a sender without a receiver blocks."""


LONG_S = 120.0
"""A deadline that nothing here comes near."""

SOON_S = 60.0
"""What ends for another reason than LONG_S ends within it, however busy the machine is."""


def options(rank: int, timeout_s: float = LONG_S) -> TransportOptions:
    return TransportOptions(timeout_s, LOOPBACK, 1 << 20, f"cuda:{rank}")


@pytest.fixture(params=KINDS)
def pair(request: pytest.FixtureRequest) -> Iterator[tuple[Transport, Transport]]:
    """Rank 0 and rank 1, connected."""
    host = host_store(LOOPBACK)
    other = join_store(LOOPBACK, host.port, SOON_S)
    with ThreadPoolExecutor(2) as pool:
        opening = [
            pool.submit(open_transport, request.param, s, r, 2, options(r))
            for r, s in enumerate((host, other))
        ]
        first, second = (future.result(SOON_S) for future in opening)
    yield first, second
    for transport in (first, second):
        transport.close()


def together(*calls: Callable[[], object]) -> list[object]:
    with ThreadPoolExecutor(len(calls)) as pool:
        return [future.result(SOON_S) for future in [pool.submit(call) for call in calls]]


@pytest.mark.parametrize("nbytes", [1, 4096, 3 * (1 << 20) + 17])
def test_an_image_arrives_byte_for_byte_in_buckets(
    pair: tuple[Transport, Transport], nbytes: int
) -> None:
    sent = torch.randint(0, 256, (nbytes,), dtype=torch.uint8)
    got = torch.zeros(nbytes, dtype=torch.uint8)
    together(
        *(
            lambda t=t, x=x: broadcast_image(t, x, 1 << 20, SOON_S)
            for t, x in zip(pair, (sent, got), strict=True)
        )
    )
    assert torch.equal(sent, got)


@pytest.mark.parametrize("rank", [0, 1])
def test_an_end_whose_peer_stalls_fails_at_its_deadline(
    pair: tuple[Transport, Transport], rank: int
) -> None:
    start = time.monotonic()
    with pytest.raises(TransferFailed):
        broadcast_image(pair[rank], torch.zeros(MUCH, dtype=torch.uint8), MUCH, 1.0)
    assert 0.9 < time.monotonic() - start < SOON_S


@pytest.mark.parametrize("rank", [0, 1])
def test_an_abort_ends_a_broadcast_and_all_later_ones_and_the_close_waits_for_no_peer(
    pair: tuple[Transport, Transport], rank: int
) -> None:
    timer = threading.Timer(0.3, pair[rank].abort)
    timer.start()
    start = time.monotonic()
    for _ in range(2):
        with pytest.raises(TransferFailed, match="abort"):
            pair[rank].broadcast(torch.zeros(MUCH, dtype=torch.uint8), LONG_S)
    pair[rank].close()
    assert time.monotonic() - start < SOON_S
    timer.join()


def test_a_peer_that_closed_is_noticed_before_the_deadline(
    pair: tuple[Transport, Transport],
) -> None:
    pair[0].close()
    start = time.monotonic()
    with pytest.raises(TransferFailed):
        pair[1].broadcast(torch.zeros(MUCH, dtype=torch.uint8), LONG_S)
    assert time.monotonic() - start < SOON_S


@pytest.mark.parametrize("kind", KINDS)
def test_a_missing_rank_fails_the_opening_at_its_deadline(kind: str) -> None:
    host = host_store(LOOPBACK)
    start = time.monotonic()
    with pytest.raises(TransferFailed):
        open_transport(kind, host, 0, 2, options(0, timeout_s=1.0))
    assert time.monotonic() - start < SOON_S


def test_an_unknown_kind_is_a_config_error() -> None:
    with pytest.raises(ConfigError, match="carrier_pigeon"):
        open_transport("carrier_pigeon", host_store(LOOPBACK), 0, 2, options(0))


@pytest.mark.skipif(torch.cuda.is_available(), reason="this host has CUDA")
def test_nccl_without_a_gpu_is_a_config_error_that_names_tcp() -> None:
    with pytest.raises(ConfigError, match="use tcp"):
        open_transport("nccl", host_store(LOOPBACK), 0, 2, options(0))


def test_a_store_listens_on_the_interface_it_was_bound_to_and_on_no_other() -> None:
    port = host_store(LOOPBACK).port
    with open("/proc/net/tcp") as table:
        listening = [line.split()[1] for line in table if line.split()[3] == "0A"]
    addresses = {a.split(":")[0] for a in listening if int(a.split(":")[1], 16) == port}
    assert addresses <= {"0100007F"}


@pytest.mark.parametrize("count", [0, 40, (9 << 20) + 1, 16 << 20])
def test_a_store_carries_texts_of_any_length_and_keeps_nothing_of_one_that_is_deleted(
    count: int,
) -> None:
    host = host_store(LOOPBACK)
    before = host.num_keys()
    for text in ("a" * count, "b" * 7):
        put_text(join_store(LOOPBACK, host.port, SOON_S), "digests", text)
        assert get_text(host, "digests") == text
    put_text(host, "digests", "a" * count)
    delete_text(host, "digests")
    assert host.num_keys() == before


@pytest.mark.parametrize("value", ["", "one"])
def test_a_value_that_is_no_text_in_pieces_is_its_writers_error(value: str) -> None:
    host = host_store(LOOPBACK)
    host.set("digests", value)
    with pytest.raises(PeerError, match="digests in the store must be a text in pieces"):
        get_text(host, "digests")


def test_joining_a_store_that_is_gone_names_its_address() -> None:
    host = host_store(LOOPBACK)
    port = host.port
    del host
    with pytest.raises(TransferFailed, match=f"{LOOPBACK}:{port}"):
        join_store(LOOPBACK, port, 0.5)


@pytest.fixture
def link() -> Iterator[LaneLink]:
    manifest = Manifest.build([("a", "bfloat16", (10,))], 4096)
    config = WeightSync(bucket_bytes=4096, lane_deadline_s=10.0)
    made = LaneLink("run", 1, manifest, LinkOptions(config, "gloo", LOOPBACK))
    yield made
    made.close()


def test_a_receiver_that_does_not_come_is_a_failed_transfer_at_the_deadline(link: LaneLink) -> None:
    hello = link.open()
    said = rf"receiver to connect to {hello.host}:{hello.port} .*server's log says why; .*bind_host"
    with pytest.raises(TransferFailed, match=said):
        link.wait_joined(0.3)


def test_an_abort_ends_the_wait_for_a_receiver_and_every_later_one_at_once(link: LaneLink) -> None:
    link.open()
    timer = threading.Timer(0.3, link.abort)
    timer.start()
    start = time.monotonic()
    for _ in range(2):
        with pytest.raises(TransferFailed, match="abort"):
            link.wait_joined(LONG_S)
    assert time.monotonic() - start < SOON_S
    timer.join()


def _receiver(hello: Hello) -> ReceiverChannel:
    sock = connect((hello.host, hello.port), hello.ticket, None, SOON_S, "trainer")
    return ReceiverChannel(sock, "", lambda _: None)


def test_only_the_first_mark_has_the_time_of_the_patches() -> None:
    manifest = Manifest.build([("a", "bfloat16", (3 * 4096,))], 4096)
    config = WeightSync(bucket_bytes=4096, progress_deadline_s=0.5, lane_deadline_s=LONG_S)
    link = LaneLink("run", 1, manifest, LinkOptions(config, "tcp", LOOPBACK))
    hello = link.open()
    start = time.monotonic()
    receiver = _receiver(hello)
    receiver.send(Kind.MOVED, 0)
    with pytest.raises(TransferFailed, match="to have byte 8192"):
        link._moving(0, None, int(LONG_S) * config.min_rate)
    assert time.monotonic() - start < SOON_S
    link.close()


def test_a_link_whose_store_cannot_be_hosted_leaves_no_channel_at_the_source() -> None:
    manifest = Manifest.build([("a", "bfloat16", (10,))], 4096)
    source = RangeServer()
    source.listen(LOOPBACK)
    link = LaneLink("run", 1, manifest, LinkOptions(WeightSync(), "gloo", LOOPBACK, source=source))
    with descriptors_left(0), pytest.raises(ConfigError, match="there is none left"):
        link.open()
    link.close()
    assert source._channels == {}
    source.close()


def test_a_receiver_may_take_longer_for_the_manifest_than_for_a_bucket() -> None:
    manifest = Manifest.build([("a", "bfloat16", (10,))], 4096)
    config = WeightSync(bucket_bytes=4096, progress_deadline_s=0.2, min_rate=1 << 40)
    link = LaneLink("run", 1, manifest, LinkOptions(config, "tcp", LOOPBACK))
    hello = link.open()
    receiver = _receiver(hello)
    answer = Staged(0, 0, True, "").to_json().encode()
    timer = threading.Timer(1.0, receiver.send, (Kind.STAGED, 0, answer))
    timer.start()
    assert link.send_manifest().ok
    timer.join()
    link.close()


def test_all_links_send_one_copy_of_the_manifest_and_of_a_version_s_digests() -> None:
    manifest = Manifest.build([("a", "bfloat16", (10,))], 4096)
    image, digests = torch.zeros(manifest.total_bytes, dtype=torch.uint8), bytes(range(16))
    config = WeightSync(bucket_bytes=4096, progress_deadline_s=0.05, connect_deadline_s=0.05)
    queued = []
    for epoch in (1, 2):
        link = LaneLink("run", epoch, manifest, LinkOptions(config, "tcp", LOOPBACK))
        link.open()
        with pytest.raises(TransferFailed, match="waiting for the receiver"):
            link.send_manifest()  # no receiver comes
        with pytest.raises(TransferFailed, match="waiting for the receiver"):
            link.send(1, 1, image, digests, "")
        queued.append([part.obj for part in link._opened().out])
        link.close()
    first, second = queued
    shared = [body for body in first if any(body is other for other in second)]
    assert shared == [manifest.encoded, digests]
    assert manifest.encoded == manifest.to_json().encode()


def server_info(tp_size: int) -> dict[str, int]:
    return {"tp_size": tp_size, **MOST}


def test_a_server_that_refuses_a_group_is_the_reason_that_it_was_not_opened() -> None:
    board = Board()
    board.routes = {
        "GET /server_info": lambda _: (200, server_info(tp_size=1)),
        "GET /model_info": lambda _: (200, {"weight_version": "default", "model_path": "m"}),
        "POST /init_weights_update_group": lambda _: (400, {"message": "no such backend"}),
    }
    access = ServerAccess(board.url, SOON_S)
    options = LinkOptions(WeightSync(lane_deadline_s=2.0), "gloo", LOOPBACK)
    manifest = Manifest.build([("a", "bfloat16", (10,))], 4096)
    link = StockLink("run", 1, manifest, options, StockRoutes(access))
    link.join(SglangControl(access), SOON_S)
    with pytest.raises(ServerRefused, match="no such backend"):
        link.offer(1, 1, b"", "")
    link.close()
    board.close()


@pytest.mark.parametrize(
    ("transport", "key", "words"),
    [("gloo", Key.generate(), "has a run key"), ("nccl", None, "transport is nccl")],
)
def test_a_stock_server_that_can_never_serve_a_run_is_unfit_before_its_first_group(
    transport: str, key: Key | None, words: str
) -> None:
    access = ServerAccess("http://127.0.0.1:9", SOON_S)
    options = LinkOptions(WeightSync(), transport, LOOPBACK, run_key=key)
    manifest = Manifest.build([("a", "bfloat16", (10,))], 4096)
    link = StockLink("run", 1, manifest, options, StockRoutes(access))
    with pytest.raises(ServerUnfit, match=words):
        link.join(SglangControl(access), SOON_S)
    link.close()


@pytest.mark.parametrize("commits", [True, False])
def test_a_stock_server_leaves_the_group_of_a_failed_transfer_too(commits: bool) -> None:
    board = Board()
    left: list[str] = []

    def leave(body: dict[str, str]) -> tuple[int, dict[str, str]]:
        left.append(body["group_name"])
        return 200, {}

    board.routes = {
        "GET /server_info": lambda _: (200, server_info(tp_size=0)),  # so rank 0 is alone
        "GET /model_info": lambda _: (200, {"weight_version": "default", "model_path": "m"}),
        "POST /init_weights_update_group": 200,
        "POST /destroy_weights_update_group": leave,
    }
    access = ServerAccess(board.url, SOON_S)
    options = LinkOptions(WeightSync(), "gloo", LOOPBACK)
    manifest = Manifest.build([("a", "bfloat16", (10,))], 4096)
    link = StockLink("run", 1, manifest, options, StockRoutes(access))
    link.join(SglangControl(access), SOON_S)
    link.offer(1, 1, b"", "")
    if commits:
        link.ping(2, SOON_S)
    for _ in range(2):
        link.close()
    board.close()
    assert left == ["titan_grpo-run-1-1"]


@pytest.mark.parametrize("pair", ["gloo"], indirect=True)
def test_a_stock_server_whose_update_began_is_intact_only_after_a_whole_version(
    pair: tuple[Transport, Transport],
) -> None:
    """As the update ends, SGLang repacks weights: some layers bear that only after a load."""
    board = Board()
    lost = "Failed to receive weights: a peer is gone"  # SGLang's words
    board.routes = {"POST /update_weight_version": 200, "POST /begin_weight_update": 200}
    board.routes["POST /update_weights_from_distributed"] = lambda _: (400, {"message": lost})
    access, manifest = (
        ServerAccess(board.url, SOON_S),
        Manifest.build([("a", "bfloat16", (9,))], 64),
    )
    link = StockLink(
        "run", 1, manifest, LinkOptions(WeightSync(), "gloo", LOOPBACK), StockRoutes(access)
    )
    link._transport, image = pair[0], torch.zeros(manifest.total_bytes, dtype=torch.uint8)
    staged = Staged(1, 1, True, "f")
    applied = link.push(SglangControl(access), staged, image, lambda _: None, SOON_S)
    assert lost in applied.error
    assert not applied.ok
    assert not applied.intact
    link.close()
    board.close()


def test_a_link_that_is_not_open_says_so(link: LaneLink) -> None:
    with pytest.raises(TransferFailed, match="not open"):
        link.wait_joined(1.0)


def test_a_server_without_the_plugin_leaves_a_probe_unanswered() -> None:
    with pytest.raises(TransferFailed, match="plugin"):
        ask_receiver(len, LOOPBACK, 0.3, transport="probe")
