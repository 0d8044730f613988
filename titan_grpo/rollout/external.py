"""Sources of groups from outside, in the rollout process: their common base, and the source that
environments push to (form of a body, admission, HTTP server). atropos.py has the other source.

They take and send the dispatcher's messages. A group from outside cannot be made again, so one that
is given back is skipped. The number of waiting groups is bounded here (``Used`` frees places), to
keep them fresh.

``POST /groups`` takes a ``Body`` (``GET /schema`` has its JSON schema), all of its groups or none.

==== ======================================================================================
202  taken, except for ``duplicates`` groups whose ``id`` was taken before
400  not JSON, against the schema, or longer than ``training.seq_len``: the text names the
     place, the rule and the value
409  made by a version that is too stale for the trainer, or that does not exist yet
413  more than ``httpd.MAX_BYTES``
429  enough groups wait for the trainer: retry after ``Retry-After`` seconds
503  the loop is busy, or the run is ending: retry after ``Retry-After`` seconds
==== ======================================================================================
"""

import asyncio
import json
import os
import re
import sys
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Annotated, Any

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

from titan_grpo.config.rollout import required_key
from titan_grpo.engines.generation import TokenId
from titan_grpo.errors import NOT_JSON, DataError
from titan_grpo.protocol.admission import too_stale
from titan_grpo.protocol.messages import Label, ServerState
from titan_grpo.rollout import messages
from titan_grpo.rollout.httpd import RETRY_AFTER_S, HttpServer, Reply, Request
from titan_grpo.rollout.messages import RolloutSpec, Ticket
from titan_grpo.samples import EXTERNAL, LARGEST_REWARD, Completion, Group, Prompt, sound_logprobs

REMEMBERED_IDS = 100_000
"""Number of ids kept to detect duplicates; the oldest are evicted first."""

DECIDE_S = 10.0
"""Deadline of the loop's decision on a request, in seconds."""

Send = Callable[[messages.FromWorker], None]

Count = Annotated[int, Meta(ge=0)]
Tokens = Annotated[tuple[TokenId, ...], Meta(min_length=1)]
Reward = Annotated[float, Meta(ge=-LARGEST_REWARD, le=LARGEST_REWARD)]


class PushedCompletion(Struct, frozen=True, forbid_unknown_fields=True):
    """One completion of a pushed group."""

    tokens: Annotated[Tokens, Meta(description="what follows the prompt")]
    logprobs: Annotated[
        tuple[float, ...],
        Meta(
            description="the engine's log-probability of each token, natural logarithm, as many as"
            " tokens; any number where sampled is false"
        ),
    ]
    reward: Reward
    sampled: Annotated[
        tuple[bool, ...],
        Meta(
            description="which tokens the policy sampled, as many as tokens; the others are"
            " context. Default: all"
        ),
    ] = ()
    zero_advantage: Annotated[
        bool, Meta(description="do not train on it; its reward still counts in the group's mean")
    ] = False
    finish_reason: Annotated[
        str,
        Meta(
            description='"length" if a length limit ended it (grpo.mask_truncated leaves it out);'
            ' "stop" if nothing did. Default: unknown, a completion of'
            " rollout.max_completion_tokens counts as ended by it"
        ),
    ] = EXTERNAL


class PushedGroup(Struct, frozen=True, forbid_unknown_fields=True):
    """One pushed group."""

    policy_version: Annotated[
        Count, Meta(description="oldest version that made a token of the group")
    ]
    prompt_tokens: Tokens
    completions: Annotated[tuple[PushedCompletion, ...], Meta(min_length=1)]
    id: (
        Annotated[
            str,
            Meta(
                min_length=1,
                description="a group with an id that was taken before is not taken again",
            ),
        ]
        | UnsetType
    ) = UNSET
    source: Annotated[str, Meta(description="who made it, for the records")] = "pushed"


class Body(Struct, frozen=True, forbid_unknown_fields=True):
    """Body of ``POST /groups``."""

    groups: Annotated[tuple[PushedGroup, ...], Meta(min_length=1)]


SCHEMA: dict[str, Any] = {
    "$schema": "https://json-schema.org/draft/2020-12/schema",
    "title": "titan_grpo groups, version 1",
    **msgspec.json.schema(Body),
}
"""JSON schema of a body of ``POST /groups``."""


@dataclass(frozen=True, slots=True)
class Incoming:
    """A parsed group; ``id`` is empty if it has none."""

    id: str
    group: Group


def parse(body: bytes, row_tokens: int = sys.maxsize) -> list[Incoming]:
    """Return the groups of a body, none of a completion that is longer than ``row_tokens`` with its
    prompt. Raises DataError with the place in the body, the rule, and the value."""
    try:
        groups = msgspec.json.decode(body, type=Body).groups
    except msgspec.ValidationError as error:
        rule, _, place = str(error).partition(" - at `$")
        place = place.rstrip("`")
        raise DataError(f"body{place}: {rule}{_got(body, place)}") from error
    except NOT_JSON as error:  # also of a text that is not UTF-8
        raise DataError(f"the body must be JSON: {error}") from error
    return [_incoming(each, f"body.groups[{n}]", row_tokens) for n, each in enumerate(groups)]


def _got(body: bytes, place: str) -> str:
    """Return ", got VALUE" for the value at a place; "" if a key comes twice, and it is not there.
    Raises DataError if the body is no JSON behind the place."""
    try:
        value: Any = json.loads(body)
    except NOT_JSON as error:
        raise DataError(f"the body must be JSON: {error}") from error
    try:
        for name, index in re.findall(r"\.(\w+)|\[(\d+)\]", place):
            value = value[name or int(index)]
    except (LookupError, TypeError):
        return ""
    return f", got {str(value)[:100]!r}"


def _incoming(group: PushedGroup, place: str, row_tokens: int) -> Incoming:
    completions = []
    for number, item in enumerate(group.completions):
        _check(item, f"{place}.completions[{number}]")
        if (length := len(group.prompt_tokens) + len(item.tokens)) > row_tokens:
            raise DataError(
                f"{place}.completions[{number}].tokens must be at most training.seq_len"
                f" ({row_tokens}) with the prompt's, got {length}: make shorter ones, or raise it"
            )
        completions.append(
            Completion(
                token_ids=item.tokens,
                logprobs=item.logprobs,
                finish_reason=item.finish_reason,
                version_first=group.policy_version,
                version_last=group.policy_version,
                server=group.source,
                reward=item.reward,
                sampled=() if all(item.sampled) else item.sampled,
                zero_advantage=item.zero_advantage,
            )
        )
    id_ = "" if group.id is UNSET else group.id
    return Incoming(id_, Group(Prompt(0, group.prompt_tokens), tuple(completions)))


def _check(item: PushedCompletion, place: str) -> None:
    """Check the rules between fields. Raises DataError."""
    count, sampled = len(item.tokens), item.sampled
    for name, length in (("logprobs", len(item.logprobs)), ("sampled", len(sampled) or count)):
        if length != count:
            raise DataError(f"{place}.{name} must be as many as tokens ({count}), got {length}")
    if sampled and True not in sampled:
        raise DataError(f"{place}.sampled must have a true one: nothing could be learnt from it")
    for at, logprob in enumerate(item.logprobs):
        if (not sampled or sampled[at]) and not sound_logprobs((logprob,)):
            raise DataError(
                f"{place}.logprobs[{at}] must be 0 or less, got {logprob}: is it a probability?"
            )


class External:
    """Base of the sources from outside: prompt indices, waiting groups, versions. All methods run
    in the loop."""

    def __init__(self, spec: RolloutSpec, send: Send) -> None:
        self._spec, self._send = spec, send
        self._indices = spec.unused_prompts()
        self._waiting = dict(spec.waiting)
        self._versions: dict[str, int] = {}
        """Server -> the last version that it is known to have held."""
        self._counts = messages.Counters()
        self._trainer_version = spec.base_version
        self._per_step = spec.prompts_per_step * spec.group_size
        """Completions of one step."""

    async def close(self) -> None:
        """Stop taking groups."""

    def on(self, message: messages.ToWorker) -> None:
        match message:
            case ServerState(url, version) if version is not None:
                # A server that becomes unknown keeps its last version: perhaps only its lane broke
                # off, and environments go on to sample there.
                self._versions[url] = version
            case messages.ServerLeft(url):
                self._versions.pop(url, None)
            case messages.AskLoad(number):
                self._send(messages.Answer(number, {}))
            case messages.TrainerVersion(version):
                self._trainer_version = version
            case messages.Used(indices):
                for index in indices:
                    self._waiting.pop(index, None)
            case messages.GiveBack(ticket):
                self._waiting.pop(ticket.index, None)
                text = f"group {ticket.index} from outside came too late to be used"
                self._report(text, skipped=ticket.index)

    @property
    def waiting(self) -> int:
        """Number of completions sent to the trainer and not used yet."""
        return sum(self._waiting.values())

    def _deliver(self, group: Group) -> None:
        index = next(self._indices)
        group = replace(group, prompt=replace(group.prompt, index=index))
        self._waiting[index] = len(group.completions)
        self._counts.add("external_groups")
        self._counts.add("tokens", sum(c.num_sampled for c in group.completions))
        self._counts.made(group.completions)
        self._send(messages.GroupDone(Ticket(index), group, self._counts.changed()))

    def _report(self, text: str, skipped: int | None = None) -> None:
        self._send(messages.Event(text, self._counts.changed(), skipped))


class PushSource(External):
    """Source of the groups that environments POST. It takes whole bodies, and none while ``1 +
    max_staleness`` steps' worth wait. The HTTP server's threads parse; the loop decides."""

    def __init__(self, spec: RolloutSpec, send: Send) -> None:
        """Start listening. Raises ConfigError if the address cannot be bound, or the key is not
        there."""
        super().__init__(spec, send)
        self._capacity = (1 + spec.max_staleness) * self._per_step
        """Completions that may wait for the trainer before groups are refused."""
        self._newest_version = spec.base_version
        """Newest version that the trainer made or a server ever held."""
        self._run = ""
        """The run's id in the labels of its servers; empty until one of them holds a version."""
        self._ids: OrderedDict[str, None] = OrderedDict()
        self._loop = asyncio.get_running_loop()
        key = required_key(os.environ, "push_key_env", spec.push_key_env)
        self._server = HttpServer(spec.push_address, key, self._answer, "rollout.push_address")
        self.address = self._server.address
        self._report(f"environments may push groups to http://{self.address}/groups")

    async def close(self) -> None:
        """Refuse further requests, and stop listening. The groups of one under way may still be
        taken; like all that wait at the end of a run, they are not used."""
        await asyncio.to_thread(self._server.close)

    def on(self, message: messages.ToWorker) -> None:
        """Handle a message as the base does, and note the run and the newest version."""
        super().on(message)
        if isinstance(message, ServerState) and message.version is not None:
            label = Label.parse(message.label)
            self._run = label.run_id if label else self._run
        self._newest_version = max(
            [self._trainer_version, *self._versions.values(), self._newest_version]
        )

    def _take(self, incoming: Sequence[Incoming]) -> Reply:
        """Return the reply, after use of the groups if none is refused."""
        reply = self._refusal(incoming)
        if reply is None:
            fresh = [item for item in incoming if self._is_new(item.id)]
            for item in fresh:
                self._deliver(item.group)
            counts = {"taken": len(fresh), "duplicates": len(incoming) - len(fresh)}
            reply = Reply(202, counts)
        self._counts.add(f"pushes.{reply.status}")
        return reply

    def _refusal(self, incoming: Sequence[Incoming]) -> Reply | None:
        trainer_version, most = self._trainer_version, self._spec.max_staleness
        for number, item in enumerate(incoming):
            version, rule = item.group.version, ""
            if version > self._newest_version:
                rule = f"exist, the newest is {self._newest_version}"
            elif too_stale(version, trainer_version, most):
                rule = f"be {trainer_version - most} or later (rollout.max_staleness)"
            if rule:
                text = f"groups[{number}].policy_version must {rule}, got {version}"
                return Reply(409, {"error": text})
        if self.waiting >= self._capacity:
            text = f"{self.waiting} completions wait for the trainer already"
            return Reply(429, {"error": text}, RETRY_AFTER_S)
        return None

    def _is_new(self, id_: str) -> bool:
        """Return whether no group with this id was taken before, and remember it; an empty one is
        always new."""
        if not id_:
            return True
        new = id_ not in self._ids
        self._ids[id_] = None
        if len(self._ids) > REMEMBERED_IDS:
            self._ids.popitem(last=False)
        return new

    def _status(self) -> Reply:
        """Return the facts that an environment needs."""
        facts = {
            "run": self._run,
            "trainer_version": self._trainer_version,
            "oldest_usable_version": max(self._trainer_version - self._spec.max_staleness, 0),
            "waiting": self.waiting,
            "capacity": self._capacity,
        }
        return Reply(200, facts)

    # What follows runs in the server's threads.

    def _answer(self, request: Request) -> Reply:
        match request.method, request.path:
            case "GET", "/schema":
                return Reply(200, SCHEMA)
            case "GET", "/status":
                return self._decide(self._status)
            case "POST", "/groups":
                try:
                    incoming = parse(request.body, self._spec.row_tokens)
                except DataError as error:
                    return Reply(400, {"error": str(error)})
                return self._decide(lambda: self._take(incoming))
        known = "GET /schema, GET /status and POST /groups"
        return Reply(404, {"error": f"there is {known}, got {request.method} {request.path}"})

    def _decide(self, decide: Callable[[], Reply]) -> Reply:
        """Run ``decide`` in the loop, and wait for its reply."""
        future: Future[Reply] = Future()
        text = "the rollout process does not answer; the run may be ending"
        late = Reply(503, {"error": text}, RETRY_AFTER_S)

        def run() -> None:
            # Do nothing if the sender already got a 503: it sends the groups again.
            if future.set_running_or_notify_cancel():
                reply = late
                try:
                    reply = decide()
                finally:  # it raises if rank 0 is gone
                    future.set_result(reply)

        try:
            self._loop.call_soon_threadsafe(run)
            return future.result(DECIDE_S)
        except (TimeoutError, RuntimeError):  # the loop is busy, or closed
            # no deadline: the loop decides just now, which does not wait
            return late if future.cancel() else future.result()
