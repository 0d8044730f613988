"""Sync process of a trainer host other than rank 0's, both ends: hashes the host's part and serves
its ranges, outside the training rank's interpreter.

::

    ranks of the host --copied--> its sync process: hash, serve --hashed--> rank 0's: lanes

If the process dies, it is started again with its jobs. It serves the announced versions at the same
address under the same tickets: a server may still need the newest one, and no later version may
come before it has that one.
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
    wait_copied,
)
from titan_grpo.sync.patches import Patches, is_wanted
from titan_grpo.sync.publisher import Announcer, Copy, copied_key
from titan_grpo.sync.transports.broadcast import put_text, store_errors
from titan_grpo.sync.transports.channel import TICKET_BYTES
from titan_grpo.sync.transports.range_server import RangeServer
from titan_grpo.sync.transports.tls import own_certificate

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Job:
    """A version in a slot, served under ``ticket``. ``announced``: rank 0 has its Hashed."""

    version: int
    slot: int
    ticket: str
    announced: bool = False


@dataclass(frozen=True, slots=True)
class HostBegin:
    """Arguments of the process."""

    pool: PoolAddress
    """Its ``hashed`` is rank 0's."""
    ranks: tuple[int, ...]
    """The host's ranks that write."""
    algorithm: str
    key: str = field(repr=False)
    """Hashing.key, hexadecimal; empty without a run key."""
    address: str
    """This host's address for servers."""
    config: WeightSync
    port: int = 0
    """Port of the previous process; 0: this is the first one."""


class HostSync(Child):
    """The leader's end: announces this rank's copies, and has the process hash and serve the host's
    part. Has an Announcer's interface."""

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
        """``ranks``: the host's ranks that write, this one first. ``rank0``: host and port of its
        ImagePool.hashed. ``address``: see HostBegin."""
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
        """Slot -> its last job."""
        self._error: SyncError | None = None
        self._further = 0
        """Errors of the process after the first one."""
        copy_s = config.transfer_s(pool.manifest.parts[pool.part].nbytes)
        self._announcer = Announcer(ranks[0], pool.store.port, config.connect_deadline_s, copy_s)
        self._begun = True
        self._run(self.launch(config))

    def __call__(self, version: int, slot: int, copy: Copy) -> None:
        """Publish ``version``, whose ``copy`` this rank has started into ``slot``. Never waits."""
        job = Job(version, slot, secrets.token_hex(TICKET_BYTES))
        with self.lock:
            self._jobs.pop(slot, None)  # keeps the dict in the order of the versions
            self._jobs[slot] = job
            self.post("publish", job)
        self._announcer(version, slot, copy)

    def take_error(self) -> SyncError | None:
        """Return an error that was not returned yet: the announcer's, then the first of the
        process since its last one, with the number of those after it."""
        if error := self._announcer.take_error():
            return error
        with self.lock:
            error, further = self._error, self._further
            self._error, self._further = None, 0
        return None if error is None else error.followed_by(further)

    def close(self, timeout_s: float) -> None:
        """End the process, and with it the serving, within ``timeout_s`` seconds."""
        self._end(timeout_s)
        self._announcer.close(timeout_s)

    def _begin(self) -> None:
        self._pipe.post("begin", self._handed)
        for job in self._jobs.values():
            self._pipe.post("publish", job)

    def _ended(self, text: str) -> None:
        self.failed(f"part {self._handed.pool.part}: {text}; servers read nothing here until then")

    # Called by the process, one after the other.

    def listens(self, port: int) -> None:
        """Note the port of the process, for its successor."""
        with self.lock:
            self._handed = replace(self._handed, port=port)

    def announced(self, slot: int, version: int) -> None:
        """Note that the part of ``version`` was announced to rank 0, or failed."""
        with self.lock:
            if (job := self._jobs[slot]).version == version:
                self._jobs[slot] = replace(job, announced=True)

    def failed(self, text: str) -> None:
        """Keep the first error for ``take_error``, and count the others."""
        with self.lock:
            self._further += self._error is not None
            self._error = self._error or SyncError(text)


class HostMain(Performer):
    """The process's object: a thread hashes the host's part of each version; a range server serves.

    A version's ticket is revoked when its slot is written again. Rank 0 decides when: its slot
    table has the pins of all lanes.
    """

    def begin(self, b: HostBegin) -> None:
        """Open the pool, listen and start the thread. The first call."""
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
        """Slot -> the version that it has, or is about to get."""
        self._notices: list[str] = []
        """Keys of the ranks' notices of all versions since the last one that was announced."""
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
        """Queue a version, which the host's ranks have started to copy. Never waits."""
        self._newest[job.slot] = job.version
        self._jobs.put(job)

    def end(self) -> None:
        """End the process. The last call."""
        self._jobs.put(None)
        self._thread.join(END_S)
        self._server.close()
        self.exit()

    def _hash(self) -> None:
        try:
            self._hash_all()
        except Exception:  # top of a thread: restart, else rank 0 waits in vain for later versions
            logger.exception("a host's versions cannot be hashed: the process is started again")
            self.exit()

    def _hash_all(self) -> None:
        # no deadline: end() puts None into the queue; the thread is a daemon
        while (job := self._jobs.get()) is not None:
            if job.announced:
                self._serve(job)
                continue
            version = job.version
            self._notices += [copied_key(version, rank) for rank in self._ranks]
            try:
                message = self._sealed(job)
            # RuntimeError: from a store that closes.
            except (TitanGrpoError, RuntimeError) as error:
                self._failed(version, error)
                message = Hashed(version, self._place, "", error=str(error))
            try:
                with store_errors(f"announcing version {version}"):
                    text = message.proven(self._hashing.key).to_json()
                    put_text(self._store, hashed_key(version, self._pool.part), text)
                    # Not earlier: a process that replaces this one reads the keys again. Not those
                    # of a version that failed, which may come until a later one's have.
                    while self._notices and not message.error:
                        self._pool.store.delete_key(self._notices.pop())
            except (PeerError, RuntimeError) as error:
                # torch's store does not connect again: without an end here rank 0 would wait in
                # vain for this version and every later one. The next process joins anew, and gets
                # this job too, as it is not announced.
                self._failed(version, error)
                self.exit()
            self._pipe.post("announced", job.slot, version)

    def _failed(self, version: int, error: Exception) -> None:
        self._pipe.post("failed", f"part {self._pool.part} of version {version}: {error}")

    def _sealed(self, job: Job) -> Hashed:
        version, slot = job.version, job.slot
        pool, manifest = self._pool, self._pool.manifest
        # First: the slot is being written, so its last version must not be read or patched from.
        if ticket := self._tickets.pop(slot, ""):
            self._server.revoke(ticket)
        self._patches.writing(slot)
        timeout_s = self._config.transfer_s(manifest.parts[pool.part].nbytes)
        for rank in self._ranks:
            wait_copied(pool, version, rank, timeout_s)
        image = pool.images[slot]
        digests = self._hashing.blocks(image.buffer, manifest, pool.part)
        if self._newest[slot] != version:
            # rank 0 gave this version up: the hashed bytes may be of both versions
            raise SyncError("its slot was given to a newer version before it was hashed")
        self._serve(job)
        source = change(self._place, ticket=job.ticket, memfd=image.address.to_json())
        patches = self._patches.make(version, slot, is_wanted(self._store, self._config))
        return Hashed(version, source, b"".join(digests).hex(), patches=patches)

    def _serve(self, job: Job) -> None:
        pool = self._pool
        image, part = pool.images[job.slot], pool.manifest.parts[pool.part]
        key, fd = self._hashing.range_key, image.address.fd
        self._tickets[job.slot] = self._server.grant(image.buffer, fd, key, part, job.ticket)


def main(sock: socket.socket, parent: int) -> None:
    """Entry point of the process."""
    perform(sock, parent, HostMain)
