"""Every term of the loss, and its gradient, against the papers' formulas in float64: sequence by
sequence, plain autograd.

The reference knows nothing of rows, masks, chunks or sequence numbers, and shares no code with what
it checks.
"""

import math
from dataclasses import dataclass, replace

import pytest
import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from titan_grpo.algorithm.distribution import logit_mean_square, token_entropy, token_logprobs
from titan_grpo.algorithm.loss import LogitTerms, grpo_loss
from titan_grpo.algorithm.metrics import accumulate, flags
from titan_grpo.config_grpo import GRPO

WORDS, TEMPERATURE = 7, 0.8


@dataclass
class Sequence:
    logits: torch.Tensor
    """[n, WORDS], of the policy: what is differentiated."""
    tokens: torch.Tensor
    old: torch.Tensor
    engine: torch.Tensor
    reference: torch.Tensor
    weights: torch.Tensor
    advantage: float
    staleness: int


def make_sequences(seed=0, count=9):
    generator = torch.Generator().manual_seed(seed)

    def randn(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    out = []
    for number in range(count):
        n = int(torch.randint(1, 7, (), generator=generator))
        logits, tokens = 1.5 * randn(n, WORDS), torch.randint(0, WORDS, (n,), generator=generator)
        near = torch.log_softmax(logits / TEMPERATURE, -1).gather(-1, tokens[:, None])[:, 0]
        # Around the policy, so that ratios fall inside and outside of every bound.
        old, engine, reference = near + 0.3 * randn(n), near + 0.5 * randn(n), near + 0.7 * randn(n)
        weights = torch.rand(n, generator=generator, dtype=torch.float64)
        sequence = Sequence(
            logits, tokens, old, engine, reference, weights, float(randn(())), number % 4
        )
        out.append(sequence)
    out[1].engine = out[1].engine + 12.0
    out[2].advantage = 0.0
    return out


SEQUENCES = make_sequences()


def reference_loss(sequence, z, g, old_given):
    logp_all = torch.log_softmax(z / TEMPERATURE, -1)
    logp = torch.stack([logp_all[t, sequence.tokens[t]] for t in range(len(sequence.tokens))])
    now = logp.detach()
    if old_given:
        prox = sequence.old
    elif g.proximal_logprobs == "rollout":
        prox = sequence.engine
    elif g.proximal_logprobs == "interpolate" and sequence.staleness > 0:
        alpha = (sequence.staleness - 1) / sequence.staleness
        prox = sequence.engine + alpha * (now - sequence.engine)
    else:
        prox = now
    kept = [
        t
        for t in range(len(now))
        if not 0 < g.onpolicy_logp_threshold < 1 or now[t].exp() >= g.onpolicy_logp_threshold
    ]
    if not kept:
        return 0 * z.sum()
    advantage = sequence.advantage * (g.pos_scaler if sequence.advantage > 0 else g.neg_scaler)

    # Importance of the proximal policy against the engine.
    d = prox - sequence.engine
    tokens_d = [d[t].item() for t in kept]
    vetoed = g.rollout_is_veto_threshold > 0 and any(
        math.exp(x) < g.rollout_is_veto_threshold for x in tokens_d
    )

    def importance(t):
        if g.rollout_is_threshold == 0:
            return 1.0
        level = {
            "token": d[t].item(),
            "sequence": sum(tokens_d),
            "geometric": sum(tokens_d) / len(kept),
        }[g.rollout_is_level]
        w = math.exp(min(max(level, -20), 20))
        if g.rollout_is_mode == "truncate":
            w = min(w, g.rollout_is_threshold)
        elif (
            not (g.rollout_is_threshold_lower or 1 / g.rollout_is_threshold)
            <= w
            <= g.rollout_is_threshold
        ):
            w = 0.0
        return 0.0 if vetoed else w

    total = 0 * z.sum()
    gspo = torch.exp(sum(logp[t] - prox[t] for t in kept) / len(kept))
    for t in kept:
        ratio = gspo if g.policy_ratio_type == "sequence" else torch.exp(logp[t] - prox[t])
        low, high = 1 - g.clip_ratio_lower_bound, 1 + g.clip_ratio_upper_bound
        if g.policy_loss == "cispo":
            objective = min(max(ratio.item(), low), high) * advantage * logp[t]
        elif advantage >= 0:
            objective = advantage * (ratio if ratio <= high else high + 0 * ratio)
        else:
            objective = advantage * (ratio if ratio >= low else low + 0 * ratio)
        term = -importance(t) * objective
        x = sequence.reference[t] - logp[t]
        kl = {
            "k1": -x,
            "k2": x * x / 2,
            "k3": torch.exp(x) - 1 - x,
            "mse": x * x / 2,
            "abs": x.abs(),
        }[g.kl_estimator_type]
        term = term + g.kl_beta * kl
        term = term + ((g.logit_loss_weight * z[t]) ** 2).sum() / WORDS
        term = term + g.entropy_loss_weight * sum(
            logp_all[t, j].exp() * logp_all[t, j] for j in range(WORDS)
        )
        total = total + sequence.weights[t] * term
    return total


def expected(g, old_given):
    zs = [s.logits.clone().requires_grad_() for s in SEQUENCES]
    loss = sum(reference_loss(s, z, g, old_given) for s, z in zip(SEQUENCES, zs, strict=True))
    loss.backward()
    return loss.item(), [z.grad for z in zs]


def places(layout):
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


def measured(g, old_given, layout, chunk_tokens):
    rows, length, where = places(layout)
    float_names = ("rollout_logprobs", "weights", "advantages", "old", "reference", "staleness")
    b = {name: torch.zeros(rows, length, dtype=torch.float64) for name in float_names}
    b["labels"] = torch.full((rows, length), -100)
    b["sequence"] = torch.full((rows, length), -1)
    zs = [s.logits.clone().requires_grad_() for s in SEQUENCES]
    logits = torch.full((rows, length, WORDS), 3.0, dtype=torch.float64)
    for number, (s, z, (row, first)) in enumerate(zip(SEQUENCES, zs, where, strict=True)):
        stop = first + len(s.tokens)
        b["sequence"][row, max(first - 2, 0) : stop] = number
        b["labels"][row, first:stop] = s.tokens
        for name, values in (
            ("rollout_logprobs", s.engine),
            ("weights", s.weights),
            ("old", s.old),
            ("reference", s.reference),
        ):
            b[name][row, first:stop] = values
        b["advantages"][row, max(first - 2, 0) : stop] = s.advantage
        b["staleness"][row, max(first - 2, 0) : stop] = s.staleness
        logits = logits.index_put((torch.tensor(row), torch.arange(first, stop)), z)
    if layout == "rows":
        # What a micro-batch of one sequence per row may leave out.
        del b["sequence"]
        b["advantages"], b["staleness"] = b["advantages"][:, 1], b["staleness"][:, 1]
    terms = LogitTerms(
        token_entropy(logits, TEMPERATURE, chunk_tokens) if g.entropy_loss_weight else None,
        logit_mean_square(logits, chunk_tokens) if g.logit_loss_weight else None,
    )
    logprobs = token_logprobs(logits, b["labels"], TEMPERATURE, chunk_tokens)
    old, reference = b.pop("old") if old_given else None, b.pop("reference") if g.kl_beta else None
    loss, metrics = grpo_loss(logprobs, b, g, reference, old, terms)
    loss.backward()
    return loss.item(), [z.grad for z in zs], metrics


ALL_ON = GRPO(
    policy_ratio_type="sequence",
    kl_beta=0.2,
    kl_estimator_type="k3",
    pos_scaler=1.5,
    neg_scaler=0.5,
    onpolicy_logp_threshold=0.03,
    logit_loss_weight=0.3,
    entropy_loss_weight=0.05,
    rollout_is_level="geometric",
    rollout_is_mode="mask",
    rollout_is_threshold=1.6,
    rollout_is_threshold_lower=0.5,
    rollout_is_veto_threshold=1e-2,
)
CASES = {
    "grpo": GRPO(),
    "dapo clip-higher": GRPO(clip_ratio_lower_bound=0.1, clip_ratio_upper_bound=0.5),
    "gspo": GRPO(
        policy_ratio_type="sequence", clip_ratio_lower_bound=0.1, clip_ratio_upper_bound=0.1
    ),
    "cispo": GRPO(policy_loss="cispo", clip_ratio_lower_bound=1.0, clip_ratio_upper_bound=0.1),
    "cispo of sequences": GRPO(
        policy_loss="cispo", policy_ratio_type="sequence", clip_ratio_upper_bound=0.1
    ),
    "scalers": GRPO(pos_scaler=2.0, neg_scaler=0.25),
    "entropy": GRPO(entropy_loss_weight=0.3),
    "logits": GRPO(logit_loss_weight=0.7),
    "likely tokens": GRPO(onpolicy_logp_threshold=0.1),
    "likely tokens, gspo": GRPO(
        onpolicy_logp_threshold=0.1, policy_ratio_type="sequence", rollout_is_level="sequence"
    ),
    "engine as proximal": GRPO(proximal_logprobs="rollout"),
    "interpolated": GRPO(proximal_logprobs="interpolate"),
    "no correction": GRPO(rollout_is_threshold=0.0),
    "veto": GRPO(rollout_is_veto_threshold=0.5),
    "all": ALL_ON,
    "all, cispo, interpolated": replace(
        ALL_ON, policy_loss="cispo", proximal_logprobs="interpolate"
    ),
} | {
    f"kl {kind}": GRPO(kl_beta=0.4, kl_estimator_type=kind)
    for kind in ("k1", "k2", "k3", "mse", "abs")
}
CASES |= {
    f"correction {level} {mode}": GRPO(
        rollout_is_level=level, rollout_is_mode=mode, rollout_is_threshold=1.3
    )
    for level in ("token", "sequence", "geometric")
    for mode in ("truncate", "mask")
}


@pytest.mark.parametrize("old_given", [False, True], ids=["first step of a batch", "later step"])
@pytest.mark.parametrize("case", CASES)
def test_loss_and_gradient_are_those_of_the_formula_in_every_layout(case, old_given):
    g = CASES[case]
    loss, grads = expected(g, old_given)
    for layout, chunk_tokens in (("rows", 0), ("packed", 3)):
        ours, our_grads, _ = measured(g, old_given, layout, chunk_tokens)
        assert ours == pytest.approx(loss, rel=1e-10, abs=1e-12), layout
        torch.testing.assert_close(our_grads, grads, rtol=1e-9, atol=1e-12)
    assert max(grad.abs().max().item() for grad in grads) > 1e-3


def test_the_cases_differ_from_each_other():
    losses = {case: round(expected(g, True)[0], 9) for case, g in CASES.items()}
    same = {"grpo": "engine as proximal interpolated", "kl k2": "kl mse"}
    seen = {}
    for case, loss in losses.items():
        if loss in seen:
            assert case in same.get(seen[loss], ""), (
                f"{case} gives the loss of {seen[loss]}: one of them tests nothing"
            )
        seen.setdefault(loss, case)


def test_a_packed_micro_batch_has_the_metrics_of_one_with_a_row_per_sequence():
    one, packed = (measured(ALL_ON, True, layout, 0)[2] for layout in ("rows", "packed"))
    assert one.keys() == packed.keys()
    for name in one:
        assert packed[name].item() == pytest.approx(one[name].item(), rel=1e-12), name
    assert one["sequences_sum"] == len(SEQUENCES)
    assert 0 < one["kept_tokens_sum"] < one["tokens_sum"]
    assert one["vetoed_tokens_sum"] > 0
    assert one["importance_capped_tokens_sum"] > 0


def test_gspo_gives_every_token_of_a_sequence_the_same_share_of_the_gradient():
    logprobs = torch.tensor([[-1.0, -2.0, -0.5]], dtype=torch.float64, requires_grad=True)
    old = torch.tensor([[-1.1, -1.9, -0.6]], dtype=torch.float64)
    batch = {
        "labels": torch.ones(1, 3, dtype=torch.int64),
        "weights": torch.full((1, 3), 1 / 3, dtype=torch.float64),
        "advantages": torch.tensor([1.0], dtype=torch.float64),
        "rollout_logprobs": old.clone(),
    }
    grpo_loss(logprobs, batch, GRPO(policy_ratio_type="sequence"), old_logprobs=old)[0].backward()
    ratio = math.exp((0.1 - 0.1 + 0.1) / 3)
    assert logprobs.grad[0].tolist() == pytest.approx([-ratio / 3] * 3, rel=1e-12)


def test_loss_and_metrics_ask_the_device_for_no_value():
    # A fake tensor has none, so whatever would wait for the device raises.
    with FakeTensorMode():
        logits = torch.randn(2, 6, WORDS, requires_grad=True)
        batch = {
            name: torch.randn(2, 6)
            for name in ("weights", "advantages", "rollout_logprobs", "staleness")
        }
        batch |= {
            "labels": torch.ones(2, 6, dtype=torch.int64),
            "sequence": torch.zeros(2, 6, dtype=torch.int64),
        }
        batch["on_policy"] = torch.ones(2, 6, dtype=torch.bool)
        terms = LogitTerms(token_entropy(logits, 1.0, 4), logit_mean_square(logits, 4))
        for g in (ALL_ON, replace(ALL_ON, policy_loss="cispo", proximal_logprobs="interpolate")):
            logprobs = token_logprobs(logits, batch["labels"], 1.0, 4)
            loss, metrics = grpo_loss(logprobs, batch, g, torch.randn(2, 6), None, terms)
            loss.backward(retain_graph=True)
            summed = accumulate([metrics, metrics])
            assert flags(loss, torch.randn(()), 1.0, False).shape == (4,)
        assert summed.keys() == metrics.keys()
        with pytest.raises(DataDependentOutputException):
            loss.item()


@pytest.mark.parametrize("layout", ["rows", "packed"])
def test_the_loss_passes_gradcheck_where_it_is_smooth(layout):
    g = replace(
        ALL_ON, onpolicy_logp_threshold=0.0, clip_ratio_lower_bound=0.9, clip_ratio_upper_bound=9.0
    )
    rows, length, _ = places(layout)
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(
        rows, length, WORDS, dtype=torch.float64, generator=generator, requires_grad=True
    )
    labels = torch.randint(0, WORDS, (rows, length), generator=generator)
    old = token_logprobs(logits, labels, TEMPERATURE, 0).detach()
    noise = torch.randn(rows, length, dtype=torch.float64, generator=generator)
    batch = {
        "labels": labels,
        "weights": torch.rand(rows, length, dtype=torch.float64, generator=generator),
        "advantages": torch.randn(rows, 1, dtype=torch.float64, generator=generator),
        "rollout_logprobs": old + 0.1 * noise,
    }

    def loss(z):
        terms = LogitTerms(token_entropy(z, TEMPERATURE, 5), logit_mean_square(z, 5))
        return grpo_loss(
            token_logprobs(z, labels, TEMPERATURE, 5), batch, g, old + noise, old, terms
        )[0]

    assert torch.autograd.gradcheck(loss, (logits,), eps=1e-6, atol=1e-7)
