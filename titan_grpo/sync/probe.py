"""Asks a server what its receiver would answer, without opening an epoch."""

from datetime import timedelta

import torch.distributed as dist

from titan_grpo.protocol.messages import PROBE, RECEIVER_RANK, Hello, Joined, key_prefix
from titan_grpo.runkey import EpochKeys, Key
from titan_grpo.sync.transports.store import host_store, store_errors


class Probe:
    """Reads a server's Joined answer without opening an epoch, for the doctor and the start-up
    check."""

    def __init__(self, bind_host: str, timeout_s: float, run_key: Key | None = None) -> None:
        """Host the store for the answer. ``hello``: the ``init_info`` to send.

        With a run key, Joined.ok tells whether the server has the same; without, Joined.keyed
        whether it has any.
        """
        self._timeout_s = timeout_s
        self._host = host_store(bind_host)
        run_id = "probe"
        self._store = dist.PrefixStore(key_prefix(run_id, 1), self._host)
        self._key = EpochKeys.of(run_key, run_id, 1).messages if run_key is not None else None
        hello = Hello(
            run_id=run_id,
            epoch=1,
            store_host=bind_host,
            store_port=self._host.port,
            transport=PROBE,
            rank=RECEIVER_RANK,
            size=RECEIVER_RANK + 1,
            manifest_digest="",
            digest_algorithm="xxh3",
            block_bytes=1,
            bucket_bytes=1,
            timeout_s=timeout_s,
        )
        self.hello = hello.proven(self._key)

    def wait(self) -> Joined:
        """The plugin's answer. TransferFailed if none comes: no plugin, or no route from the server
        to this host. PeerError if it is no refusal and does not prove the run key."""
        key = f"joined/{RECEIVER_RANK}"
        with store_errors("waiting for the server's titan_grpo plugin"):
            self._store.wait([key], timedelta(seconds=self._timeout_s))
            joined = Joined.from_json(bytes(self._store.get(key)))
        if joined.ok:
            joined.require_proof(self._key)
        return joined
