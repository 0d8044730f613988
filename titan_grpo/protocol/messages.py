"""The label that a server shows for the weights it serves, and how runs are ordered.

A label is ``<run id>:<policy version>:<fingerprint>``. A server that shows anything else (an
engine's default, the label of another run) is not known to hold any version of this run, however
healthy it looks.

What a trainer's lane and a server's receiver say to each other. Standard library only; no I/O.

All keys live under ``PrefixStore(f"{run_id}/{epoch}", ...)`` in a store that the lane hosts::

    receiver                                lane
    joined/<rank>   <- Joined
                                            manifest       <- the manifest's JSON, once
                                            order/0        <- Order(op="manifest")
    staged/0        <- Staged
                                            digests/<n>    <- raw block digests, concatenated
                                            order/<n>      <- Order(op="receive")        n counts all orders
                 (both broadcast the image, bucket by bucket, straight between the two images)
    staged/<n>      <- Staged
                    (the lane commits over HTTP: POST /update_weights {"update_info": Commit})
    applied/<n>     <- Applied
                                            order/<n+1>    <- Order(op="ping"), after the read-back over HTTP
                 (the lane broadcasts PING_BYTES: where the connection is lost, it learns so at once)
    staged/<n+1>    <- Staged: the engine that took the version has not been restarted, or its receiver were gone

With ``Hello.apply == "streamed"`` the receiver has a window (a ring of buckets) instead of a whole
image::

                                            digests/<n>    <- raw block digests, concatenated
                                            order/<n>      <- Order(op="stream")
    staged/<n>      <- Staged, at once: the window is ready, nothing has moved
                    (POST /update_weights {"update_info": Commit}; while it runs, both broadcast the image through
                     the window, and the engine loads every tensor as soon as its blocks are checked)
    applied/<n>     <- Applied
                                            cancel         <- the lane gives the transfer up: the engine is let go

A lost store connection means that the lane is gone: the receiver forgets the epoch and the engine
keeps its version. A higher epoch of the same run, or any epoch of a later run, replaces the one in
force; nothing else does (protocol.fence).

With a run key every message carries a proof that its writer has it, in both directions, and an end
that has a key believes no message without one. Digests are keyed, and an order's or a commit's
fingerprint is one over them. The manifest is bound by the Hello's digest of it. What is left
unproven (a refusal, "cancel") can only make a transfer fail."""

import json
import secrets
from dataclasses import asdict, dataclass, field, fields, replace
from types import UnionType
from typing import Any, Self, get_args, get_type_hints

from titan_grpo.errors import PeerError
from titan_grpo.runkey import KEY_FILE_VARIABLE, KEY_VARIABLE, Key

UNUSABLE = "unusable"
"""Label of a server whose last load stopped half-way: it serves nobody until a full sync has
replaced it."""


@dataclass(frozen=True, slots=True)
class Label:
    """What ``weight_version`` reads on a server after a commit.

    >>> str(Label("018f-ab", 7, "9c5e"))
    '018f-ab:7:9c5e'
    """

    run_id: str
    version: int
    fingerprint: str

    def __str__(self) -> str:
        return f"{self.run_id}:{self.version}:{self.fingerprint}"

    @classmethod
    def parse(cls, text: str | None) -> "Label | None":
        """The label in ``text``, or None if it is not one of ours."""
        parts = (text or "").split(":")
        if len(parts) != 3 or not parts[1].isdigit():
            return None
        return cls(parts[0], int(parts[1]), parts[2])


RECEIVER_RANK = 1
"""Rank of a server's receiver in its lane's communicator; the lane itself is rank 0."""

ABORTED = b"!aborted"
"""Value that an aborted lane sets on the key one of its own threads waits for."""

PROBE = "probe"
"""``Hello.transport`` of a doctor: answer with Joined, touch nothing, fence nothing."""

OPS = ("manifest", "receive", "stream", "ping", "release", "bye")

APPLY = ("staged", "streamed")
"""How an epoch's versions reach the engine: out of a whole staged image, or through a window while
it stands still."""

REPLY_S = 10.0
"""Deadline for answering a trainer of another version, in seconds."""

PING_BYTES = 1
"""What a ping broadcasts."""

CANCEL_KEY = "cancel"
"""Set by a lane that gives a streamed transfer up."""


def new_run_id(unix_s: float) -> str:
    """Identity of one trainer process group: start time in milliseconds as 12 hex digits, then 8
    random ones.

    Lexicographic order is age. ``unix_s`` is seconds since 1970.

    >>> new_run_id(1.0)[:13]
    '0000000003e8-'
    """
    return f"{int(unix_s * 1000):012x}-{secrets.token_hex(4)}"


def key_prefix(run_id: str, epoch: int) -> str:
    """Prefix of every key of one epoch."""
    return f"{run_id}/{epoch}"


def _accepts(hint: Any, value: Any) -> bool:
    """Whether a decoded JSON value fits a field's type; True and False are no numbers."""
    if isinstance(hint, UnionType):
        return any(_accepts(option, value) for option in get_args(hint))
    if hint is float:
        return isinstance(value, (int, float)) and not isinstance(value, bool)
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, getattr(hint, "__origin__", hint))


@dataclass(frozen=True, slots=True)
class Message:
    """A record that travels as JSON. Decoding refuses missing keys, unknown keys and wrong types
    with PeerError.

    ``proof`` is empty without a run key.
    """

    proof: str = field(default="", kw_only=True)

    def to_dict(self) -> dict[str, Any]:
        """As JSON-able data."""
        return asdict(self)

    def to_json(self) -> str:
        """As JSON text on one line."""
        return json.dumps(self.to_dict())

    @classmethod
    def from_dict(cls, data: Any) -> Self:
        """Decode and validate; PeerError names the key, the rule and the value."""
        name = cls.__name__
        if not isinstance(data, dict):
            raise PeerError(
                f"{name} must be a JSON object, got {type(data).__name__}: the two ends run"
                " different versions?"
            )
        hints = get_type_hints(cls)
        known = {f.name for f in fields(cls)}
        if missing := sorted(known - data.keys()):
            raise PeerError(
                f"{name} lacks {', '.join(missing)}; both ends must run the same titan_grpo"
            )
        if unknown := sorted(data.keys() - known):
            raise PeerError(
                f"{name} has unknown keys {', '.join(unknown)}; both ends must run the same"
                " titan_grpo"
            )
        for key in known:
            if not _accepts(hints[key], data[key]):
                raise PeerError(f"{name}.{key} must be {hints[key]}, got {data[key]!r}")
        message = cls(**data)
        message.check()
        return message

    @classmethod
    def from_json(cls, text: str | bytes) -> Self:
        """Decode one JSON text; PeerError if it is none."""
        try:
            data = json.loads(text)
        except ValueError as error:
            raise PeerError(f"{cls.__name__} is not JSON ({error}): {text[:80]!r}") from error
        return cls.from_dict(data)

    def check(self) -> None:
        """Raise PeerError if a value breaks a rule that its type cannot express."""

    def proven(self, key: Key | None) -> Self:
        """The same message with its proof; as it is without a key."""
        return self if key is None else replace(self, proof=key.proof(self._text()))

    def require_proof(self, key: Key | None) -> None:
        """Raise PeerError unless the writer has this end's key, or neither end has one."""
        name = type(self).__name__
        if key is None and self.proof:
            raise PeerError(
                f"{name} proves a run key and this end has none, so it could prove nothing in"
                f" return: set {KEY_VARIABLE} or {KEY_FILE_VARIABLE} here too"
            )
        if key is not None and not self.proof:
            raise PeerError(
                f"{name} carries no proof of the run key, which this end demands: hand the other"
                f" end the same key ({KEY_VARIABLE} or {KEY_FILE_VARIABLE})"
            )
        if key is not None and not key.proves(self._text(), self.proof):
            raise PeerError(
                f"{name} was proven with another run key, or changed on its way: hand both ends the"
                " same key"
            )

    def _text(self) -> str:
        """What the proof is about. The name of the type is in it: no message passes for another."""
        data = self.to_dict()
        del data["proof"]
        return json.dumps([type(self).__name__, data], sort_keys=True)

    def _require(self, ok: bool, rule: str) -> None:
        if not ok:
            raise PeerError(f"{type(self).__name__} breaks a rule: {rule}; got {self}")


@dataclass(frozen=True, slots=True)
class Hello(Message):
    """Opens an epoch: body ``init_info`` of POST /init_weight_transfer_engine.

    ``manifest_digest`` and the byte counts let a receiver refuse before a byte moves; ``timeout_s``
    is the deadline of one transfer, in seconds; ``apply`` is one of APPLY.
    """

    run_id: str
    epoch: int
    store_host: str
    store_port: int
    transport: str
    rank: int
    size: int
    manifest_digest: str
    digest_algorithm: str
    block_bytes: int
    bucket_bytes: int
    timeout_s: float
    apply: str = "staged"

    def check(self) -> None:
        self._require(self.epoch >= 1, "epoch >= 1")
        self._require(0 < self.store_port < 65536, "0 < store_port < 65536")
        self._require(0 < self.rank < self.size, "0 < rank < size (rank 0 is the lane)")
        self._require(self.timeout_s > 0, "timeout_s > 0")
        self._require(self.apply in APPLY, f"apply is one of {', '.join(APPLY)}")
        whole = (
            self.block_bytes > 0
            and self.bucket_bytes > 0
            and self.bucket_bytes % self.block_bytes == 0
        )
        self._require(whole, "bucket_bytes is a positive multiple of block_bytes")


def reply_address(data: Any) -> Hello | None:
    """The least of a Hello that a refusal can be sent back by, from one of another titan_grpo; None
    if that is missing too.

    It is a probe: good for an answer and for nothing else.
    """
    if not isinstance(data, dict):
        return None
    rank = data.get("rank")
    known = {key: data.get(key) for key in ("run_id", "epoch", "store_host", "store_port", "rank")}
    size = rank + 1 if isinstance(rank, int) else None
    rest = {
        "transport": PROBE,
        "size": size,
        "manifest_digest": "",
        "digest_algorithm": "xxh3",
        "block_bytes": 1,
    }
    try:
        return Hello.from_dict(
            known | rest | {"bucket_bytes": 1, "timeout_s": REPLY_S, "apply": APPLY[0], "proof": ""}
        )
    except PeerError:
        return None


@dataclass(frozen=True, slots=True)
class Joined(Message):
    """The receiver's answer to Hello, with what its engine holds: the read-back that settles an
    unknown server.

    ``held_run`` is empty and ``held_version`` -1 while the engine runs on what it was started with.
    ``intact`` is false if a load broke off half-way and no whole one followed. ``keyed``: this end
    has a run key. A refusal is believed without a proof: whoever can forge one can as well cut the
    connection.
    """

    rank: int
    ok: bool
    error: str
    package: str
    pid: int
    held_run: str
    held_version: int
    held_fingerprint: str
    intact: bool
    keyed: bool = False


@dataclass(frozen=True, slots=True)
class Order(Message):
    """What the lane wants next. ``version`` and ``fingerprint`` are meaningful for "receive" and
    "stream" only."""

    number: int
    op: str
    version: int
    digests_key: str
    fingerprint: str

    def check(self) -> None:
        self._require(self.op in OPS, f"op is one of {', '.join(OPS)}")
        self._require(self.number >= 0, "number >= 0")


@dataclass(frozen=True, slots=True)
class Staged(Message):
    """How an order ended at the receiver.

    ``ok`` after "stream" says that the window is ready and that digests and fingerprint belong
    together. ``ok`` after "receive" says that every block digest and the fingerprint match;
    otherwise ``error`` says why and ``bad_block`` is the first block that differs (-1: not a matter
    of blocks). ``image`` is where the staged bytes lie on the server's host, empty if nowhere.
    ``verify_s`` is the check that was left after the last byte, in seconds: blocks are hashed while
    later ones arrive.
    """

    number: int
    version: int
    ok: bool
    fingerprint: str
    receive_s: float
    verify_s: float
    error: str
    bad_block: int
    image: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Commit(Message):
    """Body ``update_info`` of POST /update_weights: load this staged image."""

    run_id: str
    epoch: int
    number: int
    version: int
    fingerprint: str
    manifest_digest: str
    image: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Applied(Message):
    """How a commit ended in the engine.

    ``intact`` says that the engine holds one whole version: the new one if ``ok``, otherwise the
    old one. Not intact means that a load broke off half-way: keep the server paused until a commit
    succeeds. ``loaded`` counts tensors. A receiver that streamed adds the last three: its work in
    seconds, and the first block that differed (-1: none did).
    """

    number: int
    version: int
    ok: bool
    fingerprint: str
    loaded: int
    apply_s: float
    error: str
    intact: bool
    receive_s: float = 0.0
    verify_s: float = 0.0
    bad_block: int = -1
