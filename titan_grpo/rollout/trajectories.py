"""Contiguous tokens of an agent's episode, and the text that a call adds to them. Pure."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from titan_grpo.errors import NOT_JSON, DataError
from titan_grpo.rollout.codec import TextCodec
from titan_grpo.rollout.openai_api import Message

MARK = "TheAnswerStandsHere"
"""Placeholder answer, to find the text that a template writes after an answer."""


@dataclass(eq=False, slots=True)
class Trajectory:
    """Contiguous tokens of an episode: a prompt, then the sampled answers and the added context.

    ``messages``: those of its last call and its answer, in the template's form (arguments of tool
    calls parsed, since clients format that JSON differently). ``rendered``: the text of that call's
    prompt. ``part``: index among the group's parts; -1 before it has one. ``delivered``: number of
    that part's tokens that the agent has received. ``tail``: text of the last answer.
    ``finish_reason``: "length" if the run's limit cut the last answer, else "stop": an agent's own
    ``max_tokens`` is part of its way of asking. ``written``: those of ``_written``, once a call
    asked for them.
    """

    prompt: tuple[int, ...]
    part: int = -1
    tools: tuple[Any, ...] = ()
    messages: tuple[Message, ...] = ()
    rendered: str = ""
    delivered: int = 0
    tail: str = ""
    finish_reason: str = ""
    written: tuple[str, str] | None = None


def added_text(
    trajectory: Trajectory, known: Sequence[Message], rendered: str, codec: TextCodec
) -> str | None:
    """Return the text that a call's prompt, ``rendered``, adds to a trajectory, whose messages are
    ``known``. None if the template now renders the earlier messages differently (without their
    reasoning, say).

    Example: "user: hi\\nassistant:" was asked, " yo" was sampled, and the prompt is now "user: hi
    \\nassistant: yo\\nuser: so?\\nassistant:" -> "\\nuser: so?\\nassistant:".
    """
    # Once: with a template that leaves out earlier thoughts no trajectory goes on, and each call of
    # an episode would render the messages of all calls before it.
    trajectory.written = trajectory.written or _written(trajectory, known, codec)
    before, end = trajectory.written
    if not (before and rendered.startswith(before)):
        return None

    def whole(part: str) -> bool:
        # "<" is no part of the token "<|im_end|>": its rest would be encoded as other tokens.
        texts = part, end[len(part) :]
        return sum(_specials(codec, text) for text in texts) == _specials(codec, end)

    # The model may have sampled the end of its turn, or a part of it, itself.
    parts = (end[:n] for n in range(len(end), -1, -1) if trajectory.tail.endswith(end[:n]))
    return end.removeprefix(next(filter(whole, parts))) + rendered[len(before) :]


def _written(trajectory: Trajectory, known: Sequence[Message], codec: TextCodec) -> tuple[str, str]:
    """Return the text of a trajectory's messages, and its end after the last answer; both empty if
    it does not begin with the text of the last call's prompt."""
    marked = *known[:-1], {"role": "assistant", "content": MARK}
    try:
        before, text = (codec.render(each, trajectory.tools, ask=False) for each in (known, marked))
    except DataError:
        return "", ""
    _, mark, end = text.rpartition(MARK)
    same = before.startswith(trajectory.rendered) and mark and before.endswith(end)
    return (before, end) if same else ("", "")


def _specials(codec: TextCodec, text: str) -> int:
    """Return the number of special tokens in a text."""
    return sum(bool(codec.spell((t,))) and not codec.decode((t,)) for t in codec.encode(text))


def for_template(message: Message) -> Message:
    """Return a message with the arguments of its tool calls as objects, as templates expect."""
    if "tool_calls" not in message:
        return message
    calls = []
    for call in message["tool_calls"]:
        function = call["function"]
        calls.append(call | {"function": function | {"arguments": _read(function["arguments"])}})
    return message | {"tool_calls": calls}


def _read(arguments: Any) -> Any:
    try:
        found = json.loads(arguments)
    except (TypeError, *NOT_JSON):
        return arguments
    return found if isinstance(found, dict) else arguments
