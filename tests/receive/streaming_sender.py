"""A streaming lane in a process of its own that stops half-way: prints its Hello, then its Commit
of version 2, sends BUCKETS buckets, prints "sent", and waits to be killed.

usage: streaming_sender.py FOLDER RUN_ID EPOCH BUCKET_BYTES BUCKETS   (FOLDER: with manifest.json
and image)
"""

import sys
from pathlib import Path

import torch

from titan_grpo.config import WeightSync
from titan_grpo.layout.image import Hashing, fingerprint
from titan_grpo.layout.manifest import Manifest
from titan_grpo.sync.link import LaneLink, LinkOptions


def main(folder: Path, run_id: str, epoch: int, bucket: int, buckets: int) -> None:
    manifest = Manifest.from_json((folder / "manifest.json").read_text())
    data = bytearray((folder / "image").read_bytes())
    digests = Hashing("xxh3").blocks(memoryview(data), manifest)
    image = torch.frombuffer(data, dtype=torch.uint8)
    config = WeightSync(apply="streamed", bucket_bytes=bucket, lane_deadline_s=240.0)
    link = LaneLink(run_id, epoch, manifest, LinkOptions(config, "gloo", "127.0.0.1"))
    print(link.open().to_json(), flush=True)
    link.wait_joined(180.0)
    assert link.send_manifest().ok
    staged = link.offer(1, 2, digests, fingerprint(manifest.digest, digests))
    print(link.commit(staged).to_json(), flush=True)
    for start in range(0, buckets * bucket, bucket):
        link._connected().broadcast(image[start : start + bucket], 60.0)
    print("sent", flush=True)
    sys.stdin.read()  # until killed, or until the parent is gone


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], *map(int, sys.argv[3:]))
