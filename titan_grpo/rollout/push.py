"""Groups that external environments push: the schema, the check of what came, and who is let in
when. Pure.

``POST /groups`` takes a body of ``SCHEMA``'s form (published at ``GET /schema``). All of its groups
are taken, or none.

==== =====================================================================================================================
202  taken; ``duplicates`` of them were here before (same ``id``) and are not taken again
400  not JSON, or not of the schema's form: the text names the place, the rule and what was there
409  made by a version that the trainer can no longer use, or that does not exist yet
413  more than ``httpd.MAX_BYTES``
429  the trainer has enough waiting: come again after ``Retry-After`` seconds
503  the run is ending
==== =====================================================================================================================

The HTTP door of the rollout process: environments push groups here. Threads that parse; the loop
decides (ingest.py)."""

import asyncio
import json
import math
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as LateError
from dataclasses import dataclass, field
from typing import Any

from titan_grpo.errors import DataError
from titan_grpo.protocol.admission import too_stale
from titan_grpo.rollout.httpd import RETRY_AFTER_S, HttpServer, Reply, Request
from titan_grpo.samples import Completion, Group, Prompt

LARGEST_LOGPROB = 1e-3
"""Rounding may make a certain token's log-probability that large; the mark of a masked one (1.0 in
Atropos) is larger."""

REMEMBERED_IDS = 100_000
"""Ids kept to recognise a group that is sent again."""

_TOKENS = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}
_COMPLETION: dict[str, Any] = {
    "type": "object",
    "additionalProperties": False,
    "required": ["tokens", "logprobs", "reward"],
    "properties": {
        "tokens": _TOKENS | {"description": "what follows the prompt"},
        "logprobs": {
            "type": "array",
            "items": {"type": "number"},
            "description": (
                "the engine's log-probability of each token, natural logarithm, as many as tokens;"
                " any number where sampled is false"
            ),
        },
        "reward": {"type": "number"},
        "sampled": {
            "type": "array",
            "items": {"type": "boolean"},
            "description": (
                "which tokens the policy sampled, as many as tokens; the others are context."
                " Default: all"
            ),
        },
        "zero_advantage": {
            "type": "boolean",
            "description": "do not learn from it; its reward still counts in the group's mean",
        },
        "finish_reason": {"type": "string"},
    },
}
_GROUP: dict[str, Any] = {
    "type": "object",
    "additionalProperties": False,
    "required": ["policy_version", "prompt_tokens", "completions"],
    "properties": {
        "id": {
            "type": "string",
            "minLength": 1,
            "description": "a group with an id that was taken before is not taken again",
        },
        "policy_version": {
            "type": "integer",
            "minimum": 0,
            "description": "oldest version that made a token of the group",
        },
        "prompt_tokens": _TOKENS,
        "completions": {"type": "array", "items": _COMPLETION, "minItems": 1},
        "source": {"type": "string", "description": "who made it, for the records"},
    },
}
SCHEMA: dict[str, Any] = {
    "$schema": "https://json-schema.org/draft/2020-12/schema",
    "title": "titan_grpo groups, version 1",
    "type": "object",
    "additionalProperties": False,
    "required": ["groups"],
    "properties": {"groups": {"type": "array", "items": _GROUP, "minItems": 1}},
}
"""JSON schema of a body of ``POST /groups``."""


@dataclass(frozen=True, slots=True)
class Incoming:
    """A group as it came; ``id`` is empty where it has none."""

    id: str
    group: Group


def parse(body: bytes) -> list[Incoming]:
    """The groups of a body. Raises DataError with the place in the body, the rule, and what was
    there."""
    try:
        content = json.loads(body)
    except ValueError as error:
        raise DataError(f"the body must be JSON: {error}") from error
    _conform(content, SCHEMA, "body")
    return [
        _incoming(group, f"body.groups[{number}]") for number, group in enumerate(content["groups"])
    ]


_KINDS: dict[str, Callable[[Any], bool]] = {
    "object": lambda value: isinstance(value, dict),
    "array": lambda value: isinstance(value, list),
    "string": lambda value: isinstance(value, str),
    "boolean": lambda value: isinstance(value, bool),
    "integer": lambda value: isinstance(value, int) and not isinstance(value, bool),
    "number": lambda value: (
        isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    ),
}


def _conform(value: Any, schema: Mapping[str, Any], place: str) -> None:
    """The part of JSON schema that ``SCHEMA`` uses. Raises DataError for the first thing that does
    not conform."""
    if not _KINDS[schema["type"]](value):
        raise DataError(f"{place} must be of type {schema['type']}, got {str(value)[:100]!r}")
    if schema["type"] == "object":
        _conform_object(value, schema, place)
    elif schema["type"] == "array":
        _conform_array(value, schema, place)
    elif "minimum" in schema and value < schema["minimum"]:
        raise DataError(f"{place} must be {schema['minimum']} or greater, got {value}")
    elif "minLength" in schema and not value:
        raise DataError(f"{place} must not be empty")


def _conform_object(value: Mapping[str, Any], schema: Mapping[str, Any], place: str) -> None:
    known = schema["properties"]
    for name in schema["required"]:
        if name not in value:
            raise DataError(f"{place} must have {name!r}, got {sorted(value)}")
    for name, inner in value.items():
        if name not in known:
            raise DataError(f"{place}.{name} is not a field; known are {sorted(known)}")
        _conform(inner, known[name], f"{place}.{name}")


def _conform_array(value: Sequence[Any], schema: Mapping[str, Any], place: str) -> None:
    if len(value) < schema.get("minItems", 0):
        raise DataError(f"{place} must not be empty")
    items = schema["items"]
    # Lists of tokens are long: the kind of all is looked at first, and their bound by the least of
    # them.
    plain = items["type"] in ("integer", "number", "boolean") and all(
        map(_KINDS[items["type"]], value)
    )
    if plain and (not value or "minimum" not in items or min(value) >= items["minimum"]):
        return
    for number, inner in enumerate(value):
        _conform(inner, items, f"{place}[{number}]")


def _incoming(data: Mapping[str, Any], place: str) -> Incoming:
    version, source = data["policy_version"], data.get("source", "pushed")
    completions = []
    for number, item in enumerate(data["completions"]):
        here = f"{place}.completions[{number}]"
        tokens, logprobs, sampled = item["tokens"], item["logprobs"], item.get("sampled", [])
        for name, values in (("logprobs", logprobs), ("sampled", sampled or tokens)):
            if len(values) != len(tokens):
                raise DataError(
                    f"{here}.{name} must be as many as tokens ({len(tokens)}), got {len(values)}"
                )
        if sampled and True not in sampled:
            raise DataError(f"{here}.sampled must have a true one: nothing could be learnt from it")
        bad = next(
            (
                at
                for at, lp in enumerate(logprobs)
                if lp > LARGEST_LOGPROB and (not sampled or sampled[at])
            ),
            None,
        )
        if bad is not None:
            raise DataError(
                f"{here}.logprobs[{bad}] must be 0 or less, got {logprobs[bad]}: is it a"
                " probability?"
            )
        completions.append(
            Completion(
                token_ids=tuple(tokens),
                logprobs=tuple(map(float, logprobs)),
                finish_reason=item.get("finish_reason", "external"),
                version_first=version,
                version_last=version,
                server=source,
                reward=float(item["reward"]),
                sampled=() if all(sampled) else tuple(sampled),
                zero_advantage=item.get("zero_advantage", False),
            )
        )
    return Incoming(
        data.get("id", ""), Group(Prompt(0, tuple(data["prompt_tokens"])), tuple(completions))
    )


@dataclass(slots=True)
class Desk:
    """Lets groups in, or says why not. ``capacity`` bounds the completions that wait for the
    trainer."""

    capacity: int
    max_staleness: int
    trainer_version: int
    newest_version: int
    """What the trainer has made or a server holds: nothing can be newer."""
    closing: bool = False
    _ids: OrderedDict[str, None] = field(default_factory=OrderedDict)

    def take(self, incoming: Sequence[Incoming], waiting: int) -> tuple[Reply, list[Group]]:
        """Reply and the groups to be used, all or none; ``waiting`` completions were let in and are
        not used yet."""
        if self.closing:
            return Reply(503, {"error": "the run is ending"}, RETRY_AFTER_S), []
        for number, item in enumerate(incoming):
            version = item.group.version
            if version > self.newest_version:
                text = (
                    f"groups[{number}].policy_version must exist, the newest is"
                    f" {self.newest_version}, got {version}"
                )
                return Reply(409, {"error": text}), []
            if too_stale(version, self.trainer_version, self.max_staleness):
                oldest = self.trainer_version - self.max_staleness
                text = (
                    f"groups[{number}].policy_version must be {oldest} or later"
                    f" (rollout.max_staleness), got {version}"
                )
                return Reply(409, {"error": text}), []
        if waiting >= self.capacity:
            return (
                Reply(
                    429,
                    {"error": f"{waiting} completions wait for the trainer already"},
                    RETRY_AFTER_S,
                ),
                [],
            )
        taken = []
        for item in incoming:
            if item.id in self._ids:
                continue
            if item.id:
                self._ids[item.id] = None
                if len(self._ids) > REMEMBERED_IDS:
                    self._ids.popitem(last=False)
            taken.append(item.group)
        return Reply(202, {"taken": len(taken), "duplicates": len(incoming) - len(taken)}), taken

    def status(self, waiting: int) -> dict[str, Any]:
        """What an environment wants to know before it makes groups."""
        return {
            "trainer_version": self.trainer_version,
            "oldest_usable_version": max(self.trainer_version - self.max_staleness, 0),
            "waiting": waiting,
            "capacity": self.capacity,
        }


DECIDE_S = 10.0
"""How long the loop may take to decide, in seconds."""


class Door:
    """Listens from construction to ``close`` at ``host:port`` (port 0: any); ``take`` and
    ``status`` run in ``loop``.

    With a ``key`` every request needs ``Authorization: Bearer KEY``. Raises ConfigError where the
    address can not be bound.
    """

    def __init__(
        self,
        address: str,
        key: str,
        loop: asyncio.AbstractEventLoop,
        take: Callable[[list[Incoming]], Reply],
        status: Callable[[], Reply],
    ) -> None:
        self._loop, self._take, self._status = loop, take, status
        self._server = HttpServer(address, key, self._answer, "rollout.push_address")
        self.address = self._server.address

    def close(self) -> None:
        """Take no further request. Idempotent."""
        self._server.close()

    def _answer(self, request: Request) -> Reply:
        """Reply to one request, in a connection's thread."""
        method, path = request.method, request.path
        if (method, path) == ("GET", "/schema"):
            return Reply(200, SCHEMA)
        if (method, path) == ("GET", "/status"):
            return self._decided(self._status)
        if (method, path) != ("POST", "/groups"):
            return Reply(
                404,
                {
                    "error": (
                        f"there is GET /schema, GET /status and POST /groups, got {method} {path}"
                    )
                },
            )
        try:
            incoming = parse(request.body)
        except DataError as error:
            return Reply(400, {"error": str(error)})
        return self._decided(lambda: self._take(incoming))

    def _decided(self, decide: Callable[[], Reply]) -> Reply:
        future: Future[Reply] = Future()

        def run() -> None:
            # Not after the sender was told that nothing was decided.
            if future.set_running_or_notify_cancel():
                future.set_result(decide())

        try:
            self._loop.call_soon_threadsafe(run)
            return future.result(DECIDE_S)
        except (LateError, RuntimeError):  # the loop is busy, or closed
            future.cancel()
            return Reply(
                503,
                {"error": "the rollout process does not answer; the run may be ending"},
                RETRY_AFTER_S,
            )
