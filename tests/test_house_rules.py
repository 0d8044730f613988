"""The house rules that a machine can check: sizes, docstrings, broad handlers, texts, and that the
README is true."""

import ast
import os
import re
import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import SLOW, Source
from tests.rigs.present import present

MAX_FILE = 550
MAX_FUNCTION = 80
USUAL_FUNCTION = 35
MAX_ARGUMENTS = 6

FORBIDDEN = {
    "a path of one machine": r"(?<![\w.])/(work|root|home|opt)/",
    "a path of one machine (tests have tmp_path)": r"(?<![\w.])/tmp/",
    "a package mirror": (
        r"(pypi|pythonhosted|artifactory|nexus)[\w.-]*\.(org|com|io|net|internal)|file:///"
    ),
    "a note to oneself": r"\b(TODO|FIXME|XXX)\b",
}
"""What no file of the project contains -> its pattern."""

FORBIDDEN_IN_TESTS = {
    "a sleep as synchronisation": r"\b(time|asyncio|anyio)\.sleep\((?!0\))",
    "a mock of our own code": r"\bunittest\.mock\b|\bmonkeypatch\.setattr\(\s*[\"']?titan_grpo",
}

HANGS = """
import threading

import pytest


@pytest.mark.parametrize("index", range(4))
def test_of_which_the_last_hangs(index):
    if index == 3:
        threading.Event().wait()
"""

Function = ast.FunctionDef | ast.AsyncFunctionDef


def functions(tree: ast.Module) -> Iterator[Function]:
    yield from (n for n in ast.walk(tree) if isinstance(n, Function))


def length(node: Function) -> int:
    return present(node.end_lineno) - node.lineno + 1


def arguments(node: Function) -> int:
    a = node.args
    names = [x.arg for x in (*a.posonlyargs, *a.args, *a.kwonlyargs)]
    return len([n for n in names if n not in ("self", "cls")]) + (a.vararg is not None)


def ours(sources: list[Source]) -> list[Source]:
    return [s for s in sources if s.path.startswith(("titan_grpo/", "patches/", "scripts/"))]


def test_files_are_short(sources: list[Source]) -> None:
    lengths = {s.path: s.text.count("\n") for s in sources}
    assert {path: n for path, n in lengths.items() if n > MAX_FILE} == {}
    assert statistics.median(lengths[s.path] for s in ours(sources)) <= 260


def test_functions_are_short_and_take_few_arguments(sources: list[Source]) -> None:
    long = [
        f"{s.path}:{f.lineno} {f.name}: {length(f)} lines"
        for s in sources
        for f in functions(s.tree)
        if length(f) > MAX_FUNCTION
    ]
    wide = [
        f"{s.path}:{f.lineno} {f.name}: {arguments(f)} arguments"
        for s in sources
        for f in functions(s.tree)
        if arguments(f) > MAX_ARGUMENTS
    ]
    assert long + wide == []
    lengths = [length(f) for s in ours(sources) for f in functions(s.tree)]
    assert sum(n <= USUAL_FUNCTION for n in lengths) >= 0.9 * len(lengths)


def public(tree: ast.Module) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef]:
    for node in tree.body:
        if isinstance(
            node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
        ) and not node.name.startswith("_"):
            yield node


def test_public_modules_classes_and_functions_have_docstrings(sources: list[Source]) -> None:
    package = [s for s in sources if s.path.startswith(("titan_grpo/", "patches/"))]
    missing = [s.path for s in package if s.text.strip() and ast.get_docstring(s.tree) is None]
    missing += [
        f"{s.path}:{n.lineno} {n.name}"
        for s in package
        for n in public(s.tree)
        if ast.get_docstring(n) is None
    ]
    assert missing == []


def handlers_without_reason(text: str, tree: ast.Module) -> list[int]:
    """Lines of ``except:``, ``except Exception`` and ``except BaseException`` whose line does not
    end with the reason.

    A handler that ends with a bare ``raise`` only cleans up: it swallows nothing and needs no
    reason.
    """
    lines = text.splitlines()
    out = []
    for node in ast.walk(tree):
        if isinstance(node, ast.ExceptHandler):
            names = (
                {n.id for n in ast.walk(node.type) if isinstance(n, ast.Name)}
                if node.type
                else {"BaseException"}
            )
            excused = re.search(r"#( noqa: BLE001)?\W+(?!noqa)\w+ \w+", lines[node.lineno - 1])
            passes_on = isinstance(node.body[-1], ast.Raise) and node.body[-1].exc is None
            if names & {"Exception", "BaseException"} and not (excused or passes_on):
                out.append(node.lineno)
    return out


def test_broad_handlers_give_their_reason(sources: list[Source]) -> None:
    assert [
        f"{s.path}:{line}"
        for s in ours(sources)
        for line in handlers_without_reason(s.text, s.tree)
    ] == []


def test_the_handler_check_catches_a_broad_handler() -> None:
    for end, found in (
        ("", [3]),
        ("  # noqa: BLE001", [3]),
        ("  # noqa: BLE001 - top of a thread", []),
        ("  # top of a thread", []),
    ):
        text = f"try:\n    f()\nexcept Exception:{end}\n    pass\n"
        assert handlers_without_reason(text, ast.parse(text)) == found


def found(pattern: str, paths: list[Path], root: Path) -> list[str]:
    out = []
    for path in paths:
        try:
            text = path.read_text()
        except UnicodeDecodeError:
            continue
        out += [
            f"{path.relative_to(root)}:{number}: {line.strip()[:120]}"
            for number, line in enumerate(text.splitlines(), 1)
            if re.search(pattern, line)
        ]
    return out


def test_files_speak_of_the_project_only(tracked: list[Path], root: Path) -> None:
    paths = [p for p in tracked if p.name != Path(__file__).name]
    assert {
        what: hits for what, pattern in FORBIDDEN.items() if (hits := found(pattern, paths, root))
    } == {}


def test_tests_use_neither_sleeps_nor_mocks_of_our_own_code(
    tracked: list[Path], root: Path
) -> None:
    paths = [
        p
        for p in tracked
        if p.suffix == ".py" and "tests" in p.parts and p.name != Path(__file__).name
    ]
    assert {
        what: hits
        for what, pattern in FORBIDDEN_IN_TESTS.items()
        if (hits := found(pattern, paths, root))
    } == {}


def test_the_argument_and_length_counts_are_what_they_say() -> None:
    tree = ast.parse("def f(self, a, b=1, *args, c, **kw):\n    x = 1\n    return x\n")
    (f,) = functions(tree)
    assert (arguments(f), length(f)) == (4, 3)


def test_commands_and_files_that_the_readme_names_exist(root: Path) -> None:
    text = (root / "README.md").read_text()
    paths = set(re.findall(r"(?<![\w/])((?:scripts|train_configs|docs|patches)/[\w./-]*\w)", text))
    assert {p for p in paths if not (root / p).exists()} == set()
    from titan_grpo.cli import COMMANDS

    named = set(re.findall(r"titan-grpo ([a-z]\w+)", text))
    assert named <= set(COMMANDS), (
        f"the README names commands that titan-grpo does not have: {named - set(COMMANDS)}"
    )


def test_a_script_that_needs_the_checkout_puts_it_on_its_path(root: Path) -> None:
    """Run as a file, a script has its own folder on the path, and not the checkout."""
    needs = {
        path.name
        for path in (root / "scripts").glob("*.py")
        if re.search(r"^from (tests|scripts)\b", path.read_text(), re.MULTILINE)
    }
    finds = {
        path.name
        for path in (root / "scripts").glob("*.py")
        if "\nsys.path.insert(0, str(Path(__file__).resolve().parents[1]))" in path.read_text()
    }
    assert needs
    assert needs <= finds


def test_what_the_fast_check_leaves_out_exists(root: Path) -> None:
    assert [path for path in SLOW if not (root / path).exists()] == []


def test_scripts_are_executable_and_strict(root: Path) -> None:
    scripts = sorted((root / "scripts").glob("*.sh"))
    assert scripts
    for script in scripts:
        assert script.stat().st_mode & 0o111, f"{script.name} is not executable"
        assert "set -euo pipefail" in script.read_text(), f"{script.name} goes on after an error"


def test_files_that_share_a_server_stay_on_one_worker(request: pytest.FixtureRequest) -> None:
    """Where the plugin does not see the groups, every server is started by every worker, in
    silence."""
    if os.environ.get("PYTEST_XDIST_WORKER") and request.config.getvalue("loadgroup"):
        assert request.node.nodeid.endswith("@sources")


def test_a_test_past_its_deadline_fails_and_the_others_go_on(root: Path, tmp_path: Path) -> None:
    (tmp_path / "test_hangs.py").write_text(HANGS)
    options = ("-c", root / "pyproject.toml", "--rootdir", tmp_path, "-n", "2", "--timeout", "2")
    done = subprocess.run(
        (sys.executable, "-m", "pytest", *options, "--dist", "loadgroup", tmp_path),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert "1 failed, 3 passed" in done.stdout, done.stdout + done.stderr


def test_files_that_the_pages_on_the_code_name_exist(root: Path) -> None:
    missing = {}
    for page in ("design", "protocol", "contributing", "measurements"):
        text = (root / f"docs/{page}.md").read_text()
        # a name in brackets lies beside the file before it, as in `engines/vllm.py (sglang.py)`
        names = set(re.findall(r"[\w/]+/\w+\.(?:py|sh|md|toml)\b", text))
        links = set(re.findall(r"\]\(([\w/]+\.md)\)", text))
        found = [
            n for n in names if not ((root / n).exists() or (root / "titan_grpo" / n).exists())
        ]
        found += [n for n in links if not (root / "docs" / n).exists()]
        if found:
            missing[page] = sorted(found)
    assert missing == {}


def test_every_room_of_the_design_exists(root: Path) -> None:
    table = (root / "docs/design.md").read_text().partition("## Rooms")[2]
    rooms = set(re.findall(r"`(\w+)/`", table)) - {"tests", "patches"}
    there = {p.name for p in (root / "titan_grpo").iterdir() if p.is_dir() and p.name[0] != "_"}
    assert rooms == there - {"patches"}
