"""Completions in pieces: wherever the bytes are cut, the same tokens come out as of an answer in
one piece."""

import asyncio
import json
import random
from collections.abc import Awaitable, Callable
from itertools import pairwise
from typing import Any

import pytest

from titan_grpo.engines import sglang, vllm
from titan_grpo.engines.generation import (
    INTERVAL,
    Events,
    Piece,
    Sampled,
    Sampling,
    StreamedAnswer,
)
from titan_grpo.engines.http import AsyncDriver, Call, HttpRefused
from titan_grpo.errors import ServerRefused, ServerUnreachable

IDS, LOGPROBS = tuple(range(40, 49)), tuple(-0.5 - i for i in range(9))
VLLM, SGLANG = (engine.stream([1, 2], Sampling(9, seed=3), 1.0) for engine in (vllm, sglang))
SPANS: list[dict[str, Any]] = [
    {"version": "r:7:f", "start": 0, "end": 5},
    {"version": "r:8:f", "start": 5, "end": 9},
]
CUTS = ((0, 1), (1, 5), (5, 9))


def events(*contents: object, end: bytes = b"\n\n") -> bytes:
    """A body of server-sent events."""
    return b"".join(
        b"data: "
        + (c if isinstance(c, bytes) else json.dumps(c, ensure_ascii=False).encode())
        + end
        for c in contents
    )


def of_vllm(start: int, end: int, reason: str | None = None) -> dict[str, Any]:
    """An event of vLLM: what is new, with text of several bytes a character."""
    logprobs = {"token_logprobs": LOGPROBS[start:end], "tokens": ["Î"] * (end - start)}
    spans = {"weight_versions": SPANS} if reason else {}
    choice = {
        "index": 0,
        "text": "Î🙂" * (end - start),
        "token_ids": IDS[start:end],
        "logprobs": logprobs,
    }
    return {"id": "cmpl-1", "choices": [choice | {"finish_reason": reason} | spans]}


def of_sglang(
    start: int, end: int, reason: dict[str, Any] | None = None, late: int = 0
) -> dict[str, Any]:
    """An event of SGLang: the tokens from ``start`` on. ``late``: so many tokens came after its
    numbers were written."""
    meta = {
        "output_token_logprobs": [[lp, i, None] for lp, i in zip(LOGPROBS, IDS, strict=True)][
            start : end + late
        ],
        "completion_tokens": end,
        "finish_reason": reason,
        "weight_versions": [s | {"end": min(s["end"], end)} for s in SPANS if s["start"] < end],
        "num_retractions": 1,
    }
    return {"text": "Î🙂" * end, "output_ids": IDS[start : end + late], "meta_info": meta}


LENGTH = {"type": "length", "length": 9}
BODIES = {
    "vllm": (
        VLLM,
        events(*(of_vllm(a, b) for a, b in CUTS[:2]), of_vllm(5, 9, "length"), b"[DONE]"),
    ),
    "vllm, its end alone": (
        VLLM,
        events(*(of_vllm(a, b) for a, b in CUTS), of_vllm(9, 9, "length"), b"[DONE]"),
    ),
    "vllm, with usage": (
        VLLM,
        events(of_vllm(0, 9, "length"), {"choices": [], "usage": {}}, b"[DONE]", end=b"\r\n\r\n"),
    ),
    "sglang, all so far": (
        SGLANG,
        events(of_sglang(0, 1), of_sglang(0, 5), of_sglang(0, 9, LENGTH), b"[DONE]"),
    ),
    "sglang, overtaken": (
        SGLANG,
        events(
            of_sglang(0, 1, late=2), of_sglang(0, 5, late=4), of_sglang(0, 9, LENGTH), b"[DONE]"
        ),
    ),
    "sglang, what is new": (
        SGLANG,
        events(of_sglang(0, 1), of_sglang(1, 5), of_sglang(5, 9, LENGTH), b"[DONE]"),
    ),
}
VERSIONS = (("r:7:f", 0, 5), ("r:8:f", 5, 9))


def whole(answer: StreamedAnswer) -> Sampled:
    assert answer.whole
    return answer.sampled(answer.count, answer.finish_reason)


@pytest.mark.parametrize("name", BODIES)
def test_wherever_a_body_is_cut_its_tokens_are_the_same(name: str) -> None:
    call, body = BODIES[name]
    wanted = Sampled(IDS, LOGPROBS, "length", VERSIONS, 1 if call is SGLANG else None)
    chance = random.Random(3)
    for count in (0, len(body) - 1, *range(1, 40)):
        cuts = [0, *sorted(chance.sample(range(1, len(body)), count)), len(body)]
        answer = StreamedAnswer(call)
        for start, end in pairwise(cuts):
            answer.take(body[start:end])
            assert answer.count == len(answer._logprobs)
        assert whole(answer) == wanted


def test_payloads_come_when_their_line_is_whole_and_other_lines_say_nothing() -> None:
    taken = Events()
    assert taken.take(b": ping\r\n\r\nevent: x\ndata:1\nda") == [b"1"]
    assert taken.take("ta: Î".encode()[:-1]) == []
    assert taken.take("Î".encode()[-1:] + b"\n\n") == ["Î".encode()]


@pytest.mark.parametrize("call", [VLLM, SGLANG], ids=["vllm", "sglang"])
def test_a_streamed_request_differs_from_the_other_one_in_nothing_but_that(
    call: Call[Piece],
) -> None:
    dialect = vllm if call is VLLM else sglang
    plain = dialect.generate([1, 2], Sampling(9, seed=3), 1.0)
    asked = dict(call.json)
    assert asked.pop("stream") is True
    parameters = asked if dialect is vllm else asked["sampling_params"]
    assert parameters.pop("stream_interval") == INTERVAL
    assert (asked, call.path, call.timeout_s) == (plain.json, plain.path, plain.timeout_s)


@pytest.mark.parametrize(
    ("call", "event", "status"),
    [
        (
            VLLM,
            {"error": {"message": "engine is dead", "type": "InternalServerError", "code": 500}},
            500,
        ),
        (VLLM, {"error": "engine is dead"}, 500),
        (SGLANG, {"error": {"message": "too long", "code": 400}}, 400),
        (
            SGLANG,
            of_sglang(0, 0, {"type": "abort", "message": "too long", "status_code": 400}),
            400,
        ),
    ],
)
def test_an_error_among_the_events_is_a_refusal_and_what_came_before_it_stays(
    call: Call[Piece], event: dict[str, Any], status: int
) -> None:
    answer = StreamedAnswer(call)
    answer.take(events(of_vllm(0, 5) if call is VLLM else of_sglang(0, 5)))
    with pytest.raises(HttpRefused, match="broke its answer off") as refused:
        answer.take(events(event))
    assert refused.value.status == status
    assert answer.sampled(5, "abort").token_ids == IDS[:5]


@pytest.mark.parametrize(
    ("call", "event"),
    [
        (VLLM, of_vllm(5, 6, "abort")),
        (SGLANG, of_sglang(0, 6, {"type": "abort", "message": "Aborted"})),
    ],
)
def test_an_abort_is_an_end_with_what_there_is(call: Call[Piece], event: dict[str, object]) -> None:
    answer = StreamedAnswer(call)
    answer.take(events(of_vllm(0, 5) if call is VLLM else of_sglang(0, 5), event, b"[DONE]"))
    sampled = whole(answer)
    assert (sampled.token_ids, sampled.logprobs, sampled.finish_reason) == (
        IDS[:6],
        LOGPROBS[:6],
        "abort",
    )


def test_an_abort_in_sglangs_queue_repeats_the_last_token_with_all_log_probabilities() -> None:
    answer, last = StreamedAnswer(SGLANG), of_sglang(0, 5, {"type": "abort", "message": "Aborted"})
    answer.take(events(of_sglang(0, 1), of_sglang(1, 5), last | {"output_ids": IDS[4:5]}))
    sampled = whole(answer)
    assert (sampled.token_ids, sampled.logprobs) == (IDS[:5], LOGPROBS[:5])


def test_what_is_kept_of_an_answer_has_the_spans_of_its_tokens_only() -> None:
    answer = StreamedAnswer(SGLANG)
    answer.take(events(of_sglang(0, 9)))
    assert not answer.whole
    assert answer.sampled(6, "abort").versions == (("r:7:f", 0, 5), ("r:8:f", 5, 6))
    assert answer.sampled(5, "abort").versions == (("r:7:f", 0, 5),)
    assert answer.sampled(0, "abort") == Sampled((), (), "abort", (), 1)


@pytest.mark.parametrize(
    "body",
    [
        b"data: {\n\n",
        b"data: 1\n\n",
        b'data: {"choices": [1, 2]}\n\n',
        b'data: {"choices": [{}]}\n\n',
    ],
)
def test_an_event_of_another_form_is_refused(body: bytes) -> None:
    for call in (VLLM, SGLANG):
        with pytest.raises(ServerRefused, match="must"):
            StreamedAnswer(call).take(body)


def test_tokens_that_were_left_out_are_refused() -> None:
    answer = StreamedAnswer(SGLANG)
    answer.take(events(of_sglang(0, 1)))
    with pytest.raises(ServerRefused, match="left out the tokens 1 to 4"):
        answer.take(events(of_sglang(5, 9)))


Speak = Callable[[asyncio.StreamWriter], Awaitable[object]]


def listen(speak: Speak, answer: StreamedAnswer, call: Call[Piece] = VLLM) -> None:
    """Take the answer of a real server, which says what a test writes, and hangs up."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 1000000\r\n\r\n")
        await speak(writer)
        writer.close()

    async def run() -> None:
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        driver = AsyncDriver(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
        try:
            await driver.stream(call, answer)
        finally:
            await driver.close()
            server.close()

    asyncio.run(run())


def test_a_connection_that_breaks_leaves_what_came() -> None:
    async def speak(writer: asyncio.StreamWriter) -> None:
        writer.write(events(of_vllm(0, 5)))

    answer = StreamedAnswer(VLLM)
    with pytest.raises(ServerUnreachable, match=r"http://127\.0\.0\.1:\d+: .* broke off"):
        listen(speak, answer)
    assert answer.sampled(answer.count, "abort").token_ids == IDS[:5]


def test_a_connection_that_breaks_after_the_last_token_has_broken_nothing() -> None:
    async def speak(writer: asyncio.StreamWriter) -> None:
        writer.write(events(of_vllm(0, 9, "length")))

    answer = StreamedAnswer(VLLM)
    listen(speak, answer)
    assert whole(answer).token_ids == IDS


def test_silence_counts_as_broken_and_slowness_does_not() -> None:
    async def slowly(writer: asyncio.StreamWriter) -> None:
        never = asyncio.get_running_loop().create_future()
        for start in range(6):
            writer.write(events(of_vllm(start, start + 1)))
            await asyncio.wait([never], timeout=0.6)
        await asyncio.wait([never], timeout=120)

    call = vllm.stream([1], Sampling(9), 3.0)
    answer = StreamedAnswer(call)
    with pytest.raises(ServerUnreachable, match=r"silent for 3 s"):
        listen(slowly, answer, call)
    assert answer.count == 6, "3.6 s in all, and no silence of 3 s before the last token"


def test_comments_that_keep_a_connection_open_are_silence() -> None:
    """vLLM sends them with --sse-keep-alive-interval, also while its engine is frozen."""

    async def comment(writer: asyncio.StreamWriter) -> None:
        never = asyncio.get_running_loop().create_future()
        body = events(of_vllm(0, 5), of_vllm(5, 9))
        for piece in (body[:-20], body[-20:], *[b": keep-alive\n\n"] * 600):
            writer.write(piece)
            sent.append(piece)
            await asyncio.wait([never], timeout=0.2)

    sent: list[bytes] = []
    answer, call = StreamedAnswer(VLLM), vllm.stream([1], Sampling(9), 1.0)
    with pytest.raises(ServerUnreachable, match=r"silent for 1 s"):
        listen(comment, answer, call)
    assert answer.count == 9
    assert len(sent) < 30
