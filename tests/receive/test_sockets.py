"""Every socket that listens for the sync listens on the configured interface, at both ends, while
bytes move."""

import ipaddress

import psutil
import pytest

from tests.receive.site import BUCKET

pytestmark = pytest.mark.e2e


def interfaces() -> list[str]:
    """Loopback, and one address of this host on a network if it has any."""
    found = [
        a.address
        for rows in psutil.net_if_addrs().values()
        for a in rows
        if a.family.name == "AF_INET"
    ]
    return [
        "127.0.0.1",
        *[address for address in found if not ipaddress.ip_address(address).is_loopback][:1],
    ]


def listening(pid: int | None = None) -> set[tuple[str, int]]:
    """(address, port) of every TCP socket that a process listens on."""
    connections = psutil.Process(pid).net_connections("tcp")
    return {(c.laddr.ip, c.laddr.port) for c in connections if c.status == psutil.CONN_LISTEN}


@pytest.mark.parametrize("host", interfaces(), ids=["loopback", "network"][: len(interfaces())])
def test_both_ends_listen_on_the_configured_interface_only(host, site, weights) -> None:
    before, w = listening(), weights(1.0)
    link = site.greet(w, bind_host=host)
    link.wait_joined(60.0)
    assert link.send_manifest().ok
    trainer: list[set] = []
    receiver: list[set] = []

    def look(moved: int) -> None:
        trainer.append(listening() - before)
        receiver.append(listening(site.side.receiver.pid))

    staged = link.send(1, 1, w.image, w.digests, w.fingerprint, look)
    assert staged.ok
    assert len(trainer) == -(-w.image.numel() // BUCKET)
    # one port; and over gloo that of the store, and of gloo's device at each end
    ours = [host] * (3 if site.transport == "gloo" else 1)
    assert [sorted(address for address, _ in found) for found in trainer] == [ours] * len(trainer)
    own = [host] if site.transport == "gloo" else []
    assert [sorted(address for address, _ in found) for found in receiver] == [own] * len(receiver)
