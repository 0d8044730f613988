# The trainer. From the root of a checkout:
#
#   docker build -f docker/trainer.Dockerfile -t titan-grpo-trainer .
#   docker run --gpus all --network host --ipc host -v $PWD/job:/job titan-grpo-trainer \
#     --nproc_per_node 8 -m titan_grpo.train --job.config_file train.toml
#
# CUDA's libraries come with torch's wheels; the host has the driver. --ipc host: NCCL needs more of
# /dev/shm than the 64 MiB that a container has by default.
ARG BASE=python:3.11-slim
FROM ${BASE}
# Triton compiles at run time. Without versions: Debian keeps no earlier ones, so a pinned package is soon one that
# cannot be installed.
# hadolint ignore=DL3008
RUN apt-get update && apt-get install -y --no-install-recommends gcc g++ libc6-dev \
    && rm -rf /var/lib/apt/lists/*
COPY pyproject.toml README.md LICENSE /source/
COPY titan_grpo /source/titan_grpo
COPY patches /source/patches
RUN pip install --no-cache-dir "/source[train]"
WORKDIR /job
ENTRYPOINT ["torchrun"]
