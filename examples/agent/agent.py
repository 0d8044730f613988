# An agent with a calculator, through the openai client, on the quickstart's model. From the root:
#
#   scripts/quickstart.sh --out outputs/agent --steps 24 \
#     --rollout.agent examples.agent.agent:solve \
#     --rollout.dataset examples/agent/data.jsonl \
#     --rollout.tool_parser examples.agent.agent:every_answer_is_a_call \
#     --rollout.prompts_per_step 4 --rollout.max_completion_tokens 128 --training.seq_len 192

import json

from openai import OpenAI

TURNS, MAX_TOKENS = 3, 12
DIGITS = set("0123456789")

CALCULATOR = {
    "type": "function",
    "function": {
        "name": "calculator",
        "description": "Adds numbers.",
        "parameters": {"type": "object", "properties": {"sum": {"type": "string"}}},
    },
}


def calculate(text):
    """The sum in a text such as "12+34", or that it is none."""
    try:
        return str(sum(int(number) for number in text.split("+")))
    except ValueError:
        return "?"


def solve(base_url, api_key, row):
    """Ask, run the tool that the model calls, and tell it the result, three times.

    The reward is the share of digits in what it asked the calculator: what a model that has never
    seen a text can learn in 20 steps.
    """
    client = OpenAI(base_url=base_url, api_key=api_key)
    messages = [{"role": "user", "content": row["question"]}]
    written = ""
    for _ in range(TURNS):
        reply = client.chat.completions.create(
            model="policy", messages=messages, tools=[CALCULATOR], max_tokens=MAX_TOKENS
        )
        message = reply.choices[0].message
        messages.append(message)
        for call in message.tool_calls:
            asked = json.loads(call.function.arguments)["sum"]
            written += asked
            result = {"role": "tool", "tool_call_id": call.id, "content": calculate(asked)}
            messages.append(result)
    return sum(letter in DIGITS for letter in written) / max(len(written), 1)


def every_answer_is_a_call(text):
    """The tiny model's format of tool calls: all that it writes is a sum for the calculator."""
    return "", [("calculator", {"sum": text})]
