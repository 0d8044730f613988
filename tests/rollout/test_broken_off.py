"""Connections that break under requests: what was streamed until then goes on elsewhere,
once."""

import asyncio
import threading
import time
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from tests.rollout.conftest import CompletionServer, MakeServer, StartClient, piece
from tests.rollout.sampling import holding, sample, sampler_of
from titan_grpo.engines import vllm
from titan_grpo.engines.generation import Sampling
from titan_grpo.engines.http import AsyncDriver, Call, Sink
from titan_grpo.errors import PeerError
from titan_grpo.protocol.messages import ServerState
from titan_grpo.rollout.dispatch import worth_keeping
from titan_grpo.rollout.messages import RolloutSpec, Ticket
from titan_grpo.rollout.sampler import Attempt, GroupDropped, Interrupted, Sampler, TokenStream
from titan_grpo.samples import NO_TOKENS, Completion, whole_routes

WAIT_S = 60.0
TOKENS = 6


@pytest.fixture
def sampler(model_dir: str) -> Sampler:
    return sampler_of("digits", model_dir, 2, TOKENS)


def test_a_broken_connection_leaves_its_stream_and_those_of_the_requests_beside_it(
    completion_server: MakeServer, sampler: Sampler
) -> None:
    first, other = completion_server(), completion_server()

    def break_off(body: dict[str, Any]) -> tuple[int, Iterator[bytes]]:
        def speak() -> Iterator[bytes]:
            yield first.piece([7, 8])
            if body["seed"] == first.bodies[0]["seed"]:
                first.wait_for_requests(2)
            else:
                first.released.wait(WAIT_S)

        return 200, speak()

    first.behaviour = break_off
    parts = [NO_TOKENS, NO_TOKENS]
    with pytest.raises(PeerError, match="broke off"):
        sample(sampler, parts, holding(first.url, 3))
    broken = [part for part in parts if part.token_ids]
    assert broken, "the one that broke has its tokens; the one beside it has them if they had come"
    assert {
        (p.token_ids, p.logprobs, p.version_first, p.version_last, p.finish_reason) for p in broken
    } == {((7, 8), (-1.0, -1.0), 3, 3, "")}

    other.behaviour = lambda body: other.answer(
        [9] * body["max_tokens"], [-2.0] * body["max_tokens"]
    )
    group = sample(sampler, parts, holding(other.url, 4), attempt=1)
    assert all(len(c.token_ids) == TOKENS for c in group.completions), (
        "the budget is the original one"
    )
    done = [c for c, part in zip(group.completions, parts, strict=True) if c.token_ids[0] == 7]
    assert len(done) == len(broken)
    for completion in done:
        assert completion.token_ids == (7, 8, 9, 9, 9, 9)
        assert completion.logprobs == (-1.0,) * 2 + (-2.0,) * 4
        assert (completion.version_first, completion.version_last) == (3, 4)


class Told:
    """A sink, and an event that it took a piece."""

    def __init__(self, sink: Sink, came: asyncio.Event) -> None:
        self._sink, self._came = sink, came

    @property
    def whole(self) -> bool:
        return self._sink.whole

    def take(self, chunk: bytes) -> bool:
        came = self._sink.take(chunk)
        self._came.set()
        return came


class Telling(AsyncDriver):
    """A driver that tells when a piece was taken."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.came = asyncio.Event()

    async def stream(self, call: Call[Any], sink: Sink) -> None:
        await super().stream(call, Told(sink, self.came))


def broken_off(
    sampler: Sampler, server: CompletionServer, pieces: Sequence[bytes], *changes: dict[str, Any]
) -> tuple[Completion, BaseException]:
    """What is kept of a request on a server of version 3, and how it ended: by its last piece if
    that is of an end, else it is cancelled there. The server has changed before each piece but
    the first."""
    changed, ends = [threading.Event() for _ in changes], b'"length"' in pieces[-1]

    def speak(_: dict[str, Any]) -> tuple[int, Iterator[bytes]]:
        def said() -> Iterator[bytes]:
            yield pieces[0]
            for event, text in zip(changed, pieces[1:], strict=True):
                event.wait(WAIT_S)
                yield text
            if not ends:
                server.released.wait(WAIT_S)

        return 200, said()

    async def run() -> BaseException:
        driver, known = Telling(server.url), holding(server.url, 3)
        running = asyncio.create_task(sampler.group(Attempt(Ticket(0), parts, known, driver)))
        async with asyncio.timeout(WAIT_S):
            await driver.came.wait()
            for event, change in zip(changed, changes, strict=True):
                driver.came.clear()
                known.state = msgspec.structs.replace(known.state, **change)
                event.set()
                await driver.came.wait()
        if not ends:
            running.cancel()
        (error,) = await asyncio.gather(running, return_exceptions=True)
        await driver.close()
        assert isinstance(error, BaseException)
        return error

    server.behaviour, parts = speak, [NO_TOKENS]
    error = asyncio.run(run())
    return parts[0], error


def test_a_cancelled_request_leaves_its_tokens(
    completion_server: MakeServer, sampler: Sampler
) -> None:
    part, _ = broken_off(sampler, completion_server(), [piece([7, 8])])
    assert (part.token_ids, part.version_first, part.version_last) == ((7, 8), 3, 3)


def test_what_came_before_the_ledger_lost_the_servers_version_goes_on_elsewhere(
    completion_server: MakeServer, sampler: Sampler
) -> None:
    pieces = [piece([7, 8]), piece([9] * (TOKENS - 2), "length")]
    part, error = broken_off(sampler, completion_server(), pieces, {"version": None})
    assert isinstance(error, Interrupted)
    assert (part.token_ids, part.version_last, part.finished) == ((7, 8), 3, False)


@pytest.mark.parametrize("mix", [True, False])
def test_what_a_drain_cancels_is_of_the_old_version_alone(
    completion_server: MakeServer, sampler: Sampler, mix: bool
) -> None:
    sampler._spec = replace(sampler._spec, in_flight_weight_updates=mix)
    drains = {"accepting": False, "committing": 4}
    part, _ = broken_off(sampler, completion_server(), [piece([7]), piece([8])], drains)
    assert (part.token_ids, part.version_first, part.version_last) == ((7, 8), 3, 4 if mix else 3)
    # Unless it may mix, it goes on only where the old version still is.
    assert worth_keeping([part], 3, 3, mix) == (part,)
    assert worth_keeping([part], 4, 3, mix) == (part if mix else NO_TOKENS,)


def test_what_came_after_the_ledger_lost_track_is_not_kept() -> None:
    server, call = holding("http://a", 3), vllm.stream([1], Sampling(9), 1.0)
    stream = TokenStream(call, lambda: server.newest, time.monotonic)
    assert (stream.kept().token_ids, stream.version) == ((), None)
    for version, tokens in ((3, [5]), (4, [6, 7]), (None, [8])):
        server.state = msgspec.structs.replace(server.state, version=version)
        stream.take(piece(tokens))
    kept = stream.kept()
    assert (kept.token_ids, kept.finish_reason, stream.version) == ((5, 6, 7), "abort", 4)


def test_the_pace_of_an_answer_is_that_of_the_tokens_after_its_first_piece() -> None:
    seconds = iter((10.0, 11.5, 14.0))
    stream = TokenStream(vllm.stream([1], Sampling(9), 1.0), lambda: 3, lambda: next(seconds))
    assert stream.pace == (0, 0.0)
    for tokens in ([], [5, 6], [7], [8, 9]):
        stream.take(piece(tokens))
    assert stream.pace == (3, 4.0)


def test_an_answer_that_only_lacked_its_last_line_is_kept_as_finished() -> None:
    stream = TokenStream(vllm.stream([1], Sampling(9), 1.0), lambda: 3, time.monotonic)
    stream.take(piece([5, 6], "stop"))
    assert (stream.whole, stream.kept().finish_reason) == (True, "stop")


@pytest.mark.parametrize("streamed", [True, False])
def test_the_rollout_process_goes_on_at_another_server_and_the_broken_one_gets_its_rest(
    completion_server: MakeServer, model_dir: str, start_client: StartClient, streamed: bool
) -> None:
    broken, good = completion_server(), completion_server()
    # Later requests get no tokens: how many come before there is a better server is up to the
    # machine.
    broken.behaviour = lambda _: (
        (200, iter([broken.piece([7, 8])])) if len(broken.bodies) <= 2 else (500, {})
    )
    good.behaviour = lambda body: good.answer([9] * body["max_tokens"], [-2.0] * body["max_tokens"])
    spec = RolloutSpec(
        model_dir=model_dir,
        prompts_per_step=1,
        group_size=2,
        max_completion_tokens=TOKENS,
        max_staleness=0,
        stream_completions=streamed,
    )
    client = start_client(spec, broken)
    broken.wait_for_requests(2)
    client.set_server(ServerState(good.url, 0, True, "r:0:f"))
    (group,) = client.next_batch(0, 1, WAIT_S)
    counters = client.counters()
    starts = [completion.token_ids[:2] for completion in group.completions]
    assert ((7, 8) in starts) == streamed, starts
    assert all(len(completion.token_ids) == TOKENS for completion in group.completions)
    assert counters["outages"] >= 1
    assert (counters["resumed"] > 0) == streamed, counters
    assert counters["resumed_tokens"] == 2 * counters["resumed"]


def test_a_completion_that_goes_on_keeps_the_routes_that_its_tokens_were_sampled_on() -> None:
    # A prompt of one token, one expert of one layer each; the second server computes the first
    # three tokens again, and routes them otherwise.
    first, second = (array("H", experts).tobytes() for experts in ([1, 2], [5, 5, 3]))
    part = Completion((7, 8), (-1.0, -1.0), "", 3, 3, "s", routes=first)
    whole = part.then(Completion((9,), (-1.0,), "stop", 4, 4, "s", routes=second))
    assert array("H", whole.routes).tolist() == [1, 2, 3]
    assert whole_routes(whole.routes, 1 + 3, 1)


def test_an_answer_without_the_routes_that_training_needs_drops_its_group(
    completion_server: MakeServer, sampler: Sampler
) -> None:
    server = completion_server()
    server.behaviour = lambda body: server.answer([9] * TOKENS, [-2.0] * TOKENS)
    sampler._spec = replace(sampler._spec, router_replay=True)
    with pytest.raises(GroupDropped, match="no_routes"):
        sample(sampler, [NO_TOKENS, NO_TOKENS], holding(server.url, 3))
    assert not any(body.get("stream") for body in server.bodies)
