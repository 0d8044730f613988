"""A value that may be None in general, and not in this test."""

from typing import TypeVar

T = TypeVar("T")


def present(value: T | None) -> T:
    """The value; fails where there is none."""
    assert value is not None
    return value
