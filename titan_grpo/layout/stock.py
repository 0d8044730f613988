"""What a stock server's own update route demands of a manifest: buckets that it can unpack, and names that it knows. Pure."""

import re
from collections import Counter
from collections.abc import Collection, Iterable

from titan_grpo.layout.manifest import ITEM_BYTES, Manifest, TensorSpec

FUSED = (
    (re.compile(r"\.(q|k|v)_proj\.(\w+)$"), r".qkv_proj.\2"),
    (re.compile(r"\.experts\.\d+\.(gate|up)_proj\.weight$"), ".experts.w13_weight"),
    (re.compile(r"\.experts\.\d+\.down_proj\.weight$"), ".experts.w2_weight"),
    (re.compile(r"\.(gate|up)_proj\.(\w+)$"), r".gate_up_proj.\2"),
)
"""HF names -> the parameter in which engines keep several of them as one."""

PARTS = {".qkv_proj.": 3, ".gate_up_proj.": 2}
"""Piece of a fused parameter's name -> HF tensors that make it up. An engine takes one of them alone, and says success."""

SHOWN = 4


def buckets(manifest: Manifest, bucket_bytes: int) -> list[tuple[TensorSpec, ...]]:
    """Runs of tensors that lie in the image without gaps, each of at most ``bucket_bytes`` (or one tensor), in order.

    A bucket's bytes are one slice of the image, and every tensor in it starts at a multiple of its item size, so that the
    other end can view it in place.

    Worked example: bf16 tensors of 256, 256, 30 and 512 bytes lie at 0, 256, 512 and 768; with 1024-byte buckets they go as
    (0, 1, 2) and (3): there are 226 bytes of padding before the last one.
    """
    out: list[list[TensorSpec]] = []
    for spec in manifest.tensors:
        if out:
            start, last = out[-1][0].offset, out[-1][-1]
            joins = last.offset + last.nbytes == spec.offset and (spec.offset - start) % ITEM_BYTES[spec.dtype] == 0
            if joins and spec.offset + spec.nbytes - start <= bucket_bytes:
                out[-1].append(spec)
                continue
        out.append([spec])
    return [tuple(bucket) for bucket in out]


def fused(name: str) -> str:
    """The engine's parameter that takes a HF tensor: ``0.mlp.up_proj.weight`` -> ``0.mlp.gate_up_proj.weight``."""
    for pattern, replacement in FUSED:
        name, found = pattern.subn(replacement, name)
        if found:
            break
    return name


def names_problem(sent: Iterable[str], served: Collection[str]) -> str:
    """Why tensors with these HF names do not make up a model with these parameters; empty if they do.

    A head that is tied to the embedding may be on either side. Parameters that engines compute themselves (rotary tables) are
    not asked for.
    """
    wanted = {name for name in served if not name.endswith(("inv_freq", "cos_sin_cache"))}
    count = Counter(fused(name) for name in sent)
    given = set(count)
    optional = {"lm_head.weight"} if "lm_head.weight" not in wanted & given else set()
    unknown, missing = sorted(given - wanted - optional), sorted(wanted - given - optional)
    partly = sorted(name for name in given for piece, number in PARTS.items() if piece in name and count[name] != number)
    parts = [
        f"{what}: {', '.join(names[:SHOWN])}{f' and {len(names) - SHOWN} more' if len(names) > SHOWN else ''}"
        for what, names in (("unknown to the server", unknown), ("missing", missing), ("sent in part", partly))
        if names
    ]
    if not parts:
        return ""
    return (
        f"the trainer's tensors are not those of the server's model ({'; '.join(parts)}): serve the model that is trained, or, "
        "if the engine only has other names for them, install titan_grpo in the server's environment"
    )
