#!/usr/bin/env python
"""What a patch between two versions is worth: its bytes over the image's, and the rates of making
and applying it on one core.

    python scripts/bench_delta.py [--shape qwen3_0.6b] [--lr 1e-6] [--steps 6] [--json PATH]

Float32 masters from N(0, 0.02) (norms: 1), real steps of torch's AdamW with the recipes' settings,
and a bfloat16 image after each. Gradients are independent noise (AdamW does not see their scale);
in the first step every update is as long as lr, so it changes the most. Tensors are stepped in
slices, since a step of AdamW is by element. A rate is image bytes over processor time of the
thread. Every patched slice has the digest of the slice that it must be.
"""

import math
import sys
import time
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the checkout, for every script

from scripts.bench_gpu import SHAPES
from scripts.common import options_of, positive, write_json
from titan_grpo.layout import delta
from titan_grpo.layout.image import Hashing
from titan_grpo.layout.manifest import Part

GIB = 2**30
SLICE = 1 << 24
"""Elements."""


def image_of(master: torch.Tensor) -> np.ndarray:
    """Bytes of the bfloat16 cast."""
    return master.detach().to(torch.bfloat16).view(torch.uint8).numpy()


def main(argv: list[str]) -> int:
    """0: every patched slice is what it must be."""
    parser = options_of(__doc__)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="qwen3_0.6b")
    parser.add_argument("--lr", type=float, default=1e-6)
    parser.add_argument("--steps", type=positive, default=6)
    options = parser.parse_args(argv)
    if not 0 <= options.lr < 1:
        parser.error(f"--lr is a learning rate, 0 or more and below 1, got {options.lr:g}")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    image_bytes, equal = 0, True
    sizes, encode_s, apply_s = ([0.0] * options.steps for _ in range(3))
    for shape in SHAPES[options.shape].values():
        total = math.prod(shape)
        for start in range(0, total, SLICE):
            count = min(SLICE, total - start)
            master = torch.ones(count) if len(shape) == 1 else torch.randn(count) * 0.02
            master.requires_grad_()
            adam = torch.optim.AdamW([master], lr=options.lr, betas=(0.9, 0.99), weight_decay=0.0)
            staged = image_of(master).copy()
            image_bytes += staged.size
            for step in range(options.steps):
                master.grad = torch.randn(count)
                adam.step()
                new = image_of(master)
                base = staged.copy()
                whole = Part(((0, new.size),))
                begin = time.thread_time()
                patch = delta.encode(base, new, whole, 2 * new.size)
                encoded = time.thread_time()
                assert patch is not None
                delta.apply(patch, staged, whole)
                apply_s[step] += time.thread_time() - encoded
                encode_s[step] += encoded - begin
                sizes[step] += len(patch)
                one, other = (Hashing("xxh3").block([x.data]) for x in (staged, new))
                equal &= one == other
    share = [size / image_bytes for size in sizes]
    out = {
        "options": vars(options),
        "image_bytes": image_bytes,
        "patch_over_image": max(share),
        "patch_over_image_by_step": share,
        "encode_gib_per_s": image_bytes * options.steps / GIB / sum(encode_s),
        "apply_gib_per_s": image_bytes * options.steps / GIB / sum(apply_s),
        "encode_gib_per_s_by_step": [image_bytes / GIB / s for s in encode_s],
        "apply_gib_per_s_by_step": [image_bytes / GIB / s for s in apply_s],
        "digests_equal": equal,
    }
    print(f"{options.shape}, {image_bytes / GIB:.2f} GiB, lr {options.lr:g}")
    for n, (part, made, used) in enumerate(zip(share, encode_s, apply_s, strict=True), 1):
        print(
            f"step {n}: patch / image {part:.2%}, encode {image_bytes / GIB / made:.2f} GiB/s,"
            f" apply {image_bytes / GIB / used:.2f} GiB/s"
        )
    print(f"digests equal: {equal}")
    write_json(options.json, out)
    return 0 if equal else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
