"""What every engine must do with the KV of requests that run over a commit: keep it, or compute it
anew, as it is asked."""

import math
from collections.abc import Callable
from pathlib import Path

from tests.conformance.commits import Sender, sender
from tests.conformance.crowd import FEW, prompt
from tests.conformance.engine import MAX_DIFFERENCE, EngineUnderTest, assert_aborted, furthest
from tests.conformance.reference import Reference
from titan_grpo.engines.generation import Sampled

Held = list[tuple[Sampled, int]]
"""By seed: an answer, and how many of its tokens came before the commit."""


def _over_a_commit(
    e: EngineUnderTest, trainer: Sender, version: int, recompute: bool
) -> tuple[Path, Held]:
    """Requests over a commit: the directory of the new weights, and those that the pause held."""
    trainer.sync(version, version)
    weights, folder = trainer.make(version + 1)
    labels = [trainer.label(version), trainer.label(version + 1)]
    before: list[int] = []
    with trainer.link(weights) as link:
        staged = trainer.stage(link, weights, version + 1)
        with e.crowd(labels[0]) as crowd:

            def paused() -> None:
                crowd.wait_still()
                before.extend(crowd.counts())
                if recompute:
                    trainer.control.drop_kv()

            assert trainer.apply(link, staged, labels[1], paused).ok
            answers = crowd.end()
    assert_aborted(e, answers, labels)
    # Of the one whose answer comes whole it is not known whether it was at work when the pause
    # came.
    return folder, list(zip(answers, before, strict=False))


def _off(folder: Path, held: Held) -> list[float]:
    """How far the FEW-th token after the commit is from what the new weights give it after the
    whole sequence, in nats. Not the last one: how many there are until the end is for the machine
    to say, and after enough of them old KV hardly counts."""
    reference, off = Reference(folder), []
    for seed, (sampled, before) in enumerate(held):
        ids = [*prompt(seed), *sampled.token_ids[: before + FEW]]
        off.append(
            furthest(
                sampled.logprobs[before + FEW - 1 : before + FEW], reference.logprobs(ids)[-1:]
            )
        )
    return off


def requests_in_flight_are_computed_anew_where_that_is_asked(e: EngineUnderTest) -> None:
    """None is lost; from the commit on a token has the log-probability that the new weights alone
    give it. Where the engine counts how often a request lost its KV, it has counted this."""
    with sender(e) as trainer:
        folder, held = _over_a_commit(e, trainer, 30, recompute=True)
    off = _off(folder, held)
    assert max(off) <= MAX_DIFFERENCE, off
    for sampled, _ in held:
        assert sampled.retractions is None or sampled.retractions >= len(sampled.versions) - 1, (
            sampled
        )


def requests_in_flight_keep_their_kv_otherwise(e: EngineUnderTest) -> None:
    """None is lost, and the tokens of each are of the version before and of the one after, in
    that order. What comes after the commit is of both weights: the check above would find this."""
    with sender(e) as trainer:
        folder, held = _over_a_commit(e, trainer, 32, recompute=False)
    off = _off(folder, held)
    assert 4 * MAX_DIFFERENCE < max(off) < math.inf, off


CHECKS: tuple[Callable[[EngineUnderTest], None], ...] = (
    requests_in_flight_are_computed_anew_where_that_is_asked,
    requests_in_flight_keep_their_kv_otherwise,
)
"""They leave the server with weights of their own."""
