#!/usr/bin/env bash
# Proves on this machine that a server serves exactly the trainer's weights: two trainer ranks, one real server, three runs.
# With two or more GPUs it uses CUDA (in environments as of setup.sh --cuda), and NCCL for the weights if trainer and server have
# one version of it, otherwise the CPU.
# With --device cuda --nproc 1 trainer and server share one GPU, and the weights go as on a CPU. Exit code 1: a violation.
#
# With --faults instead: every fault of the matrix, or those named, in real trainers, lanes, receivers and servers.
#
#   scripts/verify_grpo_2gpu.sh [--engine vllm|sglang] [--device auto|cpu|cuda] [--steps N] [--json PATH] [--out DIR]
#                               [--torchtitan 0.2|0.3] [--help]
#   scripts/verify_grpo_2gpu.sh --faults all|NAMES [--list] [--engine vllm|sglang] [--deadline S] [--json PATH] [--out DIR]
set -euo pipefail
root="$(cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/.." && pwd)"
# Before there is an environment that could say more: help makes none.
case " $* " in *" --help "* | *" -h "*) [ -x "$root/.venv/bin/python" ] || { sed -n '2,11s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"; exit 0; } ;; esac
# See scripts/test.sh.
unset PYTHONDONTWRITEBYTECODE
torchtitan=0.2 device=auto previous="" arguments=()
for argument in "$@"; do
    case "$argument" in
        --torchtitan=*) torchtitan="${argument#--torchtitan=}" previous=""; continue ;;
        --device=*) device="${argument#--device=}" ;;
    esac
    case "$previous" in --torchtitan) torchtitan="$argument" ;; --device) device="$argument" ;; esac
    # The trainer's environment is this script's choice, not the command's.
    if [ "$argument" != --torchtitan ] && [ "$previous" != --torchtitan ]; then arguments+=("$argument"); fi
    previous="$argument"
done
set -- "${arguments[@]+"${arguments[@]}"}"
# Where the command will use CUDA: a build for CPUs finds no GPU, and SGLang's for CUDA does not run on a CPU.
gpus=$({ nvidia-smi -L 2>/dev/null || true; } | grep -c '^GPU' || true) kind=()
if [ -n "${CUDA_VISIBLE_DEVICES+set}" ]; then
    visible=$(tr ',' '\n' <<<"$CUDA_VISIBLE_DEVICES" | grep -c . || true)
    if [ "$visible" -lt "$gpus" ]; then gpus=$visible; fi
fi
case "$device" in
    auto) if [ "$gpus" -ge 2 ]; then kind=(--cuda); fi ;;
    cuda) if [ "$gpus" -ge 1 ]; then kind=(--cuda); fi ;;
esac
"$root/scripts/setup.sh" --torchtitan "$torchtitan" "${kind[@]+"${kind[@]}"}" >&2
trainer="$root/.venv"
if [ "$torchtitan" = 0.3 ]; then trainer="$root/.venv-titan03"; fi
# This checkout's code, also where an environment is another's.
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"
for argument in "$@"; do
    case "$argument" in --faults | --faults=* | --list) exec env PYTHONSAFEPATH=1 "$trainer/bin/python" -m tests.faults "$@" ;; esac
done
exec "$trainer/bin/titan-grpo" verify "$@"
