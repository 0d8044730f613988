"""What an Atropos environment asks of a vLLM server, by Atropos's own class. Runs in the
environment of the Atropos API, which has nothing of ours:

    python atropos_server.py URL MODEL_DIR API_KEY COUNT TOKENS ID ...

Prints one JSON object: ``sampled`` (``tokens_and_logprobs_completion`` of COUNT completions of
TOKENS tokens after the prompt of these ids) and ``scored`` (``get_logprobs`` of the prompt).
"""

import asyncio
import json
import sys

from atroposlib.envs.server_handling.server_baseline import APIServerConfig
from atroposlib.envs.server_handling.vllm_server import VLLMServer


async def main() -> None:
    """Ask, and print what came."""
    url, model, key = sys.argv[1:4]
    count, tokens, *ids = map(int, sys.argv[4:])
    config = APIServerConfig(
        timeout=60, api_key=key, base_url=f"{url}/v1", model_name=model, server_type="vllm"
    )
    server = VLLMServer(config)
    sampled = await server.tokens_and_logprobs_completion(
        input_ids=ids, n=count, max_tokens=tokens, temperature=1.0, ignore_eos=True
    )
    scored = await server.get_logprobs(input_ids=ids)
    print(json.dumps({"healthy": server.server_healthy, "sampled": sampled, "scored": scored}))


asyncio.run(main())
