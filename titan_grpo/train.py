"""``torchrun ... -m titan_grpo.train --job.config_file X.toml``: the trainer's entry point on every
rank."""

import os
import signal
import sys
import traceback
from typing import Any


def _stop_on_signals() -> None:
    """Let the first SIGTERM or SIGINT end this rank the ordinary way: lanes, rollouts and servers
    are closed.

    The later ones are ignored: torchrun repeats its signals, and would cut the closing short. It
    kills after its grace. If torchrun itself is killed, its ranks (each in a session of its own)
    would train on alone: the kernel sends SIGTERM.
    """
    from titan_grpo.subprocesses import end_with_parent

    end_with_parent(signal.SIGTERM)

    def stop(number: int, frame: Any) -> None:
        for each in (signal.SIGTERM, signal.SIGINT):
            signal.signal(each, signal.SIG_IGN)
        raise SystemExit(128 + number)

    for each in (signal.SIGTERM, signal.SIGINT):
        signal.signal(each, stop)


def _check_environment() -> None:
    from titan_grpo.errors import ConfigError
    from titan_grpo.subprocesses import TORCHRUN

    if missing := [name for name in TORCHRUN if name not in os.environ]:
        raise ConfigError(
            f"titan_grpo.train must be started by torchrun, which sets {', '.join(missing)}: "
            "torchrun --nproc_per_node N -m titan_grpo.train --job.config_file X.toml"
        )


def _run(argv: list[str]) -> None:
    # First: it patches what must be patched before torchtitan is imported.
    from titan_grpo.titan.compat import prepare

    prepare()
    from titan_grpo.observe.terminal import print_status
    from titan_grpo.titan.jobconfig import check_files, read

    world = os.environ.get("WORLD_SIZE", "")
    job_config, notes = read(argv, int(world) if world.isdigit() else None)
    if os.environ.get("RANK", "0") == "0":
        print_status("\n".join(notes))
    check_files(job_config, os.environ)
    _check_environment()
    from titan_grpo.titan.trainer import run

    _stop_on_signals()
    run(job_config)


def main(argv: list[str]) -> int:
    """Run one rank. 0: trained; 2: the configuration is refused; 1: another error of ours. Both are
    said in one line."""
    from titan_grpo.errors import (
        ConfigError,
        DataError,
        StorageError,
        TaskError,
        TitanGrpoError,
        UpstreamError,
    )
    from titan_grpo.observe.terminal import print_error

    rank = os.environ.get("RANK", "0")
    try:
        _run(argv)
    except (ConfigError, DataError, UpstreamError) as error:
        # Every rank meets the same error; one of them says it.
        if rank == "0":
            print_error(str(error))
        return 2
    except (StorageError, TaskError) as error:
        print_error(f"rank {rank}: {error}")
        return 1
    except TitanGrpoError as error:
        traceback.print_exc()
        print_error(f"rank {rank}: {type(error).__name__}: {error}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
