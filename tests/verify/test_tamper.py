"""The self-test's foreign sender commits other weights under the label that the server has."""

from pathlib import Path

import pytest
import torch

from tests.rigs.server_handle import ServerProcess, served
from tests.rigs.tampered_verify import commit_foreign
from titan_grpo.verify.outcome import Committed, read

pytestmark = pytest.mark.e2e


def test_a_foreign_commit_changes_the_weights_and_not_the_label(tmp_path: Path) -> None:
    record = tmp_path / "commits.jsonl"
    tensors = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.ones(5, dtype=torch.bfloat16)}
    with ServerProcess(args=["--record", str(record)]) as server:
        before = server.run(served())
        commit_foreign(server.url, tensors, 7, None)
        after = server.run(served())
    assert after["label"] == before["label"]
    assert (after["digest"] != before["digest"], after["paused"]) == (True, False)
    (commit,) = read(record, Committed)
    assert (commit.version, commit.ok, set(commit.tensors)) == (7, True, {"a", "b"})
