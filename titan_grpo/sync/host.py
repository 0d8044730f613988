"""The sync process of a trainer host that is not rank 0's, both ends: blocks are hashed and ranges
served there, out of the training rank's interpreter.

::

    ranks of the host --copied--> its sync process: hash, serve --hashed--> rank 0's: lanes

Killed, the process is started again, with the versions that it has not announced, and serves those
that it has, at the same address under the same tickets: a server may still need the newest one, and
without that one no later one may come.
"""

import logging
import queue
import secrets
import socket
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from msgspec.structs import replace as change

from titan_grpo.config import WeightSync
from titan_grpo.errors import ConfigError, PeerError, SyncError, TitanGrpoError
from titan_grpo.layout.image import Hashing
from titan_grpo.protocol.messages import Hashed, RangeSource
from titan_grpo.runkey import Key
from titan_grpo.sync.child import END_S, Child, Performer, perform
from titan_grpo.sync.images import (
    ImagePool,
    PoolAddress,
    hashed_key,
    own_certificate,
    wait_copied,
)
from titan_grpo.sync.patches import Patches, is_wanted
from titan_grpo.sync.publisher import Announcer, Copy
from titan_grpo.sync.transports.broadcast import store_errors
from titan_grpo.sync.transports.channel import TICKET_BYTES
from titan_grpo.sync.transports.range_server import RangeServer

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Job:
    """A version in a slot. ``ticket``: under which it is served; ``announced``: rank 0 knows of
    it."""

    version: int
    slot: int
    ticket: str
    announced: bool = False


@dataclass(frozen=True, slots=True)
class HostBegin:
    """What the process starts with."""

    pool: PoolAddress
    """Its ``hashed`` is rank 0's."""
    ranks: tuple[int, ...]
    """Of the host, that write."""
    algorithm: str
    key: str = field(repr=False)
    """Hashing.key as digits; empty without a run key."""
    address: str
    """Of this host, where servers read."""
    config: WeightSync
    port: int = 0
    """Where the last process served; 0: it is the first one."""


class HostSync(Child):
    """The leader's end: announces this rank's copies, and has the host's part hashed and served.
    ``take_error`` and ``close`` as an Announcer."""

    MODULE = "titan_grpo.sync.host"
    NAME = "host's sync process"

    def __init__(
        self,
        pool: ImagePool,
        ranks: Sequence[int],
        hashing: Hashing,
        address: str,
        rank0: tuple[str, int],
        config: WeightSync,
    ) -> None:
        """``ranks``: those that write, this one first. ``rank0``: host and port of its
        ImagePool.hashed. The rest: see HostBegin."""
        super().__init__(config)
        self._handed = HostBegin(
            pool=replace(pool.address, hashed=rank0),
            ranks=tuple(ranks),
            algorithm=hashing.algorithm,
            key=hashing.key.hex() if hashing.key is not None else "",
            address=address,
            config=config,
        )
        self._jobs: dict[int, Job] = {}
        """Of each slot the last one."""
        self._error: SyncError | None = None
        self._announcer = Announcer(ranks[0], pool.store.port, config.connect_deadline_s)
        self._begun = True
        self._run(self.launch(config))

    def __call__(self, version: int, slot: int, copy: Copy) -> None:
        """This rank copies its share of ``version`` into ``slot``. Never waits."""
        job = Job(version, slot, secrets.token_hex(TICKET_BYTES))
        with self.lock:
            self._jobs.pop(slot, None)  # in order of the versions
            self._jobs[slot] = job
            self.post("publish", job)
        self._announcer(version, slot, copy)

    def take_error(self) -> SyncError | None:
        """The first error since the last call."""
        error, self._error = self._error, None
        return self._announcer.take_error() or error

    def close(self, timeout_s: float) -> None:
        """End the process: it serves no more."""
        self._end(timeout_s)
        self._announcer.close(timeout_s)

    def _begin(self) -> None:
        self._pipe.post("begin", self._handed)
        for job in self._jobs.values():
            self._pipe.post("publish", job)

    def _ended(self, text: str) -> None:
        self.failed(f"part {self._handed.pool.part}: {text}; servers read nothing here until then")

    # What the process posts, one after the other.

    def listens(self, port: int) -> None:
        """It serves at this port."""
        with self.lock:
            self._handed = replace(self._handed, port=port)

    def announced(self, slot: int, version: int) -> None:
        """Rank 0 knows of the part of ``version``, or that it failed."""
        with self.lock:
            if (job := self._jobs[slot]).version == version:
                self._jobs[slot] = replace(job, announced=True)

    def failed(self, text: str) -> None:
        """For the next ``take_error``."""
        self._error = self._error or SyncError(text)


class HostMain(Performer):
    """A thread that hashes the host's part of each version, and the range server's.

    A version's ticket ends when its slot is written again. Rank 0 decides when that is: its slot
    table knows every lane that reads.
    """

    def begin(self, b: HostBegin) -> None:
        """The first of all calls."""
        self._pool = b.pool.open(b.config.connect_deadline_s)
        assert self._pool.hashed is not None
        self._store = self._pool.hashed
        key = Key.parse(b.key, "the run's key for blocks") if b.key else None
        self._hashing = Hashing(b.algorithm, key)
        self._ranks, self._config = b.ranks, b.config
        self._server = RangeServer(certificate=own_certificate(b.config))
        port = self._listen(b.address, b.port)
        self._place = RangeSource(b.address, port, "", part=self._pool.part, pin=self._server.pin)
        self._patches = Patches(self._pool, self._server, self._place, self._hashing.range_key)
        self._tickets: dict[int, str] = {}
        self._newest: dict[int, int] = {}
        """The version that each slot gets, or has."""
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._hash, name="host part", daemon=True)
        self._thread.start()
        self._pipe.post("listens", port)

    def _listen(self, address: str, port: int) -> int:
        try:
            return self._server.listen(address, port)
        except ConfigError as error:
            if not port:
                raise
            logger.warning("what was served before is lost: %s", error)
            return self._server.listen(address)

    def publish(self, job: Job) -> None:
        """The host's ranks have started to copy a version into its slot. Never waits."""
        self._newest[job.slot] = job.version
        self._jobs.put(job)

    def end(self) -> None:
        """The last of all calls: serve no more."""
        self._jobs.put(None)
        self._thread.join(END_S)
        self._server.close()
        self.exit()

    def _hash(self) -> None:
        try:
            self._hash_all()
        except Exception:  # top of a thread: rank 0 would wait for every later version
            logger.exception("a host's versions cannot be hashed: the process is started again")
            self.exit()

    def _hash_all(self) -> None:
        # no deadline: close() puts None into the queue; the thread is a daemon
        while (job := self._jobs.get()) is not None:
            if job.announced:
                self._serve(job)
                continue
            version, part = job.version, self._pool.part
            read: list[str] = []
            try:
                message = self._sealed(job, read)
            # RuntimeError: from a store that closes
            except (TitanGrpoError, RuntimeError) as error:
                self._failed(version, error)
                message = Hashed(version, part, self._place, "", error=str(error))
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
            self._pipe.post("announced", job.slot, version)

    def _failed(self, version: int, error: Exception) -> None:
        self._pipe.post("failed", f"part {self._pool.part} of version {version}: {error}")

    def _sealed(self, job: Job, read: list[str]) -> Hashed:
        version, slot = job.version, job.slot
        pool, manifest = self._pool, self._pool.manifest
        if ticket := self._tickets.pop(slot, ""):
            self._server.revoke(ticket)
        self._patches.writing(slot)
        timeout_s = self._config.lane_deadline_s
        read.extend(wait_copied(pool, version, rank, timeout_s) for rank in self._ranks)
        image = pool.images[slot]
        digests = self._hashing.blocks(image.buffer, manifest, pool.part)
        if self._newest[slot] != version:
            # rank 0 has given this version up
            raise SyncError("its slot was given to a newer version before it was hashed")
        self._serve(job)
        source = change(self._place, ticket=job.ticket, memfd=image.address.to_json())
        patches = self._patches.make(version, slot, is_wanted(self._store, self._config))
        return Hashed(version, pool.part, source, b"".join(digests).hex(), patches=patches)

    def _serve(self, job: Job) -> None:
        pool = self._pool
        image, part = pool.images[job.slot], pool.manifest.parts[pool.part]
        key, fd = self._hashing.range_key, image.address.fd
        self._tickets[job.slot] = self._server.grant(image.buffer, fd, key, part, job.ticket)


def main(sock: socket.socket, parent: int) -> None:
    """Entry point of the process."""
    perform(sock, parent, HostMain)
