"""What every engine must do with answers in pieces: they are the answers that would have come whole."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from titan_grpo.engines.drivers import AsyncDriver, HttpRefused
from titan_grpo.engines.sampling import Sampled, Sampling
from titan_grpo.engines.streamed import INTERVAL, Answer, StreamedCall
from titan_grpo.testing.suites.engine import (
    CROWD,
    LENGTH,
    MAX_DIFFERENCE,
    REQUEST_S,
    EngineUnderTest,
    assert_sound,
    furthest,
    paused,
    prompt,
    refusal,
)
from titan_grpo.testing.suites.reference import Reference


class Steps:
    """A sink that notes how many tokens there were after each chunk."""

    def __init__(self, call: StreamedCall) -> None:
        self.answer = Answer(call)
        self.counts: list[int] = []

    def take(self, chunk: bytes) -> None:
        """The next bytes."""
        self.answer.take(chunk)
        self.counts.append(self.answer.count)

    def end(self) -> None:
        """There are no more."""
        self.answer.end()

    @property
    def whole(self) -> bool:
        """Whether all came."""
        return self.answer.whole

    def sampled(self) -> Sampled:
        """The whole answer."""
        return self.answer.sampled(self.answer.count, self.answer.finish_reason)


def stream(e: EngineUnderTest, *calls: StreamedCall, meanwhile: Callable[[], None] = lambda: None) -> list[Steps]:
    """The calls at once, through one driver; ``meanwhile`` runs in a thread once one of them has tokens."""

    async def run() -> list[Steps]:
        driver = AsyncDriver(e.access.url, e.access.api_key, len(calls))
        loop, began = asyncio.get_running_loop(), asyncio.Event()

        class Announced(Steps):
            def take(self, chunk: bytes) -> None:
                super().take(chunk)
                if self.answer.count:
                    began.set()

        sinks = [Announced(call) for call in calls]
        running = asyncio.gather(*(driver.stream(call.call, sink) for call, sink in zip(calls, sinks, strict=True)))
        try:
            async with asyncio.timeout(REQUEST_S):
                await began.wait()
                with ThreadPoolExecutor(1) as pool:
                    await loop.run_in_executor(pool, meanwhile)
                await running
        finally:
            await driver.close()
        return sinks

    return asyncio.run(run())


def _crowd(e: EngineUnderTest, label: str) -> list[StreamedCall]:
    return [e.speak.stream(prompt(seed), Sampling(LENGTH, 1.0, 17 + seed, label), REQUEST_S) for seed in range(CROWD)]


def _long_crowd(e: EngineUnderTest, label: str) -> list[StreamedCall]:
    """Requests that are all at work for a while, whatever else the machine does."""
    long = [Sampling(LENGTH, 1.0, 17 + seed, label, ignore_eos=True) for seed in range(CROWD)]
    return [e.speak.stream(prompt(seed), each, REQUEST_S) for seed, each in enumerate(long)]


def answers_in_pieces_are_the_ones_that_come_whole(e: EngineUnderTest) -> None:
    """The same tokens where the engine follows seeds, their end among them; and the log-probabilities are right in any case."""
    reference, label = Reference(e.model), e.run(e.speak.label())
    for seed, one in enumerate(stream(e, *_crowd(e, "pieces"))):
        sampled = one.sampled()
        assert_sound(e, sampled, [label])
        computed = reference.logprobs([*prompt(seed), *sampled.token_ids])[len(prompt(seed)) - 1 :]
        assert furthest(sampled.logprobs, computed) <= MAX_DIFFERENCE, (seed, sampled, computed)
        assert len(set(one.counts) - {0}) >= len(sampled.token_ids) // INTERVAL, (one.counts, sampled)
    for seed in (1, 2):
        # Alone, since in bf16 a near tie may fall otherwise where another number of requests is computed at a time.
        (one,) = stream(e, e.speak.stream(prompt(seed), Sampling(LENGTH, 1.0, seed, "alone in pieces"), REQUEST_S))
        whole = e.run(e.speak.generate(prompt(seed), Sampling(LENGTH, 1.0, seed, "alone and whole"), REQUEST_S))
        if e.follows_seeds:
            assert one.sampled().token_ids == whole.token_ids, (one.sampled(), whole)
            assert one.sampled().finish_reason == whole.finish_reason, (one.sampled(), whole)
            assert furthest(one.sampled().logprobs, whole.logprobs) <= MAX_DIFFERENCE, (one.sampled(), whole)


def a_label_in_a_pause_marks_the_tokens_after_it_in_pieces_too(e: EngineUnderTest) -> None:
    """None is lost over a pause, and the spans of the last piece are those of the whole answer."""
    before = e.run(e.speak.label())

    with e.control() as control:

        def relabel() -> None:
            with paused(control):
                control.relabel("in-pieces")

        answers = [one.sampled() for one in stream(e, *_long_crowd(e, "relabelled"), meanwhile=relabel)]
    for sampled in answers:
        assert_sound(e, sampled, [before, "in-pieces"], LENGTH)
    assert not e.says_versions or any(len(sampled.versions) == 2 for sampled in answers), answers


def an_abort_ends_answers_in_pieces_with_what_they_have(e: EngineUnderTest) -> None:
    """As whole ones: the tokens that were not sent yet come with the end."""
    steps = stream(e, *_long_crowd(e, "aborted"), meanwhile=lambda: e.run(e.speak.abort_all(10.0)))
    answers = [one.sampled() for one in steps]
    aborted = [sampled for sampled in answers if sampled.finish_reason == "abort"]
    assert any(sampled.token_ids for sampled in aborted), answers
    assert all(len(sampled.token_ids) == len(sampled.logprobs) < LENGTH for sampled in aborted), aborted


def a_request_that_can_not_be_is_refused_in_pieces_too(e: EngineUnderTest) -> None:
    """With the same status, although SGLang says 200 first."""
    call = e.speak.stream(prompt(1) * 1000, Sampling(4), REQUEST_S)

    async def run() -> None:
        driver = AsyncDriver(e.access.url, e.access.api_key)
        try:
            await driver.stream(call.call, Answer(call))
        finally:
            await driver.close()

    refused = refusal(lambda: asyncio.run(run()))
    assert isinstance(refused, HttpRefused), refused
    assert refused.status == 400, refused


CHECKS: tuple[Callable[[EngineUnderTest], None], ...] = (
    answers_in_pieces_are_the_ones_that_come_whole,
    a_label_in_a_pause_marks_the_tokens_after_it_in_pieces_too,
    an_abort_ends_answers_in_pieces_with_what_they_have,
    a_request_that_can_not_be_is_refused_in_pieces_too,
)
"""They need the first weights."""
