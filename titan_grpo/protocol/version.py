"""The label that a server shows for the weights it serves, and how runs are ordered.

A label is ``<run id>:<policy version>:<fingerprint>``. A server that shows anything else (an engine's default, the label of
another run) is not known to hold any version of this run, however healthy it looks.
"""

from dataclasses import dataclass

UNUSABLE = "unusable"
"""Label of a server whose last load stopped half-way: it serves nobody until a full sync has replaced it."""


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
