"""A network of its own for one server: a namespace and a pair of virtual interfaces that ``tc`` can
slow down; and several hosts on one machine. Needs root."""

import ctypes
import json
import os
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from titan_grpo.errors import TitanGrpoError

COMMAND_S = 10.0
NET = "10.213.{net}"
"""Addresses of the pair; the third byte comes from our pid, so that two matrices on one host seldom
meet."""

CLONE_NEWNET = 0x40000000
"""Of setns(2)."""

BURST_BYTES = 16 << 10
QUEUE_MS = 200


class NotAllowed(TitanGrpoError):
    """This host does not let us have namespaces, or its kernel lacks what a limit needs."""


class Namespace:
    """One namespace, reached at ``inner`` from here; ``outer`` is our address towards it.
    ``number`` tells those of one process apart; ``of`` is the process that made it, where that is
    another one. A context manager."""

    def __init__(self, number: int = 0, of: int = 0) -> None:
        pid = of or os.getpid()
        net, mark = NET.format(net=(pid + number) % 250), f"{pid}x{number}"
        self.name = f"titan-grpo-{mark}"
        self._ours, self._theirs = f"tg{mark}", f"tgp{mark}"
        self.outer, self.inner = f"{net}.1", f"{net}.2"

    @property
    def inside(self) -> str:
        """The command that runs its arguments in there."""
        return f"ip netns exec {self.name}"

    @property
    def host(self) -> tuple[str, ...]:
        """The command that runs its arguments in there with processes of their own, which end with
        it: as on another host, they read no memory of ours."""
        own = ("unshare", "--pid", "--mount-proc", "--fork", "--kill-child")
        return (*self.inside.split(), *own)

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Sockets that this thread makes meanwhile are in there."""
        libc = ctypes.CDLL(None, use_errno=True)
        with open("/proc/thread-self/ns/net") as ours, open(f"/run/netns/{self.name}") as theirs:
            if libc.setns(theirs.fileno(), CLONE_NEWNET):
                raise NotAllowed(f"setns into {self.name}: {os.strerror(ctypes.get_errno())}")
            try:
                yield
            finally:
                libc.setns(ours.fileno(), CLONE_NEWNET)

    def limit(self, bytes_per_s: float) -> None:
        """Both directions carry so much and no more (token bucket). NotAllowed if the kernel can
        not."""
        self._shape(_bucket(bytes_per_s))

    def limit_all_but(self, port: int, bytes_per_s: float) -> None:
        """As limit, except for what comes from or goes to a server's ``port`` in there
        (hierarchical token buckets). NotAllowed if the kernel cannot."""
        self.free()
        bits = max(8, round(bytes_per_s * 8))
        for (tc, device), end in zip(self._ends, ("dport", "sport"), strict=True):
            of_class = f"{tc} class add dev {device} parent 1: classid"
            _run(f"{tc} qdisc add dev {device} root handle 1: htb default 10")
            _run(f"{of_class} 1:10 htb rate {bits}bit burst {BURST_BYTES} cburst {BURST_BYTES}")
            _run(f"{of_class} 1:20 htb rate 10gbit")
            _run(
                f"{tc} filter add dev {device} parent 1: protocol ip prio 1 u32"
                f" match ip {end} {port} 0xffff flowid 1:20"
            )

    def delay(self, milliseconds: float) -> None:
        """Every packet takes so much longer each way (netem). NotAllowed if the kernel cannot."""
        self._shape(f"netem delay {milliseconds:g}ms")

    def free(self) -> None:
        """No limit and no delay. Idempotent."""
        for tc, device in self._ends:
            _try(f"{tc} qdisc del dev {device} root")

    def __enter__(self) -> "Namespace":
        with ExitStack() as undo:  # whatever ends this early, an interrupt too
            undo.push(self.__exit__)
            _run(f"ip netns add {self.name}")
            _run(f"ip link add {self._ours} type veth peer name {self._theirs}")
            _run(f"ip link set {self._theirs} netns {self.name}")
            _run(f"ip addr add {self.outer}/30 dev {self._ours}")
            _run(f"ip link set {self._ours} up")
            _run(f"ip -n {self.name} addr add {self.inner}/30 dev {self._theirs}")
            _run(f"ip -n {self.name} link set {self._theirs} up")
            _run(f"ip -n {self.name} link set lo up")
            # All of our addresses are reached through this pair, and so within its limit.
            _run(f"ip -n {self.name} route add default via {self.outer}")
            undo.pop_all()
        return self

    def __exit__(self, *exc: object) -> None:
        _try(f"ip link del {self._ours}")
        _try(f"ip netns del {self.name}")

    @property
    def _ends(self) -> tuple[tuple[str, str], ...]:
        """Of the pair, ours first: the command that shapes it there, and the device."""
        return ("tc", self._ours), (f"{self.inside} tc", self._theirs)

    def _shape(self, discipline: str) -> None:
        for tc, device in self._ends:
            _run(f"{tc} qdisc replace dev {device} root {discipline}")


class Host:
    """A host of its own: network, names and processes. Its one interface is ``eth0``."""

    def __init__(self, name: str, device: str, address: str) -> None:
        self.name, self.address, self._device = name, address, device

    @property
    def inside(self) -> tuple[str, ...]:
        """The command that runs its arguments in there, as the host's process 1: all of the host's
        processes end with it. Every host has the same host name, as containers may."""
        own = ("unshare", "--uts", "--pid", "--mount-proc", "--fork", "--kill-child")
        named = ("sh", "-c", 'hostname trainer && exec "$@"', "sh")
        gloo = ("env", "GLOO_SOCKET_IFNAME=eth0")
        return (*self.network, *own, *named, *gloo)

    @property
    def network(self) -> tuple[str, ...]:
        """The command that runs its arguments in there, where they see each other's processes. Each
        ``inside`` is like a container of its own."""
        return ("ip", "netns", "exec", self.name)

    def limit(self, bytes_per_s: float) -> None:
        """Its link carries so much each way and no more. NotAllowed if the kernel cannot."""
        bucket = _bucket(bytes_per_s)
        _run(f"ip netns exec {self.name} tc qdisc replace dev eth0 root {bucket}")
        _run(f"tc qdisc replace dev {self._device} root {bucket}")

    def cut(self) -> None:
        """Its link carries nothing until ``join``."""
        _run(f"ip link set {self._device} down")

    def join(self) -> None:
        """The opposite of ``cut``."""
        _run(f"ip link set {self._device} up")

    def moved(self) -> tuple[int, int]:
        """Bytes that it has sent and received, headers included."""
        said = subprocess.run(
            ["ip", "-j", "-s", "link", "show", "dev", self._device],
            capture_output=True,
            timeout=COMMAND_S,
            check=True,
        )
        stats = json.loads(said.stdout)[0]["stats64"]
        return int(stats["rx"]["bytes"]), int(stats["tx"]["bytes"])


class Hosts:
    """So many hosts on one switch, and this one at ``address``. A context manager; needs root."""

    def __init__(self, count: int) -> None:
        pid, net = os.getpid(), NET.format(net=os.getpid() % 250)
        self._bridge = f"tgb{pid}"
        self.address = f"{net}.254"
        self.hosts = [
            Host(f"titan-grpo-{pid}-{i}", f"tg{pid}h{i}", f"{net}.{i + 1}") for i in range(count)
        ]

    def __enter__(self) -> "Hosts":
        with ExitStack() as undo:  # whatever ends this early, an interrupt too
            undo.push(self.__exit__)
            _run(f"ip link add {self._bridge} type bridge")
            _run(f"ip addr add {self.address}/24 dev {self._bridge}")
            _run(f"ip link set {self._bridge} up")
            for host in self.hosts:
                self._add(host)
            undo.pop_all()
        return self

    def __exit__(self, *exc: object) -> None:
        for host in self.hosts:
            _try(f"ip link del {host._device}")
            _try(f"ip netns del {host.name}")
        _try(f"ip link del {self._bridge}")

    def _add(self, host: Host) -> None:
        _run(f"ip netns add {host.name}")
        _run(f"ip link add {host._device} type veth peer name eth0 netns {host.name}")
        _run(f"ip link set {host._device} master {self._bridge} up")
        _run(f"ip -n {host.name} addr add {host.address}/24 dev eth0")
        _run(f"ip -n {host.name} link set eth0 up")
        _run(f"ip -n {host.name} link set lo up")


def _bucket(bytes_per_s: float) -> str:
    bits = max(8, round(bytes_per_s * 8))
    return f"tbf rate {bits}bit burst {BURST_BYTES} latency {QUEUE_MS}ms"


def _try(command: str) -> str:
    """Why it failed; empty if it did not."""
    try:
        done = subprocess.run(
            command.split(), capture_output=True, text=True, timeout=COMMAND_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    said = done.stderr.strip().splitlines() or ["no reason given"]
    return said[-1] if done.returncode else ""


def _run(command: str) -> None:
    if why := _try(command):
        raise NotAllowed(f"{command}: {why}")
