"""The engine's side of a weight sync, for every engine: answer a hello, commit a version, never
raise."""

import logging
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Protocol

import torch
import torch.distributed as dist

from titan_grpo.engines.generation import NO_ROUTES
from titan_grpo.errors import PeerError, TitanGrpoError, UpstreamError
from titan_grpo.layout.cuda_runtime import CudaRuntime
from titan_grpo.layout.image import ImageAddress, SharedImage
from titan_grpo.layout.manifest import Manifest
from titan_grpo.protocol.messages import Applied, Attach, Commit, Hello, reply_address
from titan_grpo.receive.checkpoint import difference, essential
from titan_grpo.receive.process import ReceiverHandle
from titan_grpo.receive.window import Tensors, WindowReader
from titan_grpo.runkey import Key
from titan_grpo.sync.transports.broadcast import beside

log = logging.getLogger("titan_grpo.receive")


class Workers:
    """The processes that hold one model together. All make the same calls in the same order."""

    def __init__(self, coordinator: Any = None) -> None:
        """Of an engine's group coordinator, for which vLLM and SGLang use the same attribute names;
        None: the model is in one process."""
        self.rank: int = 0 if coordinator is None else coordinator.rank_in_group
        self.size: int = 1 if coordinator is None else coordinator.world_size
        self._group = None if coordinator is None else coordinator.cpu_group

    def share(self, value: Any) -> Any:
        """Rank 0's value, on every rank."""
        box = [value]
        if self.size > 1:
            dist.broadcast_object_list(box, group_src=0, group=self._group)
        return box[0]

    def gather(self, value: str) -> list[str]:
        """Every rank's value, on every rank."""
        values = [value] * self.size
        if self.size > 1:
            dist.all_gather_object(values, value, group=self._group)
        return values


class WorkerDevice:
    """The device that an engine's worker computes on: the calling thread's CUDA device, if this
    process uses CUDA; else the CPU.

    Made by the worker's main thread: another thread's current device is GPU 0, whatever the model
    is on.
    """

    def __init__(self) -> None:
        used = torch.cuda.is_available() and torch.cuda.is_initialized()
        self.name = f"cuda:{torch.cuda.current_device()}" if used else "cpu"
        """ "cuda:N" by this process's own numbers, which its children share, or "cpu"."""

    def settle(self) -> None:
        """Wait until the device has done everything that was enqueued, on all streams."""
        if self.name != "cpu":
            torch.cuda.synchronize(self.name)

    def pin(self, image: torch.Tensor) -> Callable[[], None] | None:
        """Pin host memory (uint8[nbytes]), from which copies to the device are then several times
        as fast, and asynchronous; the call that undoes it. None without a device, or if it was
        refused."""
        if self.name == "cpu":
            return None
        pointer, nbytes = image.data_ptr(), image.numel()
        try:
            runtime = CudaRuntime()
            with torch.cuda.device(self.name):
                refusal = runtime.register(pointer, nbytes)
        except UpstreamError as error:
            refusal = str(error)
        if refusal is not None:
            log.warning(
                "%d bytes of staged weights could not be pinned (%s): each load reads pageable"
                " memory, and the pause is several times as long; raise the limit on locked memory"
                " (ulimit -l)",
                nbytes,
                refusal,
            )
            return None

        def unpin() -> None:
            # in whichever thread: without this the call would make a context on GPU 0
            with torch.cuda.device(self.name):
                runtime.unregister(pointer)

        return unpin


def quantization_of(model_config: Any) -> str:
    """How a server with this ModelConfig, of either engine, quantises its weights; empty if it does
    not."""
    return model_config.quantization or ""


class Engine(Protocol):
    """The part that differs between engines: names and loading. ``config``: of its model, as
    config.json has it; empty where there is none. ``routes``: whether completions come with the
    experts of each token, where they are asked for. ``quantization``: see Joined."""

    config: Mapping[str, Any]
    routes: bool
    quantization: str

    def refuses(self, manifest: Manifest) -> str:
        """Why these tensors are not the ones this model is made of; empty if they are. Touches no
        weight."""
        ...

    def load(self, tensors: Tensors) -> int:
        """Load (HF name, tensor on the host, valid during the call only); how many. Raises if it
        went wrong half-way."""
        ...


def package_version() -> str:
    """Name and version of this package, for the Joined answer."""
    try:
        return f"titan_grpo {version('titan_grpo')}"
    except PackageNotFoundError:
        return "titan_grpo (not installed, on the path)"


def log_to_stderr() -> None:
    """Send the package's log of an engine's process to stderr. Idempotent."""
    if not log.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("titan_grpo plugin %(process)d: %(message)s"))
        log.addHandler(handler)
        log.setLevel(logging.INFO)
        log.propagate = False


def log_ready(workers: Workers, problem: str, run_key: Key | None) -> None:
    """Log the state of a plugin at its start."""
    access = "no run key: takes weights from any trainer"
    if run_key is not None:
        access = "takes weights from trainers with the run key"
    log.info("plugin ready, worker %d of %d, %s", workers.rank, workers.size, problem or access)


def tensor_views(image: torch.Tensor, manifest: Manifest) -> Tensors:
    """(name, view of the image with the manifest's dtype and shape), in order; ``image`` is
    uint8[total_bytes]."""
    for spec in manifest.tensors:
        flat = image[spec.offset : spec.offset + spec.nbytes]
        yield spec.name, flat.view(getattr(torch, spec.dtype)).view(spec.shape)


class Counted(Iterable[tuple[str, torch.Tensor]]):
    """Passes tensors through and counts them."""

    def __init__(self, tensors: Tensors) -> None:
        self._tensors = tensors
        self.count = 0

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        for pair in self._tensors:
            self.count += 1
            yield pair


class Attempt:
    """One worker's progress through one commit.

    ``touched``: weights may have changed. ``reader``: set for a windowed apply, where the mapped
    image is the window and not a whole version.
    """

    def __init__(self) -> None:
        self.loaded = 0
        self.load_s = 0.0
        self.final = False
        self.error = ""
        self.touched = False
        self.mapped: Mapped | None = None
        self.reader: WindowReader | None = None

    def tensors(self) -> Tensors:
        """All tensors in order; returns when the first one is there. TransferFailed if it does not
        come."""
        if self.reader is not None:
            return self.reader.begun()
        assert self.mapped is not None
        return iter(self.mapped.tensors)


class Mapped:
    """What a worker keeps of an epoch from one commit to the next: the receiver's memory, mapped,
    and its manifest, parsed and accepted. A commit costs no page of it anew.
    """

    def __init__(self, grant: Mapping[str, Any], device: WorkerDevice) -> None:
        """Map what the grant names, and pin it for copies to ``device``. Not a window: it is filled
        again as soon as its tensors were taken, and a copy from pinned memory may still read them
        then. SyncError if the receiver is gone; DataError if its manifest is none."""
        self.grant = dict(grant)
        with SharedImage.attach(ImageAddress.from_json(grant["manifest"])) as text:
            self.manifest = Manifest.from_json(bytes(text.buffer).decode())
        self.image = SharedImage.attach(ImageAddress.from_json(grant["image"]))
        whole = [] if grant["streamed"] else tensor_views(self.image.tensor(), self.manifest)
        self.tensors = list(whole)
        pinned = not grant["streamed"]
        self._unpin = device.pin(self.image.tensor()) if pinned else None

    def release(self) -> None:
        """Unpin the memory, before it is unmapped."""
        if self._unpin is not None:
            self._unpin()
            self._unpin = None


def _release(mapping: Future[Mapped]) -> None:
    """Callback of a mapping that has ended."""
    # no deadline: it has
    if mapping.exception() is None:
        # no deadline: it has
        mapping.result().release()


class EngineSide:
    """Held by an engine's plugin, one per worker. ``hello`` and ``commit`` never raise.

    An exception in a worker's call ends the engine with every request in it, and leaves the other
    workers in a collective that this one never joins.
    """

    def __init__(
        self, engine: Engine, workers: Workers, problem: str, run_key: Key | None = None
    ) -> None:
        """``problem``: why commits cannot work in this engine, reported to every lane that joins;
        empty if they can. ``run_key``: serve only trainers that prove it.
        """
        self._engine, self._workers, self._problem = engine, workers, problem
        self._device = WorkerDevice()
        self._mapped: Mapped | None = None
        self._ahead: tuple[dict[str, Any], Future[Mapped]] | None = None
        """A grant that is mapped and pinned while the engine generates and the first version is on
        its way: both take seconds for large models."""
        self.receiver: ReceiverHandle | None = None
        if workers.rank == 0:
            self.receiver = ReceiverHandle(
                package_version(), run_key, self._device.name, engine.quantization
            )

    def hello(self, data: dict[str, Any]) -> None:
        """Body of POST /init_weight_transfer_engine, on every worker: a Hello, whose answer goes
        over the lane's channel, or an Attach. Returns at once."""
        if isinstance(data, dict) and "attach" in data:
            self.map_ahead(self._workers.share(self.place(data["attach"])))
            return
        # On every worker, before the answer: the hello may end the receiver, whose memory must not
        # be held beside that of the next one.
        self._unmap()
        if self.receiver is None:
            return
        try:
            refusal = self._hello(self.receiver, data)
        except TitanGrpoError as error:
            refusal = str(error)
        except Exception:  # noqa: BLE001 - raising would end the engine
            refusal = traceback.format_exc()
        level = logging.WARNING if refusal else logging.INFO
        log.log(level, "hello from a trainer: %s", refusal or "accepted")

    def _hello(self, receiver: ReceiverHandle, data: dict[str, Any]) -> str:
        try:
            hello = Hello.from_dict(data)
        except PeerError as error:
            # answered now: a trainer of another version would wait for its deadline
            if (address := reply_address(data)) is not None:
                receiver.answer(address, f"{error} (this server runs {package_version()})")
            return str(error)
        return receiver.hello(hello, self._problem or self._unfit(hello))

    def _unfit(self, hello: Hello) -> str:
        if found := difference(hello.model, essential(self._engine.config)):
            return (
                f"this server computes another model: {found}; start it with the trainer's"
                " config.json"
            )
        if hello.routes and not self._engine.routes:
            return (
                "this server does not send the experts of each token, and grpo.router_replay needs"
                f" those of every completion: {NO_ROUTES}"
            )
        return ""

    def place(self, data: Any) -> dict[str, Any]:
        """Rank 0: where the memory is that an Attach asks to map; empty where there is none."""
        if self.receiver is None:
            return {}
        try:
            return self.receiver.place(Attach.from_dict(data))
        except Exception as refusal:  # noqa: BLE001 - raising would end the engine
            log.warning("the staged weights are not mapped before a commit: %s", refusal)
            return {}

    def map_ahead(self, grant: dict[str, Any]) -> None:
        """On every worker, with what ``place`` returned: begin to map and pin it, in place of what
        is mapped."""
        self._unmap()
        if grant:
            self._ahead = grant, beside(lambda: Mapped(grant, self._device), "map")

    def commit(self, data: dict[str, Any]) -> Applied | None:
        """Body of POST /update_weights: load the version if all of it is right; how that ended.
        None if ``data`` is no Commit, which has no number to report under."""
        try:
            commit = Commit.from_dict(data)
        except Exception as refusal:  # noqa: BLE001 - raising would end the engine
            log.warning("update_weights was refused, the engine keeps its version: %s", refusal)
            return None
        start, attempt = time.monotonic(), Attempt()
        try:
            self._run(commit, attempt)
        except Exception as failure:  # noqa: BLE001 - raising would end the engine
            log.error("commit of version %d\n%s", commit.version, traceback.format_exc())
            attempt.error = f"the workers lost each other: {type(failure).__name__}: {failure}"
            # an exchange that failed here may have worked on the others: they may have loaded
            attempt.touched = True
        ok, held = not attempt.error, self.receiver.state if self.receiver is not None else None
        report = Applied(
            number=commit.number,
            version=commit.version,
            ok=ok,
            fingerprint=commit.fingerprint if ok else "",
            loaded=attempt.loaded,
            apply_s=time.monotonic() - start,
            error=attempt.error,
            final=attempt.final,
            load_s=attempt.load_s,
            intact=ok if attempt.touched else held is None or held.intact,
        )
        self._report(commit, report)
        return report

    def close(self) -> None:
        """End the receiver, and let go of its memory."""
        self._unmap()
        if self.receiver is not None:
            self.receiver.close()

    def _run(self, commit: Commit, attempt: Attempt) -> None:
        """The commit on this worker. Raises only where an exchange with the other workers fails."""
        self._prepare(commit, self._workers.share(self._request(commit)), attempt)
        attempt.error = self._first(attempt.error)
        if attempt.error:
            return
        self._load(commit, attempt)
        # a broken reader has ended on every worker, inside an exchange of its own
        if attempt.reader is None or not attempt.reader.broken:
            attempt.error = self._first(attempt.error)

    def _first(self, error: str) -> str:
        """The first error of all workers, on every worker."""
        return next((why for why in self._workers.gather(error) if why), "")

    def _request(self, commit: Commit) -> dict[str, Any]:
        """Rank 0: the receiver's grant, or ``{"error": reason}``."""
        if self.receiver is None:
            return {}
        if self._problem:
            return {"error": self._problem}
        try:
            return self.receiver.lend(commit)
        except TitanGrpoError as error:
            return {"error": str(error)}
        except Exception as error:  # noqa: BLE001 - the other workers wait for what this one shares
            return {"error": f"{type(error).__name__}: {error}"}

    def _prepare(self, commit: Commit, grant: dict[str, Any], attempt: Attempt) -> None:
        """Every reason to refuse, before a weight is touched."""
        try:
            attempt.error = str(grant.get("error", ""))
            if attempt.error:
                return
            mapped = self._mapped
            if mapped is None or mapped.grant != grant:
                mapped = self._map(grant)
                attempt.error = self._engine.refuses(mapped.manifest)
                attempt.final = bool(attempt.error)
                if attempt.error:
                    mapped.release()
                    return
            found = mapped.manifest.digest
            if found != (wanted := commit.manifest_digest):
                raise PeerError(f"the manifest must have digest {wanted}, got {found}")
            self._mapped = attempt.mapped = mapped
            if grant["streamed"]:
                ring = mapped.image.tensor()
                attempt.reader = WindowReader(ring, mapped.manifest, self._workers, self._take)
        except Exception as error:  # noqa: BLE001 - the other workers wait for ours
            attempt.error = f"{type(error).__name__}: {error}"

    def _load(self, commit: Commit, attempt: Attempt) -> None:
        assert attempt.mapped is not None
        try:
            tensors = attempt.tensors()
            # a pause may let the last batch run on (SGLang's does): it must not read new weights
            self._device.settle()
            attempt.touched, start = True, time.monotonic()
            try:
                attempt.loaded = self._engine.load(tensors)
            finally:
                attempt.load_s = time.monotonic() - start
                # the image is the receiver's again after this: no copy may still read it
                self._device.settle()
            if attempt.loaded != (wanted := len(attempt.mapped.manifest.tensors)):
                attempt.error = f"the engine loaded {attempt.loaded} of {wanted} tensors"
        except Exception as failure:  # noqa: BLE001 - raising would end the engine
            log.error("loading version %d broke off\n%s", commit.version, traceback.format_exc())
            attempt.error = f"loading broke off: {type(failure).__name__}: {failure}"
            # the failure of one worker alone leaves the progress of the others unknown
            attempt.touched |= attempt.reader is None or not attempt.reader.broken

    def _map(self, grant: dict[str, Any]) -> Mapped:
        """The memory of a grant that was not mapped for a commit before."""
        if self._ahead is not None and self._ahead[0] == grant:
            (_, mapping), self._ahead = self._ahead, None
            # no deadline: the commit would do the same work itself, for as long
            error = mapping.exception()
            if error is None:
                # no deadline: it has ended
                return mapping.result()
            log.warning("the staged weights could not be mapped before a commit: %s", error)
        else:
            self._unmap()  # before the next one is mapped
        return Mapped(grant, self._device)

    def _unmap(self) -> None:
        mapped, self._mapped = self._mapped, None
        ahead, self._ahead = self._ahead, None
        if mapped is not None:
            mapped.release()
        if ahead is not None:
            # now, or on its thread as soon as it is mapped: the end of a mapping unpins nothing
            ahead[1].add_done_callback(_release)

    def _take(self, consumed: int) -> int:
        assert self.receiver is not None
        return self.receiver.take(consumed)

    def _report(self, commit: Commit, report: Applied) -> None:
        if self.receiver is None:
            return
        done = report.error or f"{report.loaded} tensors, {report.apply_s:.3f} s"
        log.info("commit of version %d: %s", report.version, done)
        try:
            self.receiver.applied(commit, report)
        except Exception as error:  # noqa: BLE001 - raising would end the engine
            log.warning(
                "version %d could not be reported to the trainer: %s", report.version, error
            )
