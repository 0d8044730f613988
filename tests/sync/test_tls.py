"""Lanes and sources under TLS: real sockets, real receivers, real certificates."""

import socket
import threading
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.rigs.present import present
from tests.rigs.receiver_server import DirectControl
from tests.rigs.sockets import certificate
from tests.sync.conftest import SOON_S, MakeRig, read
from titan_grpo.config import WeightSync
from titan_grpo.errors import ConfigError, TransferFailed
from titan_grpo.layout.manifest import Extent, Part
from titan_grpo.observe import names
from titan_grpo.protocol.messages import Hello, RangeSource
from titan_grpo.receive.fetch import RELAY_HOST
from titan_grpo.receive.receiver import CERTIFICATE, CERTIFICATE_KEY
from titan_grpo.runkey import Key
from titan_grpo.sync.transports import range_server
from titan_grpo.sync.transports.range_server import RangeServer
from titan_grpo.sync.transports.sender import TLS_BYTES
from titan_grpo.sync.transports.tls import Certificate, WrongCertificate, check_certificate

pytestmark = pytest.mark.e2e

KEY = Key(bytes(range(32)))
NAMES = ("weight_sync.tls_certificate", "weight_sync.tls_key")

PIECE = 64 << 10

image = torch.randint(0, 256, ((3 << 20) + 17,), dtype=torch.uint8)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[str, str]]:
    folder = tmp_path_factory.mktemp("certificates")
    return {name: certificate(folder, name) for name in ("trainer", "other", "server")}


@pytest.fixture
def shown(made: dict[str, tuple[str, str]]) -> Certificate:
    return present(Certificate.load(*made["trainer"], NAMES))


@pytest.fixture
def server(shown: Certificate) -> Iterator[RangeServer]:
    source = RangeServer(certificate=shown)
    yield source
    source.close()


def place(server: RangeServer, port: int | None = None, pin: str | None = None) -> RangeSource:
    ticket = server.grant(image.numpy().data, None, KEY)
    listens = server.listen("127.0.0.1")
    at = "127.0.0.1", port or listens, ticket
    return RangeSource(*at, pin=server.pin if pin is None else pin)


def read_all(source: RangeSource) -> bytes:
    return read(source, 0, image.numel(), KEY)


class Tap:
    """Forwards one connection to a port of this host, and keeps what passes."""

    def __init__(self, port: int) -> None:
        self.passed = bytearray()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, args=(port,), daemon=True).start()

    def _accept(self, port: int) -> None:
        near = self._listener.accept()[0]
        far = socket.create_connection(("127.0.0.1", port))
        for a, b in ((near, far), (far, near)):
            threading.Thread(target=self._forward, args=(a, b), daemon=True).start()

    def _forward(self, a: socket.socket, b: socket.socket) -> None:
        with suppress(OSError):
            while data := a.recv(1 << 16):
                self.passed += data
                b.sendall(data)
            b.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        self._listener.close()


@pytest.mark.parametrize("secret", [True, False])
def test_who_listens_sees_weights_only_without_tls(shown: Certificate, secret: bool) -> None:
    server = RangeServer(certificate=shown if secret else None)
    tap = Tap(server.listen("127.0.0.1"))
    assert read_all(place(server, tap.port)) == bytes(image.numpy())
    piece = bytes(image[4096:4160].numpy())
    assert (piece in tap.passed) is not secret
    tap.close()
    server.close()


class Watched(Part):
    """A part of short pieces that notes how many bytes of it each call is asked for."""

    asked: list[int]

    def pieces(self, start: int, stop: int) -> Iterator[Extent]:
        self.asked.append(stop - start)
        return super().pieces(start, stop)


def test_short_pieces_are_gathered_once_and_not_the_whole_range_for_each_call(
    server: RangeServer,
) -> None:
    nbytes = image.numel() // 2 // PIECE * PIECE
    part = Watched(tuple((at, at + PIECE) for at in range(0, 2 * nbytes, 2 * PIECE)))
    object.__setattr__(part, "asked", [])
    ticket = server.grant(image.numpy().data, None, KEY, part)
    source = RangeSource("127.0.0.1", server.listen("127.0.0.1"), ticket, pin=server.pin)
    wanted = b"".join(bytes(image.numpy()[a:b]) for a, b in part.extents)
    assert read(source, 0, nbytes, KEY) == wanted
    assert max(part.asked) <= TLS_BYTES < nbytes


def test_a_reader_without_tls_gets_no_byte_and_the_next_one_is_served(
    server: RangeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(range_server, "GREET_S", 1.0)
        with pytest.raises(TransferFailed):
            read_all(place(server, pin=""))
    with socket.create_connection(("127.0.0.1", server.listen("127.0.0.1")), SOON_S):
        assert read_all(place(server)) == bytes(image.numpy())  # that one says nothing at all


def test_a_source_with_another_certificate_is_not_read(
    server: RangeServer, made: dict[str, tuple[str, str]]
) -> None:
    other = present(Certificate.load(*made["other"], NAMES))
    with pytest.raises(WrongCertificate, match="something between ends TLS"):
        read_all(place(server, pin=other.pin))


def test_a_source_without_tls_is_not_read_where_a_certificate_is_named(shown: Certificate) -> None:
    server = RangeServer()
    with pytest.raises(TransferFailed, match="no TLS with the source"):
        read_all(place(server, pin=shown.pin))
    server.close()


@pytest.mark.parametrize("case", ["missing", "mixed", "no certificate", "half"])
def test_a_certificate_that_cannot_be_shown_is_one_clear_line(
    made: dict[str, tuple[str, str]], tmp_path: Path, case: str
) -> None:
    path, key = made["trainer"]
    if case == "missing":
        path = str(tmp_path / "none.pem")
    elif case == "mixed":
        key = made["other"][1]
    elif case == "no certificate":
        path = key
    else:
        key = ""
    with pytest.raises(ConfigError, match=r"weight_sync\.tls_certificate and") as said:
        Certificate.load(path, key, NAMES)
    assert "\n" not in str(said.value)


def test_a_certificate_without_a_run_key_is_refused_at_the_start(
    made: dict[str, tuple[str, str]],
) -> None:
    config = WeightSync(**in_config(made["trainer"]))
    check_certificate(config, KEY)
    with pytest.raises(ConfigError, match="tls_certificate needs a run key"):
        check_certificate(config, None)


def keyed(*urls: str) -> dict[str, Key]:
    return dict.fromkeys(("trainer", *urls), KEY)


def in_config(paths: tuple[str, str]) -> dict[str, Any]:
    return {"tls_certificate": paths[0], "tls_key": paths[1]}


def test_versions_reach_servers_over_tls_from_every_trainer_host(
    rig: MakeRig, made: dict[str, tuple[str, str]]
) -> None:
    run = rig("a", "b", hosts=2, far=True, run_keys=keyed("a", "b"), **in_config(made["trainer"]))
    assert len(run.pool.manifest.parts) == 2
    for version in (1, 2):
        run.deliver(version)
    assert [run.loaded[url].value() for url in "ab"] == [2, 2]


def test_a_server_that_meets_another_certificate_is_named_and_the_others_go_on(
    rig: MakeRig, made: dict[str, tuple[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = rig("a", "b", started=False, run_keys=keyed("a", "b"), **in_config(made["trainer"]))
    other = present(Certificate.load(*made["other"], NAMES))
    greet = DirectControl.greet

    def elsewhere(control: DirectControl, hello: Mapping[str, Any]) -> None:
        """What a proxy at the trainer's address shows is not what the Hello says."""
        if control.url == "b":
            keys = present(run.lanes._link.keys(hello["run_id"], hello["epoch"]))
            changed = Hello.from_dict({**hello, "pin": other.pin, "proof": ""})
            hello = changed.proven(keys.messages).to_dict()
        greet(control, hello)

    monkeypatch.setattr(DirectControl, "greet", elsewhere)
    run.start()
    run.publish(1)
    run.until(lambda: run.server_set.entries()["a"].held == 1)
    run.until(lambda: run.server_set.last_error("b") is not None)
    assert "must show the certificate with SHA-256" in str(run.server_set.last_error("b"))
    run.publish(2)
    run.until(lambda: run.server_set.entries()["a"].held == 2)
    assert run.loaded["b"].values == {}


@pytest.mark.parametrize("certified", [True, False])
def test_servers_serve_each_other_over_tls_or_not_at_all(
    rig: MakeRig, made: dict[str, tuple[str, str]], monkeypatch: pytest.MonkeyPatch, certified: bool
) -> None:
    monkeypatch.setenv(RELAY_HOST, "127.0.0.9")
    if certified:
        for name, path in zip((CERTIFICATE, CERTIFICATE_KEY), made["server"], strict=True):
            monkeypatch.setenv(name, path)
    patient = {"min_rate": 1 << 20, "progress_deadline_s": 60.0, **in_config(made["trainer"])}
    run = rig("a", "b", relay=True, far=True, run_keys=keyed("a", "b"), **patient)
    for version in (1, 2):
        run.deliver(version)
    assert [run.loaded[url].value() for url in "ab"] == [2, 2]
    assert (run.recorder.history().totals.get(names.RELAYED_BYTES, 0) > 0) is certified


def test_a_server_whose_certificate_is_missing_says_so_and_the_others_go_on(
    rig: MakeRig, made: dict[str, tuple[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(CERTIFICATE, made["server"][0])
    run = rig("a", relay=True, far=True, run_keys=keyed("a"), **in_config(made["trainer"]))
    run.publish(1)
    run.until(lambda: run.server_set.last_error("a") is not None)
    assert f"{CERTIFICATE} and {CERTIFICATE_KEY} belong together" in str(
        run.server_set.last_error("a")
    )
