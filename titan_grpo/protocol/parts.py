"""What a trainer host tells rank 0's host about its part of a version (layout.parts).

::

    key in rank 0's store     value
    hashed/<version>/<part>   Hashed, set by the host's leader
"""

from titan_grpo.protocol.messages import Message, RangeSource


def hashed_key(version: int, part: int) -> str:
    """Key that a host's leader sets when its part of ``version`` is served, or failed."""
    return f"hashed/{version}/{part}"


class Hashed(Message, frozen=True):
    """A host's part of ``version`` is whole, hashed and served at ``source``; or ``error`` says why
    not.

    ``digests``: of the part's blocks, in order, hexadecimal. The store takes 8 MiB: with blocks of
    4 MiB and keyed digests a part may have 500 GB.
    """

    version: int
    part: int
    source: RangeSource
    digests: str
    error: str = ""


def problem(hashed: Hashed, version: int, part: int) -> str:
    """Why this is not the part that a version waits for; empty if it is. Digests of another version
    would make one that no receiver can hold."""
    if (hashed.version, hashed.part) != (version, part):
        return f"it is part {hashed.part} of version {hashed.version}"
    return hashed.error
