"""The content of tensors as digests by name: knows no image, no offsets and no blocks, on purpose.

A verification compares two ends through it, so that a mistake in the layout can not make both ends agree.
"""

import hashlib
from collections.abc import Mapping

import torch


def tensor_digest(tensor: torch.Tensor) -> str:
    """32 hex characters over dtype, shape and the row-major bytes; the tensor may be on any device, and not contiguous."""
    dtype = str(tensor.dtype).removeprefix("torch.")
    state = hashlib.blake2b(f"{dtype} {tuple(tensor.shape)} ".encode(), digest_size=16)
    flat = tensor.detach().cpu().contiguous().flatten()
    state.update(memoryview(flat.view(torch.uint8).numpy()))
    return state.hexdigest()


def content_digest(tensors: Mapping[str, str]) -> str:
    """32 hex characters over the digests of all tensors (name -> tensor_digest), whatever their order."""
    text = "\n".join(f"{name} {tensors[name]}" for name in sorted(tensors))
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
