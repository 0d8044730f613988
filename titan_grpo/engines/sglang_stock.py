"""SGLang's own update of weights over a process group (0.5.21 to 0.5.23), for servers without our
plugin: ``engines.control.StockRoutes``."""

from typing import Any

from titan_grpo.engines import sglang
from titan_grpo.engines.control import Announced, Group
from titan_grpo.engines.http import Call, ServerAccess, ignore, want
from titan_grpo.errors import ServerRefused

NOT_RECEIVED = "Failed to receive weights"
"""Start of a refusal that came before any weight was touched."""


def update(group: str, announced: Announced, timeout_s: float) -> Call[None]:
    """Receive one broadcast of exactly the announced bytes, and load it. Needs a pause and an open
    update.

    The version is not set and the cache not flushed here: SGLang cannot flush while requests are
    paused, and answers 400 then although the weights are in.
    """
    body: dict[str, Any] = {"names": list(announced.names), "dtypes": list(announced.dtypes)}
    body |= {"shapes": [list(shape) for shape in announced.shapes], "group_name": group}
    body |= {"load_format": "flattened_bucket", "flush_cache": False, "abort_all_requests": False}
    path = "/update_weights_from_distributed"
    return Call("POST", path, timeout_s, ignore, json=body, admin=True)


class HttpStockRoutes:
    """StockRoutes over HTTP."""

    def __init__(self, access: ServerAccess) -> None:
        self._driver = access.driver()

    def _post(self, path: str, body: dict[str, Any], timeout_s: float) -> Any:
        return self._driver.run(
            Call("POST", path, timeout_s, lambda answer: answer, json=body, admin=True)
        )

    def workers(self, timeout_s: float) -> int:
        return self._driver.run(sglang.world_size(timeout_s))

    def parameter_names(self, timeout_s: float) -> frozenset[str]:
        """As the checksums list them: no other route of SGLang's has them."""
        path = "/weights_checker"
        answer = self._post(path, {"action": "checksum"}, timeout_s)
        ranks = want(answer, "ranks", list, path)
        if not ranks:
            raise ServerRefused(f"{path} must list at least one rank")
        return frozenset(str(name) for name in want(ranks[0], "checksums", dict, path))

    def init_group(self, group: Group, timeout_s: float) -> None:
        """The scheduler stands still until all ranks are there."""
        body = {"master_address": group.host, "master_port": group.port, "rank_offset": 1}
        body |= {"world_size": group.size, "group_name": group.name, "backend": group.backend}
        self._post("/init_weights_update_group", body, timeout_s)

    def destroy_group(self, name: str, timeout_s: float) -> None:
        self._post("/destroy_weights_update_group", {"group_name": name}, timeout_s)

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
