#!/usr/bin/env bash
# Proves on this machine that a server serves exactly the trainer's weights: two trainer ranks, one real server, three runs.
# With two or more GPUs it uses CUDA, and NCCL for the weights, otherwise the CPU. Exit code 1 names what is violated.
# With --device cuda --nproc 1 trainer and server share one GPU, and the weights go as on a CPU.
#
# With --faults instead: every fault of the matrix, or those named, in real trainers, lanes, receivers and servers.
#
#   scripts/verify_grpo_2gpu.sh [--engine vllm|sglang] [--device auto|cpu|cuda] [--steps N] [--json PATH] [--out DIR]
#                               [--torchtitan 0.2|0.3] [--help]
#   scripts/verify_grpo_2gpu.sh --faults all|NAMES [--list] [--engine vllm|sglang] [--deadline S] [--json PATH] [--out DIR]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# Before there is an environment that could say more: help makes none.
case " $* " in *" --help "* | *" -h "*) [ -x .venv/bin/python ] || { sed -n '2,10s/^# \{0,1\}//p' scripts/verify_grpo_2gpu.sh; exit 0; } ;; esac
# See scripts/test.sh.
unset PYTHONDONTWRITEBYTECODE
torchtitan=0.2 previous="" arguments=()
for argument in "$@"; do
    case "$argument" in --torchtitan=*) torchtitan="${argument#--torchtitan=}" previous=""; continue ;; esac
    if [ "$previous" = --torchtitan ]; then torchtitan="$argument"; fi
    # The trainer's environment is this script's choice, not the command's.
    if [ "$argument" != --torchtitan ] && [ "$previous" != --torchtitan ]; then arguments+=("$argument"); fi
    previous="$argument"
done
set -- "${arguments[@]+"${arguments[@]}"}"
scripts/setup.sh --torchtitan "$torchtitan" >&2
trainer=.venv
if [ "$torchtitan" = 0.3 ]; then trainer=.venv-titan03; fi
# This checkout's code, also where an environment is another's.
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
for argument in "$@"; do
    case "$argument" in --faults | --faults=* | --list) exec "$trainer/bin/python" -m tests.faults "$@" ;; esac
done
exec "$trainer/bin/titan-grpo" verify "$@"
