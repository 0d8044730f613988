"""The doctor's look at a server's options that a job depends on: adapters, and routes of an MoE."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from titan_grpo.commands.doctor_checks import Finding, ok, problem
from titan_grpo.commands.doctor_facts import Access
from titan_grpo.engines import sglang, vllm
from titan_grpo.engines.generation import RETURN_ROUTES
from titan_grpo.engines.http import Call, SyncDriver
from titan_grpo.errors import PeerError

SUBJECT = "options"
PATH = "/server_info"
ANSWER_S = 60.0
"""vLLM collects its whole system's description for this answer."""


@dataclass(frozen=True, slots=True)
class Options:
    """What a job needs, or what a server was started with. ``lora_rank``: of adapters that are
    versions, 0 without. ``routes``: experts come with the tokens."""

    lora_rank: int = 0
    routes: bool = False


def of_server(engine: str, answer: Any) -> Options:
    """Read /server_info. It has an SGLang's keys in it: nothing of it is shown. Pure."""
    found = answer if isinstance(answer, dict) else {}
    if engine == sglang.NAME:
        return Options(0, found.get("enable_return_routed_experts") is True)
    config = found.get("vllm_config")
    config = config if isinstance(config, dict) else {}
    lora, extra = config.get("lora_config") or {}, config.get("aux_output_config") or {}
    rank = lora.get("max_lora_rank", 0)
    return Options(int(rank), extra.get("enable_return_routed_experts") is True)


def compare(url: str, engine: str, wanted: Options, found: Options) -> Iterator[Finding]:
    """Judge what a server was started with. Pure."""
    rank = wanted.lora_rank
    enough = f"--enable-lora --max-lora-rank {vllm.allowed_rank(rank)}"
    if rank and engine != vllm.NAME:
        remedy = 'set lora.sync = "merged", or serve with vLLM'
        yield problem(SUBJECT, f"{url}: {engine} takes no adapters as versions", remedy)
    elif rank and not found.lora_rank:
        text = f'{url} was started without --enable-lora, and lora.sync is "adapter"'
        yield problem(SUBJECT, text, f"start it with {enough}")
    elif rank > found.lora_rank:
        text = f"{url} takes adapters of rank {found.lora_rank} at most, lora.rank is {rank}"
        yield problem(SUBJECT, text, f"start it with {enough}")
    elif found.lora_rank and not rank:
        remedy = 'start it without --enable-lora, or set lora.sync = "adapter"'
        yield problem(SUBJECT, f"{url} takes adapters, and the job sends whole weights", remedy)
    elif rank:
        yield ok(SUBJECT, f"{url} takes adapters up to rank {found.lora_rank}")
    if wanted.routes and not found.routes:
        text = f"{url} sends no routes, and grpo.router_replay needs those of every completion"
        yield problem(SUBJECT, text, f"start it with {RETURN_ROUTES}")
    elif wanted.routes:
        yield ok(SUBJECT, f"{url} sends the experts of each token")


def findings(url: str, engine: str, wanted: Options, access: Access) -> Iterator[Finding]:
    """Ask, and judge; nothing where a server does not answer: other findings say why."""
    call = Call("GET", PATH, ANSWER_S, lambda answer: of_server(engine, answer))
    if engine == vllm.NAME:
        call = Call("GET", PATH, ANSWER_S, call.parse, params={"config_format": "json"})
    try:
        with SyncDriver(url, access.api_key) as driver:
            found = driver.run(call)
    except PeerError:
        return
    yield from compare(url, engine, wanted, found)
