"""Our plugin's load and label routes, and its part of a scheduler, over SGLang's own classes and
without a server. ``python -m tests.receive.sglang_update``, in SGLang's environment, prints what
each call of the routes was answered with, what came to the model in which order, and the cache keys
of requests without one."""

import asyncio
import json
import os
from types import SimpleNamespace
from typing import Any, cast

import httpx
import torch
from sglang.srt.entrypoints import http_server
from sglang.srt.managers.scheduler_components import invariant_checker, weight_updater
from sglang.srt.plugins.hook_registry import HookRegistry, HookType
from sglang.srt.utils.common import normalize_serialized_named_tensor_payloads

from titan_grpo.engines.sglang import LOADER
from titan_grpo.receive import sglang_plugin

seen: list[Any] = []


class Side:
    """The engine's side of a commit, which refuses those without a number."""

    def commit(self, data: dict[str, Any]) -> None:
        seen.append(data)
        if "number" in data:
            engine.load(iter(()))


class Updater:
    """Of the scheduler's model."""

    def begin_weight_update(self) -> None:
        seen.append("begin")

    def end_weight_update(self, *, run_post_load: bool) -> None:
        seen.append(f"end, post load {run_post_load}")


class Model:
    """Of the scheduler."""

    def load_weights(self, tensors: Any) -> None:
        seen.append(f"load {len(list(tensors))}")


class Manager:
    """SGLang's tokenizer manager, whose messages to the scheduler are calls."""

    def __init__(self, scheduler: Any) -> None:
        self._scheduler = scheduler

    async def update_weights_from_tensor(self, update: Any) -> tuple[bool, str]:
        seen.append("message")
        update.serialized_named_tensors = normalize_serialized_named_tensor_payloads(
            update.serialized_named_tensors
        )
        answer = self._scheduler.update_weights_from_tensor(update)
        return answer.success, answer.message

    async def update_weight_version(self, update: Any) -> None:
        seen.append(update.new_version)


async def statuses(*calls: tuple[str, dict[str, Any]]) -> list[int]:
    """Of the plugin's routes, one after the other."""
    transport = httpx.ASGITransport(http_server.app)
    async with httpx.AsyncClient(transport=transport, base_url="http://sglang") as client:
        return [(await client.post(f"/titan_grpo/{r}", json=b)).status_code for r, b in calls]


HookRegistry.register(sglang_plugin.UPDATE, sglang_plugin._updated, HookType.AROUND)
HookRegistry.apply_hooks()
torch.distributed.init_process_group("gloo", "tcp://127.0.0.1:0", rank=0, world_size=1)
kind: Any = weight_updater.SchedulerWeightUpdaterManager
scheduler = kind.__new__(kind)  # its constructor wants a whole engine
runner = SimpleNamespace(weight_updater=Updater(), model=Model())
scheduler.tp_worker = SimpleNamespace(model_runner=runner)
scheduler._session = scheduler.metrics_collector = scheduler.tp_cpu_group = None
engine = sglang_plugin.SglangModel.__new__(sglang_plugin.SglangModel)  # it wants the model's files
engine._runner = runner
sglang_plugin.plugin.side = Side()  # type: ignore[assignment]
paused = SimpleNamespace(waiting_queue=[], is_initializing=False, forward_ct=1)
paused.grammar_manager = SimpleNamespace(grammar_queue=[])
paused.cur_batch_for_debug = "of the requests that a pause froze"
watchdog = invariant_checker.create_scheduler_watchdog(cast(Any, paused), 3600.0, soft=True)
watched = [watchdog.is_active()]
sglang_plugin.plugin.scheduler = paused
sglang_plugin._add_routes()
manager = Manager(scheduler)
http_server.get_global_state = lambda: SimpleNamespace(tokenizer_manager=manager)
os.environ[sglang_plugin.SOCKET_VARIABLE] = f"test {os.getpid()}"
Request = tuple[str, dict[str, object]]
LABEL: Request = ("finish", {"label": "r:1:f"})
LOAD: Request = ("load", {"number": 1})
NONSENSE: Request = ("load", {"nonsense": "\u00fc" * 40_000})
HELLO: Request = ("hello", {})  # nothing listens to it: 503
answers = asyncio.run(statuses(LABEL, LOAD, LABEL, LABEL))
greeted = asyncio.run(statuses(LOAD, HELLO, LABEL))
loaded, seen = seen, []
watched.append(watchdog.is_active())
refused = asyncio.run(statuses(NONSENSE))


def update(load_format: str | None, *tensors: bytes) -> str:
    """What an update by SGLang's own route is answered with."""
    request = SimpleNamespace(load_format=load_format, serialized_named_tensors=list(tensors))
    return str(scheduler.update_weights_from_tensor(request).message)


foreign = update(None)
for tensors in ([], [b"\x80\x02]."], [b"\x80\x02].", b"{}"], [b"7"], [b"[" * 99_999]):
    update(LOADER, *tensors)
found: dict[str, Any] = {"answers": answers, "greeted": greeted, "seen": loaded, "foreign": foreign}


def key(server: str) -> str:
    """The key that a scheduler of that server gives a request without one."""
    os.environ[sglang_plugin.SOCKET_VARIABLE] = server
    request = SimpleNamespace(extra_key=None)
    sglang_plugin._asked(None, request)
    return str(request.extra_key)


def waits_over_a_commit(queue: list[Any], own: str | None = None) -> list[str]:
    """The key of a request in this queue, before and after a commit."""
    request = SimpleNamespace(extra_key=own)
    sglang_plugin._asked(None, request)
    queue[:], before = [request], str(request.extra_key)
    sglang_plugin.commit([b"{}"])
    queue.clear()
    return [before, str(request.extra_key)]


# Not its text, more than a pipe holds: its end was lost where the reader was slow.
seen = ["nonsense" if each == NONSENSE[1] else each for each in seen]
found |= {"refused": [refused, seen], "watched": watched}
found |= {"keys": [key("one"), key("one"), key("another")]}
seen = []
ready, compiled = paused.waiting_queue, paused.grammar_manager.grammar_queue
queued = {"ready": waits_over_a_commit(ready), "grammar": waits_over_a_commit(compiled)}
found |= {"queued": queued | {"with its own": waits_over_a_commit(ready, "salt")}}
print(json.dumps(found))
