#!/usr/bin/env bash
# The main job on a machine without a GPU: sets up what is missing, starts real vLLM or SGLang servers, trains a tiny
# model with GRPO.
#
#   scripts/quickstart.sh [--engine vllm|sglang|both] [--servers N] [--steps N] [--sync|--async] [--out DIR] [--help]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
scripts/setup.sh >&2
exec .venv/bin/titan-grpo quickstart "$@"
