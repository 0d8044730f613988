"""Who may write weights: a real receiver process and real lanes, with the right key, another one,
none, and with forgeries."""

import logging
import threading
import time
from collections.abc import Callable, Iterator

import psutil
import pytest

from tests.receive.site import Site, Weights
from tests.rigs.present import present
from titan_grpo.config import WeightSync
from titan_grpo.errors import PeerError, TransferFailed
from titan_grpo.layout.image import fingerprint
from titan_grpo.protocol.messages import Joined, Kind, Order
from titan_grpo.runkey import KEY_VARIABLE, Key
from titan_grpo.sync.link import LaneLink, LinkOptions
from titan_grpo.sync.transports.channel import ReceiverChannel, connect

pytestmark = pytest.mark.e2e

RUN_KEY = Key(bytes(range(32)))
OTHER_KEY = Key(bytes(range(1, 33)))
OLDER_RUN = "000000000001-00000000"


@pytest.fixture(scope="module")
def guarded() -> Iterator[Site]:
    """A server with a run key; each test opens epochs of its own."""
    made = Site(RUN_KEY)
    yield made
    made.close()


def block_key(site: Site, run_id: str | None = None) -> Key:
    options = LinkOptions(WeightSync(), "gloo", "", run_key=RUN_KEY)
    key = options.hashing(run_id or site.run_id).key
    assert key is not None
    return key


@pytest.fixture
def trainer(guarded: Site) -> tuple[LaneLink, Callable[[int], float]]:
    """The right one: joined, with version v of value v committed; returns (link, deliver the next
    version)."""
    link = guarded.connect(Weights(0.0))
    held = guarded.receiver.state.version

    def deliver(number: int) -> float:
        value = float(held + number)
        version = Weights(value, key=block_key(guarded))
        report = guarded.deliver(link, number, held + number, version)
        assert report.ok, report
        assert guarded.engine.value() == value
        return value

    return link, deliver


def test_the_right_key_writes_weights_and_none_of_it_is_seen(
    guarded: Site,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv(KEY_VARIABLE, RUN_KEY.hex())  # as the engine's process has it
    caplog.set_level(logging.DEBUG)
    link = guarded.connect(Weights(1.0))
    assert guarded.deliver(link, 1, 1, Weights(1.0, key=block_key(guarded))).ok
    assert guarded.engine.value() == 1.0
    receiver = psutil.Process(guarded.receiver_pid)
    seen = [
        repr(link._options),
        repr(guarded.receiver.state),
        caplog.text,
        *capfd.readouterr(),
        *receiver.cmdline(),
    ]
    seen += [f"{name}={value}" for name, value in receiver.environ().items()]
    keys = present(link._options.keys(guarded.run_id, guarded.epoch))
    for secret in (RUN_KEY, keys.messages, keys.blocks):
        assert not any(secret.hex() in text for text in seen)


@pytest.mark.parametrize(
    ("key", "words"), [(OTHER_KEY, "another run key"), (None, "carries no proof of the run key")]
)
def test_a_trainer_without_the_key_gets_the_reason_and_the_one_in_force_goes_on(
    guarded: Site,
    trainer: tuple[LaneLink, Callable[[int], float]],
    key: Key | None,
    words: str,
) -> None:
    _, deliver = trainer
    before = deliver(1)
    stranger = guarded.greet(Weights(9.0), run_key=key)
    with pytest.raises(PeerError, match=words) as caught:
        stranger.wait_joined(180.0)
    assert RUN_KEY.hex() not in str(caught.value)
    # not even with a run that claims to be the latest
    with pytest.raises(PeerError, match=words):
        guarded.greet(Weights(9.0), run_key=key, run_id="ffffffffffff-00000000").wait_joined(180.0)
    assert guarded.engine.value() == before
    deliver(2)


def test_a_recorded_hello_an_older_run_and_an_older_epoch_are_refused_though_they_prove_the_key(
    guarded: Site, trainer: tuple[LaneLink, Callable[[int], float]]
) -> None:
    _, deliver = trainer
    before = deliver(1)
    last = guarded.epoch
    for run_id, epoch in ((guarded.run_id, last), (guarded.run_id, 1), (OLDER_RUN, 99)):
        link = guarded.greet(Weights(9.0), run_id=run_id, epoch=epoch)
        guarded.epoch = last
        with pytest.raises(PeerError, match="is not newer"):
            link.wait_joined(180.0)
    assert guarded.engine.value() == before
    deliver(2)


def test_a_manifest_that_is_not_the_announced_one_is_refused(guarded: Site) -> None:
    link = guarded.greet(Weights(9.0))
    link.wait_joined(180.0)
    link._manifest = Weights(9.0, names=("b",)).manifest  # as an attacker on the way would swap it
    staged = link.send_manifest()
    assert not staged.ok
    assert "must have digest" in staged.error


def test_a_manifest_that_is_damaged_on_the_way_is_refused_and_the_reason_said(
    guarded: Site,
) -> None:
    link = guarded.greet(Weights(9.0))
    link.wait_joined(180.0)
    damaged = link._manifest.encoded.replace(b"block", b"bl\xefck", 1)
    link._manifest.__dict__["encoded"] = damaged  # a cached property
    staged = link.send_manifest()
    assert not staged.ok
    assert "a manifest must list" in staged.error


def test_a_forged_commit_is_not_loaded_and_the_true_one_is(
    guarded: Site, trainer: tuple[LaneLink, Callable[[int], float]]
) -> None:
    link, _ = trainer
    held = guarded.receiver.state.version
    before = guarded.engine.value()
    version = Weights(float(held + 1), key=block_key(guarded))
    staged = link.send(1, held + 1, version.image, version.digests, version.fingerprint)
    true = link.commit(staged)
    other = OTHER_KEY.derive("messages", guarded.run_id, str(guarded.epoch))
    for forged in (
        true.to_dict() | {"proof": ""},
        true.proven(other).to_dict(),
        true.to_dict() | {"version": held + 2},
    ):
        report = guarded.side.commit(forged)
        assert report is not None
        assert not report.ok
        assert report.intact
    assert guarded.engine.value() == before
    with pytest.raises(TransferFailed, match="waiting for the engine"):
        link.wait_applied(1, 0.2)  # a forger cannot make the trainer believe that its commit failed
    guarded.side.commit(true.to_dict())
    assert link.wait_applied(1, 60.0).ok
    assert guarded.engine.value() == held + 1


def test_blocks_hashed_without_the_key_or_for_another_run_do_not_match(
    guarded: Site, trainer: tuple[LaneLink, Callable[[int], float]]
) -> None:
    link, deliver = trainer
    for number, key in enumerate((None, OTHER_KEY, block_key(guarded, OLDER_RUN)), start=1):
        wrong = Weights(9.0, key=key)
        digests = (
            wrong.blocks if key else [d * 2 for d in wrong.blocks]
        )  # xxh3's, made as long as blake3's
        print_ = fingerprint(wrong.manifest.digest, digests)
        staged = link.send(number, 99, wrong.image, b"".join(digests), print_)
        assert not staged.ok
        assert staged.bad_block >= 0  # several are read at once
    deliver(4)


def test_an_order_that_somebody_else_put_into_the_connection_ends_the_epoch(
    guarded: Site, trainer: tuple[LaneLink, Callable[[int], float]]
) -> None:
    link, _ = trainer
    before = guarded.engine.value()
    present(link._channel).send(Kind.ORDER, 1, Order(1, "receive", 99, "ff").to_json().encode())
    assert guarded.receiver_status() == 3
    assert guarded.engine.value() == before


def test_streamed_versions_are_held_to_the_key_too() -> None:
    site = Site(RUN_KEY, transport="gloo")
    try:
        wrong, right = Weights(9.0, key=OTHER_KEY), Weights(1.0, key=block_key(site))
        for version, expected in ((wrong, 0.0), (right, 1.0)):
            link = site.greet(version, apply="streamed")
            link.wait_joined(180.0)
            assert link.send_manifest().ok
            staged = link.offer(1, 1, version.digests, version.fingerprint)
            loading = threading.Thread(
                target=site.side.commit, args=(link.commit(staged).to_dict(),), daemon=True
            )
            loading.start()
            if version is wrong:
                with pytest.raises(TransferFailed):
                    link.stream(version.image)
            else:
                link.stream(version.image)
            applied = link.wait_applied(1, 60.0)
            loading.join(60.0)
            assert (applied.ok, applied.intact) == (version is right, True)
            assert site.engine.value() == expected
    finally:
        site.close()


def test_a_server_that_only_claims_to_have_the_key_is_refused() -> None:
    link = LaneLink(
        "run",
        1,
        Weights(1.0).manifest,
        LinkOptions(WeightSync(), "gloo", "127.0.0.1", run_key=RUN_KEY),
    )
    hello = link.open()
    sock = connect((hello.host, hello.port), hello.ticket, None, 60.0, "trainer")
    channel = ReceiverChannel(sock, "", print)
    joined = Joined(True, "", "titan_grpo", 1, "", -1, "", True, keyed=True)
    channel.send(Kind.JOINED, 0, joined.to_json().encode())
    with pytest.raises(PeerError, match="Joined carries no proof of the run key"):
        link.wait_joined(180.0)
    link.close()


def test_a_probe_says_whether_a_key_is_demanded_and_whether_ours_is_the_one(
    guarded: Site,
) -> None:
    keyless, right, wrong = (guarded.probe(key) for key in (None, RUN_KEY, OTHER_KEY))
    assert (keyless.keyed, keyless.ok) == (True, True)
    assert (right.keyed, right.ok) == (True, True)
    assert (wrong.keyed, wrong.ok) == (True, False)
    assert "another run key" in wrong.error


@pytest.mark.parametrize("site", ["tcp"], indirect=True)
def test_a_trainer_of_another_version_gets_an_answer_at_once(site: Site) -> None:
    link = site.link(Weights(1.0))
    hello = link.open().to_dict()
    site.side.hello(hello | {"invented_later": 1})
    began = time.monotonic()
    with pytest.raises(
        PeerError, match="unknown field `invented_later`; both ends must run the same titan_grpo"
    ):
        link.wait_joined(180.0)
    assert time.monotonic() - began < 30.0
    assert site.receiver._serving is None
