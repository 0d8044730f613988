"""Completions that go on after a failure: nothing of them is lost, made twice, or over its
budget."""

import random
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest

from tests.rigs.present import present
from tests.rollout.conftest import Behaviour, MakeServer, answer, piece
from tests.rollout.sampling import holding, sample, sampler_of
from titan_grpo.engines.generation import Sampled
from titan_grpo.errors import PeerError
from titan_grpo.protocol.messages import ServerState
from titan_grpo.rollout.client import consumption_order
from titan_grpo.rollout.dispatch import worth_keeping
from titan_grpo.rollout.messages import GroupDone, Ticket
from titan_grpo.rollout.sampler import (
    Interrupted,
    OtherWeights,
    kv_survived,
    tokens_to_stop,
    versioned,
    went_on,
)
from titan_grpo.rollout.schedule import Server
from titan_grpo.samples import NO_TOKENS, Completion, Group, Prompt

BUDGET = 20


def test_however_often_it_is_cut_a_completion_keeps_all_tokens_its_versions_and_budget() -> None:
    chance = random.Random(5)
    for _ in range(2000):
        part, version = NO_TOKENS, chance.randrange(5)
        made: list[tuple[int, float]] = []
        versions: list[int] = []
        of_tokens: list[int] = []
        while not part.finish_reason:
            left = BUDGET - len(made)
            assert left > 0
            count, over = chance.randint(0, left), version + chance.randrange(3)
            reason = "abort" if chance.random() < 0.8 else "length" if count == left else "stop"
            tokens = tuple((chance.randrange(99), -chance.random()) for _ in range(count))
            sampled = Sampled(tuple(t for t, _ in tokens), tuple(p for _, p in tokens), reason)
            split = chance.randint(0, count)
            spans = ((f"r:{version}:f", 0, split), (f"r:{over}:f", split, count))
            sampled = replace(sampled, versions=spans)
            answer = present(versioned(sampled, f"r:{version}:f", version, over))
            part = went_on(part, answer, BUDGET)
            assert reason in ("abort", part.finish_reason)
            made += tokens
            of_tokens += [version] * split + [over] * (count - split)
            versions += [version, over] if tokens else []
            # Also to a server that is behind.
            version = max(0, over + chance.randrange(-2, 2))
        assert list(zip(part.token_ids, part.logprobs, strict=True)) == made
        assert len(made) <= BUDGET
        assert part.finish_reason in ("stop", "length")
        if made:
            assert (part.version_first, part.version_last) == (min(versions), max(versions))
            assert [version for version, n in part.token_spans for _ in range(n)] == of_tokens


def breaking_off(text: str) -> Behaviour:
    return lambda _: (200, iter([piece(list(map(ord, text)))]))


@pytest.mark.parametrize("breaks", [1, 2])
def test_a_stop_over_a_break_ends_the_completion_with_its_last_token(
    completion_server: MakeServer, breaks: int
) -> None:
    sampler, parts = sampler_of("calculator", "", 1, BUDGET, "]==", "END"), [NO_TOKENS]
    texts = "no [E", *"N"[: breaks - 1], "END] yet"[breaks:]
    for attempt, text in enumerate(texts[:-1]):
        torn = completion_server()
        torn.behaviour = breaking_off(text)
        with pytest.raises(PeerError):
            sample(sampler, parts, holding(torn.url, 3 + attempt), attempt)
    last, ids = completion_server(), list(map(ord, texts[-1]))
    # It does not find what began in the prompt that it got.
    last.behaviour = lambda _: answer(ids, [-1.0] * len(ids), "length")
    (completion,) = sample(sampler, parts, holding(last.url, 3 + breaks), breaks).completions
    assert "".join(map(chr, completion.token_ids)) == "no [END"
    assert (completion.finish_reason, len(completion.logprobs)) == ("stop", len("no [END"))
    assert completion.token_spans[-1] == (3 + breaks, 3 - breaks)


def test_a_stop_over_a_break_may_have_characters_of_several_tokens() -> None:
    def found(before: str, more: str) -> int | None:
        def spell(ids: Sequence[int]) -> str:
            return bytes(ids).decode(errors="replace")

        return tokens_to_stop(spell, before.encode(), more.encode(), ["\u20ac;"])

    assert found("a\u20ac", ";b") == 1
    assert found("a", "\u20ac;") is None, "the engine finds one in its own answer"
    assert found("\u20ac;a", "b") is None, "and has passed over this one"


FINISHED = Completion((1, 2), (-1.0, -1.0), "stop", 3, 4, "")
OPEN = Completion((1,), (-1.0,), "", 4, 4, "")


@pytest.mark.parametrize(
    ("version", "needed", "mix", "kept"),
    [
        (5, 3, True, (FINISHED, OPEN)),
        (5, 4, True, (NO_TOKENS, OPEN)),
        (5, 5, True, (NO_TOKENS, NO_TOKENS)),
        (5, 3, False, (FINISHED, NO_TOKENS)),
        (4, 3, False, (FINISHED, OPEN)),
    ],
)
def test_parts_that_are_too_old_or_would_mix_versions_begin_again(
    version: int, needed: int, mix: bool, kept: tuple[Completion, Completion]
) -> None:
    assert worth_keeping((FINISHED, OPEN), version, needed, mix) == kept
    assert worth_keeping((NO_TOKENS,), version, needed, mix) == (NO_TOKENS,)


def test_a_part_with_few_tokens_of_too_old_versions_goes_on_where_a_share_is_borne() -> None:
    part = Completion((1, 2, 3), (-1.0,) * 3, "", 3, 4, "", spans=((3, 1), (4, 2)))
    assert worth_keeping((part,), 5, 4, True, 0.5) == (part,)
    assert worth_keeping((part,), 5, 4, True, 0.25) == (NO_TOKENS,)
    assert worth_keeping((part,), 5, 4, True) == (NO_TOKENS,)


def test_a_tools_answer_is_no_part_of_the_share_of_too_old_tokens() -> None:
    def part(*turns: tuple[int, int, int]) -> Completion:
        """Turns of (version, its sampled tokens, tokens of the tool's answer to them)."""
        sampled = tuple(f for _, own, tool in turns for f in (True,) * own + (False,) * tool)
        spans = tuple((version, own + tool) for version, own, tool in turns)
        ids, logprobs = (1,) * len(sampled), (-1.0,) * len(sampled)
        return Completion(ids, logprobs, "", 3, 4, "", sampled=sampled, spans=spans)

    assert part((3, 1, 9), (4, 3, 0)).fresh_enough(4, 0.5)
    assert not part((3, 3, 0), (4, 1, 9)).fresh_enough(4, 0.5)


def test_what_is_finished_when_a_server_fails_is_kept_and_not_asked_for_again(
    completion_server: MakeServer, model_dir: str
) -> None:
    server, sampler = completion_server(), sampler_of("digits", model_dir, 3, 4)
    state = holding(server.url, 4)
    parts = [FINISHED, OPEN, FINISHED]
    server.behaviour = lambda _: (500, {"error": "engine is dead"})
    with pytest.raises(PeerError):
        sample(sampler, parts, state)
    assert parts == [FINISHED, OPEN, FINISHED]
    server.behaviour = lambda b: server.answer([7] * b["max_tokens"], [-1.0] * b["max_tokens"])
    group = sample(sampler, parts, state, attempt=1)
    assert [(c.token_ids, c.version_first, c.version_last) for c in group.completions] == [
        ((1, 2), 3, 4),
        ((1, 7, 7, 7), 4, 4),
        ((1, 2), 3, 4),
    ]
    assert [body["prompt"][-1] for body in server.bodies] == [1, 1]
    assert {body["max_tokens"] for body in server.bodies} == {3}


@pytest.mark.parametrize("begins", [False, True])
def test_a_completion_that_ends_while_a_commit_runs_may_be_of_the_version_that_comes(
    completion_server: MakeServer, model_dir: str, begins: bool
) -> None:
    server, sampler = completion_server(), sampler_of("digits", model_dir, 1, 2)
    committing = 4 if begins else None
    known = Server(ServerState(server.url, 3, not begins, "r:3:f", committing=committing))

    def commit(body: dict[str, Any]) -> tuple[int, object]:
        known.state = ServerState(server.url, 3, False, "r:3:f", committing=4)
        return server.answer([7, 7], [-1.0, -1.0])

    server.behaviour = commit
    [completion] = sample(sampler, [NO_TOKENS], known).completions
    assert (completion.version_first, completion.version_last) == (3, 4)
    assert completion.token_spans == ((3, 2),)


@pytest.mark.parametrize(
    ("recomputed", "retractions", "fit"), [(True, 0, False), (True, 1, True), (False, 0, True)]
)
def test_tokens_on_kv_that_a_commit_should_have_discarded_are_not_trained_on(
    completion_server: MakeServer, recomputed: bool, retractions: int, fit: bool
) -> None:
    server, sampler = completion_server(), sampler_of("calculator", "", 1, 2)
    sampler._spec = replace(sampler._spec, stream_completions=False, kv_recomputed=recomputed)
    spans = [{"version": f"r:{3 + at}:f", "start": at, "end": at + 1} for at in range(2)]
    meta = {
        "finish_reason": {"type": "length", "length": 2},
        "output_token_logprobs": [[-1.0, 55, None], [-1.0, 56, None]],
        "weight_versions": spans,
        "num_retractions": retractions,
    }
    server.behaviour = lambda _: (200, {"output_ids": [55, 56], "meta_info": meta})
    known = Server(ServerState(server.url, 3, True, "r:3:f", "sglang"))
    with nullcontext() if fit else pytest.raises(OtherWeights, match="kv_kept"):
        [completion] = sample(sampler, [NO_TOKENS], known).completions
        assert completion.token_spans == ((3, 1), (4, 1))


def test_an_answer_whose_servers_version_the_ledger_lost_meanwhile_is_interrupted_and_not_kept(
    completion_server: MakeServer, model_dir: str
) -> None:
    server, parts = completion_server(), [NO_TOKENS]
    known = holding(server.url, 3)

    def lose(body: dict[str, Any]) -> tuple[int, object]:
        known.state = ServerState(server.url, None, False, "")
        return server.good(body)

    server.behaviour = lose
    with pytest.raises(Interrupted):
        sample(sampler_of("digits", model_dir, 1, 4), parts, known)
    assert parts == [NO_TOKENS]


def test_the_lowest_prompts_or_the_freshest_weights_are_consumed_first() -> None:
    def done(index: int, version: int) -> GroupDone:
        completion = Completion((1,), (-1.0,), "stop", version, version, "")
        return GroupDone(Ticket(index), Group(Prompt(index, (1,)), (completion,)), {})

    ready = {index: done(index, version) for index, version in ((4, 2), (1, 1), (3, 2), (2, 3))}
    assert consumption_order(ready, "ready") == [1, 2, 3, 4]
    assert consumption_order(ready, "freshest") == [2, 3, 4, 1]


def test_kv_that_survived_a_commit_is_seen_where_the_engine_counts_its_losses() -> None:
    spans = (("r:1:f", 0, 2), ("r:2:f", 2, 3))
    assert [
        kv_survived(Sampled((1,), (-1.0,), "stop", spans, count)) for count in (None, 0, 1)
    ] == [False, True, False]
    assert not kv_survived(Sampled((1,), (-1.0,), "stop", spans[:1], 0))
