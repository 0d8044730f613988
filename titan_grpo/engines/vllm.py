"""vLLM's HTTP interface (written for and run against 0.32) as pure functions: arguments in, Call out.

The routes for weight transfer and pausing exist only where the server runs with ``VLLM_SERVER_DEV_MODE=1``.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from titan_grpo.engines.calls import Call, ignore, want
from titan_grpo.engines.sampling import Sampled, Sampling, logprob, salt, version_spans
from titan_grpo.engines.streamed import INTERVAL, Piece, StreamedCall
from titan_grpo.errors import ServerRefused

NAME = "vllm"
COMPLETIONS = "/v1/completions"


def health(timeout_s: float = 5.0) -> Call[None]:
    """200 while the engine lives, paused or not."""
    return Call("GET", "/health", timeout_s, ignore)


alive = health
"""It needs no generation, so a paused server answers too."""


def weight_info(timeout_s: float = 10.0) -> Call[str]:
    """Label of the weights that the server holds, as its last finish_weight_update set it."""
    return Call("GET", "/weight_info", timeout_s, lambda a: str(want(a, "weight_version", (str, int), "/weight_info")))


label = weight_info


def is_paused(timeout_s: float = 10.0) -> Call[bool]:
    """Whether generation is paused."""
    return Call("GET", "/is_paused", timeout_s, lambda a: bool(want(a, "is_paused", bool, "/is_paused")))


def world_size(timeout_s: float = 10.0) -> Call[int]:
    """Workers of the server: tensor x pipeline x data parallel."""
    return Call("GET", "/get_world_size", timeout_s, lambda a: int(want(a, "world_size", int, "/get_world_size")))


def models(timeout_s: float = 10.0) -> Call[list[str]]:
    """Names of the served models."""
    return Call("GET", "/v1/models", timeout_s, lambda a: [str(m["id"]) for m in want(a, "data", list, "/v1/models")])


def init_weight_transfer(hello: Mapping[str, Any], timeout_s: float) -> Call[None]:
    """Hand a lane's greeting to the server's weight-transfer plugin."""
    return Call("POST", "/init_weight_transfer_engine", timeout_s, ignore, json={"init_info": dict(hello)})


def pause(timeout_s: float, mode: str = "keep") -> Call[None]:
    """Stop scheduling. ``keep`` freezes the running requests with their KV cache and accepts new ones.

    ``clear_cache`` must be said: left out, 0.32 preempts all requests and empties the prefix cache in ``keep`` too, although
    its documentation says that it does not.
    """
    return Call("POST", "/pause", timeout_s, ignore, params={"mode": mode, "clear_cache": "false"})


def reset_kv(timeout_s: float) -> Call[bool]:
    """Throw away all KV: running requests go back to the queue with their tokens, to be computed anew, and the prefix cache is
    emptied. Whether vLLM says that it did."""
    path = "/reset_prefix_cache"
    return Call(
        "POST",
        path,
        timeout_s,
        lambda a: bool(want(a, "success", bool, path)),
        params={"reset_running_requests": "true"},
    )


def resume(timeout_s: float) -> Call[None]:
    """Go on after pause."""
    return Call("POST", "/resume", timeout_s, ignore)


def start_weight_update(timeout_s: float) -> Call[None]:
    """Open an update; an error while one is open."""
    return Call("POST", "/start_weight_update", timeout_s, ignore)


def update_weights(info: Mapping[str, Any], timeout_s: float) -> Call[None]:
    """Run the plugin's receive step (our commit) in every worker; returns when all of them are through."""
    return Call("POST", "/update_weights", timeout_s, ignore, json={"update_info": dict(info)})


def finish_weight_update(label: str | None, timeout_s: float) -> Call[None]:
    """Close the update and set the label that weight_info answers with; None leaves the label as it is."""
    body = {} if label is None else {"weight_version": label}
    return Call("POST", "/finish_weight_update", timeout_s, ignore, json=body)


def update_weight_version(label: str, timeout_s: float) -> Call[None]:
    """Set the label outside of an update."""
    return Call("POST", "/update_weight_version", timeout_s, ignore, json={"new_version": label})


def abort_all(timeout_s: float = 10.0) -> Call[None]:
    """Abort all requests in flight."""
    return Call("POST", "/abort_requests", timeout_s, ignore, json={"request_ids": []})


def generate(prompt_ids: Sequence[int], sampling: Sampling, timeout_s: float) -> Call[Sampled]:
    """Sample one continuation of a token-id prompt, with the log-probability of each sampled token.

    top_k, top_p, min_p and the repetition penalty are sent explicitly: left out, vLLM takes them from the model's
    generation_config.json, and the tokens would come from another distribution than the trainer's. Which weights made which
    token is told from vLLM 0.33 on; 0.32 ignores the question.
    """
    body: dict[str, Any] = {
        "prompt": list(prompt_ids),
        "max_tokens": sampling.max_tokens,
        "temperature": sampling.temperature,
        "top_p": 1.0,
        "top_k": -1,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "ignore_eos": sampling.ignore_eos,
        "logprobs": 0,
        "return_token_ids": True,
        "return_weight_versions": True,
    }
    if sampling.seed is not None:
        body["seed"] = sampling.seed
    if sampling.cache_salt:
        body["cache_salt"] = salt(sampling.cache_salt)
    return Call("POST", COMPLETIONS, timeout_s, parse_sampled, json=body)


def stream(prompt_ids: Sequence[int], sampling: Sampling, timeout_s: float, interval: int = INTERVAL) -> StreamedCall:
    """``generate`` with the answer in pieces. Which weights made which token is said in the last one only (from 0.33 on)."""
    call = generate(prompt_ids, sampling, timeout_s)
    return StreamedCall(replace(call, json={**call.json, "stream": True, "stream_interval": interval}), parse_piece)


def parse_piece(event: Any) -> Piece:
    """Read one event of a streamed answer; one without a choice says nothing of tokens."""
    if want(event, "choices", list, COMPLETIONS) == []:
        return Piece()
    choice = _only_choice(event)
    sampled = _read(choice, choice.get("finish_reason") or "")
    return Piece(sampled.token_ids, sampled.logprobs, sampled.finish_reason, sampled.versions)


def score(token_ids: Sequence[int], timeout_s: float, cache_salt: str = "") -> Call[tuple[float, ...]]:
    """Log-probabilities of a given sequence under the server's weights, at temperature 1.

    Returns ``len(token_ids) - 1`` values: value i belongs to ``token_ids[i + 1]`` given ``token_ids[: i + 1]``
    (the first token has no context, so no value).
    """
    count = len(token_ids)
    body: dict[str, Any] = {
        "prompt": list(token_ids),
        "max_tokens": 1,
        "temperature": 1.0,
        "echo": True,
        "logprobs": 0,
        "return_token_ids": True,
    }
    if cache_salt:
        body["cache_salt"] = salt(cache_salt)
    return Call("POST", COMPLETIONS, timeout_s, lambda answer: _parse_scores(answer, count), json=body)


def parse_sampled(answer: Any) -> Sampled:
    """Read one choice of /v1/completions. Comparing lengths is the caller's: a mismatch is a sample to drop, not an outage."""
    choice = _only_choice(answer)
    return _read(choice, str(choice.get("finish_reason")))


def _read(choice: Mapping[str, Any], reason: str) -> Sampled:
    ids = want(choice, "token_ids", list, COMPLETIONS)
    logprobs = want(want(choice, "logprobs", dict, COMPLETIONS), "token_logprobs", list, COMPLETIONS)
    spans = version_spans(choice.get("weight_versions"), COMPLETIONS)
    return Sampled(tuple(int(t) for t in ids), tuple(logprob(x) for x in logprobs), reason, spans)


def _parse_scores(answer: Any, count: int) -> tuple[float, ...]:
    choice = _only_choice(answer)
    logprobs = want(want(choice, "logprobs", dict, COMPLETIONS), "token_logprobs", list, COMPLETIONS)
    if len(logprobs) < count:
        raise ServerRefused(f"{COMPLETIONS} must echo {count} log-probabilities, got {len(logprobs)}")
    return tuple(logprob(x) for x in logprobs[1:count])


def _only_choice(answer: Any) -> Any:
    choices = want(answer, "choices", list, COMPLETIONS)
    if len(choices) != 1:
        raise ServerRefused(f"{COMPLETIONS} must answer one choice to one request, got {len(choices)}")
    return choices[0]
