"""torchtitan 0.2.2's configuration and models behind the same interface as ``models03``.

``titan.compat.upstream("models")`` returns the module for the installed torchtitan. Its functions
import torchtitan: call ``titan.compat.prepare()`` first.
"""

from typing import Any

from titan_grpo.config.task import broken
from titan_grpo.layout.infer import ToHF
from titan_grpo.titan.tiny import EOS, SHAPE

TIED = {"output.weight"}
"""Parameters that have no values of their own with tied embeddings."""

KNOWN = "a model that torchtitan knows (llama3, qwen3, ...)"
"""Rule for model.name, for error messages."""

TOKENS = 2
"""Dimension of tokens in attention inputs: [rows, heads, tokens, dim]."""


def torchtitan_sections() -> Any:
    """Return the dataclass of a job file's sections, without titan_grpo's."""
    from torchtitan.config import JobConfig

    return JobConfig


def attention() -> type:
    """Return the class of plain causal attention."""
    from torchtitan.models.attention import ScaledDotProductAttentionWrapper

    kind: type = ScaledDotProductAttentionWrapper
    return kind


def get_spec(name: str) -> Any:
    """Return the spec of model ``name``: ``model_args`` by flavor (with the tiny ones),
    ``model_cls``, ``state_dict_adapter``. Raises ValueError for an unknown name."""
    from torchtitan.models.llama3 import llama3_args
    from torchtitan.models.qwen3 import qwen3_args
    from torchtitan.protocols.train_spec import get_train_spec

    qwen3_args["grpo_tiny"] = _qwen3_args(tied=True, experts=False)
    qwen3_args["grpo_tiny_untied"] = _qwen3_args(tied=False, experts=False)
    qwen3_args["grpo_tiny_moe"] = _qwen3_args(tied=False, experts=True)
    llama3_args["grpo_tiny"] = _llama3_args()
    return get_train_spec(name)


def separate_qkv(args: Any) -> None:
    """Do nothing: q, k and v already have a projection each."""


def violations(config: Any) -> list[str]:
    """Return a job's settings that 0.2.2 cannot run, as "key must be rule (why), got value"."""
    p, split = config.parallelism, config.parallelism.tensor_parallel_degree
    rules = (
        (
            p.expert_tensor_parallel_degree not in (1, split),
            "parallelism.expert_tensor_parallel_degree",
            f"1 or that of parallelism.tensor_parallel_degree ({split}; torchtitan has no other cut"
            " of experts)",
        ),
        (
            0 < config.lora.rank < split,
            "lora.rank",
            f"at least parallelism.tensor_parallel_degree ({split}; 0.2.2 gives each rank some of"
            " A's rows, and the optimizer has no step for a rank without one; 0.3 keeps A whole)",
        ),
    )
    return broken("", config, rules)


def stored_tensors(model: Any, to_hf: ToHF) -> list[tuple[str, Any]]:
    """Return the tensors of a model that a checkpoint has, by name: its parameters, and the
    exported buffers."""
    from titan_grpo.titan.weight_sync import exported_tensors

    return exported_tensors(model, to_hf)


def _qwen3_args(tied: bool, experts: bool) -> Any:
    from torchtitan.models.moe import MoEArgs
    from torchtitan.models.qwen3 import Qwen3ModelArgs

    s = SHAPE
    # Experts in a loop: the grouped product computes in bf16, and is no faster on a CPU.
    moe = MoEArgs(
        num_experts=s.experts,
        num_shared_experts=0,
        top_k=s.experts_per_token,
        score_func="softmax",
        route_norm=True,
        score_before_experts=False,
        use_grouped_mm=False,
        load_balance_coeff=None,
    )
    return Qwen3ModelArgs(
        vocab_size=s.vocab,
        max_seq_len=s.max_positions,
        head_dim=s.head_dim,
        dim=s.hidden,
        n_layers=s.layers,
        n_heads=s.heads,
        n_kv_heads=s.kv_heads,
        qk_norm=True,
        hidden_dim=s.ffn,
        rope_theta=1000000,
        eos_id=EOS,
        enable_weight_tying=tied,
        moe_enabled=experts,
        moe_inter_dim=s.expert_ffn,
        moe_args=moe,
    )


def _llama3_args() -> Any:
    from torchtitan.models.llama3 import TransformerModelArgs

    s = SHAPE
    # torchtitan derives the FFN's width: int(2 * 4 * 128 / 3) = 341, rounded up to a multiple of
    # ``multiple_of``, gives SHAPE.ffn.
    return TransformerModelArgs(
        dim=s.hidden,
        n_layers=s.layers,
        n_heads=s.heads,
        n_kv_heads=s.kv_heads,
        vocab_size=s.vocab,
        multiple_of=s.ffn,
        rope_theta=500000,
        max_seq_len=s.max_positions,
        eos_id=EOS,
    )
