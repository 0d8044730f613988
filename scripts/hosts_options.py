"""Options of bench_hosts.py."""

import argparse
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the checkout, for every script

from scripts.common import ENGINES, options_of, positive

UNITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}

MOST_HOSTS = 253
"""Addresses of a network of 24 bits, less the switch's own."""


def rate(text: str) -> float:
    """Bytes per second: ``rate("20mbit") == 2.5e6``."""
    found = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)(kbit|mbit|gbit)", text)
    if found is None or not float(found[1]):
        raise argparse.ArgumentTypeError(f"must be like 20mbit, and over 0, got {text!r}")
    return float(found[1]) * UNITS[found[2]] / 8


def broken_rules(o: argparse.Namespace) -> Iterator[str]:
    """What the options do not go with."""
    if o.kill_inner and not (o.relay and o.receivers >= 3):
        yield "--kill-inner needs --relay and 3 receivers: else no server reads from another"
    if o.stop_s and o.trainer_hosts < 2:
        yield "--stop-s stops the last of 2 or more --trainer-hosts"
    if o.step_s < 0 or o.stop_s < 0:
        yield "--step-s and --stop-s are seconds, 0 or more"
    if not 0 < o.changed <= 1:
        yield f"--changed is a share of each row, over 0 and up to 1, got {o.changed:g}"
    if o.trainer_hosts + o.receivers > MOST_HOSTS:
        yield f"--trainer-hosts and --receivers are {MOST_HOSTS} hosts at most, by their addresses"


def parse(doc: str | None, argv: Sequence[str]) -> argparse.Namespace:
    """Options of a run. Exit code 2 for wrong ones."""
    parser = options_of(doc)
    parser.add_argument("--trainer-hosts", type=positive, default=2, help="hosts that train")
    parser.add_argument("--ranks", type=positive, default=2, help="ranks on each of them")
    parser.add_argument("--receivers", type=positive, default=4, help="hosts with a server each")
    parser.add_argument(
        "--per-host", type=positive, default=1, help="servers on each of these hosts"
    )
    parser.add_argument("--relay", action=argparse.BooleanOptionalAction, default=False)
    parser.add_argument("--kill-inner", action="store_true", help="needs --relay and 3 receivers")
    real = "real servers; default: servers without an engine"
    parser.add_argument("--engine", nargs="+", choices=ENGINES, default=[], help=real)
    parser.add_argument("--step-s", type=float, default=0.0, help="seconds between two versions")
    parser.add_argument("--stop-s", type=float, default=0.0, help="needs 2 trainer hosts")
    parser.add_argument(
        "--step-products", type=positive, default=200, help="of matrices, with --stop-s"
    )
    parser.add_argument("--delta", choices=("auto", "on", "off"), default="off")
    parser.add_argument(
        "--changed", type=float, default=1.0, help="share of each row that a version changes"
    )
    parser.add_argument(
        "--slow", type=int, default=0, help="receivers, from the first, with a tenth of the rate"
    )
    parser.add_argument("--rate", type=rate, default="20mbit", help="of each link, each way")
    parser.add_argument("--mib", type=positive, default=8, help="bytes of one version, in MiB")
    parser.add_argument(
        "--versions", type=positive, default=3, help="measured ones, after the first"
    )
    options = parser.parse_args(argv)
    if broken := next(broken_rules(options), ""):
        parser.error(broken)
    return options
