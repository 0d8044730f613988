"""Middleware (``--middleware``) of vLLM's HTTP application: cache salts, versions that are
adapters, and two routes that vLLM lacks. ASGI only; imports nothing of vLLM. The plugin refuses a
server with several HTTP processes (``--api-server-count``): only one would see an update.

* A request without a ``cache_salt`` gets one of this server's own that changes with every update of
  the weights. A pause that keeps running requests also keeps the prefix cache: without a salt a
  request would reuse prefixes of older weights. A route whose requests cannot have one is answered
  with 501.
* ``POST /generate``: a prompt as text or as token ids, answered with lists of
  ``{token id: log-probability}``, as by vLLM's former demo server; Atropos's server class uses it.
  Without options it samples from the whole softmax.
* If versions are adapters (``lora.sync = "adapter"``), a request gets the adapter that is newest
  when it arrives, whatever model it names.
* ``GET /generate`` is answered with 405, which shows the doctor that the middleware is installed.
* ``GET /health_generate``: 200 once a token was generated, as in SGLang.
* ``POST /update_weights`` to a server that is not paused is answered with 409. vLLM would allow it,
  and answers would mix two versions; SGLang waits until no request runs.
* A request that waits for an engine which has died is ended: vLLM would wait for it, and not end.

The worker's plugin writes a version that is an adapter in PEFT's format into a folder of this
host's memory. Before the label is set, the middleware makes vLLM load it under the label as its
name, through vLLM's own routes. It is then the model of all new requests; running requests keep
their adapter. An adapter without requests is unloaded, and its files are removed. The files stay
until then: vLLM reads an adapter again that it evicted from its cache.
"""

import asyncio
import atexit
import fcntl
import json
import os
import secrets
import shutil
import tempfile
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from titan_grpo.engines.generation import PLAIN
from titan_grpo.engines.vllm import COMPLETIONS, LORA_ROUTES, MIDDLEWARE, allowed_rank
from titan_grpo.errors import NOT_JSON
from titan_grpo.layout.manifest import Manifest
from titan_grpo.layout.peft import adapter_config, layer_of
from titan_grpo.protocol.messages import Label

Message = Mapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[dict[str, Any], Receive, Send], Awaitable[None]]

SALTED = frozenset(
    {
        COMPLETIONS,
        "/v1/chat/completions",
        "/v1/chat/completions/batch",
        "/v1/responses",
        "/v1/messages",
        "/v1/systemone",
        "/v1/decisions",
        "/inference/v1/generate",
        "/generative_scoring",
        "/invocations",
    }
)
"""Routes that compute tokens, and whose requests may have a ``cache_salt``."""

UNSALTED = frozenset({"/cohere/v2/chat"})
"""Routes that compute tokens, and whose requests cannot have one."""

NO_SALT = (
    "its requests take no cache_salt, so an answer could go on from prefixes of older weights: use"
    " /v1/chat/completions"
)

VARIABLE = "TITAN_GRPO_LORA_FOLDER"
STAGED = "staged"
WEIGHTS = "adapter_model.safetensors"
MEMORY = Path("/dev/shm")
PREFIX = "titan_grpo-lora-"

Shape = tuple[int, ...]

UPDATE = "/update_weights"
UPDATES = frozenset({UPDATE, "/reset_prefix_cache"})
"""Routes that, like those in LABELS, change the salt: prefixes from before may be of other weights.
A needless change costs a prefix, a missing one a wrong token."""


NOT_PAUSED = (
    "weights are loaded while generation is paused, and it is not paused here (is the pause gone to"
    " another server behind the same URL?): requests would go on with two versions; each server"
    " needs a URL of its own"
)

SLEEPS = frozenset({"/sleep", "/release_kv_cache_memory"})
"""Routes that take memory away from an engine."""

NO_SLEEP = (
    "a version would be loaded into memory that a sleeping engine has given up, which ends it, and"
    " level 2 leaves its label and no weights: pause generation (POST /pause), or end the server"
)

DEAD_S = 1.0
"""Seconds between two looks at the engine while a request waits for it."""

LABELS = {"/finish_weight_update": "weight_version", "/update_weight_version": "new_version"}
"""Routes that set the label, and the label's key in their bodies. Recovery uses the second, if a
lane died between load and label."""


class WeightsMiddleware:
    """ASGI application around vLLM's."""

    def __init__(self, app: App) -> None:
        self._app = app
        self._server, self._updates = secrets.token_hex(8), 0
        """Both are in the salts: a store of KV beyond the process has blocks of other servers, and
        of this one before its restart, after as many updates."""
        self._adapters = Adapters()
        self._folders: dict[str, Path] = {}
        """Loaded adapter -> its files."""
        self._loading = asyncio.Lock()
        """Held while vLLM loads or unloads adapters. A lane whose call timed out sets the label by
        another one: it must not pass while the load goes on, and may yet fail."""
        if _has_lora_routes():
            # vLLM makes its middlewares before it takes a request: a trainer's first manifest finds
            # the folder, or no middleware is here.
            _make_folder()
            atexit.register(shutil.rmtree, adapter_folder(), ignore_errors=True)

    async def __call__(self, scope: dict[str, Any], receive: Receive, send: Send) -> None:
        """Handle one request. A body that is no JSON object is passed on for vLLM to refuse."""
        path = (scope.get("method"), _route_of(scope).rstrip("/"))
        if scope["type"] != "http":
            await self._app(scope, receive, send)
        elif path == ("GET", "/health_generate"):
            await _body(receive)
            asked = json.dumps({"prompt": [0], "max_tokens": 1}).encode()
            inner = _at(scope, "POST", COMPLETIONS)
            await self._ask(inner, receive, _Mapped(send, lambda _: {}), asked)
        elif path == ("POST", "/generate"):
            body = await _body(receive)
            try:
                sent = completion_body(json.loads(body))
            except (AttributeError, LookupError, TypeError, *NOT_JSON):
                await self._pass(scope, _replay(body, receive), send)
                return
            asked = json.dumps(sent).encode()
            inner = _at(scope, "POST", COMPLETIONS)
            await self._ask(inner, receive, _Mapped(send, generate_answer), asked)
        elif path == ("GET", "/generate"):
            await _answer(send, 405, {"error": "/generate takes a POST with a prompt"})
        elif path[0] == "POST" and path[1] in SALTED:
            await self._ask(scope, receive, send, await _body(receive))
        elif path[0] == "POST" and path[1] in UNSALTED:
            await _answer(send, 501, {"error": f"{path[1]} is not served here: {NO_SALT}"})
        elif path[0] == "POST" and path[1] in SLEEPS:
            await _answer(send, 409, {"error": NO_SLEEP})
        elif path[0] == "POST" and path[1] in LABELS:
            self._updates += 1
            body = await _body(receive)
            if refusal := await self._load_adapter(scope, body, LABELS[path[1]]):
                await _answer(send, 500, {"error": refusal})
            else:
                await self._pass(scope, _replay(body, receive), send)
        elif path == ("POST", UPDATE) and not await self._paused(scope):
            await _answer(send, 409, {"error": NOT_PAUSED})
        else:
            if path[0] == "POST" and path[1] in UPDATES:
                self._updates += 1
            await self._pass(scope, receive, send)

    async def _pass(self, scope: dict[str, Any], receive: Receive, send: Send) -> None:
        """Pass a request on that computes no tokens.

        vLLM never answers one that waits for an engine which dies, and does not end before it has,
        so that no supervisor starts it again. So cancel it.
        """
        engine = getattr(getattr(scope.get("app"), "state", None), "engine_client", None)
        passed = asyncio.ensure_future(self._app(scope, receive, send))
        try:
            while not (await asyncio.wait([passed], timeout=DEAD_S))[0]:
                if getattr(engine, "errored", False):
                    await _answer(send, 503, {"error": "the engine has ended"})
                    return
            # no deadline: it is done; raises its error
            passed.result()
        finally:
            passed.cancel()

    async def _ask(self, scope: dict[str, Any], receive: Receive, send: Send, body: bytes) -> None:
        """Pass a request for tokens on, with a salt and the newest adapter."""
        adapter = self._adapters.began()
        try:
            body = completed(body, f"weights {self._server} {self._updates}", adapter)
            await self._app(_with_length(scope, body), _replay(body, receive), send)
        finally:
            self._adapters.ended(adapter)
            await self._unload_unused(scope)

    async def _load_adapter(self, scope: dict[str, Any], body: bytes, key: str) -> str:
        """Make vLLM load the adapter that the last commit has written, under the label in
        ``body[key]``. Return why it failed, or "" (also if there is no adapter to load)."""
        staged = adapter_folder() / STAGED
        try:
            name = json.loads(body or b"{}").get(key)
            if Label.parse(name) is None:
                return ""
        except (AttributeError, *NOT_JSON):  # vLLM refuses what is no object, or names no text
            return ""
        async with self._loading:
            if not staged.is_dir():
                return ""
            if name not in self._folders:  # else it is loaded: equal labels mean equal bytes
                place = staged.with_name(f"version-{self._updates}")
                staged.rename(place)
                asked = {"lora_name": name, "lora_path": str(place)}
                status, said = await self._route(scope, "POST", "/v1/load_lora_adapter", asked)
                if status != 200:
                    # Restore it for a retry, which would otherwise set the label without it.
                    place.rename(staged)
                    return f"vLLM did not load this version's adapter (status {status}): {said}"
                self._folders[name] = place
            shutil.rmtree(staged, ignore_errors=True)
            self._adapters.current = name
        await self._unload_unused(scope)
        return ""

    async def _unload_unused(self, scope: dict[str, Any]) -> None:
        async with self._loading:
            for name in self._adapters.unused(self._folders):
                asked = {"lora_name": name}
                status, _ = await self._route(scope, "POST", "/v1/unload_lora_adapter", asked)
                # Else refused (the client sent a wrong API key, say): the next request tries again.
                if status in (200, 404):
                    shutil.rmtree(self._folders.pop(name), ignore_errors=True)

    async def _paused(self, scope: dict[str, Any]) -> bool:
        """Return whether generation is paused: False only if vLLM says so. With any other answer
        the update itself is passed on."""
        status, said = await self._route(scope, "GET", "/is_paused")
        return status != 200 or json.loads(said).get("is_paused") is not False

    async def _route(
        self, scope: dict[str, Any], method: str, path: str, body: dict[str, Any] | None = None
    ) -> tuple[int, str]:
        """Call one of vLLM's own routes with the headers of ``scope``, which have the API key.
        Return status and text (500 characters at most)."""
        data, status, said = b"" if body is None else json.dumps(body).encode(), 0, b""
        sent = [{"type": "http.request", "body": data, "more_body": False}]

        async def receive() -> Message:
            # no deadline: the engine ends the request; there is no client that could disconnect
            return sent.pop() if sent else await asyncio.get_running_loop().create_future()

        async def send(message: Message) -> None:
            nonlocal status, said
            status = message.get("status", status)
            said += message.get("body", b"")

        await self._pass(_with_length(_at(scope, method, path), data), receive, send)
        return status, said.decode(errors="replace")[:500]


def _route_of(scope: dict[str, Any]) -> str:
    """Return the path that vLLM's router matches: without ``--root-path``, with which a proxy may
    pass requests on or without."""
    path, root = str(scope.get("path", "")), str(scope.get("root_path", ""))
    return path.removeprefix(root) if path.startswith(f"{root}/") else path


def _at(scope: dict[str, Any], method: str, route: str) -> dict[str, Any]:
    """Return the scope with another route of vLLM's, whose API key vLLM checks."""
    path = f"{scope.get('root_path', '')}{route}"
    return {**scope, "method": method, "path": path, "raw_path": path.encode()}


async def _answer(send: Send, status: int, body: dict[str, Any]) -> None:
    data = json.dumps(body).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(data))]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": data})


def completed(body: bytes, salt: str, adapter: str) -> bytes:
    """Return a request's body with ``salt``, unless it has one, and with ``adapter`` as its model,
    if there is one. The weights' versions are then not asked for: all tokens are of the adapter.
    (Without the option, and not with false: some routes refuse options that they do not know.)

    >>> completed(b'{"prompt": "a"}', "weights3", "")
    b'{"prompt": "a", "cache_salt": "weights3"}'
    >>> completed(b'{"model": "base", "cache_salt": "x"}', "weights3", "run:4:ab")
    b'{"model": "run:4:ab", "cache_salt": "x"}'
    """
    try:
        request = json.loads(body)
    except NOT_JSON:
        return body
    if not isinstance(request, dict):
        return body
    if not request.get("cache_salt"):
        request["cache_salt"] = salt
    if adapter:
        request["model"] = adapter
        request.pop("return_weight_versions", None)
    return json.dumps(request).encode()


def completion_body(request: dict[str, Any]) -> dict[str, Any]:
    """Turn a body for ``/generate`` into one for ``COMPLETIONS``; other fields have equal names.
    What it does not name is off, as in the demo server, and not as the model's files have it.

    >>> body = completion_body({"prompt": {"prompt_token_ids": [5]}, "top_p": 0.9})
    >>> body["prompt"], body["top_p"], body["top_k"], body["temperature"]
    ([5], 0.9, -1, 1.0)
    """
    prompt = request["prompt"] if "prompt" in request else request["prompt_token_ids"]
    if isinstance(prompt, dict):
        prompt = prompt["prompt_token_ids"]
    # Only the sampled token's log-probability: for others the answer has texts instead of ids.
    asked = {"prompt": prompt, "logprobs": 0, "return_token_ids": True, "stream": False}
    named = {k: v for k, v in request.items() if k != "prompt_token_ids" and v is not None}
    return {"temperature": 1.0, "skip_special_tokens": True, **PLAIN, **named, **asked}


def generate_answer(answer: dict[str, Any]) -> dict[str, Any]:
    """Return ``/generate``'s answer: ``text``, ``logprobs`` ([completion][token] = [{id: nats}]),
    ``finish_reasons``, and on request ``prompt_logprobs`` ([position] = {id: nats})."""
    choices = answer["choices"]
    out: dict[str, Any] = {
        "text": [choice["text"] for choice in choices],
        "finish_reasons": [choice["finish_reason"] for choice in choices],
        "logprobs": [
            [
                [{str(token): logprob}]
                for token, logprob in zip(
                    choice["token_ids"], choice["logprobs"]["token_logprobs"], strict=True
                )
            ]
            for choice in choices
        ],
    }
    prompt = choices[0].get("prompt_logprobs")
    if prompt is not None:
        out["prompt_logprobs"] = [
            None if entry is None else {token: value["logprob"] for token, value in entry.items()}
            for entry in prompt
        ]
    return out


class _Mapped:
    """ASGI ``send`` that collects the whole answer and maps a successful one."""

    def __init__(self, send: Send, mapping: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
        self._send, self._mapping = send, mapping
        self._start: Message = {}
        self._body = b""

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._start = message
            return
        self._body += message.get("body", b"")
        if message.get("more_body"):
            return
        start, body = self._start, self._body
        if start["status"] == 200:
            body = json.dumps(self._mapping(json.loads(body))).encode()
        headers = [(k, v) for k, v in start.get("headers", ()) if k.lower() != b"content-length"]
        headers.append((b"content-length", str(len(body)).encode()))
        await self._send({**start, "headers": headers})
        await self._send({"type": "http.response.body", "body": body})


async def _body(receive: Receive) -> bytes:
    """Return the whole body, or the received part if the client has disconnected."""
    pieces, more = list[bytes](), True
    while more:
        # no deadline: ends with the connection
        message = await receive()
        pieces.append(message.get("body", b""))
        more = message["type"] == "http.request" and message.get("more_body", False)
    return b"".join(pieces)


def _replay(body: bytes, receive: Receive) -> Receive:
    """Return an ASGI receive: ``body`` first, then ``receive``, where vLLM awaits a disconnect."""
    messages = iter([{"type": "http.request", "body": body, "more_body": False}])

    async def replayed() -> Message:
        message = next(messages, None)
        # no deadline: ends when the client disconnects or the request is done
        return message if message is not None else await receive()

    return replayed


def _with_length(scope: dict[str, Any], body: bytes) -> dict[str, Any]:
    replaced = (b"content-length", b"content-type", b"transfer-encoding")
    headers = [(k, v) for k, v in scope["headers"] if k.lower() not in replaced]
    headers += [(b"content-type", b"application/json")]
    return {**scope, "headers": [*headers, (b"content-length", str(len(body)).encode())]}


def choose_folder() -> None:
    """Choose this server's folder, and remove those of servers that were killed. Call it before the
    server's processes start: they inherit it."""
    if VARIABLE in os.environ:
        return
    place = MEMORY if MEMORY.is_dir() else Path(tempfile.gettempdir())
    for folder in place.glob(f"{PREFIX}*"):
        with suppress(OSError):  # it is gone, or another user's, or its server lives
            _remove_unlocked(folder)
    os.environ[VARIABLE] = str(place / f"{PREFIX}{secrets.token_hex(8)}")


def _has_lora_routes() -> bool:
    """Return whether this server has vLLM's routes that load and unload adapters."""
    return os.environ.get(LORA_ROUTES, "").lower() in ("1", "true")


def _remove_unlocked(folder: Path) -> None:
    """Remove a folder. Raises BlockingIOError if a process has locked it."""
    fd = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(folder)
    finally:
        os.close(fd)


def _make_folder() -> None:
    """Make the server's folder, unless it is there, and lock it until this process ends. Its being
    there shows the workers that the middleware will load what they write."""
    if (folder := adapter_folder()).is_dir():
        return
    # It gets its name last: a server that starts now removes folders that are not locked.
    draft = Path(tempfile.mkdtemp(dir=folder.parent))
    # The descriptor stays open, and with it the lock. A lock holds in other pid namespaces too.
    fcntl.flock(os.open(draft, os.O_RDONLY), fcntl.LOCK_SH)
    draft.rename(folder)


def adapter_folder() -> Path:
    """Return the server's folder, which exists if a middleware takes adapters from it."""
    choose_folder()
    return Path(os.environ[VARIABLE])


def write_staged(tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Write an adapter's tensors in PEFT's format into the middleware's folder; B is already
    scaled."""
    draft = adapter_folder() / f"{STAGED}.partial"
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir()
    # clone: safetensors refuses tensors that share storage, as views of one image do
    whole = {name: tensor.clone() for name, tensor in tensors}
    save_file(whole, draft / WEIGHTS, metadata={"format": "pt"})
    rank = next(tensor.shape[0] for name, tensor in whole.items() if ".lora_A." in name)
    targets = {layer_of(name).rpartition(".")[2] for name in whole}
    (draft / "adapter_config.json").write_text(json.dumps(adapter_config(rank, rank, targets)))
    shutil.rmtree(adapter_folder() / STAGED, ignore_errors=True)
    draft.rename(adapter_folder() / STAGED)


def adapter_problem(manifest: Manifest, lora_config: Any, base: Mapping[str, Shape]) -> str:
    """Return why a server with this LoRAConfig (or None) cannot take these adapters, or "".
    ``base``: names and shapes of its checkpoint; empty if unknown."""
    ranks = {s.shape[0] for s in manifest.tensors if ".lora_A." in s.name}
    rank = max(ranks)
    if lora_config is None:
        return (
            f'the trainer sends adapters of rank {rank} (lora.sync = "adapter"), and the server was'
            " started without --enable-lora: start it with --enable-lora --max-lora-rank"
            f" {allowed_rank(rank)}"
        )
    if rank > lora_config.max_lora_rank:
        return (
            f"the trainer's adapters have rank {rank}, and the server takes at most"
            f" {lora_config.max_lora_rank}: start it with --max-lora-rank {allowed_rank(rank)}"
        )
    served = getattr(lora_config, "target_modules", None)
    layers = {layer_of(spec.name).rpartition(".")[2] for spec in manifest.tensors}
    left = sorted(layers - {*(served or ())})
    if served is not None and left:
        return (
            f"vLLM would pass over the adapters of {', '.join(left)} in silence, and its tokens"
            " would be of other weights than the trainer's: start it without --lora-target-modules"
        )
    if not _has_lora_routes():
        return f"adapters are loaded through vLLM's routes: start the server with {LORA_ROUTES}=1"
    if not adapter_folder().is_dir():
        return (
            "adapters are loaded by our middleware, which the server was started without, and its"
            f" answers would be the base model's: start it with --middleware {MIDDLEWARE}"
        )
    for spec in manifest.tensors if base else ():
        shape = base.get(f"{layer_of(spec.name)}.weight")
        side = 1 if ".lora_A." in spec.name else 0
        if shape is None or len(shape) != 2 or shape[side] != spec.shape[side]:
            return (
                f"{spec.name} {spec.shape} is no adapter of the server's model ({shape}): serve the"
                " base model that is trained"
            )
    return ""


class Adapters:
    """Record of the number of requests of each adapter. No I/O."""

    def __init__(self) -> None:
        self.current = ""
        """The adapter that new requests get."""
        self._requests: Counter[str] = Counter()

    def began(self) -> str:
        """Count a new request; return its adapter."""
        self._requests[self.current] += 1
        return self.current

    def ended(self, name: str) -> None:
        """Count the end of a request, or its cancellation."""
        self._requests[name] -= 1
        if not self._requests[name]:
            del self._requests[name]

    def unused(self, loaded: Iterable[str]) -> list[str]:
        """Return the loaded adapters that no request has or will get."""
        return sorted(n for n in loaded if n != self.current and not self._requests[n])
