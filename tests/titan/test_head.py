"""grpo.fp32_lm_head on the tiny models: logits of bfloat16 weights in float32."""

import pytest
import torch

from tests.rigs.tiny_model import loaded
from titan_grpo.errors import ConfigError
from titan_grpo.titan.head import compute_head_in_fp32


@pytest.mark.parametrize("kind", ["qwen3", "llama3"])
def test_logits_are_float32_products_of_what_mixed_precision_gives_the_head(kind):
    model = loaded(kind)
    names = set(model.state_dict())
    model = model.to(torch.bfloat16)
    tokens = torch.arange(4, 36)[None]
    hidden, head = [], getattr(model, "output", None) or model.lm_head
    head.register_forward_pre_hook(lambda _m, given: hidden.append(given[0]))
    before = model(tokens)
    compute_head_in_fp32(model)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        after = model(tokens)
    assert (before.dtype, after.dtype) == (torch.bfloat16, torch.float32)
    assert torch.equal(after, hidden[1].float() @ head.weight.float().T)
    # What bfloat16 loses: up to 1 in 256 of a logit.
    assert 1e-3 < (after - before).abs().max() < after.abs().max() / 100
    after.logsumexp(-1).sum().backward()
    assert head.weight.grad.abs().sum() > 0
    assert set(model.state_dict()) == names


def test_a_last_layer_that_is_no_plain_projection_is_refused():
    model = torch.nn.Module()
    model.output = torch.nn.Bilinear(2, 2, 2)
    with pytest.raises(ConfigError, match="fp32_lm_head needs"):
        compute_head_in_fp32(model)
