#!/usr/bin/env bash
# Every check of the project: set-up if needed, formatting, lint, types, all states of the protocol, then the whole test suite
# with real servers.
#
#   scripts/test.sh [--fast|--long] [arguments for pytest]      e.g. scripts/test.sh -m "not e2e" tests/observe
#   --fast   formatting, lint, types, and the tests that need neither a server nor torchtitan: 75 s on two cores, and
#            20 s more while mypy has no cache
#   --long   those tests too that take longest, and those of torchtitan 0.3, whose environment is made
set -euo pipefail
cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/.."
# Where it is set (some containers do), Python keeps no compiled code, and set-up leaves compiling to the first import: then each
# process compiles torch (import: 4.3 s of a core, else 1.8) or vLLM (27 s, else 11) again.
unset PYTHONDONTWRITEBYTECODE

case "${1:-}" in -h | --help) sed -n '2,8s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"; exit 0 ;; esac

# More workers than cores: tests wait for servers and processes to start, and the fast ones for deadlines.
marks=() states=yes workers=3 long=no limit=2h
case "${1:-}" in
  --long) shift; marks=(-m "") long=yes limit=12h ;;
  --fast) shift; marks=(-m "not e2e and not long and not slow"); states=no workers=4 ;;
esac
[ $# -eq 0 ] || states=no limit=12h

step() { printf '\n== %s\n' "$*"; }

step "set-up"
scripts/setup.sh
if [ $long = yes ]; then scripts/setup.sh --torchtitan 0.3 --only trainer; fi

said=$(mktemp -d)
declare -A started
trap 'kill "${started[@]}" 2>/dev/null || true; rm -rf "$said"' EXIT

# Runs a check of one core beside the tests, which leave more than that of the cores unused.
beside() { # check, command...
  "${@:2}" >"$said/$1" 2>&1 &
  started[$1]=$!
}

# Waits for such a check and shows what it said; without the lines that match a pattern, if it passed.
ended() { # check, pattern
  step "$1"
  if wait "${started[$1]}"; then grep -v "${2:-^$}" "$said/$1" || true; else status=$? && cat "$said/$1"; fi
  unset "started[$1]"
}

step "ruff format --check"
.venv/bin/ruff format --check .
step "ruff check"
.venv/bin/ruff check .

beside "mypy" .venv/bin/mypy
[ $states = no ] || beside "every state of the protocol" \
  .venv/bin/python -m tests.model_check --ranks 2 --servers 2 --versions 3 --seconds 1800

step "pytest"
# What shares a server stays on one worker (tests/conftest.py). The longest tests are named, because the whole has to stay within
# what a person waits for.
# A test past its own deadline fails. One that hangs in C code takes no signal, so the whole has a deadline too.
status=0
timeout --foreground --signal INT --kill-after 60 $limit \
  .venv/bin/python -m pytest -n $workers --dist loadgroup --no-loadscope-reorder --durations=25 --durations-min=5 "${marks[@]}" "$@" ||
  status=$?
case $status in 124 | 137) echo "the tests did not end within $limit: one hangs, or the machine is too slow for them" >&2 ;; esac
ended "mypy"
# What is said of each seeded bug would hide the end of what the tests say.
[ $states = no ] || ended "every state of the protocol" "^seeded bug: "
exit $status
