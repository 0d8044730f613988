"""The servers of a run: named at its start by the configuration, a servers file or a SLURM host
list; changed while it runs by that file or by commands over a Unix socket. The trainer's main
thread waits for neither."""

import itertools
import os
import re
import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from titan_grpo.config import Rollout
from titan_grpo.config.rollout import server_url, two_names
from titan_grpo.errors import (
    ConfigError,
    DataError,
    PeerError,
    ServerRefused,
    ServerUnreachable,
)
from titan_grpo.observe import terminal
from titan_grpo.sync.server_set import ServerSet
from titan_grpo.unix_rpc import Handler, Server, call, listens

MAX_HOSTS = 65_536
"""Bound on a host list: a mistyped range must not fill the memory."""

_RANGE = re.compile(r"(\d{1,18})(?:-(\d{1,18}))?")
_PART = re.compile(r"\[[^\[\]]*\]|[^\[\],\s]+")
_ITEM = re.compile(rf"(?:{_PART.pattern})+")


def expand_hosts(text: str) -> tuple[str, ...]:
    """Return the host names of a SLURM host list, in order, each once. Numbers keep the width of
    their range's first. Raises ConfigError if ``text`` is no host list.

    >>> expand_hosts("node[01-03,07],gpu2")
    ('node01', 'node02', 'node03', 'node07', 'gpu2')
    >>> expand_hosts("rack[1-2]n[9-10]")
    ('rack1n9', 'rack1n10', 'rack2n9', 'rack2n10')
    """
    out: dict[str, None] = {}
    items, total = _ITEM.findall(text), 0
    if not items or ",".join(items) != text.strip():
        raise ConfigError(f"a host list must look like node[01-03,07],gpu2, got {text!r:.200}")
    for item in items:
        choices, count = [], 1
        for part in _PART.findall(item):
            choices.append(_numbers(part[1:-1], text) if part[0] == "[" else [part])
            count *= len(choices[-1])
            # Before the names are made: repeated ones would take as long, and count no less.
            if total + count > MAX_HOSTS:
                raise ConfigError(
                    f"a host list must have {MAX_HOSTS} hosts at most, got {text!r:.200}"
                )
        total += count
        out |= dict.fromkeys(map("".join, itertools.product(*choices)))
    return tuple(out)


def _numbers(ranges: str, text: str) -> list[str]:
    out: list[str] = []
    for piece in ranges.split(","):
        found = _RANGE.fullmatch(piece)
        low, high = (
            (int(found.group(1)), int(found.group(2) or found.group(1))) if found else (1, 0)
        )
        if found is None or not 0 <= high - low < MAX_HOSTS - len(out):
            raise ConfigError(
                f"a range of a host list must be like 01-03 or 7, with {MAX_HOSTS} hosts at most,"
                f" got {piece!r:.100} in {text!r:.200}"
            )
        out += [f"{number:0{len(found.group(1))}d}" for number in range(low, high + 1)]
    return out


def parse_servers(text: str) -> tuple[str, ...]:
    """Return the URLs of a servers file, each once: one per line, ``#`` starts a comment.

    Raises ConfigError naming the line, also if the last line has no newline: the file is still
    being written.
    """
    if text and not text.endswith("\n"):
        raise ConfigError(
            "its last line has no end: it is still being written (write another file, then"
            " rename it)"
        )
    out: dict[str, None] = {}
    for number, line in enumerate(text.splitlines(), 1):
        if url := line.partition("#")[0].strip():
            try:
                out[server_url(url)] = None
            except ConfigError as error:
                raise ConfigError(f"line {number}: {error}") from error
    if both := two_names(out):
        raise ConfigError(f"{both} are one server: give it one name")
    return tuple(out)


Stamp = tuple[int, int, int]


def _stamp(found: os.stat_result) -> Stamp:
    return found.st_ino, found.st_size, found.st_mtime_ns


class ServersFile:
    """Polled file of server URLs that a scheduler replaces. inotify would miss changes that another
    host makes on a network file system."""

    def __init__(self, path: str | Path) -> None:
        self._path = Path(path)
        self._seen: Stamp | None = None

    def read(self) -> tuple[str, ...]:
        """Return the URLs in the file. Raises ConfigError naming the file if it is unreadable or
        malformed."""
        try:
            with self._path.open(encoding="utf-8-sig") as file:
                # Before reading: ``changed`` then notices a write in between.
                self._seen = _stamp(os.fstat(file.fileno()))
                return parse_servers(file.read())
        except (OSError, UnicodeDecodeError) as error:
            if isinstance(error, OSError):
                self.forget()  # it may be readable later, without another change
            raise ConfigError(
                f"rollout.servers_file must be a readable file, got {str(self._path)!r}: {error}"
            ) from error
        except ConfigError as error:
            raise ConfigError(f"rollout.servers_file {str(self._path)!r}: {error}") from error

    def forget(self) -> None:
        """Have ``changed`` return the URLs again, or raise again, although nothing changes."""
        self._seen = None

    def changed(self) -> tuple[str, ...] | None:
        """Return the URLs if the file or its content changed since it was last read, else None.
        Raises as ``read`` does, once per change; again at each call while the file is there and
        cannot be read."""
        try:
            stamp: Stamp | None = _stamp(self._path.stat())
        except OSError:
            stamp = None
        if stamp == self._seen:
            return None
        return self.read()


@dataclass(frozen=True, slots=True)
class Known:
    """URLs of the configured servers: ``fixed`` for the whole run, ``listed`` in the servers
    file."""

    fixed: tuple[str, ...]
    listed: tuple[str, ...]

    @property
    def urls(self) -> list[str]:
        """All URLs, each once, the fixed first."""
        return list(dict.fromkeys((*self.fixed, *self.listed)))


def known_servers(
    rollout: Rollout,
    environ: Mapping[str, str],
    launched: tuple[str, ...] = (),
    apart: Collection[str] = (),
) -> Known:
    """Return the servers that ``[rollout]`` names now; ``launched`` replaces the word "launch",
    and is empty where they are not started yet. ``apart``: the evaluations' own servers, which
    must be others. Raises ConfigError."""
    fixed = launched if rollout.launches else tuple(server_url(url) for url in rollout.servers)
    if variable := rollout.servers_slurm:
        if not (hosts := environ.get(variable, "")).strip():
            raise ConfigError(
                f"rollout.servers_slurm must name a variable with a host list, {variable} is"
                f" {'empty' if variable in environ else 'not set'}: is this a job of SLURM, with"
                " that group?"
            )
        ports = range(rollout.servers_port, rollout.servers_port + rollout.servers_per_host)
        fixed += tuple(
            server_url(f"http://{host}:{port}") for host in expand_hosts(hosts) for port in ports
        )
    listed = ServersFile(rollout.servers_file).read() if rollout.servers_file else ()
    if not (rollout.launches or fixed or listed):
        raise ConfigError(
            "rollout.servers_file must name a server at the start of a run, got"
            f" {rollout.servers_file!r} with none"
        )
    known = Known(tuple(dict.fromkeys(fixed)), listed)
    if both := two_names((*known.urls, *apart)):
        raise ConfigError(
            "rollout.servers, servers_file and servers_slurm, and servers in [[evaluation]], must"
            f" give a server one name, {both} are one server"
        )
    if shared := sorted(set(apart) & set(known.urls)):
        raise ConfigError(
            "servers in [[evaluation]] must be none of rollout.servers, servers_file and"
            f" servers_slurm, got {', '.join(shared)}, which would get no rollouts: leave them out"
            " of the table to evaluate beside the rollouts"
        )
    return known


LOOK_S = 1.0
"""Seconds between two checks of the servers file."""

CHANGE_S = 20.0
"""Seconds to wait for a removal before answering that it is in progress."""

STOP_S = 5.0
"""Seconds that ``close`` waits for the thread of the servers file."""


NAME = "control.sock"

ANSWER_S = 30.0
"""Seconds that a command waits for its answer; longer than CHANGE_S."""


@contextmanager
def _address(folder: Path) -> Iterator[str]:
    """Yield a short path to the socket: the kernel takes 107 bytes, run directories may be
    longer."""
    fd = os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{fd}/{NAME}"
    finally:
        os.close(fd)


def ask(folder: Path, request: Mapping[str, Any], timeout_s: float = ANSWER_S) -> dict[str, Any]:
    """Send a request to the trainer that runs in ``folder`` on this host; return its answer. Raises
    ServerUnreachable if none comes, ServerRefused with its refusal."""
    try:
        with _address(folder) as address:
            return call(address, request, timeout_s)
    except (OSError, ServerUnreachable) as error:
        raise ServerUnreachable(
            f"no trainer runs in {folder} on this host, or it does not answer ({error}): name the"
            " run's job.dump_folder with --run, on the host of its rank 0"
        ) from error


class ControlSocket:
    """Listening socket in the run's directory, from construction to ``close``. Raises ServerRefused
    if a live trainer has one."""

    def __init__(self, folder: Path, handler: Handler) -> None:
        self._path = folder / NAME
        with _address(folder) as address:
            if listens(address):
                raise ServerRefused(
                    f"{self._path} belongs to a live trainer: two runs cannot share a directory"
                )
            self._path.unlink(missing_ok=True)  # left by a killed trainer
            self._server = Server(address, handler, concurrent=True)
        self._inode = self._path.stat().st_ino
        self._server.start()

    def close(self) -> None:
        """Stop listening and remove the socket. Idempotent."""
        self._server.close()
        with suppress(OSError):
            # by now the file may belong to the next trainer
            if self._path.stat().st_ino == self._inode:
                self._path.unlink()


class Membership:
    """Thread of the servers file and socket for commands; run from construction to ``close``."""

    def __init__(
        self,
        servers: ServerSet,
        run_dir: Path,
        in_flight: Callable[[], Mapping[str, int]],
        servers_file: str | Path,
    ) -> None:
        """``in_flight``: number of requests by server, for the list command. ``servers_file``: its
        path, or empty; ``servers`` has its content at the start. If the socket cannot be opened,
        only the commands are missing."""
        self._servers, self._in_flight = servers, in_flight
        self._file = ServersFile(servers_file) if servers_file else None
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="servers file", daemon=True)
        if self._file is not None:
            self._thread.start()
        self._socket: ControlSocket | None = None
        try:
            self._socket = ControlSocket(run_dir, self._answer)
        except (PeerError, OSError) as error:
            terminal.print_status(f"titan-grpo servers will not reach this run: {error}")

    def close(self) -> None:
        """Stop following the file and the socket. Bounded; idempotent."""
        self._stopping.set()
        if self._socket is not None:
            self._socket.close()
        if self._thread.is_alive():
            self._thread.join(STOP_S)

    def _answer(self, request: Mapping[str, Any]) -> Mapping[str, Any]:
        what = request.get("do")
        if what == "list":
            return {"servers": self._servers.lines(self._in_flight())}
        if what not in ("add", "remove"):
            raise DataError(f"a request must be one of add, remove, list, got {what!r:.200}")
        try:
            url = server_url(str(request.get("url", "")))
        except ConfigError as error:
            raise DataError(str(error)) from error
        if what == "add":
            if both := two_names([*self._servers.urls, url]):
                raise DataError(f"{both} are one server: it is in the run already")
            later = "" if self._servers.add(url) else " when its last lane has ended"
            text = f"{url} was added: it gets the newest version before its first rollout{later}"
        elif self._servers.remove(url, CHANGE_S):
            text = f"{url} was removed: it takes no more rollouts and no more versions"
        else:
            text = f"{url} is leaving: what its lane has begun is finished first"
        return {"text": text}

    def _follow(self) -> None:
        assert self._file is not None
        complaint = ""
        while not self._stopping.wait(LOOK_S):
            try:
                urls = self._file.changed()
                if urls is not None:
                    # Before a lane starts: two lanes of a run on one server refuse each other.
                    if both := two_names((*self._servers.urls, *urls)):
                        raise ConfigError(
                            f"rollout.servers_file must give a server one name, {both} are one"
                            " server; to rename one, take it out of the file first"
                        )
                    self._servers.listed(urls)
                    complaint = ""
            except (ConfigError, ServerRefused) as error:
                self._file.forget()  # a command may remove what it was refused for
                if str(error) != complaint:
                    complaint = str(error)
                    terminal.print_status(
                        f"servers: {complaint}; the last good list stays in force"
                    )
