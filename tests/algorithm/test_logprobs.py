import pytest
import torch

from titan_grpo.algorithm.distribution import token_logprobs


def make(dtype=torch.float32, rows=3, length=5, words=11, seed=0):
    generator = torch.Generator().manual_seed(seed)
    logits = (3 * torch.randn(rows, length, words, generator=generator)).to(dtype).requires_grad_()
    labels = torch.randint(0, words, (rows, length), generator=generator)
    labels[0, :2] = -100
    labels[-1] = -100
    return logits, labels


def plain(logits, labels, temperature):
    chosen = (
        torch.log_softmax(logits.float() / temperature, -1)
        .gather(-1, labels.clamp(min=0).unsqueeze(-1))
        .squeeze(-1)
    )
    return chosen.masked_fill(labels == -100, 0)


@pytest.mark.parametrize("chunk_tokens", [0, 1, 4, 15, 1000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_values_and_gradients_are_those_of_log_softmax_for_every_chunk_size(dtype, chunk_tokens):
    logits, labels = make(dtype)
    upstream = torch.randn(labels.shape, generator=torch.Generator().manual_seed(1))
    out = token_logprobs(logits, labels, 0.7, chunk_tokens)
    (gradient,) = torch.autograd.grad((out * upstream).sum(), logits)
    expected = plain(logits, labels, 0.7)
    (expected_gradient,) = torch.autograd.grad((expected * upstream).sum(), logits)
    assert out.dtype == torch.float32
    assert gradient.dtype == dtype
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(
        gradient, expected_gradient, rtol=1e-5 if dtype == torch.float32 else 8e-3, atol=1e-6
    )


def test_the_gradient_is_that_of_finite_differences():
    logits, labels = make(torch.float64, rows=2, length=3, words=5)
    assert torch.autograd.gradcheck(lambda x: token_logprobs(x, labels, 1.3, 2), logits)


def test_ignored_positions_give_zero_and_no_gradient_even_from_a_bad_upstream_gradient():
    logits, labels = make()
    out = token_logprobs(logits, labels, 1.0, 4)
    ignored = labels == -100
    assert not out[ignored].any()
    out.backward(torch.where(ignored, torch.nan, 1.0))
    assert not logits.grad[ignored].any()
    assert logits.grad.isfinite().all()


def test_large_logits_do_not_overflow():
    logits = torch.tensor([[[1e4, -1e4, 0.0]]], requires_grad=True)
    out = token_logprobs(logits, torch.tensor([[1]]), 1.0, 0)
    assert out.item() == -2e4
    out.sum().backward()
    assert logits.grad.tolist() == [[[-1.0, 1.0, 0.0]]]


def test_only_the_logits_as_they_are_and_one_number_per_token_are_kept_for_backward():
    logits, labels = make(torch.bfloat16, rows=2, length=8, words=64)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        token_logprobs(logits, labels, 1.0, 4)
    big = [t for t in kept if t.numel() >= logits.numel()]
    assert [t.dtype for t in big] == [torch.bfloat16]
    assert big[0].data_ptr() == logits.data_ptr()
    assert sum(t.numel() for t in kept if t is not big[0]) <= 4 * labels.numel()
