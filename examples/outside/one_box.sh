#!/usr/bin/env bash
# Server, environment and trainer on one machine without a GPU, each a process of its own. From the root, after
# scripts/quickstart.sh, whose model and environments it takes:
#
#   examples/outside/one_box.sh push
#   examples/outside/one_box.sh atropos      (needs scripts/setup.sh --only atropos)
#
# Each process has its log in OUT. When the trainer ends, or this script is ended, all others end too.
set -euo pipefail
source="${1:-push}"
MODEL="${MODEL:-outputs/quickstart/model}"
OUT="${OUT:-outputs/one_box}"
SERVER=http://127.0.0.1:8000 PUSH=127.0.0.1:8300 API=http://127.0.0.1:8400

fail() { echo "one_box: $*" >&2; exit 2; }
[ -f "$MODEL/config.json" ] || fail "no model in $MODEL: run scripts/quickstart.sh, or set MODEL"
[ ! -e "$OUT" ] || fail "$OUT is there already: remove it, or set OUT"
case "$source" in
    push) brings=(examples/outside/pushing.py "$SERVER" "http://$PUSH")
          keys=(--rollout.source push --rollout.push_address "$PUSH") ;;
    atropos) brings=(examples/outside/atropos.py "$SERVER" "$API")
             keys=(--rollout.source atropos --rollout.atropos_url "$API") ;;
    *) fail "push or atropos, got $source" ;;
esac
mkdir -p "$OUT"
trap 'kill $(jobs -p) 2>/dev/null || true; wait' EXIT
trap 'exit 130' INT TERM

export OMP_NUM_THREADS=1
# All of them are here: a proxy that the shell names would be asked for 127.0.0.1, and have another machine's.
export no_proxy="127.0.0.1${no_proxy:+,$no_proxy}"
export NO_PROXY="$no_proxy"
VLLM_SERVER_DEV_MODE=1 VLLM_ENABLE_V1_MULTIPROCESSING=0 VLLM_CPU_KVCACHE_SPACE=1 TORCHDYNAMO_DISABLE=1 \
    .venv-vllm/bin/python -m vllm.entrypoints.openai.api_server --host 127.0.0.1 --port "${SERVER##*:}" \
    --model "$MODEL" --enforce-eager --no-enable-chunked-prefill --distributed-executor-backend uni \
    --logprobs-mode processed_logprobs --weight-transfer-config '{"backend":"titan_grpo"}' \
    --middleware titan_grpo.receive.vllm_http.WeightsMiddleware >"$OUT/server.log" 2>&1 &
server=$!
if [ "$source" = atropos ]; then
    .venv-atropos/bin/python -m uvicorn atroposlib.api:app --port "${API##*:}" >"$OUT/api.log" 2>&1 &
fi
echo "starting the server, about a minute on two cores; logs in $OUT"
for second in $(seq 300); do
    .venv/bin/python -c "import urllib.request as r; r.urlopen('$SERVER/health', timeout=5)" 2>/dev/null && break
    kill -0 "$server" 2>/dev/null || fail "the server has ended: $(tail -n 1 "$OUT/server.log")"
    [ "$second" -lt 300 ] || fail "the server does not answer: see $OUT/server.log"
    sleep 1
done
.venv/bin/python "${brings[@]}" >"$OUT/environment.log" 2>&1 &
.venv/bin/torchrun --nproc_per_node 2 -m titan_grpo.train --job.config_file train_configs/quickstart_cpu.toml \
    --job.dump_folder "$OUT" --model.hf_assets_path "$MODEL" --rollout.servers "$SERVER" --rollout.group_size 4 \
    "${keys[@]}" "${@:2}"
