#!/usr/bin/env bash
# Proves on this machine that a server serves exactly the trainer's weights: two trainer ranks, one real server, three runs.
# With two or more GPUs it uses CUDA, and NCCL for the weights, otherwise the CPU. Exit code 1 names what is violated.
#
# With --faults instead: every fault of the matrix, or those named, in real trainers, lanes, receivers and servers.
#
#   scripts/verify_grpo_2gpu.sh [--engine vllm|sglang] [--device auto|cpu|cuda] [--steps N] [--json PATH] [--out DIR] [--help]
#   scripts/verify_grpo_2gpu.sh --faults all|NAMES [--list] [--engine vllm|sglang] [--deadline S] [--json PATH] [--out DIR]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
scripts/setup.sh >&2
for argument in "$@"; do
    case "$argument" in --faults | --faults=* | --list) exec .venv/bin/python -m tests.faults "$@" ;; esac
done
exec .venv/bin/titan-grpo verify "$@"
