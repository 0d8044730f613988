"""Logits that two gloo ranks share."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.rigs.ranks import run_ranks

SCRIPT = Path(__file__).with_name("rank_of_two.py")


@pytest.fixture(scope="module")
def figures(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    store = tmp_path_factory.mktemp("two_ranks") / "store"
    return [json.loads(out.splitlines()[-1]) for out in run_ranks(SCRIPT, 2, str(store))]


@pytest.mark.e2e
@pytest.mark.parametrize("vocabulary", ["11 words", "1 words"])
def test_logits_sharded_over_the_vocabulary_give_the_same_values_and_gradients(
    figures: list[dict[str, Any]], vocabulary: str
) -> None:
    for rank in figures:
        assert rank[vocabulary].keys() == {"logprobs", "entropy", "mean_square"}
        for reader, differences in rank[vocabulary].items():
            assert max(differences) < 2e-6, reader


@pytest.mark.e2e
def test_logits_sharded_over_the_sequence_are_refused_with_the_remedy(
    figures: list[dict[str, Any]],
) -> None:
    for rank in figures:
        assert "disable_loss_parallel" in rank["refusal"]
