"""Every wait has a deadline, or is ended by something else that a line of this file names; and none polls.

A thread that waits is woken by what it waits for. What wakes by the clock is in ``BY_THE_CLOCK``, with the reason.
"""

import ast
import re
from collections.abc import Iterator

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
"""Method that may wait -> position of its timeout; None: it has none, so somebody else must end it."""

TIMEOUTS = {"timeout", "timeout_s", "timeout_ms", "deadline_s"}

RUNS = {"run", "call", "check_call", "check_output"}
"""Functions of subprocess that wait for the process."""

SENTINEL = "close() of its owner puts None into the queue; the thread is a daemon"
DONE = "the task has ended: this is called by its callback, or after its group"
OTHER_END = "ends with the other process, whose end closes the stream"

ENDED_BY: dict[str, str] = {
    "titan_grpo/commands/facts.py call_back": "the probe was made with the deadline",
    "titan_grpo/commands/rollouts.py run": "a service in the foreground; Ctrl-C or SIGTERM",
    "titan_grpo/commands/processes.py run_logged": "a command in the foreground, which lasts as long as the training; Ctrl-C",
    "titan_grpo/engines/processes.py wait_process": "the process has ended",
    "titan_grpo/engines/guard.py main": "the end of the owner, a signal, or the end of the child, which is killed after that",
    "titan_grpo/engines/launch.py __init__": "the socket has a timeout",
    "titan_grpo/layout/digest.py digests": "hashing of memory: arithmetic, in threads that wait for nobody",
    "titan_grpo/observe/recorder.py _drain": SENTINEL,
    "titan_grpo/observe/recorder.py _write_loop": SENTINEL,
    "titan_grpo/receive/channel.py _read": "settimeout in the line above; without a deadline it " + OTHER_END,
    "titan_grpo/receive/door.py run": "close(), which shuts the socket down, or the end of the process: the thread is a daemon",
    "titan_grpo/rollout/local.py _receive_loop": OTHER_END,
    "titan_grpo/rollout/local.py _send_loop": SENTINEL,
    "titan_grpo/rollout/dispatch.py _ended": DONE,
    "titan_grpo/rollout/engine_calls.py _serve": SENTINEL,
    "titan_grpo/rollout/external.py _ended": DONE,
    "titan_grpo/rollout/external.py _take_batches": "room for a batch, when the trainer takes one; or close(), by cancelling",
    "titan_grpo/rollout/sampler.py at_once": DONE,
    "titan_grpo/rollout/session.py _call_back": "a frame for the trainer, or close()",
    "titan_grpo/rollout/worker.py _read_loop": OTHER_END,
    "titan_grpo/rollout/worker.py _serve": "Stop, an error, or the end of the trainer, which the reader turns into Stop",
    "titan_grpo/rollout/worker.py _write_loop": SENTINEL,
    "titan_grpo/rollout/worker.py run": OTHER_END,
    "titan_grpo/sync/keeper.py _read": "MSG_DONTWAIT",
    "titan_grpo/sync/keeper.py run": "read after select, and while the queue is not empty: this thread alone takes from it",
    "titan_grpo/sync/publisher.py _run": SENTINEL,
    "titan_grpo/sync/transports/gloo.py broadcast": "the work has completed: its future was waited for with a deadline",
    "titan_grpo/sync/transports/nccl.py _run": "a timer aborts the communicator at the deadline",
    "titan_grpo/sync/worker.py _seal_loop": SENTINEL,
    "titan_grpo/titan/control_socket.py _answer": "the connection has a timeout (the handler's)",
    "titan_grpo/titan/control_socket.py ask": "the socket has a timeout",
    "titan_grpo/titan/members.py _loop": SENTINEL,
    "titan_grpo/verify/faults/trainer.py _run": SENTINEL,
    "titan_grpo/verify/faults/trainer.py main": OTHER_END,
}
"""``path function`` of a wait without a deadline -> what ends it."""


CLOCKS = {"sleep", "serve_forever", "Timer", "call_later", "call_at"}
"""Wakes by the clock wherever it stands. (socketserver's serve_forever looks twice a second whether it shall end.)"""

CHILDREN = re.compile(r"(process|guard|child|probe|popen)$")
"""How variables that hold a child process end; their own wait with a timeout asks again every 50 ms."""

SECONDS = re.compile(r"^_?[A-Z][A-Z_]*_S$")

ANEW = {"range", "count", "repeat", "iter"}
"""A for loop over one of these does the same again and again, as while does; others do it for one thing after the other."""

REST = "woken by the event; the time is what is left of a deadline, and its end is the end of the loop"
ONCE = "once, at a deadline"
ASKED = "the other end has no way to tell, so it is asked: "

BY_THE_CLOCK: dict[str, str] = {
    "titan_grpo/engines/launch.py wait_healthy": ASKED + "an engine that starts; only where a run launches its servers",
    "titan_grpo/receive/process.py serve": "the deadline of sending one answer; a request of the engine wakes it",
    "titan_grpo/receive/receiver.py _next": "an order or the lane's end wakes it; a store has no wait without a timeout (60 s)",
    "titan_grpo/rollout/client.py next_batch": REST,
    "titan_grpo/rollout/dispatch.py _drain": ONCE,
    "titan_grpo/rollout/dispatch.py _outage": ASKED + "a server that failed, after a rest that doubles",
    "titan_grpo/rollout/external.py _paused": ASKED + "an Atropos API has a batch or not; only while there is room for one",
    "titan_grpo/rollout/external.py _take_batches": "the bounds of that pause",
    "titan_grpo/rollout/serving.py _serve": ASKED + "whether a descriptor is free again; else a connection wakes it",
    "titan_grpo/rollout/remote.py _wait": ASKED
    + "a service whose callbacks are lost, after 5 s of silence; a message wakes it",
    "titan_grpo/rollout/service.py _watch": "the end of an open lease",
    "titan_grpo/rollout/session.py _call_back": ASKED + "a trainer that did not take a callback, after a rest that doubles",
    "titan_grpo/rollout/worker.py _read_loop": ONCE + ", after the end of the trainer",
    "titan_grpo/sync/fleet.py wait_held": REST,
    "titan_grpo/sync/keeper.py run": "woken by a line, a result, the trainer's end; else at the end of an open lease",
    "titan_grpo/sync/lane.py _await_newer": ASKED
    + "a server that was restarted holds other weights; every 10 s, with nothing to send",
    "titan_grpo/sync/lane.py _rest": ASKED + "a server that failed, after a rest that doubles; a stop ends it at once",
    "titan_grpo/sync/publisher.py _run": "the deadline of one copy; a version wakes it",
    "titan_grpo/sync/shelf.py pin_newer": REST,
    "titan_grpo/sync/transports/nccl.py _run": ONCE,
    "titan_grpo/titan/members.py _look_loop": ASKED
    + "a file on a network file system; the command titan-grpo servers is an event",
}
"""``path function`` of what wakes by the clock -> why that is right."""


def calls(tree: ast.AST, where: str = "") -> Iterator[tuple[str, ast.Call]]:
    """(enclosing function, call) of every call."""
    for name, call, _ in placed(tree, where):
        yield name, call


def placed(tree: ast.AST, where: str = "", again: bool = False) -> Iterator[tuple[str, ast.Call, bool]]:
    """(enclosing function, call, whether it is in a loop that does the same again) of every call."""
    for node in ast.iter_child_nodes(tree):
        name, looped = where, again
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            name, looped = node.name, False
        elif isinstance(node, ast.While):
            looped = True
        elif isinstance(node, ast.For) and isinstance(node.iter, ast.Call):
            looped = again or _name(node.iter) in ANEW
        if isinstance(node, ast.Call):
            yield name, node, looped
        yield from placed(node, name, looped)


def _name(call: ast.Call) -> str:
    return call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")


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
        return any(k.arg == "blocking" and not getattr(k.value, "value", True) for k in call.keywords)
    return False


def _is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant | ast.JoinedStr) or (isinstance(node, ast.Attribute) and node.attr in ("path", "sep"))


def endless(path: str, tree: ast.AST) -> list[tuple[str, int, str]]:
    """(path function, line, call) of every wait without a deadline."""
    out = []
    for where, call in calls(tree):
        function = call.func
        if not isinstance(function, ast.Attribute):
            continue
        name, owner = function.attr, ast.unparse(function.value)
        if owner == "subprocess" and name in RUNS:
            waits = not bounded(call, None)
        elif name in POSITION and owner != "asyncio":
            waits = not not_a_wait(call) and not bounded(call, POSITION[name])
        else:
            waits = False
        if waits:
            out.append((f"{path} {where}", call.lineno, ast.unparse(call)[:80]))
    return out


def clocked(path: str, tree: ast.AST) -> list[tuple[str, int, str]]:
    """(path function, line, call) of everything that wakes by the clock: pauses, and waits with a timeout in a loop."""
    out = []
    for where, call, again in placed(tree):
        name, function = _name(call), call.func
        owner = ast.unparse(function.value) if isinstance(function, ast.Attribute) else ""
        seconds = any(isinstance(n, ast.Name) and SECONDS.match(n.id) for a in _values(call) for n in ast.walk(a))
        if isinstance(function, ast.Attribute) and name in POSITION and owner != "asyncio":
            waits = not not_a_wait(call) and bounded(call, POSITION[name])
        else:
            waits = any(keyword.arg in TIMEOUTS for keyword in call.keywords)
        child = name == "wait" and waits and CHILDREN.search(owner)
        if name in CLOCKS or child or (again and (waits or seconds)):
            out.append((f"{path} {where}", call.lineno, ast.unparse(call)[:80]))
    return out


def _values(call: ast.Call) -> list[ast.expr]:
    return [*call.args, *(keyword.value for keyword in call.keywords)]


def found(sources) -> list[tuple[str, int, str]]:
    # What testing/ waits for is bounded by the tests that use it.
    ours = [s for s in sources if s.path.startswith("titan_grpo/") and not s.path.startswith("titan_grpo/testing/")]
    return [wait for source in ours for wait in endless(source.path, source.tree)]


def test_every_wait_has_a_deadline_or_a_named_end(sources) -> None:
    unnamed = [f"{place.replace(' ', f':{line} ')}: {call}" for place, line, call in found(sources) if place not in ENDED_BY]
    assert unnamed == [], "give it a timeout, or a line in ENDED_BY that says what ends it"


def test_the_list_of_exceptions_has_no_line_too_many(sources) -> None:
    assert set(ENDED_BY) - {place for place, _, _ in found(sources)} == set()


def test_the_check_catches_waits_and_lets_bounded_ones_pass() -> None:
    bad = ["e.wait()", "t.join()", "q.get()", "l.acquire()", "c.recv()", "p.communicate()", "f.result()", "subprocess.run(x)"]
    bad += ["e.wait(None)", "t.join(timeout=None)", "store.wait([key])", "select.select([a], [], [])", "c.wait_for(fact)"]
    good = ["e.wait(1)", "t.join(left)", "q.get(timeout=1)", "','.join(x)", "m.get(key)", "l.acquire(blocking=False)"]
    good += ["subprocess.run(x, timeout=5)", "store.wait([key], limit)", "select.select([a], [], [], 1)", "c.wait_for(fact, 3)"]
    for texts, count in ((bad, 1), (good, 0)):
        assert [text for text in texts if len(endless("x", ast.parse(text))) != count] == []


def waking(sources) -> list[tuple[str, int, str]]:
    # verify/ and testing/ look at runs from outside, at which nobody may look into.
    outside = ("titan_grpo/testing/", "titan_grpo/verify/")
    ours = [s for s in sources if s.path.startswith("titan_grpo/") and not s.path.startswith(outside)]
    return [wake for source in ours for wake in clocked(source.path, source.tree)]


def test_nothing_in_a_run_wakes_by_the_clock_but_for_a_named_reason(sources) -> None:
    unnamed = [
        f"{place.replace(' ', f':{line} ')}: {call}" for place, line, call in waking(sources) if place not in BY_THE_CLOCK
    ]
    assert unnamed == [], "wait for the event (a future, a condition, a queue, a descriptor), or say why there is none"


def test_the_list_of_reasons_has_no_line_too_many(sources) -> None:
    assert set(BY_THE_CLOCK) - {place for place, _, _ in waking(sources)} == set()


def test_the_check_catches_polling_and_lets_a_single_deadline_pass() -> None:
    nap = "sleep"  # which no test says
    bad = [
        f"time.{nap}(1)",
        f"await asyncio.{nap}(0.1)",
        "server.serve_forever()",
        "self._process.wait(5.0)",
        f"{nap}(PAUSE_S)",
    ]
    bad += ["while not e.wait(0.1):\n    look()", "while True:\n    q.get(timeout=0.01)", "for _ in range(9):\n    e.wait(1)"]
    bad += ["while not done():\n    self.pause(POLL_S)", "loop.call_later(1, look)", "while x:\n    driver.run(timeout_s=1)"]
    good = ["e.wait(1)", "while True:\n    q.get()", "for t in threads:\n    t.join(5.0)", "wait_process(process, 5.0)"]
    good += ["while True:\n    def f():\n        e.wait(1)", "q.get(timeout=1)"]
    for texts, count in ((bad, 1), (good, 0)):
        assert [text for text in texts if len(clocked("x", ast.parse(text))) != count] == []
