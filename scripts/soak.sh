#!/usr/bin/env bash
# Many versions to two server processes under random faults: nothing wrong is served, nothing leaks, no step waits.
# Every version is checked; memory is judged in long runs. Exit code 1 if a figure is not as demanded.
#
#   scripts/soak.sh [--versions 1000] [--seconds-per-version S] [--fault-every N] [--seed N] [--json PATH] [--help]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# See scripts/test.sh.
unset PYTHONDONTWRITEBYTECODE
scripts/setup.sh --only trainer >&2
exec .venv/bin/python -m tests.soak "$@"
