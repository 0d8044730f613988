#!/usr/bin/env bash
# The main job on a machine without a GPU: sets up what its engines need, starts real vLLM or SGLang servers, trains a
# tiny model with GRPO.
#
#   scripts/quickstart.sh [--engine vllm|sglang|both] [--servers N] [--steps N] [--sync|--async] [--out DIR]
#                         [--lora RANK [--lora-sync merged|adapter]] [--model qwen3_moe [--router-replay]] [--help]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
engine=vllm previous=""
# vLLM sends no routes on a CPU.
case " $* " in *" --router-replay "*) engine=sglang ;; esac
for argument in "$@"; do
    case "$argument" in --engine=*) engine="${argument#--engine=}" ;; esac
    if [ "$previous" = --engine ]; then engine="$argument"; fi
    previous="$argument"
done
# What is no engine is refused by the command itself, in one line.
case "$engine" in vllm | sglang) engines="$engine" ;; both) engines=vllm,sglang ;; *) engines="" ;; esac
scripts/setup.sh --only "trainer${engines:+,$engines}" >&2
# This checkout's code, also where an environment is another's.
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
exec .venv/bin/titan-grpo quickstart "$@"
