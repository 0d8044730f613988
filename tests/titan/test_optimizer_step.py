"""What a training step says of itself: its loss is the sum of its terms, whatever it is trained on.
And the passes over the model that it makes.

The model is a table: the logits after a token are that token's row.
"""

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.algorithm.loss_inputs import ALL_ON
from tests.rigs.jobs import job
from titan_grpo.algorithm.balance import TokenCost
from titan_grpo.algorithm.batch import plan
from titan_grpo.config import GRPO, Rollout
from titan_grpo.samples import Completion, Group, Prompt
from titan_grpo.titan import compat

compat.prepare()

from titan_grpo.titan.data import TextMixin, batch_options  # noqa: E402 - patches come first
from titan_grpo.titan.modules import PackedAttention, RouterReplay  # noqa: E402
from titan_grpo.titan.optimizer_step import (  # noqa: E402
    Outcome,
    Stepper,
    least_of_share,
    reduce_metrics,
)
from titan_grpo.titan.step_records import loss_values  # noqa: E402

WORDS = 6
TABLE, REFERENCE = torch.randn(2, WORDS, WORDS, generator=torch.Generator().manual_seed(0))
TEXT = torch.tensor([[0, 1, 2, 3], [4, 5, 0, 1]]), torch.tensor([[1, 2, 3, 4], [5, 0, 1, -100]])
GROUPS = [
    Group(
        Prompt(number, (number, 1)),
        tuple(
            Completion(
                *((2, reward, 3), (-1.8, -1.7, -1.9), "stop", number % 2, number % 2, "s"),
                reward=float(reward),
            )
            for reward in (0, 1)
        ),
    )
    for number in range(4)
]
"""Half of them of version 0, the others of version 1."""
ONE_RANK = SimpleNamespace(get_optional_mesh=lambda name: None, ep_enabled=False)


@pytest.fixture(autouse=True)
def one_rank(tmp_path: Path) -> Iterator[None]:
    """The process group of a trainer of one rank."""
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group(
        "gloo", store=store, rank=0, world_size=1, timeout=timedelta(seconds=30)
    )
    yield
    dist.destroy_process_group()


def outcome_of(
    grpo: GRPO,
    version: int = 0,
    groups: Sequence[Group] = GROUPS,
    passes: Counter[str] | None = None,
    rate: float = 0.01,
) -> Outcome:
    """One training step on groups at a version, and on TEXT if the job mixes text in. ``passes``
    counts the forward passes of each model."""
    rollout = Rollout(servers=["http://a:1"], max_completion_tokens=4)
    config = job(grpo=grpo, rollout=rollout, training={"local_batch_size": 2, "seq_len": 8})
    model, reference = (
        torch.nn.Embedding.from_pretrained(table.clone(), freeze=False)
        for table in (TABLE, REFERENCE)
    )

    def logits(of: torch.nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        if passes is not None:
            passes["policy" if of is model else "reference"] += 1
        found: torch.Tensor = of(batch["input"])
        return found

    trainer: Any = SimpleNamespace(
        job_config=config,
        pipeline=None,
        policy=model,
        model_parts=[model],
        device=torch.device("cpu"),
        logits=logits,
        computing=nullcontext,
        optimizers=torch.optim.SGD(model.parameters(), lr=rate),
        lr_schedulers=SimpleNamespace(step=lambda: None),
        checkpointer=SimpleNamespace(maybe_wait_for_staging=lambda: None),
        parallel_dims=ONE_RANK,
    )
    batch = plan(groups, 1, batch_options(config, TokenCost(), WORDS))
    (mine,) = batch.micro_batches()
    pairs = [({"input": each.pop("inputs"), **each}, each.pop("labels")) for each in mine]
    spec = SimpleNamespace(
        build_tokenizer_fn=lambda job: None,
        build_dataloader_fn=lambda **given: [({"input": TEXT[0]}, TEXT[1])] * 9,
    )
    text = TextMixin(spec, config, 1, 0) if grpo.ptx_mixin_batchsize else None
    second = reference if grpo.kl_beta else None
    stepper = Stepper(trainer, second, PackedAttention(), RouterReplay(), text)
    return stepper.run(iter(pairs), batch.steps, version, False)


def step_of(grpo: GRPO, *arguments: Any, **options: Any) -> dict[str, float]:
    """The metrics of a step (see ``outcome_of``) of which all optimizer steps were taken."""
    outcome = outcome_of(grpo, *arguments, **options)
    assert outcome.taken == outcome.steps, outcome.unhealthy
    return loss_values(reduce_metrics(outcome, ONE_RANK))


def test_a_gradient_norm_that_is_not_a_number_skips_its_step_and_is_the_largest_of_the_batch() -> (
    None
):
    outcome = outcome_of(replace(ALL_ON, num_microbatches=3), rate=math.inf)
    assert (outcome.taken, outcome.steps, outcome.skipped) == (1, 3, 2)
    assert math.isnan(outcome.grad_norm)


@pytest.mark.parametrize("text", [0, 2])
@pytest.mark.parametrize("minibatches", [1, 2])
def test_the_loss_of_a_step_is_the_sum_of_its_terms(text: int, minibatches: int) -> None:
    grpo = replace(ALL_ON, num_microbatches=minibatches, ptx_mixin_batchsize=text, ptx_scale=0.5)
    values = step_of(grpo)
    terms = ("policy_term", "kl_term", "entropy_term", "logit_term")
    total = sum(values[f"loss/{name}"] for name in terms)
    if text:
        assert values["loss/ptx"] > 0.1
        total += 0.5 * values["loss/ptx"]
    assert values["loss/total"] == pytest.approx(total, rel=1e-5)


def test_means_of_ratio_and_correction_are_over_the_tokens_in_the_loss() -> None:
    # Half of the tokens are left out; one optimizer step, so every ratio is 1.
    left = GRPO(token_staleness_limit=0, rollout_is_threshold=0.0)
    values = step_of(left, version=1)
    assert (values["loss/kept_fraction"], values["ratio/mean"]) == (0.5, 1.0)
    assert values["importance/mean"] == 1.0


def test_the_staleness_of_tokens_is_of_sampled_ones_however_many_passes_a_step_makes() -> None:
    flags, spans = (True, False, True), ((0, 2), (1, 1))
    (group, *_) = GROUPS
    mixed = [replace(c, sampled=flags, spans=spans) for c in group.completions]
    groups = [replace(group, completions=tuple(mixed))]
    for epochs in (1, 2):
        values = step_of(GRPO(num_epochs=epochs), version=2, groups=groups)
        assert values["staleness/token_mean"] == 1.5


@pytest.mark.parametrize(
    ("grpo", "policy", "reference"),
    [
        (GRPO(), 4, 0),
        (GRPO(kl_beta=0.1, num_epochs=3, proximal_logprobs="rollout"), 12, 4),
        (GRPO(num_microbatches=4), 4 + 3, 0),
        (GRPO(num_epochs=2), 8 + 4, 0),
        (GRPO(num_epochs=2, proximal_logprobs="rollout", m2_threshold=0.04), 8 + 8, 0),
        (GRPO(num_microbatches=4, top_entropy_share=0.5), 4 + 4, 0),
        (GRPO(num_microbatches=4, policy_loss="cispo"), 4, 0),
        (GRPO(num_microbatches=4, policy_loss="topr"), 4, 0),
    ],
    ids=[
        *("one step", "a reference", "minibatches", "epochs", "M2PO before each optimizer step"),
        "entropies beside the minibatches",
        *("CISPO has no proximal policy", "TOPR has no proximal policy"),
    ],
)
def test_a_step_reads_a_model_that_does_not_change_once(
    grpo: GRPO, policy: int, reference: int
) -> None:
    # GROUPS make four micro-batches, for one optimizer step or for four.
    passes: Counter[str] = Counter()
    step_of(grpo, passes=passes)
    assert passes == Counter(policy=policy, reference=reference)


def test_tokens_whose_entropies_differ_by_rounding_are_chosen_together() -> None:
    # As those after one prefix do, computed in batches of other shapes or on other ranks.
    entropies = torch.tensor([2.0, 1.000001, 1.0, 0.5])
    for rounded in (entropies, entropies[[0, 2, 1, 3]]):
        for share in (0.5, 0.75):
            chosen = rounded >= least_of_share(rounded, share)
            assert chosen.tolist() == [True, True, True, False]


def test_only_tokens_of_the_policy_before_the_batch_and_on_its_kv_count_as_on_policy() -> None:
    def counted(groups: Sequence[Group], version: int, epochs: int = 1, parts: int = 1) -> float:
        outcome = outcome_of(GRPO(num_epochs=epochs, num_microbatches=parts), version, groups)
        return reduce_metrics(outcome, ONE_RANK)["on_policy_count"]

    assert [counted(GROUPS, 0, epochs) for epochs in (1, 2)] == [12, 12], "of 24 in each pass"
    assert counted(GROUPS, 0, parts=4) == 6

    def waited(completion: Completion) -> Completion:
        return replace(completion, version_first=0, version_last=1, spans=((1, 3),))

    late = [replace(group, completions=tuple(map(waited, group.completions))) for group in GROUPS]
    assert counted(late, 1) == 0


def test_the_loss_is_a_mean_over_optimizer_steps_that_were_skipped_too() -> None:
    skipped = outcome_of(GRPO(num_microbatches=2, grad_norm_limit=1e-9))
    assert (skipped.taken, skipped.steps) == (0, 2)
    taken = outcome_of(GRPO(num_microbatches=2), rate=0.0)
    found = [reduce_metrics(outcome, ONE_RANK)["loss"] for outcome in (skipped, taken)]
    assert found[0] == pytest.approx(found[1], abs=1e-9)
    assert abs(found[1]) > 1e-4


def test_a_share_of_the_tokens_of_high_entropy_is_of_sampled_ones() -> None:
    # Half of the 24 follow a 1, and all of these have the greatest entropy: the second tokens of
    # all completions, whose advantages cancel out, and the fourth ones of the better four.
    values = step_of(GRPO(top_entropy_share=0.5, rollout_is_threshold=0.0))
    assert values["loss/policy_term"] == pytest.approx(-4 / 24, rel=1e-4)


@pytest.mark.parametrize(("share", "least"), [(0.5, 3.0), (0.7, 2.0), (0.01, 4.0)])
def test_the_share_of_tokens_of_high_entropy_is_rounded_and_is_one_at_least(
    share: float, least: float
) -> None:
    values = torch.tensor([1.0, 4.0, 2.0, 3.0])
    assert least_of_share(values, share) == pytest.approx(least, abs=2e-4)
    assert least_of_share(values[:0], share) == math.inf


@pytest.mark.parametrize(
    ("left_out", "masked"),
    [({}, 0), ({"token_staleness_limit": 0}, 1), ({"neg_scaler": 0.0}, 1)],
    ids=["none", "by their age", "by an advantage of 0"],
)
def test_m2po_bounds_the_second_moment_of_the_tokens_in_the_policy_term(
    left_out: dict[str, Any], masked: int
) -> None:
    # One token of 0.09, and nine older ones of 1e-4 with a negative advantage: together below 0.04.
    logprob = torch.log_softmax(TABLE[1], -1)[2].item()

    def group(number: int, version: int, better: float, worse: float) -> Group:
        logprobs = {1.0: logprob - better, 0.0: logprob + worse}
        return Group(
            Prompt(number, (0, 1)),
            tuple(
                Completion((2,), (engine,), "stop", version, version, "s", reward=reward)
                for reward, engine in logprobs.items()
            ),
        )

    groups = [group(0, 1, 0.3, 0.0), *(group(n, 0, 0.0, 0.01) for n in range(1, 10))]
    grpo = GRPO(m2_threshold=0.04, rollout_is_threshold=0.0, **left_out)
    values = step_of(grpo, version=1, groups=groups)
    assert values["importance/cut_fraction"] == masked / 20
