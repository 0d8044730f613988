"""TLS under a source's connections: the source's certificate, and the reader's check of it.

A certificate's pin (its SHA-256) travels with the source's address, in the Hello and in the orders,
under the run key's proof. So any certificate will do: no authority or host name is checked. The
reader proves itself inside TLS as without it (channel.py).
"""

import hashlib
import re
import selectors
import socket
import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from titan_grpo.errors import ConfigError, TransferFailed
from titan_grpo.runkey import Key

if TYPE_CHECKING:  # receivers start without the sections
    from titan_grpo.config import WeightSync

WOULD_BLOCK = (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError)
"""Exceptions of a call on a non-blocking socket that would block."""

PEM = re.compile("-----BEGIN CERTIFICATE-----.*?-----END CERTIFICATE-----", re.DOTALL)


class WrongCertificate(TransferFailed):
    """The other end showed another certificate than the pin's. ``shown``: its pin."""

    def __init__(self, message: str, shown: str) -> None:
        super().__init__(message)
        self.shown = shown


@dataclass(frozen=True, slots=True)
class Certificate:
    """A source's certificate."""

    context: ssl.SSLContext
    pin: str
    """Hexadecimal."""

    @classmethod
    def load(cls, path: str, key_path: str, names: tuple[str, str]) -> "Certificate | None":
        """Load a certificate (its chain may follow) and its private key from PEM files; None if
        both paths are empty. Raises ConfigError if they do not fit; ``names``: of the two, for its
        message."""
        if not path and not key_path:
            return None
        if not path or not key_path:
            raise ConfigError(f"{names[0]} and {names[1]} belong together: set both, or none")
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.num_tickets = 0  # readers resume nothing
        try:
            # Without a password function, OpenSSL would ask on the terminal.
            context.load_cert_chain(path, key_path, password=lambda: b"")
            found = PEM.findall(Path(path).read_text(encoding="ascii", errors="replace"))
            return cls(context, _pin(ssl.PEM_cert_to_DER_cert(found[0])))
        except (OSError, ValueError, IndexError) as error:
            raise ConfigError(
                f"{names[0]} and {names[1]} must be a certificate and its private key, without a"
                f" password, in PEM files, got {path!r} and {key_path!r}: {error}"
            ) from error


def own_certificate(config: "WeightSync") -> Certificate | None:
    """Load the certificate of this trainer host. Raises ConfigError as Certificate.load."""
    names = "weight_sync.tls_certificate", "weight_sync.tls_key"
    return Certificate.load(config.tls_certificate, config.tls_key, names)


def check_certificate(config: "WeightSync", run_key: Key | None) -> None:
    """Raise ConfigError for a certificate that cannot be loaded, or that protects nothing."""
    if own_certificate(config) is not None and run_key is None:
        raise ConfigError(
            "weight_sync.tls_certificate needs a run key (weight_sync.run_key_file), there is none:"
            " who reads the calls to a server could take its weights in its place"
        )


def _pin(certificate: bytes) -> str:
    return hashlib.sha256(certificate).hexdigest()


def secured(sock: socket.socket, pin: str, name: str) -> socket.socket:
    """Return ``sock`` with TLS; the result owns it. ``name``: of the other end, for errors. Raises
    WrongCertificate if it shows another certificate than the ``pin``'s, TransferFailed if it does
    not speak TLS."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    try:
        made = context.wrap_socket(sock)
    except OSError as error:
        sock.close()
        raise TransferFailed(f"no TLS with the {name}: {error}") from error
    shown = _pin(made.getpeercert(binary_form=True) or b"")
    if shown != pin:
        made.close()
        raise WrongCertificate(
            f"the {name} must show the certificate with SHA-256 {pin[:16]}..., it shows"
            f" {shown[:16]}...: something between ends TLS (a proxy, a service mesh) and could read"
            " the weights; let these connections through as they are",
            shown,
        )
    return made


def shaken(sock: socket.socket) -> int:
    """Continue a connection's handshake. Return the selectors event that it waits for; 0: it is
    done, or there is no TLS."""
    if isinstance(sock, ssl.SSLSocket):
        try:
            sock.do_handshake()
        except ssl.SSLWantReadError:
            return selectors.EVENT_READ
        except ssl.SSLWantWriteError:
            return selectors.EVENT_WRITE
    return 0


def send_records(sock: ssl.SSLSocket, data: memoryview) -> int:
    """Send what the socket takes, a record of 16 KiB at a time; return how many bytes. Raises one
    of WOULD_BLOCK if it takes none: the next call must then begin with the same bytes."""
    done = 0
    try:
        while done < data.nbytes:
            done += sock.send(data[done:])
    except WOULD_BLOCK:
        if not done:
            raise
    return done
