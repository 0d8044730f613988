"""A lane in a process of its own that misbehaves on request: it prints its Hello, goes as far as
its mode says, prints the mode, and then waits to be killed.

usage: sender_process.py RUN_ID EPOCH MODE   (mode: half | stall | longer | garbage)
"""

import os
import sys
from datetime import timedelta

import torch
import torch.distributed as dist

from titan_grpo.layout.digest import block_digests, fingerprint
from titan_grpo.layout.manifest import Manifest
from titan_grpo.protocol.messages import Hello, Order, key_prefix
from titan_grpo.runkey import EpochKeys, find_run_key
from titan_grpo.sync.transports.base import TransportOptions
from titan_grpo.sync.transports.store import host_store, open_transport, put_value

BLOCK, BUCKET, TIMEOUT_S = 4096, 16384, 3.0


def main(run_id: str, epoch: int, mode: str) -> None:
    manifest = Manifest.build([("a", "bfloat16", (64, 1024)), ("b", "float32", (1000,))], BLOCK)
    image = torch.full((manifest.total_bytes,), 9, dtype=torch.uint8)
    host = host_store("127.0.0.1")
    store = dist.PrefixStore(key_prefix(run_id, epoch), host)
    run_key = find_run_key(os.environ)
    key = EpochKeys.of(run_key, run_id, epoch).messages if run_key else None
    algorithm = "blake3" if run_key else "xxh3"
    hello = Hello(
        run_id,
        epoch,
        "127.0.0.1",
        host.port,
        "gloo",
        1,
        2,
        manifest.digest,
        algorithm,
        BLOCK,
        BUCKET,
        TIMEOUT_S,
    )
    print(hello.proven(key).to_json(), flush=True)
    store.wait(["joined/1"], timedelta(seconds=60))
    transport = open_transport("gloo", store, 0, 2, TransportOptions(30.0, "127.0.0.1", BUCKET))
    put_value(store, "manifest", manifest.to_json().encode())
    store.set("order/0", Order(0, "manifest", 0, "", "").proven(key).to_json())
    store.wait(["staged/0"], timedelta(seconds=60))
    digests = block_digests(memoryview(image.numpy()), manifest, "xxh3")
    put_value(store, "digests/1", b"".join(digests))
    order = Order(1, "receive", 99, "digests/1", fingerprint(manifest.digest, digests))
    store.set("order/1", order.proven(key).to_json())
    if mode in ("half", "stall"):
        transport.broadcast(image[:BUCKET], 10.0)
    if mode == "longer":
        transport.broadcast(image[: 2 * BUCKET], 10.0)
    if mode == "garbage":
        image[5000] = 0
        for start in range(0, image.numel(), BUCKET):
            transport.broadcast(image[start : start + BUCKET], 10.0)
        store.wait(["staged/1"], timedelta(seconds=60))
        print(store.get("staged/1").decode(), flush=True)
    print(mode, flush=True)
    sys.stdin.read()  # until killed, or until the parent is gone


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3])
