"""The middleware around vLLM's HTTP application: salts, two routes, no update without a pause."""

import ast
import asyncio
import json
import runpy
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from titan_grpo.engines import vllm
from titan_grpo.engines.generation import PLAIN
from titan_grpo.receive import vllm_http
from titan_grpo.receive.vllm_http import SALTED, UNSALTED, WeightsMiddleware, _body, completed

LARGE_PIECES = 16 << 10

CHOICE = {
    "text": "ab",
    "finish_reason": "length",
    "token_ids": [7, 8],
    "logprobs": {"token_logprobs": [-0.5, -1.0]},
    "prompt_logprobs": [None, {"6": {"logprob": -2.0, "rank": 1}}],
}


class Inner:
    """Where vLLM stands in ``app``: keeps what comes, and answers ``status`` with ``answer`` in two
    pieces."""

    def __init__(self, answer: Any = None, status: int = 200) -> None:
        self.answer, self.status = json.dumps(answer).encode(), status
        self.app = WeightsMiddleware(self)
        self.came: list[tuple[str, Any]] = []

    async def __call__(self, scope: Mapping[str, Any], receive: Any, send: Any) -> None:
        body, more = b"", True
        while more:
            message = await receive()
            body, more = body + message["body"], message["more_body"]
        headers = {k.decode(): v.decode() for k, v in scope["headers"]}
        assert headers.get("content-length", str(len(body))) == str(len(body))
        assert headers["authorization"] == "Bearer key", "vLLM checks it"
        self.came.append((scope["path"], json.loads(body) if body else None))
        await send({"type": "http.response.start", "status": self.status, "headers": []})
        for piece, more in ((self.answer[:3], True), (self.answer[3:], False)):
            await send({"type": "http.response.body", "body": piece, "more_body": more})


def ask(inner: Inner, method: str, path: str, body: Any = None, **more: Any) -> tuple[int, Any]:
    """(status, answer) of one request, whose body comes in two pieces."""
    return asyncio.run(asked(inner, method, path, body, **more))


async def asked(
    inner: Inner, method: str, path: str, body: Any = None, **more: Any
) -> tuple[int, Any]:
    """See ``ask``. ``more``: of the scope."""
    data = json.dumps(body).encode() if body is not None else b""
    pieces = [(data[:2], True), (data[2:], False)]
    sent: list[Mapping[str, Any]] = []

    async def receive() -> dict[str, Any]:
        piece, more = pieces.pop(0)
        return {"type": "http.request", "body": piece, "more_body": more}

    async def send(message: Mapping[str, Any]) -> None:
        sent.append(message)

    headers = [(b"authorization", b"Bearer key")]
    scope = {"type": "http", "method": method, "path": path, "headers": headers, **more}
    await inner.app(scope, receive, send)
    return sent[0]["status"], json.loads(b"".join(message["body"] for message in sent[1:]))


def salt_of(inner: Inner, **body: Any) -> str:
    ask(inner, "POST", "/v1/completions", {"prompt": [5], **body})
    salt: str = inner.came[-1][1]["cache_salt"]
    return salt


def test_launched_servers_name_it_as_it_is() -> None:
    assert f"{WeightsMiddleware.__module__}.{WeightsMiddleware.__name__}" == vllm.MIDDLEWARE


def test_a_request_that_waits_for_an_engine_which_dies_is_answered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Before, the server stopped listening and waited for it for ever, so nobody started another
    one."""
    monkeypatch.setattr(vllm_http, "DEAD_S", 0.01)
    engine, inner = SimpleNamespace(errored=False), Inner()

    async def waiting(scope: Any, receive: Any, send: Any) -> None:
        engine.errored = True
        # no deadline: what the test is about
        await asyncio.get_running_loop().create_future()

    inner.app = WeightsMiddleware(waiting)
    app = SimpleNamespace(state=SimpleNamespace(engine_client=engine))
    said = ask(inner, "GET", "/weight_info", app=app)
    assert said == (503, {"error": "the engine has ended"})


def test_a_request_without_a_salt_gets_one_of_the_weights_that_are_served() -> None:
    inner = Inner({})
    before = salt_of(inner)
    assert salt_of(inner) == before
    assert salt_of(inner, cache_salt="own") == "own"
    ask(inner, "POST", "/update_weights", "x")
    assert salt_of(inner) not in (before, "")


def test_salts_of_two_servers_or_of_one_before_and_after_its_restart_differ() -> None:
    """A KV connector would give the one blocks of the other's weights."""
    assert salt_of(Inner({})) != salt_of(Inner({}))


@pytest.mark.parametrize(
    "path",
    [
        "/v1/messages",
        "/v1/chat/completions/batch",
        "/v1/systemone",
        "/v1/decisions",
        "/generative_scoring",
        "/invocations",
    ],
)
def test_requests_of_other_apis_get_the_salt_too(path: str) -> None:
    inner = Inner({})
    salt = salt_of(inner)
    ask(inner, "POST", path, {"model": "base"})
    assert inner.came[1:] == [(path, {"model": "base", "cache_salt": salt})]


def test_an_api_whose_requests_take_no_salt_is_refused_with_the_one_to_use() -> None:
    inner = Inner({})
    status, answer = ask(inner, "POST", "/cohere/v2/chat", {"messages": []})
    assert (status, inner.came) == (501, [])
    assert "/v1/chat/completions" in answer["error"]


@pytest.mark.parametrize("path", ["/sleep", "/release_kv_cache_memory"])
def test_a_route_that_takes_memory_from_the_engine_is_refused_with_what_to_do(path: str) -> None:
    inner = Inner({})
    status, answer = ask(inner, "POST", path, {})
    assert (status, inner.came) == (409, [])
    assert "POST /pause" in answer["error"]


NEWER = {"/v1/decisions"}
"""Since vLLM 0.33."""

OTHER_FOLDERS = {
    "pooling": "models that generate nothing",
    "rl": "pauses and weights",
    "scale_out/derender": "tokens to text",
    "scale_out/render": "text to tokens",
    "serve/dev": "the server itself",
    "serve/elastic_ep": "its size",
    "serve/fault_tolerance": "its engines",
    "serve/lora": "its adapters",
    "serve/profile": "its profiler",
    "serve/tokenize": "text to tokens and back",
    "speech_to_text": "models with audio, which no run trains",
}
"""Folders of vLLM's entry points whose routes compute no tokens of a run's model."""

OTHER_ROUTES = {
    "/abort_requests",
    "/cohere/v2/chat/render",
    "/inference/v1/abort_requests",
    "/ping",
    "/v1/messages/count_tokens",
    "/v1/responses/{response_id}/cancel",
}
"""Routes of the other folders that compute none."""


def post_routes(folder: Path) -> Iterator[str]:
    """Paths of the routes with a body that a folder's sources name."""
    for path in folder.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Attribute)
                and node.func.attr in ("post", "put", "api_route", "add_api_route", "websocket")
                and node.args
                and isinstance(first := node.args[0], ast.Constant)
                and isinstance(first.value, str)
            ):
                yield first.value


def test_each_route_of_the_installed_vllm_that_computes_tokens_is_salted_or_refused(
    vllm_python: str,
) -> None:
    environment = Path(vllm_python).parents[1]
    (entrypoints,) = environment.glob("lib/python3*/site-packages/vllm/entrypoints")
    every = set(post_routes(entrypoints))
    others = {route for name in OTHER_FOLDERS for route in post_routes(entrypoints / name)}
    ours = SALTED | UNSALTED
    assert every | NEWER >= ours | OTHER_ROUTES
    assert every - others - OTHER_ROUTES - ours == set()


@pytest.mark.parametrize(
    ("said", "status", "passed"),
    [({"is_paused": True}, 200, True), ({"is_paused": False}, 200, False), ({}, 401, True)],
    ids=["paused", "not paused", "refused by vLLM, as the update will be"],
)
def test_an_update_is_passed_on_unless_generation_goes_on(
    said: dict[str, bool], status: int, passed: bool
) -> None:
    inner = Inner(said, status)
    answered, answer = ask(inner, "POST", "/update_weights", {"update_info": {}})
    assert inner.came[0] == ("/is_paused", None)
    assert [path for path, _ in inner.came[1:]] == (["/update_weights"] if passed else [])
    assert answered == (status if passed else 409)
    assert passed or "not paused" in answer["error"]


@pytest.mark.parametrize("prefix", ["/v", ""], ids=["passed on", "taken off by a proxy"])
def test_a_request_meets_the_same_rules_under_a_root_path(prefix: str) -> None:
    inner = Inner({"is_paused": False})
    root = {"root_path": "/v"}
    assert ask(inner, "POST", f"{prefix}/update_weights", {}, **root)[0] == 409
    ask(inner, "POST", f"{prefix}/v1/completions", {"prompt": [5]}, **root)
    assert [path for path, _ in inner.came] == ["/v/is_paused", f"{prefix}/v1/completions"]
    assert inner.came[1][1]["cache_salt"]


def test_generate_is_a_completion_whose_tokens_come_by_their_ids() -> None:
    inner = Inner({"choices": [CHOICE, CHOICE]})
    asked = {"prompt": {"prompt_token_ids": [5, 6]}, "logprobs": 0, "n": 2, "max_tokens": 2}
    status, answer = ask(inner, "POST", "/generate", asked)
    [(path, body)] = inner.came
    assert (status, path) == (200, "/v1/completions")
    assert (body["prompt"], body["n"], body["max_tokens"]) == ([5, 6], 2, 2)
    assert answer == {
        "text": ["ab", "ab"],
        "finish_reasons": ["length", "length"],
        "logprobs": [[[{"7": -0.5}], [{"8": -1.0}]]] * 2,
        "prompt_logprobs": [None, {"6": -2.0}],
    }


def test_generate_samples_from_the_whole_softmax_unless_a_request_names_something_else() -> None:
    """vLLM would take the rest from the model's generation_config.json."""
    inner = Inner({"choices": [CHOICE]})
    asked = {"prompt": "a", "temperature": 0.5, "min_p": 0.1, "top_p": None}
    ask(inner, "POST", "/generate", asked)
    [(_, body)] = inner.came
    assert (body["temperature"], body["min_p"], body["top_k"], body["top_p"]) == (0.5, 0.1, -1, 1.0)
    ask(inner, "POST", "/generate", {"prompt": "a"})
    assert inner.came[1][1].items() >= {"temperature": 1.0, **PLAIN}.items()


def test_the_example_of_an_environment_samples_from_the_whole_softmax(root: Path) -> None:
    example = runpy.run_path(str(root / "examples" / "outside" / "sampling.py"))
    assert example["PLAIN"] == PLAIN


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [("POST", "/generate", {"prompt": "a"}), ("GET", "/health_generate", None)],
)
def test_a_refusal_of_vllm_is_passed_on(
    method: str, path: str, body: dict[str, str] | None
) -> None:
    inner = Inner({"error": "no"}, 401)
    assert ask(inner, method, path, body) == (401, {"error": "no"})


def test_what_is_no_prompt_is_left_to_vllm_and_a_get_shows_that_the_middleware_is_there() -> None:
    inner = Inner({"detail": "Not Found"}, 404)
    bodies: tuple[object, ...] = ({}, {"prompt": {}}, [], None)
    for body in bodies:
        assert ask(inner, "POST", "/generate", body) == (404, {"detail": "Not Found"})
    assert ask(inner, "GET", "/generate")[0] == 405
    assert len(inner.came) == 4


@pytest.mark.parametrize("body", [{"weight_version": 7}, {"weight_version": []}, [], None])
def test_what_is_no_label_is_left_to_vllm(body: object) -> None:
    inner = Inner({"detail": "a string is wanted"}, 422)
    assert ask(inner, "POST", "/finish_weight_update", body)[0] == 422
    assert inner.came == [("/finish_weight_update", body)]


@pytest.mark.parametrize(
    "body", [b"no JSON", b"\xe5", b"[" * 99_999], ids=["text", "bytes", "deep"]
)
def test_a_body_that_cannot_be_read_is_left_to_vllm(body: bytes) -> None:
    assert completed(body, "salt", "adapter") == body


def test_a_large_body_in_many_pieces_takes_the_time_of_its_bytes() -> None:
    left, began = LARGE_PIECES, time.monotonic()

    async def receive() -> dict[str, Any]:
        nonlocal left
        left -= 1
        return {"type": "http.request", "body": bytes(512), "more_body": left > 0}

    assert len(asyncio.run(_body(receive))) == LARGE_PIECES << 9
    # The event loop serves nothing else meanwhile. Each piece once: 0.1 s.
    assert time.monotonic() - began < 5.0


def test_health_generate_has_a_token_generated() -> None:
    inner = Inner({"choices": [CHOICE]})
    assert ask(inner, "GET", "/health_generate") == (200, {})
    assert inner.came[0][1]["max_tokens"] == 1
