"""How an environment of its own samples a group on a vLLM server of the run: the standard library's
HTTP, and the server's own routes."""

import json
import os
import time
import urllib.error
import urllib.request

PROMPT = [1, 40, 41, 42]
TOKENS = 12
DIGITS = range(21, 31)
"""Token ids of the digits in the quickstart's model."""

PLAIN = {"top_p": 1.0, "top_k": -1, "min_p": 0.0}
PLAIN |= {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
"""The trainer recomputes the whole softmax; vLLM would take what is not named from the model's
generation_config.json."""


PATIENCE_S = float(os.environ.get("PATIENCE_S", "300"))
"""Seconds without an answer after which an environment ends. Server, rollout process and run may be
killed and started again meanwhile, which takes as long as loading a model."""


def patiently(call, *args):
    """``call(*args)``, again and again while nothing answers it, or no version is there."""
    until = time.monotonic() + PATIENCE_S
    while True:
        try:
            return call(*args)
        except OSError:
            if time.monotonic() > until:
                raise
            time.sleep(0.5)


def ask(url, body=None):
    """(status, JSON) of a POST of ``body``, or of a GET without one. Raises OSError without an
    answer, and for one that is no JSON: a proxy's page, whose server is away."""
    key = os.environ.get("VLLM_API_KEY", "")
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, headers)
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            status, content = answer.status, answer.read()
    except urllib.error.HTTPError as error:
        status, content = error.code, error.read() or b"{}"
    try:
        return status, json.loads(content)
    except ValueError:
        raise OSError(f"{url} answered {status} and no JSON") from None


def version_of(server):
    """The version that the server holds. Raises OSError before the run has brought it one, also
    after the server was started again."""
    # "RUN:VERSION:FINGERPRINT"
    parts = str(ask(f"{server}/weight_info")[1].get("weight_version")).split(":")
    if len(parts) != 3:
        raise OSError(f"{server} holds no version of a run")
    return int(parts[1])


def begun(server):
    """Return once the server holds a version: before the first one, the run may load for long."""
    said = False
    while True:
        try:
            version_of(server)
            return
        except OSError as error:
            if not said:
                print(f"waiting for a run at {server}: {error}", flush=True)
            said = True
            time.sleep(0.5)


def sample(server):
    """One completion: its token ids, the log-probability of each, and the share of digits. Raises
    OSError if the server ends: the next one's answer would be of other weights."""
    asked = {"prompt": PROMPT, "max_tokens": TOKENS, "temperature": 1.0, "logprobs": 0}
    asked |= {"return_token_ids": True, **PLAIN}
    status, answer = ask(f"{server}/v1/completions", asked)
    if status != 200:
        raise OSError(f"{server} answered {status}: {answer}")
    choice = answer["choices"][0]
    tokens = choice["token_ids"]
    reward = sum(token in DIGITS for token in tokens) / len(tokens)
    return tokens, choice["logprobs"]["token_logprobs"], reward
