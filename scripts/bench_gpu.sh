#!/usr/bin/env bash
# What only a GPU can show, in one command: the price of a version in a training step, the rate of its copy, and how long a
# server stands still to load it. No engine and no model files are needed; weights are random.
#
#   scripts/bench_gpu.sh [--shapes qwen3_0.6b,llama3_8b] [--versions N] [--json PATH] [--help]
#
# PYTHON=...   the interpreter (default: .venv/bin/python); its torch must be a CUDA build
set -euo pipefail
root="$(cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/.." && pwd)"
python="${PYTHON:-$root/.venv/bin/python}"
if ! command -v "$python" >/dev/null; then
    printf 'bench_gpu: no interpreter at %s: name one with a CUDA build of torch and titan_grpo: PYTHON=...\n' "$python" >&2
    exit 2
fi
PYTHONSAFEPATH=1 PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}" exec "$python" -m scripts.bench_gpu "$@"
