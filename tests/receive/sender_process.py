"""A lane in a process of its own that misbehaves on request: it prints its Hello, goes as far as
its mode says, prints the mode, and then waits to be killed.

usage: sender_process.py RUN_ID EPOCH MODE   (mode: half | stall | longer | garbage)
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
TIMEOUT_S = {"stall": 8.0}
"""Also of the communicator's opening, so no shorter than that takes on a busy machine."""


def main(run_id: str, epoch: int, mode: str) -> None:
    manifest = Manifest.build([("a", "bfloat16", (64, 1024)), ("b", "float32", (1000,))], BLOCK)
    image = torch.full((manifest.total_bytes,), 9, dtype=torch.uint8)
    config = WeightSync(bucket_bytes=BUCKET, lane_deadline_s=TIMEOUT_S.get(mode, 60.0))
    options = LinkOptions(config, "gloo", "127.0.0.1", run_key=find_run_key(os.environ))
    link = LaneLink(run_id, epoch, manifest, options)
    print(link.open().to_json(), flush=True)
    link.wait_joined(180.0)
    assert link.send_manifest().ok
    digests = Hashing("xxh3").blocks(image.numpy().data, manifest)
    order = Order(1, "receive", 99, fingerprint(manifest.digest, digests))
    link._post(order, b"".join(digests))
    if mode in ("half", "stall"):
        link._connected().broadcast(image[:BUCKET], 60.0)
    if mode == "longer":
        link._connected().broadcast(image[: 2 * BUCKET], 60.0)
    if mode == "garbage":
        image[5000] = 0
        link.stream(image)
        print(link._staged(1, 60.0).to_json(), flush=True)
    print(mode, flush=True)
    sys.stdin.read()  # until killed, or until the parent is gone


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3])
