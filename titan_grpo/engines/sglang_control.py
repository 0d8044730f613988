"""A lane's control plane of an SGLang server."""

from collections.abc import Mapping
from typing import Any

from titan_grpo.engines import sglang
from titan_grpo.engines.calls import Call
from titan_grpo.engines.control import NOT_RECOMPUTED
from titan_grpo.engines.drivers import HttpRefused, SyncDriver
from titan_grpo.engines.sampling import Sampling
from titan_grpo.engines.sglang_stock import HttpStockRoutes, StockRoutes
from titan_grpo.errors import ServerRefused, ServerUnreachable

LOOK_S = 10.0
"""Longest deadline of a question, in seconds."""

TOKEN_S = 4.0
"""How long a server without our plugin gets to generate one token, which shows that it is not paused, in seconds. Less than the
20 s after which SGLang takes its own silence for illness."""

ABSENT = (401, 404)
"""Answers to a route of our plugin where the plugin is not: 404, or with both keys set 401, since SGLang guards routes that it
does not have with the API key."""

NO_PLUGIN = (
    f"install titan_grpo in the server's environment and start it with --custom-weight-loader {sglang.LOADER}, or set "
    'weight_sync.apply = "streamed"; or the admin key (rollout.admin_key_env) is not the server\'s'
)


class SglangControl:
    """SGLang >= 0.5.21 with our plugin."""

    engine = sglang.NAME

    def __init__(self, url: str, api_key: str, admin_key: str, deadline_s: float, load_deadline_s: float | None = None) -> None:
        """``deadline_s``: of each call; ``load_deadline_s``: of ``load``, where that waits for a transfer too."""
        self._driver = SyncDriver(url, api_key, admin_key)
        self._access = (url, api_key, admin_key)
        self._deadline_s = deadline_s
        self._load_deadline_s = load_deadline_s or deadline_s
        self._boot: str | None = None
        self.url = url

    @property
    def _look_s(self) -> float:
        return min(LOOK_S, self._deadline_s)

    def label(self) -> str:
        return self._driver.run(sglang.label(self._look_s))

    def stock(self) -> StockRoutes | None:
        return None if self._state() is not None else HttpStockRoutes(*self._access)

    def greet(self, hello: Mapping[str, Any]) -> None:
        try:
            self._driver.run(sglang.hello(hello, self._deadline_s))
        except HttpRefused as error:
            if error.status in ABSENT:
                raise ServerRefused(f"{error}: {NO_PLUGIN}") from error
            raise

    def paused(self) -> bool:
        """Where our plugin is not there to say it: whether a token can be had."""
        state = self._state()
        if state is not None:
            return state.paused
        if self._answers(sglang.ready(self._look_s), (404, 503)):
            return False
        # 503 also after a health check met a pause that is long over: only a token tells the two apart (a health check that
        # generates does not: any message of the scheduler, such as the answer to a lane's call, makes it say yes)
        try:
            self._driver.run(sglang.generate([0], Sampling(1), min(TOKEN_S, self._deadline_s)))
        except ServerUnreachable:
            self._driver.run(sglang.alive(self._look_s))
            return True
        return False

    def pause(self) -> None:
        self._driver.run(sglang.pause(self._deadline_s))

    def drop_kv(self) -> None:
        """``retract`` is answered before it is done; that the cache could be flushed after it shows that nobody holds KV."""
        self._driver.run(sglang.pause(self._deadline_s, "retract"))
        try:
            self._driver.run(sglang.flush_cache(self._deadline_s))
        except HttpRefused as error:
            raise ServerRefused(f"{error}: SGLang did not throw its KV cache away: {NOT_RECOMPUTED}") from error

    def load(self, info: Mapping[str, Any]) -> None:
        state = self._state()
        if state is None:
            raise ServerRefused(f"{self._driver.url}: there is no titan_grpo plugin to commit a version: {NO_PLUGIN}")
        self._boot = state.boot
        begin = sglang.begin_weight_update(self._deadline_s)
        # 400: a lane that died between begin and end left its update open
        if not self._answers(begin, (400,)):
            self._driver.run(sglang.end_weight_update(self._deadline_s))
            self._driver.run(begin)
        self._driver.run(sglang.update_weights(info, state.workers, self._load_deadline_s))

    def finish(self, label: str) -> None:
        """A restarted server has no update to end. One that restarts between the two calls would take the label, so it is
        asked once more; what it shows then is settled when its lane connects again."""
        self._driver.run(sglang.end_weight_update(self._deadline_s))
        self.relabel(label)
        boot, self._boot = self._boot, None
        state = self._state() if boot is not None else None
        if boot is not None and (state is None or state.boot != boot):
            raise ServerRefused(f"{self._driver.url} was restarted while a version was committed: it holds other weights")

    def relabel(self, label: str) -> None:
        self._driver.run(sglang.update_weight_version(label, self._deadline_s))

    def resume(self) -> None:
        self._driver.run(sglang.resume(self._deadline_s))

    def close(self) -> None:
        self._driver.close()

    def _state(self) -> sglang.State | None:
        """What our plugin says; None if it is not there."""
        try:
            return self._driver.run(sglang.state(self._look_s))
        except HttpRefused as error:
            if error.status not in ABSENT:
                raise
            return None

    def _answers(self, call: Call[None], refusals: tuple[int, ...]) -> bool:
        """Whether a call is answered with yes; False for these refusals, any other is raised."""
        try:
            self._driver.run(call)
        except HttpRefused as error:
            if error.status not in refusals:
                raise
            return False
        return True
