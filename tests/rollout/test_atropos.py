"""Atropos groups as we read them: alignment, turns, overrides, and what is refused. What the source
makes of a server that is lost."""

import asyncio
import itertools
import math
import threading
from collections.abc import Callable, Coroutine
from contextlib import closing
from dataclasses import replace
from typing import Any, TypeVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from titan_grpo.errors import DataError, ServerRefused
from titan_grpo.protocol.messages import ServerState
from titan_grpo.rollout.atropos import (
    AtroposSource,
    Rejected,
    batch_call,
    batch_of,
    group_of,
)
from titan_grpo.rollout.httpd import HttpServer, Reply, Request
from titan_grpo.rollout.messages import (
    Event,
    FromWorker,
    GroupDone,
    RolloutSpec,
    ServerLeft,
    TrainerVersion,
    Used,
)

M = -100

T = TypeVar("T")


def item(**changes: Any) -> dict[str, Any]:
    """Two sequences: prompt 5 6 (7), then sampled tokens."""
    whole = {
        "tokens": [[5, 6, 8, 9], [5, 6, 7, 8]],
        "masks": [[M, M, 8, 9], [M, M, M, 8]],
        "scores": [1.0, 0],
        "inference_logprobs": [[1.0, 1.0, -0.25, -0.5], [1.0, 1.0, 1.0, -2]],
        "env_id": 3,
    }
    return whole | changes


def test_log_probabilities_stay_with_their_own_tokens() -> None:
    group = group_of(item(), 7)
    one, two = group.completions
    assert group.prompt.token_ids == (5, 6)
    assert (one.token_ids, one.logprobs, one.sampled) == ((8, 9), (-0.25, -0.5), ())
    assert (two.token_ids, two.logprobs, two.sampled) == ((7, 8), (0.0, -2), (False, True))
    assert (one.reward, two.reward, one.version_first, two.version_last) == (1.0, 0.0, 7, 7)
    assert one.server == "atropos environment 3"


def test_a_tools_turn_is_context_and_a_masked_end_is_cut() -> None:
    turns = {
        "tokens": [[5, 8, 40, 41, 9, 50]],
        "masks": [[M, 8, M, M, 9, M]],
        "scores": [0.5],
        "inference_logprobs": [[1.0, -0.1, 1.0, 1.0, -0.2, 1.0]],
    }
    [completion] = group_of(turns, 0).completions
    assert completion.token_ids == (8, 40, 41, 9)
    assert completion.sampled == (True, False, False, True)
    assert completion.logprobs == (-0.1, 0.0, 0.0, -0.2)


@pytest.mark.timeout(60)
def test_long_sequences_that_differ_early_are_read_in_no_time() -> None:
    """Before, in minutes, in which the rollout process did nothing else."""
    count = 200_000
    rows = [[5, own, *[6] * count, 9] for own in (7, 8)]
    masks, logprobs = [M] * (count + 2) + [9], [1.0] * (count + 2) + [-0.5]
    whole = {"tokens": rows, "masks": [masks] * 2, "inference_logprobs": [logprobs] * 2}
    group = group_of(whole | {"scores": [0.0, 1.0]}, 0)
    assert group.prompt.token_ids == (5,)
    assert [c.num_sampled for c in group.completions] == [1, 1]


def test_an_override_takes_a_sequence_out_of_the_learning_only() -> None:
    group = group_of(item(overrides=[{}, {"set_advantage_to_zero": True}]), 0)
    assert [c.zero_advantage for c in group.completions] == [False, True]


@pytest.mark.parametrize("field", ["group_overrides", "generation_params"])
def test_a_version_may_ride_along(field: str) -> None:
    assert group_of(item(**{field: {"policy_version": 4}}), 9).version == 4
    assert group_of(item(**{field: {"policy_version": True}}), 9).version == 9


@pytest.mark.parametrize(
    ("reason", "changes"),
    [
        ("no_logprobs", {"inference_logprobs": None}),
        ("bad_logprob", {"inference_logprobs": [[1.0, 1.0, 1.0, -0.5], [1.0, 1.0, 1.0, -2]]}),
        (
            "bad_logprob",
            {"inference_logprobs": [[1.0, 1.0, float("nan"), -0.5], [1.0, 1.0, 1.0, -2]]},
        ),
        ("length_mismatch", {"inference_logprobs": [[1.0, -0.25, -0.5], [1.0, 1.0, 1.0, -2]]}),
        ("length_mismatch", {"scores": [1.0]}),
        ("length_mismatch", {"tokens": [], "masks": [], "scores": [], "inference_logprobs": []}),
        *(("bad_score", {"scores": [1.0, bad]}) for bad in (math.inf, math.nan, 1e39)),
        ("bad_score", {"scores": None}),
        ("empty_prompt", {"masks": [[5, M, 8, 9], [M, M, M, 8]]}),
        ("empty_prompt", {"tokens": [[5, 6, 8, 9], [4, 6, 7, 8]]}),
        ("nothing_sampled", {"masks": [[M] * 4, [M, M, M, 8]]}),
        ("malformed", {"tokens": [[5, 6, "8", 9], [5, 6, 7, 8]]}),
        ("malformed", {"tokens": [[5, 6, -7, 9], [5, 6, 7, 8]]}),
        ("malformed", {"tokens": [[5, 6, M, 9], [5, 6, 7, 8]]}),
        ("malformed", {"tokens": [[5, 6, 1 << 31, 9], [5, 6, 7, 8]]}),
        ("malformed", {"overrides": [{}]}),
        ("images", {"images": ["x"]}),
    ],
)
def test_a_group_that_is_not_what_it_says_is_rejected_by_a_word(
    reason: str, changes: dict[str, Any]
) -> None:
    with pytest.raises(Rejected) as caught:
        group_of(item(**changes), 0)
    assert caught.value.reason == reason


sequences = st.lists(
    st.tuples(
        st.lists(st.integers(0, 9), max_size=4),
        st.lists(st.tuples(st.integers(0, 9), st.booleans()), max_size=6),
    ),
    min_size=1,
    max_size=4,
)


@given(st.lists(st.integers(0, 9), min_size=1, max_size=4), sequences)
def test_every_sampled_token_keeps_its_place_and_its_log_probability(
    prompt: list[int], rest: list[tuple[list[int], list[tuple[int, bool]]]]
) -> None:
    rows = []
    for context, turns in rest:
        tokens = [*prompt, *context, *(t for t, _ in turns), 7]
        sampled = [False] * len([*prompt, *context]) + [s for _, s in turns] + [True]
        rows.append((tokens, sampled, [-0.01 * (at + 1) for at in range(len(tokens))]))
    group = group_of(
        {
            "tokens": [tokens for tokens, _, _ in rows],
            "masks": [
                [t if s else M for t, s in zip(tokens, sampled, strict=True)]
                for tokens, sampled, _ in rows
            ],
            "scores": [0.0] * len(rows),
            "inference_logprobs": [
                [lp if s else 1.0 for lp, s in zip(lps, sampled, strict=True)]
                for _, sampled, lps in rows
            ],
        },
        0,
    )
    start = len(group.prompt.token_ids)
    for completion, (tokens, sampled, logprobs) in zip(group.completions, rows, strict=True):
        assert [*group.prompt.token_ids, *completion.token_ids] == tokens
        kept = completion.sampled or (True,) * len(completion.token_ids)
        assert [False] * start + list(kept) == sampled
        for at, (chosen, logprob) in enumerate(zip(kept, completion.logprobs, strict=True)):
            assert logprob == (logprobs[start + at] if chosen else 0.0)


def test_the_answers_of_the_api_are_told_apart() -> None:
    assert batch_of({"batch": None}) == ()
    refusal = {"status": "error", "message": "Trainer not registered.", "batch": []}
    assert batch_of(refusal) is None
    assert batch_of({"batch": [item()]}) == (item(),)
    for answer in ({}, None, {"batch": 3}, {"batch": [3]}):
        with pytest.raises(ServerRefused, match="list of groups or null"):
            batch_of(answer)


def test_a_batch_has_the_time_of_its_tokens() -> None:
    # Half a million tokens take atroposlib 1.3 s, 33 millions 84 s.
    spec = RolloutSpec(model_dir="", prompts_per_step=16, group_size=8, row_tokens=4096)
    assert 30 < batch_call(spec).timeout_s < 60
    for larger in (
        replace(spec, prompts_per_step=1024),
        replace(spec, group_size=512),
        replace(spec, row_tokens=262144),
    ):
        assert batch_call(larger).timeout_s > 300


class Api:
    """An API that hands out ``batches``, with an empty answer before each, and holds nothing
    else."""

    def __init__(self) -> None:
        self.batches: list[list[dict[str, Any]]] = []
        self.refusals: list[int] = []
        """Status of the next answers, of any request."""
        self._empty = False
        self._server = HttpServer("127.0.0.1:0", "", self._answer, "a test")
        self.url = f"http://{self._server.address}"

    def _answer(self, request: Request) -> Reply:
        if self.refusals:
            return Reply(self.refusals.pop(0), {"error": "no such route"})
        match request.path:
            case "/register":
                return Reply(200, {"uuid": 1})
            case "/batch":
                self._empty = not (self._empty and self.batches)
                return Reply(200, {"batch": None if self._empty else self.batches.pop()})
        return Reply(200, {"queue_size": 0})

    def close(self) -> None:
        self._server.close()


def held(url: str, version: int | None) -> ServerState:
    return ServerState(url, version, version is not None, f"r:{version}:f")


class Sourced:
    """The source of a run, what it says, and the error that ends it."""

    def __init__(self, url: str, **changes: Any) -> None:
        self.said: asyncio.Queue[FromWorker] = asyncio.Queue()
        self.failed: asyncio.Queue[BaseException] = asyncio.Queue()
        values = {"prompts_per_step": 1, "group_size": 2, "row_tokens": 64, **changes}
        spec = RolloutSpec(model_dir="", source="atropos", atropos_url=url, **values)
        self._source = AtroposSource(spec, self.said.put_nowait, self.failed.put_nowait)
        self.on, self.close = self._source.on, self._source.close

    async def next(self) -> FromWorker:
        return await asyncio.wait_for(self.said.get(), 20)

    async def version(self) -> int:
        """Take the next group, as a step does; returns its version."""
        done = await self.next()
        assert isinstance(done, GroupDone)
        self.on(Used((done.ticket.index,)))
        return done.group.version


def with_api(scenario: Callable[[Api], Coroutine[Any, Any, T]], *refusals: int) -> T:
    with closing(Api()) as api:
        api.refusals += refusals
        return asyncio.run(scenario(api))


def test_a_lost_server_bounds_versions_until_it_leaves_and_is_named_once() -> None:
    async def scenario(api: Api) -> None:
        source = Sourced(api.url, max_staleness=1)

        async def version() -> int:
            api.batches.append([item()])
            return await source.version()

        source.on(held("http://lost", 5))
        source.on(held("http://other", 5))
        source.on(held("http://lost", None))
        source.on(held("http://other", 7))
        source.on(TrainerVersion(7))
        event = await source.next()
        assert isinstance(event, Event)
        for text in (
            "made by version 5",
            "titan-grpo servers remove http://lost",
            "policy_version",
        ):
            assert text in event.text
        # It may still answer the environments: only its lane is known to be broken.
        assert [await version() for _ in range(3)] == [5, 5, 5]
        source.on(ServerLeft("http://lost"))
        # The bound moves with the next empty answer.
        assert [await version() for _ in range(3)][1:] == [7, 7]
        await source.close()

    with_api(scenario)


def test_a_commit_while_the_api_answers_that_it_has_no_batch_makes_no_group_newer() -> None:
    async def scenario() -> None:
        loop, known = asyncio.get_running_loop(), threading.Event()
        asked, left = itertools.count(), [0]

        def commit() -> None:
            source.on(held("http://s", 4))
            known.set()

        def answer(request: Request) -> Reply:
            if request.path == "/register":
                return Reply(200, {"uuid": 1})
            if request.path == "/status":
                return Reply(200, {"queue_size": left[0]})
            if (number := next(asked)) == 2:
                # Groups come, and then a server gets a version, before this answer arrives.
                left[0] = 2
                loop.call_soon_threadsafe(commit)
                known.wait(20)
            return Reply(200, {"batch": [item()] if number % 2 else None})

        with closing(HttpServer("127.0.0.1:0", "", answer, "a test")) as server:
            source = Sourced(f"http://{server.address}")
            source.on(held("http://s", 3))
            made = [await source.version() for _ in range(3)]
            await source.close()
        assert made == [3, 3, 3]

    asyncio.run(scenario())


def test_before_a_server_of_a_resumed_run_holds_a_version_groups_may_be_of_any() -> None:
    async def scenario(api: Api) -> None:
        source = Sourced(api.url, base_version=40)

        async def version() -> int:
            api.batches.append([item()])
            return await source.version()

        # The API is empty each time, and servers still have the weights of before.
        assert [await version() for _ in range(2)] == [0, 0]
        source.on(held("http://s", 40))
        # The bound moves with the next empty answer.
        assert [await version() for _ in range(3)][1:] == [40, 40]
        await source.close()

    with_api(scenario)


def test_a_sequence_longer_than_a_row_is_dropped_with_the_key_that_has_the_length() -> None:
    async def scenario(api: Api) -> None:
        source = Sourced(api.url, row_tokens=4)
        longer = {
            "tokens": [[5, 6, 8, 9, 7], [5, 6, 7, 8]],
            "masks": [[M, M, 8, 9, 7], [M, M, M, 8]],
            "inference_logprobs": [[1.0, 1.0, -0.25, -0.5, -1], [1.0, 1.0, 1.0, -2]],
        }
        api.batches.append([item(**longer), item()])
        event, done = await source.next(), await source.next()
        assert isinstance(event, Event)
        assert "a sequence has 5 tokens, training.seq_len is 4: " in event.text
        assert event.counters["dropped.too_long"] == 1
        assert isinstance(done, GroupDone)
        await source.close()

    with_api(scenario)


def test_a_refusal_of_an_api_that_has_answered_is_an_outage() -> None:
    """Before, one 404 of a proxy whose API restarted ended a run as a mistake in its URL."""

    async def scenario(api: Api) -> None:
        source = Sourced(api.url)
        api.batches.append([item()])
        await source.version()
        api.refusals = [404, 429]
        event = await source.next()
        assert isinstance(event, Event)
        assert "gave no batch" in event.text
        api.batches.append([item()])
        while not isinstance(await source.next(), GroupDone):
            assert source.failed.empty()
        await source.close()
        assert (source.failed.empty(), api.refusals) == (True, [])

    with_api(scenario)


def test_a_refusal_of_an_api_that_never_answered_ends_the_run() -> None:
    async def scenario(api: Api) -> BaseException:
        source = Sourced(api.url)
        error = await asyncio.wait_for(source.failed.get(), 20)
        await source.close()
        return error

    text = str(with_api(scenario, 404))
    assert "rollout.atropos_url must be that of an Atropos API" in text


def test_64_groups_in_a_row_that_cannot_be_trained_on_end_the_run() -> None:
    async def scenario(api: Api) -> BaseException:
        source = Sourced(api.url)
        bad = item(inference_logprobs=None)
        api.batches += [[bad], [bad] * 63 + [item()] + [bad] * 63]
        error = await asyncio.wait_for(source.failed.get(), 20)
        await source.close()
        came = [source.said.get_nowait() for _ in range(source.said.qsize())]
        # The group that can be trained on begins the count anew.
        assert [type(message) for message in came].index(GroupDone) == 63
        return error

    error = with_api(scenario)
    assert isinstance(error, DataError)
    assert str(error).startswith("64 groups in a row cannot be trained on; the last: inference_log")
