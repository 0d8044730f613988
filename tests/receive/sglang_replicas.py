"""An SGLang with two data-parallel replicas, and one with a layer that keeps a copy of its weights,
each in one process; a launcher of several servers has started them by multiprocessing.
``python -m tests.receive.sglang_replicas MODEL``, in SGLang's environment, prints what a trainer
that greets each is answered."""

import asyncio
import json
import multiprocessing
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import httpx
import torch
from sglang.srt.entrypoints import http_server
from sglang.srt.server_args import ServerArgs

from titan_grpo.engines.sglang import LOADER
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


def scheduler(args: Any, model: torch.nn.Module) -> Any:
    """One of a server. Each of a replica has a tensor-parallel group of its own, in which it has
    rank 0."""
    config = SimpleNamespace(
        hf_text_config=SimpleNamespace(to_dict=dict),
        quantization=None,
        model_path="nowhere",
        revision=None,
    )
    return SimpleNamespace(
        tp_worker=SimpleNamespace(model_runner=SimpleNamespace(model=model)),
        server_args=args,
        model_config=config,
        tp_group=SimpleNamespace(rank_in_group=0, world_size=1, cpu_group=None),
    )


def replicas() -> list[Any]:
    args = SimpleNamespace(dp_size=2, enable_return_routed_experts=False)
    return [scheduler(args, torch.nn.Module()) for _ in range(2)]


def keeps_a_copy() -> list[Any]:
    model: Any = torch.nn.Linear(2, 2)
    model._derived_weight_cache_error = "the layer keeps a copy"
    return [scheduler(ServerArgs(sys.argv[1], custom_weight_loader=[LOADER]), model)]


def serve(schedulers: Callable[[], list[Any]], answer: Any) -> None:
    """The server's start, and its answer."""
    sglang_plugin.register()
    for each in schedulers():
        sglang_plugin._scheduler_made(None, each)
    state: Any = SimpleNamespace(tokenizer_manager=None)
    http_server.get_global_state = lambda: state
    answer.put(ask_receiver(greet, LOOPBACK, WAIT_S, transport="tcp").error)


fork = multiprocessing.get_context("fork")
found = []
for each in (replicas, keeps_a_copy):
    answer = fork.SimpleQueue()
    server = fork.Process(target=serve, args=(each, answer))
    server.start()
    server.join(2 * WAIT_S)
    if server.exitcode != 0:
        raise SystemExit(server.exitcode)
    found.append(answer.get())
print(json.dumps(found))
