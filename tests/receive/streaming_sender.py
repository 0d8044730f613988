"""A streaming lane in a process of its own that stops half-way: prints its Hello, then its Commit,
sends BUCKETS buckets, prints "sent", and waits to be killed.

usage: streaming_sender.py FOLDER BUCKETS   (FOLDER: what ``write_transfer`` left there)
"""

import json
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from titan_grpo.layout.digest import block_digests, fingerprint
from titan_grpo.layout.manifest import Manifest
from titan_grpo.protocol.messages import Commit, Hello, Order, Staged, key_prefix
from titan_grpo.sync.transports.base import TransportOptions
from titan_grpo.sync.transports.store import host_store, open_transport, put_value


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
    host = host_store("127.0.0.1")
    store = dist.PrefixStore(key_prefix(run_id, epoch), host)
    layout = (
        manifest.digest,
        "xxh3",
        manifest.block_bytes,
        bucket,
        options["timeout_s"],
        "streamed",
    )
    print(Hello(run_id, epoch, "127.0.0.1", host.port, "gloo", 1, 2, *layout).to_json(), flush=True)
    store.wait(["joined/1"], timedelta(seconds=60))
    transport = open_transport("gloo", store, 0, 2, TransportOptions(30.0, "127.0.0.1", bucket))
    put_value(store, "manifest", manifest.to_json().encode())
    store.set("order/0", Order(0, "manifest", 0, "", "").to_json())
    store.wait(["staged/0"], timedelta(seconds=60))
    put_value(store, "digests/1", b"".join(digests))
    store.set("order/1", Order(1, "stream", options["version"], "digests/1", print_).to_json())
    store.wait(["staged/1"], timedelta(seconds=60))
    staged = Staged.from_json(bytes(store.get("staged/1")))
    print(
        Commit(
            run_id, epoch, 1, options["version"], print_, manifest.digest, staged.image
        ).to_json(),
        flush=True,
    )
    for start in range(0, buckets * bucket, bucket):
        transport.broadcast(image[start : start + bucket], 30.0)
    print("sent", flush=True)
    sys.stdin.read()  # until killed, or until the parent is gone


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
