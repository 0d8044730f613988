"""Lanes and run keys: the server with the trainer's key is synced; the others cost it nothing and
are named with the rule."""

import pytest

from titan_grpo.runkey import Key

pytestmark = pytest.mark.e2e


def test_only_the_server_with_the_trainers_key_is_synced_and_the_others_are_named(rig):
    key = Key.generate()
    run = rig(
        "same", "other", "none", run_keys={"trainer": key, "same": key, "other": Key.generate()}
    )
    for version in (1, 2):
        run.publish(version)
        run.until(lambda version=version: run.server_set.entry("same").held == version)
    assert run.loaded["same"].value() == 2.0
    run.until(lambda: all(run.server_set.last_error(url) for url in ("other", "none")))
    assert "was proven with another run key" in str(run.server_set.last_error("other"))
    assert "this end has none" in str(run.server_set.last_error("none"))
    assert [run.servers[url].versions for url in ("other", "none")] == [[], []]
    assert not any(run.servers[url].paused for url in run.servers)
    assert key.hex() not in repr(run.lanes._context) + str(run.server_set.take_error())


def test_a_trainer_without_a_key_is_refused_by_a_server_that_has_one(rig):
    run = rig("keyed", run_keys={"keyed": Key.generate()})
    run.publish(1)
    run.until(lambda: run.server_set.last_error("keyed") is not None)
    assert "carries no proof of the run key" in str(run.server_set.last_error("keyed"))
    assert run.loaded["keyed"].values == {}
