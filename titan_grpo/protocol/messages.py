"""Messages between a trainer's lane and a server's receiver, the label that a server shows, and the
ledger's entry of a server.

They travel as frames (``Kind``, order number, body) over one connection per epoch, which the
receiver opens to the address in the Hello::

    receiver                                lane
    JOINED          <- Joined
                                            BLOB           <- the manifest's JSON, once
                                            ORDER 0        <- Order(op="manifest")
    MOVED 0         <- staged: at each mark (protocol.marks) of the image's memory that was made
    STAGED 0        <- Staged
                                            BLOB           <- raw block digests, concatenated
                                            ORDER n        <- Order(op="receive", sources)
                 (RANGES: the receiver reads ranges from the sources;
                  other transports: both broadcast the image, bucket by bucket, from image to image)
    MOVED n         <- once the bytes up to each mark have arrived, in order (RANGES)
    STAGED n        <- Staged
                    (the lane commits: POST /update_weights {"update_info": Commit})
    APPLIED n       <- Applied
                                            ORDER n+1      <- Order(op="ping"), after the read-back
    STAGED n+1      <- Staged
                                            ORDER n        <- Order(op="bye"), when the lane ends
    STAGED n        <- Staged: the run has left the server
    SIGN            ->  SIGN, answered by the trainer's process at once: it is alive

The answer to the ping proves that the engine has not restarted: its receiver would have died with
it. n counts all orders of the connection.

With ``Hello.apply == "streamed"`` the receiver has a window (a ring of buckets), not an image::

                                            BLOB           <- raw block digests, concatenated
                                            ORDER n        <- Order(op="stream")
    STAGED n        <- Staged, at once: the window is ready, nothing has moved
                    (POST /update_weights {"update_info": Commit}; meanwhile both broadcast
                     through the window; the engine loads each tensor once its blocks are checked)
    APPLIED n       <- Applied
                                            CANCEL         <- the lane cancels the load

The end of the connection means that the other end is gone. The receiver then drops the epoch, and
the engine keeps its version; the lane opens the next epoch. protocol.server decides which epoch
replaces another.

With a run key, both ends prove it when the connection opens. Every message carries a proof too, and
an end with a key refuses messages without one. Digests are keyed, and so is the fingerprint over
them. The Hello's digest binds the manifest. What stays unproven (a refusal, MOVED, CANCEL, SIGN)
can only make a transfer fail.
"""

import re
import secrets
from dataclasses import dataclass
from enum import Enum, IntEnum
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec
from msgspec import Meta

from titan_grpo.errors import NOT_JSON, PeerError
from titan_grpo.runkey import KEY_FILE_VARIABLE, KEY_VARIABLE, Key

if TYPE_CHECKING:
    from typing import Self  # Python 3.11; servers run on 3.10 too

FORMAT = 5
"""Number of the messages' form. Raise it with every change that the other end must know."""

UNUSABLE = "unusable"
"""Label of a half-loaded server: it gets no requests until a full sync has succeeded."""

VERSION_DIGITS = re.compile("[0-9]{1,18}")
"""A label's version. Any client may set a label: int() takes no superscripts, nor 5000 digits."""


@dataclass(frozen=True, slots=True)
class Label:
    """Value of ``weight_version`` on a server after a commit.

    Any other value is an engine's default or another run's label.

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
        """Return the label in ``text``, or None if it has not this form."""
        parts = (text or "").split(":")
        if len(parts) != 3 or not VERSION_DIGITS.fullmatch(parts[1]):
            return None
        return cls(parts[0], int(parts[1]), parts[2])


class Kind(IntEnum):
    """Type of a frame."""

    JOINED = 1
    BLOB = 2
    """Payload of the next order."""
    ORDER = 3
    MOVED = 4
    STAGED = 5
    APPLIED = 6
    CANCEL = 7
    SIGN = 8


PROBE = "probe"
"""``Hello.transport`` of the doctor command: the receiver answers Joined and opens no epoch."""

Op = Literal["manifest", "receive", "stream", "ping", "bye"]

Apply = Literal["staged", "streamed"]
"""Where the engine loads versions from: a whole staged image, or a window during the pause."""

REPLY_S = 10.0
"""Deadline, in seconds, of the refusal to a trainer with another version of this package."""

TCP = "tcp"
NIXL = "nixl"
RANGES = (TCP, NIXL)
"""Values of ``Hello.transport`` with which the receiver reads versions from sources, in ranges."""


def new_run_id(unix_s: float) -> str:
    """Return the identity of one trainer process group: the start time in milliseconds as 12 hex
    digits, then 8 random ones. ``unix_s``: seconds since 1970.

    >>> new_run_id(1.0)[:13]
    '0000000003e8-'
    """
    return f"{int(unix_s * 1000):012x}-{secrets.token_hex(4)}"


Positive = Annotated[int, Meta(ge=1)]
Number = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
"""A lane answers a term with its successor, which a message must hold too."""


class Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A record that travels as JSON. ``proof`` is empty without a run key."""

    proof: str = ""

    def to_dict(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__struct_fields__}

    def to_json(self) -> str:
        return msgspec.json.encode(self).decode()

    @classmethod
    def from_dict(cls, data: Any) -> "Self":
        """Validate decoded JSON. Raises PeerError with the field, the rule and the value's type."""
        try:
            return msgspec.convert(data, cls)
        except msgspec.ValidationError as error:
            raise PeerError(
                f"{cls.__name__} is not valid: {error}; both ends must run the same titan_grpo"
            ) from error

    @classmethod
    def from_json(cls, text: str | bytes | bytearray) -> "Self":
        """Decode and validate one JSON text. Raises PeerError."""
        try:
            data = msgspec.json.decode(text)
        except NOT_JSON as error:
            raise PeerError(f"{cls.__name__} is not JSON ({error}): {text[:80]!r}") from error
        return cls.from_dict(data)

    def proven(self, key: Key | None) -> "Self":
        """Return the message with its proof; without a key, the message as it is."""
        return self if key is None else msgspec.structs.replace(self, proof=key.proof(self._text()))

    def require_proof(self, key: Key | None) -> None:
        """Raise PeerError unless the writer has this end's key, or neither end has one. The text is
        shown at either end, so it names both."""
        name = type(self).__name__
        if key is None and self.proof:
            raise PeerError(
                f"{name} proves a run key and its reader has none, so it could prove nothing in"
                f" return: set {KEY_VARIABLE} or {KEY_FILE_VARIABLE} there too (servers read Hello)"
            )
        if key is not None and not self.proof:
            raise PeerError(
                f"{name} carries no proof of the run key, which its reader demands: hand its writer"
                f" the same key ({KEY_VARIABLE} or {KEY_FILE_VARIABLE}; trainers write Hello)"
            )
        if key is not None and not key.proves(self._text(), self.proof):
            raise PeerError(
                f"{name} was proven with another run key, or changed on its way: hand both ends the"
                " same key"
            )

    def _text(self) -> str:
        """Return the text to prove. It has the type's name: no message passes for another type."""
        # Convert first: 30 and 30.0 are the same value of a float field, but two texts.
        bare = msgspec.structs.replace(self.from_dict(self.to_dict()), proof="")
        return msgspec.json.encode([type(self).__name__, bare]).decode()


class Hello(Message, frozen=True):
    """Request to open an epoch: body ``init_info`` of POST /init_weight_transfer_engine.

    By ``manifest_digest`` and the byte counts a receiver can refuse before a byte moves.
    ``timeout_s``: deadline of one transfer, in seconds. ``term`` orders the runs (protocol.server).
    """

    run_id: str
    epoch: Positive
    host: str
    port: Annotated[int, Meta(ge=1, le=65535)]
    ticket: str
    """Hexadecimal name of the lane's channel at that address."""
    transport: str
    manifest_digest: str
    digest_algorithm: str
    bucket_bytes: Positive
    timeout_s: Annotated[float, Meta(gt=0)]
    format: int
    """FORMAT of the trainer's titan_grpo."""
    apply: Apply = "staged"
    term: Number = 1
    url: str = ""
    """The server's name in the run: one server under two names is refused."""
    owner: str = ""
    """Identity of the run's dump folder: a resumed run takes over its own servers."""
    take_over: bool = True
    """Whether to take the server from a live run of another owner."""
    age_s: Annotated[float, Meta(ge=0)] = 0.0
    """Seconds since the run started, by a monotonic clock."""
    live_s: Annotated[float, Meta(ge=0)] = 0.0
    """Seconds for which the run counts as live after the lane's last SIGN."""
    connections: Positive = 1
    """TCP connections, with one thread each, that the receiver reads a version over."""
    progress_s: Annotated[float, Meta(gt=0)] = 10.0
    """Longest wait for the next byte of a range, in seconds."""
    relay_wait_s: Annotated[float, Meta(ge=0)] = 0.0
    """Longest wait for other servers (receive.fetch.Patience), in seconds; 0: no server serves
    others."""
    min_rate: Positive = 50 << 20
    """Least acceptable rate of a transfer, in bytes per second."""
    store_port: Annotated[int, Meta(ge=0, le=65535)] = 0
    """Port of the store, at ``host``, at which gloo and NCCL meet; 0 for transport "tcp"."""
    nccl: str = ""
    """Version of the trainer's NCCL (transport "nccl"); the server must have the same."""
    pin: str = ""
    """Certificate of the channel, as RangeSource.pin."""
    model: dict[str, Any] = {}
    """receive.checkpoint.essential of the trainer's model, compared with the server's if not {}."""
    routes: bool = False
    """Whether the engine must return the experts of each token with its completions."""

    def __post_init__(self) -> None:
        if self.format != FORMAT:
            raise ValueError(
                f"format must be {FORMAT}, got {self.format}: trainer and server need titan_grpo of"
                " the same version"
            )


def reply_address(data: Any) -> Hello | None:
    """Return a probe with the fields that a refusal needs, from the Hello of another version of
    this package; None if they are missing. Use it for the answer only."""
    if not isinstance(data, dict):
        return None
    known = {key: data.get(key) for key in ("run_id", "epoch", "host", "port", "ticket")}
    rest: dict[str, Any] = {"transport": PROBE, "manifest_digest": ""}
    rest |= {"digest_algorithm": "xxh3", "bucket_bytes": 1, "timeout_s": REPLY_S, "format": FORMAT}
    try:
        return Hello.from_dict(known | rest)
    except PeerError:
        return None


class Joined(Message, frozen=True):
    """The receiver's answer to Hello, with what its engine holds.

    ``held_run`` is empty and ``held_version`` -1 while the engine runs on its initial weights.
    ``intact`` is false from a load that failed half-way until a load succeeds. ``keyed``: the
    server has a run key. The ``_in_force`` fields name the epoch that the server obeys. A refusal
    needs no proof: an attacker who can forge one can also cut the connection.
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
    """Of a refusal: it is permanent while engine and trainer stay as they are."""
    relay_host: str = ""
    """Address at which other servers read from this one, with ``relay_port`` (0: they cannot)."""
    relay_port: Annotated[int, Meta(ge=0, le=65535)] = 0
    relay_pin: str = ""
    """Certificate of that address, as RangeSource.pin."""
    zone: str = ""
    """Servers prefer to read from servers of the same zone."""
    quantization: str = ""
    """The engine's name of its weight quantisation; empty without."""

    @property
    def held(self) -> Label | None:
        """Label of the version that the engine holds; None for its initial weights."""
        if not self.held_run:
            return None
        return Label(self.held_run, self.held_version, self.held_fingerprint)


class Standing(Enum):
    """State of one server in the ledger."""

    UNKNOWN = "unknown"
    HOLDS = "holds"
    RECEIVING = "receiving"
    COMMITTING = "committing"
    QUARANTINED = "quarantined"
    """Half loaded: no requests until a full sync has replaced every tensor."""
    GONE = "gone"
    """Removed from the run."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One server's ledger entry: what its lane knows of it (protocol.lane).

    ``held``: the version that it serves, as read back from it; ``incoming``: the version being
    transferred or committed.
    """

    standing: Standing = Standing.UNKNOWN
    held: int | None = None
    incoming: int | None = None

    def __repr__(self) -> str:
        held = "?" if self.held is None else f"v{self.held}"
        incoming = "" if self.incoming is None else f" <- v{self.incoming}"
        return f"{self.standing.value}({held}{incoming})"

    @property
    def accepting(self) -> bool:
        """Whether the server may get new rollouts: it serves one known version and no commit runs.

        A receiving server still serves what it holds. During a commit the version of a new request
        would be ambiguous, so the server gets none.
        """
        return self.held is not None and self.standing in (Standing.HOLDS, Standing.RECEIVING)

    @property
    def committing(self) -> int | None:
        """The version whose commit runs, else None. The server begins to serve it at an unknown
        moment between the pause and the read-back."""
        return self.incoming if self.standing is Standing.COMMITTING else None


class ServerState(
    msgspec.Struct, frozen=True, tag=True, tag_field="frame", forbid_unknown_fields=True
):
    """A server's ledger entry, for the rollouts.

    ``version``: what it holds, None: unknown. ``accepting``: whether it takes new groups.
    ``label``: its version label, the salt of its requests. ``engine``: its HTTP dialect, may be
    empty while ``version`` is None. ``committing``: the version whose commit runs and which the
    server may serve already; sent before the server is paused.
    """

    url: str
    version: int | None
    accepting: bool
    label: str
    engine: str = "vllm"
    committing: int | None = None


class RangeSource(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where to read a part of a version: over TCP from ``host`` and ``port``, or, as a process of
    the same host and user, from a memfd.

    ``ticket``: hexadecimal name of the image at the source. ``memfd``: a layout.image.ImageAddress,
    empty without one. ``pin``: SHA-256 of the source's certificate; empty: no TLS. ``nixl``:
    NixlSource.place of the image, empty without.
    """

    host: str
    port: int
    ticket: str
    memfd: dict[str, int] = {}
    part: Number = 0
    pin: str = ""
    nixl: str = ""


class Patch(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where to read a patch (layout.delta): ``nbytes`` that turn the source's part of ``base`` into
    that of ``version``."""

    base: Number
    version: Number
    nbytes: Number
    source: RangeSource

    @property
    def part(self) -> int:
        return self.source.part


class Order(Message, frozen=True):
    """The lane's next request. ``version`` and ``fingerprint`` belong to "receive" and "stream".

    ``sources``: where a "receive" reads the version; empty: the lane broadcasts it. ``patches``:
    chains that lead from the staged version to the new one, part by part; may be empty. ``relays``:
    other servers with this version, to try before the sources. ``serve``: ticket of each part under
    which this server serves it to others; empty: it serves none.
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

    ``ok`` after "stream": the window is ready, and the fingerprint is that of the digests. ``ok``
    after "receive": every block digest and the fingerprint match. Otherwise ``error`` is the reason
    and ``bad_block`` the first block that differs (-1: none). ``verify_s``: seconds of checks; of
    ranges summed over the threads, while others arrive; of a broadcast after the last byte.
    ``read_bytes``: all bytes read, of patches and blocks; ``relay_bytes``: those of them from
    ``relays``; ``lost``: indices of the ``relays`` that failed.
    """

    number: int
    version: int
    ok: bool
    fingerprint: str
    receive_s: float = 0.0
    verify_s: float = 0.0
    error: str = ""
    bad_block: int = -1
    read_bytes: Number = 0
    relay_bytes: Number = 0
    lost: tuple[Number, ...] = ()


class Attach(Message, frozen=True):
    """``{"attach": ...}``, sent in place of a Hello: map the receiver's memory now. Otherwise the
    epoch's first commit maps it, in its pause."""

    run_id: str
    epoch: int


class Commit(Message, frozen=True):
    """Request to load a staged image: body ``update_info`` of POST /update_weights."""

    run_id: str
    epoch: int
    number: int
    version: int
    fingerprint: str
    manifest_digest: str


class Applied(Message, frozen=True):
    """The engine's report on a commit.

    ``intact``: the engine holds one whole version: the new one if ``ok``, otherwise the old one.
    Not intact: the load failed half-way; keep the server paused until a commit succeeds.
    ``loaded``: number of tensors; ``load_s``: seconds in the engine's own loader, or of the copies
    that repeat it, part of ``apply_s``. Streamed, the receiver adds the seconds of its own checks,
    ``verify_s``, and ``bad_block``, the first block that differs (-1: none).
    """

    number: int
    version: int
    ok: bool
    fingerprint: str
    loaded: int
    apply_s: float
    error: str
    intact: bool
    verify_s: float = 0.0
    bad_block: int = -1
    final: bool = False
    """Of a refusal: this engine can never load this run's versions."""
    load_s: float = 0.0


class Hashed(Message, frozen=True):
    """Report of another trainer host's leader, in rank 0's store: the ``source``'s part of
    ``version`` is complete, hashed and served there; otherwise ``error`` is the reason.

    ``digests``: hexadecimal, of the part's blocks in order. ``patches``: the chain that leads to
    ``version``, oldest first.
    """

    version: int
    source: RangeSource
    digests: str
    error: str = ""
    patches: tuple[Patch, ...] = ()

    def problem(self, version: int, part: int) -> str:
        """Return why this report is not the expected one; empty if it is. With digests of another
        version, no receiver's check could succeed."""
        if (self.version, self.source.part) != (version, part):
            return f"it is part {self.source.part} of version {self.version}"
        return self.error
