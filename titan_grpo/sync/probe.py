"""Probe of a server's receiver: have it join an epoch, read its answer, close the epoch again."""

from collections.abc import Callable
from typing import Any

from titan_grpo.layout.image import KEYED
from titan_grpo.protocol.messages import FORMAT, Hello, Joined, Kind
from titan_grpo.runkey import EpochKeys, Key
from titan_grpo.sync.transports.range_server import RangeServer

Greet = Callable[[dict[str, Any]], object]
"""Callback that sends a Hello (``init_info``) to the server's plugin."""


def ask_receiver(
    greet: Greet, bind_host: str, timeout_s: float, run_key: Key | None = None, **hello: Any
) -> Joined:
    """Send a Hello with the fields of ``hello`` and return the receiver's answer; the receiver then
    loses its connection and ends. With ``transport`` PROBE no epoch is opened.

    Raises TransferFailed without an answer within ``timeout_s`` seconds (no plugin, or no route
    from the server to this host), PeerError if an acceptance does not prove the run key. With a run
    key, Joined.ok says whether the server has the same; without, Joined.keyed whether it has any.
    """
    asked: dict[str, Any] = {"run_id": "probe", "epoch": 1, **hello}
    keys = EpochKeys.of(run_key, asked["run_id"], asked["epoch"]) if run_key is not None else None
    key = keys.messages if keys is not None else None
    server = RangeServer()
    try:
        channel = server.channel(bind_host, key)
        message = Hello(
            host=channel.host,
            port=channel.port,
            ticket=channel.ticket.hex(),
            manifest_digest="",
            digest_algorithm=KEYED,
            bucket_bytes=1,
            timeout_s=timeout_s,
            format=FORMAT,
            **asked,
        )
        greet(message.proven(key).to_dict())
        what = "waiting for the server's titan_grpo plugin"
        joined = Joined.from_json(channel.take(0, (Kind.JOINED,), timeout_s, what).body)
    finally:
        server.close()
    if joined.ok:
        joined.require_proof(key)
    return joined
