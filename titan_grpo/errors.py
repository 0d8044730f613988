"""The exception tree. The type says where the fault is; the message says rule, value, consequence
and remedy.

::

    TitanGrpoError
    |-- ConfigError            the user's TOML, arguments or environment; exit code 2
    |-- UpstreamError          an upstream package has a version that this code was not written for
    |-- ProtocolError          a bug of ours: an event that a table's state does not list
    |-- DataError              a rollout or a data file is malformed
    |-- TaskError              the user's task or reward function raised, more often than allowed
    |-- UnhealthyError         NaN, too large a gradient, rewards that say nothing
    |-- RunStopped             rank 0 ended the run, as the other ranks say it
    |-- StorageError           a file of the run cannot be written: the disk is full, or read-only
    |-- AlertStop              a threshold of alerts.stop was crossed
    |-- SyncError              a background sync failed; raised or logged at a step boundary
    `-- PeerError              a server is wrong, or gone
        |-- ServerUnreachable  no answer: refused, reset, timed out
        |-- ServerRefused      the server answered with a refusal
        |   |-- ServerUnfit    a retry cannot succeed until the server is started in another way
        |   `-- ServerTaken    another run is in force there
        `-- TransferFailed     bytes were lost, late, or not the ones that were sent
"""


class TitanGrpoError(Exception):
    """Root of every exception that titan_grpo raises on purpose."""


class ConfigError(TitanGrpoError):
    """The user's configuration breaks a rule. One line, exit code 2."""


class UpstreamError(TitanGrpoError):
    """An upstream package has a version that a patch or adapter was not written for."""


class ProtocolError(TitanGrpoError):
    """A state got an event that it does not list: a bug of ours, never of a peer."""


class DataError(TitanGrpoError):
    """A rollout, a prompt or a data file is malformed or inconsistent."""


class TaskError(TitanGrpoError):
    """The user's task or reward function failed more often than ``rollout.task_error_budget``
    allows. The message has its traceback."""


class UnhealthyError(TitanGrpoError):
    """The numbers of a training step are bad, and the configuration says to stop the run. Raised on
    every rank."""


class RunStopped(TitanGrpoError):
    """Rank 0's error that ends the run, on every other rank: its type and text."""


class StorageError(TitanGrpoError):
    """The disk refused a file of the run. Printed in one line by the affected rank."""


class AlertStop(TitanGrpoError):
    """A threshold of alerts.stop was crossed: the run ends, with its state saved if it saves
    checkpoints."""


class SyncError(TitanGrpoError):
    """A background weight sync failed: server, version, block (if any), and cause.

    Latched by the thread that finds it, and raised or logged at the next step boundary.
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
        """Return the same error with a note that ``count`` others followed."""
        if count == 0:
            return self
        cause = f"{self.cause} (and {count} more since the last step)"
        return SyncError(cause, url=self.url, version=self.version, block=self.block)


class PeerError(TitanGrpoError):
    """A server is wrong or gone. It is never our own bug, and alone never stops the trainer."""


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
    block that differed."""

    def __init__(self, message: str, block: int | None = None) -> None:
        super().__init__(message)
        self.block = block


NOT_JSON = (ValueError, RecursionError)
"""What msgspec (from 0.21 on) and json raise for bytes that are no UTF-8, no JSON, of another form,
or nested deeper than Python's recursion limit."""

CROSSING: dict[str, type[TitanGrpoError]] = {
    kind.__name__: kind
    for kind in (
        *(ServerUnfit, ServerRefused, ServerUnreachable, TransferFailed, PeerError),
        *(ConfigError, UpstreamError, ProtocolError, TitanGrpoError),
    )
}
"""Errors that are passed to another process, by name and text."""


def kind_of(error: BaseException) -> str:
    """Return the name in CROSSING of the error's nearest base class. Other exceptions are bugs of
    ours: "ProtocolError"."""
    names = (kind.__name__ for kind in type(error).__mro__)
    return next((name for name in names if name in CROSSING), ProtocolError.__name__)


def utf8_text(text: str) -> str:
    """Return a text as UTF-8 can have it. A user's error may quote a lone surrogate, which a policy
    can write as an escape: it becomes an escape again.

    >>> utf8_text("a\\ud800")
    'a\\\\ud800'
    """
    return text.encode(errors="backslashreplace").decode()
