"""vLLM's HTTP side, as a middleware (``--middleware``): requests without a salt, and the two routes
that vLLM lacks and environments ask for. ASGI only; imports nothing of vLLM. For servers with one
HTTP process: of several (``--api-server-count``) only one would learn of an update.

* A request that names no ``cache_salt`` is given one that changes with every update of the weights.
  A pause that keeps running requests keeps the prefix cache too, and without a salt a request would
  meet the prefixes of older weights there.
* ``POST /generate``: a prompt as text or as token ids, answered with lists of
  ``{token id: log-probability}``, as vLLM's former demo server had it and Atropos's server class
  asks for it.
* ``GET /health_generate``: 200 once a token was generated, as SGLang has it.
"""

import json
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

Message = Mapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[dict[str, Any], Receive, Send], Awaitable[None]]

COMPLETIONS = "/v1/completions"
SALTED = frozenset({COMPLETIONS, "/v1/chat/completions", "/v1/responses", "/inference/v1/generate"})
"""Routes whose requests may name a ``cache_salt``."""

UPDATES = frozenset({"/update_weights", "/finish_weight_update", "/reset_prefix_cache"})
"""Routes after which the prefixes of before are those of other weights. One too many costs a
prefix, one too few a wrong token."""


class WeightsMiddleware:
    """An ASGI application around vLLM's."""

    def __init__(self, app: App) -> None:
        self._app = app
        self._updates = 0

    async def __call__(self, scope: dict[str, Any], receive: Receive, send: Send) -> None:
        """One request. Bodies that are no JSON object are passed on as they are, for vLLM to
        refuse."""
        path = (scope.get("method"), scope.get("path", "").rstrip("/"))
        if scope["type"] != "http":
            await self._app(scope, receive, send)
        elif path == ("GET", "/health_generate"):
            await _body(receive)
            asked = self._completion(scope, receive, {"prompt": [0], "max_tokens": 1})
            await self._app(*asked, _Mapped(send, lambda _: {}))
        elif path == ("POST", "/generate"):
            body = await _body(receive)
            try:
                sent = completion_body(json.loads(body))
            except (AttributeError, TypeError, ValueError):
                await self._app(scope, _replay(body, receive), send)
                return
            asked = self._completion(scope, receive, sent)
            await self._app(*asked, _Mapped(send, generate_answer))
        elif path[0] == "POST" and path[1] in SALTED:
            body = salted(await _body(receive), self._salt)
            await self._app(_with_length(scope, body), _replay(body, receive), send)
        else:
            if path[0] == "POST" and path[1] in UPDATES:
                self._updates += 1
            await self._app(scope, receive, send)

    @property
    def _salt(self) -> str:
        return f"weights{self._updates}"

    def _completion(
        self, scope: dict[str, Any], receive: Receive, body: dict[str, Any]
    ) -> tuple[dict[str, Any], Receive]:
        """The same request as one to ``COMPLETIONS``, so that its rules and keys hold."""
        data = salted(json.dumps(body).encode(), self._salt)
        moved = {**scope, "method": "POST", "path": COMPLETIONS, "raw_path": COMPLETIONS.encode()}
        return _with_length(moved, data), _replay(data, receive)


def salted(body: bytes, salt: str) -> bytes:
    """A request's body with ``salt``, unless it names one.

    >>> salted(b'{"prompt": "a"}', "weights3")
    b'{"prompt": "a", "cache_salt": "weights3"}'
    """
    try:
        request = json.loads(body)
    except ValueError:
        return body
    if not isinstance(request, dict) or request.get("cache_salt"):
        return body
    return json.dumps(request | {"cache_salt": salt}).encode()


def completion_body(request: dict[str, Any]) -> dict[str, Any]:
    """The body for ``COMPLETIONS`` of one for ``/generate``; its other fields have the same names.

    >>> completion_body({"prompt": {"prompt_token_ids": [5]}, "max_tokens": 2})["prompt"]
    [5]
    """
    prompt = request["prompt"] if "prompt" in request else request["prompt_token_ids"]
    if isinstance(prompt, dict):
        prompt = prompt["prompt_token_ids"]
    # Only the sampled token's log-probability: of others the answer has the text and not the id.
    asked = {"prompt": prompt, "logprobs": 0, "return_token_ids": True, "stream": False}
    return {k: v for k, v in request.items() if k != "prompt_token_ids"} | asked


def generate_answer(answer: dict[str, Any]) -> dict[str, Any]:
    """``/generate``'s answer: ``text``, ``logprobs`` ([completion][token] = [{id: nats}]),
    ``finish_reasons``, and ``prompt_logprobs`` ([position] = {id: nats}) where they were asked
    for."""
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
    """A ``send`` that waits for the whole answer and maps it if it is a success."""

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
    """The whole body; what came of it if the client left."""
    body, more = b"", True
    while more:
        # no deadline: the server ends a connection that is silent
        message = await receive()
        body += message.get("body", b"")
        more = message["type"] == "http.request" and message.get("more_body", False)
    return body


def _replay(body: bytes, receive: Receive) -> Receive:
    """``body``, then what ``receive`` brings: vLLM waits there for the client to leave."""
    messages = iter([{"type": "http.request", "body": body, "more_body": False}])

    async def replayed() -> Message:
        message = next(messages, None)
        # no deadline: until the client leaves, or the request is done
        return message if message is not None else await receive()

    return replayed


def _with_length(scope: dict[str, Any], body: bytes) -> dict[str, Any]:
    replaced = (b"content-length", b"content-type", b"transfer-encoding")
    headers = [(k, v) for k, v in scope["headers"] if k.lower() not in replaced]
    headers += [(b"content-type", b"application/json")]
    return {**scope, "headers": [*headers, (b"content-length", str(len(body)).encode())]}
