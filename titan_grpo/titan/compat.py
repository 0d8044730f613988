"""The gate to torchtitan: which versions, and everything that must happen before its first import."""

from importlib import metadata

from titan_grpo.errors import UpstreamError
from titan_grpo.patches.versions import Range, inside, release

TORCHTITAN: Range = ("torchtitan", "0.2.2", "0.3")


def refusal(version: str | None) -> str:
    """Why this torchtitan version can not be used, with the remedy; empty if it can. Pure; None means not installed."""
    remedy = "install torchtitan>=0.2.2,<0.3"
    if version is None:
        return f"torchtitan is not installed, and training needs it: {remedy} (pip install 'titan_grpo[train]')"
    if inside(version, TORCHTITAN):
        return ""
    if release(version) >= release(TORCHTITAN[2]):
        return (
            f"torchtitan {version} is not supported: 0.3 removed TOML files, torchtitan.config.JobConfig and the train "
            f"specs that titan_grpo plugs into, so no recipe would load; {remedy}"
        )
    return f"torchtitan {version} is too old: the seams that titan_grpo plugs into came with 0.2.2; {remedy}"


def require_torchtitan() -> str:
    """Installed version of torchtitan. Loads nothing of it.

    Raises:
        UpstreamError: it is missing, or its version is not supported.
    """
    try:
        version: str | None = metadata.version("torchtitan")
    except metadata.PackageNotFoundError:
        version = None
    reason = refusal(version)
    if version is None or reason:
        raise UpstreamError(reason)
    return version


def prepare() -> bool:
    """Version gate and all patches that act at import. Call before anything imports torchtitan. Idempotent.

    Returns whether training runs on the CPU; ``titan.cpu.after_parallelize`` is still due once the model is built.

    Raises:
        UpstreamError: a version of torchtitan or torch that this was not written for.
        ProtocolError: torchtitan was imported before.
    """
    require_torchtitan()
    from titan_grpo.patches import torchtitan_tied_embeddings
    from titan_grpo.titan import cpu

    on_cpu = cpu.install()
    torchtitan_tied_embeddings.apply()
    return on_cpu
