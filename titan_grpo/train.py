"""Entry point of every trainer rank: ``torchrun ... -m titan_grpo.train --job.config_file
X.toml``."""

import gc
import os
import sys
import threading
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from itertools import chain
from pathlib import Path

SAY_S = 30.0
"""Seconds that the other ranks of a host wait for its first rank to print why they all end."""


def _check_environment() -> None:
    from titan_grpo.errors import ConfigError
    from titan_grpo.subprocesses import TORCHRUN

    if missing := [name for name in TORCHRUN if name not in os.environ]:
        raise ConfigError(
            f"titan_grpo.train must be started by torchrun, which sets {', '.join(missing)}: "
            "torchrun --nproc_per_node N -m titan_grpo.train --job.config_file X.toml"
        )


def restart_notes(environ: Mapping[str, str]) -> list[str]:
    """Return what the start says of ``torchrun --max-restarts``. Pure.

    torch 2.13's torchrun keeps one store: ranks of a restart may find the addresses of dead ones
    there. The variable changes that, but for a static rendezvous (--node_rank, --master_port).
    """
    shared = environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if not shared or environ.get("TORCHELASTIC_MAX_RESTARTS", "0") == "0":
        return []
    return [
        "--max-restarts: restarted ranks may not find each other: start torchrun with"
        " TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 in its environment, and with --rdzv_backend c10d in"
        " place of --node_rank and --master_port"
    ]


def stopped_before(folder: str, environ: Mapping[str, str]) -> str:
    """Return what stopped the run of this folder as its job asks, if torchrun has started it again
    since (--max-restarts): to torchrun that was a failure like others. Empty otherwise."""
    from msgspec import json

    from titan_grpo.errors import NOT_JSON, AlertStop, UnhealthyError
    from titan_grpo.observe.recorder import SUMMARY
    from titan_grpo.observe.schema import Summary

    if environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0":
        return ""
    try:
        ended_by = json.decode(Path(folder, SUMMARY).read_bytes(), type=Summary).ended_by
    except (OSError, *NOT_JSON):
        return ""
    asked = tuple(f"{error.__name__}: " for error in (AlertStop, UnhealthyError))
    return ended_by if ended_by.startswith(asked) else ""


def _start(argv: list[str]) -> Callable[[], None]:
    """Import what a rank needs and read its job; return the training."""
    from titan_grpo.errors import RunStopped
    from titan_grpo.subprocesses import stop_on_signals

    stop_on_signals()
    # Before the next imports: some patches must be applied before torchtitan is imported.
    from titan_grpo.titan.compat import prepare

    prepare()
    from titan_grpo.observe.terminal import print_status
    from titan_grpo.titan.jobconfig import check_files, read

    world = os.environ.get("WORLD_SIZE", "")
    ranks = int(world) if world.isdigit() else None
    job_config, *lines = read(argv, ranks)
    lines += [check_files(job_config, os.environ, ranks), restart_notes(os.environ)]
    if os.environ.get("RANK", "0") == "0":
        print_status("\n".join(chain.from_iterable(lines)))
    _check_environment()
    if reason := stopped_before(job_config.job.dump_folder, os.environ):
        raise RunStopped(f"torchrun started the run again, which its own rule had ended: {reason}")
    from titan_grpo.titan.trainer import run

    return partial(run, job_config)


def _run(argv: list[str]) -> None:
    # Imports make no garbage: without the collector, those of torch and torchtitan take a quarter
    # less time. What they made is left out of later collections, the interpreter's last included.
    gc.disable()
    try:
        train = _start(argv)
    finally:
        gc.freeze()
        gc.enable()
    train()


def refuse(text: str, environ: Mapping[str, str], wait_s: float = SAY_S) -> None:
    """Print why the ranks end, once per host: its first rank prints it. Another rank prints it only
    if nothing has ended it after ``wait_s``: then the first rank does not know."""
    from titan_grpo.observe.terminal import print_error

    if environ.get("LOCAL_RANK", "0") == "0":
        print_error(text)
        return
    # torchrun ends all ranks as soon as one has ended. If this rank ended at once, the first one
    # could be ended before it has printed anything.
    threading.Event().wait(wait_s)
    print_error(f"rank {environ.get('RANK', '')}: {text}")


def leave_out_stack(environ: Mapping[str, str]) -> None:
    """Remove the stack that torchtitan's ``train`` has left for torchrun's report: of an end that
    is no bug it says nothing, and the line that does would be far above it."""
    with suppress(KeyError, OSError):
        os.unlink(environ["TORCHELASTIC_ERROR_FILE"])


def main(argv: list[str]) -> int:
    """Run one rank. Return 0 after training, 2 for a refused configuration, 1 for another error of
    ours. Errors are printed in one line."""
    from titan_grpo.errors import (
        AlertStop,
        ConfigError,
        DataError,
        ProtocolError,
        RunStopped,
        TitanGrpoError,
        UnhealthyError,
        UpstreamError,
    )
    from titan_grpo.observe.terminal import print_error

    rank = os.environ.get("RANK", "0")
    try:
        _run(argv)
    except TitanGrpoError as error:
        if isinstance(error, ProtocolError):  # a bug of ours
            traceback.print_exc()
        else:
            leave_out_stack(os.environ)
        if isinstance(error, (ConfigError, DataError, UpstreamError)):
            refuse(str(error), os.environ)
            return 2
        if isinstance(error, (RunStopped, AlertStop, UnhealthyError)):
            # Every rank ends by it. Rank 0 prints it when it has closed everything: torchrun would
            # end it in the middle of that if another rank of its host ended now.
            refuse(str(error), os.environ)
        else:
            print_error(f"rank {rank}: {error}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
