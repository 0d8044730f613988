"""The run key: 32 secret bytes that trainer and servers share. A process without it cannot write
weights.

It comes from a file or from the environment, never from a command line, and no repr, log, error or
pickle shows it. The run key itself proves and hashes nothing: each use has a key of its own,
derived by HMAC-SHA256 (the construction of HKDF's expand step, RFC 5869) from the run key and a
description of the use.
"""

import hashlib
import hmac
import json
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from titan_grpo.errors import ConfigError

KEY_VARIABLE = "TITAN_GRPO_RUN_KEY"
"""Environment variable with the run key itself, 64 hexadecimal digits."""

KEY_FILE_VARIABLE = "TITAN_GRPO_RUN_KEY_FILE"
"""Environment variable with the path of a file that holds the run key."""

KEY_VARIABLES = (KEY_VARIABLE, KEY_FILE_VARIABLE)

KEY_BYTES = 32


class Key:
    """A secret of KEY_BYTES bytes."""

    __slots__ = ("_raw",)

    def __init__(self, raw: bytes) -> None:
        """Raises ConfigError for any other length."""
        if len(raw) != KEY_BYTES:
            raise ConfigError(f"a run key must have {KEY_BYTES} bytes, got {len(raw)}")
        self._raw = raw

    @classmethod
    def generate(cls) -> "Key":
        """Return a new key, from the operating system's randomness."""
        return cls(secrets.token_bytes(KEY_BYTES))

    @classmethod
    def parse(cls, text: str, source: str) -> "Key":
        """Read hexadecimal digits; surrounding blanks are allowed. Raises ConfigError, which names
        ``source`` and never shows the text."""
        try:
            raw = bytes.fromhex(text)
        except ValueError:
            raw = b""
        if len(raw) != KEY_BYTES:
            raise ConfigError(
                f"{source} must hold a run key of {2 * KEY_BYTES} hexadecimal digits, it holds"
                f" {len(text.strip())} characters that are none; make one with: openssl rand"
                " -hex 32"
            )
        return cls(raw)

    @property
    def raw(self) -> bytes:
        """The key's bytes, for a keyed hash."""
        return self._raw

    def hex(self) -> str:
        """Return the hexadecimal digits, to pass the key by environment or pipe."""
        return self._raw.hex()

    def derive(self, *purpose: str) -> "Key":
        """Return the key for one use; other purposes give unrelated keys."""
        return Key(hmac.digest(self._raw, json.dumps(purpose).encode(), hashlib.sha256))

    def proof(self, message: str) -> str:
        """Return the proof of this key for ``message``: its HMAC-SHA256, 64 hexadecimal digits."""
        return hmac.new(self._raw, message.encode(), hashlib.sha256).hexdigest()

    def proves(self, message: str, proof: str) -> bool:
        """Whether ``proof`` is that of ``message``, compared in constant time."""
        return hmac.compare_digest(self.proof(message).encode(), proof.encode())

    def __repr__(self) -> str:
        return "<key>"

    def __reduce__(self) -> NoReturn:
        raise TypeError("a run key is handed over by environment or file; it is not pickled")


@dataclass(frozen=True, slots=True)
class EpochKeys:
    """Keys of one epoch: ``messages`` authenticates its messages, ``blocks`` keys the digests of
    its run."""

    messages: Key
    blocks: Key

    @classmethod
    def of(cls, run_key: Key, run_id: str, epoch: int) -> "EpochKeys":
        """Derive the keys: proofs of other epochs' messages and other runs' digests are invalid."""
        return cls(run_key.derive("messages", run_id, str(epoch)), run_key.derive("blocks", run_id))

    def to_hex(self) -> dict[str, str]:
        """Encode for the socket pair between an engine and its receiver process."""
        return {"messages": self.messages.hex(), "blocks": self.blocks.hex()}

    @classmethod
    def from_hex(cls, data: Mapping[str, str]) -> "EpochKeys":
        return cls(
            *(
                Key.parse(data[name], f"the epoch's key for {name}")
                for name in ("messages", "blocks")
            )
        )


def with_run_key(environ: Mapping[str, str], key: Key | None) -> dict[str, str]:
    """Return ``environ`` for a child process, with ``key`` in place of any other; unchanged without
    a key. Pure."""
    if key is None:
        return dict(environ)
    return {name: value for name, value in environ.items() if name not in KEY_VARIABLES} | {
        KEY_VARIABLE: key.hex()
    }


def find_run_key(environ: Mapping[str, str], path: str = "") -> Key | None:
    """Return the run key, or None if none is configured.

    ``path``: a configured file. Raises ConfigError if a named file is missing or has no key, or if
    more than one source is set.
    """
    sources = [name for name in KEY_VARIABLES if environ.get(name)] + (
        ["weight_sync.run_key_file"] if path else []
    )
    if len(sources) > 1:
        raise ConfigError(
            f"the run key must come from one place, {' and '.join(sources)} are set: which one"
            " counts? unset all but one"
        )
    if environ.get(KEY_VARIABLE):
        return Key.parse(environ[KEY_VARIABLE], KEY_VARIABLE)
    path = path or environ.get(KEY_FILE_VARIABLE, "")
    if not path:
        return None
    try:
        text = Path(path).read_text(encoding="utf-8-sig", errors="replace")
    except OSError as error:
        raise ConfigError(
            f"{sources[0]} must name a readable file with the run key, got {path!r}:"
            f" {error.strerror}"
        ) from error
    return Key.parse(text, f"{sources[0]} ({path})")
