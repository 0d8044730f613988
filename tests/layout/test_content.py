"""Digests of content: equal for equal values however they lie in memory, different for anything
that differs."""

import pytest
import torch

from titan_grpo.layout.digest import content_digest, tensor_digest

BASE = torch.arange(12, dtype=torch.float32).view(3, 4).bfloat16()


def test_a_strided_view_has_the_digest_of_its_copy() -> None:
    assert tensor_digest(BASE.t()) == tensor_digest(BASE.t().contiguous())


@pytest.mark.parametrize(
    "other",
    [BASE.view(4, 3), BASE.view(torch.float16), BASE.t(), torch.cat([-BASE[:1], BASE[1:]])],
    ids=["shape", "dtype", "order", "one sign"],
)
def test_any_difference_changes_the_digest(other: torch.Tensor) -> None:
    assert tensor_digest(BASE) != tensor_digest(other)


def test_the_digest_of_all_depends_on_names_and_not_on_their_order() -> None:
    assert content_digest({"a": "1", "b": "2"}) == content_digest({"b": "2", "a": "1"})
    assert content_digest({"a": "1", "b": "2"}) != content_digest({"a": "2", "b": "1"})
