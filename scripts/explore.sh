#!/usr/bin/env bash
# Walks through every interleaving of trainer, lanes and servers, on the protocol tables that production runs on, with faults
# at every step; the seeded bugs must all be caught. Exit code 1 on a violation or a bug that is missed.
#
#   scripts/explore.sh [--ranks 2] [--servers 2] [--versions 3] [--faults 1] [--streamed] [--no-bugs] [--json PATH] [--help]
set -euo pipefail
root="$(cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/.." && pwd)"
# See scripts/test.sh.
unset PYTHONDONTWRITEBYTECODE
"$root/scripts/setup.sh" --only trainer >&2
exec env PYTHONSAFEPATH=1 PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}" "$root/.venv/bin/python" -m tests.model_check "$@"
