"""The exception tree. The type says who is wrong; the message says rule, value, consequence and
remedy.

::

    TitanGrpoError
    |-- ConfigError            the user's TOML, arguments or environment; exit code 2
    |-- UpstreamError          an upstream package has a version that this code was not written for
    |-- ProtocolError          we are wrong: an event that a table's state does not list
    |-- DataError              a rollout or a data file is not what it says it is
    |-- TaskError              the user's task or reward function raised, more often than allowed
    |-- UnhealthyError         NaN, too large a gradient, rewards that say nothing
    |-- StorageError           a file of the run cannot be written: the disk is full, or read-only
    |-- SyncError              a background sync failed; shown at a step boundary
    `-- PeerError              a server is wrong, or gone
        |-- ServerUnreachable  no answer: refused, reset, timed out
        |-- ServerRefused      it answered, and the answer was no
        |   |-- ServerUnfit    nor will it say yes as it was started: asking again changes nothing
        |   `-- ServerTaken    another run is in force there
        `-- TransferFailed     bytes were lost, late, or not the ones that were sent
"""


class TitanGrpoError(Exception):
    """Root of every exception that titan_grpo raises on purpose."""


class ConfigError(TitanGrpoError):
    """The user's configuration breaks a rule. One line, exit code 2."""


class UpstreamError(TitanGrpoError):
    """An upstream package has a version for which a patch or an adapter was not written."""


class ProtocolError(TitanGrpoError):
    """An event reached a state that does not list it: a bug of ours, never of a peer."""


class DataError(TitanGrpoError):
    """A rollout, a prompt or a data file breaks its own declaration."""


class TaskError(TitanGrpoError):
    """The user's task or reward function failed more often than ``rollout.task_error_budget``
    allows. The message has the traceback of their code."""


class UnhealthyError(TitanGrpoError):
    """The numbers of a training step are bad, and the configuration says that the run stops. Raised
    on every rank alike."""


class StorageError(TitanGrpoError):
    """The disk refused a file of the run. Said in one line on the rank that met it."""


class AlertStop(TitanGrpoError):
    """A threshold of alerts.stop was crossed: the run ends, with its state saved if it saves
    checkpoints."""


class SyncError(TitanGrpoError):
    """A background weight sync failed: which server, version and block (where there is one), and
    why.

    Latched by the thread that met it and raised, or logged, at the next step boundary.
    """

    def __init__(
        self, cause: str, *, url: str = "", version: int | None = None, block: int | None = None
    ) -> None:
        where = [url] if url else []
        where += [f"version {version}"] if version is not None else []
        where += [f"block {block}"] if block is not None else []
        super().__init__(f"{', '.join(where)}: {cause}" if where else cause)
        self.cause, self.url, self.version, self.block = cause, url, version, block

    def followed_by(self, count: int) -> "SyncError":
        """The same error, telling that ``count`` others came after it."""
        if count == 0:
            return self
        cause = f"{self.cause} (and {count} more since the last step)"
        return SyncError(cause, url=self.url, version=self.version, block=self.block)


class PeerError(TitanGrpoError):
    """A server is wrong or gone. Never our own bug, and never a reason to stop the trainer by
    itself."""


class ServerUnreachable(PeerError):
    """No answer from a server: connection refused, reset, or past its deadline."""


class ServerRefused(PeerError):
    """A server answered, and its answer was a refusal."""


class ServerUnfit(ServerRefused):
    """A server cannot serve this run as it was started: another model, key or version of the
    engine."""


class ServerTaken(ServerRefused):
    """Another run is in force on a server: ``run_id``, with ``term`` (protocol.server), ``age_s``
    seconds old."""

    def __init__(self, message: str, run_id: str, term: int, age_s: float) -> None:
        super().__init__(message)
        self.run_id, self.term, self.age_s = run_id, term, age_s


class TransferFailed(PeerError):
    """A transfer ended without the announced bytes: lost, late, or different. ``block``: the first
    one that differed."""

    def __init__(self, message: str, block: int | None = None) -> None:
        super().__init__(message)
        self.block = block


CROSSING: dict[str, type[TitanGrpoError]] = {
    kind.__name__: kind
    for kind in (
        *(ServerUnfit, ServerRefused, ServerUnreachable, TransferFailed, PeerError),
        *(ConfigError, UpstreamError, ProtocolError, TitanGrpoError),
    )
}
"""Errors that cross to another process, by name and text."""


def kind_of(error: BaseException) -> str:
    """The name in CROSSING under which an error crosses: the nearest that it is. What was not
    raised on purpose is a bug of ours."""
    names = (kind.__name__ for kind in type(error).__mro__)
    return next((name for name in names if name in CROSSING), ProtocolError.__name__)
