"""A lane's control plane of a vLLM server."""

from collections.abc import Mapping
from typing import Any

from titan_grpo.engines import vllm
from titan_grpo.engines.control import NOT_RECOMPUTED
from titan_grpo.engines.drivers import SyncDriver
from titan_grpo.errors import ServerRefused


class VllmControl:
    """vLLM >= 0.32 with our plugin, over its RL routes."""

    engine = vllm.NAME

    def __init__(self, url: str, api_key: str, deadline_s: float, load_deadline_s: float | None = None) -> None:
        """``deadline_s``: of each call; ``load_deadline_s``: of ``load``, where that waits for a transfer too."""
        self._driver = SyncDriver(url, api_key)
        self._deadline_s = deadline_s
        self._load_deadline_s = load_deadline_s or deadline_s
        self.url = url

    def label(self) -> str:
        return self._driver.run(vllm.weight_info(min(10.0, self._deadline_s)))

    def stock(self) -> None:
        """vLLM's own engines need a GPU or its host: greet says that our plugin is missing."""

    def greet(self, hello: Mapping[str, Any]) -> None:
        self._driver.run(vllm.init_weight_transfer(hello, self._deadline_s))

    def paused(self) -> bool:
        return self._driver.run(vllm.is_paused(min(10.0, self._deadline_s)))

    def pause(self) -> None:
        self._driver.run(vllm.pause(self._deadline_s))

    def drop_kv(self) -> None:
        """A vLLM without this reset answers without a word of success, which is refused too."""
        if not self._driver.run(vllm.reset_kv(self._deadline_s)):
            raise ServerRefused(f"{self._driver.url}: vLLM did not throw its KV cache away: {NOT_RECOMPUTED}")

    def load(self, info: Mapping[str, Any]) -> None:
        try:
            self._driver.run(vllm.start_weight_update(self._deadline_s))
        except ServerRefused:
            # A lane that died between start and finish left its session open, and vLLM has no route to abort one.
            self._driver.run(vllm.finish_weight_update(None, self._deadline_s))
            self._driver.run(vllm.start_weight_update(self._deadline_s))
        self._driver.run(vllm.update_weights(info, self._load_deadline_s))

    def finish(self, label: str) -> None:
        self._driver.run(vllm.finish_weight_update(label, self._deadline_s))

    def relabel(self, label: str) -> None:
        self._driver.run(vllm.update_weight_version(label, self._deadline_s))

    def resume(self) -> None:
        self._driver.run(vllm.resume(self._deadline_s))

    def close(self) -> None:
        self._driver.close()
