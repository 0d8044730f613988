"""An SGLang with two data-parallel replicas, both in one process, whose HTTP process a launcher of
several servers has started by multiprocessing. ``python -m tests.receive.sglang_replicas``, in
SGLang's environment, prints what a trainer that greets it is answered."""

import asyncio
import json
import multiprocessing
from types import SimpleNamespace
from typing import Any

import httpx
import torch
from sglang.srt.entrypoints import http_server

from titan_grpo.receive import sglang_plugin
from titan_grpo.sync.probe import ask_receiver

LOOPBACK, WAIT_S = "127.0.0.1", 60.0


def greet(greeting: dict[str, Any]) -> None:
    """Send a hello over the server's route."""

    async def post() -> None:
        transport = httpx.ASGITransport(http_server.app)
        async with httpx.AsyncClient(transport=transport, base_url="http://sglang") as client:
            answer = await client.post("/titan_grpo/hello", json=greeting)
            answer.raise_for_status()

    asyncio.run(post())


def replica() -> Any:
    """The scheduler of one: each has a tensor-parallel group of its own, in which it has rank 0."""
    config = SimpleNamespace(
        hf_text_config=SimpleNamespace(to_dict=dict),
        quantization=None,
        model_path="nowhere",
        revision=None,
    )
    return SimpleNamespace(
        tp_worker=SimpleNamespace(model_runner=SimpleNamespace(model=torch.nn.Module())),
        server_args=SimpleNamespace(dp_size=2, enable_return_routed_experts=False),
        model_config=config,
        tp_group=SimpleNamespace(rank_in_group=0, world_size=1, cpu_group=None),
    )


def serve() -> None:
    """The server's start, and its answer."""
    sglang_plugin.register()
    for _ in range(2):
        sglang_plugin._scheduler_made(None, replica())
    state: Any = SimpleNamespace(tokenizer_manager=None)
    http_server.get_global_state = lambda: state
    joined = ask_receiver(greet, LOOPBACK, WAIT_S, transport="tcp")
    print(json.dumps(joined.error), flush=True)


server = multiprocessing.get_context("fork").Process(target=serve)
server.start()
server.join(2 * WAIT_S)
raise SystemExit(server.exitcode)
