"""The version gate, and what each patch declares."""

import importlib
import re
from pathlib import Path

import pytest

from titan_grpo.errors import UpstreamError
from titan_grpo.patches import versions


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("2.13.0+cpu", (2, 13, 0)),
        ("0.3.0rc1", (0, 3, 0)),
        ("0.33.1.dev4+g1", (0, 33, 1)),
        ("2.11", (2, 11)),
        ("x", ()),
    ],
)
def test_the_numbers_of_a_version_are_its_leading_ones(
    text: str, expected: tuple[int, ...]
) -> None:
    assert versions.numbers(text) == expected


def test_a_version_without_numbers_is_refused() -> None:
    with pytest.raises(UpstreamError, match="no numeric release"):
        versions.release("nightly")


@pytest.mark.parametrize(
    ("text", "expected"), [("2.10.9", False), ("2.11", True), ("2.15.3", True), ("2.16.0", False)]
)
def test_a_range_holds_its_first_version_and_not_its_last(text: str, expected: bool) -> None:
    assert versions.inside(text, ("torch", "2.11", "2.16")) is expected


def test_an_installed_version_outside_the_range_is_refused_with_the_remedy() -> None:
    with pytest.raises(
        UpstreamError, match=r"patch p is written for pytest >=0\.1,<0\.2, found .*widen its range"
    ):
        versions.require(("pytest", "0.1", "0.2"), "p")


@pytest.fixture
def patches(root: Path) -> set[str]:
    folder = root / "patches"
    files = {path.stem for path in folder.glob("*.py")} - {"__init__", "versions"}
    return files | {path.parent.name for path in folder.glob("*/__init__.py")}


def test_a_patch_says_why_for_which_versions_and_until_when(patches: set[str]) -> None:
    # These two import vLLM.
    for name in patches - {"vllm_cpu_experts", "vllm_cpu_reload"}:
        patch = importlib.import_module(f"titan_grpo.patches.{name}")
        assert len(patch.WHY) > 40, name
        assert len(patch.DELETE_WHEN) > 20, name
        package, first, beyond = patch.APPLIES_TO
        assert package in {"torch", "torchtitan", "sglang"}, name
        assert versions.release(first) < versions.release(beyond), name


def test_the_table_of_patches_is_complete(root: Path, patches: set[str]) -> None:
    table = (root / "patches" / "README.md").read_text()
    assert patches <= set(re.findall(r"^\| `(\w+)(?:\.py|/)`", table, re.MULTILINE))
