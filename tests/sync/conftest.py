"""What the sync process runs, within this process, where a test can look inside; two small matrices
to send, and servers without an engine."""

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import fields
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from tests.rigs.host_process import HostProcess, host_ops, host_shards
from tests.rigs.receiver_server import DirectControl, ReceiverServer
from titan_grpo.config import WeightSync
from titan_grpo.layout.infer import infer_layout
from titan_grpo.layout.manifest import ALIGNMENT, parts_of
from titan_grpo.layout.plan import written_extents
from titan_grpo.observe.recorder import Recorder
from titan_grpo.protocol import members
from titan_grpo.protocol.lane import Observer, no_observer
from titan_grpo.protocol.messages import RangeSource
from titan_grpo.protocol.pause_guard import Deadlines
from titan_grpo.receive.fetch import TcpReader
from titan_grpo.runkey import Key
from titan_grpo.sync.images import ImagePool, Published
from titan_grpo.sync.lanes import SyncLanes, SyncOptions
from titan_grpo.sync.publisher import Announcer, Publisher, Snapshotter
from titan_grpo.sync.server_set import JOIN_S, ServerSet

SHAPES = {"up": (2048, 1024), "down": (1024, 2048)}
"""4 MiB each in bfloat16: more than the sockets' buffers, so that a frozen receiver stops a
transfer in the middle."""

WAIT_S = 150.0
"""Deadline of what must happen. Several receivers may start one after the other within it, each of
which imports torch: seconds alone, ten times that where every core is wanted."""

SHORT: dict[str, Any] = {
    "backoff_s": 0.05,
    "backoff_max_s": 0.2,
    "block_bytes": 1 << 20,
    "bucket_bytes": 1 << 20,
    "bind_host": "127.0.0.1",
}


SOON_S = 60.0
"""What ends for another reason than its deadline ends within it, however busy the machine is."""


def read(source: RangeSource, offset: int, nbytes: int, key: Key | None = None) -> bytes:
    """Part of what a source serves, over a connection of its own."""
    got = bytearray(nbytes)
    with closing(TcpReader(source, key, SOON_S)) as reader:
        reader.read_into(offset, memoryview(got))
    return bytes(got)


class Lane(threading.Thread):
    """Connects once to nothing, says ``+URL``, and ``-URL`` when it is stopped; ends when it is
    let go."""

    engine = "vllm"

    def __init__(
        self, url: str, epoch: int, held: threading.Event, say: Callable[[str], object] = str
    ) -> None:
        super().__init__(name=f"lane {url}", daemon=True)
        self.url, self.epoch = url, epoch + 1
        self._held, self._say, self._stopping = held, say, threading.Event()

    def run(self) -> None:
        self._say(f"+{self.url}")
        assert self._stopping.wait(WAIT_S)
        self._say(f"-{self.url}")
        self._held.wait(WAIT_S)

    def stop(self) -> None:
        self._stopping.set()

    def abort(self) -> None:
        """Nothing can be aborted."""


class Weights:
    """What one server has loaded: each load must show one value in all tensors."""

    def __init__(self) -> None:
        self.values: dict[str, set[float]] = {}
        self.breaks = threading.Event()
        self.hold: threading.Event | None = None
        """Set it to make a load wait until the event is set."""

    def __call__(self, name: str, tensor: torch.Tensor) -> None:
        self.values[name] = {float(tensor.min()), float(tensor.max())}
        if self.hold is not None:
            assert self.hold.wait(WAIT_S)
        if self.breaks.is_set():
            self.breaks.clear()
            raise RuntimeError("planted failure in the middle of a load")

    def value(self) -> float:
        (value,) = set().union(*self.values.values())
        return value


class LocalSet(ServerSet):
    """Set of servers whose lanes, in this process, report to it without a pipe."""

    def sealed(self, version: int, published: Published | None) -> None:
        """See Reports: these lanes see their slots."""

    def lane_ended(self, url: str) -> None:
        """See Reports: these lanes have ``is_alive``."""


class Rig:
    """Servers, sealer and lanes, and the publisher of the only rank; ``publish`` sends ``version``
    as every element."""

    def __init__(self, folder: Path, urls: tuple[str, ...], **config: Any) -> None:
        """``config``: keys of [weight_sync] and of SyncOptions, ``watch`` (lane_observer),
        ``run_id``, ``far`` (servers read no memory of the trainer, as on another host),
        ``run_keys``: "trainer" or a server -> its key, ``changed``: see host_shards,
        ``quantised``: a server -> its method, and ``leases``: of a pause guard; None: there is
        none.

        ``hosts``: over so many the rows of both matrices are cut; this process is the first, the
        others are in ``hosts``, at 127.0.0.2 and so on."""
        self._hosts = hosts = int(config.pop("hosts", 1))
        self._changed = int(config.pop("changed", 0))
        run_keys: dict[str, Key] = config.pop("run_keys", {})
        quantised: dict[str, str] = config.pop("quantised", {})
        watch: Observer = config.pop("watch", no_observer)
        run_id: str = config.pop("run_id", "")
        far: bool = config.pop("far", False)
        leases: Deadlines | None = config.pop("leases", None)
        known = {field.name for field in fields(SyncOptions)} & config.keys()
        own: dict[str, Any] = {"look_s": 1.0} | {name: config.pop(name) for name in known}
        self.loaded = {url: Weights() for url in urls}
        self.servers = {
            url: ReceiverServer(
                url, self.loaded[url], run_keys.get(url), quantization=quantised.get(url, "")
            )
            for url in urls
        }
        self.config = WeightSync(**(SHORT | config))
        self.recorder = Recorder(folder)
        layout = infer_layout(dict, SHAPES)
        manifest = layout.manifest("bfloat16", self.config.block_bytes)
        ops = [host_ops(SHAPES, manifest, host, hosts) for host in range(hosts)]
        written = [written_extents(op for each in host.values() for op in each) for host in ops]
        manifest = manifest.with_parts(parts_of(written, manifest.total_bytes, ALIGNMENT))
        self.pool = ImagePool.create(
            manifest, self.config.slots, run_id, hashed_host="127.0.0.1" if hosts > 1 else ""
        )
        options = SyncOptions(
            urls=urls,
            make_control=self._control,
            run_key=run_keys.get("trainer"),
            leaders=range(1, hosts),
            lane_observer=watch,
            guarded=leases is not None,
            guard_deadlines=leases,
            tamper=tuple if far else None,
            **own,
        )
        self.server_set = LocalSet(
            members.start(frozenset(urls), frozenset(options.listed)),
            lambda *lane: self.lanes.open_lane(*lane),
            self.recorder,
            observer=options.observer,
            leave_s=WAIT_S,
            max_lag=self.config.max_lag,
        )
        self.lanes = SyncLanes(self.pool, self.config, self.recorder, options, self.server_set)
        self.slots = self.lanes.slots
        self._announcer = Announcer(0, self.pool.store.port, WAIT_S, WAIT_S)
        copier = Snapshotter(ops[0], self.pool.tensors(), options.device, self.config.bucket_bytes)
        self.publisher = Publisher(copier, self._announcer)
        self.hosts = [self._host(part, hosts) for part in range(1, hosts)]

    def _host(self, part: int, hosts: int) -> HostProcess:
        link = self.lanes._link
        assert self.pool.hashed is not None
        hashing = link.hashing(self.pool.run_id)
        return HostProcess(
            {
                "shapes": SHAPES,
                "manifest": self.pool.manifest.to_json(),
                "part": part,
                "hosts": hosts,
                "slots": self.config.slots,
                "changed": self._changed,
                "store_port": self.pool.hashed.port,
                "address": f"127.0.0.{part + 1}",
                "algorithm": hashing.algorithm,
                "key": hashing.key.hex() if hashing.key is not None else "",
                "config": msgspec.to_builtins(self.config),
            }
        )

    def _control(self, url: str) -> DirectControl:
        control = DirectControl(self.servers[url])
        control.url = url  # a server may be known under two names
        return control

    def start(self) -> None:
        self.lanes.start()
        self.server_set.start()

    def publish(self, version: int) -> int:
        """Publish as the trainer does; the slot."""
        slot = self.slots.reserved.wait(WAIT_S)
        assert slot is not None, f"no slot became free for version {version}: {self.slots!r}"
        self.publish_into(version, slot)
        return slot

    def publish_into(
        self, version: int, slot: int, shards: Mapping[str, torch.Tensor] | None = None
    ) -> None:
        """What the trainer's hosts do at a step boundary; none of it waits for anybody. ``shards``:
        of this host, in place of host_shards."""
        for host in self.hosts:
            host.publish(version, slot)
        self.lanes.publish(version, slot, self.recorder.now())
        shards = shards or host_shards(SHAPES, self._hosts, version, self._changed)
        self.publisher.publish(version, slot, shards)
        self.publisher.fence()

    def until(self, fact: Callable[[], bool]) -> None:
        """Wait until a change of a server makes ``fact`` true."""
        assert self.server_set.wait(fact, WAIT_S), (
            f"not within {WAIT_S} s: {self.server_set!r} {self.slots!r}"
        )

    def until_error(self, words: str) -> None:
        """Wait for an error that has these words."""
        self.until(lambda: words in str(self.server_set.take_error()))

    def until_held(self, url: str, version: int) -> None:
        """Wait until one server was read back with ``version``."""
        self.until(lambda: self.server_set.entries()[url].held == version)

    def everyone(self, version: int) -> None:
        """Wait until every server was read back with ``version``."""
        self.until(
            lambda: all(entry.held == version for entry in self.server_set.entries().values())
        )

    def deliver(self, version: int) -> None:
        """Publish, and wait until every server was read back with it."""
        self.publish(version)
        self.everyone(version)

    def complete(self, version: int) -> Published:
        """Wait until ``version`` can be pinned; return it."""
        complete = threading.Event()
        while (found := self.slots.pin_newer("test", version - 1, complete.set)) is None:
            assert complete.wait(WAIT_S)
            complete.clear()
        self.slots.unpin("test")
        return found

    def flush(self, version: int, timeout_s: float) -> list[str]:
        self.lanes.finish()
        return self.server_set.flush(version, timeout_s)

    def end(self, within_s: float = JOIN_S) -> None:
        """End lanes and sealer. Idempotent."""
        if deadline := self.server_set.close(within_s):
            self.lanes.end(deadline)

    def close(self) -> None:
        self.end()
        for server in self.servers.values():
            server.close()
        for host in self.hosts:
            host.kill()
        self._announcer.close(WAIT_S)
        self.publisher.close()
        self.recorder.close()
        self.pool.close()


MakeRig = Callable[..., Rig]


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[MakeRig]:
    """``rig("a", "b", started=True, lane_deadline_s=5.0)``: servers by name, any key of
    [weight_sync]."""
    made: list[Rig] = []

    def make(*urls: str, started: bool = True, **config: Any) -> Rig:
        made.append(Rig(tmp_path, urls, **config))
        if started:
            made[-1].start()
        return made[-1]

    yield make
    for one in made:
        one.close()
