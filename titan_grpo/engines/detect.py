"""Which engine answers at a URL, asked of the server itself: a fleet may mix engines, and a restarted server may be another."""

from typing import Any

from titan_grpo.engines import sglang, vllm
from titan_grpo.engines.calls import Call
from titan_grpo.engines.drivers import HttpRefused, SyncDriver
from titan_grpo.errors import ServerRefused

EXPECTED = (
    "vLLM >= 0.32 started with VLLM_SERVER_DEV_MODE=1 (GET /weight_info), or SGLang >= 0.5.21 (GET /model_info with a "
    "weight_version)"
)


def questions(timeout_s: float) -> dict[str, Call[Any]]:
    """Engine -> the call that only it answers in the promised form."""
    return {sglang.NAME: sglang.label(timeout_s), vllm.NAME: vllm.weight_info(timeout_s)}


def is_other(refusal: ServerRefused) -> bool:
    """Whether a refusal says that another engine is there: no such route, or an answer of another form. Pure.

    A refused key or a server in trouble says nothing about which engine it is.
    """
    return refusal.status in (404, 405) if isinstance(refusal, HttpRefused) else True


def detect(driver: SyncDriver, timeout_s: float) -> str:
    """The engine's name. ServerUnreachable without an answer, ServerRefused with what is expected for a stranger."""
    heard = []
    for name, call in questions(timeout_s).items():
        try:
            driver.run(call)
        except ServerRefused as refusal:
            if not is_other(refusal):
                raise
            heard.append(f"{call.path} {refusal.status if isinstance(refusal, HttpRefused) else 'of another form'}")
        else:
            return name
    raise ServerRefused(f"{driver.url} must be {EXPECTED}, got {', '.join(heard)}")
