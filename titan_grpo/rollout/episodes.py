"""Episodes of agents: which of their calls go on from which tokens, and what they were answered. No
I/O; all methods run in the rollout process's loop.

An episode is a list of trajectories, each of which becomes one completion. A call whose history is
that of a trajectory, and which the chat template only appends to, goes on from the trajectory's
tokens; any other one begins a new trajectory.
"""

import asyncio
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from titan_grpo.errors import DataError
from titan_grpo.rollout.codec import TextCodec
from titan_grpo.rollout.openai_api import (
    NO_KEY,
    TOO_LONG,
    ChatAnswer,
    ChatRequest,
    Message,
    Refused,
)
from titan_grpo.rollout.partial import Partial

MARK = "TheAnswerStandsHere"
"""Stands for an answer, to see what a template writes after one."""


@dataclass(eq=False, slots=True)
class Trajectory:
    """Tokens in a row: a prompt, then what was sampled and what was added to it.

    ``messages``: those of its last call and the answer to it, as the template gets them: clients
    write the JSON of a tool call's arguments in their own way. ``rendered``: the text of that
    call's prompt. ``part``: its place among the group's parts; -1 before it has one. ``told``: how
    many tokens of that part its agent knows of. ``tail``: the end of these, as text.
    """

    prompt: tuple[int, ...]
    part: int = -1
    tools: tuple[Any, ...] = ()
    messages: tuple[Message, ...] = ()
    rendered: str = ""
    told: int = 0
    tail: str = ""
    finish_reason: str = ""
    busy: bool = True
    """A call of it waits for its answer."""


@dataclass(eq=False, slots=True)
class Call:
    """A call that waits for its answer. ``context``: what it adds to its trajectory's part."""

    request: ChatRequest
    trajectory: Trajectory
    context: tuple[int, ...]
    rendered: str
    answer: "asyncio.Future[ChatAnswer]"


@dataclass(eq=False, slots=True)
class Episode:
    """One run of an agent; ``key`` names it. ``over`` has its reward, or the agent's error."""

    key: str
    number: int
    """Place in its group."""
    row: dict[str, Any]
    over: "asyncio.Future[float]"
    trajectories: list[Trajectory] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)
    _changed: "asyncio.Future[None] | None" = None

    def ask(self, codec: TextCodec, request: ChatRequest, budget: int) -> Call:
        """Take a call. Raises Refused where its messages cannot be rendered, or its trajectory has
        no room."""
        try:
            messages = [for_template(message) for message in request.messages]
            rendered = codec.render(messages, request.tools)
        except DataError as error:
            raise Refused(400, str(error), "messages") from error
        going = self._continued(codec, request, rendered, messages)
        context: tuple[int, ...] = ()
        if going is not None:
            trajectory, context = going
            if trajectory.told + len(context) >= budget:
                raise Refused(
                    400,
                    f"the episode must fit rollout.max_completion_tokens = {budget} after its"
                    f" prompt: it has {trajectory.told} tokens, this call adds {len(context)}",
                    "messages",
                    TOO_LONG,
                )
            trajectory.busy = True
        else:
            trajectory = Trajectory(codec.encode(rendered), tools=request.tools)
            if not self.trajectories:
                trajectory.part = self.number
            self.trajectories.append(trajectory)
        answer = asyncio.get_running_loop().create_future()
        call = Call(request, trajectory, context, rendered, answer)
        self.calls.append(call)
        self.notice()
        return call

    def _continued(
        self,
        codec: TextCodec,
        request: ChatRequest,
        rendered: str,
        messages: Sequence[Message],
    ) -> tuple[Trajectory, tuple[int, ...]] | None:
        """The trajectory that a call goes on from, the longest of several, and what it adds."""
        for trajectory in sorted(self.trajectories, key=lambda t: -len(t.messages)):
            count = len(trajectory.messages)
            same = trajectory.tools == request.tools and not trajectory.busy
            if same and trajectory.messages == tuple(messages[:count]) and trajectory.told:

                def render(messages: Sequence[Message], tools: Any = request.tools) -> str:
                    return codec.render(messages, tools, ask=False)

                added = added_text(trajectory, render, messages[:count], rendered)
                if added is not None:
                    return trajectory, codec.encode(added)
        return None

    def answered(self, call: Call, told: int, tail: str, answer: ChatAnswer) -> None:
        """Answer a call; ``told``: tokens of its trajectory's part, whose end reads ``tail``."""
        trajectory = call.trajectory
        trajectory.messages = tuple(map(for_template, (*call.request.messages, answer.message)))
        trajectory.rendered, trajectory.told, trajectory.tail = call.rendered, told, tail
        trajectory.finish_reason = "length" if answer.finish_reason == "length" else "stop"
        trajectory.busy = False
        self.calls.remove(call)
        if not call.answer.done():
            call.answer.set_result(answer)

    def lost(self, parts: Sequence[Partial]) -> bool:
        """Whether tokens that the agent knows of are no longer among the group's parts."""
        return any(
            trajectory.told
            and (
                trajectory.part >= len(parts)
                or len(parts[trajectory.part].token_ids) < trajectory.told
            )
            for trajectory in self.trajectories
        )

    def end(self, text: str) -> None:
        """Take no further call; those that wait are refused with ``text``."""
        if not self.over.done():
            self.over.cancel()
        for call in self.calls:
            if not call.answer.done():
                call.answer.set_exception(Refused(401, text, code=NO_KEY))
        self.calls.clear()
        self.notice()

    def changed(self) -> "asyncio.Future[None]":
        """Done at the next call, and at the end."""
        if self._changed is None or self._changed.done():
            self._changed = asyncio.get_running_loop().create_future()
        return self._changed

    def notice(self) -> None:
        """Let those know who wait for a change."""
        if self._changed is not None and not self._changed.done():
            self._changed.set_result(None)


def added_text(
    trajectory: Trajectory,
    render: Callable[[Sequence[Message]], str],
    known: Sequence[Message],
    rendered: str,
) -> str | None:
    """What a call's prompt, ``rendered``, adds to a trajectory, whose messages are ``known``. None
    where the template writes what was there before in another way now (without the earlier
    thoughts, say).

    Example: "user: hi\\nassistant:" was asked, " yo" was sampled, and the prompt is now "user: hi
    \\nassistant: yo\\nuser: so?\\nassistant:" -> "\\nuser: so?\\nassistant:".
    """
    try:
        before = render(known)
        marked = render([*known[:-1], {"role": "assistant", "content": MARK}])
    except DataError:
        return None
    _, mark, end = marked.rpartition(MARK)
    same = before.startswith(trajectory.rendered) and rendered.startswith(before)
    if not (same and mark and before.endswith(end)):
        return None
    # The model may have written the end of its turn, or a part of it, itself.
    written = next(n for n in range(len(end), -1, -1) if trajectory.tail.endswith(end[:n]))
    return end[written:] + rendered[len(before) :]


def for_template(message: Message) -> Message:
    """With the arguments of tool calls as objects, as templates expect them."""
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
    except (TypeError, ValueError):
        return arguments
    return found if isinstance(found, dict) else arguments
