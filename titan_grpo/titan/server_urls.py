"""Where server URLs come from: the configuration, a file, a SLURM host list. Pure, but for reading
the file."""

import itertools
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from titan_grpo.config import LAUNCH, Rollout
from titan_grpo.config.rollout import server_url, two_names
from titan_grpo.errors import ConfigError

MAX_HOSTS = 65_536
"""More hosts than any host list has: a mistyped range shall not fill the memory."""

_RANGE = re.compile(r"(\d+)(?:-(\d+))?")
_PART = re.compile(r"\[([^\[\]]*)\]|([^\[\],\s]+)")


def expand_hosts(text: str) -> tuple[str, ...]:
    """Host names of a SLURM host list, in order, each once. Numbers keep the width of a range's
    first.

    Raises ConfigError for what is not a host list.

    >>> expand_hosts("node[01-03,07],gpu2")
    ('node01', 'node02', 'node03', 'node07', 'gpu2')
    >>> expand_hosts("rack[1-2]n[9-10]")
    ('rack1n9', 'rack1n10', 'rack2n9', 'rack2n10')
    """
    out: dict[str, None] = {}
    for item in _items(text):
        found = list(_PART.finditer(item))
        if not found or "".join(part.group(0) for part in found) != item:
            raise ConfigError(f"a host list must look like node[01-03,07],gpu2, got {text!r}")
        choices = [
            _numbers(part.group(1), text) if part.group(2) is None else [part.group(2)]
            for part in found
        ]
        for names in itertools.product(*choices):
            out["".join(names)] = None
            if len(out) > MAX_HOSTS:
                raise ConfigError(f"a host list must have {MAX_HOSTS} hosts at most, got {text!r}")
    return tuple(out)


def _items(text: str) -> Iterator[str]:
    """The pieces between commas that stand outside of brackets."""
    depth, item = 0, ""
    for letter in text.strip():
        depth += {"[": 1, "]": -1}.get(letter, 0)
        if letter == "," and depth == 0:
            yield item
            item = ""
        else:
            item += letter
    yield item


def _numbers(ranges: str, text: str) -> list[str]:
    out: list[str] = []
    for piece in ranges.split(","):
        found = _RANGE.fullmatch(piece)
        low, high = (
            (int(found.group(1)), int(found.group(2) or found.group(1))) if found else (1, 0)
        )
        if found is None or not 0 <= high - low < MAX_HOSTS:
            raise ConfigError(
                f"a range of a host list must be like 01-03 or 7, got {piece!r} in {text!r}"
            )
        out += [f"{number:0{len(found.group(1))}d}" for number in range(low, high + 1)]
    return out


def parse_servers(text: str) -> tuple[str, ...]:
    """URLs of a servers file: one per line, ``#`` starts a comment, each named once counts.

    Raises ConfigError naming the line. A last line without its end is refused: the file is being
    written.
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
    """A file that a scheduler replaces. ``changed`` looks at it; what was wrong with it is said
    once per content.

    It is looked at, and not watched by inotify: that sees no change that another host makes on a
    network file system.
    """

    def __init__(self, path: str | Path) -> None:
        self._path = Path(path)
        self._seen: Stamp | None = None

    def __repr__(self) -> str:
        return f"<ServersFile {self._path}>"

    def read(self) -> tuple[str, ...]:
        """The URLs that it names now. Raises ConfigError naming the file where it cannot be read
        or is malformed."""
        try:
            with self._path.open(encoding="utf-8") as file:
                self._seen = _stamp(os.fstat(file.fileno()))
                return parse_servers(file.read())
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(
                f"rollout.servers_file must be a readable file, got {str(self._path)!r}: {error}"
            ) from error
        except ConfigError as error:
            raise ConfigError(f"rollout.servers_file {str(self._path)!r}: {error}") from error

    def changed(self) -> tuple[str, ...] | None:
        """Its URLs if it is another file, or another content, than at the last look; else None.
        Raises as ``read`` does, once: what is still wrong at the next look is not said again."""
        try:
            stamp: Stamp | None = _stamp(self._path.stat())
        except OSError:
            stamp = None
        if stamp == self._seen:
            return None
        self._seen = stamp
        return self.read()


@dataclass(frozen=True, slots=True)
class Known:
    """Servers that the configuration names, as URLs: ``fixed`` for the whole run, ``listed`` by the
    watched file."""

    fixed: tuple[str, ...]
    listed: tuple[str, ...]

    @property
    def urls(self) -> list[str]:
        """All of them, each once, the fixed first."""
        return list(dict.fromkeys((*self.fixed, *self.listed)))


def slurm_urls(variable: str, ports: range, environ: Mapping[str, str]) -> tuple[str, ...]:
    """URLs of the servers at these ports on each host in the host list that an environment variable
    holds. Raises ConfigError naming the variable."""
    text = environ.get(variable, "")
    if not text.strip():
        raise ConfigError(
            f"rollout.servers_slurm must name a variable with a host list, {variable} is"
            f" {'empty' if variable in environ else 'not set'}: is this a job of SLURM, with that"
            " group?"
        )
    hosts = expand_hosts(text)
    return tuple(server_url(f"http://{host}:{port}") for host in hosts for port in ports)


def known_servers(
    rollout: Rollout, environ: Mapping[str, str], launched: tuple[str, ...] = ()
) -> Known:
    """What ``[rollout]`` names at this moment; ``launched`` stands for the word "launch". Raises
    ConfigError."""
    fixed = (
        launched
        if rollout.servers == [LAUNCH]
        else tuple(server_url(url) for url in rollout.servers)
    )
    if rollout.servers_slurm:
        ports = range(rollout.servers_port, rollout.servers_port + rollout.servers_per_host)
        fixed += slurm_urls(rollout.servers_slurm, ports, environ)
    listed = ServersFile(rollout.servers_file).read() if rollout.servers_file else ()
    if not fixed and not listed:
        raise ConfigError(
            "rollout.servers_file must name a server at the start of a run, got"
            f" {rollout.servers_file!r} with none"
        )
    known = Known(tuple(dict.fromkeys(fixed)), listed)
    if both := two_names(known.urls):
        raise ConfigError(
            "rollout.servers, servers_file and servers_slurm must give a server one name,"
            f" {both} are one server"
        )
    return known
