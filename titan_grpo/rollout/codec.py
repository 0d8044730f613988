"""Messages as JSON, for the way between hosts: one text each. Nothing that is read here can be
anything but such a message."""

import hashlib
import json
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import Any, TypeVar, get_args, get_type_hints

from cattrs import BaseValidationError, transform_error
from cattrs.preconf.json import make_converter
from cattrs.strategies import configure_tagged_union

from titan_grpo.errors import DataError, PeerError
from titan_grpo.rollout.messages import FromWorker, ToWorker
from titan_grpo.rollout.spec import RolloutSpec

TAG = "frame"
"""The key that names a message's type."""

_converter = make_converter(forbid_extra_keys=True)
for _union in (ToWorker, FromWorker):
    configure_tagged_union(_union, _converter, tag_name=TAG)

T = TypeVar("T")


def encode(message: ToWorker | FromWorker, direction: Any) -> str:
    """The text of a message; ``direction`` is ``ToWorker`` or ``FromWorker``. Raises DataError for
    one without a JSON form."""
    return _text(_converter.unstructure(message, direction), type(message).__name__)


def decode(text: str, direction: Any) -> Any:
    """``encode`` back. Raises PeerError."""
    try:
        return _structure(json.loads(text), direction)
    except ValueError as error:
        raise PeerError(f"a frame must be JSON ({error}): {text[:200]!r}") from error


def spec_to_json(spec: RolloutSpec) -> dict[str, Any]:
    """A JSON-able form. Raises DataError where there is none."""
    data: dict[str, Any] = _converter.unstructure(spec)
    _text(data, "the spec")
    return data


def spec_from_json(data: Any) -> RolloutSpec:
    """Inverse of spec_to_json. Raises PeerError."""
    spec: RolloutSpec = _structure(data, RolloutSpec)
    return spec


def _text(data: Any, what: str) -> str:
    try:
        return json.dumps(data, allow_nan=False, separators=(",", ":"))
    except (TypeError, ValueError) as error:
        raise DataError(
            "with a remote rollout.controller prompts need a JSON payload and numbers must be"
            f" finite: {what}: {error}"
        ) from error


def _structure(data: Any, kind: Any) -> Any:
    try:
        return _converter.structure(data, kind)
    except BaseValidationError as error:
        raise PeerError(
            f"a frame can not be read: {'; '.join(transform_error(error))[:300]}"
        ) from error
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise PeerError(f"a frame can not be read ({error!r}): {str(data)[:200]!r}") from error


def shape(kind: Any) -> Iterator[str]:
    """Every record that can occur in ``kind``, with the names and types of its fields; sorted where
    it matters."""
    if is_dataclass(kind) and isinstance(kind, type):
        hints = get_type_hints(kind)
        yield f"{kind.__name__}({', '.join(f'{f.name}: {hints[f.name]}' for f in fields(kind))})"
        for hint in hints.values():
            yield from shape(hint)
    for argument in get_args(kind):
        yield from shape(argument)


FORMAT = hashlib.sha256(
    "\n".join(sorted({*shape(ToWorker), *shape(FromWorker), *shape(RolloutSpec)})).encode()
).hexdigest()[:16]
"""Names the messages of this version: two ends that differ in it would not understand each
other."""
