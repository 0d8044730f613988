"""What every engine must do with answers in pieces: they are the answers that would have come
whole.

engine.py has them over pauses, labels and aborts."""

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from tokenizers import Tokenizer

from tests.conformance.crowd import CROWD, REQUEST_S, prompt
from tests.conformance.engine import (
    LENGTH,
    MAX_DIFFERENCE,
    EngineUnderTest,
    assert_sound,
    furthest,
    refusal,
)
from tests.conformance.reference import Reference
from titan_grpo.engines.generation import INTERVAL, Piece, Sampled, Sampling, StreamedAnswer
from titan_grpo.engines.http import AsyncDriver, Call, HttpRefused
from titan_grpo.rollout.codec import TextCodec
from titan_grpo.rollout.sampler import TokenStream


class Steps(TokenStream):
    """An answer that notes how many tokens there were after each chunk."""

    def __init__(self, call: Call[Piece]) -> None:
        super().__init__(call, lambda: 0, time.monotonic)
        self.counts: list[int] = []

    def take(self, chunk: bytes) -> bool:
        """The next bytes."""
        came = super().take(chunk)
        self.counts.append(self.count)
        return came

    def all(self) -> Sampled:
        return self.sampled(self.count, self.finish_reason)


def stream(e: EngineUnderTest, *calls: Call[Piece]) -> list[Steps]:
    """The calls at once, through one driver."""

    async def run() -> list[Steps]:
        driver, sinks = (
            AsyncDriver(e.access.url, e.access.api_key, len(calls)),
            [Steps(call) for call in calls],
        )
        try:
            async with asyncio.timeout(REQUEST_S):
                await asyncio.gather(
                    *(driver.stream(call, sink) for call, sink in zip(calls, sinks, strict=True))
                )
        finally:
            await driver.close()
        return sinks

    return asyncio.run(run())


def _crowd(e: EngineUnderTest, label: str) -> list[Call[Piece]]:
    return [
        e.speak.stream(prompt(seed), Sampling(LENGTH, 1.0, 17 + seed, label), REQUEST_S)
        for seed in range(CROWD)
    ]


def answers_in_pieces_are_the_ones_that_come_whole(e: EngineUnderTest) -> None:
    """The same tokens where the engine follows seeds, their end among them; and the
    log-probabilities are right in any case."""
    reference, label = Reference(e.model), e.run(e.speak.label())
    crowd = stream(e, *_crowd(e, "pieces"))
    for seed, one in enumerate(crowd):
        sampled = one.all()
        assert_sound(e, sampled, [label])
        computed = reference.logprobs([*prompt(seed), *sampled.token_ids])[len(prompt(seed)) - 1 :]
        assert furthest(sampled.logprobs, computed) <= MAX_DIFFERENCE, (seed, sampled, computed)
    # An engine joins the pieces of a reader who is behind: how many come is the machine's affair.
    counts = [one.counts for one in crowd]
    assert any(len(set(each) - {0}) > 1 for each in counts if each[-1] > INTERVAL), counts
    for one in crowd:
        first = next(count for count in one.counts if count)
        tokens, seconds = one.pace
        assert tokens == one.counts[-1] - first
        assert (seconds > 0.0) == (tokens > 0)
    for seed in (1, 2):
        # Alone, since in bf16 a near tie may fall otherwise where another number of requests is
        # computed at a time.
        (one,) = stream(
            e,
            e.speak.stream(prompt(seed), Sampling(LENGTH, 1.0, seed, "alone in pieces"), REQUEST_S),
        )
        whole = e.run(
            e.speak.generate(
                prompt(seed), Sampling(LENGTH, 1.0, seed, "alone and whole"), REQUEST_S
            )
        )
        if e.follows_seeds:
            assert one.all().token_ids == whole.token_ids, (one.all(), whole)
            assert one.all().finish_reason == whole.finish_reason, (one.all(), whole)
            assert furthest(one.all().logprobs, whole.logprobs) <= MAX_DIFFERENCE, (
                one.all(),
                whole,
            )


def a_request_that_can_not_be_is_refused_in_pieces_too(e: EngineUnderTest) -> None:
    """With the same status, although SGLang says 200 first."""
    call = e.speak.stream(prompt(1) * 1000, Sampling(4), REQUEST_S)

    async def run() -> None:
        driver = AsyncDriver(e.access.url, e.access.api_key)
        try:
            await driver.stream(call, StreamedAnswer(call))
        finally:
            await driver.close()

    refused = refusal(lambda: asyncio.run(run()))
    assert isinstance(refused, HttpRefused), refused
    assert refused.status == 400, refused


def a_stop_text_or_token_ends_an_answer_and_is_part_of_it(e: EngineUnderTest) -> None:
    """Whole and in pieces: the trainer learns all that was sampled, up to the end of the stop."""
    codec = TextCodec(str(e.model))
    greedy = Sampling(24, 0.0, ignore_eos=True)
    plain = e.run(e.speak.generate(prompt(5), greedy, REQUEST_S)).token_ids
    text = codec.decode(plain[4:6])
    assert text.strip(), plain
    ends = (n for n in range(1, len(plain) + 1) if text in codec.decode(plain[:n]))
    for sampling, count in (
        (replace(greedy, stop=(text,)), next(ends)),
        # SGLang looks at stop tokens only where it looks at the end of text
        (
            replace(greedy, stop_token_ids=(plain[7],), ignore_eos=False),
            plain.index(plain[7]) + 1,
        ),
    ):
        whole = e.run(e.speak.generate(prompt(5), sampling, REQUEST_S))
        (pieces,) = stream(e, e.speak.stream(prompt(5), sampling, REQUEST_S))
        for answer in (whole, pieces.all()):
            assert answer.token_ids == plain[:count], (answer, plain, sampling)
            assert len(answer.logprobs) == count, answer
            assert answer.finish_reason == "stop", answer


def a_stop_text_may_be_a_special_token(e: EngineUnderTest) -> None:
    """As the end of a turn is in a base model's template, which has no end token for it."""
    file = Tokenizer.from_file(str(e.model / "tokenizer.json"))
    special = {
        number: token.content
        for number, token in file.get_added_tokens_decoder().items()
        if token.special
    }
    sampling = Sampling(LENGTH, 1.0, stop=tuple(special.values()), ignore_eos=True)
    with ThreadPoolExecutor(CROWD) as pool:
        calls = [
            e.speak.generate(prompt(seed), replace(sampling, seed=seed), REQUEST_S)
            for seed in range(CROWD)
        ]
        answers = list(pool.map(e.run, calls))
    assert any(answer.finish_reason == "stop" for answer in answers), answers
    for answer in answers:
        *before, last = (token in special for token in answer.token_ids)
        assert not any(before), answer
        assert last == (answer.finish_reason == "stop"), answer


CHECKS: tuple[Callable[[EngineUnderTest], None], ...] = (
    answers_in_pieces_are_the_ones_that_come_whole,
    a_stop_text_or_token_ends_an_answer_and_is_part_of_it,
    a_stop_text_may_be_a_special_token,
    a_request_that_can_not_be_is_refused_in_pieces_too,
)
"""They need the first weights."""
