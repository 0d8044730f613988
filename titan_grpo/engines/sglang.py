"""SGLang (0.5.23): its HTTP interface as pure functions from arguments to a Call, a lane's control
plane, and the command that starts a server.

Calls with ``admin`` go to routes under SGLang's admin key; if one is set, SGLang refuses the API
key there, and the admin key on all other routes. ``/server_info`` answers with both keys in clear
text: keep its content out of messages and logs."""

import json
import os
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

from titan_grpo.engines.generation import (
    INTERVAL,
    QUERY_S,
    RETURN_ROUTES,
    TOOL_PARSER,
    Piece,
    Sampled,
    Sampling,
    ToolCalls,
    logprob,
    read_ids,
    routes,
    salt,
    tool_calls,
    version_spans,
)
from titan_grpo.engines.http import NOT_RECOMPUTED, Call, HttpRefused, ServerAccess, ignore, want
from titan_grpo.engines.sglang_stock import StockRoutes
from titan_grpo.errors import ServerRefused, ServerUnfit, ServerUnreachable
from titan_grpo.patches import sglang_cpu

if TYPE_CHECKING:
    from titan_grpo.engines.launch import ServerSpec

NAME = "sglang"
GENERATE, PARSE = "/generate", "/parse_function_call"
LOADER = "titan_grpo.receive.sglang_plugin.commit"
"""Value of ``--custom-weight-loader`` that lets our plugin load weights, and the load format of its
updates."""

TOKEN_S = 4.0
"""Seconds to wait for one token from a server without our plugin: without one it counts as paused.
Less than the 20 s of silence after which SGLang reports itself unhealthy."""

ABSENT = (401, 404)
"""Statuses of our plugin's routes on a server without it: 404, or 401 with both keys set, as SGLang
guards routes that it lacks with the API key."""

NO_PLUGIN = (
    "install titan_grpo in the server's environment and start it with --custom-weight-loader"
    f" {LOADER} and --tokenizer-worker-num 1 (the HTTP processes of several workers have no routes"
    ' of a plugin), or set weight_sync.apply = "streamed" (and transport = "auto"); or the admin'
    " key (rollout.admin_key_env) is not the server's"
)


def _post(path: str, timeout_s: float, body: Any = None) -> Call[None]:
    return Call("POST", path, timeout_s, ignore, json=body, admin=True)


def health(timeout_s: float = 30.0) -> Call[None]:
    """Answered with 200 once the scheduler has sent any message, after a second or more. On a
    paused server it hangs, answers 503 after 20 s, and marks the server unhealthy until the next
    one. With ``SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION=0``, which our launcher sets, it is 503
    until the server has warmed up, and 200 ever after.
    """
    return Call("GET", "/health", timeout_s, ignore)


def alive(timeout_s: float = 2.0) -> Call[None]:
    """Answered with 200 while the HTTP process runs, even if paused or the scheduler hangs."""
    return Call("GET", "/model_info", timeout_s, ignore)


def label(timeout_s: float = QUERY_S) -> Call[str]:
    """Return the label of the weights in the HTTP process, which gets it after the scheduler.

    So it is never newer than the label on tokens. (It stays older after an update through SGLang's
    own routes with a ``weight_version`` and a cache flush that fails.)
    """
    path = "/model_info"
    return Call("GET", path, timeout_s, lambda a: str(want(a, "weight_version", str, path)))


def paused(timeout_s: float = 5.0) -> Call[bool]:
    """Return whether generation is paused, by our plugin's route: SGLang has none."""
    path = "/titan_grpo/state"
    return Call("GET", path, timeout_s, lambda a: bool(want(a, "paused", bool, path)), admin=True)


def hello(greeting: Mapping[str, Any], timeout_s: float) -> Call[None]:
    """Send a lane's hello to our plugin."""
    return _post("/titan_grpo/hello", timeout_s, dict(greeting))


def generate(prompt_ids: Sequence[int], sampling: Sampling, timeout_s: float) -> Call[Sampled]:
    """See Dialect. The answer has the version of each token.

    Everything that shapes the distribution is sent explicitly, against a server's
    ``--preferred-sampling-params``. The seed has an effect only if the server runs with
    ``--enable-deterministic-inference``. ``extra_key`` separates the prefix cache by version.
    """
    parameters: dict[str, Any] = {
        "max_new_tokens": sampling.max_tokens,
        "min_new_tokens": 0,
        **sampling.options,
    }
    if sampling.seed is not None:
        parameters["sampling_seed"] = sampling.seed
    body: dict[str, Any] = {
        "input_ids": list(prompt_ids),
        "sampling_params": parameters,
        "return_logprob": True,
        "logprob_start_len": -1,
    }
    if sampling.cache_salt:
        body["extra_key"] = salt(sampling.cache_salt)
    if sampling.routes:
        body["return_routed_experts"] = True
    return Call("POST", GENERATE, timeout_s, parse_sampled, json=body)


def stream(
    prompt_ids: Sequence[int], sampling: Sampling, timeout_s: float, interval: int = INTERVAL
) -> Call[Piece]:
    """Do as ``generate``, with the answer in pieces. Each piece has all tokens so far, unless the
    server runs with ``--incremental-streaming-output``, as ours do."""
    body = generate(prompt_ids, sampling, timeout_s).json
    body["sampling_params"]["stream_interval"] = interval
    return Call("POST", GENERATE, timeout_s, parse_piece, json=body | {"stream": True})


def parse_piece(event: Any) -> Piece:
    """Read one event of a streamed answer, incremental or not: its count of tokens so far gives the
    position of its tokens. (A list of all tokens may have grown before it was sent.)

    Raises HttpRefused for a status code in the finish reason, the status of an unstreamed answer.
    """
    meta = want(event, "meta_info", dict, GENERATE)
    ids = read_ids(event, "output_ids", GENERATE)
    entries = want(meta, "output_token_logprobs", list, GENERATE) if ids else []
    count = int(want(meta, "completion_tokens", int, GENERATE))
    reason = meta.get("finish_reason")
    ended = want(reason, "type", str, GENERATE) if reason is not None else ""
    status = reason.get("status_code") if reason is not None else None
    if ended == "abort" and isinstance(status, int) and status >= HTTPStatus.BAD_REQUEST:
        raise HttpRefused(f"{GENERATE} broke its answer off: {str(reason)[:300]}", status)
    start = max(count - len(ids), 0)
    # An answer that ends in the queue has only the last token, but all log-probabilities.
    ids, entries = (
        ids[: count - start],
        entries[start if len(entries) >= count else 0 :][: count - start],
    )
    spans = version_spans(meta.get("weight_versions"), GENERATE)
    return start, Sampled(ids, tuple(map(_first, entries)), ended, spans, _retractions(meta))


def score(
    token_ids: Sequence[int], timeout_s: float, cache_salt: str = ""
) -> Call[tuple[float, ...]]:
    """See Dialect. SGLang computes the whole sequence without its prefix cache; the salt separates
    the entries that it adds to the cache."""
    count = len(token_ids)
    body: dict[str, Any] = {
        "input_ids": list(token_ids),
        "sampling_params": {"max_new_tokens": 1, "temperature": 1.0},
        "return_logprob": True,
        "logprob_start_len": 0,
    }
    if cache_salt:
        body["extra_key"] = salt(cache_salt)
    return Call("POST", GENERATE, timeout_s, lambda answer: _parse_scores(answer, count), json=body)


def tool_parser(timeout_s: float) -> Call[str]:
    """See Dialect."""
    path = "/server_info"

    def parse(answer: Any) -> str:
        # not ``want``: its error would show the answer, which contains the server's keys
        name = answer.get("tool_call_parser") if isinstance(answer, Mapping) else None
        if not isinstance(name, str):
            raise ServerUnfit(
                f"{path} names no parser of calls of tools: start the server with {TOOL_PARSER}"
                " NAME"
            )
        return name

    return Call("GET", path, timeout_s, parse)


def parse_tool_calls(
    parser: str, token_ids: Sequence[int], text: str, tools: Sequence[Any], timeout_s: float
) -> Call[tuple[str, ToolCalls]]:
    """See Dialect. SGLang parses ``text``."""
    body = {"text": text, "tools": list(tools), "tool_call_parser": parser}

    def parse(answer: Any) -> tuple[str, ToolCalls]:
        calls = want(answer, "calls", list, PARSE)
        found = [(want(call, "name", str, PARSE), call.get("parameters")) for call in calls]
        return tool_calls(want(answer, "normal_text", (str, type(None)), PARSE), found)

    return Call("POST", PARSE, timeout_s, parse, json=body)


def parse_sampled(answer: Any) -> Sampled:
    """Read one answer of /generate. A mismatch of lengths is accepted here: it is a sample to drop,
    not an outage."""
    meta = want(answer, "meta_info", dict, GENERATE)
    ids = read_ids(answer, "output_ids", GENERATE)
    entries = want(meta, "output_token_logprobs", list, GENERATE)
    reason = want(want(meta, "finish_reason", dict, GENERATE), "type", str, GENERATE)
    spans = version_spans(meta.get("weight_versions"), GENERATE)
    return Sampled(
        ids,
        tuple(map(_first, entries)),
        reason,
        spans,
        _retractions(meta),
        routes(meta.get("routed_experts"), GENERATE, "int32", _array),
    )


def _array(data: bytes) -> Any:
    import numpy as np  # imported here: the receiver works without numpy

    return np.frombuffer(data, dtype="<i4")


def _retractions(meta: Mapping[str, Any]) -> int | None:
    count = meta.get("num_retractions")
    return count if isinstance(count, int) else None


def _parse_scores(answer: Any, count: int) -> tuple[float, ...]:
    entries = want(
        want(answer, "meta_info", dict, GENERATE), "input_token_logprobs", list, GENERATE
    )
    if len(entries) != count:
        raise ServerRefused(
            f"{GENERATE} must give {count} log-probabilities of the prompt, got {len(entries)}"
        )
    return tuple(_first(entry) for entry in entries[1:])


def _first(entry: Any) -> float:
    """Return the log-probability in ``[log-probability, token id, text]``."""
    return logprob(entry[0] if isinstance(entry, list) and entry else None)


class SglangControl:
    """ServerControl of SGLang >= 0.5.21 with our plugin."""

    engine = NAME

    def __init__(self, access: ServerAccess) -> None:
        self._access, self._driver = access, access.driver()
        self._run = self._driver.run
        self._deadline_s = access.deadline_s
        self._load_deadline_s = access.load_deadline_s or access.deadline_s
        self._query_s = min(QUERY_S, access.deadline_s)
        self.url = access.url

    def label(self) -> str:
        return self._run(label(self._query_s))

    def stock(self) -> StockRoutes | None:
        return None if self._paused() is not None else StockRoutes(self._access)

    def greet(self, greeting: Mapping[str, Any]) -> None:
        self._tell_plugin(hello(greeting, self._deadline_s))

    def check_tool_parser(self) -> None:
        self._run(tool_parser(self._query_s))

    def paused(self) -> bool:
        """Return whether generation is paused: without our plugin, whether no token comes."""
        found = self._paused()
        if found is not None:
            return found
        if self._answers(Call("GET", "/ready", self._query_s, ignore), (404, 503)):
            return False
        # 503 may also be left from a health check during an earlier pause: only a token tells. (A
        # health check that generates does not: any message of the scheduler makes it succeed, also
        # the answer to a lane's call.)
        try:
            self._run(generate([0], Sampling(1), min(TOKEN_S, self._deadline_s)))
        except ServerUnreachable:
            self._run(alive(self._query_s))
            return True
        return False

    def pause(self) -> None:
        """Freeze the running requests with their KV cache; new ones wait."""
        self._post("/pause_generation", {"mode": "in_place"})

    def drop_kv(self) -> None:
        """Put running requests back into the queue with their tokens but without KV, also on a
        server that is already paused, then empty the prefix cache. ``retract`` is answered before
        it is done; a flush, which is refused while a request has KV, proves that none has."""
        self._post("/pause_generation", {"mode": "retract"})
        try:
            self._post("/flush_cache")
        except HttpRefused as error:
            raise ServerRefused(
                f"{error}: SGLang did not throw its KV cache away: {NOT_RECOMPUTED}"
            ) from error

    def load(self, info: Mapping[str, Any]) -> None:
        """Run a whole update, with our commit, in every scheduler, by our plugin's route. Answered
        when all have finished. Needs a pause."""
        self._tell_plugin(_post("/titan_grpo/load", self._load_deadline_s, dict(info)))

    def finish(self, label: str) -> None:
        """Set the label by our plugin's route, or without it by SGLang's own two calls. A restarted
        server refuses: it has no load, and no update to end. Without the plugin, a restart between
        the two calls goes unnoticed here; the lane's ping after the read-back finds it."""
        own = _post("/titan_grpo/finish", self._deadline_s, {"label": label})
        if self._answers(own, ABSENT):
            return
        self._post("/end_weight_update", {})
        self.relabel(label)

    def relabel(self, label: str) -> None:
        """Set the label, in the scheduler first. SGLang's default would abort all requests."""
        self._post("/update_weight_version", {"new_version": label, "abort_all_requests": False})

    def resume(self) -> None:
        self._post("/continue_generation", {"torch_empty_cache": False})

    def close(self) -> None:
        self._driver.close()

    def _paused(self) -> bool | None:
        """Return whether generation is paused, by our plugin; None without the plugin."""
        try:
            return self._run(paused(self._query_s))
        except HttpRefused as error:
            if error.status not in ABSENT:
                raise
            return None

    def _post(self, path: str, body: Any = None) -> None:
        self._run(_post(path, self._deadline_s, body))

    def _tell_plugin(self, call: Call[None]) -> None:
        """Make a call of our plugin's. Raises ServerUnfit without the plugin."""
        try:
            self._run(call)
        except HttpRefused as error:
            if error.status in ABSENT:
                raise ServerUnfit(f"{error}: {NO_PLUGIN}") from error
            raise

    def _answers(self, call: Call[None], refusals: tuple[int, ...]) -> bool:
        """Return whether a call succeeds: False for ``refusals``. Raises on any other error."""
        try:
            self._run(call)
        except HttpRefused as error:
            if error.status not in refusals:
                raise
            return False
        return True


# pure torch in every layer: PyPI has no compiled kernels for CPU
CPU_ARGUMENTS = ["--device", "cpu", "--attention-backend", "torch_native"]
CPU_ARGUMENTS += ["--sampling-backend", "pytorch", "--grammar-backend", "none"]
CPU_ARGUMENTS += ["--disable-overlap-schedule", "--cuda-graph-backend-decode", "disabled"]
CPU_ARGUMENTS += ["--cuda-graph-backend-prefill", "disabled"]


INPUT_MARGIN = 6
"""SGLang takes inputs of 7 tokens less than its context at most (0.5.21 to 0.5.23): with this many
tokens more than a row it takes all that are shorter than the row."""


def context_length(spec: "ServerSpec") -> int:
    """Return the context to start with: a row and INPUT_MARGIN, as far as the model allows it
    (SGLang refuses to start with more). Without all of the margin the longest inputs are refused.
    """
    return max(spec.max_model_len, min(spec.max_model_len + INPUT_MARGIN, spec.position_limit))


def command(spec: "ServerSpec", keys_path: str = "") -> list[str]:
    """Return the server's command line. ``keys_path``: file with the result of ``keys``, if any."""
    context = context_length(spec)
    out = [spec.python, "-m", "sglang.launch_server", "--model-path", spec.model]
    out += ["--host", spec.host, "--port", str(spec.port)]
    out += ["--dtype", spec.dtype, "--context-length", str(context)]
    out += ["--max-running-requests", str(spec.max_num_seqs), "--log-level-http", "warning"]
    # An idle scheduler polls, at 90 % of a core; with this it waits for messages, at 2 %.
    out += ["--sleep-on-idle"]
    # Stream only new tokens; otherwise each piece has all so far, with their log-probabilities.
    out += ["--incremental-streaming-output"]
    if spec.tensor_parallel > 1:
        out += ["--tp", str(spec.tensor_parallel)]
    if spec.cpu:
        # Without a bound SGLang takes a fraction of the host's memory for the cache, and fills it
        # slowly.
        out += [*CPU_ARGUMENTS, "--max-total-tokens", str(spec.max_num_seqs * context)]
    if spec.weight_transfer:
        out += ["--custom-weight-loader", LOADER]
    if spec.routes:
        out += [RETURN_ROUTES]
    if spec.fp32_head:
        out += ["--enable-fp32-lm-head"]
    if keys_path:
        out += ["--config", keys_path]
    return out + list(spec.args)


def keys(spec: "ServerSpec") -> str:
    """Return the content of the file with the keys, or "". The file must be private. (SGLang's only
    other way is the command line, which every user of the host can read.) YAML, written as JSON."""
    found = {"api-key": spec.api_key, "admin-api-key": spec.admin_key}
    present = {name: value for name, value in found.items() if value}
    return json.dumps(present) if present else ""


def environment(
    base: Mapping[str, str], spec: "ServerSpec", cores: Sequence[int]
) -> dict[str, str]:
    """Return ``base`` with SGLang's variables. ``cores``: those that this process may use."""
    # Otherwise /health generates a token: it would queue behind rollouts, and report a paused
    # server as unhealthy, also afterwards. Either way it answers 503 until the first tokens.
    out = dict(base) | {"SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "0"}
    if spec.cpu:
        out |= {"CUDA_VISIBLE_DEVICES": "", "SGLANG_USE_CPU_ENGINE": "1"}
    if spec.cpu and spec.tensor_parallel > 1:
        # SGLang needs a NUMA node per rank, or this.
        chosen = (str(cores[rank % len(cores)]) for rank in range(spec.tensor_parallel))
        out["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(chosen)
    out |= dict(spec.env)
    if spec.cpu:
        paths = (sglang_cpu.directory(), out.get("PYTHONPATH", ""))
        out["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    return out
