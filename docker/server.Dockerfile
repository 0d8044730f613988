# An engine's own image with the plugin in it. From the root of a checkout:
#
#   docker build -f docker/server.Dockerfile -t titan-grpo-vllm .
#   docker build -f docker/server.Dockerfile --build-arg BASE=lmsysorg/sglang:v0.5.23 -t titan-grpo-sglang .
#
# Start it as README.md says for that engine. The engine's torch is kept: only what it lacks is added.
ARG BASE=vllm/vllm-openai:v0.32.0
FROM ${BASE}
COPY pyproject.toml README.md LICENSE /source/
COPY titan_grpo /source/titan_grpo
COPY patches /source/patches
RUN python3 -m pip install --no-cache-dir --no-deps /source \
    && python3 -m pip install --no-cache-dir "h11>=0.14,<1" "httpx>=0.27,<1" "xxhash>=3.4,<5" "blake3>=1.0,<2" "msgspec>=0.21,<1"
