#!/usr/bin/env bash
# Trainer on two hosts with 8 GPUs each, one vLLM server on each of two others:  sbatch examples/cluster/slurm.sh
#
# Edit the partition, the numbers of hosts, MODEL and the two environments. The TOML file is the one that titan-grpo init writes.
#SBATCH --job-name=titan_grpo
#SBATCH --nodes=2 --ntasks-per-node=1 --gpus-per-node=8
#SBATCH hetjob
#SBATCH --nodes=2 --ntasks-per-node=1 --gpus-per-node=8
set -euo pipefail
MODEL="${MODEL:-$PWD/assets/Qwen3-0.6B}"
PORT=8000

# Servers and trainer share one secret, so nobody else writes weights.
key="$(mktemp -p "$HOME" .titan_grpo_key.XXXXXX)"
trap 'rm -f "$key"' EXIT
python3 -c 'import secrets; print(secrets.token_hex(32))' >"$key"
export TITAN_GRPO_RUN_KEY_FILE="$key"

VLLM_SERVER_DEV_MODE=1 srun --het-group=1 --export=ALL .venv-vllm/bin/vllm serve "$MODEL" \
    --host 0.0.0.0 --port $PORT --logprobs-mode processed_logprobs \
    --weight-transfer-config '{"backend":"titan_grpo"}' \
    --middleware titan_grpo.receive.vllm_http.WeightsMiddleware &

# One torchrun on each trainer host. They meet at the first, on which Slurm runs this script.
srun --het-group=0 --export=ALL .venv/bin/torchrun --nnodes "$SLURM_JOB_NUM_NODES_HET_GROUP_0" --nproc_per_node 8 \
    --rdzv_id "$SLURM_JOB_ID" --rdzv_backend c10d --rdzv_endpoint "$(hostname):29500" -m titan_grpo.train \
    --job.config_file train.toml --model.hf_assets_path "$MODEL" \
    --rollout.servers_slurm SLURM_JOB_NODELIST_HET_GROUP_1 --rollout.servers_port $PORT
# The end of the trainer is the end of the job: Slurm ends the servers.
scancel "$SLURM_JOB_ID"
