#!/usr/bin/env bash
# Proves on this machine that a server serves exactly the trainer's weights: two trainer ranks, one real server, three runs.
# With two or more GPUs it uses NCCL and CUDA, otherwise gloo on the CPU. Exit code 1 names what is violated.
#
#   scripts/verify_grpo_2gpu.sh [--engine vllm|sglang] [--device auto|cpu|cuda] [--steps N] [--json PATH] [--out DIR] [--help]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
scripts/setup.sh >&2
exec .venv/bin/titan-grpo verify "$@"
