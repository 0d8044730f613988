"""Entropy and mean square of the logits: values, gradients, chunks, types. Sharded logits:
test_two_ranks.py."""

import math

import pytest
import torch

from titan_grpo.algorithm.distribution import logit_mean_square, token_entropy

CHUNKS = [0, 1, 4, 100]


def make(dtype=torch.float64, rows=3, length=5, words=11):
    generator = torch.Generator().manual_seed(1)
    return (
        (3 * torch.randn(rows, length, words, generator=generator, dtype=torch.float64))
        .to(dtype)
        .requires_grad_()
    )


@pytest.mark.parametrize("chunk_tokens", CHUNKS)
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_the_entropy_is_torchs_own_with_its_gradient(temperature, chunk_tokens):
    logits, other = make(), make()
    upstream = torch.randn(3, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    ours = token_entropy(logits, temperature, chunk_tokens)
    theirs = torch.distributions.Categorical(logits=other / temperature).entropy()
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-14)
    ours.backward(upstream)
    theirs.backward(upstream)
    torch.testing.assert_close(logits.grad, other.grad, rtol=1e-10, atol=1e-13)


@pytest.mark.parametrize("chunk_tokens", CHUNKS)
def test_the_mean_square_is_that_of_the_formula_with_its_gradient(chunk_tokens):
    logits, other = make(), make()
    ours, theirs = logit_mean_square(logits, chunk_tokens), (other**2).mean(-1)
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=0)
    ours.sum().backward()
    theirs.sum().backward()
    torch.testing.assert_close(logits.grad, other.grad, rtol=1e-12, atol=0)


def test_gradcheck():
    logits = make(rows=1, length=3, words=4)
    assert torch.autograd.gradcheck(lambda z: token_entropy(z, 0.7, 2), (logits,))
    assert torch.autograd.gradcheck(lambda z: logit_mean_square(z, 2), (logits,))


@pytest.mark.parametrize(
    "read", [lambda z: token_entropy(z, 1.0, 4), lambda z: logit_mean_square(z, 4)]
)
def test_only_the_logits_as_they_are_and_numbers_per_token_are_kept_for_backward(read):
    logits = make(torch.bfloat16, rows=2, length=8, words=64)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        read(logits)
    big = [t for t in kept if t.numel() >= logits.numel()]
    assert [t.data_ptr() for t in big] == [logits.data_ptr()]
    assert sum(t.numel() for t in kept if t is not big[0]) <= 2 * 2 * 8


def test_low_precision_logits_give_float32_and_gradients_of_their_own_type():
    logits = make(torch.bfloat16)
    out = token_entropy(logits, 1.0, 4) + logit_mean_square(logits, 4)
    assert out.dtype == torch.float32
    out.sum().backward()
    assert logits.grad.dtype == torch.bfloat16


def test_extreme_distributions_stay_finite():
    logits = torch.tensor([[[1e4, -1e4, 0.0], [5.0, 5.0, 5.0]]], requires_grad=True)
    out = token_entropy(logits, 1.0, 0)
    assert out[0].tolist() == pytest.approx([0, math.log(3)])
    out.sum().backward()
    assert logits.grad.isfinite().all()
