"""Packed rows against one row per sequence, on the tiny models: the same log-probabilities, the
same gradients."""

import random
from contextlib import nullcontext

import pytest
import torch

from tests.rigs.tiny_model import loaded
from titan_grpo.algorithm.batch import BatchOptions, plan
from titan_grpo.algorithm.distribution import token_logprobs
from titan_grpo.algorithm.rows import attention_rows
from titan_grpo.errors import ConfigError
from titan_grpo.samples import Completion, Group, Prompt
from titan_grpo.titan import tiny

OPTIONS = BatchOptions(token_budget=160, max_len=80)


def random_groups(seed):
    source = random.Random(seed)
    groups = []
    for index in range(source.randint(1, 4)):
        prompt = Prompt(
            index, tuple(source.randrange(4, 128) for _ in range(source.randint(1, 20)))
        )
        lengths = [
            source.choice((1, 2, 7, 8, 9, source.randint(1, 60)))
            for _ in range(source.randint(2, 4))
        ]
        completions = tuple(
            Completion(
                tuple(source.randrange(4, 128) for _ in range(n)),
                (-2.0,) * n,
                "stop",
                0,
                0,
                "s",
                source.random(),
            )
            for n in lengths
        )
        groups.append(Group(prompt, completions))
    return groups


def computed(model, packed, micro_batches):
    """Log-probabilities by sequence (its inputs and labels), and the gradient of their weighted
    sum."""
    model.zero_grad()
    found = {}
    for mb in micro_batches:
        rows = attention_rows(mb["sequence"]) if "positions" in mb else None
        with packed.using(rows, torch.device("cpu")) if packed else nullcontext():
            logits = model(mb["inputs"], positions=mb.get("positions"))
            logprobs = token_logprobs(logits, mb["labels"], 1.0, 64)
            (logprobs * mb["weights"] * (1 + mb["advantages"])).sum().backward()
        for number in range(int(mb["sequence"].max()) + 1):
            mine = mb["sequence"] == number
            key = (tuple(mb["inputs"][mine].tolist()), tuple(mb["labels"][mine].tolist()))
            found.setdefault(key, []).append(logprobs.detach()[mine])
    return found, {name: p.grad.clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize("kind", tiny.KINDS)
def test_packed_and_padded_rows_give_the_same_logprobs_and_gradients(kind) -> None:
    from titan_grpo.titan.packed import PackedAttention

    plain, model, packed = loaded(kind), loaded(kind), PackedAttention()
    packed.install(model)
    assert [name for name, _ in plain.named_parameters()] == [
        name for name, _ in model.named_parameters()
    ]
    for seed in range(6):
        groups = random_groups(seed)
        [padded_batches], [packed_batches] = (
            plan(
                groups, 1, BatchOptions(OPTIONS.token_budget, OPTIONS.max_len, pack=pack)
            ).micro_batches()
            for pack in (False, True)
        )
        expected, expected_grads = computed(plain, None, padded_batches)
        got, grads = computed(model, packed, packed_batches)
        assert expected.keys() == got.keys()
        for key, rows in expected.items():
            for one, other in zip(rows, got[key], strict=True):
                torch.testing.assert_close(other, one, atol=2e-5, rtol=1e-5)
        assert max(float(g.abs().max()) for g in expected_grads.values()) > 1e-3
        for name, grad in expected_grads.items():
            scale = float(grad.abs().max())
            torch.testing.assert_close(
                grads[name], grad, atol=2e-5 * max(scale, 1.0), rtol=1e-4, msg=f"{seed} {name}"
            )


def test_without_the_seam_packed_sequences_see_each_other() -> None:
    model = loaded("llama3")
    [batches] = plan(
        random_groups(0), 1, BatchOptions(OPTIONS.token_budget, OPTIONS.max_len, pack=True)
    ).micro_batches()
    [padded] = plan(random_groups(0), 1, OPTIONS).micro_batches()
    expected, _ = computed(model, None, padded)
    got, _ = computed(model, None, batches)
    assert (
        max(
            float((a - b).abs().max())
            for key in expected
            for a, b in zip(expected[key], got[key], strict=True)
        )
        > 0.1
    )


def test_a_rank_without_sequences_runs_forward_and_backward_to_zero_gradients() -> None:
    from titan_grpo.titan.packed import PackedAttention

    model, packed = loaded("llama3"), PackedAttention()
    packed.install(model)
    options = BatchOptions(OPTIONS.token_budget, OPTIONS.max_len, pack=True)
    idle = plan(random_groups(0)[:1], 2, options).micro_batches()
    [empty] = [rank for rank in idle if int(rank[0]["sequence"].max()) < 0]
    found, grads = computed(model, packed, empty)
    assert found == {}
    assert all(not grad.any() for grad in grads.values())


def test_a_model_without_sdpa_attention_is_refused() -> None:
    from titan_grpo.titan.packed import PackedAttention

    with pytest.raises(ConfigError, match="pack_sequences needs a model with sdpa"):
        PackedAttention().install(torch.nn.Linear(2, 2))
