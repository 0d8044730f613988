#!/usr/bin/env bash
# The main job on a machine without a GPU: sets up what is missing, starts real vLLM servers, trains a tiny model with GRPO.
#
#   scripts/quickstart.sh [--servers N] [--steps N] [--sync|--async] [--out DIR] [--help]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
scripts/setup.sh >&2
exec .venv/bin/titan-grpo quickstart "$@"
