"""What every version of a fault run's weights is, known to both ends without asking each other."""

from collections.abc import Mapping

import torch

from titan_grpo.layout.digest import tensor_digest

GOLDEN = 0.6180339887498949
"""Multiples of it, modulo 1, never come close to each other: neighbouring versions differ in every
tensor."""

SPREAD = 0.25
SALT_STRIDE = 100_003
"""Versions between two runs' contents: equal versions of two runs are different weights."""


def factor(version: int, index: int, salt: int) -> float:
    """What tensor ``index`` is multiplied by at ``version`` of run ``salt``: between 1 and 1 +
    SPREAD."""
    return 1.0 + SPREAD * (((version + SALT_STRIDE * salt + 1) * (index + 1) * GOLDEN) % 1.0)


def weights(base: Mapping[str, torch.Tensor], version: int, salt: int) -> dict[str, torch.Tensor]:
    """The version's float32 masters. ``base``: float32 tensors by name, in the manifest's order."""
    return {
        name: tensor * factor(version, index, salt)
        for index, (name, tensor) in enumerate(base.items())
    }


def digests(base: Mapping[str, torch.Tensor], version: int, salt: int) -> dict[str, str]:
    """Digest of every tensor as a server must get it, in bfloat16."""
    return {
        name: tensor_digest(tensor.to(torch.bfloat16))
        for name, tensor in weights(base, version, salt).items()
    }
