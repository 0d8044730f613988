"""Certificates for tests, made by openssl as a user makes them."""

import subprocess
from pathlib import Path

CURVE = "ec_paramgen_curve:prime256v1"
MAKE = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", CURVE, "-nodes", "-days", "2"]


def certificate(folder: Path, name: str) -> tuple[str, str]:
    """Paths of a new certificate and its key."""
    pem, key = str(folder / f"{name}.pem"), str(folder / f"{name}.key")
    files = ["-subj", f"/CN={name}", "-keyout", key, "-out", pem]
    subprocess.run([*MAKE, *files], check=True, capture_output=True, timeout=60)
    return pem, key
