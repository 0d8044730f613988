"""One end of an NCCL lane: ``nccl_end.py RANK PORT SCENARIO``. Not a test module itself.

Rank 0 has a group of its own beside it, which must live on. Both ends share one GPU: NCCL takes two
ranks on it for a mistake, unless they are on two hosts, which NCCL_HOSTID says.
"""

import json
import os
import signal
import sys
import threading
import time
from datetime import timedelta
from typing import Any

HEARTBEAT_S = 4
"""After that long torch's monitor ends the process, if a watchdog has told it to (480 s, unless
set)."""

BYTES = 64 << 20
LATER_S = 2 * HEARTBEAT_S + 2


def tell(**facts: Any) -> None:
    print(json.dumps(facts), flush=True)


def main(rank: int, port: int, scenario: str) -> None:
    os.environ |= {"NCCL_HOSTID": f"host{rank}", "NCCL_SOCKET_IFNAME": "lo"}
    deadline_s = 3.0 if scenario == "absent" else 60.0
    os.environ["TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC"] = str(HEARTBEAT_S)
    # torch reads it once, and the other group is the first one
    os.environ["TORCH_NCCL_NONBLOCKING_TIMEOUT"] = str(round(deadline_s))
    import torch
    import torch.distributed as dist

    from titan_grpo.errors import TransferFailed
    from titan_grpo.sync.transports.broadcast import NcclTransport, TransportOptions

    one = torch.ones(1, device="cuda")
    if rank == 0:
        # as torchtitan makes it: without a device_id, which would make it non-blocking
        dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
        dist.all_reduce(one)
    store = dist.TCPStore(
        "127.0.0.1", port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=60)
    )
    began, error = time.monotonic(), ""
    try:
        transport = NcclTransport(
            store, rank, 2, TransportOptions(deadline_s, "127.0.0.1", BYTES, "cuda:0")
        )
        for value in (1, 2, 3):
            image = torch.full((BYTES,), value if rank == 0 else 0, dtype=torch.uint8)
            transport.broadcast(image, 60.0)
            assert bool((image == value).all()), f"bucket {value} has other bytes"
        tell(ready=True)
        if scenario == "abort" and rank == 1:
            signal.pause()  # the other end aborts, and the test ends this process
        if scenario == "abort":
            threading.Timer(0.5, transport.abort).start()
        began = time.monotonic()
        while True:
            transport.broadcast(image, 3.0 if scenario == "stop" else 60.0)
    except TransferFailed as failure:
        error = str(failure)
    tell(error=error, after_s=time.monotonic() - began)
    if rank == 0:
        threading.Event().wait(LATER_S)  # longer than the monitor waits
        dist.all_reduce(one)
        torch.cuda.synchronize()
        tell(trains_on=one.item())
    os._exit(0)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
