"""``titan-grpo servers``: list, add and remove servers of a running trainer, through the socket in
its directory."""

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from titan_grpo.config.rollout import server_url
from titan_grpo.errors import ConfigError
from titan_grpo.observe.terminal import aligned
from titan_grpo.titan.servers import ask

COLUMNS = ("url", "standing", "held", "accepting", "in_flight", "last_error")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="titan-grpo servers",
        description="Show, add and remove servers of a running trainer, through the socket in its"
        " folder.",
    )
    commands = parser.add_subparsers(dest="do", required=True, metavar="add | remove | list")
    common = argparse.ArgumentParser(add_help=False)
    folder = "directory of the run, its job.dump_folder (default outputs)"
    common.add_argument("--run", default="outputs", help=folder)
    for name, text in (
        ("add", "a server joins: the newest version first, then rollouts"),
        ("remove", "a server leaves; its rollouts are made elsewhere"),
        ("list", "what every server holds"),
    ):
        command = commands.add_parser(name, parents=[common], help=text)
        if name == "list":
            command.add_argument("--json", action="store_true", help="as JSON")
        else:
            command.add_argument("url", help="such as http://host:8000")
    return parser


def table(lines: Sequence[Mapping[str, Any]]) -> str:
    """Format the servers as aligned columns.

    >>> line = {"url": "http://a:1", "standing": "holds", "held": 3, "accepting": True}
    >>> print(table([line]))
    url         standing  held  accepting  in_flight  last_error
    http://a:1  holds     3     yes        -          -
    """
    rows = [[_cell(line.get(name)) for name in COLUMNS] for line in lines]
    return "\n".join(aligned([COLUMNS, *rows]))


def _cell(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "-" if value in (None, "") else str(value)


def run(argv: list[str], env: Mapping[str, str]) -> int:
    """Print one line, or the table. Raises PeerError if the trainer does not run or refuses."""
    options = _parser().parse_args(argv)
    folder = Path(options.run)
    if not folder.is_dir():
        raise ConfigError(f"--run must be the directory of a run, {options.run!r} is none")
    request = {"do": options.do}
    if options.do != "list":
        request["url"] = server_url(options.url)
    answer = ask(folder, request)
    if options.do != "list":
        print(answer["text"])
    elif options.json:
        print(json.dumps(answer["servers"], indent=2))
    else:
        print(table(answer["servers"]))
    return 0
