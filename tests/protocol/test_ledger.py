import pytest

from titan_grpo.errors import ProtocolError
from titan_grpo.protocol import ledger
from titan_grpo.protocol.ledger import Entry, Standing
from titan_grpo.protocol.version import Label


def test_a_server_holds_a_version_only_after_its_read_back():
    e = ledger.committing(ledger.receiving(Entry(), 3))
    assert (repr(e), e.accepting) == ("committing(? <- v3)", False)
    e = ledger.holds(e, 3)
    assert (repr(e), e.accepting) == ("holds(v3)", True)


def test_a_receiving_server_goes_on_serving_what_it_holds():
    e = ledger.receiving(ledger.holds(Entry(), 3), 4)
    assert (repr(e), e.accepting) == ("receiving(v3 <- v4)", True)
    assert repr(ledger.transfer_failed(e)) == "holds(v3)"


def test_a_commit_in_doubt_makes_the_server_unknown():
    e = ledger.unknown(ledger.committing(ledger.receiving(ledger.holds(Entry(), 3), 4)))
    assert (repr(e), e.accepting) == ("unknown(?)", False)


def test_a_half_loaded_server_takes_nothing_until_a_full_sync():
    e = ledger.receiving(ledger.quarantined(ledger.holds(Entry(), 3)), 4)
    assert (e.standing, e.accepting) == (Standing.QUARANTINED, False)
    assert repr(ledger.holds(ledger.committing(e), 4)) == "holds(v4)"


def test_a_servers_version_never_goes_back():
    e = ledger.holds(Entry(), 3)
    with pytest.raises(ProtocolError, match="never goes back"):
        ledger.receiving(e, 3)
    with pytest.raises(ProtocolError, match="never goes back"):
        ledger.holds(e, 2)


def test_events_out_of_order_are_refused():
    with pytest.raises(ProtocolError, match="not listed"):
        ledger.committing(Entry())
    with pytest.raises(ProtocolError, match="not listed"):
        ledger.receiving(ledger.gone(Entry()), 1)


def test_labels_round_trip_and_foreign_ones_are_not_ours():
    label = Label("018bcfe56800-00ff", 12, "abcd")
    assert Label.parse(str(label)) == label
    for foreign in (None, "", "default", "a:b:c", "unusable", "7"):
        assert Label.parse(foreign) is None
