"""The doctor compares a server's tokenizer with the trainer's."""

import pytest

from tests.rigs.board import Board
from titan_grpo.commands.doctor_facts import Access
from titan_grpo.commands.doctor_tokenizer import TEXT, finding, ids_here
from titan_grpo.titan.tiny import write_tiny_model


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    return str(write_tiny_model("qwen3", tmp_path_factory.mktemp("model"), seed=1))


@pytest.mark.parametrize(
    ("change", "status", "words"),
    [
        (lambda ids: ids, "ok", "has the trainer's"),
        (lambda ids: [*ids[:3], ids[3] + 1, *ids[4:]], "warning", "token 3 of a sample text is"),
        (lambda ids: ids[:-1], "warning", "tokens here, "),
    ],
)
def test_ids_that_differ_are_a_warning(change, status, words, model) -> None:
    board = Board()
    ids = ids_here(model, TEXT)
    board.routes["POST /tokenize"] = lambda _: (200, {"tokens": change(ids)})
    found = finding(board.url, model, Access(5))
    board.close()
    assert (found.status, words in found.text) == (status, True)
    assert bool(found.remedy) == (status == "warning")


def test_a_server_that_does_not_say_and_a_model_without_one_are_no_finding(model, tmp_path) -> None:
    board = Board()
    assert finding(board.url, model, Access(5)) is None
    board.routes["POST /tokenize"] = lambda _: (200, {"tokens": [1]})
    assert finding(board.url, str(tmp_path), Access(5)) is None
    board.close()
