"""Which room may import which: the table of docs/design.md, read from the sources."""

import ast
import subprocess
import sys
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path

import pytest

from tests.conftest import Source

BASE = {
    "errors",
    "samples",
    "config",
    "runkey",
    "subprocesses",
    "unix_rpc",
    "run_main",
}
TABLES = BASE | {"protocol", "observe"}
PARTS = TABLES | {"layout", "algorithm", "engines"}
MOVERS = PARTS | {"sync.transports"}
RUNTIME = MOVERS | {"sync", "receive", "rollout", "patches"}
TOP = RUNTIME | {"titan", "verify", "commands"}

ALLOWED: dict[str, set[str]] = {
    "errors": set(),
    "samples": {"errors"},
    "config": {"errors"},
    "runkey": {"errors"},
    "subprocesses": BASE - {"subprocesses"},
    "unix_rpc": {"errors"},
    "run_main": set(),
    "protocol": BASE,
    "observe": BASE,
    "views": BASE | {"observe"},
    "plan": BASE | {"protocol"},
    "layout": TABLES,
    "algorithm": TABLES,
    "engines": TABLES | {"patches"},
    "patches": {"errors"},
    "sync.transports": PARTS,
    "sync": MOVERS,
    "receive": MOVERS | {"patches"},
    "rollout": PARTS,
    "titan": RUNTIME | {"verify"},
    "verify": RUNTIME,
    "commands": RUNTIME | {"titan", "verify", "views", "plan"},
    "train": RUNTIME | {"titan"},
    "cli": TOP,
}
"""Room -> rooms that it may import besides itself. Rooms of one level do not see each other."""

NO_TORCH = {"errors", "samples", "config", "runkey", "subprocesses", "unix_rpc", "run_main"}
NO_TORCH |= {"protocol", "observe", "views", "plan", "engines", "rollout"}
"""Rooms that run without torch: the rollout process, the tools, and everything that must start
fast."""

ONLY_HERE = {
    "torchtitan": ("titan_grpo/titan/", "titan_grpo/train.py", "patches/", "tests/"),
    "vllm": (
        "titan_grpo/receive/vllm_plugin.py",
        "titan_grpo/verify/recording.py",
        "patches/vllm_",
        "tests/",
    ),
    "sglang": ("titan_grpo/receive/sglang_plugin.py", "patches/sglang_", "tests/"),
    "httpx": ("titan_grpo/engines/http.py", "scripts/bench_", "tests/"),
    "h11": ("titan_grpo/engines/", "tests/"),
    "matplotlib": ("titan_grpo/observe/report.py", "scripts/bench_", "tests/"),
    "rich": ("titan_grpo/views/live.py", "titan_grpo/commands/watch.py", "tests/"),
}
"""Third-party package -> the only files that may import it."""


def module_of(path: str) -> str:
    name = path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    return f"titan_grpo.{name}" if name.startswith("patches") else name


def room_of(module: str) -> str:
    parts = module.split(".")[1:]
    return (
        ".".join(parts[:2]) if parts[:2] == ["sync", "transports"] else (parts[0] if parts else "")
    )


def at_import(node: ast.AST) -> Iterator[ast.AST]:
    """Nodes that run when the module is imported: not the bodies of functions, not what only type
    checkers read."""
    for child in ast.iter_child_nodes(node):
        typing = isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test)
        if not typing and not isinstance(
            child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
        ):
            yield child
            yield from at_import(child)


def imports(nodes: Iterable[ast.AST], module: str, is_package: bool) -> Iterator[tuple[str, int]]:
    """Absolute names that import statements among ``nodes`` name, and their lines."""
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parent = module.split(".")[
                    : None if is_package and node.level == 1 else -(node.level - is_package)
                ]
                base = ".".join([*parent, *base.split(".")]).rstrip(".")
            yield from ((f"{base}.{alias.name}", node.lineno) for alias in node.names)


@pytest.fixture(scope="module")
def all_edges(sources: list[Source]) -> list[tuple[str, str, str, int]]:
    """(importing path, importing module, imported name, line) of all files."""
    return [
        (source.path, module_of(source.path), name, line)
        for source in sources
        for name, line in imports(
            ast.walk(source.tree), module_of(source.path), source.path.endswith("__init__.py")
        )
    ]


@pytest.fixture(scope="module")
def edges(all_edges: list[tuple[str, str, str, int]]) -> list[tuple[str, str, str, int]]:
    """Those of the package's own files."""
    return [edge for edge in all_edges if edge[0].startswith(("titan_grpo/", "patches/"))]


def wrong_arrows(edges: list[tuple[str, str, str, int]]) -> list[str]:
    wrong = []
    for path, module, name, line in edges:
        here, there = room_of(module), room_of(name)
        if (
            name.split(".")[0] != "titan_grpo"
            or here in ("", there)
            or there == ""
            or there.startswith("__")
        ):
            continue
        if there not in ALLOWED.get(here, set()):
            wrong.append(f"{path}:{line} ({here}) imports {name} ({there})")
    return wrong


def test_imports_point_downwards_only(edges: list[tuple[str, str, str, int]]) -> None:
    assert wrong_arrows(edges) == []


def test_the_arrow_check_catches_an_upward_and_a_sideways_import() -> None:
    edges = [
        ("titan_grpo/protocol/x.py", "titan_grpo.protocol.x", "titan_grpo.sync.lane.Lane", 1),
        ("titan_grpo/layout/x.py", "titan_grpo.layout.x", "titan_grpo.engines.vllm", 2),
        ("titan_grpo/sync/x.py", "titan_grpo.sync.x", "titan_grpo.sync.transports.broadcast", 3),
    ]
    assert len(wrong_arrows(edges)) == 2


PURE = {
    "bisect",
    "collections",
    "dataclasses",
    "enum",
    "functools",
    "itertools",
    "json",
    "math",
    "re",
    "secrets",
    "types",
    "typing",
}
"""What the tables of protocol/ may import: no clock, no thread, no socket, no torch. (``secrets``
makes a run id's digits.)"""


def test_the_protocol_imports_msgspec_and_the_pure_part_of_the_standard_library_only(
    edges: list[tuple[str, str, str, int]],
) -> None:
    found = {
        name.split(".")[0] for path, _, name, _ in edges if path.startswith("titan_grpo/protocol/")
    }
    assert found - PURE == {"titan_grpo", "msgspec"}


def test_every_room_is_in_the_table(edges: list[tuple[str, str, str, int]]) -> None:
    rooms = {room_of(module) for _, module, _, _ in edges} - {""}
    assert rooms <= set(ALLOWED), "a new room needs its line in ALLOWED and in docs/design.md"


def test_modules_do_not_import_each_other_in_a_circle(sources: list[Source]) -> None:
    ours = {module_of(s.path): s for s in sources if s.path.startswith(("titan_grpo/", "patches/"))}
    graph: dict[str, set[str]] = {module: set() for module in ours}
    for module, source in ours.items():
        for name, _ in imports(at_import(source.tree), module, source.path.endswith("__init__.py")):
            target = name if name in ours else name.rpartition(".")[0]
            if target in ours and target != module:
                graph[module].add(target)
    done: set[str] = set()

    def walk(module: str, trail: tuple[str, ...]) -> None:
        assert module not in trail, (
            f"circle: {' -> '.join([*trail[trail.index(module) :], module])}"
        )
        if module not in done:
            for target in sorted(graph[module]):
                walk(target, (*trail, module))
            done.add(module)

    for module in sorted(graph):
        walk(module, ())


def test_an_upstream_package_is_imported_in_its_own_place_only(
    all_edges: list[tuple[str, str, str, int]],
) -> None:
    wrong = [
        f"{path}:{line} imports {name}"
        for path, _, name, line in all_edges
        if not path.startswith(ONLY_HERE.get(name.split(".")[0], ""))
    ]
    assert wrong == []


def loaded_by(modules: list[str], suspect: str) -> str:
    """Which of ``modules`` first pulls in ``suspect``; empty if none does. A fresh interpreter,
    since this one has it."""
    code = (
        "import importlib, sys\n"
        f"for m in {modules!r}:\n    importlib.import_module(m)\n"
        f"    if {suspect!r} in sys.modules: print(m); break\n"
    )
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=280, check=True
    ).stdout.strip()


def modules_of(rooms: Collection[str], sources: list[Source]) -> list[str]:
    names = [module_of(s.path) for s in sources if s.path.startswith(("titan_grpo/", "patches/"))]
    return [n for n in names if room_of(n) in rooms or n == "titan_grpo"]


def test_rooms_that_must_start_fast_load_no_torch(sources: list[Source]) -> None:
    assert loaded_by(modules_of(NO_TORCH, sources), "torch") == ""


def test_the_receiver_loads_no_torchtitan(sources: list[Source]) -> None:
    modules = [
        m
        for m in modules_of(("receive",), sources)
        if not m.endswith(("vllm_plugin", "sglang_plugin"))
    ]
    assert loaded_by(modules, "torchtitan") == ""


NEWER = {
    "typing": {"Self", "Never", "LiteralString", "Unpack", "assert_never", "override"},
    "enum": {"StrEnum"},
    "datetime": {"UTC"},
    "contextlib": {"chdir"},
    "tomllib": set(),
}
"""What Python 3.10 has not: module -> names, none of them: the whole module."""


def test_what_a_server_imports_needs_no_more_than_python_3_10(root: Path) -> None:
    """SGLang 0.5.21 runs on 3.10. scripts/compat.py imports it there."""
    late = []
    for room in ("receive", "layout", "protocol", "engines", "sync/transports"):
        for path in (root / "titan_grpo" / room).glob("*.py"):
            tree = ast.parse(path.read_text(), feature_version=(3, 10))
            guarded = {
                node
                for block in ast.walk(tree)
                if isinstance(block, ast.If) and "TYPE_CHECKING" in ast.dump(block.test)
                for node in ast.walk(block)
            }
            for node in set(ast.walk(tree)) - guarded:
                if isinstance(node, ast.ImportFrom) and node.module in NEWER:
                    names = {each.name for each in node.names}
                    if not NEWER[node.module] or names & NEWER[node.module]:
                        late.append(f"{path.name}: {node.module} {sorted(names)}")
                elif isinstance(node, ast.Import):
                    late += [
                        f"{path.name}: {each.name}" for each in node.names if each.name == "tomllib"
                    ]
    assert late == []
