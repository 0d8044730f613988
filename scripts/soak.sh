#!/usr/bin/env bash
# Many versions to two server processes under random faults: nothing wrong is served, nothing leaks, no step waits.
# Every version is checked; memory is judged in long runs. Exit code 1 if a figure is not as demanded.
#
#   scripts/soak.sh [--versions 1000] [--seconds-per-version S] [--fault-every N] [--seed N] [--json PATH] [--help]
set -euo pipefail
root="$(cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/.." && pwd)"
# See scripts/test.sh.
unset PYTHONDONTWRITEBYTECODE
"$root/scripts/setup.sh" --only trainer >&2
exec env PYTHONSAFEPATH=1 PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}" "$root/.venv/bin/python" -m tests.soak "$@"
