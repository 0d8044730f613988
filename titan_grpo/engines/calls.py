"""HTTP as data: what to ask, and how to read the answer. Whoever owns a connection executes a Call (drivers.py)."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from titan_grpo.errors import ServerRefused

T = TypeVar("T")


class HttpRefused(ServerRefused):
    """A non-2xx answer, or an error in the middle of one. ``status`` is its HTTP status code."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True, slots=True)
class Call(Generic[T]):
    """One HTTP request and the pure function that turns its 2xx answer into a value.

    ``parse`` gets the decoded JSON body, or ``None`` for an empty or non-JSON one, and raises ServerRefused
    (through ``want``) where the answer has not the promised form. ``timeout_s`` is the deadline in seconds. ``admin``: it
    goes with the admin key, if there is one.
    """

    method: str
    path: str
    timeout_s: float
    parse: Callable[[Any], T]
    params: Mapping[str, str] = field(default_factory=dict)
    json: Any = None
    admin: bool = False


def want(answer: Any, key: str, kind: type | tuple[type, ...], path: str) -> Any:
    """``answer[key]`` if it has the type ``kind``, else ServerRefused with the path, the key and what was there."""
    value = answer.get(key) if isinstance(answer, Mapping) else None
    if isinstance(answer, Mapping) and key in answer and isinstance(value, kind):
        return value
    raise ServerRefused(f"{path} must answer with {key!r}, got {str(answer)[:200]!r}: another server or another version of it?")


def ignore(_answer: Any) -> None:
    """Parse step of calls whose status code says everything."""
