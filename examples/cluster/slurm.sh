#!/usr/bin/env bash
# Trainer on two hosts with 8 GPUs each, vLLM servers on two others:  sbatch examples/cluster/slurm.sh
#
# Edit the partition, the numbers of hosts, MODEL and the two environments. The TOML file is the one that titan-grpo init writes;
# its servers do not count here.
# One group of hosts does too (delete the lines from "hetjob" on, and ask for 4 nodes): the last SERVER_NODES of them serve.
#SBATCH --job-name=titan_grpo
# Whole hosts: without --exclusive a host's ranks would share the one core of a task. Without --no-kill the first host that
# fails ends the job, a server's too.
#SBATCH --nodes=2 --ntasks-per-node=1 --gpus-per-node=8 --exclusive --mem=0 --no-kill
#SBATCH hetjob
#SBATCH --nodes=2 --ntasks-per-node=1 --gpus-per-node=8 --exclusive --mem=0 --no-kill
set -euo pipefail
MODEL="${MODEL:-$PWD/assets/hf/Qwen3-0.6B}"
PORT=8000                             # of the first server of a host; the others' count up
PER_HOST="${PER_HOST:-1}"             # servers of a host, which share its GPUs
GPUS="${GPUS:-8}"                     # of a host
SERVER_NODES="${SERVER_NODES:-2}"     # in a job of one group
RESTART_AFTER="${RESTART_AFTER:-600}" # seconds: a server that ends later than that is started again

wrong() { echo "$1" >&2; exit 2; }
within() { [[ "$1" =~ ^[1-9][0-9]*$ && "$1" -le "$2" ]]; }
within "$PER_HOST" "$GPUS" || wrong "PER_HOST must be 1 to GPUS ($GPUS), got $PER_HOST"
SERVER_GPUS=$((GPUS / PER_HOST))      # its tensor parallelism

listed() { (IFS=, && echo "$*"); }
if [ -n "${SLURM_JOB_NODELIST_HET_GROUP_1:-}" ]; then
    trainers="$SLURM_JOB_NUM_NODES_HET_GROUP_0" SERVER_NODES="$SLURM_JOB_NUM_NODES_HET_GROUP_1"
    export SERVER_HOSTS="$SLURM_JOB_NODELIST_HET_GROUP_1"
    train=(--het-group=0) serve=(--het-group=1)
else
    mapfile -t hosts < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
    within "$SERVER_NODES" $((${#hosts[@]} - 1)) || wrong "SERVER_NODES must leave some of ${#hosts[@]} hosts to train, got $SERVER_NODES"
    trainers=$((${#hosts[@]} - SERVER_NODES))
    SERVER_HOSTS="$(listed "${hosts[@]:$trainers}")"
    export SERVER_HOSTS
    train=(--nodes="$trainers" --nodelist="$(listed "${hosts[@]:0:$trainers}")")
    serve=(--nodes="$SERVER_NODES" --nodelist="$SERVER_HOSTS")
fi

# Servers and trainer share one secret, so no other process writes weights.
key="$(mktemp -p "$HOME" .titan_grpo_key.XXXXXX)" servers="" trainer=""
# Either ends with the other, and the job's state is that of the trainer: scancel would make it CANCELLED.
finish() {
  rm -f "$key"
  for each in $servers $trainer; do kill "$each" 2>/dev/null || true; done
}
trap finish EXIT
python3 -c 'import secrets; print(secrets.token_hex(32))' >"$key"
export TITAN_GRPO_RUN_KEY_FILE="$key" MODEL PORT SERVER_GPUS RESTART_AFTER

# --ntasks each time: the allocation's number is in the environment, and Slurm would take that, and ignore the one per node.
# The servers do without each other: no host that fails and no server that ends takes the others along, whatever
# KillOnBadExit and WaitTime in slurm.conf say.
VLLM_SERVER_DEV_MODE=1 srun "${serve[@]}" --no-kill --kill-on-bad-exit=0 --wait=0 \
    --ntasks=$((SERVER_NODES * PER_HOST)) --ntasks-per-node="$PER_HOST" --gpus-per-task="$SERVER_GPUS" --export=ALL \
    bash -c 'trap "exit 143" TERM  # when the server has ended, which gets the signal too
    while began=$SECONDS; do
      .venv-vllm/bin/vllm serve "$MODEL" \
        --host 0.0.0.0 --port $((PORT + SLURM_LOCALID)) --tensor-parallel-size "$SERVER_GPUS" --logprobs-mode processed_logprobs \
        --weight-transfer-config "{\"backend\":\"titan_grpo\"}" \
        --middleware titan_grpo.receive.vllm_http.WeightsMiddleware
      status=$?
      # One that ends at once has a mistake, and would again. The run takes any other back.
      [ $((SECONDS - began)) -ge "$RESTART_AFTER" ] || exit "$status"
      echo "the server at port $((PORT + SLURM_LOCALID)) of $(hostname) ended ($status): it is started again" >&2
    done' &
servers=$!

# One torchrun on each trainer host. They meet at the first, on which Slurm runs this script.
srun "${train[@]}" --ntasks="$trainers" --ntasks-per-node=1 --gpus-per-node="$GPUS" --export=ALL \
    .venv/bin/torchrun --nnodes "$trainers" --nproc_per_node "$GPUS" \
    --rdzv_id "$SLURM_JOB_ID" --rdzv_backend c10d --rdzv_endpoint "$(hostname):29500" -m titan_grpo.train \
    --job.config_file train.toml --model.hf_assets_path "$MODEL" \
    --rollout.servers= --rollout.servers_slurm SERVER_HOSTS --rollout.servers_port $PORT --rollout.servers_per_host "$PER_HOST" &
trainer=$!

status=0
wait -n "$servers" "$trainer" || status=$?
if kill -0 "$trainer" 2>/dev/null; then
    wrong "all servers have ended (srun: $status), so the trainer is ended too: it would wait for them; their lines above say why"
fi
exit "$status"
