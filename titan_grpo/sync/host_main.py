"""The sync process of a trainer host that is not rank 0's: its leader's end is host.HostSync."""

import queue
import sys
import threading
from collections.abc import Callable

from titan_grpo.errors import PeerError, SyncError, TitanGrpoError
from titan_grpo.layout.image import SharedImage
from titan_grpo.layout.manifest import Manifest
from titan_grpo.protocol.messages import RangeSource
from titan_grpo.protocol.parts import Hashed, hashed_key
from titan_grpo.runkey import Key
from titan_grpo.sync.child import END_S
from titan_grpo.sync.host import HostBegin
from titan_grpo.sync.part import LOOPBACK, Hashing, ImagePool, own_certificate, wait_copied
from titan_grpo.sync.sync_main import Performer, main
from titan_grpo.sync.transports.range_server import RangeServer
from titan_grpo.sync.transports.store import join_store, store_errors


class HostPart:
    """A thread that hashes the host's part of each version, and the range server's.

    A version's ticket ends when its slot is written again. Rank 0 decides when that is: its slot
    table knows every lane that reads.
    """

    def __init__(
        self, b: HostBegin, announced: Callable[[int], None], failed: Callable[[str], None]
    ) -> None:
        """``announced`` and ``failed``: see HostSync."""
        manifest, wait_s = Manifest.from_json(b.manifest), b.config.connect_deadline_s
        extents = manifest.parts[b.part].extents
        self.images = tuple(SharedImage.attach(image, extents, serve=True) for image in b.images)
        store = join_store(LOOPBACK, b.store_port, wait_s)
        self._pool = ImagePool(b.run_id, manifest, b.part, self.images, store)
        self._store = join_store(*b.rank0, wait_s)
        key = Key.parse(b.key, "the run's key for blocks") if b.key else None
        self._hashing = Hashing(b.algorithm, key)
        self._ranks, self._timeout_s = b.ranks, b.config.lane_deadline_s
        self._announced, self._fail = announced, failed
        self._server = RangeServer(certificate=own_certificate(b.config))
        self._host, self._port = b.address, self._server.listen(b.address)
        self._tickets: dict[int, str] = {}
        self._newest: dict[int, int] = {}
        """The version that each slot gets, or has."""
        self._jobs: queue.SimpleQueue[tuple[int, int] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="host part", daemon=True)
        self._thread.start()

    def publish(self, version: int, slot: int) -> None:
        """The host's ranks have started to copy ``version`` into ``slot``. Never waits."""
        self._newest[slot] = version
        self._jobs.put((version, slot))

    def close(self) -> None:
        """End the thread and serve no more."""
        self._jobs.put(None)
        self._thread.join(END_S)
        self._server.close()

    def _run(self) -> None:
        # no deadline: close() puts None into the queue; the thread is a daemon
        while (job := self._jobs.get()) is not None:
            version, part = job[0], self._pool.part
            read: list[str] = []
            try:
                message = self._sealed(*job, read)
            # RuntimeError: from a store that closes
            except (TitanGrpoError, RuntimeError) as error:
                self._failed(version, error)
                source = RangeSource(self._host, self._port, "", part=part)
                message = Hashed(version, part, source, "", error=str(error))
            try:
                with store_errors(f"announcing version {version}"):
                    text = message.proven(self._hashing.key).to_json()
                    self._store.set(hashed_key(version, part), text)
                    # Not earlier: a process that is started in this one's place reads it again.
                    for key in read:
                        self._pool.store.delete_key(key)
            # It must not end the thread: rank 0 would wait for every later version.
            except (PeerError, RuntimeError) as error:
                self._failed(version, error)
            self._announced(version)

    def _failed(self, version: int, error: Exception) -> None:
        self._fail(f"part {self._pool.part} of version {version}: {error}")

    def _sealed(self, version: int, slot: int, read: list[str]) -> Hashed:
        pool, manifest = self._pool, self._pool.manifest
        if ticket := self._tickets.pop(slot, ""):
            self._server.revoke(ticket)
        read.extend(wait_copied(pool, version, rank, self._timeout_s) for rank in self._ranks)
        image = pool.images[slot]
        digests = self._hashing.digests(image.buffer, manifest, pool.part)
        if self._newest[slot] != version:
            # rank 0 has given this version up
            raise SyncError("its slot was given to a newer version before it was hashed")
        self._tickets[slot] = self._server.grant(
            image.buffer,
            image.address.fd,
            self._hashing.range_key,
            manifest.parts[pool.part],
        )
        source = RangeSource(
            self._host,
            self._port,
            self._tickets[slot],
            image.address.to_json(),
            pool.part,
            self._server.pin,
        )
        return Hashed(version, pool.part, source, b"".join(digests).hex())


class HostMain(Performer):
    """Performs what the leader posts."""

    def begin(self, b: HostBegin) -> None:
        """The first of all calls."""
        post = self._pipe.post
        self.part = HostPart(b, lambda v: post("announced", v), lambda text: post("failed", text))

    def publish(self, version: int, slot: int) -> None:
        """See HostPart."""
        self.part.publish(version, slot)

    def end(self) -> None:
        """The last of all calls."""
        self.part.close()
        self.exit()


if __name__ == "__main__":
    main(sys.argv[1:], HostMain)
