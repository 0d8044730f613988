"""The messages between a trainer's lane and a server's receiver, and the label that a server shows.

They travel as frames (``Kind``, number of the order, body) over one connection per epoch, which the
receiver opens to the address in the Hello::

    receiver                                lane
    JOINED          <- Joined
                                            BLOB           <- the manifest's JSON, once
                                            ORDER 0        <- Order(op="manifest")
    STAGED 0        <- Staged
                                            BLOB           <- raw block digests, concatenated
                                            ORDER n        <- Order(op="receive", sources)
                 (transport "tcp": the receiver reads ranges from the sources;
                  others: both broadcast the image, bucket by bucket, from image to image)
    MOVED n         <- once per bucket that has arrived, in their order (transport "tcp")
    STAGED n        <- Staged
                    (the lane commits: POST /update_weights {"update_info": Commit})
    APPLIED n       <- Applied
                                            ORDER n+1      <- Order(op="ping"), after the read-back
    STAGED n+1      <- Staged
                                            ORDER n        <- Order(op="bye"), when the lane ends
    STAGED n        <- Staged: the run has left the server
    SIGN            ->  SIGN, by the trainer's process at once: it lives

The answer to the ping proves that the engine has not restarted: its receiver would have died with
it. n counts all orders.

With ``Hello.apply == "streamed"`` the receiver has a window (a ring of buckets), no whole image::

                                            BLOB           <- raw block digests, concatenated
                                            ORDER n        <- Order(op="stream")
    STAGED n        <- Staged, at once: the window is ready, nothing has moved
                    (POST /update_weights {"update_info": Commit}; meanwhile both broadcast
                     through the window; the engine loads each tensor once its blocks are checked)
    APPLIED n       <- Applied
                                            CANCEL         <- the lane cancels the load

The connection's end means that the other end is gone: the receiver drops the epoch and the engine
keeps its version; the lane opens the next epoch. protocol.server decides which epoch replaces
another.

With a run key, both ends prove it when the connection opens; besides, every message carries a proof
that its writer has the key, and an end that has a key refuses messages without one. Digests are
keyed, and so is the fingerprint over them. The Hello's digest binds the manifest. The unproven rest
(a refusal, MOVED, CANCEL, SIGN) can only make a transfer fail.
"""

import secrets
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec
from msgspec import Meta

from titan_grpo.errors import PeerError
from titan_grpo.runkey import KEY_FILE_VARIABLE, KEY_VARIABLE, Key

if TYPE_CHECKING:
    from typing import Self  # Python 3.11; servers run on 3.10 too

UNUSABLE = "unusable"
"""Label of a server that is half loaded: it gets no requests until a full sync has succeeded."""


@dataclass(frozen=True, slots=True)
class Label:
    """Value of ``weight_version`` on a server after a commit.

    Any other value (an engine's default, another run's label) says nothing about the versions of
    this run.

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


class Kind(IntEnum):
    """What a frame of the connection is."""

    JOINED = 1
    BLOB = 2
    """Bytes that the next order is about."""
    ORDER = 3
    MOVED = 4
    STAGED = 5
    APPLIED = 6
    CANCEL = 7
    SIGN = 8


PROBE = "probe"
"""``Hello.transport`` of a doctor: the receiver answers with Joined and opens no epoch."""

Op = Literal["manifest", "receive", "stream", "ping", "bye"]

Apply = Literal["staged", "streamed"]
"""How versions reach the engine: from a whole staged image, or through a window during a pause."""

REPLY_S = 10.0
"""Deadline for answering a trainer of another version, in seconds."""

TCP = "tcp"
NIXL = "nixl"
RANGES = (TCP, NIXL)
"""``Hello.transport`` of an epoch whose receiver reads the versions from sources, in ranges."""


def new_run_id(unix_s: float) -> str:
    """Identity of one trainer process group: start time in milliseconds as 12 hex digits, then 8
    random ones. ``unix_s`` is seconds since 1970.

    >>> new_run_id(1.0)[:13]
    '0000000003e8-'
    """
    return f"{int(unix_s * 1000):012x}-{secrets.token_hex(4)}"


def marks(total_bytes: int, bucket_bytes: int) -> tuple[int, ...]:
    """The marks of a transfer, one per bucket.

    >>> marks(10, 4)
    (4, 8, 10)
    """
    return (*range(bucket_bytes, total_bytes, bucket_bytes), total_bytes)


Positive = Annotated[int, Meta(ge=1)]
Number = Annotated[int, Meta(ge=0)]


class Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A record that travels as JSON. Decoding a wrong one raises PeerError.

    ``proof`` is empty without a run key.
    """

    proof: str = ""

    def to_dict(self) -> dict[str, Any]:
        """As JSON-able data."""
        return {name: getattr(self, name) for name in self.__struct_fields__}

    def to_json(self) -> str:
        """As JSON text on one line."""
        return msgspec.json.encode(self).decode()

    @classmethod
    def from_dict(cls, data: Any) -> "Self":
        """Validate decoded JSON; PeerError names the field, the rule and the value's type."""
        try:
            return msgspec.convert(data, cls)
        except msgspec.ValidationError as error:
            raise PeerError(
                f"{cls.__name__} is not valid: {error}; both ends must run the same titan_grpo"
            ) from error

    @classmethod
    def from_json(cls, text: str | bytes | bytearray) -> "Self":
        """Decode one JSON text; PeerError if it is none."""
        try:
            data = msgspec.json.decode(text)
        except ValueError as error:  # not UTF-8, or msgspec.DecodeError
            raise PeerError(f"{cls.__name__} is not JSON ({error}): {text[:80]!r}") from error
        return cls.from_dict(data)

    def proven(self, key: Key | None) -> "Self":
        """The same message with its proof; as it is without a key."""
        return self if key is None else msgspec.structs.replace(self, proof=key.proof(self._text()))

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
        """The text that is proven. It names the type, so no message passes for another."""
        # converted first: 30 and 30.0 are one value of a float field and two texts
        bare = msgspec.structs.replace(self.from_dict(self.to_dict()), proof="")
        return msgspec.json.encode([type(self).__name__, bare]).decode()


class Hello(Message, frozen=True):
    """Opens an epoch: body ``init_info`` of POST /init_weight_transfer_engine.

    ``manifest_digest`` and the byte counts let a receiver refuse before a byte moves; ``timeout_s``
    is the deadline of one transfer, in seconds. ``term`` orders the runs (protocol.server).
    """

    run_id: str
    epoch: Positive
    host: str
    port: Annotated[int, Meta(ge=1, le=65535)]
    ticket: str
    """Names the lane's channel at that address, hexadecimal."""
    transport: str
    manifest_digest: str
    digest_algorithm: str
    block_bytes: Positive
    bucket_bytes: Positive
    timeout_s: Annotated[float, Meta(gt=0)]
    apply: Apply = "staged"
    term: Number = 1
    url: str = ""
    """The server's name in the run: one server under two names is refused."""
    owner: str = ""
    """Identity of the run's dump folder: a resumed run takes its own servers back."""
    take_over: bool = True
    """Whether the server is taken from a live run of another owner."""
    age_s: Annotated[float, Meta(ge=0)] = 0.0
    """Seconds since the run started, by a monotonic clock."""
    live_s: Annotated[float, Meta(ge=0)] = 0.0
    """Seconds after the lane's last sign for which its run counts as live."""
    connections: Positive = 1
    """TCP connections, and threads, with which the receiver reads a version."""
    progress_s: Annotated[float, Meta(gt=0)] = 10.0
    """Longest wait for the next byte of a range, in seconds."""
    relay_wait_s: Annotated[float, Meta(ge=0)] = 0.0
    """Longest wait for a range from another server, in seconds; 0: servers serve no others."""
    store_port: Annotated[int, Meta(ge=0, le=65535)] = 0
    """Port of the store, at ``host``, at which gloo and NCCL meet; 0 for transport "tcp"."""
    nccl: str = ""
    """Version of the trainer's NCCL (transport "nccl"), which must be the server's too."""
    pin: str = ""
    """Of the channel: see RangeSource."""
    model: dict[str, Any] = {}
    """receive.checkpoint.essential of the trainer's model; empty is not compared."""
    routes: bool = False
    """Whether completions must come with the experts of each token."""

    def __post_init__(self) -> None:
        if self.bucket_bytes % self.block_bytes:
            raise ValueError(
                f"bucket_bytes must be a multiple of block_bytes, got {self.bucket_bytes} and"
                f" {self.block_bytes}"
            )


def reply_address(data: Any) -> Hello | None:
    """A probe with the fields of another version's Hello that a refusal needs; None without them.

    It is good for an answer and for nothing else.
    """
    if not isinstance(data, dict):
        return None
    known = {key: data.get(key) for key in ("run_id", "epoch", "host", "port", "ticket")}
    rest: dict[str, Any] = {"transport": PROBE, "manifest_digest": ""}
    rest |= {"digest_algorithm": "xxh3", "block_bytes": 1, "bucket_bytes": 1, "timeout_s": REPLY_S}
    try:
        return Hello.from_dict(known | rest)
    except PeerError:
        return None


class Joined(Message, frozen=True):
    """The receiver's answer to Hello, with what its engine holds.

    ``held_run`` is empty and ``held_version`` -1 while the engine runs on its initial weights.
    ``intact`` is false after a load that broke off, until a whole one follows. ``keyed``: the
    server has a run key. The fields in force name the epoch that the server obeys. A refusal is
    accepted without a proof: an attacker who can forge one can also cut the connection.
    """

    ok: bool
    error: str
    package: str
    pid: int
    held_run: str
    held_version: int
    held_fingerprint: str
    intact: bool
    keyed: bool = False
    run_in_force: str = ""
    epoch_in_force: int = 0
    term_in_force: Number = 0
    age_in_force_s: float = 0.0
    """Seconds since that run started."""
    final: bool = False
    """Of a refusal: it stays as long as engine and trainer stay as they are."""
    relay_host: str = ""
    """Address at which other servers read from this one, at ``relay_port``; 0: they cannot."""
    relay_port: Annotated[int, Meta(ge=0, le=65535)] = 0
    relay_pin: str = ""
    """Of that address: see RangeSource."""
    zone: str = ""
    """Servers of one zone read from each other first."""
    quantization: str = ""
    """Method by which the engine quantises its weights, in the engine's word; empty without."""

    @property
    def held(self) -> Label | None:
        """Label of the version that the engine holds; None while it runs on its initial weights."""
        if not self.held_run:
            return None
        return Label(self.held_run, self.held_version, self.held_fingerprint)


class ServerState(
    msgspec.Struct, frozen=True, tag=True, tag_field="frame", forbid_unknown_fields=True
):
    """What the ledger has of a server, for the rollouts.

    ``version``: what it holds, None for unknown. ``accepting``: whether it takes new groups.
    ``label``: the version label at the server, which salts its requests. ``engine``: its
    dialect, may be empty while the version is. ``committing``: the version whose commit runs, which
    it may serve already; said before the server is paused.
    """

    url: str
    version: int | None
    accepting: bool
    label: str
    engine: str = "vllm"
    committing: int | None = None


class RangeSource(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where a part of a version can be read: by TCP from ``host`` and ``port``, and by a process of
    the same host and user from a memfd.

    ``ticket``: hexadecimal, names the image at the source. ``memfd``: a layout.image.ImageAddress,
    empty if the image is in none. ``pin``: SHA-256 of the certificate that it shows; empty: no TLS.
    ``nixl``: NixlSource.place of the image, empty without.
    """

    host: str
    port: int
    ticket: str
    memfd: dict[str, int] = {}
    part: Number = 0
    pin: str = ""
    nixl: str = ""


class Patch(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where to read the ``nbytes`` (layout.delta) that make the source's part of ``version`` of
    that of ``base``."""

    base: Number
    version: Number
    nbytes: Number
    source: RangeSource

    @property
    def part(self) -> int:
        """See protocol.patches.Leads."""
        return self.source.part


class Order(Message, frozen=True):
    """The lane's next request. ``version`` and ``fingerprint`` belong to "receive" and "stream".

    ``sources``: from where a "receive" reads the version; none: the lane broadcasts it.
    ``patches``: of each part from the version that is staged to the new one, in order, or none.
    ``relays``: other servers that read it too, asked before the sources; ``serve``: tickets under
    which this one serves each part to others, or none.
    """

    number: Number
    op: Op
    version: int
    fingerprint: str
    sources: tuple[RangeSource, ...] = ()
    patches: tuple[Patch, ...] = ()
    relays: tuple[RangeSource, ...] = ()
    serve: tuple[str, ...] = ()


class Staged(Message, frozen=True):
    """The receiver's answer to an order.

    ``ok`` after "stream": the window is ready, and digests and fingerprint belong together. ``ok``
    after "receive": every block digest and the fingerprint match. Otherwise ``error`` says why and
    ``bad_block`` is the first block that differs (-1: not about blocks). ``image`` is the address
    of the staged bytes on the server's host, empty without any. ``verify_s``: seconds of checks
    after the last byte. ``read_bytes``: read from sources, patches and blocks; ``relay_bytes``: of
    these from ``relays``; ``lost``: those of them, by number, that failed.
    """

    number: int
    version: int
    ok: bool
    fingerprint: str
    receive_s: float = 0.0
    verify_s: float = 0.0
    error: str = ""
    bad_block: int = -1
    image: dict[str, int] = {}
    read_bytes: Number = 0
    relay_bytes: Number = 0
    lost: tuple[int, ...] = ()


class Attach(Message, frozen=True):
    """``{"attach": ...}`` where a Hello goes: map the receiver's memory now, and not in the pause
    of the epoch's first commit."""

    run_id: str
    epoch: int


class Commit(Message, frozen=True):
    """Body ``update_info`` of POST /update_weights: load this staged image."""

    run_id: str
    epoch: int
    number: int
    version: int
    fingerprint: str
    manifest_digest: str
    image: dict[str, int]


class Applied(Message, frozen=True):
    """The engine's report on a commit.

    ``intact``: the engine holds one whole version: the new one if ``ok``, otherwise the old one.
    Not intact: a load broke off half-way; keep the server paused until a commit succeeds.
    ``loaded`` counts tensors; ``load_s``: seconds in the engine's own loader, part of ``apply_s``.
    A receiver that streamed adds ``receive_s`` and ``verify_s``, its work in seconds, and
    ``bad_block``, the first block that differed (-1: none did).
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
    final: bool = False
    """Of a refusal: this engine can never take what this run sends."""
    load_s: float = 0.0


class Hashed(Message, frozen=True):
    """Set by another trainer host's leader in rank 0's store: its part (layout.parts) of
    ``version`` is whole, hashed and served at ``source``; or ``error`` says why not.

    ``digests``: of the part's blocks, in order, hexadecimal. The store takes 8 MiB: with blocks of
    4 MiB and keyed digests a part may have 500 GB. ``patches``: that lead to it, in order.
    """

    version: int
    part: int
    source: RangeSource
    digests: str
    error: str = ""
    patches: tuple[Patch, ...] = ()

    def problem(self, version: int, part: int) -> str:
        """Why this is not the part that a version waits for; empty if it is. Digests of another
        version would make one that no receiver can hold."""
        if (self.version, self.part) != (version, part):
            return f"it is part {self.part} of version {self.version}"
        return self.error
