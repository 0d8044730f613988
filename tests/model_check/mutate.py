"""``python -m tests.model_check.mutate``: random mutants of the protocol's tables, each run against
the tests and a small exploration until one of them fails. Prints the survivors."""

import argparse
import ast
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
PROTOCOL = Path("titan_grpo/protocol")
OWN = {"server.py": ("fence", "staging")}
"""Tests of a file in tests/protocol, where they do not have its name. They run first."""

TIMEOUT_S = 600.0
"""Of one mutant; a mutant that hangs counts as killed."""

HANGS_S = 60
"""Of one test: each takes some seconds at most."""

FLIPPED = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}


class Mutant(NamedTuple):
    """``apply`` changes the tree that it was found in."""

    line: int
    what: str
    apply: Callable[[], object]


def mutants(tree: ast.Module) -> Iterator[Mutant]:
    """Each possible mutant: a comparison flipped, a condition negated, an action dropped, a
    constant off by one. Texts for people (``__repr__``, errors, docstrings) are left out."""
    for function in ast.walk(tree):
        if not isinstance(function, ast.FunctionDef) or function.name == "__repr__":
            continue
        texts = {n for r in ast.walk(function) if isinstance(r, ast.Raise) for n in ast.walk(r)}
        for node in ast.walk(function):
            if node not in texts:
                yield from _at(node)


def _at(node: ast.AST) -> Iterator[Mutant]:
    match node:
        case ast.Compare(ops=[op]) if type(op) in FLIPPED:
            flipped = FLIPPED[type(op)]
            what = f"{type(op).__name__} -> {flipped.__name__}"
            yield Mutant(node.lineno, what, lambda: setattr(node, "ops", [flipped()]))
        case ast.If() | ast.IfExp():
            negated = ast.UnaryOp(ast.Not(), node.test)
            yield Mutant(node.lineno, "condition negated", lambda: setattr(node, "test", negated))
        case ast.Tuple(elts=[_, *_], ctx=ast.Load()) if any(
            isinstance(e, ast.Call) for e in node.elts
        ):
            index = next(i for i, e in enumerate(node.elts) if isinstance(e, ast.Call))
            if len(node.elts) == 1 or isinstance(node.elts[-1], ast.Call):
                yield Mutant(node.lineno, "action dropped", lambda: node.elts.pop(index))
        case ast.Constant(value=int() as value) if not isinstance(value, bool):
            yield Mutant(node.lineno, f"{value} + 1", lambda: setattr(node, "value", value + 1))


def _survives(folder: Path, file: str) -> bool:
    env = os.environ | {"PYTHONPATH": str(folder)}
    pytest = ["-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", f"--timeout={HANGS_S}"]
    own = [f"tests/protocol/test_{name}.py" for name in OWN.get(file, (Path(file).stem,))]
    doctests = [*pytest, "--doctest-modules", str(PROTOCOL)]
    explore = ["-m", "tests.model_check", "--servers", "1", "--versions", "2", "--no-bugs"]
    behind = [*pytest, "tests/model_check/test_explore.py", "-k", "clocks_are_behind"]
    for command in ([*pytest, *own], [*pytest, "tests/protocol"], doctests, explore, behind):
        try:
            done = subprocess.run(
                [sys.executable, *command],
                cwd=folder,
                env=env,
                capture_output=True,
                timeout=TIMEOUT_S,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return False
        if done.returncode != 0:
            return False
    return True


def main() -> int:
    """1 if a mutant survived."""
    parser = argparse.ArgumentParser(prog="python -m tests.model_check.mutate")
    parser.add_argument("--count", type=int, default=65)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    files = sorted(p.name for p in (ROOT / PROTOCOL).glob("*.py"))
    places = [
        (name, number)
        for name in files
        for number, _ in enumerate(mutants(ast.parse((ROOT / PROTOCOL / name).read_text())))
    ]
    chosen = random.Random(options.seed).sample(places, min(options.count, len(places)))
    survivors = 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for part in ("titan_grpo", "tests"):
            shutil.copytree(ROOT / part, folder / part, symlinks=True)
        shutil.copy(ROOT / "pyproject.toml", folder)
        # Checks that fail without a mutant would count each one as killed.
        if not _survives(folder, "server.py"):
            parser.error("the tests or the exploration fail without a mutant")
        for done, (file, number) in enumerate(chosen, start=1):
            path = folder / PROTOCOL / file
            text = path.read_text()
            tree = ast.parse(text)
            mutant = list(mutants(tree))[number]
            mutant.apply()
            path.write_text(ast.unparse(ast.fix_missing_locations(tree)))
            survived = _survives(folder, file)
            path.write_text(text)
            survivors += survived
            verdict = "SURVIVED" if survived else "killed"
            print(f"{done:3} {file}:{mutant.line} {mutant.what}: {verdict}", flush=True)
    print(f"{len(chosen)} mutants of {len(places)}, {survivors} survived")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
