"""A lane in a process of its own that sends a part of a version over gloo: it prints its Hello,
then "half", and waits to be killed.

usage: half_sender.py RUN_ID
"""

import os
import sys

import torch

from titan_grpo.config import WeightSync
from titan_grpo.layout.image import Hashing, fingerprint
from titan_grpo.layout.manifest import Manifest
from titan_grpo.protocol.messages import Order
from titan_grpo.runkey import find_run_key
from titan_grpo.sync.link import LaneLink, LinkOptions

BLOCK, BUCKET = 4096, 16384


def main(run_id: str) -> None:
    manifest = Manifest.build([("a", "bfloat16", (64, 1024))], BLOCK)
    image = torch.full((manifest.total_bytes,), 9, dtype=torch.uint8)
    config = WeightSync(bucket_bytes=BUCKET)
    options = LinkOptions(config, "gloo", "127.0.0.1", run_key=find_run_key(os.environ))
    link = LaneLink(run_id, 2, manifest, options)
    print(link.open().to_json(), flush=True)
    link.wait_joined(180.0)
    assert link.send_manifest().ok
    digests = Hashing("xxh3").blocks(image.numpy().data, manifest)
    order = Order(1, "receive", 99, fingerprint(manifest.digest, digests))
    link._post(order, b"".join(digests))
    link._connected().broadcast(image[:BUCKET], 60.0)
    print("half", flush=True)
    sys.stdin.read()  # until killed, or until the parent is gone


if __name__ == "__main__":
    main(sys.argv[1])
