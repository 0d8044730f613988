"""How an episode of several turns ends: by its task, or by the run's limits."""

from collections.abc import Sequence
from contextlib import nullcontext
from itertools import compress

import pytest

from tests.rollout.agents import says, talker
from tests.rollout.conftest import GroupOf, MakeServer, answer
from tests.rollout.sampling import Letters, holding, sample
from titan_grpo.rollout.codec import TextCodec
from titan_grpo.rollout.messages import RolloutSpec
from titan_grpo.rollout.sampler import NotAccepted, Sampler
from titan_grpo.rollout.task_runner import Codec, TaskRunner, Turn
from titan_grpo.samples import NO_TOKENS, Prompt

BUDGET = 10


class Dialogue:
    """A task that answers each turn with two tokens, unless the turn has a full stop."""

    def __init__(self) -> None:
        self.asked = 0

    def prompt(self, index: int, codec: Codec) -> Prompt:
        return Prompt(index, codec.encode("go"))

    async def turn(
        self, prompt: Prompt, turns: Sequence[Turn], codec: Codec
    ) -> Sequence[int] | None:
        self.asked += 1
        return None if "." in turns[-1].text else codec.encode("hm")

    async def episode_reward(self, prompt: Prompt, turns: Sequence[Turn]) -> float:
        return 0.0


@pytest.mark.parametrize("left", range(3))
@pytest.mark.parametrize(("last", "reason"), [(".", "stop"), ("?", "length")])
def test_an_episode_without_room_for_its_tasks_answer_ends_by_its_length(
    completion_server: MakeServer, left: int, last: str, reason: str
) -> None:
    server, task = completion_server(), Dialogue()
    ids = list(Letters().encode("a" * (BUDGET - left - 1) + last))
    server.behaviour = lambda _: answer(ids, [-1.0] * len(ids), "stop")
    spec = RolloutSpec(model_dir="", group_size=1, max_completion_tokens=BUDGET)
    sampler = Sampler(spec, TaskRunner(task, Letters(), spec))
    (completion,) = sample(sampler, [NO_TOKENS], holding(server.url, 3)).completions
    assert (completion.token_ids, completion.finish_reason) == (tuple(ids), reason)


@pytest.mark.parametrize(
    ("turns", "tokens", "reason", "asked"),
    [(1, 1, "stop", 0), (3, 1, "stop", 2), (8, BUDGET, "length", 0)],
)
def test_a_task_is_not_asked_after_the_last_of_the_turns_or_a_turn_that_the_budget_cuts(
    completion_server: MakeServer, turns: int, tokens: int, reason: str, asked: int
) -> None:
    server, task = completion_server(), Dialogue()
    server.behaviour = lambda _: answer([97] * tokens, [-1.0] * tokens, reason)
    spec = RolloutSpec(model_dir="", group_size=1, max_completion_tokens=BUDGET, max_turns=turns)
    sampler = Sampler(spec, TaskRunner(task, Letters(), spec))
    (completion,) = sample(sampler, [NO_TOKENS], holding(server.url, 3)).completions
    assert (completion.finish_reason, completion.answers, task.asked) == (reason, asked, asked)
    seeds = {body["seed"] for body in server.bodies}
    assert len(seeds) == len(server.bodies) == asked + 1, "each turn has random numbers of its own"


def test_a_turn_of_the_policy_without_a_token_ends_its_episode(
    completion_server: MakeServer,
) -> None:
    server, task = completion_server(), Dialogue()
    turns = [[97], []]
    server.behaviour = lambda _: answer(ids := turns.pop(0), [-1.0] * len(ids), "stop")
    spec = RolloutSpec(model_dir="", group_size=1, max_completion_tokens=BUDGET)
    sampler = Sampler(spec, TaskRunner(task, Letters(), spec))
    (completion,) = sample(sampler, [NO_TOKENS], holding(server.url, 3)).completions
    assert completion.sampled == (True, False, False)
    assert (completion.finish_reason, task.asked) == ("stop", 1)


@pytest.mark.parametrize(("least", "left_out"), [(3, False), (4, True)])
def test_the_least_length_of_a_completion_counts_what_the_policy_sampled(
    completion_server: MakeServer, least: int, left_out: bool
) -> None:
    # Three turns of one token, with two tokens of the task between them.
    server, task = completion_server(), Dialogue()
    server.behaviour = lambda _: answer([97], [-1.0], "stop")
    spec = RolloutSpec(
        model_dir="",
        group_size=1,
        max_completion_tokens=BUDGET,
        max_turns=3,
        min_completion_tokens=least,
    )
    sampler = Sampler(spec, TaskRunner(task, Letters(), spec))
    with pytest.raises(NotAccepted, match="too_short") if left_out else nullcontext():
        sample(sampler, [NO_TOKENS], holding(server.url, 3))


def test_an_agents_own_limit_cuts_each_of_its_turns_and_is_not_the_runs(
    group_of: GroupOf, codec: TextCodec
) -> None:
    group = group_of(talker(3, max_tokens=2), [says(codec, "one", "two")])
    (completion,) = group.completions
    said = list(compress(completion.token_ids, completion.sampled))
    assert said == [token for text in ("one", "two", "one") for token in codec.encode(text)[:2]]
    assert completion.finish_reason == "stop"
