"""The version gate of every patch: a patch is applied only to upstream versions that it was written
for.

A patch module declares ``WHY`` (the upstream reason), ``APPLIES_TO`` (see ``Range``),
``DELETE_WHEN``, and a function that applies it, mostly ``apply() -> bool``: True if the patch is
in place, False if it is not needed here.
"""

import re
from importlib import metadata

from titan_grpo.errors import UpstreamError

Range = tuple[str, str, str]
"""(package, first version it was written for, first version that it was not written for)."""


def numbers(version: str) -> tuple[int, ...]:
    """Return a version's leading numbers: "2.13.0+cpu" -> (2, 13, 0), "0.3.0rc1" -> (0, 3, 0),
    "nightly" -> (). Pure."""
    found = re.match(r"\d+(\.\d+)*", version)
    return tuple(int(part) for part in found.group().split(".")) if found else ()


def release(version: str) -> tuple[int, ...]:
    """Return ``numbers``. Raises UpstreamError if there are none."""
    if not (found := numbers(version)):
        raise UpstreamError(
            f"version {version!r} has no numeric release; the patches cannot tell what it contains"
        )
    return found


def inside(version: str, applies_to: Range) -> bool:
    """Whether ``version`` is in the range, whose end is exclusive. Pure."""
    _, first, beyond = applies_to
    return release(first) <= release(version) < release(beyond)


def require(applies_to: Range, patch: str) -> str:
    """Return the installed version of the package.

    Raises:
        UpstreamError: the version is outside the range.
    """
    package, first, beyond = applies_to
    version = metadata.version(package)
    if not inside(version, applies_to):
        raise UpstreamError(
            f"patch {patch} is written for {package} >={first},<{beyond}, found {version}: applied"
            f" blindly it could corrupt training silently; install a {package} in that range, or"
            f" check the patch against {version} and widen its range"
        )
    return version
