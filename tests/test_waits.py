"""Every wait has a deadline, or a comment ``# no deadline:`` above it that says what ends it."""

import ast
from collections.abc import Iterator

from tests.conftest import Source

POSITION = {
    "wait": 0,
    "join": 0,
    "acquire": 1,
    "communicate": 1,
    "result": 0,
    "exception": 0,
    "wait_for": 1,
    "get": 1,
    "select": 3,
    "serve_forever": None,
    "recv": None,
    "recvfrom": None,
    "recv_bytes": None,
    "recv_into": None,
    "readline": None,
    "accept": None,
}
"""Method that may wait -> position of its timeout; None: it has none, another party must end it."""

TIMEOUTS = {"timeout", "timeout_s", "timeout_ms", "deadline_s"}

RUNS = {"run", "call", "check_call", "check_output"}
"""Functions of subprocess that wait for the process."""


def bounded(call: ast.Call, position: int | None) -> bool:
    if any(keyword.arg in TIMEOUTS for keyword in call.keywords):
        return not any(k.arg in TIMEOUTS and _none(k.value) for k in call.keywords)
    if position == 0 and call.args and isinstance(call.args[0], ast.List):
        position = 1  # a store waits for a list of keys
    return position is not None and len(call.args) > position and not _none(call.args[position])


def _none(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is None


def not_a_wait(call: ast.Call) -> bool:
    """``", ".join(x)``, ``os.path.join(a, b)``, ``mapping.get(key)``, ``queue.get(False)``."""
    function = call.func
    assert isinstance(function, ast.Attribute)
    if function.attr == "join":
        return bool(call.args) and _is_text(function.value)
    if function.attr == "get":
        return bool(call.args)
    if function.attr == "acquire":
        return any(
            k.arg == "blocking" and not getattr(k.value, "value", True) for k in call.keywords
        )
    return False


def _is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant | ast.JoinedStr) or (
        isinstance(node, ast.Attribute) and node.attr in ("path", "sep")
    )


def endless(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Line and text of every call that may wait without a deadline."""
    for call in ast.walk(tree):
        if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Attribute):
            continue
        name, owner = call.func.attr, ast.unparse(call.func.value)
        if owner == "subprocess" and name in RUNS:
            waits = not bounded(call, None)
        elif name in POSITION and owner != "asyncio":
            waits = not not_a_wait(call) and not bounded(call, POSITION[name])
        else:
            waits = False
        if waits:
            yield call.lineno, ast.unparse(call)[:80]


def excused(tree: ast.AST, lines: list[str], line: int) -> bool:
    """Whether the comment block above the statement of this line says ``no deadline:``."""
    first = max(
        node.lineno
        for node in ast.walk(tree)
        if isinstance(node, ast.stmt) and node.lineno <= line <= (node.end_lineno or 0)
    )
    while first > 1 and lines[first - 2].lstrip().startswith("#"):
        first -= 1
        if "# no deadline:" in lines[first - 1]:
            return True
    return False


def test_every_wait_has_a_deadline_or_a_comment_that_says_what_ends_it(
    sources: list[Source],
) -> None:
    unnamed = [
        f"{source.path}:{line}: {call}"
        for source in sources
        if source.path.startswith("titan_grpo/")
        for line, call in endless(source.tree)
        if not excused(source.tree, source.text.splitlines(), line)
    ]
    assert unnamed == [], "give it a timeout, or a comment '# no deadline: what ends it' above it"


def test_the_check_catches_waits_and_lets_bounded_ones_pass() -> None:
    bad = """e.wait() t.join() q.get() l.acquire() c.recv() p.communicate() f.result()
        subprocess.run(x) e.wait(None) t.join(timeout=None) store.wait([key])
        select.select([a],[],[]) c.wait_for(fact)"""
    good = """e.wait(1) t.join(left) q.get(timeout=1) ','.join(x) m.get(key)
        l.acquire(blocking=False) subprocess.run(x,timeout=5) store.wait([key],limit)
        select.select([a],[],[],1) c.wait_for(fact,3)"""
    for texts, count in ((bad, 1), (good, 0)):
        found = {text: len(list(endless(ast.parse(text)))) for text in texts.split()}
        assert set(found.values()) == {count}, found
