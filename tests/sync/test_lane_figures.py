"""What a lane counts."""

import pytest
from msgspec.structs import replace as change

from tests.rigs.receiver_server import DirectControl
from tests.sync.conftest import MakeRig
from titan_grpo.errors import ServerRefused
from titan_grpo.observe import names
from titan_grpo.protocol.messages import Applied
from titan_grpo.sync.link import LaneLink


def test_a_server_that_loaded_other_weights_than_the_versions_is_quarantined(
    rig: MakeRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    applied, wrong = LaneLink.wait_applied, iter(["ff"])

    def answer(link: LaneLink, number: int, timeout_s: float) -> Applied:
        true = applied(link, number, timeout_s)
        return change(true, fingerprint=next(wrong, true.fingerprint))

    monkeypatch.setattr(LaneLink, "wait_applied", answer)
    r = rig("a")
    r.deliver(1)
    totals = r.recorder.history().totals
    assert (totals[names.DIGEST_MISMATCHES], totals[names.QUARANTINES]) == (1, 1)
    assert "it loaded ff; it stays paused" in str(r.server_set.take_error())


def test_bytes_of_a_streamed_transfer_count_as_far_as_they_were_sent(
    rig: MakeRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server without our plugin refuses the label that must precede the first byte."""

    class Routes:
        def workers(self, _: float) -> int:
            return 0

        def parameter_names(self, _: float) -> list[str]:
            return [spec.name for spec in r.pool.manifest.tensors]

        def init_group(self, *_: object) -> None:
            """The trainer is the only rank."""

        def destroy_group(self, *_: object) -> None:
            """Nobody is in it."""

        def close(self) -> None:
            """No connection is open."""

    def refuse(control: DirectControl, label: str) -> None:
        raise ServerRefused("no label now")

    offered = iter([Routes()])
    monkeypatch.setattr(DirectControl, "stock", lambda _: next(offered, None))
    monkeypatch.setattr(DirectControl, "relabel", refuse)
    r = rig("a", apply="streamed", started=False)
    r.start()  # its lane asks for the names of ``r``
    r.deliver(1)
    assert "no label now; 0 of 2 tensors were loaded" in str(r.server_set.take_error())
    assert r.recorder.history().totals[names.SYNC_BYTES] == r.pool.manifest.total_bytes
