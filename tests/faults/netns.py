"""Several hosts on one machine: namespaces with virtual interfaces, on a switch, which ``tc`` can
slow down. Needs root."""

import ctypes
import json
import os
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from titan_grpo.errors import TitanGrpoError

COMMAND_S = 10.0
NET = "10.213.{net}"
"""Addresses on a switch; the third byte comes from our pid, so that two matrices on one host seldom
meet."""

CLONE_NEWNET = 0x40000000
"""Of setns(2)."""

BURST_BYTES = 16 << 10
QUEUE_MS = 200


class NotAllowed(TitanGrpoError):
    """This host does not let us have namespaces, or its kernel lacks what a limit needs."""


@dataclass(frozen=True)
class Host:
    """A host of its own: network, names and processes. Its one interface is ``eth0``, and
    ``device`` the end of it on our switch, where our address is ``switch``."""

    name: str
    device: str
    address: str
    switch: str

    @property
    def inside(self) -> tuple[str, ...]:
        """The command that runs its arguments in there, as the host's process 1: all of the host's
        processes end with it, and they read no memory of ours. Every host has the same host name,
        as containers may."""
        own = ("unshare", "--uts", "--pid", "--mount-proc", "--fork", "--kill-child")
        named = ("sh", "-c", 'hostname trainer && exec "$@"', "sh")
        gloo = ("env", "GLOO_SOCKET_IFNAME=eth0")
        return (*self.network, *own, *named, *gloo)

    @property
    def network(self) -> tuple[str, ...]:
        """The command that runs its arguments in there, where they see each other's processes. Each
        ``inside`` is like a container of its own."""
        return ("ip", "netns", "exec", self.name)

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

    def give(self, address: str, instead: bool = False) -> None:
        """It has an address in another network of 24 bits too, or ``instead`` of its own."""
        if instead:
            _run(f"ip -n {self.name} addr flush dev eth0")
        _run(f"ip -n {self.name} addr add {address}/24 dev eth0")

    def limit(self, bytes_per_s: float) -> None:
        """Its link carries so much each way and no more (token bucket). NotAllowed if the kernel
        cannot."""
        bits = max(8, round(bytes_per_s * 8))
        self._shape(f"tbf rate {bits}bit burst {BURST_BYTES} latency {QUEUE_MS}ms")

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

    def lose(self) -> None:
        """Its link carries nothing from now on, and nobody is told: as when its switch, or it, has
        lost power."""
        _run(f"ip link set {self.device} down")

    def find(self) -> None:
        """Its link is there again."""
        _run(f"ip link set {self.device} up")

    def free(self) -> None:
        """No limit and no delay. Idempotent."""
        for tc, device in self._ends:
            _try(f"{tc} qdisc del dev {device} root")

    def moved(self) -> tuple[int, int]:
        """Bytes that it has sent and received, headers included."""
        said = subprocess.run(
            ["ip", "-j", "-s", "link", "show", "dev", self.device],
            capture_output=True,
            timeout=COMMAND_S,
            check=True,
        )
        stats = json.loads(said.stdout)[0]["stats64"]
        return int(stats["rx"]["bytes"]), int(stats["tx"]["bytes"])

    @property
    def _ends(self) -> tuple[tuple[str, str], ...]:
        """Of its link, ours first: the command that shapes it there, and the device."""
        return ("tc", self.device), (" ".join((*self.network, "tc")), "eth0")

    def _shape(self, discipline: str) -> None:
        for tc, device in self._ends:
            _run(f"{tc} qdisc replace dev {device} root {discipline}")


class Hosts:
    """So many hosts on one switch, and this one at ``address``. A context manager; needs root."""

    def __init__(self, count: int) -> None:
        pid, net = os.getpid(), NET.format(net=os.getpid() % 250)
        self._bridge = f"tgb{pid}"
        self.address = f"{net}.254"
        self.hosts = [
            Host(f"titan-grpo-{pid}-{i}", f"tg{pid}h{i}", f"{net}.{i + 1}", self.address)
            for i in range(count)
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
            _try(f"ip link del {host.device}")
            _try(f"ip netns del {host.name}")
        _try(f"ip link del {self._bridge}")

    def _add(self, host: Host) -> None:
        _run(f"ip netns add {host.name}")
        _run(f"ip link add {host.device} type veth peer name eth0 netns {host.name}")
        _run(f"ip link set {host.device} master {self._bridge} up")
        _run(f"ip -n {host.name} addr add {host.address}/24 dev eth0")
        _run(f"ip -n {host.name} link set eth0 up")
        _run(f"ip -n {host.name} link set lo up")


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
