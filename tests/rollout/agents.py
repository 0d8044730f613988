"""Agents of the openai client, and what an engine says to them."""

import threading
from collections.abc import Callable

from tests.rollout.conftest import answer
from titan_grpo.titan.tiny import EOS

ADD = {"type": "function", "function": {"name": "add", "parameters": {}}}
HELLO = {"role": "user", "content": "hello"}


def says(codec, *texts: str, log: list[list[int]] | None = None) -> Callable:
    """An engine that says one text after the other, each with an end token, and then again."""
    lock, count = threading.Lock(), [0]

    def behaviour(body):
        with lock:
            text = texts[count[0] % len(texts)]
            count[0] += 1
            if log is not None:
                log.append(body["prompt"])
        ids = [*codec.encode(text), EOS][: body["max_tokens"]]
        reason = "stop" if ids[-1] == EOS else "length"
        return answer(ids, [-1.0] * len(ids), reason)

    return behaviour


def client_of(base_url, api_key):
    """A client that repeats nothing by itself."""
    import openai

    return openai.OpenAI(base_url=base_url, api_key=api_key, max_retries=0, timeout=60.0)


def talker(turns=3, **options):
    """An agent of so many turns; returns 1."""

    def agent(base_url, api_key, row):
        client, messages = client_of(base_url, api_key), [HELLO]
        for turn in range(turns):
            reply = client.chat.completions.create(model="any", messages=messages, **options)
            messages.append(reply.choices[0].message)
            messages.append({"role": "user", "content": f"and {turn}?"})
        return 1.0

    return agent
