"""Live view of a run: follows its growing files and lays out a terminal screen."""

import re
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from titan_grpo.observe import names
from titan_grpo.observe.names import short
from titan_grpo.observe.output import reading
from titan_grpo.observe.recorder import ENTRY, HISTORY, METRICS, row_of
from titan_grpo.observe.report import duration, held_by, number
from titan_grpo.observe.run_lock import lives, restarts
from titan_grpo.observe.schema import decoded
from titan_grpo.views.findings import percent
from titan_grpo.views.run import band, edges, in_order, read_summary, summary_of

TAIL_BYTES = 1 << 22
"""Bytes read from the end of a long file that exists when watching starts (the newest lines), and
as many from its beginning (the servers)."""

MEMBERS = tuple(
    f'["{kind}"'.encode()
    for kind in ("process", "server", "holds", "member", "first step", "resume")
)
"""Beginnings of the lines of history.jsonl that say which servers and steps are in the run: few,
and each counts, wherever it is."""

KEPT_STEPS = 400
"""Rows kept for the screen's means and curves."""

WINDOW = 10
"""Steps of the column "mean"."""

ERRORS = 5
"""The last errors on the screen. A run of days has many: no more are kept, and commits are
counted."""

SPARK = "▁▂▃▄▅▆▇█"
SPARK_WIDTH = 32

SHOWN = (
    (names.REWARD, "reward"),
    (names.STALENESS_MAX, "staleness, largest"),
    (names.LOGPROB_GAP, "log-probability gap"),
    (names.ON_POLICY_GAP, "the same, own version"),
    (names.COMPLETION_TOKENS, "completion tokens"),
    (names.CLIP_FRACTION, "clipped"),
    (names.IMPORTANCE_CUT, "correction cut"),
    (names.GRAD_NORM, "gradient norm"),
    (names.STEP_S, "step, s"),
    (names.ROLLOUT_WAIT_S, "  waiting for rollouts"),
    (names.TRAIN_S, "  training"),
    (names.BLOCKED_S, "  blocked by weight sync"),
)
"""(metric, its name on the screen)."""


class Tail:
    """Whole lines of a growing file, each once, and its last line again if that was replaced. A
    file that became shorter otherwise is read again."""

    def __init__(self, path: Path, always: tuple[bytes, ...] = ()) -> None:
        """``always``: beginnings of the lines that are also wanted of a long file's middle."""
        self._path, self._always = path, always
        self._at = 0
        """Where the last line returned begins."""
        self._last = b""
        self._begun = False

    def lines(self) -> list[bytes]:
        """Return the lines since the last call; none while there is no file."""
        try:
            with reading(self._path) as file:
                size = file.seek(0, 2)
                if size < self._at:
                    self._at, self._last = 0, b""
                out = self._skipped(file, size) if not self._begun else []
                self._begun = True
                # From the last line on: the end of a run replaces it (Recorder.after_last_step),
                # and may have cut the old one without having written the new one yet.
                file.seek(self._at)
                data = file.read(size - self._at)
        except FileNotFoundError:
            self._at, self._last = 0, b""
            return []
        whole = data[: data.rfind(b"\n") + 1]
        lines = whole.removeprefix(self._last).splitlines(keepends=True)
        if lines:
            self._last = lines[-1]
            self._at += len(whole) - len(self._last)
        return out + [line.rstrip(b"\r\n") for line in lines]

    def _skipped(self, file: Any, size: int) -> list[bytes]:
        """Return the beginning of a long file, with the lines of its middle that are wanted, and
        move to its end."""
        if size <= 2 * TAIL_BYTES:
            return []
        file.seek(0)
        out: list[bytes] = file.readlines(TAIL_BYTES)
        # Not past where the end begins, whose lines are all wanted.
        while self._always and (left := size - TAIL_BYTES - file.tell()) > 0:
            lines = file.readlines(min(left, TAIL_BYTES))
            out += [line for line in lines if line.startswith(self._always)]
        if not self._always:
            file.seek(size - TAIL_BYTES)
            # no deadline: this reads a file up to the end of a line.
            file.readline()
        self._at = file.tell()
        return [line.rstrip(b"\r\n") for line in out]


@dataclass
class State:
    """Known state of a run."""

    rows: deque[dict[str, Any]] = field(default_factory=lambda: deque(maxlen=KEPT_STEPS))
    held: dict[str, int | None] = field(default_factory=dict)
    """Server -> version; None: none yet, or it does not answer."""
    left: set[str] = field(default_factory=set)
    """Servers that left. A commit that had begun is ended all the same, and brings none back."""
    commits: dict[str, int] = field(default_factory=dict)
    """Server -> number of commits seen."""
    errors: deque[str] = field(default_factory=lambda: deque(maxlen=ERRORS))
    own_errors: deque[str] = field(default_factory=lambda: deque(maxlen=ERRORS))
    """Those of the run's last process."""
    own: dict[str, int] = field(default_factory=dict)
    """Servers of the run's last process -> number of commits seen of it."""
    begun: bool = False
    """Whether the run's last process has made a step: the rows before it may be made again."""
    last_change: float = field(default_factory=time.monotonic)

    @property
    def step(self) -> int:
        """The last step; 0 before the first."""
        return int(self.rows[-1]["step"]) if self.rows else 0

    @property
    def newest(self) -> int:
        """The newest version known: of a server, or from which the trainer began its last step."""
        own = self.rows[-1].get(names.VERSION) if self.rows and self.begun else None
        return max((int(v) for v in (*self.held.values(), own) if v is not None), default=0)

    def add_row(self, row: dict[str, Any]) -> None:
        """Add a line of metrics.jsonl; it replaces all rows from its step on."""
        while self.rows and self.rows[-1]["step"] >= row["step"]:
            self.rows.pop()
        self.rows.append(row)

    def add_entry(self, entry: Sequence[Any]) -> None:
        """Apply a line of history.jsonl."""
        match entry:
            case ["process"]:  # it may have other servers than the one before
                self.held, self.left, self.own, self.begun = {}, set(), {}, False
                self.own_errors.clear()
            case ["server", str(url)] | ["member", str(url), "joined", _]:
                self.left.discard(url)
                self.held.setdefault(url, None)
                self.own.setdefault(url, 0)
            case ["holds", str(url), int() | None as version] if url not in self.left:
                self.held[url] = version
            case ["commit", str(url), int(version)]:
                if url not in self.left:
                    self.held[url] = version
                for commits in (self.commits, self.own):
                    commits[url] = commits.get(url, 0) + 1
            case ["member", str(url), "left", _]:
                self.held.pop(url, None)
                self.left.add(url)
            case ["error", str(message)]:
                self.errors.append(message)
                self.own_errors.append(message)
            case ["resume", _]:
                self.begun = True
            case ["first step"]:  # what was before is an older run in the same folder
                self.begun = True
                self.errors = self.own_errors.copy()
                self.commits = dict(self.own)


class Follower:
    """Reader of a run's folder, which need not exist yet."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.state = State()
        self._metrics = Tail(folder / METRICS)
        self._history = Tail(folder / HISTORY, MEMBERS)

    def read(self) -> list[dict[str, Any]]:
        """Read new lines. Returns the new rows of metrics.jsonl."""
        for line in self._history.lines():
            if (entry := decoded(line, ENTRY)) is not None:
                self.state.add_entry(entry)
        first = not self.state.rows
        rows = [row for line in self._metrics.lines() if (row := row_of(line)) is not None]
        for row in rows:
            self.state.add_row(row)
        if rows:
            # What was there before this command may be hours old.
            self.state.last_change = time.monotonic() - (self._age_s() if first else 0.0)
        return rows

    def _age_s(self) -> float:
        """Return how long ago metrics.jsonl was written, by the file system's clock."""
        with suppress(FileNotFoundError):
            return max(0.0, time.time() - (self.folder / METRICS).stat().st_mtime)
        return 0.0

    def ended(self) -> bool:
        """Return whether the run is over: its trainer has ended, and torchrun starts it no more, or
        if that is unknown (run_lock.lives), it has a summary.json."""
        alive = lives(self.folder)
        if alive is None:
            return summary_of(self.folder) is not None
        if alive:
            return False
        if not restarts(self.folder):
            return True
        summary = read_summary(self.folder)
        return summary is not None and not summary.ended_by


def spark(values: Sequence[float]) -> str:
    """Draw values as at most SPARK_WIDTH blocks.

    Example: 0, 1, 2, 3 -> "▁▃▆█"; equal values are all "▁".
    """
    if not values:
        return ""
    means = band(np.array(values, dtype=np.float64), edges(len(values), SPARK_WIDTH)).mean
    low, high = float(means.min()), float(means.max())
    scale = (len(SPARK) - 1) / (high - low) if high > low else 0.0
    return "".join(SPARK[round((value - low) * scale)] for value in means)


def step_line(row: Mapping[str, Any], held: Mapping[str, int | None]) -> str:
    """Return a step's line for output that is no terminal. ``held``: versions at that step."""
    figures = (
        ("reward", names.REWARD),
        ("stale", names.STALENESS_MAX),
        ("gap", names.LOGPROB_GAP),
        ("step_s", names.STEP_S),
        ("waited_s", names.ROLLOUT_WAIT_S),
        ("blocked_s", names.BLOCKED_S),
    )
    text = "  ".join(f"{label} {number(row.get(name))}" for label, name in figures)
    rewards = re.compile(f"{names.EVALUATION}/(.+)/reward")
    for name, value in row.items():
        if found := rewards.fullmatch(name):
            text += f"  evaluation {found[1]} {number(value)}"
    return f"step {row['step']}  {text}{held_by(held)}"


def screen(name: str, state: State, now: float) -> RenderableType:
    """Lay out the screen; ``now`` is on the clock of ``state.last_change``."""
    since = duration(max(0.0, now - state.last_change))
    if not state.rows:
        held = sum(v is not None for v in state.held.values())
        known = f"; {held} of {len(state.held)} servers hold a version" if state.held else ""
        return Group(Text(f"{name}: no step yet, for {since}{known}"), *_errors(state))
    last = state.rows[-1]
    head = Text(f"{name}: step {state.step}", style="bold")
    head.append(f"   last step {since} ago", style="dim")
    if last.get(names.STEP_S):
        waited = (last.get(names.ROLLOUT_WAIT_S) or 0.0) / last[names.STEP_S]
        head.append(f"   waiting for rollouts {percent(waited)}", style="dim")
    return Group(head, _metrics(state), _servers(state), *_errors(state))


def _metrics(state: State) -> Table:
    table = Table(box=None, pad_edge=False)
    for title in ("", "last", f"mean of {WINDOW}"):
        table.add_column(title, justify="right" if title else "left")
    table.add_column(f"last {len(state.rows)} steps")
    for name, label in SHOWN:
        values = [row[name] for row in state.rows if row.get(name) is not None]
        if values:
            mean = float(np.mean(values[-WINDOW:]))
            last = state.rows[-1].get(name)
            table.add_row(label, number(last), number(mean), Text(spark(values), style="cyan"))
    return table


def _servers(state: State) -> Table:
    table = Table(box=None, pad_edge=False)
    for title in ("server", "version", "behind", "commits seen"):
        table.add_column(title, justify="left" if title == "server" else "right")
    for url in in_order(state.held):
        version = state.held[url]
        behind = None if version is None else state.newest - version
        style = "yellow" if behind is None or behind > 1 else ""
        shown = "not serving" if version is None else version
        cells = (short(url), shown, behind, state.commits.get(url, 0))
        table.add_row(*("-" if cell is None else str(cell) for cell in cells), style=style)
    return table


def _errors(state: State) -> list[Text]:
    return [Text(f"error: {message}", style="red") for message in state.errors]
