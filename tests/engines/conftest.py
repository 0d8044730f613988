"""A server whose routes a test writes down."""

from collections.abc import Iterator

import pytest

from tests.rigs.board import Board


@pytest.fixture
def board() -> Iterator[Board]:
    board = Board()
    yield board
    board.close()
