"""SGLang's own update of weights over a process group (0.5.21 to 0.5.23), for servers where nothing
of ours is installed."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from titan_grpo.engines import sglang
from titan_grpo.engines.http import Call, SyncDriver, ignore, want
from titan_grpo.errors import ServerRefused

NOT_RECEIVED = "Failed to receive weights"
"""How a refusal begins that came before any weight was touched."""


@dataclass(frozen=True, slots=True)
class Group:
    """A process group of one transfer. Rank 0 is the trainer, the server's workers are 1 to ``size
    - 1``."""

    name: str
    host: str
    port: int
    size: int
    backend: str


@dataclass(frozen=True, slots=True)
class Announced:
    """What one broadcast carries, one after the other: tensors by name, dtype (torch's name without
    "torch."), and shape."""

    names: Sequence[str]
    dtypes: Sequence[str]
    shapes: Sequence[Sequence[int]]


def init_group(group: Group, timeout_s: float) -> Call[None]:
    """Have the workers join; answers when all ranks are there. The scheduler stands still
    meanwhile."""
    body: dict[str, Any] = {
        "master_address": group.host,
        "master_port": group.port,
        "rank_offset": 1,
    }
    body |= {"world_size": group.size, "group_name": group.name, "backend": group.backend}
    return Call("POST", "/init_weights_update_group", timeout_s, ignore, json=body, admin=True)


def destroy_group(name: str, timeout_s: float) -> Call[None]:
    """Leave the group; refused by a server that does not have it, as one that was restarted
    since."""
    return Call(
        "POST",
        "/destroy_weights_update_group",
        timeout_s,
        ignore,
        json={"group_name": name},
        admin=True,
    )


def update(group: str, announced: Announced, timeout_s: float) -> Call[None]:
    """Receive one broadcast of exactly the announced bytes, and load it. Needs a pause and an open
    update.

    The version is not set and the cache not flushed here: SGLang can not flush while requests are
    paused, and says 400 then although the weights are in.
    """
    body: dict[str, Any] = {"names": list(announced.names), "dtypes": list(announced.dtypes)}
    body |= {"shapes": [list(shape) for shape in announced.shapes], "group_name": group}
    body |= {"load_format": "flattened_bucket", "flush_cache": False, "abort_all_requests": False}
    return Call(
        "POST", "/update_weights_from_distributed", timeout_s, ignore, json=body, admin=True
    )


def parameter_names(timeout_s: float) -> Call[frozenset[str]]:
    """Names of the model's parameters, as the checksums list them (SGLang has no other route that
    says them)."""
    return Call(
        "POST", "/weights_checker", timeout_s, _parse_names, json={"action": "checksum"}, admin=True
    )


def _parse_names(answer: Any) -> frozenset[str]:
    ranks = want(answer, "ranks", list, "/weights_checker")
    if not ranks:
        raise ServerRefused("/weights_checker must list at least one rank")
    return frozenset(str(name) for name in want(ranks[0], "checksums", dict, "/weights_checker"))


class HttpStockRoutes:
    """The routes over connections of their own."""

    def __init__(self, url: str, api_key: str, admin_key: str) -> None:
        self._driver = SyncDriver(url, api_key, admin_key)

    def workers(self, timeout_s: float) -> int:
        return self._driver.run(sglang.world_size(timeout_s))

    def parameter_names(self, timeout_s: float) -> frozenset[str]:
        return self._driver.run(parameter_names(timeout_s))

    def init_group(self, group: Group, timeout_s: float) -> None:
        self._driver.run(init_group(group, timeout_s))

    def destroy_group(self, name: str, timeout_s: float) -> None:
        self._driver.run(destroy_group(name, timeout_s))

    def begin(self, timeout_s: float) -> None:
        try:
            self._driver.run(sglang.begin_weight_update(timeout_s))
        except ServerRefused:
            self._driver.run(sglang.end_weight_update(timeout_s))
            self._driver.run(sglang.begin_weight_update(timeout_s))

    def update(self, group: str, announced: Announced, timeout_s: float) -> None:
        self._driver.run(update(group, announced, timeout_s))

    def close(self) -> None:
        self._driver.close()
