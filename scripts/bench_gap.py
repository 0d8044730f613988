#!/usr/bin/env python
"""How far is a trainer from a server on the same weights, and what does a head in float32 change?

    python scripts/bench_gap.py [--engine vllm|sglang] [--shape tiny|qwen3_0.6b] [--prompts 4]
        [--tokens 64] [--json P]

A real server samples, once as it is and once with logits in float32. torchtitan's model with the
same bfloat16 weights computes the log-probabilities of the sampled tokens: in float32, in bfloat16,
and in bfloat16 with its head in float32 (``grpo.fp32_lm_head``). Printed are mean and largest
differences in nats: the on-policy gap that a run with these weights would show.
"""

import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the checkout, for tests and scripts

from scripts.common import ENGINES, QWEN3_0_6B, Table, options_of, serving, write_json
from tests.rigs.tiny_model import loaded
from titan_grpo.algorithm.distribution import token_logprobs
from titan_grpo.engines.generation import Sampled, Sampling
from titan_grpo.engines.http import SyncDriver
from titan_grpo.engines.launch import Server
from titan_grpo.engines.server import dialect
from titan_grpo.titan import tiny
from titan_grpo.titan.modules import compute_head_in_fp32

FLAVORS = {"tiny": (tiny.SHAPE, "grpo_tiny"), "qwen3_0.6b": (QWEN3_0_6B, "0.6B")}
STARTUP_S, ANSWER_S = 900.0, 600.0
STD = {"tiny": 0.1, "qwen3_0.6b": 0.02}
"""Of the random weights: so that the distributions are not flat."""

Answers = Sequence[tuple[tuple[int, ...], Sampled]]


def answers(server: Server, prompts: Sequence[tuple[int, ...]], tokens: int) -> Answers:
    generate, ask = dialect(server.spec.engine).generate, Sampling(tokens, ignore_eos=True)
    with SyncDriver(server.url) as driver:
        return [(each, driver.run(generate(each, ask, ANSWER_S))) for each in prompts]


def gaps(model: torch.nn.Module, found: Answers) -> dict[str, float]:
    """Mean and largest difference of the sampled tokens' log-probabilities, in nats."""
    apart = []
    for prompt, sampled in found:
        ids = torch.tensor([[*prompt, *sampled.token_ids]])
        with torch.inference_mode():
            ours = token_logprobs(model(ids[:, :-1]).float(), ids[:, 1:], 1.0, 0)
        apart.append((ours[0, len(prompt) - 1 :] - torch.tensor(sampled.logprobs)).abs())
    values = torch.cat(apart)
    return {"mean": values.mean().item(), "max": values.max().item()}


def in_bfloat16(model: torch.nn.Module) -> None:
    """As FSDP2's mixed precision computes: parameters in bfloat16, buffers as they are."""
    for parameter in model.parameters():
        parameter.data = parameter.data.bfloat16()


STEPS: dict[str, Callable[[torch.nn.Module], None]] = {
    "float32": lambda model: None,
    "bfloat16": in_bfloat16,
    "bfloat16, head in float32": compute_head_in_fp32,
}
"""The trainers, each made of the one before."""


def main() -> int:
    """Measure, print the table, write the JSON."""
    parser = options_of(__doc__)
    parser.add_argument("--engine", choices=ENGINES, default="vllm")
    parser.add_argument("--shape", choices=sorted(FLAVORS), default="qwen3_0.6b")
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=64)
    options = parser.parse_args()
    shape, flavor = FLAVORS[options.shape]
    prompts = [(5 + n, 17, 40, 90 - n) for n in range(options.prompts)]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        path = tiny.write_tiny_model(
            "qwen3", folder / "model", 3, std=STD[options.shape], shape=shape
        )
        found = {}
        for head, fp32 in (("bfloat16", False), ("float32", True)):
            settings = {"max_num_seqs": 8, "fp32_head": fp32}
            log = folder / f"{head}.log"
            with serving(options.engine, path, log, STARTUP_S, **settings) as server:
                found[head] = answers(server, prompts, options.tokens)
        whole = load_file(path / "model.safetensors")
        model = loaded("qwen3", {name: value.float() for name, value in whole.items()}, flavor)
        table = Table(text=25)
        for precision, change in STEPS.items():
            change(model)
            for head, sampled in found.items():
                who = {"trainer": precision, "server's head": head}
                table.add(who | gaps(model, sampled))
    write_json(options.json, table.rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
