"""A streaming lane in a process of its own that stops half-way: prints its Hello, then its Commit,
sends BUCKETS buckets, prints "sent", and waits to be killed.

usage: streaming_sender.py FOLDER BUCKETS   (FOLDER: what ``write_transfer`` left there)
"""

import json
import sys
from pathlib import Path

import torch

from titan_grpo.config import WeightSync
from titan_grpo.layout.image import block_digests, fingerprint
from titan_grpo.layout.manifest import Manifest
from titan_grpo.sync.link import LaneLink, LinkOptions


def main(folder: Path, buckets: int) -> None:
    options = json.loads((folder / "options.json").read_text())
    run_id, epoch, bucket = options["run_id"], options["epoch"], options["bucket_bytes"]
    manifest = Manifest.from_json((folder / "manifest.json").read_text())
    good = bytearray((folder / "image").read_bytes())
    digests = block_digests(memoryview(good), manifest, "xxh3")
    print_ = fingerprint(manifest.digest, digests)
    image = torch.frombuffer(good, dtype=torch.uint8)
    if options["bad_byte"] >= 0:
        image[options["bad_byte"]] ^= 1
    config = WeightSync(apply="streamed", bucket_bytes=bucket, lane_deadline_s=options["timeout_s"])
    link = LaneLink(run_id, epoch, manifest, LinkOptions(config, "gloo", "127.0.0.1"))
    print(link.open().to_json(), flush=True)
    link.wait_joined(180.0)
    assert link.send_manifest().ok
    staged = link.offer(1, options["version"], digests, print_)
    print(link.commit(staged).to_json(), flush=True)
    for start in range(0, buckets * bucket, bucket):
        link._connected().broadcast(image[start : start + bucket], 60.0)
    print("sent", flush=True)
    sys.stdin.read()  # until killed, or until the parent is gone


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
