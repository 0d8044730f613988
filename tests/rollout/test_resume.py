"""Completions that go on after a failure: nothing of them is lost, made twice, or over its
budget."""

import random
from typing import Any

import pytest

from tests.rollout.conftest import MakeServer
from tests.rollout.sampling import sample, sampler_of
from titan_grpo.engines.generation import Sampled
from titan_grpo.errors import PeerError
from titan_grpo.rollout.client import consumption_order
from titan_grpo.rollout.messages import GroupDone, Ticket
from titan_grpo.rollout.partial import Made, Partial, oldest, worth_keeping
from titan_grpo.rollout.sampler import kv_survived
from titan_grpo.rollout.schedule import Server
from titan_grpo.samples import Completion, Group, Prompt

BUDGET = 20


def test_however_often_it_is_cut_a_completion_keeps_all_tokens_its_versions_and_budget() -> None:
    chance = random.Random(5)
    for _ in range(2000):
        part, version = Partial(), chance.randrange(5)
        made: list[tuple[int, float]] = []
        versions: list[int] = []
        of_tokens: list[int] = []
        while not part.finish_reason:
            left = part.left(BUDGET)
            assert left == BUDGET - len(made) > 0
            count, over = chance.randint(0, left), version + chance.randrange(3)
            reason = "abort" if chance.random() < 0.8 else "length" if count == left else "stop"
            tokens = tuple((chance.randrange(99), -chance.random()) for _ in range(count))
            sampled = Sampled(tuple(t for t, _ in tokens), tuple(p for _, p in tokens), reason)
            split = chance.randint(0, count)
            answer = Made(version, over, ((version, split), (over, count - split)))
            part = part.after(sampled, answer, BUDGET)
            made += tokens
            of_tokens += [version] * split + [over] * (count - split)
            versions += [version, over] if tokens else []
            version = over + chance.randrange(2)
        assert list(zip(part.token_ids, part.logprobs, strict=True)) == made
        assert len(made) <= BUDGET
        assert part.finish_reason in ("stop", "length")
        if made:
            assert (part.first, part.last) == (min(versions), max(versions))
            assert oldest([Partial(), part]) == part.first
            spans = part.completion("").token_spans
            assert [version for version, count in spans for _ in range(count)] == of_tokens


FINISHED = Partial((1, 2), (-1.0, -1.0), 3, 4, "stop")
OPEN = Partial((1,), (-1.0,), 4, 4)


@pytest.mark.parametrize(
    ("version", "needed", "mix", "kept"),
    [
        (5, 3, True, (FINISHED, OPEN)),
        (5, 4, True, (Partial(), OPEN)),
        (5, 5, True, (Partial(), Partial())),
        (5, 3, False, (FINISHED, Partial())),
        (4, 3, False, (FINISHED, OPEN)),
    ],
)
def test_parts_that_are_too_old_or_would_mix_versions_begin_again(
    version: int, needed: int, mix: bool, kept: tuple[Partial, Partial]
) -> None:
    assert worth_keeping((FINISHED, OPEN), version, needed, mix) == kept
    assert worth_keeping((Partial(),), version, needed, mix) == (Partial(),)


def test_a_part_with_few_tokens_of_too_old_versions_goes_on_where_a_share_is_borne() -> None:
    part = Partial((1, 2, 3), (-1.0,) * 3, 3, 4, spans=((3, 1), (4, 2)))
    assert worth_keeping((part,), 5, 4, True, 0.5) == (part,)
    assert worth_keeping((part,), 5, 4, True, 0.25) == (Partial(),)
    assert worth_keeping((part,), 5, 4, True) == (Partial(),)


def test_what_is_finished_when_a_server_fails_is_kept_and_not_asked_for_again(
    completion_server: MakeServer, model_dir: str
) -> None:
    server, sampler = completion_server(), sampler_of("digits", model_dir, 3, 4)
    state = Server(server.url, 4, True, "r:4:f", "vllm")
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
    state = Server(server.url, 3, not begins, "r:3:f", "vllm", committing)

    def commit(body: dict[str, Any]) -> tuple[int, object]:
        state.accepting, state.committing = False, 4
        return server.answer([7, 7], [-1.0, -1.0])

    server.behaviour = commit
    [completion] = sample(sampler, [Partial()], state).completions
    assert (completion.version_first, completion.version_last) == (3, 4)
    assert completion.token_spans == ((3, 2),)


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
