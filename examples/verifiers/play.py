# A verifiers environment, unchanged, whose model is the one that is trained. In an environment
# of Python of its own (scripts/setup.sh --only verifiers), beside a run with these keys:
#
#   .venv-verifiers/bin/python examples/verifiers/play.py http://127.0.0.1:8500
#
#   [rollout]
#   agent = "outside"
#   agent_address = "127.0.0.1:8500"
#   agent_key_env = "AGENT_KEY"          # or left out; for an address that others reach

import asyncio
import json
import os
import sys
import time
import urllib.error
import urllib.request

import verifiers as vf
from datasets import Dataset
from openai import AsyncOpenAI, AuthenticationError
from verifiers.clients import OpenAIChatCompletionsClient

AT_ONCE = 32
KEY = os.environ.get("AGENT_KEY")
PATIENCE_S = float(os.environ.get("PATIENCE_S", "300"))
"""Seconds without an answer after which it ends. The run, or its rollout process, may be killed and
started again meanwhile, which takes as long as loading the model."""
NO_ANSWER = ("EmptyModelResponseError", "InvalidModelResponseError", "OverlongPromptError")
"""Errors of verifiers that are the model's own: the episode has its rubric's reward."""


class NoEpisodes(Exception):
    """The address is another one's, or needs another key."""


def digits(completion):
    """The share of digits in the answer."""
    said = completion[-1]["content"] if completion else ""
    return sum(letter.isdigit() for letter in said) / max(len(said), 1)


def environment():
    """Any other will do: vf.load_environment("...")."""
    rows = [{"question": f"{n}+{n}=?", "answer": str(2 * n)} for n in range(10, 50)]
    return vf.SingleTurnEnv(dataset=Dataset.from_list(rows), rubric=vf.Rubric(funcs=[digits]))


def ask(url, body):
    """(status, JSON) of a POST."""
    data, headers = json.dumps(body).encode(), {"Content-Type": "application/json"}
    if KEY:
        headers["Authorization"] = f"Bearer {KEY}"
    try:
        with urllib.request.urlopen(urllib.request.Request(url, data, headers), timeout=600) as got:
            return got.status, json.load(got)
    except urllib.error.HTTPError as error:
        return error.code, {}


async def patiently(url, body):
    """``ask``, again and again while nothing answers it."""
    until = time.monotonic() + PATIENCE_S
    while True:
        try:
            return await asyncio.to_thread(ask, url, body)
        except OSError:
            if time.monotonic() > until:
                raise
            await asyncio.sleep(0.5)


async def play(run, env, rows):
    """Take an episode, play it with its key, post its reward; again and again."""
    while True:
        status, taken = await patiently(f"{run}/episodes", {})
        if status in (429, 503):  # none waits; the run is ending
            await asyncio.sleep(0.5)
            continue
        if status != 200:
            why = (
                'that is no run with agent = "outside", or its agent_key_env has another AGENT_KEY'
            )
            raise NoEpisodes(f"{run}/episodes answered {status}: {why}")
        key, row = taken["id"], rows[taken["row"]["index"] % len(rows)]
        client = OpenAIChatCompletionsClient(
            AsyncOpenAI(base_url=f"{run}/v1", api_key=key, timeout=600)
        )
        try:
            played = await env.run_rollout(row, client, "policy", {"max_tokens": 12})
        except AuthenticationError:  # the episode is over, or has begun again with another key
            continue
        error = played.get("error")
        if error is None or error["error"] in NO_ANSWER:  # else the run's task_timeout_s ends it
            reward = {"reward": played["reward"]}
            await patiently(f"{run}/episodes/{key}/reward", reward)


async def begun(run):
    """Return once the run listens."""
    said = False
    while True:
        try:
            return await asyncio.to_thread(ask, run, {})
        except OSError as error:
            if not said:
                print(f"waiting for a run at {run}: {error}", flush=True)
            said = True
            await asyncio.sleep(1)


async def main(run):
    """Play until neither the run nor one that goes on from it answers."""
    env = environment()
    rows = env.get_dataset().to_list()
    await begun(run)
    try:
        await asyncio.gather(*(play(run, env, rows) for _ in range(AT_ONCE)))
    except OSError:
        print("the run has ended")
    except NoEpisodes as error:
        sys.exit(str(error))


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
