"""TLS under a source's connections: the certificate that it shows, and how a reader checks it.

A certificate's pin, the SHA-256 of it, travels with the address at which it is shown: in the Hello
and in the orders, under the run key's proof. So any certificate will do, and no authority and no
host name is asked. The reader proves itself within, as without TLS (channel.py).
"""

import hashlib
import re
import selectors
import socket
import ssl
from dataclasses import dataclass
from pathlib import Path

from titan_grpo.errors import ConfigError, TransferFailed

WOULD_BLOCK = (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError)
"""What a call on a socket that does not block raises where it would."""

PEM = re.compile("-----BEGIN CERTIFICATE-----.*?-----END CERTIFICATE-----", re.DOTALL)


class WrongCertificate(TransferFailed):
    """The other end is not the one that the address was given for. ``shown``: its pin."""

    def __init__(self, message: str, shown: str) -> None:
        super().__init__(message)
        self.shown = shown


@dataclass(frozen=True, slots=True)
class Certificate:
    """What a source shows."""

    context: ssl.SSLContext
    pin: str
    """See the module; hexadecimal."""

    @classmethod
    def load(cls, path: str, key_path: str, names: tuple[str, str]) -> "Certificate | None":
        """From PEM files: a certificate (its chain may follow) and its private key; None if both
        paths are empty. ``names``: what the two are called in the ConfigError."""
        if not path and not key_path:
            return None
        if not path or not key_path:
            raise ConfigError(f"{names[0]} and {names[1]} belong together: set both, or none")
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.num_tickets = 0  # readers resume nothing
        try:
            # A password would be asked for on the terminal.
            context.load_cert_chain(path, key_path, password=lambda: b"")
            found = PEM.findall(Path(path).read_text(encoding="ascii", errors="replace"))
            return cls(context, _pin(ssl.PEM_cert_to_DER_cert(found[0])))
        except (OSError, ValueError, IndexError) as error:
            raise ConfigError(
                f"{names[0]} and {names[1]} must be a certificate and its private key, without a"
                f" password, in PEM files, got {path!r} and {key_path!r}: {error}"
            ) from error


def _pin(certificate: bytes) -> str:
    return hashlib.sha256(certificate).hexdigest()


def secured(sock: socket.socket, pin: str, name: str) -> socket.socket:
    """``sock`` with TLS, which owns it from now on; ``name`` is the other end, for errors.
    WrongCertificate if it shows another one than the ``pin``'s; TransferFailed if it speaks no TLS.
    """
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
    """Go on with a connection's handshake: the event of selectors that it waits for; 0: it is done,
    or there is no TLS."""
    if isinstance(sock, ssl.SSLSocket):
        try:
            sock.do_handshake()
        except ssl.SSLWantReadError:
            return selectors.EVENT_READ
        except ssl.SSLWantWriteError:
            return selectors.EVENT_WRITE
    return 0


def send_records(sock: ssl.SSLSocket, data: memoryview) -> int:
    """Send what the socket takes, a record of 16 KiB at a time; how many bytes. Raises one of
    WOULD_BLOCK if it takes none: then the next call must begin with the same bytes."""
    done = 0
    try:
        while done < data.nbytes:
            done += sock.send(data[done:])
    except WOULD_BLOCK:
        if not done:
            raise
    return done
