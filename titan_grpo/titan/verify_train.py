"""``torchrun ... -m titan_grpo.titan.verify_train --evidence DIR [--tamper KIND:N] -- ARGUMENTS``: a
run with evidence."""

import argparse
import sys
from functools import partial
from pathlib import Path


def main(argv: list[str]) -> int:
    """Run one rank with a VerifyTrainer; ARGUMENTS are those of titan_grpo.train. Errors propagate
    to torchrun."""
    parser = argparse.ArgumentParser(prog="titan_grpo.titan.verify_train", description=__doc__)
    parser.add_argument("--evidence", type=Path, required=True)
    parser.add_argument("--tamper", default="")
    cut = argv.index("--")
    options = parser.parse_args(argv[:cut])
    # First: it patches what must be patched before torchtitan is imported.
    from titan_grpo.titan.compat import prepare

    prepare()
    from titan_grpo.titan.jobconfig import parse
    from titan_grpo.titan.trainer import run
    from titan_grpo.titan.verify_trainer import Tamper, VerifyTrainer

    run(
        parse(argv[cut + 1 :]),
        partial(VerifyTrainer, evidence=options.evidence, tamper=Tamper.parse(options.tamper)),
    )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
