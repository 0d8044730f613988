"""Make the rollouts of a run whose trainer is on another host.

The run names this service with rollout.controller = "http://host:port". It serves one run at a
time; a newer run replaces it. It needs what a rollout process needs: the model's tokenizer, the
task and its data at the paths that the run names, and the servers' API key in the same environment
variable.
"""

import argparse
import signal
import threading
from collections.abc import Mapping

# The worker runs in a child process: packages that it lacks here are named before a run connects.
import titan_grpo.rollout.worker  # noqa: F401
from titan_grpo.config.rollout import host_and_port, is_loopback, read_key
from titan_grpo.errors import ConfigError
from titan_grpo.rollout.service import Service

KEY_VARIABLE = "TITAN_GRPO_CONTROLLER_KEY"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="titan-grpo rollouts",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add, bind = parser.add_argument, "127.0.0.1:8910"
    add("--bind", default=bind, metavar="HOST:PORT", help=f"default {bind}; port 0: any")
    secret = f"variable with the key that trainers must send ({KEY_VARIABLE})"
    add("--key-env", metavar="NAME", help=secret)
    silent = "a trainer silent for so long loses its session (60)"
    add("--lease", type=float, default=60.0, metavar="SECONDS", help=silent)
    return parser


def run(argv: list[str], env: Mapping[str, str]) -> int:
    """Serve until SIGINT or SIGTERM. Raises ConfigError if the address cannot be bound or needs a
    key."""
    options = _parser().parse_args(argv)
    named: str | None = options.key_env
    variable = KEY_VARIABLE if named is None else named
    place, key = host_and_port(options.bind), read_key(env, variable)
    if named is not None and not key:
        raise ConfigError(
            f"--key-env must name a variable that holds a key, {named!r} is empty"
            " or not set, and the service would serve without a key: export it, or leave --key-env"
            " out"
        )
    if place and not key and not is_loopback(place[0]):
        raise ConfigError(
            f"--bind must be on loopback while {variable} is empty, got {options.bind}"
            " (any client could have this host make requests and run tasks); set it to a secret"
            " that the trainer has too (rollout.controller_key_env)"
        )
    if not 0 < options.lease < float("inf"):
        raise ConfigError(f"--lease must be greater than 0, and finite, got {options.lease:g}")
    service = Service(options.bind, key, options.lease, _print)
    ended = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: ended.set())
    _print(f"serving at http://{service.address}, {'with' if key else 'without'} a key")
    # no deadline: a foreground service, ended by Ctrl-C or SIGTERM.
    ended.wait()
    service.close()
    return 0


def _print(text: str) -> None:
    print(f"rollouts: {text}", flush=True)
