"""Chat completions in OpenAI's format: parsing of requests, answers, events and errors. Pure.

https://platform.openai.com/docs/api-reference/chat. A field that would change the sampling
distribution is refused by name, since the trainer recomputes the log-probabilities of the samples.
An unsupported field is refused too, instead of ignored without notice.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from titan_grpo.errors import NOT_JSON, TitanGrpoError

Message = dict[str, Any]

POLICY = "policy"
"""Name of the one model that ``GET /v1/models`` lists. A request may name any model."""

NO_KEY = "invalid_api_key"
"""OpenAI's error code for an invalid key."""

TOO_LONG = "context_length_exceeded"
"""OpenAI's error code for a context that is too long: the call's trajectory has no room."""

ROLES = {role: role for role in ("system", "user", "assistant", "tool")} | {"developer": "system"}
"""Role of a message -> role for the template. Other roles are refused: templates drop messages of
unknown roles silently. "developer" is OpenAI's newer name of "system"."""

IGNORED = {"metadata", "prompt_cache_key", "safety_identifier", "service_tier", "store", "user"}
"""Fields without an effect on sampling."""


REASONING = ("reasoning_content", "reasoning")
"""Names of a message's thoughts: clients send one of them, templates read either."""


def _is_tool(tool: Any) -> bool:
    function = tool.get("function") if isinstance(tool, dict) else None
    return isinstance(function, dict) and isinstance(function.get("name"), str)


def _is_stop(value: Any) -> bool:
    texts = [value] if isinstance(value, str) else value
    return isinstance(texts, list) and all(isinstance(text, str) and text for text in texts)


Rule = tuple[Callable[[Any], bool], str]

LIMIT: Rule = (lambda v: type(v) is int and v > 0, "an integer greater than 0")

RULES: dict[str, Rule] = {
    "frequency_penalty": (lambda v: v == 0, "0"),
    "logit_bias": (lambda v: v == {}, "left out"),
    "logprobs": (lambda v: isinstance(v, bool), "true or false"),
    "max_completion_tokens": LIMIT,
    "max_tokens": LIMIT,
    "messages": (lambda v: isinstance(v, list) and v != [], "a list of messages, at least one"),
    "n": (lambda v: v == 1, "1 (a group has as many episodes as rollout.group_size)"),
    "parallel_tool_calls": (lambda v: v is True, "true"),
    "presence_penalty": (lambda v: v == 0, "0"),
    "response_format": (lambda v: v == {"type": "text"}, '{"type": "text"}'),
    "stop": (_is_stop, "a text or a list of texts"),
    "stream": (lambda v: isinstance(v, bool), "true or false"),
    "tool_choice": (lambda v: v in ("auto", "none"), '"auto" or "none"'),
    "tools": (lambda v: isinstance(v, list) and all(map(_is_tool, v)), "a list of functions"),
    "top_logprobs": (lambda v: v == 0, "0"),
    "top_p": (lambda v: v == 1, "1 (the trainer recomputes the whole distribution)"),
}
"""Field -> test of a supported value, and its description."""


class Refused(TitanGrpoError):
    """A request is refused, with ``status`` and OpenAI's error object."""

    def __init__(self, status: int, text: str, param: str = "", code: str = "") -> None:
        super().__init__(text)
        self.status, self.param, self.code = status, param, code

    @property
    def body(self) -> dict[str, Any]:
        kind = "authentication_error" if self.status == 401 else "invalid_request_error"
        param, code = self.param or None, self.code or None
        return {"error": {"message": str(self), "type": kind, "param": param, "code": code}}


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """One call of an agent. ``messages``: in the form of ``plain``; ``tools``: as sent.
    ``max_tokens``: 0 for the run's limit."""

    model: str
    messages: tuple[Message, ...]
    tools: tuple[Any, ...] = ()
    max_tokens: int = 0
    stop: tuple[str, ...] = ()
    stream: bool = False
    usage: bool = False
    """Whether a streamed answer ends with the token counts."""
    logprobs: bool = False
    calls: bool = False
    """Whether the answer may call tools."""


@dataclass(frozen=True, slots=True)
class ChatAnswer:
    """The policy's answer. ``logprobs``: (text of a token, its log-probability), natural log."""

    id: str
    created: int
    message: Message
    finish_reason: str
    prompt_tokens: int
    completion_tokens: int
    logprobs: tuple[tuple[str, float], ...] = ()


def parse(body: bytes, temperature: float) -> ChatRequest:
    """Return the request in a body. Raises Refused, which names the field, its rule and its value.

    ``temperature``: the run's, the only one accepted.
    """
    try:
        # Not the standard library's decoder: it accepts lone surrogates (an escape such as
        # "\\ud800" alone), which neither the tokenizer nor a request to an engine can encode.
        given = msgspec.json.decode(body)
    except NOT_JSON as error:
        raise Refused(400, f"the body must be JSON in UTF-8: {error}") from error
    if not isinstance(given, dict):
        raise Refused(400, f"the body must be an object, got {given!r:.100}")
    # A null field counts as left out.
    fields = {name: value for name, value in given.items() if value is not None}
    fields.setdefault("messages", None)
    rules = RULES | {"temperature": (lambda v: v == temperature, f"{temperature:g}, the run's")}
    for name, (possible, rule) in rules.items():
        if name in fields and not possible(fields[name]):
            raise _refusal(name, rule, fields[name])
    for name in sorted(fields.keys() - rules.keys() - IGNORED - {"model", "stream_options"}):
        raise _refusal(name, "left out", fields[name])
    stop, tools = fields.get("stop", []), fields.get("tools", [])
    limits = [fields[name] for name in ("max_completion_tokens", "max_tokens") if name in fields]
    options = fields.get("stream_options", {})
    return ChatRequest(
        str(fields.get("model", POLICY)),
        tuple(plain(each, f"messages[{i}]") for i, each in enumerate(fields["messages"])),
        tuple(tools),
        min(limits, default=0),
        (stop,) if isinstance(stop, str) else tuple(stop),
        fields.get("stream", False),
        isinstance(options, dict) and bool(options.get("include_usage")),
        fields.get("logprobs", False),
        bool(tools) and fields.get("tool_choice", "auto") == "auto",
    )


def plain(message: Any, place: str = "message") -> Message:
    """Return a message in the canonical form for comparison and the template: role, content as
    text, and tool_calls, reasoning, tool_call_id and name if present. Raises Refused.

    Clients add empty fields (``refusal: null``), and send content as parts of text.

    >>> plain({"role": "user", "content": [{"type": "text", "text": "hi"}], "name": None})
    {'role': 'user', 'content': 'hi'}
    """
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise _refusal(place, "an object with a role", message)
    if message["role"] not in ROLES:
        raise _refusal(f"{place}.role", f"one of {', '.join(ROLES)}", message["role"])
    if message.get("function_call") is not None:
        raise _refusal(f"{place}.function_call", "left out (tool_calls)", message["function_call"])
    content = message.get("content")
    if isinstance(content, list):
        if not all(isinstance(p, dict) and isinstance(p.get("text"), str) for p in content):
            raise _refusal(f"{place}.content", "a text, or parts of text", content)
        content = "".join(part["text"] for part in content)
    # Only the assistant's message (tool calls alone) and a tool's result may lack content.
    asks = ROLES[message["role"]] in ("system", "user")
    if not isinstance(content, str if asks else str | None):
        raise _refusal(f"{place}.content", "a text, or parts of text", content)
    out: Message = {"role": ROLES[message["role"]], "content": content or ""}
    calls = message.get("tool_calls") or []
    try:
        called = [
            tool_call(c["id"], c["function"]["name"], c["function"]["arguments"]) for c in calls
        ]
    except (TypeError, KeyError) as error:
        rule = "calls with an id and a function of name and arguments"
        raise _refusal(f"{place}.tool_calls", rule, calls) from error
    if called:
        out["tool_calls"] = called
    if reasoning := next((message[k] for k in REASONING if message.get(k)), None):
        if not isinstance(reasoning, str):
            raise _refusal(f"{place}.reasoning", "a text", reasoning)
        out |= dict.fromkeys(REASONING, reasoning)
    return out | {k: message[k] for k in ("tool_call_id", "name") if message.get(k) is not None}


def tool_call(id: str, name: str, arguments: str) -> dict[str, Any]:
    """Return a tool call in OpenAI's format; ``arguments``: a text of JSON."""
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


def answer_body(request: ChatRequest, answer: ChatAnswer) -> dict[str, Any]:
    """Return the body of an answer that is not streamed."""
    message = answer.message
    if "tool_calls" in message and not message["content"]:
        message = message | {"content": None}
    choice = {"index": 0, "message": message, "finish_reason": answer.finish_reason}
    choice["logprobs"] = _logprobs(request, answer)
    head = {"id": answer.id, "object": "chat.completion", "created": answer.created}
    return head | {"model": request.model, "choices": [choice], "usage": _usage(answer)}


def answer_events(request: ChatRequest, answer: ChatAnswer) -> bytes:
    """Return an answer as server-sent events: role, content, calls, finish reason, [DONE]."""
    head = {"id": answer.id, "object": "chat.completion.chunk", "created": answer.created}
    head["model"] = request.model

    def event(delta: dict[str, Any], reason: str | None = None, logprobs: Any = None) -> bytes:
        choice = {"index": 0, "delta": delta, "finish_reason": reason, "logprobs": logprobs}
        usage = {"usage": None} if request.usage else {}
        return _event(head | {"choices": [choice]} | usage)

    events = [event({"role": "assistant", "content": ""})]
    logprobs = _logprobs(request, answer)
    if answer.message["content"] or logprobs:
        events.append(event({"content": answer.message["content"]}, logprobs=logprobs))
    for index, call in enumerate(answer.message.get("tool_calls", ())):
        events.append(event({"tool_calls": [{"index": index} | call]}))
    events.append(event({}, answer.finish_reason))
    if request.usage:
        events.append(_event(head | {"choices": [], "usage": _usage(answer)}))
    return b"".join([*events, b"data: [DONE]\n\n"])


def model_body(created: int) -> dict[str, Any]:
    """Return the answer to ``GET /v1/models/{name}``, the same for any name."""
    return {"id": POLICY, "object": "model", "created": created, "owned_by": "titan_grpo"}


def models_body(created: int) -> dict[str, Any]:
    """Return the answer to ``GET /v1/models``."""
    return {"object": "list", "data": [model_body(created)]}


def _refusal(name: str, rule: str, value: Any) -> Refused:
    code = "unsupported_value"
    return Refused(400, f"{name} must be {rule}, got {value!r:.200}", name, code)


def _logprobs(request: ChatRequest, answer: ChatAnswer) -> dict[str, Any] | None:
    if not request.logprobs:
        return None

    def each(text: str, logprob: float) -> dict[str, Any]:
        return {
            "token": text,
            "logprob": logprob,
            # A token with a part of a character has no text of its own, so its bytes are unknown.
            "bytes": None if "\ufffd" in text else list(text.encode()),
            "top_logprobs": [],
        }

    return {"content": [each(*one) for one in answer.logprobs], "refusal": None}


def _usage(answer: ChatAnswer) -> dict[str, int]:
    prompt, completion = answer.prompt_tokens, answer.completion_tokens
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
    }


def _event(content: Sequence[Any] | Mapping[str, Any]) -> bytes:
    return b"data: " + json.dumps(content).encode() + b"\n\n"
