"""The work of a sequence, counted by torchtitan, against a count by hand."""

import pytest
import torch

from titan_grpo.titan import compat, flavors, tiny


@pytest.mark.parametrize("kind", ["qwen3", "llama3", "qwen3_moe"])
def test_the_work_of_a_sequence_is_what_the_dimensions_say(kind) -> None:
    compat.prepare()
    flavors.register_tiny_flavors()
    from torchtitan.protocols.train_spec import get_train_spec

    from titan_grpo.titan.trainer import token_cost

    name, flavor = flavors.FLAVORS[kind]
    spec = get_train_spec(name)
    args = spec.model_args[flavor]
    with torch.device("meta"):
        cost = token_cost(args, spec.model_cls(args))
    s = tiny.SHAPE
    attention = s.hidden * s.head_dim * (2 * s.heads + 2 * s.kv_heads)
    mlp = (
        3 * s.hidden * s.ffn
        if kind != "qwen3_moe"
        else s.hidden * (s.experts + 3 * s.experts_per_token * s.expert_ffn)
    )
    matrices = s.layers * (attention + mlp) + s.vocab * s.hidden
    # Two operations per weight forward and four backward; norms are the small rest. qwen3 ties its
    # output to the embedding.
    tied = 6 * s.vocab * s.hidden if kind == "qwen3" else 0
    assert 6 * matrices - tied <= cost.linear <= 6 * matrices * 1.01
    # Scores and values, forward and backward, 2 operations each, and half of the square is masked.
    assert cost.quadratic == s.layers * s.heads * s.head_dim * 2 * 6 / 2
