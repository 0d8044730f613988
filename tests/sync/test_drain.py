"""A lane that lets its server finish its requests before a commit: the server generates meanwhile,
and nothing else waits."""

import threading

import pytest

from titan_grpo.observe import names
from titan_grpo.protocol.ledger import Standing

pytestmark = pytest.mark.e2e

WAIT_S = 60.0


def test_a_draining_server_generates_and_takes_nothing_new_while_the_other_one_commits(rig):
    held, gone = threading.Event(), threading.Event()

    def drain(url):
        if url == "a":
            held.set()
            assert gone.wait(WAIT_S)

    r = rig("a", "b", drain=drain)
    r.publish(1)
    assert held.wait(WAIT_S)
    for version in (2, 3):
        r.publish(version)
        assert r.servers["b"].wait_version(version, WAIT_S)
    entry = r.server_set.entry("a")
    assert entry.standing is Standing.COMMITTING
    assert not entry.accepting
    assert not r.servers["a"].paused
    gone.set()
    r.everyone(3)
    assert r.servers["a"].versions == [1, 3]
    assert r.recorder.series(names.DRAIN_S)
    assert r.server_set.take_error() is None
