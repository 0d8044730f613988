#!/usr/bin/env bash
# The main job on a machine without a GPU: sets up what its engines need, starts real vLLM or SGLang servers, trains a
# tiny model with GRPO.
#
#   scripts/quickstart.sh [--engine vllm|sglang|both] [--servers N] [--steps N] [--sync|--async] [--out DIR]
#                         [--lora RANK [--lora-sync merged|adapter]] [--model qwen3_moe [--router-replay]]
#                         [--torchtitan 0.2|0.3] [--help]
set -euo pipefail
# No cd, as in the other scripts: paths in arguments are relative to where the user stands.
root="$(cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/.." && pwd)"
# Before there is an environment that could say more: help makes none.
case " $* " in *" --help "* | *" -h "*) [ -x "$root/.venv/bin/python" ] || { sed -n '2,7s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"; exit 0; } ;; esac
# See scripts/test.sh.
unset PYTHONDONTWRITEBYTECODE
engine=vllm torchtitan=0.2 previous="" arguments=()
# vLLM sends no routes on a CPU.
case " $* " in *" --router-replay "*) engine=sglang ;; esac
for argument in "$@"; do
    case "$argument" in
        --engine=*) engine="${argument#--engine=}" ;;
        --torchtitan=*) torchtitan="${argument#--torchtitan=}" previous=""; continue ;;
    esac
    case "$previous" in --engine) engine="$argument" ;; --torchtitan) torchtitan="$argument" ;; esac
    # The trainer's environment is this script's choice, not the command's.
    if [ "$argument" != --torchtitan ] && [ "$previous" != --torchtitan ]; then arguments+=("$argument"); fi
    previous="$argument"
done
# What is no engine is refused by the command itself, in one line.
case "$engine" in vllm | sglang) engines="$engine" ;; both) engines=vllm,sglang ;; *) engines="" ;; esac
"$root/scripts/setup.sh" --torchtitan "$torchtitan" --only "trainer${engines:+,$engines}" >&2
# This checkout's code, also where an environment is another's.
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"
trainer="$root/.venv"
if [ "$torchtitan" = 0.3 ]; then trainer="$root/.venv-titan03"; fi
exec "$trainer/bin/titan-grpo" quickstart "${arguments[@]+"${arguments[@]}"}"
