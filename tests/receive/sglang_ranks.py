"""The plugin's hello route of an SGLang with two tensor-parallel workers, both of which are in this
process, and a lane that connects twice. ``python -m tests.receive.sglang_ranks``, in SGLang's
environment, prints how often the receiver's memory is mapped, and whether a label may be set: when
it was attached, after hellos that replace no receiver, and when the next receiver has joined."""

import asyncio
import contextlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import httpx
from sglang.srt.entrypoints import http_server

from tests.receive.workers import Team
from titan_grpo.config import WeightSync
from titan_grpo.engines.server import ServerControl
from titan_grpo.errors import PeerError
from titan_grpo.layout.manifest import Manifest
from titan_grpo.protocol.messages import PROBE
from titan_grpo.receive import sglang_plugin
from titan_grpo.receive.commit import Engine, EngineSide
from titan_grpo.sync.link import LaneLink, LinkOptions
from titan_grpo.sync.probe import ask_receiver
from titan_grpo.unix_rpc import Server

WAIT_S = 60.0


class Route:
    """What of a lane's control plane is needed: the hello."""

    def greet(self, greeting: Mapping[str, Any]) -> None:
        async def post() -> None:
            transport = httpx.ASGITransport(http_server.app)
            async with httpx.AsyncClient(transport=transport, base_url="http://sglang") as client:
                answer = await client.post("/titan_grpo/hello", json=dict(greeting))
                answer.raise_for_status()

        asyncio.run(post())


def mapped() -> int:
    """How many mappings of a receiver's image this process has, once those under way are done."""
    for side in sides:
        if side._mapping is not None:
            side._mapping[1].result(WAIT_S)
    return Path("/proc/self/maps").read_text().count("titan_grpo staging")


def state() -> tuple[int, bool]:
    """What is mapped, and whether a label may be set."""
    return mapped(), sglang_plugin.plugin.loaded


def connect(epoch: int) -> LaneLink:
    """The lane's ``epoch``-th connection, joined."""
    options = LinkOptions(WeightSync(), "tcp", "127.0.0.1")
    link = LaneLink("run", epoch, MANIFEST, options)
    link.join(cast(ServerControl, Route()), WAIT_S)
    return link


MANIFEST = Manifest.build([("weight", "bfloat16", (64, 64))], 4096)
os.environ[sglang_plugin.SOCKET_VARIABLE] = f"test {os.getpid()}"
sides = [EngineSide(Engine(), cast(Any, member), "") for member in Team(2).members]
plugins = [sglang_plugin.plugin, sglang_plugin.Plugin()]
for rank, (plugin, side) in enumerate(zip(plugins, sides, strict=True)):
    plugin.side = side
    Server(sglang_plugin._address(rank), plugin.hello).start()
sglang_plugin._add_routes()
manager: Any = SimpleNamespace(server_args=SimpleNamespace(tp_size=2))
http_server.get_global_state = lambda: SimpleNamespace(tokenizer_manager=manager)
first = connect(2)
first.send_manifest()
Route().greet({"attach": first.attach().to_dict()})
found = {"attached": state()}
sglang_plugin.plugin.loaded = True
ask_receiver(Route().greet, "127.0.0.1", WAIT_S, transport=PROBE)
found["probed"] = state()
with contextlib.suppress(PeerError):
    connect(2)
found["refused"] = state()
Route().greet({"map": {}})
found["forged"] = state()
first.close()
second = connect(3)
found["joined again"] = state()
print(json.dumps(found))
second.close()
for side in sides:
    side.close()
