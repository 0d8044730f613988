"""Asks a server what its receiver would answer, without opening an epoch."""

from collections.abc import Mapping
from typing import Any

from titan_grpo.protocol.messages import PROBE, Hello, Joined, Kind
from titan_grpo.runkey import EpochKeys, Key
from titan_grpo.sync.transports.range_server import RangeServer


class Probe:
    """Reads a server's Joined answer without opening an epoch, for the doctor and the start-up
    check."""

    def __init__(
        self,
        bind_host: str,
        timeout_s: float,
        run_key: Key | None = None,
        model: Mapping[str, Any] | None = None,
    ) -> None:
        """Listen for the answer. ``hello``: the ``init_info`` to send; ``model`` as of Hello.

        With a run key, Joined.ok tells whether the server has the same; without, Joined.keyed
        whether it has any.
        """
        self._timeout_s = timeout_s
        run_id = "probe"
        self._key = EpochKeys.of(run_key, run_id, 1).messages if run_key is not None else None
        self._server = RangeServer()
        self._channel = channel = self._server.channel(bind_host, self._key)
        hello = Hello(
            run_id=run_id,
            epoch=1,
            host=channel.host,
            port=channel.port,
            ticket=channel.ticket.hex(),
            transport=PROBE,
            manifest_digest="",
            digest_algorithm="xxh3",
            block_bytes=1,
            bucket_bytes=1,
            timeout_s=timeout_s,
            model=dict(model or {}),
        )
        self.hello = hello.proven(self._key)

    def wait(self) -> Joined:
        """The plugin's answer. TransferFailed if none comes: no plugin, or no route from the server
        to this host. PeerError if it is no refusal and does not prove the run key."""
        what = "waiting for the server's titan_grpo plugin"
        try:
            frame = self._channel.take(0, (Kind.JOINED,), self._timeout_s, what)
        finally:
            self._server.close()
        joined = Joined.from_json(frame.body)
        if joined.ok:
            joined.require_proof(self._key)
        return joined
