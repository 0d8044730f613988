"""The processes that hold one model together, as the engine's side of a commit sees them.

The engine's end of a streamed transfer: tensors in manifest order, as their bytes come in.

What every engine's plugin does, whatever the engine: answer a hello, commit a version, and never
raise."""

import logging
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from itertools import chain
from typing import Any, Protocol

import torch
import torch.distributed as dist

from titan_grpo.errors import PeerError, SyncError, TitanGrpoError, TransferFailed
from titan_grpo.layout.image import ImageAddress, SharedImage
from titan_grpo.layout.manifest import Manifest, TensorSpec
from titan_grpo.protocol.messages import Applied, Commit, Hello, reply_address
from titan_grpo.receive.handle import ReceiverHandle
from titan_grpo.receive.window import copy_out
from titan_grpo.runkey import Key


class Workers(Protocol):
    """The processes that hold one model together. All make the same calls in the same order."""

    rank: int
    size: int

    def share(self, value: Any) -> Any:
        """Rank 0's value, on every rank."""
        ...

    def gather(self, value: str) -> list[str]:
        """Every rank's value, on every rank."""
        ...


class OneWorker:
    """A model in one process."""

    rank = 0
    size = 1

    def share(self, value: Any) -> Any:
        """See Workers."""
        return value

    def gather(self, value: str) -> list[str]:
        """See Workers."""
        return [value]


class GroupWorkers:
    """Those of an engine's own group: vLLM's and SGLang's coordinators have the same names for what
    is needed of them."""

    def __init__(self, coordinator: Any) -> None:
        self._group = coordinator.cpu_group
        self.rank: int = coordinator.rank_in_group
        self.size: int = coordinator.world_size

    def share(self, value: Any) -> Any:
        """See Workers."""
        box = [value]
        dist.broadcast_object_list(box, group_src=0, group=self._group)
        return box[0]

    def gather(self, value: str) -> list[str]:
        """See Workers."""
        values = [""] * self.size
        dist.all_gather_object(values, value, group=self._group)
        return values


def workers_of(coordinator: Any) -> Workers:
    """The workers of an engine's group coordinator; without collectives where there is only one."""
    return OneWorker() if coordinator.world_size == 1 else GroupWorkers(coordinator)


Tensors = Iterator[tuple[str, torch.Tensor]]
Take = Callable[[int], int]
"""(bytes consumed) -> bytes that may be read, or PeerError; rank 0's only."""


class Feed:
    """One version on its way through a window. All workers of an engine walk through it in step."""

    def __init__(
        self, ring: torch.Tensor, manifest: Manifest, workers: Workers, take: Take
    ) -> None:
        """``ring``: uint8[window bytes], filled by the receiver."""
        self._ring, self._manifest, self._workers, self._take = ring, manifest, workers, take
        self._filled = 0
        self.broken = ""

    def tensors(self) -> Tensors:
        """(HF name, tensor of its own memory), each when its last block is checked; ends when the
        whole version is.

        Copies and not views: engines keep a layer's tensors until the layer is complete, and the
        ring goes on. TransferFailed, on every worker alike, if the transfer or a worker failed;
        ``broken`` then says why.
        """
        for spec in self._manifest.tensors:
            yield spec.name, self._tensor(spec)
        while self._filled < self._manifest.total_bytes:
            self._advance()

    def _tensor(self, spec: TensorSpec) -> torch.Tensor:
        flat = torch.empty(spec.nbytes, dtype=torch.uint8)
        done = 0
        while done < spec.nbytes:
            start = spec.offset + done
            if self._filled <= start:
                self._advance()
                continue
            size = min(self._filled - start, spec.nbytes - done)
            copy_out(self._ring, start, flat[done : done + size])
            done += size
        return flat.view(getattr(torch, spec.dtype)).view(spec.shape)

    def _advance(self) -> None:
        """Give back what was read (all there is) and wait for more. Called by every worker at the
        same bytes."""
        # first: a worker whose load broke off says so in its place of this very exchange
        # (EngineSide)
        failed = [why for why in self._workers.gather("") if why]
        if not failed:
            filled, why = self._workers.share(self._ask())
            self._filled = filled
            failed = [why] if why else []
        if failed:
            self.broken = failed[0]
            raise TransferFailed(self.broken)

    def _ask(self) -> tuple[int, str]:
        if self._workers.rank != 0:
            return 0, ""
        try:
            return self._take(self._filled), ""
        except (TitanGrpoError, OSError, ValueError, KeyError) as error:
            # anything else would leave the other workers in an exchange without us
            return self._filled, f"{type(error).__name__}: {error}"


def begun(tensors: Tensors) -> Tensors:
    """The same tensors, once the first one is there: until then nothing of the engine has to be
    touched."""
    first = next(tensors)
    return chain([first], tensors)


log = logging.getLogger("titan_grpo.receive")


class Engine(Protocol):
    """The part that differs: names and loading."""

    def refuses(self, manifest: Manifest) -> str:
        """Why these tensors are not the ones this model is made of; empty if they are. Touches no
        weight."""
        ...

    def load(self, tensors: Iterator[tuple[str, torch.Tensor]]) -> int:
        """Load (HF name, tensor on the host, valid during the call only); how many. Raises if it
        went wrong half-way."""
        ...


def package_version() -> str:
    """Name and version of this package, as a lane is told on joining."""
    try:
        return f"titan_grpo {version('titan_grpo')}"
    except PackageNotFoundError:
        return "titan_grpo (not installed, on the path)"


def tensor_views(image: torch.Tensor, manifest: Manifest) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, view of the image with the manifest's dtype and shape), in order; ``image`` is
    uint8[total_bytes]."""
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
    """Everything that a commit needs and that could be refused: ``image`` is a whole version, or
    the window of ``feed``."""

    image: SharedImage
    manifest: Manifest
    feed: Feed | None

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """All of them in order; returns when the first one is there. TransferFailed if it does not
        come."""
        if self.feed is not None:
            return begun(self.feed.tensors())
        return tensor_views(self.image.tensor(), self.manifest)


class EngineSide:
    """Held by an engine's plugin, one per worker. ``hello`` and ``commit`` never raise: an
    exception in a worker's call ends the engine, and with it every request.
    """

    def __init__(
        self, engine: Engine, workers: Workers, problem: str, run_key: Key | None = None
    ) -> None:
        """``problem``: why commits could not work in this engine, told to every lane on joining;
        empty if they can.

        ``run_key``: serve only who proves it.
        """
        self._engine, self._workers, self._problem = engine, workers, problem
        self._client = ReceiverHandle(package_version(), run_key) if workers.rank == 0 else None

    @property
    def client(self) -> ReceiverHandle | None:
        """The receiver's handle; rank 0 only."""
        return self._client

    def hello(self, data: dict[str, Any]) -> None:
        """Body of POST /init_weight_transfer_engine. Returns at once; the answer goes over the
        lane's store."""
        if self._client is None:
            return
        try:
            refusal = self._greet(self._client, data)
            log.log(
                logging.WARNING if refusal else logging.INFO,
                "hello from a trainer: %s",
                refusal or "accepted",
            )
        except TitanGrpoError as error:
            log.warning("a hello was refused, the engine keeps its version: %s", error)
        except Exception:  # noqa: BLE001 - top of an engine's call: raising would end the engine
            log.error(
                "a hello could not be served; the engine keeps its version\n%s",
                traceback.format_exc(),
            )

    def _greet(self, client: ReceiverHandle, data: dict[str, Any]) -> str:
        try:
            hello = Hello.from_dict(data)
        except PeerError as error:
            # a trainer of another version learns it now, and not by waiting for its deadline
            if (address := reply_address(data)) is not None:
                client.answer(address, f"{error} (this server runs {package_version()})")
            return str(error)
        return client.hello(hello, self._problem)

    def commit(self, data: dict[str, Any]) -> Applied | None:
        """Body of POST /update_weights: load the version if all of it is right. None if ``data`` is
        no Commit."""
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
        broken = [
            why for why in self._workers.gather(ready if isinstance(ready, str) else "") if why
        ]
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
        log.info(
            "commit of version %d: %s",
            report.version,
            report.error or f"{report.loaded} tensors, {report.apply_s:.3f} s",
        )
        try:
            self._client.applied(commit, report)
        except PeerError as error:
            log.warning(
                "the trainer could not be told how version %d ended: %s", report.version, error
            )
