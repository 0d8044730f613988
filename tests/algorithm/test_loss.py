"""Every term of the loss and its gradient against the float64 reference, and single rules by
hand."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from tests.algorithm.loss_inputs import ALL_ON, filled
from tests.algorithm.loss_reference import Sequence, sequence_loss
from titan_grpo.algorithm.distribution import logit_mean_square, token_entropy, token_logprobs
from titan_grpo.algorithm.loss import LogitTerms, Metrics, accumulate, flags, grpo_loss
from titan_grpo.algorithm.objective import (
    Spans,
    gmpo_objective,
    kl_term,
    least_left_out,
    second_moments,
)
from titan_grpo.config import GRPO
from titan_grpo.errors import ConfigError

WORDS, TEMPERATURE = 7, 0.8


def make_sequences(seed: int = 0, count: int = 9) -> tuple[list[Sequence], list[torch.Tensor]]:
    """Sequences and the policy's logits at their tokens."""
    generator = torch.Generator().manual_seed(seed)

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    out, logits = [], []
    for _ in range(count):
        n = int(torch.randint(1, 7, (), generator=generator))
        z, tokens = 1.5 * randn(n, WORDS), torch.randint(0, WORDS, (n,), generator=generator)
        near = torch.log_softmax(z / TEMPERATURE, -1).gather(-1, tokens[:, None])[:, 0]
        # Around the policy, so that ratios fall inside and outside of every bound.
        old, engine, reference = near + 0.3 * randn(n), near + 0.5 * randn(n), near + 0.7 * randn(n)
        weights = torch.rand(n, generator=generator, dtype=torch.float64)
        # A completion that ran over commits has tokens of several versions.
        staleness = torch.randint(0, 3, (n,), generator=generator).sort(descending=True).values
        out.append(Sequence(tokens, old, engine, reference, weights, float(randn(1)), staleness))
        logits.append(z)
    out[1].engine = out[1].engine + 12.0
    out[2].advantage = 0.0
    return out, logits


SEQUENCES, LOGITS = make_sequences()


def expected(g: GRPO, old_given: bool) -> tuple[float, list[torch.Tensor]]:
    zs = [z.clone().requires_grad_() for z in LOGITS]
    losses = [
        sequence_loss(s, z, TEMPERATURE, g, old_given) for s, z in zip(SEQUENCES, zs, strict=True)
    ]
    loss = torch.stack(losses).sum()
    loss.backward()
    return loss.item(), [z.grad for z in zs if z.grad is not None]


def places(layout: str) -> tuple[int, int, list[tuple[int, int]]]:
    """(rows, length, where each sequence begins): one per row, or as many in a row as fit into 14
    tokens, prompts between."""
    if layout == "rows":
        return len(SEQUENCES), 8, [(row, 1) for row in range(len(SEQUENCES))]
    out, row, column = [], 0, 0
    for s in SEQUENCES:
        if column + 2 + len(s.tokens) > 14:
            row, column = row + 1, 0
        out.append((row, column + 2))
        column += 2 + len(s.tokens)
    return row + 1, 14, out


def measured(
    g: GRPO, old_given: bool, layout: str, chunk_tokens: int
) -> tuple[float, list[torch.Tensor], Metrics]:
    rows, length, where = places(layout)
    float_names = ("rollout_logprobs", "weights", "advantages", "old", "reference", "staleness")
    b = {name: torch.zeros(rows, length, dtype=torch.float64) for name in float_names}
    b["labels"] = torch.full((rows, length), -100)
    b["sequence"] = torch.full((rows, length), -1)
    zs = [z.clone().requires_grad_() for z in LOGITS]
    logits = torch.full((rows, length, WORDS), 3.0, dtype=torch.float64)
    for number, (s, z, (row, first)) in enumerate(zip(SEQUENCES, zs, where, strict=True)):
        own, whole = slice(first, first + len(s.tokens)), slice(max(first - 2, 0), first + len(z))
        b["labels"][row, own], b["rollout_logprobs"][row, own] = s.tokens, s.engine
        b["weights"][row, own], b["old"][row, own] = s.weights, s.old
        b["reference"][row, own] = s.reference
        b["sequence"][row, whole], b["advantages"][row, whole] = number, s.advantage
        b["staleness"][row, own] = s.staleness.double()
        logits = logits.index_put((torch.tensor(row), torch.arange(own.start, own.stop)), z)
    b["on_policy"] = b["sequence"] < 0
    terms = LogitTerms(
        token_entropy(logits, TEMPERATURE, chunk_tokens) if g.entropy_loss_weight else None,
        logit_mean_square(logits, chunk_tokens) if g.logit_loss_weight else None,
    )
    logprobs = token_logprobs(logits, b["labels"], TEMPERATURE, chunk_tokens)
    old, reference = b.pop("old") if old_given else None, b.pop("reference") if g.kl_beta else None
    loss, metrics = grpo_loss(logprobs, b, g, reference, old, terms)
    loss.backward()
    return loss.item(), [z.grad for z in zs if z.grad is not None], metrics


SEQUENCE = GRPO(policy_ratio_type="sequence")
CASES = {
    "grpo": GRPO(),
    "dapo clip-higher": GRPO(clip_ratio_lower_bound=0.1, clip_ratio_upper_bound=0.5),
    "gspo": replace(SEQUENCE, clip_ratio_lower_bound=0.1, clip_ratio_upper_bound=0.1),
    "dual clip": GRPO(clip_ratio_dual=1.35),
    "cispo": GRPO(policy_loss="cispo", cispo_weight_max=1.4),
    "gmpo": GRPO(policy_loss="gmpo", clip_ratio_lower_bound=0.1, clip_ratio_upper_bound=0.1),
    "sapo": GRPO(policy_loss="sapo", sapo_tau_neg=3.0),
    "topr": GRPO(policy_loss="topr"),
    "kl in the reward": GRPO(kl_beta=0.4, kl_in_reward=True),
    "kl of no weight": GRPO(kl_in_reward=True),
    "scalers": GRPO(pos_scaler=2.0, neg_scaler=0.25),
    "entropy": GRPO(entropy_loss_weight=0.3),
    "logits": GRPO(logit_loss_weight=0.7),
    "likely tokens": GRPO(onpolicy_logp_threshold=0.1),
    "likely tokens, gspo": replace(
        SEQUENCE, onpolicy_logp_threshold=0.1, rollout_is_level="sequence"
    ),
    "engine as proximal": GRPO(proximal_logprobs="rollout"),
    "interpolated": GRPO(proximal_logprobs="interpolate"),
    "young tokens": GRPO(token_staleness_limit=1),
    "young tokens, gspo": replace(SEQUENCE, token_staleness_limit=0, kl_beta=0.2),
    "no correction": GRPO(rollout_is_threshold=0.0),
    "veto": GRPO(rollout_is_veto_threshold=0.5),
    "all": ALL_ON,
    "all, cispo, interpolated": replace(
        ALL_ON, policy_loss="cispo", proximal_logprobs="interpolate"
    ),
}
for kind in ("k1", "k2", "k3", "mse", "abs"):
    CASES[f"kl {kind}"] = replace(GRPO(kl_beta=0.4), kl_estimator_type=kind)
for level in ("token", "sequence", "geometric"):
    for mode in ("truncate", "mask"):
        bounded = GRPO(rollout_is_threshold=1.3)
        CASES[f"correction {level} {mode}"] = replace(
            bounded, rollout_is_level=level, rollout_is_mode=mode
        )


@pytest.mark.parametrize("old_given", [False, True], ids=["first step of a batch", "later step"])
@pytest.mark.parametrize("case", CASES)
def test_loss_and_gradient_are_those_of_the_formula_in_every_layout(
    case: str, old_given: bool
) -> None:
    loss, grads = expected(CASES[case], old_given)
    for layout, chunk_tokens in (("rows", 0), ("packed", 3)):
        ours, our_grads, _ = measured(CASES[case], old_given, layout, chunk_tokens)
        assert ours == pytest.approx(loss, rel=1e-10, abs=1e-12), layout
        torch.testing.assert_close(our_grads, grads, rtol=1e-9, atol=1e-12)
    assert max(grad.abs().max().item() for grad in grads) > 1e-3


def test_the_cases_differ_from_each_other() -> None:
    seen: dict[float, str] = {}
    same = {"grpo": "kl of no weight, engine as proximal, interpolated", "kl k2": "kl mse"}
    for case, g in CASES.items():
        loss = round(expected(g, True)[0], 9)
        if loss in seen:
            assert case in same.get(seen[loss], ""), f"{case} gives the loss of {seen[loss]}"
        seen.setdefault(loss, case)


def test_a_packed_micro_batch_has_the_metrics_of_one_with_a_row_per_sequence() -> None:
    one, packed = (measured(ALL_ON, True, layout, 0)[2] for layout in ("rows", "packed"))
    assert one.keys() == packed.keys()
    for name in one:
        assert packed[name].item() == pytest.approx(one[name].item(), rel=1e-12), name
    assert 0 < one["kept_tokens_sum"] < one["tokens_sum"]
    assert one["vetoed_tokens_sum"] > 0
    assert one["importance_capped_tokens_sum"] > 0


def test_loss_and_metrics_ask_the_device_for_no_value() -> None:
    # A fake tensor has none, so whatever would wait for the device raises.
    with FakeTensorMode():
        logits = torch.randn(2, 6, WORDS, requires_grad=True)
        names = ("weights", "advantages", "rollout_logprobs", "staleness")
        batch = {name: torch.randn(2, 6) for name in names}
        batch["labels"] = torch.ones(2, 6, dtype=torch.int64)
        batch["sequence"] = torch.zeros(2, 6, dtype=torch.int64)
        batch["on_policy"] = torch.ones(2, 6, dtype=torch.bool)
        terms = LogitTerms(token_entropy(logits, 1.0, 4), logit_mean_square(logits, 4))
        for case in ("all", "all, cispo, interpolated"):
            logprobs = token_logprobs(logits, batch["labels"], 1.0, 4)
            loss, metrics = grpo_loss(logprobs, batch, CASES[case], torch.randn(2, 6), None, terms)
            loss.backward(retain_graph=True)
            assert accumulate([metrics, metrics]).keys() == metrics.keys()
            assert flags(loss, torch.randn(()), 1.0, False).shape == (4,)
        with pytest.raises(DataDependentOutputException):
            loss.item()


# Single rules, by hand.

MASK = torch.tensor([[False, True, True], [True, True, True]])


def micro_batch(
    advantages: tuple[float, float] = (1.0, -1.0),
    mask: torch.Tensor = MASK,
    rollout: float = -1.0,
) -> dict[str, torch.Tensor]:
    return filled(
        {
            "labels": torch.where(mask, 3, -100),
            "weights": mask / mask.sum().clamp(min=1),
            "advantages": torch.tensor(advantages)[:, None].expand(mask.shape),
            "rollout_logprobs": torch.full(mask.shape, rollout) * mask,
        }
    )


def gradient_of(values: torch.Tensor, *arguments: Any) -> torch.Tensor:
    """Gradient of the loss at these log-probabilities."""
    logprobs = values.clone().requires_grad_()
    grpo_loss(logprobs, *arguments)[0].backward()
    assert logprobs.grad is not None
    return logprobs.grad


@pytest.mark.parametrize("key", ["kl_beta", "entropy_loss_weight", "logit_loss_weight"])
def test_a_weight_without_what_it_weights_is_refused(key: str) -> None:
    weight: dict[str, Any] = {key: 0.1}
    with pytest.raises(ConfigError, match=rf"grpo\.{key} = 0\.1 needs"):
        grpo_loss(torch.zeros(2, 3), micro_batch(), replace(GRPO(), **weight))


def normalised(logits: torch.Tensor) -> torch.Tensor:
    return torch.log_softmax(logits, -1)


@pytest.mark.parametrize("drift", [0.0, 0.23])
@pytest.mark.parametrize("estimator", ["k2", "k3", "mse", "in the reward"])
def test_the_mean_kl_gradient_over_the_engines_tokens_is_that_of_the_divergence(
    estimator: Any, drift: float
) -> None:
    """Over every word, weighted by the engine's probability: the expectation itself. The engine is
    ``drift`` nats away from the policy at the mean."""
    generator = torch.Generator().manual_seed(4)
    words = 8
    start, noise, other = (
        torch.randn(words, generator=generator, dtype=torch.float64) for _ in range(3)
    )
    shift = noise / noise.abs().mean() * drift
    engine, reference = normalised(start + shift), normalised(start + 0.4 * other)
    z = start.clone().requires_grad_()
    exact = (normalised(z).exp() * (normalised(z) - reference)).sum()
    exact.backward()
    assert z.grad is not None
    wanted, z.grad = z.grad.clone(), None
    g = GRPO(
        kl_beta=1.0,
        kl_in_reward=estimator == "in the reward",
        kl_estimator_type="k3" if estimator == "in the reward" else estimator,
        rollout_is_threshold=10.0,
    )
    batch = filled(
        {
            "labels": torch.arange(words)[:, None],
            "weights": engine.exp()[:, None],
            "advantages": torch.zeros(words, 1, dtype=torch.float64),
            "rollout_logprobs": engine[:, None],
        }
    )
    loss, metrics = grpo_loss(normalised(z)[:, None], batch, g, reference[:, None])
    loss.backward()
    assert z.grad is not None
    assert (z.grad - wanted).norm() <= 0.01 * wanted.norm()
    if estimator == "k3":
        assert metrics["kl_loss_sum"].item() == pytest.approx(exact.item(), rel=0.01)


def test_the_kl_in_the_reward_has_the_gradient_of_whole_completions() -> None:
    """Two tokens, each of three words, every completion weighted by its probability."""
    tables = [
        torch.randn(4, 3, generator=torch.Generator().manual_seed(n)).double() for n in (1, 2)
    ]
    policy, reference = tables
    pairs = [(a, b) for a in range(3) for b in range(3)]

    def both(table: torch.Tensor) -> torch.Tensor:
        logp = normalised(table)
        return torch.stack([torch.stack([logp[3, a], logp[a, b]]) for a, b in pairs])

    z = policy.clone().requires_grad_()
    whole = both(z).sum(-1)
    (whole.exp() * (whole - both(reference).sum(-1))).sum().backward()
    assert z.grad is not None
    wanted, z.grad = z.grad.clone(), None
    probabilities = both(policy).sum(-1).exp()
    batch = filled(
        {
            "labels": torch.tensor(pairs),
            "weights": probabilities[:, None].expand(9, 2),
            "advantages": torch.zeros(9, 2, dtype=torch.float64),
            "rollout_logprobs": both(policy),
        }
    )
    grpo_loss(both(z), batch, GRPO(kl_beta=1.0, kl_in_reward=True), both(reference))[0].backward()
    torch.testing.assert_close(z.grad, wanted, rtol=1e-9, atol=1e-12)


def test_the_docstring_example_of_m2po_and_nothing_to_leave_out() -> None:
    moments = torch.tensor([0.9, 0, 0.01, 0.5, 0.02], dtype=torch.float64)
    assert least_left_out(moments, 0.04) == 0.5
    assert least_left_out(moments, 0.5) == math.inf
    assert least_left_out(torch.tensor([0.25, 0.75]), 0.5) == math.inf, "the mean may be that"
    assert least_left_out(torch.zeros(3), 0.04) == math.inf
    moved = second_moments(
        torch.tensor([-1.0, -1.0, -3.0, -3.0]),
        torch.full((4,), -2.0),
        torch.tensor([1.0, -1.0, 1.0, -2.0]),
    )
    assert moved.tolist() == [1, 0, 0, 1], "only where the step would go on"


def test_tokens_outside_the_second_moment_are_in_no_policy_term_and_count_as_cut() -> None:
    outside = torch.tensor([[True, False, False], [False, True, False]])
    batch = micro_batch() | {"outside_m2": outside}
    gradient = gradient_of(torch.full((2, 3), -1.0), batch, GRPO())
    assert torch.equal(gradient != 0, ~outside & MASK)
    _, metrics = grpo_loss(torch.full((2, 3), -1.0), batch, GRPO())
    assert metrics["importance_capped_tokens_sum"] == (outside & MASK).sum()


def test_only_tokens_of_high_entropy_are_in_the_policy_term() -> None:
    chosen = torch.tensor([[False, False, True], [True, False, True]])
    batch = micro_batch() | {"high_entropy": chosen}
    gradient = gradient_of(torch.full((2, 3), -1.0), batch, GRPO())
    assert torch.equal(gradient != 0, chosen & MASK)


def test_extreme_differences_stay_finite_in_loss_and_gradient() -> None:
    grpo = GRPO(kl_beta=0.1, rollout_is_level="sequence", rollout_is_threshold=5.0)
    logprobs = torch.full((2, 3), -200.0, requires_grad=True)
    old = torch.full((2, 3), -1.0)
    loss, metrics = grpo_loss(logprobs, micro_batch(rollout=-400.0), grpo, torch.zeros(2, 3), old)
    loss.backward()
    assert logprobs.grad is not None
    assert logprobs.grad.isfinite().all()
    assert all(value.isfinite() for value in (loss, *metrics.values()))


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_an_all_masked_micro_batch_is_a_zero_with_a_graph(level: Any) -> None:
    logprobs = torch.zeros(2, 3, requires_grad=True)
    empty = micro_batch((0.0, 0.0), torch.zeros_like(MASK))
    grpo = GRPO(policy_ratio_type=level, kl_beta=0.1)
    loss, metrics = grpo_loss(logprobs, empty, grpo, torch.zeros(2, 3))
    loss.backward()
    assert logprobs.grad is not None
    assert not logprobs.grad.any()
    of_none = {metrics.pop(name).item() for name in ("logprob_max", "minus_logprob_max")}
    assert of_none == {-math.inf}, "the largest of no token loses against any other rank's"
    assert all(value == 0 for value in (loss, *metrics.values()))


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_values_at_ignored_positions_do_not_matter(level: Any) -> None:
    grpo = GRPO(policy_ratio_type=level, rollout_is_level=level, kl_beta=0.3)
    results = []
    for values in (torch.full((2, 3), -0.5), torch.where(MASK, -0.5, 7.0)):
        batch = micro_batch() | {"rollout_logprobs": 2 * values}
        others = (batch, grpo, 3 * values, 1.5 * values)
        _, metrics = grpo_loss(values, *others)
        figures = {name: value.item() for name, value in metrics.items()}
        results.append((figures, gradient_of(values, *others).tolist()))
    assert results[0] == results[1]


def test_only_the_policy_gets_a_gradient() -> None:
    logprobs, ref, old = (torch.full((2, 3), -x, requires_grad=True) for x in (1.0, 1.2, 1.1))
    grpo_loss(logprobs, micro_batch(), GRPO(kl_beta=0.1), ref, old)[0].backward()
    assert logprobs.grad is not None
    assert ref.grad is None
    assert old.grad is None


def test_the_on_policy_gap_leaves_out_rows_of_older_versions() -> None:
    batch = micro_batch() | {"on_policy": torch.tensor([[True], [False]])}
    logprobs = torch.tensor([[0.0, -1.5, -1.25], [-9.0, -9.0, -9.0]])
    metrics = grpo_loss(logprobs, batch, GRPO())[1]
    names = ("on_policy_count_sum", "on_policy_gap_sum", "on_policy_gap_max")
    assert [metrics[name].item() for name in names] == pytest.approx([2, 0.75, 0.5])


def test_log_probabilities_are_summed_apart_by_the_sign_of_the_advantage() -> None:
    batch = micro_batch() | {"advantages": torch.tensor([[0.5], [-0.5]])}
    logprobs = torch.tensor([[-0.5, -1.5, -1.0], [-4.0, -2.0, -3.0]])
    metrics = grpo_loss(logprobs, batch, GRPO())[1]
    labelled = batch["labels"] >= 0
    for row, name in enumerate(("better", "worse")):
        own = logprobs[row][labelled[row]]
        assert metrics[f"{name}_count_sum"] == own.numel()
        assert metrics[f"{name}_logprob_sum"].item() == pytest.approx(own.sum().item())


def test_the_extremes_are_of_labelled_tokens_and_the_least_is_negated() -> None:
    batch = micro_batch()
    labelled = batch["labels"] >= 0
    assert not labelled.all()
    logprobs = torch.where(labelled, torch.tensor([[-0.5, -1.5, -1.0], [-4.0, -2.0, -3.0]]), -9.0)
    metrics = grpo_loss(logprobs, batch, GRPO())[1]
    assert metrics["logprob_max"] == logprobs[labelled].max()
    assert -metrics["minus_logprob_max"] == logprobs[labelled].min()


def test_a_ratio_past_its_bound_is_clipped_only_where_the_advantage_pushes_it_further() -> None:
    batch, old = micro_batch(), torch.full((2, 3), -1.0)  # the first row's advantage is positive
    for moved, name, tokens in ((0.5, "clipped_high", 2), (-0.5, "clipped_low", 3)):
        metrics = grpo_loss(old + moved, batch, GRPO(), None, old)[1]
        clipped = {n: metrics[f"{n}_tokens_sum"].item() for n in ("clipped_high", "clipped_low")}
        assert clipped == {"clipped_high": 0, "clipped_low": 0} | {name: tokens}


def test_gmpo_bounds_no_ratio_from_below_where_the_lower_bound_is_1() -> None:
    ones = torch.ones(1, 2)
    spans = Spans(ones.bool(), torch.zeros(1, 2, dtype=torch.int64))
    for low, mean in ((1.0, math.exp(-5)), (0.5, math.sqrt(0.5))):
        found = gmpo_objective(torch.tensor([[-10.0, 0.0]]), -ones, spans, low, 0.2)
        assert found.tolist() == [pytest.approx([-mean] * 2)]


def test_a_token_that_was_very_unlikely_for_the_engine_weighs_ten_in_the_kl_term() -> None:
    now, reference = torch.tensor([0.0]), torch.tensor([1.0])
    for times, weight in ((15.0, 10.0), (5.0, 5.0)):
        found = [
            kl_term(now, reference, torch.tensor([-math.log(times)]), estimator).item()
            for estimator in ("k2", "k3")
        ]
        assert found == pytest.approx([weight / 2, weight * (math.e - 2)])


def test_a_threshold_of_1_leaves_every_token_in_the_loss() -> None:
    metrics = grpo_loss(torch.full((2, 3), -1.0), micro_batch(), GRPO(onpolicy_logp_threshold=1.0))
    assert metrics[1]["kept_tokens_sum"] == MASK.sum()
