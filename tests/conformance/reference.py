"""What a model directory computes, by transformers in fp32 on the CPU; and its weights as a version
image."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file

from tests.rigs.trainer import manifest_of
from titan_grpo.layout.image import fingerprint
from titan_grpo.sync.link import LinkOptions

BLOCK_BYTES = 64 << 10


class Reference:
    """The model in ``folder``, in float32 or ``dtype``. ``end_ids``: the tokens that end an
    answer."""

    def __init__(self, folder: Path, dtype: torch.dtype = torch.float32) -> None:
        from transformers import AutoModelForCausalLM

        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
        ends = self._model.generation_config.eos_token_id
        self.end_ids: frozenset[int] = frozenset(ends if isinstance(ends, list) else [ends])

    def logprobs(self, token_ids: Sequence[int], temperature: float = 1.0) -> list[float]:
        """Log-probability of every token but the first, in nats."""
        ids = torch.tensor([token_ids], dtype=torch.int64)
        with torch.inference_mode():
            logits = self._model(ids).logits[0, :-1].float() / temperature
        values: list[float] = logits.log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0].tolist()
        return values

    def clearest(self, candidates: Sequence[list[int]], count: int) -> list[list[int]]:
        """Those with the clearest choice of experts; of a model without experts the first ones.

        Where two experts are all but equal, rounding in bf16 decides which one a token gets, and
        engine and reference differ by tenths with the same weights (transformers in bf16 and in
        fp32 do too): such sequences show nothing. ``candidates`` have one length.
        """
        if not getattr(self._model.config, "num_experts", 0):
            return list(candidates[:count])
        ids = torch.tensor(candidates, dtype=torch.int64)
        with torch.inference_mode():
            routed = self._model(ids, output_router_logits=True).router_logits
        chosen = self._model.config.num_experts_per_tok
        gap = torch.full((len(ids),), torch.inf)
        for logits in routed:
            top = logits.softmax(-1).topk(chosen + 1).values.view(*ids.shape, chosen + 1)
            gap = torch.minimum(gap, (top[..., -2] - top[..., -1]).min(1).values)
        return [candidates[i] for i in gap.topk(count).indices.tolist()]


class Weights:
    """Tensors as a trainer would send them: an image in bfloat16, and its digests."""

    def __init__(
        self, tensors: Mapping[str, torch.Tensor], options: LinkOptions, run_id: str
    ) -> None:
        self.manifest = manifest_of(tensors, BLOCK_BYTES)
        self.image = torch.zeros(self.manifest.total_bytes, dtype=torch.uint8)
        for spec in self.manifest.tensors:
            self.image[spec.offset : spec.offset + spec.nbytes] = (
                tensors[spec.name].bfloat16().flatten().view(torch.uint8)
            )
        digests = options.hashing(run_id).blocks(self.image.numpy().data, self.manifest)
        self.digests = b"".join(digests)
        self.fingerprint = fingerprint(self.manifest.digest, digests)


def renamed(folder: Path, rename: Callable[[str], str] = str) -> dict[str, torch.Tensor]:
    """A model directory's tensors. ``rename``: of a name, for sending what no server knows."""
    return {rename(name): t for name, t in load_file(folder / "model.safetensors").items()}
