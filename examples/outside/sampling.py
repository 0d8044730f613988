"""How an environment of its own samples a group on a vLLM server of the run: the standard library's
HTTP, and the server's own routes."""

import json
import os
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


def ask(url, body=None):
    """(status, JSON) of a POST of ``body``, or of a GET without one."""
    key = os.environ.get("VLLM_API_KEY", "")
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, headers)
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read() or b"{}")


def version_of(server):
    """The version that the server holds; None before the run has brought it the first one."""
    # "RUN:VERSION:FINGERPRINT"
    parts = str(ask(f"{server}/weight_info")[1]["weight_version"]).split(":")
    return int(parts[1]) if len(parts) == 3 else None


def sample(server):
    """One completion: its token ids, the log-probability of each, and the share of digits."""
    asked = {"prompt": PROMPT, "max_tokens": TOKENS, "temperature": 1.0, "logprobs": 0}
    asked |= {"return_token_ids": True, **PLAIN}
    choice = ask(f"{server}/v1/completions", asked)[1]["choices"][0]
    tokens = choice["token_ids"]
    reward = sum(token in DIGITS for token in tokens) / len(tokens)
    return tokens, choice["logprobs"]["token_logprobs"], reward
