"""What rank 0 keeps of a micro-batch: the tokens of each sequence and their log-probabilities."""

import pytest
import torch

from titan_grpo.algorithm.rows import Layout, Row, build, compact
from titan_grpo.samples import Completion, Group, Prompt
from titan_grpo.titan.shown import FirstBatch, sequences, shown


def completion(tokens, sampled=(), reward=0.0) -> Completion:
    return Completion(tokens, (-1.0,) * len(tokens), "stop", 3, 3, "http://a:1", reward, sampled)


def first_batch(completions, pack: bool) -> FirstBatch:
    prompt = Prompt(0, (5, 6))
    rows = [Row(0, prompt, each, 1.0, 1.0) for each in completions]
    (batch,) = build(compact([rows], Layout(64, 32, 0, 8, pack)))
    # a log-probability that says which token it is of
    logprobs = -batch["labels"].float() / 100
    return FirstBatch(batch["inputs"], batch["labels"], batch["sequence"], logprobs)


@pytest.mark.parametrize("pack", [False, True])
def test_each_sequence_has_the_log_probabilities_of_its_own_tokens(pack) -> None:
    batch = first_batch([completion((7, 8, 9)), completion((10,)), completion((7, 8))], pack)
    assert sequences(batch) == {
        (5, 6, 7, 8, 9): [None, None, -0.07, -0.08, -0.09],
        (5, 6, 10): [None, None, -0.1],
        (5, 6, 7, 8): [None, None, -0.07, -0.08],
    }


def test_a_tools_answer_has_no_log_probability() -> None:
    batch = first_batch([completion((7, 8, 9), (True, False, True))], pack=False)
    assert sequences(batch) == {(5, 6, 7, 8, 9): [None, None, -0.07, None, -0.09]}


def test_a_sequence_whose_last_token_the_batch_does_not_have_is_left_out() -> None:
    batch = first_batch([completion((7, 8), (True, False)), completion((9,))], pack=False)
    assert list(sequences(batch)) == [(5, 6, 9)]


def test_a_log_probability_that_is_no_number_is_none() -> None:
    batch = first_batch([completion((7, 8))], pack=False)
    nothing = batch._replace(logprobs=torch.full_like(batch.logprobs, float("nan")))
    assert sequences(nothing) == {(5, 6, 7, 8): [None] * 4}


def test_completions_of_other_ranks_are_not_shown() -> None:
    mine, other = completion((7, 8), reward=0.5), completion((9,))
    group = Group(Prompt(0, (5, 6)), (other, mine))
    (found,) = shown([group], sequences(first_batch([mine], pack=False)))
    assert (found.prompt, found.tokens, found.reward) == ([5, 6], [7, 8], 0.5)
    assert (found.engine, found.trainer) == ([-1.0, -1.0], [-0.07, -0.08])
