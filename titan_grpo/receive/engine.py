"""What every engine's plugin does, whatever the engine: answer a hello, commit a version, and never raise."""

import logging
import time
import traceback
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Protocol

import torch

from titan_grpo.errors import PeerError, SyncError, TitanGrpoError
from titan_grpo.layout.image import ImageAddress, SharedImage
from titan_grpo.layout.manifest import Manifest
from titan_grpo.protocol.wire import Applied, Commit, Hello, reply_address
from titan_grpo.receive.client import ReceiverClient
from titan_grpo.receive.feed import Feed, begun
from titan_grpo.receive.workers import Workers
from titan_grpo.runkey import Key

log = logging.getLogger("titan_grpo.receive")


class Engine(Protocol):
    """The part that differs: names and loading."""

    def refuses(self, manifest: Manifest) -> str:
        """Why these tensors are not the ones this model is made of; empty if they are. Touches no weight."""
        ...

    def load(self, tensors: Iterator[tuple[str, torch.Tensor]]) -> int:
        """Load (HF name, tensor on the host, valid during the call only); how many. Raises if it went wrong half-way."""
        ...


def package_version() -> str:
    """Name and version of this package, as a lane is told on joining."""
    try:
        return f"titan_grpo {version('titan_grpo')}"
    except PackageNotFoundError:
        return "titan_grpo (not installed, on the path)"


def tensor_views(image: torch.Tensor, manifest: Manifest) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, view of the image with the manifest's dtype and shape), in order; ``image`` is uint8[total_bytes]."""
    for spec in manifest.tensors:
        flat = image[spec.offset : spec.offset + spec.nbytes]
        yield spec.name, flat.view(getattr(torch, spec.dtype)).view(spec.shape)


class Counted(Iterable[tuple[str, torch.Tensor]]):
    """Passes tensors through and counts them."""

    def __init__(self, tensors: Iterator[tuple[str, torch.Tensor]]) -> None:
        self._tensors = tensors
        self.count = 0

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        for pair in self._tensors:
            self.count += 1
            yield pair


@dataclass(frozen=True, slots=True)
class Ready:
    """Everything that a commit needs and that could be refused: ``image`` is a whole version, or the window of ``feed``."""

    image: SharedImage
    manifest: Manifest
    feed: Feed | None

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """All of them in order; returns when the first one is there. TransferFailed if it does not come."""
        if self.feed is not None:
            return begun(self.feed.tensors())
        return tensor_views(self.image.tensor(), self.manifest)


class EngineSide:
    """Held by an engine's plugin, one per worker. ``hello`` and ``commit`` never raise: an exception in a worker's call
    ends the engine, and with it every request.
    """

    def __init__(self, engine: Engine, workers: Workers, problem: str, run_key: Key | None = None) -> None:
        """``problem``: why commits could not work in this engine, told to every lane on joining; empty if they can.

        ``run_key``: serve only who proves it.
        """
        self._engine, self._workers, self._problem = engine, workers, problem
        self._client = ReceiverClient(package_version(), run_key) if workers.rank == 0 else None

    @property
    def client(self) -> ReceiverClient | None:
        """The receiver's handle; rank 0 only."""
        return self._client

    def hello(self, data: dict[str, Any]) -> None:
        """Body of POST /init_weight_transfer_engine. Returns at once; the answer goes over the lane's store."""
        if self._client is None:
            return
        try:
            refusal = self._greet(self._client, data)
            log.log(logging.WARNING if refusal else logging.INFO, "hello from a trainer: %s", refusal or "accepted")
        except TitanGrpoError as error:
            log.warning("a hello was refused, the engine keeps its version: %s", error)
        except Exception:  # noqa: BLE001 - top of an engine's call: raising would end the engine
            log.error("a hello could not be served; the engine keeps its version\n%s", traceback.format_exc())

    def _greet(self, client: ReceiverClient, data: dict[str, Any]) -> str:
        try:
            hello = Hello.from_dict(data)
        except PeerError as error:
            # a trainer of another version learns it now, and not by waiting for its deadline
            if (address := reply_address(data)) is not None:
                client.answer(address, f"{error} (this server runs {package_version()})")
            return str(error)
        return client.hello(hello, self._problem)

    def commit(self, data: dict[str, Any]) -> Applied | None:
        """Body of POST /update_weights: load the version if all of it is right. None if ``data`` is no Commit."""
        try:
            commit = Commit.from_dict(data)
        except TitanGrpoError as refusal:
            log.warning("update_weights was refused, the engine keeps its version: %s", refusal)
            return None
        start = time.monotonic()
        loaded, error, touched = self._guarded(commit)
        intact = self._intact() if not touched else not error
        report = Applied(
            number=commit.number,
            version=commit.version,
            ok=not error,
            fingerprint=commit.fingerprint if not error else "",
            loaded=loaded,
            apply_s=time.monotonic() - start,
            error=error,
            intact=intact,
        )
        self._report(commit, report)
        return report

    def close(self) -> None:
        """End the receiver."""
        if self._client is not None:
            self._client.close()

    def _guarded(self, commit: Commit) -> tuple[int, str, bool]:
        """(tensors loaded, why it failed or empty, whether weights were touched)."""
        ready = self._prepare(commit)
        broken = [why for why in self._workers.gather(ready if isinstance(ready, str) else "") if why]
        if isinstance(ready, str):
            return 0, broken[0], False
        if broken:
            ready.image.close()
            return 0, broken[0], False
        loaded, error, touched = self._load(commit, ready)
        if ready.feed is not None and ready.feed.broken:
            return loaded, error, touched  # every worker has met the same end in the feed already
        broken = [why for why in self._workers.gather(error) if why]
        return loaded, broken[0] if broken else "", touched

    def _load(self, commit: Commit, ready: Ready) -> tuple[int, str, bool]:
        """See _guarded; this worker's part."""
        loaded, error, touched = 0, "", False
        try:
            tensors = ready.tensors()
            touched = True
            loaded = self._engine.load(tensors)
            if loaded != len(ready.manifest.tensors):
                error = f"the engine loaded {loaded} of {len(ready.manifest.tensors)} tensors"
        except Exception as failure:  # noqa: BLE001 - top of an engine's call: raising would end the engine
            log.error("loading version %d broke off\n%s", commit.version, traceback.format_exc())
            error = f"loading broke off: {type(failure).__name__}: {failure}"
            # an error of one worker alone says nothing about how far the others are
            touched = touched or ready.feed is None or not ready.feed.broken
        finally:
            ready.image.close()
        return loaded, error, touched

    def _prepare(self, commit: Commit) -> Ready | str:
        """Everything that can be refused without touching a weight; on each worker."""
        try:
            lent = self._workers.share(self._lend(commit))
            if "error" in lent:
                return str(lent["error"])
            manifest = Manifest.from_json(lent["manifest"])
            if refusal := self._engine.refuses(manifest):
                return refusal
            image = SharedImage.attach(ImageAddress.from_json(lent["image"]))
            if not lent["streamed"]:
                return Ready(image, manifest, None)
            return Ready(image, manifest, Feed(image.tensor(), manifest, self._workers, self._take))
        except (TitanGrpoError, OSError, TypeError, ValueError) as error:
            return f"{type(error).__name__}: {error}"

    def _lend(self, commit: Commit) -> dict[str, Any]:
        if self._client is None:
            return {}
        if self._problem:
            return {"error": self._problem}
        try:
            return self._client.lend(commit)
        except (PeerError, SyncError) as error:
            return {"error": str(error)}

    def _take(self, consumed: int) -> int:
        if self._client is None:
            raise SyncError("only worker 0 talks to the receiver")
        return self._client.take(consumed)

    def _intact(self) -> bool:
        return self._client is None or self._client.holding.intact

    def _report(self, commit: Commit, report: Applied) -> None:
        if self._client is None:
            return
        log.info("commit of version %d: %s", report.version, report.error or f"{report.loaded} tensors, {report.apply_s:.3f} s")
        try:
            self._client.applied(commit, report)
        except PeerError as error:
            log.warning("the trainer could not be told how version %d ended: %s", report.version, error)
