"""``torchrun ... -m titan_grpo.train --job.config_file X.toml``: the trainer's entry point on every rank."""

import os
import sys


def _fail(error: Exception) -> int:
    # Every rank meets the same configuration error; one of them says it.
    if os.environ.get("RANK", "0") == "0":
        print(f"titan-grpo: {error}", file=sys.stderr, flush=True)
    return 2


def main(argv: list[str]) -> int:
    """Run one rank. 0: trained; 2: the configuration is refused, in one line. Other errors propagate to torchrun."""
    from titan_grpo.errors import ConfigError, DataError, UpstreamError

    try:
        # First: it patches what must be patched before torchtitan is imported.
        from titan_grpo.titan.compat import prepare

        prepare()
        from titan_grpo.titan.jobconfig import parse
        from titan_grpo.titan.run import run

        job_config = parse(argv)
    except (ConfigError, UpstreamError) as error:
        return _fail(error)
    try:
        run(job_config)
    except (ConfigError, DataError) as error:
        return _fail(error)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
