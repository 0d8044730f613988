"""Log-probabilities, entropy and mean square of logits: values, gradients, chunks, types, memory.
Sharded logits: test_two_ranks.py."""

import math
from collections.abc import Callable

import pytest
import torch

from titan_grpo.algorithm.distribution import logit_mean_square, token_entropy, token_logprobs

LABELS = torch.randint(0, 11, (3, 5), generator=torch.Generator().manual_seed(0))
LABELS[0, :2] = -100
LABELS[-1] = -100


def plain_logprobs(z: torch.Tensor, temperature: float) -> torch.Tensor:
    out = torch.log_softmax(z / temperature, -1).gather(-1, LABELS.clamp(min=0).unsqueeze(-1))
    return out.squeeze(-1).masked_fill(LABELS == -100, 0)


Read = Callable[[torch.Tensor, float, int], torch.Tensor]
Plain = Callable[[torch.Tensor, float], torch.Tensor]

READERS: dict[str, tuple[Read, Plain]] = {
    "logprobs": (
        lambda z, temperature, chunk: token_logprobs(z, LABELS, temperature, chunk),
        plain_logprobs,
    ),
    "entropy": (
        token_entropy,
        lambda z, temperature: torch.distributions.Categorical(logits=z / temperature).entropy(),
    ),
    "mean square": (
        lambda z, temperature, chunk: logit_mean_square(z, chunk),
        lambda z, temperature: (z**2).mean(-1),
    ),
}


def make(dtype: torch.dtype = torch.float64) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    logits = 3 * torch.randn(3, 5, 11, generator=generator, dtype=torch.float64)
    return logits.to(dtype).requires_grad_()


@pytest.mark.parametrize("chunk_tokens", [0, 1, 4, 100])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("reader", READERS)
def test_values_and_gradients_are_torchs_own_for_every_chunk_size(
    reader: str, temperature: float, chunk_tokens: int
) -> None:
    read, plain = READERS[reader]
    logits, other = make(), make()
    upstream = torch.randn(3, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    ours, theirs = read(logits, temperature, chunk_tokens), plain(other, temperature)
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-14)
    ours.backward(upstream)
    theirs.backward(upstream)
    torch.testing.assert_close(logits.grad, other.grad, rtol=1e-10, atol=1e-13)


@pytest.mark.parametrize("reader", READERS)
def test_low_precision_logits_give_float32_and_gradients_of_their_own_type(reader: str) -> None:
    read, plain = READERS[reader]
    logits, other = make(torch.bfloat16), make(torch.bfloat16)
    out = read(logits, 0.7, 4)
    assert out.dtype == torch.float32
    out.sum().backward()
    plain(other.float(), 0.7).sum().backward()
    assert logits.grad is not None
    assert logits.grad.dtype == torch.bfloat16
    torch.testing.assert_close(logits.grad, other.grad, rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize("reader", READERS)
def test_only_the_logits_as_they_are_and_numbers_per_token_are_kept_for_backward(
    reader: str,
) -> None:
    logits = make(torch.bfloat16)
    kept: list[torch.Tensor] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        READERS[reader][0](logits, 1.0, 4)
    big = [t for t in kept if t.numel() >= logits.numel()]
    assert [t.data_ptr() for t in big] == [logits.data_ptr()]
    assert sum(t.numel() for t in kept if t is not big[0]) <= 4 * LABELS.numel()


def test_ignored_positions_give_zero_and_no_gradient_even_from_a_bad_upstream_gradient() -> None:
    logits, ignored = make(), LABELS == -100
    out = token_logprobs(logits, LABELS, 1.0, 4)
    assert not out[ignored].any()
    out.backward(torch.where(ignored, torch.nan, 1.0))
    assert logits.grad is not None
    assert not logits.grad[ignored].any()
    assert logits.grad.isfinite().all()


def test_extreme_logits_stay_finite() -> None:
    logits = torch.tensor([[[1e4, -1e4, 0.0], [5.0, 5.0, 5.0]]], requires_grad=True)
    logprobs, entropy = (
        token_logprobs(logits, torch.tensor([[1, 0]]), 1.0, 0),
        token_entropy(logits, 1.0, 0),
    )
    assert logprobs[0].tolist() == pytest.approx([-2e4, -math.log(3)])
    assert entropy[0].tolist() == pytest.approx([0, math.log(3)])
    (logprobs.sum() + entropy.sum()).backward()
    assert logits.grad is not None
    assert logits.grad[0, 0].tolist() == [-1.0, 1.0, 0.0]
    assert logits.grad.isfinite().all()
