"""Agents of the openai client, and what an engine says to them."""

import http.client
import json
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from tests.rollout.conftest import Behaviour, answer
from titan_grpo.rollout.task_runner import Codec
from titan_grpo.titan.tiny import EOS

if TYPE_CHECKING:
    import openai
    from openai.types.chat import ChatCompletionFunctionToolParam, ChatCompletionUserMessageParam

ADD: "ChatCompletionFunctionToolParam" = {
    "type": "function",
    "function": {"name": "add", "parameters": {}},
}
HELLO: "ChatCompletionUserMessageParam" = {"role": "user", "content": "hello"}


def says(codec: Codec, *texts: str, log: list[list[int]] | None = None) -> Behaviour:
    """An engine that says one text after the other, each with an end token, and then again."""
    lock, count = threading.Lock(), [0]

    def behaviour(body: dict[str, Any]) -> tuple[int, Any]:
        with lock:
            text = texts[count[0] % len(texts)]
            count[0] += 1
            if log is not None:
                log.append(body["prompt"])
        ids = [*codec.encode(text), EOS][: body["max_tokens"]]
        reason = "stop" if ids[-1] == EOS else "length"
        return answer(ids, [-1.0] * len(ids), reason)

    return behaviour


def client_of(base_url: str, api_key: str) -> "openai.OpenAI":
    """A client that repeats nothing by itself."""
    import openai

    return openai.OpenAI(base_url=base_url, api_key=api_key, max_retries=0, timeout=60.0)


def send(
    address: str, method: str, path: str, key: str = "", body: dict[str, Any] | None = None
) -> tuple[int, Any]:
    """Status and answer of a request to the agents' endpoint."""
    connection = http.client.HTTPConnection(address, timeout=60)
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    data = None if body is None else json.dumps(body).encode()
    connection.request(method, path, data if method == "GET" else data or b"", headers)
    reply = connection.getresponse()
    return reply.status, json.loads(reply.read())


def taken(address: str, key: str = "") -> dict[str, Any]:
    """An episode of the agents' endpoint, once one is offered."""
    while (found := send(address, "POST", "/episodes", key))[0] == 429:
        pass  # the group has not begun
    return dict(found[1])


def asking(
    base_url: str, api_key: str, retries: int | None = None, messages: Sequence[Any] = (HELLO,)
) -> http.client.HTTPConnection:
    """A connection whose call was sent, with OpenAI's count of retries unless it is None."""
    address, _, path = base_url.removeprefix("http://").partition("/")
    connection = http.client.HTTPConnection(address, timeout=60)
    headers = {"Authorization": f"Bearer {api_key}"}
    if retries is not None:
        headers["x-stainless-retry-count"] = str(retries)
    body = json.dumps({"model": "any", "messages": [*messages]})
    connection.request("POST", f"/{path}/chat/completions", body, headers)
    return connection


Agent = Callable[[str, str, Any], float]


def caller(*requests: dict[str, Any], seen: list[Any] | None = None, reward: float = 1.0) -> Agent:
    """An agent that makes these calls one after the other, of HELLO where one names no messages;
    ``seen`` gets their answers, or the chunks of a streamed one."""

    def agent(base_url: str, api_key: str, row: Any) -> float:
        ask: Any = client_of(base_url, api_key).chat.completions.create
        for request in requests:
            answer = ask(**{"model": "any", "messages": [HELLO], **request})
            if seen is not None:
                seen.extend(answer if request.get("stream") else [answer])
        return reward

    return agent


def saying(*texts: str) -> Iterator[dict[str, Any]]:
    """Calls for ``caller``: each of one message of the user."""
    for text in texts:
        yield {"messages": [{"role": "user", "content": text}]}


def talker(turns: int = 3, keys: list[str] | None = None, **options: Any) -> Agent:
    """An agent of so many turns; returns 1. ``keys`` gets the key of each episode."""

    def agent(base_url: str, api_key: str, row: Any) -> float:
        if keys is not None:
            keys.append(api_key)
        client = client_of(base_url, api_key)
        messages: list[Any] = [HELLO]
        for turn in range(turns):
            reply = client.chat.completions.create(model="any", messages=messages, **options)
            messages.append(reply.choices[0].message)
            messages.append({"role": "user", "content": f"and {turn}?"})
        return 1.0

    return agent
